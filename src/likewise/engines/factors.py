"""The gradients of one parameter for a batch, in the form in which they are cheapest.

A ParameterGradient stands for G, (n, d, numel), the gradients of d outputs of n samples. It computes G Gᵀ of each
sample, Σ Gᵀ w, G u and G itself, from factors where that is cheaper than from the dense tensor.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from likewise.linalg import SHORT_RUN, accumulation_dtype, columns_in_cache, product, split_product

COPIES = 3  # of a sum over samples, in numbers of the compute dtype: with its copy in float64


class ParameterGradient(ABC):
    """Gradients of one parameter, G, (n, d, numel)."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The floating type of G."""

    @property
    def tensors(self) -> list[Tensor]:
        """The floating tensors that G is computed from, in the order in which `tangent` takes their derivatives."""
        return [self.rows()]

    def tangent(self, derivatives: Iterator[Tensor]) -> "ParameterGradient":
        """Return the derivative of G, given those of `tensors`, by the product rule."""
        return DenseGradient(next(derivatives))

    @property
    def kind(self) -> Any:
        """Gradients of the same kind can be concatenated along positions."""
        return type(self)

    @abstractmethod
    def self_gram(self) -> Tensor:
        """Return G Gᵀ of each sample, (n, d, d)."""

    def to(self, dtype: torch.dtype) -> "ParameterGradient":
        """Return the same gradients in another floating type."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        cast = {name: value.to(dtype) for name, value in values.items() if _is_floating(value)}
        if all(values[name] is value for name, value in cast.items()):
            return self
        return replace(self, **cast)  # type: ignore[type-var]

    @abstractmethod
    def rows(self) -> Tensor:
        """Return G, (n, d, numel)."""

    def write(self, out: Tensor) -> None:
        """Write G to `out`, (n, d, numel)."""
        out.copy_(self.rows())

    @abstractmethod
    def vjp(self, weights: Tensor) -> Tensor:
        """Return Σ Gᵀ w for weights (n, d, c), (c, numel)."""

    @abstractmethod
    def jvp(self, directions: Tensor) -> Tensor:
        """Return G u for directions (c, numel), (n, d, c)."""

    @property
    @abstractmethod
    def column_entries(self) -> int:
        """Numbers that `vjp` and `jvp` take for a column of weights, or a direction, the sum over samples included."""

    def column_groups(self, c: int, max_bytes: int) -> Iterator[slice]:
        """Yield some of c columns of weights, or directions, at a time: as many as products have bytes for."""
        size = max(1, max_bytes // max(1, self.column_entries * self.dtype.itemsize))
        for start in range(0, c, size):
            yield slice(start, min(start + size, c))

    @property
    def rows_serve_columns(self) -> bool:
        """Whether several columns of weights cost less from G, formed for a few samples at a time."""
        return True

    def part(self, where: slice | Tensor) -> "ParameterGradient":
        """Return the gradients of some of the samples: of a slice, or at places, (k,), which copies them."""
        return DenseGradient(self.rows()[where])

    def blocks(self) -> Iterator["ParameterGradient"]:
        """Yield the gradients of consecutive samples; of few at a time where G would leave a CPU's cache."""
        yield self

    def permute(self, shape: Sequence[int], order: Sequence[int]) -> "ParameterGradient":
        """Return the gradients of a permuted view of the parameter.

        Args:
            shape: Of the parameter.
            order: Of its dimensions in the view, the slowest first.

        """
        rows = self.rows()
        shaped = rows.reshape(*rows.shape[:2], *shape)
        return DenseGradient(shaped.permute(0, 1, *(i + 2 for i in order)).flatten(2))

    def paired_gram(self, n: int) -> Tensor:
        """Return J(x) J(x')ᵀ of the first n samples with the next n, (n, d, d)."""
        rows = self.rows()
        return rows[:n] @ rows[n:].mT

    def joint_gram(self) -> Tensor:
        """Return G Gᵀ of all samples with all others, (n·d, n·d), in the accumulation type."""
        return gram_from_rows(self.rows().flatten(0, 1)[None])[0]

    def project_two_sided(self, left: Tensor, right: Tensor) -> Tensor:
        """Return Lᵀ G R, (n, d, blocks, k, l), of G as matrices; where factors cost less, G is not formed.

        Args:
            left: (blocks, rows, k), rows of the parameter's first dimension.
            right: (blocks, columns, l), columns of all its other dimensions together.

        """
        rows = self.rows().to(left.dtype)
        if right.shape[1] == 1:  # a vector: one product for all blocks
            projected = project_last(rows.unsqueeze(2), left)[:, :, 0]  # (n, d, blocks, k)
            return projected.unsqueeze(4) * right
        matrices = rows.reshape(*rows.shape[:2], left.shape[1], right.shape[1])
        return sum_positions(left.transpose(0, 1)[None, None], project_last(matrices, right))


class StructuredGradient(ParameterGradient):
    """G as factors over positions, whose sums over samples are factors over more positions."""

    @property
    def is_dense(self) -> bool:
        """Whether G was computed already, so that using it costs nothing."""
        return False

    @property
    def rows_are_cheaper(self) -> bool:
        """Whether ‖G‖² costs less from G than from pairs of positions."""
        return False

    @abstractmethod
    def whiten(self, roots: Tensor) -> "StructuredGradient":
        """Return K(x, x)^-½ G, given the roots K(x, x)^-½, (n, d, d)."""

    @abstractmethod
    def group(self, places: Tensor) -> "StructuredGradient":
        """Return Σ G over the samples of each group, given their places (groups, size); samples are the groups."""


@final
@dataclass(frozen=True)
class DenseGradient(ParameterGradient):
    """G as a dense tensor."""

    gradients: Tensor  # (n, d, numel)

    @property
    def dtype(self) -> torch.dtype:
        """The floating type of G."""
        return self.gradients.dtype

    def self_gram(self) -> Tensor:
        """Return G Gᵀ of each sample."""
        return gram_from_rows(self.gradients)

    def rows(self) -> Tensor:
        """Return G."""
        return self.gradients

    def vjp(self, weights: Tensor) -> Tensor:
        """Return Σ Gᵀ w."""
        return split_product(weights.flatten(0, 1).T, self.gradients.flatten(0, 1).T)

    def jvp(self, directions: Tensor) -> Tensor:
        """Return G u."""
        return product(self.gradients.flatten(0, 1), directions).unflatten(0, self.gradients.shape[:2])

    @property
    def column_entries(self) -> int:
        """Numbers that a column takes: a sum, and products of each run of entries."""
        n, d, numel = self.gradients.shape
        return COPIES * numel + n * d * numel // SHORT_RUN

    def part(self, where: slice | Tensor) -> "DenseGradient":
        """Return the gradients of some of the samples: of a slice, or at places, (k,), which copies them."""
        return DenseGradient(self.gradients[where])


@final
@dataclass(frozen=True)
class FactoredGradient(StructuredGradient):
    """G = Σ_t δ_t a_tᵀ over positions t: a matrix that multiplies inputs a."""

    inputs: Tensor  # (n, t, i)
    deltas: Tensor  # (n, d, t, o)
    inputs_first: bool = False  # the parameter is (i, o) instead of (o, i)

    @property
    def dtype(self) -> torch.dtype:
        """The floating type of G."""
        return self.deltas.dtype

    @property
    def tensors(self) -> list[Tensor]:
        """Inputs and output gradients."""
        return [self.inputs, self.deltas]

    def tangent(self, derivatives: Iterator[Tensor]) -> "FactoredGradient":
        """Return Σ_t δ_t a'_tᵀ + δ'_t a_tᵀ: twice as many positions."""
        inputs, deltas = next(derivatives), next(derivatives)
        both = torch.cat([self.inputs, inputs], 1), torch.cat([deltas, self.deltas], 2)
        return FactoredGradient(*both, self.inputs_first)

    @property
    def kind(self) -> Any:
        """Gradients of the same kind can be concatenated along positions."""
        return type(self), self.inputs_first

    @property
    def is_dense(self) -> bool:
        """Whether G was computed already."""
        return "_dense" in self.__dict__

    def self_gram(self) -> Tensor:
        """Return G Gᵀ, from G or from the Gram matrices of positions, whichever is cheaper."""
        if self.deltas.shape[2] == 1:
            deltas = self.deltas[:, :, 0].to(accumulation_dtype(self.deltas))
            return deltas @ deltas.mT * squared_norms(self.inputs)
        if self.is_dense or self._dense_is_cheaper:
            return gram_from_rows(self._dense)
        return gram_from_positions(self.inputs @ self.inputs.mT, self.deltas)

    @property
    def is_outer(self) -> bool:
        """Whether G is one outer product, larger than its factors."""
        _, d, t, o = self.deltas.shape
        i = self.inputs.shape[2]
        return t == 1 and d * i * o > i + d * o

    @property
    def _dense_is_cheaper(self) -> bool:
        _, d, t, o = self.deltas.shape
        return t > 1 and dense_is_cheaper(d, t, self.inputs.shape[2], o)

    def rows(self) -> Tensor:
        """Return G."""
        return self._dense

    @cached_property
    def _dense(self) -> Tensor:
        inputs, deltas = self.inputs.unsqueeze(1), self.deltas
        product = inputs.mT @ deltas if self.inputs_first else deltas.mT @ inputs
        return product.flatten(2)

    def vjp(self, weights: Tensor) -> Tensor:
        """Return Σ Gᵀ w, from G if it is dense already, else by one matrix product over samples and positions."""
        if self.is_dense:
            return DenseGradient(self._dense).vjp(weights)
        inputs = self.inputs.flatten(0, 1)
        deltas = torch.einsum("ndc,ndto->cnto", weights, self.deltas).flatten(1, 2)
        sides = (inputs.T, deltas.mT) if self.inputs_first else (deltas.mT, inputs.T)
        return split_product(*sides).flatten(1)

    def jvp(self, directions: Tensor) -> Tensor:
        """Return G u = Σ_t δ_t · (u a_t), or from G if it is dense already."""
        n, d, t, o = self.deltas.shape
        if self.is_dense and d <= t:
            return DenseGradient(self._dense).jvp(directions)
        i = self.inputs.shape[2]
        matrices = directions.view(-1, i, o) if self.inputs_first else directions.view(-1, o, i).mT
        # one product for all directions
        transformed = self.inputs.flatten(0, 1) @ matrices.transpose(0, 1).flatten(1)
        by_direction = transformed.view(n, t, -1, o).transpose(1, 2).flatten(2)
        return product(self.deltas.flatten(2), by_direction)

    @property
    def column_entries(self) -> int:
        """Numbers that a column takes: a sum, and output gradients of one output in two orders."""
        return COPIES * self.inputs.shape[2] * self.deltas.shape[3] + 2 * self.deltas[:, 0].numel()

    @property
    def rows_serve_columns(self) -> bool:
        """Whether several columns of weights cost less from G: not of outer products."""
        return self.deltas.shape[2] > 1

    def part(self, where: slice | Tensor) -> "FactoredGradient":
        """Return the gradients of some of the samples: of a slice, or at places, (k,), which copies them."""
        return FactoredGradient(self.inputs[where], self.deltas[where], self.inputs_first)

    def permute(self, shape: Sequence[int], order: Sequence[int]) -> ParameterGradient:
        """Return the gradients of the transposed matrix; any other view is dense."""
        if len(shape) == 2:
            return FactoredGradient(self.inputs, self.deltas, not self.inputs_first)
        return super().permute(shape, order)

    def project_two_sided(self, left: Tensor, right: Tensor) -> Tensor:
        """Return Lᵀ G R = Σ_t (Lᵀ δ_t) (Rᵀ a_t)ᵀ."""
        wanted = (self.inputs.shape[2], self.deltas.shape[3])
        if (left.shape[1], right.shape[1]) != (wanted if self.inputs_first else wanted[::-1]):
            return super().project_two_sided(left, right)  # the matrix is a view of the parameter
        _, d, t, o = self.deltas.shape
        i = self.inputs.shape[2]
        if self.is_dense and d * o * i < t * (i + d * o):
            return super().project_two_sided(left, right)
        of_inputs, of_deltas = (left, right) if self.inputs_first else (right, left)
        inputs = project_last(self.inputs.unsqueeze(1), of_inputs)  # (n, 1, t, blocks, k)
        deltas = project_last(self.deltas, of_deltas)
        return sum_positions(*((inputs, deltas) if self.inputs_first else (deltas, inputs)))

    def paired_gram(self, n: int) -> Tensor:
        """Return J(x) J(x')ᵀ of the first n samples with the next n, from positions where that is cheaper."""
        a, b, delta, other = self.inputs[:n], self.inputs[n:], self.deltas[:n], self.deltas[n:]
        _, d, t, o = delta.shape
        if t * t * (a.shape[2] + d * d * o) < d * a.shape[2] * o * (2 * t + d):
            return torch.einsum("nts,ndto,neso->nde", a @ b.mT, delta, other)
        return super().paired_gram(n)

    def joint_gram(self) -> Tensor:
        """Return G Gᵀ of all samples with all others, from positions where that is cheaper."""
        n, d, t, o = self.deltas.shape
        i = self.inputs.shape[2]
        by_positions = (n * t) ** 2 * (i + d * o) + (n * d) ** 2 * t * o
        if self.is_dense or n * d * i * o * (t + n * d) <= by_positions:
            return super().joint_gram()
        in_float64 = by_positions <= FEW_MULTIPLICATIONS
        dtype = (
            accumulation_dtype(self.deltas) if in_float64 else torch.promote_types(self.dtype, torch.float32)
        )
        inputs, deltas = self.inputs.flatten(0, 1).to(dtype), self.deltas.to(dtype)
        found = _joint_gram_of_positions(inputs @ inputs.mT, deltas)
        return super().joint_gram() if found is None else found

    def whiten(self, roots: Tensor) -> "FactoredGradient":
        """Return K(x, x)^-½ G; inputs are scaled too: large ones meet small roots, neither may overflow."""
        scale = self.inputs.detach().abs().amax((1, 2), keepdim=True).to(roots)
        scale = torch.where(scale > 0, scale, 1)
        weights = (roots * scale).to(self.deltas.dtype)
        deltas = (weights @ self.deltas.flatten(2)).view_as(self.deltas)
        return FactoredGradient(self.inputs / scale.to(self.inputs.dtype), deltas, self.inputs_first)

    def group(self, places: Tensor) -> "FactoredGradient":
        """Return Σ G over the samples of each group."""
        inputs = self.inputs[places].flatten(1, 2)
        return FactoredGradient(inputs, _group_deltas(self.deltas, places), self.inputs_first)


@final
@dataclass(frozen=True)
class EmbeddingGradient(StructuredGradient):
    """G of an embedding table: position t looks up row index_t."""

    indices: Tensor  # (n, t), -1 where no gradient flows
    deltas: Tensor  # (n, d, t, o)
    size: int  # rows of the table

    @property
    def dtype(self) -> torch.dtype:
        """The floating type of G."""
        return self.deltas.dtype

    @property
    def tensors(self) -> list[Tensor]:
        """The output gradients; indices have no derivative."""
        return [self.deltas]

    def tangent(self, derivatives: Iterator[Tensor]) -> "EmbeddingGradient":
        """Return the derivative of G."""
        return EmbeddingGradient(self.indices, next(derivatives), self.size)

    @property
    def rows_are_cheaper(self) -> bool:
        """Whether the table has fewer entries than there are pairs of positions."""
        t, o = self.deltas.shape[2:]
        return t * t > self.size * o

    def self_gram(self) -> Tensor:
        """Return G Gᵀ, a sum over pairs of positions that look up the same row."""
        same = (self.indices[:, :, None] == self.indices[:, None, :]) & (self.indices >= 0)[:, :, None]
        return gram_from_positions(same.to(self.deltas), self.deltas)

    def rows(self) -> Tensor:
        """Return G, mostly zeros."""
        n, d, _, o = self.deltas.shape
        rows = self.deltas.new_zeros(n, d, self.size + 1, o)
        where = (self.indices % (self.size + 1))[:, None, :, None].expand_as(self.deltas)
        return rows.scatter_add(2, where, self.deltas)[:, :, : self.size].flatten(2)

    def vjp(self, weights: Tensor) -> Tensor:
        """Return Σ Gᵀ w."""
        where = (self.indices % (self.size + 1)).flatten()
        deltas = torch.einsum("ndc,ndto->cnto", weights, self.deltas).flatten(1, 2)
        total = deltas.new_zeros(len(deltas), self.size + 1, deltas.shape[2])
        return total.index_add_(1, where, deltas)[:, : self.size].flatten(1)

    def jvp(self, directions: Tensor) -> Tensor:
        """Return G u, from the rows of u that are looked up."""
        table = directions.view(len(directions), self.size, -1)
        known = (self.indices >= 0)[None, :, :, None]
        gathered = table[:, self.indices.clamp(min=0)] * known
        return product(self.deltas.flatten(2), gathered.transpose(0, 1).flatten(2))

    @property
    def column_entries(self) -> int:
        """Numbers that a column takes: a table, and output gradients of one output in two orders."""
        return COPIES * (self.size + 1) * self.deltas.shape[3] + 2 * self.deltas[:, 0].numel()

    @property
    def rows_serve_columns(self) -> bool:
        """Whether several columns of weights cost less from G: not of a table, whose G is mostly zeros."""
        return False

    def project_two_sided(self, left: Tensor, right: Tensor) -> Tensor:
        """Return Lᵀ G R, from the rows of L that are looked up."""
        if (left.shape[1], right.shape[1]) != (self.size, self.deltas.shape[3]):
            return super().project_two_sided(left, right)  # the table is a view of the parameter
        deltas = project_last(self.deltas, right)
        known = (self.indices >= 0)[:, :, None, None]
        looked_up = left.transpose(0, 1)[self.indices.clamp(min=0)] * known  # (n, t, blocks, k)
        return sum_positions(looked_up.to(deltas.dtype).unsqueeze(1), deltas)

    def part(self, where: slice | Tensor) -> "EmbeddingGradient":
        """Return the gradients of some of the samples: of a slice, or at places, (k,), which copies them."""
        return EmbeddingGradient(self.indices[where], self.deltas[where], self.size)

    def whiten(self, roots: Tensor) -> "EmbeddingGradient":
        """Return K(x, x)^-½ G."""
        deltas = (roots.to(self.deltas.dtype) @ self.deltas.flatten(2)).view_as(self.deltas)
        return EmbeddingGradient(self.indices, deltas, self.size)

    def group(self, places: Tensor) -> "EmbeddingGradient":
        """Return Σ G over the samples of each group."""
        return EmbeddingGradient(
            self.indices[places].flatten(1), _group_deltas(self.deltas, places), self.size
        )


@final
@dataclass(frozen=True)
class SlicedGradient(ParameterGradient):
    """G that is 0 outside of some contiguous slices of the parameter, each with its own gradient."""

    parts: dict[int, ParameterGradient]  # by first entry; slices do not overlap
    sizes: dict[int, int]
    numel: int

    @property
    def dtype(self) -> torch.dtype:
        """The floating type of G."""
        return next(iter(self.parts.values())).dtype

    def to(self, dtype: torch.dtype) -> "SlicedGradient":
        """Return the same gradients in another floating type."""
        return SlicedGradient(
            {start: part.to(dtype) for start, part in self.parts.items()}, self.sizes, self.numel
        )

    def self_gram(self) -> Tensor:
        """Return G Gᵀ."""
        return torch.stack([part.self_gram() for part in self.parts.values()]).sum(0)

    def rows(self) -> Tensor:
        """Return G."""
        rows = {start: part.rows() for start, part in self.parts.items()}
        first = next(iter(rows.values()))
        total = first.new_zeros(*first.shape[:2], self.numel)
        for start, value in rows.items():
            total[:, :, start : start + self.sizes[start]] = value
        return total

    def vjp(self, weights: Tensor) -> Tensor:
        """Return Σ Gᵀ w."""
        sums = {start: part.vjp(weights) for start, part in self.parts.items()}
        first = next(iter(sums.values()))
        total = first.new_zeros(len(first), self.numel)
        for start, value in sums.items():
            total[:, start : start + self.sizes[start]] = value
        return total

    def jvp(self, directions: Tensor) -> Tensor:
        """Return G u."""
        transformed = [
            part.jvp(directions[:, start : start + self.sizes[start]]) for start, part in self.parts.items()
        ]
        return torch.stack(transformed).sum(0)

    @property
    def column_entries(self) -> int:
        """Numbers that a column takes: a sum, and those of the largest slice."""
        return COPIES * self.numel + max(part.column_entries for part in self.parts.values())

    def project_two_sided(self, left: Tensor, right: Tensor) -> Tensor:
        """Return Lᵀ G R, of slices that consist of whole rows without forming G."""
        columns = right.shape[1]
        if any(start % columns or self.sizes[start] % columns for start in self.parts):
            return super().project_two_sided(left, right)
        projected = [
            part.project_two_sided(left[:, start // columns : (start + self.sizes[start]) // columns], right)
            for start, part in self.parts.items()
        ]
        return torch.stack(projected).sum(0)

    def permute(self, shape: Sequence[int], order: Sequence[int]) -> ParameterGradient:
        """Return the gradients of a stack of transposed matrices, one a slice; any other view is dense."""
        if tuple(order) == (0, 2, 1):
            parts = {start: part.permute(shape[1:], (1, 0)) for start, part in self.parts.items()}
            return SlicedGradient(parts, self.sizes, self.numel)
        return super().permute(shape, order)


@final
@dataclass(frozen=True)
class SubsetGradient(ParameterGradient):
    """G that is 0 for all but some samples."""

    samples: Tensor  # (m,) places of these samples
    gradient: ParameterGradient  # of the m samples
    n: int  # samples in all

    @property
    def dtype(self) -> torch.dtype:
        """The floating type of G."""
        return self.gradient.dtype

    def self_gram(self) -> Tensor:
        """Return G Gᵀ."""
        return self._spread(self.gradient.self_gram())

    def rows(self) -> Tensor:
        """Return G."""
        return self._spread(self.gradient.rows())

    def vjp(self, weights: Tensor) -> Tensor:
        """Return Σ Gᵀ w."""
        return self.gradient.vjp(weights[self.samples.to(weights.device)])

    def jvp(self, directions: Tensor) -> Tensor:
        """Return G u."""
        return self._spread(self.gradient.jvp(directions))

    @property
    def column_entries(self) -> int:
        """Numbers that a column takes."""
        return self.gradient.column_entries

    @property
    def rows_serve_columns(self) -> bool:
        """Whether several columns of weights cost less from G: rows of all samples are mostly zeros."""
        return False

    def project_two_sided(self, left: Tensor, right: Tensor) -> Tensor:
        """Return Lᵀ G R."""
        return self._spread(self.gradient.project_two_sided(left, right))

    def permute(self, shape: Sequence[int], order: Sequence[int]) -> "SubsetGradient":
        """Return the gradients of a permuted view of the parameter."""
        return SubsetGradient(self.samples, self.gradient.permute(shape, order), self.n)

    def _spread(self, value: Tensor) -> Tensor:
        empty = value.new_zeros(self.n, *value.shape[1:])
        return empty.index_copy(0, self.samples.to(value.device), value)


FEW_MULTIPLICATIONS = 2**28  # of products of positions: in float64 these take about a hundredth of a second
MOST_CANCELLATION = 512  # of terms over their sum, where these are products in the compute dtype
SMALL = 4096  # entries of a parameter whose dense gradients are concatenated with those of others


class Block(NamedTuple):
    """The gradients of some parameters, concatenated."""

    names: tuple[str, ...]
    gradient: ParameterGradient


def merge_small(by_parameter: dict[str, ParameterGradient]) -> list[Block]:
    """Return gradients with small dense ones concatenated: one large operation is faster than many small ones."""
    small = {
        name: gradient.gradients
        for name, gradient in by_parameter.items()
        if isinstance(gradient, DenseGradient) and gradient.gradients.shape[2] <= SMALL
    }
    if len(small) < 2:
        return [Block((name,), gradient) for name, gradient in by_parameter.items()]
    blocks = [Block((name,), gradient) for name, gradient in by_parameter.items() if name not in small]
    return [*blocks, Block(tuple(small), DenseGradient(torch.cat(list(small.values()), 2)))]


def resize_outputs(
    gradient: ParameterGradient, d: int, convert: Callable[[Tensor], Tensor]
) -> ParameterGradient:
    """Return a gradient of the same structure for d outputs, of other values, to count its memory.

    Args:
        gradient: Of any number of outputs.
        d: The number of outputs.
        convert: Applied to all tensors, for example to such without memory.

    """

    def resize(value: Tensor) -> Tensor:
        return convert(value).new_zeros(value.shape[0], d, *value.shape[2:])

    return _map_tensors(gradient, resize, convert)


def combine_outputs(gradient: ParameterGradient, u: Tensor) -> ParameterGradient:
    """Return the gradients of combinations of outputs, U G, in the same structure, for u (..., combinations, d)."""

    def combine(value: Tensor) -> Tensor:
        return (u.to(value) @ value.flatten(2)).reshape(len(value), u.shape[-2], *value.shape[2:])

    return _map_tensors(gradient, combine)


def map_tensors(gradient: ParameterGradient, convert: Callable[[Tensor], Tensor]) -> ParameterGradient:
    """Return a gradient of the same structure, of converted tensors."""
    return _map_tensors(gradient, convert, convert)


def _map_tensors(
    gradient: ParameterGradient,
    of_outputs: Callable[[Tensor], Tensor],
    others: Callable[[Tensor], Tensor] | None = None,
) -> ParameterGradient:
    """Return a gradient of the same structure, given what becomes of tensors (n, d, ...) and of all others."""
    named = ((field.name, getattr(gradient, field.name)) for field in fields(gradient))  # type: ignore[arg-type]
    values = {name: _convert(name, value, of_outputs, others) for name, value in named}
    return replace(gradient, **values)  # type: ignore[type-var]


def _convert(
    name: str,
    value: Any,
    of_outputs: Callable[[Tensor], Tensor],
    others: Callable[[Tensor], Tensor] | None,
) -> Any:
    """Return a field of a gradient with converted tensors."""
    if isinstance(value, ParameterGradient):
        return _map_tensors(value, of_outputs, others)
    if isinstance(value, dict):
        return {key: _convert(name, part, of_outputs, others) for key, part in value.items()}
    if not isinstance(value, Tensor):
        return value
    if name in ("deltas", "gradients"):
        return of_outputs(value)
    return value if others is None else others(value)


def copy_gradient(gradient: ParameterGradient, known: dict[int, ParameterGradient]) -> ParameterGradient:
    """Return a gradient of the same tensors and with what was computed of it; what is computed later is not shared.

    Args:
        gradient: The gradient.
        known: Copies that were made already, by the id of what they are copies of.

    """
    if id(gradient) in known:
        return known[id(gradient)]
    copied = known[id(gradient)] = copy(gradient)
    for name, value in vars(gradient).items():
        if isinstance(value, ParameterGradient):
            vars(copied)[name] = copy_gradient(value, known)
        elif isinstance(value, dict):
            vars(copied)[name] = {
                key: copy_gradient(part, known) if isinstance(part, ParameterGradient) else part
                for key, part in value.items()
            }
    return copied


def describe_shapes(gradient: ParameterGradient) -> str:
    """Return the same text for gradients of the same structure, whatever their values."""

    def describe(value: Any) -> str:
        if isinstance(value, ParameterGradient):
            return describe_shapes(value)
        if isinstance(value, dict):
            return str([(key, describe(part)) for key, part in value.items()])
        return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else str(value)

    values = (describe(getattr(gradient, field.name)) for field in fields(gradient))  # type: ignore[arg-type]
    return f"{type(gradient).__name__}({', '.join(values)})"


def _group_deltas(deltas: Tensor, places: Tensor) -> Tensor:
    """Return output gradients (groups, d, size · t, o) of samples (groups, size) with t positions each."""
    return deltas[places].transpose(1, 2).flatten(2, 3)


def project_last(values: Tensor, maps: Tensor) -> Tensor:
    """Return values (n, d, t, size) by maps (blocks, size, k), (n, d, t, blocks, k), in float32 or wider."""
    joined = maps.transpose(0, 1).flatten(1).to(values.dtype)  # one product for all blocks
    projected = values @ joined
    wide = projected.to(torch.promote_types(projected.dtype, torch.float32))
    return wide.unflatten(3, (maps.shape[0], maps.shape[2]))


def sum_positions(left: Tensor, right: Tensor) -> Tensor:
    """Return Σ_t l_t r_tᵀ of each block, (n, d, blocks, k, l), given (n, d or 1, t, blocks, k) and (..., l)."""
    if left.device.type == "cpu":
        return left.permute(0, 1, 3, 4, 2) @ right.transpose(2, 3)
    return sum_pairs_of_blocks(left, right)


def sum_pairs_of_blocks(left: Tensor, right: Tensor) -> Tensor:
    """Return the same from all pairs of blocks: one large product, where copies and many small ones take longer."""
    pairs = left.flatten(3).mT @ right.flatten(3)
    blocks = pairs.unflatten(3, right.shape[3:]).unflatten(2, left.shape[3:])  # (n, d, blocks, k, blocks, l)
    return blocks.diagonal(dim1=2, dim2=4).movedim(-1, 2)


def _is_floating(value: Any) -> bool:
    return isinstance(value, ParameterGradient) or (isinstance(value, Tensor) and value.is_floating_point())


def dense_is_cheaper(d: int, t: int, i: int, o: int) -> bool:
    """Whether G Gᵀ is cheaper from G than from Gram matrices of its t positions."""
    by_positions = t * t * (i + d * o) + (d * d * t * o if d > 1 else 0)
    by_rows = d * t * i * o + d * d * i * o
    return by_rows <= by_positions


def concatenate(parts: list[Tensor], dim: int) -> Tensor:
    """Return torch.cat(parts, dim), without a copy if there is only one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def gram_from_rows(gradients: Tensor) -> Tensor:
    """Return G Gᵀ of each sample, for G (n, d, numel)."""
    if gradients.shape[1] == 1:
        return squared_norms(gradients)
    wide = accumulation_dtype(gradients)
    total = gradients.new_zeros(*gradients.shape[:2], gradients.shape[1], dtype=wide)
    for part in gradients.split(columns_in_cache(gradients), dim=2):
        exact = part.to(wide)
        total += exact @ exact.mT
    return total


def squared_norms(tensor: Tensor) -> Tensor:
    """Return the squared norm of each sample, (n, 1, 1): of short runs in the compute dtype, summed in float64."""
    run = math.gcd(tensor[0].numel(), 4096)
    if run >= 32 and tensor.is_contiguous():
        parts = torch.linalg.vector_norm(tensor.view(len(tensor), -1, run), dim=2, keepdim=True)
        return parts.to(accumulation_dtype(parts)).square().sum(1, keepdim=True)
    return torch.linalg.vector_norm(
        tensor, dim=(1, 2), keepdim=True, dtype=accumulation_dtype(tensor)
    ).square()


def gram_from_positions(inputs: Tensor, deltas: Tensor) -> Tensor:
    """Return Σ_ts (a_t·a_s)(δ_t·δ_s) for each pair of outputs, given a_t·a_s (n, t, t)."""
    n, d = deltas.shape[:2]
    if d == 1:
        flat = deltas[:, 0]
        return (inputs * (flat @ flat.mT)).sum((1, 2), keepdim=True, dtype=accumulation_dtype(flat))
    wide = deltas.to(accumulation_dtype(deltas))
    mixed = inputs.to(wide).unsqueeze(1) @ wide  # Σ_s (a_t·a_s) δ_s
    return wide.reshape(n, d, -1) @ mixed.reshape(n, d, -1).mT


def _joint_gram_of_positions(inputs: Tensor, deltas: Tensor) -> Tensor | None:
    """Return Σ_ts (a_t·a_s)(δ_t·δ_s) of all pairs of samples and outputs, (n·d, n·d), given a_t·a_s (n·t, n·t).

    None where terms cancel so far that their rounding would show.
    """
    n, d, t, _ = deltas.shape
    wide, of_inputs = accumulation_dtype(deltas), inputs.view(n, t, n, t)
    if d == 1 or t == 1:  # one product
        flat = deltas.flatten(0, 2)
        of_deltas = (flat @ flat.mT).view(n, d, t, n, d, t)
        total = torch.einsum("ntms,ndtmes->ndme", of_inputs, of_deltas).to(wide).reshape(n * d, n * d)
    else:
        total = deltas.new_empty(n, d, n, d, dtype=wide)
        for x in range(n):  # with the samples from x on
            mixed = of_inputs[x, :, x:].transpose(0, 1).unsqueeze(1) @ deltas[x:]  # Σ_s (a_t·a_s) δ_s
            by_position = deltas[x].transpose(0, 1) @ mixed.permute(2, 3, 0, 1).flatten(2)
            blocks = by_position.sum(0, dtype=wide).view(d, n - x, d)
            total[x, :, x:], total[x:, :, x] = blocks, blocks.permute(1, 2, 0)
        total = total.view(n * d, n * d)
    if deltas.dtype == wide:
        return total
    sizes = torch.linalg.matrix_norm(of_inputs.diagonal(dim1=0, dim2=2), dim=(0, 1)).to(wide)
    terms = sizes[:, None] * torch.linalg.vector_norm(deltas.flatten(2), dim=2).to(wide).square()
    return total if (terms.flatten() <= MOST_CANCELLATION * total.diagonal()).all() else None


def sum_gradients(uses: list[ParameterGradient]) -> ParameterGradient:
    """Return the sum of the gradients of several uses of one parameter."""
    if len(uses) == 1:
        return uses[0]
    sliced = [use for use in uses if isinstance(use, SlicedGradient)]
    if len(sliced) == len(uses):
        return _concatenate_slices(sliced)
    factored = [use for use in uses if isinstance(use, FactoredGradient)]
    indexed = [use for use in uses if isinstance(use, EmbeddingGradient)]
    if len(factored) + len(indexed) < len(uses) or len({use.inputs_first for use in factored}) > 1:
        return _sum_dense(uses)
    table = _concatenate_indices(indexed) if indexed else None
    matrix = _concatenate_factors(factored) if factored else None
    if table is None or matrix is None:
        only = table or matrix
        assert only is not None
        return only
    return SharedGradient(matrix, table)


def _sum_dense(uses: list[ParameterGradient]) -> ParameterGradient:
    total = uses[0].rows().clone()
    for use in uses[1:]:
        total += use.rows()
    return DenseGradient(total)


def _concatenate_slices(uses: list[SlicedGradient]) -> ParameterGradient:
    """Return the sum of sliced gradients, in slices where these are equal or disjoint."""
    parts: dict[int, list[ParameterGradient]] = {}
    sizes: dict[int, int] = {}
    for use in uses:
        for start, part in use.parts.items():
            if sizes.setdefault(start, use.sizes[start]) != use.sizes[start]:
                return _sum_dense(list(uses))
            parts.setdefault(start, []).append(part)
    ends = [(start, start + size) for start, size in sorted(sizes.items())]
    if any(end > start for (_, end), (start, _) in itertools.pairwise(ends)):
        return _sum_dense(list(uses))
    return SlicedGradient({start: sum_gradients(same) for start, same in parts.items()}, sizes, uses[0].numel)


def _concatenate_factors(uses: list[FactoredGradient]) -> FactoredGradient:
    inputs = torch.cat([use.inputs for use in uses], 1)
    return FactoredGradient(inputs, torch.cat([use.deltas for use in uses], 2), uses[0].inputs_first)


def _concatenate_indices(uses: list[EmbeddingGradient]) -> EmbeddingGradient:
    indices = torch.cat([use.indices for use in uses], 1)
    return EmbeddingGradient(indices, torch.cat([use.deltas for use in uses], 2), uses[0].size)


@final
@dataclass(frozen=True)
class SharedGradient(StructuredGradient):
    """G of a matrix (o, i) that is also an embedding table: tied weights."""

    matrix: FactoredGradient
    table: EmbeddingGradient

    @property
    def dtype(self) -> torch.dtype:
        """The floating type of G."""
        return self.matrix.dtype

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of both uses."""
        return self.matrix.tensors + self.table.tensors

    def tangent(self, derivatives: Iterator[Tensor]) -> "SharedGradient":
        """Return the derivative of G."""
        return SharedGradient(self.matrix.tangent(derivatives), self.table.tangent(derivatives))

    @property
    def rows_are_cheaper(self) -> bool:
        """Whether ‖G‖² costs less from G than from pairs of positions."""
        return self.table.rows_are_cheaper

    def self_gram(self) -> Tensor:
        """Return G Gᵀ: that of both uses, and their cross terms."""
        cross = self._cross()
        return self.matrix.self_gram() + self.table.self_gram() + cross + cross.mT

    def _cross(self) -> Tensor:
        """Return the inner products of the two uses, Σ_ts δ_t[row_s] (a_t · ε_s), (n, d, d)."""
        inputs, deltas = self.matrix.inputs, self.matrix.deltas
        if self.matrix.inputs_first:
            inputs, deltas = deltas, inputs.unsqueeze(1)  # rows of the table are those of the inputs
            inner = torch.einsum("ndti,nesi->ndtes", inputs, self.table.deltas)
            gathered = self._gather_rows(deltas).expand(-1, inputs.shape[1], -1, -1)
        else:
            inner = torch.einsum("nti,nesi->ntes", inputs, self.table.deltas).unsqueeze(1)
            inner = inner.expand(-1, deltas.shape[1], -1, -1, -1)
            gathered = self._gather_rows(deltas)
        return torch.einsum(
            "ndtes,ndts->nde", inner.to(accumulation_dtype(inner)), gathered.to(accumulation_dtype(gathered))
        )

    def _gather_rows(self, values: Tensor) -> Tensor:
        """Return the entries of (n, d, t, rows) at the rows looked up, (n, d, t, s), 0 for index -1."""
        where = self.table.indices[:, None, None, :].expand(*values.shape[:3], -1)
        return values.gather(3, where.clamp(min=0)) * (where >= 0)

    def rows(self) -> Tensor:
        """Return G."""
        return self.matrix.rows() + self.table.rows()

    def vjp(self, weights: Tensor) -> Tensor:
        """Return Σ Gᵀ w."""
        return self.matrix.vjp(weights) + self.table.vjp(weights)

    def jvp(self, directions: Tensor) -> Tensor:
        """Return G u."""
        return self.matrix.jvp(directions) + self.table.jvp(directions)

    @property
    def column_entries(self) -> int:
        """Numbers that a column takes: those of both uses."""
        return self.matrix.column_entries + self.table.column_entries

    @property
    def rows_serve_columns(self) -> bool:
        """Whether several columns of weights cost less from G: not of a table."""
        return False

    def project_two_sided(self, left: Tensor, right: Tensor) -> Tensor:
        """Return Lᵀ G R of both uses."""
        return self.matrix.project_two_sided(left, right) + self.table.project_two_sided(left, right)

    def part(self, where: slice | Tensor) -> "SharedGradient":
        """Return the gradients of some of the samples: of a slice, or at places, (k,), which copies them."""
        return SharedGradient(self.matrix.part(where), self.table.part(where))

    def whiten(self, roots: Tensor) -> "SharedGradient":
        """Return K(x, x)^-½ G."""
        return SharedGradient(self.matrix.whiten(roots), self.table.whiten(roots))

    def group(self, places: Tensor) -> "SharedGradient":
        """Return Σ G over the samples of each group."""
        return SharedGradient(self.matrix.group(places), self.table.group(places))
