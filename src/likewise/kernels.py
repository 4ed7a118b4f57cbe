"""The paper's kernels, as values.

A kernel is reduce( K(x,x)^left · K(x,x') · K(x',x')^right ), with K(x,x') = J(x) J(x')ᵀ the (d, d) block of inner
products of the gradients of d outputs. A reduction turns a block into one number, larger for more similar; on the
correlation block K^C each of ours is 1 for x' = x, if K(x,x) has full rank (else the trace is rank / d).

A reduction declares two properties. If it is linear in the block, products with the Gram matrix take two passes over
the data. If it gives the same number for a block and its transpose, a square matrix takes half the work.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from likewise.checks import check_function, check_number
from likewise.wording import counted

Reduction = Callable[[Tensor], Tensor]
R = TypeVar("R", bound=Reduction)


def reduction(*, linear: bool = False, symmetric: bool = False) -> Callable[[R], R]:
    """Declare the properties of a reduction of blocks, so that kernels with it can be computed faster.

    Args:
        linear: reduce(a A + b B) = a reduce(A) + b reduce(B): products of the Gram matrix take two passes.
        symmetric: reduce(Aᵀ) = reduce(A): each pair of a square matrix is formed once.

    Returns:
        A decorator that returns the function itself.

    Example:
        >>> import likewise as lw
        >>> @lw.reduction(linear=True)
        ... def first_output(blocks):
        ...     return blocks[..., 0, 0]
        >>> lw.Kernel(-0.5, -0.5, first_output).linear
        True

    """

    def declare(function: R) -> R:
        function.linear, function.symmetric = linear, symmetric  # type: ignore[attr-defined]
        return function

    return declare


@reduction(linear=True, symmetric=True)
def mean_diagonal(blocks: Tensor) -> Tensor:
    """Return tr B / d, in [-1, 1] on K^C; eq. 5. Linear in the block.

    Args:
        blocks: (..., d, d) blocks of a kernel.

    Returns:
        (...) one number for each block.

    Example:
        >>> import torch, likewise as lw
        >>> lw.mean_diagonal(torch.eye(2))
        tensor(1.)

    """
    return blocks.diagonal(dim1=-2, dim2=-1).mean(-1)


@reduction(symmetric=True)
def best_rotation(blocks: Tensor) -> Tensor:
    """Return max over rotations R of tr(B R) / d; for d = 2 it is ½ √(‖B‖² + 2 det B); sec. 3.

    Reflections are excluded: a mirrored pair of outputs does not count as alike.

    Args:
        blocks: (..., d, d) blocks of a kernel.

    Returns:
        (...) one number for each block.

    Example:
        >>> import torch, likewise as lw
        >>> lw.best_rotation(torch.tensor([[0.0, 1.0], [-1.0, 0.0]]))      # a quarter turn
        tensor(1.)

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


@reduction(symmetric=True)
def subspace_match(blocks: Tensor) -> Tensor:
    """Return ‖B‖² / d, in [0, 1] on K^C: 1 when the outputs at x and x' can only move jointly.

    Args:
        blocks: (..., d, d) blocks of a kernel.

    Returns:
        (...) one number for each block.

    Example:
        >>> import torch, likewise as lw
        >>> lw.subspace_match(torch.eye(2))
        tensor(1.)

    """
    return blocks.square().sum((-2, -1)) / blocks.shape[-1]


@reduction(symmetric=True)
def near_identity(blocks: Tensor) -> Tensor:
    """Return 1 − ‖B − Id‖² / 2d, which is tr B / d + ½ (1 − ‖B‖²/d); appendix.

    Args:
        blocks: (..., d, d) blocks of a kernel.

    Returns:
        (...) one number for each block.

    Example:
        >>> import torch, likewise as lw
        >>> lw.near_identity(torch.eye(2))
        tensor(1.)

    """
    return 1 - _distance_to_identity(blocks).square() / (2 * blocks.shape[-1])


@reduction(symmetric=True)
def identity_distance(blocks: Tensor) -> Tensor:
    """Return 1 − ‖B − Id‖ / √d, the distance to the identity as a similarity; appendix.

    Args:
        blocks: (..., d, d) blocks of a kernel.

    Returns:
        (...) one number for each block.

    Example:
        >>> import torch, likewise as lw
        >>> lw.identity_distance(torch.eye(2))
        tensor(1.)

    """
    return 1 - _distance_to_identity(blocks) / blocks.shape[-1] ** 0.5


@reduction(linear=True, symmetric=True)
def whole_block(blocks: Tensor) -> Tensor:
    """Return the (d, d) block itself; the block of (x', x) is its transpose.

    Args:
        blocks: (..., d, d) blocks of a kernel.

    Returns:
        (..., d, d) the blocks.

    Example:
        >>> import torch, likewise as lw
        >>> kernel = lw.Kernel(-0.5, -0.5, lw.whole_block)
        >>> lw.GramMatrix(torch.nn.Linear(4, 2), torch.randn(5, 4), kernel=kernel).dense().shape
        torch.Size([5, 5, 2, 2])

    """
    return blocks


def _distance_to_identity(blocks: Tensor) -> Tensor:
    d = blocks.shape[-1]
    return (blocks - torch.eye(d).to(blocks)).square().sum((-2, -1)).sqrt()


@dataclass(frozen=True)
class Kernel:
    """reduce( K(x,x)^left_power · K(x,x') · K(x',x')^right_power ).

    Args:
        left_power: Power of the row's own kernel K(x,x); -½ normalizes.
        right_power: Power of the column's own kernel K(x',x').
        reduce: Turns blocks (..., d, d) into numbers (...); declare the properties of your own with `reduction`.

    Example:
        >>> import torch, likewise as lw
        >>> kernel = lw.Kernel(-0.5, -0.5)      # k^C
        >>> kernel, kernel == lw.CORRELATION
        (Kernel(-0.5, -0.5, mean_diagonal), True)

    """

    left_power: float
    right_power: float
    reduce: Reduction = mean_diagonal

    def __post_init__(self) -> None:
        for name in ("left_power", "right_power"):
            advice = "an exponent such as 0, -0.5 or -1"
            object.__setattr__(self, name, check_number(name, getattr(self, name), advice=advice))
        check_function("reduce", self.reduce, "of blocks (..., d, d)", "such as likewise.mean_diagonal")

    def __repr__(self) -> str:
        name = getattr(self.reduce, "__name__", self.reduce)
        return f"Kernel({self.left_power:g}, {self.right_power:g}, {name})"

    @property
    def linear(self) -> bool:
        """Whether the reduction is linear in the block: products take two passes."""
        return bool(getattr(self.reduce, "linear", False))

    @property
    def symmetric(self) -> bool:
        """Whether k(x', x) follows from k(x, x')."""
        return self.left_power == self.right_power and bool(getattr(self.reduce, "symmetric", False))

    @property
    def bounded(self) -> bool:
        """Whether gradients are normalized on both sides, so that similarities are at most 1."""
        return self.left_power == self.right_power == -0.5

    @property
    def keeps_blocks(self) -> bool:
        """Whether k(x, x') is a (d, d) block instead of a number."""
        return self.reduce is whole_block

    def coefficients(self, d: int) -> Tensor:
        """Return A, (d, d) in float64, with reduce(B) = Σ A ∘ B, for a linear reduction to one number."""
        if self.reduce is mean_diagonal:
            return torch.eye(d, dtype=torch.float64) / d
        unit = torch.eye(d * d, dtype=torch.float64).view(d * d, d, d)
        return self.reduce(unit).reshape(d, d)


INNER_PRODUCT = Kernel(0, 0)
"""k^I, the inner product of gradients, not normalized; eq. 1.

Example:
    >>> import torch, likewise as lw
    >>> net, x = torch.nn.Linear(4, 2), torch.randn(5, 4)
    >>> bool((lw.similarity(net, x, kernel=lw.INNER_PRODUCT).diagonal() > 0).all())
    True

"""

INFLUENCE = Kernel(0, -1)
"""k^N: a move v of f(x') by the smallest change of parameters moves f(x) by k^N v; sec. 2, Theorem 3.

Example:
    >>> import torch, likewise as lw
    >>> net, x = torch.nn.Linear(4, 2), torch.randn(5, 4)
    >>> lw.GramMatrix(net, x, kernel=lw.INFLUENCE).dense().diagonal().round(decimals=3)
    tensor([1., 1., 1., 1., 1.])

"""

CORRELATION = Kernel(-0.5, -0.5)
"""k^C, the default: at most 1, and 1 for x' = x; eq. 2, 4, 5.

Example:
    >>> import torch, likewise as lw
    >>> net, x = torch.nn.Linear(4, 2), torch.randn(5, 4)
    >>> lw.similarity(net, x, kernel=lw.CORRELATION).diagonal().round(decimals=3)
    tensor([1., 1., 1., 1., 1.])

"""

ROTATION_INVARIANT = Kernel(-0.5, -0.5, best_rotation)
"""The best over rotations of the outputs: for outputs whose direction does not matter; sec. 3.

Example:
    >>> import torch, likewise as lw
    >>> net, x = torch.nn.Linear(4, 2), torch.randn(5, 4)
    >>> lw.similarity(net, x, kernel=lw.ROTATION_INVARIANT).diagonal().round(decimals=3)
    tensor([1., 1., 1., 1., 1.])

"""

SUBSPACE_MATCH = Kernel(-0.5, -0.5, subspace_match)
"""Whether the outputs at x and x' can only move jointly, in whatever direction; appendix.

Example:
    >>> import torch, likewise as lw
    >>> net, x = torch.nn.Linear(4, 2), torch.randn(5, 4)
    >>> lw.similarity(net, x, kernel=lw.SUBSPACE_MATCH).diagonal().round(decimals=3)
    tensor([1., 1., 1., 1., 1.])

"""

NEAR_IDENTITY = Kernel(-0.5, -0.5, near_identity)
"""1 − ‖K^C − Id‖² / 2d; appendix.

Example:
    >>> import torch, likewise as lw
    >>> net, x = torch.nn.Linear(4, 2), torch.randn(5, 4)
    >>> lw.similarity(net, x, kernel=lw.NEAR_IDENTITY).diagonal().round(decimals=3)
    tensor([1., 1., 1., 1., 1.])

"""

IDENTITY_DISTANCE = Kernel(-0.5, -0.5, identity_distance)
"""1 − ‖K^C − Id‖ / √d; appendix.

Example:
    >>> import torch, likewise as lw
    >>> net, x = torch.nn.Linear(4, 2), torch.randn(5, 4)
    >>> lw.similarity(net, x, kernel=lw.IDENTITY_DISTANCE).diagonal().round(decimals=3)
    tensor([1., 1., 1., 1., 1.])

"""

# Reductions that are finite for finite blocks, unless they overflow.
FINITE_REDUCTIONS = (
    mean_diagonal,
    whole_block,
    best_rotation,
    subspace_match,
    near_identity,
    identity_distance,
)


def refuse_out_of_range(values: Tensor, ids: Tensor, kernel: Kernel) -> None:
    """Raise if values of the kernel, (n, ...) for samples with these ids, are infinite or NaN."""
    finite = values.reshape(len(values), -1).isfinite().all(1)
    if not finite.all():
        bad = ids[~finite.to(ids.device)]
        raise ValueError(
            f"Values of {kernel} are out of the range of {values.dtype} (largest number "
            f"{torch.finfo(values.dtype).max:.1e}) for {counted(len(bad), 'sample')}, the first with ids "
            f"{bad[:5].tolist()}: scale inputs or outputs down, use a normalized kernel such as "
            "likewise.CORRELATION, or a model in float64 (model.double())."
        )
