"""Raw samples turned into a model's inputs, one by one, when they are asked for."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from likewise.loading.options import Preparation


class Prepared(Dataset[Any]):
    """The inputs that a function makes of raw samples, all of one shape; without labels.

    The first two are made at once, to see that their shapes are equal.
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
                f"{name} raised {type(error).__name__} for {self._called(i)}: {error}"
            ) from error
        try:
            found = as_input(value)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{name} gave for {self._called(i)} what is no input of a model: {error} Expected a tensor, "
                "or a dict or tuple of tensors."
            ) from error
        self._refuse_other_shapes(i, found)
        return found

    def _refuse_other_shapes(self, i: int, found: Any) -> None:
        shapes = _shapes(found)
        if self._shapes is not None and shapes != self._shapes:
            raise ValueError(
                f"{self._prepare.name} gave {_written(self._shapes)} for {self._called(0)}, but "
                f"{_written(shapes)} for {self._called(i)}: samples go into one batch, so pad or cut them "
                'to one length or size, for example tokenizer(text, padding="max_length", '
                "truncation=True, max_length=128)."
            )

    def _called(self, i: int) -> str:
        return f"sample {i}" if self._names is None else f"sample {i} ({self._names[i]})"


Shapes = dict[str, tuple[int, ...]]


def as_input(value: object) -> Any:
    """Return numbers, and lists, tuples and dicts of them, as tensors.

    What Hugging Face tokenizers and processors give for one sample as a batch of one loses that dimension.
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
    """Return a copy with floats as float32 and integers as int64, but uint8 and bool as they are."""
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


def _written(shapes: Shapes) -> str:
    return ", ".join(f"{name} {shape}".strip() for name, shape in shapes.items())
