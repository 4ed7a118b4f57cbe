"""Functions with correct higher derivatives: norms, convolutions, and bags of embeddings.

PyTorch's third derivatives of layer_norm and instance_norm are silently wrong, and so are second derivatives of
instance_norm under vmap (torch 2.13; `tests/engines/test_factors.py` fails once that is fixed). It has no second
derivative of embedding_bag.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from likewise.engines.convolution import ConvolutionOptions, bind_convolution, convolution_arguments


def layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Return F.layer_norm."""
    hat = _standardize(input, tuple(range(-len(tuple(normalized_shape)), 0)), eps)
    hat = hat if weight is None else hat * weight
    return hat if bias is None else hat + bias


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Return F.instance_norm."""
    if not use_input_stats:
        return F.instance_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    hat, shape = _standardize(input, tuple(range(2, input.dim())), eps), (-1, *[1] * (input.dim() - 2))
    hat = hat if weight is None else hat * weight.view(shape)
    return hat if bias is None else hat + bias.view(shape)


def _standardize(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    centered = x - x.mean(dims, keepdim=True)
    return centered * (centered.square().mean(dims, keepdim=True) + eps).rsqrt()


def torch_instance_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """Return torch.instance_norm."""
    return instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


def torch_layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """Return torch.layer_norm."""
    return layer_norm(input, normalized_shape, weight, bias, eps)


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Return F.embedding_bag; of bags of one length, in a way that can be differentiated twice."""
    if input.dim() != 2 or mode == "max" or max_norm is not None or scale_grad_by_freq:
        return F.embedding_bag(
            input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights,
            include_last_offset, padding_idx,
        )  # fmt: skip
    rows = F.embedding(input, weight)
    counted = torch.ones_like(rows[..., 0])
    if padding_idx is not None:
        counted = (input != padding_idx % len(weight)).to(rows)
    shares = counted if per_sample_weights is None else counted * per_sample_weights
    total = (rows * shares.unsqueeze(2)).sum(1)
    return total / counted.sum(1, keepdim=True).clamp(min=1) if mode == "mean" else total


_backward = torch.ops.aten.convolution_backward


class _Outputs(torch.autograd.Function):
    """x * w + b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, options: ConvolutionOptions) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.options = options
        return torch.ops.aten.convolution(x, w, b, *options)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        (x, w), (g,), needed = ctx.saved_tensors, grad_outputs, ctx.needs_input_grad
        return (
            _ForInputs.apply(g, w, x.detach(), ctx.options) if needed[0] else None,
            _ForKernel.apply(x, g, w.detach(), ctx.options) if needed[1] else None,
            g.sum([0, *range(2, g.dim())]) if needed[2] else None,
            None,
        )


class _ForInputs(torch.autograd.Function):
    """The gradient in the inputs, for output gradients g; `like`: inputs of that shape."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, w: Tensor, like: Tensor, options: ConvolutionOptions) -> Tensor:
        ctx.save_for_backward(g, w)
        ctx.options = options
        return _backward(g, like, w, None, *options, [True, False, False])[0]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        (g, w), (x,), needed = ctx.saved_tensors, grad_outputs, ctx.needs_input_grad
        return (
            _Outputs.apply(x, w, None, ctx.options) if needed[0] else None,
            _ForKernel.apply(x, g, w.detach(), ctx.options) if needed[1] else None,
            None,
            None,
        )


class _ForKernel(torch.autograd.Function):
    """The gradient in the kernel, summed over samples; `like`: a kernel of that shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, g: Tensor, like: Tensor, options: ConvolutionOptions) -> Tensor:
        ctx.save_for_backward(x, g)
        ctx.options = options
        return _backward(g, x, like, None, *options, [False, True, False])[1]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        (x, g), (w,), needed = ctx.saved_tensors, grad_outputs, ctx.needs_input_grad
        return (
            _ForInputs.apply(g, w, x.detach(), ctx.options) if needed[0] else None,
            _Outputs.apply(x, w, None, ctx.options) if needed[1] else None,
            None,
            None,
        )


def _replace_convolution(dims: int, transposed: bool) -> Callable[..., Tensor]:
    original, names = getattr(F, _name(dims, transposed)), convolution_arguments(transposed)

    def convolve(*args: Any, **kwargs: Any) -> Tensor:
        a = {**dict(zip(names, args, strict=False)), **kwargs}
        x, weight = a["input"], a["weight"]
        if x.dim() != dims + 2 or isinstance(a.get("padding"), str) or _is_special(x, weight):
            outputs: Tensor = original(*args, **kwargs)
            return outputs
        x, options = bind_convolution(x, weight, a, dims, transposed)
        return _Outputs.apply(x, weight, a.get("bias"), options)

    return convolve


def _is_special(x: Tensor, weight: Tensor) -> bool:
    """Whether to call the original: under functorch transforms or autocast, or with complex numbers."""
    transformed = torch._C._are_functorch_transforms_active()
    return bool(
        transformed or x.is_complex() or weight.is_complex() or torch.is_autocast_enabled(x.device.type)
    )


def _name(dims: int, transposed: bool) -> str:
    return f"conv_transpose{dims}d" if transposed else f"conv{dims}d"


CONVOLUTIONS = {
    getattr(F, _name(dims, transposed)): _replace_convolution(dims, transposed)
    for dims in (1, 2, 3)
    for transposed in (False, True)
}


Substitutes = dict[Callable[..., Any], Callable[..., Any]]
SECOND_ORDER: Substitutes = {  # for second derivatives, which are wrong under vmap where there is no rule
    F.instance_norm: instance_norm,
    torch.instance_norm: torch_instance_norm,
    torch.layer_norm: torch_layer_norm,
    F.embedding_bag: embedding_bag,
    **CONVOLUTIONS,
}
THIRD_ORDER: Substitutes = {**SECOND_ORDER, F.layer_norm: layer_norm}  # for third ones


class FunctionSubstitution(TorchFunctionMode):
    """Replaces some functions while active."""

    def __init__(self, substitutes: Substitutes) -> None:
        super().__init__()
        self._substitutes = substitutes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._substitutes.get(func, func)(*args, **(kwargs or {}))
