"""The two passes of a product: over the columns to sum, over the rows to read off.

Σ_x' S(x) S(x')ᵀ w(x') = S(x) u with u = Σ S(x')ᵀ w(x'), one parameter vector for each column of weights.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from likewise.data import Batches
from likewise.fingerprint import Fingerprint
from likewise.gradients import Gradients, Kept, Vanished
from likewise.network import Network
from likewise.parallel import join_over, sum_over

Weights = Callable[[range], Tensor]  # the weights (b, d, c) of the samples at these places
Read = Callable[[range, Tensor], Tensor]  # what to keep of the products (b, d, c) at these places


@dataclass(frozen=True)
class Passes:
    """Passes over rows and columns, with the exponents of a kernel."""

    net: Network
    gradients: Gradients
    rows: Batches
    columns: Batches
    row: float
    column: float
    d: int
    p: int
    max_memory: int

    @property
    def vectors_at_once(self) -> int:
        """How many parameter vectors in float64, twice, fit into a quarter of the memory allowed."""
        return max(1, self.max_memory // 8 // (8 * self.p))

    def spans(self, data: Batches) -> list[range]:
        """Return the batches to read: the user's, or what fits at once, not too few or many samples."""
        at_once = self.gradients.at_once
        if data.given or at_once is None:
            return data.spans()
        return data.spans(at_once * (256 // at_once) if at_once < 256 else min(at_once, 2048))

    def add_to(self, fingerprint: Fingerprint, name: str) -> None:
        """Add what ranks that share a pass must have in common."""
        fingerprint.add("network", self.net)
        fingerprint.add("rows", self.rows)
        fingerprint.add("columns", self.columns)
        fingerprint.add("exponents", (self.row, self.column))
        fingerprint.add("engine", type(self.gradients).__name__)

    def pull(self, weights: Weights, kept: Kept | None = None) -> Tensor:
        """Return Σ S(x')ᵀ w(x') over the columns: a parameter vector a weight, (c, p)."""
        vanished = Vanished()

        def term(where: range) -> Tensor:
            samples = self.columns.samples(where)
            pulled = self.gradients.pull(samples, weights(where), self.column)
            if pulled.own is not None:
                vanished.note(samples, pulled.own.rank)
                if kept is not None:
                    kept.put(where, pulled.own)
            return pulled.total

        with self.net.evaluating():
            settle = self.gradients.settle
            total = sum_over(term, self.spans(self.columns), "summing gradients", self, settle)
        if self.rows is not self.columns:  # else the second pass names them
            vanished.warn()
        return total

    def push(self, directions: Tensor, read: Read, kept: Kept | None = None) -> Tensor:
        """Return read(places, S(x) u) of the rows; u are the rows of (c, p) directions."""
        vanished = Vanished()

        def answer(where: range) -> Tensor:
            samples = self.rows.samples(where)
            own = None if kept is None else kept.get(where)
            pushed = self.gradients.push(samples, directions, self.row, own)
            vanished.note(samples, pushed.ranks)
            return read(where, pushed.outputs)

        with self.net.evaluating():
            answers = join_over(answer, self.spans(self.rows), "reading off", self, self.gradients.settle)
        vanished.warn()
        return answers

    def product(self, weights: Weights, c: int, read: Read = lambda _, outputs: outputs) -> Tensor:
        """Return read(places, S(x) Σ S(x')ᵀ w(x')) in float64, in as many rounds as vectors need to fit."""
        group = self.vectors_at_once
        if c > group:
            rounds = [
                self.product(_some_columns(weights, slice(i, i + group)), min(group, c - i))
                for i in range(0, c, group)
            ]
            return read(range(self.rows.n), torch.cat(rounds, 2))
        same = self.rows is self.columns and self.row == self.column
        fits = 8 * self.rows.n * self.d**2 <= self.max_memory // 8
        kept = Kept(self.rows.n) if same and fits else None
        return self.push(self.pull(weights, kept), read, kept)

    def traces(self, weights: Tensor) -> Tensor:
        """Return Σ_x' tr(S(x) S(x')ᵀ) w(x') / d for weights (m, c), (n, c), in float64."""
        eye = torch.eye(self.d).to(weights)
        outputs_at_once = min(self.d, self.vectors_at_once)
        columns_at_once = max(1, self.vectors_at_once // outputs_at_once)
        sums = []
        for some in weights.split(columns_at_once, dim=1):
            firsts = range(0, self.d, outputs_at_once)
            parts = [self._trace(some, eye[:, i : i + outputs_at_once], i) for i in firsts]
            sums.append(torch.stack(parts).sum(0) / self.d)
        return torch.cat(sums, 1)

    def _trace(self, weights: Tensor, eye: Tensor, first: int) -> Tensor:
        """Return the part of the traces that some of the outputs, from `first` on, add to them."""
        c, some = weights.shape[1], eye.shape[1]

        def blocks(where: range) -> Tensor:
            return torch.einsum("nc,de->ndec", weights[where.start : where.stop], eye).flatten(2)

        def read(_: range, outputs: Tensor) -> Tensor:
            mine = outputs[:, first : first + some].unflatten(2, (some, c))
            return mine.diagonal(dim1=1, dim2=2).sum(-1)

        return self.product(blocks, some * c, read)


def _some_columns(weights: Weights, which: slice) -> Weights:
    return lambda where: weights(where)[:, :, which]
