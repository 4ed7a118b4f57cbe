"""Compares gradients with those of plain autograd, parameter by parameter.

A gradient assigned to the wrong sample shows in Σₓ J(x)ᵀ w(x) with random weights w, which takes one backward pass for
any number of outputs. The reference is plain autograd, never on a batch of one sample: PyTorch's backward of
BatchNorm2d is wrong there (see docs/upstream.md). Where autograd and an engine disagree in the model's precision, both
are computed in float64, where rounding does not flip a ReLU. Where they still disagree, a finite difference decides.
"""

import warnings
from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from likewise.data import Samples
from likewise.engines.memory import is_out_of_memory
from likewise.engines.tracer import repeat_samples
from likewise.model import Network, Parameters
from likewise.torch_state import allows_tf32, full_float32

FLOAT64_TOLERANCE = 1e-5  # a part of the model may still work in float32
COMPARED = 2**18  # entries whose difference a CPU takes at once: it stays in its cache

Parts = list[Tensor]  # a vector (p,) as those of the parameters, in order: no copy of the whole
Compute = Callable[[Network], Parts]  # Σₓ J(x)ᵀ w(x), of a network that is the same up to precision


class PlainPass(NamedTuple):
    """A forward pass as the model does it, with its graph."""

    samples: Samples
    parameters: Parameters
    outputs: Tensor  # (n, d)

    def gradient(self, weights: Tensor) -> Parts:
        """Return Σₓ J(x)ᵀ w(x), by parameter, by one backward pass, for weights (n, d)."""
        with torch.enable_grad():
            total = (self.outputs * weights.to(self.outputs)).sum()
        return gradient_parts(total, self.parameters)

    def mix(self, mixing: Tensor) -> "PlainPass":
        """Return the same with combinations of the outputs, given their weights (d, c)."""
        with torch.enable_grad():
            return self._replace(outputs=self.outputs @ mixing.to(self.outputs))


def plain_pass(net: Network, samples: Samples) -> PlainPass:
    """Return a pass over a batch of at least two samples; call it inside `net.evaluation_mode`."""
    assert len(samples) > 1
    parameters = {name: value.requires_grad_() for name, value in net.parameters.items()}
    with torch.enable_grad():
        return PlainPass(samples, parameters, network_outputs(net, samples, parameters))


def weighted_gradient(net: Network, samples: Samples, weights: Tensor) -> Parts:
    """Return Σₓ J(x)ᵀ w(x), by parameter, by one backward over a batch of at least two samples.

    Args:
        net: The network; call it inside `net.evaluation_mode`.
        samples: The batch that the model is called on.
        weights: (n, d), of each sample and output.

    """
    return plain_pass(net, samples).gradient(weights)


def gradient_parts(output: Tensor, parameters: Parameters) -> Parts:
    """Return the gradient of a scalar, (numel,) of each parameter."""
    values = list(parameters.values())
    if not output.requires_grad:  # it depends on no selected parameter
        return [value.detach().new_zeros(value.numel()) for value in values]
    gradients = torch.autograd.grad(
        output, values, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return flatten_gradients(dict(zip(parameters, gradients, strict=True)), parameters)


def flatten_gradients(gradients: Parameters, parameters: Parameters) -> Parts:
    """Return gradients by name as vectors, in the order of the parameters."""
    device = next(iter(parameters.values())).device
    dense = [g.to_dense() if g.is_sparse else g for g in (gradients[name] for name in parameters)]
    return [gradient.reshape(-1).to(device) for gradient in dense]


def all_finite(parts: Parts) -> bool:
    """Whether no entry is NaN or infinite."""
    return all(bool(part.isfinite().all()) for part in parts)


def network_outputs(net: Network, samples: Samples, parameters: Parameters | None = None) -> Tensor:
    """Return f(x) of a batch, (n, d), with some parameters replaced if any are given."""
    return net.function(parameters or {}, samples.inputs, samples.labels, samples.ids)


def find_mismatch(
    net: Network, compute: Compute, samples: Samples, weights: Tensor, plain: PlainPass | None = None
) -> str | None:
    """Return the first parameter for which Σₓ J(x)ᵀ w(x) of an engine is wrong, None if it is correct.

    Args:
        net: The network; call it inside `net.evaluation_mode`.
        compute: The sum by the engine in question, of the network it is given.
        samples: At least two samples, as one batch.
        weights: (n, d), of each sample and output.
        plain: A pass of the network over these samples, if there was one before.

    """
    with full_float32():
        low = torch.finfo(net.dtype).eps > torch.finfo(torch.float32).eps
        double_net = in_float64(net, samples) if low else None
        if double_net is None:
            ours, theirs = compute(net), (plain or plain_pass(net, samples)).gradient(weights)
            name = _mismatch_by_rounding(net, samples, ours, theirs, rounding_tolerance(net))
            if name is None:
                return None
            double_net = in_float64(net, samples)
            if double_net is None:
                return name
        ours, theirs = compute(double_net), weighted_gradient(double_net, samples, weights)
        name = _mismatch_by_rounding(double_net, samples, ours, theirs, FLOAT64_TOLERANCE)
        if name is None or matches_finite_difference(double_net, samples, weights, name, ours, theirs):
            return None
        return name


def _mismatch_by_rounding(
    net: Network, samples: Samples, ours: Parts, theirs: Parts, tolerance: float
) -> str | None:
    """Return the first parameter for which two vectors differ by more than a tolerance, and than rounding inside."""
    name = first_mismatch(net, ours, theirs, tolerance)
    inner = 0.0 if name is None else inner_tolerance(net, samples)
    return name if inner <= tolerance else first_mismatch(net, ours, theirs, inner)


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


def first_mismatch(net: Network, ours: Parts, theirs: Parts, tolerance: float) -> str | None:
    """Return the name of the first parameter for which two vectors differ, if any."""
    if not theirs:
        return None
    within = are_within(ours, theirs, tolerance).tolist()  # one wait for the device
    return next((name for name, agrees in zip(net.names, within, strict=True) if not agrees), None)


def are_within(ours: Parts, theirs: Parts, tolerance: float) -> Tensor:
    """Return for each parameter whether two vectors agree, relative to the largest entry of all; NaN never does."""
    limit = tolerance * _stack([_largest(part) for part in theirs]).max().clamp(min=1e-37)
    return _stack([_largest_difference(a, b) for a, b in zip(ours, theirs, strict=True)]) <= limit


def _stack(values: Parts) -> Tensor:
    """Return scalars as a vector; those of a model's layers may be of several types."""
    dtype = reduce(torch.promote_types, (value.dtype for value in values))
    return torch.stack([value.to(dtype) for value in values])


def _largest_difference(a: Tensor, b: Tensor) -> Tensor:
    """Return the largest absolute difference, NaN if there is any; on a CPU of entries that stay in its cache."""
    if a.device.type != "cpu" or a.numel() <= COMPARED:
        return _largest(a - b)
    pairs = zip(a.split(COMPARED), b.split(COMPARED), strict=True)
    return torch.stack([_largest(part - other) for part, other in pairs]).max()


def _largest(values: Tensor) -> Tensor:
    """Return the largest absolute value, NaN if there is any, without a copy."""
    if not values.numel():
        return values.new_zeros(())
    return torch.stack(torch.aminmax(values)).abs().max()


def matches_finite_difference(
    net: Network, samples: Samples, weights: Tensor, name: str, ours: Parts, theirs: Parts
) -> bool:
    """Whether a finite difference agrees with `ours` rather than with autograd's gradient."""
    place = net.names.index(name)
    mine, expected = ours[place], theirs[place]
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
    if on_gpu and (allows_tf32("convolution") or allows_tf32("matmul")):
        epsilon = max(epsilon, 2**-11)  # TF32 has ten bits
    return max(float(epsilon**0.5), FLOAT64_TOLERANCE)


class _FloatingTypes(TorchFunctionMode):
    """Collects the types of differentiable values."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = set[torch.dtype]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.requires_grad:
            self.seen.add(result.dtype)
        return result


def inner_tolerance(net: Network, samples: Samples) -> float:
    """Return the tolerated difference of gradients where forward rounds to half precision by itself, else 0."""
    epsilon = inner_epsilon(net, repeat_samples(samples, max(2, len(samples))))
    return epsilon**0.5 if epsilon > torch.finfo(torch.float32).eps else 0.0


def inner_epsilon(net: Network, samples: Samples) -> float:
    """Return the rounding of the coarsest type inside the forward pass, such as of a cast or of autocast in it."""
    parameters = {name: value.requires_grad_() for name, value in net.parameters.items()}
    with torch.enable_grad(), _FloatingTypes() as types:
        net.function(parameters, samples.inputs, samples.labels, samples.ids)
    real = [seen for seen in types.seen if seen.is_floating_point]
    return max((float(torch.finfo(seen).eps) for seen in real), default=0.0)
