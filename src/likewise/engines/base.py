"""The four questions of a network's gradients that suffice for every statistic.

J(x) is the (d, p) Jacobian of the outputs in the parameters, K(x, x) = J Jᵀ, and S(x) = K(x, x)ᵉ J(x)
with the exponent e that a kernel asks for (0: J itself, -½: orthonormal rows). Powers act on the
range of K alone, see linalg. Answers come with the rank of each K(x, x) where e asked for a power; a
rank of 0 means that no parameter moves the sample's outputs.
"""

import errno
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from likewise.data import Samples
from likewise.linalg import Power, product


class ZeroGradientWarning(UserWarning):
    """Some samples have no gradient, so nothing is similar to them."""


class GradientMismatchError(RuntimeError):
    """The gradient of a sample turned out wrong in the middle of a pass, none of whose numbers can be used.

    Attributes:
        id: The sample's position in the data set.
        parameter: The first parameter in which its gradient is wrong, None if that is not known.

    """

    def __init__(self, message: str, id: int, parameter: str | None = None) -> None:
        super().__init__(message)
        self.id, self.parameter = id, parameter


class DependentSampleError(ValueError):
    """The outputs of a sample depend on chance or on the other samples of its batch.

    Attributes:
        id: The sample's position in the data set.

    """

    def __init__(self, message: str, id: int) -> None:
        super().__init__(message)
        self.id = id


class PartsChangedError(Exception):
    """Features of some samples come in other parts than those before: start again."""


class ZeroGradientLog:
    """The samples of one pass that turned out to have no gradient."""

    def __init__(self) -> None:
        self._ids: set[int] = set()
        self._seen: set[int] = set()

        self._noted: list[tuple[Tensor, Tensor]] = []

    def note(self, samples: Samples, ranks: Tensor | None) -> None:
        """Remember which samples have rank 0, without waiting for a GPU."""
        self._seen.update(samples.ids.tolist())
        if ranks is not None and ranks.device.type == "cpu":  # what is kept here fragments the heap
            self._ids.update(samples.ids[ranks == 0].tolist())
        elif ranks is not None:
            self._noted.append((samples.ids, ranks == 0))

    def warn(self) -> None:
        """Name them, if there are any."""
        for ids, gone in self._noted:
            self._ids.update(ids[gone.cpu()].tolist())
        if self._ids:
            first = sorted(self._ids)
            warnings.warn(
                f"{len(first)} of {len(self._seen)} samples have no gradient (ids "
                f"{', '.join(map(str, first[:10]))}{' ...' if len(first) > 10 else ''}): no "
                "parameter moves their outputs, so nothing is similar to them, not even themselves. "
                "Their similarities are 0; gram.zero_gradients() tells which.",
                ZeroGradientWarning,
                stacklevel=4,
            )


class SelfKernelCache:
    """K(x, x)ᵉ of n samples, by place, so that the second pass need not find them again."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._own: Power | None = None

    def put(self, where: range, own: Power) -> None:
        """Remember those of the samples at these places."""
        if self._own is None:  # one room for all: small tensors here and there fragment the heap
            self._own = Power(*(part.new_zeros(self._n, *part.shape[1:]) for part in own))
        for room, part in zip(self._own, own, strict=True):
            room[where.start : where.stop] = part

    def get(self, where: range) -> Power | None:
        """Return those of the samples at these places, None if none were put."""
        return None if self._own is None else Power(*(part[where.start : where.stop] for part in self._own))


class Rows(NamedTuple):
    """S(x), explicitly."""

    rows: Tensor  # (n, d, p), at least float32
    ranks: Tensor | None  # (n,), None for exponent 0


class Features(NamedTuple):
    """S(x) for inner products of pairs, in parts: explicit rows, and outer products never formed.

    S(x) S(x')ᵀ = rows rows'ᵀ + Σ (a·a') δ δ'ᵀ over the factors (a, δ). The largest entry of each a is
    ±1, so that no factor overflows where their product does not.
    """

    rows: Tensor  # (n, d, q)
    factors: tuple[tuple[Tensor, Tensor], ...]  # (n, i) and (n, d, o) each
    ranks: Tensor | None

    @property
    def tensors(self) -> list[Tensor]:
        """All of them, samples first."""
        return [self.rows, *(part for factor in self.factors for part in factor)]

    def over(self, tensors: list[Tensor]) -> "Features":
        """Return features of the same parts with other tensors."""
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
    """Return a bᵀ in float64, (n, p) and (m, p) -> (n, m), also where products leave the range of float32."""
    found = product(a, b)
    if found.sum().isfinite():
        return found
    scales = [torch.linalg.vector_norm(t, torch.inf, dim=1) for t in (a, b)]
    left, right = (torch.where(scale > 0, scale, 1) for scale in scales)
    return product(a / left[:, None], b / right[:, None]) * left.to(found)[:, None] * right.to(found)


class Parts(NamedTuple):
    """J(x) of some samples parameter by parameter, so that they need not be held at once; see Features."""

    own: Tensor  # (n, d, d) what the factors add to K(x, x), float64
    width: int  # numbers of all explicit parts together
    explicit: Iterable[tuple[int, Tensor, Tensor]]  # where it begins, rows (n, d, q), what it adds to K(x, x)
    factors: tuple[tuple[Tensor, Tensor], ...]


class VjpResult(NamedTuple):
    """Σₓ S(x)ᵀ w(x), a parameter vector for each column of weights."""

    total: Tensor  # (c, p), float64
    own: Power | None  # K(x, x)ᵉ, None for exponent 0: `push` need not find it again


class JvpResult(NamedTuple):
    """S(x) u, for each of some parameter vectors u."""

    outputs: Tensor  # (n, d, c), float64
    ranks: Tensor | None


class Engine(ABC):
    """A way to get at gradients."""

    at_once: int | None = None  # how many samples fit into the memory allowed, where that is known
    room: tuple[int, int] = 0, 0  # bytes: beside the samples, and of each sample, where that is known

    @abstractmethod
    def self_kernel(self, samples: Samples, exponent: float = 1) -> Power:
        """Return K(x, x)ᵉ, (n, d, d), in float64, and its ranks."""

    @abstractmethod
    def rows(self, samples: Samples, exponent: float) -> Rows:
        """Return S(x), (n, d, p)."""

    @abstractmethod
    def features(self, samples: Samples, exponent: float) -> Features:
        """Return S(x) in whatever parts make pairs cheap."""

    def parts(self, samples: Samples) -> Iterator[Parts]:
        """Yield J(x) of consecutive samples in parts, to be gone through once."""
        found = self.features(samples, 0)
        own = self.self_kernel(samples).matrix
        yield Parts(torch.zeros_like(own), found.rows.shape[2], [(0, found.rows, own)], found.factors)

    def widest(self, samples: Samples) -> int:
        """Return how many numbers the largest part of one sample has."""
        return max(part[0].numel() for part in self.features(samples[:1], 0).tensors)

    @abstractmethod
    def vjp(self, samples: Samples, weights: Tensor, exponent: float) -> VjpResult:
        """Return Σₓ S(x)ᵀ w(x) for weights (n, d, c): from outputs to parameters."""

    @abstractmethod
    def jvp(
        self, samples: Samples, directions: Tensor, exponent: float, own: Power | None = None
    ) -> JvpResult:
        """Return S(x) u for each row u of directions (c, p): from parameters to outputs.

        `own`: K(x, x)ᵉ where it is known already.
        """

    def finish_checks(self) -> None:  # noqa: B027
        """Raise now what was put off so as not to wait for a GPU; call it at the end of a pass."""


def concatenate_powers(parts: list[Power]) -> Power | None:
    """Return the powers of consecutive chunks as one, None of no chunk."""
    if not parts:
        return None
    return Power(torch.cat([p.matrix for p in parts]), torch.cat([p.rank for p in parts]))


def whiten_outputs(outputs: Tensor, own: Power | None) -> JvpResult:
    """Return K(x, x)ᵉ J(x) u of J(x) u."""
    if own is None:
        return JvpResult(outputs, None)
    return JvpResult(own.matrix.to(outputs) @ outputs, own.rank)


def whiten_rows(rows: Tensor, own: Power, overwrite: bool = False) -> Tensor:
    """Return K(x, x)ᵉ J(x), also where powers are beyond the range of float32.

    `overwrite`: the rows are nobody else's, and their memory may be used.
    """
    if rows.shape[1] > 1:
        return (own.matrix @ rows.to(own.matrix)).to(rows.dtype)
    if rows.device.type != "cpu":  # of a gradient out of this range little is left
        factor = own.matrix.clamp(max=torch.finfo(rows.dtype).max).to(rows.dtype)
        return rows.mul_(factor) if overwrite else rows * factor
    root = own.matrix.sqrt().to(rows.dtype)  # twice by the root, which is within the range
    return (rows.mul_(root) if overwrite else rows * root).mul_(root)


def check_finite(rows: Tensor, samples: Samples) -> None:
    """Raise if anything of a sample's (n, ...) numbers is NaN or infinite, and name the samples."""
    if rows.sum().isfinite():  # one cheap sum; it may overflow, or infinities cancel to NaN: then look closer
        return
    finite = rows.flatten(1).sum(1, dtype=torch.float32 if rows.device.type == "mps" else torch.float64)
    _refuse(samples.ids, finite.isfinite(), rows.dtype)  # a sum is finite if and only if its terms are


def _refuse(ids: Tensor, finite: Tensor, dtype: torch.dtype) -> None:
    if not finite.all():
        bad = ids[~finite.to(ids.device)]
        raise ValueError(
            f"The gradient of {len(bad)} samples is not finite, the first with ids "
            f"{bad[:5].tolist()}: look for NaN or infinity in their inputs (or an overflow in "
            f"{dtype}), and leave them out."
        )


class FiniteChecks:
    """What is to be finite: looked at now on a CPU, later on a GPU, so that it need not stop."""

    def __init__(self) -> None:
        self._open: list[tuple[Tensor, Tensor, torch.dtype]] = []

    def note(self, rows: Tensor, samples: Samples) -> None:
        """Raise, now or when settled, if anything of a sample's (n, ...) numbers is not finite."""
        if rows.device.type == "cpu":
            check_finite(rows, samples)
        elif rows[0].numel():
            largest = torch.linalg.vector_norm(rows.flatten(1), torch.inf, dim=1)
            self._open.append((samples.ids, largest.isfinite(), rows.dtype))

    def finish_checks(self) -> None:
        """Raise what was put off."""
        pending, self._open = self._open, []
        for ids, finite, dtype in pending:
            _refuse(ids, finite, dtype)


class MemoryLimitError(MemoryError):
    """Not even one sample fits into max_memory.

    Attributes:
        enough: A max_memory, in bytes, that would do.
    """

    def __init__(self, message: str, enough: int) -> None:
        super().__init__(message)
        self.enough = enough


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was not enough memory, on whatever device."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # neither PyTorch's allocator for CPUs nor the system's loader of libraries has an exception of its own:
    # there is only their text to tell
    if isinstance(error, ImportError):
        return "failed to map segment" in str(error)
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def fit_batch_size(size: int, d: int, p: int, max_memory: int, rest: int = 0) -> int:
    """Return how many samples of `size` bytes each fit beside the `rest`, or say that not even one does."""
    if size + rest > max_memory:
        enough = 2 * (size + rest)
        raise MemoryLimitError(
            f"The gradients of one sample, {d:,} outputs × {p:,} parameters, take about "
            f"{(size + rest) / 2**20:,.1f} MiB, over the {max_memory / 2**20:,.1f} MiB that max_memory "
            f"leaves for them: allow max_memory={enough:_}, or choose a readout of fewer "
            "outputs or fewer parameters.",
            enough,
        )
    return int((max_memory - rest) // size)
