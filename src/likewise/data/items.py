"""Samples from a data set that is read item by item, or by columns."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset, default_collate

from likewise.checks import describe, refuse_unreadable
from likewise.data.cache import ItemCache, item_bytes
from likewise.data.labels import LABEL_NAMES, refuse_text_labels, separate_labels
from likewise.data.source import Source, checksum_of_positions, refuse_empty
from likewise.data.tables import column
from likewise.fingerprint import checksums, tensor_states
from likewise.model_state import preserve_generators
from likewise.padding import PaddingCollate, RaggedError, pad_columns

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
