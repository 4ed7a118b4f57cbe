"""Density during training: a running estimate of the total gradient, and a sampler that prefers sparse regions."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Sampler

from likewise.checks import check_number, check_seed, check_tensor


class RunningTotal:
    """Exponential moving average of the mean normalized gradient, for `losses.density`.

    Each batch updates it; the first batches are not biased toward zero.

    Args:
        decay: Weight of the old estimate at each update, from 0 to below 1.

    Example:
        >>> import torch, likewise as lw
        >>> model, total = torch.nn.Linear(3, 2), lw.losses.RunningTotal(decay=0.9)
        >>> term = lw.losses.density(model, torch.randn(8, 3), total, q=0.5)
        >>> total.mean.shape
        torch.Size([2, 8])

    """

    def __init__(self, decay: float = 0.95) -> None:
        self.decay = check_number("decay", decay, least=0, below=1)
        self.mean: Tensor | None = None  # (d, p)
        self._weight = 0.0

    def update(self, total: Tensor, n: int) -> Tensor:
        """Add a batch and return the new estimate.

        Args:
            total: (d, p) sum of the batch's normalized gradients.
            n: The number of its samples.

        Returns:
            (d, p) estimated mean.

        """
        self._weight = self.decay * self._weight + 1 - self.decay
        part = (1 - self.decay) / self._weight
        new = total / n
        self.mean = new if self.mean is None else self.mean + part * (new - self.mean)
        return self.mean


class DensitySampler(Sampler[int]):
    """Order for a DataLoader that draws samples of sparse regions first, each once an epoch.

    Sorts by −density / temperature plus Gumbel noise, density in units of its standard deviation. Each epoch has
    its own noise.

    Args:
        density: (n,) N_S, or any number that grows with the number of samples nearby.
        temperature: 0 sorts strictly, large values shuffle.
        seed: Seed of the noise.

    Example:
        >>> import torch, likewise as lw
        >>> list(lw.losses.DensitySampler(torch.tensor([3.0, 1.0, 2.0]), temperature=0))
        [1, 2, 0]

    """

    def __init__(self, density: Tensor, *, temperature: float = 0.5, seed: int = 0) -> None:
        self.temperature = check_number("temperature", temperature, least=0)
        self.seed, self.epoch = check_seed("seed", seed), 0
        self.update(density)

    def update(self, density: Tensor) -> None:
        """Replace the densities, as they change with training."""
        self.density = check_tensor("density", density).detach().flatten().double().cpu()

    def __len__(self) -> int:
        return len(self.density)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        self.epoch += 1
        spread = self.density.std(correction=0)
        standardized = (self.density - self.density.mean()) / torch.where(spread > 0, spread, 1)
        noise = -torch.rand(len(self), generator=generator, dtype=torch.float64).log().neg().log()
        score = standardized - self.temperature * noise
        return iter(score.argsort(stable=True).tolist())
