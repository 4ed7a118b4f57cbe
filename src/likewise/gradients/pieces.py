"""The gradient of one parameter for a batch, in the form in which it is cheapest.

Each piece stands for G, (n, d, numel), the gradients of d outputs of n samples, and answers about it
without forming it where that saves work: G Gᵀ of each sample, Σ Gᵀ w, G u, and G itself.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.func import vmap


class Piece(ABC):
    """Gradients of one parameter."""

    @abstractmethod
    def own(self) -> Tensor:
        """Return G Gᵀ of each sample, (n, d, d)."""

    @abstractmethod
    def rows(self) -> Tensor:
        """Return G, (n, d, numel)."""

    @abstractmethod
    def pull(self, weights: Tensor) -> Tensor:
        """Return Σ Gᵀ w for weights (n, d, c), (c, numel)."""

    @abstractmethod
    def push(self, directions: Tensor) -> Tensor:
        """Return G u for directions (c, numel), (n, d, c)."""


@final
@dataclass(frozen=True)
class Dense(Piece):
    """G itself."""

    gradients: Tensor  # (n, d, numel)

    def own(self) -> Tensor:
        """Return G Gᵀ of each sample."""
        return _own(self.gradients)

    def rows(self) -> Tensor:
        """Return G."""
        return self.gradients

    def pull(self, weights: Tensor) -> Tensor:
        """Return Σ Gᵀ w."""
        return weights.flatten(0, 1).T @ self.gradients.flatten(0, 1)

    def push(self, directions: Tensor) -> Tensor:
        """Return G u."""
        return self.gradients @ directions.T


@final
@dataclass(frozen=True)
class Factored(Piece):
    """G = Σ_t δ_t a_tᵀ over positions t: a matrix that multiplies inputs a."""

    inputs: Tensor  # (n, t, i)
    deltas: Tensor  # (n, d, t, o)
    inputs_first: bool = False  # the parameter is (i, o) instead of (o, i)

    def own(self) -> Tensor:
        """Return G Gᵀ, from G or from the Gram matrices of positions, whichever takes less."""
        _, d, t, o = self.deltas.shape
        i = self.inputs.shape[2]
        if t == 1:
            deltas, inputs = _wide(self.deltas[:, :, 0]), _wide(self.inputs, d)
            return deltas @ deltas.mT * inputs.square().sum((1, 2))[:, None, None]
        if t * (i + d * d * o) < d * i * o:
            return _own_by_positions(self.inputs @ self.inputs.mT, self.deltas)
        return _own(self.rows())

    def rows(self) -> Tensor:
        """Return G."""
        inputs, deltas = self.inputs.unsqueeze(1), self.deltas
        product = inputs.mT @ deltas if self.inputs_first else deltas.mT @ inputs
        return product.flatten(2)

    def pull(self, weights: Tensor) -> Tensor:
        """Return Σ Gᵀ w: one matrix product over samples and positions."""
        inputs = self.inputs.flatten(0, 1)
        deltas = torch.einsum("ndc,ndto->cnto", weights, self.deltas).flatten(1, 2)
        total = inputs.T @ deltas if self.inputs_first else deltas.mT @ inputs
        return total.flatten(1)

    def push(self, directions: Tensor) -> Tensor:
        """Return G u = Σ_t δ_t · (u a_t)."""
        o, i = self.deltas.shape[3], self.inputs.shape[2]
        matrices = directions.view(-1, i, o) if self.inputs_first else directions.view(-1, o, i).mT
        moved = self.inputs.unsqueeze(1) @ matrices  # (n, c, t, o)
        return self.deltas.flatten(2) @ moved.flatten(2).mT


@final
@dataclass(frozen=True)
class Indexed(Piece):
    """G of a table of which position t takes row index_t: an embedding."""

    indices: Tensor  # (n, t), -1 where no gradient flows
    deltas: Tensor  # (n, d, t, o)
    size: int  # rows of the table

    def own(self) -> Tensor:
        """Return G Gᵀ: positions that take the same row meet."""
        same = (self.indices[:, :, None] == self.indices[:, None, :]) & (self.indices >= 0)[:, :, None]
        return _own_by_positions(same.to(self.deltas), self.deltas)

    def rows(self) -> Tensor:
        """Return G, mostly zeros."""
        n, d, _, o = self.deltas.shape
        found = self.deltas.new_zeros(n, d, self.size + 1, o)
        where = (self.indices % (self.size + 1))[:, None, :, None].expand_as(self.deltas)
        return found.scatter_add(2, where, self.deltas)[:, :, : self.size].flatten(2)

    def pull(self, weights: Tensor) -> Tensor:
        """Return Σ Gᵀ w."""
        deltas = torch.einsum("ndc,ndto->cnto", weights, self.deltas).flatten(1, 2)
        total = deltas.new_zeros(len(deltas), self.size + 1, deltas.shape[2])
        where = (self.indices % (self.size + 1)).flatten()
        return total.index_add(1, where, deltas)[:, : self.size].flatten(1)

    def push(self, directions: Tensor) -> Tensor:
        """Return G u: the rows taken from u."""
        table = directions.view(len(directions), self.size, -1)
        taken = table[:, self.indices.clamp(min=0)] * (self.indices >= 0)[None, :, :, None]
        return torch.einsum("cnto,ndto->ndc", taken, self.deltas)


@final
@dataclass(frozen=True)
class Convolution(Piece):
    """G of a kernel that was convolved with `inputs`."""

    inputs: Tensor  # (n, channels, ...)
    deltas: Tensor  # (n, d, outputs, ...)
    shape: torch.Size  # of the kernel
    apply: Callable[[Tensor, Tensor], Tensor]  # inputs, kernel -> outputs, without bias
    unfold: Callable[[Tensor], Tensor] | None  # inputs -> (n, t, i); None with groups or transposed

    def own(self) -> Tensor:
        """Return G Gᵀ."""
        factored = self._factored()
        return _own(self.rows()) if factored is None else factored.own()

    def rows(self) -> Tensor:
        """Return G."""
        factored = self._factored()
        if factored is not None:
            return factored.rows()

        def one(x: Tensor, delta: Tensor) -> Tensor:
            return self._weight_gradient(x.unsqueeze(0), delta.unsqueeze(0))

        return vmap(vmap(one, in_dims=(None, 0)))(self.inputs, self.deltas).flatten(2)

    def pull(self, weights: Tensor) -> Tensor:
        """Return Σ Gᵀ w, by the ordinary backward of the kernel on weighted output gradients."""
        weighted = torch.einsum("ndc,nd...->cn...", weights, self.deltas)
        return torch.stack([self._weight_gradient(self.inputs, delta).flatten() for delta in weighted])

    def push(self, directions: Tensor) -> Tensor:
        """Return G u, by a convolution with u."""
        moved = [self.apply(self.inputs, u.view(self.shape)).flatten(1) for u in directions]
        return self.deltas.flatten(2) @ torch.stack(moved, 2)

    def _factored(self) -> Factored | None:
        if self.unfold is None:
            return None
        return Factored(self.unfold(self.inputs), self.deltas.flatten(3).mT)

    def _weight_gradient(self, inputs: Tensor, deltas: Tensor) -> Tensor:
        kernel = self.inputs.new_zeros(self.shape)
        return torch.func.vjp(lambda w: self.apply(inputs, w), kernel)[1](deltas)[0]


def _wide(tensor: Tensor, d: int = 2) -> Tensor:
    """Return the tensor in float64 if more than one output needs the rank of G Gᵀ."""
    several = (tensor.shape[1] if tensor.dim() == 3 else d) > 1
    return tensor.double() if several and tensor.device.type != "mps" else tensor


def _own(gradients: Tensor) -> Tensor:
    if gradients.shape[1] == 1:
        return gradients.square().sum(2, keepdim=True)
    wide = _wide(gradients)
    return wide @ wide.mT


def _own_by_positions(inputs: Tensor, deltas: Tensor) -> Tensor:
    """Return Σ_ts (a_t·a_s)(δ_t·δ_s) for each pair of outputs, given a_t·a_s (n, t, t)."""
    n, d, t, _ = deltas.shape
    if d == 1:
        flat = deltas[:, 0]
        return (inputs * (flat @ flat.mT)).sum((1, 2))[:, None, None]
    flat = deltas.flatten(1, 2).double() if deltas.device.type != "mps" else deltas.flatten(1, 2)
    pairs = (flat @ flat.mT).view(n, d, t, d, t)
    return torch.einsum("ndtes,nts->nde", pairs, inputs.to(pairs))
