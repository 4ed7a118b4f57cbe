"""All pairs of new inputs, or of rows, with the rows of an index: strips from mapped shards, memory flat.

With sketches u of rows, their mean μ, and w = (v − μ) / |v − μ| of a new input with sketch v:

    centered(u, v) = (u − μ)·w / |u − μ|        plain(u, v) = centered · |u − μ| |v − μ| + u·μ + v·μ − μ·μ

A row is stored as u − o with the origin o of its data set, so that (u − μ)·w = (u − o)·w + (o − μ)·w. |u − μ| and u·μ
of every row are in the summary. The statistics are those of `likewise.statistics`, as reducers of strips.
"""

import copy
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from likewise.gram import Reducer, Strip
from likewise.gram.centering import rounding_floor, warn_of_lost_differences
from likewise.gram.last_layer import Features
from likewise.gram.strips import reduce_strip, split_results
from likewise.index.store import IndexFolder, Rows, Shard, read_sources
from likewise.statistics.novelty import (
    NEIGHBORS,
    ClosenessReducer,
    Ingredients,
    closest_cosines,
    reference_places,
)

TALLEST = 512  # rows of a strip
ROW_BYTES = 16  # lengths, scales, means and labels


class Directions(NamedTuple):
    """Sketches less the mean, as unit vectors."""

    vectors: Tensor  # (n, width), 0 where centering leaves only rounding
    lengths: Tensor  # (n,) before
    means: Tensor  # (n,) mean plain similarity to the rows of the index
    alive: Tensor  # (n,) 1, and 0 for a zero gradient, which is similar to nothing


class Columns:
    """The rows of an index that are not removed, as columns of strips."""

    def __init__(self, folder: IndexFolder, device: torch.device | None = None) -> None:
        self.folder, self.device = folder, device or torch.device("cpu")
        sources = read_sources(folder)
        self.origins = sources.origins.double()  # (sources, width)
        samples = torch.tensor([float(source["samples"]) for source in folder.state["data"]])
        weights = (samples / samples.sum())[:, None]
        self.error_factors = (
            (weights * sources.factors.square()).sum(0).sqrt()
        )  # of centered, plain similarities
        removed = folder.read_tensors("removed")
        self.removed = removed["rows"].clone() if removed else torch.zeros(0, dtype=torch.int64)
        self._shards = folder.shards

    @cached_property
    def kept(self) -> list[Tensor | None]:
        """The places of rows that are not removed, shard by shard; None for all of them."""
        found: list[Tensor | None] = []
        for shard in self._shards:
            here = self.removed[(self.removed >= shard.start) & (self.removed < shard.stop)]
            mask = torch.ones(shard.stop - shard.start, dtype=torch.bool)
            mask[here - shard.start] = False
            found.append(mask.nonzero()[:, 0] if len(here) else None)
        return found

    @property
    def ids(self) -> Tensor:
        """The number of every row that is not removed, (m,)."""
        return self.numbers(torch.arange(self.m))

    def numbers(self, places: Tensor) -> Tensor:
        """Return the numbers of the rows at these places among those that are not removed."""
        return places if self._all_kept is None else self._all_kept[places]

    def places(self, numbers: Tensor) -> Tensor:
        """Return the places of the rows with these numbers.

        Raises:
            IndexError: A row is not there, or was removed.

        """
        if self._all_kept is None:
            places = numbers.clamp(0, self.m - 1)
        else:
            places = torch.searchsorted(self._all_kept, numbers).clamp(max=self.m - 1)
        missing = numbers[self.numbers(places) != numbers]
        if len(missing):
            ends = self.numbers(torch.tensor([0, self.m - 1])).tolist()
            raise IndexError(
                f"The index has no row {int(missing[0])}: it has {self.m:,}, from {ends[0]} to {ends[1]}, without "
                "those that were removed."
            )
        return places

    @cached_property
    def _all_kept(self) -> Tensor | None:
        """The numbers of all rows; None where they are the places, so that a million take no memory."""
        stops = [0, *(shard.stop for shard in self._shards)]
        whole = all(shard.start == stop for shard, stop in zip(self._shards, stops, strict=False))
        if whole and all(kept is None for kept in self.kept):
            return None
        parts = [torch.arange(shard.start, shard.stop) for shard in self._shards]
        return torch.cat([p if k is None else p[k] for p, k in zip(parts, self.kept, strict=True)])

    @cached_property
    def m(self) -> int:
        """How many rows there are."""
        return sum(self._count(number) for number in range(len(self._shards)))

    @cached_property
    def mean(self) -> Tensor:
        """The mean sketch μ, (width,), in float64."""
        return self._summary["mean"].clone()

    @cached_property
    def _summary(self) -> dict[str, Tensor]:
        return self.folder.read_tensors("summary")

    @property
    def lengths(self) -> Tensor:
        """The distance of every row from the mean, (m,); 0 where only rounding is left."""
        return self._summary["lengths"]

    @cached_property
    def scales(self) -> Tensor:
        """1 / lengths, (m,), on the device; 0 where only rounding is left."""
        lengths = self.lengths.to(self.device, torch.float32, copy=True)
        return lengths.reciprocal_().nan_to_num_(posinf=0)

    @property
    def means(self) -> Tensor:
        """The mean plain similarity of every row to all, (m,)."""
        return self._summary["means"]

    @property
    def reference(self) -> Ingredients:
        """What the novelty of some rows, each left out in turn, is made of: what new inputs are compared with."""
        known = [self._summary[name] for name in Ingredients._fields if name in self._summary]
        return Ingredients(*known)

    @cached_property
    def has_features(self) -> bool:
        """Whether it is known of every row what the last layer sees."""
        return all(content.features is not None for _, _, content, _ in self.shards())

    def features(self) -> Iterator[Features]:
        """Yield the features of the rows in order, float32, some at a time."""
        for _, _, content, kept in self.shards():
            if content.features is None or content.feature_lengths is None:
                raise ValueError("Some rows of the index have no features.")
            every = slice(None) if kept is None else kept
            directions = normalize(content.features[every].float(), dim=1)  # lengths were rounded too
            yield Features(directions, content.feature_lengths[every])

    @property
    def alive(self) -> Tensor | None:
        """1, and 0 for rows with a zero gradient, (m,); None if there is no such row."""
        dead = self._summary["dead"]
        if not len(dead):
            return None
        return torch.ones(self.m).index_fill_(0, dead.clone(), 0)

    def shards(self) -> Iterator[tuple[slice, Shard, Rows, Tensor | None]]:
        """Yield the places of a shard's rows among the columns, the shard, its content, and which rows are kept."""
        place = 0
        for shard, kept in zip(self._shards, self.kept, strict=True):
            count = shard.stop - shard.start if kept is None else len(kept)
            yield slice(place, place + count), shard, self.folder.read_rows(shard), kept
            place += count

    def sketches(self, places: Sequence[int] | Tensor) -> Tensor:
        """Return the sketches u of the rows at these places, (n, width), in float64."""
        wanted = torch.as_tensor(places, dtype=torch.int64)
        found = torch.zeros(len(wanted), self.origins.shape[1], dtype=torch.float64)
        starts = torch.tensor([0, *(self._count(i) for i in range(len(self._shards)))]).cumsum(0)
        numbers = torch.searchsorted(starts, wanted, right=True) - 1
        for number in numbers.unique().tolist():
            shard, kept, mine = self._shards[number], self.kept[number], (numbers == number).nonzero()[:, 0]
            local = wanted[mine] - starts[number]
            local = local if kept is None else kept[local]
            rows = self.folder.read_rows(shard)
            decoded = rows.sketches[local].double()
            if rows.scales is not None:
                decoded.mul_(rows.scales[local, None].double())
            decoded.add_(self.origins[shard.source])
            decoded[torch.isin(local, rows.dead)] = 0
            found[mine] = decoded
        return found

    def unit_vectors(self) -> Iterator[Tensor]:
        """Yield (u − μ) / |u − μ| of all rows in order, float32, some at a time; 0 where only rounding is left."""
        for where, shard, content, kept in self.shards():
            shift = (self.origins[shard.source] - self.mean).float()
            scales, place = self.scales[where].cpu(), 0
            for block, decoded in content.blocks():
                rows = decoded.add_(shift)
                if kept is not None:
                    rows = rows[kept[(kept >= block.start) & (kept < block.stop)] - block.start]
                yield rows * scales[place : place + len(rows), None]
                place += len(rows)

    def directions(self, sketches: Tensor) -> Directions:
        """Return sketches u, (n, width), less the mean, as what strips are computed from."""
        exact = sketches.double()
        left, squares = exact - self.mean, exact.square().sum(1)
        lengths = left.norm(dim=1)
        lengths[(squares == 0) | (lengths.square() <= rounding_floor(torch.float32) * squares)] = 0
        vectors = torch.where(lengths[:, None] > 0, normalize(left, dim=1), 0)
        return Directions(vectors, lengths, exact @ self.mean, (squares > 0).double())

    def _count(self, number: int) -> int:
        kept, shard = self.kept[number], self._shards[number]
        return shard.stop - shard.start if kept is None else len(kept)


class IndexPairs:
    """Similarities of inputs, or of rows of the index, with all rows of an index, strip by strip.

    Args:
        columns: The rows of the index.
        sketches: (n, width) of new inputs; None for the rows of the index with themselves.
        places: Which rows, where there are no new inputs; None for all.
        centered: Whether `strip.similarity` is the centered one.
        max_memory: Bytes for a strip and what reducers make of it.

    """

    def __init__(
        self,
        columns: Columns,
        sketches: Tensor | None = None,
        *,
        places: Sequence[int] | None = None,
        centered: bool = True,
        max_memory: int = 2**30,
    ) -> None:
        self._columns, self._sketches, self._centered = columns, sketches, centered
        self._places = range(columns.m) if places is None else places
        self._max_memory = max_memory
        self._whole: list[
            Tensor
        ] = []  # centered similarities of all rows, where they are one strip that is kept
        self._keeps = False

    def kept(self) -> "IndexPairs":
        """Return the same pairs, which are computed once for several visits, where they fit into one strip."""
        other = copy.copy(self)
        other._whole, other._keeps = [], True
        return other

    def with_centering(self, centered: bool) -> "IndexPairs":
        """Return the same pairs, centered or plain."""
        other = copy.copy(self)
        other._centered = centered
        return other

    @property
    def sketches(self) -> Tensor:
        """The sketches of the rows, (n, width)."""
        return self._columns.sketches(self._places) if self._sketches is None else self._sketches

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and columns."""
        return len(self._places) if self._sketches is None else len(self._sketches), self._columns.m

    @property
    def square(self) -> bool:
        """Whether rows and columns are the same samples."""
        return self._sketches is None

    def visit(self, *reducers: Reducer) -> list[tuple[Tensor, ...]]:
        """Return what each reducer keeps of every row, joined over strips."""
        n, m = self.shape
        share = self._max_memory // 8
        share = max(share - ROW_BYTES * m, share // 4)  # what is kept of every row takes memory too
        height = max(1, min(TALLEST, share // (8 * m)))
        results = [
            reduce_strip(self._strip(range(start, min(start + height, n))), reducers)
            for start in range(0, n, height)
        ]
        joined = tuple(torch.cat(parts) for parts in zip(*results, strict=True))
        return split_results(joined, reducers)

    def _strip(self, where: range) -> Strip:
        columns, places = self._columns, self._places[where.start : where.stop]
        sketches = (
            columns.sketches(places) if self._sketches is None else self._sketches[where.start : where.stop]
        )
        rows = columns.directions(sketches)
        centered = self._whole[0] if self._whole else self._centered_similarities(rows)
        if self._keeps and len(where) == self.shape[0] and not self._whole:
            self._whole.append(centered)

        def plain() -> Tensor:
            k = centered * rows.lengths[:, None].to(centered)
            k.mul_(columns.lengths.to(k)).add_(rows.means[:, None].to(k))
            k.add_(columns.means.to(k)).sub_(float(columns.mean.square().sum()))
            k.mul_(rows.alive[:, None].to(k))
            return k if columns.alive is None else k.mul_(columns.alive.to(k))

        square = self._sketches is None
        if square and not isinstance(places, range):
            return _SampledStrip(torch.as_tensor(places), self._centered, plain, lambda: centered)
        rows_here = places if isinstance(places, range) and square else where
        return Strip(
            rows=rows_here, square=square, use_centered=self._centered, plain=plain, centered=lambda: centered
        )

    def _centered_similarities(self, rows: Directions) -> Tensor:
        columns = self._columns
        vectors = rows.vectors.to(columns.device, torch.float32)
        shifts = rows.vectors @ (columns.origins - columns.mean).T  # (b, sources): (o − μ)·w
        transposed = vectors.T.contiguous()
        found = vectors.new_empty(len(vectors), columns.m)
        for where, shard, content, kept in columns.shards():
            here = found[:, where]
            for block, decoded in content.blocks(columns.device):
                product = (decoded @ transposed).T
                if kept is None:
                    here[:, block] = product
                else:
                    inside = (kept >= block.start) & (kept < block.stop)
                    here[:, inside.to(here.device)] = product[:, (kept[inside] - block.start).to(here.device)]
            here.add_(shifts[:, shard.source, None].to(here))
        return found.mul_(columns.scales)


class _SampledStrip(Strip):
    """Some rows of the index with all of them, the rows anywhere."""

    def __init__(self, places: Tensor, use_centered: bool, plain, centered) -> None:  # type: ignore[no-untyped-def]
        super().__init__(
            rows=range(len(places)), square=True, use_centered=use_centered, plain=plain, centered=centered
        )
        self._row_places = places

    def fill_self_(self, similarity: Tensor, fill: float | Tensor) -> Tensor:
        similarity[torch.arange(len(self._row_places)), self._row_places] = fill
        return similarity

    def self_similarity(self, similarity: Tensor) -> Tensor:
        return similarity[torch.arange(len(self._row_places)), self._row_places]


def summarize(folder: IndexFolder, max_memory: int = 2**30, known_closeness: Tensor | None = None) -> None:
    """Write the summary: mean, distance and similarity to it of every row, what the novelty of some rows is made of.

    Three passes over the rows; nothing is computed from gradients. The sum of gradients, which is of other rows now,
    is dropped.

    Args:
        folder: The index.
        max_memory: Bytes for a strip of pairs.
        known_closeness: (m,) the mean plain similarity of every row to the most similar others, where all pairs were
            compared before: then two passes do.

    """
    folder.state["files"].pop("gradient", None)
    columns = Columns(folder)
    if not columns.m:
        raise ValueError("No row is left: an index keeps at least one.")
    mean = _mean(columns)
    lengths, means, dead = _distances(columns, mean)
    lost = int((lengths == 0).sum()) - len(dead)
    warn_of_lost_differences(
        lost, columns.m, "ask the index with centered=False, --plain on the command line"
    )
    known = {"mean": mean, "lengths": lengths, "means": means, "dead": dead}
    folder.write_tensors("summary", known)
    folder.write_tensors("summary", {**known, **_reference(Columns(folder), max_memory, known_closeness)})


def _mean(columns: Columns) -> Tensor:
    total = torch.zeros(columns.origins.shape[1], dtype=torch.float64)
    for where, shard, content, kept in columns.shards():
        weights = torch.ones(len(content.sketches), dtype=torch.float64)
        weights[content.dead] = 0
        if kept is not None:
            weights = torch.zeros_like(weights).index_copy_(0, kept, weights[kept])
        for block, decoded in content.blocks():
            total += weights[block] @ decoded.double()
        total += weights.sum() * columns.origins[shard.source]
        del where
    return total / columns.m


def _distances(columns: Columns, mean: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return |u − μ| and u·μ of every row, (m,), and the places of rows with a zero gradient."""
    lengths, means = torch.zeros(columns.m), torch.zeros(columns.m)
    dead = []
    for where, shard, content, kept in columns.shards():
        every = torch.zeros(len(content.sketches), 2)
        origin = columns.origins[shard.source]
        for block, decoded in content.blocks():
            left = decoded.add_((origin - mean).float())  # u − μ, small numbers: float32 is enough
            product = (left @ mean.float()).double() + mean.square().sum()
            squares = left.square().sum(1).double()
            whole = squares + 2 * product - mean.square().sum()  # |u|²
            squares = torch.where(squares > rounding_floor(torch.float32) * whole, squares, 0)
            every[block] = torch.stack([squares.sqrt(), product], 1).float()
        every[content.dead] = 0
        numbers = torch.arange(len(every)) if kept is None else kept
        lengths[where], means[where] = every[numbers].unbind(1)
        dead.append(torch.isin(numbers, content.dead).nonzero()[:, 0] + where.start)
    return lengths, means, torch.cat(dead)


def _reference(columns: Columns, max_memory: int, known_closeness: Tensor | None) -> dict[str, Tensor]:
    """Return what the novelty of some rows, spread over the index and each left out in turn, is made of."""
    if columns.m < 2:
        return {"gradient_novelty": torch.zeros(0)}
    places, k = reference_places(columns.m), min(NEIGHBORS, columns.m - 1)
    if known_closeness is None:
        pairs = IndexPairs(columns, places=places.tolist(), centered=False, max_memory=max_memory)
        ((closeness,),) = pairs.visit(ClosenessReducer(k))
    else:
        closeness = known_closeness[places]
    found = {"gradient_novelty": 1 - closeness.float()}
    if not columns.has_features:
        return found
    chosen, first = [], 0
    for part in columns.features():
        here = places[(places >= first) & (places < first + len(part.lengths))] - first
        chosen.append(Features(*(value[here] for value in part)))
        first += len(part.lengths)
    directions, lengths = map(torch.cat, zip(*chosen, strict=True))
    near = closest_cosines(directions, (part.directions for part in columns.features()), k, places)
    return {**found, "feature_novelty": 1 - near, "feature_length": lengths}
