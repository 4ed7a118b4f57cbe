"""Differentiable gradients of a batch, for training terms.

The model is called on its own parameters, and the inputs and output gradients of its operations stay in the graph.
Inner products, norms and sums of per-sample gradients follow from those factors; a dense gradient is formed only
where that is cheaper.

A tangent ∂ₓ J(x) · e takes two backward passes: of Σ ⟨T, u⟩ with respect to x, which is linear in u, and of its product
with e with respect to u. This works for everything that can be differentiated twice, also where forward mode is
missing or wrong.
"""

import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from likewise.data import Samples
from likewise.engines.double_backward import SECOND_ORDER, THIRD_ORDER, FunctionSubstitution, Substitutes
from likewise.engines.factors import (
    DenseGradient,
    EmbeddingGradient,
    FactoredGradient,
    ParameterGradient,
    StructuredGradient,
    merge_small,
)
from likewise.engines.gradient_batch import GradientBatch, compute_gradients
from likewise.engines.memory import is_out_of_memory
from likewise.engines.tracer import TRACE_FUNCTIONS, Trace, UntraceableError, repeat_samples
from likewise.engines.validation import check_independent_samples, find_fault
from likewise.linalg import Power, inverse_root, rank_floor
from likewise.model import Network, Parameters
from likewise.torch_state import full_float32, is_recording

_independent: WeakKeyDictionary[nn.Module, set[Any]] = WeakKeyDictionary()
_traces: WeakKeyDictionary[nn.Module, dict[Any, Trace | None]] = WeakKeyDictionary()


@dataclass(frozen=True)
class DifferentiableGradients:
    """J(x) of a batch, in parts, differentiable; and S(x) = K(x, x)^-½ J(x)."""

    chunk: GradientBatch
    parts: list[ParameterGradient]  # by parameter, small ones concatenated
    self_kernel: Tensor  # (n, d, d) K(x, x), float64
    dtype: torch.dtype  # of the model
    finite: Tensor | None = None  # (n,) which samples have a finite gradient, if not all do

    @cached_property
    def root(self) -> Power:
        """K(x, x)^-½."""
        if is_recording() and self.self_kernel.device.type == "cuda" and self.d > 1:
            raise ValueError(
                f"The term of {self.d} outputs needs eigenvectors, which a GPU cannot record: take a readout "
                "of one output, such as label_against_rest, or the term as it is."
            )
        return inverse_root(self.self_kernel, rank_floor(self.dtype))

    @property
    def d(self) -> int:
        """The number of outputs."""
        return self.chunk.d

    @property
    def returned(self) -> Any:
        """What the model returned, with its graph."""
        return self.chunk.returned

    def pairs(self) -> Tensor:
        """Return tr S(x) S(x')ᵀ / d of the first half of the batch with the second, (n / 2,)."""
        n = len(self.self_kernel) // 2
        roots = self.root.matrix
        blocks = torch.zeros_like(roots[:n])
        for gradient in self.parts:
            blocks = blocks + gradient.paired_gram(n)
        return torch.einsum("nde,nef,nfd->n", roots[:n], blocks, roots[n:]) / self.d

    def sums(self, groups: list[Tensor]) -> Tensor:
        """Return ‖Σ S(x)‖² over the samples of each group, (groups,), given their places, small groups first."""
        return group_sums(self.parts, self.root.matrix, groups)

    def weighted_sums(self, members: Tensor, weights: Tensor) -> Tensor:
        """Return Σ_g w_g ‖Σ S(x)‖² over groups g, given the membership matrix (groups, n) and weights (groups,)."""
        return weighted_sums(self.parts, self.root.matrix, members, weights)

    def along(self, directions: Tensor, numels: dict[str, int]) -> Tensor:
        """Return S(x) u for each of the directions u (c, p), (n, d, c)."""
        named = dict(zip(numels, directions.split(list(numels.values()), dim=1), strict=True))
        moved = sum(
            gradient.jvp(named[name].to(gradient.dtype)).to(self.self_kernel)
            for name, gradient in self.chunk.by_parameter.items()
        )
        return self.root.matrix @ moved

    def total(self, numels: dict[str, int]) -> Tensor:
        """Return Σ S(x), (d, p), in float64, without a graph."""
        weights, gradients = self.root.matrix.detach(), self.chunk.by_parameter
        parts = [
            gradients[name].vjp(weights.to(gradients[name].dtype)).detach().to(weights)
            if name in gradients
            else weights.new_zeros(self.d, numel)
            for name, numel in numels.items()
        ]
        return torch.cat(parts, 1)


def differentiable_gradients(
    net: Network, samples: Samples, substitutes: Substitutes = SECOND_ORDER
) -> DifferentiableGradients:
    """Return the gradients of a batch, differentiable in the model's own parameters.

    The model is called in evaluation mode and in full precision; a sample whose gradient is not finite
    is left out: its gradient is zero.
    """
    finite = None if is_recording() else _finite_inputs(samples)
    with net.evaluation_mode(), torch.enable_grad():
        if finite is not None and not finite.all():
            return _leave_out(net, samples, finite, substitutes)
        chunk = _compute_gradients(net, samples, substitutes)
        parts = [block.gradient for block in merge_small(chunk.by_parameter)]
        if not parts:
            raise ValueError(
                "The outputs depend on none of the chosen parameters: there is nothing to compare."
            )
        self_kernel = parts[0].self_gram()
        for gradient in parts[1:]:
            self_kernel = self_kernel + gradient.self_gram()
        if not is_recording():
            finite = self_kernel.detach().flatten(1).sum(1).isfinite()
            if not finite.all():
                return _leave_out(net, samples, finite, substitutes)
        return DifferentiableGradients(chunk, parts, self_kernel, net.dtype)


def live_parameters(net: Network) -> Parameters:
    """Return the model's own parameters; selected ones that are frozen are replaced by new leaves."""
    every = dict(net.model.named_parameters())
    frozen = {k: every[k].detach().requires_grad_() for k in net.names if not every[k].requires_grad}
    return {**every, **frozen}


def refuse_dependent_samples_once(net: Network, samples: Samples) -> None:
    """Raise if outputs are random or depend on the batch; checked once for each model and batch shape."""
    key = (_readout_key(net.readout), _signature(samples))
    known = _independent.setdefault(net.model, set())
    if key not in known:
        check_independent_samples(net, samples[:3])
        known.add(key)


def _finite_inputs(samples: Samples) -> Tensor:
    """Return which samples have inputs without NaN and infinity, (n,) booleans."""
    finite = torch.ones(len(samples), dtype=torch.bool)
    for leaf in tree_leaves(samples.inputs):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            finite &= (
                leaf.detach().flatten(1).isfinite().all(1).cpu() if leaf.dim() > 1 else leaf.isfinite().cpu()
            )
    return finite


def _leave_out(
    net: Network, samples: Samples, finite: Tensor, substitutes: Substitutes
) -> DifferentiableGradients:
    """Return the gradients of the finite samples; those of the others are zero and flagged in `finite`."""
    wrong = samples.ids.cpu()[~finite.cpu()].tolist()
    shown = f"{', '.join(map(str, wrong[:10]))}{', ...' if len(wrong) > 10 else ''}"
    warnings.warn(
        f"The gradients of {len(wrong)} of {len(finite)} samples are not finite (ids {shown}; overflow, or "
        "NaN in an input): the training term leaves them out.",
        stacklevel=4,
    )
    places = finite.nonzero()[:, 0].cpu()
    if len(places) == 0:
        raise ValueError(
            "No sample of the batch has a finite gradient: look for NaN in the inputs or weights."
        )
    labels = None if samples.labels is None else samples.labels[places]
    leaves, spec = tree_flatten(samples.inputs)
    rest = Samples(tree_unflatten([leaf[places] for leaf in leaves], spec), labels, samples.ids[places])
    finite_part = differentiable_gradients(net, rest, substitutes)
    n, where = len(samples), places.to(finite_part.self_kernel.device)

    def spread(value: Tensor) -> Tensor:
        return value.new_zeros(n, *value.shape[1:]).index_copy(0, where, value)

    rows: dict[str, ParameterGradient] = {
        name: DenseGradient(spread(gradient.rows()))
        for name, gradient in finite_part.chunk.by_parameter.items()
    }
    chunk = GradientBatch(samples, finite_part.d, rows, net.call_model(live_parameters(net), samples.inputs))
    known = finite.to(where.device)
    return DifferentiableGradients(
        chunk,
        [block.gradient for block in merge_small(rows)],
        spread(finite_part.self_kernel),
        net.dtype,
        known,
    )


def _compute_gradients(net: Network, samples: Samples, substitutes: Substitutes) -> GradientBatch:
    """Return the batch's gradients from traced operations, or from plain autograd if it cannot be traced."""
    parameters = live_parameters(net)
    if len(samples) == 1:  # PyTorch is wrong about some batches of one
        alone = _compute_gradients(net, repeat_samples(samples, 2), substitutes).part(slice(0, 1))
        return replace(alone, returned=net.call_model(parameters, samples.inputs))
    key = (_readout_key(net.readout), net.names, _signature(samples))
    known = _traces.setdefault(net.model, {})
    if key not in known:
        while len(known) >= 16:  # the oldest goes
            del known[next(iter(known))]
        known[key] = _checked_trace(net, samples)
    for _ in range(2):
        trace = known[key]
        if trace is None:
            break
        try:
            return compute_gradients(net, trace, samples, parameters, substitutes)
        except UntraceableError:  # it branches on its data: perhaps another trace fits
            known[key] = _checked_trace(net, samples)
    with FunctionSubstitution(substitutes):
        return _one_by_one(net, samples, parameters)


def _readout_key(readout: Any) -> Any:
    """Return a key for a readout that keeps neither it nor a model in its closure alive."""
    return getattr(readout, "__code__", None) or getattr(readout, "__func__", repr(readout))


def _signature(samples: Samples) -> Any:
    leaves, spec = tree_flatten((samples.inputs, samples.labels))
    shapes = [(tuple(leaf.shape[1:]), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return str(spec), tuple(shapes)


def _checked_trace(net: Network, samples: Samples) -> Trace | None:
    """Return a trace whose gradients agree with autograd, else None, with a warning."""
    check_independent_samples(net, samples[:3])
    with torch.no_grad(), full_float32():
        for trace_function in TRACE_FUNCTIONS:
            try:
                trace = trace_function(net, samples[:3])
                fault = find_fault(net, samples[:3], trace_function=trace_function)
                if fault is None:
                    return trace
                reason, remedy = fault
            except UntraceableError as problem:
                reason, remedy = str(problem), ""
            except Exception as error:  # plain autograd handles every model that cannot be followed
                if is_out_of_memory(error):
                    raise
                reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
                remedy = ""
    warnings.warn(
        f"{type(net.model).__name__} cannot be followed by its operations ({reason}): the training term "
        f"takes each sample's gradient on its own, which is exact but slow. {remedy}",
        stacklevel=2,
    )
    return None


def _one_by_one(net: Network, samples: Samples, parameters: Parameters) -> GradientBatch:
    rows = []
    for sample in samples.split(1):
        pair = repeat_samples(sample, 2)
        output = net.function(parameters, pair.inputs, pair.labels, pair.ids)
        values = [parameters[name] for name in net.names]
        gradients = [
            torch.autograd.grad(one, values, create_graph=True, allow_unused=True)
            for one in output[0].unbind()
        ]
        filled = [
            torch.cat(
                [
                    torch.zeros_like(v).flatten() if g is None else g.flatten()
                    for g, v in zip(one, values, strict=True)
                ]
            )
            for one in gradients
        ]
        rows.append(torch.stack(filled))
    parts = torch.stack(rows).split(list(net.numels.values()), dim=2)
    named: dict[str, ParameterGradient] = {
        k: DenseGradient(v) for k, v in zip(net.numels, parts, strict=True)
    }
    return GradientBatch(samples, rows[0].shape[0], named, net.call_model(parameters, samples.inputs))


def group_sums(parts: list[ParameterGradient], roots: Tensor, groups: list[Tensor]) -> Tensor:
    """Return ‖Σ S(x)‖² of each group, (groups,), given roots K(x, x)^-½ and places, small groups first."""
    sizes = sorted({len(at) for at in groups})
    stacked = [torch.stack([at for at in groups if len(at) == size]) for size in sizes]
    which = torch.repeat_interleave(torch.arange(len(groups)), torch.tensor([len(at) for at in groups]))
    places = torch.cat(groups)
    sums = []
    for gradient in parts:
        if isinstance(gradient, StructuredGradient) and not gradient.is_dense:
            sums.append(torch.cat([_sums_of_factors(gradient, roots, at) for at in stacked]))
        else:
            sums.append(_sums_of_rows(gradient.rows(), roots, places, which, len(groups)))
    return torch.stack(sums).sum(0)


def weighted_sums(parts: list[ParameterGradient], roots: Tensor, members: Tensor, weights: Tensor) -> Tensor:
    """Return Σ_g w_g ‖Σ S(x)‖² by operations whose shapes do not depend on the groups.

    Args:
        parts: The gradients by parameter.
        roots: (n, d, d) K(x, x)^-½.
        members: (groups, n) 1 where a sample is in a group, else 0.
        weights: (groups,) w_g.

    """
    pairs = members.T @ (weights[:, None] * members)  # the weight of each pair of samples
    sums = []
    for gradient in parts:
        if (
            isinstance(gradient, FactoredGradient | EmbeddingGradient)
            and not gradient.is_dense
            and _pairs_are_cheaper(gradient, len(members))
        ):
            sums.append((pairs * _pair_traces(gradient, roots)).sum())
        else:
            rows = gradient.rows()
            summing = torch.einsum("gn,nde->gdne", members, roots).to(rows.dtype)
            total = summing.flatten(2).flatten(0, 1) @ rows.flatten(0, 1)
            sums.append((total.square().sum(1).to(roots).view(len(members), -1).sum(1) * weights).sum())
    return torch.stack(sums).sum()


def _pairs_are_cheaper(gradient: FactoredGradient | EmbeddingGradient, groups: int) -> bool:
    """Whether products of all pairs of positions cost less than dense gradients, summed by group."""
    n, d, t, o = gradient.deltas.shape
    i = gradient.inputs.shape[2] if isinstance(gradient, FactoredGradient) else gradient.size
    return (n * t) ** 2 * (d * o + (i if isinstance(gradient, FactoredGradient) else 1)) <= n * d * o * i * (
        t + groups
    )


def _pair_traces(gradient: FactoredGradient | EmbeddingGradient, roots: Tensor) -> Tensor:
    """Return tr S(x) S(x')ᵀ in one parameter of all pairs of samples, (n, n)."""
    n, d, t, o = gradient.deltas.shape
    whitened = gradient.whiten(roots)
    deltas = whitened.deltas
    if isinstance(whitened, FactoredGradient):
        flat = whitened.inputs.flatten(0, 1)
        same = flat @ flat.T
    else:
        index = whitened.indices.flatten()
        same = ((index[:, None] == index) & (index >= 0)).to(deltas)
    by_output = deltas.transpose(0, 1).reshape(d, n * t, o)
    products = (by_output @ by_output.mT).sum(0) * same
    return products.view(n, t, n, t).sum((1, 3), dtype=roots.dtype)


def _sums_of_rows(rows: Tensor, roots: Tensor, places: Tensor, which: Tensor, groups: int) -> Tensor:
    """Return ‖Σ S‖² of each group from explicit rows, (groups,); a place's sample is of group `which`."""
    n, d = roots.shape[:2]
    which = which.to(rows.device)
    if groups <= 16:  # one product; of more groups, most of it would be zeros
        members = roots.new_zeros(groups, n)
        members[which, places] = 1
        weights = torch.einsum("gn,nde->ndge", members, roots).to(rows.dtype)
        total = weights.flatten(0, 1).flatten(1).T @ rows.flatten(0, 1)
        return total.view(groups, -1).square().sum(1).to(roots)
    weighted = roots.to(rows.dtype) @ rows if d > 1 else roots.to(rows.dtype) * rows
    flat = weighted.flatten(1)
    total = flat.new_zeros(groups, flat.shape[1]).index_add(0, which, flat[places])
    return total.square().sum(1).to(roots)


def _sums_of_factors(gradient: StructuredGradient, roots: Tensor, at: Tensor) -> Tensor:
    """Return ‖Σ S‖² of groups of one size, (groups,): a group has the positions of all its samples."""
    sums = gradient.whiten(roots).group(at)
    if sums.rows_are_cheaper:
        return sums.rows().flatten(1).square().sum(1).to(roots)
    return sums.self_gram().diagonal(dim1=1, dim2=2).sum(1)


def gradient_tangents(net: Network, samples: Samples, direction: Tensor) -> Tensor:
    """Return ‖∂ₓ J(x) · e(x)‖² of each sample, (n,), differentiable in the model's parameters.

    Samples without a finite gradient are left out.
    """
    with torch.inference_mode(False):
        return _squared_norms(net, samples, direction.clone())


def _squared_norms(net: Network, samples: Samples, direction: Tensor) -> Tensor:
    x = samples.inputs.detach().clone().requires_grad_()
    base = differentiable_gradients(net, Samples(x, samples.labels, samples.ids), THIRD_ORDER)
    gradients = list(base.chunk.by_parameter.values())
    tensors = [tensor for gradient in gradients for tensor in gradient.tensors]
    derivatives = iter(_tangents(tensors, x, direction))
    tangents = [gradient.tangent(derivatives) for gradient in gradients]
    norms = [gradient.self_gram().diagonal(dim1=1, dim2=2).sum(1) for gradient in tangents]
    total = torch.stack(norms).sum(0)
    return total if base.finite is None else total[base.finite]


def _tangents(tensors: list[Tensor], x: Tensor, direction: Tensor) -> list[Tensor]:
    """Return the derivative of each tensor along the direction in x."""
    depend = [tensor for tensor in tensors if tensor.requires_grad]
    dummies = [torch.zeros_like(tensor, requires_grad=True) for tensor in depend]
    zeros = {id(tensor): torch.zeros_like(tensor) for tensor in tensors}
    with torch.enable_grad():
        total = torch.stack([(t * u).sum() for t, u in zip(depend, dummies, strict=True)]).sum()
        (back,) = torch.autograd.grad(total, x, create_graph=True, allow_unused=True)
        if back is None or not back.requires_grad:
            return [zeros[id(tensor)] for tensor in tensors]
        derivatives = torch.autograd.grad(
            (back * direction).sum(), dummies, create_graph=True, allow_unused=True
        )
    known = {id(t): g for t, g in zip(depend, derivatives, strict=True) if g is not None}
    return [known.get(id(tensor), zeros[id(tensor)]) for tensor in tensors]
