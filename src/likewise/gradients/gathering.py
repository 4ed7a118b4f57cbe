"""The gradients of some samples, parameter by parameter: one forward pass, a backward for each output."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from likewise.data import Samples
from likewise.gradients.instead import Instead
from likewise.gradients.pieces import Dense, Piece
from likewise.gradients.rules import Call, pieces
from likewise.gradients.sums import summed
from likewise.gradients.trace import Recorder, Step, Trace, Untraceable
from likewise.linalg import wide
from likewise.network import Network, Parameters


@dataclass(frozen=True)
class Chunk:
    """The gradients of some samples, by parameter."""

    samples: Samples
    d: int
    pieces: dict[str, Piece]  # only parameters that the outputs depend on
    returned: Any = None  # by the model, with its graph, where the gradients are differentiable
    outputs: Tensor | None = None  # (n, d) of the samples in their batch, where one forward pass had them

    def own(self, device: torch.device) -> Tensor:
        """Return K(x, x): the sum over parameters."""
        empty = torch.zeros(len(self.samples), self.d, self.d, device=device)
        total = empty.to(wide(empty))
        for piece in self.pieces.values():
            total += piece.own()
        return total

    def part(self, where: slice) -> "Chunk":
        """Return the gradients of some of the samples."""
        outputs = None if self.outputs is None else self.outputs[where]
        pieces = {name: piece.part(where) for name, piece in self.pieces.items()}
        return Chunk(self.samples[where], self.d, pieces, None, outputs)

    def weighted_sum(self, net: Network, weights: Tensor) -> Tensor:
        """Return Σₓ J(x)ᵀ w(x) for weights (n, d), (p,), in the model's precision."""
        column = weights.unsqueeze(2)
        return torch.cat(
            [
                self.pieces[name].pull(column.to(net.dtype)).flatten()
                if name in self.pieces
                else weights.new_zeros(size, dtype=net.dtype)
                for name, size in net.numels.items()
            ]
        )


def gathered(
    net: Network,
    trace: Trace,
    samples: Samples,
    live: Parameters | None = None,
    instead: Instead | None = None,
) -> Chunk:
    """Return the gradients of some samples from one forward pass and a backward for each output.

    `live`: the model's own parameters instead of copies, if the gradients are to be differentiable, and
    what to call `instead` of functions whose derivatives are wrong.
    """
    recorder = Recorder(net, trace, live, instead)
    outputs = recorder.recorded(net, samples)
    uses: dict[str, list[Piece]] = {}
    for step, deltas in zip(recorder.steps, _deltas(outputs, recorder.steps, live is not None), strict=True):
        if not step.unchanged():
            raise Untraceable(f"the inputs of {step.operation.name} were overwritten in place")
        if deltas:
            for place, piece in pieces(Call(step, deltas, len(samples), instead)).items():
                chained = _chained(step, place, piece, recorder.parameters, live is not None)
                for name, part in chained.items():
                    uses.setdefault(name, []).append(part)
    ordered = {name: summed(uses[name]) for name in net.names if name in uses}
    returned = recorder.returned if live else None
    return Chunk(samples, outputs.shape[1], ordered, returned, outputs.detach())


def _deltas(outputs: Tensor, steps: list[Step], live: bool) -> list[dict[int, Tensor]]:
    """Return the gradients of the summed outputs in each operation's outputs, (d, ...) each."""
    edges = [edge for step in steps for edge in step.edges.values()]
    if not edges or not outputs.requires_grad:
        return [{} for _ in steps]
    d = outputs.shape[1]
    with torch.enable_grad():
        sums = outputs.sum(0).unbind()
    found = [
        torch.autograd.grad(
            sums[i], edges, retain_graph=live or i < d - 1, create_graph=live, allow_unused=True
        )
        for i in range(d)
    ]
    stacked = iter([_stacked(column) for column in zip(*found, strict=True)])
    deltas = []
    for step in steps:
        mine = {place: next(stacked) for place in step.edges}
        deltas.append({place: value for place, value in mine.items() if value is not None})
    return deltas


def _stacked(column: tuple[Tensor | None, ...]) -> Tensor | None:
    known = [delta for delta in column if delta is not None]
    if not known:
        return None
    if len(column) == 1:
        return known[0].unsqueeze(0)
    return torch.stack([torch.zeros_like(known[0]) if delta is None else delta for delta in column])


def _chained(step: Step, place: int, piece: Piece, parameters: Parameters, live: bool) -> dict[str, Piece]:
    """Return the pieces of the parameters that the tensor at this place was computed from."""
    source = step.operation.sources[place]
    if isinstance(source, str):
        return {source: piece}
    tensor, names = step.operation.leaves[place], sorted(source.names)
    rows, values = piece.rows(), [parameters[name] for name in names]
    flat = rows.reshape(-1, *tensor.shape).to(tensor.dtype)
    chain = partial(
        torch.autograd.grad,
        step.operation.edges[place],
        values,
        retain_graph=True,
        create_graph=live,
        allow_unused=True,
        materialize_grads=True,
    )
    try:
        found = chain(grad_outputs=flat, is_grads_batched=True)
    except RuntimeError:  # no batching rule for one of the operations
        each = [chain(grad_outputs=row) for row in flat]
        found = tuple(torch.stack(column) for column in zip(*each, strict=True))
    return {name: Dense(value.reshape(*rows.shape[:2], -1)) for name, value in zip(names, found, strict=True)}
