"""Spot checks: samples are drawn from all of the ranking, and intervals hold what they promise."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import likewise as lw
from likewise.statistics.spot_check import estimate_errors, strata_order

CASES = json.loads((Path(__file__).parent / "spot_check_cases.json").read_text())


@pytest.mark.parametrize("case", CASES["estimates"], ids=lambda case: str(case["wrong"]))
def test_estimates_are_those_of_the_file_for_other_implementations(case):
    found = estimate_errors(case["sizes"], case["decided"], case["wrong"])
    for name in ("precision", "errors"):
        expected = [math.nan] * 3 if case[name] is None else case[name]
        assert getattr(found, name) == pytest.approx(expected, nan_ok=True)


def test_strata_and_orders_are_those_of_the_file():
    for case in CASES["orders"]:
        assert strata_order(case["sizes"], case["count"]) == case["order"]
    for case in CASES["strata"]:
        check = lw.spot_check(torch.rand(case["n"]), torch.arange(case["n"]) < case["flagged"])
        assert list(check.sizes) == case["sizes"]


def ranking(n, share, quality, rng):
    """Return which labels are wrong, the most suspicious first."""
    wrong = rng.random(n) < share
    return wrong[np.argsort(-(rng.normal(size=n) + quality * wrong))]


def test_intervals_hold_the_truth_in_95_percent_of_the_draws():
    rng, shares = np.random.default_rng(0), []
    for n, share, quality, flagged, count in (
        (500, 0.05, 1.5, 1.5, 20),
        (500, 0.2, 3, 0.5, 30),
        (3000, 0.01, 0, 1.5, 20),
        (3000, 0.4, 1.5, 0.5, 50),
        (20_000, 0.05, 3, 1.5, 50),
        (20_000, 0.01, 0, 0.5, 50),
    ):
        wrong = ranking(n, share, quality, rng)
        f = int(flagged * share * n)
        sizes = lw.spot_check(torch.arange(n, 0, -1), torch.arange(n) < f).sizes
        parts = np.split(wrong, np.cumsum(sizes)[:2])
        decided = [strata_order(sizes, count).count(h) for h in range(3)]
        drawn = [rng.hypergeometric(p.sum(), (~p).sum(), m, 500) for p, m in zip(parts, decided, strict=True)]
        hits = np.zeros(2)
        for found in np.stack(drawn, 1).tolist():
            estimate = estimate_errors(sizes, decided, found)
            hits += [
                estimate.precision.low - 1e-9 <= parts[0].mean() <= estimate.precision.high + 1e-9,
                estimate.errors.low - 1e-9 <= wrong.sum() <= estimate.errors.high + 1e-9,
            ]
        shares.append(hits / 500)
    assert np.min(shares) >= 0.92  # of 500 draws: 95 % less three standard errors
    assert np.mean(shares) >= 0.95


def test_the_draw_itself_is_uniform_within_strata_and_estimates_are_unbiased():
    score = torch.arange(200, 0, -1.0)
    wrong = torch.rand(200, generator=torch.Generator().manual_seed(0)) < score / 250
    likely, seen = [], torch.zeros(200)
    for seed in range(400):
        check = lw.spot_check(score, torch.arange(200) < 40, count=30, seed=seed)
        assert len(check.samples.unique()) == 30
        seen[check.samples] += 1
        likely.append(check.estimate(wrong[check.samples]).errors.likely)
    assert abs(np.mean(likely) - int(wrong.sum())) < 3 * np.std(likely) / 20
    for h, size in enumerate(check.sizes):
        share = strata_order(check.sizes, 30).count(h) / size
        spread = (share * (1 - share) / 400) ** 0.5
        assert (seen[check.strata == h] / 400 - share).abs().max() < 4.5 * spread


def test_undecided_samples_are_left_out_and_others_are_refused():
    check = lw.spot_check(torch.rand(100), torch.arange(100) < 10, count=20)
    first = check.estimate([True, False, None, True])
    assert sum(first.decided) == 3
    assert check.estimate({int(i): True for i in check.samples}).errors.likely == pytest.approx(100)
    other = next(i for i in range(100) if i not in check.samples.tolist())
    with pytest.raises(ValueError, match="not drawn"):
        check.estimate({other: True})
    with pytest.raises(ValueError, match="21 decisions for 20"):
        check.estimate([True] * 21)
    with pytest.raises(TypeError, match="True"):
        check.estimate(["wrong"])


def test_a_label_suspicion_is_checked_by_its_own_flags():
    torch.manual_seed(0)
    x = torch.randn(120, 4)
    y = (x[:, 0] > 0).long()
    y[:6] = 1 - y[:6]
    net = torch.nn.Linear(4, 2)
    net.weight.data = torch.tensor([[-1.0, 0, 0, 0], [1, 0, 0, 0]])
    found = lw.label_suspicion(lw.GramMatrix(lw.Network(net, lw.all_outputs), (x, y)))
    check = lw.spot_check(found, count=200)
    assert check.sizes[0] == int(found.flagged.sum())
    wrong = torch.arange(120) < 6
    assert check.estimate(wrong[check.samples]).errors == pytest.approx((6, 6, 6))
    with pytest.raises(ValueError, match="its own"):
        lw.spot_check(found, found.flagged)


def test_nothing_flagged_leaves_precision_unknown():
    check = lw.spot_check([0.1, 0.9, 0.4, 0.2] * 25, count=20)
    found = check.estimate([False] * 20)
    assert math.isnan(found.precision.likely)
    assert found.errors.low == 0 < found.errors.high


@pytest.mark.filterwarnings("error")
def test_columns_of_a_table_are_taken_as_they_are():
    scores = np.arange(100.0)
    scores.flags.writeable = False
    check = lw.spot_check(scores, scores > 90, count=10)
    assert check.sizes == (9, 9, 82)
