"""The moments of Adam from a checkpoint: which way a training step on one sample alone would go."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from likewise.checks import describe
from likewise.loading.models import load_tensors
from likewise.model import Network

FILE = "optimizer.pt"  # of a checkpoint folder of the Trainer of transformers
BETAS, EPSILON = (0.9, 0.999), 1e-8  # of torch.optim.Adam, where the state does not say
PREFIXES = ("module.", "_orig_mod.")


@dataclass(frozen=True)
class AdamMoments:
    """First and second moments of the training loss's gradient, by parameter.

    Attributes:
        first: Running means of gradients.
        second: Running means of their squares.
        step: How many steps they are of.
        betas: How fast they forget.
        epsilon: Added to the root of the second moment.

    """

    first: dict[str, Tensor]
    second: dict[str, Tensor]
    step: int
    betas: tuple[float, float]
    epsilon: float

    def update(self, name: str, rows: Tensor) -> Tensor:
        """Return minus the next update by Adam, for gradients of minus the loss, (n, numel); no weight decay.

        The direction is that of the readout: with m and v the moments of the loss and g = −rows its gradient,
        (β₁ m + (1 − β₁) g)/(1 − β₁ᵗ) over √((β₂ v + (1 − β₂) g²)/(1 − β₂ᵗ)) + ε, times −1.

        Args:
            name: Of the parameter.
            rows: (n, numel) gradients of the readout, of which minus is the loss.

        """
        one, two = self.betas
        first = self.first[name].to(rows).flatten()
        second = self.second[name].to(rows).flatten()
        step = self.step + 1
        scale = rows.square().mul_(1 - two).add_(second, alpha=two).div_(1 - two**step).sqrt_()
        return (rows * (1 - one)).sub_(first, alpha=one).div_(1 - one**step).div_(scale.add_(self.epsilon))

    def describe(self) -> dict[str, Any]:
        """Return what tells moments apart."""
        digest = hashlib.sha256()
        for name in sorted(self.first):
            for moment in (self.first[name], self.second[name]):
                digest.update(name.encode())
                digest.update(moment.detach().cpu().float().contiguous().numpy().tobytes())
        return {
            "name": "adam",
            "step": self.step,
            "betas": list(self.betas),
            "epsilon": self.epsilon,
            "fingerprint": digest.hexdigest()[:16],
        }


def read_moments(given: Any, net: Network) -> AdamMoments:
    """Return the moments of Adam for the selected parameters of a network.

    Args:
        given: A torch optimizer over the model's parameters; its state dict; exp_avg and exp_avg_sq by the names of
            parameters; or the path of such a state dict, or of a checkpoint folder of the Trainer of transformers.
        net: The network.

    Raises:
        ValueError: A parameter has no moments, or of another shape, or it is not clear which are whose.

    """
    by_name, groups = _by_name(given, net.model)
    parameters = net.parameters
    shapes = {name: value.shape for name, value in parameters.items()}
    for name, shape in shapes.items():
        state = by_name.get(name)
        if state is None or "exp_avg" not in state or "exp_avg_sq" not in state:
            raise ValueError(
                f"The optimizer has no moments exp_avg and exp_avg_sq of {name}: give the state of Adam or AdamW after "
                "training, or select the parameters that were trained by parameters=."
            )
        if state["exp_avg"].numel() != shape.numel():
            raise ValueError(
                f"The optimizer's moments of {name} are of shape {tuple(state['exp_avg'].shape)}, and the parameter of "
                f"{tuple(shape)}: give {{name: optimizer.state[p] for name, p in model.named_parameters()}}."
            )
    steps = {int(by_name[name].get("step", 10**9)) for name in shapes}
    betas = {tuple(group.get("betas", BETAS)) for group in groups} or {BETAS}
    epsilons = {float(group.get("eps", EPSILON)) for group in groups} or {EPSILON}
    if len(steps) > 1 or len(betas) > 1 or len(epsilons) > 1:
        raise ValueError(
            f"Parameters were trained for different numbers of steps {sorted(steps)[:5]}, or with several betas or "
            "eps: one update of all is not defined."
        )
    one, two = betas.pop()
    return AdamMoments(
        {name: by_name[name]["exp_avg"].to(value.device) for name, value in parameters.items()},
        {name: by_name[name]["exp_avg_sq"].to(value.device) for name, value in parameters.items()},
        steps.pop(),
        (float(one), float(two)),
        epsilons.pop(),
    )


State = Mapping[str, Any]


def _by_name(given: Any, model: nn.Module) -> tuple[dict[str, State], Sequence[State]]:
    """Return the state of each parameter by its name, and the groups of an optimizer."""
    if isinstance(given, torch.optim.Optimizer):
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        known = {names[id(p)]: state for p, state in given.state.items() if id(p) in names}
        return known, given.param_groups
    if isinstance(given, str | PathLike):
        path = Path(given)
        given = load_tensors(str(path / FILE if path.is_dir() else path))
    if not isinstance(given, Mapping):
        raise TypeError(
            "optimizer_state must be an optimizer, its state dict, or the path of one or of a checkpoint folder, found "
            f"{describe(given)}."
        )
    if "state" not in given:
        return {_bare(str(name)): state for name, state in given.items()}, ()
    groups = list(given.get("param_groups", ()))
    states = given["state"]
    if states and all(isinstance(key, str) for key in states):
        return {_bare(key): state for key, state in states.items()}, groups
    named = dict(zip(_numbers(groups), _ordered_names(groups, model), strict=True))
    return {named[number]: state for number, state in states.items()}, groups


def _numbers(groups: Sequence[State]) -> list[int]:
    return [number for group in groups for number in group["params"]]


def _ordered_names(groups: Sequence[State], model: nn.Module) -> list[str]:
    """Return the names of an optimizer's parameters in its order."""
    if groups and all("param_names" in group for group in groups):
        return [_bare(str(name)) for group in groups for name in group["param_names"]]
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    orders = [[trained]] if len(groups) == 1 else [_decay_groups(model, trained)] if len(groups) == 2 else []
    for order in orders:
        if [len(group["params"]) for group in groups] == [len(part) for part in order]:
            return [name for part in order for name in part]
    raise ValueError(
        f"The optimizer has {len(groups)} groups of {[len(group['params']) for group in groups]} parameters, and the "
        f"model {len(trained)} that require grad: which are whose is not known. Give "
        "{name: optimizer.state[p] for name, p in model.named_parameters()}."
    )


def _decay_groups(model: nn.Module, trained: list[str]) -> list[list[str]]:
    """Return the two groups that the Trainer of transformers makes: with weight decay, and without."""
    from transformers import Trainer

    decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    return [
        [name for name in trained if name in decayed],
        [name for name in trained if name not in decayed],
    ]


def _bare(name: str) -> str:
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name
