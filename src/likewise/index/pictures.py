"""Thumbnails, excerpts and names of the samples of an index, in files next to the shards."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from likewise.data import Batches, Samples
from likewise.index.store import IndexFolder
from likewise.thumbnails import EXCERPT, Picture, Range, picture, pictures, values_of

KINDS = ("", "image", "text", "row", "signal")
COMPARED = 64  # samples whose range of values is drawn as black and white

Show = Callable[[int], Any] | Sequence[Any]


class PictureMaker:
    """Makes what is stored of samples.

    Args:
        data: The samples.
        show: What to see of sample i; the inputs themselves if None, where they are arrays.
        names: One per sample.
        excerpt_length: Characters that are kept of a text.

    """

    def __init__(
        self, data: Batches, show: Show | None, names: Sequence[str] | None, excerpt_length: int = EXCERPT
    ) -> None:
        self._data, self._show, self._names = data, _in_order(show), _in_order(names)
        self._length = excerpt_length
        first = data.samples(range(1)).inputs
        self._known: dict[int, Any] = {}  # samples that were read to find the range, until they are drawn
        self._visible = show is not None or (isinstance(first, Tensor) and first.is_floating_point())
        self._values = self._find_values() if self._visible else None

    @property
    def available(self) -> bool:
        """Whether there is anything to store."""
        return self._visible or self._names is not None

    def pictures(self, places: range, samples: Samples) -> list[Picture | None]:
        """Return what to see of a batch."""
        if not self._visible:
            return [None] * len(places)
        if self._show is None:
            self._known.clear()  # batches are read anyway
            return pictures(_arrays(samples), self._values)
        return [picture(self._raw(place), self._values, self._length) for place in places]

    def picture(self, place: int) -> Picture | None:
        """Return what to see of one sample."""
        if not self._visible:
            return None
        return picture(self._raw(place), self._values, self._length)

    def names(self, places: range) -> list[str]:
        """Return the names of a batch; empty ones where there are none."""
        return ["" if self._names is None else str(self._names[i]) for i in places]

    def find_difference(self, places: range, stored: Mapping[str, Tensor]) -> str | None:
        """Return what was given of these samples and is stored otherwise, None where all is the same.

        Names are compared one by one, of what `show` returns the first sample's picture; neither where it is not given.
        """
        if self._names is not None:
            there = [decode_picture(stored, row)[1] for row in range(len(places))]
            if there != [_storable(name) for name in self.names(places)]:
                return "list of names (some have changed"
        if self._show is not None and decode_picture(stored, 0)[0] != self.picture(places[0]):
            return "show (it returns something else"
        return None

    def _find_values(self) -> Range | None:
        """Return what is drawn as black and white, from a few samples; None where they come as they are drawn."""
        places = np.linspace(0, self._data.n - 1, min(self._data.n, COMPARED)).astype(int).tolist()
        first = self._raw(places[0])
        if hasattr(first, "shape") and getattr(first, "dtype", None) != np.uint8:  # a table has no dtype
            self._known = {place: self._raw(place) for place in places[1:]}
        self._known[places[0]] = first
        return values_of(self._known.values()) if len(self._known) == len(places) else None

    def _raw(self, place: int) -> Any:
        """Return what is to be seen of a sample, as it was given."""
        if place in self._known:
            return self._known.pop(place)
        if self._show is None:
            return np.asarray(_arrays(self._data.samples(range(place, place + 1)))[0])
        try:
            return self._show(place) if callable(self._show) else self._show[place]
        except Exception as error:
            raise ValueError(f"show raised {type(error).__name__} for sample {place}: {error}") from error


def encode_pictures(pictures: Sequence[Picture | None], names: Sequence[str]) -> dict[str, Tensor]:
    """Return pictures and names as tensors: all bytes in a row, and where each ends."""
    written = [name.encode("utf-8", "replace") for name in names]
    contents = [b"" if seen is None else seen.content for seen in pictures]
    kinds = [0 if seen is None else KINDS.index(seen.kind) for seen in pictures]
    return {
        "kinds": torch.tensor(kinds, dtype=torch.uint8),
        "content": _bytes(contents),
        "ends": _ends(contents),
        "names": _bytes(written),
        "name_ends": _ends(written),
    }


def decode_picture(stored: Mapping[str, Tensor], row: int) -> tuple[Picture | None, str]:
    """Return the picture and the name of a row of a shard."""
    if not stored:
        return None, ""
    kind = KINDS[int(stored["kinds"][row])]
    name = _part(stored["names"], stored["name_ends"], row).decode("utf-8", "replace")
    return Picture(kind, _part(stored["content"], stored["ends"], row)) if kind else None, name


class StoredPictures:
    """The pictures and names in an index; the files of a shard are mapped once for all of its rows.

    Args:
        folder: The index.

    """

    def __init__(self, folder: IndexFolder) -> None:
        self._folder, self._shards = folder, folder.shards
        self._mapped: dict[int, dict[str, Tensor]] = {}

    def picture(self, row: int) -> Picture | None:
        """Return what to see of a row."""
        return self.read(row)[0]

    def read(self, row: int) -> tuple[Picture | None, str]:
        """Return the picture and the name of a row."""
        shard = next(s for s in self._shards if s.start <= row < s.stop)
        if shard.start not in self._mapped:
            self._mapped[shard.start] = self._folder.read_pictures(shard)
        return decode_picture(self._mapped[shard.start], row - shard.start)


def _in_order(given: Any) -> Any:
    """Return a column of a table as a list: a Series would be read by its index, not by position."""
    return list(given) if hasattr(given, "iloc") else given


def _arrays(samples: Samples) -> np.ndarray:
    return np.asarray(samples.inputs.detach().float().cpu().numpy())


def _storable(name: str) -> str:
    """Return a name as it is read back: lone surrogates become question marks."""
    return name.encode("utf-8", "replace").decode("utf-8")


def _bytes(parts: Sequence[bytes]) -> Tensor:
    return torch.from_numpy(np.frombuffer(b"".join(parts), dtype=np.uint8).copy())


def _ends(parts: Sequence[bytes]) -> Tensor:
    return torch.tensor([len(part) for part in parts], dtype=torch.int64).cumsum(0)


def _part(content: Tensor, ends: Tensor, row: int) -> bytes:
    start = 0 if row == 0 else int(ends[row - 1])
    return content[start : int(ends[row])].numpy().tobytes()
