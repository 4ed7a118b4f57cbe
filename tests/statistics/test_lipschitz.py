"""Bounds on how fast similarities change."""

import torch
from torch import nn

import likewise as lw

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))


def test_sampled_bound_is_of_the_size_of_the_exact_one():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    gram = lw.GramMatrix(model, torch.randn(300, 3, dtype=torch.float64))
    ratio = lw.denoising(gram, draws=60).bound / lw.denoising(gram, exact=True).bound
    assert 0.7 < ratio.min() and ratio.max() < 1.4


def test_a_bare_linear_layer_has_a_bound():
    assert lw.lipschitz_bound(lw.GramMatrix(nn.Linear(3, 2), X)).isfinite().all()
