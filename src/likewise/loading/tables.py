"""Read a table with one row per sample: numbers, text, or rows for a function to prepare."""

import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from likewise.loading.dataset import Labels, Options, Prepared, Read, labels_from
from likewise.loading.imports import library
from likewise.loading.paths import listed, refuse_expansion
from likewise.loading.texts import Texts

if TYPE_CHECKING:
    from pandas import DataFrame, Series
    from pyarrow.parquet import ParquetFile

USED = ("label", "text_column", "columns", "prepare", "limit", "show_columns")
MOST_SHOWN = 50  # of the inputs; columns that are named are all shown
BATCH_BYTES = 2**24  # about what is read at once to measure a column of unknown size
# Words that stand for a missing number; in a column of text they are words.
MISSING = ("", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "-NaN", "-nan", "NULL", "null", "None")


def read_table(path: Path, options: Options) -> Read:
    """Return the rows of a .csv, .tsv, .parquet or .jsonl file."""
    try:
        frame = _frame(path, options)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read as a table ({error}).") from error
    return table_read(frame, options, str(path))


def table_columns(path: Path) -> list[str]:
    """Return the names of a table's columns; rows are read of JSON lines only."""
    if path.suffix.lower() == ".jsonl":
        return [str(name) for name in _json_lines(path).columns]
    if path.suffix.lower() == ".parquet":
        return list(library("pyarrow.parquet", "pyarrow").read_schema(path).names)
    separator = "\t" if path.suffix.lower() == ".tsv" else ","
    return [str(name) for name in library("pandas", "pandas").read_csv(path, sep=separator, nrows=0).columns]


def text_lines(text: str) -> list[str]:
    """Return the lines of a text without a byte order mark.

    Only line feeds end a line: the other separators of Unicode, at which `splitlines` splits too, may stand in a text.
    """
    return text.removeprefix("\ufeff").removesuffix("\n").split("\n")


def text_columns(options: Options, there: Iterable[str]) -> list[str]:
    """Return the text columns: one, or two separated by a comma for pairs."""
    if options.text_column is None:
        return []
    known = {str(name) for name in there}
    if options.text_column in known or options.tokenization is None or options.prepare is not None:
        return [options.text_column]
    return [part.strip() for part in options.text_column.split(",")]


def table_read(frame: "DataFrame", options: Options, name: str) -> Read:
    """Return the rows of a table: numbers as float32 (n, q), or text or rows prepared by a function.

    A function that prepares rows gets a dict, column -> value, without the label. Classes are numbered over
    the whole table, also where only part of it is kept. Of a row a person sees the label, the columns that
    are named as inputs or to be shown, and where none is named those that the model is called with. What a
    function makes of whole rows tells nothing of the columns it used, so then none is shown unless named.
    """
    options.refuse_all_but(USED, f"the table {name}")
    frame = frame.reset_index(drop=True).set_axis([str(column) for column in frame.columns], axis=1)
    _refuse_missing(frame, options, name)
    unfilled = options.labels_optional and bool(frame[options.label].isna().any())
    labels = None if unfilled else _labels(frame, options.label, name)
    rows = frame.iloc[: options.limit]
    inputs = rows.drop(columns=[] if options.label is None else [options.label])
    dataset, shown = _inputs(inputs, options, name)
    notes = dataset.notes if isinstance(dataset, Texts) else ()
    if isinstance(dataset, Tensor) and options.columns is None:
        notes = _left_out(inputs, shown, options, name)
    if unfilled:
        notes = (
            *notes,
            f"the label {options.label!r} is missing in some rows of {name}, so it is left out.",
        )
    values = None if labels is None else labels.values[: options.limit]
    classes = None if labels is None else labels.classes
    columns = tuple(shown) if isinstance(dataset, Tensor) else None
    return Read(
        dataset,
        values,
        classes,
        show=_row_viewer(rows, shown, options),
        notes=notes,
        columns=columns,
        token_text=dataset.token_text if isinstance(dataset, Texts) else None,
    )


def _frame(path: Path, options: Options) -> "DataFrame":
    if path.suffix.lower() == ".jsonl":
        return _json_lines(path)
    return _parquet(path, options) if path.suffix.lower() == ".parquet" else _read_separated(path, options)


def _json_lines(path: Path) -> "DataFrame":
    """Return JSON objects, one per line, unchanged: no word becomes a date or a missing value."""
    rows = []
    for number, line in enumerate(text_lines(path.read_text(encoding="utf-8")), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f'line {number} is no JSON object, such as {{"text": ...}}')
        rows.append(row)
    return library("pandas", "pandas").DataFrame(rows)


def _parquet(path: Path, options: Options) -> "DataFrame":
    library("pyarrow", "pyarrow")
    with library("pyarrow.parquet", "pyarrow").ParquetFile(path) as file:
        needed = _parquet_bytes(file, options.max_memory)
    refuse_expansion(path, "The table", needed, options.max_memory)
    return library("pandas", "pandas").read_parquet(path)


def _parquet_bytes(file: "ParquetFile", enough: int) -> int:
    """Return the bytes of a table in memory, or more than enough.

    The metadata tell what is stored, where a column of equal values takes nothing: columns of fixed width are
    counted by their rows, others are read batch by batch.
    """
    rows, fields = file.metadata.num_rows, list(file.schema_arrow)
    widths = {field.name: _byte_width(field.type) for field in fields}
    total = rows * sum(width for width in widths.values() if width is not None)
    unknown = [name for name, width in widths.items() if width is None]
    if unknown and total <= enough:
        size = max(1, BATCH_BYTES // (256 * len(unknown)))
        for batch in file.iter_batches(size, columns=unknown):
            total += batch.nbytes
            if total > enough:
                break
    return total


def _byte_width(type_: Any) -> int | None:
    """Return the bytes of a value; None if that depends on the value."""
    types = library("pyarrow", "pyarrow").types
    return -(-type_.bit_width // 8) if types.is_primitive(type_) else None


def _read_separated(path: Path, options: Options) -> "DataFrame":
    pandas = library("pandas", "pandas")
    separator = "\t" if path.suffix.lower() == ".tsv" else ","
    texts = text_columns(options, table_columns(path))
    # Beside columns of text only labels and what is shown are used, so only they can have missing values.
    used = {c for c in (options.label, *(options.show_columns or ())) if c is not None and c not in texts}
    missing = {column: list(MISSING) for column in used} if texts else list(MISSING)
    types = dict.fromkeys(texts, str) if texts else None
    with warnings.catch_warnings():
        warnings.simplefilter("error", pandas.errors.ParserWarning)
        try:
            return pandas.read_csv(
                path, sep=separator, keep_default_na=False, na_values=missing, dtype=types, index_col=False
            )
        except pandas.errors.ParserWarning as warning:
            raise ValueError(
                "some rows have more cells than there are column names: name every column, and quote cells that hold "
                "the separator"
            ) from warning


def _refuse_missing(frame: "DataFrame", options: Options, name: str) -> None:
    if not len(frame):
        raise ValueError(f"{name} has no rows, so there is nothing to compare.")
    label = [] if options.label is None else [options.label]
    inputs = [*label, *text_columns(options, frame.columns), *(options.columns or ())]
    there = set(frame.columns)
    missing = [column for column in [*inputs, *(options.show_columns or ())] if column not in there]
    if missing:
        more = f", nor {len(missing) - 1} more of those asked for" if len(missing) > 1 else ""
        close = get_close_matches(missing[0], map(str, frame.columns), n=3) if not more else []
        advice = f" Did you mean {' or '.join(close)}?" if close else ""
        raise ValueError(
            f"{name} has no column {missing[0]!r}{more}: it has {listed(frame.columns, 50)}.{advice}"
        )
    for column, count in Counter(inputs).items():
        if count > 1:
            raise ValueError(
                f"Column {column!r} is asked for twice: a label or text column cannot be another input."
            )


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


def _inputs(frame: "DataFrame", options: Options, name: str) -> tuple[Any, list[str]]:
    """Return the inputs, and the columns that are known to be in them."""
    n, prepare, column = len(frame), options.prepare, options.text_column
    columns = None if options.columns is None else list(options.columns)
    if column is not None and prepare is None and columns is None and options.tokenization is not None:
        if options.label is not None and options.tokenization.task == "causal-lm":
            raise ValueError(
                f"A causal language model predicts tokens, not the label {options.label!r}: leave --label out, and "
                "show it with --show-columns; or pass --task sequence-classification."
            )
        named = text_columns(options, frame.columns)
        return options.tokenization.tokenize([_texts(frame, one, name) for one in named]), named
    if column is not None:
        if prepare is None or columns is not None:
            raise ValueError(
                f"text_column={column!r} needs prepare, the import string of a function from text to the model's input "
                "such as a tokenizer, or a model from a folder of save_pretrained; it cannot be combined with columns."
            )
        texts = _texts(frame, column, name)
        return Prepared(texts.__getitem__, n, prepare), [column]
    if prepare is not None:
        return Prepared(_Rows(frame, columns or list(frame.columns)), n, prepare), columns or []
    return _numbers(frame, columns, name)


def _row_viewer(frame: "DataFrame", inputs: list[str], options: Options) -> Callable[[int], object]:
    """Return what to show of a row: a text, or a dict of the requested columns."""
    named = list(options.show_columns or ())
    texts = text_columns(options, frame.columns)
    if len(texts) == 1 and not named:
        return frame[texts[0]].tolist().__getitem__
    label = [] if options.label is None else [options.label]
    return _Rows(frame, list(dict.fromkeys([*label, *named, *inputs[:MOST_SHOWN]])))


class _Rows:
    """Rows of a table as dicts of some of its columns."""

    def __init__(self, frame: "DataFrame", columns: list[str]) -> None:
        self._columns: dict[str, Series] = {column: frame[column] for column in columns}
        self._n = len(frame)

    def __call__(self, i: int) -> dict[str, object]:
        if not 0 <= i < self._n:
            raise IndexError(f"row {i} of {self._n}")
        values = {name: column.iloc[i] for name, column in self._columns.items()}
        return {name: v.item() if isinstance(v, np.generic) else v for name, v in values.items()}


def _texts(frame: "DataFrame", column: str, name: str) -> list[str]:
    texts = frame[column].tolist()
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(
                f"Column {column!r} of {name} holds {text!r} in row {i} (from 0), expected text: fill it in, "
                "or name another column."
            )
    return texts


def _numbers(frame: "DataFrame", asked: list[str] | None, name: str) -> tuple[Tensor, list[str]]:
    numeric = _numeric(frame)
    columns = [column for column in frame.columns if column in numeric] if asked is None else asked
    if asked is None:
        _refuse_dirty(frame, numeric, name)
    if not columns:
        raise ValueError(
            f"There are no numeric columns in {name}, only {listed(frame.columns)}: name them with columns, or pass "
            "text_column and prepare."
        )
    for column in columns:
        if column not in numeric:
            raise ValueError(
                f"Column {column!r} of {name} holds no numbers ({frame[column].dtype}, for example "
                f"{frame[column].iloc[0]!r}): encode it, leave it out, or pass prepare."
            )
    values = frame[columns].to_numpy(dtype=np.float32, na_value=np.nan)
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        row, place = bad[0]
        raise ValueError(
            f"Column {columns[place]!r} of {name} holds {values[row, place]} in row {row} (rows from 0, "
            f"without the header); {len(bad)} cells are like this. Fill them in, or leave out rows or columns."
        )
    return torch.from_numpy(np.ascontiguousarray(values)), columns


def _numeric(frame: "DataFrame") -> set[str]:
    """Return the columns that hold numbers or booleans, also if cells are missing."""
    types = library("pandas", "pandas").api.types
    return {
        column
        for column, dtype in frame.dtypes.items()
        if types.is_numeric_dtype(dtype)
        # Booleans with missing cells are objects to pandas.
        or (types.is_object_dtype(dtype) and types.infer_dtype(frame[column], skipna=True) == "boolean")
    }


def _refuse_dirty(frame: "DataFrame", numeric: set[str], name: str) -> None:
    """Raise if a column holds numbers in most rows but text in a few: it would silently not be an input."""
    to_numeric = library("pandas", "pandas").to_numeric
    for column in frame.columns:
        if column in numeric:
            continue
        cells = frame[column]
        words = np.flatnonzero((to_numeric(cells, errors="coerce").isna() & cells.notna()).to_numpy())
        known = int(cells.notna().sum())
        if 0 < len(words) <= (known - 1) / 2:
            shown = ", ".join(f"{cells.iloc[row]!r} in row {row}" for row in words[:3])
            more = f" and {len(words) - 3:,} more" if len(words) > 3 else ""
            raise ValueError(
                f"Column {column!r} of {name} holds numbers but for {len(words):,} of {known:,} cells: {shown}{more} "
                "(rows from 0, without the header). Correct these cells, or name the inputs with columns."
            )


def _left_out(frame: "DataFrame", inputs: list[str], options: Options, name: str) -> tuple[str, ...]:
    """Return a note about columns that are not inputs because they hold text, except for those that are shown."""
    known = {*inputs, *(options.show_columns or ())}
    others = [column for column in frame.columns if column not in known]
    if not others:
        return ()
    verb = "is not an input" if len(others) == 1 else "are not inputs"
    which = (
        f"the column {others[0]} of {name} holds"
        if len(others) == 1
        else f"the columns {listed(others)} of {name} hold"
    )
    return (f"{which} text and {verb}; --columns names inputs, --show-columns columns that are only shown.",)
