"""Counts of neighbors."""

import torch
from torch import nn

import likewise as lw

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))


def test_thresholds_count_what_equals_them():
    gram = lw.GramMatrix(nn.Linear(3, 2), X[:1].expand(6, 3))
    assert (lw.hard_neighbors(gram, 1.0) == 6).all()
    independent = lw.GramMatrix(nn.Linear(4, 1, bias=False).double(), torch.eye(4).double())
    assert (lw.hard_neighbors(independent, 0.0) == 4).all()  # k = 0 counts at τ = 0
