"""Sums of squared kernel values in linear time, by random signs.

With signs r, E[(Σ_j r_j k_ij)²] = Σ_j k_ij². Since every pair shares a common direction, plain probes
err alike for all samples; so the leading directions U of Σ Sᵀ S are found first, by a randomized range
finder, their part is taken exactly, and only the rest is probed:

    S C Sᵀ = (S Uᵀ)(S C Uᵀ)ᵀ + (S C Uᵀ)(S Uᵀ)ᵀ − (S Uᵀ)(U C Uᵀ)(S Uᵀ)ᵀ + S (I − P) C (I − P) Sᵀ

with C = Σ_j S(x_j)ᵀ S(x_j), which is never formed, and P = Uᵀ U. Nothing grows with the data set.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from likewise.gram import GramMatrix


class Squares(NamedTuple):
    """Σ_j B_ij B_ijᵀ over the columns, for each row."""

    blocks: Tensor  # (n, d, d)
    relative_error: Tensor  # (n,) standard error of its trace, relative to it


def row_squares(gram: GramMatrix, draws: int, seed: int) -> Squares:
    """Return Σ_x' B(x, x') B(x, x')ᵀ of the kernel's blocks, estimated from `draws` random signs."""
    if draws < 4:
        raise ValueError(f"At least 4 draws are needed for an error bar, found {draws}.")
    leading = min(draws // 4, 32, max(1, gram.vectors_at_once // 3))
    signs = _Signs(gram, draws, seed)
    basis = torch.linalg.qr(gram.pull(signs.columns(0, leading), gram.kernel.column).T).Q.T
    exact = _exact_part(gram, basis)
    rest, fourth, count = torch.zeros_like(exact), exact.new_zeros(len(exact)), draws - leading
    for start in range(leading, draws, gram.vectors_at_once):
        stop = min(start + gram.vectors_at_once, draws)
        probes = gram.pull(signs.columns(start, stop), gram.kernel.column)
        probes -= (probes @ basis.T) @ basis
        moments = gram.push(probes, gram.kernel.row, _moments)
        rest += moments[:, 1:].view_as(exact) / count
        fourth += moments[:, 0] / count
    blocks = exact + rest
    mean, total = (b.diagonal(dim1=1, dim2=2).sum(-1) for b in (rest, blocks))
    error = ((fourth - mean.square()).clamp(min=0) / (count - 1)).sqrt()
    return Squares(blocks, torch.where(total > 0, error / total, 0))


class _Signs:
    """Random signs for each column sample, the same whenever and wherever they are asked for."""

    def __init__(self, gram: GramMatrix, draws: int, seed: int) -> None:
        self._d, self._draws, self._seed = gram.d, draws, seed

    def columns(self, start: int, stop: int):
        """Return the weights of draws start to stop, by place."""

        def weights(where: range) -> Tensor:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + where.start)
            shape = (len(where), self._d, self._draws)
            signs = torch.randint(0, 2, shape, generator=generator, dtype=torch.int8)
            return signs[:, :, start:stop].double() * 2 - 1

        return weights


def _exact_part(gram: GramMatrix, basis: Tensor) -> Tensor:
    column, row = gram.kernel.column, gram.kernel.row

    def along(where: range) -> Tensor:
        return gram.gradients.push(gram.columns.samples(where), basis, column).outputs

    spread = gram.pull(along, column)  # U C
    inner = spread @ basis.T

    def read(outputs: Tensor) -> Tensor:
        near, far = outputs.split(len(basis), dim=2)
        cross = near @ far.mT
        return cross + cross.mT - near @ inner @ near.mT

    return gram.push(torch.cat([basis, spread]), row, read)


def _moments(outputs: Tensor) -> Tensor:
    """Return Σ ‖v‖⁴ and Σ v vᵀ over draws v, (n, 1 + d²)."""
    fourth = outputs.square().sum(1).square().sum(1, keepdim=True)
    return torch.cat([fourth, (outputs @ outputs.mT).flatten(1)], 1)
