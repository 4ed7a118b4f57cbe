"""The nearest neighbors of each sample, and the mean similarity of classes."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from likewise.checks import check_integer
from likewise.gram import BlockReducer, GramMatrix, Strip, SumReducer, pair_source
from likewise.largest import Largest, merge_largest
from likewise.statistics.targets import class_numbers, refuse_other, to_device


class Neighbors(NamedTuple):
    """The most similar columns of each row, best first.

    Attributes:
        indices: (n, k) integers, places in the columns.
        similarities: (n, k).

    Example:
        >>> import torch, likewise as lw
        >>> gram = lw.GramMatrix(torch.nn.Linear(4, 3), (torch.randn(60, 4), torch.arange(60) % 3))
        >>> found = lw.nearest(gram, k=3)
        >>> bool((found.similarities[:, 0] >= found.similarities[:, 1]).all())
        True

    """

    indices: Tensor
    similarities: Tensor


@dataclass(frozen=True)
class NearestReducer(BlockReducer):
    """The k largest similarities of each row and their columns, without the sample itself; ties go to the first."""

    k: int
    results: ClassVar[int] = 2

    def fold(self, total: tuple[Tensor, ...] | None, block: Strip) -> tuple[Tensor, ...]:
        """Return indices and similarities of the columns so far, (b, k) each."""
        others = block.without_self(block.similarity, -torch.inf)
        return merge_largest(None if total is None else Largest(*total), others, block.first_column, self.k)


def nearest(gram: GramMatrix, k: int = 10, *, sketch: int | None = None) -> Neighbors:
    """The k most similar samples of each row, best first; visits all pairs.

    Within one data set, a sample is not its own neighbor.

    Args:
        gram: Plain or centered; neighbors are ranked by its similarity.
        k: Number of neighbors; fewer if the data set has no more.
        sketch: Estimate from random projections with this many numbers per sample instead of exact gradients.

    Returns:
        Neighbors with `indices` and `similarities`, (n, k) each.

    Example:
        >>> import torch, likewise as lw
        >>> lw.nearest(lw.GramMatrix(torch.nn.Linear(4, 2), torch.randn(9, 4)), k=3).indices.shape
        torch.Size([9, 3])

    """
    refuse_other(gram)
    k = check_integer("k", k, 1)
    k = min(k, gram.shape[1] - gram.square)
    (found,) = pair_source(gram, sketch).visit(NearestReducer(k))
    return Neighbors(*found)


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
