"""Samplers that draw by weights."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import likewise as lw
from likewise.integrations.samplers import WeightedSampler, density_weights, label_weights


def first_draws(sampler, times):
    """How often each sample is the first of an epoch."""
    counts = torch.zeros(len(sampler.weights))
    for _ in range(times):
        counts[next(iter(sampler))] += 1
    return counts / times


def test_samples_are_drawn_in_proportion_to_weights():
    weights = torch.tensor([0.0, 1.0, 2.0, 5.0, 0.0])
    drawn = torch.tensor(list(WeightedSampler(weights, num_samples=80_000)))
    torch.testing.assert_close(drawn.bincount(minlength=5) / 80_000, weights / 8, atol=0.01, rtol=0)


def test_without_replacement_each_comes_once_and_heavy_ones_first():
    weights = torch.tensor([0.0, 1.0, 2.0, 5.0])
    sampler = WeightedSampler(weights, num_samples=3, replacement=False)
    assert all(sorted(sampler) == [1, 2, 3] for _ in range(20))
    torch.testing.assert_close(first_draws(sampler, 4000), weights / 8, atol=0.04, rtol=0)


def test_epochs_differ_and_can_be_repeated_and_resumed():
    sampler, same = (WeightedSampler(torch.rand(50) + 1, seed=3) for _ in range(2))
    same.weights = sampler.weights
    first, second = list(sampler), list(sampler)
    assert first != second
    assert list(same) == first
    same.set_epoch(1)
    assert list(same) == second
    assert list(WeightedSampler(sampler.weights, seed=4)) != first


def test_processes_share_an_epoch():
    parts = []
    for rank in range(3):
        sampler = WeightedSampler(torch.ones(30), num_samples=30, replacement=False)
        sampler.rank, sampler.ranks = rank, 3
        assert len(sampler) == 10
        parts += list(sampler)
    assert sorted(parts) == list(range(30))


def test_loader_takes_the_sampler():
    loader = DataLoader(torch.arange(40), batch_size=16, sampler=WeightedSampler(torch.arange(40.0)))
    seen = torch.cat(list(loader))
    assert len(seen) == 40 and 0 not in seen


def test_weights_are_those_of_the_statistics():
    torch.manual_seed(0)
    x, y = torch.randn(60, 4), torch.arange(60) % 2
    x[:, 0] += torch.where(y == 1, 4.0, -4.0)
    y[7] = 1 - y[7]
    net = nn.Linear(4, 2)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[-1.0, 0, 0, 0], [1, 0, 0, 0]]))
    gram = lw.GramMatrix(net, (x, y))
    found = lw.label_suspicion(gram)
    trusted = label_weights(found)
    torch.testing.assert_close(trusted, 1 - found.suspicion.double())
    assert int(trusted.argmin()) == 7
    assert torch.equal(trusted, label_weights(found.suspicion.numpy()))
    density = density_weights(lw.soft_neighbors(gram))
    torch.testing.assert_close(density, 1 / gram.dense().double().sum(1).clamp(min=1), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    [
        ([1.0, -1.0], {}, "at least 0 and not all 0, found .* from -1"),
        ([0.0, 0.0], {}, "not all 0"),
        ([1.0, float("nan")], {}, "must be finite"),
        ([[1.0]], {}, r"must be \(n,\)"),
        ([1.0, 0.0], {"replacement": False}, "Cannot draw 2 different samples: only 1 of 2 weights"),
    ],
    ids=["negative", "zero", "nan", "matrix", "too few"],
)
def test_weights_that_cannot_be_drawn_by_are_refused(weights, options, message):
    with pytest.raises(ValueError, match=message):
        WeightedSampler(weights, **options)


def test_suspicions_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"in \[0, 1\], found \(2,\) from 0 to 3"):
        label_weights([0.0, 3.0])
