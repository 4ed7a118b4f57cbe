"""One training record shared by several processes, used by the callbacks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from likewise.checks import check_type
from likewise.watch import Watch, WithIndex

CHUNK = 1 << 16  # samples whose sums are exchanged at a time


class PassRecorder:
    """Records the batches of this process, and merges the records of all processes at the end of each epoch.

    Merging after each epoch keeps forgetting exact, although samples move between processes from epoch to epoch.
    Afterwards, `watch` is the same in every process.

    Args:
        watch: The record to continue.
        path: The file that `save` writes; None writes nothing.
        ranks: Number of processes.
    """

    def __init__(self, watch: Watch, path: str | Path | None, ranks: int) -> None:
        self.watch = watch
        self.path = path
        self.ranks = ranks
        self._part = watch if ranks == 1 else watch.empty_part()

    def update(self, logits: Any, labels: Any, ids: Any) -> None:
        """Add one batch of this process."""
        self._part.update(logits, labels, ids)

    def join(self, gather: Callable[[Tensor], Tensor], device: torch.device | str) -> None:
        """Merge what all processes have recorded since the last call; every process must call it.

        Args:
            gather: Takes a (k, c) tensor and returns those of all processes, stacked or one below another.
            device: Where `gather` needs its tensor.
        """
        if self.ranks == 1:
            return
        for start in range(0, self.watch.n, CHUNK):
            samples = slice(start, min(start + CHUNK, self.watch.n))
            mine = self._part.part(samples)
            for part in gather(mine.to(device)).reshape(self.ranks, *mine.shape):
                self.watch.merge_part(samples, part)
        self._part = self.watch.empty_part()

    def save(self) -> None:
        """Write the record if there is a path; call it in one process."""
        if self.path is not None:
            self.watch.save(self.path)


def find_indexed(dataset: Any) -> WithIndex | None:
    """Return the WithIndex in a data set, also inside subsets."""
    while dataset is not None and not isinstance(dataset, WithIndex):
        dataset = getattr(dataset, "dataset", None)
    return dataset


def check_watch(watch: Any, n: int) -> Watch:
    """Return the given record, or a new one of n samples."""
    if watch is None:
        return Watch(n)
    if check_type("watch", watch, Watch, "a likewise.Watch").n != n:
        raise ValueError(
            f"The record is of {watch.n:,} samples, and the data set has {n:,}: start a new Watch."
        )
    return watch
