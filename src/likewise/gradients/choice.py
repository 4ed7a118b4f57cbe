"""Which way to get at the gradients of this model: the fast one, if it is right.

Before the first number is returned, the operations' gradients of two samples are compared with plain
autograd, parameter by parameter; where they differ, or the model cannot be traced, the reference takes
over and a warning says why.
"""

import warnings
from typing import Literal

import torch
from torch import Tensor

from likewise.data import Samples
from likewise.gradients.autograd import Jacobians, disagreement, full_float32
from likewise.gradients.base import Gradients, is_out_of_memory, samples_at_once
from likewise.gradients.explicit import Explicit
from likewise.gradients.layers import Layers
from likewise.gradients.meter import Meter
from likewise.gradients.trace import Trace, repeated, traced
from likewise.network import Network
from likewise.readouts import Outputs, Readout

# Libraries take room of their own inside an operation, which is not counted.
SLACK = 1.25
CACHE = 48 * 2**20  # bytes beyond which a CPU gets slower a sample, measured
Engine = Literal["auto", "autograd", "layers"]


def chosen(net: Network, samples: Samples, engine: Engine, max_memory: int) -> Gradients:
    """Return the engine asked for; call it inside `net.evaluating`, with a few samples."""
    if engine != "autograd":
        try:
            trace = traced(net, samples)
            size, room = _size(net, trace, samples[:1], max_memory)
            wrong = _wrong(_checkable(net, samples[:1], max_memory), samples[:2])
            if wrong is None:
                return Layers(net, trace, size, room)
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


def _checkable(net: Network, samples: Samples, max_memory: int) -> Network:
    """Return the network with so few of its outputs that explicit gradients of two samples fit."""
    d, p, number = Jacobians(net).shape(samples)
    most = max(1, max_memory // (12 * p * max(number, 4)))
    return net.exact() if d <= most else net.exact(_some_outputs(net, d, most))


def _some_outputs(net: Network, d: int, most: int) -> Readout:
    """Return the readout of `most` outputs, spread over all."""
    places = torch.linspace(0, d - 1, most).long()

    def read(outputs: Outputs, labels: Tensor | None, ids: Tensor) -> Tensor:
        every = net.read(outputs, labels, ids)
        return every[:, places.to(every.device)]

    return read


def _wrong(net: Network, samples: Samples) -> str | None:
    """Return the first parameter whose traced gradient is not autograd's, if any."""
    with full_float32():
        rows = Layers(net, traced(net, samples), size=2).rows(samples, 0).rows
        return disagreement(net, rows, samples)


def _size(net: Network, trace: Trace, samples: Samples, max_memory: int) -> tuple[int, tuple[int, int]]:
    """Return how many samples to take at once, by the room that each takes in the summing pass."""
    d, p, number = Jacobians(net).shape(samples)
    rest = p * (number + 4 + 3 * 8)  # copies, a sum in the model's precision, and three in float64
    if rest > max_memory:
        samples_at_once(12 * d * p, d, p, max_memory, rest)
    few, more = (_room(net, trace, repeated(samples, n)) for n in (2, 4))
    each = int(SLACK * max(more - few, 2) / 2)
    fit = samples_at_once(each, d, p, max_memory, rest)
    on_cpu = next(iter(net.parameters.values())).device.type == "cpu"
    return min(fit, max(32, CACHE // each)) if on_cpu else fit, (rest, each)


def _room(net: Network, trace: Trace, samples: Samples) -> int:
    """Return the bytes at most in use while K(x, x) of samples is found; sums of parameters come on top."""
    _ = net.parameters  # copies are not of the samples
    with Meter() as meter:
        Layers(net, trace, len(samples)).self_kernel(samples)
    return meter.peak
