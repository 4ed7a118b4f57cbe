"""Opacus: grad_sample of the summed outputs, forward and backward for each; the products are ours."""

from collections.abc import Callable

from opacus.grad_sample import wrap_model
from torch import Tensor

from peers.work import Data, Rows, Work, kernel_of_rows, rows_by_batch


def ready(work: Work, mode: str = "hooks", batch: int = 64) -> Callable[[], Tensor]:
    """In evaluation mode nothing is recorded; no layer of these nets minds the other."""
    model = wrap_model(work.model.train(), grad_sample_mode=mode, loss_reduction="sum")

    def of_output(data: Data, i: int) -> Rows:
        work.readout(model(data.x), data.y)[:, i].sum().backward()
        found = [value.grad_sample.flatten(1) for value in model.parameters()]
        for value in model.parameters():
            value.grad_sample = value.grad = None
        return found

    def gradients(data: Data) -> list[Rows]:
        return [of_output(data, i) for i in range(work.d)]

    return lambda: kernel_of_rows(work, lambda data: rows_by_batch(data, batch, gradients))


def ready_expanded(work: Work) -> Callable[[], Tensor]:
    """With PyTorch's ExpandedWeights in place of hooks."""
    return ready(work, mode="ew")
