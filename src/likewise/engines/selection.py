"""Selects the gradient engine of a model: the traced engine if its gradients are correct, else the reference.

Before the first number is returned, the traced gradients of a few samples are compared with plain autograd,
parameter by parameter (validation.py). Where they differ, or the model cannot be traced, the dense engine takes
over and a warning says why. With either engine, every later pass checks some of its samples.
"""

import warnings
from contextlib import nullcontext
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from likewise.data import Samples
from likewise.engines.base import Engine
from likewise.engines.dense import DenseEngine, Jacobians
from likewise.engines.factors import describe_shapes, resize_outputs
from likewise.engines.gradient_batch import (
    GradientBatch,
    compute_gradients,
    count_output_bytes,
    differentiate_pass,
)
from likewise.engines.memory import (
    PRODUCT_BYTES,
    SLACK,
    MemoryMeter,
    MemoryUse,
    entries_per_sample,
    fit_batch_size,
    is_out_of_memory,
    keep_freed_memory,
)
from likewise.engines.pass_check import PassCheck
from likewise.engines.traced import GradientForms, TracedEngine
from likewise.engines.tracer import (
    TRACE_FUNCTIONS,
    RegroupedError,
    Trace,
    TraceFunction,
    repeat_samples,
    trace_model,
)
from likewise.engines.validation import Fault, FirstPair, find_fault, regrouping_fault
from likewise.linalg import matrix_power
from likewise.model import Inputs, Network
from likewise.readouts import Outputs, Readout
from likewise.torch_state import full_float32

CACHE = 48 * 2**20  # bytes of a batch with its sums beyond which a CPU takes longer per sample, measured
GRADIENT_CACHE = 100 * 2**20  # the same where the gradients of one parameter at a time are formed
CHECKED = 8  # outputs, or combinations of more of them, that are checked
MEASURED = 4  # outputs whose memory is measured; that of more is counted from shapes
MANY_OUTPUTS = 512  # beyond which a warning says what they cost
EngineName = Literal["auto", "autograd", "layers"]
Shape = tuple[int, int, int]  # d, p and the bytes of a number


def select_engine(
    net: Network,
    samples: Samples,
    later: Samples | None,
    engine: EngineName,
    max_memory: int,
    pair: FirstPair | None = None,
    d: int | None = None,
) -> Engine:
    """Return the requested engine; call it inside `net.evaluation_mode`.

    Args:
        net: The network.
        samples: A few samples of the first batch, for tracing and validation.
        later: A few samples of another batch, on which the model may take another branch, if there are any.
        engine: "auto" and "layers" trace the model, "autograd" is the dense reference.
        max_memory: Bytes for gradients, beside the model and its activations.
        pair: Of a large model, passes over two samples: it is checked on these alone instead of `samples`; PassCheck
            looks at others in every pass.
        d: The number of outputs, if it is known; else the network is called on a sample.

    """
    keep_freed_memory()
    if pair is not None:
        samples, later = pair.samples, None if later is None else later[:2]
    if engine != "autograd":
        shape = Jacobians(net).shape(samples[:1], d)
        for trace_function in TRACE_FUNCTIONS:
            try:
                select = _select_traced if pair is None else partial(_select_large, pair=pair)
                found = select(net, samples, later, trace_function, max_memory, shape)
                if isinstance(found, TracedEngine):
                    return found
                reason, remedy = found
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
    return DenseEngine(Jacobians(net), max_memory, check=PassCheck(net))


def _select_traced(
    net: Network,
    samples: Samples,
    later: Samples | None,
    trace_function: TraceFunction,
    max_memory: int,
    shape: Shape,
) -> TracedEngine | Fault:
    """Return the traced engine, or the fault of its gradients."""
    trace = trace_function(net, samples)
    _refuse_large(shape, max_memory)
    fit = _fit_memory(net, trace, samples[:1], shape, max_memory)
    d, p, number = shape
    most = min(CHECKED, max(1, max_memory // (12 * p * max(number, 4))))  # dense gradients of two samples fit
    checked = net.exact() if d <= most else net.exact(_combined_outputs(net, d, most))
    known = trace if net.autocast is None else None  # the check is without autocast
    fault = find_fault(checked, samples, later, trace_function, trace=known)
    if fault is not None:
        return fault
    return TracedEngine(net, trace, fit.size, fit.memory, PassCheck(net), None, fit.gradient_size)


def _select_large(
    net: Network,
    samples: Samples,
    later: Samples | None,
    trace_function: TraceFunction,
    max_memory: int,
    shape: Shape,
    pair: FirstPair,
) -> TracedEngine | Fault:
    """Return the traced engine of a large model, or the fault of its gradients: of two samples, which are kept."""
    _refuse_large(shape, max_memory)
    if trace_function is trace_model:
        trace, trial = _try_pair(net, pair, shape[0], max_memory if pair.is_all else 0)
    else:
        trace = trace_function(net, samples)
        trial = _try_gradients(with_combined_outputs(net, shape[0], 1), trace, samples)
    fit = _fit_memory(net, trace, samples[:1], shape, max_memory, trial)
    d, gradients, is_exact = shape[0], trial.gradients, net.autocast is None
    checked, plain = net.exact(), pair.plain
    if gradients.d < d:
        checked, plain = net.exact(_combined_outputs(net, d, 1)), plain.mix(_mixing(d, 1))
    traced, known = (trace, gradients) if is_exact else (None, None)  # the check is without autocast
    fault = find_fault(
        checked,
        samples,
        later,
        trace_function,
        trace=traced,
        brief=True,
        regrouped=not pair.is_all,
        known=known,
        plain=plain,
    )
    if fault is not None:
        return fault
    check = PassCheck(net, verified=samples if is_exact else None)
    forms = GradientForms.of(gradients, net.parameters)
    engine = TracedEngine(net, trace, fit.size, fit.memory, check, forms, fit.gradient_size)
    if is_exact and gradients.d == d and pair.is_all:
        engine.keep(gradients)
    return engine


def _try_pair(net: Network, pair: FirstPair, d: int, max_memory: int) -> "tuple[Trace, _Trial]":
    """Return the trace of a large model and the gradients of two samples: those of all outputs, if few and they fit.

    Args:
        net: The network.
        pair: Passes over the samples.
        d: The number of outputs.
        max_memory: Bytes for the gradients of all outputs, beyond which a random combination is taken.

    """
    trace, recorder, meter = pair.take_recorded(net)
    with full_float32(), meter, torch.enable_grad():
        outputs = recorder.outputs
        bytes_of_all = (d + 1) * count_output_bytes(recorder.steps)
        if d > 1 and (d > MEASURED or meter.now + bytes_of_all > max_memory):
            outputs = outputs @ _mixing(d, 1).to(outputs)
        gradients = differentiate_pass(net, recorder, pair.samples, outputs)
        del recorder, outputs
        device = next(iter(net.parameters.values())).device
        return trace, _Trial(gradients, meter.peak, meter.now, device)


def with_combined_outputs(net: Network, d: int, count: int) -> Network:
    """Return the network with random combinations of its outputs."""
    return net.with_readout(_combined_outputs(net, d, count))


def _combined_outputs(net: Network, d: int, count: int) -> Readout:
    """Return the readout of random combinations of all outputs: an error in any of them shows."""
    mixing = _mixing(d, count)

    def read(outputs: Outputs, labels: Tensor | None, ids: Tensor, inputs: Inputs) -> Tensor:
        every = net.read(outputs, labels, ids, inputs)
        return every.reshape(len(every), -1) @ mixing.to(every)

    return read


def _mixing(d: int, count: int) -> Tensor:
    """Return the weights of random combinations of outputs, (d, count)."""
    return torch.randn(d, count, generator=torch.Generator().manual_seed(0)) / d**0.5


def _refuse_large(shape: Shape, max_memory: int) -> None:
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


def _fixed_bytes(shape: Shape) -> int:
    """Return the bytes of copies of parameters, a sum over them in the model's precision, and three in float64."""
    _, p, number = shape
    return p * (number + 4 + 3 * 8)


def _checked_bytes(shape: Shape) -> int:
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
    shape: Shape,
    max_memory: int,
    trial: "_Trial | None" = None,
) -> _Fit:
    """Return the batch sizes that fit into memory, from the bytes that each sample takes in a vjp."""
    d, p, _ = shape
    if trial is None and d > MEASURED:
        trial = _try_gradients(with_combined_outputs(net, d, 2), trace, repeat_samples(samples, 2))
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
    product_bytes = min(PRODUCT_BYTES, max_memory // 8)
    memory = MemoryUse(_fixed_bytes(shape), each, entries_per_sample(samples.inputs), product_bytes)
    return _Fit(fit, fit_alone, memory)


def _peak_bytes(net: Network, trace: Trace, samples: Samples) -> tuple[int, int]:
    """Return the peak bytes of gradients alone, and with K(x, x); sums over parameters come on top."""
    device = next(iter(net.parameters.values())).device  # copies of parameters are not of the samples
    with MemoryMeter() as meter:
        gradients = TracedEngine(net, trace, len(samples)).gradients(samples)
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
