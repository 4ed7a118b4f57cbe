"""captum: TracInCP of one checkpoint with learning rate 1 is the Gram of loss gradients."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from captum.influence import TracInCP
from torch import Tensor, nn

from peers.work import Work, only_scalar


class _Loss(nn.Module):
    def __init__(self, work: Work, reduction: str) -> None:
        super().__init__()
        self.work, self.reduction = work, reduction

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        values = self.work.scalar(outputs, labels)
        return values.sum() if self.reduction == "sum" else values


def _load(model: nn.Module, path: str) -> float:
    model.load_state_dict(torch.load(path, weights_only=True))
    return 1.0


def ready(work: Work, by_batch: bool = False, batch: int = 8) -> Callable[[], Tensor]:
    """`by_batch`: per-sample gradients by hooks; the default differentiates sample after sample."""
    only_scalar(work, "one loss a sample")
    folder = tempfile.TemporaryDirectory()
    path = str(Path(folder.name, "checkpoint.pt"))
    torch.save(work.model.state_dict(), path)
    tracin = TracInCP(
        work.model,
        work.left.dataset(),
        [path],
        checkpoints_load_func=_load,
        loss_fn=_Loss(work, "sum" if by_batch else "none"),
        batch_size=batch,
        sample_wise_grads_per_batch=by_batch,
    )

    def matrix(folder: tempfile.TemporaryDirectory = folder) -> Tensor:
        gram = tracin.influence(work.right.loader(batch)).T
        if not work.normalized:
            return gram
        left, right = (tracin.self_influence(data.loader(batch)).sqrt() for data in (work.left, work.right))
        return gram / left[:, None] / right

    return matrix


def ready_by_batch(work: Work) -> Callable[[], Tensor]:
    """The quicker of the two ways."""
    return ready(work, by_batch=True, batch=64)
