"""Similarity in one call: of gradients, or of activations for comparison (sec. 2.3 and 6.2 of the paper)."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from likewise.checks import check_integer, check_names, check_tensor
from likewise.engines import Activations, DenseEngine, EngineName, default_max_memory
from likewise.gram.matrix import GramMatrix
from likewise.kernels import CORRELATION, Kernel
from likewise.model import Network, to_network
from likewise.readouts import Readout, all_outputs


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
        readout: Whose gradients are compared; chosen by the model's outputs if None (see `Network`).
        kernel: Which kernel; k^C by default.
        centered: Double-centered over the columns.
        engine: How gradients are computed.

    Returns:
        (n, m), on the model's device.

    Raises:
        ValueError: A Network was given, and a readout beside it.

    Example:
        >>> import torch, likewise as lw
        >>> x = torch.randn(5, 4)
        >>> lw.similarity(torch.nn.Linear(4, 2), x).diagonal().round(decimals=4)
        tensor([1., 1., 1., 1., 1.])

    """
    net = to_network(model, readout)
    return GramMatrix(net, a, b, kernel=kernel, engine=engine, centered=centered).dense()


def perceptual(
    model: Network | nn.Module,
    layers: str | Sequence[str],
    data: Any,
    columns: Any = None,
    *,
    weights: Sequence[float] | None = None,
    kernel: Kernel = CORRELATION,
    centered: bool = False,
    max_memory: int | None = None,
) -> GramMatrix:
    """Return the Gram matrix of Σ_l λ_l a_l(x)·a_l(x'), or its cosine by default, (d = 1).

    Every use of a GramMatrix and every statistic but those of predictions works
    on it; with kernel=INNER_PRODUCT it is the plain sum.

    Args:
        model: A model, or a Network.
        layers: Names or glob patterns of modules whose outputs are the activations.
        data: The rows: anything that `likewise.batches` accepts.
        columns: The columns; `data` if None.
        weights: λ of each layer; 1 if None.
        kernel: Which kernel; the cosine by default.
        centered: Double-centered over the columns.
        max_memory: Bytes for activations and strips.

    Returns:
        A GramMatrix of activations.

    Example:
        >>> import torch, likewise as lw
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> lw.nearest(lw.perceptual(model, "1", torch.randn(9, 4)), k=3).indices.shape
        torch.Size([9, 3])

    """
    net = (
        model if isinstance(model, Network) else Network(model, all_outputs, parameters="*")
    )  # frozen ones too
    names = check_names("layers", layers, "names or glob patterns of modules, such as 'layer4.*'")
    if max_memory is None:
        max_memory = default_max_memory(next(net.model.parameters()).device)
    max_memory = check_integer("max_memory", max_memory, 1, advice="bytes, such as 2**30")
    if weights is not None:
        weights = check_tensor("weights", weights).reshape(-1).tolist()
    source = Activations(net, names, [1.0] * len(names) if weights is None else weights)
    engine = DenseEngine(source, max_memory // 2)
    return GramMatrix(
        net, data, columns, kernel=kernel, engine=engine, centered=centered, max_memory=max_memory
    )
