"""Which inputs are unlike all that the network was trained on?"""

import torch
from torch import Tensor

from likewise.gram import GramMatrix
from likewise.likeness import Strip, likeness
from likewise.statistics.neighbors import nearest
from likewise.statistics.targets import refuse_other

NEIGHBORS = 10


def novelty(gram: GramMatrix, k: int = NEIGHBORS, sketch: int | None = None) -> Tensor:
    """Return 1 − the mean similarity to the k most similar columns, (n,): larger is more unlike all data.

    Rows are the inputs in question, columns the training set: lw.GramMatrix(model, new, columns=training).
    0: the network cannot tell the input from k training samples; its range depends on the network, so
    compare with the novelty of held-out data. Of a data set with itself, a sample is not its own neighbor.
    The matrix must not be centered: what all training samples share is what a novel input lacks. Visits all
    pairs; sums over all data, which take two passes, tell little (docs/uses.md).
    """
    refuse_unbounded(gram)
    if gram.centered:
        raise ValueError(
            "Novelty is what an input lacks of what all training samples share, and centering takes that "
            "off: make the GramMatrix with centered=False."
        )
    if k < 1:
        raise ValueError(f"At least one neighbor must be asked for, found k = {k}.")
    if gram.shape[1] - gram.square < 1:
        raise ValueError("There is no other sample to be like: give more than one.")
    if sketch is None:
        return 1 - nearest(gram, k).similarities.mean(1)
    closest: tuple[Tensor] = likeness(gram, sketch).map_strips(
        lambda *_: (), closeness(gram.shape[1], gram.square, k)
    )
    return 1 - closest[0]


def closeness(columns: int, square: bool, k: int = NEIGHBORS) -> Strip:
    """Return what finds, of strips of similarities, the mean of the k largest but for a sample's own."""
    count = min(k, columns - square)

    def found(where: range, similarities: Tensor) -> tuple[Tensor, ...]:
        if not square:
            return (similarities.topk(count, dim=1).values.mean(1),)
        rows = torch.arange(len(where), device=similarities.device)
        places = rows, rows + where.start
        own = similarities[places].clone()
        similarities[places] = -torch.inf
        best = similarities.topk(count, dim=1).values
        similarities[places] = own
        return (best.mean(1) if count else torch.zeros_like(own),)

    return found


def refuse_unbounded(gram: GramMatrix) -> None:
    """Raise where similarities have no largest value to compare with."""
    refuse_other(gram)
    if not gram.kernel.row == gram.kernel.column == -0.5:
        raise ValueError(
            f"Similarities of at most 1 are needed, and those of {gram.kernel} have no limit: use "
            "gram.with_kernel(likewise.CORRELATION)."
        )
