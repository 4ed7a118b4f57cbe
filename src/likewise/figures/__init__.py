"""The report's plots as matplotlib functions.

Each draws into `ax`, or into a new figure, and returns the Axes. Tables have the columns of `Analysis.table`. The
gallery of the documentation shows all of them (`make gallery`).
Colors are the color-blind-safe palette of Okabe and Ito. Names are never parsed as formulas.
"""

from likewise.figures.curves import calibration, density_histogram, dynamics, similarity_histogram, slices
from likewise.figures.grids import neighbor_grid, pair_grid
from likewise.figures.matrices import class_similarity, confusion
from likewise.figures.scatter import cartography, kernel_map, neighborhoods

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
