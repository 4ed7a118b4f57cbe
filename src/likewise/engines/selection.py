"""Selects the gradient engine of a model: the traced engine if its gradients are correct, else the reference.

Before the first number is returned, the traced gradients of a few samples are compared with plain autograd,
parameter by parameter (validation.py). Where they differ, or the model cannot be traced, the dense engine takes
over and a warning says why. With either engine, every later pass checks some of its samples.
"""

import warnings
from typing import Literal

import torch
from torch import Tensor

from likewise.data import Samples
from likewise.engines.base import Engine
from likewise.engines.dense import DenseEngine, Jacobians
from likewise.engines.memory import MemoryMeter, MemoryUse, fit_batch_size, is_out_of_memory
from likewise.engines.traced import TracedEngine
from likewise.engines.tracer import TRACE_FUNCTIONS, RegroupedError, Trace, repeat_samples
from likewise.engines.validation import SpotCheck, find_fault, regrouping_fault
from likewise.model import Inputs, Network
from likewise.readouts import Outputs, Readout

# Libraries allocate scratch memory inside an operation, which MemoryMeter does not count.
SLACK = 1.25
CACHE = 48 * 2**20  # bytes beyond which a CPU gets slower a sample, measured
CHECKED = 8  # outputs, or combinations of more of them, that are checked
EngineName = Literal["auto", "autograd", "layers"]


def select_engine(
    net: Network, samples: Samples, later: Samples, engine: EngineName, max_memory: int, n: int = 1
) -> Engine:
    """Return the requested engine; call it inside `net.evaluation_mode`.

    Args:
        net: The network.
        samples: A few samples of the first batch, for tracing and validation.
        later: A few samples of another batch, on which the model may take another branch.
        engine: "auto" and "layers" trace the model, "autograd" is the dense reference.
        max_memory: Bytes for gradients, beside the model and its activations.
        n: The number of samples of a pass, as far as it is known.

    """
    if engine != "autograd":
        for trace_function in TRACE_FUNCTIONS:
            try:
                trace = trace_function(net, samples)
                size, memory = _fit_memory(net, trace, samples[:1], max_memory)
                fault = find_fault(_checkable(net, samples[:1], max_memory), samples, later, trace_function)
                if fault is None:
                    return TracedEngine(net, trace, size, memory, SpotCheck(net, n))
                reason, remedy = fault
            except RegroupedError as problem:
                reason, remedy = regrouping_fault(problem)
            except Exception as error:  # the reference handles every model that cannot be traced
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
    """Return the network in full precision, with so few outputs that dense gradients of two samples fit."""
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


def _fit_memory(net: Network, trace: Trace, samples: Samples, max_memory: int) -> tuple[int, MemoryUse]:
    """Return the batch size that fits into memory, from the bytes that each sample takes in a vjp."""
    d, p, number = Jacobians(net).shape(samples)
    rest = p * (number + 4 + 3 * 8)  # copies, a sum in the model's precision, and three in float64
    if rest > max_memory:
        fit_batch_size(12 * d * p, d, p, max_memory, rest)
    few, more = (_peak_bytes(net, trace, repeat_samples(samples, n)) for n in (2, 4))
    each = int(SLACK * max(more - few, 2) / 2)
    fit = fit_batch_size(each, d, p, max_memory, rest)
    on_cpu = next(iter(net.parameters.values())).device.type == "cpu"
    return min(fit, max(32, CACHE // each)) if on_cpu else fit, MemoryUse(rest, each)


def _peak_bytes(net: Network, trace: Trace, samples: Samples) -> int:
    """Return the peak bytes while K(x, x) of samples is computed; sums over parameters come on top."""
    _ = net.parameters  # copies are not of the samples
    with MemoryMeter() as meter:
        TracedEngine(net, trace, len(samples)).self_kernel(samples)
    return meter.peak
