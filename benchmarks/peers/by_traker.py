"""traker: its per-sample gradients, before any projection; the products are ours."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call
from trak.gradient_computers import FunctionalGradientComputer
from trak.modelout_functions import AbstractModelOutput

from peers.work import Data, Rows, Work, kernel_of_rows, rows_by_batch


class _Output(AbstractModelOutput):
    def __init__(self, work: Work, i: int) -> None:
        self.work, self.i = work, i

    def get_output(
        self, model: nn.Module, weights: Mapping, buffers: Mapping, image: Tensor, label: Tensor
    ) -> Tensor:
        outputs = functional_call(model, (weights, buffers), (image[None],))
        return self.work.readout(outputs, label[None])[0, self.i]

    def get_out_to_loss_grad(
        self, model: nn.Module, weights: Mapping, buffers: Mapping, batch: Data
    ) -> Tensor:
        return torch.ones(len(batch.y), 1)


def ready(work: Work, batch: int = 64) -> Callable[[], Tensor]:
    """One pass over the data for each output."""
    p = sum(value.numel() for value in work.model.parameters())
    of_output = [
        FunctionalGradientComputer(work.model, _Output(work, i), p, torch.float32, "cpu")
        for i in range(work.d)
    ]

    def gradients(data: Data) -> list[Rows]:
        found = [each.compute_per_sample_grad(data) for each in of_output]
        return [[part.detach().flatten(1) for part in of_one.values()] for of_one in found]

    return lambda: kernel_of_rows(work, lambda data: rows_by_batch(data, batch, gradients))
