"""Which way to get at the gradients of this model: the fast one, if it is right.

Before the first number is returned, the operations' gradients of a few samples are compared with plain
autograd, parameter by parameter (validation.py); where they differ, or the model cannot be traced, the
reference takes over and a warning says why. Either engine has samples of every later pass checked.
"""

import warnings
from typing import Literal

import torch
from torch import Tensor

from likewise.data import Samples
from likewise.engines.base import Engine, fit_batch_size, is_out_of_memory
from likewise.engines.dense import DenseEngine
from likewise.engines.jacobians import Jacobians
from likewise.engines.memory import MemoryMeter
from likewise.engines.traced import TracedEngine
from likewise.engines.tracer import WAYS, Regrouped, Trace, repeat_samples
from likewise.engines.validation import SpotCheck, find_fault, regrouping_fault
from likewise.model import Inputs, Network
from likewise.readouts import Outputs, Readout

# Libraries take room of their own inside an operation, which is not counted.
SLACK = 1.25
CACHE = 48 * 2**20  # bytes beyond which a CPU gets slower a sample, measured
CHECKED = 8  # outputs, or combinations of more of them, that are checked
EngineName = Literal["auto", "autograd", "layers"]


def select_engine(
    net: Network, samples: Samples, later: Samples, engine: EngineName, max_memory: int, n: int = 1
) -> Engine:
    """Return the engine asked for; call it inside `net.evaluating`, with a few samples of two batches.

    `n`: how many samples a pass has, as far as that is known.
    """
    if engine != "autograd":
        for way in WAYS:
            try:
                trace = way(net, samples)
                size, room = _size(net, trace, samples[:1], max_memory)
                fault = find_fault(_checkable(net, samples[:1], max_memory), samples, later, way)
                if fault is None:
                    return TracedEngine(net, trace, size, room, SpotCheck(net, n))
                reason, remedy = fault
            except Regrouped as problem:
                reason, remedy = regrouping_fault(problem)
            except Exception as error:  # the reference is for whatever cannot be traced
                if is_out_of_memory(error):
                    raise
                reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
                remedy = "For full speed leave the parameters of that operation out, by parameters=[...]."
        warnings.warn(
            f"{type(net.model).__name__} is differentiated by the slower reference engine ({reason}). Its "
            f"numbers are exact. {remedy}",
            stacklevel=2,
        )
    return DenseEngine(Jacobians(net), max_memory, check=SpotCheck(net, n))


def _checkable(net: Network, samples: Samples, max_memory: int) -> Network:
    """Return the network in full precision, of so few outputs that explicit gradients of two samples fit."""
    d, p, number = Jacobians(net).shape(samples)
    most = min(CHECKED, max(1, max_memory // (12 * p * max(number, 4))))
    return net.exact() if d <= most else net.exact(_combined_outputs(net, d, most))


def _combined_outputs(net: Network, d: int, count: int) -> Readout:
    """Return the readout of random combinations of all outputs: an error in any of them shows."""
    mixing = torch.randn(d, count, generator=torch.Generator().manual_seed(0)) / d**0.5

    def read(outputs: Outputs, labels: Tensor | None, ids: Tensor, inputs: Inputs) -> Tensor:
        every = net.read(outputs, labels, ids, inputs)
        return every.reshape(len(every), -1) @ mixing.to(every)

    return read


def _size(net: Network, trace: Trace, samples: Samples, max_memory: int) -> tuple[int, tuple[int, int]]:
    """Return how many samples to take at once, by the room that each takes in the summing pass."""
    d, p, number = Jacobians(net).shape(samples)
    rest = p * (number + 4 + 3 * 8)  # copies, a sum in the model's precision, and three in float64
    if rest > max_memory:
        fit_batch_size(12 * d * p, d, p, max_memory, rest)
    few, more = (_room(net, trace, repeat_samples(samples, n)) for n in (2, 4))
    each = int(SLACK * max(more - few, 2) / 2)
    fit = fit_batch_size(each, d, p, max_memory, rest)
    on_cpu = next(iter(net.parameters.values())).device.type == "cpu"
    return min(fit, max(32, CACHE // each)) if on_cpu else fit, (rest, each)


def _room(net: Network, trace: Trace, samples: Samples) -> int:
    """Return the bytes at most in use while K(x, x) of samples is found; sums of parameters come on top."""
    _ = net.parameters  # copies are not of the samples
    with MemoryMeter() as meter:
        TracedEngine(net, trace, len(samples)).self_kernel(samples)
    return meter.peak
