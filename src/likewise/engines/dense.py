"""The dense engine: everything from explicit Jacobian rows. Slow, simple, the reference for the traced engine.

Rows are computed a few samples at a time within max_memory, and dropped again.
"""

from collections.abc import Iterator
from functools import partial
from typing import Protocol, final

import torch
from torch import Tensor

from likewise.data import Samples
from likewise.engines.base import (
    Engine,
    Features,
    GradientParts,
    JvpResult,
    Rows,
    VjpResult,
    check_finite,
    concatenate_powers,
    fit_batch_size,
    whiten_outputs,
    whiten_rows,
)
from likewise.engines.validation import SpotCheck
from likewise.linalg import Power, accumulation_dtype, matrix_power, rank_floor


class Source(Protocol):
    """Computes the rows that a DenseEngine works on."""

    def __call__(self, samples: Samples) -> Tensor:
        """Return the rows of samples, (n, d, p)."""

    def shape(self, samples: Samples) -> tuple[int, int, int]:
        """Return d, p and the bytes of a number, before any row is computed."""


# A chunk of rows takes about seven times its size: by parameter, concatenated, whitened, twice in float64.
COPIES = 7


@final
class DenseEngine(Engine):
    """Gradients from dense rows, in at most about `max_memory` bytes.

    Args:
        source: Computes the rows: Jacobians, or activations.
        max_memory: Bytes for the rows of one chunk and what is made of them.
        check: Compares some samples of every pass with autograd, where rows are a network's gradients.

    """

    name = "dense"

    def __init__(
        self,
        source: Source,
        max_memory: int,
        check: SpotCheck | None = None,
    ) -> None:
        self._source, self._max_memory = source, max_memory
        self._check = check
        self._size: int | None = None  # samples of a chunk; known after the first call

    def self_kernel(self, samples: Samples, exponent: float = 1) -> Power:
        """Return K(x, x)ᵉ and its ranks."""
        powers = concatenate_powers([self._self_kernel(*raw, exponent) for raw in self._chunks(samples)])
        assert powers is not None
        return powers

    def rows(self, samples: Samples, exponent: float) -> Rows:
        """Return S(x); the caller makes sure that they fit into memory."""
        parts, self_kernels = [], list[Power]()
        for raw in self._chunks(samples):
            rows = raw[0]
            if exponent:
                self_kernels.append(self._self_kernel(*raw, exponent))
                rows = whiten_rows(rows, self_kernels[-1], overwrite=True)
            parts.append(rows)
        self_kernel = concatenate_powers(self_kernels)
        return Rows(torch.cat(parts), None if self_kernel is None else self_kernel.rank)

    def features(self, samples: Samples, exponent: float) -> Features:
        """Return S(x), all of it dense."""
        explicit = self.rows(samples, exponent)
        return Features(explicit.rows, (), explicit.ranks)

    def parts(self, samples: Samples) -> Iterator[GradientParts]:
        """Yield J(x) as one dense part, and K(x, x) of the same rows."""
        for raw in self._chunks(samples):
            rows, self_kernel = raw[0], self._self_kernel(*raw, 1).matrix
            yield GradientParts(torch.zeros_like(self_kernel), rows.shape[2], [(0, rows, self_kernel)], ())

    def vjp(self, samples: Samples, weights: Tensor, exponent: float) -> VjpResult:
        """Return Σₓ S(x)ᵀ w(x)."""
        total, self_kernels, start = None, list[Power](), 0
        for raw in self._chunks(samples):
            rows = raw[0]
            part = weights[start : start + len(rows)].to(rows.device, accumulation_dtype(rows))
            start += len(rows)
            if exponent:
                self_kernels.append(self._self_kernel(*raw, exponent))
                part = self_kernels[-1].matrix @ part
            term = part.flatten(0, 1).T @ rows.flatten(0, 1).to(part.dtype)
            total = term if total is None else total.add_(term)
        assert total is not None and start == len(weights)
        return VjpResult(total, concatenate_powers(self_kernels))

    def jvp(
        self, samples: Samples, directions: Tensor, exponent: float, self_kernel: Power | None = None
    ) -> JvpResult:
        """Return S(x) u for each direction u."""
        outputs, self_kernels = [], list[Power]()
        for raw in self._chunks(samples):
            rows = raw[0]
            outputs.append(rows.to(directions.dtype) @ directions.T)
            if exponent and self_kernel is None:
                self_kernels.append(self._self_kernel(*raw, exponent))
        return whiten_outputs(torch.cat(outputs), self_kernel or concatenate_powers(self_kernels))

    def finish_checks(self) -> None:
        """Check a sample of the pass."""
        if self._check is not None:
            self._check.finish_checks()

    def _chunks(self, samples: Samples) -> Iterator[tuple[Tensor, float]]:
        """Yield rows, finite and at least float32, and the floor of their ranks."""
        if self._size is None:
            d, p, number = self._source.shape(samples[:1])
            self._size = fit_batch_size(d * p * max(number, 4) * COPIES, d, p, self._max_memory)
        for part in samples.split(self._size):
            computed = self._source(part)
            check_finite(computed, part)
            if self._check is not None:
                self._check.offer(part, None, partial(_combine_rows, computed), computed.shape[1])
            rows = computed.to(torch.promote_types(computed.dtype, torch.float32))
            yield rows, rank_floor(computed.dtype)

    def _self_kernel(self, rows: Tensor, floor: float, exponent: float) -> Power:
        exact = rows.to(accumulation_dtype(rows))
        return matrix_power(exact @ exact.mT, exponent, floor)


def _combine_rows(rows: Tensor, place: int, u: Tensor) -> Tensor:
    """Return J(x)ᵀ u of the sample at a position, (p,)."""
    return u.to(rows) @ rows[place]
