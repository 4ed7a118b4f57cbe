"""Read new inputs from memory, in the same way as the indexed data."""

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
    """A new input: the model's input, and a picture of it."""

    value: Any
    picture: Picture | None


class InputReader:
    """Reads new inputs of one kind in the same way as the indexed data.

    Args:
        kind: "image", "text" or "row".
        read: Turns a raw value into a data set of one sample.
        columns: The columns that a row needs, in order; None if they are not known.

    """

    def __init__(
        self, kind: str, read: Callable[..., loading.Read], columns: list[str] | None = None
    ) -> None:
        self.kind, self.columns, self._read = kind, columns, read

    def read(self, raw: Any) -> NewInput:
        """Read a new input.

        Raises:
            ValueError: It cannot be read; the message says why.
            MemoryError: It is too large once decoded.

        """
        if self.kind == "row":
            raw = self._order_columns(raw)
        found = self._read(**{self.kind: raw})
        shown = None if found.show is None else picture(found.show(0))
        return NewInput(found.dataset[0], shown)

    def _order_columns(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row with its columns in the order of the data; raise if one is missing or unknown."""
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
    """Return a reader of new inputs for an index built by a command; None if its settings do not say how.

    Args:
        index: The index.
        settings: The arguments of `loading.pasted_input`, and `data`, the name of the data set.

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
    """Return the kind of new inputs (image, text or row), by the settings or else by the stored pictures."""
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
    """Return the columns of a row, in order, if they are certain: named, or as many as the index has inputs."""
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
        f"The index was built from {width} columns of {settings['data']}, but does not say which: rebuild it with "
        "--columns."
    )
