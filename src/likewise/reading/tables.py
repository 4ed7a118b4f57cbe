"""A table, a row a sample: numbers, text, or rows for a function to prepare."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from likewise.reading.imports import library
from likewise.reading.labels import Labels, labels_from
from likewise.reading.options import Options, Read
from likewise.reading.paths import listed
from likewise.reading.samples import Prepared

if TYPE_CHECKING:
    from pandas import DataFrame

USED = ("label", "text_column", "columns", "prepare", "limit")
SHOWN = 50
# Words that stand for a missing number; in a column of text they are words.
MISSING = ("", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "-NaN", "-nan", "NULL", "null", "None")


def read_table(path: Path, options: Options) -> Read:
    """Return the rows of a .csv, .tsv or .parquet file."""
    try:
        frame = _parquet(path) if path.suffix.lower() == ".parquet" else _separated(path, options.text_column)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read as a table ({error}).") from error
    return table_read(frame, options, str(path))


def table_read(frame: "DataFrame", options: Options, name: str) -> Read:
    """Return the rows of a table: numbers float32 (n, q), or what a function makes of text or of rows.

    A function that prepares rows gets a dict, column -> value, without the label. Classes are numbered over
    the whole table, also where only part of it is kept.
    """
    options.refuse_all_but(USED, f"the table {name}")
    frame = frame.reset_index(drop=True).set_axis([str(column) for column in frame.columns], axis=1)
    asked = (options.label, options.text_column, *(options.columns or ()))
    _refuse_missing(frame, [column for column in asked if column is not None], name)
    labels = _labels(frame, options.label, name)
    inputs = frame.drop(columns=[] if options.label is None else [options.label]).iloc[: options.limit]
    values = None if labels is None else labels.values[: options.limit]
    classes = None if labels is None else labels.classes
    return _inputs(inputs, options, name)._replace(labels=values, classes=classes)


def _parquet(path: Path) -> "DataFrame":
    library("pyarrow", "pyarrow")
    return library("pandas", "pandas").read_parquet(path)


def _separated(path: Path, text_column: str | None) -> "DataFrame":
    pandas = library("pandas", "pandas")
    separator = "\t" if path.suffix.lower() == ".tsv" else ","
    columns = pandas.read_csv(path, sep=separator, nrows=0).columns
    missing = {column: list(MISSING) for column in columns if column != text_column}
    types = {text_column: str} if text_column in columns else None
    return pandas.read_csv(path, sep=separator, keep_default_na=False, na_values=missing, dtype=types)


def _refuse_missing(frame: "DataFrame", asked: list[str], name: str) -> None:
    if not len(frame):
        raise ValueError(f"{name} has no rows: there is nothing to compare.")
    for column in asked:
        if column not in frame.columns:
            raise ValueError(f"{name} has no column {column!r}: it has {listed(frame.columns, 50)}.")
        if asked.count(column) > 1:
            raise ValueError(f"Column {column!r} is asked for twice: a label, or text, is no other input.")


def _labels(frame: "DataFrame", label: str | None, name: str) -> Labels | None:
    if label is None:
        return None
    column = frame[label]
    empty = np.flatnonzero(column.isna().to_numpy())
    if len(empty):
        raise ValueError(
            f"The label {label!r} of {name} is missing in row {empty[0]} (rows from 0, without the header; "
            "an empty cell, or a word such as NA or None): fill it in or leave the row out."
        )
    return labels_from(column.to_numpy(), label)


def _inputs(frame: "DataFrame", options: Options, name: str) -> Read:
    n, prepare, column = len(frame), options.prepare, options.text_column

    def row(i: int) -> dict[str, object]:
        return _row(frame, i, options.columns)

    def seen(i: int) -> dict[str, object]:
        return _row(frame, i, frame.columns[:SHOWN])

    if column is not None:
        if prepare is None or options.columns is not None:
            raise ValueError(
                f"text_column={column!r} needs prepare, the import string of a function from text to the "
                "model's input such as a tokenizer, and goes without columns."
            )
        texts = _texts(frame, column, name)
        return Read(Prepared(texts.__getitem__, n, prepare), show=texts.__getitem__)
    if prepare is not None:
        return Read(Prepared(row, n, prepare), show=seen)
    return Read(_numbers(frame, options.columns, name), show=seen)


def _row(frame: "DataFrame", i: int, columns: Any) -> dict[str, object]:
    if not 0 <= i < len(frame):
        raise IndexError(f"row {i} of {len(frame)}")
    chosen = frame.columns if columns is None else columns
    values = {column: frame[column].iloc[i] for column in chosen}
    return {column: v.item() if isinstance(v, np.generic) else v for column, v in values.items()}


def _texts(frame: "DataFrame", column: str, name: str) -> list[str]:
    texts = frame[column].tolist()
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(
                f"Column {column!r} of {name} holds {text!r} in row {i} (from 0), expected text: fill it in, "
                "or name another column."
            )
    return texts


def _numbers(frame: "DataFrame", asked: Any, name: str) -> Tensor:
    numeric = library("pandas", "pandas").api.types.is_numeric_dtype
    columns = [c for c in frame.columns if numeric(frame[c].dtype)] if asked is None else list(asked)
    if not columns:
        raise ValueError(
            f"No columns of numbers in {name}, only {listed(frame.columns)}: name them by columns, or give "
            "text_column and prepare."
        )
    for column in columns:
        if not numeric(frame[column].dtype):
            raise ValueError(
                f"Column {column!r} of {name} holds no numbers ({frame[column].dtype}, for example "
                f"{frame[column].iloc[0]!r}): encode it, leave it out, or give prepare."
            )
    values = frame[columns].to_numpy(dtype=np.float32, na_value=np.nan)
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        row, place = bad[0]
        raise ValueError(
            f"Column {columns[place]!r} of {name} holds {values[row, place]} in row {row} (rows from 0, "
            f"without the header), as {len(bad)} cells do in all: fill them in, or leave out rows or columns."
        )
    return torch.from_numpy(np.ascontiguousarray(values))
