"""Backward passes: from outputs to operations on parameters, and from derived tensors to parameters."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from likewise.engines.factors import DenseGradient, ParameterGradient, SlicedGradient
from likewise.engines.tracer import Operation, Step
from likewise.model import Parameters


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
    columns = [
        torch.autograd.grad(
            sums[i], edges, retain_graph=live or keep_graph or i < d - 1, create_graph=live, allow_unused=True
        )
        for i in range(d)
    ]
    stacked = iter([_stack_deltas(column) for column in zip(*columns, strict=True)])
    deltas = []
    for step in steps:
        mine = {place: next(stacked) for place in step.edges}
        deltas.append({place: value for place, value in mine.items() if value is not None})
    return deltas


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
    flat = rows.reshape(-1, *tensor.shape).to(tensor.dtype)
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
