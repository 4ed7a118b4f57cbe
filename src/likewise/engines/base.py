"""The interface of gradient engines, their results, and the checks they share.

J(x) is the (d, p) Jacobian of the outputs with respect to the parameters, K(x, x) = J Jᵀ the self kernel, and
S(x) = K(x, x)ᵉ J(x) the whitened Jacobian, with the exponent e of the kernel (0: J itself, -½: orthonormal rows).
Powers act on the range of K only (see linalg). For e ≠ 0, results include the rank of each K(x, x); rank 0 means a
zero gradient.

Every statistic follows from four operations: the self kernel, S(x) as rows or factors, the vjp Σ S(x)ᵀ w(x) and
the jvp S(x) u.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from likewise.data import Samples
from likewise.engines.factors import DenseGradient, ParameterGradient
from likewise.engines.memory import UNKNOWN_MEMORY, MemoryUse
from likewise.linalg import Power, columns_in_cache, product
from likewise.wording import agreeing, counted


class ZeroGradientWarning(UserWarning):
    """Some samples have a zero gradient, so nothing is similar to them.

    Example:
        >>> import torch, likewise as lw
        >>> import warnings
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.ReLU())
        >>> _ = model[0].bias.data.fill_(-100)                                # the unit is never on
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     _ = lw.similarity(model, torch.randn(5, 4))
        >>> any(issubclass(found.category, lw.ZeroGradientWarning) for found in caught)
        True

    """


class GradientMismatchError(RuntimeError):
    """The gradient of a sample is wrong, so that no number of the pass can be used.

    Attributes:
        id: The sample's position in the data set.
        parameter: The first parameter whose gradient is wrong, None if unknown.

    Example:
        >>> import likewise as lw
        >>> error = lw.GradientMismatchError("the gradient of sample 7 is wrong", 7, "fc.weight")
        >>> error.id, error.parameter
        (7, 'fc.weight')

    """

    def __init__(self, message: str, id: int, parameter: str | None = None) -> None:
        super().__init__(message)
        self.id, self.parameter = id, parameter


class DependentSampleError(ValueError):
    """The outputs of a sample depend on chance or on the other samples of its batch.

    Attributes:
        id: The sample's position in the data set.

    Example:
        >>> import likewise as lw
        >>> error = lw.DependentSampleError("outputs of sample 7 depend on its batch", 7)
        >>> error.id, isinstance(error, ValueError)
        (7, True)

    """

    def __init__(self, message: str, id: int) -> None:
        super().__init__(message)
        self.id = id


class PartsChangedError(Exception):
    """The features of a batch have other parts than those of earlier batches: start again."""


class ZeroGradientLog:
    """The samples of one pass that have a zero gradient."""

    def __init__(self) -> None:
        self._ids: set[int] = set()
        self._seen: set[int] = set()

        self._pending: list[tuple[Tensor, Tensor]] = []

    def note(self, samples: Samples, ranks: Tensor | None) -> None:
        """Record which samples have rank 0, without synchronizing with a GPU."""
        self._seen.update(samples.ids.tolist())
        if ranks is not None and ranks.device.type == "cpu":  # tensors stored here would fragment the heap
            self._ids.update(samples.ids[ranks == 0].tolist())
        elif ranks is not None:
            self._pending.append((samples.ids, ranks == 0))

    def warn(self) -> None:
        """Warn with the ids of these samples, if there are any."""
        for ids, is_zero in self._pending:
            self._ids.update(ids[is_zero.cpu()].tolist())
        if self._ids:
            first = sorted(self._ids)
            warnings.warn(
                f"{len(first)} of {len(self._seen)} samples {agreeing(len(first), 'has', 'have')} no gradient (ids "
                f"{', '.join(map(str, first[:10]))}{' ...' if len(first) > 10 else ''}): no "
                "parameter moves their outputs, so nothing is similar to them, not even themselves. "
                "Their similarities are 0; gram.zero_gradients() tells which.",
                ZeroGradientWarning,
                stacklevel=4,
            )


class SelfKernelCache:
    """K(x, x)ᵉ of n samples by position, computed in the first pass and reused in the second."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._cache: Power | None = None

    def put(self, where: range, self_kernel: Power) -> None:
        """Store the self kernels of the samples at these positions."""
        if self._cache is None:  # one allocation: many small tensors would fragment the heap
            self._cache = Power(*(part.new_zeros(self._n, *part.shape[1:]) for part in self_kernel))
        for target, part in zip(self._cache, self_kernel, strict=True):
            target[where.start : where.stop] = part

    def get(self, where: range) -> Power | None:
        """Return the self kernels of the samples at these positions, None if none are stored."""
        return (
            None if self._cache is None else Power(*(part[where.start : where.stop] for part in self._cache))
        )


class Rows(NamedTuple):
    """S(x) as a dense tensor."""

    rows: Tensor  # (n, d, p), at least float32
    ranks: Tensor | None  # (n,), None for exponent 0


class Features(NamedTuple):
    """S(x) for inner products of pairs: dense rows, and outer products as factors.

    S(x) S(x')ᵀ = rows rows'ᵀ + Σ (a·a') δ δ'ᵀ over the factors (a, δ). The largest entry of each a is
    ±1, so that no factor overflows where their product does not.
    """

    rows: Tensor  # (n, d, q)
    factors: tuple[tuple[Tensor, Tensor], ...]  # (n, i) and (n, d, o) each
    ranks: Tensor | None
    self_gram: Tensor | None = None  # (n, d, d) K(x, x) in float64, where the engine had to compute it

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, samples along the first dimension."""
        return [self.rows, *(part for factor in self.factors for part in factor)]

    def over(self, tensors: list[Tensor]) -> "Features":
        """Return features of the same structure with other tensors."""
        pairs = tuple(zip(tensors[1::2], tensors[2::2], strict=True))
        return Features(tensors[0], pairs, None)

    def traces(self, other: "Features") -> Tensor:
        """Return tr S(x) S(x')ᵀ of all pairs, (n, m), in float64; the trace needs no off-diagonal product."""
        total = _finite_product(self.rows.flatten(1), other.rows.flatten(1))
        for (a, delta), (b, epsilon) in zip(self.factors, other.factors, strict=True):
            total += product(a, b) * _finite_product(delta.flatten(1), epsilon.flatten(1))
        return total

    def blocks(self, other: "Features") -> Tensor:
        """Return S(x) S(x')ᵀ of all pairs, (n, m, d, d), in float64."""
        n, d, m = len(self.rows), self.rows.shape[1], len(other.rows)
        total = _finite_product(self.rows.flatten(0, 1), other.rows.flatten(0, 1)).view(n, d, m, d)
        for (a, delta), (b, epsilon) in zip(self.factors, other.factors, strict=True):
            products = _finite_product(delta.flatten(0, 1), epsilon.flatten(0, 1)).view(n, d, m, d)
            total += products * product(a, b)[:, None, :, None]
        return total.transpose(1, 2)


def _finite_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a bᵀ in float64, (n, p) and (m, p) -> (n, m), also where products overflow float32."""
    products = product(a, b)
    if products.sum().isfinite():
        return products
    scales = [torch.linalg.vector_norm(t, torch.inf, dim=1) for t in (a, b)]
    left, right = (torch.where(scale > 0, scale, 1) for scale in scales)
    return product(a / left[:, None], b / right[:, None]) * left.to(products)[:, None] * right.to(products)


class RowBlock(NamedTuple):
    """J(x) of some columns of consecutive samples."""

    rows: Tensor  # (n, d, q)
    gram: Tensor  # (n, d, d) their term of K(x, x)


class GradientParts(NamedTuple):
    """J(x) of some samples parameter by parameter, so that only one is in memory; see Features."""

    factors_gram: Tensor  # (n, d, d) the term of the factors in K(x, x), float64
    width: int  # entries of all dense parts together
    explicit: Iterable[tuple[int, Iterable[RowBlock]]]  # first column, and the rows, to be consumed at once
    factors: tuple[tuple[Tensor, Tensor], ...]
    # Gradients of the matrices that were asked for, not formed yet; to be consumed at once.
    matrices: Iterable[tuple[str, Iterable[ParameterGradient]]] = ()


class VjpResult(NamedTuple):
    """Σₓ S(x)ᵀ w(x), a parameter vector for each column of weights."""

    total: Tensor  # (c, p), float64
    self_kernel: Power | None  # K(x, x)ᵉ, None for exponent 0; can be passed to `jvp`


class JointBlocks(NamedTuple):
    """S(x) S(x')ᵀ of all pairs of a batch."""

    blocks: Tensor  # (n, n, d, d)
    ranks: Tensor | None  # of K(x, x), (n,); None where nothing is whitened


class JvpResult(NamedTuple):
    """S(x) u for parameter vectors u."""

    outputs: Tensor  # (n, d, c), float64
    ranks: Tensor | None


class Engine(ABC):
    """Computes per-sample gradients: self kernels, whitened Jacobians, and products with them.

    Attributes:
        name: Of the engine, in messages.
        batch_size: Samples that fit into max_memory beside sums over parameters, None if unknown.
        memory: Bytes that a batch takes; zeros if unknown.

    """

    name: ClassVar[str] = "custom"
    batch_size: int | None = None
    memory: MemoryUse = UNKNOWN_MEMORY

    @abstractmethod
    def self_kernel(self, samples: Samples, exponent: float = 1) -> Power:
        """Return K(x, x)ᵉ, (n, d, d), in float64, and its ranks."""

    @abstractmethod
    def rows(self, samples: Samples, exponent: float) -> Rows:
        """Return S(x), (n, d, p)."""

    @abstractmethod
    def features(self, samples: Samples, exponent: float) -> Features:
        """Return S(x) in the form in which inner products of pairs are cheapest."""

    def parts(self, samples: Samples) -> Iterator[GradientParts]:
        """Yield J(x) of consecutive samples in parts; each iterator can be consumed once."""
        features = self.features(samples, 0)
        self_kernel = self.self_kernel(samples).matrix
        yield GradientParts(
            torch.zeros_like(self_kernel),
            features.rows.shape[2],
            [(0, [RowBlock(features.rows, self_kernel)])],
            features.factors,
        )

    def by_parameter(
        self, samples: Samples, numels: Mapping[str, int]
    ) -> Iterator[Mapping[str, ParameterGradient]]:
        """Yield J(x) of consecutive samples by parameter; parameters without a gradient may be missing.

        Args:
            samples: The batch.
            numels: The number of entries of each parameter, in the order of J(x).

        """
        rows = self.rows(samples, 0).rows
        split = rows.split(list(numels.values()), dim=2)
        yield {name: DenseGradient(part) for name, part in zip(numels, split, strict=True)}

    def map_by_parameter(
        self,
        samples: Samples,
        numels: Mapping[str, int],
        function: Callable[[Mapping[str, ParameterGradient]], tuple[Tensor, ...]],
        reads: object,
    ) -> tuple[Tensor, ...]:
        """Return function(J(x) by parameter), joined over consecutive samples.

        Args:
            samples: The batch.
            numels: As of `by_parameter`.
            function: Returns tensors with one entry for each sample.
            reads: What it computes with beside the gradients; the function is the same for the same object.

        """
        del reads
        return join_tensors([function(gradients) for gradients in self.by_parameter(samples, numels)])

    def matrices(self, samples: Samples) -> dict[str, tuple[int, int]]:
        """Return rows and columns of the parameters that `map_parts` can yield as matrices; none by default."""
        del samples
        return {}

    def map_parts(
        self,
        samples: Samples,
        function: Callable[[GradientParts], tuple[Tensor, ...]],
        reads: object,
        matrices: Collection[str] = (),
    ) -> tuple[Tensor, ...]:
        """Return function(parts of J(x)), joined over consecutive samples.

        Args:
            samples: The batch.
            function: Returns tensors with one entry for each sample.
            reads: What it computes with beside the parts; the function is the same for the same object.
            matrices: Names of parameters whose gradients are not formed, of those that `matrices` knows.

        """
        del matrices
        return join_tensors([function(parts) for parts in self.parts(samples)])

    def largest_part(self, samples: Samples, d: int) -> int:
        """Return the number of entries of the largest part of one sample with d outputs."""
        del d
        return max(part[0].numel() for part in self.features(samples[:1], 0).tensors)

    def feature_bytes(self, samples: Samples, d: int) -> int:
        """Return the bytes of the features of one sample with d outputs."""
        del d
        return sum(part[0].nbytes for part in self.features(samples[:1], 0).tensors)

    @abstractmethod
    def vjp(self, samples: Samples, weights: Tensor, exponent: float) -> VjpResult:
        """Return Σₓ S(x)ᵀ w(x) for weights (n, d, c), (c, p)."""

    def vjp_with_self_kernel(self, samples: Samples, c: int, weights: Callable[[Power], Tensor]) -> VjpResult:
        """Return Σₓ J(x)ᵀ w(x), (c, p), and K(x, x), for weights that depend on it.

        Args:
            samples: The batch.
            c: The number of columns of weights.
            weights: Returns w(x), (n, d, c), given K(x, x) of some samples and their ranks.

        """
        del c
        self_kernel = self.self_kernel(samples)
        return VjpResult(self.vjp(samples, weights(self_kernel), 0).total, self_kernel)

    @abstractmethod
    def jvp(
        self, samples: Samples, directions: Tensor, exponent: float, self_kernel: Power | None = None
    ) -> JvpResult:
        """Return S(x) u for each row u of directions (c, p), (n, d, c).

        Args:
            samples: The batch.
            directions: (c, p) parameter vectors.
            exponent: e of S(x) = K(x, x)ᵉ J(x).
            self_kernel: K(x, x)ᵉ if it was computed before.

        """

    def vjp_by_output(self, samples: Samples, weights: Tensor, d: int, exponent: float) -> VjpResult:
        """Return Σₓ w(x) S_e(x) for each of the d outputs e, (d · c, p), for weights (n, c)."""
        each = torch.einsum("nc,fe->nfec", weights, torch.eye(d).to(weights)).flatten(2)
        return self.vjp(samples, each, exponent)

    def jvp_by_output(
        self,
        samples: Samples,
        directions: Tensor,
        d: int,
        exponent: float,
        self_kernel: Power | None = None,
    ) -> JvpResult:
        """Return S_e(x) u_e for directions of each output e, (d · c, p), as outputs (n, d, c)."""
        outputs, ranks = self.jvp(samples, directions, exponent, self_kernel)
        own = outputs.unflatten(2, (d, -1)).diagonal(dim1=1, dim2=2)  # (n, c, d)
        return JvpResult(own.transpose(1, 2), ranks)

    def begin_pass(self, n: int) -> None:  # noqa: B027
        """Announce a pass: until `finish_checks`, gradients are asked for of n samples, once each.

        Optional; it lets an engine prepare for so many. Call it inside `net.evaluation_mode`.
        """

    def retain(self, max_bytes: int, n: int) -> AbstractContextManager[None]:
        """Let later passes inside over the same n samples read what the first computed; does nothing by default."""
        del max_bytes, n
        return nullcontext()

    def enlarged(self, size: int) -> AbstractContextManager[None]:
        """Take batches of `size` samples inside, if that is more than now; does nothing by default."""
        del size
        return nullcontext()

    def form_all_parts(self) -> None:  # noqa: B027
        """Have no factors among the parts of gradients from now on, after a PartsChangedError on any rank."""

    @property
    def gradient_batch_size(self) -> int | None:
        """Samples that fit into max_memory where only gradients are computed, None if unknown."""
        return self.batch_size

    def finish_checks(self) -> None:  # noqa: B027
        """Raise errors deferred so as not to synchronize with a GPU; call it at the end of a pass."""

    def defer_checks(self) -> None:
        """Leave the checks of a pass to the `finish_checks` of the next, which begins while a GPU is still busy.

        Call it instead of `finish_checks` if no result is returned before the next pass of the same evaluation ends.
        By default nothing is left to be checked.
        """
        self.finish_checks()


def join_tensors(results: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return the tensors of consecutive chunks, concatenated; without a copy if there is only one chunk."""
    return results[0] if len(results) == 1 else tuple(map(torch.cat, zip(*results, strict=True)))


def concatenate_powers(parts: list[Power]) -> Power | None:
    """Return the powers of consecutive chunks as one, None for an empty list."""
    if not parts:
        return None
    return Power(torch.cat([p.matrix for p in parts]), torch.cat([p.rank for p in parts]))


def whiten_outputs(outputs: Tensor, self_kernel: Power | None) -> JvpResult:
    """Return K(x, x)ᵉ J(x) u, given J(x) u."""
    if self_kernel is None:
        return JvpResult(outputs, None)
    return JvpResult(self_kernel.matrix.to(outputs) @ outputs, self_kernel.rank)


def whiten_rows(rows: Tensor, self_kernel: Power, overwrite: bool = False) -> Tensor:
    """Return K(x, x)ᵉ J(x), also where powers overflow float32; `overwrite` allows to reuse the rows' memory."""
    if rows.shape[1] > 1:
        matrix, result = self_kernel.matrix, rows if overwrite else torch.empty_like(rows)
        columns = columns_in_cache(rows)
        for part, whitened in zip(rows.split(columns, 2), result.split(columns, 2), strict=True):
            whitened.copy_(matrix @ part.to(matrix))
        return result
    if rows.device.type != "cpu":  # a gradient out of this range is mostly lost already
        factor = self_kernel.matrix.clamp(max=torch.finfo(rows.dtype).max).to(rows.dtype)
        return rows.mul_(factor) if overwrite else rows * factor
    root = self_kernel.matrix.sqrt().to(rows.dtype)  # twice the root, which does not overflow
    return (rows.mul_(root) if overwrite else rows * root).mul_(root)


def check_finite(rows: Tensor, samples: Samples) -> None:
    """Raise if a row of (n, ...) has NaN or infinity, and name the samples."""
    if rows.sum().isfinite():  # one cheap sum; it may overflow, or infinities cancel to NaN: then look closer
        return
    finite = rows.flatten(1).sum(1, dtype=torch.float32 if rows.device.type == "mps" else torch.float64)
    _raise_not_finite(
        samples.ids, finite.isfinite(), rows.dtype
    )  # a sum is finite if and only if its terms are


def _raise_not_finite(ids: Tensor, finite: Tensor, dtype: torch.dtype) -> None:
    if not finite.all():
        bad = ids[~finite.to(ids.device)]
        raise ValueError(
            f"The gradient of {counted(len(bad), 'sample')} is not finite, the first with ids "
            f"{bad[:5].tolist()}: look for NaN or infinity in their inputs (or an overflow in "
            f"{dtype}), and leave them out."
        )


class FiniteChecks:
    """Checks for NaN and infinity: immediate on a CPU, deferred on a GPU to avoid synchronization."""

    def __init__(self) -> None:
        self._pending: list[tuple[Tensor, Tensor, torch.dtype]] = []

    def note(self, rows: Tensor, samples: Samples) -> None:
        """Raise, now or in `finish_checks`, if a row of (n, ...) is not finite."""
        if rows.device.type == "cpu":
            check_finite(rows, samples)
        elif rows[0].numel():
            largest = torch.linalg.vector_norm(rows.flatten(1), torch.inf, dim=1)
            self._pending.append((samples.ids, largest.isfinite(), rows.dtype))

    def finish_checks(self) -> None:
        """Raise deferred errors."""
        pending, self._pending = self._pending, []
        if pending and not torch.cat([finite for _, finite, _ in pending]).all():  # waits for the device once
            for ids, finite, dtype in pending:
                _raise_not_finite(ids, finite, dtype)
