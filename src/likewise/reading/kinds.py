"""Which kind of data a word on the command line names."""

from collections.abc import Callable, Sequence
from pathlib import Path

from likewise.reading.arrays import read_arrays
from likewise.reading.images import read_folder
from likewise.reading.imports import imported, is_import
from likewise.reading.objects import read_object
from likewise.reading.options import Options, Preparation, Read
from likewise.reading.paths import existing
from likewise.reading.tables import read_table

READERS: dict[str, Callable[[Path, Options], Read]] = {
    ".csv": read_table,
    ".tsv": read_table,
    ".parquet": read_table,
    ".npz": read_arrays,
}


def data(
    text: str,
    *,
    label: str | None = None,
    text_column: str | None = None,
    columns: Sequence[str] | None = None,
    image_size: int | None = None,
    gray: bool = False,
    prepare: str | None = None,
    limit: int | None = None,
) -> Read:
    """Return a folder of images, a table, arrays, or what an import string names, ready for batches.

    `prepare`: the import string of a function from one raw sample (PIL image, dict of a row, str or array) to
    the model's input. `limit`: the first so many samples; of a folder of classes, as many spread over all.
    """
    for name, number in (("image_size", image_size), ("limit", limit)):
        if number is not None and number < 1:
            raise ValueError(f"{name} must be at least 1, found {number}.")
    if isinstance(columns, str):
        raise TypeError(f"columns must be a list of names, found the text {columns!r}.")
    prepared = None if prepare is None else _preparation(prepare)
    options = Options(label, text_column, columns, image_size, gray, prepared, limit)
    if "://" in text:
        raise ValueError(f"{text} is an address: download it, and give the path.")
    if is_import(text):
        return read_object(text, options)
    path = existing(text)
    if path.is_dir():
        return read_folder(path, options)
    if path.suffix.lower() not in READERS:
        raise ValueError(
            f"{text} is of no known kind: a folder of images, {', '.join(READERS)}, or an import string such "
            "as path/to/file.py:object can be read."
        )
    return READERS[path.suffix.lower()](path, options)


def _preparation(text: str) -> Preparation:
    function = imported(text)
    if not callable(function):
        raise TypeError(
            f"{text} is a {type(function).__name__}, expected a function from one raw sample to the model's "
            "input."
        )
    return Preparation(text, function)
