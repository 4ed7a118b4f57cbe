"""The four questions, answered from explicit rows: the reference, slow and sure.

Rows are formed a few samples at a time, so that the memory allowed is kept, and dropped again.
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
    JvpResult,
    Parts,
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
    """Who forms rows."""

    def __call__(self, samples: Samples) -> Tensor:
        """Return the rows of samples, (n, d, p)."""

    def shape(self, samples: Samples) -> tuple[int, int, int]:
        """Return d, p and the bytes of a number, before any row is formed."""


# A chunk of rows takes about seven times its room: per parameter, joined, normalized, twice in float64.
COPIES = 7


@final
class DenseEngine(Engine):
    """Answers from rows that `source` forms, in at most about `max_memory` bytes."""

    def __init__(
        self,
        source: Source,
        max_memory: int,
        check: SpotCheck | None = None,
    ) -> None:
        self._source, self._max_memory = source, max_memory
        self._check = check  # of samples of every pass, where rows are a network's gradients
        self._size: int | None = None  # samples that fit at once; known after the first call

    def self_kernel(self, samples: Samples, exponent: float = 1) -> Power:
        """Return K(x, x)ᵉ and its ranks."""
        found = concatenate_powers([self._own(*raw, exponent) for raw in self._chunks(samples)])
        assert found is not None
        return found

    def rows(self, samples: Samples, exponent: float) -> Rows:
        """Return S(x); the caller sees to it that they fit."""
        parts, owns = [], list[Power]()
        for raw in self._chunks(samples):
            rows = raw[0]
            if exponent:
                owns.append(self._own(*raw, exponent))
                rows = whiten_rows(rows, owns[-1], overwrite=True)
            parts.append(rows)
        own = concatenate_powers(owns)
        return Rows(torch.cat(parts), None if own is None else own.rank)

    def features(self, samples: Samples, exponent: float) -> Features:
        """Return S(x), all of it explicit."""
        found = self.rows(samples, exponent)
        return Features(found.rows, (), found.ranks)

    def parts(self, samples: Samples) -> Iterator[Parts]:
        """Yield J(x), all of it one part, and K(x, x) of the same rows."""
        for raw in self._chunks(samples):
            rows, own = raw[0], self._own(*raw, 1).matrix
            yield Parts(torch.zeros_like(own), rows.shape[2], [(0, rows, own)], ())

    def vjp(self, samples: Samples, weights: Tensor, exponent: float) -> VjpResult:
        """Return Σₓ S(x)ᵀ w(x)."""
        total, owns, start = None, list[Power](), 0
        for raw in self._chunks(samples):
            rows = raw[0]
            part = weights[start : start + len(rows)].to(rows.device, accumulation_dtype(rows))
            start += len(rows)
            if exponent:
                owns.append(self._own(*raw, exponent))
                part = owns[-1].matrix @ part
            term = part.flatten(0, 1).T @ rows.flatten(0, 1).to(part.dtype)
            total = term if total is None else total.add_(term)
        assert total is not None and start == len(weights)
        return VjpResult(total, concatenate_powers(owns))

    def jvp(
        self, samples: Samples, directions: Tensor, exponent: float, own: Power | None = None
    ) -> JvpResult:
        """Return S(x) u for each direction u."""
        outputs, owns = [], list[Power]()
        for raw in self._chunks(samples):
            rows = raw[0]
            outputs.append(rows.to(directions.dtype) @ directions.T)
            if exponent and own is None:
                owns.append(self._own(*raw, exponent))
        return whiten_outputs(torch.cat(outputs), own or concatenate_powers(owns))

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
                self._check.offer(part, None, partial(_combined, computed), computed.shape[1])
            rows = computed.to(torch.promote_types(computed.dtype, torch.float32))
            yield rows, rank_floor(computed.dtype)

    def _own(self, rows: Tensor, floor: float, exponent: float) -> Power:
        exact = rows.to(accumulation_dtype(rows))
        return matrix_power(exact @ exact.mT, exponent, floor)


def _combined(rows: Tensor, place: int, u: Tensor) -> Tensor:
    """Return J(x)ᵀ u of the sample at a place, (p,)."""
    return u.to(rows) @ rows[place]
