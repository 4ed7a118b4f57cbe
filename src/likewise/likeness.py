"""Similarities less what all samples share, strip by strip: exact, or from sketches.

In most networks every pair shares a common direction, which hides structure. Taking the mean off the
normalized gradients leaves, of k with row means r and their mean g,

    c(x, x') = k(x, x') − r(x) − r(x') + g,    likeness = c(x, x') / √(c(x, x) c(x', x'))

a cosine again: 1 for samples that the network cannot tell apart, 0 and below for those with less in
common than two samples have on average.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from likewise.gram import GramMatrix
from likewise.parallel import join_over

Strip = Callable[[range, Tensor], Any]


class Likeness(Protocol):
    """The likeness of every pair of n samples."""

    n: int

    def map_strips(self, function: Strip) -> Any:
        """Return function(places of the rows, likeness (b, n)) joined; it may overwrite what it gets."""


class ExactLikeness:
    """From a Gram matrix, its row sums Σ k(x, x') and its diagonal k(x, x)."""

    def __init__(self, gram: GramMatrix, sums: Tensor, own: Tensor) -> None:
        self._gram, self.n = gram, gram.shape[0]
        self._means = sums.double() / self.n
        self._whole = self._means.mean()
        self._scale = _inverse_root(own - 2 * self._means + self._whole, own)

    def map_strips(self, function: Strip) -> Any:
        """Return function(places, likeness) joined; visits all pairs."""
        return self._gram.map_strips(lambda where, k: function(where, self._centered(where, k)))

    def _centered(self, where: range, k: Tensor) -> Tensor:
        means, scale = self._means.to(k), self._scale.to(k)
        here = slice(where.start, where.stop)
        k = k.sub_(means[here, None]).sub_(means - self._whole.to(k))
        return k.mul_(scale[here, None]).mul_(scale)


class SketchedLikeness:
    """From sketches, vectors (n, q) whose squared lengths are k(x, x)."""

    def __init__(self, features: Tensor, max_memory: int) -> None:
        self.n, self._max_memory = len(features), max_memory
        centered = features - features.mean(0)
        own = features.square().sum(1)
        nothing = (own == 0) | (centered.square().sum(1) <= 1e-6 * own)  # no gradient, or what all share
        centered[nothing] = 0
        self.features = torch.nn.functional.normalize(centered, dim=1)

    def map_strips(self, function: Strip) -> Any:
        """Return function(places, likeness) joined."""
        height = max(1, min(512, self._max_memory // 8 // (8 * self.n)))
        spans = [range(i, min(i + height, self.n)) for i in range(0, self.n, height)]
        columns = self.features.T.contiguous()
        return join_over(lambda w: function(w, self.features[w.start : w.stop] @ columns), spans, "pairs")


def _inverse_root(squares: Tensor, own: Tensor) -> Tensor:
    """Return squares^-½, and 0 for a sample that has no gradient or nothing but what all share."""
    alive = (own > 0) & (squares > 1e-6 * own)
    return torch.where(alive, torch.where(alive, squares, 1).rsqrt(), 0)
