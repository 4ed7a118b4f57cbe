"""Pairs from projected gradients: the strips of a GramMatrix at a fraction of its cost, with an error.

A sketch is a random projection of a sample's whitened gradient. Similarities of sketches err by about 1/√width,
less the more similar two samples are; `measure_error` says by how much on a few samples compared both ways.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from likewise.checks import check_integer
from likewise.distributed import join_results
from likewise.gram.centering import rounding_floor
from likewise.gram.matrix import GramMatrix
from likewise.gram.projection import Sketch, Sketched, bucket_count, sketch_bytes, whiten_sketches
from likewise.gram.strips import PairSource, Reducer, Strip, reduce_strip, split_results
from likewise.kernels import CORRELATION

NARROWEST = 16  # numbers a sample


class Sketches:
    """k^C of all pairs from whitened sketches, plain and centered.

    Args:
        rows: (n, q) vectors whose squared lengths are k(x, x).
        columns: (m, q) of other samples; None for a square matrix.
        centered: Whether `strip.similarity` is the centered one.
        max_memory: Bytes for a strip and what reducers make of it.

    """

    def __init__(
        self, rows: Tensor, *, columns: Tensor | None = None, centered: bool = False, max_memory: int = 2**30
    ) -> None:
        reference = rows if columns is None else columns
        mean = reference.mean(0)
        self._grand_mean = mean.square().sum()
        self._rows = _Directions.from_sketches(rows, mean)
        self._columns = self._rows if columns is None else _Directions.from_sketches(columns, mean)
        self._centered, self._max_memory = centered, max_memory

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and columns."""
        return len(self._rows.means), len(self._columns.means)

    @property
    def square(self) -> bool:
        """Whether rows and columns are the same samples."""
        return self._rows is self._columns

    def visit(self, *reducers: Reducer) -> list[tuple[Tensor, ...]]:
        """Return what each reducer keeps of every row, joined over strips."""
        rows, columns = self._rows, self._columns
        n, m = self.shape
        height = max(1, min(512, self._max_memory // 8 // (8 * m)))
        spans = [range(i, min(i + height, n)) for i in range(0, n, height)]
        transposed = columns.vectors.T.contiguous()

        def show(where: range) -> tuple[Tensor, ...]:
            here = slice(where.start, where.stop)
            centered = rows.vectors[here] @ transposed

            def plain() -> Tensor:
                k = (centered * rows.lengths[here, None]).mul_(columns.lengths)
                k = k.add_(rows.means[here, None]).add_(columns.means - self._grand_mean)
                return k.mul_(rows.alive[here, None]).mul_(columns.alive)

            strip = Strip(
                rows=where,
                square=self.square,
                use_centered=self._centered,
                plain=plain,
                centered=lambda: centered,
            )
            return reduce_strip(strip, reducers)

        return split_results(join_results(show, spans, "pairs"), reducers)


class _Directions(NamedTuple):
    """Sketches less their mean: subtracted before any product, or small differences would drown in float32."""

    vectors: Tensor  # (n, q) of unit length, 0 where centering leaves only rounding
    lengths: Tensor  # (n,) before
    means: Tensor  # (n,) mean similarity to the reference set
    alive: Tensor  # (n,) 1, and 0 for a sample with a zero gradient, which is similar to nothing

    @classmethod
    def from_sketches(cls, sketches: Tensor, mean: Tensor) -> "_Directions":
        left = sketches - mean
        squares = sketches.square().sum(1)
        left[(squares == 0) | (left.square().sum(1) <= rounding_floor(sketches.dtype) * squares)] = 0
        vectors = torch.nn.functional.normalize(left, dim=1)
        return cls(vectors, left.norm(dim=1), sketches @ mean, (squares > 0).to(sketches))


def pair_source(gram: GramMatrix, sketch: int | None) -> PairSource:
    """Return the matrix itself, or its sketches of about `sketch` numbers a sample."""
    if sketch is None:
        return gram
    sketch = check_integer("sketch", sketch, NARROWEST, 2**20, "numbers a sample, such as 1024, or None")
    if gram.kernel != CORRELATION:
        raise ValueError(
            f"Sketches are of likewise.CORRELATION, found {gram.kernel}: leave sketch out, or use that kernel."
        )
    projection = Sketch(bucket_count(sketch, gram.d), 0)
    rows = whiten_sketches(sketch_rows(gram, projection)).to(gram.device)
    columns = (
        None if gram.square else whiten_sketches(sketch_rows(gram.of_columns(), projection)).to(gram.device)
    )
    return Sketches(rows, columns=columns, centered=gram.centered, max_memory=gram.max_memory)


def sketch_rows(gram: GramMatrix, sketch: Sketch, where: range | None = None) -> Sketched:
    """Return the sketches of the rows at these places, of all if None."""
    data = gram.data if where is None else gram.data.take(where)
    engine = gram.engine
    with gram.net.evaluation_mode():
        size = max(1, sketch_bytes(engine, data.samples(range(1))))
        height = max(1, min(data.size, gram.max_memory // 2 // size, engine.batch_size or data.size))
        joined = join_results(
            lambda w: tuple(sketch(engine, data.samples(w))),
            data.spans(height),
            "sketches",
            gram,
            engine.finish_checks,
        )
    return Sketched(*joined)


class SketchError(NamedTuple):
    """How far sketched similarities are off, measured on a few samples compared both ways."""

    samples: int
    all_pairs: float  # root mean square
    similar_pairs: float  # among the most similar tenth of pairs


def measure_error(gram: GramMatrix, sketches: Tensor, samples: int = 128) -> SketchError:
    """Return the error of whitened sketches (n, q) against exact similarities of some of the samples."""
    n = gram.shape[0]
    places = torch.linspace(0, n - 1, min(n, samples)).long().unique()
    part = gram.with_kernel(CORRELATION).with_centering(False)
    part.data = part.columns = gram.data.take(places.tolist())
    exact, few = part.dense().cpu().double(), sketches[places.to(sketches.device)].cpu().double()
    if len(places) == 1:
        return SketchError(1, 0.0, 0.0)
    squares = (few @ few.T - exact).square()
    apart = ~torch.eye(len(places), dtype=torch.bool)
    similar = exact[apart] >= exact[apart].quantile(0.9)
    every, top = squares[apart].mean().sqrt(), squares[apart][similar].mean().sqrt()
    return SketchError(len(places), float(every), float(top))
