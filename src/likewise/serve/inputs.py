"""New inputs from memory, read as the data of an index were."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from likewise import loading
from likewise.index import Index
from likewise.loading.load import TABLES
from likewise.loading.tables import table_columns
from likewise.thumbnails import Picture, picture

MOST_PIXELS = 50_000_000
BYTES_PER_PIXEL = 20  # decoded, converted and as a tensor
KINDS = ("image", "text", "row")


class NewInput(NamedTuple):
    """A new input: what the model is called with, and what a person sees of it."""

    value: Any
    picture: Picture | None


class InputReader:
    """Reads new inputs of one kind as the data of an index were read.

    Args:
        kind: "image", "text" or "row".
        read: From the raw value to a data set of one sample.
        columns: The columns that a row needs, in order; None where they are not known.

    """

    def __init__(
        self, kind: str, read: Callable[..., loading.Read], columns: list[str] | None = None
    ) -> None:
        self.kind, self.columns, self._read = kind, columns, read

    def read(self, raw: Any) -> NewInput:
        """Return a new input.

        Raises:
            ValueError: It cannot be read; the message says why.
            MemoryError: It is too large once it is decoded.

        """
        if self.kind == "row":
            raw = self._ordered(raw)
        found = self._read(**{self.kind: raw})
        shown = None if found.show is None else picture(found.show(0))
        return NewInput(found.dataset[0], shown)

    def _ordered(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row with its columns in the order of the data; a missing or unknown one is refused."""
        if self.columns is None:
            return dict(row)
        missing = [name for name in self.columns if name not in row]
        unknown = [name for name in row if name not in self.columns]
        if missing or unknown:
            parts = [f"missing: {', '.join(missing[:8])}"] if missing else []
            parts += [f"unknown: {', '.join(map(str, unknown[:8]))}"] if unknown else []
            raise ValueError(f"The row needs {len(self.columns)} columns ({'; '.join(parts)}).")
        return {name: row[name] for name in self.columns}


def reader_from_settings(index: Index, settings: Mapping[str, Any]) -> InputReader | None:
    """Return what reads new inputs for an index that was built by a command; None where that cannot be told.

    Args:
        index: The index.
        settings: What `loading.pasted_input` takes, and `data`, the word that named the data.

    """
    kind = _kind_of(index, settings)
    if kind is None:
        return None
    columns = _row_columns(index, settings) if kind == "row" else settings["columns"]
    known = {name: value for name, value in settings.items() if name != "data"}
    known |= {"columns": columns, "max_memory": MOST_PIXELS * BYTES_PER_PIXEL}

    def read(**raw: Any) -> loading.Read:
        return loading.pasted_input(**raw, **known)

    return InputReader(kind, read, columns)


def _kind_of(index: Index, settings: Mapping[str, Any]) -> str | None:
    """Return what new inputs are: images, texts or rows, as the settings say, else as the stored pictures show."""
    if settings["text_column"] is not None:
        return "text"
    path = Path(settings["data"]).expanduser()
    if path.suffix.lower() in TABLES:
        return "row"
    if settings["data"] and path.is_dir():
        return "image"
    seen = index.sample(int(index.rows[0])).picture
    is_raw = settings["prepare"] is not None or settings["image_size"] is not None
    return seen.kind if seen is not None and seen.kind in KINDS and is_raw else None


def _row_columns(index: Index, settings: Mapping[str, Any]) -> list[str] | None:
    """Return the columns of a row, in order, where they are certain: named, or as many as the index has inputs."""
    if settings["columns"] is not None:
        return list(settings["columns"])
    if settings["prepare"] is not None:
        return None
    path = Path(settings["data"]).expanduser()
    width = index.manifest["inputs"][0][2][-1]
    candidates = [table_columns(path)] if path.is_file() else []
    seen = index.sample(int(index.rows[0])).picture
    if seen is not None and seen.kind == "row":
        candidates.append(list(json.loads(seen.content)))
    for names in candidates:
        left = [name for name in names if name not in (settings["label"], *(settings["show_columns"] or ()))]
        if len(left) == width:
            return left
    raise ValueError(
        f"Which {width} columns of {settings['data']} the index was built from cannot be told: build it with --columns."
    )
