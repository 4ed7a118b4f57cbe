"""Draw training samples with weights based on similarity, for `torch.utils.data.DataLoader`.

    weights = label_weights(likewise.label_suspicion(gram)) * density_weights(likewise.soft_neighbors(gram))
    loader = DataLoader(dataset, batch_size=64, sampler=WeightedSampler(weights))

Weights multiply: the first gives less weight to suspicious labels, the second to samples in dense regions.
`likewise.losses.DensitySampler` instead visits every sample once per epoch, sparse regions first.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from likewise.checks import check_flag, check_integer, check_tensor
from likewise.distributed import rank, world_size
from likewise.statistics.label_issues import LabelSuspicion

__all__ = ["WeightedSampler", "density_weights", "label_weights"]


class WeightedSampler(Sampler[int]):
    """Draws positions of a data set with probabilities proportional to weights, anew in each epoch.

    Unlike `torch.utils.data.WeightedRandomSampler`, it is reproducible by its seed, can be resumed at an epoch, divides
    an epoch among the processes of distributed training, and is not limited to 2²⁴ samples.

    Args:
        weights: (n,) non-negative, not all zero; they need not sum to 1.
        num_samples: Number of draws per epoch, by all processes together; n if None. Rounded up to a multiple of the
            number of processes.
        replacement: Whether a sample may be drawn several times per epoch. If False, `num_samples` is at most the
            number of nonzero weights.
        seed: Seed of all epochs; the same in every process.

    Example:
        >>> import torch
        >>> from likewise.integrations.samplers import WeightedSampler
        >>> sampler = WeightedSampler(torch.tensor([0.0, 1.0, 3.0]), num_samples=8)
        >>> len(sampler), 0 in set(sampler)
        (8, False)
        >>> loader = torch.utils.data.DataLoader(torch.arange(3), batch_size=4, sampler=sampler)
        >>> [len(batch) for batch in loader]
        [4, 4]

    """

    def __init__(
        self, weights: Any, *, num_samples: int | None = None, replacement: bool = True, seed: int = 0
    ) -> None:
        self.weights = _check_weights(weights)
        self.replacement = check_flag("replacement", replacement)
        self.seed = check_integer("seed", seed, 0)
        n = len(self.weights)
        wanted = n if num_samples is None else check_integer("num_samples", num_samples, 1)
        self.rank, self.ranks = rank(), world_size()
        self.num_samples = -(-wanted // self.ranks) * self.ranks
        possible = int((self.weights > 0).sum())
        if not self.replacement and self.num_samples > possible:
            raise ValueError(
                f"Cannot draw {self.num_samples:,} different samples: only {possible:,} of {n:,} weights are not zero. "
                "Pass a smaller num_samples=, or replacement=True."
            )
        self.epoch = 0

    def __len__(self) -> int:
        """Return how many positions this process draws in an epoch."""
        return self.num_samples // self.ranks

    def __iter__(self) -> Iterator[int]:
        """Draw the positions of the next epoch."""
        drawn = self._draw(self.epoch)
        self.epoch += 1
        return iter(drawn[self.rank :: self.ranks].tolist())

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch after a restart; otherwise each pass over the sampler is the next epoch.

        Args:
            epoch: Number of the next epoch, from 0.

        """
        self.epoch = check_integer("epoch", epoch, 0)

    def _draw(self, epoch: int) -> Tensor:
        state = int(np.random.SeedSequence([self.seed, epoch]).generate_state(1, np.uint64)[0] >> 1)
        generator = torch.Generator().manual_seed(state)
        if self.replacement:
            sums = self.weights.cumsum(0)
            points = torch.rand(self.num_samples, generator=generator, dtype=torch.float64) * sums[-1]
            return torch.searchsorted(sums, points, right=True).clamp(max=int(self.weights.nonzero().max()))
        # The order in which exponential clocks with these rates ring is that of draws without replacement.
        waits = torch.empty(len(self.weights), dtype=torch.float64).exponential_(generator=generator)
        return (waits / self.weights).topk(self.num_samples, largest=False).indices


def label_weights(found: Any) -> Tensor:
    """Weights that trust suspicious labels less: 1 − suspicion.

    Args:
        found: The result of `likewise.label_suspicion`, or (n,) suspicions in [0, 1], such as a column of a run.

    Returns:
        (n,) in [0, 1], float64.

    Example:
        >>> from likewise.integrations.samplers import label_weights
        >>> label_weights([0.0, 0.25, 1.0])
        tensor([1.0000, 0.7500, 0.0000], dtype=torch.float64)

    """
    suspicion = found.suspicion if isinstance(found, LabelSuspicion) else found
    values = check_tensor("suspicion", suspicion).double().cpu()
    if values.dim() != 1 or float(values.min()) < 0 or float(values.max()) > 1:
        raise ValueError(
            f"Suspicions must be (n,) in [0, 1], found {tuple(values.shape)} from {float(values.min()):g} to "
            f"{float(values.max()):g}."
        )
    return 1 - values


def density_weights(soft_neighbors: Any) -> Tensor:
    """Weights that keep dense regions from outweighing rare ones: 1 / max(N_S, 1).

    A sample is its own neighbor, so N_S is 1 if no other sample is like it.

    Args:
        soft_neighbors: (n,) the result of `likewise.soft_neighbors`, or that column of a run.

    Returns:
        (n,) in (0, 1], float64.

    Example:
        >>> from likewise.integrations.samplers import density_weights
        >>> density_weights([1.0, 4.0, 0.5])
        tensor([1.0000, 0.2500, 1.0000], dtype=torch.float64)

    """
    counts = check_tensor("soft_neighbors", soft_neighbors).double().cpu()
    if counts.dim() != 1:
        raise ValueError(f"soft_neighbors must be (n,), one number per sample, found {tuple(counts.shape)}.")
    return 1 / counts.clamp(min=1)


def _check_weights(weights: Any) -> Tensor:
    values = check_tensor("weights", weights).double().cpu()
    if values.dim() != 1 or len(values) == 0 or float(values.min()) < 0 or float(values.max()) == 0:
        found = f"{tuple(values.shape)}" + (f" from {float(values.min()):g}" if values.numel() else "")
        raise ValueError(f"weights must be (n,), at least 0 and not all 0, found {found}.")
    return values
