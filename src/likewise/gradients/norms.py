"""Norms whose higher derivatives are right.

PyTorch's own third derivatives of layer_norm and instance_norm are wrong, and the second ones of
instance_norm under vmap, without a word (torch 2.13; `tests/gradients/test_norms.py` tells when that ends).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


def _layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    hat = _standardized(input, tuple(range(-len(tuple(normalized_shape)), 0)), eps)
    hat = hat if weight is None else hat * weight
    return hat if bias is None else hat + bias


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not use_input_stats:
        return F.instance_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    hat, shape = _standardized(input, tuple(range(2, input.dim())), eps), (-1, *[1] * (input.dim() - 2))
    hat = hat if weight is None else hat * weight.view(shape)
    return hat if bias is None else hat + bias.view(shape)


def _standardized(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    centered = x - x.mean(dims, keepdim=True)
    return centered * (centered.square().mean(dims, keepdim=True) + eps).rsqrt()


def _torch_instance_norm(
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
    return _instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


def _torch_layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    return _layer_norm(input, normalized_shape, weight, bias, eps)


Instead = dict[Callable[..., Any], Callable[..., Any]]  # what to call in the place of what
TWICE: Instead = {  # for second derivatives, which are wrong under vmap where there is no rule
    F.instance_norm: _instance_norm,
    torch.instance_norm: _torch_instance_norm,
    torch.layer_norm: _torch_layer_norm,
}
THRICE: Instead = {**TWICE, F.layer_norm: _layer_norm}  # for third ones


class Substituting(TorchFunctionMode):
    """Calls something else in the place of some functions."""

    def __init__(self, instead: Instead) -> None:
        super().__init__()
        self._instead = instead

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._instead.get(func, func)(*args, **(kwargs or {}))
