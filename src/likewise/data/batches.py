"""Batches of a data set in a fixed order, the function that opens one, and the source for each kind of data set."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    default_collate,
    default_convert,
)

from likewise.checks import check_integer, check_names, describe, to_tensor
from likewise.data.columns import (
    ColumnNames,
    column,
    column_names,
    has_columns,
    is_table,
    refuse_text_labels,
    separate_labels,
    split_label,
    table_values,
)
from likewise.data.sources import ItemSource, Source, TensorSource
from likewise.fingerprint import Fingerprint
from likewise.padding import IGNORED, PaddingCollate, pad_columns
from likewise.torch_state import send
from likewise.wording import counted

RUN = 8  # samples of one batch that are looked at together, of samples from all over a data set


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
        def take(values: Any) -> Any:
            if not isinstance(values, Tensor):
                return values[part]
            return values[part if isinstance(part, slice) else send(part, values.device)]

        labels = None if self.labels is None else take(self.labels)
        return Samples(tree_map(take, self.inputs), labels, take(self.ids))

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

    def spread(self, count: int) -> tuple[list[int], "Batches"]:
        """Return the places of about `count` samples from all over the data set, and these samples.

        Samples of two batches may differ in shape. So they come in small batches, each from one batch of this data
        set, where the batches are the user's.
        """
        run = min(RUN, self.size) if self.given else 1
        starts = torch.linspace(0, max(0, self.n - run), max(1, min(self.n, count) // run)).long().tolist()
        places: list[int] = []
        for start in starts:
            stop = min(self.n, (start // self.size + 1) * self.size)  # of its batch
            first = max(0, min(start, stop - run))
            if not places or first > places[-1]:
                places += range(first, min(first + run, self.n))
        size = run if self.given else self.size
        return places, Batches(self._source, [self._positions[i] for i in places], size, self.given)

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


def open_source(
    dataset: Any,
    labels: Any,
    fixed: bool = True,
    pad_id: int | None = None,
    columns: Sequence[str] | None = None,
) -> tuple[Source, int | None, int]:
    """Return the source of samples, its batch size if it has one, and the number of samples.

    Args:
        dataset: As for `batches`.
        labels: As for `batches`.
        fixed: Refuse data that shuffle or augment at random.
        pad_id: The padding token of texts; None refuses texts of different lengths.
        columns: Column names for numbers that have none.

    """
    if isinstance(dataset, DataLoader) and not isinstance(dataset.dataset, IterableDataset):
        size = _ordered_batch_size(dataset) if fixed else _batch_size(dataset)
        source = _open_samples(
            dataset.dataset, labels, _batch_collate(dataset), fixed, pad_id, batch_size=size
        )
        n = min(len(source), len(_inner_sampler(dataset))) if fixed else len(source)
        dropped = getattr(dataset.batch_sampler, "drop_last", dataset.drop_last)
        return source, size, n - n % size if dropped and fixed else n
    collate = getattr(dataset, "collate_batch", default_collate)
    source = _open_samples(dataset, labels, collate, fixed, pad_id, columns)
    return source, None, len(source)


def _open_samples(
    dataset: Any,
    labels: Any,
    collate: Callable[[list[Any]], Any],
    fixed: bool,
    pad_id: int | None,
    columns: Sequence[str] | None = None,
    batch_size: int | None = None,
) -> Source:
    if dataset is None or isinstance(dataset, str | bytes | PathLike):
        raise TypeError(f"Expected a data set, found {dataset!r}: read the data first.")
    if isinstance(dataset, type):
        raise TypeError(f"Expected a data set, found {describe(dataset)}: pass an instance of it.")
    if isinstance(dataset, IterableDataset | DataLoader) or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"{type(dataset).__name__} has no length and no fixed order: every statistic reads the "
            "data twice. Collect it first, for example list(dataset)."
        )
    if isinstance(labels, str) and has_columns(dataset):
        dataset, labels = split_label(dataset, labels)
    whole = _whole(pad_columns(dataset, pad_id) if isinstance(dataset, Mapping) else dataset)
    if whole is not None:
        names = ColumnNames(tuple(columns)) if columns is not None else _input_names(dataset, labels)
        return TensorSource(*separate_labels(whole, labels), names)
    if columns is not None:
        raise ValueError(f"columns needs a tensor or array of numbers (n, q), found {describe(dataset)}.")
    by_columns = hasattr(dataset, "column_names") and collate is default_collate
    if not by_columns and collate is default_collate:
        collate = PaddingCollate(pad_id)
    return ItemSource(dataset, collate, labels, by_columns, fixed, pad_id, batch_size)


def _input_names(dataset: Any, labels: Any) -> Any:
    """Return the names of the columns of the inputs, in a tree like theirs."""
    inside = labels if labels is None or isinstance(labels, str) else False
    return separate_labels(column_names(dataset), inside)[0]


def _whole(dataset: Any) -> Any:
    """Return the data set as a tree of tensors if it holds all samples at once, else None."""
    if isinstance(dataset, Tensor | np.ndarray):
        return to_tensor("data", dataset, "give numbers of one shape for every sample")
    if has_columns(dataset):
        return table_values(dataset)
    if is_table(dataset):
        return column(str(getattr(dataset, "name", None) or "table"), np.array(dataset.to_numpy()))
    _refuse_list_of_columns(dataset)
    if isinstance(dataset, Mapping):
        return {
            str(name): _whole(values) if is_table(values) else column(str(name), values)
            for name, values in dataset.items()
        }
    arrays = isinstance(dataset, tuple) and len(dataset) > 0
    if arrays and all(isinstance(v, Tensor | np.ndarray | Mapping | tuple) or is_table(v) for v in dataset):
        refuse_text_labels(dataset[-1])
        return tuple(_whole(v) for v in dataset)
    if arrays and (isinstance(dataset[0], Tensor | np.ndarray | Mapping) or is_table(dataset[0])):
        refuse_text_labels(dataset[-1])
        return (_whole(dataset[0]), *(column("labels", v) for v in dataset[1:]))
    return None


def _refuse_list_of_columns(dataset: Any) -> None:
    if not isinstance(dataset, list) or not dataset:
        return
    if isinstance(dataset[0], str):
        raise TypeError("Found a list of text, which no model takes: tokenize or read it first.")
    first, second = dataset[0], dataset[-1]
    columns = len(dataset) == 2 and all(hasattr(v, "__len__") and not isinstance(v, tuple) for v in dataset)
    if columns and np.shape(first) != np.shape(second) and len(first) == len(second):
        raise TypeError(
            f"A list is a sequence of samples, but these two have shapes {np.shape(first)} and "
            f"{np.shape(second)}: did you mean the tuple (X, y)?"
        )
    if isinstance(first, tuple | list) and len(first) == 2 and all(isinstance(v, Tensor) for v in first):
        inputs, labels = first
        whole = labels.dim() == 1 and not labels.is_floating_point()
        if whole and inputs.dim() > 1 and len(inputs) == len(labels):
            raise TypeError(
                "This looks like a list of batches, but each item must be one sample: pass the loader itself, "
                "or its data set."
            )


def _ordered_batch_size(loader: DataLoader[Any]) -> int:
    """Return the batch size of a loader that reads its data set from first to last, or refuse it."""
    drawn, inner = loader.batch_sampler, _inner_sampler(loader)
    if type(inner) is not SequentialSampler or (drawn is not None and type(drawn) is not BatchSampler):
        culprit = inner if type(drawn) is BatchSampler or drawn is None else drawn
        raise ValueError(
            f"This DataLoader draws samples with a {type(culprit).__name__}, so two passes may see them in different "
            "orders. Create it with shuffle=False and without sampler or batch_sampler; for part of the data, use "
            "torch.utils.data.Subset."
        )
    return loader.batch_size or getattr(drawn, "batch_size", None) or 256


def _inner_sampler(loader: DataLoader[Any]) -> Any:
    """Return what draws single samples."""
    return getattr(loader.batch_sampler, "sampler", loader.sampler)


def _batch_collate(loader: DataLoader[Any]) -> Callable[[list[Any]], Any]:
    """Return what puts items into a batch; a loader without batches has a function of each item."""
    if loader.batch_size is not None or loader.batch_sampler is not None:
        return loader.collate_fn
    convert = loader.collate_fn
    if convert is default_convert:
        return default_collate
    return lambda items: default_collate([convert(item) for item in items])


def _batch_size(loader: DataLoader[Any]) -> int:
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else 256
