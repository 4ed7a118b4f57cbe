"""Partitions of the indices along a dimension among samples.

Even and in order where the batch is a dimension; uneven and in any order where rows were regrouped: tokens routed to
experts, packed sequences, time steps before samples.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor


@final
@dataclass(frozen=True)
class Even:
    """Consecutive indices of the same number for each of n samples."""

    n: int

    def split(self, value: Tensor, dimension: int, fill: bool = False) -> Tensor:
        """Return (n, ...), with the indices of one sample in the place of the dimension."""
        return value.unflatten(dimension, (self.n, -1)).movedim(dimension, 0)


@final
@dataclass(frozen=True)
class Uneven:
    """Indices along `width` dimensions taken as one, for each sample that has any."""

    samples: Tensor  # (n,) their places in the batch
    indices: Tensor  # (n, most indices of one sample), padded with any
    known: Tensor  # (n, most): False for padding
    width: int = 1

    @property
    def n(self) -> int:
        """The number of samples."""
        return len(self.samples)

    def split(self, value: Tensor, dimension: int, fill: bool = False) -> Tensor:
        """Return (n, ...) with a sample's indices in the place of the dimensions, zeros for padding."""
        flat = value.flatten(dimension, dimension + self.width - 1) if self.width > 1 else value
        indices = self.indices.to(value.device)
        split = flat.index_select(dimension, indices.flatten()).unflatten(dimension, indices.shape)
        if fill and not self.known.all():
            known = self.known.to(value.device).view(*indices.shape, *[1] * (flat.dim() - dimension - 1))
            split = torch.where(known, split, 0)
        return split.movedim(dimension, 0)


Partition = Even | Uneven


def partition_by(owners: Tensor, width: int = 1) -> Uneven:
    """Return the partition of indices, given the sample of each, (size,), -1 for none."""
    samples, counts = owners[owners >= 0].unique(return_counts=True)
    most = int(counts.max())
    order = owners.argsort(stable=True)[int((owners < 0).sum()) :]
    place = torch.arange(len(order)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    who = torch.repeat_interleave(torch.arange(len(samples)), counts)
    indices = torch.zeros(len(samples), most, dtype=torch.int64)
    known = torch.zeros(len(samples), most, dtype=torch.bool)
    indices[who, place], known[who, place] = order, True
    return Uneven(samples, indices, known, width)
