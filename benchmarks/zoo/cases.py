"""What a case of the benchmark is: a small model with random weights, and inputs for it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from likewise.readouts import main_tensor

SAMPLES = 3
MOST_PARAMETERS = 8_000_000  # beyond it, the largest tensors are frozen


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
    creates_float64: bool = False  # needs float64 as default type to run in it

    @property
    def key(self) -> str:
        """The name it is recorded under."""
        return f"{self.library}/{self.family}/{self.name}"


def build_case(case: Case) -> Problem:
    """Return the model, in evaluation mode and with weights that leave no gradient zero by initialization."""
    torch.manual_seed(0)
    problem = case.build()
    model = problem.model.eval()
    generator = torch.Generator().manual_seed(0)
    disturb_constants(model, generator)
    fit_batch_norms(problem, generator)
    freeze_largest(model, MOST_PARAMETERS)
    return problem


def call(problem: Problem, inputs: Any = None) -> Any:
    """Return what the model returns of its own inputs, or of these."""
    inputs = problem.inputs if inputs is None else inputs
    return problem.model(**inputs) if isinstance(inputs, dict) else problem.model(inputs)


@torch.no_grad()
def disturb_constants(model: nn.Module, generator: torch.Generator) -> None:
    """Add noise to what initialization makes constant: norms, biases, scales, layers of zeros.

    A layer that starts at zero hides the gradients of those before it, and a scale of one hides a mistake
    in how scales are treated.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point() and (
            parameter.dim() < 2 or bool((parameter == parameter.mean()).all())
        ):
            parameter.add_(0.1 * _noise(parameter, generator))


@torch.no_grad()
def fit_batch_norms(problem: Problem, generator: torch.Generator) -> None:
    """Set running statistics to about those of the inputs, as training would have.

    With those of initialization, activations fade or grow from layer to layer.
    """
    norms = [m for m in problem.model.modules() if isinstance(m, _BatchNorm) and m.running_var is not None]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
    if norms:
        call(problem)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval()
        norm.momentum = momentum
        variance = norm.running_var
        norm.running_mean.add_(0.1 * variance.sqrt() * _noise(variance, generator))
        norm.running_var = variance * torch.exp(0.2 * _noise(variance, generator)) + 0.1 * variance.mean()


def freeze_largest(model: nn.Module, most: int) -> None:
    """Freeze the largest tensors until at most so many parameters are left to differentiate."""
    wanted = sorted((p for p in model.parameters() if p.requires_grad), key=Tensor.numel)
    left = sum(p.numel() for p in wanted)
    while left > most:
        frozen = wanted.pop()
        frozen.requires_grad_(False)
        left -= frozen.numel()


def _noise(value: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(value.shape, generator=generator, dtype=torch.float32).to(value.dtype)


def combined_outputs(outputs: Any, labels: Tensor | None = None) -> Tensor:
    """Return one number per sample, a fixed combination of all that the model returns of it.

    The weights look random but draw nothing, which `vmap` would refuse.
    """
    scores = main_tensor(outputs).flatten(1)
    places = torch.arange(scores.shape[1], dtype=torch.float64, device=scores.device)
    weights = (2 / scores.shape[1]) ** 0.5 * torch.cos(places * places * 0.7548776662)
    return scores @ weights.to(torch.float32).to(scores.dtype).unsqueeze(1)


def random_images(size: int, channels: int = 3, frames: tuple[int, ...] = ()) -> Tensor:
    """Return images, or stacks of them, that differ from each other."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(SAMPLES, *frames, channels, size, size, generator=generator)


def random_tokens(length: int = 6, vocabulary: int = 32) -> Tensor:
    """Return token numbers, none of the first three, which are often special."""
    generator = torch.Generator().manual_seed(2)
    return torch.randint(3, vocabulary, (SAMPLES, length), generator=generator)
