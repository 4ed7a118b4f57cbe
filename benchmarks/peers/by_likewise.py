"""likewise, as a user calls it: a GramMatrix and its dense form."""

from collections.abc import Callable

from torch import Tensor

import likewise as lw
from peers.work import Work


def ready(work: Work) -> Callable[[], Tensor]:
    """Set-up is the trace of the model and its comparison with autograd."""
    exponent = -0.5 if work.normalized else 0
    gram = lw.GramMatrix(
        lw.Network(work.model, readout=work.readout),
        tuple(work.left),
        columns=None if work.square else tuple(work.right),
        kernel=lw.Kernel(exponent, exponent, lw.mean_diagonal if work.d == 1 else lw.whole_block),
    )
    assert gram.d == work.d
    return gram.dense
