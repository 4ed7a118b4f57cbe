"""How many samples are like x? The paper's counts (sec. 4.1). A sample counts as its own neighbor."""

from typing import NamedTuple

import torch
from torch import Tensor

from likewise.gram import GramMatrix


def soft_neighbors(gram: GramMatrix) -> Tensor:
    """Return N_S(x) = Σ k(x, x'), (n,), in two passes over the data; sec. 4.2.

    Of all samples alike it is N, of samples alone 1. Every pair shares a common direction, so that
    N_S is large in most networks: compare samples with each other, not with 1. Where similarities
    can be negative (centered, label_against_rest) they cancel and N_S can be below 1 or negative.
    """
    return gram.row_sums()


def hard_neighbors(gram: GramMatrix, threshold: float = 0.9) -> Tensor:
    """Return N_τ(x), how many samples have k(x, x') ≥ τ, (n,), up to rounding; visits all pairs."""
    rounding = 8 * torch.finfo(gram.dtype).eps
    return gram.over_rows(lambda k: (k >= threshold - rounding).sum(1))


def positive_neighbors(gram: GramMatrix, exponent: float = 2) -> Tensor:
    """Return N⁺_α(x) = Σ max(k(x, x'), 0)^α, (n,); visits all pairs. The larger α, the more local."""
    if not exponent > 0:
        raise ValueError(f"The exponent of N⁺_α must be positive, found {exponent}.")
    return gram.over_rows(lambda k: k.clamp(min=0).pow(exponent).sum(1))


class SimilarityHistogram(NamedTuple):
    """How many samples are how similar to each sample."""

    edges: Tensor  # (bins + 1,)
    counts: Tensor  # (n, bins) integers; counts.sum(0) is the histogram of all pairs


def similarity_histogram(
    gram: GramMatrix, bins: int = 100, low: float = -1, high: float = 1
) -> SimilarityHistogram:
    """Return each row's histogram of k(x, x') over `bins` equal bins of [low, high].

    What lies outside counts in the first or last bin. Visits all pairs.
    """
    if bins < 1 or not low < high:
        raise ValueError(f"Bins and a range are needed, found {bins} bins of [{low}, {high}].")

    def counted(k: Tensor) -> Tensor:
        place = ((k - low) * (bins / (high - low))).floor().clamp(0, bins - 1).long()
        return k.new_zeros(len(k), bins, dtype=torch.int64).scatter_add(1, place, torch.ones_like(place))

    counts = gram.over_rows(counted)
    return SimilarityHistogram(torch.linspace(low, high, bins + 1, dtype=torch.float64), counts)
