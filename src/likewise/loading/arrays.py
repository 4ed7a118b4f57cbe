"""Read inputs and labels from an .npz file."""

import math
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile, is_zipfile

import numpy as np
from torch import Tensor

from likewise.loading.dataset import Labels, Options, Prepared, Read, as_tensor, labels_from
from likewise.loading.paths import listed, refuse_expansion

INPUTS = ("x", "X", "inputs", "images")
LABELS = ("y", "labels")
CHANNELS = (1, 3, 4)
USED = ("label", "prepare", "limit")


def read_arrays(path: Path, options: Options) -> Read:
    """Return the inputs of an .npz file as float32, and its labels.

    Images of uint8, (n, h, w) or (n, h, w, c), become (n, c, h, w) in [0, 1]; other integers stay integers. A
    `prepare` function gets the stored array of one sample.
    """
    options.refuse_all_but(USED, f"the arrays in {path}")
    stored = _read_stored(path, options.label, options.max_memory)
    inputs, prepare = stored.inputs[: options.limit], options.prepare
    n, pictures = len(inputs), _are_images(inputs, stored.name)
    dataset = _inputs(inputs) if prepare is None else Prepared(inputs.__getitem__, n, prepare)
    read = Read(dataset, show=_channels_last(inputs).__getitem__ if pictures else None)
    if stored.labels is None:
        return read
    return read._replace(labels=stored.labels.values[:n], classes=stored.labels.classes)


class _Stored(NamedTuple):
    name: str
    inputs: np.ndarray
    labels: Labels | None


def _read_stored(path: Path, label: str | None, max_memory: int) -> _Stored:
    with _archive(path) as archive:
        there = [name.removesuffix(".npy") for name in archive.namelist()]
        name = next((name for name in INPUTS if name in there), None)
        if name is None or (label is not None and label not in there):
            raise ValueError(
                f"{path} holds {listed(there)}: expected inputs under {', '.join(INPUTS)}, labels "
                f"under {' or '.join(LABELS) if label is None else label}."
            )
        label = label or next((name for name in LABELS if name in there), None)
        wanted = [name] if label is None else [name, label]
        needed = sum(_declared_bytes(archive, each, path) for each in wanted)
        refuse_expansion(path, f"What {' and '.join(wanted)} declare", needed, max_memory)
        inputs = _array(archive, name, path)
        labels = None if label is None else labels_from(np.atleast_1d(_array(archive, label, path)), label)
    if not inputs.ndim or not len(inputs):
        raise ValueError(f"{name!r} in {path} has the shape {inputs.shape}: there are no samples.")
    if inputs.dtype.kind not in "biuf":
        raise TypeError(f"{name!r} in {path} holds {inputs.dtype}, expected numbers.")
    if labels is not None and len(labels.values) != len(inputs):
        raise ValueError(f"{len(labels.values)} labels ({label!r}) for {len(inputs)} samples in {path}.")
    return _Stored(name, inputs, labels)


def _archive(path: Path) -> ZipFile:
    if not is_zipfile(path):
        with path.open("rb") as file:
            alone = file.read(len(np.lib.format.MAGIC_PREFIX)) == np.lib.format.MAGIC_PREFIX
        reason = "it holds one array without a name" if alone else "it is no archive, or is cut off"
        raise ValueError(_unreadable(path, reason))
    try:
        return ZipFile(path)
    except Exception as error:
        raise ValueError(_unreadable(path, error)) from error


def _declared_bytes(archive: ZipFile, name: str, path: Path) -> int:
    """Return the bytes that the header of an array declares; raise unless as many are stored."""
    member = archive.getinfo(_member(archive, name))
    try:
        with archive.open(member) as file:
            short = np.lib.format.read_magic(file) == (1, 0)
            read = np.lib.format.read_array_header_1_0 if short else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
            stored = member.file_size - file.tell()
    except Exception as error:
        raise ValueError(_unreadable(path, error)) from error
    if dtype.hasobject:
        raise ValueError(_unreadable(path, f"{name!r} holds Python objects"))
    declared = math.prod(shape) * dtype.itemsize
    if declared != stored:
        raise ValueError(
            _unreadable(
                path, f"{name!r} declares the shape {shape}, {declared:,} bytes, and stores {stored:,}"
            )
        )
    return declared


def _array(archive: ZipFile, name: str, path: Path) -> np.ndarray:
    try:
        with archive.open(_member(archive, name)) as file:
            return np.lib.format.read_array(file, allow_pickle=False)
    except Exception as error:
        raise ValueError(_unreadable(path, error)) from error


def _member(archive: ZipFile, name: str) -> str:
    return f"{name}.npy" if f"{name}.npy" in archive.NameToInfo else name


def _unreadable(path: Path, reason: object) -> str:
    return (
        f"{path} cannot be read as arrays ({reason}): expected an .npz file without Python objects, as "
        "np.savez(path, x=inputs, y=labels) writes it."
    )


def _inputs(array: np.ndarray) -> Tensor:
    if array.dtype != np.uint8 or array.ndim not in (3, 4):
        return as_tensor(array)
    pixels = as_tensor(array).float().div_(255)
    if array.ndim == 3:
        return pixels[:, None]
    return pixels if _channels_first(array) else pixels.permute(0, 3, 1, 2).contiguous()


def _are_images(array: np.ndarray, name: str) -> bool:
    if array.ndim == 3:
        return array.dtype == np.uint8 or name == "images"
    return array.ndim == 4 and (
        array.dtype == np.uint8 or array.shape[-1] in CHANNELS or array.shape[1] in CHANNELS
    )


def _channels_first(array: np.ndarray) -> bool:
    return array.ndim == 4 and array.shape[1] in CHANNELS and array.shape[-1] not in CHANNELS


def _channels_last(array: np.ndarray) -> np.ndarray:
    return array.transpose(0, 2, 3, 1) if _channels_first(array) else array
