"""The paper's kernels, as values.

A kernel is reduce( K(x,x)^row · K(x,x') · K(x',x')^column ), with K(x,x') = J(x) J(x')ᵀ the (d, d)
block of inner products of the gradients of d outputs. A reduction turns a block into one number,
larger for more similar; on the correlation block K^C each of them is 1 for x' = x, if K(x,x) has full
rank (else the trace is rank / d).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from likewise.checks import check_function, check_number

Reduction = Callable[[Tensor], Tensor]


def mean_diagonal(blocks: Tensor) -> Tensor:
    """Return tr B / d, in [-1, 1] on K^C; eq. 5. The only reduction that is linear in the block."""
    return blocks.diagonal(dim1=-2, dim2=-1).mean(-1)


def best_rotation(blocks: Tensor) -> Tensor:
    """Return max over rotations R of tr(B R) / d; for d = 2 it is ½ √(‖B‖² + 2 det B); sec. 3.

    Rotations, not reflections: a mirrored pair of outputs does not count as alike.
    """
    d = blocks.shape[-1]
    if d == 1:
        return blocks[..., 0, 0]
    if d == 2:
        turn = blocks[..., 0, 1] - blocks[..., 1, 0]
        return torch.hypot(blocks.diagonal(dim1=-2, dim2=-1).sum(-1), turn) / 2
    values = torch.linalg.svdvals(blocks)
    mirrored = torch.linalg.det(blocks) < 0
    return (values.sum(-1) - 2 * values[..., -1] * mirrored) / d


def subspace_match(blocks: Tensor) -> Tensor:
    """Return ‖B‖² / d, in [0, 1] on K^C: 1 when the outputs at x and x' can only move jointly."""
    return blocks.square().sum((-2, -1)) / blocks.shape[-1]


def near_identity(blocks: Tensor) -> Tensor:
    """Return 1 − ‖B − Id‖² / 2d, which is tr B / d + ½ (1 − ‖B‖²/d); appendix."""
    return 1 - _distance_to_identity(blocks).square() / (2 * blocks.shape[-1])


def identity_distance(blocks: Tensor) -> Tensor:
    """Return 1 − ‖B − Id‖ / √d, the distance to the identity as a similarity; appendix."""
    return 1 - _distance_to_identity(blocks) / blocks.shape[-1] ** 0.5


def whole_block(blocks: Tensor) -> Tensor:
    """Return the (d, d) block itself."""
    return blocks


def _distance_to_identity(blocks: Tensor) -> Tensor:
    d = blocks.shape[-1]
    return (blocks - torch.eye(d).to(blocks)).square().sum((-2, -1)).sqrt()


@dataclass(frozen=True)
class Kernel:
    """reduce( K(x,x)^row · K(x,x') · K(x',x')^column )."""

    row: float
    column: float
    reduce: Reduction = mean_diagonal

    def __post_init__(self) -> None:
        for name in ("row", "column"):
            advice = "an exponent such as 0, -0.5 or -1"
            object.__setattr__(self, name, check_number(name, getattr(self, name), advice=advice))
        check_function("reduce", self.reduce, "of blocks (..., d, d)", "such as likewise.mean_diagonal")

    def __repr__(self) -> str:
        return f"Kernel({self.row:g}, {self.column:g}, {getattr(self.reduce, '__name__', self.reduce)})"


INNER_PRODUCT = Kernel(0, 0)  # k^I, eq. 1
INFLUENCE = Kernel(0, -1)  # k^N: a move v of f(x') moves f(x) by k^N v; sec. 2, Theorem 3
CORRELATION = Kernel(-0.5, -0.5)  # k^C, eq. 2, 4, 5
ROTATION_INVARIANT = Kernel(-0.5, -0.5, best_rotation)  # sec. 3
SUBSPACE_MATCH = Kernel(-0.5, -0.5, subspace_match)  # appendix
NEAR_IDENTITY = Kernel(-0.5, -0.5, near_identity)  # appendix
IDENTITY_DISTANCE = Kernel(-0.5, -0.5, identity_distance)  # appendix
# Reductions that are the same of K(x, x') and of its transpose K(x', x); whole blocks are transposed with it.
SYMMETRIC = (mean_diagonal, whole_block, best_rotation, subspace_match, near_identity, identity_distance)
