"""The largest entries of each row of a matrix whose columns come some at a time."""

from typing import NamedTuple

import torch
from torch import Tensor

TIED_ROWS = 64  # in which the first of equal entries are looked for at a time


class Largest(NamedTuple):
    """The largest entries of each row so far, best first; of equal ones the first column first."""

    indices: Tensor  # (n, k) columns
    values: Tensor  # (n, k)


def merge_largest(best: Largest | None, values: Tensor, start: int, k: int) -> Largest:
    """Return the k largest entries of each row among those before and those of the next columns.

    Only entries above the k-th best so far are sorted: a look at each entry, after the first columns.

    Args:
        best: Of the columns before, which is written to; None at the first.
        values: (n, m) the next columns, row by row or column by column in memory.
        start: The place of the first of them.
        k: How many; fewer are returned as long as there were no more columns.

    """
    if best is not None and best.values.shape[1] == k:
        return _replace_smaller(best, values, start)
    columns = torch.arange(start, start + values.shape[1], device=values.device).expand_as(values)
    if best is not None:
        values, columns = torch.cat([best.values, values], 1), torch.cat([best.indices, columns], 1)
    return _largest(values, columns, k)


def _largest(values: Tensor, columns: Tensor, k: int) -> Largest:
    """Return the k largest entries of each row, of equal ones those that come first."""
    count = min(k, values.shape[1])
    found = values.topk(count, dim=1)
    places = found.indices
    if count:
        least = found.values[:, -1:]
        tied = ((values >= least).sum(1) > count).nonzero()[:, 0]
        for rows in tied.split(TIED_ROWS):
            some, bound = values[rows], least[rows]
            above, equal = some > bound, some == bound
            needed = count - above.sum(1, keepdim=True)
            chosen = above | (equal & (equal.cumsum(1) <= needed))
            places[rows] = chosen.nonzero()[:, 1].view(len(rows), count)
    places = places.sort(dim=1).values
    order = values.gather(1, places).sort(dim=1, descending=True, stable=True)
    places = places.gather(1, order.indices)
    return Largest(columns.gather(1, places), order.values)


def _replace_smaller(best: Largest, values: Tensor, start: int) -> Largest:
    """Return the best with larger values of later columns in the place of the smallest."""
    k = best.values.shape[1]
    rows, columns = _true_places(values > best.values[:, -1:]) if k else (values.new_zeros(0).long(),) * 2
    if not len(rows):
        return best
    counts = torch.bincount(rows, minlength=len(values))
    hit = counts.nonzero()[:, 0]
    slots = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows] + k
    numbers = ((counts > 0).cumsum(0) - 1)[rows]
    candidates = values.new_full((len(hit), k + int(counts.max())), -torch.inf)
    places = torch.zeros_like(candidates, dtype=torch.int64)
    candidates[:, :k], places[:, :k] = best.values[hit], best.indices[hit]
    candidates[numbers, slots], places[numbers, slots] = values[rows, columns], columns + start
    order = candidates.sort(dim=1, descending=True, stable=True)
    best.values[hit] = order.values[:, :k]
    best.indices[hit] = places.gather(1, order.indices[:, :k])
    return best


def _true_places(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows and columns of the entries that are True, of which there are few, row by row."""
    if mask.is_contiguous():
        flat = _true_entries(mask.flatten())
        return flat // mask.shape[1], flat % mask.shape[1]
    flat = _true_entries(mask.T.flatten())
    columns, rows = flat // mask.shape[0], flat % mask.shape[0]
    order = rows.argsort(stable=True)
    return rows[order], columns[order]


def _true_entries(mask: Tensor) -> Tensor:
    """Return mask.nonzero()[:, 0] of a vector, eight entries at a time."""
    whole = len(mask) // 8 * 8
    words = mask[:whole].view(torch.int64).nonzero()
    places = (8 * words + torch.arange(8, device=mask.device)).flatten()
    rest = mask[whole:].nonzero()[:, 0] + whole
    return torch.cat([places[mask[places]], rest])
