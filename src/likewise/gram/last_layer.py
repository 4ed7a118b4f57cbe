"""What the last layer of a network sees: its inputs, read on the way of a forward pass.

A linear layer with inputs h and a bias has the gradient e ⊗ (h, 1) for each output e, so that the similarity by its
gradients is the cosine of two (h, 1), whatever the number of outputs. The inputs of the last layer are what is called
the features of a sample; (h, 1) costs a forward pass, and no gradient.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from likewise.data import Batches, Samples
from likewise.distributed import join_results
from likewise.gram.matrix import finite_outputs
from likewise.model import Network
from likewise.readouts import reads_text

MOST_FEATURES = 256  # numbers of a direction that are kept
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Features(NamedTuple):
    """(h, 1) of samples, as direction and length."""

    directions: Tensor  # (n, q) of unit length, float32
    lengths: Tensor  # (n,), float32

    @classmethod
    def compress(cls, vectors: Tensor) -> "Features":
        """Return them, on the CPU; directions of more than 256 numbers as random projections, the same ones always.

        A projected 1 − cosine errs by about 9 %, √(2/256), whatever its size.
        """
        vectors = vectors.float().cpu()
        directions = normalize(vectors, dim=1)
        if vectors.shape[1] > MOST_FEATURES:
            generator = torch.Generator().manual_seed(0)
            signs = torch.randint(0, 2, (vectors.shape[1], MOST_FEATURES), generator=generator) * 2.0 - 1
            directions = normalize(directions @ signs, dim=1)
        return cls(directions, vectors.norm(dim=1))


class LastLayer:
    """The linear or convolutional layer that a model calls last.

    Args:
        net: The network.
        layer: One of its modules.

    """

    def __init__(self, net: Network, layer: nn.Module) -> None:
        self._net, self._layer = net, layer

    @classmethod
    def find(cls, net: Network, samples: Samples) -> "LastLayer | None":
        """Return it, from a forward pass of a few samples; None where no such layer is called once for all of them.

        None, too, where the readout reads texts: what their last layer sees is a word, not a sample.

        """
        if reads_text(net.readout):
            return None
        layers = [module for module in net.model.modules() if isinstance(module, LAYERS)]
        with net.evaluation_mode(), _seen_by(layers) as calls:
            net.function({}, samples.inputs, samples.labels, samples.ids)
        if not calls:
            return None
        last, seen = calls[-1]
        alone = sum(module is last for module, _ in calls) == 1
        fits = isinstance(seen, Tensor) and seen.dim() >= 2 and len(seen) == len(samples)
        return cls(net, last) if alone and fits else None

    def read(self, samples: Samples, *, masked: bool = True) -> tuple[Tensor, Tensor]:
        """Return the network's outputs, (n, d), and (h, 1) of each sample, (n, q); call it while evaluating.

        Inputs are averaged over positions, and the 1 stands for the bias, where there is one.

        Args:
            samples: Of the data set.
            masked: Accept outputs of -infinity.

        """
        with _seen_by([self._layer]) as calls:
            outputs = finite_outputs(self._net, samples, masked=masked)
        if len(calls) != 1 or len(calls[0][1]) != len(samples):
            raise ValueError(
                f"The last layer was called {len(calls)} times for {len(samples)} samples, once for the first ones: "
                "its inputs are not those of samples. Use lw.novelty(gram, parameters=None)."
            )
        return outputs, self._vectors(calls[0][1])

    @contextmanager
    def watching(self) -> Iterator[Callable[[], Tensor | None]]:
        """Yield a function that returns (h, 1) of the samples of the model's last call, None if there was no such call.

        The layer may be called with samples once a call. What is read is copied, before forward can write to it.
        """
        calls: list[Tensor | None] = []

        def begin(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            calls.clear()

        def note(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            seen = arguments[0] if arguments and isinstance(arguments[0], Tensor) else None
            with torch._C.DisableTorchFunction(), torch.no_grad():  # no operation of the model's
                calls.append(None if seen is None else self._vectors(seen).clone())

        handles = [self._net.model.register_forward_pre_hook(begin)]
        handles.append(self._layer.register_forward_pre_hook(note))
        try:
            yield lambda: calls[0] if len(calls) == 1 else None
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def recording(self) -> Iterator[list[Features]]:
        """Yield a list that the features of every batch are added to, which the model is called with meanwhile."""
        found: list[Features] = []

        def note(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            found.append(Features.compress(self._vectors(arguments[0].detach())))

        handle = self._layer.register_forward_pre_hook(note)
        try:
            yield found
        finally:
            handle.remove()

    def _vectors(self, seen: Tensor) -> Tensor:
        """Return (h, 1) from what the layer was called with."""
        seen = seen.to(torch.promote_types(seen.dtype, torch.float32))
        if seen.dim() > 2:
            positions = (
                range(1, seen.dim() - 1) if isinstance(self._layer, nn.Linear) else range(2, seen.dim())
            )
            seen = seen.mean(tuple(positions))
        if self._layer.bias is not None:
            seen = torch.cat([seen, seen.new_ones(len(seen), 1)], 1)
        return seen


def last_layer_features(layer: LastLayer, net: Network, data: Batches) -> Features:
    """Return direction and length of (h, 1) of all samples, on the CPU: one forward pass."""

    def read(where: range) -> tuple[Tensor, ...]:
        return tuple(Features.compress(layer.read(data.samples(where))[1]))

    with net.evaluation_mode():
        return Features(*join_results(read, data.spans(), "features", net))


def last_layer_inputs(layer: LastLayer, net: Network, data: Batches, size: int | None = None) -> Tensor:
    """Return (h, 1) of all samples, (n, q): one forward pass, of at most `size` samples at a time."""

    def read(where: range) -> Tensor:
        parts = data.samples(where).split(size or len(where))
        return torch.cat([layer.read(part)[1] for part in parts])

    with net.evaluation_mode():
        return join_results(read, data.spans(), "features", net)


@contextmanager
def _seen_by(layers: Sequence[nn.Module]) -> Iterator[list[tuple[nn.Module, Any]]]:
    """Yield a list that calls of the layers are added to, each with its first argument; no hook is left behind."""
    calls: list[tuple[nn.Module, Any]] = []

    def note(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        calls.append(
            (module, arguments[0].detach() if arguments and isinstance(arguments[0], Tensor) else None)
        )

    handles = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
