"""Where samples come from: every kind of data set, read by position.

Every statistic reads the data at least twice and refers to samples by number, so the order must hold:
what shuffles or augments at random is refused.
"""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Protocol, overload

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from likewise.checks import check_integer, check_names, describe, refuse_unreadable, to_tensor
from likewise.fingerprint import ChecksumCache, Fingerprint, checksums
from likewise.model_state import preserve_generators
from likewise.padding import IGNORED, PaddingCollate, RaggedError, pad_columns

LABEL_NAMES = ("labels", "label")


class Source(Protocol):
    """Where samples are fetched from, by position."""

    @property
    def columns(self) -> tuple[str, ...] | None:
        """The names of the columns of a table, whose order the model sees; None where there are none."""

    def match_columns(self, names: Sequence[str]) -> "Source":
        """Return the samples with the columns of their table in the order of these names; itself without names."""

    def __len__(self) -> int: ...
    def __call__(self, positions: list[int]) -> tuple[Any, Tensor | None]:
        """Return the inputs and labels of the samples at these positions."""

    def checksum(self, positions: Sequence[int]) -> str:
        """Return a checksum of the samples at these positions, of a few if they are not in memory."""

    def with_cache(self, max_bytes: int) -> "tuple[Source, int]":
        """Return a source that keeps what it has read, and the bytes that all samples would take, or max_bytes."""


def opened(
    dataset: Any,
    labels: Any,
    fixed: bool = True,
    pad_id: int | None = None,
    columns: Sequence[str] | None = None,
) -> tuple[Source, int | None, int]:
    """Return where samples are fetched from, in what batches if that is given, and how many.

    Args:
        dataset: As `batches` takes it.
        labels: As `batches` takes them.
        fixed: Refuse what shuffles or augments at random.
        pad_id: The token that fills up texts; None: texts of several lengths are refused.
        columns: Names of the columns of numbers that have none.

    """
    if isinstance(dataset, DataLoader) and not isinstance(dataset.dataset, IterableDataset):
        size = _ordered_batch_size(dataset) if fixed else _batch_size(dataset)
        alone = dataset.batch_size is None and dataset.batch_sampler is None
        collate = default_collate if alone else dataset.collate_fn
        source = _opened(dataset.dataset, labels, collate, fixed, pad_id)
        n = len(source)
        dropped = getattr(dataset.batch_sampler, "drop_last", dataset.drop_last)
        return source, size, n - n % size if dropped and fixed else n
    collate = getattr(dataset, "collate_batch", default_collate)
    source = _opened(dataset, labels, collate, fixed, pad_id, columns)
    return source, None, len(source)


def _opened(
    dataset: Any,
    labels: Any,
    collate: Callable[[list[Any]], Any],
    fixed: bool,
    pad_id: int | None,
    columns: Sequence[str] | None = None,
) -> Source:
    if dataset is None or isinstance(dataset, str | bytes | PathLike):
        raise TypeError(f"Data were expected, found {dataset!r}: read it first.")
    if isinstance(dataset, type):
        raise TypeError(f"Data were expected, found {describe(dataset)}: give an instance of it.")
    if isinstance(dataset, IterableDataset | DataLoader) or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"{type(dataset).__name__} has no length and no fixed order: every statistic reads the "
            "data twice. Collect it first, for example list(dataset)."
        )
    if isinstance(labels, str) and _has_columns(dataset):
        dataset, labels = _split_label(dataset, labels)
    whole = _whole(pad_columns(dataset, pad_id) if isinstance(dataset, Mapping) else dataset)
    if whole is not None:
        return _Whole(*_apart(whole, labels), _column_names(dataset) if columns is None else columns)
    if columns is not None:
        raise ValueError(
            f"columns names those of a table of numbers, found {describe(dataset)}: give a tensor."
        )
    by_columns = hasattr(dataset, "column_names") and collate is default_collate
    if not by_columns and collate is default_collate:
        collate = PaddingCollate(pad_id)
    return _Items(dataset, collate, labels, by_columns, fixed, pad_id)


def _whole(dataset: Any) -> Any:
    """Return the data set as a tree of tensors if it holds all samples at once, else None."""
    if isinstance(dataset, Tensor | np.ndarray):
        return to_tensor("data", dataset, "give numbers of one shape for every sample")
    if _has_columns(dataset):
        return _table_values(dataset)
    if _is_table(dataset):
        return column(str(getattr(dataset, "name", None) or "table"), np.array(dataset.to_numpy()))
    _refuse_list_of_columns(dataset)
    if isinstance(dataset, Mapping):
        return {str(name): column(str(name), values) for name, values in dataset.items()}
    arrays = isinstance(dataset, tuple) and len(dataset) > 0
    if arrays and all(isinstance(v, Tensor | np.ndarray | Mapping | tuple) or _is_table(v) for v in dataset):
        refuse_text_labels(dataset[-1])
        return tuple(_whole(v) for v in dataset)
    if arrays and (isinstance(dataset[0], Tensor | np.ndarray | Mapping) or _is_table(dataset[0])):
        refuse_text_labels(dataset[-1])
        return (_whole(dataset[0]), *(column("labels", v) for v in dataset[1:]))
    return None


def _is_table(values: Any) -> bool:
    """Whether this is a table or a column of one, as pandas and polars have them."""
    return hasattr(values, "to_numpy") and not isinstance(values, type)


def _has_columns(values: Any) -> bool:
    return _is_table(values) and hasattr(values, "columns")


def _column_names(dataset: Any) -> list[str] | None:
    """Return the names of the columns of a table, or of the table in (table, labels); None where they are numbers."""
    table = dataset[0] if isinstance(dataset, tuple) and dataset else dataset
    if not _has_columns(table) or not any(isinstance(name, str) for name in table.columns):
        return None
    return [str(name) for name in table.columns]


def _split_label(table: Any, label: str) -> tuple[Any, Any]:
    """Return a table without the column of labels, and that column."""
    names = list(table.columns)
    if label not in names:
        raise ValueError(f"There is no column {label!r}, only {', '.join(map(str, names))}.")
    return table[[name for name in names if name != label]], np.array(table[label])


def _table_values(table: Any) -> Tensor:
    """Return the numbers of a table (n, q), or say which column holds something else."""
    values = np.array(table.to_numpy())
    if values.dtype.kind != "O":
        return column("table", values)
    parts = []
    for name, part in zip(table.columns, values.T, strict=True):
        row = next((i for i, value in enumerate(part) if isinstance(value, str)), None)
        if row is not None:
            raise TypeError(
                f"Column {name!r} of the table holds text, {part[row]!r} in row {row} (from 0): make it numbers, or "
                f"leave it out, table.drop(columns={name!r}); labels={name!r} if it is the label."
            )
        parts.append(column(str(name), np.array(part.tolist())).double())
    return torch.stack(parts, dim=1)


def refuse_text_labels(labels: Any) -> None:
    """Raise if labels are text: which output of the model is which class, only the user knows."""
    if isinstance(labels, Tensor):
        return
    values = labels.to_numpy() if _is_table(labels) else labels
    if isinstance(values, np.ndarray):
        values = values.flat if values.dtype.kind in "OU" else ()
    first = next((v for v in values if isinstance(v, str)), None) if isinstance(values, Iterable) else None
    if first is not None:
        raise TypeError(
            f"The labels are text, such as {str(first)!r}, and the model's outputs have numbers: give the number of "
            "each label's output. For classes in alphabetical order: classes, labels = np.unique(labels, "
            "return_inverse=True), then labels=labels, and classes=list(classes) where names are shown."
        )


class _Whole:
    """Samples from tensors that hold all of them."""

    def __init__(self, inputs: Any, labels: Tensor | None, columns: Sequence[str] | None = None) -> None:
        leaves = tree_leaves(inputs)
        if not leaves:
            raise ValueError(f"The data hold nothing, found {describe(inputs)}: give at least one tensor.")
        named = [("data", leaf) for leaf in leaves] + ([] if labels is None else [("labels", labels)])
        for name, leaf in named:
            if not isinstance(leaf, Tensor) or leaf.dim() == 0:
                raise ValueError(
                    f"{name} must have samples along the first dimension, found {describe(leaf)}: one sample "
                    "alone needs x[None]."
                )
        lengths = sorted({len(leaf) for leaf in leaves})
        _refuse_empty(lengths[0])
        if len(lengths) != 1:
            raise ValueError(f"Inputs differ in length, {lengths}: each needs an entry for every sample.")
        if labels is not None and len(labels) != lengths[0]:
            raise ValueError(f"{len(labels)} labels for {lengths[0]} samples: one for each is needed.")
        is_table = isinstance(inputs, Tensor) and inputs.dim() == 2
        if columns is not None and is_table and len(columns) != inputs.shape[1]:
            raise ValueError(f"{len(columns)} names for {inputs.shape[1]} columns: one for each is needed.")
        self.columns = tuple(columns) if columns is not None and is_table else None
        self._inputs, self._labels, self._n = inputs, labels, lengths[0]
        self._checksums = ChecksumCache()

    def __len__(self) -> int:
        return self._n

    def __call__(self, positions: list[int]) -> tuple[Any, Tensor | None]:
        where: slice | list[int] = positions
        if positions == list(range(positions[0], positions[0] + len(positions))):
            where = slice(positions[0], positions[0] + len(positions))  # a view, not a copy
        labels = None if self._labels is None else self._labels[where]
        return tree_map(lambda t: t[where], self._inputs), labels

    def match_columns(self, names: Sequence[str]) -> Source:
        """Return the samples with these columns, or say which is missing."""
        here = self.columns
        if here is None or here == tuple(names):
            return self
        missing = [name for name in names if name not in here]
        twice = [name for name in names if here.count(name) > 1]
        if missing or twice:
            problem = f"has no column {missing[0]!r}" if missing else f"has the column {twice[0]!r} twice"
            raise ValueError(
                f"Columns are taken by their names, {', '.join(names[:20])}, and this table {problem}: it has "
                f"{', '.join(here[:20])}. Rename its columns, or give its numbers in the right order, table.to_numpy()."
            )
        return _Whole(self._inputs[:, [here.index(name) for name in names]], self._labels, names)

    def checksum(self, positions: Sequence[int]) -> str:
        """Return a checksum of every number, and of the positions."""
        leaves = tree_leaves((self._inputs, self._labels))
        tensors = {str(i): leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        return " ".join([*self._checksums.get(tensors).values(), _checksum_of_positions(positions)])

    def with_cache(self, max_bytes: int) -> tuple[Source, int]:
        """Return itself: nothing is read anew."""
        return self, 0


class _ItemCache:
    """Copies of items of a data set, up to a number of bytes: what comes first stays.

    Passes read from first to last, so that a cache that drops the oldest item would never hold the next one.
    """

    def __init__(self, max_bytes: int) -> None:
        self._free, self._items = max_bytes, dict[int, Any]()

    def __contains__(self, position: int) -> bool:
        return position in self._items

    def get(self, position: int) -> Any:
        """Return a copy of an item: a collate function may take it apart or write to it."""
        return tree_map(_copy_leaf, self._items[position])

    def put(self, position: int, item: Any) -> None:
        """Keep a copy of an item, if its bytes can be counted and fit."""
        size = _item_bytes(item)
        if position not in self._items and size is not None and size <= self._free:
            self._items[position] = tree_map(_copy_leaf, item)
            self._free -= size


LEAF_BYTES = 256  # of a tensor or number beside its values: about what the objects of Python take


def _item_bytes(item: Any) -> int | None:
    """Return the bytes of an item, None where it holds what cannot be counted or copied."""
    total = LEAF_BYTES
    for leaf in tree_leaves(item):
        if isinstance(leaf, Tensor):
            if leaf.layout != torch.strided or leaf.requires_grad:
                return None
            total += leaf.numel() * leaf.element_size() + LEAF_BYTES
        elif isinstance(leaf, np.ndarray):
            if leaf.dtype.hasobject:
                return None
            total += leaf.nbytes + LEAF_BYTES
        elif leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes | np.generic):
            total += sys.getsizeof(leaf) + LEAF_BYTES
        else:
            return None
    return total


def _copy_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.clone()
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


class _Items:
    """Samples from a data set that is read item by item, or by columns."""

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[Any], Any],
        labels: Any,
        by_columns: bool,
        fixed: bool,
        pad_id: int | None = None,
    ) -> None:
        self._dataset, self._collate, self._by_columns = dataset, collate, by_columns
        self._pad_id = pad_id
        given = labels is not None and labels is not False and not isinstance(labels, str)
        if given:
            refuse_text_labels(labels)
        self._given = column("labels", labels) if given else None
        self._inside = False if given else labels
        self._n = _length(dataset)
        self._cache: _ItemCache | None = None
        _refuse_empty(self._n)
        self.columns = None  # those of a Hugging Face data set reach the model by name
        if self._given is not None and (self._given.dim() == 0 or len(self._given) != self._n):
            found = len(self._given) if self._given.dim() else 1
            raise ValueError(f"{found} labels for {self._n} samples: one for each is needed.")
        if fixed:
            with preserve_generators():  # the data set may draw when it is read
                self._refuse_chance()

    def __len__(self) -> int:
        return self._n

    def __call__(self, positions: list[int]) -> tuple[Any, Tensor | None]:
        if self._by_columns:
            rows = self._columns(positions)
            named = {self._inside} if isinstance(self._inside, str) else set(LABEL_NAMES)
            for name in named & set(rows):
                column(name, rows[name])  # labels that are text are an error, not left out
            rows = pad_columns({name: rows[name] for name in rows if _usable(rows[name])}, self._pad_id)
            batch: Any = {name: column(name, values) for name, values in rows.items()}
            if not batch:
                raise TypeError(
                    f"The columns {sorted(self._dataset.column_names)} hold no numbers: tokenize or transform them "
                    "first."
                )
        else:
            batch = self._collated(positions, self._read_items(positions))
        inputs, labels = _apart(batch, self._inside)
        _refuse_unreadable(positions, inputs, labels)
        return inputs, labels if self._given is None else self._given[positions]

    def match_columns(self, names: Sequence[str]) -> Source:
        """Return itself: items are no rows of a table."""
        del names
        return self

    def checksum(self, positions: Sequence[int]) -> str:
        """Return a checksum of sixteen samples, from the first to the last, and of the positions."""
        n = len(positions)
        places = sorted({i * (n - 1) // 15 for i in range(16)})
        leaves = [leaf for place in places for leaf in tree_leaves(self([int(positions[place])]))]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        shapes = str(sorted({(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors}))
        return " ".join([shapes, *checksums(tensors), _checksum_of_positions(positions)])

    def with_cache(self, max_bytes: int) -> tuple[Source, int]:
        """Return a source that decodes each sample once, as far as they fit; a list holds them already."""
        if isinstance(self._dataset, list | tuple | TensorDataset):
            return self, 0
        other = copy.copy(self)
        other._cache = _ItemCache(max_bytes)
        first = other._columns([0]) if self._by_columns else other._item(0)
        size = _item_bytes(first)
        return (self, 0) if size is None else (other, min(max_bytes, size * self._n))

    def _read_items(self, positions: list[int]) -> list[Any]:
        """Return the items at these positions, read together where the data set can and none is in a cache."""
        read = getattr(self._dataset, "__getitems__", None)
        if read is None or self._cache is not None or len(positions) == 1:
            return [self._item(i) for i in positions]
        try:
            return list(read(positions))
        except Exception as together:
            for position in positions:  # which of them?
                self._item(position)
            together.add_note(f"This happened when samples {positions[:3]} ... were read from the data set.")
            raise

    def _item(self, position: int) -> Any:
        if self._cache is not None and position in self._cache:
            return self._cache.get(position)
        try:
            item = self._dataset[position]
        except Exception as error:  # whatever a user's code raises; StopIteration would end a loop
            raise _unread(position, self._n, error) from error
        if self._cache is not None:
            self._cache.put(position, item)
        return item

    def _columns(self, positions: list[int]) -> Any:
        """Return the columns of some rows, those that are not in the cache read in one go."""
        cache = self._cache
        if cache is None:
            return self._read_columns(positions)
        missing = [position for position in positions if position not in cache]
        fresh = self._read_columns(missing) if missing else {}
        if not all(_splits(values, len(missing)) for values in fresh.values()):
            self._cache = None
            return self._read_columns(positions)
        rows = {
            position: {name: values[i : i + 1] for name, values in fresh.items()}
            for i, position in enumerate(missing)
        }
        for position, row in rows.items():
            cache.put(position, row)
        if len(missing) == len(positions):
            return fresh
        parts = [rows[position] if position in rows else cache.get(position) for position in positions]
        return {name: _join_rows([part[name] for part in parts]) for name in parts[0]}

    def _read_columns(self, positions: list[int]) -> Any:
        try:
            return self._dataset[positions]
        except Exception as together:
            for position in positions:  # which of them?
                try:
                    self._dataset[[position]]
                except Exception as error:
                    raise _unread(position, self._n, error) from error
            together.add_note(f"This happened when samples {positions[:3]} ... were read from the data set.")
            raise

    def _collated(self, positions: list[int], items: list[Any]) -> Any:
        try:
            return self._collate(items)
        except RaggedError:
            raise
        except Exception as error:
            shown = ", ".join(
                f"{i}: {describe(_first(item))}" for i, item in zip(positions, items, strict=True)
            )
            raise TypeError(
                f"The samples cannot be put into one batch ({error!r}): let the data set return tensors of "
                f"one shape, or give a DataLoader with a collate_fn. Found at {shown[:300]}."
            ) from error

    def _refuse_chance(self) -> None:
        n = len(self)
        for place in sorted({0, n // 3, 2 * n // 3, n - 1}):
            once, *more = (tree_leaves(self([place])) for _ in range(3))
            pairs = [pair for again in more for pair in zip(once, again, strict=True)]
            if any(isinstance(a, Tensor) and not _same(a, b) for a, b in pairs):
                raise ValueError(
                    f"Sample {place} differs each time it is read: random augmentation? Every statistic "
                    "reads the data twice; give the data set without it."
                )


def _splits(values: Any, n: int) -> bool:
    """Whether a column can be cut into rows and put together again with the same result."""
    if isinstance(values, Tensor | np.ndarray):
        return len(values) == n
    return isinstance(values, list) and len(values) == n and not any(isinstance(v, Tensor) for v in values)


def _join_rows(values: list[Any]) -> Any:
    if isinstance(values[0], Tensor):
        return torch.cat(values)
    if isinstance(values[0], np.ndarray):
        return np.concatenate(values)
    return [value for part in values for value in part]


def _checksum_of_positions(positions: Sequence[int]) -> str:
    return str(positions) if isinstance(positions, range) else checksums([torch.tensor(positions)])[0]


def _first(item: Any) -> Any:
    return item[0] if isinstance(item, tuple) and item else item


def _unread(position: int, n: int, error: Exception) -> Exception:
    """Return the error to raise where a sample cannot be read: too little memory is no fault of the data."""
    text = f"Sample {position} of {n} cannot be read from the data set ({type(error).__name__}: {error})"
    if isinstance(error, MemoryError):
        return MemoryError(f"{text}: use smaller batches.")
    return ValueError(f"{text}: mend it, or leave it out, for example by torch.utils.data.Subset.")


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except Exception as error:
        raise TypeError(
            f"{type(dataset).__name__} does not tell its length ({type(error).__name__}: {error}): samples "
            "are referred to by number. Give it a __len__, or collect it first, for example list(dataset)."
        ) from error


def _refuse_empty(n: int) -> None:
    if n == 0:
        raise ValueError("The data set is empty: there is nothing to compare.")


def _refuse_unreadable(positions: list[int], inputs: Any, labels: Any) -> None:
    """Raise if a batch holds what is no tensor with values: numbers of one shape were expected."""
    for name, value in [*(("data", leaf) for leaf in tree_leaves(inputs)), ("labels", labels)]:
        if isinstance(value, str | bytes) or (value is None and name == "data"):
            raise TypeError(
                f"Sample {positions[0]} of the data set holds {describe(value)}, which no model takes as it "
                "is: let the data set return tensors."
            )
        if isinstance(value, Tensor):
            refuse_unreadable(name, value)


def _apart(batch: Any, labels: Any) -> tuple[Any, Tensor | None]:
    """Return inputs and labels of a batch or of a whole data set."""
    if labels is not None and labels is not False and not isinstance(labels, str):
        refuse_text_labels(labels)
        return _bare(batch), column("labels", labels)
    if labels is False:
        return _bare(batch), None
    if isinstance(batch, Mapping):
        names = [labels] if labels else [name for name in LABEL_NAMES if name in batch]
        if labels and labels not in batch:
            raise ValueError(f"There is no column {labels!r}, only {sorted(batch)}.")
        inputs = {name: value for name, value in batch.items() if name not in names}
        return inputs, batch[names[0]] if names else None
    if labels is not None:
        raise ValueError(
            f"labels={labels!r} names a column, and the data have no named columns: give a dict, or the "
            "labels themselves."
        )
    if isinstance(batch, tuple | list) and len(batch) > 1:
        return _bare(tuple(batch[:-1])), batch[-1]
    return _bare(batch), None


def _bare(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return dict(batch)  # such as a BatchEncoding of transformers, which torch takes for one leaf
    return batch[0] if isinstance(batch, tuple | list) and len(batch) == 1 else batch


def _usable(values: Any) -> bool:
    return isinstance(values, Tensor) or not isinstance(values[0], str)


def column(name: str, values: Any) -> Tensor:
    """Return one number or array a sample as a tensor, or say why not."""
    return to_tensor(
        f"Column {name!r}",
        values,
        "numbers of one shape for every sample are needed; map text to numbers, for example labels by "
        "np.unique(labels, return_inverse=True)[1]; pad, transform or leave out what has many shapes",
    )


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _refuse_list_of_columns(dataset: Any) -> None:
    if not isinstance(dataset, list) or not dataset:
        return
    if isinstance(dataset[0], str):
        raise TypeError("A list of text was given: no model takes it as it is; tokenize or read it first.")
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
                "This looks like a list of batches, but an item is one sample: give the loader itself, "
                "or its data set."
            )


def _ordered_batch_size(loader: DataLoader[Any]) -> int:
    """Return the batch size of a loader that reads its data set from first to last, or refuse it."""
    drawn = loader.batch_sampler
    inner = getattr(drawn, "sampler", loader.sampler)
    if type(inner) is not SequentialSampler or (drawn is not None and type(drawn) is not BatchSampler):
        culprit = inner if type(drawn) is BatchSampler or drawn is None else drawn
        raise ValueError(
            f"This DataLoader takes its samples by {type(culprit).__name__}, and two passes may see them "
            "in different orders. Make it with shuffle=False and no sampler or batch_sampler of its own; "
            "for part of the data, give a torch.utils.data.Subset."
        )
    return loader.batch_size or getattr(drawn, "batch_size", None) or 256


def _batch_size(loader: DataLoader[Any]) -> int:
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else 256


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

    Labels of tokens, padded to several lengths, are filled up with −100.
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
        size: Samples of a batch; the loader's, or what fits into memory, if None.
        labels: Numbers given apart, or the name of a column, or False where all that an item holds is input.
        limit: Use the first so many samples only.
        pad_id: The token that fills up input_ids of several lengths, such as tokenizer.pad_token_id; they are padded
            on the right, with 0 in the attention mask and −100 in the labels.
        columns: Names of the columns of a tensor or array (n, q), as tables have them: an index of these samples then
            reads tables by name.

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
                raise ValueError(f"These are batches already: give {name} when they are made.")
    else:
        pad_id = None if pad_id is None else check_integer("pad_id", pad_id, 0)
        names = None if columns is None else check_names("columns", columns)
        source, own_size, count = opened(dataset, labels, pad_id=pad_id, columns=names)
        positions = range(count)
    size = own_size if size is None else size
    size = None if size is None else check_integer("size", size, 1)
    limit = None if limit is None else check_integer("limit", limit, 1)
    if len(positions) == 0:
        raise ValueError("The data set is empty: there is nothing to compare.")
    return Batches(source, positions[:limit], size or 256, given=size is not None)


def training_data(dataset: Any, *, labels: Any = None) -> Batches:
    """Return a data set to train on, as `batches` does, which may also shuffle or augment at random.

    Of a DataLoader the data set, the collate function and the batch size are used, whatever its sampler: samples are
    read by their position in the data set.

    Args:
        dataset: Anything that `batches` accepts, or a DataLoader with any sampler.
        labels: As `batches` takes them.

    """
    if isinstance(dataset, Batches):
        return batches(dataset, labels=labels)
    source, size, count = opened(dataset, labels, fixed=False)
    return Batches(source, range(count), size or 256, given=size is not None)
