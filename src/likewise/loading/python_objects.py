"""Data sets from Python code: anything that likewise.batches accepts, with labels and names if there are any."""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from likewise.loading.dataset import Labels, Options, Preparation, Prepared, Read, as_tensor, labels_from
from likewise.loading.imports import build_object, import_object
from likewise.loading.paths import listed
from likewise.loading.tables import table_read

USED = ("label", "prepare", "limit", "show_columns")
LABELS = ("labels", "label")  # where batches looks for them


def read_object(text: str, options: Options) -> Read:
    """Return the data set that an import string names, or that a class or function without arguments returns.

    It may be a Read, or a dict with its keys. `label` names a column of a dict, of a Hugging Face dataset, or
    of items that are dicts. Integers stay the labels they are: no class is numbered anew. A preparation gets
    what an item holds but its label. Of items that are dicts only the columns in `show_columns` are shown.
    """
    found: Any = import_object(text)
    ready = hasattr(found, "__getitem__") and not isinstance(found, type)
    if not ready and callable(found) and not isinstance(found, nn.Module):
        found = build_object(found, text, "the data set")
    if type(found).__module__.split(".")[0] == "pandas" and hasattr(found, "columns"):
        return table_read(found, options, text)
    options.refuse_all_but(USED, f"the {type(found).__name__} of {text}")
    read = _read(found, text)
    if (options.label, options.prepare, options.limit, options.show_columns) != (None, None, None, None):
        _refuse_batches(read.dataset, text)
    if options.show_columns is not None:
        read = read._replace(show=_item_viewer(read.dataset, options.show_columns, text))
    if options.label is not None or (options.prepare is not None and read.labels is None):
        read = _separate_label(read, options, text)
    if options.limit is not None:
        read = _first(read, options.limit)
    return read if options.prepare is None else _prepared(read, options.prepare, text)


def _read(found: Any, text: str) -> Read:
    given = found._asdict() if isinstance(found, Read) else found
    if not isinstance(given, Mapping) or "dataset" not in given:
        return Read(_check_dataset(found, text))
    unknown = sorted(set(map(str, given)) - set(Read._fields))
    if unknown:
        raise ValueError(
            f"{text} gave {listed(unknown)} besides a dataset: expected only {', '.join(Read._fields)}."
        )
    read = Read(**given)
    _check_dataset(read.dataset, text)
    names = None if read.names is None else tuple(map(str, read.names))
    classes = None if read.classes is None else tuple(map(str, read.classes))
    read = read._replace(names=names, classes=classes)
    if read.labels is None:
        return read
    labels = _labels(read.labels, "labels")
    if names is not None and len(names) != len(labels.values):
        raise ValueError(f"{text} gave {len(names)} names for {len(labels.values)} labels.")
    return read._replace(labels=labels.values, classes=classes or labels.classes)


def _check_dataset(dataset: Any, text: str) -> Any:
    if isinstance(dataset, Mapping) and any(hasattr(part, "column_names") for part in dataset.values()):
        raise TypeError(f"{text} gave the parts {listed(dataset)}: return one of them.")
    plain = isinstance(dataset, str | bytes | PathLike | IterableDataset)
    if plain or not (hasattr(dataset, "__getitem__") or isinstance(dataset, DataLoader)):
        raise TypeError(
            f"{text} gave {type(dataset).__name__}: expected a torch Dataset, tensors, arrays, a list of "
            "samples, or a function that returns one."
        )
    return dataset


def _refuse_batches(dataset: Any, text: str) -> None:
    if isinstance(dataset, DataLoader) or type(dataset).__name__ == "Batches":
        raise TypeError(
            f"{text} gave a {type(dataset).__name__}, which is in batches already: return its data set to "
            "use label, prepare, limit or show_columns."
        )


def _item_viewer(dataset: Any, names: Sequence[str], text: str) -> Callable[[int], dict[str, Any]]:
    """Return what to show of an item: these of its columns."""
    there = columns(dataset)
    for name in names:
        if name not in there:
            raise ValueError(f"{text} has no column {name!r} to show: it has {listed(there)}.")

    def show(i: int) -> dict[str, Any]:
        item = sample(dataset, i)
        return {name: item[name] for name in names}

    return show


def _labels(values: Any, name: str) -> Labels:
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(list(values))
    if array.dtype.kind in "iuf":
        numbers = as_tensor(array)
        return Labels(numbers if numbers.is_floating_point() else numbers.long(), None)
    return labels_from(array, name)


def _separate_label(read: Read, options: Options, text: str) -> Read:
    """Return the data without the label column, if there is one."""
    dataset, there = read.dataset, columns(read.dataset)
    name = options.label or next((name for name in LABELS if name in there), None)
    if name is None:
        return read
    if name not in there:
        raise ValueError(f"{text} has no column {name!r}: it has {listed(there)}.")
    by_columns = isinstance(dataset, Mapping) or hasattr(dataset, "column_names")
    values = dataset[name] if by_columns else [dataset[i][name] for i in range(len(dataset))]
    labels = _labels(values, name)
    features = getattr(dataset, "features", None) or {}
    classes = getattr(features.get(name), "names", None) or labels.classes
    return read._replace(
        dataset=without(dataset, name), labels=labels.values, classes=classes and tuple(classes)
    )


def _first(read: Read, limit: int) -> Read:
    labels = None if read.labels is None else read.labels[:limit]
    names = None if read.names is None else read.names[:limit]
    return read._replace(dataset=first(read.dataset, limit), labels=labels, names=names)


def _prepared(read: Read, prepare: Preparation, text: str) -> Read:
    dataset, n = read.dataset, length(read.dataset)
    if n == 0:
        raise ValueError(f"{text} gave a data set without samples.")
    pairs = (
        Labeled(dataset, n, prepare, read.names) if read.labels is None and Labeled.fits(dataset) else None
    )

    def raw(i: int) -> Any:
        return sample(dataset, i) if pairs is None else pairs.raw(i)

    prepared = Prepared(raw, n, prepare, read.names) if pairs is None else pairs
    seen = isinstance(raw(0), str | np.ndarray) or type(raw(0)).__module__.startswith("PIL.")
    return read._replace(dataset=prepared, show=read.show or (raw if seen else None))


def length(dataset: Any) -> int:
    """Return the number of samples."""
    if isinstance(dataset, Mapping):
        return length(next(iter(dataset.values()), ()))
    return length(dataset[0]) if _is_whole(dataset) else len(dataset)


def sample(dataset: Any, i: int) -> Any:
    """Return sample i; for columns, a dict."""
    if isinstance(dataset, Mapping):
        return {name: sample(values, i) for name, values in dataset.items()}
    if _is_whole(dataset):
        return tuple(sample(part, i) for part in dataset)
    return dataset[i]


def first(dataset: Any, limit: int) -> Any:
    """Return the first samples."""
    if isinstance(dataset, Mapping):
        return {name: first(values, limit) for name, values in dataset.items()}
    if _is_whole(dataset):
        return tuple(first(part, limit) for part in dataset)
    if isinstance(dataset, Tensor | np.ndarray | list | tuple):
        return dataset[:limit]
    kept = range(min(limit, len(dataset)))
    return dataset.select(kept) if hasattr(dataset, "column_names") else Subset(dataset, kept)


def columns(dataset: Any) -> list[str]:
    """Return the names of columns, or the keys of items that are dicts."""
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
                f"The label of sample 0 is the text {label!r}: return a likewise.loading.Read, or a dict, with "
                "separate labels; classes are then numbered."
            )

    @staticmethod
    def fits(dataset: Any) -> bool:
        """Return whether the last entry of an item is its label, as for batches."""
        one = sample(dataset, 0)
        return isinstance(one, tuple | list) and len(one) > 1

    def raw(self, i: int) -> Any:
        """Return item i without its label."""
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
    """Return whether this is a tuple of all inputs and all labels, as for batches."""
    if not isinstance(dataset, tuple) or not dataset:
        return False
    held = isinstance(dataset[0], Tensor | np.ndarray | Mapping)
    return held or all(isinstance(part, Tensor | np.ndarray | Mapping | tuple) for part in dataset)
