"""A look at the model before its numbers are trusted.

A gradient may depend neither on chance nor on the other samples of its batch.
"""

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
    once, again = _outputs(net, samples), _outputs(net, samples)
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


def _outputs(net: Network, samples: Samples) -> Tensor:
    return net.function({}, samples.inputs, samples.labels, samples.ids)
