"""The last linear layer of a network, if its outputs are that layer's or an activation of them.

There, f(x) = h(W a(x) + b), and the paper's bound of the outputs by their gradients applies (appendix):
the gradient in W and b holds the activities a(x), so gradients that agree make outputs that agree.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from likewise.data import Samples
from likewise.gradients.autograd import jacobians_one_by_one
from likewise.network import Network

# Activations and a bound of their derivative.
ACTIVATIONS: tuple[tuple[Callable[[Tensor], Tensor], float], ...] = (
    (lambda c: c, 1.0),
    (torch.relu, 1.0),
    (torch.tanh, 1.0),
    (torch.sigmoid, 0.25),
    (nn.functional.softplus, 1.0),
    (nn.functional.leaky_relu, 1.0),
    (nn.functional.elu, 1.0),
    (nn.functional.logsigmoid, 1.0),
    (nn.functional.softsign, 1.0),
    (nn.functional.hardtanh, 1.0),
    (nn.functional.silu, 1.1),
    (nn.functional.gelu, 1.13),
)


class Head(NamedTuple):
    """‖f(x) − f(x')‖ ≤ slope · ‖a(x) − a(x')‖, a being the inputs of this layer."""

    weight: str  # the name of W
    bias: str
    slope: float


class _Call(NamedTuple):
    name: str
    module: nn.Linear
    inputs: Tensor
    outputs: Tensor

    @property
    def parameters(self) -> tuple[str, str]:
        """The names of its weight and bias."""
        prefix = f"{self.name}." if self.name else ""
        return f"{prefix}weight", f"{prefix}bias"


def last_linear(net: Network, samples: Samples) -> Head | None:
    """Return the layer, or None if there is none, it has no bias, or its parameters are shared.

    Call it inside `net.evaluating`.
    """
    with _recorded(net.model) as calls:
        outputs = net.function({}, samples.inputs, samples.labels, samples.ids)
    if not calls or calls[-1].outputs.dim() != 2:
        return None
    last = calls[-1]
    weight, bias = last.parameters
    slope = _slope(last, outputs)
    if slope is None or not {weight, bias} <= set(net.names) or not _alone(net, last, samples):
        return None
    return Head(weight, bias, slope)


def _slope(call: _Call, outputs: Tensor) -> float | None:
    """Return a Lipschitz constant from the layer's inputs to the network's outputs."""
    weight = call.module.weight.detach()
    for activation, steepest in ACTIVATIONS:
        active = activation(call.outputs)
        if active.shape == outputs.shape and torch.allclose(active, outputs):
            return steepest * float(torch.linalg.matrix_norm(weight.double(), 2))
        for i in range(active.shape[1] if outputs.shape[1] == 1 else 0):
            if torch.allclose(active[:, i], outputs[:, 0]):
                return steepest * float(weight[i].double().norm())
    log_softmax = call.outputs.log_softmax(1)
    if log_softmax.shape == outputs.shape and torch.allclose(log_softmax, outputs):
        # The derivative Id − 1 pᵀ is longest where p is certain: √classes.
        return outputs.shape[1] ** 0.5 * float(torch.linalg.matrix_norm(weight.double(), 2))
    return None


def _alone(net: Network, call: _Call, samples: Samples) -> bool:
    """Whether ∂f/∂W = ∂f/∂b ⊗ a: W and b have no other use."""
    weight, bias = call.parameters
    layer = net.with_parameters([weight, bias])
    with torch.enable_grad():
        jacobian = jacobians_one_by_one(layer, samples)
    sizes = [layer.parameters[name].numel() for name in layer.names]
    parts = dict(zip(layer.names, jacobian.split(sizes, dim=2), strict=True))
    expected = torch.einsum("ndo,ni->ndoi", parts[bias], call.inputs)
    return torch.allclose(parts[weight], expected.flatten(2), rtol=1e-3, atol=1e-6)


@contextmanager
def _recorded(model: nn.Module) -> Iterator[list[_Call]]:
    calls: list[_Call] = []

    def record(name: str, module: nn.Linear, inputs: tuple[Tensor, ...], outputs: Tensor) -> None:
        calls.append(_Call(name, module, inputs[0].clone(), outputs.clone()))

    hooks = [
        module.register_forward_hook(
            lambda module, inputs, outputs, name=name: record(name, module, inputs, outputs)
        )
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.bias is not None
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
