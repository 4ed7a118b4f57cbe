"""Checks before the first number: samples are independent, and the gradients of a traced model are right.

Outputs must be those of a sample alone: not random, not of its batch, not of an earlier call. Gradients are compared
with those of autograd, on samples in several orders and on invented ones.

A call of a large network takes long, so that each of those on the first two samples serves several purposes: the pass
of plain autograd tells whether samples are independent too, the recorded one is traced, measured, checked and used for
a first result, and the trace needs a call on one sample alone, which tells whether its outputs depend on others.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from likewise.data import Samples
from likewise.engines.comparison import (
    FLOAT64_TOLERANCE,
    Parts,
    PlainPass,
    all_finite,
    find_mismatch,
    inner_epsilon,
    network_outputs,
    plain_pass,
    weighted_gradient,
)
from likewise.engines.factors import combine_outputs
from likewise.engines.gradient_batch import GradientBatch, compute_gradients
from likewise.engines.memory import MemoryMeter, is_out_of_memory
from likewise.engines.tracer import (
    FirstRecorder,
    Layouts,
    PassRecorder,
    RegroupedError,
    RowTrace,
    Step,
    Trace,
    TraceFunction,
    UntraceableError,
    repeat_samples,
    trace_model,
)
from likewise.model import Network
from likewise.torch_state import fast_attention, full_float32

LARGE = 5e8  # floating-point operations of a forward pass of one sample
SHORT_MIDDLE = torch.tensor([1.0, 0.0, 1.0])  # shares of the lengths of three samples
REGROUPED = (
    "forward sorts, drops or groups samples or their positions, so that {} does not meet them in order"
)
KEEP_ORDER = (
    "For full speed, keep samples in their places inside forward: pad instead of x[mask], sort before the "
    "model is called."
)


class Fault(NamedTuple):
    """Why an engine's gradients cannot be used, and what to do about it."""

    reason: str
    remedy: str


class FirstCall(NamedTuple):
    """What one call of the network tells."""

    outputs: Tensor  # (1, d) of the first sample alone, or (2, d) if it fails alone; in full float32
    large: bool  # whether it takes so long that checks before the first number use fewer samples


def first_call(net: Network, samples: Samples) -> FirstCall:
    """Return the outputs of the first sample, and whether the network is large."""
    counter = OperationCounter()
    with full_float32():
        try:
            with counter:
                return FirstCall(network_outputs(net, samples[:1]), counter.flops > LARGE)
        except Exception as error:
            if is_out_of_memory(error):
                raise
        several = repeat_samples(samples[:2], 2)  # that one alone fails is for other checks to explain
        return FirstCall(network_outputs(net, several), large=False)


class OperationCounter(TorchDispatchMode):
    """Counts the floating-point operations of matrix products and convolutions."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes a second

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=result)
        return result


def find_fault(
    net: Network,
    samples: Samples,
    later: Samples | None = None,
    trace_function: TraceFunction = trace_model,
    *,
    trace: Trace | None = None,
    brief: bool = False,
    regrouped: bool = True,
    known: GradientBatch | None = None,
    plain: PlainPass | None = None,
) -> Fault | None:
    """Return the fault of the traced gradients of a model, None if they agree with autograd.

    Looked at are the samples in their order, in reverse, samples of a later batch if any are given, and
    samples invented from the first, of other values and lengths: a model that sorts or groups samples by
    their values, and leaves the given ones in order, shows it there.

    Args:
        net: The network.
        samples: A few samples.
        later: A few samples of another batch.
        trace_function: Traces the model.
        trace: Of this network on these samples, if it was traced before.
        brief: Of two samples, look only at them in their order, at one between two copies of the other, and at those
            of a later batch.
        regrouped: Look for samples that forward moves by their values; False if there is no batch but this one.
        known: The traced gradients of the samples, if they were computed before.
        plain: A pass of the network over the samples, if there was one before.

    Raises:
        UntraceableError: The model cannot be traced on these samples.

    """
    samples = repeat_samples(samples, max(2, len(samples)))
    with full_float32():  # two correct gradients in TF32 may differ by more than a wrong one
        trace = trace or trace_function(net, samples)
        fault = find_fault_of_batch(net, trace, samples, explicit=True, known=known, plain=plain)
        if fault is None and not brief:
            fault = find_fault_of_batch(net, trace, reverse_samples(samples))
        if fault is None and brief and regrouped:
            fault = _find_fault_between_copies(net, trace, samples)
        if fault is None and later is not None:
            fault = _find_fault_later(net, repeat_samples(later, max(2, len(later))), trace, trace_function)
        return fault if fault or brief else _find_fault_in_synthetic(net, trace, samples)


def reverse_samples(samples: Samples) -> Samples:
    """Return at least two samples, in reverse."""
    samples = repeat_samples(samples, max(2, len(samples)))
    return samples[torch.arange(len(samples)).flip(0)]


def _find_fault_between_copies(net: Network, trace: Trace, pair: Samples) -> Fault | None:
    """Return the fault of a model that sorts or groups samples, from the second of a pair between copies of the first.

    Sorted by any value in which the two differ, either way, three such samples do not keep their places, and an
    operation meets the copies as different ones. The one in the middle is first truncated to one position, since two
    samples may be of the same length. Costs one forward pass if all is well.
    """
    if isinstance(trace, RowTrace):  # which finds the sample of each row in every batch
        return None
    between = pair[torch.tensor([0, 1, 0])]
    inputs = tree_map(partial(_truncate, shares=SHORT_MIDDLE), between.inputs)
    for batch in (Samples(inputs, between.labels, between.ids), between):
        recorder = PassRecorder(net, trace)
        try:
            with fast_attention(next(iter(recorder.parameters.values())).device):
                outputs = recorder.record_pass(net, batch)
        except RegroupedError as problem:
            return regrouping_fault(problem)
        except UntraceableError:  # another branch, which says nothing of the trace
            continue
        except Exception as error:  # what was invented may be nothing that the model accepts
            if batch is between or is_out_of_memory(error):
                raise
            continue
        if outputs.isfinite().all():
            are_in_place = all(map(_meets_copies, recorder.steps))
            del recorder, outputs
            return None if are_in_place else find_fault_of_batch(net, trace, batch)
    return None


def _meets_copies(step: Step) -> bool:
    """Whether the first and the last of three samples are the same to an operation."""
    for place, dimension in step.layout.batched.items():
        first, _, last = step.operation.leaves[place].detach().tensor_split(3, dimension)
        if torch.equal(first, last):
            continue
        if not (first.is_floating_point() or first.is_complex()):
            return False
        tolerance = torch.finfo(first.dtype).eps ** 0.75  # rounding may depend on the place
        if not (first - last).abs().max() <= tolerance * first.abs().max():
            return False
    return True


def _find_fault_later(
    net: Network, samples: Samples, trace: Trace, trace_function: TraceFunction
) -> Fault | None:
    """Return the fault on samples on which the model may take another branch than the trace."""
    try:
        try:
            known = compute_gradients(net, trace, samples)
        except UntraceableError:
            trace = trace_function(net, samples)
            known = None
        fault = find_fault_of_batch(net, trace, samples, known=known)
        return None if fault is not None and not _have_finite_gradients(net, samples) else fault
    except RegroupedError as problem:
        return regrouping_fault(problem)
    except UntraceableError:  # such batches are differentiated one by one, when they come
        return None


def _have_finite_gradients(net: Network, samples: Samples) -> bool:
    """Whether autograd's gradients are finite: if not, they say nothing of a trace; the pass names them."""
    weights = torch.ones(len(samples), network_outputs(net, samples).shape[1])
    return all_finite(weighted_gradient(net, samples, weights))


def _find_fault_in_synthetic(net: Network, trace: Trace, samples: Samples) -> Fault | None:
    batch = _synthesize_samples(samples)
    try:
        outputs = network_outputs(net, batch)
    except Exception as error:  # what was invented may be nothing that the model accepts
        if is_out_of_memory(error):
            raise
        return None
    try:
        return find_fault_of_batch(net, trace, batch) if outputs.isfinite().all() else None
    except UntraceableError:
        return None


def find_fault_of_batch(
    net: Network,
    trace: Trace,
    samples: Samples,
    *,
    explicit: bool = False,
    known: GradientBatch | None = None,
    plain: PlainPass | None = None,
) -> Fault | None:
    """Return the fault of the traced gradients of one batch, None if they agree with autograd.

    A batch on which the model takes another branch than the trace says nothing of the trace.

    Args:
        net: The network.
        trace: Of the model.
        samples: The batch.
        explicit: Take half of the samples from dense gradients, instead of all from weighted sums.
        known: The traced gradients of the batch, if they were computed before.
        plain: A pass of the network over the batch, if there was one before.

    """
    try:
        known = known or compute_gradients(net, trace, samples)
    except RegroupedError as problem:
        return regrouping_fault(problem)
    except UntraceableError:
        if isinstance(trace, RowTrace):  # which has no branches
            raise
        return None

    def chunk(other: Network) -> GradientBatch:
        if other is net:
            return known
        again = RowTrace() if isinstance(trace, RowTrace) else trace_model(other, samples)
        return compute_gradients(other, again, samples)

    def mismatch(weights: Tensor, dense: int = 0) -> str | None:
        def compute(other: Network) -> Parts:
            gradients, first, rest = chunk(other), slice(0, dense), slice(dense, None)
            if not dense:
                return _sum(gradients, other, weights)
            by_sum = _sum(gradients.part(rest), other, weights[rest])
            by_rows = _sum_of_rows(gradients.part(first), other, weights[first])
            return [a.add_(b) for a, b in zip(by_sum, by_rows, strict=True)]

        return find_mismatch(net, compute, samples, weights, plain)

    weights = _draw_weights((len(samples), known.d), seed=0)
    wrong = mismatch(weights, dense=(len(samples) + 1) // 2 if explicit else 0)
    if wrong is None:
        return None
    if mismatch(weights[:1].expand_as(weights)) is None:  # a sum in which no gradient can be misplaced
        return Fault(REGROUPED.format(wrong), KEEP_ORDER)
    return Fault(
        f"the gradient in {wrong} came out different from autograd's",
        f"For full speed leave that parameter out, by parameters=[...] without {wrong!r}.",
    )


def regrouping_fault(problem: RegroupedError) -> Fault:
    """Return the fault of a model with rows that do not divide evenly among samples."""
    return Fault(f"{REGROUPED.format('an operation')}: {problem}", KEEP_ORDER)


def _sum(chunk: GradientBatch, net: Network, weights: Tensor) -> Parts:
    return chunk.weighted_sum(net, weights.to(next(net.model.parameters()).device))


def _sum_of_rows(chunk: GradientBatch, net: Network, weights: Tensor) -> Iterator[Tensor]:
    """Yield Σₓ J(x)ᵀ w(x) of each parameter, from dense gradients."""
    weights = weights.to(next(net.model.parameters()).device, net.dtype)
    for name, size in net.numels.items():
        gradient = chunk.by_parameter.get(name)
        if gradient is None:
            yield weights.new_zeros(size)
        elif len(weights) == 1:  # of one sample, that of one output is formed instead of all
            yield combine_outputs(gradient, weights).rows()[0, 0]
        else:
            yield torch.einsum("nd,ndp->p", weights, gradient.rows().to(weights))


def _synthesize_samples(samples: Samples) -> Samples:
    """Return n synthetic samples: values mixed across samples, each but the first truncated to another length."""
    generator = torch.Generator().manual_seed(0)
    n = len(samples)
    lengths = 1 - torch.arange(n) * 0.618 % 1  # neither growing nor shrinking: nothing is sorted by length

    def mixed(value: Tensor) -> Tensor:
        sources = torch.randint(0, n, value.shape, generator=generator).to(value.device)
        return _truncate(value.gather(0, sources), lengths)

    return Samples(tree_map(mixed, samples.inputs), samples.labels, samples.ids)


def _truncate(value: Tensor, shares: Tensor) -> Tensor:
    """Return (n, length, ...) with zeros behind a share of the positions of each sample, at least one."""
    if value.dim() < 2:
        return value
    n, length = value.shape[:2]
    inside = torch.arange(length) < (shares * length).ceil().clamp(min=1)[:, None]
    return value * inside.to(value).view(n, length, *[1] * (value.dim() - 2))


def _draw_weights(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class RecordedPass(NamedTuple):
    """A pass that was recorded, with its graph."""

    trace: Layouts
    recorder: FirstRecorder | PassRecorder
    meter: MemoryMeter  # of the memory that it took


@dataclass
class FirstPair:
    """Two samples, and the passes over them."""

    plain: PlainPass  # without autocast
    recorded: RecordedPass | None  # until it is taken: its graph serves once
    is_all: bool = False  # whether no other samples are compared

    @property
    def samples(self) -> Samples:
        """The two."""
        return self.plain.samples

    def take_recorded(self, net: Network) -> RecordedPass:
        """Return the recorded pass, recorded now if it was taken before or could not be recorded then.

        Raises:
            UntraceableError: The model cannot be traced.

        """
        recorded, self.recorded = self.recorded, None
        return recorded or _record_by_trace(net, self.samples)


def call_on_pair(net: Network, samples: Samples, alone: Tensor, *, is_all: bool, record: bool) -> FirstPair:
    """Return passes over the first two samples, once these were seen to be independent.

    Args:
        net: The network; call this inside `net.evaluation_mode`.
        samples: A few samples.
        alone: The outputs of the first of them alone, in full float32.
        is_all: Whether no other samples are compared. Else the two are taken in reverse: a model that sorts samples
            inside forward may find the first ones in order.
        record: Record a pass, for the traced engine.

    """
    place = 0 if is_all else 1  # of the first sample
    pair = repeat_samples(samples[:2], 2)[torch.tensor([place, 1 - place])]
    exact, known, recorded = net.exact(), {place: alone}, None
    with full_float32():
        plain = plain_pass(exact, pair)
        if record:
            recorded = _record_first(net, pair, pair[1 - place : 2 - place])
    if recorded is not None:
        known[1 - place] = recorded.alone
    check_independent_samples(exact, pair, plain.outputs.detach(), known if net.autocast is None else None)
    return FirstPair(plain, None if recorded is None else recorded.of_pair, is_all)


class _Recorded(NamedTuple):
    of_pair: RecordedPass
    alone: Tensor  # outputs of the sample that was traced alone


def _record_first(net: Network, pair: Samples, one: Samples) -> _Recorded | None:
    """Return a pass over two samples, traced by another over one of them, None if that fails for any reason."""
    meter, recorder = MemoryMeter(), FirstRecorder(net, pair)
    try:
        with fast_attention(next(iter(recorder.parameters.values())).device):
            with meter:
                recorder.run(net, pair)
            trace, alone = recorder.trace(net, one)
    except Exception as error:  # a trace by other numbers of samples may succeed, else it says why not
        if is_out_of_memory(error):
            raise
        return None
    return _Recorded(RecordedPass(trace, recorder, meter), alone)


def _record_by_trace(net: Network, pair: Samples) -> RecordedPass:
    """Return a pass over two samples, traced before by two and three samples."""
    trace, meter = trace_model(net, pair), MemoryMeter()
    recorder = PassRecorder(net, trace)
    with full_float32(), fast_attention(next(iter(recorder.parameters.values())).device), meter:
        recorder.record_pass(net, pair)
    return RecordedPass(trace, recorder, meter)


ROUNDINGS_INSIDE = 4  # by how many roundings of half precision inside forward outputs may differ


def check_independent_samples(
    net: Network, samples: Samples, once: Tensor | None = None, alone: dict[int, Tensor] | None = None
) -> None:
    """Raise if outputs differ between two calls, or between a batch and its samples alone, or come from an old one.

    Call it inside `net.evaluation_mode`.

    Args:
        net: The network.
        samples: A few samples.
        once: Their outputs as one batch in full float32, if they were computed before.
        alone: The outputs of single samples by their place, as far as they were computed before.

    """
    _refuse_old_graphs(net, samples)
    with full_float32():  # in TF32, right outputs differ by more than dependent ones may
        _refuse_dependent(net, samples, network_outputs(net, samples) if once is None else once, alone or {})


def _refuse_old_graphs(net: Network, samples: Samples) -> None:
    """Raise if forward reads a tensor that an earlier call computed from parameters: their gradients would miss it."""
    held = {
        f"{name}.{attribute}" if name else attribute: value
        for name, module in net.model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf
    }
    if not held:
        return
    parameters = {name: value.requires_grad_() for name, value in net.parameters.items()}
    with torch.enable_grad():
        total = network_outputs(net, samples, parameters).sum()
    if not total.requires_grad:
        return
    reached = torch.autograd.grad(total, list(held.values()), retain_graph=True, allow_unused=True)
    for name, gradient in zip(held, reached, strict=True):
        if gradient is not None:
            raise ValueError(
                f"{type(net.model).__name__} keeps {name}, which an earlier call computed from parameters, and forward "
                f"uses it again: the gradients of these parameters would miss it. Clear it first (model.{name} = None, "
                "or what the model has for that)."
            )


def _refuse_dependent(net: Network, samples: Samples, once: Tensor, known: dict[int, Tensor]) -> None:
    try:
        each = enumerate(samples.split(1))
        alone = torch.cat([known[i] if i in known else network_outputs(net, x) for i, x in each])
    except Exception as error:
        raise ValueError(
            f"The model takes {len(samples)} samples together but not one alone ({error}): do a sample's "
            "outputs depend on the other samples of its batch? A gradient must be of one sample."
        ) from error
    scale = once.abs().max()
    tolerance = torch.finfo(once.dtype).eps ** 0.5 * scale
    if once.shape == alone.shape and (once - alone).abs().max() <= tolerance:
        return
    if known:  # as a tracer calls the model, perhaps
        return _refuse_dependent(net, samples, once, {})
    again = network_outputs(net, samples)
    apart = max((once - other).abs().max() for other in (again, alone) if other.shape == once.shape)
    inner = inner_epsilon(net, samples) if tolerance < apart else 0.0
    if (
        inner > torch.finfo(once.dtype).eps
        and apart <= max(FLOAT64_TOLERANCE, ROUNDINGS_INSIDE * inner) * scale
    ):
        return
    if (once - again).abs().max() > tolerance:
        raise ValueError(
            f"The model's outputs differ by {(once - again).abs().max():.2g} between two calls in "
            "evaluation mode: something in it is random, such as F.dropout without training=False."
        )
    if once.shape != alone.shape or (once - alone).abs().max() > tolerance:
        raise ValueError(
            "A sample's outputs depend on the other samples of its batch, also in evaluation mode "
            f"(by {(once - alone).abs().max():.2g}): batch statistics, such as a BatchNorm with "
            "track_running_stats=False, or a batch that is not the first dimension, such as an LSTM "
            "without batch_first? A gradient must be of one sample."
        )
