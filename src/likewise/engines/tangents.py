"""How fast does a sample's gradient turn as the sample moves? ∂ₓ J(x) · e, from factors alone.

A tangent is taken by two backward passes: of Σ ⟨T, u⟩ in x, which is linear in u, and of its product with
e in u. So whatever can be differentiated twice can be asked, also where forward mode cannot go or errs.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from likewise.data import Samples
from likewise.engines.differentiable import differentiable_gradients
from likewise.engines.double_backward import THIRD_ORDER
from likewise.engines.factors import (
    DenseGradient,
    EmbeddingGradient,
    FactoredGradient,
    ParameterGradient,
    SharedGradient,
)
from likewise.model import Network


def gradient_tangents(net: Network, samples: Samples, direction: Tensor) -> Tensor:
    """Return ‖∂ₓ J(x) · e(x)‖² of each sample, (n,), differentiable in the model's parameters.

    Samples without a finite gradient are left out.
    """
    with torch.inference_mode(False):
        return _turning(net, samples, direction.clone())


def _turning(net: Network, samples: Samples, direction: Tensor) -> Tensor:
    x = samples.inputs.detach().clone().requires_grad_()
    base = differentiable_gradients(net, Samples(x, samples.labels, samples.ids), THIRD_ORDER)
    gradients = list(base.chunk.by_parameter.values())
    tensors = [tensor for gradient in gradients for tensor in _tensors(gradient)]
    moved = iter(_tangents(tensors, x, direction))
    turned = [_turned(gradient, moved) for gradient in gradients]
    norms = [gradient.self_gram().diagonal(dim1=1, dim2=2).sum(1) for gradient in turned]
    total = torch.stack(norms).sum(0)
    return total if base.finite is None else total[base.finite]


def _tensors(gradient: ParameterGradient) -> list[Tensor]:
    if isinstance(gradient, SharedGradient):
        return _tensors(gradient.matrix) + _tensors(gradient.table)
    if isinstance(gradient, FactoredGradient):
        return [gradient.inputs, gradient.deltas]
    assert isinstance(gradient, DenseGradient | EmbeddingGradient)
    return [gradient.gradients if isinstance(gradient, DenseGradient) else gradient.deltas]


def _tangents(tensors: list[Tensor], x: Tensor, direction: Tensor) -> list[Tensor]:
    """Return the derivative of each tensor as x moves along the direction."""
    depend = [tensor for tensor in tensors if tensor.requires_grad]
    dummies = [torch.zeros_like(tensor, requires_grad=True) for tensor in depend]
    zeros = {id(tensor): torch.zeros_like(tensor) for tensor in tensors}
    with torch.enable_grad():
        total = torch.stack([(t * u).sum() for t, u in zip(depend, dummies, strict=True)]).sum()
        (back,) = torch.autograd.grad(total, x, create_graph=True, allow_unused=True)
        if back is None or not back.requires_grad:
            return [zeros[id(tensor)] for tensor in tensors]
        derivatives = torch.autograd.grad(
            (back * direction).sum(), dummies, create_graph=True, allow_unused=True
        )
    known = {id(t): g for t, g in zip(depend, derivatives, strict=True) if g is not None}
    return [known.get(id(tensor), zeros[id(tensor)]) for tensor in tensors]


def _turned(gradient: ParameterGradient, moved: Iterator[Tensor]) -> ParameterGradient:
    """Return the derivative of a piece: of a product, both factors in turn, side by side."""
    if isinstance(gradient, SharedGradient):
        matrix, table = _turned(gradient.matrix, moved), _turned(gradient.table, moved)
        assert isinstance(matrix, FactoredGradient) and isinstance(table, EmbeddingGradient)
        return SharedGradient(matrix, table)
    if isinstance(gradient, FactoredGradient):
        inputs, deltas = next(moved), next(moved)
        both = torch.cat([gradient.inputs, inputs], 1), torch.cat([deltas, gradient.deltas], 2)
        return FactoredGradient(*both, gradient.inputs_first)
    if isinstance(gradient, EmbeddingGradient):
        return EmbeddingGradient(gradient.indices, next(moved), gradient.size)
    return DenseGradient(next(moved))
