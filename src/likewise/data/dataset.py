"""Choose the source for each kind of data set."""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    default_collate,
    default_convert,
)

from likewise.checks import describe, to_tensor
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
from likewise.padding import PaddingCollate, pad_columns


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
