"""The gradient of a parameter that is used several times: the sum over its uses.

Positions of uses of one kind are put side by side. A matrix that is also a table of embeddings, as in
language models, stays in two parts, whose inner product needs no gradient either.
"""

import itertools
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from likewise.gradients.pieces import Dense, Factored, Indexed, Piece, Sliced
from likewise.linalg import wide


def summed(uses: list[Piece]) -> Piece:
    """Return the sum of the pieces of one parameter."""
    if len(uses) == 1:
        return uses[0]
    sliced = [use for use in uses if isinstance(use, Sliced)]
    if len(sliced) == len(uses):
        return _slices_side_by_side(sliced)
    factored = [use for use in uses if isinstance(use, Factored)]
    indexed = [use for use in uses if isinstance(use, Indexed)]
    if len(factored) + len(indexed) < len(uses) or len({use.inputs_first for use in factored}) > 1:
        return _formed(uses)
    table = _indices_side_by_side(indexed) if indexed else None
    matrix = _factors_side_by_side(factored) if factored else None
    if table is None or matrix is None:
        found = table or matrix
        assert found is not None
        return found
    return Tied(matrix, table)


def _formed(uses: list[Piece]) -> Piece:
    total = uses[0].rows().clone()
    for use in uses[1:]:
        total += use.rows()
    return Dense(total)


def _slices_side_by_side(uses: list[Sliced]) -> Piece:
    """Return the sum of slices, in slices where these are the same or do not overlap."""
    parts: dict[int, list[Piece]] = {}
    sizes: dict[int, int] = {}
    for use in uses:
        for start, part in use.parts.items():
            if sizes.setdefault(start, use.sizes[start]) != use.sizes[start]:
                return _formed(list(uses))
            parts.setdefault(start, []).append(part)
    ends = [(start, start + size) for start, size in sorted(sizes.items())]
    if any(end > start for (_, end), (start, _) in itertools.pairwise(ends)):
        return _formed(list(uses))
    return Sliced({start: summed(same) for start, same in parts.items()}, sizes, uses[0].numel)


def _factors_side_by_side(uses: list[Factored]) -> Factored:
    inputs = torch.cat([use.inputs for use in uses], 1)
    return Factored(inputs, torch.cat([use.deltas for use in uses], 2), uses[0].inputs_first)


def _indices_side_by_side(uses: list[Indexed]) -> Indexed:
    indices = torch.cat([use.indices for use in uses], 1)
    return Indexed(indices, torch.cat([use.deltas for use in uses], 2), uses[0].size)


@final
@dataclass(frozen=True)
class Tied(Piece):
    """G of a matrix (o, i) that inputs are multiplied by, and whose rows are looked up elsewhere."""

    matrix: Factored
    table: Indexed

    def own(self) -> Tensor:
        """Return G Gᵀ: those of the parts, and twice what they have in common."""
        cross = self._cross()
        return self.matrix.own() + self.table.own() + cross + cross.mT

    def _cross(self) -> Tensor:
        """Return the inner products of the two parts, Σ_ts δ_t[row_s] (a_t · ε_s), (n, d, d)."""
        inputs, deltas = self.matrix.inputs, self.matrix.deltas
        if self.matrix.inputs_first:
            inputs, deltas = deltas, inputs.unsqueeze(1)  # rows of the table are those of the inputs
            meeting = torch.einsum("ndti,nesi->ndtes", inputs, self.table.deltas)
            taken = self._taken(deltas).expand(-1, inputs.shape[1], -1, -1)
        else:
            meeting = torch.einsum("nti,nesi->ntes", inputs, self.table.deltas).unsqueeze(1)
            meeting = meeting.expand(-1, deltas.shape[1], -1, -1, -1)
            taken = self._taken(deltas)
        return torch.einsum("ndtes,ndts->nde", meeting.to(wide(meeting)), taken.to(wide(taken)))

    def _taken(self, values: Tensor) -> Tensor:
        """Return the entries of (n, d, t, rows) at the rows looked up, (n, d, t, s), 0 for none."""
        where = self.table.indices[:, None, None, :].expand(*values.shape[:3], -1)
        return values.gather(3, where.clamp(min=0)) * (where >= 0)

    def rows(self) -> Tensor:
        """Return G."""
        return self.matrix.rows() + self.table.rows()

    def pull(self, weights: Tensor) -> Tensor:
        """Return Σ Gᵀ w."""
        return self.matrix.pull(weights) + self.table.pull(weights)

    def push(self, directions: Tensor) -> Tensor:
        """Return G u."""
        return self.matrix.push(directions) + self.table.push(directions)

    def part(self, where: slice) -> "Tied":
        """Return the gradients of some of the samples."""
        return Tied(self.matrix.part(where), self.table.part(where))
