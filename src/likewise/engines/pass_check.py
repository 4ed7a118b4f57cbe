"""Checks samples of every pass: their gradients against autograd, their outputs in another batch.

A model that sorts or groups samples inside forward may leave any one of them in its place. So up to 32 samples of one
batch are checked together, from their sum with random weights: a gradient in the place of another changes it.
"""

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from likewise.data import Samples
from likewise.engines.base import DependentSampleError, GradientMismatchError
from likewise.engines.comparison import (
    FLOAT64_TOLERANCE,
    Parts,
    all_finite,
    are_within,
    first_mismatch,
    gradient_parts,
    in_float64,
    inner_tolerance,
    matches_finite_difference,
    network_outputs,
    rounding_tolerance,
    weighted_gradient,
)
from likewise.engines.tracer import repeat_samples
from likewise.model import Network
from likewise.torch_state import full_float32, send

WINDOW = 1024  # samples of a pass of which one is checked on the way
SHARE = 0.005  # of the time of a pass, beyond which there are no checks on the way
FULL_TOLERANCE = 1e-3  # of gradients of one batch in full float32
FAR = 0.25  # in TF32, relative to the largest entry
FEW, MANY = 4, 32  # samples that are checked together, in most passes and in some
PASS_SHARE = 1 / 32  # of a later pass, beyond which no more than few of its samples are checked together
SHOWN = 0.3  # the tolerance is at most this part of 1/√k, the weight of one of k samples in their sum


class PassCheck:
    """Compares samples of a random batch of every pass with autograd in other batches.

    Up to 32 samples of the batch in the first pass, and in every pass whose number is a power of two, there at most one
    in 32 of the pass; else four. Four more in every 1024 as long as these take less than 0.5 % of the time. A seeded
    generator decides which: at once in a pass of known length (`begin_pass`), else anew with every batch.
    """

    def __init__(self, net: Network, seed: int = 0, verified: Samples | None = None) -> None:
        """Check passes.

        Args:
            net: The network.
            seed: Of the samples that are checked.
            verified: A batch whose gradients were compared just now: the first pass does not repeat it.

        """
        self._net, self._verified = net, verified
        self._generator = torch.Generator().manual_seed(seed)
        self._cost = float("inf")  # seconds of the last check, of few samples
        self._passes = 0  # that were checked
        self._deferred: list[tuple[_Candidate, Tensor]] = []  # of earlier passes, with their agreement
        self._begin()

    @property
    def sizes(self) -> list[int]:
        """The entries of each parameter, in order."""
        return list(self._net.numels.values())

    def _begin(self) -> None:
        """Reset for a new pass."""
        self._pending: _Candidate | None = None
        self._agreement: Tensor | None = None  # of the pending samples with autograd, once it is computed
        self._seen, self._start, self._spent = 0, time.perf_counter(), 0.0
        self._length = 0  # samples of a pass that was announced
        self._selected = 0  # which of these is checked
        self._extra = self._below(WINDOW)  # the next sample to check on the way

    def begin_pass(self, n: int) -> None:
        """Select a sample of a pass over n samples; call it inside `net.evaluation_mode`, before the first batch."""
        self._begin()
        self._forget_if_stopped()
        self._length, self._selected = n, self._below(n)

    def offer(
        self,
        samples: Samples,
        outputs: Tensor | None,
        gradient: Callable[[Tensor, Tensor], Parts],
        d: int,
        *,
        count: int | None = None,
        again: Callable[[Samples, Tensor, Tensor], Parts] | None = None,
    ) -> None:
        """Register a batch: samples of it may be checked, now or at the end of the pass.

        Args:
            samples: The batch as the model was called on it.
            outputs: (n, d), what the model returned for it, None if it was not called on the batch.
            gradient: Returns Σₓ J(x)ᵀ w(x), by parameter, given k places in the batch and weights of these, (k, d).
            d: The number of outputs.
            count: How many of the samples belong to the pass, if not all; the others stand behind them.
            again: Returns the same sum of a batch, computed again.

        """
        n = len(samples) if count is None else count
        if self._verified is not None and is_same_batch(self._verified, samples):
            self._skip(n)
            return

        def candidate(place: int, most: int) -> _Candidate:
            order = torch.randperm(n, generator=self._generator)
            places = torch.cat([torch.tensor([place]), order[order != place][: most - 1]])
            compared = None if outputs is None else outputs[send(places, outputs.device)]
            # An engine that takes each sample alone moves none: the gradient of one is enough.
            weights = torch.randn(1 if outputs is None else len(places), d, generator=self._generator)
            ours = gradient(places[: len(weights)], weights)
            return _Candidate(samples, places, weights, ours, compared, again)

        if self._seen == 0:
            self._start = time.perf_counter()
            self._forget_if_stopped()
        place = self._select(n)
        if 0 <= place < n:
            self._pending, self._agreement = candidate(place, self._most(outputs)), None
        if self._seen <= self._extra < self._seen + n:
            if self._spent + self._cost <= SHARE * (time.perf_counter() - self._start):
                self._check(candidate(self._extra - self._seen, FEW))
                self._spent += self._cost
            self._extra = (self._extra // WINDOW + 1) * WINDOW + self._below(WINDOW)
        self._seen += n

    def _select(self, n: int) -> int:
        """Return the place of the sample to check, counted from the next n: among them or not."""
        if self._seen < self._length:
            return self._selected - self._seen
        return self._below(self._seen + n)  # so that every sample of a pass of any length is as likely

    def _skip(self, n: int) -> None:
        """Take the next n samples out of a pass of known length."""
        if self._seen < self._length:
            self._length -= n
            if self._selected >= self._seen:
                self._selected = self._seen + self._below(self._length - self._seen)

    def _most(self, outputs: Tensor | None) -> int:
        """Return how many samples of a batch are checked together."""
        is_power_of_two = self._passes & (self._passes + 1) == 0  # of the number of this pass
        if outputs is None or not is_power_of_two:
            return FEW
        most = min(MANY, int((SHOWN / rounding_tolerance(self._net)) ** 2))
        if self._passes and self._length:  # of a pass in short parts, each is one for itself
            most = min(most, int(PASS_SHARE * self._length))
        return max(FEW, most)

    def _forget_if_stopped(self) -> None:
        """Drop what was selected when the evaluation ends: by then a pass is finished, or an exception has stopped it.

        The next pass may be of other weights.
        """
        reference = weakref.ref(self)  # an engine may be gone before the evaluation ends

        def forget() -> None:
            check = reference()
            if check is not None:
                check._begin()
                check._deferred.clear()

        self._net.call_on_leaving(forget)

    def start_checks(self) -> None:
        """Compare the selected samples, without waiting for a GPU; call it at the end of a pass."""
        if self._pending is not None and self._agreement is None:
            with self._time_check(self._pending):
                self._agreement = _agreement_in_other_batches(self._net, self._pending)

    def defer(self) -> None:
        """Compare the selected samples, and leave it to `finish_checks` of a later pass to raise if they are wrong."""
        self.start_checks()
        (pending, agreement), self._verified = (self._pending, self._agreement), None
        self._begin()
        if pending is not None:
            assert agreement is not None
            self._passes += 1
            self._deferred.append((pending, agreement))

    def finish_checks(self) -> None:
        """Raise if samples selected in this pass, or in one that left it to this, are wrong; call it at its end."""
        self.defer()
        deferred, self._deferred = self._deferred, []
        for candidate, agreement in deferred:
            self._conclude(candidate, agreement)

    def _check(self, candidate: "_Candidate") -> None:
        with self._time_check(candidate):
            self._conclude(candidate, _agreement_in_other_batches(self._net, candidate))

    @contextmanager
    def _time_check(self, candidate: "_Candidate") -> Iterator[None]:
        """Measure what a check of few samples costs, given that of a candidate's: it decides on checks on the way."""
        start = time.perf_counter()
        yield
        self._cost = (time.perf_counter() - start) * min(1, FEW / len(candidate.places))

    def _conclude(self, candidate: "_Candidate", agreement: Tensor) -> None:
        """Raise if outputs or gradients are wrong; where they agree with those of smaller batches, they are right."""
        if not agreement and not _is_infinite_by_autograd_too(self._net, candidate):
            tolerance = max(rounding_tolerance(self._net), inner_tolerance(self._net, candidate.sample))
            _check_outputs(self._net, candidate, tolerance)
            _check_gradient(self._net, candidate, tolerance)

    def _below(self, bound: int) -> int:
        return int(torch.randint(max(1, bound), (), generator=self._generator))


def is_same_batch(known: Samples, samples: Samples) -> bool:
    """Whether two batches are equal, in order and in value: another data set has samples of the same ids."""
    if known.ids.tolist() != samples.ids.tolist():
        return False
    leaves, others = (tree_leaves((some.inputs, some.labels)) for some in (known, samples))
    return len(leaves) == len(others) and all(map(_are_equal, leaves, others))


def _are_equal(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return one is other  # no labels
    return one.dtype == other.dtype and torch.equal(one.to(other.device), other)


class _Candidate(NamedTuple):
    samples: Samples  # the batch as the model was called on it
    places: Tensor  # (k,) of samples whose outputs are compared, in another order than the batch's
    weights: Tensor  # (k, d), or (1, d) where only the gradient of the first is compared
    gradient: Parts  # Σₓ J(x)ᵀ w(x) of these
    outputs: Tensor | None  # (k, d), in the batch
    again: Callable[[Samples, Tensor, Tensor], Parts] | None = None  # the sum, computed again

    @property
    def sample(self) -> Samples:
        """The first of those that are compared."""
        return self.samples[self.places[:1]]

    @property
    def groups(self) -> tuple[Tensor, ...]:
        """Which of the k samples are called together: another batch also where all are compared."""
        k = len(self.places)
        return torch.arange(k).tensor_split(2 if 4 <= k == len(self.samples) else 1)

    def weights_inside(self, places: Tensor, weights: Tensor) -> Tensor:
        """Return weights (n, d) of the whole batch, given those at some places."""
        inside = torch.zeros(len(self.samples), weights.shape[1])
        inside[places] = weights
        return inside


def _agreement_in_other_batches(net: Network, candidate: _Candidate) -> Tensor:
    """Return whether outputs and gradients are those of smaller batches, (), without waiting for a GPU.

    It takes a forward and a backward pass of each sample.
    """
    if candidate.outputs is None or len(candidate.places) < 2:
        return torch.tensor(False)
    parameters = {name: value.requires_grad_() for name, value in net.parameters.items()}
    tolerance, total, agree = rounding_tolerance(net), Parts(), list[Tensor]()
    for group in candidate.groups:
        with torch.enable_grad():
            outputs = network_outputs(net, candidate.samples[candidate.places[group]], parameters)
            weighted = (outputs * send(candidate.weights[group], outputs.device).to(outputs)).sum()
        outputs = outputs.detach()
        apart = (candidate.outputs[send(group, outputs.device)] - outputs).abs().max()
        agree.append(apart <= tolerance * outputs.abs().max())
        theirs = gradient_parts(weighted, parameters)
        total = [a + b for a, b in zip(total, theirs, strict=True)] if total else theirs
    return torch.stack([*agree, are_within(candidate.gradient, total, tolerance).all()]).all()


def _is_infinite_by_autograd_too(net: Network, candidate: _Candidate) -> bool:
    """Whether a gradient of the batch is NaN or infinite, by plain autograd as well: the pass names its sample.

    Of the samples that are not checked it may be one: in a sum over the batch, a weight of 0 does not leave it out.
    """
    if all_finite(candidate.gradient) or len(candidate.samples) < 2:
        return False
    inside = candidate.weights_inside(candidate.places[: len(candidate.weights)], candidate.weights)
    return not all_finite(weighted_gradient(net, candidate.samples, inside))


def _outputs_in_groups(net: Network, candidate: _Candidate) -> Tensor:
    """Return the outputs of the k samples in other batches, (k, d)."""
    each = (candidate.samples[candidate.places[group]] for group in candidate.groups)
    return torch.cat(
        [network_outputs(net, repeat_samples(few, max(2, len(few))))[: len(few)] for few in each]
    )


def _check_outputs(net: Network, candidate: _Candidate, tolerance: float) -> None:
    """Raise if outputs are random, or depend on the batch."""
    few = candidate.samples[candidate.places]
    if candidate.outputs is None:  # the engine takes each sample alone, so this is what it takes
        together = network_outputs(net, few)[:1]
        alone, few = network_outputs(net, repeat_samples(candidate.sample, 2))[:1], candidate.sample
    else:
        together, alone = candidate.outputs, _outputs_in_groups(net, candidate)
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
    together = network_outputs(double_net, candidate.samples)
    together = together[candidate.places.to(together.device)]
    alone = _outputs_in_groups(double_net, candidate)
    return bool((together - alone).abs().max() <= FLOAT64_TOLERANCE * alone.abs().max())


def _check_gradient(net: Network, candidate: _Candidate, tolerance: float) -> None:
    """Raise if gradients of samples are not those of the samples alone."""
    batch, weights = candidate.samples[candidate.places[: len(candidate.weights)]], candidate.weights
    if len(batch) == 1:
        batch, weights = repeat_samples(batch, 2), torch.cat([weights, torch.zeros_like(weights)])
    ours, theirs = candidate.gradient, weighted_gradient(net, batch, weights)
    if not all_finite(ours) and not all_finite(theirs):
        return  # the pass itself names all samples whose gradient is not finite
    name = first_mismatch(net, ours, theirs, tolerance)
    if name is None:
        return
    if len(candidate.samples) > 1:  # a ReLU may fall on the other side in another batch: look at the same one
        inside = candidate.weights_inside(candidate.places[: len(candidate.weights)], candidate.weights)
        same = weighted_gradient(net, candidate.samples, inside)
        if first_mismatch(net, ours, same, tolerance) is None:
            return
        if candidate.again is not None and _agrees_in_full_float32(net, candidate, inside):
            return
    double_net = in_float64(net, batch)
    if double_net is not None and matches_finite_difference(
        double_net, batch, weights, name, [part.double() for part in ours], [part.double() for part in theirs]
    ):
        return
    number = int(candidate.samples.ids[_find_wrong(net, candidate, tolerance)])
    raise GradientMismatchError(
        f"The gradient of sample {number} in {name} is not that of the sample alone, so no number of this "
        f"pass can be used. {type(net.model).__name__} probably moves samples to other places inside "
        'forward, by their values. Take engine="autograd", which is slower but right.',
        number,
        name,
    )


def _find_wrong(net: Network, candidate: _Candidate, tolerance: float) -> int:
    """Return the place of a sample whose gradient is wrong: in that half of the samples whose sum is, and so on."""
    places, weights = candidate.places[: len(candidate.weights)], candidate.weights
    while len(places) > 1 and candidate.again is not None:
        half = slice(0, len(places) // 2)
        ours = candidate.again(candidate.samples, places[half], weights[half])
        inside = candidate.weights_inside(places[half], weights[half])
        theirs = weighted_gradient(net, candidate.samples, inside)
        if first_mismatch(net, ours, theirs, tolerance) is None:
            half = slice(half.stop, None)
        places, weights = places[half], weights[half]
    return int(places[0])


def _agrees_in_full_float32(net: Network, candidate: _Candidate, weights: Tensor) -> bool:
    """Whether the gradient is right once products are not rounded to TF32, and was not far from it before.

    In TF32 a ReLU or maximum may fall on the other side between two launches of the same batch.
    """
    if rounding_tolerance(net) <= FULL_TOLERANCE or candidate.again is None:
        return False
    with full_float32():
        ours = candidate.again(candidate.samples, candidate.places, candidate.weights)
        theirs = weighted_gradient(net, candidate.samples, weights)
    agree = first_mismatch(net, ours, theirs, FULL_TOLERANCE) is None
    return agree and first_mismatch(net, candidate.gradient, theirs, FAR) is None
