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

from likewise.checks import (
    check_choice,
    check_flag,
    check_function,
    check_number,
    check_tensor,
    describe,
    refuse_unreadable,
    to_tensor,
)
from likewise.cuda_graphs import is_recording
from likewise.data import Samples
from likewise.engines import (
    TWICE,
    DifferentiableGradients,
    FunctionSubstitution,
    differentiable_gradients,
    gradient_tangents,
    refuse_dependent_samples_once,
)
from likewise.linalg import accumulation_dtype
from likewise.losses.groups import similarity_inside
from likewise.model import Inputs, Network, check_model, describing_call
from likewise.readouts import Readout, all_outputs

Chosen = str | Sequence[str] | None  # which parameters
Transform = Callable[[Any], Any]
Function = TypeVar("Function", bound=Callable[..., Any])
_warned: WeakSet[nn.Module] = WeakSet()


def full_precision(term: Function) -> Function:
    """Return the term with any autocast around the call switched off."""

    @wraps(term)
    def precise(model: nn.Module | Network, *given: Any, **options: Any) -> Any:
        module = model.model if isinstance(model, Network) else check_model(model)
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
    weight, n = check_number("weight", weight), _count(x)
    if _count(other, "other") != n:
        raise ValueError(f"Inputs are matched one by one, found {n} and {_count(other)} of them.")
    both = _joined(x, other)
    given = _given(labels, n)
    if given is not None:
        second = given if other_labels is None else _given(other_labels, n, "other_labels")
        given = torch.cat([given, cast(Tensor, second)])
    elif other_labels is not None:
        raise ValueError("other_labels are given without labels: both are needed, or neither.")
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
    weight, n = check_number("weight", weight), _count(x)
    groups = None if groups is None else _check_groups(groups, n)
    ids = None if ids is None else _one_a_sample("ids", ids, n)
    net = network_of(model, readout, parameters, check_flag("outputs", outputs))
    found = live_batch(net, x, labels, ids)
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
    n, every = _count(x), x
    functions = transforms if isinstance(transforms, list | tuple) else [transforms]
    if not functions:
        raise ValueError("transforms must hold at least one transform of the inputs, found an empty list.")
    called = [check_function("transforms", given, "of the inputs, or a list of such") for given in functions]
    copies = [x, *(_transformed(x, function) for function in called)]
    for place, copy in enumerate(copies[1:]):
        if _count(copy, f"what transform {place} returns") != n:
            raise ValueError(f"transforms must keep the {n} samples, number {place} returns {_count(copy)}.")
        every = _joined(every, copy)
    given = _given(labels, n)
    given = None if given is None else torch.cat([given] * len(copies))
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
    check_choice("form", form, ("ratio", "cosine"))
    weight, outputs = check_number("weight", weight), check_flag("outputs", outputs)
    sizes_of = _count(a, "a"), _count(b, "b")
    labels_a = _given(labels_a, sizes_of[0], "labels_a")
    labels_b = _given(labels_b, sizes_of[1], "labels_b")
    net = network_of(model, readout, parameters, outputs)
    with net.evaluation_mode(), torch.enable_grad():
        if not is_recording():
            some = Samples(dict(a) if isinstance(a, Mapping) else a, labels_a, _numbers(a))
            refuse_dependent_samples_once(net, some)
        first, returned_a = _mean_gradient(net, a, labels_a)
        second, returned_b = _mean_gradient(net, b, labels_b)
    finite = first.detach().isfinite().all() & second.detach().isfinite().all()
    if not is_recording() and not finite:
        wrong = {"a": _not_finite(a), "b": _not_finite(b)}
        which = ", ".join(f"{name}{places}" for name, places in wrong.items() if places) or "none"
        raise ValueError(
            "A mean gradient is not finite: leave out samples with NaN or infinity in their inputs "
            f"({which}), look at the weights, or use `group`, which looks at each sample and leaves out such."
        )
    inner, sizes = (first * second).sum(), first.square().sum() * second.square().sum()
    alive = (sizes.detach() > 0) & sizes.detach().isfinite()
    scale = torch.where(alive, sizes, 1).sqrt()
    if form == "ratio":
        n = sum(sizes_of) / 2
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
    net, weight = network_of(model, readout, parameters), check_number("weight", weight)
    if isinstance(x, Tensor):
        refuse_unreadable("x", x)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(
            f"x must be one tensor of floating numbers, which `along` moves: found {describe(x)}."
        )
    labels = _given(labels, _count(x))
    x = net.to_device(x)
    if callable(direction) and not isinstance(direction, type):
        direction = _transformed(x, direction)
    moving = net.to_device(check_tensor("direction", direction, finite=False))
    if moving.shape != x.shape:
        raise ValueError(
            f"A direction has the shape of the inputs, {tuple(x.shape)}: found {tuple(moving.shape)}."
        )
    turned = gradient_tangents(net, Samples(x, labels, _numbers(x)), moving)
    if not is_recording() and not turned.detach().isfinite().all():
        wrong = (~turned.detach().isfinite()).nonzero()[:5, 0].tolist()
        raise ValueError(
            f"The gradients of samples {wrong} do not change at a finite rate along the direction: look for "
            "NaN or infinity in their inputs, in the direction or in the weights, and leave them out."
        )
    return weight * turned.mean().to(net.dtype)


def _transformed(x: Inputs, transform: Transform) -> Inputs:
    try:
        return transform(x)
    except Exception as error:
        error.add_note(f"The transform {getattr(transform, '__name__', transform)!r} raised this.")
        raise


def network_of(
    model: nn.Module | Network, readout: Readout, parameters: Chosen, shared: bool = False
) -> Network:
    """Return the model with the choices made; a Network has made its own. `shared`: with the main loss."""
    _refuse_inference(model.model if isinstance(model, Network) else model)
    if not shared:
        _warn_of_running_statistics(model.model if isinstance(model, Network) else model)
    if not isinstance(model, Network):
        return Network(model, readout, parameters)
    if readout is not all_outputs or parameters is not None:
        raise ValueError(
            "A Network has its readout and parameters: choose them there, or give the bare model."
        )
    return model.exact()


def _refuse_inference(model: nn.Module) -> None:
    """Raise of parameters that autograd cannot differentiate in, and so no term can train."""
    for name, value in model.named_parameters():
        if value.is_inference():
            raise ValueError(
                f"Parameter {name} of the model was created in inference mode and cannot be trained: create "
                "or load the model outside of torch.inference_mode()."
            )


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


def live_batch(
    net: Network, x: Inputs, labels: Tensor | None, ids: Tensor | None = None
) -> DifferentiableGradients:
    """Return the differentiable gradients of a batch."""
    numbers = _numbers(x) if ids is None else ids
    x = dict(x) if isinstance(x, Mapping) else x
    return differentiable_gradients(net, Samples(x, _given(labels, len(numbers)), numbers))


def _given(labels: Any, n: int, name: str = "labels") -> Tensor | None:
    return None if labels is None else _one_a_sample(name, labels, n)


def _one_a_sample(name: str, values: Any, n: int) -> Tensor:
    """Return numbers, an entry for each sample, or say what is wrong with them."""
    tensor = to_tensor(name, values, "numbers are needed, an entry for each sample")
    if tensor.dim() == 0 or len(tensor) != n:
        raise ValueError(f"{name} must have an entry for each of {n} samples, found {describe(tensor)}.")
    return tensor


def _check_groups(groups: Any, n: int) -> Tensor:
    numbers = _one_a_sample("groups", groups, n)
    if numbers.shape != (n,) or numbers.is_complex():
        raise ValueError(f"groups must be one number for each of {n} samples, found {describe(numbers)}.")
    if numbers.is_floating_point() and not is_recording() and not numbers.isfinite().all():
        wrong = (~numbers.isfinite()).nonzero()[:5, 0].tolist()
        raise ValueError(f"groups must be finite, found NaN or infinity for samples {wrong}: leave them out.")
    return numbers


def _count(x: Inputs, name: str = "x") -> int:
    """Return the number of samples, or say what is wrong with the inputs."""
    leaves = tree_leaves(dict(x) if isinstance(x, Mapping) else x)
    if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
        found = describe(x) if len(leaves) != 1 else describe(leaves[0])
        raise TypeError(f"{name} must be a tensor, or a tuple or dict of tensors, found {found}.")
    for leaf in leaves:
        refuse_unreadable(name, leaf)
        if leaf.dim() == 0:
            raise ValueError(
                f"{name} must have samples along the first dimension, found {describe(leaf)}: one sample "
                "alone needs x[None]."
            )
    lengths = sorted({len(leaf) for leaf in leaves})
    if len(lengths) > 1:
        raise ValueError(f"{name} holds tensors that differ in length, {lengths}: samples come first.")
    if lengths[0] == 0:
        raise ValueError(f"The batch {name} is empty: there is nothing to compare.")
    return lengths[0]


def _numbers(x: Inputs) -> Tensor:
    """Return the samples' numbers in the batch, where the inputs are."""
    n = _count(x)
    return torch.arange(n, device=tree_leaves(dict(x) if isinstance(x, Mapping) else x)[0].device)


def _joined(x: Inputs, other: Inputs) -> Inputs:
    try:
        return tree_map(lambda a, b: torch.cat([a, b]), x, other)
    except (RuntimeError, ValueError, TypeError) as error:
        form = " and ".join(describe(value) for value in (x, other))
        raise ValueError(f"Both inputs must have one form and one shape a sample, found {form}.") from error


def _not_finite(x: Inputs) -> list[int]:
    """Return the first places of samples whose inputs hold NaN or infinity."""
    leaves = tree_leaves(dict(x) if isinstance(x, Mapping) else x)
    wrong = [(~leaf.detach().isfinite()).reshape(len(leaf), -1).any(1) for leaf in leaves]
    return torch.stack([part.cpu() for part in wrong]).any(0).nonzero()[:5, 0].tolist()


def _mean_gradient(net: Network, x: Inputs, labels: Tensor | None) -> tuple[Tensor, Any]:
    """Return the mean over a batch of each output's gradient, and what the model returned."""
    chosen, rest = _live_state(net)
    numbers = _numbers(x)
    with describing_call(net, x, labels, numbers):
        with FunctionSubstitution(TWICE):
            returned = net.called({**rest, **chosen}, x)
        read = net.chosen(returned, x, labels, numbers)
    if not read.requires_grad:
        raise ValueError("The outputs depend on none of the chosen parameters: there is nothing to compare.")
    values, found = list(chosen.values()), []
    for output in read.mean(0).unbind():
        gradients = torch.autograd.grad(output, values, create_graph=True, allow_unused=True)
        found += [
            torch.zeros_like(v).flatten() if g is None else g.flatten()
            for g, v in zip(gradients, values, strict=True)
        ]
    joined = torch.cat(found)
    return joined.to(accumulation_dtype(joined)), returned


def _live_state(net: Network) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the chosen parameters, live, and all other parameters and copies of buffers."""
    every = dict(net.model.named_parameters())
    chosen = {
        k: every[k] if every[k].requires_grad else every[k].detach().requires_grad_() for k in net.names
    }
    rest: dict[str, Tensor] = {k: v for k, v in every.items() if k not in chosen}
    return chosen, {**rest, **{k: v.detach().clone() for k, v in net.model.named_buffers()}}
