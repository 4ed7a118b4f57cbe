"""Matrices of classes: confusion and mean similarity."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from likewise.figures.drawing import Names, check_numbers, class_names, make_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def confusion(matrix: ArrayLike, classes: Names = None, ax: Axes | None = None) -> Axes:
    """Draw the counts of labels (rows) by neighbors' votes (columns), colored off the diagonal.

    Args:
        matrix: (classes, classes) counts, as `Analysis.confusion`.
        classes: Names of the classes.
        ax: Axes to draw into; None creates a new figure.

    Returns:
        The Axes of the matrix, labels down and votes across.

    Example:
        >>> import likewise as lw
        >>> from matplotlib.figure import Figure
        >>> ax = lw.figures.confusion([[9, 1], [2, 8]], classes=["cat", "dog"], ax=Figure().add_subplot())
        >>> ax.get_ylabel()
        'label'

    """
    counts = check_numbers(matrix, "matrix", len(np.asarray(matrix)), len(np.asarray(matrix)))
    shades = np.ma.masked_array(counts, np.eye(len(counts), dtype=bool))
    texts = np.where(shades.filled(1) == 0, "", np.vectorize("{:,.0f}".format)(counts))
    ax = _heat_map(ax, shades, texts if len(counts) <= 20 else None, classes, diverging=False)
    ax.set(xlabel="neighbors' vote", ylabel="label")
    return ax


def class_similarity(matrix: ArrayLike, classes: Names = None, ax: Axes | None = None) -> Axes:
    """Draw the heat map of mean similarity between classes, white at 0; NaN (no pair) is gray.

    Args:
        matrix: (classes, classes) means, as `Analysis.class_similarity`.
        classes: Names of the classes.
        ax: Axes to draw into; None creates a new figure.

    Returns:
        The Axes of the matrix, with a color bar.

    Example:
        >>> import likewise as lw
        >>> from matplotlib.figure import Figure
        >>> matrix = [[0.6, -0.1], [-0.1, 0.5]]
        >>> ax = lw.figures.class_similarity(matrix, classes=["cat", "dog"], ax=Figure().add_subplot())

    """
    shades = np.ma.masked_invalid(np.asarray(matrix, float))
    means = check_numbers(shades.filled(0), "matrix", len(shades), len(shades))
    signed = np.char.replace(np.vectorize("{:.2f}".format)(means.round(2) + 0.0), "-", "−")  # never −0.00
    texts = np.where(shades.mask, "", signed)
    return _heat_map(ax, shades, texts if len(means) <= 12 else None, classes, diverging=True)


def _heat_map(
    ax: Axes | None, shades: np.ma.MaskedArray, texts: np.ndarray | None, classes: Names, diverging: bool
) -> Axes:
    """Draw a matrix of classes by classes, masked cells gray, optionally with texts in the cells."""
    ticks = np.arange(0, len(shades), -(-len(shades) // 20))
    names, size = class_names(ticks, classes), np.abs(shades.filled(0))
    most, side = size.max() or 1, float(np.clip(0.42 * len(shades) + 1.3, 2.5, 8))
    ax = make_axes(ax, side + 0.8 * (diverging or texts is None), side)
    picture = ax.imshow(shades, "RdBu_r" if diverging else "Oranges", vmin=-most * diverging, vmax=most)
    if diverging or texts is None:
        ax.figure.colorbar(picture, ax=ax, label="mean similarity" if diverging else "samples", shrink=0.8)
    turned = 45 if max(map(len, names)) > 3 else 0
    ax.set_xticks(ticks, names, rotation=turned, ha="right" if turned else "center", rotation_mode="anchor")
    ax.set(yticks=ticks, yticklabels=names, facecolor="#E6E6E6")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    font = "small" if len(shades) <= 6 else "x-small"
    for (row, column), text in np.ndenumerate(np.empty((0, 0)) if texts is None else texts):
        color = "white" if size[row, column] > 0.6 * most else "black"
        ax.text(column, row, text, color=color, ha="center", va="center", fontsize=font)
    return ax
