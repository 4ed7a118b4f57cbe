"""Denoising factors and label variances where outputs or labels are awkward."""

import pytest
import torch
from torch import nn

import likewise as lw

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))


def test_label_variance_does_not_drown_in_the_mean():
    gram, labels = lw.GramMatrix(nn.Linear(3, 1), X), torch.randn(12, dtype=torch.float64)
    plain, far = (lw.fit_quality(gram, labels + offset).label_variance for offset in (0, 1e5))
    assert torch.allclose(plain, far, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_denoising_of_outputs_that_cannot_move_independently(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4), nn.LogSoftmax(1)).to(dtype)
    gram = lw.GramMatrix(model, X)
    found, exact = lw.denoising(gram), lw.denoising(gram, exact=True)
    assert torch.allclose(found.factor, exact.factor, rtol=0.05)
    assert (exact.factor >= exact.floor * 0.99).all()
    assert (exact.shift.norm(dim=1) <= exact.bound).all()
    alike = lw.denoising(lw.GramMatrix(model, X[:1].expand(4, 3)), exact=True)
    assert torch.allclose(alike.factor, torch.full((4,), 0.5, dtype=dtype), rtol=1e-3)
    assert alike.shift.abs().max() < 1e-5


def test_estimated_factors_are_the_same_for_every_batch_size():
    torch.manual_seed(0)
    x = torch.randn(40, 5, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    net = lw.Network(model, lw.all_outputs)
    grams = [lw.GramMatrix(net, lw.batches(x, size=size)) for size in (40, 17, 7, 1)]
    whole, *others = [lw.denoising(gram, draws=20) for gram in grams]
    assert (whole.factor_error > 0).all()
    for found in others:
        torch.testing.assert_close(found.factor, whole.factor, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(found.factor_error, whole.factor_error, rtol=1e-6, atol=1e-9)


def test_smoothed_labels_are_one_hot_where_labels_are_classes_of_the_network():
    counts = torch.arange(12) * 3 % 7
    gram = lw.GramMatrix(nn.Linear(3, 1), X)
    found, values = (lw.denoising(gram, labels).smoothed_label for labels in (counts, counts.float()))
    assert found.shape == (12, 1) and torch.equal(found, values)  # one output: whole numbers are values
    assert lw.denoising(gram, counts % 2).smoothed_label.shape == (12, 2)
    several = nn.Linear(3, 7)
    for readout in (lw.label_against_rest, lw.one_output(0), lw.all_outputs):
        found = lw.denoising(lw.GramMatrix(lw.Network(several, readout), (X, counts))).smoothed_label
        assert found.shape == (12, 7)
    whole = lw.GramMatrix(several, X)
    one_hot, floats = (lw.denoising(whole, labels).smoothed_label for labels in (counts, counts.float()))
    assert torch.equal(one_hot, floats)
