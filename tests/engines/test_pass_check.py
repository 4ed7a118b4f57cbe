"""Which samples of a pass are compared with autograd."""

from collections import Counter

import pytest
import torch
from torch import nn

import likewise as lw
from likewise.engines import pass_check
from likewise.engines.pass_check import PassCheck


def offered(check, data, announced=None):
    """Return the places whose gradients a pass over the data asks for, batch by batch."""
    asked = []

    def gradient(start):
        def at(places, weights):
            asked.append(start + int(places[0]))
            return [torch.zeros(1)]

        return at

    if announced is not None:
        check.begin_pass(announced)
    start = 0
    for samples in data:
        check.offer(samples, None, gradient(start), 1)
        start += len(samples)
    return asked


def test_of_an_announced_pass_one_sample_is_selected_and_any_is_as_likely():
    net = lw.Network(nn.Linear(2, 1))
    data = lw.batches(torch.randn(12, 2), size=5)
    counts = Counter()
    with net.evaluation_mode():
        check = PassCheck(net)
        for _ in range(1200):
            asked = offered(check, data, announced=12)
            assert len(asked) == 1
            counts.update(asked)
    assert sorted(counts) == list(range(12))
    assert all(60 < count < 140 for count in counts.values())


def test_of_any_other_pass_every_sample_is_as_likely_in_the_end():
    net = lw.Network(nn.Linear(2, 1))
    data = lw.batches(torch.randn(12, 2), size=5)
    with net.evaluation_mode():
        check = PassCheck(net)
        counts = Counter(offered(check, data)[-1] for _ in range(1200) if check._begin() is None)
    assert sorted(counts) == list(range(12))
    assert all(60 < count < 140 for count in counts.values())


def test_samples_that_set_up_has_verified_are_not_selected():
    net = lw.Network(nn.Linear(2, 1))
    data = lw.batches(torch.randn(12, 2), size=5)
    with net.evaluation_mode():
        for seed in range(50):
            (asked,) = offered(PassCheck(net, seed, verified=data[0]), data, announced=12)
            assert asked >= 5


def test_a_pass_that_is_longer_than_announced_is_checked_too():
    net = lw.Network(nn.Linear(2, 1))
    data = lw.batches(torch.randn(12, 2), size=5)
    with net.evaluation_mode():
        last = Counter(offered(PassCheck(net, seed), data, announced=5)[-1] for seed in range(200))
    assert min(last) < 5 <= max(last)


def test_what_an_interrupted_pass_has_compared_says_nothing_of_samples_selected_later():
    net, samples = lw.Network(nn.Linear(2, 1)), lw.batches(torch.randn(4, 2), size=4)[0]

    def offer(check, factor):
        def gradient(places, weights):
            total = weights.T @ samples.inputs[places]
            return [factor * total.flatten(), factor * weights.sum(0)]

        check.offer(samples, net.function({}, samples.inputs), gradient, 1)

    with net.evaluation_mode():
        check = PassCheck(net)
        check.begin_pass(4)
        offer(check, factor=1)
        check.start_checks()  # and something else raises before the pass is finished
        before = check._pending
        while check._pending is before:
            offer(check, factor=2)
        with pytest.raises(lw.GradientMismatchError):
            check.finish_checks()


@pytest.mark.parametrize("left", [False, True], ids=["same evaluation", "evaluation left"])
def test_a_pass_that_leaves_its_checks_to_the_next_is_checked_there(left):
    net, samples = lw.Network(nn.Linear(2, 1)), lw.batches(torch.randn(4, 2), size=4)[0]
    check = PassCheck(net)

    def run_pass(factor):
        def gradient(places, weights):
            total = weights.T @ samples.inputs[places]
            return [factor * total.flatten(), factor * weights.sum(0)]

        check.begin_pass(4)
        check.offer(samples, net.function({}, samples.inputs), gradient, 1)

    with net.evaluation_mode():
        run_pass(factor=2)
        check.defer()
        if not left:
            run_pass(factor=1)
            with pytest.raises(lw.GradientMismatchError):
                check.finish_checks()
    with net.evaluation_mode():  # nothing is left of an evaluation that an exception may have ended
        run_pass(factor=1)
        check.finish_checks()


def test_samples_are_checked_on_the_way_once_a_pass_has_shown_the_cost(monkeypatch):
    monkeypatch.setattr(pass_check, "SHARE", 1000)
    net = lw.Network(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)))
    gram = lw.GramMatrix(net, lw.batches(torch.randn(5000, 4), size=100))
    checked, check = [], PassCheck._check

    def count(self, candidate):
        checked.append(len(candidate.places))
        check(self, candidate)

    monkeypatch.setattr(PassCheck, "_check", count)
    gram @ torch.ones(5000)
    before = len(checked)
    gram @ torch.ones(5000)
    assert len(checked) >= before + 8  # one in 1024, in each of two passes
    assert set(checked) == {pass_check.FEW}


def test_a_sample_that_is_not_finite_is_named_as_such_also_where_it_is_checked_on_the_way(monkeypatch):
    monkeypatch.setattr(pass_check, "SHARE", 1e9)
    monkeypatch.setattr(pass_check, "WINDOW", 5)  # one of nearly every batch
    torch.manual_seed(0)
    x = torch.randn(60, 4)
    net = lw.Network(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)))
    gram = lw.GramMatrix(net, lw.batches(x, size=6))
    gram @ torch.ones(60)
    for place in range(3, 60, 6):
        bad = x.clone()
        bad[place, 0] = torch.nan
        with pytest.raises(ValueError, match=rf"not finite, the first with ids \[{place}\]"):
            gram.with_columns(lw.batches(bad, size=6)) @ torch.ones(60)
