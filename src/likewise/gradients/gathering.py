"""The gradients of some samples, parameter by parameter: one forward pass, a backward for each output."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from likewise.data import Samples
from likewise.gradients.backward import chain, output_gradients
from likewise.gradients.instead import Instead
from likewise.gradients.partition import Even
from likewise.gradients.pieces import Piece
from likewise.gradients.ragged import gather_by_rows
from likewise.gradients.rules import Call, pieces
from likewise.gradients.sums import summed
from likewise.gradients.trace import Recorder, RowTrace, Trace
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
    if isinstance(trace, RowTrace):
        found = gather_by_rows(net, trace, samples, live, instead)
        returned = found.returned if live else None
        alike = {name: piece.to(net.dtype) for name, piece in found.pieces.items()}
        return Chunk(samples, found.outputs.shape[1], alike, returned, found.outputs.detach())
    recorder = Recorder(net, trace, live, instead)
    outputs = recorder.recorded(net, samples)
    uses: dict[str, list[Piece]] = {}
    dtype = net.dtype  # of all pieces: a model may hold layers of several types
    steps = recorder.steps
    for step, deltas in zip(steps, output_gradients(outputs, steps, live is not None), strict=True):
        step.refuse_overwritten()
        if deltas:
            for place, piece in pieces(
                Call(step.operation, step.layout, deltas, Even(len(samples)), instead)
            ).items():
                chained = chain(step.operation, place, piece, recorder.parameters, live is not None)
                for name, part in chained.items():
                    uses.setdefault(name, []).append(part.to(dtype))
    ordered = {name: summed(uses[name]) for name in net.names if name in uses}
    returned = recorder.returned if live else None
    return Chunk(samples, outputs.shape[1], ordered, returned, outputs.detach())
