"""Activations of named layers as rows: the perceptual similarity that the paper compares with."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, final

import torch
from torch import Tensor, nn

from likewise.data import Samples
from likewise.model import Network
from likewise.readouts import main_tensor


@final
class Activations:
    """√λ_l a_l(x) of named layers, concatenated, (n, 1, q): rows like the gradients of one output."""

    def __init__(self, net: Network, layers: Sequence[str], weights: Sequence[float]) -> None:
        names = [name for name, _ in net.model.named_modules() if name]
        for pattern in layers:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(f"No layer matches {pattern!r}. The model has: {', '.join(names)}.")
        if len(weights) != len(layers) or min(weights) < 0:
            raise ValueError(
                f"weights must be {len(layers)} numbers of at least 0, one for each of the layers, found "
                f"{list(weights)}."
            )
        self._net, self._patterns = net, tuple(layers)
        self._weight = {
            name: weight
            for pattern, weight in zip(layers, weights, strict=True)
            for name in names
            if fnmatchcase(name, pattern)
        }

    def __call__(self, samples: Samples) -> Tensor:
        """Return the activations; call it inside `net.evaluation_mode`."""
        seen: dict[str, list[Tensor]] = {name: [] for name in self._weight}
        with _record_activations(self._net.model, seen):
            self._net.function({}, samples.inputs, samples.labels, samples.ids)
        for pattern in self._patterns:  # a container may be silent, but not all that match
            if not any(seen[name] for name in seen if fnmatchcase(name, pattern)):
                raise ValueError(f"No layer that matches {pattern!r} was called in the forward pass.")
        return torch.cat(
            [
                output.reshape(len(samples), 1, -1) * self._weight[name] ** 0.5
                for name, outputs in seen.items()
                for output in outputs
            ],
            dim=2,
        )

    def shape(self, samples: Samples) -> tuple[int, int, int]:
        """Return d = 1, the number of activations and the bytes of a number."""
        rows = self(samples)
        return rows.shape[1], rows.shape[2], rows.element_size()


@contextmanager
def _record_activations(model: nn.Module, seen: dict[str, list[Tensor]]) -> Iterator[None]:
    def record(name: str, outputs: Any) -> None:
        seen[name].append(main_tensor(outputs).clone())  # the next layer may work in place

    modules = dict(model.named_modules())
    hooks = [
        modules[name].register_forward_hook(lambda _, __, outputs, name=name: record(name, outputs))
        for name in seen
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
