"""BackPACK: BatchGrad of the summed outputs, one backward pass for each; the products are ours."""

from collections.abc import Callable

from backpack import backpack, extend
from backpack.extensions import BatchGrad
from torch import Tensor

from peers.work import Data, Rows, Work, kernel_of_rows, rows_by_batch


def ready(work: Work, batch: int = 64) -> Callable[[], Tensor]:
    """Set-up extends the model."""
    model = extend(work.model)

    def of_output(outputs: Tensor) -> Rows:
        with backpack(BatchGrad(), retain_graph=True):
            outputs.sum().backward(retain_graph=True)
        found = [value.grad_batch.flatten(1) for value in model.parameters()]
        for value in model.parameters():
            del value.grad_batch
            value.grad = None
        return found

    def gradients(data: Data) -> list[Rows]:
        return [of_output(outputs) for outputs in work.readout(model(data.x), data.y).unbind(1)]

    return lambda: kernel_of_rows(work, lambda data: rows_by_batch(data, batch, gradients))
