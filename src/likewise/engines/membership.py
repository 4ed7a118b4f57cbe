"""Which sample each row of an operation's output belongs to, determined in every pass; and partitions by sample.

Where the batch is not a dimension of a tensor (tokens regrouped by expert, packed sequences, time steps before
samples, a loop over samples), gradients identify the sample of a row. The outputs of sample i are weighted by a power
of two, r_i, and summed: this multiplies the gradient of a row that serves only sample i by exactly r_i. The ratio of
two backward passes encodes the sample. A row whose ratio is no power of two serves several samples.

A Partition divides the indices along a dimension among samples: evenly and in order where the batch is a dimension,
unevenly and in any order where rows were regrouped.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from likewise.engines.tracer import UntraceableError

ROUNDINGS = 64  # by how many a ratio may deviate from a power of two: sums may be taken in any order


class Members(NamedTuple):
    """The samples that the indices along some neighboring dimensions of a tensor belong to."""

    dimension: int
    width: int  # how many dimensions, taken as one
    owners: Tensor  # (size,) the sample of each index, -1 where no gradient flows

    def mask(self, sample: int, shape: torch.Size) -> Tensor:
        """Return 1 where a tensor of this shape belongs to the sample, to be broadcast."""
        sizes = [1] * len(shape)
        sizes[self.dimension : self.dimension + self.width] = shape[
            self.dimension : self.dimension + self.width
        ]
        return (self.owners == sample).view(sizes)


SHARED = None  # in the place of members: some row serves several samples
Membership = Members | None


def find_members(
    outputs: Tensor, edges: list[GradientEdge], dtypes: list[torch.dtype]
) -> list[Membership | int]:
    """Return the samples that the rows of each tensor belong to, SHARED, or 0 where no gradient flows.

    Args:
        outputs: The network's, (n, d), with their graph.
        edges: Gradient edges of the tensors in question.
        dtypes: Of these tensors.

    """
    n, d = outputs.shape
    generator = torch.Generator().manual_seed(0)
    mix = (
        torch.randn(d, generator=generator, dtype=torch.float64).to(outputs) if d > 1 else outputs.new_ones(1)
    )
    digits = _digits(n, min(torch.finfo(dtype).max for dtype in {*dtypes, outputs.dtype}))
    passes = [_gradients(outputs, mix.expand(n, d), edges)]
    for exponents in digits:
        weights = torch.exp2(exponents).to(outputs)[:, None] * mix
        passes.append(_gradients(outputs, weights, edges))
    return [_members(column[0], list(column[1:]), digits) for column in zip(*passes, strict=True)]


def _digits(n: int, largest: float) -> list[Tensor]:
    """Return exponents of two that identify n samples, in as few passes as the range of the dtype allows."""
    limit = int(math.log2(largest) / 4)
    count = 0
    while (2 * limit + 1) ** count < n:
        count += 1
    base = next(b for b in range(1, 2 * limit + 2) if b**count >= n)
    numbers = torch.arange(n)
    return [((numbers // base**k) % base - base // 2).double() for k in range(count)]


def _gradients(outputs: Tensor, weights: Tensor, edges: list[GradientEdge]) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(outputs, edges, weights, retain_graph=True, allow_unused=True)


def _members(plain: Tensor | None, weighted: list[Tensor | None], digits: list[Tensor]) -> Membership | int:
    if plain is None:
        return 0
    dtype = torch.promote_types(plain.dtype, torch.float32)
    slack = _slack(plain)
    plain = plain.to(dtype).reshape(plain.shape or (1,))
    others = [value.to(dtype).reshape(plain.shape) for value in weighted if value is not None]
    sizes = plain.abs()
    if not sizes.sum().isfinite():
        raise UntraceableError("a gradient is not finite, which hides whose it is")
    if not sizes.any():
        return 0
    if not digits:  # one sample alone
        return Members(0, 1, torch.zeros(len(plain), dtype=torch.int64))
    for dimension, width in _ranges(plain.dim()):
        owners = _owners(plain, sizes, others, digits, dimension, width, slack)
        if owners is not None:
            return Members(dimension, width, owners)
    return SHARED


def _slack(gradient: Tensor) -> float:
    """Return the tolerated relative error of a row's ratio."""
    eps = torch.finfo(gradient.dtype).eps
    if gradient.device.type != "cpu":  # parts of the model may compute in float32, in no fixed order
        eps = max(eps, torch.finfo(torch.float32).eps)
    return min(ROUNDINGS * eps, 1e-3)


def _ranges(dims: int) -> Iterator[tuple[int, int]]:
    """Yield neighboring dimensions, as few as possible first."""
    for width in range(1, dims + 1):
        for dimension in range(dims - width + 1):
            yield dimension, width


def _owners(
    plain: Tensor,
    sizes: Tensor,
    others: list[Tensor],
    digits: list[Tensor],
    dimension: int,
    width: int,
    slack: float,
) -> Tensor | None:
    """Return the sample of each index along these dimensions, None if an index serves several samples."""
    rest = [i for i in range(plain.dim()) if not dimension <= i < dimension + width]

    def total(value: Tensor) -> Tensor:
        return value.sum(rest, keepdim=True) if rest else value

    size = total(sizes)
    counts = size > 1e3 * torch.finfo(size.dtype).eps * size.max()  # less is rounding
    codes = torch.zeros_like(size, dtype=torch.int64)
    factor = 1
    for value, exponents in zip(others, digits, strict=True):
        exponent = (total(value.abs()) / size).log2().round()
        ratio = exponent.exp2()
        off = total((value - ratio * plain).abs()) > slack * ratio * size
        if (off & counts).any():
            return None
        lowest, highest = int(exponents.min()), int(exponents.max())
        digit = exponent.nan_to_num().clamp(lowest, highest).long() - lowest
        codes += factor * digit
        factor *= highest - lowest + 1
    n = len(digits[0])
    return torch.where(size > 0, codes.clamp(max=n - 1), -1).flatten().cpu()


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
