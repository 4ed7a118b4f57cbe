"""The similarity of activations, for comparison (sec. 2.3 and 6.2)."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from likewise.checks import check_integer, check_names, check_tensor
from likewise.engines import Activations, DenseEngine
from likewise.gram import GramMatrix
from likewise.kernels import CORRELATION, Kernel
from likewise.model import Network


def perceptual(
    model: Network | nn.Module,
    layers: str | Sequence[str],
    data: Any,
    columns: Any = None,
    *,
    weights: Sequence[float] | None = None,
    kernel: Kernel = CORRELATION,
    centered: bool = False,
    max_memory: int = 2**31,
) -> GramMatrix:
    """Return the Gram matrix of Σ_l λ_l a_l(x)·a_l(x'), or its cosine by default, (d = 1).

    `layers`: names or glob patterns of modules whose outputs are the activations; `weights`: their
    λ, one by default. Every use of a GramMatrix and every statistic but those of predictions works
    on it; with kernel=INNER_PRODUCT it is the plain sum.
    """
    net = model if isinstance(model, Network) else Network(model, parameters="*")  # frozen ones too
    names = check_names("layers", layers, "names or glob patterns of modules, such as 'layer4.*'")
    max_memory = check_integer("max_memory", max_memory, 1, advice="bytes, such as 2**30")
    if weights is not None:
        weights = check_tensor("weights", weights).reshape(-1).tolist()
    source = Activations(net, names, [1.0] * len(names) if weights is None else weights)
    engine = DenseEngine(source, max_memory // 2)
    return GramMatrix(
        net, data, columns, kernel=kernel, engine=engine, centered=centered, max_memory=max_memory
    )
