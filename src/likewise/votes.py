"""Votes: every other sample votes for its own class, weighted by how alike the network treats the two."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from likewise.checks import check_number
from likewise.gram import GramMatrix, Strip, SumReducer
from likewise.gram.sketches import pair_source
from likewise.linalg import product_by_chunks

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
    gram: GramMatrix, classes: Tensor, *, exponent: float = EXPONENT, sketch: int | None = None
) -> Tensor:
    """Σ max(centered similarity, 0)^exponent over the other samples of each class; visits all pairs.

    Args:
        gram: A square matrix.
        classes: (n,) class numbers.
        exponent: How local votes are.
        sketch: Estimate from random projections with this many numbers per sample.

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
