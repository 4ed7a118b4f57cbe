"""A training term recorded as a CUDA graph and played again for each batch.

A term is hundreds of small operations, and a GPU does them faster than Python starts them. Recorded once,
with their gradient in the parameters, they start together.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from likewise.losses.density import RunningTotal
from likewise.network import Network
from likewise.recording import recording

Term = Callable[..., Tensor]
WARM_UPS = 3  # calls before recording, in which operations are traced and libraries set up


def captured(
    term: Term, model: nn.Module | Network, *example: Any, most_groups: int | None = None, **options: Any
) -> "Captured":
    """Return the term of this model, fast on a GPU, for batches of the shapes of the example.

    `captured(group, model, x, y, labels=y, weight=0.1)` is called as `(x, y, labels=y)`: with tensors, and
    all of them; the rest is kept. Batches of other shapes go the usual way, and so does everything where the
    model is not on a GPU. Needs a readout of one output, but for `two_batches` and `along`. A batch that has
    a sample without a finite gradient adds nothing: the term and its gradient are 0. `most_groups`: how many
    groups of a batch may have a pair, where this is known; the largest count.
    """
    if any(isinstance(leaf, RunningTotal) for leaf in tree_leaves((example, options))):
        raise TypeError("A RunningTotal changes at each call: `density` with one cannot be recorded.")
    if options.get("outputs"):
        raise TypeError("A recorded term returns no outputs of the model: leave out outputs=True.")
    return Captured(term, model, most_groups, (example, options))


@dataclass(frozen=True)
class _Recorded:
    graph: Any
    spec: TreeSpec
    leaves: list[Any]  # of the batch: tensors that are read at each play, and what stays
    value: Tensor
    gradient: Tensor  # in all parameters, joined
    places: list[int]  # of the parameters in memory

    def fits(self, leaves: list[Any], spec: TreeSpec) -> bool:
        return spec == self.spec and all(map(_alike, leaves, self.leaves))


class Captured:
    """A term of one model that is played again for batches of one shape; see `captured`."""

    def __init__(
        self, term: Term, model: nn.Module | Network, most: int | None, example: tuple[Any, Any]
    ) -> None:
        self._term, self._model, self._most = term, model, most
        self._kept = {k: v for k, v in example[1].items() if not _holds_tensors(v)}
        named = {k: v for k, v in example[1].items() if k not in self._kept}
        self._names = list(named)
        on_gpu = any(p.device.type == "cuda" for p in self._parameters)
        self._recorded = self._record(*tree_flatten((example[0], named))) if on_gpu else None

    def __call__(self, *batch: Any, **named: Any) -> Tensor:
        """Return the term of a batch, differentiable in the parameters."""
        if set(named) != set(self._names):
            wanted = ", ".join(self._names) or "nothing"
            raise TypeError(f"By name, every call gives {wanted}, as the example did; found {list(named)}.")
        leaves, spec = tree_flatten((batch, {name: named[name] for name in self._names}))
        if self._recorded is None or not self._recorded.fits(leaves, spec):
            return self._called(leaves, spec)
        parameters = self._parameters
        if self._recorded.places != _places(parameters):
            self._recorded = self._record(leaves, spec)
        found: Tensor = _Played.apply(self._recorded, leaves, *parameters)
        return found

    @property
    def _module(self) -> nn.Module:
        return self._model.model if isinstance(self._model, Network) else self._model

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [p for p in self._module.parameters() if p.requires_grad]

    def _called(self, leaves: list[Any], spec: TreeSpec) -> Tensor:
        batch, named = tree_unflatten(leaves, spec)
        return self._term(self._model, *batch, **named, **self._kept)

    def _record(self, leaves: list[Any], spec: TreeSpec) -> _Recorded:
        device = self._parameters[0].device
        own = [leaf.detach().to(device, copy=True) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._called(own, spec)  # as it is: what is wrong with model or batch is said here
        with torch.cuda.device(device):
            aside, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(WARM_UPS):
                    self.once(own, spec)
            torch.cuda.current_stream().wait_stream(aside)
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may go on
                value, gradient = self.once(own, spec)
        return _Recorded(graph, spec, own, value, gradient, _places(self._parameters))

    def once(self, leaves: list[Any], spec: TreeSpec) -> tuple[Tensor, Tensor]:
        """Return the term and its gradient in all parameters, by operations that can be recorded."""
        n = next(len(leaf) for leaf in leaves if isinstance(leaf, Tensor))
        with recording(self._most or n), torch.enable_grad(), _fresh_leaves(self._module):
            value = self._called(leaves, spec)
            given = self._parameters
            found = torch.autograd.grad(value, given, allow_unused=True, materialize_grads=True)
        gradient = torch.cat([part.flatten() for part in found])
        finite = gradient.isfinite().all() & value.detach().isfinite()
        return torch.where(finite, value.detach(), 0), torch.where(finite, gradient, 0)


class _Played(torch.autograd.Function):
    """The value, and backwards the gradient that was computed with it."""

    @staticmethod
    def forward(ctx: Any, recorded: _Recorded, leaves: list[Any], *parameters: Tensor) -> Tensor:
        for mine, given in zip(recorded.leaves, leaves, strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(given, non_blocking=True)
        recorded.graph.replay()
        ctx.save_for_backward(recorded.gradient.clone())  # the next play writes over it
        ctx.parameters = [(p.shape, p.dtype) for p in parameters]
        return recorded.value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Any) -> tuple[Tensor | None, ...]:
        scaled = ctx.saved_tensors[0] * given[0]
        parts = scaled.split([shape.numel() for shape, _ in ctx.parameters])
        found = (
            part.view(shape).to(dtype) for part, (shape, dtype) in zip(parts, ctx.parameters, strict=True)
        )
        return None, None, *found


@contextmanager
def _fresh_leaves(model: nn.Module) -> Iterator[None]:
    """Put leaves over the same memory in the place of parameters, for the time being.

    A leaf belongs to the stream in which it was first used, as long as any graph with it lives (another loss,
    DistributedDataParallel): backward passes would go to that stream, out of the recording.
    """
    dicts = [module._parameters for module in model.modules()]
    before = [dict(own) for own in dicts]
    every = {id(p): p for own in before for p in own.values() if p is not None}
    fresh = {at: nn.Parameter(p.detach(), p.requires_grad) for at, p in every.items()}
    try:
        for own in dicts:
            own.update({name: fresh[id(p)] for name, p in own.items() if p is not None})
        yield
    finally:
        for own, kept in zip(dicts, before, strict=True):
            own.update(kept)


def _places(parameters: list[nn.Parameter]) -> list[int]:
    return [p.data_ptr() for p in parameters]


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


def _alike(given: Any, recorded: Any) -> bool:
    if isinstance(given, Tensor) and isinstance(recorded, Tensor):
        return given.shape == recorded.shape and given.dtype == recorded.dtype
    return given is recorded or bool(given == recorded)
