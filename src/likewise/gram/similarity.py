"""The one-liner."""

from typing import Any

from torch import Tensor, nn

from likewise.engines import EngineName
from likewise.gram.matrix import GramMatrix
from likewise.kernels import CORRELATION, Kernel
from likewise.model import Network
from likewise.readouts import Readout, all_outputs


def similarity(
    model: nn.Module | Network,
    a: Any,
    b: Any = None,
    readout: Readout = all_outputs,
    kernel: Kernel = CORRELATION,
    centered: bool = False,
    engine: EngineName = "auto",
) -> Tensor:
    """Return k(x, x') of the samples of `a` with those of `b` (or with each other), (n, m).

    1 for inputs that the network cannot tell apart, 0 for inputs that have nothing in common. A
    `Network` keeps its own readout and parameters.
    """
    net = model if isinstance(model, Network) else Network(model, readout)
    return GramMatrix(net, a, b, kernel, engine, centered).dense()
