"""Novelty is the share of the training data that is less unusual: ingredients, surprises and shares, written out."""

import math

import pytest
import torch
from torch import nn

import likewise as lw
from likewise.gram import blocks
from likewise.gram.last_layer import LastLayer
from likewise.statistics.novelty import (
    Ingredients,
    closest_cosines,
    closest_others,
    novel_share,
    reference_places,
    shares_below,
    surprise,
)


def perceptron(outputs=3, *, bias=True, dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, outputs, bias=bias)).to(dtype)


def naive_share(value, reference, scale):
    """The share below a value: half of equal ones, interpolated between neighbors, 1/x beyond."""
    known = sorted(set(reference))
    m = len(reference)
    middle = {v: (sum(r < v for r in reference) + sum(r == v for r in reference) / 2) / m for v in known}
    if value < known[0]:
        return middle[known[0]] / (1 + (known[0] - value) / scale)
    if value > known[-1]:
        return 1 - (1 - middle[known[-1]]) / (1 + (value - known[-1]) / scale)
    if value in middle:
        return middle[value]
    low, high = max(v for v in known if v < value), min(v for v in known if v > value)
    return middle[low] + (value - low) / (high - low) * (middle[high] - middle[low])


def naive_tail(reference):
    ordered = sorted(reference)
    threshold = ordered[math.ceil(0.7 * len(ordered)) - 1]
    beyond = [v - threshold for v in ordered if v > threshold]
    return threshold, max(sum(beyond) / len(beyond) if beyond else 0, 1e-3)


def naive_surprise(value, reference):
    threshold, scale = naive_tail(reference)
    inside = -math.log(1 - naive_share(min(value, threshold), reference, scale))
    return inside + max(0, value - threshold) / scale


def naive_novelty(gradient, features, new, m, k):
    """From similarities of new inputs and training samples, rows, with training samples, and features of both."""

    def closeness(matrix, i, own):
        others = sorted((float(matrix[i, j]) for j in range(m) if j != own), reverse=True)[:k]
        return sum(others) / len(others)

    def ingredients(i, own):
        cosines = nn.functional.cosine_similarity(features[:, None], features[None, new:], dim=2)
        near = [1 - closeness(matrix, i, own) for matrix in (gradient, cosines)]
        return [*(math.log(max(v, 1e-4)) for v in near), math.log(float(features[i].norm()))]

    known = [ingredients(new + j, j) for j in range(m)]

    def score(found):
        total = sum(naive_surprise(found[i], [part[i] for part in known]) for i in (0, 1))
        lengths = [part[2] for part in known]
        sides = [naive_surprise(s * found[2], [s * v for v in lengths]) for s in (1, -1)]
        return total + max(0, max(sides) - math.log(2) - 1)

    reference = [score(part) for part in known]
    scale = naive_tail(reference)[1]
    return [naive_share(score(ingredients(i, None)), reference, scale) for i in range(new)]


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_novelty_is_written_out(outputs, bias):
    model, x = perceptron(outputs, bias=bias), torch.randn(32, 5, dtype=torch.float64)
    x[0] *= 30
    x[1] *= 0.01
    new, train = x[:6], x[6:]
    gradient = lw.GramMatrix(model, x, columns=train).dense()
    hidden = model[:2](x).detach()
    features = torch.cat([hidden, torch.ones(32, 1)], 1) if bias else hidden
    found = lw.novelty(lw.GramMatrix(model, new, columns=train), k=4)
    expected = naive_novelty(gradient, features, 6, 26, 4)
    torch.testing.assert_close(found, torch.tensor(expected).double(), rtol=1e-6, atol=1e-8)
    assert found.dtype == torch.float64


def test_of_a_data_set_with_itself_each_sample_is_left_out():
    model, x = perceptron(), torch.randn(40, 5, dtype=torch.float64)
    found = lw.novelty(lw.GramMatrix(model, x), k=3)
    assert abs(float(found.mean()) - 0.5) < 1e-9 and len(found.unique()) == 40
    gradients, features = (lw.novelty(lw.GramMatrix(model, x), k=3, parameters=p) for p in (None, "features"))
    lengths = torch.cat([model[:2](x).detach(), torch.ones(40, 1)], 1).norm(dim=1)
    same = Ingredients(gradients, features, lengths)
    torch.testing.assert_close(found, novel_share(same, same))


def test_features_are_the_gradients_of_the_last_layer():
    model, x = perceptron(), torch.randn(30, 5, dtype=torch.float64)
    for gram in (lw.GramMatrix(model, x), lw.GramMatrix(model, x[:8], columns=x[8:])):
        mine = lw.novelty(gram, parameters="features")
        torch.testing.assert_close(mine, lw.novelty(gram, parameters="last layer"), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("reference", [[0.0, 1, 2, 3], [1.0] * 5, [0.0, 0, 0, 4, 4, 9], [2.0]])
def test_shares_and_surprises_are_written_out(reference):
    values = [-3.0, 0, 0.5, 1, 1.25, 2, 3.5, 4, 8.999, 9, 9.5, 1e6]
    given, known = torch.tensor(values, dtype=torch.float64), torch.tensor(reference, dtype=torch.float64)
    found = shares_below(given, known, scale=0.5)
    assert found.tolist() == pytest.approx([naive_share(v, reference, 0.5) for v in values], abs=1e-9)
    assert surprise(given, known).tolist() == pytest.approx(
        [naive_surprise(v, reference) for v in values], rel=1e-9, abs=1e-12
    )
    for tensor in (found, surprise(given, known)):
        assert (tensor.diff() >= 0).all()
    assert 0 < found.min() and found.max() < 1
    outside = (given < known.min()) | (given > known.max())
    assert len(found[outside].unique()) == int(outside.sum())  # no ties beyond the reference


def test_equal_samples_are_equally_usual():
    model, x = perceptron(), torch.randn(1, 5, dtype=torch.float64).repeat(30, 1)
    found = lw.novelty(lw.GramMatrix(model, x))
    torch.testing.assert_close(found, torch.full_like(found, 0.5))
    asked = lw.novelty(lw.GramMatrix(model, torch.cat([x[:1], -2 * x[:1]]), columns=x))
    assert abs(float(asked[0]) - 0.5) < 1e-9 and asked[1] > 0.97


def test_constant_features_and_outputs_say_nothing():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    with torch.no_grad():
        model[0].bias.fill_(-100)  # no unit is ever active: features are 0, outputs constant
    x = torch.randn(40, 4, dtype=torch.float64)
    found = lw.novelty(lw.GramMatrix(model, x[:5], columns=x[5:]))
    torch.testing.assert_close(found, torch.full_like(found, 0.5))


def test_longer_and_shorter_features_are_novel():
    chance = torch.Generator().manual_seed(0)
    near, length = torch.rand(200, generator=chance), 1 + 0.1 * torch.rand(200, generator=chance)
    reference = Ingredients(near, near, length)
    asked = Ingredients(near[:3], near[:3], length[:3] * torch.tensor([1, 3, 1 / 3]))
    found = novel_share(asked, reference)
    assert found[1] > 0.99 and found[2] > 0.99 and found[0] < 0.99
    with pytest.raises(ValueError, match="have none"):
        novel_share(asked, Ingredients(near))


def test_without_features_similarity_is_alone():
    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 2))

        def forward(self, x):
            return (x @ self.weight).tanh()

    model, x = Product(), torch.randn(60, 5)
    gram = lw.GramMatrix(model, x[:9], columns=x[9:])
    order = lw.novelty(gram, parameters=None).argsort()
    assert torch.equal(lw.novelty(gram).argsort(), order)
    with pytest.raises(ValueError, match="last linear or convolutional layer"):
        lw.novelty(gram, parameters="features")


def test_a_layer_that_is_called_twice_has_no_features():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(self.layer(x).tanh())

    samples = lw.batches(torch.randn(5, 4)).samples(range(2))
    assert LastLayer.find(lw.Network(Twice(), lw.all_outputs), samples) is None


def test_convolutions_are_averaged_over_positions_and_no_hook_is_left():
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 1), nn.Flatten())
    net, x = lw.Network(model, lw.all_outputs), torch.randn(4, 1, 6, 6)
    samples = lw.batches(x).samples(range(4))
    layer = LastLayer.find(net, samples)
    with net.evaluation_mode():
        outputs, features = layer.read(samples)
    torch.testing.assert_close(outputs, model(x).detach())
    hidden = model[:2](x).detach().mean((2, 3))
    torch.testing.assert_close(features, torch.cat([hidden, torch.ones(4, 1)], 1))
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_cosines_of_parts_are_those_of_the_whole():
    vectors = nn.functional.normalize(torch.randn(50, 6, dtype=torch.float64), dim=1)
    own = torch.tensor([3, 49, 20])
    found = closest_cosines(vectors[own], vectors.split(7), 5, own, height=2)
    similarity = vectors[own] @ vectors.T
    similarity[torch.arange(3), own] = -torch.inf
    torch.testing.assert_close(found, similarity.topk(5).values.mean(1))


@pytest.mark.parametrize(("n", "block"), [(1, 8), (2, 8), (50, 7), (50, 64)])
def test_cosines_of_all_with_all_leave_the_sample_out(n, block, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", block)
    vectors = nn.functional.normalize(torch.randn(n, 6, dtype=torch.float64), dim=1)
    k = min(5, n - 1)
    others = (vectors @ vectors.T).fill_diagonal_(-torch.inf)
    torch.testing.assert_close(closest_others(vectors, k), others.topk(k).values.mean(1).nan_to_num())


def test_the_reference_is_spread_and_limited():
    assert reference_places(3).tolist() == [0, 1, 2]
    places = reference_places(10_000)
    assert len(places) == 1024 and places[0] == 0 and places[-1] == 9_999


def test_one_training_sample_is_too_few():
    gram = lw.GramMatrix(perceptron(), torch.randn(3, 5).double(), columns=torch.randn(1, 5).double())
    with pytest.raises(ValueError, match="parameters=None needs one only"):
        lw.novelty(gram)
    assert lw.novelty(gram, parameters=None).shape == (3,)
