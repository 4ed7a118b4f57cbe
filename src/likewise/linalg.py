"""Powers of small symmetric matrices, with their null directions kept null.

A self-kernel K(x, x) = J Jᵀ is singular whenever the outputs cannot move independently (softmax
outputs always sum to one), and zero when no parameter moves them (a dead ReLU). Eigenvalues under
`floor` times the largest are null: they stay null in every power, and the rank found is returned.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Power(NamedTuple):
    """A power of symmetric matrices, and how many directions of each are not null."""

    matrix: Tensor  # (..., d, d)
    rank: Tensor  # (...,) integers


def power(symmetric: Tensor, exponent: float, floor: float, scale: Tensor | None = None) -> Power:
    """Return Aᵉ on the range of A, zero elsewhere, for each A of (..., d, d) positive matrices.

    `scale`, (...,): what the floor is relative to, if larger than A: the size of what was
    subtracted to get A, whose rounding A inherits.
    """
    if symmetric.shape[-1] == 1:  # no need of eigenvectors
        values, vectors = symmetric[..., 0], symmetric.new_ones(()).expand(symmetric.shape)
    else:
        values, vectors = torch.linalg.eigh((symmetric + symmetric.mT) / 2)
    largest = values[..., -1] if scale is None else torch.maximum(values[..., -1], scale)
    least = (largest * floor).clamp(min=torch.finfo(values.dtype).tiny)
    alive = values > least[..., None]
    if exponent == 1:
        return Power(symmetric, alive.sum(-1))
    powers = torch.where(alive, values, 1).pow(exponent) * alive
    return Power((vectors * powers[..., None, :]) @ vectors.mT, alive.sum(-1))


def rank_floor(dtype: torch.dtype) -> float:
    """Return the relative floor of eigenvalues of J Jᵀ when J was computed in `dtype`.

    An error of 16 units of rounding in J shows as its square in J Jᵀ.
    """
    return max((16 * torch.finfo(dtype).eps) ** 2, 1e-12)


def wide(tensor: Tensor) -> torch.dtype:
    """Return the precision to add up in: float64 wherever the device has it."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64
