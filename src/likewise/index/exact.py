"""Exact similarities of a few pairs, to re-rank what sketches found.

A centered similarity needs the mean gradient of the whole data set: one pass over it, made when the first exact
answer is asked for and kept in the index.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from likewise.data import Batches
from likewise.gram import GramMatrix
from likewise.gram.centering import rounding_floor


class MeanGradient(NamedTuple):
    """The sum of the whitened gradients of all rows."""

    total: Tensor  # (d, p), float64
    samples: int

    @property
    def grand_mean(self) -> float:
        """The mean plain similarity of all pairs."""
        return float(self.total.square().sum()) / self.samples**2 / len(self.total)


def mean_gradient(gram: GramMatrix, data: Batches) -> MeanGradient:
    """Return the mean gradient of a data set, in one pass; `gram` has the engine."""
    d = gram.d
    over = gram.with_columns(data)

    def weights(where: range) -> Tensor:
        return torch.eye(d, dtype=torch.float64).expand(len(where), d, d)

    return MeanGradient(over.products().vjp(weights).cpu(), data.n)


class KnownOfSamples(NamedTuple):
    """What sketches say of some samples."""

    left_out: (
        Tensor  # (n,) mean plain similarity to all rows, less that to those that the mean gradient is of
    )
    diagonal: Tensor  # (n,) plain similarity to themselves: 1, or 0 where the gradient is zero


class Known(NamedTuple):
    """What sketches say of the samples that are compared, and of those that a mean gradient leaves out."""

    new: KnownOfSamples
    candidates: KnownOfSamples
    grand_mean: (
        float  # mean plain similarity of all pairs, less that of the pairs that the mean gradient is of
    )


class Centering(NamedTuple):
    """What centering needs to know of some samples."""

    means: Tensor  # (n,) mean plain similarity to all rows
    lengths: Tensor  # (n,) c(x, x)^½, 0 where only rounding is left


def exact_similarities(
    gram: GramMatrix,
    new: Batches,
    candidates: Batches,
    mean: MeanGradient | None,
    known: Known | None = None,
) -> Tensor:
    """Return the exact similarities of new inputs with candidates, (n, m), in float64.

    Args:
        gram: Has the engine; plain.
        new: The new inputs.
        candidates: Samples of the data set.
        mean: For centered similarities; None for plain ones.
        known: What sketches say, where the mean is not of all rows; one output only. None where it is of all.

    """
    rows = gram.with_columns(new).of_columns()
    plain = rows.with_columns(candidates).dense().cpu().double()
    if mean is None:
        return plain
    grand_mean = mean.grand_mean + (0 if known is None else known.grand_mean)
    sides = (
        ((new, None), (candidates, None))
        if known is None
        else ((new, known.new), (candidates, known.candidates))
    )
    one, other = (
        _center(gram.with_columns(data).of_columns(), mean, grand_mean, said) for data, said in sides
    )
    shift = one.means[:, None] + other.means - grand_mean
    lengths = one.lengths[:, None] * other.lengths
    return torch.where(lengths > 0, (plain - shift) / torch.where(lengths > 0, lengths, 1), 0)


def _center(
    rows: GramMatrix, mean: MeanGradient, grand_mean: float, known: KnownOfSamples | None
) -> Centering:
    def trace(_: range, products: Tensor) -> Tensor:
        return products.diagonal(dim1=1, dim2=2).sum(-1)

    sums = rows.products().jvp(mean.total.to(rows.device), trace).cpu().double()
    means = sums / len(mean.total) / mean.samples
    if known is None:
        diagonal = rows.exact_diagonal().cpu()
    else:
        means, diagonal = means + known.left_out, known.diagonal
    left = diagonal - 2 * means + grand_mean
    alive = (diagonal > 0) & (left > rounding_floor(rows.dtype) * diagonal)
    return Centering(means, torch.where(alive, left.clamp(min=0).sqrt(), 0))
