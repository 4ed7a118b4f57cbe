"""The gradients of some samples, parameter by parameter: one forward pass, a backward for each output."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap

from likewise.data import Samples
from likewise.gradients.instead import Instead
from likewise.gradients.pieces import Dense, Piece
from likewise.gradients.rules import Call, pieces
from likewise.gradients.sums import summed
from likewise.gradients.trace import Recorder, Source, Step, Trace, Untraceable
from likewise.linalg import wide
from likewise.network import Network, Parameters


@dataclass(frozen=True)
class Chunk:
    """The gradients of some samples, by parameter."""

    samples: Samples
    d: int
    pieces: dict[str, Piece]  # only parameters that the outputs depend on
    returned: Any = None  # by the model, with its graph, where the gradients are differentiable

    def own(self, device: torch.device) -> Tensor:
        """Return K(x, x): the sum over parameters."""
        empty = torch.zeros(len(self.samples), self.d, self.d, device=device)
        total = empty.to(wide(empty))
        for piece in self.pieces.values():
            total += piece.own()
        return total


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
                source = step.operation.sources[place]
                for name, part in _chained(source, piece, recorder.parameters).items():
                    uses.setdefault(name, []).append(part)
    ordered = {name: summed(uses[name]) for name in net.names if name in uses}
    return Chunk(samples, outputs.shape[1], ordered, recorder.returned if live else None)


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


def _chained(source: Source, piece: Piece, parameters: Parameters) -> dict[str, Piece]:
    """Return the pieces of the parameters that a derived tensor was computed from."""
    if isinstance(source, str):
        return {source: piece}
    rows = piece.rows()
    values = {name: parameters[name] for name in sorted(source.names())}
    derived, pullback, *_ = vjp(source.value, values)
    flat = rows.reshape(-1, *derived.shape).to(derived.dtype)
    try:
        found = vmap(lambda row: pullback(row)[0])(flat)
    except RuntimeError:  # no batching rule for one of the operations
        each = [pullback(row)[0] for row in flat]
        found = {name: torch.stack([one[name] for one in each]) for name in values}
    return {name: Dense(value.reshape(*rows.shape[:2], -1)) for name, value in found.items()}
