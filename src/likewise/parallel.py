"""Sharing work among processes: the only place of torch.distributed.

Both functions give every process the same result as one process would get. Started by torchrun with
an initialized process group they share the items; otherwise they are plain loops. All processes
must make the same calls in the same order; an error in one is raised in all.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map
from tqdm import tqdm

Item = TypeVar("Item")
Result = TypeVar("Result")


def processes() -> int:
    """Return how many processes share the work."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def map_over(function: Callable[[Item], Result], items: Sequence[Item], what: str) -> list[Result]:
    """Return [function(item) for item in items], computed by all processes together."""
    if processes() == 1:
        return [function(item) for item in _shown(items, what)]
    rank, size = dist.get_rank(), processes()
    shares = _from_all(lambda: [function(item) for item in _shown(items[rank::size], what)])
    return [shares[i % size][i // size] for i in range(len(items))]


def sum_over(function: Callable[[Item], Tensor], items: Sequence[Item], what: str) -> Tensor:
    """Return Σ function(item) over the items, a tensor of the same shape for each."""

    def partial() -> Tensor | None:
        total: Tensor | None = None
        for item in _shown(items[rank::size], what):
            term = function(item)
            total = term if total is None else total.add_(term)
        return total

    rank, size = (dist.get_rank(), processes()) if processes() > 1 else (0, 1)
    if size == 1:
        total = partial()
        assert total is not None, "nothing to sum"
        return total
    mine: list[Tensor | None] = []

    def shape() -> Any:
        mine.append(partial())
        return None if mine[0] is None else (mine[0].shape, mine[0].dtype, mine[0].device.type)

    known = next(s for s in _from_all(shape) if s is not None)
    total = mine[0]
    if total is None:  # more processes than items
        total = torch.zeros(known[0], dtype=known[1], device=known[2])
    dist.all_reduce(total)
    return total


def _from_all(function: Callable[[], Result]) -> list[Result]:
    """Return what `function` gave in each process; where it failed in one, fail in all."""
    result: Any = None
    failure: Exception | None = None
    device = None
    try:
        result = function()
        device = next((t.device for t in _tensors(result)), None)
        result = tree_map(lambda v: v.cpu() if isinstance(v, Tensor) else v, result)
    except Exception as error:
        failure = error
    everyone: list[Any] = [None] * processes()
    dist.all_gather_object(everyone, (result, None if failure is None else repr(failure)))
    if failure is not None:
        raise failure
    broken = [(rank, text) for rank, (_, text) in enumerate(everyone) if text is not None]
    if broken:
        raise RuntimeError(f"Process {broken[0][0]} failed: {broken[0][1]}")
    back = [result for result, _ in everyone]
    return tree_map(lambda v: v.to(device) if isinstance(v, Tensor) and device else v, back)


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map(lambda v: found.append(v) if isinstance(v, Tensor) else None, tree)
    return found


def _shown(items: Sequence[Item], what: str) -> Any:
    """A progress bar, after two seconds, on a terminal, in one process."""
    quiet = processes() > 1 and dist.get_rank() > 0
    return tqdm(items, desc=what, delay=2, disable=True if quiet else None, leave=False)
