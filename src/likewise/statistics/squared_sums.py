"""Sums of squared kernel values in linear time, by random signs.

With signs r, E[(Σ_j r_j k_ij)²] = Σ_j k_ij². Since every pair shares a common direction, plain probes
err alike for all samples; so the leading directions U of Σ Sᵀ S are found first, by a randomized range
finder, their part is taken exactly, and only the rest is probed:

    tr S C Sᵀ = 2 (S Uᵀ)·(S C Uᵀ) − (S Uᵀ)·(S Uᵀ U C Uᵀ) + tr S (I − P) C (I − P) Sᵀ

with C = Σ_j S(x_j)ᵀ S(x_j), which is never formed, and P = Uᵀ U. Nothing grows with the data set.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from likewise.gram import GramMatrix
from likewise.gram.products import Products, Weights


class Squares(NamedTuple):
    """Σ_j ‖L_i B_ij‖² over the columns j, for each row i."""

    sums: Tensor  # (n,)
    error: Tensor  # (n,) standard error


def row_squares(gram: GramMatrix, left: Tensor, draws: int, seed: int) -> Squares:
    """Return Σ_x' ‖L(x) B(x, x')‖² of the kernel's blocks B, for L (n, d, d), by random signs."""
    if draws < 4:
        raise ValueError(f"At least 4 draws are needed for an error bar, found {draws}.")
    products = gram.products()
    leading = min(draws // 4, 32, max(1, products.vectors_per_pass // 3))
    signs = _Signs(products.d, draws, seed)
    basis = torch.linalg.qr(products.vjp(signs.columns(0, leading)).T).Q.T
    exact = _exact_part(products, left, basis)

    def squares(where: range, outputs: Tensor) -> Tensor:
        size = (left[where.start : where.stop] @ outputs).square().sum(1)
        return torch.stack([size.sum(1), size.square().sum(1)], 1)

    count, moments = draws - leading, exact.new_zeros(len(exact), 2)
    for start in range(leading, draws, products.vectors_per_pass):
        probes = products.vjp(signs.columns(start, min(start + products.vectors_per_pass, draws)))
        probes -= (probes @ basis.T) @ basis
        moments += products.jvp(probes, squares) / count
    rest, second = moments.unbind(1)
    error = ((second - rest.square()).clamp(min=0) / (count - 1)).sqrt()
    return Squares((exact + rest).clamp(min=0), error)


class _Signs:
    """Random signs for each column sample, the same whenever and wherever they are asked for."""

    def __init__(self, d: int, draws: int, seed: int) -> None:
        self._d, self._draws, self._seed = d, draws, seed

    def columns(self, start: int, stop: int) -> Weights:
        """Return the weights of draws start to stop, by place."""

        def weights(where: range) -> Tensor:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + where.start)
            shape = (len(where), self._d, self._draws)
            signs = torch.randint(0, 2, shape, generator=generator, dtype=torch.int8)
            return signs[:, :, start:stop].double() * 2 - 1

        return weights


def _exact_part(products: Products, left: Tensor, basis: Tensor) -> Tensor:
    def along(where: range) -> Tensor:
        return products.gradients.jvp(products.columns.samples(where), basis, products.right_power).outputs

    spread = products.vjp(along)  # U C
    inner = spread @ basis.T

    def read(where: range, outputs: Tensor) -> Tensor:
        near, far = (left[where.start : where.stop] @ outputs).split(len(basis), dim=2)
        return (near * (2 * far - near @ inner)).sum((1, 2))

    return products.jvp(torch.cat([basis, spread]), read)
