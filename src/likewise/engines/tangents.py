"""Derivatives of per-sample gradients along an input direction: ∂ₓ J(x) · e, from factors alone.

A tangent takes two backward passes: of Σ ⟨T, u⟩ with respect to x, which is linear in u, and of its product with e
with respect to u. This works for everything that can be differentiated twice, also where forward mode is missing or
wrong.
"""

import torch
from torch import Tensor

from likewise.data import Samples
from likewise.engines.differentiable import differentiable_gradients
from likewise.engines.double_backward import THIRD_ORDER
from likewise.model import Network


def gradient_tangents(net: Network, samples: Samples, direction: Tensor) -> Tensor:
    """Return ‖∂ₓ J(x) · e(x)‖² of each sample, (n,), differentiable in the model's parameters.

    Samples without a finite gradient are left out.
    """
    with torch.inference_mode(False):
        return _squared_norms(net, samples, direction.clone())


def _squared_norms(net: Network, samples: Samples, direction: Tensor) -> Tensor:
    x = samples.inputs.detach().clone().requires_grad_()
    base = differentiable_gradients(net, Samples(x, samples.labels, samples.ids), THIRD_ORDER)
    gradients = list(base.chunk.by_parameter.values())
    tensors = [tensor for gradient in gradients for tensor in gradient.tensors]
    derivatives = iter(_tangents(tensors, x, direction))
    tangents = [gradient.tangent(derivatives) for gradient in gradients]
    norms = [gradient.self_gram().diagonal(dim1=1, dim2=2).sum(1) for gradient in tangents]
    total = torch.stack(norms).sum(0)
    return total if base.finite is None else total[base.finite]


def _tangents(tensors: list[Tensor], x: Tensor, direction: Tensor) -> list[Tensor]:
    """Return the derivative of each tensor along the direction in x."""
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
