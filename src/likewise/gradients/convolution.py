"""The gradient of a convolution's kernel for a batch."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor

from likewise.gradients.pieces import Dense, Piece, forming_is_cheaper, own_by_positions, own_of


class Convolving(NamedTuple):
    """How a kernel is applied: what torch's convolution needs beside inputs and kernel."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int

    def forward(self, inputs: Tensor, kernel: Tensor) -> Tensor:
        """Return the outputs."""
        return torch.ops.aten.convolution(inputs, kernel, None, *self)

    def kernel_gradient(self, inputs: Tensor, deltas: Tensor, kernel: Tensor) -> Tensor:
        """Return the gradient in the kernel, summed over samples."""
        only_kernel = [False, True, False]
        return torch.ops.aten.convolution_backward(deltas, inputs, kernel, None, *self, only_kernel)[1]

    def windows(self, inputs: Tensor, kernel: torch.Size) -> Tensor:
        """Return what the kernel meets at each position, (n, t, i)."""
        if inputs.dim() == 4 and inputs.device.type == "cpu":  # on a GPU, unfold loops over samples
            sides = (kernel[2:], self.dilation, self.padding, self.stride)
            return F.unfold(inputs, *map(tuple, sides)).mT
        inputs = F.pad(inputs, [p for p in reversed(self.padding) for _ in range(2)])
        dims = inputs.dim() - 2
        for i in range(dims):
            reach = self.dilation[i] * (kernel[2 + i] - 1) + 1
            inputs = inputs.unfold(2 + i, reach, self.stride[i])[..., :: self.dilation[i]]
        order = (0, *range(2, 2 + dims), 1, *range(2 + dims, 2 + 2 * dims))
        return inputs.permute(order).flatten(1 + dims).flatten(1, dims)


@final
@dataclass(frozen=True)
class Convolution(Piece):
    """G of a kernel that was convolved with `inputs`."""

    inputs: Tensor  # (n, channels, ...)
    deltas: Tensor  # (n, d, outputs, ...)
    kernel: Tensor
    how: Convolving

    def own(self) -> Tensor:
        """Return G Gᵀ, from the Gram matrices of positions where they are smaller than G."""
        if self._forms:
            return own_of(self._formed)
        windows = self.how.windows(self.inputs, self.kernel.shape)
        return own_by_positions(windows @ windows.mT, self.deltas.flatten(3).mT)

    def numbers(self) -> int:
        """Return how many numbers it holds: inputs, output gradients, and G or unfolded inputs."""
        n, d, t = len(self.inputs), self.deltas.shape[1], self.deltas[0, 0, 0].numel()
        unfolded = t * self.kernel[0].numel() + (1 + 2 * d * d) * t * t
        formed = d * self.kernel.numel() if self._forms else unfolded
        return self.inputs.numel() + self.deltas.numel() + n * formed

    @property
    def _forms(self) -> bool:
        d, o, t = self.deltas.shape[1], self.deltas.shape[2], self.deltas[0, 0, 0].numel()
        return not self._plain or forming_is_cheaper(d, t, self.kernel[0].numel(), o)

    def rows(self) -> Tensor:
        """Return G."""
        return self._formed

    def pull(self, weights: Tensor) -> Tensor:
        """Return Σ Gᵀ w: of G if it was formed, or by the kernel's backward on weighted gradients."""
        if "_formed" in self.__dict__:
            return Dense(self._formed).pull(weights)
        sums = []
        for column in weights.unbind(2):
            deltas = torch.einsum("nd,nd...->n...", column, self.deltas)
            sums.append(self.how.kernel_gradient(self.inputs, deltas, self.kernel).flatten())
        return torch.stack(sums)

    def push(self, directions: Tensor) -> Tensor:
        """Return G u, by a convolution with u."""
        deltas, parts = self.deltas.flatten(2), []
        for u in directions:
            moved = self.how.forward(self.inputs, u.view_as(self.kernel))
            parts.append(deltas @ moved.flatten(1).unsqueeze(2))
        return torch.cat(parts, 2)

    @property
    def _plain(self) -> bool:
        return self.how.groups == 1 and not self.how.transposed

    @cached_property
    def _formed(self) -> Tensor:
        n, d = self.deltas.shape[:2]
        if self._plain and self.inputs.device.type != "cpu":
            windows = self.how.windows(self.inputs, self.kernel.shape)
            return (self.deltas.flatten(3) @ windows.unsqueeze(1)).flatten(2)
        found = self.inputs.new_empty(n, d, self.kernel.numel())
        for i in range(n):  # a CPU's own backward is faster than unfolding
            for j in range(d):
                part = self.how.kernel_gradient(
                    self.inputs[i : i + 1], self.deltas[i : i + 1, j], self.kernel
                )
                found[i, j] = part.flatten()
        return found
