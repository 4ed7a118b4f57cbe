"""Plain autograd as the reference for gradients, with float64 and finite differences to settle disagreements.

It is never used on a batch of one sample: PyTorch's backward of BatchNorm2d is wrong there (see docs/upstream.md).
Where autograd and an engine disagree in the model's precision, both are computed in float64, where rounding does not
flip a ReLU. Where they still disagree, a finite difference decides.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from likewise.data import Samples
from likewise.engines.base import is_out_of_memory
from likewise.model import Network, Parameters

FLOAT64_TOLERANCE = 1e-5  # a part of the model may still work in float32

Compute = Callable[[Network], Tensor]  # Σₓ J(x)ᵀ w(x), (p,), of a network that is the same up to precision


def weighted_gradient(net: Network, samples: Samples, weights: Tensor) -> Tensor:
    """Return Σₓ J(x)ᵀ w(x), (p,), by one backward over a batch of at least two samples.

    Args:
        net: The network; call it inside `net.evaluation_mode`.
        samples: The batch that the model is called on.
        weights: (n, d), of each sample and output.

    """
    assert len(samples) > 1
    parameters = {name: value.requires_grad_() for name, value in net.parameters.items()}
    with torch.enable_grad():
        outputs = network_outputs(net, samples, parameters)
        return flat_gradient((outputs * weights.to(outputs)).sum(), parameters)


def flat_gradient(output: Tensor, parameters: Parameters) -> Tensor:
    """Return the gradient of a scalar with respect to all parameters, concatenated, (p,)."""
    values = list(parameters.values())
    if not output.requires_grad:  # it depends on no selected parameter
        return torch.cat([value.detach().new_zeros(value.numel()) for value in values])
    gradients = torch.autograd.grad(
        output, values, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return flatten_gradients(dict(zip(parameters, gradients, strict=True)), parameters)


def flatten_gradients(gradients: Parameters, parameters: Parameters) -> Tensor:
    """Return gradients by name as one vector, in the order of the parameters."""
    device = next(iter(parameters.values())).device
    dense = [g.to_dense() if g.is_sparse else g for g in (gradients[name] for name in parameters)]
    return torch.cat([gradient.reshape(-1).to(device) for gradient in dense])


def network_outputs(net: Network, samples: Samples, parameters: Parameters | None = None) -> Tensor:
    """Return f(x) of a batch, (n, d), with some parameters replaced if any are given."""
    return net.function(parameters or {}, samples.inputs, samples.labels, samples.ids)


def find_mismatch(net: Network, compute: Compute, samples: Samples, weights: Tensor) -> str | None:
    """Return the first parameter for which Σₓ J(x)ᵀ w(x) of an engine is wrong, None if it is correct.

    Args:
        net: The network; call it inside `net.evaluation_mode`.
        compute: The sum by the engine in question, of the network it is given.
        samples: At least two samples, as one batch.
        weights: (n, d), of each sample and output.

    """
    with full_float32():
        low = torch.finfo(net.dtype).eps > torch.finfo(torch.float32).eps
        double_net = in_float64(net, samples) if low else None
        if double_net is None:
            name = first_mismatch(
                net, compute(net), weighted_gradient(net, samples, weights), rounding_tolerance(net)
            )
            if name is None:
                return None
            double_net = in_float64(net, samples)
            if double_net is None:
                return name
        ours, theirs = compute(double_net), weighted_gradient(double_net, samples, weights)
        name = first_mismatch(double_net, ours, theirs, FLOAT64_TOLERANCE)
        if name is None or matches_finite_difference(double_net, samples, weights, name, ours, theirs):
            return None
        return name


def in_float64(net: Network, samples: Samples) -> Network | None:
    """Return the network in float64, None if the device or the model does not support it."""
    if net.dtype == torch.float64:
        return net.exact()
    if next(net.model.parameters()).device.type == "mps":
        return None
    double_net = net.in_float64()
    try:
        outputs = double_net.function({}, samples.inputs, samples.labels, samples.ids)
    except Exception as error:  # a model may fix its types in any way, and fail in any way
        if is_out_of_memory(error):
            raise
        return None
    return double_net if outputs.dtype == torch.float64 else None


@contextmanager
def full_float32() -> Iterator[None]:
    """Disable TF32: two correct gradients in TF32 may differ by more than a wrong one."""
    backends: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn]
    before = [backend.allow_tf32 for backend in backends]
    try:
        for backend in backends:
            backend.allow_tf32 = False
        yield
    finally:
        for backend, allowed in zip(backends, before, strict=True):
            backend.allow_tf32 = allowed


def first_mismatch(net: Network, ours: Tensor, theirs: Tensor, tolerance: float) -> str | None:
    """Return the name of the first parameter for which two vectors (p,) differ, if any."""
    limit = tolerance * theirs.abs().max().clamp(min=1e-37)
    sizes = list(net.numels.values())
    for name, mine, expected in zip(net.names, ours.split(sizes), theirs.split(sizes), strict=True):
        if expected.numel() and not (mine - expected).abs().max() <= limit:  # NaN is no agreement
            return name
    return None


def matches_finite_difference(
    net: Network, samples: Samples, weights: Tensor, name: str, ours: Tensor, theirs: Tensor
) -> bool:
    """Whether a finite difference agrees with `ours` rather than with autograd's gradient."""
    place, sizes = net.names.index(name), list(net.numels.values())
    mine, expected = ours.split(sizes)[place], theirs.split(sizes)[place]
    gap, value = mine - expected, net.parameters[name]
    if not gap.isfinite().all():
        return False
    step = 1e-6 * value.abs().max().clamp(min=1e-3) / gap.abs().max()

    def shifted(sign: int) -> Tensor:
        moved = {name: value + sign * step * gap.view_as(value)}
        return (network_outputs(net, samples, moved) * weights.to(value)).sum()

    slope = (shifted(1) - shifted(-1)) / (2 * step)
    threshold = 0.1 * gap.square().sum()
    right = bool((slope - mine @ gap).abs() < threshold < (slope - expected @ gap).abs())
    if right:
        warnings.warn(
            f"PyTorch's own gradient of {type(net.model).__name__} in {name} is wrong for some samples: a "
            "finite difference in float64 says so, and agrees with the gradients used here.",
            stacklevel=2,
        )
    return right


def rounding_tolerance(net: Network) -> float:
    """Return the tolerated difference of two correct gradients, relative to the largest entry."""
    every = dict(net.model.named_parameters())
    epsilon = max(torch.finfo(every[name].dtype).eps for name in net.names)
    if net.autocast is not None:
        epsilon = max(epsilon, torch.finfo(net.autocast).eps)
    on_gpu = next(net.model.parameters()).device.type == "cuda"
    if on_gpu and (torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32):
        epsilon = max(epsilon, 2**-11)  # TF32 has ten bits
    return max(float(epsilon**0.5), FLOAT64_TOLERANCE)
