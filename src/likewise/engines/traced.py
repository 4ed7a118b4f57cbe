"""The traced engine: gradients from the inputs and output gradients of operations on parameters.

One forward pass, a backward for each output that stops at those operations, and then a rule for each
operation. A dense gradient is formed only where nothing cheaper gives the result.
"""

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor

from likewise.data import Samples
from likewise.engines.base import (
    Engine,
    Features,
    FiniteChecks,
    GradientMismatchError,
    GradientParts,
    JvpResult,
    PartsChangedError,
    Rows,
    VjpResult,
    check_finite,
    concatenate_powers,
    whiten_outputs,
    whiten_rows,
)
from likewise.engines.dense import jacobians_one_by_one
from likewise.engines.factors import DenseGradient, FactoredGradient, ParameterGradient, gram_from_rows
from likewise.engines.gradient_batch import GradientBatch, add_up, compute_gradients
from likewise.engines.memory import UNKNOWN_MEMORY, MemoryUse
from likewise.engines.tracer import (
    TRACE_FUNCTIONS,
    RegroupedError,
    Trace,
    TraceFunction,
    UntraceableError,
    repeat_samples,
)
from likewise.engines.validation import KEEP_ORDER, SpotCheck, find_fault_of_batch, full_float32
from likewise.linalg import Power, accumulation_dtype, matrix_power, rank_floor
from likewise.model import Network

SMALL_VECTOR = 2**16  # entries of a parameter up to which sums are concatenated before they are added
MAX_TRACES = 4  # of a model that branches on its data: trying one after another takes time too


@final
class TracedEngine(Engine):
    """Gradients from operations on parameters, `size` samples at a time.

    Args:
        net: The network.
        trace: The layouts of its operations, or a RowTrace.
        size: Samples of one forward pass.
        memory: What a batch takes, where it was measured.
        check: Compares some samples of every pass with autograd; None for an engine that is itself checked.

    """

    name = "layers"

    def __init__(
        self,
        net: Network,
        trace: Trace,
        size: int,
        memory: MemoryUse = UNKNOWN_MEMORY,
        check: SpotCheck | None = None,
    ) -> None:
        self._check = check
        self._net, self._size, self.batch_size, self.memory = net, size, size, memory
        self._finite_checks = FiniteChecks()
        self._traces = [trace]  # a model that branches on its data has several
        self._outer: frozenset[str] | None = None  # parameters whose gradients stay factored
        self._directions: tuple[Any, Tensor, dict[str, Tensor]] | None = (
            None  # of the last jvp, split by parameter
        )
        self._numel, self._dtype = net.numels, net.dtype
        self._largest = max(self._numel.values())
        self._device = next(iter(net.parameters.values())).device

    def self_kernel(self, samples: Samples, exponent: float = 1) -> Power:
        """Return K(x, x)ᵉ and its ranks."""
        powers = concatenate_powers([self._self_kernel(chunk, exponent) for chunk in self._chunks(samples)])
        assert powers is not None
        return powers

    def rows(self, samples: Samples, exponent: float) -> Rows:
        """Return S(x); the caller makes sure that they fit into memory."""
        parts, ranks = [], []
        for chunk in self._chunks(samples):
            rows = self._rows(chunk, self._numel)
            self._finite_checks.note(rows, chunk.samples)
            if exponent:
                self_kernel = self._self_kernel(chunk, exponent)
                rows = whiten_rows(rows, self_kernel, overwrite=True)
                ranks.append(self_kernel.rank)
            parts.append(rows)
        return Rows(torch.cat(parts), torch.cat(ranks) if ranks else None)

    def features(self, samples: Samples, exponent: float) -> Features:
        """Return S(x): outer products of linear layers as factors, everything else dense."""
        parts = [self._features(chunk, exponent) for chunk in self._chunks(samples)]
        columns = zip(*(part.tensors for part in parts), strict=True)
        concatenated = [tensors[0] if len(tensors) == 1 else torch.cat(tensors) for tensors in columns]
        ranks = [part.ranks for part in parts if part.ranks is not None]
        grams = [part.self_gram for part in parts if part.self_gram is not None]
        return (
            parts[0]
            .over(concatenated)
            ._replace(
                ranks=torch.cat(ranks) if ranks else None, self_gram=torch.cat(grams) if grams else None
            )
        )

    def _features(self, chunk: GradientBatch, exponent: float) -> Features:
        outer = self._outer_products(chunk)
        gram: Tensor | None = None
        if exponent and chunk.d > 1:
            gram = self._self_gram(chunk)
        rows = self._rows(chunk, {k: v for k, v in self._numel.items() if k not in outer})
        if gram is not None or not exponent:
            self._finite_checks.note(rows, chunk.samples)
        else:  # one output: the squared norm of the rows and factors at hand
            gram = gram_from_rows(rows) + sum(gradient.self_gram() for gradient in outer.values())
            self._finite_checks.note(gram, chunk.samples)
        self_kernel = None if gram is None else matrix_power(gram, exponent, rank_floor(self._dtype))
        factors = []
        for gradient in outer.values():
            inputs, deltas = gradient.inputs[:, 0].to(rows.dtype), gradient.deltas[:, :, 0].to(rows.dtype)
            self._finite_checks.note(inputs, chunk.samples)
            inputs, scale = _unit_inputs(inputs)
            if self_kernel is None:
                deltas = deltas * scale[:, None, None]
                self._finite_checks.note(deltas, chunk.samples)
            else:
                self._finite_checks.note(deltas, chunk.samples)
                scaled = Power(
                    self_kernel.matrix * scale.to(self_kernel.matrix)[:, None, None], self_kernel.rank
                )
                deltas = whiten_rows(deltas, scaled)
            factors.append((inputs, deltas))
        if self_kernel is None:
            return Features(rows, tuple(factors), None)
        return Features(
            whiten_rows(rows, self_kernel, overwrite=True), tuple(factors), self_kernel.rank, gram
        )

    def parts(self, samples: Samples) -> Iterator[GradientParts]:
        """Yield J(x) in parts; each dense part is computed when it is consumed."""
        for chunk in self._chunks(samples):
            outer = self._outer_products(chunk)
            factors_gram = GradientBatch(chunk.samples, chunk.d, dict(outer)).self_gram(self._device)
            self._finite_checks.note(factors_gram, chunk.samples)
            explicit = {name: size for name, size in self._numel.items() if name not in outer}
            factors = tuple((p.inputs[:, 0], p.deltas[:, :, 0]) for p in outer.values())
            dtype = torch.promote_types(self._dtype, torch.float32)
            factors = tuple((a.to(dtype), delta.to(dtype)) for a, delta in factors)
            yield GradientParts(
                factors_gram, sum(explicit.values()), self._explicit(chunk, explicit), factors
            )

    def _explicit(self, chunk: GradientBatch, numels: dict[str, int]) -> Iterator[tuple[int, Tensor, Tensor]]:
        start, dtype = 0, torch.promote_types(self._dtype, torch.float32)
        for name, size in numels.items():
            gradient = chunk.by_parameter.pop(name, None)
            if gradient is not None:
                gram = gradient.self_gram()
                self._finite_checks.note(gram, chunk.samples)
                yield start, gradient.rows().to(dtype), gram
            start += size

    def by_parameter(
        self, samples: Samples, numels: Mapping[str, int]
    ) -> Iterator[Mapping[str, ParameterGradient]]:
        """Yield J(x) by parameter, in the form in which the trace has them."""
        del numels
        for chunk in self._chunks(samples):
            yield chunk.by_parameter

    def largest_part(self, samples: Samples) -> int:
        """Return the number of entries of the largest dense part of one sample."""
        chunk = self._compute_gradients(repeat_samples(samples[:1], 2))  # as `_chunks` does
        outer = self._outer_products(chunk)
        sizes = (size for name, size in self._numel.items() if name not in outer)
        return chunk.d * max(sizes, default=1)

    def _outer_products(self, chunk: GradientBatch) -> dict[str, FactoredGradient]:
        """Return the gradients that stay factored: of the same parameters in every batch."""
        outer = {
            k: p for k, p in chunk.by_parameter.items() if isinstance(p, FactoredGradient) and p.is_outer
        }
        if self._outer is None:
            self._outer = frozenset(outer)
        if not self._outer <= outer.keys():
            gone, self._outer = self._outer - outer.keys(), frozenset()
            raise PartsChangedError(
                f"{', '.join(sorted(gone))} had one position per sample so far, now "
                "several or none: pairs are taken from dense gradients"
            )
        return {
            name: gradient for name, gradient in outer.items() if name in self._outer
        }  # in the order of the model

    def vjp(self, samples: Samples, weights: Tensor, exponent: float) -> VjpResult:
        """Return Σₓ S(x)ᵀ w(x), each chunk's sum in the model's precision, their sum in float64."""
        c, start, self_kernels = weights.shape[2], 0, list[Power]()
        total = torch.zeros(c, sum(self._numel.values()), device=self._device)
        total = total.to(accumulation_dtype(total))
        for chunk in self._chunks(samples):
            part = weights[start : start + len(chunk.samples)].to(total)
            start += len(chunk.samples)
            if exponent:
                self_kernels.append(self._self_kernel(chunk, exponent))
                part = self_kernels[-1].matrix @ part
            scale, scaled = _scale_to_dtype(part, (0, 1), self._dtype)
            self._add_weighted_sums(total, chunk, scaled, scale)
            if not exponent and not total.sum().isfinite():
                check_finite(chunk.self_gram(self._device), chunk.samples)
        return VjpResult(total, concatenate_powers(self_kernels))

    def jvp(
        self, samples: Samples, directions: Tensor, exponent: float, self_kernel: Power | None = None
    ) -> JvpResult:
        """Return S(x) u for each direction u."""
        if (
            self._directions is None or self._directions[0]() is not directions
        ):  # the same tensor for every batch of a pass
            scale, scaled = _scale_to_dtype(directions, (1,), self._dtype)
            named = {name: part.contiguous() for name, part in self._by_name(scaled).items()}
            gone = weakref.ref(directions, lambda _: setattr(self, "_directions", None))
            self._directions = gone, scale, named
        _, scale, named = self._directions
        outputs, self_kernels = [], list[Power]()
        for chunk in self._chunks(samples):
            # Self kernels first: gradients that they make dense serve the products too.
            if exponent and self_kernel is None:
                self_kernels.append(self._self_kernel(chunk, exponent))
            empty = directions.new_zeros(len(chunk.samples), chunk.d, len(directions))
            products = add_up((b.gradient.jvp(_join(named, b.names)) for b in chunk.blocks), empty)
            self._finite_checks.note(products, chunk.samples)
            outputs.append(products * scale.view(-1))
        return whiten_outputs(torch.cat(outputs), self_kernel or concatenate_powers(self_kernels))

    def _add_weighted_sums(self, total: Tensor, chunk: GradientBatch, weights: Tensor, scale: Tensor) -> None:
        """Add Σ Gᵀ w of a chunk, times the scale, to the total (c, p)."""
        if total.device.type == "cpu" and self._largest > SMALL_VECTOR:  # without a copy of the whole vector
            sums = self._by_name(total)
            for block in chunk.blocks:
                terms = block.gradient.vjp(weights)
                sizes = [self._numel[name] for name in block.names]
                for name, term in zip(block.names, terms.split(sizes, dim=1), strict=True):
                    _add(sums[name], term, scale)
            return
        _add(total, chunk.weighted_sums(weights, self._numel), scale)

    def _by_name(self, vectors: Tensor) -> dict[str, Tensor]:
        return dict(zip(self._numel, vectors.split(list(self._numel.values()), dim=1), strict=True))

    def _self_kernel(self, chunk: GradientBatch, exponent: float) -> Power:
        return matrix_power(self._self_gram(chunk), exponent, rank_floor(self._dtype))

    def _self_gram(self, chunk: GradientBatch) -> Tensor:
        total = chunk.self_gram(self._device)
        self._finite_checks.note(total, chunk.samples)
        return total

    def finish_checks(self) -> None:
        """Raise the errors deferred so as not to synchronize with a GPU, and check a sample of the pass."""
        self._finite_checks.finish_checks()
        if self._check is not None:
            self._check.finish_checks()

    def _rows(self, chunk: GradientBatch, numels: dict[str, int]) -> Tensor:
        """Return J(x) of some parameters, each written straight to its columns."""
        dtype = torch.promote_types(self._dtype, torch.float32)
        rows = torch.empty(
            len(chunk.samples), chunk.d, sum(numels.values()), dtype=dtype, device=self._device
        )
        for (name, _), part in zip(numels.items(), rows.split(list(numels.values()), dim=2), strict=True):
            if name in chunk.by_parameter:
                chunk.by_parameter[name].write(part)
            else:
                part.zero_()
        return rows

    def _chunks(self, samples: Samples) -> Iterator[GradientBatch]:
        for part in samples.split(self._size):
            batch = (
                part if len(part) > 1 else repeat_samples(part, 2)
            )  # PyTorch is wrong about some batches of one
            chunk = self._compute_gradients(batch)
            if self._check is not None:
                self._check.offer(batch, chunk.outputs, self._gradient_in(chunk), chunk.d)
            yield chunk if len(part) > 1 else chunk.part(slice(0, 1))

    def _gradient_in(self, chunk: GradientBatch) -> Callable[[int, Tensor], Tensor]:
        """Return a function (position in the chunk, u) -> J(x)ᵀ u."""

        def gradient(place: int, u: Tensor) -> Tensor:
            one = chunk.part(slice(place, place + 1))
            return one.weighted_sum(self._net, u[None].to(self._device))

        return gradient

    def _compute_gradients(self, samples: Samples) -> GradientBatch:
        """Return the gradients of samples by a known trace, a new trace, or else by autograd."""
        regrouped: RegroupedError | None = None
        for trace in self._traces:
            try:
                return compute_gradients(self._net, trace, samples)
            except RegroupedError as problem:
                regrouped = problem
            except UntraceableError:
                continue
        reason = ""
        for trace_function in self._trace_functions(regrouped):
            try:
                trace = trace_function(self._net, samples)
                gradients = compute_gradients(self._net, trace, samples)
                with full_float32():
                    exact = self._net.exact()
                    fault = find_fault_of_batch(exact, trace_function(exact, samples), samples)
            except UntraceableError as problem:
                reason = str(problem)
                continue
            if fault is None:
                self._traces.append(trace)
                return gradients
            reason = fault.reason
        if regrouped is not None:  # earlier batches may have looked in order without being so
            raise self._regrouped_error(samples, regrouped)
        return self._by_reference(samples, reason)

    def _trace_functions(self, regrouped: RegroupedError | None) -> tuple[TraceFunction, ...]:
        """Return the ways to trace a batch that fits no known trace."""
        if regrouped is not None:
            return TRACE_FUNCTIONS[:1]
        return TRACE_FUNCTIONS if len(self._traces) < MAX_TRACES else TRACE_FUNCTIONS[1:]

    def _regrouped_error(self, samples: Samples, problem: RegroupedError) -> GradientMismatchError:
        first = int(samples.ids[0])
        return GradientMismatchError(
            f"{type(self._net.model).__name__} sorts, drops or groups samples inside forward: from sample "
            f"{first} on, {problem}. Batches before may be wrong without showing it, so no number of this "
            f'pass can be used. Take engine="autograd", which is slower but right. {KEEP_ORDER}',
            first,
        )

    def _by_reference(self, samples: Samples, reason: str) -> GradientBatch:
        """Return gradients by plain autograd, for a batch whose operations cannot be traced."""
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
    """Return inputs (n, i) scaled to a largest entry of ±1, and the scales, (n,)."""
    scale = torch.linalg.vector_norm(inputs, torch.inf, dim=1)
    scale = torch.where(scale > 0, scale, 1)
    return inputs / scale[:, None], scale


def _add(sums: Tensor, terms: Tensor, scale: Tensor) -> None:
    """Add scaled terms, (c, numel), in the precision of the sums."""
    if len(sums) == 1 and sums.device.type == "cpu":  # without a copy of the terms
        sums.add_(terms, alpha=scale.item())
    else:
        sums.addcmul_(terms.to(sums.dtype), scale.view(-1, 1))


def _join(named: dict[str, Tensor], names: tuple[str, ...]) -> Tensor:
    """Return the directions of some parameters, (c, ...), concatenated once for all batches of a pass."""
    if len(names) == 1:
        return named[names[0]]
    key = "\n".join(names)
    if key not in named:
        named[key] = torch.cat([named[name] for name in names], 1)
    return named[key]


def _scale_to_dtype(values: Tensor, dims: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the largest entries, and the values relative to them in the compute dtype, without overflow."""
    scale = values.abs().amax(dims, keepdim=True)
    scale = torch.where(scale > 0, scale, 1)
    return scale, (values / scale).to(dtype)
