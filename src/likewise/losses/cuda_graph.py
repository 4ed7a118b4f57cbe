"""A training term recorded as a CUDA graph and played again for each batch.

A term is hundreds of small operations, and a GPU does them faster than Python starts them. Recorded once,
with their gradient in the parameters, they start together. What is recorded reads parameters, buffers and
batches where they were; what else a term looks at stays as it was.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from likewise.losses.arguments import RecordedCombinations
from likewise.losses.functional import group_with_outputs, two_batches_with_outputs
from likewise.losses.samplers import RunningTotal
from likewise.model import Network
from likewise.torch_state import exclusive, recording

WARM_UPS = 3  # calls before recording, in which operations are traced and libraries set up
RECORDINGS = 3  # after so many in a row, parameters or buffers seem to move at each step


def captured(
    term: Callable[..., Tensor],
    model: nn.Module | Network,
    *example: Any,
    most_groups: int | None = None,
    **options: Any,
) -> "Captured":
    """Return the term of this model, fast on a GPU, for batches of the shapes of the example.

    `captured(group, model, x, y, labels=y, weight=0.1)` is called as `(x, y, labels=y)`: with all that was
    given by place and with all tensors given by name; other options are kept. Batches of other shapes go the
    usual way, and so does everything where the model is not on a GPU.

    Needs a readout of one output, but for `two_batches` and `along`. Without a readout, `group`, `pair` and `orbit`
    read one random combination of outputs, and so do their recordings: it is drawn before each play from the same
    generator. A batch that has a sample without a finite gradient adds nothing: the term and its gradient are 0.

    Args:
        term: A training term, one with options fixed by functools.partial, or a function of your own from model and
            batch to one number.
        model: The model that is trained.
        example: A batch, as the term takes it after the model.
        most_groups: The largest number of groups with a pair in a batch, if it is known to be less than half the number
            of samples; of more groups, the largest count.
        options: Of the term; tensors among them belong to the batch.

    Returns:
        The term as a function of batches.

    Example:
        >>> import torch, likewise as lw
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        >>> x, y = torch.randn(6, 3), torch.arange(6) % 2
        >>> term = lw.losses.captured(lw.losses.group, model, x, y, weight=0.1)
        >>> term(x, y).backward()

    """
    if not isinstance(model, nn.Module | Network):
        raise TypeError(f"A torch.nn.Module or a Network is needed, found {type(model).__name__}.")
    inside = (term.args, term.keywords) if isinstance(term, partial) else ()
    if any(isinstance(leaf, RunningTotal) for leaf in tree_leaves((inside, example, options))):
        raise TypeError("A RunningTotal changes at each call: `density` with one cannot be recorded.")
    if _function(term) in (group_with_outputs, two_batches_with_outputs):
        raise TypeError(
            "A recorded term is one number and returns no outputs of the model: record `group` or `two_batches`, "
            "or a function of your own that returns the main loss plus the term."
        )
    if most_groups is not None and (not isinstance(most_groups, int) or most_groups < 1):
        raise ValueError(f"most_groups must be a number of groups, 1 or more, found {most_groups!r}.")
    return Captured(term, model, most_groups, (example, options))


class _Place(NamedTuple):
    """A parameter or buffer as it was at the time of recording."""

    tensor: Tensor
    memory: Tensor  # which is not given to others meanwhile
    trained: bool

    def holds(self, now: Tensor) -> bool:
        unmoved = now is self.tensor and now.data_ptr() == self.memory.data_ptr()
        return unmoved and now.requires_grad == self.trained


@dataclass(frozen=True)
class _Recorded:
    graph: Any
    leaves: list[Any]  # of the batch: tensors that are read at each play, and what stays
    spec: TreeSpec
    places: list[_Place]  # where the graph reads parameters and buffers
    parameters: list[Tensor]  # those that have a gradient
    value: Tensor
    gradient: Tensor  # in these, joined
    combinations: RecordedCombinations  # of outputs that the graph reads, drawn again before each play

    def reads(self, state: list[Tensor]) -> bool:
        """Whether these are the parameters and buffers, where they were."""
        return len(state) == len(self.places) and all(map(_Place.holds, self.places, state))

    def fits(self, leaves: list[Any], spec: TreeSpec) -> bool:
        """Whether a batch can be played."""
        return spec == self.spec and all(map(_alike, leaves, self.leaves))


class Captured:
    """A term of one model that is played again for batches of one shape; see `captured`.

    Example:
        >>> import torch, likewise as lw
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        >>> x, y = torch.randn(8, 4), torch.arange(8) % 2
        >>> group = lw.losses.captured(lw.losses.group, net, x, y)
        >>> isinstance(group, lw.losses.Captured), group(x, y).shape
        (True, torch.Size([]))

    """

    def __init__(
        self,
        term: Callable[..., Tensor],
        model: nn.Module | Network,
        most: int | None,
        example: tuple[Any, Any],
    ) -> None:
        self._term, self._model, self._most = term, model, most
        self._kept = {k: v for k, v in example[1].items() if not _holds_tensors(v)}
        named = {k: v for k, v in example[1].items() if k not in self._kept}
        self._names = list(named)
        self._example = _flatten_arguments(example[0], named)
        self._recorded: _Recorded | None = None
        self._recordings = 0
        self._combinations = RecordedCombinations()
        with exclusive:
            self._ready()

    def __call__(self, *batch: Any, **named: Any) -> Tensor:
        """Return the term of a batch, differentiable in the parameters."""
        if set(named) != set(self._names):
            wanted = ", ".join(f"{name}=..." for name in self._names) or "nothing"
            raise TypeError(
                f"Call it as the example was given: as much by place, and by name {wanted}. What is no "
                f"tensor was fixed then, like a weight. Found by name: {', '.join(named) or 'nothing'}."
            )
        leaves, spec = _flatten_arguments(batch, {name: named[name] for name in self._names})
        with exclusive:  # recording swaps the model's parameters
            recorded = self._ready()
        wants_more = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
        if recorded is None or wants_more or not recorded.fits(leaves, spec):
            return self._called(leaves, spec)
        return _Played.apply(recorded, leaves, *recorded.parameters)

    def __repr__(self) -> str:
        term = _function(self._term)
        name = getattr(term, "__name__", type(term).__name__)
        return f"Captured({name}, {'recorded' if self._recorded else 'not recorded'})"

    def __getstate__(self) -> dict[str, Any]:
        return {
            **vars(self),
            "_recorded": None,
            "_combinations": RecordedCombinations(),
        }  # a graph cannot be copied

    def _ready(self) -> _Recorded | None:
        """Return a recording that reads the model where it is now; None where there can be none."""
        module = self._module
        state: list[Tensor] = [*module.parameters(), *module.buffers()]
        trained = [p for p in module.parameters() if p.requires_grad]
        if not trained or trained[0].device.type != "cuda" or self._recordings > RECORDINGS:
            return None
        known = self._recorded
        if known is not None and known.reads(state):
            self._recordings = 1  # it serves: what moved before had a reason
            return known
        self._recorded = None  # its memory first
        self._recordings += 1
        if self._recordings > RECORDINGS:
            warnings.warn(
                "Parameters or buffers of the model lie elsewhere at each step: the term is no longer "
                "recorded. Write to them in place.",
                stacklevel=3,
            )
            return None
        self._recorded = self._record(*self._example, state)
        return self._recorded

    @property
    def _module(self) -> nn.Module:
        return self._model.model if isinstance(self._model, Network) else self._model

    def _called(self, leaves: list[Any], spec: TreeSpec) -> Tensor:
        batch, named = tree_unflatten(leaves, spec)
        found = self._term(self._model, *batch, **named, **self._kept)
        lost = isinstance(found, Tensor) and torch.is_grad_enabled() and not found.requires_grad
        if not isinstance(found, Tensor) or found.dim() or lost:
            raise TypeError(
                f"A term is one number that depends on trained parameters, found {_describe_result(found)}."
            )
        return found

    @contextmanager
    def _recordable(self, n: int) -> Iterator[None]:
        with recording(self._most or n), _fresh_leaves(self._module):
            yield

    def _record(self, leaves: list[Any], spec: TreeSpec, state: list[Tensor]) -> _Recorded:
        self._combinations = RecordedCombinations()
        device = next(p.device for p in self._module.parameters() if p.requires_grad)
        own = [leaf.detach().to(device, copy=True) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        with torch.inference_mode(False), torch.enable_grad(), torch.cuda.device(device):
            expected = self.once(
                own, spec, recordable=False
            )  # what is wrong with model or batch is said here
            aside, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(WARM_UPS):
                    self.once(own, spec)
            torch.cuda.current_stream().wait_stream(aside)
            try:
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may go on
                    value, gradient, parameters = self.once(own, spec)
            except Exception as error:
                error.add_note("This term of this model cannot be recorded: use the term as it is.")
                raise
            graph.replay()
            _refuse_difference(expected, value, gradient)
        places = [_Place(tensor, tensor.detach(), tensor.requires_grad) for tensor in state]
        return _Recorded(graph, own, spec, places, parameters, value, gradient, self._combinations)

    def once(
        self, leaves: list[Any], spec: TreeSpec, recordable: bool = True
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return the term, its gradient in the parameters that it depends on, joined, and these."""
        n = next(len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim())
        trained: list[Tensor] = [p for p in self._module.parameters() if p.requires_grad]
        with self._combinations.in_use(), self._recordable(n) if recordable else nullcontext():
            value = self._called(leaves, spec)
            fresh = [p for p in self._module.parameters() if p.requires_grad]
            found = torch.autograd.grad(value, fresh, allow_unused=True)
        used = [p for p, g in zip(trained, found, strict=True) if g is not None]
        gradient = torch.cat([g.flatten() for g in found if g is not None])
        finite = gradient.isfinite().all() & value.detach().isfinite()
        return torch.where(finite, value.detach(), 0), torch.where(finite, gradient, 0), used


class _Played(torch.autograd.Function):
    """The value, and backwards the gradient that was computed with it."""

    @staticmethod
    def forward(ctx: Any, recorded: _Recorded, leaves: list[Any], *parameters: Tensor) -> Tensor:
        for mine, given in zip(recorded.leaves, leaves, strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(given)
        recorded.combinations.redraw()
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


def _refuse_difference(expected: tuple[Any, ...], value: Tensor, gradient: Tensor) -> None:
    """Say so if a play does not give what the term gave."""
    far = (gradient - expected[1]).norm() > 0.02 * expected[1].norm() + 1e-6
    if far or (value - expected[0]).abs() > 1e-3 * (1 + expected[0].abs()):
        raise RuntimeError(
            f"Recorded, the term is {float(value):.4g} where it was {float(expected[0]):.4g}, or has another "
            "gradient: it draws at random, has a sample without a finite gradient in the example, or reaches "
            "parameters other than through the model. Use the term without `captured`."
        )


def _function(term: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function inside `functools.partial`."""
    return _function(term.func) if isinstance(term, partial) else term


def _flatten_arguments(batch: Any, named: dict[str, Any]) -> tuple[list[Any], TreeSpec]:
    return tree_flatten((tuple(map(_plain, batch)), {name: _plain(value) for name, value in named.items()}))


def _plain(value: Any) -> Any:
    """Return dicts for other mappings, and tensors for arrays and lists of numbers."""
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    numbers = isinstance(value, list | tuple) and value and all(isinstance(v, int | float) for v in value)
    return torch.as_tensor(value) if numbers or isinstance(value, np.ndarray) else value


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor | np.ndarray) for leaf in tree_leaves(_plain(value)))


def _alike(given: Any, recorded: Any) -> bool:
    if isinstance(given, Tensor) and isinstance(recorded, Tensor):
        return given.shape == recorded.shape and given.dtype == recorded.dtype
    return given is recorded or bool(given == recorded)


def _describe_result(found: Any) -> str:
    if not isinstance(found, Tensor):
        return type(found).__name__
    return f"a tensor {tuple(found.shape)}" + ("" if found.requires_grad else " that depends on none")
