"""How fast does a sample's gradient turn as the sample moves? ∂ₓ J(x) · e, from factors alone.

A tangent is taken by two backward passes: of Σ ⟨T, u⟩ in x, which is linear in u, and of its product with
e in u. So whatever can be differentiated twice can be asked, also where forward mode cannot go or errs.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from likewise.data import Samples
from likewise.engines.differentiable import differentiable_gradients
from likewise.engines.double_backward import THRICE
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
    found = differentiable_gradients(net, Samples(x, samples.labels, samples.ids), THRICE)
    pieces = list(found.chunk.pieces.values())
    tensors = [tensor for piece in pieces for tensor in _tensors(piece)]
    moved = iter(_tangents(tensors, x, direction))
    turned = [_turned(piece, moved) for piece in pieces]
    norms = [piece.own().diagonal(dim1=1, dim2=2).sum(1) for piece in turned]
    total = torch.stack(norms).sum(0)
    return total if found.finite is None else total[found.finite]


def _tensors(piece: ParameterGradient) -> list[Tensor]:
    if isinstance(piece, SharedGradient):
        return _tensors(piece.matrix) + _tensors(piece.table)
    if isinstance(piece, FactoredGradient):
        return [piece.inputs, piece.deltas]
    assert isinstance(piece, DenseGradient | EmbeddingGradient)
    return [piece.gradients if isinstance(piece, DenseGradient) else piece.deltas]


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
        found = torch.autograd.grad((back * direction).sum(), dummies, create_graph=True, allow_unused=True)
    known = {id(t): g for t, g in zip(depend, found, strict=True) if g is not None}
    return [known.get(id(tensor), zeros[id(tensor)]) for tensor in tensors]


def _turned(piece: ParameterGradient, moved: Iterator[Tensor]) -> ParameterGradient:
    """Return the derivative of a piece: of a product, both factors in turn, side by side."""
    if isinstance(piece, SharedGradient):
        matrix, table = _turned(piece.matrix, moved), _turned(piece.table, moved)
        assert isinstance(matrix, FactoredGradient) and isinstance(table, EmbeddingGradient)
        return SharedGradient(matrix, table)
    if isinstance(piece, FactoredGradient):
        inputs, deltas = next(moved), next(moved)
        both = torch.cat([piece.inputs, inputs], 1), torch.cat([deltas, piece.deltas], 2)
        return FactoredGradient(*both, piece.inputs_first)
    if isinstance(piece, EmbeddingGradient):
        return EmbeddingGradient(piece.indices, next(moved), piece.size)
    return DenseGradient(next(moved))
