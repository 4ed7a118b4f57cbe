"""A data set as a sequence of batches that is the same each time it is read.

Every statistic reads the data at least twice and refers to samples by number, so the order must
hold: what shuffles or augments at random is refused. Labels and ids travel with the inputs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from likewise.checks import check_integer
from likewise.fingerprint import Fingerprint
from likewise.sources import Source, opened


@dataclass(frozen=True)
class Samples:
    """Some samples: what the model is called with, their labels and their numbers."""

    inputs: Any  # a tensor, or a tuple or dict of tensors, samples along dimension 0
    labels: Tensor | None
    ids: Tensor  # (n,) integers, the position in the data set

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice | Tensor) -> "Samples":
        labels = None if self.labels is None else self.labels[part]
        return Samples(tree_map(lambda t: t[part], self.inputs), labels, self.ids[part])

    def split(self, size: int) -> Iterator["Samples"]:
        """Yield consecutive parts of at most `size` samples."""
        for start in range(0, len(self), size):
            yield self[start : start + size]


class Batches(Sequence[Samples]):
    """Batches of a data set, in order: `data[0]` is Samples, `data[2:5]` are batches again."""

    def __init__(self, source: Source, positions: Sequence[int], size: int, given: bool = True) -> None:
        self._source, self._positions, self.size = source, positions, size
        self.given = given  # whether the size is the user's, else it may be chosen to fit

    @property
    def n(self) -> int:
        """The number of samples."""
        return len(self._positions)

    def __len__(self) -> int:
        return -(-self.n // self.size)

    @overload
    def __getitem__(self, which: int) -> Samples: ...
    @overload
    def __getitem__(self, which: slice) -> "Batches": ...
    def __getitem__(self, which: int | slice) -> "Samples | Batches":
        if isinstance(which, slice):
            start, stop, step = which.indices(len(self))
            if step != 1:
                raise ValueError(f"Batches can be sliced in order only, found a step of {step}.")
            part = self._positions[start * self.size : max(start, stop) * self.size]
            return Batches(self._source, part, self.size, self.given)
        if not -len(self) <= which < len(self):
            raise IndexError(f"batch {which} of {len(self)}")
        start = which % len(self) * self.size
        return self.samples(range(start, min(start + self.size, self.n)))

    def __repr__(self) -> str:
        return f"Batches({self.n:,} samples in {len(self):,} batches of {self.size})"

    def samples(self, where: range) -> Samples:
        """Return the samples at these places of this sequence, as one batch."""
        positions = [int(i) for i in self._positions[where.start : where.stop]]
        inputs, labels = self._source(positions)
        return Samples(inputs, labels, torch.tensor(positions, dtype=torch.int64))

    def spans(self, size: int | None = None) -> list[range]:
        """Return the places of consecutive batches, of another size if one is given."""
        size = size or self.size
        return [range(i, min(i + size, self.n)) for i in range(0, self.n, size)]

    def add_to(self, fingerprint: Fingerprint, name: str) -> None:
        """Add the number of samples and a checksum: of all that is in memory, else of a few samples."""
        fingerprint.put("data", f"number of {name}", str(self.n))
        fingerprint.put("data", name, self._source.checksum(self._positions))

    def take(self, places: Sequence[int]) -> "Batches":
        """Return the samples at these places, in batches."""
        return Batches(self._source, [self._positions[i] for i in places], self.size, self.given)

    def labels(self) -> Tensor | None:
        """Return the labels of all samples, or None if there are none."""
        parts = [batch.labels for batch in self]
        known = [part for part in parts if part is not None]
        return torch.cat(known) if known and len(known) == len(parts) else None


def batches(dataset: Any, size: int | None = None, labels: Any = None, limit: int | None = None) -> Batches:
    """Return the data set as batches of `size` (the loader's, or what fits into memory) in a fixed order.

    `dataset`: a tensor or array; a tuple (X, y); a dict of tensors; a torch Dataset or sequence; an
    un-shuffled DataLoader; a Hugging Face dataset. Items that are pairs are (input, label), dicts
    keep their label under "labels" or "label". `labels`: given apart, or the name of a column, or
    False where all that an item holds is input. `limit`: use the first so many samples only.
    """
    if isinstance(dataset, Batches):
        own_size = dataset.size if dataset.given else None
        source, positions = dataset._source, dataset._positions
        if labels is not None:
            raise ValueError("These are batches already: give labels when they are made.")
    else:
        source, own_size, count = opened(dataset, labels)
        positions = range(count)
    size = own_size if size is None else size
    size = None if size is None else check_integer("size", size, 1)
    limit = None if limit is None else check_integer("limit", limit, 1)
    if len(positions) == 0:
        raise ValueError("The data set is empty: there is nothing to compare.")
    return Batches(source, positions[:limit], size or 256, given=size is not None)
