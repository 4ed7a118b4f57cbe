"""Which samples are like x? And how alike are whole classes?"""

from typing import NamedTuple

import torch
from torch import Tensor

from likewise.gram import GramMatrix
from likewise.statistics.targets import class_numbers


class Neighbors(NamedTuple):
    """The most similar columns of each row, best first."""

    indices: Tensor  # (n, k) integers, places in the columns
    similarities: Tensor  # (n, k)


def nearest(gram: GramMatrix, k: int = 10) -> Neighbors:
    """Return the k most similar samples of each row, best first; visits all pairs.

    Of a data set with itself, a sample is not its own neighbor. There are fewer than k if the data
    set has no more.
    """
    if k < 1:
        raise ValueError(f"At least one neighbor must be asked for, found k = {k}.")
    k = min(k, gram.shape[1] - gram.square)
    similarities, indices = gram.over_rows(lambda row: tuple(row.topk(k, dim=1)), own=-torch.inf)
    return Neighbors(indices, similarities)


class ClassSimilarity(NamedTuple):
    """How similar the samples of one class are to those of another, on average."""

    mean: Tensor  # (classes, classes), pairs of different samples; NaN where a class has no pair
    counts: Tensor  # (classes,) samples of each


def class_similarity(gram: GramMatrix, labels: Tensor | None = None) -> ClassSimilarity:
    """Return the mean k(x, x') within and between classes, in two passes over the data.

    A class that the network keeps together has a large diagonal entry; two that it confuses have
    one as large off the diagonal.
    """
    if not gram.square:
        raise ValueError("Classes are compared within one data set: make the GramMatrix without columns.")
    classes = class_numbers(gram, labels)
    members = torch.nn.functional.one_hot(classes).double()
    sums = members.T.to(gram.dtype) @ gram.row_sums(members).cpu()
    own = members.T.to(gram.dtype) @ gram.diagonal().cpu()
    counts = members.sum(0)
    pairs = counts[:, None] * counts - torch.diag(counts)
    return ClassSimilarity(((sums - torch.diag(own)) / pairs).to(gram.dtype), counts.long())
