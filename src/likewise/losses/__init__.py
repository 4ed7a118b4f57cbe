"""Training terms: ask the network to see given inputs as similar, or as different."""

from likewise.losses import directions
from likewise.losses.cuda_graph import Captured, captured
from likewise.losses.density import DensitySampler, RunningTotal, density
from likewise.losses.functional import along, group, orbit, pair, two_batches
from likewise.losses.modules import Along, Density, Group, Orbit, Pair, TwoBatches

__all__ = [
    "Along",
    "Captured",
    "Density",
    "DensitySampler",
    "Group",
    "Orbit",
    "Pair",
    "RunningTotal",
    "TwoBatches",
    "along",
    "captured",
    "density",
    "directions",
    "group",
    "orbit",
    "pair",
    "two_batches",
]
