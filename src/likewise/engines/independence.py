"""Checks that outputs are those of a sample alone: not random, not of its batch, not of an earlier call."""

import torch
from torch import Tensor

from likewise.data import Samples
from likewise.engines.comparison import FLOAT64_TOLERANCE, inner_epsilon, network_outputs
from likewise.model import Network
from likewise.torch_state import full_float32

ROUNDINGS_INSIDE = 4  # by how many roundings of half precision inside forward outputs may differ


def check_independent_samples(
    net: Network, samples: Samples, once: Tensor | None = None, alone: dict[int, Tensor] | None = None
) -> None:
    """Raise if outputs differ between two calls, or between a batch and its samples alone, or come from an old one.

    Call it inside `net.evaluation_mode`.

    Args:
        net: The network.
        samples: A few samples.
        once: Their outputs as one batch in full float32, if they were computed before.
        alone: The outputs of single samples by their place, as far as they were computed before.

    """
    _refuse_old_graphs(net, samples)
    with full_float32():  # in TF32, right outputs differ by more than dependent ones may
        _refuse_dependent(net, samples, network_outputs(net, samples) if once is None else once, alone or {})


def _refuse_old_graphs(net: Network, samples: Samples) -> None:
    """Raise if forward reads a tensor that an earlier call computed from parameters: their gradients would miss it."""
    held = {
        f"{name}.{attribute}" if name else attribute: value
        for name, module in net.model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf
    }
    if not held:
        return
    parameters = {name: value.requires_grad_() for name, value in net.parameters.items()}
    with torch.enable_grad():
        total = network_outputs(net, samples, parameters).sum()
    if not total.requires_grad:
        return
    reached = torch.autograd.grad(total, list(held.values()), retain_graph=True, allow_unused=True)
    for name, gradient in zip(held, reached, strict=True):
        if gradient is not None:
            raise ValueError(
                f"{type(net.model).__name__} keeps {name}, which an earlier call computed from parameters, and forward "
                f"uses it again: the gradients of these parameters would miss it. Clear it first (model.{name} = None, "
                "or what the model has for that)."
            )


def _refuse_dependent(net: Network, samples: Samples, once: Tensor, known: dict[int, Tensor]) -> None:
    try:
        each = enumerate(samples.split(1))
        alone = torch.cat([known[i] if i in known else network_outputs(net, x) for i, x in each])
    except Exception as error:
        raise ValueError(
            f"The model takes {len(samples)} samples together but not one alone ({error}): do a sample's "
            "outputs depend on the other samples of its batch? A gradient must be of one sample."
        ) from error
    scale = once.abs().max()
    tolerance = torch.finfo(once.dtype).eps ** 0.5 * scale
    if once.shape == alone.shape and (once - alone).abs().max() <= tolerance:
        return
    if known:  # as a tracer calls the model, perhaps
        return _refuse_dependent(net, samples, once, {})
    again = network_outputs(net, samples)
    apart = max((once - other).abs().max() for other in (again, alone) if other.shape == once.shape)
    inner = inner_epsilon(net, samples) if tolerance < apart else 0.0
    if (
        inner > torch.finfo(once.dtype).eps
        and apart <= max(FLOAT64_TOLERANCE, ROUNDINGS_INSIDE * inner) * scale
    ):
        return
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
