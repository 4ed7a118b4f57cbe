"""Verdicts on how well a network fits its labels."""

import pytest
import torch
from torch import nn

import likewise as lw
from likewise.distributed import record_passes
from likewise.gram import Sketch, bucket_count, inner_product_sums, sketch_rows

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))


def test_verdicts():
    alone = lw.GramMatrix(nn.Linear(12, 1, bias=False), torch.eye(12))
    assert lw.fit_quality(alone, torch.randn(12)).verdict == "overfit"
    crowd = lw.GramMatrix(nn.Linear(3, 1), 0.01 * X)
    assert lw.fit_quality(crowd, torch.randn(12)).verdict == "underfit"
    assert lw.fit_quality(crowd, torch.ones(12)).verdict == "fit"


@pytest.mark.parametrize("statistic", [lw.fit_quality, lw.denoising, lw.label_suspicion, lw.reliability])
def test_labels_that_losses_ignore_are_no_values(statistic):
    labels = torch.arange(12) % 3
    labels[[2, 5]] = -100
    with pytest.raises(ValueError, match=r"2 labels are -100.*samples \[2, 5\]"):
        statistic(lw.GramMatrix(nn.Linear(3, 3), (X, labels)))


def test_one_label_that_is_ignored_is_one_label():
    labels = torch.arange(len(X)) % 3
    labels[2] = -100
    with pytest.raises(ValueError, match="1 label is -100"):
        lw.fit_quality(lw.GramMatrix(nn.Linear(3, 3), (X, labels)))


def variance_of_all(outputs, labels):
    return lw.fit_quality(lw.GramMatrix(nn.Linear(3, outputs), X), labels).total_variance


def test_label_variance_is_of_the_labels_that_are_learned():
    counts, classes = torch.arange(12) ** 2, torch.arange(12) % 3
    assert variance_of_all(1, counts) == pytest.approx(float(counts.double().var(correction=0)))
    assert variance_of_all(1, counts) == pytest.approx(variance_of_all(1, counts.float()))
    one_hot = nn.functional.one_hot(classes)
    written = classes, classes[:, None], classes.float(), classes.double()[:, None], one_hot, one_hot.float()
    assert [variance_of_all(3, labels) for labels in written] == pytest.approx([2 / 3] * len(written))
    bits = classes % 2
    assert variance_of_all(1, bits) == pytest.approx(variance_of_all(1, bits.float()))


def test_from_sketches_all_of_it_is_estimated_in_one_pass():
    torch.manual_seed(0)
    x = torch.randn(300, 6, dtype=torch.float64)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    model = torch.nn.Sequential(torch.nn.Linear(6, 200), torch.nn.Tanh(), torch.nn.Linear(200, 3)).double()
    gram = lw.GramMatrix(model, (x, y))
    exact = lw.fit_quality(gram, sketch=None)
    with record_passes(lambda: 0.0) as passes:
        found = lw.fit_quality(gram, sketch=4096)
    assert sum(p.what == "sketches" for p in passes) == 1
    assert not {"summing gradients", "reading off"} & {p.what for p in passes}
    assert (found.neighbors - exact.neighbors).abs().median() < 0.08 * exact.neighbors.median()
    assert (found.label_variance - exact.label_variance).abs().median() < 0.03
    assert found.verdict == exact.verdict and abs(found.supported - exact.supported) < 0.02


@pytest.mark.parametrize("d", [1, 3])
def test_sums_of_inner_products_are_estimated_without_bias(d):
    torch.manual_seed(0)
    model, x = torch.nn.Linear(40, d).double(), torch.randn(30, 40, dtype=torch.float64) + 0.5
    gram = lw.GramMatrix(lw.Network(model, lw.all_outputs), x, kernel=lw.CORRELATION)
    weights = torch.randn(30, 2, dtype=torch.float64)
    exact = gram.with_kernel(lw.INNER_PRODUCT).exact_row_sums(weights)
    q = bucket_count(256, d)
    found = torch.stack(
        [inner_product_sums(sketch_rows(gram, Sketch(q, seed)), weights) for seed in range(40)]
    )
    error = found.std(0) / 40**0.5
    assert ((found.mean(0) - exact).abs() < 4.5 * error + 1e-6 * exact.abs().max()).all()
