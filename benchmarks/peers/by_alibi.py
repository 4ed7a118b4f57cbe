"""alibi: GradientSimilarity, one sample at a time; of a square matrix both sides are differentiated."""

from collections.abc import Callable

import numpy as np
import torch
from alibi.explainers import GradientSimilarity
from torch import Tensor

from peers.work import Work, only_scalar


def ready(work: Work) -> Callable[[], Tensor]:
    """Nothing to set up: its fit forms the gradients of the rows."""
    only_scalar(work, "one loss a sample")
    rows, columns = ([part.numpy() for part in data] for data in (work.left, work.right))

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        return work.scalar(outputs, labels).sum()

    def matrix() -> Tensor:
        explainer = GradientSimilarity(
            work.model,
            loss,
            sim_fn="grad_cos" if work.normalized else "grad_dot",
            precompute_grads=True,
            backend="pytorch",
            device="cpu",
        )
        found = explainer.fit(*rows).explain(*columns)
        scores = np.empty((len(columns[0]), len(rows[0])), np.float32)
        np.put_along_axis(scores, found.ordered_indices, found.scores, 1)
        return torch.from_numpy(scores).T

    return matrix
