"""Samples of a data set that may be held whole, in columns, or item by item."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset, Subset

from likewise.reading.options import Preparation
from likewise.reading.samples import Prepared


def length(dataset: Any) -> int:
    """Return the number of samples."""
    if isinstance(dataset, Mapping):
        return length(next(iter(dataset.values()), ()))
    return length(dataset[0]) if _is_whole(dataset) else len(dataset)


def sample(dataset: Any, i: int) -> Any:
    """Return sample i; of columns, a dict."""
    if isinstance(dataset, Mapping):
        return {name: sample(values, i) for name, values in dataset.items()}
    if _is_whole(dataset):
        return tuple(sample(part, i) for part in dataset)
    return dataset[i]


def first(dataset: Any, limit: int) -> Any:
    """Return the first so many samples."""
    if isinstance(dataset, Mapping):
        return {name: first(values, limit) for name, values in dataset.items()}
    if _is_whole(dataset):
        return tuple(first(part, limit) for part in dataset)
    if isinstance(dataset, Tensor | np.ndarray | list | tuple):
        return dataset[:limit]
    kept = range(min(limit, len(dataset)))
    return dataset.select(kept) if hasattr(dataset, "column_names") else Subset(dataset, kept)


def columns(dataset: Any) -> list[str]:
    """Return the names of columns, or of what an item that is a dict holds."""
    if hasattr(dataset, "column_names"):
        return list(dataset.column_names)
    if not length(dataset):
        return []
    one = sample(dataset, 0)
    return list(one) if isinstance(one, Mapping) else []


def without(dataset: Any, name: str) -> Any:
    """Return the samples without one of their columns."""
    if isinstance(dataset, Mapping):
        return {key: values for key, values in dataset.items() if key != name}
    if hasattr(dataset, "column_names"):
        return dataset.remove_columns([name])
    return _Without(dataset, name)


class Labeled(Dataset[Any]):
    """Items (input, label), or (input, input, label), with the input prepared."""

    def __init__(self, dataset: Any, n: int, prepare: Preparation, names: tuple[str, ...] | None) -> None:
        self._dataset = dataset
        self._prepared = Prepared(self.raw, n, prepare, names)
        label = sample(dataset, 0)[-1]
        if isinstance(label, str):
            raise TypeError(
                f"The label of sample 0 is the text {label!r}: return a likewise.reading.Read, or a dict, "
                "with the labels apart, and the classes are numbered."
            )

    @staticmethod
    def fits(dataset: Any) -> bool:
        """Return whether the last of an item is its label, as batches sees it."""
        one = sample(dataset, 0)
        return isinstance(one, tuple | list) and len(one) > 1

    def raw(self, i: int) -> Any:
        """Return what item i holds but its label."""
        return _inputs(sample(self._dataset, i))

    def __len__(self) -> int:
        return len(self._prepared)

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        item = sample(self._dataset, i)
        return self._prepared.input(i, _inputs(item)), item[-1]


def _inputs(item: Any) -> Any:
    return item[0] if len(item) == 2 else item[:-1]


class _Without(Dataset[Any]):
    """Items that are dicts, without one of their columns."""

    def __init__(self, dataset: Any, name: str) -> None:
        self._dataset, self._name = dataset, name

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {name: value for name, value in self._dataset[i].items() if name != self._name}


def _is_whole(dataset: Any) -> bool:
    """Return whether this is a tuple of all inputs and all labels, as batches sees it."""
    if not isinstance(dataset, tuple) or not dataset:
        return False
    held = isinstance(dataset[0], Tensor | np.ndarray | Mapping)
    return held or all(isinstance(part, Tensor | np.ndarray | Mapping | tuple) for part in dataset)
