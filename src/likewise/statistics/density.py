"""How many samples are similar to each: the paper's counts (sec. 4.1). A sample counts as its own neighbor."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from likewise.checks import check_integer, check_number
from likewise.gram import GramMatrix, Strip, SumReducer, pair_source
from likewise.statistics.targets import refuse_other, to_device

MOST_BINS = 1_000_000


def soft_neighbors(gram: GramMatrix) -> Tensor:
    """N_S(x) = Σ k(x, x'), the soft number of neighbors; sec. 4.2. Two passes over the data.

    N if all samples are alike, 1 if each is alone. All gradients share a common direction, so N_S is large in most
    networks: compare samples with each other, not with 1. If similarities can be negative (centered,
    label_against_rest), they cancel, and N_S can be below 1 or negative.

    Args:
        gram: Plain or centered.

    Returns:
        (n,) N_S of the rows.

    Example:
        >>> import torch, likewise as lw
        >>> lw.soft_neighbors(lw.GramMatrix(torch.nn.Linear(4, 2), torch.randn(9, 4))).shape
        torch.Size([9])

    """
    refuse_other(gram)
    return gram.row_sums()


@dataclass(frozen=True)
class CountReducer(SumReducer):
    """How many similarities of each row are at least a threshold, itself included."""

    threshold: float

    def terms(self, block: Strip) -> tuple[Tensor, ...]:
        """Return the counts, (b,) integers; a few units of rounding below the threshold count."""

        def compare(strip: Strip) -> Tensor:
            rounding = 8 * torch.finfo(strip.similarity.dtype).eps
            return strip.similarity >= self.threshold - rounding

        return (block.shared(("at least", self.threshold), compare).count_nonzero(1),)


def hard_neighbors(gram: GramMatrix, threshold: float = 0.9, *, sketch: int | None = None) -> Tensor:
    """N_τ(x), how many samples have k(x, x') ≥ τ, itself included; visits all pairs.

    Args:
        gram: Plain or centered.
        threshold: τ.
        sketch: Estimate from random projections with this many numbers per sample.

    Returns:
        (n,) integers.

    Example:
        >>> import torch, likewise as lw
        >>> gram = lw.GramMatrix(torch.nn.Linear(4, 3), (torch.randn(60, 4), torch.arange(60) % 3))
        >>> bool((lw.hard_neighbors(gram, 0.9) >= 1).all())                   # itself
        True

    """
    refuse_other(gram)
    threshold = check_number("threshold", threshold)
    ((counts,),) = pair_source(gram, sketch).visit(CountReducer(threshold))
    return counts


@dataclass(frozen=True)
class PositiveReducer(SumReducer):
    """The sum of the positive similarities of each row to a power, itself included."""

    exponent: float

    def terms(self, block: Strip) -> tuple[Tensor, ...]:
        """Return the sums, (b,)."""
        return (block.positive_power(self.exponent).sum(1),)


def positive_neighbors(gram: GramMatrix, exponent: float = 2, *, sketch: int | None = None) -> Tensor:
    """N⁺_α(x) = Σ max(k(x, x'), 0)^α, itself included; visits all pairs. The larger α, the more local.

    Args:
        gram: Plain or centered. With a centered matrix and α = 4, this is the `local_density` of `analyze`.
        exponent: α, positive.
        sketch: Estimate from random projections with this many numbers per sample.

    Returns:
        (n,) sums.

    Example:
        >>> import torch, likewise as lw
        >>> gram = lw.GramMatrix(torch.nn.Linear(4, 3), (torch.randn(60, 4), torch.arange(60) % 3))
        >>> lw.positive_neighbors(gram, exponent=4).shape
        torch.Size([60])

    """
    refuse_other(gram)
    exponent = check_number("exponent", exponent, above=0)
    ((sums,),) = pair_source(gram, sketch).visit(PositiveReducer(exponent))
    return sums.to(gram.dtype)


class SimilarityHistogram(NamedTuple):
    """Histogram of the similarities of each sample.

    Attributes:
        edges: (bins + 1,).
        counts: (n, bins) integers; counts.sum(0) is the histogram of all pairs.

    Example:
        >>> import torch, likewise as lw
        >>> gram = lw.GramMatrix(torch.nn.Linear(4, 3), (torch.randn(60, 4), torch.arange(60) % 3))
        >>> found = lw.similarity_histogram(gram, bins=20)
        >>> found.edges.shape, found.counts.shape
        (torch.Size([21]), torch.Size([60, 20]))

    """

    edges: Tensor
    counts: Tensor


@dataclass(frozen=True)
class HistogramReducer(SumReducer):
    """Each row's histogram over equal bins; values outside count in the first or last bin."""

    bins: int
    low: float = -1
    high: float = 1

    def terms(self, block: Strip) -> tuple[Tensor, ...]:
        """Return the counts, (b, bins) integers."""

        def find_bins(strip: Strip) -> Tensor:
            scaled = (strip.similarity - self.low) * (self.bins / (self.high - self.low))
            return scaled.floor_().clamp_(0, self.bins - 1).to(torch.int32)

        places = block.shared(("bins", self), find_bins)
        n = len(places)
        places = places + torch.arange(n, dtype=torch.int32, device=places.device)[:, None] * self.bins
        flat = (places if places.is_contiguous() else places.T).flatten()  # in any order, without a copy
        return (torch.bincount(flat, minlength=n * self.bins).view(n, self.bins),)

    @property
    def edges(self) -> Tensor:
        """The edges of the bins, (bins + 1,)."""
        return torch.linspace(self.low, self.high, self.bins + 1, dtype=torch.float64)


def similarity_histogram(
    gram: GramMatrix,
    bins: int = 100,
    low: float = -1,
    high: float = 1,
    *,
    sketch: int | None = None,
) -> SimilarityHistogram:
    """Each row's histogram of similarities over equal bins of [low, high]; visits all pairs.

    Args:
        gram: Plain or centered.
        bins: Number of bins.
        low: Lower end; smaller values count in the first bin.
        high: Upper end; larger values count in the last bin.
        sketch: Estimate from random projections with this many numbers per sample.

    Returns:
        SimilarityHistogram with `edges`, (bins + 1,), and `counts`, (n, bins).

    Example:
        >>> import torch, likewise as lw
        >>> gram = lw.GramMatrix(torch.nn.Linear(4, 3), (torch.randn(60, 4), torch.arange(60) % 3))
        >>> lw.similarity_histogram(gram, bins=20).counts.sum(1)[:3]
        tensor([60, 60, 60])

    """
    refuse_other(gram)
    bins, low = check_integer("bins", bins, 1, MOST_BINS), check_number("low", low)
    high = check_number("high", high, above=low, most=low + torch.finfo(torch.float64).max)
    reducer = HistogramReducer(bins, low, high)
    ((counts,),) = pair_source(gram, sketch).visit(reducer)
    return to_device(SimilarityHistogram(reducer.edges, counts.long()), gram.device)
