"""Votes whose truth is known: how many labels are wrong, and which?"""

from itertools import pairwise
from math import log
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import likewise as lw
from likewise.statistics.label_issues import suspicion_from_votes
from likewise.statistics.noise_rate import (
    calibrate_shares,
    estimate_noise,
    narrow_loss_chance,
    wrong_chance,
)


def voted(share, n=4000, classes=5, sharp=6.0, seed=0, kind="uniform"):
    """Votes that know the true class up to noise, and labels of which a share is wrong."""
    chance = torch.Generator().manual_seed(seed)
    truth = torch.randint(0, classes, (n,), generator=chance)
    scores = torch.randn(n, classes, generator=chance, dtype=torch.float64)
    scores[torch.arange(n), truth] += sharp * torch.rand(n, generator=chance, dtype=torch.float64)
    wrong = torch.rand(n, generator=chance) < share
    step = torch.randint(1, classes, (n,), generator=chance) if kind == "uniform" else 1
    return scores.softmax(1), torch.where(wrong, (truth + step) % classes, truth), wrong


@pytest.mark.parametrize("kind", ["uniform", "pair"])
@pytest.mark.parametrize("share", [0.05, 0.2, 0.4])
def test_errors_are_counted_and_their_chances_are_right(share, kind):
    votes, labels, wrong = voted(share, kind=kind)
    found = suspicion_from_votes(votes, labels)
    low, likely, high = found.errors
    assert low <= int(wrong.sum()) <= high and low <= likely <= high
    chance = estimate_noise(votes, labels).chance
    assert found.flagged.any() and chance[wrong].mean() > 5 * chance[~wrong].mean()
    told = chance.float() if found.distinct else torch.full_like(chance, torch.nan).float()
    torch.testing.assert_close(found.chance_wrong, told, rtol=0, atol=0, equal_nan=True)
    precision = float(wrong[found.flagged].double().mean())
    assert found.precision.low - 0.1 <= precision <= found.precision.high + 0.1
    assert f"{int(found.flagged.sum())} flagged" in repr(found)


def test_clean_labels_are_hardly_flagged():
    votes, labels, _ = voted(0.0)
    votes = votes + 2 * torch.nn.functional.one_hot(labels)  # nobody is in doubt
    found = suspicion_from_votes(votes, labels)
    assert found.flagged.double().mean() < 0.05 and found.errors.low < 0.05 * len(labels)


def test_calibrated_votes_are_frequencies_of_labels():
    chance = torch.Generator().manual_seed(0)
    shares = torch.rand(20_000, 2, generator=chance, dtype=torch.float64)
    shares = shares / shares.sum(1, keepdim=True)
    labels = torch.bernoulli(shares[:, 1].square(), generator=chance).long()  # not the share itself
    found = calibrate_shares(torch.stack([1 - shares[:, 1], shares[:, 1]], 1), labels)
    # both classes share one curve: the chance at a share, on average over them
    ones, zeros = shares[:, 1].square(), 1 - (1 - shares[:, 1]).square()
    assert (found[:, 1] - (ones + zeros) / 2).abs().mean() < 0.05
    assert torch.allclose(found.sum(1), torch.ones(20_000, dtype=torch.float64))


@given(seed=st.integers(0, 10_000), n=st.integers(1, 30), classes=st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_any_votes_give_chances_and_ordered_ends(seed, n, classes):
    chance = torch.Generator().manual_seed(seed)
    votes = torch.rand(n, classes, generator=chance, dtype=torch.float64).pow(4)
    votes[torch.rand(n, generator=chance) < 0.2] = 0
    labels = torch.randint(0, classes, (n,), generator=chance)
    found = suspicion_from_votes(votes, labels)
    own = torch.nn.functional.one_hot(labels, classes).double()
    cast = votes.sum(1, keepdim=True)
    chance = estimate_noise(torch.where(cast > 0, votes / cast.clamp(min=1e-300), own), labels).chance
    for tensor in (found.suspicion, chance):
        assert ((tensor >= 0) & (tensor <= 1)).all()
    assert found.distinct or found.chance_wrong.isnan().all()
    known = found.distinct and bool(found.flagged.any())
    assert found.errors.high <= n and (found.precision.likely >= 0) == known
    for ends in (found.errors, found.precision) if known else (found.errors,):
        assert 0 <= ends.low <= ends.likely + 1e-9 and ends.likely <= ends.high + 1e-9
    assert (found.flagged <= found.contested).all()
    limit = 0.5 if found.distinct else 0.8
    assert torch.equal(found.flagged, found.contested & (chance >= limit))


@given(seed=st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_bayes_rule_is_written_out(seed):
    """Where labels are known to be right but for a small rate, the chance is Bayes' rule with true = q."""
    chance = torch.Generator().manual_seed(seed)
    true = torch.rand(8, 3, generator=chance, dtype=torch.float64).softmax(1)
    transition = torch.full((3, 3), 0.02, dtype=torch.float64).fill_diagonal_(0.96)
    given_labels = torch.randint(0, 3, (8,), generator=chance)
    found = wrong_chance(true @ transition, transition, given_labels)
    for i, y in enumerate(given_labels.tolist()):
        joint = [float(true[i, c] * transition[c, y]) for c in range(3)]
        assert abs(float(found[i]) - (1 - joint[y] / sum(joint))) < 0.02


def hidden_errors(own):
    """Memorized labels: right ones win their vote clearly, wrong ones get about as many votes as one other class."""
    chance = torch.Generator().manual_seed(0)
    n, wrong = 2000, torch.arange(2000) < 200
    labels = torch.randint(0, 4, (n,), generator=chance)
    other = (labels + torch.randint(1, 4, (n,), generator=chance)) % 4
    votes = 0.02 + 0.02 * torch.rand(n, 4, generator=chance, dtype=torch.float64)
    votes[torch.arange(n), labels] += torch.where(wrong, own, 0.8) + 0.05 * torch.randn(n, generator=chance)
    votes[torch.arange(n), other] += torch.where(wrong, 0.6, 0.0)
    return votes, labels, wrong


def test_a_group_that_may_be_empty_does_not_stand_out_in_the_votes_of_a_network():
    votes, labels, _ = hidden_errors(0.2)
    found = estimate_noise(votes / votes.sum(1, keepdim=True), labels, learned=0.95)
    assert not found.distinct and found.errors.low == 0 and "memorized" in found.reason


def test_hidden_errors_are_found_in_a_group_of_their_own():
    votes, labels, wrong = hidden_errors(0.2)
    found = estimate_noise(votes / votes.sum(1, keepdim=True), labels)
    assert found.distinct and found.errors.low <= 200 <= found.errors.high
    whole = suspicion_from_votes(votes, labels)
    assert whole.precision.low <= whole.errors.low / int(whole.flagged.sum())  # if so few labels are wrong
    assert f"flagged; about {whole.errors.likely:.0f} wrong" in repr(whole)
    assert found.chance[wrong].mean() > 0.4 and found.chance[~wrong].mean() < 0.1


def test_labels_that_tie_may_be_wrong_or_ambiguous():
    """Half of them win: right labels of ambiguous samples would look the same."""
    votes, labels, wrong = hidden_errors(0.6)
    found = suspicion_from_votes(votes, labels)
    assert not found.distinct and found.chance_wrong.isnan().all()
    assert found.errors.low <= 200 <= found.errors.high
    assert wrong[found.suspicion.argsort(descending=True)[:200]].all(), "the order still is right"


@pytest.mark.parametrize("ring", [False, True])
def test_no_error_is_seen_in_clean_classes_that_touch(ring):
    """Votes of a trained network thin out at the border of clean classes, which is no group of errors."""
    torch.manual_seed(0)
    x = torch.randn(400, 4)
    y = ((x.norm(dim=1) > 1.8) if ring else (x[:, 0] > 0)).long()
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    found = lw.label_suspicion(lw.GramMatrix(model, (x, y)))
    assert not found.distinct and "memorized" in found.reason  # every label is reproduced: who knows?
    assert found.flagged.sum() < 20


def test_a_class_of_one_does_not_make_others_wrong():
    votes, labels, _ = voted(0.0, n=2000)
    votes = votes + 2 * nn.functional.one_hot(labels, 5)
    before = suspicion_from_votes(votes, labels).errors.likely
    votes = torch.cat([votes, torch.zeros(2000, 1).double()], 1)
    labels = torch.cat([labels[:-1], torch.tensor([5])])
    assert suspicion_from_votes(votes, labels).errors.likely <= before + 5


def test_many_classes_do_not_fill_memory():
    labels = torch.arange(3000) % 2500
    found = suspicion_from_votes(torch.rand(3000, 2500).double() + 3 * nn.functional.one_hot(labels), labels)
    assert not found.flagged.any() and found.suspicion.max() < 1


def memorized_votes(n=1000, classes=10, share=0.1):
    """Votes that agree with every label, also with those that are wrong, and chances that reproduce them."""
    labels = torch.randint(classes, (n,))
    votes = torch.rand(n, classes).double() + 3 * nn.functional.one_hot(labels, classes)
    wrong = torch.rand(n) < share
    return votes, torch.where(wrong, (labels + 1) % classes, labels), wrong


def test_where_labels_are_memorized_and_neighbors_agree_nothing_is_told():
    votes, _, _ = memorized_votes()
    labels = votes.argmax(1)
    found = suspicion_from_votes(votes, labels, nn.functional.one_hot(labels, 10).double())
    assert "memorized" in found.reason
    assert "cannot tell" in repr(found)
    assert found.chance_wrong.isnan().all()
    assert np.isnan([*found.errors, *found.precision]).all()
    assert not found.suspicion.isnan().any()
    assert suspicion_from_votes(votes, labels).reason == "", (
        "without the network's opinion nothing is known of it"
    )


def test_where_neighbors_support_few_labels_nothing_is_told():
    torch.manual_seed(0)
    labels = torch.randint(10, (1000,))
    votes = torch.rand(1000, 10).double() + 0.4 * nn.functional.one_hot(labels, 10)
    found = suspicion_from_votes(votes, labels, torch.rand(1000, 10).double())
    assert "votes of similar samples support only" in found.reason
    assert found.chance_wrong.isnan().all()


def test_a_group_of_wrong_labels_is_told_also_of_a_memorized_network():
    votes, labels, wrong = memorized_votes()
    found = suspicion_from_votes(votes, labels, nn.functional.one_hot(labels, 10).double())
    assert found.reason == ""
    assert found.distinct
    assert found.errors.low <= int(wrong.sum()) <= found.errors.high


def test_overlapping_classes_are_no_group_of_wrong_labels():
    torch.manual_seed(0)
    truth = torch.randint(10, (3000,))
    hard = torch.rand(3000) < 0.25  # the vote is between two classes, and either wins
    wrong = torch.rand(3000) < 0.1
    labels = torch.where(wrong, (truth + torch.randint(1, 10, (3000,))) % 10, truth)
    one_hot = nn.functional.one_hot
    votes = torch.rand(3000, 10).double() * 0.3 + 3 * one_hot(truth, 10)
    tie = 3 * one_hot((truth + 1) % 10, 10) + torch.randn(3000, 1) * one_hot(truth, 10)
    votes = torch.where(hard[:, None], (votes + tie).clamp(min=0), votes)
    found = suspicion_from_votes(votes, labels)
    known = not np.isnan(found.precision.likely)
    assert not known or abs(found.precision.likely - float(wrong[found.flagged].double().mean())) < 0.1
    assert found.errors.low <= int(wrong.sum()) <= found.errors.high


def close_votes(n=4000, classes=5, k=0.7, share=0.1, seed=0, clearest=2.5):
    """Votes of overlapping classes: right labels lose by r at a chance of Φ(-k r), wrong ones mostly lose clearly."""
    chance = torch.Generator().manual_seed(seed)
    clear = clearest * torch.rand(n, generator=chance, dtype=torch.float64).sqrt()
    lose = torch.rand(n, generator=chance, dtype=torch.float64) < torch.special.ndtr(-k * clear)
    wrong = torch.rand(n, generator=chance) < share
    clearly = 2 + 0.5 * torch.randn(n, generator=chance, dtype=torch.float64)
    against = torch.where(wrong, clearly, torch.where(lose, clear, -clear))
    labels = torch.randint(classes, (n,), generator=chance)
    votes = torch.full((n, classes), 0.02, dtype=torch.float64)
    votes[torch.arange(n), labels] = 1.0
    votes[torch.arange(n), (labels + 1) % classes] = against.exp()
    return votes / votes.sum(1, keepdim=True), labels, wrong, against


@pytest.mark.parametrize("k", [0.6, 1.0, 1.6])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.2])
def test_right_labels_that_lose_narrowly_are_told_by_those_that_win_narrowly(k, share):
    _, _, wrong, against = close_votes(k=k, share=share)
    narrow = narrow_loss_chance(against)
    lost = against > 0
    assert (narrow[~lost] == 0).all() and ((narrow >= 0) & (narrow <= 1)).all()
    right = int((lost & ~wrong).sum())
    assert abs(float(narrow.sum()) - right) < 0.25 * right + 0.1 * int(
        wrong.sum()
    )  # some wrong ones are close
    order = against[lost].argsort()
    assert (narrow[lost][order].diff() <= 1e-12).all(), (
        "the clearer the loss, the less likely it is a narrow one"
    )


def test_narrow_losses_are_counted_as_written_out():
    _, _, _, against = close_votes(n=1000)
    values = against.tolist()
    chance = NormalDist().cdf
    close = [v for v in values if abs(v) <= 1]
    posterior = lambda k: sum(log(chance(-k * v)) for v in close) - (k - 1) ** 2 / (2 * 0.2**2)  # noqa: E731
    k = max(np.linspace(0, 3, 1501), key=posterior)
    lost = sorted(v for v in values if v > 0)
    bins = max(1, min(20, len(lost) // 25))
    edges = np.unique([*np.quantile(lost, np.linspace(0, 1, bins + 1)), 1.5])
    edges[0] = -np.inf
    pools = []  # [losers, sum of right ones], pooled where chances would rise
    for low, high in pairwise(edges):
        here = sum(low < v <= high for v in lost)
        won = [-v for v in values if v <= 0 and low < -v <= high]
        pools.append([here, sum(chance(-k * r) / chance(k * r) for r in won)])
        while len(pools) > 1 and pools[-1][1] / pools[-1][0] > pools[-2][1] / pools[-2][0]:
            last = pools.pop()
            pools[-1] = [a + b for a, b in zip(pools[-1], last, strict=True)]
    expected = [min(1, right / losers) for losers, right in pools for _ in range(losers)]
    found = narrow_loss_chance(against)
    assert bins > 3 and (found[against <= 0] == 0).all()
    np.testing.assert_allclose(found[against > 0][against[against > 0].argsort()], expected, atol=2e-3)


@pytest.mark.parametrize("seed", range(3))
def test_numbers_are_right_or_absent_where_right_labels_lose_narrowly(seed):
    votes, labels, wrong, _ = close_votes(seed=seed)
    found = suspicion_from_votes(votes, labels)
    assert not found.distinct and np.isnan(found.precision.likely) and found.chance_wrong.isnan().all()
    assert found.errors.low <= int(wrong.sum()) <= found.errors.high
    votes, labels, wrong, _ = close_votes(k=1.6, seed=seed, clearest=4.0)  # classes hardly overlap
    found = suspicion_from_votes(votes, labels)
    assert found.distinct and abs(found.precision.likely - float(wrong[found.flagged].double().mean())) < 0.1
    assert found.errors.low <= int(wrong.sum()) <= found.errors.high
    chance = found.chance_wrong.double()
    assert abs(float(chance.sum()) - int(wrong.sum())) < 0.15 * int(wrong.sum())


def test_without_close_votes_every_loss_counts():
    against = torch.cat([-5 - torch.rand(300), 4 + torch.rand(40)]).double()
    assert narrow_loss_chance(against).sum() < 0.01
    assert narrow_loss_chance(-against.abs()).sum() == 0


def test_a_few_labels_that_lose_clearly_are_not_taken_for_narrow_losers():
    """12 of 400 labels lose by 3 to 6, 6 right ones narrowly: all 18 are too few for bins of their own."""
    clear, narrow = torch.linspace(3, 6, 12), torch.linspace(0.05, 0.7, 6)
    won = torch.cat([-torch.linspace(0.05, 0.9, 30), -torch.linspace(1, 9, 352)])
    chance = narrow_loss_chance(torch.cat([clear, narrow, won]).double())
    assert (chance[:12] < 0.1).all() and (chance[12:18] > 0.9).all()
