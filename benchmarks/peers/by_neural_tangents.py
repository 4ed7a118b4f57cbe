"""neural-tangents: its empirical kernel of the net written in jax, from the layers of the PyTorch one."""

import os

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

from collections.abc import Callable

import jax
import neural_tangents
import numpy as np
import torch
from jax import Array, lax
from jax import numpy as jnp
from torch import Tensor, nn

from peers.work import Work, losses

Parameters = list[tuple[Array, Array]]  # weight and bias of each layer that has them


def ready(work: Work) -> Callable[[], Tensor]:
    """The first call compiles. The default implementation was also the quickest of the three."""
    layers = list(work.model)
    theta = [_arrays(*layer.parameters()) for layer in layers if list(layer.parameters())]
    left, right = (_arrays(data.x, nn.functional.one_hot(data.y, 10)) for data in (work.left, work.right))

    def readout(theta: Parameters, samples: tuple[Array, Array]) -> Array:
        outputs = _outputs(layers, theta, samples[0])
        if work.readout is not losses:
            return outputs
        return -(jax.nn.log_softmax(outputs) * samples[1]).sum(1, keepdims=True)

    kernel = jax.jit(neural_tangents.empirical_ntk_fn(readout, trace_axes=(), vmap_axes=0))
    own = jax.jit(neural_tangents.empirical_ntk_fn(readout, trace_axes=(), vmap_axes=0, diagonal_axes=(0,)))

    def matrix() -> Tensor:
        found = kernel(left, None if work.square else right, theta)
        if work.normalized:
            found = found * own(left, None, theta)[:, None] ** -0.5 * own(right, None, theta) ** -0.5
        found = torch.from_numpy(np.array(found))
        return found[..., 0, 0] if work.d == 1 else found

    return matrix


def _arrays(*tensors: Tensor) -> tuple[Array, ...]:
    return tuple(jnp.asarray(tensor.detach().numpy()) for tensor in tensors)


def _outputs(layers: list[nn.Module], theta: Parameters, x: Array) -> Array:
    left = iter(theta)
    for layer in layers:
        x = _layer(layer, x, *(next(left) if list(layer.parameters()) else ()))
    return x


def _layer(layer: nn.Module, x: Array, weight: Array | None = None, bias: Array | None = None) -> Array:
    match layer:
        case nn.Conv2d():
            padding = [(size, size) for size in layer.padding]
            names = ("NCHW", "OIHW", "NCHW")
            found = lax.conv_general_dilated(x, weight, (1, 1), padding, dimension_numbers=names)
            return found + bias[:, None, None]
        case nn.Linear():
            return x @ weight.T + bias
        case nn.ReLU():
            return jax.nn.relu(x)
        case nn.MaxPool2d():
            return lax.reduce_window(x, -np.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
        case nn.AdaptiveAvgPool2d():
            return x.mean((2, 3), keepdims=True)
        case nn.Flatten():
            return x.reshape(len(x), -1)
    raise TypeError(f"no translation of {layer}")
