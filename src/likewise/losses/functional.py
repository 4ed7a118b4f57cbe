"""Training terms that ask the network to treat given inputs as similar (sec. 5), or as different.

Each is a function that returns one number to be added to a loss, differentiable in all parameters of the
model; `weight` scales it, and below zero it repels where it would attract. The model is called in
evaluation mode (its BatchNorm statistics and dropout left alone) and in full precision, whatever the mode
and the autocast around the call. `group_with_outputs` and `two_batches_with_outputs` also return what the model
returned, so that the main loss need not call it again.

The similarity is k^C of the readout's outputs in the chosen parameters; of several outputs the mean of the
diagonal of K^C. `pair`, `group` and `orbit` read one random combination of all outputs unless given a readout. A
sample with a zero gradient is similar to nothing; one whose gradient is not finite is left out.
`functools.partial` fixes options: `partial(losses.group, weight=0.1)`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from likewise.checks import (
    check_choice,
    check_function,
    check_integer,
    check_number,
    check_tensor,
    describe,
    refuse_unreadable,
)
from likewise.data import Samples
from likewise.engines import (
    SECOND_ORDER,
    DifferentiableGradients,
    FunctionSubstitution,
    gradient_tangents,
    live_parameters,
    refuse_dependent_samples_once,
)
from likewise.linalg import accumulation_dtype
from likewise.losses.arguments import (
    ParameterNames,
    Transform,
    apply_transform,
    batch_gradients,
    build_network,
    check_groups,
    check_labels,
    check_per_sample,
    choose_readout,
    concatenate,
    count_samples,
    find_nonfinite,
    full_precision,
    plain,
    sample_numbers,
)
from likewise.losses.samplers import RunningTotal
from likewise.model import Inputs, Network, annotate_errors
from likewise.readouts import Readout
from likewise.torch_state import is_recording, most_groups


class TermAndOutputs(NamedTuple):
    """A training term and what the model returned, from one forward pass.

    Attributes:
        term: One number, to be added to a loss.
        outputs: What the model returned.

    Example:
        >>> import torch, likewise as lw
        >>> net, x = torch.nn.Linear(4, 3), torch.randn(8, 4)
        >>> term, outputs = lw.losses.group_with_outputs(net, x, torch.arange(8) % 2)
        >>> term.shape, outputs.shape
        (torch.Size([]), torch.Size([8, 3]))

    """

    term: Tensor
    outputs: Any


@full_precision
def pair(
    model: nn.Module | Network,
    x: Inputs,
    other: Inputs,
    labels: Tensor | None = None,
    other_labels: Tensor | None = None,
    *,
    readout: Readout | None = None,
    parameters: ParameterNames = None,
    weight: float = 1,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return − mean k^C(xᵢ, x'ᵢ) over matched inputs: −1 if each is treated like its match.

    Args:
        model: The model that is trained, or a Network, which keeps its own readout and parameters.
        x: Inputs, a tensor or a tuple or dict of tensors, samples first.
        other: As many, of the same form: the match of each.
        labels: Labels of x, for readouts that use them.
        other_labels: Labels of `other`; None: those of x.
        readout: The outputs to compare; None: one random combination of all, new at each call (see `group`).
        parameters: Names or patterns of parameters whose gradients are compared; None: all that require grad.
        weight: Factor of the term.
        generator: Draws the combination if no readout is given; None: PyTorch's global one (torch.manual_seed).

    Returns:
        A scalar tensor.

    Example:
        >>> import torch, likewise as lw
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> x = torch.randn(4, 3)
        >>> lw.losses.pair(model, x, x + 0.1 * torch.randn(4, 3)).backward()

    """
    weight, n = check_number("weight", weight), count_samples(x)
    if count_samples(other, "other") != n:
        raise ValueError(f"Inputs are matched one by one, found {n} and {count_samples(other)} of them.")
    both = concatenate(x, other)
    every = check_labels(labels, n)
    if every is not None:
        second = every if other_labels is None else check_labels(other_labels, n, "other_labels")
        every = torch.cat([every, cast(Tensor, second)])
    elif other_labels is not None:
        raise ValueError("other_labels are given without labels: pass both, or neither.")
    net = build_network(model, choose_readout(model, readout, generator), parameters)
    gradients = batch_gradients(net, both, every, sample_numbers(x).repeat(2))
    similarity = gradients.pairs()
    if gradients.finite is not None:  # pairs of which none is left out
        similarity = similarity[gradients.finite[:n] & gradients.finite[n:]]
    return -weight * (similarity.sum() / max(1, len(similarity))).to(gradients.dtype)


@full_precision
def group(
    model: nn.Module | Network,
    x: Inputs,
    groups: Tensor | None = None,
    labels: Tensor | None = None,
    *,
    readout: Readout | None = None,
    parameters: ParameterNames = None,
    weight: float = 1,
    ids: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return 1 − the mean k^C of pairs inside a group, the mean over groups: 0 if each group is alike.

    By Σ k^C = ‖Σ ĝ‖² − n, exact for each sample, at the cost of one more backward pass rather than of all
    pairs. A group of one sample has no pair and does not count; the term is 1 if there is no pair at all.

    Without a readout, one output is compared: vᵀf of all d outputs, with v uniform on the sphere, one for the
    batch and a new one at each call. That costs as much as one output, where all take d times as much and more.
    The term and its gradient are then unbiased estimates of their means over v, that is of the term with the
    similarity E_v[vᵀKv / √(vᵀK₁v · vᵀK₂v)] in place of k^C, where K = J(x)J(x')ᵀ, K₁ and K₂ = J(x)J(x)ᵀ and
    J(x')J(x')ᵀ. This is k^C for one output, and for several wherever K₁ and K₂ are multiples of the identity;
    elsewhere it differs, since it is normalized for each v rather than by K₁^-½ and K₂^-½, for which all outputs
    are needed. It is 1 only for J(x') = c J(x), c > 0, and then k^C is 1 too (if J has full rank). The mean over
    calls, not a single one, is what training follows: `readout=lw.label_against_rest` costs the same, draws
    nothing and asks about the class, so take it where there are labels. `readout=lw.all_outputs` is k^C of all
    outputs at once, `readout=lw.projected_outputs(1, seed=0)` one fixed combination.

    Args:
        model: The model that is trained, or a Network, which keeps its own readout and parameters.
        x: Inputs, a tensor or a tuple or dict of tensors, samples first.
        groups: (n,) the number of each sample's group, such as its class; None: all are one group.
        labels: Labels of the samples, for readouts that use them.
        readout: The outputs to compare; None: one random combination of all, new at each call (see `group`).
        parameters: Names or patterns of parameters whose gradients are compared; None: all that require grad.
        weight: Factor of the term.
        ids: (n,) the samples' numbers, for readouts that use them; None: 0, 1, ...
        generator: Draws the combination if no readout is given; None: PyTorch's global one (torch.manual_seed).

    Returns:
        A scalar tensor, from 0 to 2 times the weight.

    Example:
        >>> import torch, likewise as lw
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        >>> x, y = torch.randn(6, 3), torch.arange(6) % 2
        >>> lw.losses.group(model, x, y, weight=0.1).backward()
        >>> lw.losses.group(model, x, y, labels=y, readout=lw.label_against_rest, weight=0.1).backward()

    """
    net = build_network(model, choose_readout(model, readout, generator), parameters)
    return _group(net, x, groups, labels, weight, ids).term


@full_precision
def group_with_outputs(
    model: nn.Module | Network,
    x: Inputs,
    groups: Tensor | None = None,
    labels: Tensor | None = None,
    *,
    readout: Readout | None = None,
    parameters: ParameterNames = None,
    weight: float = 1,
    ids: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> TermAndOutputs:
    """Return the term of `group` with what the model returned, for a main loss from the same forward pass.

    The outputs are those of evaluation mode: no dropout, and BatchNorm by its running statistics.

    Args:
        model: As in `group`, like all other arguments.
        x: Inputs.
        groups: (n,) the number of each sample's group; None: all are one group.
        labels: Labels of the samples, for readouts that use them.
        readout: The outputs to compare.
        parameters: The parameters whose gradients are compared.
        weight: Factor of the term.
        ids: (n,) the samples' numbers, for readouts that use them.
        generator: Draws the combination if no readout is given; None: PyTorch's global one (torch.manual_seed).

    Returns:
        The scalar term, and the model's outputs with their graph.

    Example:
        >>> import torch, likewise as lw
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        >>> x, y = torch.randn(6, 3), torch.arange(6) % 2
        >>> term, logits = lw.losses.group_with_outputs(model, x, y, y, readout=lw.label_against_rest)
        >>> (torch.nn.functional.cross_entropy(logits, y) + 0.1 * term).backward()

    """
    net = build_network(model, choose_readout(model, readout, generator), parameters, shares_forward=True)
    return _group(net, x, groups, labels, weight, ids)


@full_precision
def orbit(
    model: nn.Module | Network,
    x: Inputs,
    transforms: Transform | Sequence[Transform],
    labels: Tensor | None = None,
    *,
    readout: Readout | None = None,
    parameters: ParameterNames = None,
    weight: float = 1,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return 1 − the mean k^C of each sample with its transformed copies and of these with each other.

    Args:
        model: The model that is trained, or a Network, which keeps its own readout and parameters.
        x: Inputs, a tensor or a tuple or dict of tensors, samples first.
        transforms: A function from inputs to inputs of the same form, or a list of such.
        labels: Labels of the samples, and of their copies, for readouts that use them.
        readout: The outputs to compare; None: one random combination of all, new at each call (see `group`).
        parameters: Names or patterns of parameters whose gradients are compared; None: all that require grad.
        weight: Factor of the term.
        generator: Draws the combination if no readout is given; None: PyTorch's global one (torch.manual_seed).

    Returns:
        A scalar tensor: 0 if each sample is like its copies.

    Example:
        >>> import torch, likewise as lw
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> x = torch.randn(4, 3)
        >>> lw.losses.orbit(model, x, [lambda x: x.flip(1), lambda x: 2 * x]).backward()

    """
    n, every = count_samples(x), x
    functions = transforms if isinstance(transforms, list | tuple) else [transforms]
    if not functions:
        raise ValueError("transforms must hold at least one transform of the inputs, found an empty list.")
    checked = [check_function("transforms", one, "of the inputs, or a list of such") for one in functions]
    copies = [x, *(apply_transform(x, function) for function in checked)]
    for place, copy in enumerate(copies[1:]):
        if count_samples(copy, f"what transform {place} returns") != n:
            raise ValueError(
                f"transforms must keep the {n} samples, number {place} returns {count_samples(copy)}."
            )
        every = concatenate(every, copy)
    one = check_labels(labels, n)
    repeated = None if one is None else torch.cat([one] * len(copies))
    ids = sample_numbers(x).repeat(len(copies))
    net = build_network(model, choose_readout(model, readout, generator), parameters)
    return _group(net, every, ids, repeated, weight, ids).term


@full_precision
def two_batches(
    model: nn.Module | Network,
    a: Inputs,
    b: Inputs,
    labels_a: Tensor | None = None,
    labels_b: Tensor | None = None,
    *,
    form: Literal["ratio", "cosine"] = "ratio",
    readout: Readout | None = None,
    parameters: ParameterNames = None,
    weight: float = 1,
) -> Tensor:
    """Return n_B ‖μ₁ − μ₂‖² / (‖μ₁‖ ‖μ₂‖) of the mean gradients of two mini-batches, the paper's term.

    Cheaper than `group` where there are many positions, but of means: it cannot normalize each sample. If a
    mean is zero, the term is 0.

    Args:
        model: The model that is trained, or a Network, which keeps its own readout and parameters.
        a: Inputs of one mini-batch.
        b: Inputs of the other, best as many.
        labels_a: Labels of a, for readouts that use them.
        labels_b: Labels of b.
        form: "ratio", as above, or "cosine": 1 − cos(μ₁, μ₂), from 0 to 2.
        readout: The outputs to compare; None: all up to ten, else eight random combinations.
        parameters: Names or patterns of parameters whose gradients are compared; None: all that require grad.
        weight: Factor of the term.

    Returns:
        A scalar tensor: 0 if both means are the same.

    Raises:
        ValueError: A mean gradient is not finite.

    Example:
        >>> import torch, likewise as lw
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> x = torch.randn(8, 3)
        >>> lw.losses.two_batches(model, x[:4], x[4:], form="cosine", weight=0.1).backward()

    """
    net = build_network(model, readout, parameters)
    return _two_batches(net, a, b, labels_a, labels_b, form, weight).term


@full_precision
def two_batches_with_outputs(
    model: nn.Module | Network,
    a: Inputs,
    b: Inputs,
    labels_a: Tensor | None = None,
    labels_b: Tensor | None = None,
    *,
    form: Literal["ratio", "cosine"] = "ratio",
    readout: Readout | None = None,
    parameters: ParameterNames = None,
    weight: float = 1,
) -> TermAndOutputs:
    """Return the term of `two_batches` with what the model returned for a main loss from the same forward passes.

    Args:
        model: As in `two_batches`, like all other arguments.
        a: Inputs of one mini-batch.
        b: Inputs of the other.
        labels_a: Labels of a, for readouts that use them.
        labels_b: Labels of b.
        form: "ratio" or "cosine".
        readout: The outputs to compare.
        parameters: The parameters whose gradients are compared.
        weight: Factor of the term.

    Returns:
        The scalar term, and the pair of the model's outputs for a and for b, with their graph.

    Example:
        >>> import torch, likewise as lw
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        >>> x, y = torch.randn(8, 3), torch.arange(8) % 2
        >>> term, (of_a, of_b) = lw.losses.two_batches_with_outputs(model, x[:4], x[4:])
        >>> (torch.nn.functional.cross_entropy(torch.cat([of_a, of_b]), y) + 0.01 * term).backward()

    """
    net = build_network(model, readout, parameters, shares_forward=True)
    return _two_batches(net, a, b, labels_a, labels_b, form, weight)


@full_precision
def along(
    model: nn.Module | Network,
    x: Tensor,
    direction: Tensor | Callable[[Tensor], Tensor],
    labels: Tensor | None = None,
    *,
    readout: Readout | None = None,
    parameters: ParameterNames = None,
    weight: float = 1,
) -> Tensor:
    """Return the mean of ‖∂ₓ∇f(x)·e(x)‖²: how fast a sample's gradient turns as it moves along e.

    The limit of ‖∇f(x + εe) − ∇f(x)‖² / ε². Costs two more backward passes than `group`.

    Args:
        model: The model that is trained, or a Network, which keeps its own readout and parameters.
        x: Inputs, one tensor of floating numbers.
        direction: e, of the shape of x, or a function of x such as those of `losses.directions`.
        labels: Labels of the samples, for readouts that use them.
        readout: The outputs to differentiate; None: all up to ten, else eight random combinations.
        parameters: Names or patterns of parameters whose gradient is used; None: all that require grad.
        weight: Factor of the term.

    Returns:
        A scalar tensor, not negative where the weight is not.

    Example:
        >>> import torch, likewise as lw
        >>> net = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), net)
        >>> lw.losses.along(model, torch.rand(4, 1, 4, 4), lw.losses.directions.rotation).backward()

    """
    net, weight = build_network(model, readout, parameters), check_number("weight", weight)
    if isinstance(x, Tensor):
        refuse_unreadable("x", x)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(
            f"x must be one tensor of floating numbers, which `along` moves: found {describe(x)}."
        )
    labels = check_labels(labels, count_samples(x))
    x = net.to_device(x)
    if callable(direction) and not isinstance(direction, type):
        direction = apply_transform(x, direction)
    tangent = net.to_device(check_tensor("direction", direction, finite=False))
    if tangent.shape != x.shape:
        raise ValueError(
            f"A direction has the shape of the inputs, {tuple(x.shape)}: found {tuple(tangent.shape)}."
        )
    rates = gradient_tangents(net, Samples(x, labels, sample_numbers(x)), tangent)
    if not is_recording() and not rates.detach().isfinite().all():
        wrong = (~rates.detach().isfinite()).nonzero()[:5, 0].tolist()
        raise ValueError(
            f"The gradients of samples {wrong} do not change at a finite rate along the direction: look for "
            "NaN or infinity in their inputs, in the direction or in the weights, and leave them out."
        )
    return weight * rates.mean().to(net.dtype)


@full_precision
def density(
    model: nn.Module | Network,
    x: Inputs,
    total: Tensor | RunningTotal,
    labels: Tensor | None = None,
    *,
    q: float,
    samples: int | None = None,
    readout: Readout | None = None,
    parameters: ParameterNames = None,
    weight: float = 1,
) -> Tensor:
    """Return Σ (N_S(xᵢ)/N − q)² over the batch: asks that each sample be like a share q of the data.

    Args:
        model: The model that is trained, or a Network, which keeps its own readout and parameters.
        x: Inputs, a tensor or a tuple or dict of tensors, samples first.
        total: (d, p) Σ K(x',x')^-½ J(x') over the data, without a gradient of its own; or a RunningTotal, which
            estimates it and is updated with this batch.
        labels: Labels of the samples, for readouts that use them.
        q: The share of the data that each sample should be like.
        samples: The number of samples in `total`; not needed with a RunningTotal.
        readout: The outputs to compare; None: all up to ten, else eight random combinations.
        parameters: Names or patterns of parameters whose gradients are compared; None: all that require grad.
        weight: Factor of the term.

    Returns:
        A scalar tensor.

    Example:
        >>> import torch, likewise as lw
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> total = lw.losses.RunningTotal()
        >>> lw.losses.density(model, torch.randn(8, 3), total, q=0.4).backward()

    """
    q, weight = check_number("q", q), check_number("weight", weight)
    net = build_network(model, readout, parameters)
    p = sum(net.numels.values())
    mean = None if isinstance(total, RunningTotal) else _mean_of_total(total, samples, p)
    gradients = batch_gradients(net, x, labels)
    if isinstance(total, RunningTotal):
        counted = len(gradients.self_kernel) if gradients.finite is None else int(gradients.finite.sum())
        mean = total.update(gradients.total(net.numels), counted)
    share, expected = cast(Tensor, mean), (gradients.d, p)
    if share.shape != expected:
        raise ValueError(f"total must be (d, p) = {expected}, found {tuple(share.shape)}.")
    products = gradients.along(share.to(gradients.self_kernel), net.numels)
    shares = products.diagonal(dim1=1, dim2=2).sum(1) / gradients.d  # N_S / N
    shares = shares if gradients.finite is None else shares[gradients.finite]
    return weight * (shares - q).square().sum().to(gradients.dtype)


def _group(
    net: Network, x: Inputs, groups: Any, labels: Tensor | None, weight: float, ids: Tensor | None
) -> TermAndOutputs:
    weight, n = check_number("weight", weight), count_samples(x)
    groups = check_groups(groups, n)
    ids = None if ids is None else check_per_sample("ids", ids, n)
    gradients = batch_gradients(net, x, labels, ids)
    similarity = similarity_inside(gradients, groups)
    return TermAndOutputs(weight * (1 - similarity).to(gradients.dtype), gradients.returned)


def _two_batches(
    net: Network,
    a: Inputs,
    b: Inputs,
    labels_a: Tensor | None,
    labels_b: Tensor | None,
    form: Literal["ratio", "cosine"],
    weight: float,
) -> TermAndOutputs:
    check_choice("form", form, ("ratio", "cosine"))
    weight = check_number("weight", weight)
    n_a, n_b = count_samples(a, "a"), count_samples(b, "b")
    labels_a = check_labels(labels_a, n_a, "labels_a")
    labels_b = check_labels(labels_b, n_b, "labels_b")
    with net.evaluation_mode(), torch.enable_grad():
        if not is_recording():
            refuse_dependent_samples_once(net, Samples(plain(a), labels_a, sample_numbers(a)))
        first, outputs_a = _mean_gradient(net, a, labels_a)
        second, outputs_b = _mean_gradient(net, b, labels_b)
    finite = first.detach().isfinite().all() & second.detach().isfinite().all()
    if not is_recording() and not finite:
        wrong = {"a": find_nonfinite(a), "b": find_nonfinite(b)}
        which = ", ".join(f"{name}{places}" for name, places in wrong.items() if places) or "none"
        raise ValueError(
            "A mean gradient is not finite: leave out samples with NaN or infinity in their inputs "
            f"({which}), check the weights, or use `group`, which leaves out such samples."
        )
    squares = first.square().sum() * second.square().sum()
    alive = (squares.detach() > 0) & squares.detach().isfinite()
    scale = torch.where(alive, squares, 1).sqrt()
    if form == "ratio":
        term = (n_a + n_b) / 2 * (first - second).square().sum() / scale
    else:
        term = 1 - (first * second).sum() / scale
    return TermAndOutputs(weight * torch.where(alive, term, 0).to(net.dtype), (outputs_a, outputs_b))


def _mean_gradient(net: Network, x: Inputs, labels: Tensor | None) -> tuple[Tensor, Any]:
    """Return the mean over a batch of each output's gradient, joined, and what the model returned."""
    parameters, ids = live_parameters(net), sample_numbers(x)
    with annotate_errors(net, x, labels, ids):
        with FunctionSubstitution(SECOND_ORDER):
            returned = net.call_model(parameters, x)
        outputs = net.select_outputs(returned, x, labels, ids)
    if not outputs.requires_grad:
        raise ValueError(
            "The outputs depend on none of the chosen parameters, so there is nothing to compare."
        )
    values, parts = [parameters[name] for name in net.names], []
    for output in outputs.mean(0).unbind():
        gradients = torch.autograd.grad(output, values, create_graph=True, allow_unused=True)
        parts += [
            torch.zeros_like(v).flatten() if g is None else g.flatten()
            for g, v in zip(gradients, values, strict=True)
        ]
    joined = torch.cat(parts)
    return joined.to(accumulation_dtype(joined)), returned


def _mean_of_total(total: Any, samples: Any, p: int) -> Tensor:
    """Return the total over the samples, (d, p), divided by their number."""
    tensor = check_tensor("total", total, advice="(d, p) with samples=N, or a RunningTotal")
    if samples is None:
        raise ValueError("The number of samples in total is missing: pass samples=N, or a RunningTotal.")
    if tensor.numel() == 0 or tensor.numel() % p:
        raise ValueError(f"total must be (d, p) with p = {p}, found {tuple(tensor.shape)}.")
    return tensor.reshape(-1, p) / check_integer("samples", samples, 1, 2**62)


def similarity_inside(found: DifferentiableGradients, groups: Tensor | None) -> Tensor:
    """Return the mean over groups of the mean k^C of different samples in each; 0 without a pair."""
    n, device = len(found.self_kernel), found.self_kernel.device
    if groups is None and not is_recording():
        return _mean_similarity(found, _groups_with_pairs(found, [torch.arange(n, device=device)]))
    groups = torch.zeros(n, device=device) if groups is None else torch.as_tensor(groups)
    if groups.shape != (n,):
        raise ValueError(f"groups must be one number for each of {n} samples, found {tuple(groups.shape)}.")
    groups = groups.to(device)
    if is_recording():
        return _recorded_similarity(found, groups)
    return _mean_similarity(found, _groups_with_pairs(found, _places(groups)))


def _places(groups: Tensor) -> list[Tensor]:
    """Return the positions of the samples of each group."""
    counts = groups.unique(return_counts=True)[1].tolist()
    return list(groups.argsort(stable=True).split(counts))


def _groups_with_pairs(found: DifferentiableGradients, groups: list[Tensor]) -> list[Tensor]:
    """Return the groups that have a pair, small ones first, without samples that are left out."""
    if found.finite is not None:
        groups = [places[found.finite[places]] for places in groups]
    return sorted((places for places in groups if len(places) > 1), key=len)


def _mean_similarity(found: DifferentiableGradients, groups: list[Tensor]) -> Tensor:
    """Return the mean over groups of the mean k^C of different samples in each."""
    if not groups:
        return found.self_kernel.sum() * 0
    ranks = found.root.rank
    own = torch.stack([ranks[at].sum() for at in groups])
    pairs = torch.tensor([len(at) * (len(at) - 1) for at in groups], device=own.device)
    return ((found.sums(groups) - own) / found.d / pairs).mean()


def _recorded_similarity(found: DifferentiableGradients, groups: Tensor) -> Tensor:
    """Return the same by operations that do not depend on how many groups there are, nor on their sizes."""
    same = groups[:, None] == groups
    sizes = same.sum(1)
    leads = ~same.tril(-1).any(1)  # the first sample of each group stands for it
    sizes, order = torch.where(leads, sizes, 0).sort(descending=True, stable=True)
    most = max(1, min(len(groups) // 2, most_groups()))  # no more than half as many groups have a pair
    members, sizes = same[order[:most]].to(found.self_kernel), sizes[:most].to(found.self_kernel)
    several = sizes > 1
    weights = several / (sizes * (sizes - 1)).clamp(min=1) / several.sum().clamp(min=1)
    own = members @ found.root.rank.to(found.self_kernel)
    return (found.weighted_sums(members, weights) - (weights * own).sum()) / found.d
