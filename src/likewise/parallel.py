"""Sharing work among processes: the only place of torch.distributed.

Both functions give every process the same result as one process would get. Started by torchrun with
an initialized process group they share the work; otherwise they are plain loops. All processes must
make the same calls in the same order; an error in one is raised in all.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map
from tqdm import tqdm

show_progress: ContextVar[bool] = ContextVar("show_progress", default=True)
Clock = Callable[[], float]  # anything that grows as work is done: seconds, operations


class Pass(NamedTuple):
    """One pass over data that was made, and what it took by the clock."""

    what: str
    cost: float


# Of each thread: which clocks run, and whether a pass is under way.
_records: ContextVar[tuple[tuple[Clock, list[Pass]], ...]] = ContextVar("records", default=())
_inside: ContextVar[bool] = ContextVar("inside a pass", default=False)


@contextmanager
def recorded(clock: Clock) -> Iterator[list[Pass]]:
    """Collect the passes made inside, each with what it took."""
    passes: list[Pass] = []
    before = _records.set((*_records.get(), (clock, passes)))
    try:
        yield passes
    finally:
        _records.reset(before)


class FailedElsewhere(RuntimeError):
    """Another process raised an error, whose type and text are quoted."""


def processes() -> int:
    """Return how many processes share the work."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def join_over(function: Callable[[range], Any], spans: list[range], what: str) -> Any:
    """Return function(span) joined along dimension 0; it has a row for each place of the span.

    `function` returns a tensor, or a tuple of tensors. Results go straight into their place: small
    tensors kept between large temporary ones would fragment the heap, and memory would grow.
    """
    n = spans[-1].stop
    joined: Any = None

    def place(where: Tensor, part: Tensor) -> None:
        where[span.start : span.stop] = part

    with _together(), _noted(what):
        for span in _shared(spans, what):
            parts = function(span)
            for part in parts if isinstance(parts, tuple) else (parts,):
                if not isinstance(part, Tensor) or part.dim() == 0 or len(part) != len(span):
                    found = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
                    raise ValueError(
                        f"A row for each of {len(span)} samples was expected, found {found}: a reduction "
                        "keeps the rows, as k.sum(1) does."
                    )
            if joined is None:
                joined = tree_map(lambda part: part.new_zeros(n, *part.shape[1:]), parts)
            tree_map(place, joined, parts)
    return tree_map(_summed, _alike(joined))


def sum_over(function: Callable[[range], Tensor], spans: list[range], what: str) -> Tensor:
    """Return Σ function(span), a tensor of the same shape for each."""
    total: Tensor | None = None
    with _together(), _noted(what):
        for span in _shared(spans, what):
            term = function(span)
            total = term if total is None else total.add_(term)
    return _summed(_alike(total))


@contextmanager
def _noted(what: str) -> Iterator[None]:
    records = _records.get()
    starts = [clock() for clock, _ in records]
    yield
    for (clock, passes), start in zip(records, starts, strict=True):
        passes.append(Pass(what, clock() - start))


def _shared(spans: list[range], what: str) -> Iterator[range]:
    """Yield this process's share, with a progress bar after two seconds, on a terminal, in one."""
    rank = dist.get_rank() if processes() > 1 else 0
    quiet = True if rank > 0 or not show_progress.get() else None
    yield from tqdm(spans[rank :: processes()], desc=what, delay=2, disable=quiet, leave=False)


class _together:
    """Raise in all processes what was raised in one, so that none waits for ever."""

    def __enter__(self) -> None:
        if _inside.get():
            raise RuntimeError("A pass over the data was asked for inside another: take it before.")
        self._before = _inside.set(True)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        _inside.reset(self._before)
        if processes() == 1:
            return
        everyone: list[Any] = [None] * processes()
        dist.all_gather_object(everyone, None if error is None else f"{kind.__name__}: {error}")
        broken = [(rank, text) for rank, text in enumerate(everyone) if text is not None]
        if error is None and broken:
            raise FailedElsewhere(f"Process {broken[0][0]} failed: {broken[0][1]}")


def _alike(result: Any) -> Any:
    """Return the result, or zeros of its shape where a process had no share."""
    if processes() == 1:
        return result
    shapes: list[Any] = [None] * processes()
    mine = None
    if result is not None:
        mine = tree_map(lambda t: (tuple(t.shape), t.dtype, t.device.type), result)
    dist.all_gather_object(shapes, mine)
    if result is not None:
        return result
    known = next(shape for shape in shapes if shape is not None)

    def zeros(shape: Any) -> Tensor:
        return torch.zeros(shape[0], dtype=shape[1], device=shape[2])

    return zeros(known) if isinstance(known[1], torch.dtype) else tuple(map(zeros, known))


def _summed(tensor: Tensor) -> Tensor:
    """Return the sum over processes; places that another process filled are zero in this one."""
    if processes() == 1:
        return tensor
    shared = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
    dist.all_reduce(shared)
    return shared.to(tensor.dtype)
