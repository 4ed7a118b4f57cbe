"""Validates gradients: of a traced model before the first number, of some samples in every later pass.

A gradient assigned to the wrong sample shows in Σₓ J(x)ᵀ w(x) with random weights w, which takes one backward pass for
any number of outputs. The reference is plain autograd, never on a batch of one sample: PyTorch's backward of
BatchNorm2d is wrong there (see docs/upstream.md). Where autograd and an engine disagree in the model's precision, both
are computed in float64, where rounding does not flip a ReLU. Where they still disagree, a finite difference decides.
"""

import time
import warnings
from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from likewise.data import Samples
from likewise.engines.base import DependentSampleError, GradientMismatchError
from likewise.engines.gradient_batch import GradientBatch, compute_gradients
from likewise.engines.memory import is_out_of_memory
from likewise.engines.tracer import (
    RegroupedError,
    RowTrace,
    Trace,
    TraceFunction,
    UntraceableError,
    repeat_samples,
    trace_model,
)
from likewise.model import Network, Parameters
from likewise.precision import allows_tf32, full_float32

WINDOW = 1024  # samples of a pass of which one is checked on the way
LARGE = 5e8  # floating-point operations of a forward pass of one sample
SHARE = 0.005  # of the time of a pass, beyond which there are no checks on the way
FLOAT64_TOLERANCE = 1e-5  # a part of the model may still work in float32
FULL_TOLERANCE = 1e-3  # of gradients of one batch in full float32
COMPARED = 2**18  # entries whose difference a CPU takes at once: it stays in its cache
ROUNDINGS_INSIDE = 4  # by how many roundings of half precision inside forward outputs may differ
FAR = 0.25  # in TF32, relative to the largest entry
OUTPUTS_CHECKED = 4  # samples whose outputs are compared at each check
REGROUPED = (
    "forward sorts, drops or groups samples or their positions, so that {} does not meet them in order"
)
KEEP_ORDER = (
    "For full speed, keep samples in their places inside forward: pad instead of x[mask], sort before the "
    "model is called."
)

Parts = list[Tensor]  # a vector (p,) as those of the parameters, in order: no copy of the whole
Compute = Callable[[Network], Parts]  # Σₓ J(x)ᵀ w(x), of a network that is the same up to precision


class Fault(NamedTuple):
    """Why an engine's gradients cannot be used, and what to do about it."""

    reason: str
    remedy: str


class FirstPass(NamedTuple):
    """What one forward pass of two samples tells."""

    samples: Samples
    outputs: Tensor  # (2, d), in full float32
    large: bool  # whether it takes so long that checks before the first number use fewer samples


def first_pass(net: Network, samples: Samples) -> FirstPass:
    """Return the outputs of the first two samples, and whether the network is large."""
    several = repeat_samples(samples[:2], 2)  # that one alone fails is for other checks to explain
    with full_float32(), OperationCounter() as counter:
        outputs = network_outputs(net, several)
    return FirstPass(several, outputs, counter.flops > len(several) * LARGE)


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
    reverse: GradientBatch | None = None,
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
        brief: Look only at the samples in reverse, and at those of a later batch.
        reverse: The traced gradients of the samples in reverse, if they were computed before.

    Raises:
        UntraceableError: The model cannot be traced on these samples.

    """
    samples, backwards = repeat_samples(samples, max(2, len(samples))), reverse_samples(samples)
    with full_float32():  # two correct gradients in TF32 may differ by more than a wrong one
        trace = trace or trace_function(net, samples)
        if brief:
            fault = find_fault_of_batch(net, trace, backwards, explicit=True, known=reverse)
        else:
            fault = find_fault_of_batch(net, trace, samples, explicit=True)
            fault = fault or find_fault_of_batch(net, trace, backwards)
        if fault is None and later is not None:
            fault = _find_fault_later(net, repeat_samples(later, max(2, len(later))), trace, trace_function)
        return fault if fault or brief else _find_fault_in_synthetic(net, trace, samples)


def reverse_samples(samples: Samples) -> Samples:
    """Return at least two samples, in reverse."""
    samples = repeat_samples(samples, max(2, len(samples)))
    return samples[torch.arange(len(samples)).flip(0)]


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
) -> Fault | None:
    """Return the fault of the traced gradients of one batch, None if they agree with autograd.

    A batch on which the model takes another branch than the trace says nothing of the trace.

    Args:
        net: The network.
        trace: Of the model.
        samples: The batch.
        explicit: Take half of the samples from dense gradients, instead of all from weighted sums.
        known: The traced gradients of the batch, if they were computed before.

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
            return [a + b.to(a) for a, b in zip(by_sum, by_rows, strict=True)]

        return find_mismatch(net, compute, samples, weights)

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


class SpotCheck:
    """Compares random samples of every pass with autograd on two copies of them alone.

    One sample of each pass, and one more in every 1024 as long as these take less than 0.5 % of the
    time; beside it the outputs of up to four samples, called in another batch. Which samples, a seeded
    generator decides.
    """

    def __init__(self, net: Network, n: int, seed: int = 0, verified: Samples | None = None) -> None:
        """Check passes over about n samples.

        Args:
            net: The network.
            n: The number of samples of a pass, as far as it is known.
            seed: Of the samples that are checked.
            verified: Samples whose gradients were compared just now: the first pass does not repeat it.

        """
        self._net, self._n, self._verified = net, n, verified
        self._generator = torch.Generator().manual_seed(seed)
        self._cost = float("inf")  # seconds of the last check
        self._begin()

    @property
    def sizes(self) -> list[int]:
        """The entries of each parameter, in order."""
        return list(self._net.numels.values())

    def _begin(self) -> None:
        """Reset for a new pass."""
        self._pending: _Candidate | None = None
        self._seen, self._start, self._spent = 0, time.perf_counter(), 0.0
        self._target = self._below(self._n)  # the sample to check at the end of the pass
        self._extra = self._below(WINDOW)  # the next one to check on the way

    def offer(
        self,
        samples: Samples,
        outputs: Tensor | None,
        gradient: Callable[[int, Tensor], Parts],
        d: int,
        *,
        count: int | None = None,
        again: Callable[[Samples, int, Tensor], Parts] | None = None,
    ) -> None:
        """Register a batch: one of its samples may be checked, now or at the end of the pass.

        Args:
            samples: The batch as the model was called on it.
            outputs: (n, d), what the model returned for it, None if it was not called on the batch.
            gradient: Returns J(x)ᵀ u of the sample at a place, by parameter, given u, (d,).
            d: The number of outputs.
            count: How many of the samples belong to the pass, if not all; the others stand behind them.
            again: Returns J(x)ᵀ u of the sample at a place of a batch, computed again.

        """
        n = len(samples) if count is None else count
        if self._verified is not None and _holds_all(self._verified, samples[:n]):
            return

        def candidate(place: int) -> _Candidate:
            order = torch.randperm(n, generator=self._generator)
            few = torch.cat([torch.tensor([place]), order[order != place][: OUTPUTS_CHECKED - 1]])
            u = torch.randn(d, generator=self._generator)
            compared = None if outputs is None else outputs[few.to(outputs.device)].clone()
            return _Candidate(samples, place, u, gradient(place, u), few, compared, again)

        if self._seen == 0:  # a pass may turn out to be shorter than the last one
            self._start = time.perf_counter()
            self._pending = candidate(self._below(n))
        places = range(self._seen, self._seen + n)
        if self._target in places and self._seen:
            self._pending = candidate(self._target - self._seen)
        if self._extra in places:
            if self._spent + self._cost <= SHARE * (time.perf_counter() - self._start):
                self._check(candidate(self._extra - self._seen))
                self._spent += self._cost
            self._extra = (self._extra // WINDOW + 1) * WINDOW + self._below(WINDOW)
        self._seen += n

    def finish_checks(self) -> None:
        """Check the selected sample; call it at the end of a pass."""
        pending, self._n = self._pending, self._seen or self._n
        self._verified = None
        self._begin()
        if pending is not None:
            self._check(pending)

    def _check(self, candidate: "_Candidate") -> None:
        start = time.perf_counter()
        if not _agrees_in_another_batch(self._net, candidate):
            tolerance = max(rounding_tolerance(self._net), _inner_tolerance(self._net, candidate.sample))
            _check_outputs(self._net, candidate, tolerance)
            _check_gradient(self._net, candidate, tolerance)
        self._cost = time.perf_counter() - start

    def _below(self, bound: int) -> int:
        return int(torch.randint(max(1, bound), (), generator=self._generator))


def _holds_all(known: Samples, samples: Samples) -> bool:
    """Whether all samples are among those known: in value, since another data set has samples of the same ids."""
    places = {number: place for place, number in enumerate(known.ids.tolist())}
    numbers = samples.ids.tolist()
    if not places.keys() >= set(numbers):
        return False
    same = known[torch.tensor([places[number] for number in numbers])]
    leaves, others = (tree_leaves((some.inputs, some.labels)) for some in (same, samples))
    return len(leaves) == len(others) and all(map(_are_equal, leaves, others))


def _are_equal(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return one is other  # no labels
    return one.dtype == other.dtype and torch.equal(one.to(other.device), other)


class _Candidate(NamedTuple):
    samples: Samples  # the batch as the model was called on it
    place: int  # of the sample in the batch
    u: Tensor  # (d,)
    gradient: Parts  # J(x)ᵀ u
    few: Tensor  # places of samples whose outputs are compared, in another order than the batch's
    outputs: Tensor | None  # (few, d), in the batch
    again: Callable[[Samples, int, Tensor], Parts] | None = None  # the gradient, computed again

    @property
    def sample(self) -> Samples:
        return self.samples[self.place : self.place + 1]


def _agrees_in_another_batch(net: Network, candidate: _Candidate) -> bool:
    """Whether outputs and gradient are those of a small batch of other samples: one forward and one backward."""
    few = candidate.samples[candidate.few]
    if candidate.outputs is None or len(few) < 2:
        return False
    parameters = {name: value.requires_grad_() for name, value in net.parameters.items()}
    with torch.enable_grad():
        outputs = network_outputs(net, few, parameters)
        theirs = gradient_parts((outputs[0] * candidate.u.to(outputs)).sum(), parameters)  # of the candidate
    tolerance = rounding_tolerance(net)
    apart = (candidate.outputs - outputs.detach()).abs().max()
    if not apart <= tolerance * outputs.detach().abs().max():
        return False
    return first_mismatch(net, candidate.gradient, theirs, tolerance) is None


def _check_outputs(net: Network, candidate: _Candidate, tolerance: float) -> None:
    """Raise if outputs are random, or depend on the batch."""
    few = candidate.samples[candidate.few]
    if candidate.outputs is None:  # the engine takes each sample alone, so this is what it takes
        together = network_outputs(net, few)[:1]
        alone, few = network_outputs(net, repeat_samples(candidate.sample, 2))[:1], candidate.sample
    else:
        together = candidate.outputs
        alone = network_outputs(net, few if len(few) > 1 else repeat_samples(few, 2))[: len(few)]
    apart = (together - alone).abs().amax(1)
    scale = alone.abs().max()
    if not (apart <= tolerance * scale).all() and not _agree_in_float64(net, candidate):
        number = int(few.ids[int(apart.nan_to_num(torch.inf).argmax())])
        again, same = (network_outputs(net, candidate.samples) for _ in range(2))
        what = (
            "something in the model is random for it, such as F.dropout without training=False"
            if (again - same).abs().max() > tolerance * scale
            else "they depend on the other samples of its batch"
        )
        raise DependentSampleError(
            f"The outputs of sample {number} differ by {apart.max():.2g} between two batches, in evaluation "
            f"mode: {what}. A gradient must be of one sample. The first samples did not show it; leave such "
            "samples out, or change the model.",
            number,
        )


def _agree_in_float64(net: Network, candidate: _Candidate) -> bool:
    """Whether outputs of the batch and of some of its samples agree once rounding decides nothing."""
    double_net = in_float64(net, candidate.sample)
    if double_net is None:
        return False
    few = candidate.samples[candidate.few]
    together = network_outputs(double_net, candidate.samples)[
        candidate.few.to(next(double_net.model.parameters()).device)
    ]
    alone = network_outputs(double_net, few if len(few) > 1 else repeat_samples(few, 2))[: len(few)]
    return bool((together - alone).abs().max() <= FLOAT64_TOLERANCE * alone.abs().max())


def _check_gradient(net: Network, candidate: _Candidate, tolerance: float) -> None:
    """Raise if the gradient of a sample is not that of the sample alone."""
    pair = repeat_samples(candidate.sample, 2)
    weights = torch.stack([candidate.u, torch.zeros_like(candidate.u)])
    ours, theirs = candidate.gradient, weighted_gradient(net, pair, weights)
    if not all_finite(ours) and not all_finite(theirs):
        return  # the pass itself names all samples whose gradient is not finite
    name = first_mismatch(net, ours, theirs, tolerance)
    if name is None:
        return
    if len(candidate.samples) > 1:  # a ReLU may fall on the other side in another batch: look at the same one
        inside = torch.zeros(len(candidate.samples), len(candidate.u))
        inside[candidate.place] = candidate.u
        same = weighted_gradient(net, candidate.samples, inside)
        if first_mismatch(net, ours, same, tolerance) is None:
            return
        if candidate.again is not None and _agrees_in_full_float32(net, candidate, inside):
            return
    double_net = in_float64(net, pair)
    if double_net is not None and matches_finite_difference(
        double_net, pair, weights, name, [part.double() for part in ours], [part.double() for part in theirs]
    ):
        return
    number = int(candidate.sample.ids[0])
    raise GradientMismatchError(
        f"The gradient of sample {number} in {name} is not that of the sample alone, so no number of this "
        f"pass can be used. {type(net.model).__name__} probably moves samples to other places inside "
        'forward, by their values. Take engine="autograd", which is slower but right.',
        number,
        name,
    )


def _agrees_in_full_float32(net: Network, candidate: _Candidate, weights: Tensor) -> bool:
    """Whether the gradient is right once products are not rounded to TF32, and was not far from it before.

    In TF32 a ReLU or maximum may fall on the other side between two launches of the same batch.
    """
    if rounding_tolerance(net) <= FULL_TOLERANCE or candidate.again is None:
        return False
    with full_float32():
        ours = candidate.again(candidate.samples, candidate.place, candidate.u)
        theirs = weighted_gradient(net, candidate.samples, weights)
    agree = first_mismatch(net, ours, theirs, FULL_TOLERANCE) is None
    return agree and first_mismatch(net, candidate.gradient, theirs, FAR) is None


def _sum(chunk: GradientBatch, net: Network, weights: Tensor) -> Parts:
    return chunk.weighted_sum(net, weights.to(next(net.model.parameters()).device))


def _sum_of_rows(chunk: GradientBatch, net: Network, weights: Tensor) -> Parts:
    """Return Σₓ J(x)ᵀ w(x) from dense gradients."""
    weights = weights.to(next(net.model.parameters()).device, net.dtype)
    return [
        torch.einsum("nd,ndp->p", weights, chunk.by_parameter[name].rows().to(weights))
        if name in chunk.by_parameter
        else weights.new_zeros(size)
        for name, size in net.numels.items()
    ]


def _synthesize_samples(samples: Samples) -> Samples:
    """Return n synthetic samples: values mixed across samples, each but the first truncated to another length."""
    generator = torch.Generator().manual_seed(0)
    n = len(samples)
    lengths = 1 - torch.arange(n) * 0.618 % 1  # neither growing nor shrinking: nothing is sorted by length

    def mixed(value: Tensor) -> Tensor:
        sources = torch.randint(0, n, value.shape, generator=generator).to(value.device)
        value = value.gather(0, sources)
        if value.dim() < 2:
            return value
        length = value.shape[1]
        inside = torch.arange(length) < (lengths * length).ceil().clamp(min=1)[:, None]
        return value * inside.to(value).view(n, length, *[1] * (value.dim() - 2))

    return Samples(tree_map(mixed, samples.inputs), samples.labels, samples.ids)


def _draw_weights(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check_independent_samples(net: Network, samples: Samples, once: Tensor | None = None) -> None:
    """Raise if outputs differ between two calls, or between a batch and its samples alone, or come from an old one.

    Call it inside `net.evaluation_mode`.

    Args:
        net: The network.
        samples: A few samples.
        once: Their outputs as one batch in full float32, if they were computed before.

    """
    _refuse_old_graphs(net, samples)
    with full_float32():  # in TF32, right outputs differ by more than dependent ones may
        _refuse_dependent(net, samples, _outputs(net, samples) if once is None else once)


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


def _refuse_dependent(net: Network, samples: Samples, once: Tensor) -> None:
    try:
        alone = torch.cat([_outputs(net, x) for x in samples.split(1)])
    except Exception as error:
        raise ValueError(
            f"The model takes {len(samples)} samples together but not one alone ({error}): do a sample's "
            "outputs depend on the other samples of its batch? A gradient must be of one sample."
        ) from error
    scale = once.abs().max()
    tolerance = torch.finfo(once.dtype).eps ** 0.5 * scale
    if once.shape == alone.shape and (once - alone).abs().max() <= tolerance:
        return
    again = _outputs(net, samples)
    apart = max((once - other).abs().max() for other in (again, alone) if other.shape == once.shape)
    inner = _inner_epsilon(net, samples) if tolerance < apart else 0.0
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


class _FloatingTypes(TorchFunctionMode):
    """Collects the types of differentiable values."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = set[torch.dtype]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.requires_grad:
            self.seen.add(result.dtype)
        return result


def _inner_tolerance(net: Network, samples: Samples) -> float:
    """Return the tolerated difference of gradients where forward rounds to half precision by itself, else 0."""
    epsilon = _inner_epsilon(net, repeat_samples(samples, max(2, len(samples))))
    return epsilon**0.5 if epsilon > torch.finfo(torch.float32).eps else 0.0


def _inner_epsilon(net: Network, samples: Samples) -> float:
    """Return the rounding of the coarsest type inside the forward pass, such as of a cast or of autocast in it."""
    parameters = {name: value.requires_grad_() for name, value in net.parameters.items()}
    with torch.enable_grad(), _FloatingTypes() as types:
        net.function(parameters, samples.inputs, samples.labels, samples.ids)
    real = [seen for seen in types.seen if seen.is_floating_point]
    return max((float(torch.finfo(seen).eps) for seen in real), default=0.0)


def _outputs(net: Network, samples: Samples) -> Tensor:
    return net.function({}, samples.inputs, samples.labels, samples.ids)


def weighted_gradient(net: Network, samples: Samples, weights: Tensor) -> Parts:
    """Return Σₓ J(x)ᵀ w(x), by parameter, by one backward over a batch of at least two samples.

    Args:
        net: The network; call it inside `net.evaluation_mode`.
        samples: The batch that the model is called on.
        weights: (n, d), of each sample and output.

    """
    assert len(samples) > 1
    parameters = {name: value.requires_grad_() for name, value in net.parameters.items()}
    with torch.enable_grad():
        outputs = network_outputs(net, samples, parameters)
        return gradient_parts((outputs * weights.to(outputs)).sum(), parameters)


def gradient_parts(output: Tensor, parameters: Parameters) -> Parts:
    """Return the gradient of a scalar, (numel,) of each parameter."""
    values = list(parameters.values())
    if not output.requires_grad:  # it depends on no selected parameter
        return [value.detach().new_zeros(value.numel()) for value in values]
    gradients = torch.autograd.grad(
        output, values, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return _flatten_each(dict(zip(parameters, gradients, strict=True)), parameters)


def flatten_gradients(gradients: Parameters, parameters: Parameters) -> Tensor:
    """Return gradients by name as one vector, in the order of the parameters."""
    return torch.cat(_flatten_each(gradients, parameters))


def _flatten_each(gradients: Parameters, parameters: Parameters) -> Parts:
    device = next(iter(parameters.values())).device
    dense = [g.to_dense() if g.is_sparse else g for g in (gradients[name] for name in parameters)]
    return [gradient.reshape(-1).to(device) for gradient in dense]


def all_finite(parts: Parts) -> bool:
    """Whether no entry is NaN or infinite."""
    return all(bool(part.isfinite().all()) for part in parts)


def network_outputs(net: Network, samples: Samples, parameters: Parameters | None = None) -> Tensor:
    """Return f(x) of a batch, (n, d), with some parameters replaced if any are given."""
    return net.function(parameters or {}, samples.inputs, samples.labels, samples.ids)


def find_mismatch(net: Network, compute: Compute, samples: Samples, weights: Tensor) -> str | None:
    """Return the first parameter for which Σₓ J(x)ᵀ w(x) of an engine is wrong, None if it is correct.

    Args:
        net: The network; call it inside `net.evaluation_mode`.
        compute: The sum by the engine in question, of the network it is given.
        samples: At least two samples, as one batch.
        weights: (n, d), of each sample and output.

    """
    with full_float32():
        low = torch.finfo(net.dtype).eps > torch.finfo(torch.float32).eps
        double_net = in_float64(net, samples) if low else None
        if double_net is None:
            ours, theirs = compute(net), weighted_gradient(net, samples, weights)
            name = _mismatch_by_rounding(net, samples, ours, theirs, rounding_tolerance(net))
            if name is None:
                return None
            double_net = in_float64(net, samples)
            if double_net is None:
                return name
        ours, theirs = compute(double_net), weighted_gradient(double_net, samples, weights)
        name = _mismatch_by_rounding(double_net, samples, ours, theirs, FLOAT64_TOLERANCE)
        if name is None or matches_finite_difference(double_net, samples, weights, name, ours, theirs):
            return None
        return name


def _mismatch_by_rounding(
    net: Network, samples: Samples, ours: Parts, theirs: Parts, tolerance: float
) -> str | None:
    """Return the first parameter for which two vectors differ by more than a tolerance, and than rounding inside."""
    name = first_mismatch(net, ours, theirs, tolerance)
    inner = 0.0 if name is None else _inner_tolerance(net, samples)
    return name if inner <= tolerance else first_mismatch(net, ours, theirs, inner)


def in_float64(net: Network, samples: Samples) -> Network | None:
    """Return the network in float64, None if the device or the model does not support it."""
    if net.dtype == torch.float64:
        return net.exact()
    if next(net.model.parameters()).device.type == "mps":
        return None
    double_net = net.in_float64()
    try:
        outputs = double_net.function({}, samples.inputs, samples.labels, samples.ids)
    except Exception as error:  # a model may fix its types in any way, and fail in any way
        if is_out_of_memory(error):
            raise
        return None
    return double_net if outputs.dtype == torch.float64 else None


def first_mismatch(net: Network, ours: Parts, theirs: Parts, tolerance: float) -> str | None:
    """Return the name of the first parameter for which two vectors differ, if any."""
    if not theirs:
        return None
    limit = tolerance * _stack([_largest(part) for part in theirs]).max().clamp(min=1e-37)
    apart = _stack([_largest_difference(a, b) for a, b in zip(ours, theirs, strict=True)])
    within = (apart <= limit).tolist()  # NaN is no agreement; one wait for the device
    return next((name for name, agrees in zip(net.names, within, strict=True) if not agrees), None)


def _stack(values: Parts) -> Tensor:
    """Return scalars as a vector; those of a model's layers may be of several types."""
    dtype = reduce(torch.promote_types, (value.dtype for value in values))
    return torch.stack([value.to(dtype) for value in values])


def _largest_difference(a: Tensor, b: Tensor) -> Tensor:
    """Return the largest absolute difference, NaN if there is any; on a CPU of entries that stay in its cache."""
    if a.device.type != "cpu" or a.numel() <= COMPARED:
        return _largest(a - b)
    pairs = zip(a.split(COMPARED), b.split(COMPARED), strict=True)
    return torch.stack([_largest(part - other) for part, other in pairs]).max()


def _largest(values: Tensor) -> Tensor:
    """Return the largest absolute value, NaN if there is any, without a copy."""
    if not values.numel():
        return values.new_zeros(())
    return torch.stack(torch.aminmax(values)).abs().max()


def matches_finite_difference(
    net: Network, samples: Samples, weights: Tensor, name: str, ours: Parts, theirs: Parts
) -> bool:
    """Whether a finite difference agrees with `ours` rather than with autograd's gradient."""
    place = net.names.index(name)
    mine, expected = ours[place], theirs[place]
    gap, value = mine - expected, net.parameters[name]
    if not gap.isfinite().all():
        return False
    step = 1e-6 * value.abs().max().clamp(min=1e-3) / gap.abs().max()

    def shifted(sign: int) -> Tensor:
        moved = {name: value + sign * step * gap.view_as(value)}
        return (network_outputs(net, samples, moved) * weights.to(value)).sum()

    slope = (shifted(1) - shifted(-1)) / (2 * step)
    threshold = 0.1 * gap.square().sum()
    right = bool((slope - mine @ gap).abs() < threshold < (slope - expected @ gap).abs())
    if right:
        warnings.warn(
            f"PyTorch's own gradient of {type(net.model).__name__} in {name} is wrong for some samples: a "
            "finite difference in float64 says so, and agrees with the gradients used here.",
            stacklevel=2,
        )
    return right


def rounding_tolerance(net: Network) -> float:
    """Return the tolerated difference of two correct gradients, relative to the largest entry."""
    every = dict(net.model.named_parameters())
    epsilon = max(torch.finfo(every[name].dtype).eps for name in net.names)
    if net.autocast is not None:
        epsilon = max(epsilon, torch.finfo(net.autocast).eps)
    on_gpu = next(net.model.parameters()).device.type == "cuda"
    if on_gpu and (allows_tf32("convolution") or allows_tf32("matmul")):
        epsilon = max(epsilon, 2**-11)  # TF32 has ten bits
    return max(float(epsilon**0.5), FLOAT64_TOLERANCE)
