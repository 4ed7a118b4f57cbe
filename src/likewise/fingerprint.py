"""Fingerprints of what a call was given, by which ranks find out whether they were given the same.

Integers, text, weights and data are compared exactly, by checksums of their bytes that do not depend on the
device. Floating-point options may have been computed on each rank and are compared within a tolerance.
"""

import math
import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

FLOAT_TOLERANCE = 1e-9  # relative, of Python's floats: given by the user
TENSOR_TOLERANCE = 1e-4  # relative to the root mean square: may have been computed, on another device
CHUNK = 1 << 20  # numbers to sum at a time
CACHED_CHUNK = 1 << 16  # the same on a CPU, whose cache holds them: 36 MB in 10 ms rather than 70
DEPTH = 4  # of functions and containers inside each other
SHOWN = 32  # items of a container
SAMPLED = 64  # numbers of a tensor that are always looked at


class Close(NamedTuple):
    """Numbers that agree if they differ by no more than `tolerance` times their scale."""

    numbers: list[float]
    scale: float
    tolerance: float

    def agrees(self, other: "Close") -> bool:
        """Return whether all numbers of both are within the tolerance."""
        scale = max(self.scale, other.scale) * self.tolerance
        return len(self.numbers) == len(other.numbers) and all(
            a == b or (a != a and b != b) or abs(a - b) <= scale
            for a, b in zip(self.numbers, other.numbers, strict=True)
        )


Entry = str | Close
Entries = dict[str, dict[str, Entry]]  # by kind ("weights", "data", "options"), then by name


@runtime_checkable
class Fingerprinted(Protocol):
    """An object that knows which of its parts matter."""

    def add_to(self, fingerprint: "Fingerprint", name: str) -> None:
        """Add its parts."""


class Fingerprint:
    """What a call was given, by kind and name."""

    def __init__(self) -> None:
        self.entries: Entries = {}
        self._known: dict[int, Any] = {}  # objects that were added, by id; held, so that ids stay theirs

    def put(self, kind: str, name: str, entry: Entry) -> None:
        """Add one entry; a second one of the same name gets a number, unless it is the same."""
        named = self.entries.setdefault(kind, {})
        unique, again = name, 1
        while unique in named:
            if named[unique] == entry:
                return
            again += 1
            unique = f"{name} ({again})"
        named[unique] = entry

    def add(self, name: str, value: Any, depth: int = 0) -> None:
        """Add whatever can be compared of an option or an argument; of unknown objects their type."""
        if isinstance(value, Fingerprinted):
            if id(value) not in self._known:
                self._known[id(value)] = value
                value.add_to(self, name)
        elif isinstance(value, Tensor):
            self._add_tensor(name, value)
        elif isinstance(value, float):
            self.put("options", name, Close([value], abs(value), FLOAT_TOLERANCE))
        elif value is None or isinstance(value, bool | int | str | bytes | torch.dtype | range | slice):
            self.put("options", name, repr(value))
        elif depth >= DEPTH:
            self.put("options", name, type(value).__name__)
        elif isinstance(value, Mapping):
            for key in list(value)[:SHOWN]:
                self.add(f"{name}[{key!r}]", value[key], depth + 1)
        elif isinstance(value, tuple | list):
            self.put("options", f"len({name})", str(len(value)))
            for i, item in enumerate(value[:SHOWN]):
                self.add(f"{name}[{i}]", item, depth + 1)
        else:
            self._add_function(name, value, depth)

    def _add_function(self, name: str, value: Any, depth: int) -> None:
        """Add a function by its name and what it captured; of other objects the type."""
        if isinstance(value, partial):
            self.add(name, (value.func, value.args, value.keywords), depth + 1)
            return
        function = getattr(value, "__func__", value)
        code = getattr(function, "__code__", None)
        if code is None:
            self.put("options", name, getattr(value, "__name__", type(value).__name__))
            if callable(value) and not isinstance(value, type | torch.nn.Module):
                for inner, part in getattr(value, "__dict__", {}).items():
                    self.add(inner, part, depth + 1)
            return
        self.put("options", name, f"{code.co_qualname}:{code.co_firstlineno}")
        captured = zip(code.co_freevars, function.__closure__ or (), strict=True)
        for inner, cell in captured:
            if _is_filled(cell):
                self.add(inner, cell.cell_contents, depth + 1)
        for i, default in enumerate(function.__defaults__ or ()):
            self.add(f"{name} default {i}", default, depth + 1)

    def _add_tensor(self, name: str, value: Tensor) -> None:
        shape = f"{tuple(value.shape)} {value.dtype}"
        if value.is_meta or value.layout is not torch.strided:
            self.put("options", name, shape)
        elif value.is_floating_point():
            self.put("options", f"shape of {name}", shape)
            self.put("options", name, _summary(value))
        else:
            self.put("options", name, f"{shape} {checksums([value])[0]}")


def differing(entries: Iterable[Mapping[str, Entry]]) -> dict[str, list[int]]:
    """Return the names at which fingerprints differ, with a number for each rank: equal where they agree."""
    given = list(entries)
    found = {}
    for name in dict.fromkeys(name for one in given for name in one):
        groups: list[Entry | None] = []
        places = []
        for one in given:
            entry = one.get(name)
            place = next((i for i, known in enumerate(groups) if _agree(known, entry)), len(groups))
            if place == len(groups):
                groups.append(entry)
            places.append(place)
        if len(groups) > 1:
            found[name] = places
    return found


def checksums(tensors: list[Tensor]) -> list[str]:
    """Return an exact checksum of each tensor's bytes and their order, the same on every device."""
    found = [_checksum(tensor) for tensor in tensors]
    return [f"{total & (2**64 - 1):016x}" for total in _fetched(found)]


def sampled_checksums(tensors: list[Tensor]) -> list[str]:
    """Return a checksum of a few numbers of each, spread over it: cheap enough for every pass."""
    return checksums([_spread(_integers(tensor)) for tensor in tensors])


def tensor_states(tensors: Iterable[Tensor]) -> tuple[Any, ...]:
    """Return what changes when one of the tensors is replaced or written to.

    Writes that PyTorch does not count (through `.data`, or an array that shares the memory) are noticed at a few
    numbers of each tensor.
    """
    given = list(tensors)
    places = [(t.data_ptr(), 0 if t.is_inference() else t._version) if _is_plain(t) else id(t) for t in given]
    few: dict[torch.device, list[Tensor]] = {}
    for tensor in given:
        few.setdefault(tensor.device, []).append(_spread(_integers(tensor)).to(torch.int64))
    return (*places, *_fetched([_checksum(torch.cat(parts)) for parts in few.values()]))


def describe_module(module: torch.nn.Module) -> str:
    """Return the modules as they print themselves, without addresses in memory."""
    return _without_addresses(repr(module))


class ChecksumCache:
    """Checksums of tensors that are computed again when a tensor was written to or replaced.

    Writes that PyTorch does not count (through `.data`, or an array that shares the memory) are noticed at a
    few numbers that are looked at each time.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[Any, str]] = {}

    def get(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Return the checksum of each tensor, by name."""
        states = {name: _state(tensor) for name, tensor in tensors.items()}
        stale = [n for n, s in states.items() if s is None or self._known.get(n, (None,))[0] != s]
        for name, checksum in zip(stale, checksums([tensors[name] for name in stale]), strict=True):
            self._known[name] = states[name], checksum
        few = sampled_checksums(list(tensors.values()))
        return {
            name: f"{tuple(tensor.shape)} {tensor.dtype} {self._known[name][1]} {some}"
            for (name, tensor), some in zip(tensors.items(), few, strict=True)
        }


def _agree(a: Entry | None, b: Entry | None) -> bool:
    if isinstance(a, Close) and isinstance(b, Close):
        return a.agrees(b)
    return type(a) is type(b) and a == b


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return False
    return True


def _without_addresses(text: str) -> str:
    return re.sub(r"0x[0-9a-fA-F]+", "0x", text)


def _state(tensor: Tensor) -> tuple[int, int, int] | None:
    """Return what changes when a tensor is replaced or written to; None where nobody counts."""
    if tensor.is_inference() or tensor.layout is not torch.strided:
        return None
    return id(tensor), tensor.data_ptr(), tensor._version


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta


def _integers(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor as a flat one of integers; nothing of one that has no plain memory."""
    tensor = tensor.detach()
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_quantized:
        return torch.zeros(0, dtype=torch.int64)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    same_size: Mapping[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.reshape(-1).view(same_size[tensor.element_size()])


def _checksum(tensor: Tensor) -> Tensor:
    """Return Σ (2i + 1) v_i modulo 2⁶⁴: any single change, and any exchange of different numbers, shows."""
    values = _integers(tensor)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    chunk = CACHED_CHUNK if values.device.type == "cpu" else CHUNK
    for start in range(0, values.numel(), chunk):
        part = values[start : start + chunk]
        odd = torch.arange(2 * start + 1, 2 * (start + len(part)) + 1, 2, device=values.device)
        total += (part.to(torch.int64) * odd).sum()
    return total


def _spread(values: Tensor) -> Tensor:
    return values[:: max(1, values.numel() // SAMPLED)]


def _fetched(scalars: list[Tensor]) -> list[int]:
    """Return numbers that may be on several devices, with one transfer from each."""
    by_device: dict[torch.device, list[int]] = {}
    for i, scalar in enumerate(scalars):
        by_device.setdefault(scalar.device, []).append(i)
    found = [0] * len(scalars)
    for places in by_device.values():
        for i, value in zip(places, torch.stack([scalars[i] for i in places]).tolist(), strict=True):
            found[i] = value
    return found


def _summary(value: Tensor) -> Close:
    """Return mean, root mean square and a few numbers of a floating tensor."""
    flat = value.detach().reshape(-1)
    if flat.numel() > 4 * CHUNK:
        flat = flat[:: flat.numel() // CHUNK]
    if flat.numel() == 0:
        return Close([], 0.0, TENSOR_TOLERANCE)
    wide = (flat.cpu() if flat.device.type == "mps" else flat).double()
    size = float(wide.square().mean().sqrt())
    numbers = [size, float(wide.mean()), *_spread(wide).tolist()]
    return Close(numbers, size if math.isfinite(size) else 0.0, TENSOR_TOLERANCE)
