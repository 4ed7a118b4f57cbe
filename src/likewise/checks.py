"""Checks of arguments, made where a user enters: each names the argument, what was found and what to do.

Every function returns the value in the form that the rest of the package uses, or raises TypeError (a value
of the wrong kind) or ValueError (of the right kind, but out of range).
"""

import math
import numbers
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

SEEDS = 2**32  # torch, numpy and the products of seeds that are formed here all take less than this


def check_integer(
    name: str, value: Any, least: int | None = None, most: int | None = None, advice: str = ""
) -> int:
    """Return an integer, also one of numpy's or a tensor of a single integer."""
    if isinstance(value, Tensor) and value.dim() == 0 and _is_integral(value) and not value.is_meta:
        value = value.item()
    expected = "an integer" + _range(least, most)
    if not _is_a(numbers.Integral, value):
        raise TypeError(_message(name, expected, value, advice))
    if (least is not None and value < least) or (most is not None and value > most):
        raise ValueError(_message(name, expected, value, advice))
    return int(value)


def check_seed(name: str, value: Any) -> int:
    """Return a seed of a random generator."""
    return check_integer(name, value, 0, SEEDS - 1)


def check_number(
    name: str,
    value: Any,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    advice: str = "",
) -> float:
    """Return a finite real number; `least` and `most` may be reached, `above` and `below` may not."""
    if isinstance(value, Tensor) and value.dim() == 0 and not value.is_complex() and not value.is_meta:
        value = value.item()
    value = value.item() if isinstance(value, np.number) else value
    expected = "a finite number" + _range(least, most, above, below)
    if not _is_a(numbers.Real, value):
        raise TypeError(_message(name, expected, value, advice))
    outside = (
        (least is not None and value < least)
        or (most is not None and value > most)
        or (above is not None and value <= above)
        or (below is not None and value >= below)
    )
    if abs(value) > torch.finfo(torch.float64).max or math.isnan(value) or outside:
        raise ValueError(_message(name, expected, value, advice))
    return float(value)


def check_flag(name: str, value: Any) -> bool:
    """Return True or False; nothing else is read as one of them."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(_message(name, "True or False", value))
    return bool(value)


def check_choice(name: str, value: Any, choices: Collection[str], advice: str = "") -> str:
    """Return one of a few words."""
    expected = " or ".join(repr(choice) for choice in choices)
    if not isinstance(value, str):
        raise TypeError(_message(name, expected, value, advice))
    if value not in choices:
        raise ValueError(_message(name, expected, value, advice))
    return value


def check_type(name: str, value: Any, kinds: type | tuple[type, ...], expected: str, advice: str = "") -> Any:
    """Return a value of one of these types; `expected` says in words what is needed."""
    if not isinstance(value, kinds):
        raise TypeError(_message(name, expected, value, advice))
    return value


def check_function(name: str, value: Any, signature: str, advice: str = "") -> Callable[..., Any]:
    """Return something that can be called; a class cannot stand for one of its instances."""
    if not callable(value) or isinstance(value, type):
        raise TypeError(_message(name, f"a function {signature}", value, advice))
    return value


def check_names(name: str, value: Any, advice: str = "") -> list[str]:
    """Return names or patterns as a list; a single one stands for itself."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names or not all(isinstance(n, str) for n in names):
        raise TypeError(_message(name, "one name, or a list of names", value, advice))
    return list(names)


def check_tensor(name: str, value: Any, finite: bool = True, advice: str = "") -> Tensor:
    """Return real numbers as a dense tensor; arrays and lists of numbers become one."""
    tensor = to_tensor(name, value, advice)
    if tensor.is_complex():
        raise TypeError(_message(name, "real numbers", tensor, advice or "take tensor.real or tensor.abs()"))
    if finite and not tensor.isfinite().all():
        wrong = (~tensor.isfinite()).flatten().nonzero()[:, 0]
        raise ValueError(
            f"{name} must be finite: {len(wrong)} of {tensor.numel()} numbers are NaN or infinite, the first "
            f"at place {int(wrong[0])}. Leave them out or replace them."
        )
    return tensor


def to_tensor(name: str, value: Any, advice: str = "") -> Tensor:
    """Return numbers in any container as a dense tensor that has values."""
    tensor = value if isinstance(value, Tensor) else _converted(name, value, advice)
    refuse_unreadable(name, tensor)
    return tensor


def refuse_unreadable(name: str, tensor: Tensor) -> None:
    """Raise if a tensor has no values, or none that can be read sample by sample."""
    if tensor.is_meta:
        raise ValueError(
            f"{name} must have values, found {describe(tensor)} on the meta device, which holds shapes only: "
            "load or create it on a real device."
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else "sparse"
        advice = "pad it with torch.nested.to_padded_tensor" if tensor.is_nested else "call .to_dense()"
        raise TypeError(
            f"{name} must be a dense tensor, found a {kind} one of {tensor.dtype}: {advice} first."
        )
    if tensor.is_quantized:
        raise TypeError(f"{name} must be a plain tensor, found a quantized one: call .dequantize() first.")


def describe(value: Any) -> str:
    """Return what a value is, in a few words."""
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} {tuple(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} {value.shape}"
    if value is None or isinstance(value, str | bytes | bool | numbers.Number):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    if isinstance(value, list | tuple | dict | set):
        return f"a {type(value).__name__} of {len(value)} items"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"a {type(value).__name__}"


def _converted(name: str, value: Any, advice: str) -> Tensor:
    expected = "a tensor of numbers"
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(_message(name, "an array without a mask", value, "fill or drop what is masked"))
    if isinstance(value, str | bytes) or not (isinstance(value, Sequence) or hasattr(value, "__array__")):
        raise TypeError(_message(name, expected, value, advice))
    try:
        if not isinstance(value, np.ndarray) and len(value) and all(isinstance(v, Tensor) for v in value):
            return torch.stack(list(value))
        array = np.asarray(value)
        if _holds_text(array):
            raise TypeError("it holds text")
        return torch.as_tensor(_readable(array))
    except (TypeError, ValueError, RuntimeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
        raise TypeError(_message(name, f"{expected} of one shape", value, f"{reason}; {advice}")) from error


def _holds_text(array: np.ndarray) -> bool:
    return array.dtype.kind in "SU" or (
        array.dtype.kind == "O" and any(isinstance(v, str) for v in array.flat)
    )


def _readable(array: np.ndarray) -> np.ndarray:
    """Return an array that torch can share: no negative strides, bytes in the order of this machine."""
    native = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    return native.copy() if any(stride < 0 for stride in native.strides) else native


def _message(name: str, expected: str, found: Any, advice: str = "") -> str:
    return f"{name} must be {expected}, found {describe(found)}{': ' + advice if advice else ''}."


def _range(
    least: float | None, most: float | None, above: float | None = None, below: float | None = None
) -> str:
    words = []
    if least is not None and most is not None:
        return f" from {least:,} to {most:,}"
    words += [f"at least {least:,}"] if least is not None else []
    words += [f"at most {most:,}"] if most is not None else []
    words += [f"above {above:,}"] if above is not None else []
    words += [f"below {below:,}"] if below is not None else []
    return " " + " and ".join(words) if words else ""


def _is_integral(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _is_a(kind: type, value: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
