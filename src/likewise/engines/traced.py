"""The four questions, answered from the inputs and output gradients of operations on parameters.

One forward pass, a backward for each output that stops at those operations, and then a rule for each:
no gradient is formed that need not be.
"""

import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import Tensor

from likewise.data import Samples
from likewise.engines.base import (
    Engine,
    Features,
    FiniteChecks,
    GradientMismatchError,
    JvpResult,
    Parts,
    PartsChangedError,
    Rows,
    VjpResult,
    check_finite,
    concatenate_powers,
    whiten_outputs,
    whiten_rows,
)
from likewise.engines.factors import DenseGradient, FactoredGradient, ParameterGradient, self_gram
from likewise.engines.gradient_batch import GradientBatch, compute_gradients
from likewise.engines.jacobians import jacobians_one_by_one
from likewise.engines.reference import full_float32
from likewise.engines.tracer import WAYS, Regrouped, Trace, UntraceableError, Way, repeat_samples
from likewise.engines.validation import KEEP_ORDER, SpotCheck, find_fault_of_batch
from likewise.linalg import Power, accumulation_dtype, matrix_power, rank_floor
from likewise.model import Network

MOST_TRACES = 4  # of a model that branches on its data: trying one after another takes time too


@final
class TracedEngine(Engine):
    """Answers from operations on parameters, `size` samples at a time."""

    def __init__(
        self,
        net: Network,
        trace: Trace,
        size: int,
        room: tuple[int, int] = (0, 0),
        check: SpotCheck | None = None,
    ) -> None:
        self._check = check  # of samples of every pass; None for engines that are themselves checked
        self._net, self._size, self.at_once, self.room = net, size, size, room
        self._doubts = FiniteChecks()
        self._traces = [trace]  # a model that branches on its data has several
        self._outer: frozenset[str] | None = None  # parameters whose gradients are kept as factors
        self._directions: tuple[Any, Tensor, dict[str, Tensor]] | None = None  # the last ones pushed
        self._numel, self._dtype = net.numels, net.dtype
        self._device = next(iter(net.parameters.values())).device

    def self_kernel(self, samples: Samples, exponent: float = 1) -> Power:
        """Return K(x, x)ᵉ and its ranks."""
        found = concatenate_powers([self._own(chunk, exponent) for chunk in self._chunks(samples)])
        assert found is not None
        return found

    def rows(self, samples: Samples, exponent: float) -> Rows:
        """Return S(x); the caller sees to it that they fit."""
        parts, ranks = [], []
        for chunk in self._chunks(samples):
            rows = self._rows(chunk, self._numel)
            self._doubts.note(rows, chunk.samples)
            if exponent:
                own = self._own(chunk, exponent)
                rows = whiten_rows(rows, own, overwrite=True)
                ranks.append(own.rank)
            parts.append(rows)
        return Rows(torch.cat(parts), torch.cat(ranks) if ranks else None)

    def features(self, samples: Samples, exponent: float) -> Features:
        """Return S(x): outer products of linear layers as factors, all else explicit."""
        parts, ranks = [], []
        for chunk in self._chunks(samples):
            features = self._features(chunk, exponent)
            parts.append(features)
            if features.ranks is not None:
                ranks.append(features.ranks)
        columns = zip(*(part.tensors for part in parts), strict=True)
        joined = [tensors[0] if len(tensors) == 1 else torch.cat(tensors) for tensors in columns]
        return parts[0].over(joined)._replace(ranks=torch.cat(ranks) if ranks else None)

    def _features(self, chunk: GradientBatch, exponent: float) -> Features:
        outer = self._outer_products(chunk)
        own = self._own(chunk, exponent) if exponent and chunk.d > 1 else None
        rows = self._rows(chunk, {k: v for k, v in self._numel.items() if k not in outer})
        if own is not None or not exponent:
            self._doubts.note(rows, chunk.samples)
        else:  # one output: the squared norm of what is there anyway
            norms = self_gram(rows) + sum(piece.own() for piece in outer.values())
            self._doubts.note(norms, chunk.samples)
            own = matrix_power(norms, exponent, rank_floor(self._dtype))
        factors = []
        for piece in outer.values():
            inputs, deltas = piece.inputs[:, 0].to(rows.dtype), piece.deltas[:, :, 0].to(rows.dtype)
            self._doubts.note(inputs, chunk.samples)
            inputs, scale = _unit_inputs(inputs)
            if own is None:
                deltas = deltas * scale[:, None, None]
                self._doubts.note(deltas, chunk.samples)
            else:
                self._doubts.note(deltas, chunk.samples)
                scaled = Power(own.matrix * scale.to(own.matrix)[:, None, None], own.rank)
                deltas = whiten_rows(deltas, scaled)
            factors.append((inputs, deltas))
        if own is None:
            return Features(rows, tuple(factors), None)
        return Features(whiten_rows(rows, own, overwrite=True), tuple(factors), own.rank)

    def parts(self, samples: Samples) -> Iterator[Parts]:
        """Yield J(x) in parts, each explicit one formed when it is asked for and dropped after."""
        for chunk in self._chunks(samples):
            outer = self._outer_products(chunk)
            own = GradientBatch(chunk.samples, chunk.d, dict(outer)).own(self._device)
            self._doubts.note(own, chunk.samples)
            explicit = {name: size for name, size in self._numel.items() if name not in outer}
            factors = tuple((p.inputs[:, 0], p.deltas[:, :, 0]) for p in outer.values())
            dtype = torch.promote_types(self._dtype, torch.float32)
            factors = tuple((a.to(dtype), delta.to(dtype)) for a, delta in factors)
            yield Parts(own, sum(explicit.values()), self._explicit(chunk, explicit), factors)

    def _explicit(self, chunk: GradientBatch, numels: dict[str, int]) -> Iterator[tuple[int, Tensor, Tensor]]:
        start, dtype = 0, torch.promote_types(self._dtype, torch.float32)
        for name, size in numels.items():
            piece = chunk.pieces.pop(name, None)
            if piece is not None:
                own = piece.own()
                self._doubts.note(own, chunk.samples)
                yield start, piece.rows().to(dtype), own
            start += size

    def widest(self, samples: Samples) -> int:
        """Return how many numbers the largest part of one sample has."""
        chunk = self._gathered(samples[:1])
        outer = self._outer_products(chunk)
        sizes = (size for name, size in self._numel.items() if name not in outer)
        return chunk.d * max(sizes, default=1)

    def _outer_products(self, chunk: GradientBatch) -> dict[str, FactoredGradient]:
        """Return the pieces to keep as factors: of the same parameters in every batch."""
        found = {k: p for k, p in chunk.pieces.items() if isinstance(p, FactoredGradient) and p.is_outer}
        if self._outer is None:
            self._outer = frozenset(found)
        if not self._outer <= found.keys():
            gone, self._outer = self._outer - found.keys(), frozenset()
            raise PartsChangedError(
                f"{', '.join(sorted(gone))} had one position per sample so far, now "
                "several or none: pairs are taken from explicit gradients"
            )
        return {
            name: piece for name, piece in found.items() if name in self._outer
        }  # in the order of the model

    def vjp(self, samples: Samples, weights: Tensor, exponent: float) -> VjpResult:
        """Return Σₓ S(x)ᵀ w(x), each chunk's sum in the model's precision, their sum in float64."""
        c, start, owns = weights.shape[2], 0, list[Power]()
        total = torch.zeros(c, sum(self._numel.values()), device=self._device)
        total = total.to(accumulation_dtype(total))
        for chunk in self._chunks(samples):
            part = weights[start : start + len(chunk.samples)].to(total)
            start += len(chunk.samples)
            if exponent:
                owns.append(self._own(chunk, exponent))
                part = owns[-1].matrix @ part
            scale, narrow = _scaled(part, (0, 1), self._dtype)
            for name, sums in self._by_name(total).items():
                if name in chunk.pieces:
                    _add(sums, chunk.pieces[name].vjp(narrow), scale)
            if not exponent and not total.sum().isfinite():
                check_finite(chunk.own(self._device), chunk.samples)
        return VjpResult(total, concatenate_powers(owns))

    def jvp(
        self, samples: Samples, directions: Tensor, exponent: float, own: Power | None = None
    ) -> JvpResult:
        """Return S(x) u for each direction u."""
        if self._directions is None or self._directions[0]() is not directions:  # the same for every batch
            scale, narrow = _scaled(directions, (1,), self._dtype)
            named = {name: part.contiguous() for name, part in self._by_name(narrow).items()}
            gone = weakref.ref(directions, lambda _: setattr(self, "_directions", None))
            self._directions = gone, scale, named
        _, scale, named = self._directions
        outputs, owns = [], list[Power]()
        for chunk in self._chunks(samples):
            moved = directions.new_zeros(len(chunk.samples), chunk.d, len(directions))
            for name, piece in chunk.pieces.items():
                moved += piece.jvp(named[name])
            if exponent and own is None:
                owns.append(self._own(chunk, exponent))
            self._doubts.note(moved, chunk.samples)
            outputs.append(moved * scale.view(-1))
        return whiten_outputs(torch.cat(outputs), own or concatenate_powers(owns))

    def _by_name(self, vectors: Tensor) -> dict[str, Tensor]:
        return dict(zip(self._numel, vectors.split(list(self._numel.values()), dim=1), strict=True))

    def _own(self, chunk: GradientBatch, exponent: float) -> Power:
        total = chunk.own(self._device)
        self._doubts.note(total, chunk.samples)
        return matrix_power(total, exponent, rank_floor(self._dtype))

    def finish_checks(self) -> None:
        """Raise now what was put off so as not to wait for a GPU, and check a sample of the pass."""
        self._doubts.finish_checks()
        if self._check is not None:
            self._check.finish_checks()

    def _rows(self, chunk: GradientBatch, numels: dict[str, int]) -> Tensor:
        """Return J(x) of some parameters, each piece straight into its place."""
        dtype = torch.promote_types(self._dtype, torch.float32)
        rows = torch.empty(
            len(chunk.samples), chunk.d, sum(numels.values()), dtype=dtype, device=self._device
        )
        for (name, _), part in zip(numels.items(), rows.split(list(numels.values()), dim=2), strict=True):
            if name in chunk.pieces:
                chunk.pieces[name].write(part)
            else:
                part.zero_()
        return rows

    def _chunks(self, samples: Samples) -> Iterator[GradientBatch]:
        for part in samples.split(self._size):
            batch = (
                part if len(part) > 1 else repeat_samples(part, 2)
            )  # PyTorch is wrong about some batches of one
            chunk = self._gathered(batch)
            if self._check is not None:
                self._check.offer(batch, chunk.outputs, self._gradient_in(chunk), chunk.d)
            yield chunk if len(part) > 1 else chunk.part(slice(0, 1))

    def _gradient_in(self, chunk: GradientBatch) -> Callable[[int, Tensor], Tensor]:
        """Return how to get J(x)ᵀ u of the sample at a place of the chunk."""

        def gradient(place: int, u: Tensor) -> Tensor:
            one = chunk.part(slice(place, place + 1))
            return one.weighted_sum(self._net, u[None].to(self._device))

        return gradient

    def _gathered(self, samples: Samples) -> GradientBatch:
        """Return the gradients of some samples by a trace that fits: known, new, or none at all."""
        regrouped: Regrouped | None = None
        for trace in self._traces:
            try:
                return compute_gradients(self._net, trace, samples)
            except Regrouped as problem:
                regrouped = problem
            except UntraceableError:
                continue
        reason = ""
        for way in self._ways(regrouped):
            try:
                trace = way(self._net, samples)
                found = compute_gradients(self._net, trace, samples)
                with full_float32():
                    exact = self._net.exact()
                    fault = find_fault_of_batch(exact, way(exact, samples), samples)
            except UntraceableError as problem:
                reason = str(problem)
                continue
            if fault is None:
                self._traces.append(trace)
                return found
            reason = fault.reason
        if regrouped is not None:  # earlier batches may have looked in order without being so
            raise self._regrouped(samples, regrouped)
        return self._by_reference(samples, reason)

    def _ways(self, regrouped: Regrouped | None) -> tuple[Way, ...]:
        """Return how a batch that fits no known trace may be followed."""
        if regrouped is not None:
            return WAYS[:1]
        return WAYS if len(self._traces) < MOST_TRACES else WAYS[1:]

    def _regrouped(self, samples: Samples, problem: Regrouped) -> GradientMismatchError:
        first = int(samples.ids[0])
        return GradientMismatchError(
            f"{type(self._net.model).__name__} sorts, drops or groups samples inside forward: from sample "
            f"{first} on, {problem}. Batches before may be wrong without showing it, so no number of this "
            f'pass can be used. Take engine="autograd", which is slower but right. {KEEP_ORDER}',
            first,
        )

    def _by_reference(self, samples: Samples, reason: str) -> GradientBatch:
        """Return gradients by plain autograd, where the operations of this batch are not to be had."""
        warnings.warn(
            f"{type(self._net.model).__name__} is differentiated one sample at a time in some batches, the "
            f"first with sample {int(samples.ids[0])}, which is exact but slow: {reason}.",
            stacklevel=2,
        )
        with torch.enable_grad():
            rows = jacobians_one_by_one(self._net, samples)
        parts = rows.split(list(self._numel.values()), dim=2)
        named: dict[str, ParameterGradient] = {
            k: DenseGradient(v) for k, v in zip(self._numel, parts, strict=True)
        }
        return GradientBatch(samples, rows.shape[1], named)


def _unit_inputs(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs (n, i) whose largest entry is ±1, and what they were divided by, (n,)."""
    scale = torch.linalg.vector_norm(inputs, torch.inf, dim=1)
    scale = torch.where(scale > 0, scale, 1)
    return inputs / scale[:, None], scale


def _add(sums: Tensor, terms: Tensor, scale: Tensor) -> None:
    """Add scaled terms, (c, numel), in the precision of the sums."""
    if len(sums) == 1 and sums.device.type == "cpu":  # without a copy of the terms
        sums.add_(terms, alpha=scale.item())
    else:
        sums += terms * scale.view(-1, 1)


def _scaled(wide: Tensor, dims: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the largest entries, and the rest relative to them in a narrow type without overflow."""
    scale = wide.abs().amax(dims, keepdim=True)
    scale = torch.where(scale > 0, scale, 1)
    return scale, (wide / scale).to(dtype)
