"""Rules for parameter gradients: from an operation and its output gradients to the gradients of its parameters.

A rule returns the gradients of the parameters among the arguments, by their place. An operation without a rule is
differentiated by vmap of its vjp, and where that fails, one sample at a time. The backward passes on both sides of a
rule are here too: from the outputs to operations, and from tensors derived from parameters to the parameters.
"""

import warnings
from collections.abc import Callable, Iterable
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vjp, vmap
from torch.utils._pytree import tree_unflatten

from likewise.engines.convolution import ConvolutionGradient, bind_convolution, convolution_arguments
from likewise.engines.double_backward import Substitutes
from likewise.engines.factors import (
    DenseGradient,
    EmbeddingGradient,
    FactoredGradient,
    ParameterGradient,
    SlicedGradient,
    concatenate,
)
from likewise.engines.membership import Partition
from likewise.engines.memory import is_out_of_memory
from likewise.engines.tracer import Layout, Operation, Step, output_tensors
from likewise.model import Parameters
from likewise.torch_state import is_recording

ParameterGradients = dict[int, ParameterGradient]  # by the place of the parameter among the leaves
Rule = Callable[["Call"], ParameterGradients | None]


class Call:
    """One operation with the gradients of its outputs, (n, d, ...), samples first."""

    def __init__(
        self,
        operation: Operation,
        layout: Layout,
        deltas: dict[int, Tensor],
        partition: Partition,
        live: Substitutes | None = None,
    ) -> None:
        self.operation, self.layout, self.partition, self.n = operation, layout, partition, partition.n
        self.live = live is not None  # whether the gradients are differentiable
        self.function = (live or {}).get(operation.function, operation.function)
        parameters = [operation.leaves[place].dtype for place in operation.sources]
        dtype = reduce(torch.promote_types, parameters)  # not a lower one that autocast chose
        self.deltas = {  # (d, *shape) -> (n, d, ...), with what a sample has in the batch's place
            place: partition.split(_convert(delta, dtype), layout.outputs[place] + 1, fill=True)
            for place, delta in deltas.items()
        }
        self.dtype = dtype

    def bind(self, *names: str) -> dict[str, Any]:
        """Return the arguments by name, given the names of positional ones."""
        args, kwargs = self.operation.arguments
        return {**dict(zip(names, args, strict=False)), **kwargs}

    def place(self, value: Any) -> int | None:
        """Return the place of a parameter among the leaves, None for anything else."""
        return next((i for i in self.operation.sources if self.operation.leaves[i] is value), None)

    def batch_dimension(self, value: Any) -> int | None:
        """Return which dimension of an argument holds samples, None if none does."""
        return next((d for i, d in self.layout.batched.items() if self.operation.leaves[i] is value), None)

    def samples(self, value: Any) -> Tensor | None:
        """Return an argument as (n, ...), samples first, or None if it holds no samples."""
        dimension = self.batch_dimension(value)
        return None if dimension is None else self.partition.split(self.to_dtype(value), dimension)

    def to_dtype(self, value: Tensor) -> Tensor:
        """Return an argument in the parameters' precision."""
        value = value if self.live else value.detach()
        return value.to(self.dtype) if value.is_floating_point() else value


def _convert(delta: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an output gradient in a precision; complex ones stay complex, also of a real parameter."""
    return delta.to(torch.promote_types(dtype, torch.complex32) if delta.is_complex() else dtype)


def parameter_gradients(call: Call) -> ParameterGradients:
    """Return the gradients of all parameters of one operation."""
    return gradients_by_rule(call) or _generic(call)


def gradients_by_rule(call: Call) -> ParameterGradients | None:
    """Return the gradients of all parameters of one operation, None if no rule applies."""
    rule = RULES.get(call.operation.function)
    if rule is not None and set(call.deltas) == {0}:
        gradients = rule(call)
        if gradients is not None and gradients.keys() == call.operation.sources.keys():
            return gradients
    return None


def _linear(call: Call) -> ParameterGradients | None:
    a = call.bind("input", "weight", "bias")
    return _matrix(call, a["input"], a["weight"], a.get("bias"), inputs_first=False)


def _addmm(call: Call) -> ParameterGradients | None:
    a = call.bind("input", "mat1", "mat2")
    if a.get("beta", 1) != 1 or a.get("alpha", 1) != 1:
        return None
    return _matrix(call, a["mat1"], a["mat2"], a["input"], inputs_first=True)


def _matmul(call: Call) -> ParameterGradients | None:
    a = call.bind("input", "other")
    if not isinstance(a["other"], Tensor) or a["other"].dim() != 2:
        return None
    return _matrix(call, a["input"], a["other"], None, inputs_first=True)


def _matrix(call: Call, x: Any, weight: Any, bias: Any, inputs_first: bool) -> ParameterGradients | None:
    inputs = call.samples(x)
    places: ParameterGradients = {}
    if inputs is None or call.samples(weight) is not None:
        return None
    deltas = call.deltas[0]
    flat = deltas.reshape(*deltas.shape[:2], -1, deltas.shape[-1])
    place, bias_place = call.place(weight), call.place(bias)
    if place is not None:
        positions = inputs.reshape(call.n, -1, inputs.shape[-1])
        places[place] = FactoredGradient(positions.to(flat.dtype), flat, inputs_first)
    if bias_place is not None:
        if bias.dim() != 1 or bias.shape[0] != flat.shape[-1]:
            return None
        places[bias_place] = DenseGradient(flat.sum(2))
    return places


def _embedding(call: Call) -> ParameterGradients | None:
    a = call.bind("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    indices, place = call.samples(a["input"]), call.place(a["weight"])
    if indices is None or place is None or a.get("max_norm") is not None or a.get("scale_grad_by_freq"):
        return None
    size, padding = a["weight"].shape[0], a.get("padding_idx")
    if padding is not None:
        indices = torch.where(indices == padding % size, -1, indices)
    deltas = call.deltas[0]
    flat = deltas.reshape(*deltas.shape[:2], -1, deltas.shape[-1])
    return {place: EmbeddingGradient(indices.reshape(call.n, -1), flat, size)}


def _normalization(names: tuple[str, ...], reduced_dims: Callable[[int, Any], list[int]]) -> Rule:
    """A layer x̂ ∘ weight + bias: x̂ is what it returns without them."""

    def rule(call: Call) -> ParameterGradients | None:
        a = call.bind(*names)
        x, weight, bias = a["input"], a.get("weight"), a.get("bias")
        inputs = call.samples(x)
        if inputs is None or a.get("training") or a.get("use_input_stats"):
            return None
        gradients: ParameterGradients = {}
        deltas = call.deltas[0]
        dims = reduced_dims(inputs.dim() - 1, weight if isinstance(weight, Tensor) else bias)
        place, bias_place = call.place(weight), call.place(bias)
        if place is not None:
            with torch.set_grad_enabled(call.live):
                bare = dict.fromkeys({"weight", "bias"} & set(names))
                plain = call.function(**{**a, **bare, "input": call.to_dtype(x)})
            hat = call.partition.split(plain, call.layout.outputs[0]).unsqueeze(1)
            gradients[place] = DenseGradient(_dot(deltas, hat, dims).flatten(2))
        if bias_place is not None:
            gradients[bias_place] = DenseGradient(_sum(deltas, dims).flatten(2))
        return gradients

    return rule


_BATCH_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


def _batch_norm(call: Call) -> ParameterGradients | None:
    """A batch norm with fixed statistics: PyTorch's own backward, with the channels of each sample as channels."""
    a = call.bind(*_BATCH_NORM)
    x, mean, variance = a["input"], a.get("running_mean"), a.get("running_var")
    inputs = call.samples(x)
    if mean is None or variance is None or a.get("training"):
        return _batch_norm_by_parts(call)
    if call.live or inputs is None or call.batch_dimension(x) != 0 or inputs.shape[1] != 1:
        return _batch_norm_by_parts(call)
    deltas = call.deltas[0].squeeze(2)
    n, d, c = deltas.shape[:3]
    images = inputs.to(deltas.dtype).reshape(1, n * c, -1)
    means, variances = (statistic.detach().to(deltas.dtype).repeat(n) for statistic in (mean, variance))
    epsilon = a.get("eps", 1e-5)
    roots = (variances + epsilon).rsqrt()  # on a GPU these, and a weight, are read in evaluation mode too
    sums = [
        torch.ops.aten.native_batch_norm_backward(
            deltas[:, i].reshape(1, n * c, -1),
            images,
            torch.ones_like(means),
            means,
            variances,
            means,
            roots,
            False,
            epsilon,
            [False, True, True],
        )
        for i in range(d)
    ]
    weight, bias = (concatenate([s[i].view(n, 1, c) for s in sums], 1) for i in (1, 2))
    places = {call.place(a.get("weight")): weight, call.place(a.get("bias")): bias}
    return {place: DenseGradient(sum) for place, sum in places.items() if place is not None}


def _dot(deltas: Tensor, hat: Tensor, dims: list[int]) -> Tensor:
    """Return deltas ∘ hat, (n, d, ...), summed over dimensions counted after the first two."""
    if deltas.shape[1] > 1 or not dims or deltas.device.type != "cpu":  # a GPU is slow at many short products
        return _sum(deltas * hat, dims)
    last = [i + 1 for i in range(deltas.dim() - 2) if i not in dims]
    order = [0, *last, *(i + 1 for i in dims)]
    left, right = (t[:, 0].permute(order).flatten(len(last) + 1) for t in (deltas, hat))
    return torch.linalg.vecdot(left, right).unsqueeze(1)


def _sum(tensor: Tensor, dims: list[int]) -> Tensor:
    """Sum an (n, d, ...) tensor over dimensions counted after the first two."""
    return tensor.sum([i + 2 for i in dims]) if dims else tensor


def _prelu(call: Call) -> ParameterGradients | None:
    a = call.bind("input", "weight")
    inputs, place = call.samples(a["input"]), call.place(a["weight"])
    if inputs is None or place is None or call.batch_dimension(a["input"]) != 0 or a["input"].dim() < 2:
        return None
    below = call.deltas[0] * inputs.clamp(max=0).unsqueeze(1)  # (n, d, of the sample, channels, ...)
    if a["weight"].numel() == 1:
        return {place: DenseGradient(below.flatten(2).sum(2, keepdim=True))}
    return {place: DenseGradient(below.movedim(3, 2).flatten(3).sum(3))}


def _convolution(dims: int, transposed: bool) -> Rule:
    def rule(call: Call) -> ParameterGradients | None:
        a = call.bind(*convolution_arguments(transposed))
        x, weight = a["input"], a["weight"]
        inputs = call.samples(x)
        if inputs is None or call.batch_dimension(x) != 0 or inputs.shape[1] != 1:
            return None
        if call.batch_dimension(weight) is not None:
            return None
        if x.is_complex() or weight.is_complex():
            return None
        gradients: ParameterGradients = {}
        place, bias_place = call.place(weight), call.place(a.get("bias"))
        deltas = call.deltas[0].squeeze(2)
        if place is not None:
            x, options = bind_convolution(inputs.squeeze(1), weight, a, dims, transposed)
            gradient = ConvolutionGradient(x, deltas, weight.detach(), options)
            gradients[place] = gradient.differentiable() if call.live else gradient
        if bias_place is not None:
            gradients[bias_place] = DenseGradient(deltas.flatten(3).sum(3))
        return gradients

    return rule


def _generic(call: Call) -> ParameterGradients:
    """Differentiate the operation for each sample: by vmap of its vjp, or one after another."""
    operation, layout = call.operation, call.layout
    batched = {
        place: call.partition.split(call.to_dtype(operation.leaves[place]), dimension)
        for place, dimension in layout.batched.items()
    }
    counts = {place: operation.leaves[place] // call.n for place in layout.counts}
    tracked = {place: operation.leaves[place] for place in operation.sources}
    if not call.live:
        tracked = {place: value.detach() for place, value in tracked.items()}

    def apply(arguments: dict[int, Tensor], parameters: dict[int, Tensor]) -> dict[int, Tensor]:
        leaves = list(operation.leaves)
        for place, value in (*arguments.items(), *counts.items(), *parameters.items()):
            leaves[place] = value
        args, kwargs = tree_unflatten(leaves, operation.spec)
        outputs = output_tensors(call.function(*args, **kwargs))
        return {place: outputs[place] for place in call.deltas}

    def differentiate(arguments: dict[int, Tensor], deltas: dict[int, Tensor]) -> dict[int, Tensor]:
        _, pullback, *_ = vjp(partial(apply, arguments), tracked)
        d = len(next(iter(deltas.values())))
        rows = [pullback({place: delta[i] for place, delta in deltas.items()})[0] for i in range(d)]
        return {place: torch.stack([row[place].flatten() for row in rows]) for place in tracked}

    def differentiate_by_autograd(
        arguments: dict[int, Tensor], deltas: dict[int, Tensor]
    ) -> dict[int, Tensor]:
        """The same without torch.func, which refuses some functions."""
        with torch.enable_grad():
            uses = {place: value.requires_grad_().view_as(value) for place, value in tracked.items()}
            outputs = list(apply(arguments, uses).values())
        rows = [
            torch.autograd.grad(
                outputs,
                list(uses.values()),
                [delta[i] for delta in deltas.values()],
                retain_graph=True,
                create_graph=call.live,
                allow_unused=True,
                materialize_grads=True,
            )
            for i in range(len(next(iter(deltas.values()))))
        ]
        columns = zip(*rows, strict=True)
        return {
            place: torch.stack([value.flatten() for value in column])
            for place, column in zip(tracked, columns, strict=True)
        }

    try:
        gradients = vmap(differentiate)(batched, call.deltas)
    except Exception as error:  # no batching rule: take the operation sample by sample
        if is_out_of_memory(error) or is_recording():
            raise
        reason = str(error).strip().splitlines()[0][:80]
        warnings.warn(f"{operation.name} is differentiated one sample at a time: {reason}", stacklevel=2)
        each = [
            differentiate_by_autograd(
                {k: v[i] for k, v in batched.items()}, {k: v[i] for k, v in call.deltas.items()}
            )
            for i in range(call.n)
        ]
        gradients = {place: torch.stack([row[place] for row in each]) for place in tracked}
    return {place: DenseGradient(rows) for place, rows in gradients.items()}


def gradients_by_mask(
    operation: Operation,
    deltas: dict[int, Tensor],
    masks: Callable[[int], dict[int, Tensor]],
    samples: list[int],
    live: Substitutes | None = None,
) -> ParameterGradients:
    """Return the gradients of any operation by one backward through it for each sample and output.

    Args:
        operation: The operation.
        deltas: Gradients of its outputs, (d, ...) each.
        masks: Maps a sample to the mask of its entries in each output.
        samples: The samples with any entry.
        live: See `Call`.

    """
    function = (live or {}).get(operation.function, operation.function)
    leaves = [
        leaf.detach() if isinstance(leaf, Tensor) and live is None else leaf for leaf in operation.leaves
    ]
    with torch.enable_grad():
        for place in operation.sources:
            leaves[place] = leaves[place].requires_grad_().view_as(leaves[place])
        args, kwargs = tree_unflatten(leaves, operation.spec)
        outputs = output_tensors(function(*args, **kwargs))
    back = partial(
        torch.autograd.grad,
        [outputs[place] for place in deltas],
        [leaves[place] for place in operation.sources],
        retain_graph=True,
        create_graph=live is not None,
        allow_unused=True,
        materialize_grads=True,
    )
    parts: list[list[Tensor]] = [[] for _ in operation.sources]
    size = sum(delta.numel() for delta in deltas.values())
    step = max(1, 2**24 // max(1, size))
    for some in (samples[i : i + step] for i in range(0, len(samples), step)):
        sample_masks = [masks(sample) for sample in some]
        rows = [
            torch.stack([delta * mask[place].to(delta) for mask in sample_masks]).flatten(0, 1)
            for place, delta in deltas.items()
        ]
        try:
            gradients = back(grad_outputs=rows, is_grads_batched=True)
        except RuntimeError:  # no batching rule for its backward
            each = [back(grad_outputs=list(row)) for row in zip(*rows, strict=True)]
            gradients = tuple(torch.stack(column) for column in zip(*each, strict=True))
        for part, value in zip(parts, gradients, strict=True):
            part.append(value.reshape(len(some), -1, value[0].numel()))
    return {
        place: DenseGradient(torch.cat(part)) for place, part in zip(operation.sources, parts, strict=True)
    }


def _expand(call: Call) -> ParameterGradients | None:
    parameter = call.operation.leaves[0]
    dims = None if call.place(parameter) != 0 else _broadcast_dims(call, parameter)
    return None if dims is None else {0: DenseGradient(_as_rows(_sum(call.deltas[0], dims)))}


def _sum_or_difference(sign: int) -> Rule:
    """Differentiate x + p or x − p, where p is broadcast over samples."""

    def rule(call: Call) -> ParameterGradients | None:
        if len(call.operation.arguments[0]) > 2:  # a deprecated order of arguments
            return None
        a = call.bind("input", "other")
        gradients: ParameterGradients = {}
        for name, factor in (("input", 1), ("other", sign * a.get("alpha", 1))):
            place = call.place(a[name])
            if place is not None:
                dims = _broadcast_dims(call, a[name])
                if dims is None:
                    return None
                total = _as_rows(_sum(call.deltas[0], dims))
                total = total if factor == 1 else total * factor.conjugate()
                is_real_part = total.is_complex() and not a[name].is_complex()
                gradients[place] = DenseGradient(total.real if is_real_part else total)
        return gradients

    return rule


def _product(call: Call) -> ParameterGradients | None:
    """Differentiate x ∘ p, where p is broadcast over samples."""
    a, deltas = call.bind("input", "other"), call.deltas[0]
    place, x, parameter = call.place(a["input"]), a["other"], a["input"]
    if place is None:
        place, x, parameter = call.place(a["other"]), a["input"], a["other"]
    inputs = call.samples(x)
    dims = None if place is None else _broadcast_dims(call, parameter)
    if place is None or inputs is None or dims is None or inputs.dim() != deltas.dim() - 1:
        return None
    if call.batch_dimension(x) != call.layout.outputs[0] or deltas.is_complex():
        return None
    hat = inputs.to(deltas.dtype).unsqueeze(1).expand(-1, -1, *deltas.shape[2:])
    return {place: DenseGradient(_as_rows(_dot(deltas, hat, dims)))}


def _broadcast_dims(call: Call, parameter: Tensor) -> list[int] | None:
    """Return the dimensions of the output along which a parameter is repeated; None if samples are not among them."""
    shape = call.operation.outputs[0].shape
    extra = len(shape) - parameter.dim()
    dims = [i for i in range(len(shape)) if i < extra or parameter.shape[i - extra] == 1]
    is_plain = call.deltas[0].dim() - 2 == len(shape) and call.layout.outputs[0] in dims
    return dims if is_plain else None


def _as_rows(gradients: Tensor) -> Tensor:
    """Return (n, d, numel), also of a parameter without dimensions."""
    return gradients.reshape(*gradients.shape[:2], -1)


def _all_but_channel(dims: int, parameter: Any) -> list[int]:
    return [i for i in range(dims) if i != 1]


def _leading(dims: int, parameter: Tensor) -> list[int]:
    return list(range(dims - parameter.dim()))


_batch_norm_by_parts = _normalization(_BATCH_NORM, _all_but_channel)
RULES: dict[Any, Rule] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    F.embedding: _embedding,
    torch.prelu: _prelu,
    torch.Tensor.expand: _expand,
    torch.Tensor.expand_as: _expand,
    torch.broadcast_to: _expand,
    **dict.fromkeys((torch.add, torch.Tensor.add, torch.Tensor.__radd__), _sum_or_difference(1)),
    **dict.fromkeys((torch.sub, torch.Tensor.sub), _sum_or_difference(-1)),
    **dict.fromkeys((torch.mul, torch.Tensor.mul, torch.Tensor.__rmul__), _product),
    F.batch_norm: _batch_norm,
    F.group_norm: _normalization(("input", "num_groups", "weight", "bias", "eps"), _all_but_channel),
    F.layer_norm: _normalization(("input", "normalized_shape", "weight", "bias", "eps"), _leading),
    F.rms_norm: _normalization(("input", "normalized_shape", "weight", "eps"), _leading),
    **{getattr(F, f"conv{i}d"): _convolution(i, False) for i in (1, 2, 3)},
    **{getattr(F, f"conv_transpose{i}d"): _convolution(i, True) for i in (1, 2, 3)},
}


def output_gradients(
    outputs: Tensor, steps: list[Step], live: bool, keep_graph: bool = False
) -> list[dict[int, Tensor]]:
    """Return the gradients of the summed outputs with respect to each operation's outputs, (d, ...) each."""
    edges = [edge for step in steps for edge in step.edges.values()]
    if not edges or not outputs.requires_grad:
        return [{} for _ in steps]
    d = outputs.shape[1]
    with torch.enable_grad():
        sums = outputs.sum(0).unbind()
    shapes = [step.operation.outputs[place].shape for step in steps for place in step.edges]
    columns = (
        _shape_deltas(
            torch.autograd.grad(
                sums[i],
                edges,
                retain_graph=live or keep_graph or i < d - 1,
                create_graph=live,
                allow_unused=True,
            ),
            shapes,
        )
        for i in range(d)
    )
    if live or d == 1:
        stacked = iter([_stack_deltas(column) for column in zip(*columns, strict=True)])
    else:
        stacked = iter(_collect_deltas(columns, d, len(edges)))
    deltas = []
    for step in steps:
        mine = {place: next(stacked) for place in step.edges}
        deltas.append({place: value for place, value in mine.items() if value is not None})
    return deltas


def _shape_deltas(column: Iterable[Tensor | None], shapes: list[torch.Size]) -> tuple[Tensor | None, ...]:
    """Return gradients in the shapes of outputs: those of a view come in the shape of its base."""
    pairs = zip(column, shapes, strict=True)
    return tuple(
        delta if delta is None or delta.shape == shape else delta.reshape(shape) for delta, shape in pairs
    )


def _collect_deltas(columns: Iterable[tuple[Tensor | None, ...]], d: int, count: int) -> list[Tensor | None]:
    """Return the gradients of each of `count` tensors, (d, ...), without holding each twice as a stack would."""
    collected: list[Tensor | None] = [None] * count
    for i, column in enumerate(columns):
        for place, delta in enumerate(column):
            if delta is None:
                continue
            target = collected[place]
            if target is None:
                new = delta.new_zeros if i else delta.new_empty  # zero for the outputs before
                # The outputs of a sample side by side in memory: products of each sample then need no copy.
                target = new(delta.shape[0], d, *delta.shape[1:]).transpose(0, 1) if delta.dim() else new(d)
                collected[place] = target
            target[i] = delta
        for place, target in enumerate(collected):
            if target is not None and column[place] is None:
                target[i] = 0
    return collected


def _stack_deltas(column: tuple[Tensor | None, ...]) -> Tensor | None:
    known = [delta for delta in column if delta is not None]
    if not known:
        return None
    if len(column) == 1:
        return known[0].unsqueeze(0)
    return torch.stack([torch.zeros_like(known[0]) if delta is None else delta for delta in column])


def chain(
    operation: Operation, place: int, gradient: ParameterGradient, parameters: Parameters, live: bool
) -> dict[str, ParameterGradient]:
    """Return the gradients of the parameters that the argument at this place was computed from."""
    source = operation.sources[place]
    if isinstance(source, str):
        return {source: gradient}
    tensor, names = operation.leaves[place], sorted(source.names)
    if len(names) == 1 and (view := find_view(tensor, parameters[names[0]])) is not None:
        return {names[0]: _gradient_of_base(gradient, tensor, parameters[names[0]], view, live)}
    rows, values = gradient.rows(), [parameters[name] for name in names]
    flat = rows.reshape(rows.shape[0] * rows.shape[1], *tensor.shape).to(
        tensor.dtype
    )  # there may be no entries
    pullback = partial(
        torch.autograd.grad,
        operation.edges[place],
        values,
        retain_graph=True,
        create_graph=live,
        allow_unused=True,
        materialize_grads=True,
    )
    try:
        gradients = pullback(grad_outputs=flat, is_grads_batched=True)
    except RuntimeError:  # no batching rule for one of the operations
        each = [pullback(grad_outputs=row) for row in flat]
        gradients = tuple(torch.stack(column) for column in zip(*each, strict=True))
    return {
        name: DenseGradient(value.reshape(*rows.shape[:2], -1))
        for name, value in zip(names, gradients, strict=True)
    }


class View(NamedTuple):
    """A view of contiguous entries of a parameter, with its dimensions in any order."""

    start: int
    order: tuple[int, ...]  # of its dimensions, largest stride first


def find_view(tensor: Tensor, parameter: Tensor) -> View | None:
    """Return the view of a parameter that a tensor is, None if it is no view or shows entries twice."""
    if tensor._base is not parameter or tensor.dtype != parameter.dtype or not parameter.is_contiguous():
        return None
    if tensor.is_conj() or tensor.is_neg():
        return None
    strides = list(tensor.stride())
    order = sorted(range(tensor.dim()), key=lambda i: (tensor.shape[i] > 1, -strides[i]))
    step = 1
    for i in reversed(order):
        if tensor.shape[i] > 1 and strides[i] != step:
            return None
        step *= tensor.shape[i]
    return View(int(tensor.storage_offset()) - int(parameter.storage_offset()), tuple(order))


def _gradient_of_base(
    gradient: ParameterGradient, tensor: Tensor, parameter: Tensor, view: View, live: bool
) -> ParameterGradient:
    """Return the gradient of a parameter, given that of a view of it."""
    moves = [i for i in view.order if tensor.shape[i] > 1]
    is_column = tensor.dim() == 2 and len(moves) < 2 and tensor.shape != parameter.shape == tensor.T.shape
    if moves != sorted(moves) or is_column:
        gradient = gradient.permute(tensor.shape, view.order)
    if tensor.numel() == parameter.numel():
        return gradient
    whole = SlicedGradient({view.start: gradient}, {view.start: tensor.numel()}, parameter.numel())
    return DenseGradient(whole.rows()) if live else whole
