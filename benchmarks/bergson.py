"""The recipe of bergson 2.5 in plain torch: B G Aᵀ of each layer's gradient G, with random signs in B and A.

Of matrices alone: it leaves out biases, normalization and, of language models, embeddings and the output layer. Its
wheel asks for bitsandbytes and torchaudio, so that benchmarks time the recipe rather than the package.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Maps = dict[str, tuple[Tensor, Tensor]]  # B and A of each layer, (side, outputs) and (side, inputs)


def draw_maps(shapes: Mapping[str, torch.Size], width: int, like: Tensor | None = None) -> Maps:
    """Return random signs of length 1/√side for each matrix, to about `width` numbers in all.

    Args:
        shapes: Of the gradients, (outputs, inputs, ...), by the name of the layer.
        width: How many numbers a sample.
        like: Whose device and dtype the maps have.

    """
    side = max(1, round((width / len(shapes)) ** 0.5))
    chance = torch.Generator().manual_seed(0)

    def signs(size: int) -> Tensor:
        drawn = (torch.randint(0, 2, (side, size), generator=chance) * 2.0 - 1) / side**0.5
        return drawn if like is None else drawn.to(like)

    return {name: (signs(shape[0]), signs(shape[1:].numel())) for name, shape in shapes.items()}


def project_gradients(gradients: Mapping[str, Tensor], maps: Maps) -> Tensor:
    """Return B G Aᵀ of gradients that were formed, (n, outputs, ...) each, side by side: (n, width)."""
    found = [b @ gradients[name].flatten(2) @ a.T for name, (b, a) in maps.items()]
    return torch.cat([part.flatten(1) for part in found], 1)


class TextProjector:
    """Projects the gradients of a language model's loss from inputs and output gradients of its linear layers.

    Inputs are projected in the forward pass and output gradients in the backward pass, by hooks, so that no gradient of
    a matrix is formed. Only the table of input embeddings requires grad, as in bergson: without it there would be
    nothing to go backward to.

    Args:
        model: Of transformers; its `requires_grad` flags are changed within `hooks`.
        width: About how many numbers a text.

    """

    def __init__(self, model: Any, width: int) -> None:
        self._model = model
        self._layers = {
            name: module
            for name, module in model.base_model.named_modules()
            if isinstance(module, nn.Linear) and module.weight.requires_grad  # of LoRA, the adapters
        }
        first = next(iter(self._layers.values())).weight
        self.maps = draw_maps({n: layer.weight.shape for n, layer in self._layers.items()}, width, first)
        self.width = sum(len(b) * len(a) for b, a in self.maps.values())
        self._inputs: dict[str, Tensor] = {}
        self._found: dict[str, Tensor] = {}

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Hook the layers and freeze the weights; both are undone at the end."""
        wanted = {p: p.requires_grad for p in self._model.parameters()}
        handles = []
        for name, layer in self._layers.items():
            handles.append(layer.register_forward_hook(self._keep_input(name)))
            handles.append(layer.register_full_backward_hook(self._project(name)))
        try:
            self._model.requires_grad_(False)
            self._model.get_input_embeddings().requires_grad_(True)
            yield
        finally:
            for handle in handles:
                handle.remove()
            for parameter, flag in wanted.items():
                parameter.requires_grad_(flag)

    def project(self, tokens: Tensor) -> Tensor:
        """Return (n, width) unit vectors of texts of one length, within `hooks`."""
        logits = self._model(tokens).logits[:, :-1]
        each = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")
        loss = each.view(len(tokens), -1).mean(1).sum()
        torch.autograd.grad(loss, self._model.get_input_embeddings().weight)
        found = torch.cat([self._found.pop(name).flatten(1) for name in self.maps], 1)
        return F.normalize(found.float() if found.dtype.itemsize < 4 else found, dim=1)

    def _keep_input(self, name: str) -> Any:
        a = self.maps[name][1]

        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            self._inputs[name] = inputs[0].detach() @ a.T

        return hook

    def _project(self, name: str) -> Any:
        b = self.maps[name][0]

        def hook(module: nn.Module, inputs: Any, outputs: tuple[Tensor, ...]) -> None:
            self._found[name] = (outputs[0] @ b.T).mT @ self._inputs.pop(name)

        return hook
