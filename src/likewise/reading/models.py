"""The model an import string names, with its weights."""

from collections.abc import Mapping

from torch import nn

from likewise.reading.imports import imported, made
from likewise.reading.weights import load_weights


def model(text: str, weights: str | None = None) -> nn.Module:
    """Return the module an import string names, or what a class or function gives without arguments.

    `weights`: a file with its state, .safetensors or written by torch; it must fit exactly.
    """
    found = imported(text)
    if not isinstance(found, nn.Module) and callable(found):
        found = made(found, text, "the model")
    if not isinstance(found, nn.Module):
        advice = " A state goes into weights=." if isinstance(found, Mapping) else ""
        raise TypeError(
            f"{text} gave {type(found).__name__}, expected a torch.nn.Module, or a class or function that "
            f"gives one.{advice}"
        )
    if weights is not None:
        load_weights(found, weights)
    return found
