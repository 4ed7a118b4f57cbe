"""Load data and models by the words of a command line."""

import io
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from likewise.loading.arrays import read_arrays
from likewise.loading.dataset import Options, Preparation, Prepared, Read
from likewise.loading.images import SUFFIXES, ImageBytes, read_folder, read_images
from likewise.loading.imports import build_object, import_object, is_import, library
from likewise.loading.models import PretrainedFolder, is_pretrained, load_weights
from likewise.loading.paths import existing, listed
from likewise.loading.python_objects import read_object
from likewise.loading.tables import read_table, table_columns, table_read, text_lines
from likewise.loading.texts import Tokenization

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
    """Load a folder of images, a table, arrays, or the object of an import string.

    Args:
        text: A path, or an import string.
        label: The column (or array) that holds the labels.
        text_column: The column of texts, which `prepare` or `tokenization` turns into inputs; two columns, separated by
            a comma, are pairs that are tokenized.
        columns: The input columns; None uses all numeric columns.
        image_size: Resize images to a square with sides of this many pixels.
        gray: Read images as grayscale, one channel.
        prepare: The import string of a function from one raw sample (PIL image, dict of a row, str or array)
            to the model's input.
        tokenization: How texts become inputs without `prepare`.
        limit: Use at most this many samples: the first ones, or for a folder of classes spread over all.
        show_columns: Columns to show besides the model's inputs and the label. No other column of a table gets into a
            report.
        follow_links: Follow links in a folder of images that lead outside of it.
        max_memory: Bytes that an image, or the compressed content of a file, may expand to.

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
    """Load new samples in the same way as a data set that was read with these settings.

    Args:
        words: Image files; or one table, array file, folder or import string; or texts, if there is a text column; or
            "-" for standard input: one text per line, or a table with its header.
        read_input: Returns the content of standard input; called for "-" only.
        indexed: Width and height of the images in the index that is asked, if it holds images.
        settings: As for `data`.

    Raises:
        ValueError: The words are of several kinds, or of an unknown kind.

    """
    if not words:
        raise ValueError("No new inputs found: pass image files, a table, texts, or - for standard input.")
    if not all(word.strip() for word in words):
        raise ValueError("Found an empty text, with nothing to compare: pass a text, or a file.")
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
            "New inputs must be of one kind: image files; one table, array file, folder or import string; or texts, if "
            f"the index has a text column. Found {listed(list(words), 4)}."
        )
    return _texts(list(words), options)


def pasted_input(
    *,
    image: bytes | None = None,
    text: str | None = None,
    row: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Read:
    """Load one new sample from memory, in the same way as a data set that was read with these settings.

    Paths are never opened: a text is a text, even if a file has that name.

    Args:
        image: The bytes of an image file.
        text: A text.
        row: A table row as a dict from column to value; numeric texts become numbers.
        settings: As for `data`.

    Raises:
        ExpansionError: The decoded image takes more than `max_memory`.
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
    """Whether a word is a path or an import string rather than a text."""
    path = Path(word)
    if path.suffix.lower() in (*READERS, *SUFFIXES) or path.exists():
        return True
    return options.text_column is None and is_import(word)


def _standard_input(content: str, options: Options) -> Read:
    if options.text_column is not None:
        texts = [line for line in text_lines(content) if line.strip()]
        if not texts:
            raise ValueError("Standard input holds no text: pass one text per line.")
        return _texts(texts, options)
    frame = library("pandas", "pandas").read_csv(io.StringIO(content))
    return table_read(frame, _without_missing(options, set(frame.columns)), "standard input")


def _texts(texts: list[str], options: Options) -> Read:
    if options.prepare is not None:
        dataset = Prepared(texts.__getitem__, len(texts), options.prepare)
        return Read(dataset, names=tuple(texts), show=texts.__getitem__)
    if options.tokenization is None:
        raise ValueError("Texts need the --prepare that the index was built with.")
    if "," in str(options.text_column):
        raise ValueError(
            f"The index holds pairs of texts ({options.text_column}): pass a table with these columns."
        )
    tokens = options.tokenization.tokenize([texts])
    shown = texts.__getitem__
    return Read(tokens, names=tuple(texts), show=shown, notes=tokens.notes, token_text=tokens.token_text)


def _read_new(text: str, options: Options) -> Read:
    """Load the samples that a word names; the label column is not an input, and may be missing."""
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
        raise ValueError(f"{text} is a URL: download it, and pass the path.")
    if is_import(text):
        return read_object(text, options)
    path = existing(text)
    if path.is_dir():
        return read_folder(path, options)
    if path.suffix.lower() not in READERS:
        raise ValueError(
            f"Unknown kind of data: {text}. Pass a folder of images, a {', '.join(READERS)} file, or an import string "
            "such as path/to/file.py:object."
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
    """Load a model from an import string (a module, or a class or function that returns one) or from a folder.

    Args:
        text: An import string, or a folder written by `save_pretrained`.
        weights: A state dict file, .safetensors or written by torch.save; its keys must match exactly.
        task: For a folder: the task of the model; None uses its configuration.
        base_model: For a peft adapter: the folder of its base model.
        allow_pickle: For a folder: also read weights written by torch.save (tensors only).

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
