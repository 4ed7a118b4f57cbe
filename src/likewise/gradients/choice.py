"""Which way to get at the gradients of this model: the fast one, if it is right.

Before the first number is returned, the operations' gradients of two samples are compared with plain
autograd, parameter by parameter; where they differ, or the model cannot be traced, the reference takes
over and a warning says why.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from likewise.data import Samples
from likewise.gradients.autograd import Jacobians, disagreement
from likewise.gradients.base import Gradients, is_out_of_memory, samples_at_once
from likewise.gradients.explicit import Explicit
from likewise.gradients.layers import Layers, gathered
from likewise.gradients.trace import Trace, traced
from likewise.network import Network
from likewise.readouts import Outputs, Readout

Engine = Literal["auto", "autograd", "layers"]


def chosen(net: Network, samples: Samples, engine: Engine, max_memory: int) -> Gradients:
    """Return the engine asked for; call it inside `net.evaluating`, with a few samples."""
    if engine != "autograd":
        try:
            trace = traced(net, samples)
            size = _size(net, trace, samples[:1], max_memory)
            wrong = _wrong(_checkable(net, samples[:1], max_memory), samples[:2])
            if wrong is None:
                return Layers(net, trace, size)
            reason = f"the gradient in {wrong} came out different from autograd's"
        except Exception as error:  # the reference is for whatever cannot be traced
            if is_out_of_memory(error):
                raise
            reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
        warnings.warn(
            f"{type(net.model).__name__} is differentiated by the slower reference engine ({reason}).",
            stacklevel=2,
        )
    return Explicit(Jacobians(net), max_memory)


@contextmanager
def _full_float32() -> Iterator[None]:
    """No TF32 on a GPU: two right gradients in TF32 differ by more than a wrong one may."""
    backends: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn]
    before = [backend.allow_tf32 for backend in backends]
    try:
        for backend in backends:
            backend.allow_tf32 = False
        yield
    finally:
        for backend, allowed in zip(backends, before, strict=True):
            backend.allow_tf32 = allowed


def _checkable(net: Network, samples: Samples, max_memory: int) -> Network:
    """Return the network with so few of its outputs that explicit gradients of two samples fit."""
    d, p, number = Jacobians(net).shape(samples)
    most = max(1, max_memory // (12 * p * max(number, 4)))
    return net if d <= most else Network(net.model, _some_outputs(net, d, most), net.names)


def _some_outputs(net: Network, d: int, most: int) -> Readout:
    """Return the readout of `most` outputs, spread over all."""
    places = torch.linspace(0, d - 1, most).long()

    def read(outputs: Outputs, labels: Tensor | None, ids: Tensor) -> Tensor:
        every = net.read(outputs, labels, ids)
        return every[:, places.to(every.device)]

    return read


def _wrong(net: Network, samples: Samples) -> str | None:
    """Return the first parameter whose traced gradient is not autograd's, if any."""
    with _full_float32():
        rows = Layers(net, traced(net, samples), size=2).rows(samples, 0).rows
        return disagreement(net, rows, samples)


def _size(net: Network, trace: Trace, samples: Samples, max_memory: int) -> int:
    """Return how many samples fit, by what the pieces of one sample hold and form."""
    chunk = gathered(net, trace, samples)
    numbers = sum(piece.numbers() for piece in chunk.pieces.values())
    return samples_at_once(
        3 * numbers * max(net.dtype.itemsize, 4), chunk.d, sum(net.numels.values()), max_memory
    )
