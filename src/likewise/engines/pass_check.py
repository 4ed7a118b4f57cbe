"""Checks some samples of every pass: their gradients against autograd, their outputs in another batch."""

import time
import weakref
from collections.abc import Callable
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
from likewise.precision import full_float32

WINDOW = 1024  # samples of a pass of which one is checked on the way
SHARE = 0.005  # of the time of a pass, beyond which there are no checks on the way
FULL_TOLERANCE = 1e-3  # of gradients of one batch in full float32
FAR = 0.25  # in TF32, relative to the largest entry
OUTPUTS_CHECKED = 4  # samples whose outputs are compared at each check


class PassCheck:
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
        if self._verified is not None and holds_all(self._verified, samples[:n]):
            return

        def candidate(place: int) -> _Candidate:
            order = torch.randperm(n, generator=self._generator)
            few = torch.cat([torch.tensor([place]), order[order != place][: OUTPUTS_CHECKED - 1]])
            u = torch.randn(d, generator=self._generator)
            compared = None if outputs is None else outputs[few.to(outputs.device)].clone()
            return _Candidate(samples, place, u, gradient(place, u), few, compared, again)

        if self._seen == 0:  # a pass may turn out to be shorter than the last one
            self._start = time.perf_counter()
            self._forget_if_stopped()
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

    def _forget_if_stopped(self) -> None:
        """Drop what was selected when the evaluation ends: by then a pass is finished, or an exception has stopped it.

        The next pass may be of other weights.
        """
        reference = weakref.ref(self)  # an engine may be gone before the evaluation ends

        def begin() -> None:
            check = reference()
            if check is not None:
                check._begin()

        self._net.call_on_leaving(begin)

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
            tolerance = max(rounding_tolerance(self._net), inner_tolerance(self._net, candidate.sample))
            _check_outputs(self._net, candidate, tolerance)
            _check_gradient(self._net, candidate, tolerance)
        self._cost = time.perf_counter() - start

    def _below(self, bound: int) -> int:
        return int(torch.randint(max(1, bound), (), generator=self._generator))


def holds_all(known: Samples, samples: Samples) -> bool:
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
