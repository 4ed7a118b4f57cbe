"""What modules hold beside parameters and buffers, and their forward may read: settings, functions, hooks."""

import dis
import types
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

DEPTH = 4  # of containers and objects inside each other
SHOWN = 64  # items of a container
OWN = frozenset(vars(nn.Module())) | {"training"}  # what PyTorch keeps in a module
HOOKS = ("_forward_pre_hooks", "_forward_hooks")  # those that can change outputs
LOADS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
PLAIN: tuple[type, ...] = (
    *(bool, int, float, complex, str, bytes, range, slice, type(...)),
    *(torch.dtype, torch.device, torch.Size, np.dtype),
)


class Snapshot(NamedTuple):
    """What modules held at a moment."""

    values: tuple[Any, ...]  # equal as long as nothing was replaced
    tensors: list[Tensor]  # among them


def take_snapshot(model: nn.Module) -> Snapshot:
    """Return what the modules of a model hold, to be compared with what they hold later in the same process.

    Attributes count by value where they are numbers, text, or containers and plain objects of these, and by identity
    where they are anything else, such as functions and hooks. What forward itself writes to, a counter say, is left
    out, as is the mode.
    """
    tensors: list[Tensor] = []
    seen: set[int] = set()

    def look(value: Any, depth: int) -> Any:
        if value is None or isinstance(value, PLAIN):
            return type(value), value
        if isinstance(value, Tensor):
            tensors.append(value)
            return Tensor
        if depth == DEPTH or id(value) in seen or isinstance(value, nn.Module | type) or callable(value):
            return _Identity(value)
        seen.add(id(value))
        if isinstance(value, Mapping):
            return [(look(k, depth + 1), look(v, depth + 1)) for k, v in _first(value.items())]
        if isinstance(value, list | tuple):
            return [len(value), *(look(item, depth + 1) for item in _first(value))]
        return _Identity(value), look(getattr(value, "__dict__", None), depth + 1)

    found = []
    for module in model.modules():
        kind: Any = type(module)
        written = _names_in_forward(kind, kind.forward).written | OWN
        held = [(name, look(value, 0)) for name, value in vars(module).items() if name not in written]
        hooks = [_Identity(hook) for kind in HOOKS for hook in getattr(module, kind).values()]
        found.append((kind, kind.forward, held, hooks))
    return Snapshot(tuple(found), tensors)


def forward_settings(module: nn.Module) -> dict[str, Any]:
    """Return the numbers and texts that a module's forward reads from its attributes, and does not write."""
    kind: Any = type(module)
    names = _names_in_forward(kind, kind.forward)
    return {
        name: value
        for name, value in sorted(vars(module).items())
        if name in names.read - names.written - OWN and (value is None or isinstance(value, PLAIN))
    }


class _Identity:
    """An object that equals itself alone; held, so that its address stays its own."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


class _Names(NamedTuple):
    read: frozenset[str]
    written: frozenset[str]


@cache
def _names_in_forward(kind: type, forward: Any) -> _Names:
    """Return the attributes that forward, and the methods of the class that it names, read or write."""
    del forward  # which may be replaced in the class: the names are looked up again then
    read, written, waiting = set[str](), set[str](), ["forward"]
    while waiting:
        name = waiting.pop()
        for instruction in _instructions_of(kind, name):
            if instruction.opname == "STORE_ATTR":
                written.add(instruction.argval)
            elif instruction.opname in LOADS and instruction.argval not in read:
                read.add(instruction.argval)
                waiting.append(instruction.argval)
    return _Names(frozenset(read), frozenset(written))


def _instructions_of(kind: type, name: str) -> Iterator[dis.Instruction]:
    """Yield the instructions of a method, or property, of a class and of its bases, which super() calls."""
    for base in kind.__mro__:
        found = vars(base).get(name)
        function = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
        if isinstance(function, types.FunctionType):
            yield from instructions(function.__code__)


def instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    """Yield the instructions of a function and of those inside it."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from instructions(constant)


def _first(values: Any) -> list[Any]:
    return [value for value, _ in zip(values, range(SHOWN), strict=False)]
