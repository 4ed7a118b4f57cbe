"""Batches of a data set in a fixed order, and the function that opens one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from likewise.checks import check_integer, check_names
from likewise.data.dataset import open_source
from likewise.data.sources import Source
from likewise.fingerprint import Fingerprint
from likewise.padding import IGNORED
from likewise.wording import counted


@dataclass(frozen=True)
class Samples:
    """Some samples: what the model is called with, their labels and their numbers.

    Attributes:
        inputs: A tensor, or a tuple or dict of tensors, samples along dimension 0.
        labels: Along dimension 0 too; None where there are none.
        ids: (n,) integers, the position in the data set.

    Example:
        >>> import torch, likewise as lw
        >>> first = lw.batches((torch.randn(9, 4), torch.arange(9)), size=4)[0]
        >>> first.inputs.shape, first.ids
        (torch.Size([4, 4]), tensor([0, 1, 2, 3]))

    """

    inputs: Any
    labels: Tensor | None
    ids: Tensor

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
    """Batches of a data set, in order: `data[0]` is Samples, `data[2:5]` are batches again.

    Example:
        >>> import torch, likewise as lw
        >>> data = lw.batches(torch.randn(9, 4), size=4)
        >>> data.n, len(data), len(data[2])
        (9, 3, 1)

    """

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
                raise ValueError(f"Batches can only be sliced with a step of 1, found a step of {step}.")
            part = self._positions[start * self.size : max(start, stop) * self.size]
            return Batches(self._source, part, self.size, self.given)
        if not -len(self) <= which < len(self):
            raise IndexError(f"batch {which} of {len(self)}")
        start = which % len(self) * self.size
        return self.samples(range(start, min(start + self.size, self.n)))

    def __repr__(self) -> str:
        return (
            f"Batches({counted(self.n, 'sample')} in {counted(len(self), 'batch', 'batches')} of {self.size})"
        )

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

    def state(self) -> tuple[Any, ...]:
        """Return what changes when samples in memory are written to; nothing of samples that are read."""
        return self._source.state()

    def memory_checksum(self) -> str | None:
        """Return a checksum of all that is in memory, after a word for its form; None where nothing is."""
        return self._source.memory_checksum(self._positions)

    def take(self, places: Sequence[int]) -> "Batches":
        """Return the samples at these places, in batches."""
        return Batches(self._source, [self._positions[i] for i in places], self.size, self.given)

    @property
    def columns(self) -> tuple[str, ...] | None:
        """The names of the columns, where the samples are rows of a table of numbers that has names."""
        return self._source.columns

    def match_columns(self, names: Sequence[str] | None) -> "Batches":
        """Return the same samples with the columns of their table in the order of these names.

        Columns of other names are left out. Samples are returned as they are where either side has no names.

        Raises:
            ValueError: A name is missing, or there twice.

        """
        source = self._source if names is None else self._source.match_columns(names)
        if source is self._source:
            return self
        return Batches(source, self._positions, self.size, self.given)

    @property
    def ids(self) -> Tensor:
        """The positions of all samples in the data set, (n,); nothing is read."""
        return torch.tensor(self._positions, dtype=torch.int64)

    def with_cache(self, max_bytes: int) -> "tuple[Batches, int]":
        """Return batches that decode each sample once, as far as decoded samples fit, and what to set aside.

        Samples are cached as the data set returns them, before they are put into batches, so that every pass may
        take batches of its own size. What comes first stays; what does not fit is read again. Data that are in
        memory already are returned as they are. Not for data that change while they are used.

        Args:
            max_bytes: The most that the cache may hold.

        Returns:
            The batches, and the bytes that their cache will hold, estimated from the first sample.

        """
        source, size = self._source.with_cache(max_bytes)
        if source is self._source:
            return self, 0
        return Batches(source, self._positions, self.size, self.given), size

    def labels(self) -> Tensor | None:
        """Return the labels of all samples, or None if there are none."""
        parts = [batch.labels for batch in self]
        return join_labels(parts)


def join_labels(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Return the labels of consecutive batches as one tensor; None if one has none.

    Token labels of different lengths are padded with −100.
    """
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    if len({part.shape[1:] for part in known}) > 1 and all(
        part.dim() == 2 and not part.is_floating_point() for part in known
    ):
        width = max(part.shape[1] for part in known)
        known = [torch.nn.functional.pad(part, (0, width - part.shape[1]), value=IGNORED) for part in known]
    return torch.cat(known)


def batches(
    dataset: Any,
    size: int | None = None,
    *,
    labels: Any = None,
    limit: int | None = None,
    pad_id: int | None = None,
    columns: Sequence[str] | None = None,
) -> Batches:
    """Return the data set as batches in a fixed order.

    Args:
        dataset: A tensor, array or table; a tuple (X, y) of such; a dict of tensors; a torch Dataset or sequence; an
            un-shuffled DataLoader, with its collate function; a Hugging Face dataset. Items that are pairs are
            (input, label), dicts keep their label under "labels" or "label".
        size: Batch size; None uses the loader's, or what fits into memory.
        labels: Labels as numbers, or the name of a column, or False if items contain inputs only.
        limit: Use only the first samples, at most this many.
        pad_id: The token with which to pad input_ids of different lengths, such as tokenizer.pad_token_id; padding is
            on the right, with 0 in the attention mask and −100 in the labels.
        columns: Column names of a tensor or array (n, q): an index of these samples then reads tables by name.

    Returns:
        Batches: a sequence of Samples.

    Example:
        >>> import torch, likewise as lw
        >>> data = lw.batches(torch.randn(9, 4), size=4, labels=torch.arange(9) % 2, limit=6)
        >>> [len(batch) for batch in data]
        [4, 2]

    """
    if isinstance(dataset, Batches):
        own_size = dataset.size if dataset.given else None
        source, positions = dataset._source, dataset._positions
        for name, given in (("labels", labels), ("pad_id", pad_id), ("columns", columns)):
            if given is not None:
                raise ValueError(f"The data are batches already: pass {name} when you create them.")
    else:
        pad_id = None if pad_id is None else check_integer("pad_id", pad_id, 0)
        names = None if columns is None else check_names("columns", columns)
        source, own_size, count = open_source(dataset, labels, pad_id=pad_id, columns=names)
        positions = range(count)
    size = own_size if size is None else size
    size = None if size is None else check_integer("size", size, 1)
    limit = None if limit is None else check_integer("limit", limit, 1)
    if len(positions) == 0:
        raise ValueError("The data set is empty: there is nothing to compare.")
    return Batches(source, positions[:limit], size or 256, given=size is not None)


def training_data(dataset: Any, *, labels: Any = None) -> Batches:
    """Return a data set to train on, like `batches`, but it may shuffle or augment at random.

    A DataLoader's data set, collate function and batch size are used, but not its sampler: samples are read by
    position.

    Args:
        dataset: Anything that `batches` accepts, or a DataLoader with any sampler.
        labels: As for `batches`.

    """
    if isinstance(dataset, Batches):
        return batches(dataset, labels=labels)
    source, size, count = open_source(dataset, labels, fixed=False)
    return Batches(source, range(count), size or 256, given=size is not None)
