"""The report's plots as matplotlib functions.

Each draws into `ax`, or into a new figure, and returns the Axes. Tables have the columns of `Analysis.table`. The
gallery of the documentation shows all of them (`make gallery`).
Colors are the color-blind-safe palette of Okabe and Ito. Names are never parsed as formulas.
"""

from likewise.figures.images import neighbor_grid, pair_grid
from likewise.figures.plots import (
    calibration,
    cartography,
    class_similarity,
    confusion,
    density_histogram,
    dynamics,
    kernel_map,
    neighborhoods,
    similarity_histogram,
    slices,
)

__all__ = [
    "calibration",
    "cartography",
    "class_similarity",
    "confusion",
    "density_histogram",
    "dynamics",
    "kernel_map",
    "neighbor_grid",
    "neighborhoods",
    "pair_grid",
    "similarity_histogram",
    "slices",
]
