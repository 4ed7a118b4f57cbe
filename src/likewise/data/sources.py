"""Where samples are fetched from, by position: tensors that hold all of them, or items read one by one.

Items that are costly to read are kept in a cache.
"""

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map, tree_unflatten
from torch.utils.data import TensorDataset, default_collate

from likewise.checks import describe, refuse_unreadable
from likewise.data.columns import LABEL_NAMES, ColumnNames, column, refuse_text_labels, separate_labels
from likewise.fingerprint import ChecksumCache, checksums, tensor_states
from likewise.padding import PaddingCollate, RaggedError, pad_columns
from likewise.torch_state import preserve_generators


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


class TensorSource:
    """Samples from tensors that hold all of them."""

    def __init__(self, inputs: Any, labels: Tensor | None, names: Any = None) -> None:
        """Check the tensors; `names`: a tree like that of the inputs, with ColumnNames or None."""
        leaves = tree_leaves(inputs)
        if not leaves:
            raise ValueError(f"The data are empty, found {describe(inputs)}: pass at least one tensor.")
        named = [("data", leaf) for leaf in leaves] + ([] if labels is None else [("labels", labels)])
        for name, leaf in named:
            if not isinstance(leaf, Tensor) or leaf.dim() == 0:
                raise ValueError(
                    f"{name} must have samples along the first dimension, found {describe(leaf)}: pass a single "
                    "sample as x[None]."
                )
        lengths = sorted({len(leaf) for leaf in leaves})
        refuse_empty(lengths[0])
        if len(lengths) != 1:
            raise ValueError(f"Inputs differ in length, {lengths}: each needs an entry for every sample.")
        if labels is not None and len(labels) != lengths[0]:
            raise ValueError(f"{len(labels)} labels for {lengths[0]} samples: expected one for each.")
        self._tables = _named_tables(inputs, names)
        self._inputs, self._labels, self._n = inputs, labels, lengths[0]
        self._checksums = ChecksumCache()

    def __len__(self) -> int:
        return self._n

    def __call__(self, positions: list[int]) -> tuple[Any, Tensor | None]:
        """Return the inputs and labels of the samples at these positions."""
        where: slice | list[int] = positions
        if positions == list(range(positions[0], positions[0] + len(positions))):
            where = slice(positions[0], positions[0] + len(positions))  # a view, not a copy
        labels = None if self._labels is None else self._labels[where]
        return tree_map(lambda t: t[where], self._inputs), labels

    @property
    def columns(self) -> tuple[str, ...] | None:
        """The column names, prefixed by the path of the table if there are several; None if there are none."""
        names = [_qualify(place, name) for place, table in self._tables.items() for name in table.names]
        return tuple(names) or None

    def match_columns(self, names: Sequence[str]) -> Source:
        """Return the samples with these columns, table by table; raise naming one that is missing."""
        if not self._tables or self.columns == tuple(names):
            return self
        leaves, tree = tree_flatten_with_path(self._inputs)
        found = {keystr(path): leaf for path, leaf in leaves}
        tables = dict.fromkeys(found)
        for place, table in self._tables.items():
            wanted = [name.removeprefix(_qualify(place, "")) for name in names if _belongs(name, place)]
            if wanted:
                shown = "this table" if not place else f"the table of input {place}"
                found[place] = found[place][:, table.match(wanted, shown)]
            tables[place] = ColumnNames(tuple(wanted)) if wanted else table
        return TensorSource(
            tree_unflatten(found.values(), tree), self._labels, tree_unflatten(tables.values(), tree)
        )

    def checksum(self, positions: Sequence[int]) -> str:
        """Return a checksum of every number, and of the positions."""
        leaves = tree_leaves((self._inputs, self._labels))
        tensors = {str(i): leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        return " ".join([*self._checksums.get(tensors).values(), checksum_of_positions(positions)])

    def state(self) -> tuple[Any, ...]:
        """Return what changes when one of the tensors is modified."""
        return tensor_states(
            leaf for leaf in tree_leaves((self._inputs, self._labels)) if isinstance(leaf, Tensor)
        )

    def memory_checksum(self, positions: Sequence[int]) -> str | None:
        """Return the checksum of every number."""
        return f"tensors: {self.checksum(positions)}"

    def with_cache(self, max_bytes: int) -> tuple[Source, int]:
        """Return itself: all samples are in memory."""
        return self, 0


def _named_tables(inputs: Any, names: Any) -> dict[str, ColumnNames]:
    """Return the column names of tables among the inputs, by their path in the tree: "" for a single one."""
    leaves = {keystr(path): leaf for path, leaf in tree_flatten_with_path(inputs)[0]}
    known = {keystr(path): leaf for path, leaf in tree_flatten_with_path(names)[0]}
    found = {
        place: known[place]
        for place, leaf in leaves.items()
        if known.get(place) is not None and leaf.dim() == 2
    }
    for place, table in found.items():
        if len(table.names) != leaves[place].shape[1]:
            width = leaves[place].shape[1]
            raise ValueError(f"{len(table.names)} names for {width} columns: expected one for each.")
    return found


def _qualify(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _belongs(name: str, place: str) -> bool:
    """Whether a name from `columns` belongs to the table at this path."""
    return name.startswith(_qualify(place, ""))


OTHER_ORDER = 16  # samples that a collate function is tried on


class ItemSource:
    """Samples from a data set that is read item by item, or by columns."""

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[Any], Any],
        labels: Any,
        by_columns: bool,
        fixed: bool,
        pad_id: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        self._dataset, self._collate, self._by_columns = dataset, collate, by_columns
        self._pad_id = pad_id
        given = labels is not None and labels is not False and not isinstance(labels, str)
        if given:
            refuse_text_labels(labels)
        self._given = column("labels", labels) if given else None
        self._inside = False if given else labels
        self._n = _length(dataset)
        self._cache: ItemCache | None = None
        refuse_empty(self._n)
        self.columns = None  # those of a Hugging Face data set reach the model by name
        if self._given is not None and (self._given.dim() == 0 or len(self._given) != self._n):
            found = len(self._given) if self._given.dim() else 1
            raise ValueError(f"{found} labels for {self._n} samples: expected one for each.")
        if fixed:
            with preserve_generators():  # the data set may draw when it is read
                self._refuse_chance()
                if (
                    not by_columns
                    and collate is not default_collate
                    and not isinstance(collate, PaddingCollate)
                ):
                    self._refuse_other_order(min(batch_size or OTHER_ORDER, OTHER_ORDER))

    def __len__(self) -> int:
        return self._n

    def __call__(self, positions: list[int]) -> tuple[Any, Tensor | None]:
        """Return the inputs and labels of the samples at these positions."""
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
        inputs, labels = separate_labels(batch, self._inside)
        _refuse_unreadable(positions, inputs, labels)
        return inputs, labels if self._given is None else self._given[positions]

    def match_columns(self, names: Sequence[str]) -> Source:
        """Return itself: items have no columns."""
        del names
        return self

    def checksum(self, positions: Sequence[int]) -> str:
        """Return a checksum of sixteen samples, from the first to the last, and of the positions."""
        n = len(positions)
        places = sorted({i * (n - 1) // 15 for i in range(16)})
        leaves = [leaf for place in places for leaf in tree_leaves(self([int(positions[place])]))]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        shapes = str(sorted({(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors}))
        return " ".join([shapes, *checksums(tensors), checksum_of_positions(positions)])

    def state(self) -> tuple[Any, ...]:
        """Return what changes when the tensors of a TensorDataset, or labels passed separately, are modified.

        Nothing for other data sets.
        """
        tensors = self._dataset.tensors if isinstance(self._dataset, TensorDataset) else ()
        return tensor_states([*tensors, *([] if self._given is None else [self._given])])

    def memory_checksum(self, positions: Sequence[int]) -> str | None:
        """Return a checksum of the tensors of a TensorDataset, and of labels passed separately."""
        tensors = list(self._dataset.tensors) if isinstance(self._dataset, TensorDataset) else []
        form = f"{len(tensors)} tensors of a data set{'' if self._given is None else ', labels'}:"
        tensors += [] if self._given is None else [self._given]
        return " ".join([form, *checksums(tensors), checksum_of_positions(positions)]) if tensors else None

    def with_cache(self, max_bytes: int) -> tuple[Source, int]:
        """Return a source that decodes each sample once, as far as the cache goes; a list holds them already."""
        if isinstance(self._dataset, list | tuple | TensorDataset):
            return self, 0
        other = copy.copy(self)
        other._cache = ItemCache(max_bytes)
        first = other._columns([0]) if self._by_columns else other._item(0)
        size = item_bytes(first)
        return (self, 0) if size is None else (other, min(max_bytes, size * self._n))

    def _read_items(self, positions: list[int]) -> list[Any]:
        """Return the items at these positions, read together if the data set can and none is in a cache."""
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

    def _refuse_other_order(self, size: int) -> None:
        """Raise if the rows of a batch are not its samples in order: two batches, then with the first one last."""
        for start in sorted({0, self._n // 2 // size * size}):
            places = list(range(start, min(start + size, self._n)))
            rows, rolled = (
                [leaf for leaf in tree_leaves(self(order)) if isinstance(leaf, Tensor)]
                for order in (places, places[1:] + places[:1])
            )
            for leaf in rows:
                if leaf.dim() == 0 or len(leaf) != len(places):
                    raise ValueError(
                        f"The collate function returns a tensor {tuple(leaf.shape)} for {len(places)} samples: "
                        "expected one row for each along the first dimension. It must drop nothing; to leave samples "
                        "out, use torch.utils.data.Subset."
                    )
            if not all(_same(a.roll(-1, 0), b) for a, b in zip(rows, rolled, strict=True)):
                raise ValueError(
                    f"The collate function changes the order of samples {places[0]} to {places[-1]}, or draws at "
                    "random. Row i of a batch must be sample i; otherwise every result would name the wrong samples. "
                    "Does it sort by length, or mix samples? Keep the order (pack_padded_sequence sorts by itself with "
                    "enforce_sorted=False), and mix only in training."
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


def _first(item: Any) -> Any:
    return item[0] if isinstance(item, tuple) and item else item


def _unread(position: int, n: int, error: Exception) -> Exception:
    """Return the error to raise if a sample cannot be read; lack of memory is not the data's fault."""
    text = f"Sample {position} of {n} cannot be read from the data set ({type(error).__name__}: {error})"
    if isinstance(error, MemoryError):
        return MemoryError(f"{text}: use smaller batches.")
    return ValueError(f"{text}: mend it, or leave it out, for example by torch.utils.data.Subset.")


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except Exception as error:
        raise TypeError(
            f"{type(dataset).__name__} has no length ({type(error).__name__}: {error}), and samples are referred to by "
            "number. Give it a __len__, or collect it first, for example list(dataset)."
        ) from error


def _refuse_unreadable(positions: list[int], inputs: Any, labels: Any) -> None:
    """Raise if a batch holds something other than tensors with values."""
    for name, value in [*(("data", leaf) for leaf in tree_leaves(inputs)), ("labels", labels)]:
        if isinstance(value, str | bytes) or (value is None and name == "data"):
            raise TypeError(
                f"Sample {positions[0]} of the data set holds {describe(value)}, which no model takes: let the "
                "data set return tensors."
            )
        if isinstance(value, Tensor):
            refuse_unreadable(name, value)


def _usable(values: Any) -> bool:
    return isinstance(values, Tensor) or not isinstance(values[0], str)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


LEAF_BYTES = 256  # of a tensor or number beside its values: about what the objects of Python take


class ItemCache:
    """A cache of data set items, up to a number of bytes; it keeps the first items.

    Passes read from first to last, so a cache that drops the oldest item would never hold the next one.
    """

    def __init__(self, max_bytes: int) -> None:
        self._free, self._items = max_bytes, dict[int, Any]()

    def __contains__(self, position: int) -> bool:
        return position in self._items

    def get(self, position: int) -> Any:
        """Return a copy of an item: a collate function may modify it."""
        return tree_map(_copy_leaf, self._items[position])

    def put(self, position: int, item: Any) -> None:
        """Store a copy of an item, if its bytes can be counted and fit."""
        size = item_bytes(item)
        if position not in self._items and size is not None and size <= self._free:
            self._items[position] = tree_map(_copy_leaf, item)
            self._free -= size


def item_bytes(item: Any) -> int | None:
    """Return the bytes of an item; None if it holds something that cannot be counted or copied."""
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
