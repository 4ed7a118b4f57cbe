"""Products with a Gram matrix in two passes: a vjp over the columns, a jvp over the rows.

Σ_x' S(x) S(x')ᵀ w(x') = S(x) u with u = Σ S(x')ᵀ w(x'), one parameter vector for each column of weights. S(x) is the
whitened Jacobian K(x, x)ᵉ J(x), so that these are products with whitened Jacobians. Exact, linear in N, and nothing
is stored per sample. Several kernels of the same samples share their passes (`sums_and_diagonals`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from likewise.data import Batches, Samples
from likewise.distributed import join_results, own_share, sum_results
from likewise.engines import Engine, JvpResult, SelfKernelCache, VjpResult, ZeroGradientLog
from likewise.fingerprint import Fingerprint
from likewise.kernels import Kernel, mean_diagonal
from likewise.linalg import Power, matrix_power, rank_floor
from likewise.model import Network
from likewise.torch_state import send

Weights = Callable[[range], Tensor]  # the weights (b, d, c) of the samples at these places
Read = Callable[[range, Tensor], Tensor]  # maps the products (b, d, c) at these places
RETAINING_DEVICES = {"cuda"}
LEAST_RETAINED = 0.25  # of the samples; to retain gradients of fewer gains less than larger batches do
RETAINED_SIZE = 0.5  # of retained gradients, in shares of what their sample takes in a batch: 0.44 to 0.57
FEWEST_COLUMNS = 6  # of weights, for which gradients are formed once (a CPU, 2026-11-19)
SUMMING, READING = "summing gradients", "reading off"  # what the two passes are called


class LinearProducts(ABC):
    """Products of blocks S(x) S(x')ᵀ with weights, and of their linear reductions."""

    d: int

    @property
    @abstractmethod
    def vectors_per_pass(self) -> int:
        """How many columns of weights are taken at once."""

    @abstractmethod
    def product(self, weights: Weights, c: int, read: Read = lambda _, outputs: outputs) -> Tensor:
        """Return read(places, S(x) Σ S(x')ᵀ w(x')) for c columns of weights, in float64."""

    def reduced(self, weights: Tensor, coefficients: Tensor) -> Tensor:
        """Return Σ_x' reduce(S(x) S(x')ᵀ) w(x') for weights (m, c), (n, c), in float64.

        Args:
            weights: One number per column sample and column of weights.
            coefficients: A, (d, d), with reduce(B) = Σ A ∘ B.

        """
        used = [i for i in range(self.d) if coefficients[i].any()]
        outputs_per_pass = max(1, min(len(used), self.vectors_per_pass))
        columns_per_pass = max(1, self.vectors_per_pass // outputs_per_pass)
        sums = []
        for some in weights.split(columns_per_pass, dim=1):
            groups = (used[i : i + outputs_per_pass] for i in range(0, len(used), outputs_per_pass))
            parts = [self._reduced_part(some, coefficients, group) for group in groups]
            sums.append(torch.stack(parts).sum(0))
        return torch.cat(sums, 1)

    def _reduced_part(self, weights: Tensor, coefficients: Tensor, outputs: list[int]) -> Tensor:
        """Return the part of the sums that some outputs of the rows contribute."""
        c, some = weights.shape[1], len(outputs)
        selected = coefficients[outputs].to(weights)  # (some, d)

        def blocks(where: range) -> Tensor:
            return torch.einsum("nc,ed->ndec", weights[where.start : where.stop], selected).flatten(2)

        def read(_: range, products: Tensor) -> Tensor:
            mine = _take_outputs(products, outputs).unflatten(2, (some, c))
            return mine.diagonal(dim1=1, dim2=2).sum(-1)

        return self.product(blocks, some * c, read)


class BatchMemory(NamedTuple):
    """What the passes of a product load at a time, and the bytes that they take beside their vectors."""

    batch: int
    bytes: int  # by what a dry run measured, with slack; 0 if that is unknown


class RowSums(NamedTuple):
    """What centering and ratios need of each row, in float64."""

    sums: Tensor  # (n,) Σ_x' k(x, x')
    diagonal: Tensor  # (n,) k(x, x)


@dataclass(frozen=True)
class Products(LinearProducts):
    """Passes over rows and columns, with the powers of a kernel."""

    net: Network
    engine: Engine
    rows: Batches
    columns: Batches
    left_power: float
    right_power: float
    d: int
    p: int
    max_memory: int

    @cached_property  # while batches are larger, as many as before
    def vectors_per_pass(self) -> int:
        """How many parameter vectors in float64, twice, fit into a quarter of max_memory, and beside a batch.

        Each has an output of every sample that is loaded, of which a product takes four copies in float64.
        """
        memory, batch = self.engine.memory, self.engine.batch_size or 0
        left = self.max_memory * 7 // 8 - memory.fixed_bytes - batch * memory.bytes_per_sample
        loaded = max(len(self.spans(data)[0]) for data in (self.rows, self.columns))
        fitting = self.max_memory // 16 // (32 * self.d * loaded)
        return max(1, min(self.max_memory // 8 // (8 * self.p), 1 + left // (16 * self.p), fitting))

    @property
    def _takes_all_memory(self) -> bool:
        """Whether passes take all of max_memory, for larger batches or for gradients that are retained: on a GPU.

        On a CPU retained gradients would save 15 to 28 % of N_S (2026-11-18), for gigabytes that other programs share.
        """
        device = next(iter(self.net.parameters.values())).device
        return device.type in RETAINING_DEVICES and self.engine.memory.bytes_per_sample > 0

    @property
    def _retains(self) -> bool:
        """Whether gradients are kept for later passes: those of enough samples fit beside a batch."""
        if not self._takes_all_memory or self.rows is not self.columns:
            return False
        memory, batch = self.engine.memory, min(self.engine.batch_size or 1, self.columns.size)
        fitting = self._room(1) // memory.bytes_per_sample - batch
        return fitting >= LEAST_RETAINED * RETAINED_SIZE * self.rows.n

    def _room(self, c: int) -> int:
        """Return the bytes that c vectors leave for batches and retained gradients."""
        vectors = 16 * self.p * (min(c, self.vectors_per_pass) - 1) if c > 1 else 0
        kept = 8 * self.rows.n * self.d**2  # self kernels
        return self.max_memory * 15 // 16 - self.engine.memory.fixed_bytes - vectors - kept

    @contextmanager
    def use_memory(self, c: int) -> Iterator[None]:
        """Let several passes share what was recorded, and on a GPU the memory that c vectors leave.

        It is for gradients that a later pass reads again; where few of them would fit, it is for larger batches.
        """
        with self.net.evaluation_mode():
            if not self._takes_all_memory:
                yield
                return
            each = self.engine.memory.bytes_per_sample
            if not self._retains:
                with self.engine.enlarged(self._room(c) // each):
                    yield
                return
            largest = max(map(len, self.spans(self.columns)))
            batch = min(largest, self.engine.batch_size or largest) * each
            with self.engine.retain(self._room(c) - batch, self.rows.n):
                yield

    def count_memory(self, c: int) -> "BatchMemory":
        """Return what passes with c vectors load and take: on a GPU, also for what `use_memory` makes of the rest."""
        memory, c = self.engine.memory, min(c, self.vectors_per_pass)
        each = memory.bytes_per_sample
        with self.use_memory(c):
            loaded = len(self.spans(self.columns)[0])
            batch = min(loaded, self.engine.batch_size or 0)
        retained = 0
        if self._retains:
            retained = min(self._room(c) - batch * each, int(RETAINED_SIZE * each * self.rows.n))
        return BatchMemory(loaded, memory.fixed_bytes + batch * each + max(0, retained))

    @property
    def _keeps_self_kernels(self) -> bool:
        """Whether the self kernels of all rows fit into an eighth of max_memory."""
        return 8 * self.rows.n * self.d**2 <= self.max_memory // 8

    def spans(self, data: Batches) -> list[range]:
        """Return the batches to load: the user's, or multiples of the engine's batch size.

        Of all samples that are loaded there are self kernels, and as many outputs of some vectors.
        """
        batch_size = self.engine.batch_size
        if data.given or batch_size is None:
            return data.spans()
        if self._retains:  # half of the memory for batches, half for gradients
            batch_size = max(1, batch_size // 2)
        fitting = self.max_memory // 16 // (512 * self.d**2)  # with outputs of some ten vectors each
        most = max(1, min(256, fitting) // batch_size) * batch_size
        return data.spans(most if batch_size < 256 else min(batch_size, 2048))

    def _begin(self, data: Batches, what: str) -> list[range]:
        """Return the batches of a pass, and announce to the engine what this process computes of them."""
        spans = self.spans(data)
        self.engine.begin_pass(sum(map(len, own_share(spans, what))))
        return spans

    def add_to(self, fingerprint: Fingerprint, name: str) -> None:
        """Add what ranks that share a pass must have in common."""
        fingerprint.add("network", self.net)
        fingerprint.add("rows", self.rows)
        fingerprint.add("columns", self.columns)
        fingerprint.add("exponents", (self.left_power, self.right_power))
        fingerprint.add("engine", type(self.engine).__name__)

    def reduced(self, weights: Tensor, coefficients: Tensor) -> Tensor:
        """Return Σ_x' reduce(S(x) S(x')ᵀ) w(x'), of several columns output by output where that costs less.

        A sum over outputs e of S_e(x) · Σ S_e(x') w(x') needs the products of each output with itself only.
        """
        diagonal, most = coefficients.diagonal(), self.vectors_per_pass // self.d
        is_diagonal = torch.equal(coefficients, torch.diag(diagonal))
        if weights.shape[1] < FEWEST_COLUMNS or not is_diagonal or not most:
            return super().reduced(weights, coefficients)
        return torch.cat([self._reduced_by_output(some, diagonal) for some in weights.split(most, dim=1)], 1)

    def _reduced_by_output(self, weights: Tensor, diagonal: Tensor) -> Tensor:
        engine, d, cache = self.engine, self.d, self._new_cache()

        def sum_outputs(samples: Samples, where: range) -> VjpResult:
            return engine.vjp_by_output(samples, weights[where.start : where.stop], d, self.right_power)

        def project(samples: Samples, known: Power | None) -> JvpResult:
            return engine.jvp_by_output(samples, directions, d, self.left_power, known)

        def read(_: range, products: Tensor) -> Tensor:
            return torch.einsum("ndc,d->nc", products, send(diagonal, products.device, products.dtype))

        with self.use_memory(d * weights.shape[1]):
            directions = self._sum(sum_outputs, cache, before_jvp=True)
            return self._project(project, read, cache)

    def _new_cache(self) -> SelfKernelCache | None:
        """Return a cache of the self kernels of both passes, if they are the same and fit."""
        same = self.rows is self.columns and self.left_power == self.right_power
        return SelfKernelCache(self.rows.n) if same and self._keeps_self_kernels else None

    def vjp(
        self, weights: Weights, cache: SelfKernelCache | None = None, *, before_jvp: bool = False
    ) -> Tensor:
        """Return Σ S(x')ᵀ w(x') over the columns: a parameter vector a weight, (c, p).

        Args:
            weights: One for each column.
            cache: Receives the self kernels.
            before_jvp: Whether a jvp follows in the same evaluation, which finishes the checks of both passes.

        """

        def compute(samples: Samples, where: range) -> VjpResult:
            return self.engine.vjp(samples, weights(where), self.right_power)

        return self._sum(compute, cache, before_jvp)

    def _sum(
        self, compute: Callable[[Samples, range], VjpResult], cache: SelfKernelCache | None, before_jvp: bool
    ) -> Tensor:
        zero_gradients = ZeroGradientLog()

        def term(where: range) -> Tensor:
            samples = self.columns.samples(where)
            result = compute(samples, where)
            if result.self_kernel is not None:
                zero_gradients.note(samples, result.self_kernel.rank)
                if cache is not None:
                    cache.put(where, result.self_kernel)
            return result.total

        with self.net.evaluation_mode():
            spans = self._begin(self.columns, SUMMING)
            finish = self.engine.defer_checks if before_jvp else self.engine.finish_checks
            total = sum_results(term, spans, SUMMING, self, finish)
        if self.rows is not self.columns:  # else the second pass names them
            zero_gradients.warn()
        return total

    def jvp(self, directions: Tensor, read: Read, cache: SelfKernelCache | None = None) -> Tensor:
        """Return read(places, S(x) u) of the rows; u are the rows of (c, p) directions."""

        def compute(samples: Samples, self_kernel: Power | None) -> JvpResult:
            return self.engine.jvp(samples, directions, self.left_power, self_kernel)

        return self._project(compute, read, cache)

    def _project(
        self,
        compute: Callable[[Samples, Power | None], JvpResult],
        read: Read,
        cache: SelfKernelCache | None,
    ) -> Tensor:
        zero_gradients = ZeroGradientLog()

        def project(where: range) -> Tensor:
            samples = self.rows.samples(where)
            result = compute(samples, None if cache is None else cache.get(where))
            zero_gradients.note(samples, result.ranks)
            return read(where, result.outputs)

        with self.net.evaluation_mode():
            spans = self._begin(self.rows, READING)
            outputs = join_results(project, spans, READING, self, self.engine.finish_checks)
        zero_gradients.warn()
        return outputs

    def product(self, weights: Weights, c: int, read: Read = lambda _, outputs: outputs) -> Tensor:
        """Return read(places, S(x) Σ S(x')ᵀ w(x')) in float64, in as many rounds as vectors need to fit."""
        group = self.vectors_per_pass
        if c > group:
            with self.use_memory(group):
                rounds = [
                    self.product(_some_columns(weights, slice(i, i + group)), min(group, c - i))
                    for i in range(0, c, group)
                ]
            return read(range(self.rows.n), torch.cat(rounds, 2))
        cache = self._new_cache()
        with self.use_memory(c):
            return self.jvp(self.vjp(weights, cache, before_jvp=True), read, cache)

    def sums_and_diagonals(self, kernels: Sequence[Kernel]) -> list[RowSums] | None:
        """Return Σ_x' k(x, x') and k(x, x) of each kernel, in one vjp and one jvp pass for all.

        Each pass reads a sample once. None if the vectors of all kernels do not fit, or a kernel is not linear.
        """
        if any(not kernel.linear or kernel.keeps_blocks for kernel in kernels):
            return None
        coefficients = [kernel.coefficients(self.d) for kernel in kernels]
        used = [[i for i in range(self.d) if a[i].any()] for a in coefficients]
        if sum(map(len, used)) > self.vectors_per_pass:
            return None
        with self.use_memory(sum(map(len, used))):
            return self._sums_and_diagonals(kernels, coefficients, used)

    def _sums_and_diagonals(
        self, kernels: Sequence[Kernel], coefficients: list[Tensor], used: list[list[int]]
    ) -> list[RowSums]:
        keep = self._keeps_self_kernels and self.rows is self.columns
        if keep and len(kernels) == 1 and _is_normalized(kernels[0]):
            return [self._normalized_sums(used[0], coefficients[0])]
        powers = _SelfKernels(self, keep)

        def weights(self_kernel: Power) -> Tensor:
            parts = [
                (right := powers.power(self_kernel, kernel.right_power))
                @ send(a[rows].T, right.device, right.dtype)
                for kernel, a, rows in zip(kernels, coefficients, used, strict=True)
            ]
            return torch.cat(parts, 2)

        def read(where: range, samples: Samples, outputs: Tensor) -> Tensor:
            parts, results = outputs.split([len(rows) for rows in used], dim=2), []
            for kernel, rows, part in zip(kernels, used, parts, strict=True):
                left = powers.power(powers.get(where, samples), kernel.left_power)
                sums = _take_outputs(left @ part, rows).diagonal(dim1=1, dim2=2).sum(-1)
                exponent = 1 + kernel.left_power + kernel.right_power
                own = powers.power(powers.get(where, samples), exponent)
                results += [sums, kernel.reduce(own)]
            return torch.stack(results, 1)

        directions = self._sum_unwhitened(sum(map(len, used)), weights, powers)
        columns = self._read_unwhitened(directions, read, powers).unbind(1)
        return [RowSums(*pair) for pair in zip(columns[::2], columns[1::2], strict=True)]

    def _normalized_sums(self, outputs: list[int], coefficients: Tensor) -> RowSums:
        """Return the sums where k(x, x) is rank / d: ranks come with the first pass."""
        cache, selected = SelfKernelCache(self.rows.n), coefficients[outputs].T
        directions = self.vjp(lambda where: selected.expand(len(where), -1, -1), cache, before_jvp=True)

        def read(where: range, products: Tensor) -> Tensor:
            sums = _take_outputs(products, outputs).diagonal(dim1=1, dim2=2).sum(-1)
            known = cache.get(where)
            assert known is not None
            return torch.stack([sums, known.rank.to(sums) / self.d], 1)

        return RowSums(*self.jvp(directions, read, cache).unbind(1))

    def _sum_unwhitened(self, c: int, weights: Callable[[Power], Tensor], powers: "_SelfKernels") -> Tensor:
        zero_gradients = ZeroGradientLog()

        def term(where: range) -> Tensor:
            samples = self.columns.samples(where)
            total, self_kernel = self.engine.vjp_with_self_kernel(samples, c, weights)
            assert self_kernel is not None
            powers.put(where, self_kernel)
            zero_gradients.note(samples, self_kernel.rank)
            return total

        with self.net.evaluation_mode():
            spans = self._begin(self.columns, SUMMING)
            total = sum_results(term, spans, SUMMING, self, self.engine.defer_checks)
        if self.rows is not self.columns:  # else the second pass names them
            zero_gradients.warn()
        return total

    def _read_unwhitened(
        self,
        directions: Tensor,
        read: Callable[[range, Samples, Tensor], Tensor],
        powers: "_SelfKernels",
    ) -> Tensor:
        zero_gradients = ZeroGradientLog()

        def project(where: range) -> Tensor:
            samples = self.rows.samples(where)
            outputs = self.engine.jvp(samples, directions, 0).outputs
            result = read(where, samples, outputs)
            zero_gradients.note(samples, powers.get(where, samples).rank)
            return result

        with self.net.evaluation_mode():
            spans = self._begin(self.rows, READING)
            results = join_results(project, spans, READING, self, self.engine.finish_checks)
        zero_gradients.warn()
        return results


def _take_outputs(products: Tensor, outputs: list[int]) -> Tensor:
    """Return the products (b, d, c) of some outputs, without waiting for a GPU."""
    return products.index_select(1, send(torch.tensor(outputs), products.device))


def _is_normalized(kernel: Kernel) -> bool:
    """Whether k(x, x) is rank / d."""
    return kernel.left_power == kernel.right_power == -0.5 and kernel.reduce is mean_diagonal


def _some_columns(weights: Weights, which: slice) -> Weights:
    return lambda where: weights(where)[:, :, which]


class _SelfKernels:
    """K(x, x) of the rows, computed once where they are kept, else once a pass."""

    def __init__(self, products: Products, keep: bool) -> None:
        self._engine, self._floor = products.engine, rank_floor(products.net.dtype)
        self._kept = SelfKernelCache(products.rows.n) if keep else None
        self._seen: set[int] = set()
        self._last: tuple[Samples, Power] | None = None

    def power(self, self_kernel: Power, exponent: float) -> Tensor:
        """Return K(x, x)ᵉ, (b, d, d)."""
        return matrix_power(self_kernel.matrix, exponent, self._floor).matrix

    def put(self, where: range, self_kernel: Power) -> None:
        """Keep the self kernels of the samples at these places, if any are kept."""
        if self._kept is not None:
            self._kept.put(where, self_kernel)
            self._seen.add(where.start)

    def get(self, where: range, samples: Samples) -> Power:
        """Return the self kernels of the samples at these places."""
        if self._kept is not None and where.start in self._seen:
            known = self._kept.get(where)
            assert known is not None
            return known
        if self._last is None or self._last[0] is not samples:
            self._last = samples, self._engine.self_kernel(samples)
            self.put(where, self._last[1])
        return self._last[1]
