"""Training terms: ask the network to see given inputs as similar (sec. 5), or as different.

Each is a function that returns one number to be added to a loss, differentiable in all parameters of the
model; `weight` scales it, and below zero it repels where it would attract. The model is called in
evaluation mode (its BatchNorm statistics and dropout left alone) and in full precision, whatever the mode
and the autocast around the call. `outputs=True` also returns what the model returned, with its graph, so that
the main loss need not call it again.

The similarity is k^C of the readout's outputs in the chosen parameters; of several outputs the mean of the
diagonal of K^C. A sample without a gradient is similar to nothing; one whose gradient is not finite is left
out.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Literal, TypeVar, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map

from likewise.data import Samples
from likewise.gradients import TWICE, Live, Substituting, live, turning
from likewise.linalg import wide
from likewise.losses.inside import similarity_inside
from likewise.network import Inputs, Network
from likewise.readouts import Readout, all_outputs
from likewise.recording import is_recording

Chosen = str | Sequence[str] | None  # which parameters
Transform = Callable[[Any], Any]
Function = TypeVar("Function", bound=Callable[..., Any])
_warned: WeakSet[nn.Module] = WeakSet()


def full_precision(term: Function) -> Function:
    """Return the term with any autocast around the call switched off."""

    @wraps(term)
    def precise(model: nn.Module | Network, *given: Any, **options: Any) -> Any:
        module = model.model if isinstance(model, Network) else model
        with torch.autocast(next(module.parameters()).device.type, enabled=False):
            return term(model, *given, **options)

    return cast(Function, precise)


@full_precision
def pair(
    model: nn.Module | Network,
    x: Inputs,
    other: Inputs,
    labels: Tensor | None = None,
    other_labels: Tensor | None = None,
    *,
    readout: Readout = all_outputs,
    parameters: Chosen = None,
    weight: float = 1,
) -> Tensor:
    """Return − mean k^C(xᵢ, x'ᵢ) of inputs matched one by one: −1 if each is like its match."""
    n = _count(x)
    if _count(other) != n:
        raise ValueError(f"Inputs are matched one by one, found {n} and {_count(other)} of them.")
    both = _joined(x, other)
    given = None
    if labels is not None:
        second = labels if other_labels is None else other_labels
        given = torch.cat([torch.as_tensor(labels), torch.as_tensor(second)])
    found = live_batch(network_of(model, readout, parameters), both, given, _numbers(x).repeat(2))
    similar = found.pairs()
    if found.finite is not None:  # pairs of which none is left out
        similar = similar[found.finite[:n] & found.finite[n:]]
    return -weight * (similar.sum() / max(1, len(similar))).to(found.dtype)


@full_precision
def group(
    model: nn.Module | Network,
    x: Inputs,
    groups: Tensor | None = None,
    labels: Tensor | None = None,
    *,
    readout: Readout = all_outputs,
    parameters: Chosen = None,
    weight: float = 1,
    outputs: bool = False,
    ids: Tensor | None = None,
) -> Any:
    """Return 1 − the mean k^C of pairs inside a group, the mean over groups: 0 if each group is alike.

    `groups`: a number for each sample, such as its class; None: all are one group. A group of one sample
    has no pair and does not count; 1 if there is no pair at all. By Σ k^C = ‖Σ ĝ‖² − n, exact for each
    sample, at the cost of one more backward pass rather than of all pairs. `ids`: the samples' numbers, for
    readouts that use them.
    """
    found = live_batch(network_of(model, readout, parameters, outputs), x, labels, ids)
    similarity = similarity_inside(found, groups)
    term = weight * (1 - similarity).to(found.dtype)
    return (term, found.returned) if outputs else term


@full_precision
def orbit(
    model: nn.Module | Network,
    x: Inputs,
    transforms: Transform | Sequence[Transform],
    labels: Tensor | None = None,
    *,
    readout: Readout = all_outputs,
    parameters: Chosen = None,
    weight: float = 1,
) -> Tensor:
    """Return 1 − the mean k^C of each sample with its transformed copies and of these with each other."""
    transforms = [transforms] if callable(transforms) else transforms
    if not transforms:
        raise ValueError("An orbit needs at least one transform of the inputs.")
    copies = [x, *(transform(x) for transform in transforms)]
    every = copies[0]
    for copy in copies[1:]:
        every = _joined(every, copy)
    given = None if labels is None else torch.cat([torch.as_tensor(labels)] * len(copies))
    groups = _numbers(x).repeat(len(copies))
    return group(
        model, every, groups, given, readout=readout, parameters=parameters, weight=weight, ids=groups
    )


@full_precision
def two_batches(
    model: nn.Module | Network,
    a: Inputs,
    b: Inputs,
    labels_a: Tensor | None = None,
    labels_b: Tensor | None = None,
    *,
    form: Literal["ratio", "cosine"] = "ratio",
    readout: Readout = all_outputs,
    parameters: Chosen = None,
    weight: float = 1,
    outputs: bool = False,
) -> Any:
    """Return n_B ‖μ₁ − μ₂‖² / (‖μ₁‖ ‖μ₂‖) of the mean gradients of two mini-batches, the paper's term.

    `form="cosine"`: 1 − cos(μ₁, μ₂), which has no scale. Cheaper than `group` where there are many
    positions, but of means: it cannot normalize each sample. If a mean vanishes, the term is 0.
    """
    if form not in ("ratio", "cosine"):
        raise ValueError(f'form is "ratio" or "cosine", found {form!r}.')
    net = network_of(model, readout, parameters, outputs)
    with net.evaluating(), torch.enable_grad():
        first, returned_a = _mean_gradient(net, a, labels_a)
        second, returned_b = _mean_gradient(net, b, labels_b)
    finite = first.detach().isfinite().all() & second.detach().isfinite().all()
    if not is_recording() and not finite:
        raise ValueError(
            "A mean gradient is not finite: leave out samples with NaN or infinity in their inputs. "
            "`group` does so by itself, it looks at each sample."
        )
    inner, sizes = (first * second).sum(), first.square().sum() * second.square().sum()
    alive = (sizes.detach() > 0) & sizes.detach().isfinite()
    scale = torch.where(alive, sizes, 1).sqrt()
    if form == "ratio":
        n = (_count(a) + _count(b)) / 2
        term = n * (first - second).square().sum() / scale
    else:
        term = 1 - inner / scale
    term = weight * torch.where(alive, term, 0).to(net.dtype)
    return (term, (returned_a, returned_b)) if outputs else term


@full_precision
def along(
    model: nn.Module | Network,
    x: Tensor,
    direction: Tensor | Callable[[Tensor], Tensor],
    labels: Tensor | None = None,
    *,
    readout: Readout = all_outputs,
    parameters: Chosen = None,
    weight: float = 1,
) -> Tensor:
    """Return the mean of ‖∂ₓ∇f(x)·e(x)‖²: how fast a sample's gradient turns as it moves along e.

    The limit of ‖∇f(x + εe) − ∇f(x)‖² / ε². `direction`: e for each sample, or a function of the inputs
    such as those of `losses.directions`. Costs two more backward passes than `group`.
    """
    net = network_of(model, readout, parameters)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError("`along` moves inputs: they must be one tensor of floating numbers.")
    x = net.placed(x)
    moving = net.placed(direction(x) if callable(direction) else direction)
    if moving.shape != x.shape:
        raise ValueError(
            f"A direction has the shape of the inputs, {tuple(x.shape)}: found {tuple(moving.shape)}."
        )
    turned = turning(net, Samples(x, _given(labels), _numbers(x)), moving)
    return weight * turned.mean().to(net.dtype)


def network_of(
    model: nn.Module | Network, readout: Readout, parameters: Chosen, shared: bool = False
) -> Network:
    """Return the model with the choices made; a Network has made its own. `shared`: with the main loss."""
    if not shared:
        _warn_of_running_statistics(model.model if isinstance(model, Network) else model)
    if not isinstance(model, Network):
        return Network(model, readout, parameters)
    if readout is not all_outputs or parameters is not None:
        raise ValueError(
            "A Network has its readout and parameters: choose them there, or give the bare model."
        )
    return model.exact()


def _warn_of_running_statistics(model: nn.Module) -> None:
    """Say once of a model that its BatchNorms are trained by other statistics than the term sees."""
    if model in _warned or not any(isinstance(m, _BatchNorm) and m.training for m in model.modules()):
        return
    _warned.add(model)
    warnings.warn(
        "The term sees BatchNorm with its running statistics, training with those of the batch: the two can "
        "drift apart until the model in evaluation mode is worthless. Take the statistics anew after "
        "training (torch.optim.swa_utils.update_bn), or see docs/training.md for other ways.",
        stacklevel=5,
    )


def live_batch(net: Network, x: Inputs, labels: Tensor | None, ids: Tensor | None = None) -> Live:
    """Return the differentiable gradients of a batch."""
    numbers = _numbers(x) if ids is None else ids
    x = dict(x) if isinstance(x, Mapping) else x
    return live(net, Samples(x, _given(labels), numbers))


def _given(labels: Any) -> Tensor | None:
    return None if labels is None else torch.as_tensor(labels)


def _count(x: Inputs) -> int:
    """Return the number of samples, or say what is wrong with the inputs."""
    leaves = tree_leaves(dict(x) if isinstance(x, Mapping) else x)
    wrong = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor) or leaf.dim() == 0]
    if wrong or not leaves:
        raise TypeError(f"Inputs are tensors, samples along the first dimension: found {wrong or 'nothing'}.")
    if len(leaves[0]) == 0:
        raise ValueError("The batch is empty: there is nothing to compare.")
    return len(leaves[0])


def _numbers(x: Inputs) -> Tensor:
    """Return the samples' numbers in the batch, where the inputs are."""
    n = _count(x)
    return torch.arange(n, device=tree_leaves(dict(x) if isinstance(x, Mapping) else x)[0].device)


def _joined(x: Inputs, other: Inputs) -> Inputs:
    return tree_map(lambda a, b: torch.cat([a, b]), x, other)


def _mean_gradient(net: Network, x: Inputs, labels: Tensor | None) -> tuple[Tensor, Any]:
    """Return the mean over a batch of each output's gradient, and what the model returned."""
    chosen, rest = _live_state(net)
    with Substituting(TWICE):
        returned = net.called({**rest, **chosen}, x)
    read = net.chosen(returned, x, _given(labels), _numbers(x))
    values, found = list(chosen.values()), []
    for output in read.mean(0).unbind():
        gradients = torch.autograd.grad(output, values, create_graph=True, allow_unused=True)
        found += [
            torch.zeros_like(v).flatten() if g is None else g.flatten()
            for g, v in zip(gradients, values, strict=True)
        ]
    joined = torch.cat(found)
    return joined.to(wide(joined)), returned


def _live_state(net: Network) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the chosen parameters, live, and all other parameters and copies of buffers."""
    every = dict(net.model.named_parameters())
    chosen = {
        k: every[k] if every[k].requires_grad else every[k].detach().requires_grad_() for k in net.names
    }
    rest: dict[str, Tensor] = {k: v for k, v in every.items() if k not in chosen}
    return chosen, {**rest, **{k: v.detach().clone() for k, v in net.model.named_buffers()}}
