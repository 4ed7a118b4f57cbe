"""What is asked of a data set, and what is known once it is read."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Read(NamedTuple):
    """A data set for likewise.batches(dataset, labels=labels), and what a person should see of it."""

    dataset: Any
    labels: Tensor | None = None  # (n,) long for classes, float for numbers; None: none, or in the data set
    classes: tuple[str, ...] | None = None  # names of the classes, where labels had them
    names: tuple[str, ...] | None = None  # one a sample, such as its file
    show: Callable[[int], object] | None = None  # sample i as a PIL image, str, dict of columns or array


class Preparation(NamedTuple):
    """A function from one raw sample to the model's input, and its name."""

    name: str
    function: Callable[[Any], object]


class Options(NamedTuple):
    """What is asked of a data set; None and False where nothing is."""

    label: str | None = None
    text_column: str | None = None
    columns: Sequence[str] | None = None
    image_size: int | None = None
    gray: bool = False
    prepare: Preparation | None = None
    limit: int | None = None
    show_columns: Sequence[str] | None = None
    follow_links: bool = False
    max_memory: int = 2**31  # bytes that what is compressed may expand to; a limit for every kind of data

    def refuse_all_but(self, used: Sequence[str], kind: str) -> None:
        """Raise an error that names what was asked and cannot be done for this kind of data."""
        given = [name for name, value in self._asdict().items() if value is not None and value is not False]
        unused = [name for name in given if name not in (*used, "max_memory")]
        if unused:
            raise ValueError(f"{', '.join(unused)} cannot be used with {kind}, only {', '.join(used)}.")
