"""Which way to get at the gradients of this model: the fast one, if it is right.

Before the first number is returned, the operations' gradients of two samples are compared with plain
autograd, parameter by parameter; where they differ, or the model cannot be traced, the reference takes
over and a warning says why.
"""

import warnings
from typing import Literal

import torch
from torch import Tensor

from likewise.data import Samples
from likewise.gradients.autograd import Jacobians, jacobians_one_by_one
from likewise.gradients.base import Gradients, samples_at_once
from likewise.gradients.explicit import Explicit
from likewise.gradients.layers import Layers
from likewise.gradients.trace import Layout, Recorder, layouts
from likewise.network import Network

Engine = Literal["auto", "autograd", "layers"]


def chosen(net: Network, samples: Samples, engine: Engine, max_memory: int) -> Gradients:
    """Return the engine asked for; call it inside `net.evaluating`, with a few samples."""
    reference = Explicit(Jacobians(net), max_memory)
    if engine == "autograd":
        return reference
    try:
        layout = layouts(net, samples)
        layers = Layers(net, layout, size=2)
        wrong = disagreement(net, layers, samples[:2])
        if wrong is None:
            return Layers(net, layout, _size(net, layout, samples[:1], max_memory))
        reason = f"its gradient in {wrong} disagrees with autograd's"
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # the reference is for whatever cannot be traced
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    warnings.warn(
        f"{type(net.model).__name__} is differentiated by the slower reference engine ({reason}).",
        stacklevel=2,
    )
    return reference


def disagreement(net: Network, engine: Gradients, samples: Samples) -> str | None:
    """Return the name of the first parameter whose gradient differs from autograd's, if any."""
    with torch.enable_grad():
        expected = jacobians_one_by_one(net, samples)
    found = engine.rows(samples, 0).rows
    sizes = [value.numel() for value in net.parameters.values()]
    tolerance = torch.finfo(expected.dtype).eps ** 0.5
    largest = expected.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    parts = zip(net.names, found.split(sizes, 2), expected.split(sizes, 2), strict=True)
    for name, ours, theirs in parts:
        if theirs.numel() and _apart(ours, theirs) > tolerance * largest:
            return name
    return None


def _apart(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs().max().nan_to_num(nan=torch.inf)


def _size(net: Network, layout: dict[int, Layout], samples: Samples, max_memory: int) -> int:
    """Return how many samples fit: inputs, output gradients, and the largest gradient formed."""
    recorder = Recorder(layout)
    outputs = recorder.run(net, samples)
    d = outputs.shape[1]
    size = outputs.element_size()
    inputs = sum(step.leaves[i].numel() for step in recorder.steps for i in step.layout.batched)
    deltas = sum(shape.numel() for step in recorder.steps for shape in step.shapes)
    numels = [value.numel() for value in net.parameters.values()]
    needed = size * (3 * inputs + 2 * d * deltas + 3 * d * max(numels))
    return samples_at_once(needed, d, sum(numels), max_memory)
