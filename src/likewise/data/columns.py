"""Columns of pandas and polars tables, and which part of a data set is its labels."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from likewise.checks import to_tensor


def is_table(values: Any) -> bool:
    """Whether this is a table of pandas or polars, or a column of one."""
    return hasattr(values, "to_numpy") and not isinstance(values, type)


def has_columns(values: Any) -> bool:
    """Whether this is a table, not a column of one."""
    return is_table(values) and hasattr(values, "columns")


@dataclass(frozen=True)
class ColumnNames:
    """The names of the columns of one table, in order."""

    names: tuple[str, ...]

    def match(self, wanted: Sequence[str], table: str) -> list[int]:
        """Return where the columns of these names are, or say which is missing; `table` says which table it is."""
        here = self.names
        missing = [name for name in wanted if name not in here]
        twice = [name for name in wanted if here.count(name) > 1]
        if missing or twice:
            problem = f"has no column {missing[0]!r}" if missing else f"has the column {twice[0]!r} twice"
            raise ValueError(
                f"Columns are matched by name ({', '.join(wanted[:20])}), and {table} {problem}: it has "
                f"{', '.join(here[:20])}. Rename its columns, or pass its numbers in the right order, table.to_numpy()."
            )
        return [here.index(name) for name in wanted]


def column_names(dataset: Any) -> Any:
    """Return a tree like the data set's, with ColumnNames for each table with named columns, and None elsewhere."""
    if isinstance(dataset, Mapping):
        return {str(name): column_names(values) for name, values in dataset.items()}
    if isinstance(dataset, tuple):
        return tuple(column_names(values) for values in dataset)
    if not has_columns(dataset) or not any(isinstance(name, str) for name in dataset.columns):
        return None
    return ColumnNames(tuple(str(name) for name in dataset.columns))


def split_label(table: Any, label: str) -> tuple[Any, Any]:
    """Return a table without the column of labels, and that column."""
    names = list(table.columns)
    if label not in names:
        raise ValueError(f"There is no column {label!r}, only {', '.join(map(str, names))}.")
    return table[[name for name in names if name != label]], np.array(table[label])


def table_values(table: Any) -> Tensor:
    """Return the numbers of a table (n, q); raise naming a column that holds something else."""
    values = np.array(table.to_numpy())
    if values.dtype.kind != "O":
        return column("table", values)
    parts = []
    for name, part in zip(table.columns, values.T, strict=True):
        row = next((i for i, value in enumerate(part) if isinstance(value, str)), None)
        if row is not None:
            raise TypeError(
                f"Column {name!r} of the table holds text, {part[row]!r} in row {row} (from 0): convert it to numbers, "
                f"leave it out with table.drop(columns={name!r}), or pass labels={name!r} if it is the label."
            )
        parts.append(column(str(name), np.array(part.tolist())).double())
    return torch.stack(parts, dim=1)


def column(name: str, values: Any) -> Tensor:
    """Return one number or array per sample as a tensor; raise saying why if that is impossible."""
    return to_tensor(
        f"Column {name!r}",
        values,
        "numbers of one shape for every sample are needed; map text to numbers, for example labels by "
        "np.unique(labels, return_inverse=True)[1]; pad, transform or leave out what has many shapes",
    )


LABEL_NAMES = ("labels", "label")


def separate_labels(batch: Any, labels: Any) -> tuple[Any, Tensor | None]:
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
            f"labels={labels!r} names a column, but the data have no named columns: pass the data as a dict, or the "
            "labels themselves."
        )
    if isinstance(batch, tuple | list) and len(batch) > 1:
        return _bare(tuple(batch[:-1])), batch[-1]
    return _bare(batch), None


def _bare(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return dict(batch)  # such as a BatchEncoding of transformers, which torch takes for one leaf
    return batch[0] if isinstance(batch, tuple | list) and len(batch) == 1 else batch


def refuse_text_labels(labels: Any) -> None:
    """Raise if labels are text: only the user knows which output belongs to which class."""
    if isinstance(labels, Tensor):
        return
    values = labels.to_numpy() if is_table(labels) else labels
    if isinstance(values, np.ndarray):
        values = values.flat if values.dtype.kind in "OU" else ()
    first = next((v for v in values if isinstance(v, str)), None) if isinstance(values, Iterable) else None
    if first is not None:
        raise TypeError(
            f"The labels are text, such as {str(first)!r}, but the model's outputs are numbered: pass the output "
            "number of each label. For classes in alphabetical order: classes, labels = np.unique(labels, "
            "return_inverse=True), then labels=labels, and classes=list(classes) to show names."
        )
