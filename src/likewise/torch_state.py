"""State that a call changes for a time: of the model, of random generators, of PyTorch's switches.

A model's parameters, mode and attributes can be swapped for one thread only, and random generators, the
choice of attention kernels and `torch.backends` belong to the whole process. So one lock serves every model:
calls from several threads take turns, and each finds and leaves everything as it was.

TF32: PyTorch 2.9 has a setting for each kind of operation, and refuses to read the older common ones where these
would be ambiguous.

CUDA graphs: inside `recording` no code synchronizes with the GPU to decide what comes next. Samples without a finite
gradient cannot be left out there, nor groups be counted: the caller has to handle both.
"""

import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

exclusive = threading.RLock()  # held by the thread whose call changes or reads a model's state


@contextmanager
def evaluation(model: nn.Module, torch_generators: bool = True) -> Iterator[None]:
    """Put the model into evaluation mode, exact kernels, no gradients; restore everything on leaving.

    Other threads that want the same, for this model or another, wait until this one has left. Nested calls
    in one thread are fine.

    Args:
        model: Every module of it is put into evaluation mode.
        torch_generators: Restore PyTorch's random generators too; a GPU's cannot be read while a CUDA graph
            is recorded.

    """
    with exclusive, ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "There is a performance drop")  # of vmap's fallbacks
        stack.enter_context(preserve_generators(torch_generators))
        stack.enter_context(preserve_attributes(model))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(_select_exact_kernels(model))
        stack.enter_context(_suspend_parametrization_cache())
        device = next(model.parameters()).device.type
        stack.enter_context(torch.autocast(device, enabled=False))
        for module in model.modules():  # not model.eval(): what overrides it may merge weights
            module.training = False
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                module.scale_grad_by_freq = False  # by counts of the batch: no gradient of a sample
        yield


@contextmanager
def fast_attention(device: torch.device) -> Iterator[None]:
    """Allow attention kernels that can be differentiated once, as training uses them; no change on a CPU."""
    if device.type != "cuda":
        yield
        return
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        yield


class ParameterWriteError(Exception):
    """An operation was about to write to a parameter.

    Attributes:
        name: Of the parameter.
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"forward writes to {name}")
        self.name = name


class WriteGuard(TorchDispatchMode):
    """Raises ParameterWriteError before any operation, also inside of functions, writes to one of some tensors."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self._names = {tensor.untyped_storage()._cdata: name for name, tensor in tensors.items()}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        if schema.is_mutable:
            for i, argument in enumerate(schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._refuse(args[i] if i < len(args) else kwargs.get(argument.name))
        return func(*args, **kwargs)

    def _refuse(self, target: Any) -> None:
        for tensor in tree_leaves(target):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                name = self._names.get(tensor.untyped_storage()._cdata)
                if name is not None:
                    raise ParameterWriteError(name)


@contextmanager
def preserve_attributes(model: nn.Module) -> Iterator[None]:
    """Restore every module's mode and attributes, also what forward adds to its lists and dicts."""
    modules = [(module, dict(vars(module))) for module in model.modules()]
    held = [value for _, attributes in modules for value in attributes.values()]
    containers = [value for value in held if isinstance(value, dict | list | set)]
    empty = [value for value in containers if not value]  # most of them
    filled = [(value, value.copy()) for value in containers if value]

    def restore() -> None:
        for module, attributes in modules:
            vars(module).clear()
            vars(module).update(attributes)
        for container in empty:
            if container:
                container.clear()
        for container, content in filled:
            container.clear()
            container.extend(content) if isinstance(container, list) else container.update(content)

    try:
        yield
    finally:
        _complete(restore)


@contextmanager
def preserve_generators(torch_generators: bool = True) -> Iterator[None]:
    """Restore the random generators of Python, NumPy and PyTorch."""
    python, numpy = random.getstate(), np.random.get_state()

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)

    with torch.random.fork_rng(enabled=torch_generators):
        try:
            yield
        finally:
            _complete(restore)


@contextmanager
def _select_exact_kernels(model: nn.Module) -> Iterator[None]:
    """Turn off kernels that cannot be differentiated in evaluation mode."""
    fast = torch.backends.mha.get_fastpath_enabled()
    backends: list[Any] = [torch.backends.cudnn, torch.backends.mkldnn]
    enabled = [backend.enabled for backend in backends]

    def restore() -> None:
        torch.backends.mha.set_fastpath_enabled(fast)
        for backend, was in zip(backends, enabled, strict=True):
            backend.enabled = was

    try:
        torch.backends.mha.set_fastpath_enabled(False)
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            for backend in backends:
                backend.enabled = False
        yield
    finally:
        _complete(restore)


@contextmanager
def _suspend_parametrization_cache() -> Iterator[None]:
    """Compute parametrized weights anew inside `torch.nn.utils.parametrize.cached()`.

    The cache is of the process, and a weight in it depends on the parameters of the call that put it there.
    """
    enabled, known = parametrize._cache_enabled, parametrize._cache

    def restore() -> None:
        parametrize._cache_enabled, parametrize._cache = enabled, known

    try:
        parametrize._cache_enabled, parametrize._cache = 0, {}
        yield
    finally:
        _complete(restore)


def _complete(restore: Callable[[], None]) -> None:
    """Restore to the end, also if Ctrl-C comes in the middle."""
    try:
        restore()
    except BaseException:
        restore()
        raise


def send(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor on a device; one of the host without waiting for what a GPU still has to do.

    It may be written to at once: CUDA reads pageable memory before it returns. Pinned memory is read later, so that
    its copy is waited for.
    """
    is_read_at_once = device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned()
    return tensor.to(device, dtype or tensor.dtype, non_blocking=is_read_at_once)


_OPERATIONS = {"matmul": ("cuda.matmul",), "convolution": ("cudnn.conv", "cudnn.rnn")}
_OLDER = {"matmul": ("cuda.matmul",), "convolution": ("cudnn",)}  # before PyTorch 2.9


def allows_tf32(operation: str) -> bool:
    """Whether "matmul" or "convolution" may use TF32."""
    if not _has_own_settings():
        return bool(_backend(_OLDER[operation][0]).allow_tf32)
    found = _backend(_OPERATIONS[operation][0]).fp32_precision
    return bool((_backend("").fp32_precision if found == "none" else found) == "tf32")


@contextmanager
def full_float32() -> Iterator[None]:
    """Disable TF32."""
    with _set_tf32("matmul", False), _set_tf32("convolution", False):
        yield


@contextmanager
def products_like_convolutions(device: torch.device) -> Iterator[None]:
    """Allow TF32 in matrix products where convolutions on a device may use it, as is PyTorch's default."""
    if device.type != "cuda" or not allows_tf32("convolution") or allows_tf32("matmul"):
        yield
        return
    with _set_tf32("matmul", True):
        yield


@contextmanager
def _set_tf32(operation: str, allowed: bool) -> Iterator[None]:
    value: bool | str = allowed
    if _has_own_settings():
        name, value = "fp32_precision", "tf32" if allowed else "ieee"
        backends = [_backend(path) for path in _OPERATIONS[operation]]
    else:
        name = "allow_tf32"
        backends = [_backend(path) for path in _OLDER[operation]]
    before = [getattr(backend, name) for backend in backends]
    try:
        for backend in backends:
            setattr(backend, name, value)
        yield
    finally:
        for backend, was in zip(backends, before, strict=True):
            setattr(backend, name, was)


def _has_own_settings() -> bool:
    return hasattr(torch.backends, "fp32_precision")


def _backend(path: str) -> Any:
    found: Any = torch.backends
    for name in filter(None, path.split(".")):
        found = getattr(found, name)
    return found


_groups: ContextVar[int | None] = ContextVar("recording", default=None)


def is_recording() -> bool:
    """Return whether operations are being recorded."""
    return _groups.get() is not None


def most_groups() -> int:
    """Return the maximal number of groups of a recorded batch."""
    return _groups.get() or 0


@contextmanager
def recording(groups: int) -> Iterator[None]:
    """Use only operations that can be recorded, for batches of at most `groups` groups."""
    before = _groups.set(groups)
    try:
        yield
    finally:
        _groups.reset(before)
