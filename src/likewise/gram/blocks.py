"""All pairs of two data sets, one block of rows and columns at a time.

A block is small enough to stay in the processor's cache while reducers look at it. Of a data set with itself, each
pair of blocks is computed once: the block serves its rows, and transposed its columns. Whoever shares the rows, every
row is given its columns in order and from the same products, so that results have the same bits.
"""

from collections.abc import Callable, Iterator, Sequence
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from likewise.distributed import join_results, own_share
from likewise.engines.memory import equal_size
from likewise.gram.strips import BlockReducer, Strip, split_results

BLOCK = 512  # rows and columns whose similarities stay in the cache while reducers look at them
DEVICE_BLOCK = 4096  # of a GPU, which takes longer to start than to multiply smaller ones
BLOCK_BYTES = 64  # for a pair: similarities, their powers, and what reducers make of them

Blocks = Callable[[range, range], Strip]
Totals = list[tuple[Tensor, ...]]


def visit_blocks(
    compute: Blocks,
    rows: list[range],
    columns: list[range] | None,
    reducers: Sequence[BlockReducer],
    about: Any = None,
    what: str = "pairs",
) -> list[tuple[Tensor, ...]]:
    """Return what each reducer keeps of every row, joined over blocks of rows.

    Args:
        compute: Returns the block of rows and columns at these places.
        rows: Places of the rows of each block.
        columns: Those of the columns; None for a symmetric matrix, whose columns are the rows.
        reducers: Each is shown every block.
        about: What has to be the same on all ranks, beside the reducers.
        what: What the pass is called in messages.

    """
    if columns is None:
        finished = _symmetric_rows(compute, rows, own_share(rows, what), reducers)
    else:
        finished = _rectangular_rows(compute, own_share(rows, what), columns, reducers)
    joined = join_results(lambda _: next(finished), rows, what, (about, tuple(reducers)))
    return split_results(joined, tuple(reducers))


def block_spans(n: int, device: torch.device, max_memory: int = 2**30) -> list[range]:
    """Return the places of the rows or columns of each block, of about one size."""
    most = BLOCK if device.type == "cpu" else DEVICE_BLOCK
    size = equal_size(n, max(1, min(most, isqrt(max_memory // BLOCK_BYTES))))
    return [range(start, min(start + size, n)) for start in range(0, n, size)]


def _rectangular_rows(
    compute: Blocks, mine: list[range], columns: list[range], reducers: Sequence[BlockReducer]
) -> Iterator[tuple[Tensor, ...]]:
    """Yield the results of each of the blocks of rows that are this process's."""
    for here in mine:
        totals: Totals | None = None
        for there in columns:
            block = compute(here, there)
            totals = _fold(totals, block, reducers)
        yield _finish(totals, block, reducers)


def _symmetric_rows(
    compute: Blocks, places: list[range], mine: list[range], reducers: Sequence[BlockReducer]
) -> Iterator[tuple[Tensor, ...]]:
    """Yield the results of each of the blocks of rows that are this process's, from the upper triangle alone."""
    own = set(mine)
    totals: dict[range, Totals] = {}
    for number, here in enumerate(places):
        for there in places[number:]:
            if here not in own and there not in own:
                continue
            block = compute(here, there)
            if here in own:
                totals[here] = _fold(totals.get(here), block, reducers)
            if there in own and there != here:
                totals[there] = _fold(totals.get(there), block.transposed(), reducers)
        if here in own:
            yield _finish(totals.pop(here), block, reducers)


def _fold(totals: Totals | None, block: Strip, reducers: Sequence[BlockReducer]) -> Totals:
    before = [None] * len(reducers) if totals is None else totals
    return [reducer.fold(total, block) for reducer, total in zip(reducers, before, strict=True)]


def _finish(totals: Totals | None, block: Strip, reducers: Sequence[BlockReducer]) -> tuple[Tensor, ...]:
    assert totals is not None
    results = [reducer.finish(total, block) for reducer, total in zip(reducers, totals, strict=True)]
    return tuple(part for parts in results for part in parts)
