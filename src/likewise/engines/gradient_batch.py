"""The gradients of a batch by parameter: one forward pass, and a backward for each output."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from likewise.data import Samples
from likewise.engines.double_backward import Substitutes
from likewise.engines.factors import (
    Block,
    ParameterGradient,
    combine_outputs,
    concatenate,
    copy_gradient,
    merge_small,
    sum_gradients,
)
from likewise.engines.membership import Even
from likewise.engines.memory import PRODUCT_BYTES
from likewise.engines.ragged import compute_gradients_by_rows
from likewise.engines.rules import Call, chain, output_gradients, parameter_gradients
from likewise.engines.tracer import FirstRecorder, PassRecorder, RowTrace, Step, Trace
from likewise.linalg import accumulation_dtype, product
from likewise.model import Network, Parameters
from likewise.torch_state import fast_attention


@dataclass(frozen=True)
class GradientBatch:
    """The gradients of a batch, by parameter."""

    samples: Samples
    d: int
    by_parameter: dict[str, ParameterGradient]  # only parameters that the outputs depend on
    returned: Any = None  # by the model, with its graph, where the gradients are differentiable
    outputs: Tensor | None = None  # (n, d) of the samples in their batch, where one forward pass had them
    bytes_per_output: int = 0  # of the output gradients of all operations, of one output and all samples
    observed: tuple[Tensor, ...] | None = None  # (n, ...) each, by the network's observer

    @cached_property
    def blocks(self) -> list[Block]:
        """The gradients, small dense ones concatenated."""
        return merge_small(self.by_parameter)

    def self_gram(self, device: torch.device) -> Tensor:
        """Return K(x, x): the sum over parameters."""
        empty = torch.zeros(len(self.samples), self.d, self.d, device=device)
        return add_up(
            (block.gradient.self_gram() for block in self.blocks), empty.to(accumulation_dtype(empty))
        )

    def part(self, where: slice | Tensor) -> "GradientBatch":
        """Return the gradients of some of the samples: of a slice, or at places, (k,), which copies them."""
        outputs = None if self.outputs is None else self.outputs[where]
        gradients = {name: gradient.part(where) for name, gradient in self.by_parameter.items()}
        return GradientBatch(self.samples[where], self.d, gradients, None, outputs)

    def copy(self) -> "GradientBatch":
        """Return the same gradients; what is computed from the copy is kept there only."""
        known: dict[int, ParameterGradient] = {}
        copied = replace(
            self, by_parameter={k: copy_gradient(v, known) for k, v in self.by_parameter.items()}
        )
        if "blocks" in self.__dict__:
            blocks = [Block(names, copy_gradient(gradient, known)) for names, gradient in self.blocks]
            copied.__dict__["blocks"] = blocks
        return copied

    def weighted_sum(self, net: Network, weights: Tensor) -> list[Tensor]:
        """Return Σₓ J(x)ᵀ w(x) for weights (n, d), of each parameter, in the model's precision."""
        return [part[0] for part in self._sums_of_parameters(weights.unsqueeze(2).to(net.dtype), net.numels)]

    def weighted_sums(
        self, weights: Tensor, numels: dict[str, int], max_bytes: int = PRODUCT_BYTES
    ) -> Tensor:
        """Return Σₓ J(x)ᵀ w(x) for weights (n, d, c), (c, p).

        Args:
            weights: (n, d, c).
            numels: The entries of all parameters, in order.
            max_bytes: For products of several columns at a time.

        """
        return torch.cat(self._sums_of_parameters(weights, numels, max_bytes), 1)

    def products(
        self, directions: Callable[[tuple[str, ...]], Tensor], empty: Tensor, max_bytes: int
    ) -> Tensor:
        """Return J(x) u for c directions, (n, d, c).

        Args:
            directions: Returns those of some parameters, (c, ...).
            empty: Zeros, (n, d, c).
            max_bytes: For products of several directions at a time.

        """

        def multiply(block: Block) -> Tensor:
            groups = block.gradient.column_groups(empty.shape[2], max_bytes)
            some = directions(block.names)
            return concatenate([block.gradient.jvp(some[group]) for group in groups], 2)

        return add_up(map(multiply, self.blocks), empty) if empty.numel() else empty

    def sums_by_output(
        self, weights: Tensor, whitening: Tensor | None, numels: dict[str, int], max_bytes: int
    ) -> Iterator[tuple[tuple[str, ...], slice, Tensor]]:
        """Yield terms of Σₓ w(x) S_e(x) for each output e: parameters, columns of weights, and the term (d, b, numel).

        Args:
            weights: (n, c), the same for all outputs.
            whitening: (n, d, d), of S(x) = W(x) J(x); None: J(x).
            numels: The entries of all parameters.
            max_bytes: For gradients of few samples that are formed, and for products of several columns at a time.

        """
        c = weights.shape[1]
        for names, gradient in self.blocks:
            numel = sum(numels[name] for name in names)
            if not self._serves_columns(gradient, numel, max_bytes):
                for group in gradient.column_groups(c, max_bytes // self.d):
                    yield names, group, self._sum_without_rows(gradient, weights[:, group], whitening)
                continue
            size = max(1, max_bytes // (2 * self.d * numel * gradient.dtype.itemsize))
            for here, rows in self._rows_of_few(gradient, whitening, numel, max_bytes):
                for start in range(0, c, size):
                    group = slice(start, min(start + size, c))
                    yield names, group, weights[here, group].to(rows).mT @ rows.transpose(0, 1)

    def products_by_output(
        self,
        directions: Callable[[tuple[str, ...]], Tensor],
        empty: Tensor,
        whitening: Tensor | None,
        numels: dict[str, int],
        max_bytes: int,
    ) -> Tensor:
        """Return S_e(x) u_e for directions of each output e, (n, d, c).

        Args:
            directions: Returns those of some parameters, (d · c, ...).
            empty: Zeros, (n, d, c), to which products are added.
            whitening: As of `sums_by_output`.
            numels: Likewise.
            max_bytes: Likewise.

        """
        n, d, c = empty.shape
        for names, gradient in self.blocks:
            own, numel = directions(names), sum(numels[name] for name in names)
            if self._serves_columns(gradient, numel, max_bytes):
                for here, rows in self._rows_of_few(gradient, whitening, numel, max_bytes):
                    empty[here] += product(rows.transpose(0, 1), own.unflatten(0, (d, c))).transpose(0, 1)
                continue
            groups = gradient.column_groups(d * c, max_bytes)
            products = concatenate([gradient.jvp(own[group]) for group in groups], 2).to(empty)
            mixed = products if whitening is None else whitening.to(empty) @ products
            empty += mixed.view(n, d, d, c).diagonal(dim1=1, dim2=2).transpose(1, 2)
        return empty

    def _serves_columns(self, gradient: ParameterGradient, numel: int, max_bytes: int) -> bool:
        """Whether several columns of weights cost less from rows of a few samples, which fit."""
        fits = 2 * self.d * numel * gradient.dtype.itemsize <= max_bytes
        return fits and gradient.rows_serve_columns

    def _rows_of_few(
        self, gradient: ParameterGradient, whitening: Tensor | None, numel: int, max_bytes: int
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield consecutive samples and their S(x), (b, d, numel), which the next overwrite."""
        n = len(self.samples)
        fitting = min(n, max_bytes // (2 * self.d * numel * gradient.dtype.itemsize))
        memory: Tensor | None = (
            None  # of all blocks: on a CPU, fresh memory takes longer to touch than to write
        )
        for start in range(0, n, fitting):
            here, done = slice(start, min(start + fitting, n)), 0
            part = gradient.part(here)
            part = part if whitening is None else combine_outputs(part, whitening[here])
            for block in part.blocks():
                rows = block.rows()
                memory = rows.new_empty(fitting, *rows.shape[1:]) if memory is None else memory
                memory[done : done + len(rows)] = rows
                done += len(rows)
            assert memory is not None  # a batch has a sample at least
            yield here, memory[:done]

    def _sum_without_rows(
        self, gradient: ParameterGradient, weights: Tensor, whitening: Tensor | None
    ) -> Tensor:
        """Return Σₓ w(x) S_e(x), (d, c, numel), by columns of weights of all outputs."""
        n, c = weights.shape
        mix = torch.eye(self.d).to(weights).expand(n, -1, -1) if whitening is None else whitening.to(weights)
        every = torch.einsum("nef,nc->nfec", mix, weights).flatten(2)
        return gradient.vjp(every).unflatten(0, (self.d, c))

    def _sums_of_parameters(
        self, weights: Tensor, numels: dict[str, int], max_bytes: int = PRODUCT_BYTES
    ) -> list[Tensor]:
        named: dict[str, Tensor] = {}
        for names, gradient in self.blocks:
            groups = gradient.column_groups(weights.shape[2], max_bytes)
            sums = concatenate([gradient.vjp(weights[:, :, group]) for group in groups], 0)
            named |= zip(names, sums.split([numels[name] for name in names], dim=1), strict=True)
        dtype = next(iter(named.values())).dtype if named else weights.dtype
        c = weights.shape[2]
        return [
            named[name] if name in named else weights.new_zeros(c, size, dtype=dtype)
            for name, size in numels.items()
        ]


def add_up(terms: Iterable[Tensor], total: Tensor) -> Tensor:
    """Return total + Σ terms; few small terms in one operation."""
    if total.numel() > 2**12:
        for term in terms:
            total += term
        return total
    small = list(terms)
    return total if not small else total + torch.stack(small).sum(0, dtype=total.dtype)


def compute_gradients(
    net: Network,
    trace: Trace,
    samples: Samples,
    live: Parameters | None = None,
    substitutes: Substitutes | None = None,
    names: tuple[str, ...] | None = None,
) -> GradientBatch:
    """Return the gradients of a batch from one forward pass and a backward for each output.

    Args:
        net: The network; call this inside `net.evaluation_mode`.
        trace: Of the model, on samples of the same kind.
        samples: The batch.
        live: The model's own parameters, for differentiable gradients; None for detached copies.
        substitutes: Replacements of functions whose higher derivatives are wrong.
        names: Of the parameters whose gradients are needed; all of the network's if None.

    Raises:
        UntraceableError: The model takes another branch than the trace.

    """
    if isinstance(trace, RowTrace):
        by_rows = compute_gradients_by_rows(net, trace, samples, live, substitutes)
        returned = by_rows.returned if live else None
        alike = {
            name: gradient.to(net.dtype)
            for name, gradient in by_rows.by_parameter.items()
            if names is None or name in names
        }
        return GradientBatch(samples, by_rows.outputs.shape[1], alike, returned, by_rows.outputs.detach())
    recorder = PassRecorder(net, trace, live, substitutes)
    with nullcontext() if live else fast_attention(next(iter(recorder.parameters.values())).device):
        outputs = recorder.record_pass(net, samples)
    return differentiate_pass(net, recorder, samples, outputs, live is not None, substitutes, names)


def differentiate_pass(
    net: Network,
    recorder: PassRecorder | FirstRecorder,
    samples: Samples,
    outputs: Tensor,
    live: bool = False,
    substitutes: Substitutes | None = None,
    names: tuple[str, ...] | None = None,
) -> GradientBatch:
    """Return the gradients of a batch from a recorded forward pass: a backward for each output.

    Args:
        net: The network.
        recorder: Of the pass.
        samples: The batch.
        outputs: (n, d), what the pass returned, or combinations of it.
        live: Whether the gradients are differentiable.
        substitutes: As `compute_gradients` has them.
        names: Of the parameters whose gradients are needed; all of the network's if None.

    """
    observed = None if net.observer is None else net.observer.take()
    uses: dict[str, list[ParameterGradient]] = {}
    dtype = net.dtype  # of all gradients: a model may have layers of several types
    is_uniform = all(value.dtype == dtype for value in recorder.parameters.values())
    steps = [step for step in recorder.steps if names is None or step.reaches(names)]
    bytes_per_output = count_output_bytes(steps)
    pending = output_gradients(outputs, steps, live)
    for step in reversed(steps):
        deltas = pending.pop()  # released as soon as its gradients are computed
        step.refuse_overwritten()
        if deltas:
            for place, gradient in parameter_gradients(
                Call(step.operation, step.layout, deltas, Even(len(samples)), substitutes)
            ).items():
                chained = chain(step.operation, place, gradient, recorder.parameters, live)
                for name, part in chained.items():
                    uses.setdefault(name, []).insert(0, part if is_uniform else part.to(dtype))
    wanted = net.names if names is None else names
    ordered = {name: sum_gradients(uses[name]) for name in wanted if name in uses}
    returned = recorder.returned if live else None
    return GradientBatch(
        samples, outputs.shape[1], ordered, returned, outputs.detach(), bytes_per_output, observed
    )


def count_output_bytes(steps: list[Step]) -> int:
    """Return the bytes of the gradients of one output with respect to the outputs of all operations."""
    return sum(step.operation.outputs[i].nbytes for step in steps for i in step.edges)
