"""Jacobians by torch.func, of any model; where vmap cannot go, one sample at a time.

vmap is not trusted unseen: its Jacobian of the first sample must be that of plain autograd.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.func import vjp, vmap
from torch.utils._pytree import tree_map

from likewise.data import Samples
from likewise.gradients.base import is_out_of_memory
from likewise.network import Network, Parameters


@final
class Jacobians:
    """J(x), (n, d, p), of samples; parameters joined in the order of `net.names`."""

    def __init__(self, net: Network) -> None:
        self._net = net
        self._vmap: bool | None = None  # whether vmap is right for this model; found on first use

    def __call__(self, samples: Samples) -> Tensor:
        """Return J(x); call it inside `net.evaluating`."""
        with torch.enable_grad():
            if self._vmap is None:
                self._vmap = _vmap_is_right(self._net, samples[:1])
            return (jacobians_by_vmap if self._vmap else jacobians_one_by_one)(self._net, samples)

    def shape(self, samples: Samples) -> tuple[int, int, int]:
        """Return d, p and the bytes of a number."""
        outputs = self._net.function({}, samples.inputs, samples.labels, samples.ids)
        return outputs.shape[1], sum(self._net.numels.values()), self._net.dtype.itemsize


def jacobians_by_vmap(net: Network, samples: Samples) -> Tensor:
    """Return J(x) of all samples at once: one forward, and a backward for each output."""
    parameters = net.parameters

    def one(inputs: Any, labels: Tensor | None, number: Tensor) -> Tensor:
        inputs, number = tree_map(lambda t: t.unsqueeze(0), (inputs, number))
        label = None if labels is None else labels.unsqueeze(0)
        y, pullback, *_ = vjp(lambda theta: net.function(theta, inputs, label, number)[0], parameters)
        # One vjp per output rather than a nested vmap, which breaks on PReLU.
        return torch.stack([_joined(pullback(e)[0], parameters) for e in torch.eye(len(y)).to(y)])

    dims = (0, None if samples.labels is None else 0, 0)
    return vmap(one, in_dims=dims)(samples.inputs, samples.labels, samples.ids)


def jacobians_one_by_one(net: Network, samples: Samples) -> Tensor:
    """Return J(x) by one backward for each sample and output, with no batching of any kind."""
    parameters = {name: value.requires_grad_() for name, value in net.parameters.items()}
    jacobians = []
    for x in samples.split(1):
        y = net.function(parameters, x.inputs, x.labels, x.ids)[0]
        jacobians.append(torch.stack([_gradient(output, parameters) for output in y]))
    return torch.stack(jacobians)


@contextmanager
def full_float32() -> Iterator[None]:
    """No TF32 on a GPU: two right gradients in TF32 differ by more than a wrong one may."""
    backends: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn]
    before = [backend.allow_tf32 for backend in backends]
    try:
        for backend in backends:
            backend.allow_tf32 = False
        yield
    finally:
        for backend, allowed in zip(backends, before, strict=True):
            backend.allow_tf32 = allowed


def disagreement(net: Network, rows: Tensor, samples: Samples) -> str | None:
    """Return the name of the first parameter in which rows, (n, d, p), are not autograd's, if any."""
    with torch.enable_grad():
        expected = jacobians_one_by_one(net, samples)
    sizes = list(net.numels.values())
    limit = torch.finfo(expected.dtype).eps ** 0.5 * expected.abs().max().clamp(min=1e-37)
    for name, ours, theirs in zip(net.names, rows.split(sizes, 2), expected.split(sizes, 2), strict=True):
        if theirs.numel() and not (ours - theirs).abs().max() <= limit:  # NaN is no agreement
            return name
    return None


def _vmap_is_right(net: Network, samples: Samples) -> bool:
    try:
        wrong = disagreement(net, jacobians_by_vmap(net, samples), samples)
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


def _gradient(output: Tensor, parameters: Parameters) -> Tensor:
    values = list(parameters.values())
    if not output.requires_grad:  # no chosen parameter reaches it
        return torch.cat([value.detach().new_zeros(value.numel()) for value in values])
    found = torch.autograd.grad(output, values, retain_graph=True, allow_unused=True, materialize_grads=True)
    return _joined(dict(zip(parameters, found, strict=True)), parameters)


def _joined(gradients: Parameters, parameters: Parameters) -> Tensor:
    device = next(iter(parameters.values())).device
    return torch.cat([_dense(gradients[name]).reshape(-1).to(device) for name in parameters])


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient
