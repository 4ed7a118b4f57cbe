"""Load the state of a model from a file without running code in it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import BadZipFile, ZipFile, is_zipfile

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from likewise.loading.imports import library
from likewise.loading.paths import existing, listed

State = dict[str, Any]  # tensors by name; modules may add an `_extra_state` of their own
HOLDERS = ("state_dict", "model_state_dict", "model")
PREFIXES = ("module.", "_orig_mod.", "model.")  # of DataParallel, torch.compile and Lightning


def load_weights(model: nn.Module, text: str) -> None:
    """Load the state in a file into a model; names and shapes must match.

    Wrappers' prefixes are taken off where the rest then fits; tensors that are one in the model need to be
    there once.
    """
    path = existing(text)
    wanted = model.state_dict()
    state = _with_ties(_fitting(_state(_content(path), path), wanted), wanted)
    problems = _mismatches(state, wanted)
    if problems:
        raise ValueError(f"{path} does not fit {type(model).__name__}: {'; '.join(problems)}.")
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit {type(model).__name__}: {error}") from error


def load_tensors(text: str) -> object:
    """Return the content of a .safetensors file, or one written by torch.save, without running code in it.

    Args:
        text: The path of the file.

    Raises:
        ValueError: It holds more than tensors, numbers and text, or cannot be read.

    """
    return _content(existing(text))


def _content(path: Path) -> object:
    if path.is_dir():
        names = [entry.name for entry in sorted(path.iterdir())]
        raise ValueError(f"{path} is a folder: name the weights file in it, one of {listed(names)}.")
    if path.suffix.lower() == ".safetensors":
        files = library("safetensors.torch", "safetensors")
        try:
            return files.load_file(path)
        except Exception as error:
            raise ValueError(f"{path} cannot be read as safetensors ({error}).") from error
    _refuse_compressed(path)
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except UnpicklingError as error:
        raise ValueError(
            f"{path} holds more than tensors, or is not a weights file: reading it would run code in it (pickle), "
            "which is refused. If you trust it, load it yourself once, and write its state: "
            "torch.save(model.state_dict(), 'weights.pt')."
        ) from error
    except Exception as error:
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        raise ValueError(
            f"{path} cannot be read as weights ({reason}): expected .safetensors, or a file written by "
            "torch.save(model.state_dict(), path)."
        ) from error


def _refuse_compressed(path: Path) -> None:
    """Raise an error if a file of torch.save expands to more than its size: torch.save compresses nothing."""
    if not is_zipfile(path):
        return
    try:
        with ZipFile(path) as archive:
            needed = sum(member.file_size for member in archive.infolist())
    except BadZipFile as error:
        raise ValueError(f"{path} cannot be read as weights ({error}).") from error
    if needed > path.stat().st_size:
        raise ValueError(
            f"{path} expands to {needed:,} bytes, more than the {path.stat().st_size:,} of the file: "
            "torch.save compresses nothing, so it did not write this file."
        )


def _state(content: object, path: Path) -> State:
    held = content
    if isinstance(content, Mapping):
        held = next((content[k] for k in HOLDERS if isinstance(content.get(k), Mapping)), content)
    if not isinstance(held, Mapping):
        raise ValueError(f"{path} holds a {type(content).__name__}, expected a state dict: tensors by name.")
    odd = [
        str(k) for k, v in held.items() if not isinstance(v, Tensor) and not f"{k}".endswith("_extra_state")
    ]
    if odd or not held:
        raise ValueError(
            f"{path} holds no state dict, neither itself nor under {', '.join(HOLDERS)}: it has "
            f"{listed(map(str, held))}. Not tensors: {listed(odd, 3)}."
        )
    return {str(name): value for name, value in held.items()}


def _fitting(state: State, wanted: State) -> State:
    """Return the state with the prefix removed whose names fit the model best; unchanged if it fits."""
    return min(_strip_prefixes(state), key=lambda names: len(names.keys() ^ wanted.keys()))


def _strip_prefixes(state: State) -> Iterator[State]:
    """Yield the state, then the state without each prefix that all its names share."""
    yield state
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in state):
            yield from _strip_prefixes({name.removeprefix(prefix): value for name, value in state.items()})


def _with_ties(state: State, wanted: State) -> State:
    """Return the state with the aliases of shared tensors that safetensors leaves out."""
    there = {_memory(wanted[name]): value for name, value in state.items() if _memory(wanted.get(name))}
    tied = {name: there[_memory(value)] for name, value in wanted.items() if _memory(value) in there}
    return {**tied, **state}


def _memory(value: object) -> tuple[int, ...] | None:
    """Return the storage that two names of one tensor share; None if there is none."""
    if not isinstance(value, Tensor) or is_lazy(value) or value.device.type == "meta" or not value.numel():
        return None
    return value.data_ptr(), *value.shape, *value.stride()


def _mismatches(state: State, wanted: State) -> list[str]:
    missing, unexpected = sorted(wanted.keys() - state.keys()), sorted(state.keys() - wanted.keys())
    both = [name for name in wanted if name in state and isinstance(wanted[name], Tensor)]
    shapes = {name: (state[name], wanted[name]) for name in both if not is_lazy(wanted[name])}
    differing = [
        f"{name} is {tuple(given.shape)} there and {tuple(own.shape)} in the model"
        for name, (given, own) in shapes.items()
        if given.shape != own.shape
    ]
    return [
        *([f"missing in the file: {listed(missing, 6)}"] if missing else []),
        *([f"not in the model: {listed(unexpected, 6)}"] if unexpected else []),
        *([f"shapes that differ: {listed(differing, 3)}"] if differing else []),
    ]
