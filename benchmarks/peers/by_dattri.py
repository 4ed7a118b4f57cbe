"""dattri: TracIn of one checkpoint with weight 1, its random projection switched off."""

from collections.abc import Callable

import torch
from dattri.algorithm.tracin import TracInAttributor
from dattri.task import AttributionTask
from torch import Tensor
from torch.func import functional_call

from peers.work import Work, only_scalar


def ready(work: Work, batch: int = 64) -> Callable[[], Tensor]:
    """Gradients of the columns are formed anew for each batch of rows: still, small batches are quickest."""
    only_scalar(work, "one loss a sample")

    def loss(theta: dict[str, Tensor], sample: tuple[Tensor, Tensor]) -> Tensor:
        x, y = sample
        return work.scalar(functional_call(work.model, theta, (x[None],)), y[None])[0]

    task = AttributionTask(loss_func=loss, model=work.model, checkpoints=work.model.state_dict())
    attributor = TracInAttributor(task, torch.ones(1), normalized_grad=work.normalized, device="cpu")
    attributor.projector_kwargs = None  # None as an argument still projects, to 512 dimensions

    def matrix() -> Tensor:
        with torch.no_grad():
            return attributor.attribute(work.left.loader(batch), work.right.loader(batch))

    return matrix
