"""Separate the labels of a data set from its inputs."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from likewise.data.tables import column, is_table

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
