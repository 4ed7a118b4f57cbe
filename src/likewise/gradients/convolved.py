"""Convolutions that can be differentiated again and again at the cost of convolutions.

⟨x * w, g⟩ is linear in inputs, kernel and output gradient, and its derivatives are three operations that
every library does well: the convolution, and its gradients in the inputs and in the kernel. The derivative
of each is made of the other two. PyTorch's own second derivatives call convolutions with kernels as large as
images, which GPU libraries are not made for.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from likewise.gradients.convolution import Convolving, arguments_of, convolving

_backward = torch.ops.aten.convolution_backward


class _Outputs(torch.autograd.Function):
    """x * w + b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, how: Convolving) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.how = how
        return torch.ops.aten.convolution(x, w, b, *how)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Tensor | None, ...]:
        (x, w), (g,), needed = ctx.saved_tensors, given, ctx.needs_input_grad
        return (
            _ForInputs.apply(g, w, x.detach(), ctx.how) if needed[0] else None,
            _ForKernel.apply(x, g, w.detach(), ctx.how) if needed[1] else None,
            g.sum([0, *range(2, g.dim())]) if needed[2] else None,
            None,
        )


class _ForInputs(torch.autograd.Function):
    """The gradient in the inputs, for output gradients g; `like`: inputs of that shape."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, w: Tensor, like: Tensor, how: Convolving) -> Tensor:
        ctx.save_for_backward(g, w)
        ctx.how = how
        return _backward(g, like, w, None, *how, [True, False, False])[0]

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Tensor | None, ...]:
        (g, w), (x,), needed = ctx.saved_tensors, given, ctx.needs_input_grad
        return (
            _Outputs.apply(x, w, None, ctx.how) if needed[0] else None,
            _ForKernel.apply(x, g, w.detach(), ctx.how) if needed[1] else None,
            None,
            None,
        )


class _ForKernel(torch.autograd.Function):
    """The gradient in the kernel, summed over samples; `like`: a kernel of that shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, g: Tensor, like: Tensor, how: Convolving) -> Tensor:
        ctx.save_for_backward(x, g)
        ctx.how = how
        return _backward(g, x, like, None, *how, [False, True, False])[1]

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Tensor | None, ...]:
        (x, g), (w,), needed = ctx.saved_tensors, given, ctx.needs_input_grad
        return (
            _ForInputs.apply(g, w, x.detach(), ctx.how) if needed[0] else None,
            _Outputs.apply(x, w, None, ctx.how) if needed[1] else None,
            None,
            None,
        )


def _convolved(dims: int, transposed: bool) -> Callable[..., Tensor]:
    original, names = getattr(F, _name(dims, transposed)), arguments_of(transposed)

    def convolved(*args: Any, **kwargs: Any) -> Tensor:
        a = {**dict(zip(names, args, strict=False)), **kwargs}
        x, weight = a["input"], a["weight"]
        if x.dim() != dims + 2 or isinstance(a.get("padding"), str) or _is_special(x, weight):
            found: Tensor = original(*args, **kwargs)
            return found
        x, how = convolving(x, weight, a, dims, transposed)
        return _Outputs.apply(x, weight, a.get("bias"), how)

    return convolved


def _is_special(x: Tensor, weight: Tensor) -> bool:
    """Whether something stands between us and the numbers: vmap and its kin, autocast, complex numbers."""
    transformed = torch._C._are_functorch_transforms_active()
    return bool(
        transformed or x.is_complex() or weight.is_complex() or torch.is_autocast_enabled(x.device.type)
    )


def _name(dims: int, transposed: bool) -> str:
    return f"conv_transpose{dims}d" if transposed else f"conv{dims}d"


CONVOLUTIONS = {
    getattr(F, _name(dims, transposed)): _convolved(dims, transposed)
    for dims in (1, 2, 3)
    for transposed in (False, True)
}
