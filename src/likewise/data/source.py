"""Where samples are fetched from, by position."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from likewise.fingerprint import checksums


class Source(Protocol):
    """Where samples are fetched from, by position."""

    @property
    def columns(self) -> tuple[str, ...] | None:
        """The column names of a table, in the order that the model sees; None if there are none."""

    def match_columns(self, names: Sequence[str]) -> "Source":
        """Return the samples with the columns of their table in the order of these names; itself without names."""

    def __len__(self) -> int: ...
    def __call__(self, positions: list[int]) -> tuple[Any, Tensor | None]:
        """Return the inputs and labels of the samples at these positions."""

    def checksum(self, positions: Sequence[int]) -> str:
        """Return a checksum of the samples at these positions, of a few if they are not in memory."""

    def state(self) -> tuple[Any, ...]:
        """Return what changes when samples in memory are modified; nothing for samples that are read."""

    def memory_checksum(self, positions: Sequence[int]) -> str | None:
        """Return a checksum of all samples in memory, after a word for its form; None if nothing is in memory."""

    def with_cache(self, max_bytes: int) -> "tuple[Source, int]":
        """Return a source with a cache, and the bytes that all samples would take, at most max_bytes."""


def refuse_empty(n: int) -> None:
    """Raise if there are no samples."""
    if n == 0:
        raise ValueError("The data set is empty: there is nothing to compare.")


def checksum_of_positions(positions: Sequence[int]) -> str:
    """Return a checksum of positions; for a range, the range itself."""
    return str(positions) if isinstance(positions, range) else checksums([torch.tensor(positions)])[0]
