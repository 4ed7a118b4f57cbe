"""The gradients of some samples, parameter by parameter: one forward pass, a backward for each output."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from likewise.data import Samples
from likewise.engines.backward import chain, output_gradients
from likewise.engines.double_backward import Substitutes
from likewise.engines.factors import ParameterGradient, summed
from likewise.engines.partition import Even
from likewise.engines.ragged import gather_by_rows
from likewise.engines.rules import Call, pieces
from likewise.engines.tracer import PassRecorder, RowTrace, Trace
from likewise.linalg import accumulation_dtype
from likewise.model import Network, Parameters


@dataclass(frozen=True)
class GradientBatch:
    """The gradients of some samples, by parameter."""

    samples: Samples
    d: int
    pieces: dict[str, ParameterGradient]  # only parameters that the outputs depend on
    returned: Any = None  # by the model, with its graph, where the gradients are differentiable
    outputs: Tensor | None = None  # (n, d) of the samples in their batch, where one forward pass had them

    def own(self, device: torch.device) -> Tensor:
        """Return K(x, x): the sum over parameters."""
        empty = torch.zeros(len(self.samples), self.d, self.d, device=device)
        total = empty.to(accumulation_dtype(empty))
        for piece in self.pieces.values():
            total += piece.own()
        return total

    def part(self, where: slice) -> "GradientBatch":
        """Return the gradients of some of the samples."""
        outputs = None if self.outputs is None else self.outputs[where]
        pieces = {name: piece.part(where) for name, piece in self.pieces.items()}
        return GradientBatch(self.samples[where], self.d, pieces, None, outputs)

    def weighted_sum(self, net: Network, weights: Tensor) -> Tensor:
        """Return Σₓ J(x)ᵀ w(x) for weights (n, d), (p,), in the model's precision."""
        column = weights.unsqueeze(2)
        return torch.cat(
            [
                self.pieces[name].vjp(column.to(net.dtype)).flatten()
                if name in self.pieces
                else weights.new_zeros(size, dtype=net.dtype)
                for name, size in net.numels.items()
            ]
        )


def compute_gradients(
    net: Network,
    trace: Trace,
    samples: Samples,
    live: Parameters | None = None,
    instead: Substitutes | None = None,
) -> GradientBatch:
    """Return the gradients of some samples from one forward pass and a backward for each output.

    `live`: the model's own parameters instead of copies, if the gradients are to be differentiable, and
    what to call `instead` of functions whose derivatives are wrong.
    """
    if isinstance(trace, RowTrace):
        found = gather_by_rows(net, trace, samples, live, instead)
        returned = found.returned if live else None
        alike = {name: piece.to(net.dtype) for name, piece in found.pieces.items()}
        return GradientBatch(samples, found.outputs.shape[1], alike, returned, found.outputs.detach())
    recorder = PassRecorder(net, trace, live, instead)
    outputs = recorder.recorded(net, samples)
    uses: dict[str, list[ParameterGradient]] = {}
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
    return GradientBatch(samples, outputs.shape[1], ordered, returned, outputs.detach())
