"""Powers of small symmetric matrices on their range, and accurate products of long vectors.

A self-kernel K(x, x) = J Jᵀ is singular whenever the outputs cannot move independently (softmax
outputs always sum to one), and zero when no parameter moves them (a dead ReLU). Eigenvalues under
`floor` times the largest are null: they stay null in every power, and the rank is returned.
"""

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Power(NamedTuple):
    """A power of symmetric matrices, and how many directions of each are not null."""

    matrix: Tensor  # (..., d, d)
    rank: Tensor  # (...,) integers


def matrix_power(symmetric: Tensor, exponent: float, floor: float, scale: Tensor | None = None) -> Power:
    """Return Aᵉ on the range of A, zero elsewhere, for each A of (..., d, d) positive matrices.

    `scale`, (...,): what the floor is relative to, if larger than A: the size of what was
    subtracted to get A, whose rounding A inherits. Of A that is not finite, Aᵉ is NaN and the rank 0.
    """
    if symmetric.shape[-1] == 1:  # no need of eigenvectors
        values, vectors = symmetric[..., 0], symmetric.new_ones(()).expand(symmetric.shape)
    else:
        finite = symmetric.isfinite().all(-1).all(-1)[..., None, None]
        clean = torch.where(finite, (symmetric + symmetric.mT) / 2, 0)  # eigh would raise an error for all
        values, vectors = torch.linalg.eigh(clean)
        vectors = torch.where(finite, vectors, torch.nan)
    largest = values[..., -1] if scale is None else torch.maximum(values[..., -1], scale)
    least = (largest * floor).clamp(min=torch.finfo(values.dtype).tiny)
    alive = values > least[..., None]
    if exponent == 1:
        return Power(symmetric, alive.sum(-1))
    powers = torch.where(alive, values, 1).pow(exponent) * alive
    return Power((vectors * powers[..., None, :]) @ vectors.mT, alive.sum(-1))


def inverse_root(symmetric: Tensor, floor: float) -> Power:
    """Return A^-½ like `matrix_power`, differentiable in A also where eigenvalues coincide."""
    if symmetric.shape[-1] > 1:
        return Power(*_InverseRoot.apply(symmetric, floor))
    alive = symmetric.detach() > torch.finfo(symmetric.dtype).tiny
    return Power(torch.where(alive, symmetric, 1).rsqrt() * alive, alive[..., 0, 0].long())


class _InverseRoot(torch.autograd.Function):
    """A^-½ with its derivative by divided differences: V (F ∘ Vᵀ E V) Vᵀ, F_ij = Δf / Δλ."""

    @staticmethod
    def forward(ctx: Any, symmetric: Tensor, floor: float) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh((symmetric + symmetric.mT) / 2)
        least = (values[..., -1:] * floor).clamp(min=torch.finfo(values.dtype).tiny)
        alive = values > least
        roots = torch.where(alive, values, 1).rsqrt() * alive
        ctx.save_for_backward(vectors, roots, alive)
        ctx.mark_non_differentiable(rank := alive.sum(-1))
        return (vectors * roots[..., None, :]) @ vectors.mT, rank

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        vectors, r, alive = ctx.saved_tensors
        # of λ^-½ with r = λ^-½: (rᵢ − rⱼ) / (λᵢ − λⱼ) = − rᵢ² rⱼ² / (rᵢ + rⱼ), without a difference
        a, b = r[..., :, None], r[..., None, :]
        both = alive[..., :, None] & alive[..., None, :]
        slopes = torch.where(both, -(a * b).square() / torch.where(both, a + b, 1), 0)
        one = alive[..., :, None] ^ alive[..., None, :]  # the null direction stays null: f = 0, λ = 0 there
        slopes = torch.where(one, (a + b) ** 3, slopes)
        inner = vectors.mT @ gradients[0] @ vectors
        return vectors @ (slopes * (inner + inner.mT) / 2) @ vectors.mT, None


def rank_floor(dtype: torch.dtype) -> float:
    """Return the relative floor of eigenvalues of J Jᵀ when J was computed in `dtype`.

    An error of 16 units of rounding in J shows as its square in J Jᵀ.
    """
    return max((16 * torch.finfo(dtype).eps) ** 2, 1e-12)


# Longest float32 sums of products. In one product of 4 rows of 10⁷ numbers a CPU is off by 2e-3, in one of
# 4096 rows of 10⁵ a GPU by 3e-5. Rounding is worst where all terms are equal: 5e-6 in runs of 2¹¹ that are
# summed in order. With 16 rows or more, a CPU sums in short blocks of its own: 3e-6 at any length up to 2¹⁵.
SHORT_RUN, LONG_RUN, FEW_ROWS = 2**11, 2**14, 16
WIDENED = 2**18  # numbers of which a CPU takes copies in float64 at once
BATCHED_CELLS = 2**22  # of the results of runs that are taken in one call


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a bᵀ over the last dimension, (..., n, p) and (..., m, p) -> (..., n, m), in float64.

    Short runs are multiplied in the given type and their results added in float64: as fast as one long
    product, without its rounding error, which grows with p.
    """
    return split_product(a, b).to(accumulation_dtype(a))


def columns_in_cache(rows: Tensor) -> int:
    """Return how many columns of (..., p) to copy in float64 at once: on a CPU, parts that stay in its cache."""
    p, count = rows.shape[-1], prod(rows.shape[:-1])
    few = rows.device.type == "cpu" and 0 < count <= WIDENED // 512
    return max(1, WIDENED // count, p // 256) if few else max(1, p)


def split_product(a: Tensor, b: Tensor) -> Tensor:
    """Return `product`, but in the given type where p is one run: for results that are added elsewhere."""
    p, matrices = a.shape[-1], a.dim() == b.dim() == 2
    many_rows = a.device.type == "cpu" and min(a.shape[-2], b.shape[-2]) >= FEW_ROWS
    run = LONG_RUN if many_rows or not matrices else SHORT_RUN
    if p <= run or a.dtype == accumulation_dtype(a):
        return a @ b.mT
    if matrices:
        return _batched_product(a, b, run)
    return _product_of_stacks(a, b, run)


def _product_of_stacks(a: Tensor, b: Tensor, run: int) -> Tensor:
    """Return the products of (..., n, p) and (..., m, p): runs are further matrices of the stack, in few calls."""
    p, wide = a.shape[-1], accumulation_dtype(a)
    count = -(-p // run)
    length = next((p // parts for parts in range(count, 2 * count + 1) if p % parts == 0), run)
    whole = p - p % length
    stack, total = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), None
    per_call = length * max(1, BATCHED_CELLS // max(1, prod(stack) * a.shape[-2] * b.shape[-2]))
    for start in range(0, whole, per_call):
        here = slice(start, min(start + per_call, whole))
        left, right = (t[..., here].unflatten(-1, (-1, length)).transpose(-3, -2) for t in (a, b))
        term = (left @ right.mT).sum(-3, dtype=wide)
        total = term if total is None else total.add_(term)
    assert total is not None  # there is a run at least
    if whole < p:
        total += a[..., whole:] @ b[..., whole:].mT
    return total


def _batched_product(a: Tensor, b: Tensor, run: int) -> Tensor:
    """Return the product of two matrices, many runs in one call: one by one they are mostly overhead."""
    whole = a.shape[1] - a.shape[1] % run
    total = (a[:, whole:] @ b[:, whole:].T).to(accumulation_dtype(a))
    length = run * max(1, BATCHED_CELLS // (len(a) * len(b)))
    for start in range(0, whole, length):
        here = slice(start, min(start + length, whole))
        left, right = (t[:, here].unflatten(1, (-1, run)).transpose(0, 1) for t in (a, b))
        total += torch.bmm(left, right.mT).sum(0, dtype=total.dtype)
    return total


def accumulation_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype for accumulation: float64 on devices that have it."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def product_by_chunks(weights: Tensor, values: Tensor, columns: int = 2**16) -> Tensor:
    """Return weights (n, m) @ values (m, c), values converted to the weights' dtype some at a time.

    Values of many rows can be kept in a small dtype, booleans of a one-hot code say, without a copy of all of them.
    The transposed product of few columns takes half the time.
    """
    total = weights.new_zeros(values.shape[1], len(weights))
    for start in range(0, len(values), columns):
        part = slice(start, start + columns)
        total += values[part].to(weights).T.contiguous() @ weights[:, part].T
    return total.T.contiguous()


SQUARED_EXPONENTS = (2, 4, 8)


def power_(values: Tensor, exponent: float) -> Tensor:
    """Return values ** exponent in place; fourth and eighth powers by squares, several times faster than `pow_`."""
    if exponent in SQUARED_EXPONENTS:
        for _ in range(int(exponent).bit_length() - 1):
            values.square_()
        return values
    return values.pow_(exponent)
