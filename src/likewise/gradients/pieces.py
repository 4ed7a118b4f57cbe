"""The gradient of one parameter for a batch, in the form in which it is cheapest.

Each piece stands for G, (n, d, numel), the gradients of d outputs of n samples, and answers about it
without forming it where that saves work: G Gᵀ of each sample, Σ Gᵀ w, G u, and G itself.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from likewise.linalg import product, split_product, wide


class Piece(ABC):
    """Gradients of one parameter."""

    @abstractmethod
    def own(self) -> Tensor:
        """Return G Gᵀ of each sample, (n, d, d)."""

    def to(self, dtype: torch.dtype) -> "Piece":
        """Return the same in another floating type."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        cast = {name: value.to(dtype) for name, value in values.items() if _is_floating(value)}
        if all(values[name] is value for name, value in cast.items()):
            return self
        return replace(self, **cast)  # type: ignore[type-var]

    @abstractmethod
    def rows(self) -> Tensor:
        """Return G, (n, d, numel)."""

    def write(self, out: Tensor) -> None:
        """Put G in its place, (n, d, numel)."""
        out.copy_(self.rows())

    @abstractmethod
    def pull(self, weights: Tensor) -> Tensor:
        """Return Σ Gᵀ w for weights (n, d, c), (c, numel)."""

    @abstractmethod
    def push(self, directions: Tensor) -> Tensor:
        """Return G u for directions (c, numel), (n, d, c)."""

    def part(self, where: slice) -> "Piece":
        """Return the gradients of some of the samples."""
        return Dense(self.rows()[where])


@final
@dataclass(frozen=True)
class Dense(Piece):
    """G itself."""

    gradients: Tensor  # (n, d, numel)

    def own(self) -> Tensor:
        """Return G Gᵀ of each sample."""
        return own_of(self.gradients)

    def rows(self) -> Tensor:
        """Return G."""
        return self.gradients

    def pull(self, weights: Tensor) -> Tensor:
        """Return Σ Gᵀ w."""
        return split_product(weights.flatten(0, 1).T, self.gradients.flatten(0, 1).T)

    def push(self, directions: Tensor) -> Tensor:
        """Return G u."""
        return product(self.gradients.flatten(0, 1), directions).unflatten(0, self.gradients.shape[:2])

    def part(self, where: slice) -> "Dense":
        """Return the gradients of some of the samples."""
        return Dense(self.gradients[where])


@final
@dataclass(frozen=True)
class Factored(Piece):
    """G = Σ_t δ_t a_tᵀ over positions t: a matrix that multiplies inputs a."""

    inputs: Tensor  # (n, t, i)
    deltas: Tensor  # (n, d, t, o)
    inputs_first: bool = False  # the parameter is (i, o) instead of (o, i)

    def own(self) -> Tensor:
        """Return G Gᵀ, from G or from the Gram matrices of positions, whichever takes less."""
        if self.deltas.shape[2] == 1:
            deltas = self.deltas[:, :, 0].to(wide(self.deltas))
            return deltas @ deltas.mT * _norms(self.inputs)
        if self._forms:
            return own_of(self._formed)
        return own_by_positions(self.inputs @ self.inputs.mT, self.deltas)

    @property
    def is_outer(self) -> bool:
        """Whether G is one outer product, larger than its factors."""
        _, d, t, o = self.deltas.shape
        i = self.inputs.shape[2]
        return t == 1 and d * i * o > i + d * o

    @property
    def _forms(self) -> bool:
        _, d, t, o = self.deltas.shape
        return t > 1 and forming_is_cheaper(d, t, self.inputs.shape[2], o)

    def rows(self) -> Tensor:
        """Return G."""
        return self._formed

    @cached_property
    def _formed(self) -> Tensor:
        inputs, deltas = self.inputs.unsqueeze(1), self.deltas
        product = inputs.mT @ deltas if self.inputs_first else deltas.mT @ inputs
        return product.flatten(2)

    def pull(self, weights: Tensor) -> Tensor:
        """Return Σ Gᵀ w: of G if it was formed, or one matrix product over samples and positions."""
        if "_formed" in self.__dict__:
            return Dense(self._formed).pull(weights)
        inputs, parts = self.inputs.flatten(0, 1), []
        for some in weights.split(columns_at_once(self.deltas[:, 0].numel()), dim=2):
            deltas = torch.einsum("ndc,ndto->cnto", some, self.deltas).flatten(1, 2)
            sides = (inputs.T, deltas.mT) if self.inputs_first else (deltas.mT, inputs.T)
            parts.append(split_product(*sides).flatten(1))
        return joined(parts, 0)

    def push(self, directions: Tensor) -> Tensor:
        """Return G u = Σ_t δ_t · (u a_t)."""
        n, _, t, o = self.deltas.shape
        i = self.inputs.shape[2]
        inputs, deltas, parts = self.inputs.flatten(0, 1), self.deltas.flatten(2), []
        for some in directions.split(columns_at_once(n * t * o)):
            side_by_side = some.view(-1, i, o) if self.inputs_first else some.view(-1, o, i).mT
            moved = inputs @ side_by_side.transpose(0, 1).flatten(1)  # one product for all directions
            parts.append(product(deltas, moved.view(n, t, -1, o).transpose(1, 2).flatten(2)))
        return joined(parts, 2)

    def part(self, where: slice) -> "Factored":
        """Return the gradients of some of the samples."""
        return Factored(self.inputs[where], self.deltas[where], self.inputs_first)


@final
@dataclass(frozen=True)
class Indexed(Piece):
    """G of a table of which position t takes row index_t: an embedding."""

    indices: Tensor  # (n, t), -1 where no gradient flows
    deltas: Tensor  # (n, d, t, o)
    size: int  # rows of the table

    def own(self) -> Tensor:
        """Return G Gᵀ: positions that take the same row meet."""
        same = (self.indices[:, :, None] == self.indices[:, None, :]) & (self.indices >= 0)[:, :, None]
        return own_by_positions(same.to(self.deltas), self.deltas)

    def rows(self) -> Tensor:
        """Return G, mostly zeros."""
        n, d, _, o = self.deltas.shape
        found = self.deltas.new_zeros(n, d, self.size + 1, o)
        where = (self.indices % (self.size + 1))[:, None, :, None].expand_as(self.deltas)
        return found.scatter_add(2, where, self.deltas)[:, :, : self.size].flatten(2)

    def pull(self, weights: Tensor) -> Tensor:
        """Return Σ Gᵀ w."""
        where, parts = (self.indices % (self.size + 1)).flatten(), []
        for some in weights.split(columns_at_once(self.deltas[:, 0].numel()), dim=2):
            deltas = torch.einsum("ndc,ndto->cnto", some, self.deltas).flatten(1, 2)
            total = deltas.new_zeros(len(deltas), self.size + 1, deltas.shape[2])
            parts.append(total.index_add(1, where, deltas)[:, : self.size].flatten(1))
        return torch.cat(parts)

    def push(self, directions: Tensor) -> Tensor:
        """Return G u: the rows taken from u."""
        table = directions.view(len(directions), self.size, -1)
        known, parts = (self.indices >= 0)[None, :, :, None], []
        for some in table.split(columns_at_once(self.deltas[:, 0].numel())):
            taken = some[:, self.indices.clamp(min=0)] * known
            parts.append(product(self.deltas.flatten(2), taken.transpose(0, 1).flatten(2)))
        return joined(parts, 2)

    def part(self, where: slice) -> "Indexed":
        """Return the gradients of some of the samples."""
        return Indexed(self.indices[where], self.deltas[where], self.size)


@final
@dataclass(frozen=True)
class Sliced(Piece):
    """G of which some consecutive numbers are pieces of their own, and the rest is 0."""

    parts: dict[int, Piece]  # by where they start; no two overlap
    sizes: dict[int, int]
    numel: int

    def to(self, dtype: torch.dtype) -> "Sliced":
        """Return the same in another floating type."""
        return Sliced({start: part.to(dtype) for start, part in self.parts.items()}, self.sizes, self.numel)

    def own(self) -> Tensor:
        """Return G Gᵀ."""
        return torch.stack([part.own() for part in self.parts.values()]).sum(0)

    def rows(self) -> Tensor:
        """Return G."""
        rows = {start: part.rows() for start, part in self.parts.items()}
        first = next(iter(rows.values()))
        found = first.new_zeros(*first.shape[:2], self.numel)
        for start, value in rows.items():
            found[:, :, start : start + self.sizes[start]] = value
        return found

    def pull(self, weights: Tensor) -> Tensor:
        """Return Σ Gᵀ w."""
        pulled = {start: part.pull(weights) for start, part in self.parts.items()}
        first = next(iter(pulled.values()))
        found = first.new_zeros(len(first), self.numel)
        for start, value in pulled.items():
            found[:, start : start + self.sizes[start]] = value
        return found

    def push(self, directions: Tensor) -> Tensor:
        """Return G u."""
        moved = [
            part.push(directions[:, start : start + self.sizes[start]]) for start, part in self.parts.items()
        ]
        return torch.stack(moved).sum(0)

    def transposed(self) -> "Sliced":
        """Return the same of a stack of matrices, one in each part, that are transposed."""
        parts = {start: _transposed(part) for start, part in self.parts.items()}
        return Sliced(parts, self.sizes, self.numel)


@final
@dataclass(frozen=True)
class Subset(Piece):
    """G of which only some samples are not 0."""

    samples: Tensor  # (m,) their places
    piece: Piece  # of these
    n: int  # samples in all

    def own(self) -> Tensor:
        """Return G Gᵀ."""
        return self._spread(self.piece.own())

    def rows(self) -> Tensor:
        """Return G."""
        return self._spread(self.piece.rows())

    def pull(self, weights: Tensor) -> Tensor:
        """Return Σ Gᵀ w."""
        return self.piece.pull(weights[self.samples.to(weights.device)])

    def push(self, directions: Tensor) -> Tensor:
        """Return G u."""
        return self._spread(self.piece.push(directions))

    def _spread(self, value: Tensor) -> Tensor:
        empty = value.new_zeros(self.n, *value.shape[1:])
        return empty.index_copy(0, self.samples.to(value.device), value)


def _transposed(piece: Piece) -> Piece:
    if isinstance(piece, Subset):
        return Subset(piece.samples, _transposed(piece.piece), piece.n)
    assert isinstance(piece, Factored)
    return Factored(piece.inputs, piece.deltas, not piece.inputs_first)


def _is_floating(value: Any) -> bool:
    return isinstance(value, Piece) or (isinstance(value, Tensor) and value.is_floating_point())


def forming_is_cheaper(d: int, t: int, i: int, o: int) -> bool:
    """Whether G Gᵀ takes less from G than from Gram matrices of its t positions."""
    by_positions = t * t * (i + d * d * o)
    by_forming = d * t * i * o + d * d * i * o
    return by_forming <= by_positions


def joined(parts: list[Tensor], dim: int) -> Tensor:
    """Return parts as one, without a copy where there is but one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def columns_at_once(numel: int) -> int:
    """Return how many columns of weights to take together, at so many numbers each: about 64 MiB."""
    return max(1, 2**24 // max(1, numel))


def own_of(gradients: Tensor) -> Tensor:
    """Return G Gᵀ of each sample, for G (n, d, numel)."""
    if gradients.shape[1] == 1:
        return _norms(gradients)
    exact = gradients.to(wide(gradients))
    return exact @ exact.mT


def _norms(tensor: Tensor) -> Tensor:
    """Return the squared norm of each sample, (n, 1, 1): short runs as they are, their sum in float64."""
    run = math.gcd(tensor[0].numel(), 4096)
    if run >= 32 and tensor.is_contiguous():
        parts = torch.linalg.vector_norm(tensor.view(len(tensor), -1, run), dim=2, keepdim=True)
        return parts.to(wide(parts)).square().sum(1, keepdim=True)
    return torch.linalg.vector_norm(tensor, dim=(1, 2), keepdim=True, dtype=wide(tensor)).square()


def own_by_positions(inputs: Tensor, deltas: Tensor) -> Tensor:
    """Return Σ_ts (a_t·a_s)(δ_t·δ_s) for each pair of outputs, given a_t·a_s (n, t, t)."""
    n, d, t, _ = deltas.shape
    if d == 1:
        flat = deltas[:, 0]
        return (inputs * (flat @ flat.mT)).sum((1, 2), keepdim=True, dtype=wide(flat))
    flat = deltas.flatten(1, 2).to(wide(deltas))
    pairs = (flat @ flat.mT).view(n, d, t, d, t)
    return torch.einsum("ndtes,nts->nde", pairs, inputs.to(pairs))
