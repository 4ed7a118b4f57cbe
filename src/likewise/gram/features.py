"""Per-sample gradients, or their sketches, that are kept in memory: several statistics from one pass.

Where the features S(x) of all samples fit into a share of max_memory, nothing else needs the data again: similarities
of pairs are their inner products, and sums over all samples are products with a sum of features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from likewise.data import Batches
from likewise.engines import Features
from likewise.gram.products import LinearProducts, Read, RowSums, Weights
from likewise.kernels import Kernel
from likewise.linalg import SHORT_RUN, accumulation_dtype, matrix_power, product, split_product


@dataclass(frozen=True)
class KeptFeatures:
    """S(x) = K(x, x)ᵉ J(x) of all samples of a data set, with their self kernels."""

    features: Features
    self_kernels: Tensor  # (n, d, d) K(x, x), in float64
    exponent: float  # e
    floor: float  # of eigenvalues of K(x, x), relative to the largest

    @property
    def n(self) -> int:
        """The number of samples."""
        return len(self.self_kernels)

    def self_kernel(self, exponent: float) -> Tensor:
        """Return K(x, x) to this power, (n, d, d)."""
        return matrix_power(self.self_kernels, exponent, self.floor).matrix

    def diagonal(self, kernel: Kernel) -> Tensor:
        """Return k(x, x), (n,), or (n, d, d) of whole blocks."""
        return kernel.reduce(self.self_kernel(1 + kernel.left_power + kernel.right_power))

    def products(self, kernel: Kernel, max_memory: int) -> "KeptProducts":
        """Return products with the square matrix of this kernel."""
        return KeptProducts(self, kernel.left_power, kernel.right_power, max_memory)

    def sums_and_diagonals(self, kernels: Sequence[Kernel], max_memory: int) -> list[RowSums]:
        """Return Σ_x' k(x, x') and k(x, x) of each kernel."""
        d = self.self_kernels.shape[1]
        ones = torch.ones(self.n, 1, dtype=torch.float64)
        return [
            RowSums(
                self.products(kernel, max_memory).reduced(ones, kernel.coefficients(d))[:, 0],
                self.diagonal(kernel),
            )
            for kernel in kernels
        ]

    def part(self, where: range) -> Features:
        """Return the features at these places."""
        return self.features.over([tensor[where.start : where.stop] for tensor in self.features.tensors])


@dataclass(frozen=True)
class KeptProducts(LinearProducts):
    """Products with the square matrix of features that are kept."""

    kept: KeptFeatures
    left_power: float
    right_power: float
    max_memory: int

    @property
    def d(self) -> int:  # type: ignore[override]
        """The number of outputs."""
        return self.kept.self_kernels.shape[1]

    @property
    def vectors_per_pass(self) -> int:
        """How many sums of features, in two precisions, fit into an eighth of max_memory."""
        numel = self.kept.features.rows.shape[2]
        numel += sum(a.shape[1] * delta.shape[2] for a, delta in self.kept.features.factors)
        return max(1, self.max_memory // 8 // (16 * max(1, numel)))

    def product(self, weights: Weights, c: int, read: Read = lambda _, outputs: outputs) -> Tensor:
        """Return read(places, S(x) Σ S(x')ᵀ w(x')), for at most `vectors_per_pass` columns of weights."""
        kept = self.kept
        block = max(1, SHORT_RUN // self.d)  # sums in the compute dtype are short
        spans = [range(i, min(i + block, kept.n)) for i in range(0, kept.n, block)]
        left, right = (kept.self_kernel(e - kept.exponent) for e in (self.left_power, self.right_power))
        sums: list[Tensor] | None = None
        for where in spans:
            here = slice(where.start, where.stop)
            terms = _weighted_sums(kept.part(where), right[here] @ weights(where).to(right))
            sums = terms if sums is None else [a.add_(b) for a, b in zip(sums, terms, strict=True)]
        assert sums is not None
        parts = [
            read(where, left[where.start : where.stop] @ _project(kept.part(where), sums)) for where in spans
        ]
        return torch.cat(parts)


def _weighted_sums(features: Features, weights: Tensor) -> list[Tensor]:
    """Return Σ S(x)ᵀ w(x) for weights (n, d, c) in float64: (c, q) of the rows, (c, i, o) of each factor."""
    scale, scaled = _to_dtype(weights, (0, 1), features.rows.dtype)  # scale (1, 1, c)
    scale = scale.flatten()
    sums = [
        product(scaled.flatten(0, 1).T.contiguous(), features.rows.flatten(0, 1).T) * scale[:, None],
    ]
    for a, delta in features.factors:
        deltas = torch.einsum("ndc,ndo->con", scaled, delta)
        sums.append(split_product(a.T.expand(len(scale), -1, -1), deltas).to(scale) * scale[:, None, None])
    return sums


def _project(features: Features, sums: list[Tensor]) -> Tensor:
    """Return S(x) u, (n, d, c) in float64, for vectors u in the form of `_weighted_sums`."""
    n, d = features.rows.shape[:2]
    scale, scaled = _to_dtype(sums[0], (1,), features.rows.dtype)
    outputs = (product(features.rows.flatten(0, 1), scaled) * scale.T).unflatten(0, (n, d))
    for (a, delta), vectors in zip(features.factors, sums[1:], strict=True):
        scale, scaled = _to_dtype(vectors, (1, 2), delta.dtype)
        inputs = torch.einsum("ni,cio->nco", a, scaled)
        outputs += product(delta, inputs) * scale.flatten()
    return outputs


def _to_dtype(values: Tensor, dims: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the scale of values along dims and values / scale in `dtype`, which then cannot overflow."""
    if not values.numel():
        return values.new_ones([1 if i in dims else size for i, size in enumerate(values.shape)]), values.to(
            dtype
        )
    scale = values.abs().amax(dims, keepdim=True)
    scale = torch.where(scale > 0, scale, 1)
    return scale.to(accumulation_dtype(scale)), (values / scale).to(dtype)


@dataclass
class KeptSketches:
    """Whitened sketches of the rows and the columns of a matrix, and what tells their errors."""

    rows: Tensor  # (n, d·q)
    columns: Tensor  # (m, d·q), the same tensor for a square matrix
    mean: Tensor  # (d·q,) of the samples whose mean centering takes off
    d: int  # outputs
    dependent: int  # consecutive sums of a replicate that are not independent of each other
    error_factors: tuple[float, float] | None = None  # of centered and plain similarities, once measured


Kept = TypeVar("Kept")


class StateCache(Generic[Kept]):
    """What was computed last from some data sets, with the state of the model and the data that it belongs to."""

    def __init__(self) -> None:
        self._entry: tuple[tuple[Batches, ...], tuple[Any, ...], Kept] | None = None

    def get(self, data: tuple[Batches, ...], state: tuple[Any, ...]) -> Kept | None:
        """Return what was put for the same data sets in the same state, else None."""
        if self._entry is None:
            return None
        known, known_state, kept = self._entry
        same = len(known) == len(data) and all(a is b for a, b in zip(known, data, strict=True))
        return kept if same and known_state == state else None

    def put(self, data: tuple[Batches, ...], state: tuple[Any, ...], kept: Kept) -> None:
        """Store something in place of what is there."""
        self._entry = data, state, kept
