"""A look at the model before its numbers are trusted.

A gradient may depend neither on chance nor on the other samples of its batch.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from likewise.data import Samples
from likewise.gradients.reference import full_float32
from likewise.network import Network


def refuse_dependent_samples(net: Network, samples: Samples) -> None:
    """Raise if outputs differ between two calls, or between a batch and its samples alone.

    Call it inside `net.evaluating`.
    """
    with full_float32():  # in TF32, right outputs differ by more than dependent ones may
        _refuse_dependent(net, samples)


def _refuse_dependent(net: Network, samples: Samples) -> None:
    try:
        once, again = (_outputs(net, samples) for _ in range(2))
    except Exception as error:
        error.add_note(_how_it_was_called(net, samples))
        raise
    try:
        alone = torch.cat([_outputs(net, x) for x in samples.split(1)])
    except Exception as error:
        raise ValueError(
            f"The model takes {len(samples)} samples together but not one alone ({error}): do a sample's "
            "outputs depend on the other samples of its batch? A gradient must be of one sample."
        ) from error
    tolerance = torch.finfo(once.dtype).eps ** 0.5 * once.abs().max()
    if (once - again).abs().max() > tolerance:
        raise ValueError(
            f"The model's outputs differ by {(once - again).abs().max():.2g} between two calls in "
            "evaluation mode: something in it is random, such as F.dropout without training=False."
        )
    if once.shape != alone.shape or (once - alone).abs().max() > tolerance:
        raise ValueError(
            "A sample's outputs depend on the other samples of its batch, also in evaluation mode "
            f"(by {(once - alone).abs().max():.2g}): batch statistics, such as a BatchNorm with "
            "track_running_stats=False, or a batch that is not the first dimension, such as an LSTM "
            "without batch_first? A gradient must be of one sample."
        )


def _how_it_was_called(net: Network, samples: Samples) -> str:
    """What to look at when the model, or the readout, fails on the first samples."""

    def shown(value: Any) -> str:
        return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)

    inputs = net.placed(samples.inputs)
    if isinstance(inputs, Mapping):
        called = ", ".join(f"{name}={shown(value)}" for name, value in inputs.items())
    else:
        called = ", ".join(map(shown, inputs if isinstance(inputs, tuple | list) else [inputs]))
    labels = "no labels" if samples.labels is None else f"labels {shown(samples.labels)}"
    return (
        f"This happened when the first {len(samples)} samples were tried, as {type(net.model).__name__}"
        f"({called}) with {labels}. Samples lie along the first dimension: one alone needs x[None]. Of a "
        "tuple or pair the last is the label unless labels=False; a dict becomes keyword arguments. "
        "Integers are passed as they are: images may need x.float() / 255."
    )


def _outputs(net: Network, samples: Samples) -> Tensor:
    return net.function({}, samples.inputs, samples.labels, samples.ids)
