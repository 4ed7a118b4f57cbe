"""Norms whose higher derivatives are right.

PyTorch's own third derivatives of layer_norm and instance_norm are wrong, and the second ones of
instance_norm under vmap, without a word (torch 2.13; `tests/gradients/test_norms.py` tells when that ends).
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor


def layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Return F.layer_norm."""
    hat = _standardized(input, tuple(range(-len(tuple(normalized_shape)), 0)), eps)
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
    hat, shape = _standardized(input, tuple(range(2, input.dim())), eps), (-1, *[1] * (input.dim() - 2))
    hat = hat if weight is None else hat * weight.view(shape)
    return hat if bias is None else hat + bias.view(shape)


def _standardized(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
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
