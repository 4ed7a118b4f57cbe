"""Jacobians of any model by torch.func; where vmap fails, one sample at a time, as a batch of two copies.

vmap is validated first: its Jacobian of the first sample must agree with plain autograd.
"""

import warnings
from typing import Any, final

import torch
from torch import Tensor
from torch.func import vjp, vmap
from torch.utils._pytree import tree_map

from likewise.data import Samples
from likewise.engines.base import is_out_of_memory
from likewise.engines.reference import find_mismatch, flat_gradient, flatten_gradients, network_outputs
from likewise.engines.tracer import repeat_samples
from likewise.model import Network, Parameters, annotate_errors


@final
class Jacobians:
    """J(x), (n, d, p), of samples; parameters are concatenated in the order of `net.names`."""

    def __init__(self, net: Network) -> None:
        self._net = net
        self._vmap: bool | None = None  # whether vmap is correct for this model; tested on first use

    def __call__(self, samples: Samples) -> Tensor:
        """Return J(x); call it inside `net.evaluation_mode`."""
        with torch.enable_grad():
            if self._vmap is None:
                self._vmap = _vmap_is_correct(self._net, samples[:1])
            return (jacobians_by_vmap if self._vmap else jacobians_one_by_one)(self._net, samples)

    def shape(self, samples: Samples) -> tuple[int, int, int]:
        """Return d, p and the bytes of a number."""
        outputs = self._net.function({}, samples.inputs, samples.labels, samples.ids)
        return outputs.shape[1], sum(self._net.numels.values()), self._net.dtype.itemsize


def jacobians_by_vmap(net: Network, samples: Samples) -> Tensor:
    """Return J(x) of all samples by vmap: one forward, and a backward for each output."""
    parameters = net.parameters

    def outputs(theta: Parameters, inputs: Any, labels: Tensor | None, ids: Tensor) -> Tensor:
        return net.select_outputs(net.call_model(theta, inputs), inputs, labels, ids)

    def one(inputs: Any, labels: Tensor | None, number: Tensor) -> Tensor:
        inputs, number = tree_map(lambda t: t.unsqueeze(0), (inputs, number))
        label = None if labels is None else labels.unsqueeze(0)
        y, pullback, *_ = vjp(lambda theta: outputs(theta, inputs, label, number)[0], parameters)
        # One vjp per output rather than a nested vmap, which breaks on PReLU.
        return torch.stack([flatten_gradients(pullback(e)[0], parameters) for e in torch.eye(len(y)).to(y)])

    dims = (0, None if samples.labels is None else 0, 0)
    with annotate_errors(net, samples.inputs, samples.labels, samples.ids):  # inside, ids have no values
        return vmap(one, in_dims=dims)(samples.inputs, samples.labels, samples.ids)


def jacobians_one_by_one(net: Network, samples: Samples) -> Tensor:
    """Return J(x) by one backward for each sample and output, of a batch that is the sample twice.

    Twice, since PyTorch differentiates some operations wrongly in a batch of one.
    """
    parameters = {name: value.requires_grad_() for name, value in net.parameters.items()}
    jacobians = []
    for x in samples.split(1):
        y = network_outputs(net, repeat_samples(x, 2), parameters)[0]
        jacobians.append(torch.stack([flat_gradient(output, parameters) for output in y]))
    return torch.stack(jacobians)


def _vmap_is_correct(net: Network, samples: Samples) -> bool:
    try:
        wrong = _find_vmap_mismatch(net, samples)
        if wrong is None:
            return True
        reason = f"the gradient in {wrong} comes out wrong"
    except Exception as error:  # whatever vmap cannot do, plain autograd just did
        if is_out_of_memory(error):
            raise
        reason = str(error).strip().splitlines()[0][:80]
    warnings.warn(
        f"torch.func.vmap cannot differentiate {type(net.model).__name__} ({reason}): gradients "
        "are taken one sample at a time, which is exact but slow.",
        stacklevel=2,
    )
    return False


def _find_vmap_mismatch(net: Network, samples: Samples) -> str | None:
    """Return the first parameter for which vmap's Jacobian of a sample is wrong, if any."""
    d = network_outputs(net, samples).shape[1]
    u = torch.randn(d, generator=torch.Generator().manual_seed(0))

    def compute(other: Network) -> Tensor:
        rows = jacobians_by_vmap(other, samples)[0]
        return u.to(rows) @ rows

    return find_mismatch(net, compute, repeat_samples(samples, 2), torch.stack([u, torch.zeros_like(u)]))
