"""Options and results of all readers: labels as numbers, and raw samples that are prepared one by one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from likewise.loading.texts import Tokenization
from likewise.marked_text import TokenText


class Read(NamedTuple):
    """A data set for likewise.batches(dataset, labels=labels), and how to show its samples."""

    dataset: Any
    labels: Tensor | None = None  # (n,) long for classes, float for numbers; None: none, or in the data set
    classes: tuple[str, ...] | None = None  # names of the classes, where labels had them
    names: tuple[str, ...] | None = None  # one per sample, such as its file
    show: Callable[[int], object] | None = None  # sample i as a PIL image, str, dict of columns or array
    notes: tuple[str, ...] = ()  # what a person should know of how it was read
    columns: tuple[str, ...] | None = None  # of a table of numbers: the inputs, in their order
    token_text: Callable[[int], TokenText] | None = None  # of texts: text i, and where its tokens lie in it


class Preparation(NamedTuple):
    """A function from one raw sample to the model's input, and its name."""

    name: str
    function: Callable[[Any], object]


class Options(NamedTuple):
    """Options for reading a data set; None and False are defaults."""

    label: str | None = None
    text_column: str | None = None
    columns: Sequence[str] | None = None
    image_size: int | None = None
    gray: bool = False
    prepare: Preparation | None = None
    tokenization: Tokenization | None = (
        None  # of the model's own folder; used for texts that nothing else prepares
    )
    limit: int | None = None
    show_columns: Sequence[str] | None = None
    labels_optional: bool = False  # of new rows: a column of labels that is not filled in is left out
    follow_links: bool = False
    max_memory: int = 2**31  # bytes that what is compressed may expand to; a limit for every kind of data

    def refuse_all_but(self, used: Sequence[str], kind: str) -> None:
        """Raise an error that names options which do not apply to this kind of data."""
        given = [name for name, value in self._asdict().items() if value is not None and value is not False]
        unused = [
            name for name in given if name not in (*used, "max_memory", "tokenization", "labels_optional")
        ]
        if unused:
            raise ValueError(f"{', '.join(unused)} cannot be used with {kind}, only {', '.join(used)}.")


class Prepared(Dataset[Any]):
    """Inputs that a function computes from raw samples, all of one shape; without labels.

    The first two are computed immediately, to check that their shapes are equal.
    """

    def __init__(
        self,
        raw: Callable[[int], object],
        n: int,
        prepare: Preparation,
        names: tuple[str, ...] | None = None,
    ) -> None:
        self._raw, self._n, self._prepare, self._names = raw, n, prepare, names
        self._shapes: Shapes | None = None
        self._shapes = _shapes(self.input(0, raw(0)))
        if n > 1:
            self.input(1, raw(1))

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, i: int) -> Any:
        if not 0 <= i < self._n:
            raise IndexError(f"sample {i} of {self._n}")
        found = self.input(i, self._raw(i))
        return (found,) if isinstance(found, tuple) else found  # else the last of it would be the label

    def input(self, i: int, raw: object) -> Any:
        """Return what the model is called with for sample i, given that sample."""
        name, function = self._prepare
        try:
            value = function(raw)
        except Exception as error:
            raise ValueError(
                f"{name} raised {type(error).__name__} for {self._sample_name(i)}: {error}"
            ) from error
        try:
            found = as_input(value)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{name} gave for {self._sample_name(i)} something that is not a model input: {error} Expected a "
                "tensor, or a dict or tuple of tensors."
            ) from error
        self._refuse_other_shapes(i, found)
        return found

    def _refuse_other_shapes(self, i: int, found: Any) -> None:
        shapes = _shapes(found)
        if self._shapes is not None and shapes != self._shapes:
            raise ValueError(
                f"{self._prepare.name} gave {_format_shapes(self._shapes)} for {self._sample_name(0)}, but "
                f"{_format_shapes(shapes)} for {self._sample_name(i)}: samples go into one batch, so pad or cut them "
                'to one length or size, for example tokenizer(text, padding="max_length", '
                "truncation=True, max_length=128)."
            )

    def _sample_name(self, i: int) -> str:
        return f"sample {i}" if self._names is None else f"sample {i} ({self._names[i]})"


Shapes = dict[str, tuple[int, ...]]


def as_input(value: object) -> Any:
    """Return numbers, and lists, tuples and dicts of them, as tensors.

    The batch dimension that Hugging Face tokenizers and processors add to one sample is removed.
    """
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Mapping):
        found = {str(name): as_input(part) for name, part in value.items()}
        batch_of_one = all(isinstance(t, Tensor) and t.dim() > 1 and len(t) == 1 for t in found.values())
        if hasattr(value, "convert_to_tensors") and batch_of_one:
            return {name: part[0] for name, part in found.items()}
        return found
    if isinstance(value, tuple) or (isinstance(value, list) and any(isinstance(v, Tensor) for v in value)):
        return tuple(as_input(part) for part in value)
    if isinstance(value, np.ndarray | np.generic | list | bool | int | float):
        return as_tensor(np.asarray(value))
    raise TypeError(f"{type(value).__name__} is no tensor.")


def as_tensor(array: np.ndarray) -> Tensor:
    """Return a copy with floats as float32 and integers as int64; uint8 and bool stay unchanged."""
    if array.dtype.kind not in "biuf":
        raise TypeError(f"An array of {array.dtype} holds no numbers.")
    if array.dtype.kind == "f":
        return torch.tensor(array.astype(np.float32))
    small = array.dtype in (np.bool_, np.uint8)
    return torch.tensor(array if small else array.astype(np.int64))


def _shapes(found: Any, name: str = "") -> Shapes:
    if isinstance(found, Tensor):
        return {name: tuple(found.shape)}
    parts = found.items() if isinstance(found, Mapping) else enumerate(found)
    return {key: shape for k, part in parts for key, shape in _shapes(part, f"{name} {k}".strip()).items()}


def _format_shapes(shapes: Shapes) -> str:
    return ", ".join(f"{name} {shape}".strip() for name, shape in shapes.items())


class Labels(NamedTuple):
    """Labels, and class names if they are not numbers."""

    values: Tensor  # (n,) long for classes, else float
    classes: tuple[str, ...] | None


def labels_from(values: np.ndarray, name: str) -> Labels:
    """Return text, booleans and integers as classes, sorted and numbered from 0, and floats as numbers.

    Integers that can be class numbers stay unchanged, without names, so that a missing class does not shift the others.
    Negative or very large integers are renumbered, and named by their old values.
    """
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    plain = _of_one_type(values, name)
    if plain.dtype.kind == "f":
        return Labels(_numbers(plain, name), None)
    if plain.dtype.kind not in "biuU" or plain.ndim != 1:
        raise TypeError(
            f"The labels {name!r} are {plain.dtype} of shape {plain.shape}: expected one text, bool, integer "
            "or float per sample."
        )
    found, codes = np.unique(plain, return_inverse=True)
    if plain.dtype.kind in "iu" and found[0] >= 0 and found[-1] < max(1000, 2 * len(found)):
        return Labels(torch.from_numpy(plain.astype(np.int64)), None)
    return Labels(torch.from_numpy(codes.astype(np.int64)), tuple(map(str, found)))


def _numbers(values: np.ndarray, name: str) -> Tensor:
    missing = np.argwhere(np.isnan(values))
    if len(missing):
        raise ValueError(
            f"The labels {name!r} have no value for sample {missing[0][0]}: fill it in or leave it out."
        )
    return torch.from_numpy(values.astype(np.float32))


def _of_one_type(values: np.ndarray, name: str) -> np.ndarray:
    """Return an array of Python objects as one of text or numbers, if they are all of one type."""
    if values.dtype != object:
        return values
    types = {type(value) for value in values.flat}
    if len(types) != 1 or not types <= {str, bool, int, float}:
        raise TypeError(
            f"The labels {name!r} are of the types {sorted(t.__name__ for t in types)}: expected text, "
            "booleans, integers or floats only."
        )
    return np.array(values.tolist())
