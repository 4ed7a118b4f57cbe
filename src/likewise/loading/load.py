"""Which kind of data a word on the command line names."""

import io
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from likewise.loading.arrays import read_arrays
from likewise.loading.dataset import Options, Preparation, Prepared, Read
from likewise.loading.images import SUFFIXES, ImageBytes, read_folder, read_images
from likewise.loading.imports import build_object, import_object, is_import, library
from likewise.loading.paths import existing, listed
from likewise.loading.pretrained import PretrainedFolder, is_pretrained
from likewise.loading.python_objects import read_object
from likewise.loading.tables import read_table, table_columns, table_read, text_lines
from likewise.loading.texts import Tokenization
from likewise.loading.weights import load_weights

READERS: dict[str, Callable[[Path, Options], Read]] = {
    ".csv": read_table,
    ".tsv": read_table,
    ".parquet": read_table,
    ".jsonl": read_table,
    ".npz": read_arrays,
}


TABLES = (".csv", ".tsv", ".parquet", ".jsonl")


def data(
    text: str,
    *,
    label: str | None = None,
    text_column: str | None = None,
    columns: Sequence[str] | None = None,
    image_size: int | None = None,
    gray: bool = False,
    prepare: str | None = None,
    tokenization: Tokenization | None = None,
    limit: int | None = None,
    show_columns: Sequence[str] | None = None,
    follow_links: bool = False,
    max_memory: int = 2**31,
) -> Read:
    """Return a folder of images, a table, arrays, or what an import string names, ready for batches.

    Args:
        text: A path, or an import string.
        label: The column, or array, of labels.
        text_column: The column of texts, which `prepare` or `tokenization` turns into inputs; two, with a comma, of
            pairs that are tokenized.
        columns: The columns that are inputs; all numeric ones if not given.
        image_size: Resize images to a square of so many pixels.
        gray: Read images as gray, one channel.
        prepare: The import string of a function from one raw sample (PIL image, dict of a row, str or array)
            to the model's input.
        tokenization: How texts become inputs where `prepare` is not given.
        limit: The first so many samples; of a folder of classes, as many spread over all.
        show_columns: Columns to show of a row beside the model's inputs and the label. No other column of a
            table gets into a report.
        follow_links: Also read what links inside a folder of images lead to outside of it.
        max_memory: Bytes that an image, or what is compressed in a file, may expand to.

    Raises:
        MemoryError: Something expands to more than `max_memory`; it is not read.
        ValueError: The data cannot be read; the message says what was found and what to do.
    """
    options = _options(
        label=label,
        text_column=text_column,
        columns=columns,
        image_size=image_size,
        gray=gray,
        prepare=prepare,
        tokenization=tokenization,
        limit=limit,
        show_columns=show_columns,
        follow_links=follow_links,
        max_memory=max_memory,
    )
    return _read(text, options)


def new_inputs(
    words: Sequence[str],
    read_input: Callable[[], str],
    *,
    indexed: tuple[int, int] | None = None,
    **settings: Any,
) -> Read:
    """Return new samples in the form of a data set that was read with these settings: inputs without labels.

    Args:
        words: Files of images; or one table, archive of arrays, folder or import string; or texts, where there is a
            text column; or "-" for standard input: a text a line, or a table with its header.
        read_input: Returns what standard input holds; called for "-" only.
        indexed: Width and height of the images of the index that is asked, where it is of images.
        settings: As for `data`.

    Raises:
        ValueError: The words are of several kinds, or of none.

    """
    if not words:
        raise ValueError("New inputs are needed: files of images, a table, texts, or - for standard input.")
    if not all(word.strip() for word in words):
        raise ValueError("An empty text: there is nothing to compare. Give a text, or a file.")
    options = _options(**{**settings, "limit": None})
    if all(Path(word).suffix.lower() in SUFFIXES for word in words):
        plain = options._replace(label=None, text_column=None, columns=None, show_columns=None)
        files = [existing(word) for word in words]
        return read_images(files, tuple(words), plain, indexed)
    if list(words) == ["-"]:
        return _standard_input(read_input(), options)
    named = [word for word in words if _names_data(word, options)]
    if named and len(words) == 1:
        return _read_new(words[0], options)
    if named or options.text_column is None:
        raise ValueError(
            "New inputs must be of one kind: files of images, or one table, archive, folder or import string, or texts "
            f"where the index has a text column. Found {listed(list(words), 4)}."
        )
    return _texts(list(words), options)


def pasted_input(
    *,
    image: bytes | None = None,
    text: str | None = None,
    row: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Read:
    """Return one new sample from memory, in the form of a data set that was read with these settings.

    No path is ever read: a text is a text, whatever file has that name.

    Args:
        image: The bytes of an image file.
        text: A text.
        row: A row of a table, column -> value; texts that are numbers become numbers.
        settings: As for `data`.

    Raises:
        ExpansionError: The image takes more than `max_memory` once it is decoded.
        ValueError: It cannot be read.

    """
    options = _options(**{**settings, "limit": None})
    if image is not None:
        plain = options._replace(
            label=None, text_column=None, columns=None, show_columns=None, tokenization=None
        )
        return read_images([ImageBytes("the image", image)], ("the image",), plain)
    if text is not None:
        return _texts([text], options)
    pandas = library("pandas", "pandas")
    frame = pandas.DataFrame([{str(name): _number_or_text(value) for name, value in (row or {}).items()}])
    return table_read(frame, _without_missing(options, set(frame.columns)), "the row")


def _number_or_text(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value


def _names_data(word: str, options: Options) -> bool:
    """Whether a word is a path or an import string, and no text."""
    path = Path(word)
    if path.suffix.lower() in (*READERS, *SUFFIXES) or path.exists():
        return True
    return options.text_column is None and is_import(word)


def _standard_input(content: str, options: Options) -> Read:
    if options.text_column is not None:
        texts = [line for line in text_lines(content) if line.strip()]
        if not texts:
            raise ValueError("Standard input holds no text: give one a line.")
        return _texts(texts, options)
    frame = library("pandas", "pandas").read_csv(io.StringIO(content))
    return table_read(frame, _without_missing(options, set(frame.columns)), "standard input")


def _texts(texts: list[str], options: Options) -> Read:
    if options.prepare is not None:
        dataset = Prepared(texts.__getitem__, len(texts), options.prepare)
        return Read(dataset, names=tuple(texts), show=texts.__getitem__)
    if options.tokenization is None:
        raise ValueError("Texts need --prepare, as the index was built.")
    if "," in str(options.text_column):
        raise ValueError(
            f"The index is of pairs of texts ({options.text_column}): give a table with these columns."
        )
    tokens = options.tokenization.tokenize([texts])
    shown = texts.__getitem__
    return Read(tokens, names=tuple(texts), show=shown, notes=tokens.notes, token_text=tokens.token_text)


def _read_new(text: str, options: Options) -> Read:
    """Return the samples that a word names; a column of labels is no input, and may be missing."""
    if Path(text).suffix.lower() in TABLES:
        options = _without_missing(options, table_columns(existing(text)))
    return _read(text, options)


def _without_missing(options: Options, there: Collection[str]) -> Options:
    """Return the options for a table of new rows, which may lack labels and columns that are only shown."""
    shown = tuple(name for name in options.show_columns or () if name in there) or None
    label = options.label if options.label in there else None
    return options._replace(label=label, labels_optional=label is not None, show_columns=shown)


def _options(
    *,
    columns: Sequence[str] | None,
    image_size: int | None,
    prepare: str | None,
    limit: int | None,
    show_columns: Sequence[str] | None,
    **others: Any,
) -> Options:
    for name, number in (("image_size", image_size), ("limit", limit)):
        if number is not None and number < 1:
            raise ValueError(f"{name} must be at least 1, found {number}.")
    for name, names in (("columns", columns), ("show_columns", show_columns)):
        if isinstance(names, str):
            raise TypeError(f"{name} must be a list of names, found the text {names!r}.")
    prepared = None if prepare is None else _preparation(prepare)
    return Options(
        columns=columns,
        image_size=image_size,
        prepare=prepared,
        limit=limit,
        show_columns=show_columns or None,
        **others,
    )


def _read(text: str, options: Options) -> Read:
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


def model(
    text: str,
    weights: str | None = None,
    *,
    task: str | None = None,
    base_model: str | None = None,
    allow_pickle: bool = False,
) -> nn.Module:
    """Return the module an import string names, what a class or function gives without arguments, or that in a folder.

    Args:
        text: An import string, or a folder that `save_pretrained` wrote.
        weights: A file with its state, .safetensors or written by torch; it must fit exactly.
        task: Of a folder, what the model does; what its configuration says if None.
        base_model: Of an adapter of peft, the folder of the model that it adapts.
        allow_pickle: Of a folder, also read weights that torch.save wrote (tensors only).

    """
    if is_pretrained(text):
        folder = PretrainedFolder(text, task=task, base_model=base_model, allow_pickle=allow_pickle)
        loaded = folder.load_model()
        if weights is not None:
            load_weights(loaded, weights)
        return loaded
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
