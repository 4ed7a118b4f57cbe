"""The one-liner."""

from typing import Any

from torch import Tensor, nn

from likewise.engines import EngineName
from likewise.gram.matrix import GramMatrix
from likewise.kernels import CORRELATION, Kernel
from likewise.model import Network, to_network
from likewise.readouts import Readout


def similarity(
    model: nn.Module | Network,
    a: Any,
    b: Any = None,
    *,
    readout: Readout | None = None,
    kernel: Kernel = CORRELATION,
    centered: bool = False,
    engine: EngineName = "auto",
) -> Tensor:
    """Return k(x, x') of the samples of `a` with those of `b` (or with each other), (n, m).

    1 for inputs that the network cannot tell apart, 0 for inputs that have nothing in common.

    Args:
        model: A model, or a Network, which has its own readout and parameters.
        a: The rows: anything that `likewise.batches` accepts.
        b: The columns; `a` if None.
        readout: Whose gradients are compared; all outputs if None.
        kernel: Which kernel; k^C by default.
        centered: Double-centered over the columns.
        engine: How gradients are computed.

    Returns:
        (n, m), on the model's device.

    Raises:
        ValueError: A Network was given, and a readout beside it.

    """
    net = to_network(model, readout)
    return GramMatrix(net, a, b, kernel=kernel, engine=engine, centered=centered).dense()
