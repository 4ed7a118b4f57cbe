"""The traced engine: gradients from the inputs and output gradients of operations on parameters.

One forward pass, a backward for each output that stops at those operations, and then a rule for each
operation. A dense gradient is formed only where nothing cheaper gives the result.
"""

import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import NamedTuple, final

import torch
from torch import Tensor

from likewise.data import Samples
from likewise.distributed import world_size
from likewise.engines.base import (
    DependentSampleError,
    Engine,
    Features,
    FiniteChecks,
    GradientMismatchError,
    GradientParts,
    JointBlocks,
    JvpResult,
    PartsChangedError,
    RowBlock,
    Rows,
    VjpResult,
    check_finite,
    concatenate_powers,
    join_tensors,
    whiten_outputs,
    whiten_rows,
)
from likewise.engines.chunks import Chunk, ChunkGraphs
from likewise.engines.dense import jacobians_one_by_one
from likewise.engines.factors import (
    DenseGradient,
    FactoredGradient,
    ParameterGradient,
    concatenate,
    gram_from_rows,
)
from likewise.engines.gradient_batch import GradientBatch, compute_gradients
from likewise.engines.memory import (
    SLACK,
    UNKNOWN_MEMORY,
    MemoryMeter,
    MemoryUse,
    entries_per_sample,
    equal_size,
)
from likewise.engines.pass_check import PassCheck, is_same_batch
from likewise.engines.retained import RetainedGradients, retained_bytes
from likewise.engines.tracer import (
    TRACE_FUNCTIONS,
    RegroupedError,
    RowTrace,
    Trace,
    TraceFunction,
    UntraceableError,
    repeat_samples,
)
from likewise.engines.validation import KEEP_ORDER, find_fault_of_batch
from likewise.linalg import Power, accumulation_dtype, matrix_power, rank_floor
from likewise.model import Network, Parameters
from likewise.torch_state import full_float32, send


class _Directions:
    """Directions of a jvp, split by parameter."""

    def __init__(self, of: "weakref.ref[Tensor]", scale: Tensor, named: dict[str, Tensor]) -> None:
        self.of, self.scale, self._named = of, scale, named

    def join(self, names: tuple[str, ...]) -> Tensor:
        """Return the directions of some parameters, (c, ...), concatenated once for all batches of a pass."""
        if len(names) == 1:
            return self._named[names[0]]
        key = "\n".join(names)
        if key not in self._named:
            self._named[key] = torch.cat([self._named[name] for name in names], 1)
        return self._named[key]


SMALL_VECTOR = 2**16  # entries of a parameter up to which sums are concatenated before they are added
SMALL_PART = 512  # entries of a parameter up to which it shares a dense part with others
FEW_OUTPUTS = 8  # up to which K(x, x) costs less from dense gradients than from what they are formed of
COPIED = 4  # samples of a batch whose gradients are copied at a time
MEASURED_SHARE = 1.25  # inputs that have up to so many times as many entries tell what a sample takes
MAX_TRACES = 4  # of a model that branches on its data: trying one after another takes time too


@final
class TracedEngine(Engine):
    """Gradients from operations on parameters, `size` samples at a time.

    Args:
        net: The network.
        trace: The layouts of its operations, or a RowTrace.
        size: Samples of one forward pass, where sums over parameters are beside them.
        memory: What a batch takes, where it was measured.
        check: Compares some samples of every pass with autograd; None for an engine that is itself checked.
        forms: Of the gradients, if some were computed before; else they are when they are first asked for.
        gradient_size: Samples of one forward pass where only gradients are computed; `size` if None.

    """

    name = "layers"

    def __init__(
        self,
        net: Network,
        trace: Trace,
        size: int,
        memory: MemoryUse = UNKNOWN_MEMORY,
        check: PassCheck | None = None,
        forms: "GradientForms | None" = None,
        gradient_size: int | None = None,
    ) -> None:
        self._check, self._gradient_size, self._forms = check, gradient_size or size, forms
        self._net, self._size, self.batch_size, self.memory = net, size, size, memory
        self._finite_checks = FiniteChecks()
        self._kept: GradientBatch | None = None
        self._retained: RetainedGradients | None = None
        self._traces = [trace]  # a model that branches on its data has several
        self._larger: dict[int, int] = {}  # bytes of a sample, by the entries of inputs larger than the first
        self._outer: frozenset[str] | None = None  # parameters whose gradients stay factored
        self._directions: _Directions | None = None  # of the last jvp
        self._numel, self._dtype = net.numels, net.dtype
        self._largest = max(self._numel.values())
        self._device = next(iter(net.parameters.values())).device
        self.graphs = ChunkGraphs(net)

    @property
    def gradient_batch_size(self) -> int:
        """Samples that fit into max_memory where only gradients are computed."""
        return self._gradient_size

    def with_network(self, net: Network) -> "TracedEngine":
        """Return an engine of the same model with another readout, which checks nothing."""
        return TracedEngine(
            net,
            self._traces[0],
            self._size,
            self.memory,
            forms=self._forms,
            gradient_size=self._gradient_size,
        )

    def keep(self, gradients: GradientBatch) -> None:
        """Keep gradients that were compared with autograd, for `joint_blocks` of the same samples.

        They are released by the next pass, and when the evaluation ends: the model may change after it.
        """
        self._kept = gradients
        self._net.call_on_leaving(self._release_kept)

    def _release_kept(self) -> None:
        self._kept = None

    @contextmanager
    def retain(self, max_bytes: int, n: int) -> Iterator[None]:
        """Keep what gradients are computed from, for later passes inside over the same n samples."""
        if self._retained is not None or max_bytes <= 0:
            yield
            return
        self._retained = RetainedGradients(max_bytes, n, self._net.parameters)
        try:
            yield
        finally:
            self._retained = None
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # so large a block would be split for small tensors, and asked for again

    @contextmanager
    def enlarged(self, size: int) -> Iterator[None]:
        """Take batches of `size` samples inside, if that is more than now."""
        before = self._size
        self._size = self.batch_size = max(before, size)
        try:
            yield
        finally:
            self._size = self.batch_size = before

    def _take_kept(self, samples: Samples) -> GradientBatch | None:
        kept, self._kept = self._kept, None
        if kept is None or self._net.observer is not None:
            return None
        return kept if is_same_batch(kept.samples, samples) else None

    def self_kernel(self, samples: Samples, exponent: float = 1) -> Power:
        """Return K(x, x)ᵉ and its ranks."""
        powers = concatenate_powers(
            list(map(partial(self._self_kernel, exponent=exponent), self._chunks(samples)))
        )
        assert powers is not None
        return powers

    def rows(self, samples: Samples, exponent: float) -> Rows:
        """Return S(x); the caller makes sure that they fit into memory."""
        parts, ranks = [], []
        for chunk in self._chunks(samples):
            self_kernel = self._self_kernel(chunk, exponent) if exponent else None
            rows = self._rows(chunk.gradients, self._numel)
            self._finite_checks.note(rows, chunk.samples)
            if self_kernel is not None:
                rows = whiten_rows(rows, self_kernel, overwrite=True)
                ranks.append(self_kernel.rank)
            parts.append(rows)
            del chunk
        return Rows(torch.cat(parts), torch.cat(ranks) if ranks else None)

    def features(self, samples: Samples, exponent: float) -> Features:
        """Return S(x): outer products of linear layers as factors, everything else dense."""
        parts = list(map(partial(self._features, exponent=exponent), self._chunks(samples)))
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

    def joint_blocks(self, samples: Samples, exponent: float) -> JointBlocks:
        """Return S(x) S(x')ᵀ of all pairs of few samples: parameter by parameter, whose rows are never held together.

        Args:
            samples: At most `gradient_batch_size`.
            exponent: Of K(x, x) in S(x) = K(x, x)ᵉ J(x).

        """
        gradients = self._take_kept(samples)
        if gradients is None:
            gradients = self._chunk(samples, None).gradients.copy()
        n, d = len(samples), gradients.d
        total = torch.zeros(n * d, n * d, device=self._device)
        total = total.to(accumulation_dtype(total))
        while gradients.by_parameter:
            _, gradient = gradients.by_parameter.popitem()  # its rows go with it
            total += gradient.joint_gram().to(total)
        blocks = total.view(n, d, n, d).transpose(1, 2)
        own = blocks.diagonal(dim1=0, dim2=1).permute(2, 0, 1).contiguous()
        self._finite_checks.note(own, samples)
        if not exponent:
            return JointBlocks(blocks, None)
        powers = matrix_power(own, exponent, rank_floor(self._dtype))
        return JointBlocks(powers.matrix[:, None] @ blocks @ powers.matrix, powers.rank)

    def feature_entries(self, samples: Samples, d: int) -> dict[str, int]:
        """Return how many numbers the features of one sample with d outputs have for each parameter, in order."""
        factors = self._known_factor_sizes(samples)
        return {
            name: factors[name][0] + d * factors[name][1] if name in factors else d * size
            for name, size in self._numel.items()
        }

    def feature_bytes(self, samples: Samples, d: int) -> int:
        """Return the bytes of the features of one sample with d outputs, counted."""
        itemsize = torch.promote_types(self._dtype, torch.float32).itemsize
        return itemsize * sum(self.feature_entries(samples, d).values())

    def _known_factor_sizes(self, samples: Samples) -> dict[str, tuple[int, int]]:
        """Return the entries of inputs, and of output gradients of one output, of parameters that stay factored."""
        factors = self._known_forms(samples).factors
        return {k: v for k, v in factors.items() if self._outer is None or k in self._outer}

    def _settled_factors(self, samples: Samples) -> frozenset[str]:
        """Return the parameters that stay factored; of the trace's, where no batch has told yet."""
        if self._outer is None:
            self._outer = frozenset(self._known_factor_sizes(samples))
        return self._outer

    def _known_forms(self, samples: Samples) -> "GradientForms":
        if self._forms is None:
            self._forms = self._compute_forms(samples)
        return self._forms

    def _compute_forms(self, samples: Samples) -> "GradientForms":
        gradients = self.gradients(repeat_samples(samples[:1], 2))  # as `_chunks` calls the model
        return GradientForms.of(gradients, self._net.parameters)

    def retained_bytes(self, samples: Samples, d: int) -> dict[str, int]:
        """Return the bytes of one sample's gradient of each parameter in the form in which the trace has it.

        There are none of parameters that stay factored, whose features are that form.

        Args:
            samples: The first of which is looked at, if gradients of fewer outputs are all that is known.
            d: The number of outputs.

        """
        factors, forms = self._known_factor_sizes(samples), self._known_forms(samples)
        if forms.d != d:
            forms = self._forms = self._compute_forms(samples)
        return {name: size for name, size in forms.retained_bytes.items() if name not in factors}

    def parameter_features(
        self, samples: Samples, names: tuple[str, ...], retained: RetainedGradients | None = None
    ) -> Features:
        """Return J(x) of some parameters: outer products of linear layers as factors, everything else dense.

        Args:
            samples: The samples.
            names: Of the parameters.
            retained: Keeps gradients of other parameters, in the form in which the trace has them.

        """
        self._settled_factors(samples)  # as they were counted: else a linear layer would take all its entries
        every = set(names) | set(() if retained is None else retained.names or ())

        def compute(chunk: Chunk) -> tuple[Tensor, ...]:
            gradients = chunk.gradients
            if retained is not None:
                retained.keep(chunk.samples, gradients)
            return self._plain_features(chunk.samples, gradients, names)

        chunks = self._chunks(samples, tuple(name for name in self._numel if name in every))
        tensors = list(join_tensors(list(map(compute, chunks))))
        return Features(tensors[0], tuple(zip(tensors[1::2], tensors[2::2], strict=True)), None)

    def _plain_features(
        self, samples: Samples, gradients: GradientBatch, names: tuple[str, ...]
    ) -> tuple[Tensor, ...]:
        """Return J(x) of some parameters as the tensors of features: dense rows, then the factors."""
        known = self._outer_products(gradients, names)
        rows = self._rows(gradients, {k: v for k, v in self._numel.items() if k in names and k not in known})
        self._finite_checks.note(rows, samples)
        tensors = [rows]
        for gradient in known.values():
            inputs, scale = _unit_inputs(gradient.inputs[:, 0].to(rows.dtype))
            deltas = gradient.deltas[:, :, 0].to(rows.dtype) * scale[:, None, None]
            for tensor in (inputs, deltas):
                self._finite_checks.note(tensor, samples)
            tensors += [inputs, deltas]
        return tuple(tensors)

    def retained_features(
        self, ids: Tensor, names: tuple[str, ...], retained: RetainedGradients
    ) -> Features | None:
        """Return J(x) of parameters whose gradients were kept; None where those of a sample were not."""
        batches, parts = retained.batches(ids), list[Tensor]()
        if batches is None:
            return None
        for gradients in batches:
            parts.append(self._rows(gradients, {k: v for k, v in self._numel.items() if k in names}))
            self._finite_checks.note(parts[-1], gradients.samples)
        return Features(concatenate(parts, 0), (), None)

    def _features(self, chunk: Chunk, exponent: float) -> Features:
        gram: Tensor | None = None
        from_rows = chunk.d == 1 or (self._device.type == "cpu" and chunk.d <= FEW_OUTPUTS)
        if exponent and not from_rows:
            gram = self._self_gram(chunk)
        gradients = chunk.gradients
        outer = self._outer_products(gradients)
        rows = self._rows(gradients, {k: v for k, v in self._numel.items() if k not in outer})
        if gram is not None or not exponent:
            self._finite_checks.note(rows, chunk.samples)
        else:  # the rows and factors are at hand
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

    def form_all_parts(self) -> None:
        """Have no factors among the parts of gradients from now on."""
        self._outer = frozenset()

    def matrices(self, samples: Samples) -> dict[str, tuple[int, int]]:
        """Return rows and columns of the parameters of two dimensions or more that do not stay factored."""
        factors = self._settled_factors(samples)
        shapes = {name: value.shape for name, value in self._net.parameters.items() if name not in factors}
        return {name: (shape[0], prod(shape[1:])) for name, shape in shapes.items() if len(shape) > 1}

    def map_parts(
        self,
        samples: Samples,
        function: Callable[[GradientParts], tuple[Tensor, ...]],
        reads: object,
        matrices: Collection[str] = (),
    ) -> tuple[Tensor, ...]:
        """Return function(parts of J(x)), joined over consecutive samples."""
        results = []
        for chunk in self._chunks(samples, size=self._gradient_size):
            results.append(
                chunk.per_sample("parts", lambda gradients: function(self._parts(gradients, matrices)), reads)
            )
            for tensor in results[-1]:
                self._finite_checks.note(tensor, chunk.samples)
            del chunk
        return join_tensors(results)

    def _parts(self, gradients: GradientBatch, matrices: Collection[str]) -> GradientParts:
        """Return J(x) in parts; each dense part and matrix is computed when it is consumed."""
        outer = self._outer_products(gradients)
        factors_gram = GradientBatch(gradients.samples, gradients.d, dict(outer)).self_gram(self._device)
        apart = {*outer, *matrices}
        explicit = {name: size for name, size in self._numel.items() if name not in apart}
        dtype = torch.promote_types(self._dtype, torch.float32)
        factors = ((p.inputs[:, 0].to(dtype), p.deltas[:, :, 0].to(dtype)) for p in outer.values())
        return GradientParts(
            factors_gram,
            sum(explicit.values()),
            self._explicit(gradients, explicit),
            tuple(factors),
            self._matrices(gradients, matrices),
        )

    def _matrices(
        self, gradients: GradientBatch, names: Collection[str]
    ) -> Iterator[tuple[str, Iterator[ParameterGradient]]]:
        for name in (name for name in self._numel if name in names):
            gradient = gradients.by_parameter.pop(name, None)
            if gradient is not None:
                yield name, gradient.blocks()

    def _explicit(
        self, gradients: GradientBatch, numels: dict[str, int]
    ) -> Iterator[tuple[int, Iterator[RowBlock]]]:
        start, dtype = 0, torch.promote_types(self._dtype, torch.float32)
        small, large = _split_by_size(numels)
        for name, size in large.items():
            gradient = gradients.by_parameter.pop(name, None)
            if gradient is not None:
                yield start, (RowBlock(b.rows().to(dtype), b.self_gram()) for b in gradient.blocks())
            start += size
        if small:
            rows = self._rows(gradients, small)
            yield start, iter([RowBlock(rows, gram_from_rows(rows))])

    def by_parameter(
        self, samples: Samples, numels: Mapping[str, int]
    ) -> Iterator[Mapping[str, ParameterGradient]]:
        """Yield J(x) by parameter, in the form in which the trace has them."""
        del numels
        chunks = self._chunks(samples, size=self._gradient_size)
        yield from map(lambda chunk: chunk.gradients.by_parameter, chunks)

    def map_by_parameter(
        self,
        samples: Samples,
        numels: Mapping[str, int],
        function: Callable[[Mapping[str, ParameterGradient]], tuple[Tensor, ...]],
        reads: object,
    ) -> tuple[Tensor, ...]:
        """Return function(J(x) by parameter), joined over consecutive samples."""
        del numels

        def compute(chunk: Chunk) -> tuple[Tensor, ...]:
            found: tuple[Tensor, ...] = chunk.per_sample(
                "by parameter", lambda gradients: function(gradients.by_parameter), reads
            )
            return found

        return join_tensors(list(map(compute, self._chunks(samples, size=self._gradient_size))))

    def largest_part(self, samples: Samples, d: int) -> int:
        """Return the number of entries of the largest dense part of one sample with d outputs."""
        factors = self._known_factor_sizes(samples)
        small, large = _split_by_size({k: v for k, v in self._numel.items() if k not in factors})
        return d * max(1, sum(small.values()), *large.values())

    def _outer_products(
        self, chunk: GradientBatch, names: tuple[str, ...] | None = None
    ) -> dict[str, FactoredGradient]:
        """Return the gradients that stay factored: of the same parameters in every batch."""
        outer = _outer_products(chunk)
        if self._outer is None and names is None:
            self._outer = frozenset(outer)
        expected = (self._outer or frozenset()) & frozenset(self._numel if names is None else names)
        if not expected <= outer.keys():
            gone, self._outer = expected - outer.keys(), frozenset()
            raise PartsChangedError(
                f"{', '.join(sorted(gone))} had one position per sample so far, now "
                "several or none: pairs are taken from dense gradients"
            )
        return {
            name: gradient for name, gradient in outer.items() if name in expected
        }  # in the order of the model

    def vjp(self, samples: Samples, weights: Tensor, exponent: float) -> VjpResult:
        """Return Σₓ S(x)ᵀ w(x), each chunk's sum in the model's precision, their sum in float64."""
        start = 0

        def weigh(chunk: Chunk) -> tuple[Tensor, Power | None]:
            nonlocal start
            here, start = slice(start, start + len(chunk.samples)), start + len(chunk.samples)
            wide = accumulation_dtype(torch.empty(0, device=self._device))
            part = send(weights[here], self._device, wide)
            if not exponent:
                return part, None
            self_kernel = self._self_kernel(chunk, exponent)
            return self_kernel.matrix @ part, self_kernel

        return self._vjp(samples, weights.shape[2], weigh)

    def vjp_with_self_kernel(self, samples: Samples, c: int, weights: Callable[[Power], Tensor]) -> VjpResult:
        """Return Σₓ J(x)ᵀ w(x) and K(x, x), from one computation of gradients."""

        def weigh(chunk: Chunk) -> tuple[Tensor, Power]:
            self_kernel = self._self_kernel(chunk, 1)
            return weights(self_kernel), self_kernel

        return self._vjp(samples, c, weigh)

    def _vjp(
        self, samples: Samples, c: int, weigh: Callable[[Chunk], tuple[Tensor, Power | None]]
    ) -> VjpResult:
        """Return Σₓ J(x)ᵀ w(x), given what returns the weights of a chunk, and the self kernels if it needs them."""
        self_kernels = list[Power]()
        total = torch.zeros(c, sum(self._numel.values()), device=self._device)
        total = total.to(accumulation_dtype(total))
        for chunk in self._chunks(samples):
            part, self_kernel = weigh(chunk)
            scale, scaled = _scale_to_dtype(part, (0, 1), self._dtype)
            self._add_weighted_sums(total, chunk, scaled, scale)
            if self_kernel is not None:
                self_kernels.append(self_kernel)
            elif not total.sum().isfinite():
                check_finite(chunk.gradients.self_gram(self._device), chunk.samples)
            del chunk
        return VjpResult(total, concatenate_powers(self_kernels))

    def jvp(
        self, samples: Samples, directions: Tensor, exponent: float, self_kernel: Power | None = None
    ) -> JvpResult:
        """Return S(x) u for each direction u."""
        known = self._split_directions(directions)
        outputs, self_kernels = [], list[Power]()
        for chunk in self._chunks(samples):
            # Self kernels first: gradients that they make dense serve the products too.
            if exponent and self_kernel is None:
                self_kernels.append(self._self_kernel(chunk, exponent))

            def multiply(gradients: GradientBatch) -> Tensor:
                empty = directions.new_zeros(len(gradients.samples), gradients.d, len(directions))
                return gradients.products(known.join, empty, self.memory.product_bytes)

            products = chunk.per_sample("jvp", multiply, known)
            self._finite_checks.note(products, chunk.samples)
            outputs.append(products * known.scale.view(-1))
            del chunk
        return whiten_outputs(torch.cat(outputs), self_kernel or concatenate_powers(self_kernels))

    def vjp_by_output(self, samples: Samples, weights: Tensor, d: int, exponent: float) -> VjpResult:
        """Return Σₓ w(x) S_e(x) for each output e; gradients are formed of few samples, once for all columns."""
        c, start, self_kernels = weights.shape[1], 0, list[Power]()
        total = torch.zeros(d * c, sum(self._numel.values()), device=self._device)
        total = total.to(accumulation_dtype(total))
        sums = {name: part.unflatten(0, (d, c)) for name, part in self._by_name(total).items()}
        for chunk in self._chunks(samples):
            here, start = slice(start, start + len(chunk.samples)), start + len(chunk.samples)
            part, whitening = send(weights[here], self._device, total.dtype), None
            if exponent:
                self_kernels.append(self._self_kernel(chunk, exponent))
                size, whitening = _scale_to_dtype(self_kernels[-1].matrix, (1, 2), self._dtype)
                part = part * size[:, 0]
            scale, scaled = _scale_to_dtype(part, (0,), self._dtype)
            gradients = chunk.gradients
            terms = gradients.sums_by_output(scaled, whitening, self._numel, self.memory.product_bytes)
            for names, group, term in terms:
                split = term.split([self._numel[name] for name in names], dim=2)
                for name, own in zip(names, split, strict=True):
                    sums[name][:, group].addcmul_(own.to(total.dtype), scale[0, group, None])
            if not exponent and not total.sum().isfinite():
                check_finite(gradients.self_gram(self._device), chunk.samples)
            del chunk, gradients
        return VjpResult(total, concatenate_powers(self_kernels))

    def jvp_by_output(
        self,
        samples: Samples,
        directions: Tensor,
        d: int,
        exponent: float,
        self_kernel: Power | None = None,
    ) -> JvpResult:
        """Return S_e(x) u_e for directions of each output e, (d · c, p); gradients are formed of few samples."""
        known, start = self._split_directions(directions), 0
        outputs, self_kernels = [], list[Power]()
        for chunk in self._chunks(samples):
            here, start = slice(start, start + len(chunk.samples)), start + len(chunk.samples)
            scale, whitening = known.scale.view(d, -1), None
            if exponent:
                if self_kernel is None:
                    self_kernels.append(self._self_kernel(chunk, exponent))
                matrix = self_kernels[-1].matrix if self_kernel is None else self_kernel.matrix[here]
                size, whitening = _scale_to_dtype(matrix, (1, 2), self._dtype)
                scale = scale * size
            empty = directions.new_zeros(len(chunk.samples), d, len(directions) // d)
            most = self.memory.product_bytes
            products = chunk.gradients.products_by_output(known.join, empty, whitening, self._numel, most)
            self._finite_checks.note(products, chunk.samples)
            outputs.append(products * scale)
            del chunk
        powers = self_kernel or concatenate_powers(self_kernels)
        return JvpResult(torch.cat(outputs), powers.rank if exponent and powers is not None else None)

    def _split_directions(self, directions: Tensor) -> "_Directions":
        """Return directions by parameter; the same object for all batches of a pass, which share one tensor."""
        known = self._directions
        if known is None or known.of() is not directions:
            scale = _largest_entries(directions, (1,))
            rows = partial(_divide, divisor=scale, dtype=self._dtype, max_bytes=self.memory.product_bytes)
            named = {name: rows(part) for name, part in self._by_name(directions).items()}
            gone = weakref.ref(directions, lambda _: setattr(self, "_directions", None))
            known = self._directions = _Directions(gone, scale, named)
        return known

    def _add_weighted_sums(self, total: Tensor, chunk: Chunk, weights: Tensor, scale: Tensor) -> None:
        """Add Σ Gᵀ w of a chunk, times the scale, to the total (c, p)."""
        most, c = self.memory.product_bytes, len(total)
        if not c:
            return
        if total.device.type != "cpu" or (self._largest <= SMALL_VECTOR and c == 1):
            step = lambda gradients, w: gradients.weighted_sums(w, self._numel, most)  # noqa: E731
            _add(total, chunk.sum("vjp", step, weights), scale)
            return
        sums = self._by_name(total)  # without a copy of the whole vectors
        for names, gradient in chunk.gradients.blocks:
            sizes = [self._numel[name] for name in names]
            for group in gradient.column_groups(c, most):
                terms = gradient.vjp(weights[:, :, group]).split(sizes, dim=1)
                for name, term in zip(names, terms, strict=True):
                    _add(sums[name][group], term, scale.flatten()[group])

    def _by_name(self, vectors: Tensor) -> dict[str, Tensor]:
        return dict(zip(self._numel, vectors.split(list(self._numel.values()), dim=1), strict=True))

    def _self_kernel(self, chunk: Chunk, exponent: float) -> Power:
        return matrix_power(self._self_gram(chunk), exponent, rank_floor(self._dtype))

    def _self_gram(self, chunk: Chunk) -> Tensor:
        total = chunk.per_sample("self kernel", lambda gradients: gradients.self_gram(self._device))
        self._finite_checks.note(total, chunk.samples)
        return total

    def begin_pass(self, n: int) -> None:
        """Announce a pass over n samples: which one is checked is known then, and chunks are recorded sooner."""
        if self._check is not None:
            self._check.begin_pass(n)
        self.graphs.begin_pass(n)

    def defer_checks(self) -> None:
        """Leave what would wait for a GPU to the `finish_checks` of the next pass.

        Not where ranks share a pass: NaN in their sum would make the others name samples of their own.
        """
        if self._device.type != "cuda" or world_size() > 1:
            self.finish_checks()
        elif self._check is not None:
            self._check.defer()

    def finish_checks(self) -> None:
        """Raise the errors deferred so as not to synchronize with a GPU, and check a sample of the pass."""
        if self._check is not None:
            self._check.start_checks()  # while the GPU is still busy with the pass
        self._finite_checks.finish_checks()
        if self._check is None:
            return
        try:
            self._check.finish_checks()
        except (DependentSampleError, GradientMismatchError) as error:
            if self.graphs.in_use:
                self.graphs.problem = "a check of replayed chunks failed"
                error.add_note(
                    "Chunks were replayed from CUDA graphs, and will not be from now on: try again."
                )
            raise

    def _rows(self, gradients: GradientBatch, numels: dict[str, int]) -> Tensor:
        """Return J(x) of some parameters, each written straight to its columns."""
        dtype = torch.promote_types(self._dtype, torch.float32)
        rows = torch.empty(
            len(gradients.samples), gradients.d, sum(numels.values()), dtype=dtype, device=self._device
        )
        for (name, _), part in zip(numels.items(), rows.split(list(numels.values()), dim=2), strict=True):
            if name in gradients.by_parameter:
                gradients.by_parameter[name].write(part)
            else:
                part.zero_()
        return rows

    def _chunks(
        self, samples: Samples, names: tuple[str, ...] | None = None, size: int | None = None
    ) -> Iterator[Chunk]:
        """Yield the gradients of consecutive samples, of all parameters or of some.

        Nothing here holds a chunk while the next is computed: neither must who asks (map, or del at the end of a loop),
        or two of them take memory at a time.
        """
        self._release_kept()
        most = self.fitting(size or self._size, samples)
        for part in samples.split(equal_size(len(samples), most)):
            yield self._chunk(part, names)

    def fitting(self, most: int, samples: Samples) -> int:
        """Return how many of some samples fit where `most` of the first ones do: fewer of longer texts, say.

        Attention takes memory by the square of the length, convolutions by the number of pixels: it is measured on two
        samples, once for all whose inputs have up to a quarter fewer numbers. Call it inside `net.evaluation_mode`.
        """
        entries = entries_per_sample(samples.inputs)
        if not 0 < self.memory.entries_per_sample < entries:
            return most
        known = [size for here, size in self._larger.items() if entries <= here <= MEASURED_SHARE * entries]
        size = min(known) if known else self._larger.setdefault(entries, self._measure(samples[:1]))
        return max(1, most * self.memory.bytes_per_sample // max(size, self.memory.bytes_per_sample))

    def _measure(self, sample: Samples) -> int:
        """Return the bytes that the gradients of a sample and K(x, x) take."""
        pair, traces = repeat_samples(sample, 2), 0
        while traces < len(self._traces):  # a new trace is compared with autograd, which takes memory too
            traces = len(self._traces)
            with MemoryMeter() as meter:
                self.gradients(pair).self_gram(self._device)
        return int(SLACK * meter.peak / 2)

    def _chunk(self, part: Samples, names: tuple[str, ...] | None) -> Chunk:
        retained = self._retained if names is None and self._net.observer is None else None
        known = None if retained is None else retained.get(part)
        if known is not None:
            chunk = Chunk(part, known)
            self._offer(chunk, len(part))
            return chunk
        chunk = self._compute_chunk(part, names)
        if retained is not None:
            retained.keep(part, chunk.gradients)
        return chunk

    def _compute_chunk(self, part: Samples, names: tuple[str, ...] | None) -> Chunk:
        batch = (
            part if len(part) > 1 else repeat_samples(part, 2)
        )  # PyTorch is wrong about some batches of one
        chunk = self.graphs.chunk(batch, partial(self._compute_recordable, names=names), names)
        chunk = chunk or Chunk(batch, self.gradients(batch, names))
        if self._net.observer is not None and names is None:
            observed = chunk.observed(len(part))
            if observed is not None:
                self._net.observer.keep(part.ids, observed)
        if names is None:
            self._offer(chunk, len(batch))
        return chunk if len(part) > 1 else chunk.first()

    def _offer(self, chunk: Chunk, count: int) -> None:
        """Let samples of a chunk be checked, of the first `count`."""
        if self._check is not None:
            self._check.offer(
                chunk.called_on,
                chunk.outputs,
                lambda places, weights: self._sum_at(chunk.gradients, places, weights),
                chunk.d,
                count=count,
                again=self._sum_again,
            )

    def _sum_again(self, samples: Samples, places: Tensor, weights: Tensor) -> list[Tensor]:
        """Return Σₓ J(x)ᵀ w(x) of samples at some places of a batch, by parameter, computed again."""
        return self._sum_at(self.gradients(samples), places, weights)

    def _sum_at(self, gradients: GradientBatch, places: Tensor, weights: Tensor) -> list[Tensor]:
        """Return Σₓ J(x)ᵀ w(x) of samples at some places, by parameter, for weights of these, (k, d)."""
        if 2 * len(places) > len(gradients.samples) or self._device.type == "cuda":  # few launches
            inside = torch.zeros(len(gradients.samples), gradients.d)
            inside[places] = weights
            return gradients.copy().weighted_sum(self._net, send(inside, self._device))
        total: list[Tensor] = []
        for few, some in zip(places.split(COPIED), weights.to(self._device).split(COPIED), strict=True):
            term = gradients.part(few).weighted_sum(self._net, some)
            total = [a + b for a, b in zip(total, term, strict=True)] if total else term
        return total

    def _compute_recordable(self, samples: Samples, names: tuple[str, ...] | None = None) -> GradientBatch:
        """Return the gradients of samples by the only trace, which branches on no value."""
        if len(self._traces) > 1 or isinstance(self._traces[0], RowTrace):
            raise UntraceableError("operations depend on the values of samples")
        return compute_gradients(self._net, self._traces[0], samples, names=names)

    def gradients(self, samples: Samples, names: tuple[str, ...] | None = None) -> GradientBatch:
        """Return the gradients of samples by a known trace, a new trace, or else by autograd."""
        regrouped: RegroupedError | None = None
        for trace in self._traces:
            try:
                return compute_gradients(self._net, trace, samples, names=names)
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


def _outer_products(gradients: GradientBatch) -> dict[str, FactoredGradient]:
    """Return the gradients that are one outer product for each sample and output."""
    named = gradients.by_parameter.items()
    return {name: g for name, g in named if isinstance(g, FactoredGradient) and g.is_outer}


def _split_by_size(numels: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the parameters that are one dense part together, and those that are one each."""
    small = {name: size for name, size in numels.items() if size <= SMALL_PART}
    return small, {name: size for name, size in numels.items() if name not in small}


class GradientForms(NamedTuple):
    """In what form the trace has gradients, by parameter."""

    d: int  # outputs of which they are
    factors: dict[str, tuple[int, int]]  # of outer products: entries of inputs, and of one output's gradients
    retained_bytes: dict[str, int]  # of one sample and all these outputs

    @classmethod
    def of(cls, gradients: GradientBatch, parameters: Parameters) -> "GradientForms":
        """Return the forms of gradients in these parameters."""
        n, outer = len(gradients.samples), _outer_products(gradients)
        return cls(
            gradients.d,
            {name: (g.inputs.shape[2], g.deltas[0, 0].numel()) for name, g in outer.items()},
            {
                name: -(-retained_bytes(gradient, parameters[name].shape) // n)
                for name, gradient in gradients.by_parameter.items()
            },
        )


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


def _scale_to_dtype(values: Tensor, dims: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the largest entries, and the values relative to them in the compute dtype, without overflow."""
    scale = _largest_entries(values, dims)
    return scale, (values / scale).to(dtype)


def _largest_entries(values: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the largest entries, of any sign; 1 where all are 0."""
    largest = torch.linalg.vector_norm(values, torch.inf, dims, keepdim=True)
    return torch.where(largest > 0, largest, 1)


def _divide(rows: Tensor, divisor: Tensor, dtype: torch.dtype, max_bytes: int) -> Tensor:
    """Return rows (c, numel) divided by (c, 1) in another type: some at a time, as quotients take memory too."""
    result, size = rows.new_empty(rows.shape, dtype=dtype), max(1, max_bytes // max(1, rows[:1].nbytes))
    for target, some, by in zip(*(tensor.split(size) for tensor in (result, rows, divisor)), strict=True):
        target.copy_(some / by)
    return result
