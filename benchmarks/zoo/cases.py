"""What a case of the benchmark is: a small model with random weights, and inputs for it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from likewise.readouts import main_tensor

SAMPLES = 4


class Problem(NamedTuple):
    """A model and what it is called with, samples along dimension 0."""

    model: nn.Module
    inputs: Any  # a tensor, or a dict of tensors


@dataclass(frozen=True)
class Case:
    """One model of one family."""

    library: str
    family: str
    name: str
    build: Callable[[], Problem]

    @property
    def key(self) -> str:
        """The name it is recorded under."""
        return f"{self.library}/{self.family}/{self.name}"


def build_case(case: Case) -> Problem:
    """Return the model, in evaluation mode and with weights that leave no gradient zero by initialization."""
    torch.manual_seed(0)
    problem = case.build()
    randomize(problem.model)
    return Problem(problem.model.eval(), problem.inputs)


def randomize(model: nn.Module, seed: int = 0) -> None:
    """Disturb what initialization makes constant: norms, biases, zero layers, running statistics.

    A layer that starts at zero hides the gradients of those before it, and a scale of one hides a mistake
    in how scales are treated.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(value: Tensor) -> Tensor:
        return torch.randn(value.shape, generator=generator, dtype=torch.float32).to(value.dtype)

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and (parameter.dim() < 2 or bool((parameter == 0).all())):
                parameter.add_(0.1 * noise(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.add_(0.1 * noise(buffer))
            elif name.endswith("running_var"):
                buffer.mul_(torch.exp(0.2 * noise(buffer)))


def random_combination(outputs: Any, labels: Tensor | None = None) -> Tensor:
    """Return one number per sample, a fixed random combination of all that the model returns of it."""
    scores = main_tensor(outputs).flatten(1)
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(scores.shape[1], generator=generator, dtype=torch.float32) / scores.shape[1] ** 0.5
    return scores @ weights.to(scores.dtype).unsqueeze(1)


def random_images(size: int, channels: int = 3, frames: tuple[int, ...] = ()) -> Tensor:
    """Return images, or stacks of them, that differ from each other."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(SAMPLES, *frames, channels, size, size, generator=generator)


def random_tokens(length: int = 6, vocabulary: int = 32) -> Tensor:
    """Return token numbers, none of the first three, which are often special."""
    generator = torch.Generator().manual_seed(2)
    return torch.randint(3, vocabulary, (SAMPLES, length), generator=generator)
