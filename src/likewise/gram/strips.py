"""All pairs of two data sets, one strip of whole rows, or one block of rows and columns, at a time.

A statistic of pairs is a `Reducer`: a function of a `Strip` (some rows with all columns, plain and centered) that
returns a few numbers for each of its rows. A source of pairs (an exact GramMatrix, or sketches) shows every strip
once to any number of reducers, so that a run that needs ten statistics forms every similarity once. A `BlockReducer`
can be given the columns some at a time: then a source may show blocks (`likewise.gram.blocks`).

`Tiles` computes exact strips. The features of a strip's rows stay in memory while those of the columns are streamed;
if the features of all columns fit, they are computed once and cached. `DirectionStrips` computes them for few rows: a
row is d directions in which the outputs of all columns are differentiated, so that no gradient of a column is stored.
`JointStrips` takes very few samples with themselves in one batch, layer by layer.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from likewise.data import Batches, Samples
from likewise.distributed import shares, world_size
from likewise.engines import Engine, Features, TracedEngine, ZeroGradientLog
from likewise.gram.features import KeptFeatures
from likewise.kernels import FINITE_REDUCTIONS, Kernel, mean_diagonal, refuse_out_of_range
from likewise.linalg import SQUARED_EXPONENTS, accumulation_dtype, power_
from likewise.progress import track


class Strip:
    """Similarities of the rows at places `rows` with all m columns, or with those at places `columns`: a block.

    Args:
        rows: Places of the rows in the data set.
        square: Whether the columns are the data set itself, so that each row meets itself.
        use_centered: Whether `similarity` is the centered one.
        plain: Computes the plain similarities, (b, m), when they are first asked for.
        centered: Computes the centered similarities, (b, m), likewise; None where nobody needs them.
        columns: Places of the columns of a block; None for all columns.

    """

    def __init__(
        self,
        rows: range,
        square: bool,
        use_centered: bool,
        plain: Callable[[], Tensor],
        centered: Callable[[], Tensor] | None,
        columns: range | None = None,
    ) -> None:
        self.rows, self.square, self.columns = rows, square, columns
        self._use_centered, self._plain, self._centered = use_centered, plain, centered
        self._shared: dict[Any, Tensor] = {}
        self._mirrored: Strip | None = None

    def transposed(self) -> "Strip":
        """Return the block of the columns with the rows, which shares what was computed for this one."""
        assert self.columns is not None
        other = Strip(
            rows=self.columns,
            square=self.square,
            use_centered=self._use_centered,
            plain=lambda: self.plain.T,
            centered=lambda: self.centered.T,
            columns=self.rows,
        )
        other._mirrored = self
        return other

    @cached_property
    def plain(self) -> Tensor:
        """k(x, x') as the kernel defines it, (b, m)."""
        return self._plain()

    @cached_property
    def centered(self) -> Tensor:
        """The double-centered, normalized similarity, (b, m)."""
        if self._centered is None:
            raise RuntimeError(
                "A reducer looks at centered similarities without saying so: set centered = True."
            )
        return self._centered()

    @property
    def similarity(self) -> Tensor:
        """The similarity that the matrix was asked for: plain or centered."""
        return self.centered if self._use_centered else self.plain

    @property
    def column_places(self) -> slice:
        """Which columns these are."""
        return slice(None) if self.columns is None else slice(self.columns.start, self.columns.stop)

    @property
    def first_column(self) -> int:
        """The place of the first column."""
        return 0 if self.columns is None else self.columns.start

    def shared(self, key: Any, function: Callable[["Strip"], Tensor]) -> Tensor:
        """Return an elementwise function of the similarities, which must not be written to.

        Of a block it is computed once for all reducers that name it alike, and for the transposed block; of a strip,
        which is larger, it is not kept.
        """
        if self._mirrored is not None:
            return self._mirrored.shared(key, function).T
        if self.columns is None:
            return function(self)
        if key not in self._shared:
            self._shared[key] = function(self)
        return self._shared[key]

    def positive_power(self, exponent: float, *, centered: bool = False) -> Tensor:
        """Return max(similarity, 0)^exponent, (b, m) in float64, which must not be written to.

        Args:
            exponent: Positive.
            centered: Whether of the centered similarity, whatever the matrix was asked for.

        """
        centered = centered or self._use_centered

        def compute(strip: Strip) -> Tensor:
            root = strip._shared.get(("power", exponent / 2, centered))
            if root is not None and exponent in SQUARED_EXPONENTS:
                return root.square()
            similarity = strip.centered if centered else strip.plain
            return power_(similarity.clamp(min=0).to(accumulation_dtype(similarity)), exponent)

        return self.shared(("power", exponent, centered), compute)

    def without_self(self, similarity: Tensor, fill: float) -> Tensor:
        """Return a copy in which a sample's similarity to itself is replaced by `fill`.

        Of a block in which no row meets itself, the tensor as it is, which must not be written to.
        """
        if self.columns is not None and not (self.square and self._common):
            return similarity
        return self.fill_self_(similarity.clone(), fill)

    def fill_self_(self, similarity: Tensor, fill: float | Tensor) -> Tensor:
        """Replace each sample's similarity to itself, in place; nothing to do where rows are other samples."""
        if self.square:
            similarity[self._self_places(similarity.device)] = fill
        return similarity

    def self_similarity(self, similarity: Tensor) -> Tensor:
        """Return each sample's similarity to itself, (b,), for a square matrix; 0 where a block does not hold it."""
        if self.columns is None:
            return similarity[self._self_places(similarity.device)]
        found = similarity.new_zeros(len(self.rows))
        places = self._self_places(similarity.device)
        found[places[0]] = similarity[places]
        return found

    @property
    def _common(self) -> range:
        """The places that are among the rows and the columns of a square matrix."""
        if self.columns is None:
            return self.rows
        return range(max(self.rows.start, self.columns.start), min(self.rows.stop, self.columns.stop))

    def _self_places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        common = self._common
        places = torch.arange(len(common), device=device) + common.start
        return places - self.rows.start, places - self.first_column


class Reducer(ABC):
    """What a statistic keeps of each row of a strip."""

    results: ClassVar[int] = 1  # how many tensors a call returns
    centered: ClassVar[bool] = False  # whether it looks at strip.centered whatever the matrix is

    @abstractmethod
    def __call__(self, strip: Strip) -> tuple[Tensor, ...]:
        """Return tensors with one entry for each row of the strip, which must not be written to."""


class BlockReducer(Reducer):
    """A reducer that can be given the columns some at a time, in order: then pairs of blocks are computed once.

    Subclasses write `fold`, and `finish` where a result is not what is kept meanwhile.
    """

    @abstractmethod
    def fold(self, total: tuple[Tensor, ...] | None, block: Strip) -> tuple[Tensor, ...]:
        """Return what is kept of the columns so far, the block's included.

        Args:
            total: What was kept of the columns before, which may be written to; None at the first.
            block: The rows with the next columns. It must not be written to.

        """

    def finish(self, total: tuple[Tensor, ...], block: Strip) -> tuple[Tensor, ...]:
        """Return the results, with one entry for each row, after all columns; `block` is the last of them."""
        return total

    def __call__(self, strip: Strip) -> tuple[Tensor, ...]:
        """Return the results of whole rows."""
        return self.finish(self.fold(None, strip), strip)


class SumReducer(BlockReducer):
    """A sum over columns."""

    @abstractmethod
    def terms(self, block: Strip) -> tuple[Tensor, ...]:
        """Return the sums over the columns of a block, new tensors."""

    def fold(self, total: tuple[Tensor, ...] | None, block: Strip) -> tuple[Tensor, ...]:
        """Return the sums over all columns so far."""
        terms = self.terms(block)
        return terms if total is None else tuple(old.add_(new) for old, new in zip(total, terms, strict=True))


@dataclass(frozen=True)
class ProductReducer(SumReducer):
    """The similarities of each row times weights (m, c): a product where pairs are visited anyway.

    Sketches multiply without pairs.
    """

    weights: Tensor

    def terms(self, block: Strip) -> tuple[Tensor, ...]:
        """Return (b, c) in float64."""
        similarity = block.similarity.double()
        return (similarity @ self.weights[block.column_places].to(similarity),)


class PairSource(Protocol):
    """Whatever can show all pairs of two data sets, strip by strip."""

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and columns."""

    @property
    def square(self) -> bool:
        """Whether rows and columns are the same samples."""

    def visit(self, *reducers: Reducer) -> list[tuple[Tensor, ...]]:
        """Return what each reducer keeps of every row, joined over strips; one visit of all pairs."""


def reduce_strip(strip: Strip, reducers: tuple[Reducer, ...]) -> tuple[Tensor, ...]:
    """Return the results of all reducers in a row."""
    return tuple(part for reduce in reducers for part in reduce(strip))


def split_results(joined: tuple[Tensor, ...], reducers: tuple[Reducer, ...]) -> list[tuple[Tensor, ...]]:
    """Return the results reducer by reducer."""
    parts, start = [], 0
    for reducer in reducers:
        parts.append(joined[start : start + reducer.results])
        start += reducer.results
    return parts


def _track(spans: list[range], what: str) -> Iterable[range]:
    """Return the batches of a strip and show their progress, which that of all strips does not: there may be one."""
    return track(spans, what) if world_size() == 1 else spans


class ColumnParts(NamedTuple):
    """k of all rows with consecutive columns."""

    spans: list[range]  # of the columns
    compute: Callable[[range], Tensor]  # (b, span) or (b, span, d, d)


@dataclass(frozen=True)
class ExactStrips(ABC):
    """k(x, x') of rows with all columns, in at most about `max_memory` bytes."""

    engine: Engine
    rows: Batches
    columns: Batches
    kernel: Kernel
    d: int
    dtype: torch.dtype
    max_memory: int
    zero_gradient_log: ZeroGradientLog

    @property
    @abstractmethod
    def strips(self) -> list[range]:
        """The positions of the rows of each strip."""

    @property
    @abstractmethod
    def gradient_evaluations(self) -> int:
        """How many per-sample gradients are computed for all strips together."""

    @abstractmethod
    def strip(self, where: range) -> Tensor:
        """Return k of these rows with all columns, (b, m) or (b, m, d, d)."""

    def column_parts(self) -> "ColumnParts | None":
        """Return the only strip in parts that ranks can share, as one process computes them; None if there are more.

        Rows that are few would else be shared, and every rank would compute the gradients of all columns.
        """
        return None

    def _to_result_dtype(self, values: Tensor, where: range) -> Tensor:
        """Return values (b, m, ...) in the dtype of results, or raise if they overflow."""
        converted = values.to(self.dtype)
        if not converted.sum().isfinite():
            self.engine.finish_checks()  # gradients that are not finite are named first
            refuse_out_of_range(converted, self.rows.samples(where).ids, self.kernel)
        return converted

    def _reduce_blocks(self, blocks: Tensor, where: range) -> Tensor:
        """Return the kernel's reduction of blocks (b, m, d, d)."""
        reduced = self.kernel.reduce(self._to_result_dtype(blocks, where))
        return self._to_result_dtype(reduced, where) if self.kernel.reduce in FINITE_REDUCTIONS else reduced


@dataclass(frozen=True)
class DirectionStrips(ExactStrips):
    """Strips by a jvp over the columns, with d directions S(x) for each row x."""

    rows_per_strip: int
    column_spans: list[range]

    @property
    def strips(self) -> list[range]:
        """The positions of the rows of each strip."""
        share = -(-self.rows.n // shares())
        return self.rows.spans(max(1, min(self.rows_per_strip, share)))

    @property
    def gradient_evaluations(self) -> int:
        """How many per-sample gradients are computed for all strips together."""
        return self.rows.n + self.columns.n * len(self.strips)

    def strip(self, where: range) -> Tensor:
        """Return k of these rows with all columns, (b, m) or (b, m, d, d)."""
        directions = self._directions(where)
        spans = _track(self.column_spans, "columns of a strip")
        return torch.cat([self._part(where, self.columns.samples(part), directions) for part in spans], 1)

    def column_parts(self) -> ColumnParts | None:
        """Return the only strip in parts that ranks can share; None if there are more."""
        if self.rows.n > self.rows_per_strip:
            return None
        where = range(self.rows.n)
        directions = self._directions(where)
        return ColumnParts(
            self.column_spans, lambda span: self._part(where, self.columns.samples(span), directions)
        )

    def _directions(self, where: range) -> Tensor:
        """Return the directions of these rows, (b·d, p): one tensor for all batches, which the engine splits once."""
        samples = self.rows.samples(where)
        whitened = self.engine.rows(samples, self.kernel.left_power)
        self.zero_gradient_log.note(samples, whitened.ranks)
        rows = whitened.rows.flatten(0, 1)
        return rows.to(accumulation_dtype(rows))

    def _part(self, where: range, columns: Samples, directions: Tensor) -> Tensor:
        result = self.engine.jvp(columns, directions, self.kernel.right_power)
        self.zero_gradient_log.note(columns, result.ranks)
        products = result.outputs.unflatten(2, (len(where), self.d))  # (m, d of the column, b, d of the row)
        if self.kernel.reduce is mean_diagonal:
            traces = products.diagonal(dim1=1, dim2=3).sum(-1).T
            return self._to_result_dtype(traces / self.d, where)
        return self._reduce_blocks(products.permute(2, 0, 3, 1), where)


@dataclass(frozen=True)
class JointStrips(ExactStrips):
    """The only strip of few samples with themselves, layer by layer: whitened once their inner products are known."""

    engine: TracedEngine

    @property
    def strips(self) -> list[range]:
        """The positions of all rows."""
        return [range(self.rows.n)]

    @property
    def gradient_evaluations(self) -> int:
        """How many per-sample gradients are computed."""
        return self.rows.n

    def strip(self, where: range) -> Tensor:
        """Return k of all rows with all columns, (n, n) or (n, n, d, d)."""
        samples = self.rows.samples(where)
        blocks, ranks = self.engine.joint_blocks(samples, self.kernel.left_power)
        self.zero_gradient_log.note(samples, ranks)
        return self._reduce_blocks(blocks, where)


@dataclass(frozen=True)
class Tiles(ExactStrips):
    """Strips from inner products of features, tile by tile."""

    bytes_per_sample: int  # of features
    kept: KeptFeatures | None = None  # of the columns, with the kernel's right power

    @property
    def strips(self) -> list[range]:
        """The positions of the rows of each strip."""
        share = -(-self.rows.n // shares())
        return self.rows.spans(max(1, min(self._rows_per_strip, self._rows_by_result, share)))

    def column_parts(self) -> ColumnParts | None:
        """Return the only strip in parts that ranks can share; None if there are more, or features are kept."""
        n = self.rows.n
        if self.kept is not None or self.fits or self._symmetric:
            return None
        if n > min(self._rows_per_strip, self._rows_by_result):
            return None
        where = range(n)
        left = self._compute_features(self.rows, where, self.kernel.left_power)

        def compute(span: range) -> Tensor:
            right = self._compute_features(self.columns, span, self.kernel.right_power)
            return self._tile(left, right, where)

        return ColumnParts(self.columns.spans(self._columns_per_tile(n)), compute)

    @property
    def gradient_evaluations(self) -> int:
        """How many per-sample gradients are computed for all strips together."""
        if self.kept is not None:
            return 0 if self._symmetric else self.rows.n
        if self.fits:
            return self.columns.n + (0 if self._symmetric else self.rows.n)
        if self._matrix is not None:
            return self.rows.n + sum(self.columns.n - where.stop for where in self.strips)
        return self.rows.n + self.columns.n * len(self.strips)

    def strip(self, where: range) -> Tensor:
        """Return k of these rows with all columns, (b, m) or (b, m, d, d).

        Where k(x', x) follows from k(x, x') and the whole matrix fits into memory, strips that are asked for in order
        compute each pair once.
        """
        if self._column_cache is not None and self._symmetric:
            left = _part(self._column_cache, where)
        else:
            left = self._compute_features(self.rows, where, self.kernel.left_power)
        if self.is_mirrored and len(where) == self.columns.n:
            return self.symmetric_products(left)
        matrix = self._matrix
        if matrix is None or matrix.next_row != where.start:
            tiles = [self._tile(left, right, where) for right in self._column_features(len(where))]
            return torch.cat(tiles, 1)
        later = [self._tile(left, right, where) for right in self._column_features(len(where), where.stop)]
        return matrix.add(where, torch.cat([self.symmetric_products(left), *later], 1))

    @property
    def cache_bytes(self) -> int:
        """The max_memory at which the features of all columns can be cached."""
        return 4 * self.columns.n * self.bytes_per_sample

    @property
    def _symmetric(self) -> bool:
        return self.rows is self.columns and self.kernel.left_power == self.kernel.right_power

    @property
    def is_mirrored(self) -> bool:
        """Whether k(x', x) follows from k(x, x')."""
        return self._symmetric and self.kernel.symmetric

    @property
    def _cell_bytes(self) -> int:
        return 8 if self.kernel.reduce is mean_diagonal else 8 * self.d**2

    @cached_property
    def _matrix(self) -> "_SymmetricMatrix | None":
        """The whole matrix, filled strip by strip, if k(x', x) follows from k(x, x') and it fits."""
        return _SymmetricMatrix(self.columns.n) if self.fills_matrix and world_size() == 1 else None

    @property
    def fills_matrix(self) -> bool:
        """Whether one process fills the whole matrix, strip by strip: then a strip depends on those before."""
        fits = self._cell_bytes * self.columns.n**2 <= self.max_memory // 8
        return self.is_mirrored and fits and not self.columns.given

    def symmetric_products(self, features: Features) -> Tensor:
        """Return k of samples with themselves: each pair once, K(x', x) being K(x, x')ᵀ."""
        n, side = len(features.rows), max(64, -(-len(features.rows) // 8))
        whole: Tensor | None = None
        for start in range(0, n, side):
            here, on = range(start, min(start + side, n)), range(start, n)
            tile = self._tile(_part(features, here), _part(features, on), here)
            if whole is None:
                whole = tile.new_empty(n, n, *tile.shape[2:])
            whole[start : here.stop, start:] = tile
            beyond = tile[:, len(here) :].transpose(0, 1)
            whole[here.stop :, start : here.stop] = beyond.mT if tile.dim() == 4 else beyond
        assert whole is not None
        return whole

    def _columns_per_tile(self, strip: int) -> int:
        """How many columns are taken together, for a strip of so many rows."""
        blocks = max(1, self.max_memory // 8 // (self.d**2 * 8 * strip))
        return min(max(1, self.max_memory // 16 // self.bytes_per_sample), blocks)

    @property
    def _rows_by_result(self) -> int:
        """How many rows' results fit."""
        return self.max_memory // 8 // (self._cell_bytes * self.columns.n)

    @property
    def _rows_per_strip(self) -> int:
        """How many rows' features fit; without a column cache its share of memory is free too."""
        share = 8 if self.fits else 3
        return max(1, self.max_memory // share // self.bytes_per_sample)

    @property
    def fits(self) -> bool:
        """Whether the features of all columns fit into a quarter of the memory."""
        return self.cache_bytes <= self.max_memory

    @cached_property
    def _column_cache(self) -> Features | None:
        """The features of all columns, if they fit."""
        if self.kept is not None:
            return self.kept.features
        if not self.fits:
            return None
        return self._compute_features(self.columns, range(self.columns.n), self.kernel.right_power)

    def _column_features(self, strip: int, start: int = 0) -> Iterator[Features]:
        """Yield the features of the columns from `start` on, for a strip of so many rows."""
        for span in self.columns.spans(self._columns_per_tile(strip)):
            where = range(max(start, span.start), span.stop)
            if not where:
                continue
            if self._column_cache is not None:
                yield _part(self._column_cache, where)
            else:
                yield self._compute_features(self.columns, where, self.kernel.right_power)

    def _compute_features(self, data: Batches, where: range, exponent: float) -> Features:
        """Return the features at these positions, in batches of the user's size, which bounds activations.

        Batches are also small enough that forming their gradients, which takes about three copies of them, fits
        beside the features of a strip.
        """
        whole: Features | None = None
        fit = self.max_memory // 12 // self.bytes_per_sample
        pair = 2 * self.engine.memory.bytes_per_sample + 3 * self.bytes_per_sample  # whitened where they are
        if fit < 2 and 8 * pair <= 5 * self.max_memory:  # of one alone, the model is called on two copies
            fit = 2
        size = max(1, min(data.size, fit))
        starts = range(where.start, where.stop, size)
        for part in _track([range(a, min(a + size, where.stop)) for a in starts], "gradients of a strip"):
            samples = data.samples(part)
            features = self.engine.features(samples, exponent)
            self.zero_gradient_log.note(samples, features.ranks)
            if part == where:
                return features
            if whole is None:
                whole = features.over([t.new_empty(len(where), *t.shape[1:]) for t in features.tensors])
            for target, tensor in zip(whole.tensors, features.tensors, strict=True):
                target[part.start - where.start : part.stop - where.start] = tensor
        assert whole is not None
        return whole

    def _tile(self, left: Features, right: Features, where: range) -> Tensor:
        """Return reduce( S(x) S(x')ᵀ ) for all pairs, `where` the places of the left samples."""
        if self.kernel.reduce is mean_diagonal:
            return self._to_result_dtype(left.traces(right) / self.d, where)
        return self._reduce_blocks(left.blocks(right), where)


class _SymmetricMatrix:
    """k of a data set with itself, of which strips fill the upper triangle in order."""

    def __init__(self, n: int) -> None:
        self._n, self.next_row = n, 0
        self._values: Tensor | None = None

    def add(self, where: range, upper: Tensor) -> Tensor:
        """Return the whole rows at these places, given those from the diagonal on, (b, n − start, ...)."""
        if self._values is None:
            self._values = upper.new_empty(self._n, self._n, *upper.shape[2:])
        values, later = self._values, upper[:, len(where) :].transpose(0, 1)
        values[where.start : where.stop, where.start :] = upper
        values[where.stop :, where.start : where.stop] = later.mT if upper.dim() == 4 else later
        self.next_row = where.stop
        return values[where.start : where.stop]


def _part(features: Features, where: range) -> Features:
    return features.over([tensor[where.start : where.stop] for tensor in features.tensors])
