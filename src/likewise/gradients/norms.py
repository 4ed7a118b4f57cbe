"""Norms whose higher derivatives are right.

PyTorch's own third derivatives of layer_norm and instance_norm are wrong, and the second ones of
instance_norm under vmap, without a word (torch 2.13; `tests/gradients/test_norms.py` tells when that ends).
"""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor


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


Instead = dict[Callable[..., Any], Callable[..., Any]]  # what to call in the place of what
TWICE: Instead = {F.instance_norm: _instance_norm}  # for second derivatives
THRICE: Instead = {**TWICE, F.layer_norm: _layer_norm}  # for third ones
