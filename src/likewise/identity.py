"""What makes two runs the same run: model, data, readout, precision and options.

A run that is there is returned, or resumed, only if all of these agree. Code counts by its bytecode, values
by their bytes, and what a model computes by its outputs and gradients on a few samples: these are compared
with a tolerance, because threads and machines round differently.
"""

import dataclasses
import functools
import hashlib
import inspect
import math
import re
import sysconfig
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from likewise.data import Batches, Samples, join_labels
from likewise.model import Network, annotate_errors
from likewise.module_attributes import PLAIN, forward_settings, instructions
from likewise.readouts import check_readout

SAMPLES = 8  # on which models are compared
NUMBERS = 4  # random combinations of the outputs of each
LIBRARIES = tuple(
    str(Path(path))
    for name, path in sysconfig.get_paths().items()
    if name in ("stdlib", "purelib", "platlib")
)
READS_OF_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)


def fingerprint_model(net: Network, *, settings: bool = False) -> str:
    """Return a fingerprint of a model's modules, of the code of their forward methods and of its state.

    Args:
        net: The network.
        settings: Whether numbers and texts count that forward reads from attributes, where nobody compares what the
            model computes; those of modules of libraries count as they are printed.

    """
    printed = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(net.model))  # where an object lies in memory
    digest = hashlib.sha256(printed.encode("utf-8", "replace"))
    walk = _Walk(digest)
    for kind in dict.fromkeys(type(module) for module in net.model.modules()):
        walk.method(kind, "forward")
    for module in net.model.modules():
        for value in vars(module).values():  # an activation, say, or a forward replaced on this one object
            if isinstance(value, FUNCTIONS):
                walk.value(value)
        read = forward_settings(module) if settings and not _is_of_library(type(module).forward) else {}
        if read:
            walk.value(read)
    for name, value in net.model.state_dict().items():
        if isinstance(value, Tensor):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(_bytes_of(value))
        else:
            digest.update(f"{name} {value!r}".encode())
    return digest.hexdigest()


def fingerprint_code(*callables: Any, stores: bool = True) -> str:
    """Return a fingerprint of functions: their bytecode, defaults, closures and the functions they call.

    Code of installed libraries counts by its name. Comments and positions in a file do not count.

    Args:
        callables: Functions, or objects that are called, such as modules.
        stores: Whether lists, dicts and sets in closures count; False where calls may write to them.

    """
    digest = hashlib.sha256()
    walk = _Walk(digest, stores)
    for each in callables:
        walk.value(each)
    return digest.hexdigest()


def fingerprint_readout(net: Network, data: Batches) -> str:
    """Return a fingerprint of a readout, and of the samples' ids if it reads them."""
    digest = hashlib.sha256(fingerprint_code(net.readout).encode())
    if check_readout(net.readout).has("ids"):
        digest.update(_bytes_of(data.ids))
    return digest.hexdigest()


def read_data(data: Batches) -> tuple[str, Tensor | None]:
    """Return a fingerprint of a data set and its labels, from one reading.

    It depends on values, shapes, dtypes and names of the columns, and not on the size of the batches.
    """
    return DataRecord().complete(data)


class DataRecord:
    """Fingerprint and labels of a data set, collected while a pass that is needed anyway reads it in order."""

    def __init__(self) -> None:
        self._columns: list[_Column] = []
        self._structure, self._labels, self._next = "", list[Tensor | None](), 0

    def observe(self, data: Batches) -> Batches:
        """Return the same batches; what is read of them in order is recorded here."""
        return _ObservedBatches(data, self)

    def add(self, where: range, samples: Samples) -> None:
        """Add those of the samples at these places that come next, if any do."""
        if not where.start <= self._next < where.stop:
            return
        samples = samples[self._next - where.start :] if where.start < self._next else samples
        values, spec = tree_flatten(_without_padding(samples))
        if not self._columns:
            self._columns, self._structure = [_Column() for _ in values], str(spec)
        if str(spec) != self._structure:
            raise ValueError(f"Batches of the data differ in structure: {self._structure} and {spec}.")
        for column, value in zip(self._columns, values, strict=True):
            column.add(value)
        self._labels.append(None if samples.labels is None else samples.labels.cpu())
        self._next = where.stop

    def complete(self, data: Batches) -> tuple[str, Tensor | None]:
        """Return fingerprint and labels, having read what no pass has."""
        for where in data.spans():
            if where.stop > self._next:
                self.add(where, data.samples(where))
        parts = [str(data.n), self._structure, *(column.hexdigest() for column in self._columns)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest(), join_labels(self._labels)


class _ObservedBatches(Batches):
    def __init__(self, data: Batches, record: DataRecord) -> None:
        super().__init__(data._source, data._positions, data.size, data.given)
        self._record = record

    def samples(self, where: range) -> Samples:
        found = super().samples(where)
        self._record.add(where, found)
        return found


def precision_settings(net: Network) -> dict[str, Any]:
    """Return what decides how exactly a model computes, beside the dtype of its parameters."""
    found: dict[str, Any] = {
        "autocast": None if net.autocast is None else str(net.autocast),
        **_float32_precision(net),
    }
    if _device_type(net) == "cuda":
        matmul = torch.backends.cuda.matmul
        found["bfloat16_reduction"] = bool(matmul.allow_bf16_reduced_precision_reduction)
        found["float16_reduction"] = bool(matmul.allow_fp16_reduced_precision_reduction)
    return found


def _float32_precision(net: Network) -> dict[str, str]:
    """Return in what precision products and convolutions of float32 are taken on the model's device."""
    backends: Any = torch.backends
    on_cuda = _device_type(net) == "cuda"
    if not hasattr(backends, "fp32_precision"):  # PyTorch before 2.9
        convolution = "tf32" if on_cuda and backends.cudnn.allow_tf32 else "ieee"
        return {"matmul": torch.get_float32_matmul_precision(), "convolution": convolution}
    # the older call raises an error where both kinds of settings have been used
    chosen = {
        "matmul": (backends.cuda if on_cuda else backends.mkldnn).matmul.fp32_precision,
        "convolution": (backends.cudnn if on_cuda else backends.mkldnn).conv.fp32_precision,
    }
    return {what: "ieee" if kind == "none" else str(kind) for what, kind in chosen.items()}


def _device_type(net: Network) -> str:
    return next(net.model.parameters()).device.type


def measure_behavior(net: Network, data: Batches) -> dict[str, Any]:
    """Return what a model computes on a few samples, and how far rounding may move it.

    A row of a sample: the norm of its outputs, by which the row is compared; the norm of the gradient of what
    the readout returns, summed; random combinations of what the model and of what the readout returns.
    """
    places = np.linspace(0, data.n - 1, min(data.n, SAMPLES)).astype(int)
    with net.evaluation_mode():
        rows = [_behavior_on(net, data, int(place)) for place in places]
    return {"tolerance": _tolerance(net), "rows": rows}


def same_behavior(there: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    """Whether outputs and gradients of two models agree, up to rounding."""
    if [len(row) for row in there["rows"]] != [len(row) for row in here["rows"]]:
        return False
    tolerance = max(there["tolerance"], here["tolerance"])
    rows = [(np.array(a), np.array(b)) for a, b in zip(there["rows"], here["rows"], strict=True)]
    return all(
        np.allclose(a[1:], b[1:], rtol=tolerance, atol=tolerance * abs(a[0]), equal_nan=True) for a, b in rows
    )


def _behavior_on(net: Network, data: Batches, place: int) -> list[float]:
    samples = data.samples(range(place, place + 1))
    with torch.enable_grad():
        leaves = {name: value.requires_grad_() for name, value in net.parameters.items()}
        with annotate_errors(net, samples.inputs, samples.labels, samples.ids):
            raw = net.call_model({name: leaf.clone() for name, leaf in leaves.items()}, samples.inputs)
            read = net.select_outputs(raw, samples.inputs, samples.labels, samples.ids)
        wanted = list(leaves.values())
        gradients = torch.autograd.grad(read.sum(), wanted, allow_unused=True) if read.requires_grad else ()
    outputs = [
        leaf.detach()
        for leaf in (*tree_leaves(raw), read)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    slope = math.hypot(*(_norm(gradient) for gradient in gradients if gradient is not None))
    combined = [float(value) for leaf in outputs for value in _combined(leaf)]
    return [math.hypot(*map(_norm, outputs)), slope, *combined]


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values.to(torch.promote_types(values.dtype, torch.float32))))


def _combined(values: Tensor) -> Tensor:
    """Return a few combinations of numbers with random signs, the same each time."""
    flat = values.flatten().cpu().double()
    signs = torch.randint(0, 2, (NUMBERS, len(flat)), generator=torch.Generator().manual_seed(0))
    return (2 * signs - 1).double() @ flat / math.sqrt(max(1, len(flat)))


def _tolerance(net: Network) -> float:
    """Return how far results may differ by rounding, relative to their size."""
    dtype = net.autocast or net.dtype
    if dtype == torch.float64:
        return 1e-9
    if dtype == torch.float32:
        exact = set(_float32_precision(net).values()) <= {"ieee", "highest"}
        return 1e-3 if exact else 1e-2
    return 8 * torch.finfo(dtype).eps


def _without_padding(samples: Samples) -> tuple[Any, Any]:
    """Return inputs and labels without what pads texts: how far they are padded depends on the batch."""
    inputs, labels = samples.inputs, samples.labels
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return inputs, labels
    counts = mask != 0

    def trim(value: Any) -> Any:
        return value[counts] if isinstance(value, Tensor) and value.shape == counts.shape else value

    trimmed = {name: trim(value) for name, value in inputs.items()}
    return {**trimmed, "attention_mask": counts.sum(1)}, trim(labels)


class _Column:
    """One tensor of a sample, over all samples, however they are batched."""

    def __init__(self) -> None:
        self._digest, self._kind = hashlib.sha256(), ""

    def add(self, value: Any) -> None:
        """Add the next samples."""
        if not isinstance(value, Tensor):
            return
        kind = f"{value.dtype} {tuple(value.shape[1:])}"
        if kind != self._kind:
            self._digest.update(kind.encode())
            self._kind = kind
        self._digest.update(_bytes_of(value))

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


class _Walk:
    """Visits a function and what it refers to, each once."""

    def __init__(self, digest: Any, stores: bool = True) -> None:
        self._digest, self._seen, self._stores = digest, dict[int, Any](), stores

    def method(self, kind: type, name: str) -> None:
        """Visit a method of a class, and those that it calls by name."""
        found = inspect.getattr_static(kind, name, None)
        inner = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
        if isinstance(inner, types.FunctionType):
            self._function(inner, kind)

    def value(self, value: Any) -> None:
        """Visit a value that a function holds."""
        self._note(type(value).__qualname__)
        if value is None or isinstance(value, PLAIN):
            self._note(repr(value))
        elif isinstance(value, Tensor):
            self._note(f"{value.dtype} {tuple(value.shape)}")
            self._digest.update(_bytes_of(value))
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            self._note(f"{value.dtype} {value.shape}")
            self._digest.update(np.ascontiguousarray(value).tobytes())
        elif isinstance(value, tuple):  # equal constants may be one object or several
            self._each(value)
        elif id(value) in self._seen:
            self._note("seen")
        else:
            self._seen[id(value)] = value
            self._compound(value)

    def _compound(self, value: Any) -> None:
        if isinstance(value, types.FunctionType):
            self._function(value, None)
        elif isinstance(value, types.MethodType):
            self.value(value.__func__)
            self.method(type(value.__self__), value.__func__.__name__)
            self._state(value.__self__)
        elif isinstance(value, types.CodeType):
            self._code(value)
        elif isinstance(value, functools.partial):
            self._each([value.func, value.args, value.keywords])
        elif isinstance(value, dict):
            self._each([part for pair in value.items() for part in pair])
        elif isinstance(value, set | frozenset):
            self._each(sorted(value, key=repr))  # their order differs from process to process
        elif isinstance(value, list):
            self._each(value)
        elif isinstance(value, type | types.ModuleType | types.BuiltinFunctionType):
            self._note(f"{getattr(value, '__module__', '')} {getattr(value, '__qualname__', value.__name__)}")
        elif isinstance(value, nn.Module):
            self.method(type(value), "forward")
            self.value(dict(value.state_dict()))
            self._each([_settings(module) for module in value.modules()])
        else:
            self.method(type(value), "__call__")
            self._state(value)

    def _state(self, value: Any) -> None:
        """Visit what an object holds, where that is its value and not a store of something else."""
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            self._each([getattr(value, field.name) for field in dataclasses.fields(value)])
        elif callable(value) and not isinstance(value, nn.Module):
            self.value(dict(getattr(value, "__dict__", {})))

    def _each(self, values: Any) -> None:
        self._note(f"({len(values)}")
        for value in values:
            self.value(value)

    def _function(self, function: types.FunctionType, owner: type | None) -> None:
        code = function.__code__
        if _is_of_library(function):
            self._note(f"{function.__module__} {function.__qualname__}")
            if function.__closure__ is None or _wraps_library(function):
                return
        elif id(code) not in self._seen:
            self._seen[id(code)] = code
            self._code(code, function.__doc__)
            read = _global_names(code)
            for name in _names(code):
                if name in read and name in function.__globals__:
                    self._global(function.__globals__[name], code)
                if owner is not None:
                    self.method(owner, name)
        self._each([function.__defaults__, function.__kwdefaults__])
        for cell in function.__closure__ or ():
            held = cell.cell_contents if _is_filled(cell) else None
            if self._stores or not isinstance(held, list | dict | set):
                self.value(held)

    def _global(self, value: Any, code: types.CodeType) -> None:
        """Visit a global: functions and constants; what changes as it is used, like a cache, is left out."""
        if isinstance(value, types.ModuleType):
            used = (vars(value).get(name) for name in _names(code))
            self._each([found for found in used if isinstance(found, types.FunctionType)])
            return
        is_store = isinstance(value, list | dict | set) or hasattr(value, "__dict__")
        if not is_store or isinstance(value, Tensor) or dataclasses.is_dataclass(value) or callable(value):
            self.value(value)

    def _code(self, code: types.CodeType, doc: str | None = None) -> None:
        self._digest.update(code.co_code)
        self._each(code.co_names)
        self._each([constant for constant in code.co_consts if doc is None or constant != doc])

    def _note(self, text: str) -> None:
        self._digest.update(text.encode("utf-8", "surrogatepass") + b"\0")


def _settings(module: nn.Module) -> dict[str, Any]:
    """Return the plain attributes of a module that its forward may read, such as those that were options."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name != "training" and (value is None or isinstance(value, PLAIN))
    }


def _names(code: types.CodeType) -> list[str]:
    """Return the names that a function and those inside it refer to."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return list(dict.fromkeys([*code.co_names, *(name for part in inner for name in _names(part))]))


def _global_names(code: types.CodeType) -> set[str]:
    """Return the names that a function reads as globals: self.net is no use of a global called net."""
    return {
        instruction.argval for instruction in instructions(code) if instruction.opname in READS_OF_GLOBALS
    }


def _is_of_library(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(LIBRARIES)


def _wraps_library(function: types.FunctionType) -> bool:
    """Whether a library's function is another one of the same name, wrapped: torch does so once dynamo is imported."""
    inner = inspect.unwrap(function)
    if inner is function or not isinstance(inner, types.FunctionType):
        return False
    is_same = (inner.__module__, inner.__qualname__) == (function.__module__, function.__qualname__)
    return is_same and inner.__code__.co_filename.startswith(LIBRARIES)


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # a name that has no value yet
        return False
    return True


def _bytes_of(value: Tensor) -> bytes:
    plain = value.detach().cpu().resolve_conj().resolve_neg()
    dense = plain.to_dense() if plain.layout != torch.strided else plain
    return dense.contiguous().flatten().view(torch.uint8).numpy().tobytes()
