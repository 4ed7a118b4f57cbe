"""Which kind of data a word on the command line names."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import nn

from likewise.loading.arrays import read_arrays
from likewise.loading.dataset import Options, Preparation, Read
from likewise.loading.images import read_folder
from likewise.loading.imports import build_object, import_object, is_import
from likewise.loading.paths import existing
from likewise.loading.python_objects import read_object
from likewise.loading.tables import read_table
from likewise.loading.weights import load_weights

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
    show_columns: Sequence[str] | None = None,
    follow_links: bool = False,
    max_memory: int = 2**31,
) -> Read:
    """Return a folder of images, a table, arrays, or what an import string names, ready for batches.

    Args:
        text: A path, or an import string.
        label: The column, or array, of labels.
        text_column: The column of texts, which `prepare` turns into inputs.
        columns: The columns that are inputs; all numeric ones if not given.
        image_size: Resize images to a square of so many pixels.
        gray: Read images as gray, one channel.
        prepare: The import string of a function from one raw sample (PIL image, dict of a row, str or array)
            to the model's input.
        limit: The first so many samples; of a folder of classes, as many spread over all.
        show_columns: Columns to show of a row beside the model's inputs and the label. No other column of a
            table gets into a report.
        follow_links: Also read what links inside a folder of images lead to outside of it.
        max_memory: Bytes that an image, or what is compressed in a file, may expand to.

    Raises:
        MemoryError: Something expands to more than `max_memory`; it is not read.
        ValueError: The data cannot be read; the message says what was found and what to do.
    """
    for name, number in (("image_size", image_size), ("limit", limit)):
        if number is not None and number < 1:
            raise ValueError(f"{name} must be at least 1, found {number}.")
    for name, names in (("columns", columns), ("show_columns", show_columns)):
        if isinstance(names, str):
            raise TypeError(f"{name} must be a list of names, found the text {names!r}.")
    prepared = None if prepare is None else _preparation(prepare)
    options = Options(
        label=label,
        text_column=text_column,
        columns=columns,
        image_size=image_size,
        gray=gray,
        prepare=prepared,
        limit=limit,
        show_columns=show_columns or None,
        follow_links=follow_links,
        max_memory=max_memory,
    )
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
    function = import_object(text)
    if not callable(function):
        raise TypeError(
            f"{text} is a {type(function).__name__}, expected a function from one raw sample to the model's "
            "input."
        )
    return Preparation(text, function)


def model(text: str, weights: str | None = None) -> nn.Module:
    """Return the module an import string names, or what a class or function gives without arguments.

    `weights`: a file with its state, .safetensors or written by torch; it must fit exactly.
    """
    found = import_object(text)
    if not isinstance(found, nn.Module) and callable(found):
        found = build_object(found, text, "the model")
    if not isinstance(found, nn.Module):
        advice = " A state goes into weights=." if isinstance(found, Mapping) else ""
        raise TypeError(
            f"{text} gave {type(found).__name__}, expected a torch.nn.Module, or a class or function that "
            f"gives one.{advice}"
        )
    if weights is not None:
        load_weights(found, weights)
    return found
