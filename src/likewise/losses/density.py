"""Density as a training term, and as an order to draw samples in."""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler

from likewise.checks import check_integer, check_number, check_seed, check_tensor
from likewise.losses.functional import Chosen, full_precision, live_batch, network_of
from likewise.model import Inputs, Network
from likewise.readouts import Readout, all_outputs


@full_precision
def density(
    model: nn.Module | Network,
    x: Inputs,
    total: "Tensor | RunningTotal",
    q: float,
    labels: Tensor | None = None,
    *,
    samples: int | None = None,
    readout: Readout = all_outputs,
    parameters: Chosen = None,
    weight: float = 1,
) -> Tensor:
    """Return Σ (N_S(xᵢ)/N − q)² over the batch: asks that each sample be like a share q of the data.

    `total`: Σ K(x',x')^-½ J(x') over the data, (d, p), with the number of its `samples`, taken as given;
    or a RunningTotal, which estimates it and is updated with this batch.
    """
    q, weight = check_number("q", q), check_number("weight", weight)
    net = network_of(model, readout, parameters)
    p = sum(net.numels.values())
    mean = None if isinstance(total, RunningTotal) else _mean_of(total, samples, p)
    found = live_batch(net, x, labels)
    if isinstance(total, RunningTotal):
        counted = len(found.own) if found.finite is None else int(found.finite.sum())
        mean = total.updated(found.total(net.numels), counted)
    share, expected = cast(Tensor, mean), (found.d, p)
    if share.shape != expected:
        raise ValueError(f"total must be (d, p) = {expected}, found {tuple(share.shape)}.")
    moved = found.along(share.to(found.own), net.numels)
    shares = moved.diagonal(dim1=1, dim2=2).sum(1) / found.d  # N_S / N
    shares = shares if found.finite is None else shares[found.finite]
    return weight * (shares - q).square().sum().to(found.dtype)


def _mean_of(total: Any, samples: Any, p: int) -> Tensor:
    """Return the total of so many samples, (d, p), divided by their number."""
    given = check_tensor("total", total, advice="(d, p) with samples=N, or a RunningTotal")
    if samples is None:
        raise ValueError("samples must be given: the total of how many? Pass samples=N, or a RunningTotal.")
    if given.numel() == 0 or given.numel() % p:
        raise ValueError(f"total must be (d, p) with p = {p}, found {tuple(given.shape)}.")
    return given.reshape(-1, p) / check_integer("samples", samples, 1, 2**62)


class RunningTotal:
    """The mean normalized gradient over the data, estimated as training goes.

    An exponential mean over batches: `keep` of the old estimate stays at each update.
    """

    def __init__(self, keep: float = 0.95) -> None:
        self.keep = check_number("keep", keep, least=0, below=1)
        self.mean: Tensor | None = None  # (d, p)
        self._weight = 0.0

    def updated(self, total: Tensor, n: int) -> Tensor:
        """Return the mean gradient after a batch of n samples with this total was added."""
        self._weight = self.keep * self._weight + 1 - self.keep
        part = (1 - self.keep) / self._weight
        new = total / n
        self.mean = new if self.mean is None else self.mean + part * (new - self.mean)
        return self.mean


class DensitySampler(Sampler[int]):
    """Draws the samples of sparse regions first, each once an epoch.

    `density`: N_S or any number that grows with the crowd around a sample. The order is that of
    −density / temperature plus Gumbel noise, density in units of its spread: 0 sorts strictly, large
    values shuffle. Call `update` with new densities as training goes.
    """

    def __init__(self, density: Tensor, temperature: float = 0.5, seed: int = 0) -> None:
        self.temperature = check_number("temperature", temperature, least=0)
        self.seed, self.epoch = check_seed("seed", seed), 0
        self.update(density)

    def update(self, density: Tensor) -> None:
        """Take other densities."""
        self.density = check_tensor("density", density).detach().flatten().double().cpu()

    def __len__(self) -> int:
        return len(self.density)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        self.epoch += 1
        spread = self.density.std(correction=0)
        centered = (self.density - self.density.mean()) / torch.where(spread > 0, spread, 1)
        noise = -torch.rand(len(self), generator=generator, dtype=torch.float64).log().neg().log()
        score = centered - self.temperature * noise
        return iter(score.argsort(stable=True).tolist())
