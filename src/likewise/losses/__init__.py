"""Training terms that ask the network to treat given inputs as similar, or as different."""

from likewise.losses import directions
from likewise.losses.cuda_graph import Captured, captured
from likewise.losses.functional import (
    TermAndOutputs,
    along,
    density,
    group,
    group_with_outputs,
    orbit,
    pair,
    two_batches,
    two_batches_with_outputs,
)
from likewise.losses.samplers import DensitySampler, RunningTotal

__all__ = [
    "Captured",
    "DensitySampler",
    "RunningTotal",
    "TermAndOutputs",
    "along",
    "captured",
    "density",
    "directions",
    "group",
    "group_with_outputs",
    "orbit",
    "pair",
    "two_batches",
    "two_batches_with_outputs",
]
