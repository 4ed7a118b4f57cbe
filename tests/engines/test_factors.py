"""Norms by plain arithmetic, differentiable three times; two-sided projections of gradients in every form."""

import pytest
import torch
import torch.nn.functional as F

from likewise.engines.convolution import CACHED, HAS_ONEDNN, ConvolutionGradient, ConvolutionOptions
from likewise.engines.double_backward import THIRD_ORDER
from likewise.engines.factors import (
    DenseGradient,
    EmbeddingGradient,
    FactoredGradient,
    SharedGradient,
    SlicedGradient,
    SubsetGradient,
    combine_outputs,
    sum_pairs_of_blocks,
)

WEIGHT, BIAS = torch.randn(2, 3, dtype=torch.float64)
LAYER, INSTANCE = ((f, THIRD_ORDER[f]) for f in (F.layer_norm, F.instance_norm))
NORMS = {
    "layer": (LAYER, lambda f, x: f(x, (3,), WEIGHT, BIAS)),
    "layer of two": (LAYER, lambda f, x: f(x, (4, 3), eps=1e-3)),
    "instance": (INSTANCE, lambda f, x: f(x.mT, weight=WEIGHT, bias=BIAS)),
    "with statistics": (INSTANCE, lambda f, x: f(x.mT, BIAS, WEIGHT.abs(), use_input_stats=False)),
}


def slope_of(call, function):
    return lambda x: torch.autograd.grad(call(function, x).pow(3).sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("name", NORMS)
def test_values_and_third_derivatives(name):
    (theirs, ours), call = NORMS[name]
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(call(ours, x), call(theirs, x))
    assert torch.autograd.gradgradcheck(slope_of(call, ours), x)


@pytest.mark.parametrize("name", ["layer", "instance"])
@pytest.mark.xfail(strict=True, reason="PyTorch's own is wrong: if this passes, delete norms.py")
def test_pytorch_has_mended_its_own(name):
    (theirs, _), call = NORMS[name]
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(slope_of(call, theirs), x)


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


TABLE = EmbeddingGradient(torch.tensor([[0, 4, 4], [2, -1, 0]]), drawn(2, 2, 3, 6), 5)
GRADIENTS = {  # of a matrix (5, 6), or of a vector of 5
    "dense": DenseGradient(drawn(2, 2, 30)),
    "vector": DenseGradient(drawn(2, 2, 5)),
    "factored": FactoredGradient(drawn(2, 3, 6), drawn(2, 2, 3, 5)),
    "inputs first": FactoredGradient(drawn(2, 3, 5), drawn(2, 2, 3, 6), inputs_first=True),
    "embedding": TABLE,
    "tied": SharedGradient(FactoredGradient(drawn(2, 3, 6), drawn(2, 2, 3, 5)), TABLE),
}


SLICED = SlicedGradient(
    {6: GRADIENTS["factored"].part(slice(None)), 36: GRADIENTS["inputs first"].permute((6, 5), (1, 0))},
    {6: 30, 36: 30},
    66,
)


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("is_formed", [False, True], ids=["", "formed"])
def test_two_sided_projections_are_those_of_the_formed_gradient(name, is_formed):
    gradient = GRADIENTS[name].part(slice(None))
    if is_formed:
        gradient.self_gram(), gradient.rows()
    left, right = drawn(3, 5, 4), drawn(3, gradient.rows().shape[2] // 5, 2)
    formed = gradient.rows().unflatten(2, (5, -1))
    expected = torch.einsum("ndij,bik,bjl->ndbkl", formed, left, right)
    assert (gradient.project_two_sided(left, right) - expected).abs().max() < 1e-12


@pytest.mark.parametrize("name", ["factored", "embedding", "tied"])
def test_two_sided_projections_of_views_are_those_of_the_formed_gradient(name):
    """Of a parameter with other sides than the matrix, (2, 15)."""
    gradient, left, right = GRADIENTS[name], drawn(3, 2, 4), drawn(3, 15, 2)
    expected = torch.einsum("ndij,bik,bjl->ndbkl", gradient.rows().unflatten(2, (2, 15)), left, right)
    assert (gradient.project_two_sided(left, right) - expected).abs().max() < 1e-12


@pytest.mark.parametrize("columns", [6, 11], ids=["whole rows", "parts of rows"])
def test_two_sided_projections_of_slices_are_those_of_the_formed_gradient(columns):
    rows = 66 // columns
    left, right = drawn(3, rows, 4), drawn(3, columns, 2)
    expected = torch.einsum("ndij,bik,bjl->ndbkl", SLICED.rows().unflatten(2, (rows, -1)), left, right)
    assert (SLICED.project_two_sided(left, right) - expected).abs().max() < 1e-12


OPTIONS = {  # kernel, options
    "plain": ((4, 3, 3), ([1], [0], [1], False, [0], 1)),
    "padded, stride 2, dilated": ((4, 3, 3, 2), ([2, 1], [1, 2], [1, 2], False, [0, 0], 1)),
    "1 x 1, stride 2": ((4, 3, 1, 1), ([2, 2], [0, 0], [1, 1], False, [0, 0], 1)),
    "volumes": ((4, 3, 2, 2, 2), ([1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1)),
    "groups": ((4, 3, 3), ([1], [0], [1], False, [0], 2)),
    "transposed": ((3, 4, 3), ([2], [1], [1], True, [0], 1)),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("is_formed", [False, True], ids=["", "formed"])
def test_two_sided_projections_of_convolutions_are_those_of_the_formed_gradient(name, is_formed):
    shape, arguments = OPTIONS[name]
    options, kernel = ConvolutionOptions(*arguments), drawn(*shape)
    channels = shape[0] if options.transposed else shape[1] * options.groups
    inputs = drawn(2, channels, *[7] * (len(shape) - 2))
    deltas = drawn(2, 2, *options.forward(inputs, kernel).shape[1:])
    gradient = ConvolutionGradient(inputs, deltas, kernel, options)
    if is_formed:
        assert gradient._dense is not None
    left, right = drawn(3, shape[0], 4), drawn(3, kernel[0].numel(), 2)
    expected = torch.einsum(
        "ndij,bik,bjl->ndbkl", gradient.part(slice(None)).rows().unflatten(2, (shape[0], -1)), left, right
    )
    assert (gradient.project_two_sided(left, right) - expected).abs().max() < 1e-11


CONVOLUTION = ConvolutionGradient(
    drawn(2, 2, 5), drawn(2, 2, 3, 5), drawn(3, 2, 3), ConvolutionOptions([1], [1], [1], False, [0], 1)
)


def test_two_sided_projections_of_viewed_kernels_are_those_of_the_formed_gradient():
    left, right = drawn(3, 9, 4), drawn(3, 2, 2)
    expected = torch.einsum("ndij,bik,bjl->ndbkl", CONVOLUTION.rows().unflatten(2, (9, 2)), left, right)
    assert (CONVOLUTION.part(slice(None)).project_two_sided(left, right) - expected).abs().max() < 1e-12


@pytest.mark.parametrize("name", [*GRADIENTS, "some samples", "convolution"])
def test_the_gradient_of_a_combination_of_outputs_is_that_of_the_formed_gradient(name):
    more = {"some samples": SubsetGradient(torch.tensor([2, 0]), TABLE, 3), "convolution": CONVOLUTION}
    gradient, u = (GRADIENTS | more)[name], drawn(2)
    expected = torch.einsum("ndp,d->np", gradient.rows(), u)
    found = combine_outputs(gradient, u[None]).rows()
    assert found.shape[1] == 1 and (found[:, 0] - expected).abs().max() < 1e-12


def test_sums_over_positions_from_all_pairs_of_blocks_are_those_of_each_block():
    left, right = drawn(2, 1, 7, 3, 4), drawn(2, 3, 7, 3, 5)
    expected = torch.einsum("nctbk,ndtbl->ndbkl", left, right)
    assert (sum_pairs_of_blocks(left, right) - expected).abs().max() < 1e-12


LARGE = {  # inputs of a sample, kernel, options
    "plain": ((16, 9, 9), (8, 16, 3, 3), ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)),
    "one channel": ((1, 12, 12), (6, 1, 5, 5), ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)),
    "padded, strided, dilated": ((5, 20, 27), (7, 5, 3, 2), ([2, 1], [1, 2], [1, 3], False, [0, 0], 1)),
    "sequences": ((3, 90), (4, 3, 5), ([1], [2], [1], False, [0], 1)),
    "volumes": ((4, 5, 6, 7), (3, 4, 2, 3, 2), ([1] * 3, [0, 1, 0], [1] * 3, False, [0] * 3, 1)),
}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize("few_at_a_time", [False, True])
def test_a_kernel_in_float32_has_the_gradients_of_autograd(name, d, few_at_a_time, monkeypatch):
    shape, sides, arguments = LARGE[name]
    options, kernel, inputs = ConvolutionOptions(*arguments), drawn(*sides), drawn(5, *shape)
    deltas = drawn(5, d, *options.forward(inputs, kernel).shape[1:])
    single = [t.float() for t in (inputs, deltas, kernel)]
    if few_at_a_time:
        entries = max(single[0][0].numel(), single[1][0].numel(), d * kernel.numel())
        monkeypatch.setattr(
            "likewise.engines.convolution.CACHED", 2 * entries
        )  # two samples, and one at the end
    expected = torch.stack(
        [
            torch.stack([options.kernel_gradient(x[None], delta[None], kernel).flatten() for delta in own])
            for x, own in zip(inputs, deltas, strict=True)
        ]
    )
    gradient = ConvolutionGradient(*single, options)
    if HAS_ONEDNN and not (d == 1 and "strided" in name):
        assert gradient._strategy == "groups"
    written = torch.full_like(expected, torch.nan, dtype=torch.float32)
    gradient.write(written)
    scale = 1e-6 * expected.abs().max()
    assert (written - expected).abs().max() < scale
    assert (gradient.rows() - expected).abs().max() < scale
    blocks = torch.cat([block.rows() for block in gradient.part(slice(None)).blocks()])
    assert (blocks - expected).abs().max() < scale


def test_without_onednn_a_kernel_has_the_same_gradients(monkeypatch):
    shape, sides, arguments = LARGE["plain"]
    options, kernel, inputs = ConvolutionOptions(*arguments), drawn(*sides).float(), drawn(5, *shape).float()
    deltas = drawn(5, 3, *options.forward(inputs, kernel).shape[1:]).float()
    expected = ConvolutionGradient(inputs, deltas, kernel, options).rows()
    monkeypatch.setattr("likewise.engines.convolution.HAS_ONEDNN", False)
    other = ConvolutionGradient(inputs, deltas, kernel, options)
    assert other._strategy == "windows"
    torch.testing.assert_close(other.rows(), expected, rtol=1e-5, atol=1e-5)


def test_more_positions_than_one_run_of_a_layer_with_inputs_first():
    """Layers of GPT-2 keep their weight as (in, out): their sums over a batch of 18,000 tokens once failed."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(900, 20, 24, generator=generator)
    deltas = torch.randn(900, 1, 20, 32, generator=generator)
    weights = torch.randn(900, 1, 2, generator=generator)
    gradient = FactoredGradient(inputs, deltas, inputs_first=True)
    expected = torch.einsum("nti,ndto,ndc->cio", inputs.double(), deltas.double(), weights.double())
    torch.testing.assert_close(gradient.vjp(weights).double(), expected.flatten(1), atol=1e-3, rtol=0)


def test_gradients_of_a_convolution_come_in_blocks_that_fit_into_a_cache():
    generator = torch.Generator().manual_seed(0)
    inputs, deltas = (
        torch.randn(7, 8, 6, 6, generator=generator),
        torch.randn(7, 3, 64, 6, 6, generator=generator),
    )
    kernel = torch.zeros(64, 8, 3, 3)
    options = ConvolutionOptions([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    whole = ConvolutionGradient(inputs, deltas, kernel, options)
    assert [len(block.inputs) for block in whole.blocks()] == [7]
    many = ConvolutionGradient(
        inputs.repeat(20, 1, 1, 1), deltas.repeat(20, 1, 1, 1, 1), kernel, options
    )  # 14 k entries of G each
    blocks = list(many.blocks())
    assert len(blocks) > 1 and all(block.rows().numel() <= CACHED for block in blocks)
    assert torch.equal(torch.cat([block.rows() for block in blocks]), whole.rows().repeat(20, 1, 1))
    torch.testing.assert_close(
        torch.cat([block.self_gram() for block in blocks]), many.self_gram(), rtol=1e-7, atol=0
    )
