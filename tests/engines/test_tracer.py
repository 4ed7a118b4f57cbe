"""Traces are found once, and hold for every batch."""

import torch
from torch import nn

import likewise as lw
from likewise.engines import traced


def test_a_model_that_does_not_branch_is_traced_once(monkeypatch):
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(108, 2)).eval()
    gram = lw.GramMatrix(model, lw.batches(torch.randn(12, 1, 8, 8), 3))
    gram.engine  # noqa: B018  the first trace
    monkeypatch.setattr(traced, "TRACE_FUNCTIONS", (lambda *_: 1 / 0,))
    lw.soft_neighbors(gram)
    lw.nearest(gram, 2)
