"""The matrices that every peer is asked for, and the float64 reference they are compared with.

K(x,x') = J(x) J(x')ᵀ, with J(x) the gradients of d outputs, or K^C = K(x,x)^-½ K(x,x') K(x',x')^-½,
the cosine if d = 1.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from pairs import allconv, lenet
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

Rows = Sequence[Tensor]  # of each parameter (n, d, p), the gradients of d outputs for n samples

TITLES = {
    "a": "Gram, 256 × 256, conv net with a wide linear layer, 101 k parameters",
    "b": "Gram, 256 × 256, convolutions only, 102 k parameters",
    "c": "10 × 10 blocks of K, 128 × 128, net of a",
    "d": "cosines of loss gradients, 512 × 64, conv net of 96 k parameters",
    "e": "10 × 10 blocks of K^C, 512 × 64, net of d",
    "f": "Gram of loss gradients, 512 × 64, net of d",
}


class CannotDo(Exception):
    """The peer has no way to the matrix; the message says why, in a few words."""


class Data(NamedTuple):
    """Inputs and labels."""

    x: Tensor
    y: Tensor

    def every(self, step: int) -> "Data":
        return Data(self.x[::step], self.y[::step])

    def batches(self, size: int) -> list["Data"]:
        return [Data(x, y) for x, y in zip(self.x.split(size), self.y.split(size), strict=True)]

    def dataset(self) -> TensorDataset:
        return TensorDataset(self.x, self.y)

    def loader(self, size: int) -> DataLoader:
        return DataLoader(self.dataset(), batch_size=size)


@dataclass(frozen=True)
class Work:
    """K, or K^C if `normalized`, of the samples `left` and `right`: (n, m), or (n, m, d, d) if d > 1."""

    model: nn.Module
    left: Data
    right: Data
    readout: Callable[[Tensor, Tensor], Tensor]  # outputs and labels -> (n, d)
    d: int = 1
    normalized: bool = False

    @property
    def square(self) -> bool:
        """Whether left and right are the same samples."""
        return self.left is self.right

    def scalar(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the one output, (n,), for peers that take a loss."""
        return self.readout(outputs, labels)[:, 0]


def work_called(letter: str) -> Work:
    """Return one of the `TITLES`, the same in every process."""
    torch.manual_seed(0)
    if letter in "abc":
        return _of_outputs(allconv if letter == "b" else lenet, *((128, 10) if letter == "c" else (256, 1)))
    if letter == "e":
        return replace(_of_losses(), readout=outputs_themselves, d=10, normalized=True)
    return replace(_of_losses(), normalized=letter == "d")


def only_scalar(work: Work, because: str) -> None:
    """Refuse several outputs for a peer that knows one number of a sample, such as its loss."""
    if work.d > 1:
        raise CannotDo(because)


def kernel_of_rows(work: Work, rows: Callable[[Data], Rows]) -> Tensor:
    """Return the matrix for a peer that forms gradients; where it is square they are formed once."""
    left = rows(work.left)
    return kernel(left, left if work.square else rows(work.right), work.normalized)


def rows_by_batch(data: Data, size: int, gradients: Callable[[Data], Sequence[Rows]]) -> Rows:
    """Return the rows of all samples; `gradients` of a batch are, of each output and parameter, (n, p)."""
    parts = [gradients(part) for part in data.batches(size)]
    found = [[torch.cat(of_one) for of_one in zip(*part, strict=True)] for part in zip(*parts, strict=True)]
    if len(found) == 1:  # no copy
        return [of_one[:, None] for of_one in found[0]]
    return [torch.stack(of_one, 1) for of_one in zip(*found, strict=True)]


def kernel(left: Rows, right: Rows, normalized: bool) -> Tensor:
    """Return K or K^C of given gradients, one product for each parameter."""
    (n, d), m = left[0].shape[:2], len(right[0])
    flat = sum(a.flatten(0, 1) @ b.flatten(0, 1).T for a, b in zip(left, right, strict=True))
    blocks = flat.view(n, d, m, d).transpose(1, 2)
    if normalized:
        blocks = torch.einsum("nab,nmbc,mce->nmae", _inverse_root(left), blocks, _inverse_root(right))
    return blocks[..., 0, 0] if d == 1 else blocks


def relative_error(found: Tensor, work: Work, step: int = 8) -> float:
    """Return ‖found − exact‖ / ‖exact‖ over every eighth row and column."""
    exact = _reference(replace(work, left=work.left.every(step), right=work.right.every(step)))
    part = found[::step, ::step].double()
    if part.shape != exact.shape:
        raise ValueError(f"found {tuple(part.shape)} of every {step}th sample, expected {tuple(exact.shape)}")
    return ((part - exact).norm() / exact.norm()).item()


def _reference(work: Work) -> Tensor:
    """Return the matrix in float64 by plain autograd, one sample and one output after another."""
    model = copy.deepcopy(work.model).double()
    parameters = list(model.parameters())

    def row(x: Tensor, y: Tensor) -> list[Tensor]:
        outputs = work.readout(model(x.double()), y)[0]
        found = [torch.autograd.grad(f, parameters, retain_graph=True) for f in outputs]
        return [torch.stack(of_one).flatten(1) for of_one in zip(*found, strict=True)]

    def rows(data: Data) -> Rows:
        return [torch.stack(of_one) for of_one in zip(*(row(*one) for one in data.batches(1)), strict=True)]

    return kernel(rows(work.left), rows(work.right), work.normalized)


def _inverse_root(rows: Rows) -> Tensor:
    """Return K(x,x)^-½, (n, d, d)."""
    own = sum(torch.einsum("ndp,nep->nde", part, part) for part in rows)
    if own.shape[1] == 1:
        return own.rsqrt()
    values, vectors = torch.linalg.eigh(own.double())
    return ((vectors * values.rsqrt()[:, None]) @ vectors.mT).to(own)


def outputs_themselves(outputs: Tensor, labels: Tensor) -> Tensor:
    return outputs


def losses(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels, reduction="none")[:, None]


def _of_outputs(make: Callable[[int], nn.Module], n: int, d: int) -> Work:
    data = Data(torch.randn(n, 1, 28, 28), torch.zeros(n, dtype=torch.int64))
    return Work(make(d).eval(), data, data, outputs_themselves, d)


def _of_losses() -> Work:
    """Ten noisy patterns, a tenth of the labels drawn anew, and a net that has seen them three times."""
    patterns = F.interpolate(torch.randn(10, 1, 7, 7), size=(28, 28), mode="bilinear")
    left, right = (_noisy(patterns, n) for n in (512, 64))
    drawn = torch.where(torch.rand(512) < 0.1, torch.randint(0, 10, (512,)), left.y)
    model = _small_conv_net()
    _train(model, left := Data(left.x, drawn))
    return Work(model.eval(), left, right, losses)


def _noisy(patterns: Tensor, n: int) -> Data:
    labels = torch.randint(0, len(patterns), (n,))
    return Data(patterns[labels] + 0.9 * torch.randn(n, 1, 28, 28), labels)


def _small_conv_net() -> nn.Module:
    first = [nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(800, 112), nn.ReLU(), nn.Linear(112, 10))


def _train(model: nn.Module, data: Data) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for _ in range(3):
        for x, y in data.batches(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
