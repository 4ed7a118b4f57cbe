"""nngeometry: its GramMatrix, and its Jacobian where the matrix is not square."""

from collections.abc import Callable

from nngeometry.gram import GramMatrix
from nngeometry.jacobian import Jacobian
from torch import Tensor

from peers.work import Data, Rows, Work, kernel_of_rows


def ready(work: Work, batch: int = 64) -> Callable[[], Tensor]:
    """Nothing to set up."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        return work.readout(work.model(x), y)

    def gram() -> Tensor:
        blocks = GramMatrix(work.model, work.left.loader(len(work.left.x)), function).to_torch()
        return blocks[0, :, 0] if work.d == 1 else blocks.permute(1, 3, 0, 2)

    def rows(data: Data) -> Rows:
        return [Jacobian(work.model, data.loader(batch), function).to_torch().transpose(0, 1)]

    return gram if work.square and not work.normalized else lambda: kernel_of_rows(work, rows)
