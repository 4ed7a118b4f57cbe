"""Gradients less their mean, from any way to get at gradients, without forming them.

With J̃ = J − m: J̃ J̃ᵀ = J Jᵀ − J mᵀ − m Jᵀ + m mᵀ, Σ J̃ᵀ w = Σ Jᵀ w − mᵀ Σ w and J̃ u = J u − m u.
"""

from typing import final

import torch
from torch import Tensor

from likewise.data import Samples
from likewise.gradients.base import (
    Features,
    Gradients,
    Pulled,
    Pushed,
    Rows,
    normalized_outputs,
    normalized_rows,
)
from likewise.gradients.pieces import own_of
from likewise.linalg import Power, power

SMALL = 1e5  # units of rounding: of what less is left of a gradient's square, is computed from the gradient
FEW = 16  # of these at once


@final
class Centered(Gradients):
    """The four questions about J(x) − mean, with mean (d, p)."""

    def __init__(self, plain: Gradients, mean: Tensor, floor: float) -> None:
        self._plain, self._mean, self._floor = plain, mean, floor
        self.at_once, self.room = plain.at_once, plain.room

    def self_kernel(self, samples: Samples, exponent: float = 1) -> Power:
        """Return K(x, x)ᵉ and its ranks."""
        plain = self._plain.self_kernel(samples).matrix
        cross = self._plain.push(samples, self._mean, 0).outputs
        square = self._mean @ self._mean.T
        sizes = plain.diagonal(dim1=1, dim2=2) + square.diagonal()
        found = plain - cross - cross.mT + square
        nearly = min(SMALL / 16 * self._floor**0.5, 0.1)
        close = (found.diagonal(dim1=1, dim2=2) < nearly * sizes).any(1).nonzero()[:, 0]
        some = close.split(min(self.at_once or FEW, FEW)) if len(close) else ()
        for places in some:  # what is left drowned in rounding
            found[places] = own_of(self.rows(samples[places.cpu()], 0).rows).to(found)
        return power(found, exponent, self._floor, sizes.sum(1))

    def rows(self, samples: Samples, exponent: float) -> Rows:
        """Return S(x)."""
        plain = self._plain.rows(samples, 0).rows
        rows = plain - self._mean.to(plain.dtype)
        if not exponent:
            return Rows(rows, None)
        sizes = own_of(plain.flatten(1).unsqueeze(1))[:, 0, 0] + self._mean.square().sum()
        found = torch.cat([own_of(some) for some in rows.split(FEW)])
        own = power(found, exponent, self._floor, sizes)
        return Rows(normalized_rows(rows, own, overwrite=True), own.rank)

    def features(self, samples: Samples, exponent: float) -> Features:
        """Return S(x), all of it explicit."""
        found = self.rows(samples, exponent)
        return Features(found.rows, (), found.ranks)

    def pull(self, samples: Samples, weights: Tensor, exponent: float) -> Pulled:
        """Return Σₓ S(x)ᵀ w(x)."""
        weights, own = weights.to(self._mean), None
        if exponent:
            own = self.self_kernel(samples, exponent)
            weights = own.matrix @ weights
        total = self._plain.pull(samples, weights, 0).total
        return Pulled(total - weights.sum(0).T @ self._mean, own)

    def push(self, samples: Samples, directions: Tensor, exponent: float, own: Power | None = None) -> Pushed:
        """Return S(x) u for each direction u."""
        outputs = self._plain.push(samples, directions, 0).outputs - self._mean @ directions.T
        if exponent and own is None:
            own = self.self_kernel(samples, exponent)
        return normalized_outputs(outputs, own)

    def settle(self) -> None:
        """Raise now what was put off."""
        self._plain.settle()

    def about(self, mean: Tensor) -> "Centered":
        """Return the answers about J(x) less both means."""
        return Centered(self._plain, self._mean + mean, self._floor)
