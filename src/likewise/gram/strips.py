"""A strip of a Gram matrix as reducers see it: some rows with all columns, plain and centered.

A statistic of pairs is a reducer: a function of a strip that returns a few numbers for each of its rows. A source
of pairs (an exact GramMatrix, or sketches) shows every strip once to any number of reducers, so that a run that
needs ten statistics forms every similarity once.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import ClassVar, Protocol

import torch
from torch import Tensor


class Strip:
    """Similarities of the rows at places `rows` with all m columns.

    Args:
        rows: Places of the rows in the data set.
        square: Whether the columns are the data set itself, so that each row meets itself.
        use_centered: Whether `similarity` is the centered one.
        plain: Computes the plain similarities, (b, m), when they are first asked for.
        centered: Computes the centered similarities, (b, m), likewise; None where nobody needs them.

    """

    def __init__(
        self,
        rows: range,
        square: bool,
        use_centered: bool,
        plain: Callable[[], Tensor],
        centered: Callable[[], Tensor] | None,
    ) -> None:
        self.rows, self.square = rows, square
        self._use_centered, self._plain, self._centered = use_centered, plain, centered

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

    def without_self(self, similarity: Tensor, fill: float) -> Tensor:
        """Return a copy in which a sample's similarity to itself is replaced by `fill`."""
        copied = similarity.clone()
        return self.fill_self_(copied, fill)

    def fill_self_(self, similarity: Tensor, fill: float | Tensor) -> Tensor:
        """Replace each sample's similarity to itself, in place; nothing to do where rows are other samples."""
        if self.square:
            places = torch.arange(len(self.rows), device=similarity.device)
            similarity[places, places + self.rows.start] = fill
        return similarity

    def self_similarity(self, similarity: Tensor) -> Tensor:
        """Return each sample's similarity to itself, (b,), for a square matrix."""
        places = torch.arange(len(self.rows), device=similarity.device)
        return similarity[places, places + self.rows.start]


class Reducer(ABC):
    """What a statistic keeps of each row of a strip."""

    results: ClassVar[int] = 1  # how many tensors a call returns
    centered: ClassVar[bool] = False  # whether it looks at strip.centered whatever the matrix is

    @abstractmethod
    def __call__(self, strip: Strip) -> tuple[Tensor, ...]:
        """Return tensors with one entry for each row of the strip, which must not be written to."""


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
