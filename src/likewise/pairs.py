"""Every pair of two data sets, a strip of whole rows at a time.

Gradients of a strip's rows stay in memory while those of the columns pass by; where the gradients of
all columns fit, they are formed once.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from likewise.data import Batches
from likewise.gradients import Gradients, Vanished
from likewise.kernels import Kernel, mean_diagonal
from likewise.parallel import processes


@dataclass(frozen=True)
class Pairs:
    """k(x, x') of rows and columns, tiles of it in at most about `max_memory` bytes."""

    gradients: Gradients
    rows: Batches
    columns: Batches
    kernel: Kernel
    row_shape: tuple[int, int]  # (d, p)
    dtype: torch.dtype
    max_memory: int
    vanished: Vanished

    @property
    def strips(self) -> list[range]:
        """The places of rows to take together."""
        d = self.row_shape[0]
        cell = 8 if self.kernel.reduce is mean_diagonal else 8 * d * d
        by_result = self.max_memory // 8 // (cell * self.columns.n)
        share = -(-self.rows.n // processes())
        return self.rows.spans(max(1, min(self._samples_at_once, by_result, share)))

    def strip(self, where: range, own: float | None = None) -> Tensor:
        """Return k of these rows with all columns, (b, m) or (b, m, d, d); `own` on the diagonal."""
        if self._kept is not None and self._same_sides:
            left = self._kept[where.start : where.stop]
        else:
            left = self._formed(self.rows, where, self.kernel.row)
        tiles = [self._tile(left, right) for right in self._column_rows(len(where))]
        similarities = torch.cat(tiles, 1).to(self.dtype)
        if own is not None and self.rows is self.columns:
            places = torch.arange(len(where), device=similarities.device)
            similarities[places, places + where.start] = own
        return similarities

    @property
    def _same_sides(self) -> bool:
        return self.rows is self.columns and self.kernel.row == self.kernel.column

    @property
    def _bytes_per_sample(self) -> int:
        d, p = self.row_shape
        return d * p * self.dtype.itemsize

    @property
    def _samples_at_once(self) -> int:
        return max(1, self.max_memory // 8 // self._bytes_per_sample)

    @cached_property
    def _kept(self) -> Tensor | None:
        """The gradients of all columns, if they fit into a quarter of the memory."""
        if self.columns.n * self._bytes_per_sample > self.max_memory // 4:
            return None
        return self._formed(self.columns, range(self.columns.n), self.kernel.column)

    def _column_rows(self, strip: int) -> "list[Tensor] | map[Tensor]":
        d = self.row_shape[0]
        blocks = max(1, self.max_memory // 8 // (d * d * self.dtype.itemsize * strip))
        size = min(self._samples_at_once, blocks)
        if self._kept is not None:
            return list(self._kept.split(size))
        return map(
            lambda where: self._formed(self.columns, where, self.kernel.column),
            self.columns.spans(size),
        )

    def _formed(self, data: Batches, where: range, exponent: float) -> Tensor:
        """Return the rows at these places, a batch at a time: activations are the user's to bound."""
        rows: Tensor | None = None
        for start in range(where.start, where.stop, data.size):
            part = range(start, min(start + data.size, where.stop))
            samples = data.samples(part)
            formed = self.gradients.rows(samples, exponent)
            self.vanished.note(samples, formed.ranks)
            if rows is None:
                rows = formed.rows.new_empty(len(where), *formed.rows.shape[1:])
            rows[start - where.start : part.stop - where.start] = formed.rows
        assert rows is not None
        return rows

    def _tile(self, left: Tensor, right: Tensor) -> Tensor:
        """Return reduce( S(x) S(x')ᵀ ) for all pairs of (b, d, p) and (c, d, p) rows."""
        d = left.shape[1]
        if self.kernel.reduce is mean_diagonal:  # the trace needs no off-diagonal product
            return left.flatten(1) @ right.flatten(1).T / d
        blocks = left.flatten(0, 1) @ right.flatten(0, 1).T
        return self.kernel.reduce(blocks.view(len(left), d, len(right), d).transpose(1, 2))
