"""Neighbors of each sample: which are nearest, how many there are, and what they vote for.

The counts are the paper's (sec. 4.1); a sample counts as its own neighbor in them. In votes every other sample votes
for its own class, weighted by how alike the network treats the two.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from likewise.checks import check_integer, check_number
from likewise.gram import BlockReducer, GramMatrix, SketchOption, Strip, SumReducer, pair_source
from likewise.linalg import product_by_chunks
from likewise.statistics.targets import class_numbers, refuse_other, to_device


class Neighbors(NamedTuple):
    """The most similar columns of each row, best first.

    Attributes:
        indices: (n, k) integers, places in the columns.
        similarities: (n, k).
        errors: (n, k) standard errors of the similarities, 0 where gradients are compared. What combinations of the
            outputs leave out (docs/method.md) is not among them.

    Example:
        >>> import torch, likewise as lw
        >>> gram = lw.GramMatrix(torch.nn.Linear(4, 3), (torch.randn(60, 4), torch.arange(60) % 3))
        >>> found = lw.nearest(gram, k=3)
        >>> bool((found.similarities[:, 0] >= found.similarities[:, 1]).all())
        True

    """

    indices: Tensor
    similarities: Tensor
    errors: Tensor


@dataclass(frozen=True)
class NearestReducer(BlockReducer):
    """The k largest similarities of each row and their columns, without the sample itself; ties go to the first."""

    k: int
    results: ClassVar[int] = 2

    def fold(self, total: tuple[Tensor, ...] | None, block: Strip) -> tuple[Tensor, ...]:
        """Return indices and similarities of the columns so far, (b, k) each."""
        others = block.without_self(block.similarity, -torch.inf)
        return merge_largest(None if total is None else Largest(*total), others, block.first_column, self.k)


def nearest(gram: GramMatrix, k: int = 10, *, sketch: SketchOption = "auto") -> Neighbors:
    """The k most similar samples of each row, best first; visits all pairs.

    Within one data set, a sample is not its own neighbor.

    Args:
        gram: Plain or centered; neighbors are ranked by its similarity.
        k: Number of neighbors; fewer if the data set has no more.
        sketch: Numbers per sample of the random projections that are compared; None: gradients; "auto": gradients if
            that is cheap, else 1024 numbers (`likewise.SketchNotice`).

    Returns:
        Neighbors with `indices`, `similarities` and their standard `errors`, (n, k) each.

    Example:
        >>> import torch, likewise as lw
        >>> lw.nearest(lw.GramMatrix(torch.nn.Linear(4, 2), torch.randn(9, 4)), k=3).indices.shape
        torch.Size([9, 3])

    """
    refuse_other(gram)
    k = check_integer("k", k, 1)
    k = min(k, gram.shape[1] - gram.square)
    source = pair_source(gram, sketch)
    ((indices, similarities),) = source.visit(NearestReducer(k))
    return Neighbors(indices, similarities, source.standard_errors(indices))


class ClassSimilarity(NamedTuple):
    """How similar the samples of one class are to those of another, on average.

    Attributes:
        mean: (classes, classes) over pairs of different samples; NaN if there is no pair.
        counts: (classes,) samples per class.

    Example:
        >>> import torch, likewise as lw
        >>> gram = lw.GramMatrix(torch.nn.Linear(4, 3), (torch.randn(60, 4), torch.arange(60) % 3))
        >>> lw.class_similarity(gram).counts
        tensor([20, 20, 20])

    """

    mean: Tensor
    counts: Tensor


class SelfSimilarityReducer(SumReducer):
    """Each sample's similarity to itself, for when pairs are visited anyway."""

    def terms(self, block: Strip) -> tuple[Tensor, ...]:
        """Return the diagonal, (b,)."""
        return (block.self_similarity(block.similarity),)


def class_similarity(gram: GramMatrix, labels: Any = None) -> ClassSimilarity:
    """Mean similarity of pairs of different samples, within and between classes; two passes over the data.

    A class that the network treats alike has a large diagonal entry. Two classes that it confuses have a large entry
    off the diagonal.

    Args:
        gram: A square matrix, plain or centered.
        labels: (n,) class numbers; None uses the labels of the data.

    Returns:
        ClassSimilarity with `mean`, (classes, classes), and `counts`.

    Example:
        >>> import torch, likewise as lw
        >>> gram = lw.GramMatrix(torch.nn.Linear(4, 3), (torch.randn(60, 4), torch.arange(60) % 3))
        >>> lw.class_similarity(gram).mean.shape
        torch.Size([3, 3])

    """
    refuse_other(gram)
    if not gram.square:
        raise ValueError("class_similarity needs one data set: build the GramMatrix without columns.")
    classes = class_numbers(gram, labels)
    members = torch.nn.functional.one_hot(classes).double()
    sums, diagonal = gram.exact_row_sums(members).cpu(), gram.exact_diagonal().cpu()
    mean, counts = mean_between_classes(sums.double(), diagonal.double(), members)
    return to_device(ClassSimilarity(mean.to(gram.dtype), counts), gram.device)


def mean_between_classes(sums: Tensor, diagonal: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean similarity of different samples class by class, and the classes' sizes.

    Args:
        sums: (n, classes) similarity of each sample to all samples of each class.
        diagonal: (n,) similarity of each sample to itself.
        members: (n, classes) one-hot classes.

    """
    counts = members.sum(0)
    pairs = counts[:, None] * counts - torch.diag(counts)
    total = members.T @ sums - torch.diag(members.T @ diagonal)
    return torch.where(pairs > 0, total / pairs.clamp(min=1), torch.nan), counts.long()


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


def hard_neighbors(gram: GramMatrix, threshold: float = 0.9, *, sketch: SketchOption = "auto") -> Tensor:
    """N_τ(x), how many samples have k(x, x') ≥ τ, itself included; visits all pairs.

    Args:
        gram: Plain or centered.
        threshold: τ.
        sketch: Numbers per sample of the random projections that are compared; None: gradients; "auto": gradients if
            that is cheap, else 1024 numbers (`likewise.SketchNotice`).

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


def positive_neighbors(gram: GramMatrix, exponent: float = 2, *, sketch: SketchOption = "auto") -> Tensor:
    """N⁺_α(x) = Σ max(k(x, x'), 0)^α, itself included; visits all pairs. The larger α, the more local.

    Args:
        gram: Plain or centered. With a centered matrix and α = 4, this is the `local_density` of `analyze`.
        exponent: α, positive.
        sketch: Numbers per sample of the random projections that are compared; None: gradients; "auto": gradients if
            that is cheap, else 1024 numbers (`likewise.SketchNotice`).

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
    sketch: SketchOption = "auto",
) -> SimilarityHistogram:
    """Each row's histogram of similarities over equal bins of [low, high]; visits all pairs.

    Args:
        gram: Plain or centered.
        bins: Number of bins.
        low: Lower end; smaller values count in the first bin.
        high: Upper end; larger values count in the last bin.
        sketch: Numbers per sample of the random projections that are compared; None: gradients; "auto": gradients if
            that is cheap, else 1024 numbers (`likewise.SketchNotice`).

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


EXPONENT = 4  # of votes: larger is more local
SURPRISE_WEIGHT = 0.1  # relative to the margin; chosen on benchmarks/label_overlap.py --seeds 11
LEAST_SHARE = 0.01  # added to the share of a label: smaller shares are not more surprising


@dataclass(frozen=True)
class VotesReducer(SumReducer):
    """The votes of all other samples on each row: Σ max(centered similarity, 0)^exponent by class."""

    members: Tensor  # (m, classes) one-hot
    exponent: float = EXPONENT
    centered: ClassVar[bool] = True

    def terms(self, block: Strip) -> tuple[Tensor, ...]:
        """Return the votes, (b, classes) in float64."""
        weights = block.without_self(block.positive_power(self.exponent, centered=True), 0)
        return (product_by_chunks(weights, self.members[block.column_places]),)


def class_votes(
    gram: GramMatrix, classes: Tensor, *, exponent: float = EXPONENT, sketch: SketchOption = "auto"
) -> Tensor:
    """Σ max(centered similarity, 0)^exponent over the other samples of each class; visits all pairs.

    Args:
        gram: A square matrix.
        classes: (n,) class numbers.
        exponent: How local votes are.
        sketch: Numbers per sample of the random projections that are compared; None: gradients; "auto": gradients if
            that is cheap, else 1024 numbers (`likewise.SketchNotice`).

    Returns:
        (n, classes) in float64.

    """
    exponent = check_number("exponent", exponent, above=0)
    members = torch.nn.functional.one_hot(classes).double()
    ((votes,),) = pair_source(gram, sketch).visit(VotesReducer(members, exponent))
    return votes


def contradiction(own: Tensor, other: Tensor) -> Tensor:
    """Return how much shares of votes or probabilities contradict labels, (n,) in [0, 1].

    The margin, (1 − own + other) / 2, plus a tenth of how surprising the label is, log(1.01 / (own + 0.01)), scaled to
    [0, 1]. The second helps if classes are confused.

    Args:
        own: (n,) the share of the label.
        other: (n,) the largest share of another class.

    """
    surprise = torch.log((1 + LEAST_SHARE) / (own + LEAST_SHARE))
    most = 1 + SURPRISE_WEIGHT * math.log((1 + LEAST_SHARE) / LEAST_SHARE)
    return ((1 - own + other) / 2 + SURPRISE_WEIGHT * surprise) / most


TIED_ROWS = 64  # in which the first of equal entries are looked for at a time


class Largest(NamedTuple):
    """The largest entries of each row so far, best first; of equal ones the first column first."""

    indices: Tensor  # (n, k) columns
    values: Tensor  # (n, k)


def merge_largest(best: Largest | None, values: Tensor, start: int, k: int) -> Largest:
    """Return the k largest entries of each row among those before and those of the next columns.

    Only entries above the k-th best so far are sorted: a look at each entry, after the first columns.

    Args:
        best: Of the columns before, which is written to; None at the first.
        values: (n, m) the next columns, row by row or column by column in memory.
        start: The place of the first of them.
        k: How many; fewer are returned as long as there were no more columns.

    """
    if best is not None and best.values.shape[1] == k:
        return _replace_smaller(best, values, start)
    columns = torch.arange(start, start + values.shape[1], device=values.device).expand_as(values)
    if best is not None:
        values, columns = torch.cat([best.values, values], 1), torch.cat([best.indices, columns], 1)
    return _largest(values, columns, k)


def _largest(values: Tensor, columns: Tensor, k: int) -> Largest:
    """Return the k largest entries of each row, of equal ones those that come first."""
    count = min(k, values.shape[1])
    found = values.topk(count, dim=1)
    places = found.indices
    if count:
        least = found.values[:, -1:]
        tied = ((values >= least).sum(1) > count).nonzero()[:, 0]
        for rows in tied.split(TIED_ROWS):
            some, bound = values[rows], least[rows]
            above, equal = some > bound, some == bound
            needed = count - above.sum(1, keepdim=True)
            chosen = above | (equal & (equal.cumsum(1) <= needed))
            places[rows] = chosen.nonzero()[:, 1].view(len(rows), count)
    places = places.sort(dim=1).values
    order = values.gather(1, places).sort(dim=1, descending=True, stable=True)
    places = places.gather(1, order.indices)
    return Largest(columns.gather(1, places), order.values)


def _replace_smaller(best: Largest, values: Tensor, start: int) -> Largest:
    """Return the best with larger values of later columns in the place of the smallest."""
    k = best.values.shape[1]
    rows, columns = _true_places(values > best.values[:, -1:]) if k else (values.new_zeros(0).long(),) * 2
    if not len(rows):
        return best
    counts = torch.bincount(rows, minlength=len(values))
    hit = counts.nonzero()[:, 0]
    slots = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows] + k
    numbers = ((counts > 0).cumsum(0) - 1)[rows]
    candidates = values.new_full((len(hit), k + int(counts.max())), -torch.inf)
    places = torch.zeros_like(candidates, dtype=torch.int64)
    candidates[:, :k], places[:, :k] = best.values[hit], best.indices[hit]
    candidates[numbers, slots], places[numbers, slots] = values[rows, columns], columns + start
    order = candidates.sort(dim=1, descending=True, stable=True)
    best.values[hit] = order.values[:, :k]
    best.indices[hit] = places.gather(1, order.indices[:, :k])
    return best


def _true_places(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows and columns of the entries that are True, of which there are few, row by row."""
    if mask.is_contiguous():
        flat = _true_entries(mask.flatten())
        return flat // mask.shape[1], flat % mask.shape[1]
    flat = _true_entries(mask.T.flatten())
    columns, rows = flat // mask.shape[0], flat % mask.shape[0]
    order = rows.argsort(stable=True)
    return rows[order], columns[order]


def _true_entries(mask: Tensor) -> Tensor:
    """Return mask.nonzero()[:, 0] of a vector, eight entries at a time."""
    whole = len(mask) // 8 * 8
    words = mask[:whole].view(torch.int64).nonzero()
    places = (8 * words + torch.arange(8, device=mask.device)).flatten()
    rest = mask[whole:].nonzero()[:, 0] + whole
    return torch.cat([places[mask[places]], rest])
