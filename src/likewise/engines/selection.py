"""Selects the gradient engine of a model: the traced engine if its gradients are correct, else the reference.

Before the first number is returned, the traced gradients of a few samples are compared with plain autograd,
parameter by parameter (validation.py). Where they differ, or the model cannot be traced, the dense engine takes
over and a warning says why. With either engine, every later pass checks some of its samples.
"""

import warnings
from contextlib import nullcontext
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from likewise.data import Samples
from likewise.engines.base import Engine
from likewise.engines.dense import DenseEngine, Jacobians
from likewise.engines.factors import describe_shapes, resize_outputs
from likewise.engines.gradient_batch import GradientBatch, compute_gradients
from likewise.engines.memory import (
    MemoryMeter,
    MemoryUse,
    fit_batch_size,
    is_out_of_memory,
    keep_freed_memory,
)
from likewise.engines.pass_check import PassCheck
from likewise.engines.traced import TracedEngine
from likewise.engines.tracer import TRACE_FUNCTIONS, RegroupedError, Trace, repeat_samples
from likewise.engines.validation import find_fault, regrouping_fault, reverse_samples
from likewise.linalg import matrix_power
from likewise.model import Inputs, Network
from likewise.precision import full_float32
from likewise.readouts import Outputs, Readout

# Libraries allocate scratch memory inside an operation, which MemoryMeter does not count.
SLACK = 1.25
CACHE = 48 * 2**20  # bytes of a batch with its sums beyond which a CPU takes longer per sample, measured
GRADIENT_CACHE = (
    64 * 2**20
)  # the same where each parameter's gradients are released before the next are formed
CHECKED = 8  # outputs, or combinations of more of them, that are checked
CHECKED_LARGE = 1  # the same of a large model; PassCheck looks at all outputs of other samples, in every pass
MEASURED = 4  # outputs whose memory is measured; that of more, and of a large model, is counted from shapes
MANY_OUTPUTS = 512  # beyond which a warning says what they cost
EngineName = Literal["auto", "autograd", "layers"]


def select_engine(
    net: Network,
    samples: Samples,
    later: Samples | None,
    engine: EngineName,
    max_memory: int,
    n: int = 1,
    large: bool = False,
    d: int | None = None,
) -> Engine:
    """Return the requested engine; call it inside `net.evaluation_mode`.

    Args:
        net: The network.
        samples: A few samples of the first batch, for tracing and validation.
        later: A few samples of another batch, on which the model may take another branch, if there are any.
        engine: "auto" and "layers" trace the model, "autograd" is the dense reference.
        max_memory: Bytes for gradients, beside the model and its activations.
        n: The number of samples of a pass, as far as it is known.
        large: Check the model on fewer samples; PassCheck looks at others in every pass.
        d: The number of outputs, if it is known; else the network is called on a sample.

    """
    keep_freed_memory()
    if large:
        samples, later = samples[:2], None if later is None else later[:2]
    if engine != "autograd":
        shape = Jacobians(net).shape(samples[:1], d)
        for trace_function in TRACE_FUNCTIONS:
            try:
                trace = trace_function(net, samples)
                _refuse_large(shape, max_memory)
                checked = _checkable(net, shape, max_memory, large)
                known = trace if net.autocast is None else None  # the check is without autocast
                trial = None
                if large:  # what is measured here is checked there
                    of = (
                        checked if known is not None else _with_combined_outputs(net, shape[0], CHECKED_LARGE)
                    )
                    trial = _try_gradients(of, trace, reverse_samples(samples))
                fit = _fit_memory(net, trace, samples[:1], shape, max_memory, trial)
                gradients = trial.gradients if trial is not None and known is not None else None
                fault = find_fault(
                    checked, samples, later, trace_function, trace=known, brief=large, reverse=gradients
                )
                if fault is None:
                    shapes = None if trial is None else trial.gradients
                    is_verified = large and net.autocast is None  # the check is without autocast
                    check = PassCheck(net, n, verified=samples if is_verified else None)
                    return TracedEngine(net, trace, fit.size, fit.memory, check, shapes, fit.gradient_size)
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
    return DenseEngine(Jacobians(net), max_memory, check=PassCheck(net, n))


def _checkable(net: Network, shape: tuple[int, int, int], max_memory: int, large: bool) -> Network:
    """Return the network in full precision, with so few outputs that dense gradients of two samples fit."""
    d, p, number = shape
    most = min(CHECKED_LARGE if large else CHECKED, max(1, max_memory // (12 * p * max(number, 4))))
    return net.exact() if d <= most else net.exact(_combined_outputs(net, d, most))


def _with_combined_outputs(net: Network, d: int, count: int) -> Network:
    """Return the network with random combinations of its outputs."""
    return Network(net.model, _combined_outputs(net, d, count), parameters=net.names, autocast=net.autocast)


def _combined_outputs(net: Network, d: int, count: int) -> Readout:
    """Return the readout of random combinations of all outputs: an error in any of them shows."""
    mixing = torch.randn(d, count, generator=torch.Generator().manual_seed(0)) / d**0.5

    def read(outputs: Outputs, labels: Tensor | None, ids: Tensor, inputs: Inputs) -> Tensor:
        every = net.read(outputs, labels, ids, inputs)
        return every.reshape(len(every), -1) @ mixing.to(every)

    return read


def _refuse_large(shape: tuple[int, int, int], max_memory: int) -> None:
    """Raise if sums over parameters alone take more than max_memory, and warn of many outputs."""
    d, p, _ = shape
    if _fixed_bytes(shape) > max_memory:
        fit_batch_size(12 * d * p, d, p, max_memory, _fixed_bytes(shape))
    if d > MANY_OUTPUTS:
        warnings.warn(
            f"{d:,} outputs take {d:,} backward passes over every batch and a {d:,} × {d:,} matrix a sample. "
            "The readout likewise.projected_outputs(16), 16 random combinations of them, costs a fraction.",
            stacklevel=3,
        )


def _fixed_bytes(shape: tuple[int, int, int]) -> int:
    """Return the bytes of copies of parameters, a sum over them in the model's precision, and three in float64."""
    _, p, number = shape
    return p * (number + 4 + 3 * 8)


def _checked_bytes(shape: tuple[int, int, int]) -> int:
    """Return the bytes of copies of parameters, and of a gradient that a pass compares with autograd's."""
    _, p, number = shape
    return 4 * number * p


class _Fit(NamedTuple):
    """How many samples fit into memory."""

    size: int  # beside sums over parameters
    gradient_size: int  # where only gradients are computed
    memory: MemoryUse


def _fit_memory(
    net: Network,
    trace: Trace,
    samples: Samples,
    shape: tuple[int, int, int],
    max_memory: int,
    trial: "_Trial | None",
) -> _Fit:
    """Return the batch sizes that fit into memory, from the bytes that each sample takes in a vjp."""
    d, p, _ = shape
    if trial is None and d > MEASURED:
        trial = _try_gradients(_with_combined_outputs(net, d, 2), trace, repeat_samples(samples, 2))
    bytes_of = None if trial is None else trial.count_bytes
    if trial is not None:
        alone, each = trial.count_gradient_bytes(d), trial.count_bytes(d)
    else:
        few, more = (_peak_bytes(net, trace, repeat_samples(samples, n)) for n in (2, 4))
        alone, each = (int(SLACK * max(b - a, 2) / 2) for a, b in zip(few, more, strict=True))
    fit = fit_batch_size(each, d, p, max_memory, _fixed_bytes(shape), bytes_of)
    fit_alone = max(fit, (max_memory - _checked_bytes(shape)) // each)
    if next(iter(net.parameters.values())).device.type == "cpu":
        fit_alone = min(fit_alone, max(32, GRADIENT_CACHE // alone))
        fit = min(fit, max(32, CACHE // each))
    return _Fit(fit, fit_alone, MemoryUse(_fixed_bytes(shape), each))


def _peak_bytes(net: Network, trace: Trace, samples: Samples) -> tuple[int, int]:
    """Return the peak bytes of gradients alone, and with K(x, x); sums over parameters come on top."""
    device = next(iter(net.parameters.values())).device  # copies of parameters are not of the samples
    with MemoryMeter() as meter:
        gradients = compute_gradients(net, trace, samples)
        alone = meter.peak
        gradients.self_gram(device)
    return alone, meter.peak


class _Trial(NamedTuple):
    """The gradients of few outputs of a small batch, and the bytes that they took."""

    gradients: GradientBatch
    peak: int  # while they were computed
    kept: int  # after it
    device: torch.device

    def count_bytes(self, d: int) -> int:
        """Return the bytes that K(x, x) of d outputs takes, for each sample.

        What more outputs take is counted: their gradients with respect to every operation, and the products of these,
        taken of tensors that have shapes but no memory.
        """
        products = _count_products(self.gradients, d, self.device)
        most = max(self.peak, self.kept + products) + self._more_deltas(d)
        return int(SLACK * max(most, 2) / len(self.gradients.samples))

    def count_gradient_bytes(self, d: int) -> int:
        """Return the bytes that the gradients of d outputs take before any of them is formed, for each sample."""
        return int(SLACK * max(self.peak + self._more_deltas(d), 2) / len(self.gradients.samples))

    def _more_deltas(self, d: int) -> int:
        return (d - self.gradients.d) * self.gradients.bytes_per_output


def _try_gradients(net: Network, trace: Trace, samples: Samples) -> _Trial:
    """Return the gradients of a batch, measured."""
    device = next(iter(net.parameters.values())).device  # copies of parameters are not of the samples
    with full_float32(), MemoryMeter() as meter:
        gradients = compute_gradients(net, trace, samples)
        return _Trial(gradients, meter.peak, meter.now, device)


def _count_products(gradients: GradientBatch, d: int, device: torch.device) -> int:
    """Return the peak bytes of K(x, x) of d outputs, beside output gradients, from shapes alone."""
    kept, scratch, known = 0, 0, dict[str, tuple[int, int]]()
    fake = FakeTensorMode() if d > MEASURED else None  # which imports PyTorch's compiler: that takes seconds
    mode, convert = (nullcontext(), Tensor.detach) if fake is None else (fake, fake.from_tensor)
    for names, gradient in gradients.blocks:
        shapes = describe_shapes(gradient)
        if shapes not in known:  # most networks repeat the same layers
            with mode:
                resized = resize_outputs(gradient, d, convert)
                with MemoryMeter() as meter:
                    resized.self_gram()
                    known[shapes] = meter.now, meter.peak
        kept += known[shapes][0]
        if len(names) > 1:  # concatenated
            kept += d * gradient.rows()[:, 0].nbytes
        scratch = max(scratch, known[shapes][1])
    with mode, MemoryMeter() as meter:
        self_kernel = torch.zeros(len(gradients.samples), d, d, dtype=torch.float64, device=device)
        matrix_power(self_kernel, -0.5, 1e-12)
    return (
        kept + max(scratch, meter.peak) + 3 * self_kernel.nbytes
    )  # the sum, and its power in parts and whole
