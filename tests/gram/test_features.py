"""Features that are kept, and passes that several kernels share, against the matrix written out."""

import pytest
import torch
from torch import nn

import likewise as lw
from likewise.distributed import record_passes
from nets import SHAPES, case

KERNELS = (lw.CORRELATION, lw.INNER_PRODUCT, lw.INFLUENCE)
WAYS = {"kept": lambda gram: gram.with_feature_cache(), "two passes": lambda gram: gram}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize(
    "make", [make for make in SHAPES if make.__name__ != "Added"], ids=lambda m: m.__name__
)
@pytest.mark.filterwarnings("ignore:torch.func.vmap cannot differentiate Recurrent")
def test_sums_and_diagonals_of_several_kernels_are_those_of_the_matrices(make, d, way):
    model, x = case(make, d, 11)
    gram = WAYS[way](lw.GramMatrix(model, lw.batches(x, size=4)))
    found = gram.sums_and_diagonals(*KERNELS)
    for kernel, (sums, diagonal) in zip(KERNELS, found, strict=True):
        k = lw.GramMatrix(model, x, kernel=kernel).dense()
        torch.testing.assert_close(sums, k.sum(1), rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(diagonal, k.diagonal(), rtol=1e-9, atol=1e-10)
    weights = torch.randn(11, 2, dtype=torch.float64)
    for kernel in KERNELS:
        k = lw.GramMatrix(model, x, kernel=kernel).dense()
        product = gram.with_kernel(kernel).row_sums(weights)
        torch.testing.assert_close(product, k @ weights, rtol=1e-9, atol=1e-10)
    centered = lw.GramMatrix(model, x, centered=True).dense()
    torch.testing.assert_close(gram.with_centering(True).dense(), centered, rtol=1e-8, atol=1e-9)


def dependent(n=30):
    """Log-probabilities cannot move independently, and one sample has a zero gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 3, bias=False)).double()
    x = torch.randn(n, 5, dtype=torch.float64)
    x[7] = 0
    return lw.Network(model, readout=lw.log_probabilities), x


@pytest.mark.parametrize("way", WAYS)
def test_ranks_below_d_and_zero_gradients_are_kept_apart(way):
    net, x = dependent()
    gram = WAYS[way](lw.GramMatrix(net, x))
    with pytest.warns(lw.ZeroGradientWarning):
        correlation, inner = gram.sums_and_diagonals(lw.CORRELATION, lw.INNER_PRODUCT)
    assert correlation.sums[7] == correlation.diagonal[7] == inner.sums[7] == inner.diagonal[7] == 0
    torch.testing.assert_close(correlation.diagonal[8], torch.tensor(2 / 3).double())


@pytest.mark.parametrize("statistic", [lw.soft_neighbors, lw.uncertainty, lw.denoising])
def test_a_pass_computes_gradients_of_each_sample_once(statistic):
    called = []
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    model.register_forward_hook(lambda module, args, out: called.append(len(out)))
    gram = lw.GramMatrix(lw.Network(model), lw.batches(torch.randn(600, 5, dtype=torch.float64), size=100))
    _ = gram.engine
    called.clear()
    with record_passes(lambda: 0.0) as passes:
        statistic(gram)
    checks = sum(called) - 600 * len(passes)
    assert 0 <= checks < 100 * len(passes)


def test_features_that_fit_are_computed_once_for_all_statistics():
    net, x = dependent()
    gram = lw.GramMatrix(net, x[8:], centered=True).with_feature_cache()
    _ = gram.engine
    with record_passes(lambda: 0) as passes:
        gram.sums_and_diagonals(lw.CORRELATION, lw.INNER_PRODUCT)
        lw.nearest(gram)
        lw.uncertainty(gram.with_centering(False))
        gram.row_sums()
    assert [p.what for p in passes] == ["features", "pairs"]


def test_centering_takes_no_pass_beside_that_of_features_where_they_fit_and_two_where_not():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    for max_memory, expected in (
        (2**31, ["features", "pairs"]),
        (2**21, ["summing gradients", "reading off", "pairs"]),
    ):
        gram = lw.GramMatrix(model, torch.randn(600, 1, 8, 8), centered=True, max_memory=max_memory)
        with record_passes(lambda: 0) as passes:
            lw.nearest(gram)
        assert [p.what for p in passes] == expected


def test_kept_features_of_a_model_that_has_changed_are_computed_again():
    net, x = dependent()
    gram = lw.GramMatrix(net, x[8:]).with_feature_cache()
    before = gram.row_sums()
    with torch.no_grad():
        net.model[0].weight.mul_(2)
    after = gram.row_sums()
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, lw.GramMatrix(net, x[8:]).row_sums())


@pytest.mark.parametrize("scale", [1e-15, 1e15])
def test_sums_of_gradients_of_any_scale_are_right_in_float32(scale):
    torch.manual_seed(0)
    model, x = nn.Linear(6, 2, bias=False), torch.randn(20, 6)
    expected = (x.double() @ x.double().T).sum(1) * scale**2
    unit = nn.functional.normalize(x.double(), dim=1)
    gram = lw.GramMatrix(model, x * scale, engine="layers")
    for way in WAYS.values():
        correlation, inner = way(gram).sums_and_diagonals(lw.CORRELATION, lw.INNER_PRODUCT)
        torch.testing.assert_close(inner.sums, expected, rtol=2e-5, atol=0)
        torch.testing.assert_close(correlation.sums, (unit @ unit.T).sum(1), rtol=2e-5, atol=1e-6)
