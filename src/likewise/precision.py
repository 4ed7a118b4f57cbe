"""Whether PyTorch may round the factors of float32 products to TF32 on a GPU: read, and set for a time.

PyTorch 2.9 has a setting for each kind of operation, and refuses to read the older common ones where these would be
ambiguous.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

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
