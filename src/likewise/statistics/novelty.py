"""Which inputs are unlike all that the network was trained on."""

from dataclasses import dataclass

import torch
from torch import Tensor

from likewise.checks import check_integer
from likewise.gram import GramMatrix, Reducer, Strip
from likewise.gram.sketches import pair_source
from likewise.statistics.targets import refuse_other

NEIGHBORS = 10


@dataclass(frozen=True)
class ClosenessReducer(Reducer):
    """The mean plain similarity of each row to its k most similar columns, a sample itself left out."""

    k: int

    def __call__(self, strip: Strip) -> tuple[Tensor, ...]:
        """Return the means, (b,); 0 where there is no other sample."""
        plain = strip.plain
        if self.k == 0:
            return (plain.new_zeros(len(plain)),)
        return (strip.without_self(plain, -torch.inf).topk(self.k, dim=1).values.mean(1),)


def novelty(gram: GramMatrix, k: int = NEIGHBORS, *, sketch: int | None = None) -> Tensor:
    """1 − the mean plain similarity to the k most similar columns: larger is more unlike all data.

    0 means that the network cannot tell the input from k training samples. Its range depends on the network,
    so compare with the novelty of held-out data. Plain similarities are used whatever the matrix is: what all
    training samples share is what a novel input lacks. Visits all pairs; sums over all data, which take two
    passes, tell little (docs/uses.md).

    Args:
        gram: Rows are the inputs in question, columns the training set: lw.GramMatrix(net, new, columns=training).
            Of a data set with itself, a sample is not its own neighbor.
        k: How many neighbors are averaged.
        sketch: Estimate from random projections of so many numbers a sample.

    Returns:
        (n,) at most 2; as a rule in [0, 1].

    """
    refuse_unbounded(gram)
    k = check_integer("k", k, 1)
    count = min(k, gram.shape[1] - gram.square)
    if count < 1:
        raise ValueError("There is no other sample to be like: give more than one.")
    ((closeness,),) = pair_source(gram, sketch).visit(ClosenessReducer(count))
    return 1 - closeness


def refuse_unbounded(gram: GramMatrix) -> None:
    """Raise where similarities have no largest value to compare with."""
    refuse_other(gram)
    if not gram.kernel.bounded:
        raise ValueError(
            f"Similarities of at most 1 are needed, and those of {gram.kernel} have no limit: use "
            "gram.with_kernel(likewise.CORRELATION)."
        )
