"""Centered similarity: double centering of a kernel, then normalization.

In most networks every pair of samples shares a large common direction, which hides structure. Taking the mean off
the (normalized) gradients leaves, of k with mean similarities r(x) to a reference set and their mean g over it,

    c(x, x') = k(x, x') − r(x) − r(x') + g,        centered similarity = c(x, x') / √(c(x, x) c(x', x'))

a cosine again: 1 for samples that the network cannot tell apart, 0 and below for those with no more in common than
two samples have on average. The reference set is the columns; of new inputs, r(x) is their mean similarity to it.
"""

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from likewise.data import Batches
from likewise.kernels import Kernel
from likewise.wording import counted

EXACTER = "convert model and data to float64, or use centered=False"
VISIBLE_ERROR = 1e-3  # of a centered similarity: a larger one is worth a warning


def rounding_floor(dtype: torch.dtype) -> float:
    """Return the share of k(x, x) below which what centering leaves is rounding, for gradients in `dtype`."""
    return 128 * torch.finfo(dtype).eps


def warn_of_cancellation(centering: "Centering", diagonal: Tensor, dtype: torch.dtype) -> None:
    """Warn if samples share nearly all of their gradients, so that little but rounding is left of them.

    Similarities come with a relative error of about one unit of rounding, and centered ones with c(x, x)⁻¹ times
    that; 2.5 was measured on networks whose gradients are made ever more alike.

    Args:
        centering: Of the reference set.
        diagonal: (n,) k(x, x), 0 where the gradient is zero.
        dtype: In which gradients were computed.

    """
    warn_of_lost_differences(int(((centering.scales == 0) & (diagonal > 0)).sum()), len(diagonal))
    error = 2.5 * torch.finfo(dtype).eps / 2 * centering.scales.square()
    coarse = int((error > VISIBLE_ERROR).sum())
    if coarse:
        warnings.warn(
            f"The gradients of {coarse:,} of {counted(len(error), 'sample')} are nearly the same for all samples "
            "(they differ by "
            f"{float(centering.scales.max()) ** -1:.1g} of their length), so that centered similarities are off by up "
            f"to about {float(error.max()):.1g}: {EXACTER}.",
            stacklevel=2,
        )


def warn_of_lost_differences(lost: int, n: int, advice: str = EXACTER) -> None:
    """Warn if centering leaves only rounding of some of n samples, which are then similar to nothing."""
    if lost and n > 1:
        warnings.warn(
            f"The gradients of {lost:,} of {counted(n, 'sample')} are the mean of all up to rounding, so that their "
            f"centered similarities are 0 and say nothing: {advice}.",
            stacklevel=2,
        )


class Centering(NamedTuple):
    """What double centering needs to know of some samples."""

    means: Tensor  # (n,) r(x), in float64
    scales: Tensor  # (n,) c(x, x)^-½, 0 where centering leaves only rounding

    @classmethod
    def from_sums(
        cls,
        sums: Tensor,
        diagonal: Tensor,
        columns: int,
        dtype: torch.dtype,
        grand_mean: Tensor | None = None,
    ) -> "Centering":
        """Return it from Σ k(x, x') over the reference set and k(x, x).

        Args:
            sums: (n,) row sums over the reference set.
            diagonal: (n,) k(x, x).
            columns: How many samples the reference set has.
            dtype: In which gradients were computed.
            grand_mean: g, if these samples are not the reference set itself.

        """
        means = sums.double() / columns
        remaining = diagonal - 2 * means + (means.mean() if grand_mean is None else grand_mean)
        alive = (diagonal > 0) & (remaining > rounding_floor(dtype) * diagonal)
        return cls(means, torch.where(alive, torch.where(alive, remaining, 1).rsqrt(), 0))


class CenteredPair(NamedTuple):
    """The centering of rows and columns of one matrix, and the grand mean of its reference set."""

    rows: Centering
    columns: Centering
    grand_mean: Tensor  # ()

    def center(self, similarity: Tensor) -> Tensor:
        """Return the centered similarities of plain ones, (n, m), as a new tensor."""
        exact = similarity.double() if similarity.device.type != "mps" else similarity
        means, scales = self.rows.means[:, None].to(exact), self.rows.scales[:, None].to(exact)
        shift = (self.columns.means - self.grand_mean).to(exact)
        centered = (exact - means).sub_(shift).mul_(scales).mul_(self.columns.scales.to(exact))
        return centered.to(similarity.dtype)

    def take_rows(self, where: range) -> "CenteredPair":
        """Return the centering of a strip: of the rows at these places and all columns."""
        here = slice(where.start, where.stop)
        return self._replace(rows=Centering(self.rows.means[here], self.rows.scales[here]))

    def scale_weights(self, weights: Tensor) -> Tensor:
        """Return the weights (m, c) that the plain matrix is to be multiplied with."""
        return weights * self.columns.scales[:, None].to(weights)

    def center_product(self, product: Tensor, scaled: Tensor) -> Tensor:
        """Return the centered matrix times weights, from the plain one times their scaled version."""
        rows, columns = self.rows, self.columns
        total = scaled.sum(0).to(product)
        shift = (columns.means.to(scaled) @ scaled).to(product) - self.grand_mean.to(product) * total
        return (product - rows.means[:, None].to(product) * total - shift) * rows.scales[:, None].to(product)


class _CacheEntry(NamedTuple):
    data: Batches
    kernel: Kernel
    state: tuple[Any, ...]
    centering: Centering


class CenteringCache:
    """Centerings of the reference set and of one other data set, with the model's state they belong to."""

    def __init__(self) -> None:
        self._entries: dict[str, _CacheEntry] = {}

    def get(self, role: str, data: Batches, kernel: Kernel, state: tuple[Any, ...]) -> Centering | None:
        """Return what was put for the same samples, kernel and state of the model, else None."""
        entry = self._entries.get(role)
        if entry is None or entry.data is not data or (entry.kernel, entry.state) != (kernel, state):
            return None
        return entry.centering

    def put(
        self, role: str, data: Batches, kernel: Kernel, state: tuple[Any, ...], centering: Centering
    ) -> None:
        """Store a centering."""
        self._entries[role] = _CacheEntry(data, kernel, state, centering)
