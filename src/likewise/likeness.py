"""Similarities less what all samples share, strip by strip: exact, or from sketches.

In most networks every pair shares a common direction, which hides structure. Taking the mean off the
normalized gradients leaves, of k with row means r and their mean g,

    c(x, x') = k(x, x') − r(x) − r(x') + g,    likeness = c(x, x') / √(c(x, x) c(x', x'))

a cosine again: 1 for samples that the network cannot tell apart, 0 and below for those with less in
common than two samples have on average. Of new inputs, r(x) is their mean similarity to the data as well.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from likewise.gram import GramMatrix
from likewise.kernels import CORRELATION
from likewise.parallel import join_over
from likewise.sketch import Sketch, Sketched, sketch_bytes, whitened, width_of

Strip = Callable[[range, Tensor], tuple[Tensor, ...]]


class Likeness(Protocol):
    """The likeness of every pair of n samples."""

    n: int

    def map_strips(self, function: Strip, before: Strip | None = None) -> Any:
        """Return what `before` finds of similarities (b, n) and `function` of likenesses, joined.

        Both get the places of the rows; `function` may overwrite what it gets.
        """


class Shared(NamedTuple):
    """What samples share with the data on average, and the scale of what is left."""

    means: Tensor  # (n,) r(x)
    scale: Tensor  # (n,) c(x, x)^-½, 0 for a sample with nothing of its own

    @classmethod
    def of(cls, sums: Tensor, own: Tensor, columns: int, whole: Tensor | None = None) -> "Shared":
        """Return it from Σ k(x, x') and k(x, x); `whole`: the mean r of the data, if these are others."""
        means = sums.double() / columns
        left = own - 2 * means + (means.mean() if whole is None else whole)
        alive = (own > 0) & (left > 1e-6 * own)
        return cls(means, torch.where(alive, torch.where(alive, left, 1).rsqrt(), 0))


class ExactLikeness:
    """From a Gram matrix and what its rows and its columns share with the columns."""

    def __init__(self, gram: GramMatrix, rows: Shared, columns: Shared) -> None:
        self._gram, self.n = gram, gram.shape[0]
        self._rows, self._columns = rows, columns

    def map_strips(self, function: Strip, before: Strip | None = None) -> Any:
        """Return what both functions find, joined; visits all pairs."""

        def strip(where: range, k: Tensor) -> tuple[Tensor, ...]:
            if before is None:
                return function(where, self._centered(where, k))
            return (*before(where, k), *function(where, self._centered(where, k)))

        return self._gram.map_strips(strip)

    def _centered(self, where: range, k: Tensor) -> Tensor:
        here, means = slice(where.start, where.stop), self._columns.means.to(k)
        k = k.sub_(self._rows.means[here, None].to(k)).sub_(means - self._columns.means.mean().to(k))
        return k.mul_(self._rows.scale[here, None].to(k)).mul_(self._columns.scale.to(k))


class SketchedLikeness:
    """From sketches, vectors (n, q) whose squared lengths are k(x, x); `columns`: of other samples."""

    def __init__(self, rows: Tensor, max_memory: int, columns: Tensor | None = None) -> None:
        self.n, self._max_memory = len(rows), max_memory
        mean = (rows if columns is None else columns).mean(0)
        self._whole = mean.square().sum()
        self._rows = _Centered.of(rows, mean)
        self._columns = self._rows if columns is None else _Centered.of(columns, mean)

    def map_strips(self, function: Strip, before: Strip | None = None) -> Any:
        """Return what both functions find, joined."""
        rows, columns = self._rows, self._columns
        height = max(1, min(512, self._max_memory // 8 // (8 * len(columns.means))))
        spans = [range(i, min(i + height, self.n)) for i in range(0, self.n, height)]
        turned = columns.directions.T.contiguous()

        def strip(where: range) -> tuple[Tensor, ...]:
            here = slice(where.start, where.stop)
            c = rows.directions[here] @ turned
            if before is None:
                return function(where, c)
            k = (c * rows.lengths[here, None]).mul_(columns.lengths)
            k = k.add_(rows.means[here, None]).add_(columns.means - self._whole)
            k = k.mul_(rows.alive[here, None]).mul_(columns.alive)
            first = before(where, k)
            del k
            return (*first, *function(where, c))

        return join_over(strip, spans, "pairs")


class _Centered(NamedTuple):
    directions: Tensor  # (n, q) of unit length, 0 for a sample with nothing of its own
    lengths: Tensor  # (n,) before
    means: Tensor  # (n,) mean similarity to the data
    alive: Tensor  # (n,) 1, and 0 for a sample without a gradient, which is similar to nothing

    @classmethod
    def of(cls, features: Tensor, mean: Tensor) -> "_Centered":
        left = features - mean  # before any product: small differences of k would drown in float32
        own = features.square().sum(1)
        left[(own == 0) | (left.square().sum(1) <= 1e-6 * own)] = 0
        directions = torch.nn.functional.normalize(left, dim=1)
        return cls(directions, left.norm(dim=1), features @ mean, (own > 0).to(features))


def likeness(gram: GramMatrix, sketch: int | None = None) -> Likeness:
    """Return the likeness of rows to columns, less what the columns share.

    Exact: three passes, then all pairs of gradients. `sketch`: from gradients made that many numbers small.
    """
    own = gram if gram.square else gram.of_columns()
    if sketch is not None:
        if not isinstance(sketch, int) or isinstance(sketch, bool) or sketch < 16:
            raise ValueError(
                f"sketch is None or at least 16 numbers a sample, such as 1024, found {sketch!r}."
            )
        if gram.kernel != CORRELATION or gram.centered:
            raise ValueError(
                f"Sketches are of likewise.CORRELATION with centered=False, found {gram.kernel}"
                f"{', centered' if gram.centered else ''}: leave sketch out, or use the default kernel."
            )
        small = Sketch(width_of(sketch, gram.d), 0)
        columns = whitened(sketched(own, small)).to(gram.device)
        if gram.square:
            return SketchedLikeness(columns, gram.max_memory)
        return SketchedLikeness(whitened(sketched(gram, small)).to(gram.device), gram.max_memory, columns)
    shared = Shared.of(own.exact_row_sums()[:, 0], own.exact_diagonal(), gram.shape[1])
    if gram.square:
        return ExactLikeness(gram, shared, shared)
    rows = Shared.of(gram.exact_row_sums()[:, 0], gram.exact_diagonal(), gram.shape[1], shared.means.mean())
    return ExactLikeness(gram, rows, shared)


def sketched(gram: GramMatrix, sketch: Sketch, where: range | None = None) -> Sketched:
    """Return the sketches of the rows at these places, of all if None."""
    data = gram.data if where is None else gram.data.take(where)
    gradients = gram.gradients
    with gram.net.evaluating():
        size = max(1, sketch_bytes(gradients, data.samples(range(1))))
        height = max(1, min(data.size, gram.max_memory // 2 // size, gradients.at_once or data.size))
        joined = join_over(
            lambda w: tuple(sketch(gradients, data.samples(w))),
            data.spans(height),
            "sketches",
            gram,
            gradients.settle,
        )
    return Sketched(*joined)
