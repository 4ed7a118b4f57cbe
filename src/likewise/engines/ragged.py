"""Gradients of batches whose samples the model reorders or regroups, row by row.

Slower than a trace, by the backward passes that assign rows to samples (membership.py), but valid for any batch:
tokens routed to experts, packed sequences, a loop over samples. Nothing is assumed about the order of rows.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves

from likewise.data import Samples
from likewise.engines.double_backward import Substitutes
from likewise.engines.factors import (
    DenseGradient,
    EmbeddingGradient,
    FactoredGradient,
    ParameterGradient,
    SlicedGradient,
    SubsetGradient,
    sum_gradients,
)
from likewise.engines.membership import Members, find_members, partition_by
from likewise.engines.rules import (
    Call,
    ParameterGradients,
    chain,
    gradients_by_mask,
    gradients_by_rule,
    output_gradients,
    parameter_gradients,
)
from likewise.engines.tracer import (
    Derived,
    Layout,
    Operation,
    OperationTracer,
    RowTrace,
    Step,
    UntraceableError,
)
from likewise.model import Network, Parameters
from likewise.torch_state import is_recording


class RowGradients(NamedTuple):
    """The result of one pass."""

    outputs: Tensor  # (n, d)
    by_parameter: dict[str, ParameterGradient]
    returned: Any  # by the model


class Use(NamedTuple):
    """The gradients of one use of a parameter, for some samples of the batch."""

    samples: Tensor  # their places
    gradient: ParameterGradient


def compute_gradients_by_rows(
    net: Network,
    trace: RowTrace,
    samples: Samples,
    live: Parameters | None = None,
    substitutes: Substitutes | None = None,
) -> RowGradients:
    """Return the gradients of a batch by parameter.

    Args:
        net: The network; call this inside `net.evaluation_mode`.
        trace: Operations that were compared with autograd before; a pass with other operations is compared too.
        samples: The batch.
        live: The model's own parameters; see `compute_gradients`.
        substitutes: See `compute_gradients`.

    """
    if is_recording():
        raise UntraceableError("which rows belong to which sample cannot be found while a GPU records")
    tracer = RowTracer(net, live, substitutes)
    tracer.run(net, samples)
    outputs, n = tracer.outputs, len(samples)
    if not outputs.requires_grad:
        return RowGradients(outputs, {}, tracer.returned)
    steps = _steps_by_sample(tracer.steps, outputs)
    uses: dict[str, list[Use]] = {}
    # Of all steps: a backward to some of those behind a write in place fails inside PyTorch.
    deltas = output_gradients(outputs, [s.step for s in tracer.steps], live is not None, keep_graph=True)
    deltas_by_place = dict(zip((step.place for step in tracer.steps), deltas, strict=True))
    for step in steps:
        step.step.refuse_overwritten()
        some = deltas_by_place[step.place]
        for name, use in _uses(
            step, some, tracer.parameters, substitutes if live else None, live is not None
        ):
            uses.setdefault(name, []).append(use)
    by_parameter = {name: _merge_uses(uses[name], n) for name in net.names if name in uses}
    if live:
        by_parameter = {
            k: DenseGradient(v.rows()) if isinstance(v, SlicedGradient | SubsetGradient) else v
            for k, v in by_parameter.items()
        }
    kinds = {(s.step.operation.function, *sorted(map(str, s.step.operation.sources.values()))) for s in steps}
    if not kinds or not kinds <= trace.checked:
        _refuse_wrong_sums(outputs, by_parameter, {name: tracer.parameters[name] for name in net.names})
        trace.checked.update(kinds)
    return RowGradients(outputs, by_parameter, tracer.returned)


@dataclass(frozen=True)
class TrackedOperation:
    """An operation on parameters, and the samples of its rows."""

    place: int
    step: Step
    is_shared: bool  # whether its outputs may serve all samples, as a part of a weight does
    members: dict[int, Members]  # by output


class RowTracer(OperationTracer):
    """Records operations on parameters, and which of them may depend on parameters alone."""

    def __init__(self, net: Network, parameters: Parameters | None, substitutes: Substitutes | None) -> None:
        super().__init__(net, None, parameters)
        self.substitutes = substitutes or {}
        self.steps = list[TrackedOperation]()
        self._data: dict[int, weakref.ref[Tensor]] = {}  # what depends on the inputs

    def run(self, net: Network, samples: Samples) -> "RowTracer":
        """Return itself, after a call of the network on these samples."""
        hook = net.model.register_forward_pre_hook(
            lambda _, args, kwargs: self._mark((args, kwargs)), with_kwargs=True
        )
        try:
            super().run(net, samples)
        finally:
            hook.remove()
        return self

    def on_operation(self, place: int, operation: Operation) -> None:
        """Record the operation."""
        edges = {i: get_gradient_edge(out) for i, out in enumerate(operation.outputs) if out.requires_grad}
        step = Step(operation, _NO_LAYOUT, edges, [])
        step = replace(step, versions=step.present_versions())
        self.steps.append(TrackedOperation(place, step, self.is_derived(place, operation), {}))

    def is_derived(self, place: int, operation: Operation) -> bool:
        """Whether outputs may depend on parameters alone; a selection by the inputs counts."""
        data = [
            i for i, leaf in enumerate(operation.leaves) if isinstance(leaf, Tensor) and self._is_data(leaf)
        ]
        if operation.function in SELECTIONS:
            return all(i in operation.sources or not operation.leaves[i].is_floating_point() for i in data)
        return not data

    def _derive(self, place: int, operation: Operation, written: list[Tensor]) -> None:
        """Mark outputs as derived, and as data where the inputs selected them."""
        super()._derive(place, operation, written)
        self.on_result(operation.function, operation.leaves, [*operation.outputs, *written])

    def on_result(self, func: Any, leaves: Any, results: Any) -> None:
        """Mark what an operation on data returns, or writes to, as data."""
        name = getattr(func, "__name__", "")
        tensors = [leaf for leaf in tree_leaves(leaves) if isinstance(leaf, Tensor)]
        if name.startswith("new_") or not any(map(self._is_data, tensors)):
            return
        self._mark(results)
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            target = tensors[0]
            self._mark([target] if target._base is None else [target, target._base])

    def _mark(self, values: Any) -> None:
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor):
                self._data[id(leaf)] = weakref.ref(leaf)

    def _is_data(self, tensor: Tensor) -> bool:
        for one in (tensor, tensor._base):
            reference = None if one is None else self._data.get(id(one))
            if reference is not None and reference() is one:
                return True
        return False


def _steps_by_sample(steps: list[TrackedOperation], outputs: Tensor) -> list[TrackedOperation]:
    """Return the operations whose rows each belong to one sample; gradients of others are backpropagated."""
    edges = [edge for step in steps for edge in step.step.edges.values()]
    dtypes = [step.step.operation.outputs[i].dtype for step in steps for i in step.step.edges]
    membership = iter(find_members(outputs, edges, dtypes) if edges else [])
    separate, resolved = [], set[int]()
    for step in steps:
        mine = {i: next(membership) for i in step.step.edges}
        known = {i: value for i, value in mine.items() if value != 0}
        members = {i: value for i, value in known.items() if isinstance(value, Members)}
        if not known:
            continue
        is_shared = len(members) < len(known)
        if step.is_shared and (is_shared or len(_samples_of(members.values())) < 2):
            continue
        if is_shared:
            sources = ", ".join(sorted(set(map(str, step.step.operation.sources.values()))))
            raise UntraceableError(
                f"what {step.step.operation.name} returns of {sources} serves several samples at once"
            )
        resolved.add(step.place)
        separate.append(replace(step, step=_drop_resolved(step.step, resolved), members=members))
    return [step for step in separate if step.step.operation.sources]


def _samples_of(members: Iterable[Members]) -> Tensor:
    owners = torch.cat([one.owners for one in members])
    return owners[owners >= 0].unique()


def _drop_resolved(step: Step, resolved: set[int]) -> Step:
    """Return the operation without arguments whose gradients were computed at an earlier step."""
    sources = {
        place: source
        for place, source in step.operation.sources.items()
        if not (isinstance(source, Derived) and source.place in resolved)
    }
    return replace(step, operation=replace(step.operation, sources=sources))


def _uses(
    step: TrackedOperation,
    deltas: dict[int, Tensor],
    parameters: Parameters,
    substitutes: Substitutes | None,
    live: bool,
) -> list[tuple[str, Use]]:
    deltas = {place: deltas[place] for place in step.members if place in deltas}
    if not deltas:
        return []
    operation = step.step.operation
    samples, gradients = _operation_gradients(
        operation, deltas, step.members, (substitutes or {}) if live else None
    )
    return [
        (name, Use(samples, part))
        for place, gradient in gradients.items()
        for name, part in chain(operation, place, gradient, parameters, live).items()
    ]


def _operation_gradients(
    operation: Operation, deltas: dict[int, Tensor], members: dict[int, Members], live: Substitutes | None
) -> tuple[Tensor, ParameterGradients]:
    """Return the gradients of one operation, for the samples that have any of its rows."""
    if deltas.keys() == {0}:
        one = members[0]
        if _is_grouped(operation, one):
            return _grouped_matrices(operation, deltas[0], one.owners, live is not None)
        batched = _rows_of_arguments(operation, one)
        if batched is not None:
            partition = partition_by(one.owners, one.width)
            layout = Layout(operation.signature, batched, (), {0: one.dimension})
            call = Call(operation, layout, deltas, partition, live)
            gradients = gradients_by_rule(call)
            if gradients is None and operation.function in ELEMENTWISE:
                gradients = parameter_gradients(call)
            if gradients is not None:
                return partition.samples, gradients
    samples = _samples_of(members[place] for place in deltas)

    def masks(sample: int) -> dict[int, Tensor]:
        return {place: members[place].mask(sample, operation.outputs[place].shape) for place in deltas}

    return samples, gradients_by_mask(operation, deltas, masks, samples.tolist(), live)


def _is_grouped(operation: Operation, members: Members) -> bool:
    """Whether rows are multiplied by one of a stack of matrices, each with a run of them."""
    if operation.function not in GROUPED or operation.sources.keys() != {1}:
        return False
    x, weight, *rest = operation.leaves
    rows_only = x.dim() == 2 and weight.dim() == 3 and (members.dimension, members.width) == (0, 1)
    return rows_only and next(value for value in rest if value is not None).dim() == 1


def _grouped_matrices(
    operation: Operation, delta: Tensor, owners: Tensor, live: bool
) -> tuple[Tensor, ParameterGradients]:
    """Return the gradients of a stack of matrices, (e, i, o): a slice for each matrix with any rows."""
    x, weight, *rest = operation.leaves
    ends = next(value for value in rest if value is not None).tolist()
    inputs = (x if live else x.detach()).to(weight.dtype)
    samples = owners[owners >= 0].unique()
    parts: dict[int, ParameterGradient] = {}
    for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        mine = torch.full_like(owners, -1)
        mine[start:end] = owners[start:end]
        if (mine >= 0).any():
            partition = partition_by(mine)
            rows = partition.split(inputs, 0), partition.split(delta.to(weight.dtype), 1, fill=True)
            who = torch.searchsorted(samples, partition.samples)
            factors = FactoredGradient(*rows, inputs_first=True)
            parts[number * weight[0].numel()] = SubsetGradient(who, factors, len(samples))
    return samples, {1: SlicedGradient(parts, dict.fromkeys(parts, weight[0].numel()), weight.numel())}


def _rows_of_arguments(operation: Operation, members: Members) -> dict[int, int] | None:
    """Return in which dimension the arguments have the rows of the output, None if unknown."""
    out = operation.outputs[0]
    if out.dim() == 0:
        return None
    start, stop = members.dimension, members.dimension + members.width
    rows = out.shape[start:stop]
    if operation.function in ROWWISE:
        place = 1 if operation.function is torch.addmm else 0
        leaf = operation.leaves[place] if len(operation.leaves) > place else None
        last = ROWWISE[operation.function](operation)
        if not isinstance(leaf, Tensor) or place in operation.sources or stop > last:
            return None
        return {place: start} if leaf.shape[start:stop] == rows else None
    if operation.function in BROADCASTS:
        return {}
    if operation.function not in ELEMENTWISE:
        return None
    batched = {}
    for place, leaf in enumerate(operation.leaves):
        if not isinstance(leaf, Tensor):
            continue
        shape = (1,) * (out.dim() - leaf.dim()) + tuple(leaf.shape)
        if all(size == 1 for size in shape[start:stop]):
            continue
        if place in operation.sources or shape[start:stop] != tuple(rows):
            return None
        batched[place] = start - (out.dim() - leaf.dim())
    return batched


def _merge_uses(uses: list[Use], n: int) -> ParameterGradient:
    """Return the sum over the uses of one parameter, for all n samples."""
    sliced = [use for use in uses if isinstance(use.gradient, SlicedGradient)]
    if sliced and len(sliced) == len(uses):
        return (
            sum_gradients([_single_use(use, n) for use in sliced])
            if _differ(sliced)
            else _merge_slices(sliced, n)
        )
    kinds: dict[Any, list[Use]] = {}
    for use in uses:
        kinds.setdefault(use.gradient.kind, []).append(use)
    return sum_gradients([_concatenate_uses(same, n) for same in kinds.values()])


def _differ(uses: list[Use]) -> bool:
    """Whether slices of one parameter start at the same place and are not the same."""
    sizes: dict[int, int] = {}
    for use in uses:
        assert isinstance(use.gradient, SlicedGradient)
        for start, size in use.gradient.sizes.items():
            if sizes.setdefault(start, size) != size:
                return True
    return False


def _single_use(use: Use, n: int) -> ParameterGradient:
    return _concatenate_uses([use], n)


def _merge_slices(uses: list[Use], n: int) -> ParameterGradient:
    by_start: dict[int, list[Use]] = {}
    sizes: dict[int, int] = {}
    numel = 0
    for use in uses:
        assert isinstance(use.gradient, SlicedGradient)
        numel = use.gradient.numel
        for start, part in use.gradient.parts.items():
            sizes[start] = use.gradient.sizes[start]
            by_start.setdefault(start, []).append(_within(use.samples, part))
    return sum_gradients(
        [
            SlicedGradient({start: _merge_uses(same, n)}, {start: sizes[start]}, numel)
            for start, same in by_start.items()
        ]
    )


def _within(samples: Tensor, part: ParameterGradient) -> Use:
    return (
        Use(samples[part.samples], part.gradient) if isinstance(part, SubsetGradient) else Use(samples, part)
    )


def _concatenate_uses(uses: list[Use], n: int) -> ParameterGradient:
    """Return the sum of uses of one kind, of any samples."""
    first = uses[0].gradient
    if len(uses) == 1:
        everyone = len(uses[0].samples) == n and bool((uses[0].samples == torch.arange(n)).all())
        return first if everyone else SubsetGradient(uses[0].samples, first, n)
    if isinstance(first, FactoredGradient):
        inputs = [use.gradient.inputs for use in uses if isinstance(use.gradient, FactoredGradient)]
        deltas = [use.gradient.deltas for use in uses if isinstance(use.gradient, FactoredGradient)]
        place, length = _places(uses, [value.shape[1] for value in inputs], n)
        return FactoredGradient(
            _scatter(inputs, place, n, length, 0),
            _scatter_deltas(deltas, place, n, length),
            first.inputs_first,
        )
    if isinstance(first, EmbeddingGradient):
        indices = [use.gradient.indices for use in uses if isinstance(use.gradient, EmbeddingGradient)]
        deltas = [use.gradient.deltas for use in uses if isinstance(use.gradient, EmbeddingGradient)]
        place, length = _places(uses, [value.shape[1] for value in indices], n)
        return EmbeddingGradient(
            _scatter(indices, place, n, length, -1), _scatter_deltas(deltas, place, n, length), first.size
        )
    rows = [use.gradient.rows() for use in uses]
    samples = torch.cat([use.samples for use in uses]).to(rows[0].device)
    return DenseGradient(rows[0].new_zeros(n, *rows[0].shape[1:]).index_add(0, samples, torch.cat(rows)))


def _places(uses: list[Use], lengths: list[int], n: int) -> tuple[Tensor, int]:
    """Return where in (n, length) each position of the uses goes, one after another, and the length."""
    filled, places = torch.zeros(n, dtype=torch.int64), []
    for use, length in zip(uses, lengths, strict=True):
        places.append((use.samples, filled[use.samples, None] + torch.arange(length)))
        filled[use.samples] += length
    most = int(filled.max())
    return torch.cat([(who[:, None] * most + where).flatten() for who, where in places]), most


def _scatter(values: list[Tensor], place: Tensor, n: int, length: int, empty: int) -> Tensor:
    rows = torch.cat([value.flatten(0, 1) for value in values])
    target = rows.new_full((n * length, *rows.shape[1:]), empty)
    return target.index_copy(0, place.to(rows.device), rows).unflatten(0, (n, length))


def _scatter_deltas(values: list[Tensor], place: Tensor, n: int, length: int) -> Tensor:
    return _scatter([value.transpose(1, 2) for value in values], place, n, length, 0).transpose(1, 2)


def _refuse_wrong_sums(
    outputs: Tensor, by_parameter: dict[str, ParameterGradient], parameters: Parameters
) -> None:
    """Raise UntraceableError if a weighted sum of the gradients differs from autograd's."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(outputs.shape, generator=generator, dtype=torch.float64).to(outputs)
    expected = torch.autograd.grad(
        outputs,
        list(parameters.values()),
        weights,
        retain_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )
    dtype = torch.promote_types(outputs.dtype, torch.float32)
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)  # models compute some in float32
    limit = eps**0.5 * max(float(value.abs().max()) for value in expected)
    for name, value in zip(parameters, expected, strict=True):
        ours = (
            by_parameter[name].vjp(weights[:, :, None].to(value.dtype))[0].view_as(value)
            if name in by_parameter
            else 0
        )
        if not (ours - value).abs().max() <= limit:
            raise UntraceableError(f"the gradients in {name} do not add up to autograd's")


_NO_LAYOUT = Layout((), {}, (), {})


def _all_but_last(operation: Operation) -> int:
    return operation.outputs[0].dim() - 1


def _first(operation: Operation) -> int:
    return 1


def _before_normalized(operation: Operation) -> int:
    shapes = [operation.leaves[place].dim() for place in operation.sources]
    return operation.outputs[0].dim() - max(shapes)


# Operations on parameters whose output has the rows of its input, and how many dimensions of rows.
ROWWISE = {
    **dict.fromkeys((F.linear, torch.addmm, torch.matmul, torch.mm, F.embedding), _all_but_last),
    **dict.fromkeys((torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.mm), _all_but_last),
    **dict.fromkeys((F.layer_norm, F.rms_norm), _before_normalized),
    **dict.fromkeys((F.batch_norm, F.group_norm, torch.prelu), _first),
    **{getattr(F, f"conv{i}d"): _first for i in (1, 2, 3)},
    **{getattr(F, f"conv_transpose{i}d"): _first for i in (1, 2, 3)},
}
ELEMENTWISE = {
    *(
        getattr(torch, name)
        for name in (
            "add",
            "sub",
            "mul",
            "div",
            "true_divide",
            "where",
            "addcmul",
            "lerp",
            "maximum",
            "minimum",
            "pow",
        )
    ),
    *(getattr(torch.Tensor, name) for name in ("add", "sub", "mul", "div", "pow", "maximum", "minimum")),
    *(getattr(torch.Tensor, f"__{name}__") for name in ("add", "sub", "mul", "truediv", "pow")),
    *(getattr(torch.Tensor, f"__r{name}__") for name in ("add", "sub", "mul", "truediv", "pow")),
}
GROUPED = tuple(
    getattr(holder, name)
    for holder, name in ((F, "grouped_mm"), (torch, "_grouped_mm"))
    if hasattr(holder, name)
)
# Functions that return a part of a tensor, or a permutation.
SELECTIONS = (
    torch.Tensor.__getitem__,
    torch.Tensor.T.__get__,  # type: ignore[attr-defined]
    torch.Tensor.mT.__get__,  # type: ignore[attr-defined]
    *(
        getattr(holder, name)
        for holder in (torch, torch.Tensor)
        for name in (
            "index_select",
            "transpose",
            "permute",
            "t",
            "reshape",
            "squeeze",
            "unsqueeze",
            "chunk",
            "split",
        )
    ),
    torch.Tensor.view,
    torch.Tensor.to,
)
BROADCASTS = (torch.Tensor.expand, torch.Tensor.expand_as, torch.broadcast_to)
