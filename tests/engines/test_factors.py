"""Norms by plain arithmetic, differentiable three times; two-sided projections of gradients in every form."""

import pytest
import torch
import torch.nn.functional as F

from likewise.engines.convolution import CACHED, ConvolutionGradient, ConvolutionOptions
from likewise.engines.double_backward import THIRD_ORDER
from likewise.engines.factors import (
    DenseGradient,
    EmbeddingGradient,
    FactoredGradient,
    SharedGradient,
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


@pytest.mark.parametrize("name", GRADIENTS)
def test_two_sided_projections_are_those_of_the_formed_gradient(name):
    gradient = GRADIENTS[name]
    left, right = drawn(3, 5, 4), drawn(3, gradient.rows().shape[2] // 5, 2)
    formed = gradient.rows().unflatten(2, (5, -1))
    expected = torch.einsum("ndij,bik,bjl->ndbkl", formed, left, right)
    assert (gradient.project_two_sided(left, right) - expected).abs().max() < 1e-12


CONVOLUTION = ConvolutionGradient(
    drawn(2, 2, 5), drawn(2, 2, 3, 5), drawn(3, 2, 3), ConvolutionOptions([1], [1], [1], False, [0], 1)
)


@pytest.mark.parametrize("name", [*GRADIENTS, "some samples", "convolution"])
def test_the_gradient_of_a_combination_of_outputs_is_that_of_the_formed_gradient(name):
    more = {"some samples": SubsetGradient(torch.tensor([2, 0]), TABLE, 3), "convolution": CONVOLUTION}
    gradient, u = (GRADIENTS | more)[name], drawn(2)
    expected = torch.einsum("ndp,d->np", gradient.rows(), u)
    found = combine_outputs(gradient, u).rows()
    assert found.shape[1] == 1 and (found[:, 0] - expected).abs().max() < 1e-12


def test_sums_over_positions_from_all_pairs_of_blocks_are_those_of_each_block():
    left, right = drawn(2, 1, 7, 3, 4), drawn(2, 3, 7, 3, 5)
    expected = torch.einsum("nctbk,ndtbl->ndbkl", left, right)
    assert (sum_pairs_of_blocks(left, right) - expected).abs().max() < 1e-12


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
