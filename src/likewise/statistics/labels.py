"""Which labels look wrong? Those that the samples the network treats alike vote against."""

from typing import NamedTuple

import torch
from torch import Tensor

from likewise.gram import GramMatrix
from likewise.statistics.targets import class_numbers


class LabelSuspicion(NamedTuple):
    """What the neighbors of each sample say of its label."""

    suspicion: Tensor  # (n,) in [0, 1], the share of the votes for other labels
    suggested: Tensor  # (n,) the class with most votes
    contested: Tensor  # (n,) the neighbors' class is another one, and there are neighbors to ask
    isolated: Tensor  # (n,) too few votes to judge by


def label_suspicion(
    gram: GramMatrix,
    labels: Tensor | None = None,
    exponent: float | None = None,
    isolated_below: float = 0.05,
) -> LabelSuspicion:
    """Return the share of votes against each label, weighted by max(k, 0)^exponent; all pairs.

    A sample has no vote on itself, so the network may have learned the wrong label by heart and no
    cross-validation is needed. The exponent makes the vote local: 16 by default, 4 of a centered
    matrix, whose similarities spread more. Isolated is who gets fewer votes than `isolated_below`
    of the median; with no vote at all, there is no suspicion. The network's readout should not look
    at the label (all_outputs, log_probabilities): what is in doubt is no ground for similarity.
    """
    if not gram.square:
        raise ValueError("Labels vote within one data set: make the GramMatrix without columns.")
    if gram.kernel.row + gram.kernel.column != -1:
        raise ValueError(
            f"Votes need similarities of at most 1, and those of {gram.kernel} have no limit: use "
            "gram.with_kernel(likewise.CORRELATION)."
        )
    given = class_numbers(gram, labels)
    votes = class_votes(gram, given, exponent)
    return counted(votes, given.to(votes.device), isolated_below, gram.dtype)


def counted(
    votes: Tensor, given: Tensor, isolated_below: float = 0.05, dtype: torch.dtype = torch.float32
) -> LabelSuspicion:
    """Return what votes (n, classes) say of the labels given."""
    cast = votes.sum(1)
    mine = votes.gather(1, given[:, None])[:, 0]
    suspicion = torch.where(cast > 0, 1 - mine / cast, 0).clamp(0, 1).to(dtype)
    suggested = torch.where(cast > 0, votes.argmax(1), given)
    isolated = (cast == 0) | (cast < isolated_below * cast.median())
    return LabelSuspicion(suspicion, suggested, (suggested != given) & ~isolated, isolated)


def class_votes(gram: GramMatrix, classes: Tensor, exponent: float | None = None) -> Tensor:
    """Return Σ max(k(x, x'), 0)^exponent over the other samples of each class, (n, classes)."""
    sharp = exponent if exponent is not None else (4 if gram.centered else 16)
    if not sharp > 0:
        raise ValueError(f"The exponent of votes must be positive, found {sharp}.")
    members = torch.nn.functional.one_hot(classes)
    weights = members.double()
    return gram.over_rows(lambda k: k.double().clamp(min=0).pow(sharp) @ weights.to(k.device), own=0)
