"""Labels as numbers: classes 0..c-1, or measured values."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Labels(NamedTuple):
    """Labels, and the names of the classes if they are not their numbers."""

    values: Tensor  # (n,) long for classes, else float
    classes: tuple[str, ...] | None


def labels_from(values: np.ndarray, name: str) -> Labels:
    """Return text, booleans and integers as classes, sorted and numbered from 0, and floats as numbers.

    Integers that can be class numbers stay as they are, without names: a class that is missing here does not
    move the others. Negative or very large ones are numbered, and named by what they were.
    """
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    plain = _of_one_type(values, name)
    if plain.dtype.kind == "f":
        return Labels(_numbers(plain, name), None)
    if plain.dtype.kind not in "biuU" or plain.ndim != 1:
        raise TypeError(
            f"The labels {name!r} are {plain.dtype} of shape {plain.shape}: expected one text, bool, integer "
            "or float a sample."
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
