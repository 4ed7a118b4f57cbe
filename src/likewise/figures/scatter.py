"""Scatter plots with a point for each sample: the map, density against agreement, training dynamics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from likewise.figures.drawing import (
    COLORS,
    GRAY,
    MARKERS,
    STATUSES,
    TITLES,
    VERMILION,
    Names,
    class_names,
    draw_legend,
    make_axes,
    plain_text,
    read_column,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame


def neighborhoods(table: DataFrame, ax: Axes | None = None) -> Axes:
    """Draw local density against agreement, colored by status; labels that look wrong are crosses.

    Args:
        table: `Analysis.table`.
        ax: Axes to draw into; None creates a new figure.

    Returns:
        The Axes, with a point for each sample.

    Example:
        >>> import pandas, likewise as lw
        >>> from matplotlib.figure import Figure
        >>> table = pandas.DataFrame({"local_density": [1, 2], "agreement": [0, 1], "status": ["isolated", "ordinary"]})
        >>> ax = lw.figures.neighborhoods(table, ax=Figure().add_subplot())
        >>> ax.get_xlabel()
        'local density'

    """
    x, agreement = (
        read_column(table, "local_density", numeric=True),
        read_column(table, "agreement", numeric=True),
    )
    status = read_column(table, "status")
    has_labels = "label_issue" in table
    issue = read_column(table, "label_issue").astype(bool) if has_labels else np.zeros(len(x), dtype=bool)
    if unknown := set(status) - set(STATUSES):
        raise ValueError(f"Statuses {sorted(map(str, unknown))} found: expected {', '.join(STATUSES)}.")
    ax = make_axes(ax, 5.5, 4.0)
    y = agreement + 0.04 * (0.618034 * np.arange(len(x)) % 1 - 0.5)  # many are exactly 0 or 1
    keys, names = [], []
    for name, color in STATUSES.items():
        here = status == name
        keys.append(ax.scatter(x[here & ~issue], y[here & ~issue], 10, color, lw=0, rasterized=True))
        ax.scatter(x[here & issue], y[here & issue], 26, color, marker="X", ec="black", lw=0.5)
        names.append(f"{name}: {here.sum():,}")
    ax.set(xlabel=TITLES["local_density"], ylabel=TITLES["agreement"], ylim=(-0.1, 1.1), yticks=[0, 0.5, 1])
    if x.min() > 0:
        ticks = sorted({float(f"{tick:.2g}") for tick in np.geomspace(x.min(), x.max(), 5)})
        ax.set(xscale="log", xticks=ticks, xticklabels=[f"{tick:g}" for tick in ticks])
        ax.minorticks_off()
    if has_labels:
        keys.append(ax.scatter([], [], 26, "white", marker="X", ec="black", lw=0.8))
        names.append(f"label issue: {issue.sum():,}")
    draw_legend(ax, keys, names, beside=False)
    return ax


def kernel_map(table: DataFrame, color: str = "label", classes: Names = None, ax: Axes | None = None) -> Axes:
    """Draw the samples at map_x, map_y, colored by a column; up to ten classes have a marker each.

    Similar samples lie close together. The axes have no names; only with `layout="pca"` are they directions.

    Args:
        table: `Analysis.table`.
        color: A column of it.
        classes: Names of the classes.
        ax: Axes to draw into; None creates a new figure.

    Returns:
        The Axes, without ticks, and with a legend or a color bar.

    Example:
        >>> import pandas, likewise as lw
        >>> from matplotlib.figure import Figure
        >>> table = pandas.DataFrame({"map_x": [0, 1, 2], "map_y": [0, 1, 0], "density": [0.2, 0.4, 0.6]})
        >>> ax = lw.figures.kernel_map(table, color="density", ax=Figure().add_subplot())
        >>> ax.collections[0].get_array().tolist()
        [0.2, 0.4, 0.6]

    """
    x, y = read_column(table, "map_x", numeric=True), read_column(table, "map_y", numeric=True)
    values = read_column(table, color)
    labels = color in ("label", "prediction", "suggested_label") and values.dtype.kind in "iu"
    found, which = np.unique(values, return_inverse=True)
    names = class_names(found, classes if labels else None)
    ax = make_axes(ax, 6.2, 4.2)
    size = float(np.clip(16000 / len(x), 4, 24))
    if len(found) > len(COLORS) or (values.dtype.kind in "iuf" and not labels):
        shades = values if values.dtype.kind in "iuf" else which
        points = ax.scatter(x, y, size, shades, lw=0, cmap="viridis", rasterized=True)
        ax.figure.colorbar(points, ax=ax, label=TITLES.get(color, plain_text(color)))
    else:
        # A class keeps its color whichever column is shown and whichever classes are in it; rare ones on top.
        slots = found if labels and found[0] >= 0 and found[-1] < len(COLORS) else np.arange(len(found))
        keys = []
        for place, slot in enumerate(slots):
            here, shade = which == place, STATUSES.get(str(found[place]), COLORS[slot])
            keys.append(ax.scatter(x[here], y[here], size, shade, marker=MARKERS[slot], lw=0))
            keys[-1].set(zorder=2 + 1 / here.sum(), rasterized=True)
        draw_legend(ax, keys, names, beside=True)
    ax.set(xticks=[], yticks=[], aspect="equal")
    ax.set_adjustable("datalim")
    ax.spines[:].set_visible(False)
    return ax


def cartography(table: DataFrame, ax: Axes | None = None) -> Axes:
    """Draw training variability against confidence of each sample, labels that look wrong on top.

    Top left: easy to learn. Right: ambiguous. Bottom left: hard to learn, often a wrong label.
    From Swayamdipta et al., *Dataset Cartography*, 2020.

    Args:
        table: `Analysis.table` of a run with the record of training (`analyze(..., watch=)`).
        ax: Axes to draw into; None creates a new figure.

    Returns:
        The Axes, with a point for each sample and a legend that counts.

    Example:
        >>> import pandas, likewise as lw
        >>> from matplotlib.figure import Figure
        >>> table = pandas.DataFrame({"training_confidence": [0.9, 0.1], "training_variability": [0.1, 0.2]})
        >>> ax = lw.figures.cartography(table.assign(label_issue=[False, True]), ax=Figure().add_subplot())
        >>> [text.get_text().strip() for text in ax.get_legend().get_texts()]
        ['looks right: 1', 'looks wrong: 1']

    """
    x, y = (
        read_column(table, name, numeric=True) for name in ("training_variability", "training_confidence")
    )
    wrong = read_column(table, "label_issue").astype(bool)
    ax = make_axes(ax, 5.0, 4.0)
    size = float(np.clip(16000 / len(x), 4, 18))
    keys, names = [], []
    for here, name, color, marker in ((~wrong, "right", GRAY, "o"), (wrong, "wrong", VERMILION, "X")):
        scale = 1 if name == "right" else 2
        keys.append(ax.scatter(x[here], y[here], scale * size, color, marker=marker, lw=0, rasterized=True))
        names.append(f"looks {name}: {here.sum():,}")
    ax.set(xlim=(-0.02, max(0.5, x.max()) + 0.02), ylim=(-0.04, 1.04))
    ax.set(xlabel=TITLES["training_variability"], ylabel=TITLES["training_confidence"])
    draw_legend(ax, keys, names, beside=False)
    return ax
