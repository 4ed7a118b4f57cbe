"""Plots of numbers: curves and histograms, a point for each sample, matrices of classes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from likewise.figures.drawing import (
    BLUE,
    COLORS,
    GRAY,
    MARKERS,
    STATUSES,
    TITLES,
    VERMILION,
    Names,
    check_numbers,
    class_names,
    draw_image,
    draw_legend,
    make_axes,
    plain_text,
    read_column,
    read_images,
)

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from pandas import DataFrame


def similarity_histogram(
    edges: ArrayLike, counts: ArrayLike, threshold: float | None = None, ax: Axes | None = None
) -> Axes:
    """Draw the histogram of similarities on a log axis, and count those at or above the threshold.

    Args:
        edges: (bins + 1,) edges of the bins, as of `Analysis.histogram`.
        counts: (bins,) samples in each.
        threshold: Bins at or above it are colored and counted.
        ax: Axes to draw into; None creates a new figure.

    Returns:
        The Axes; its title has the count at or above the threshold.

    Example:
        >>> import likewise as lw
        >>> from matplotlib.figure import Figure
        >>> ax = lw.figures.similarity_histogram([-1, 0, 0.5, 1], [3, 20, 7], threshold=0.5, ax=Figure().add_subplot())
        >>> ax.get_title(loc="right")
        '7 at or above 0.5'

    """
    ends = check_numbers(edges, "edges", None)
    heights = check_numbers(counts, "counts", len(ends) - 1)
    ax = make_axes(ax, 5.0, 3.2)
    bars = ax.bar(ends[:-1], heights, np.diff(ends), align="edge", color=BLUE, ec="white", lw=0.3)
    ax.set(ylim=(0.6, 2 * max(heights.max(), 1)), yscale="log", xlabel="similarity", ylabel="samples")
    if threshold is not None:
        first, last = np.searchsorted(ends[:-1] - threshold, (-1e-6, 1e-6))  # edges are rounded
        for bar in bars[first:]:
            bar.set_facecolor(VERMILION)
        least, most = (f"{heights[max(start, 0) :].sum():,.0f}" for start in (first, last - 1))
        count = least if least == most else f"{least} to {most}"  # the threshold is inside a bin
        ax.axvline(threshold, color="black", lw=0.8, ls="--")
        ax.set_title(f"{count} at or above {threshold:g}", loc="right", color=VERMILION, fontsize="medium")
    return ax


def density_histogram(
    density: ArrayLike, images: ArrayLike | None = None, bins: int = 12, ax: Axes | None = None
) -> Axes:
    """Draw the histogram of N_S / N; with images, a typical sample above each bar.

    Args:
        density: (n,) N_S / N, as in the table of a run.
        images: (n, ...) as of `neighbor_grid`.
        bins: Number of bins.
        ax: Axes to draw into; None creates a new figure.

    Returns:
        The Axes, with a bar for each bin.

    Example:
        >>> import numpy as np, likewise as lw
        >>> from matplotlib.figure import Figure
        >>> ax = lw.figures.density_histogram(np.linspace(0.1, 0.9, 50), bins=5, ax=Figure().add_subplot())
        >>> len(ax.patches)
        5

    """
    values = check_numbers(density, "density", None)
    if bins < 1:
        raise ValueError(f"{bins} bins found: pass at least one.")
    if images is not None and len(np.asarray(images)) != len(values):
        raise ValueError(f"{len(np.asarray(images))} images found for {len(values)} densities: pass as many.")
    pad = 0.05 if np.ptp(values) < 1e-9 else 0.0  # all alike: one bar in the middle
    ends = np.linspace(values.min() - pad, values.max() + pad, bins + 1)
    which = np.searchsorted(ends[1:-1], values, "right")
    ax = make_axes(ax, 6.0, 3.4)
    ax.bar(ends[:-1], np.bincount(which, minlength=bins), np.diff(ends), align="edge", color=BLUE, ec="white")
    ax.set(xlim=(ends[0], ends[-1]), xlabel=TITLES["density"], ylabel="samples")
    if images is not None:
        members = [np.flatnonzero(which == place) for place in np.unique(which)]
        middle = [m[np.abs(values[m] - np.median(values[m])).argmin()] for m in members]
        for place, picture in zip(np.unique(which), read_images(images, np.array(middle)), strict=True):
            draw_image(ax, picture, ((place + 0.05) / bins, 1.03, 0.9 / bins, 0.2), GRAY)
    return ax


def slices(
    table: DataFrame,
    by: str = "label",
    of: str = "label_issue",
    classes: Names = None,
    most: int = 30,
    ax: Axes | None = None,
) -> Axes:
    """Draw the share of samples for which something holds, group by group, with Wilson's 95 % intervals.

    The dashed line is the share among all samples. As in the report, a column of numbers is cut into five groups of
    about equal size, in order; other groups are sorted by share, the largest first.

    Args:
        table: `Analysis.table`.
        by: The column whose groups are compared.
        of: What is counted: a column of truth values, "mistakes" (the prediction is not the label), "isolated" (its
            status), or a column of numbers, of which the largest tenth is counted.
        classes: Names of the classes, where `by` holds class numbers.
        most: How many groups are shown.
        ax: Axes to draw into; None creates a new figure.

    Returns:
        The Axes, with a bar for each group.

    Example:
        >>> import pandas, likewise as lw
        >>> from matplotlib.figure import Figure
        >>> table = pandas.DataFrame({"source": ["a", "a", "b", "b"], "label_issue": [True, False, False, False]})
        >>> ax = lw.figures.slices(table, by="source", ax=Figure().add_subplot())
        >>> [float(bar.get_width()) for bar in ax.patches]
        [0.5, 0.0]

    """
    from scipy.stats import binomtest

    hits = _count_mask(table, of)
    groups, names, ranked = _group_samples(table, by, classes)
    sizes = np.bincount(groups, minlength=len(names))
    found = np.bincount(groups, weights=hits, minlength=len(names)).astype(int)
    shares = found / sizes
    order = np.argsort(-shares, kind="stable")[:most] if ranked else np.arange(len(names))
    rows = range(len(order))
    ends = [binomtest(int(found[g]), int(sizes[g])).proportion_ci(method="wilson") for g in order]
    ax = make_axes(ax, 5.5, 0.28 * len(order) + 1.1)
    from matplotlib.ticker import PercentFormatter

    ax.barh(rows, shares[order], 0.72, color=BLUE, alpha=0.75)
    ax.hlines(rows, [end.low for end in ends], [end.high for end in ends], color="black", lw=1.2)
    ax.axvline(hits.mean(), color=VERMILION, lw=1.2, ls="--")
    ax.set_title(f"all samples: {hits.mean():.1%}", loc="right", color=VERMILION, fontsize="medium")
    ax.set_yticks(rows, [f"{names[g]} (n = {sizes[g]:,})" for g in order])
    ax.set(xlim=(0, min(1.0, 1.02 * max(end.high for end in ends))), ylim=(len(order) - 0.4, -0.6))
    ax.set(xlabel=f"share of {TITLES.get(of, f'the largest tenth of {plain_text(of)}')}")
    ax.xaxis.set_major_formatter(PercentFormatter(1))
    ax.tick_params(axis="y", length=0)
    return ax


def calibration(levels: ArrayLike, ax: Axes | None = None) -> Axes:
    """Draw the expected against the measured quality of held-out predictions; on the diagonal they agree.

    Args:
        levels: `Calibration.levels`: rows of expected, found, low and high ends of its 95 % interval, and samples.
        ax: Axes to draw into; None creates a new figure.

    Returns:
        The Axes, with a point and its interval for each level.

    Example:
        >>> import likewise as lw
        >>> from matplotlib.figure import Figure
        >>> levels = [(0.6, 0.55, 0.4, 0.7, 30), (0.9, 0.93, 0.85, 0.97, 40)]
        >>> ax = lw.figures.calibration(levels, ax=Figure().add_subplot())
        >>> ax.get_title(loc="right")
        '70 held-out predictions'

    """
    rows = check_numbers([tuple(level) for level in np.asarray(levels)], "levels", None, 5).astype(float)
    x, y, low, high, samples = rows.T
    if (low > y).any() or (high < y).any():
        raise ValueError("levels: intervals that do not hold what was found, pass low <= found <= high.")
    ax = make_axes(ax, 4.0, 4.0)
    end = 1.03 * max(x.max(), high.max())
    ax.plot([0, end], [0, end], color=GRAY, lw=1, ls="--", zorder=1)
    ax.errorbar(x, y, yerr=[y - low, high - y], fmt="o", color=BLUE, ms=5, lw=1.2, capsize=2)
    ax.set(xlim=(0, end), ylim=(0, end), aspect="equal", xlabel="expected", ylabel="found")
    ax.set_title(f"{samples.sum():,.0f} held-out predictions", loc="right", fontsize="medium")
    return ax


def dynamics(
    tables: Sequence[DataFrame],
    column: str = "density",
    steps: ArrayLike | None = None,
    samples: Sequence[int] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw a column across checkpoints: median, 10-90 % band, and the curves of single samples.

    Args:
        tables: Tables of runs on the same samples, one for each checkpoint.
        column: The column to draw.
        steps: (checkpoints,) where they are on the axis; 0, 1, 2, ... if None.
        samples: Samples that get a curve each.
        ax: Axes to draw into; None creates a new figure.

    Returns:
        The Axes, with the checkpoints along x.

    Example:
        >>> import pandas, likewise as lw
        >>> from matplotlib.figure import Figure
        >>> table = pandas.DataFrame({"map_x": [0, 1, 2], "map_y": [0, 1, 0], "density": [0.2, 0.4, 0.6]})
        >>> ax = lw.figures.dynamics([table, table], "density", samples=[0], ax=Figure().add_subplot())
        >>> ax.get_xlabel()
        'checkpoint'

    """
    columns = [read_column(table, column, numeric=True) for table in tables]
    if len({len(values) for values in columns}) != 1:
        raise ValueError(f"Tables of {[*map(len, columns)]} samples found: pass tables of the same samples.")
    times = check_numbers(range(len(tables)) if steps is None else steps, "steps", len(tables))
    picks = [] if samples is None else list(samples)
    if outside := [pick for pick in picks if not 0 <= pick < len(columns[0])]:
        raise ValueError(f"Samples {outside} found: choose from 0 to {len(columns[0]) - 1}.")
    curves = np.stack(columns, axis=1)
    low, median, high = np.percentile(curves, (10, 50, 90), axis=0)
    ax = make_axes(ax, 5.6, 3.2)
    keys: list[Artist] = [ax.fill_between(times, low, high, color=BLUE, alpha=0.2, lw=0)]
    keys += ax.plot(times, median, color=BLUE, lw=2, marker="o", ms=4)
    for slot, pick in enumerate(picks, 1):
        keys += ax.plot(times, curves[pick], color=COLORS[slot % 10], marker=MARKERS[slot % 10], lw=1, ms=4)
    draw_legend(
        ax, keys, ["10–90 % of samples", "median", *(f"sample {pick}" for pick in picks)], beside=True
    )
    ax.set(xlabel="checkpoint" if steps is None else "step", ylabel=TITLES.get(column, plain_text(column)))
    return ax


def _count_mask(table: DataFrame, of: str) -> np.ndarray:
    """Return the samples for which something holds."""
    if of == "mistakes":
        return read_column(table, "prediction") != read_column(table, "label")
    if of == "isolated":
        return read_column(table, "status") == "isolated"
    values = read_column(table, of)
    if values.dtype.kind == "b":
        return values
    numbers = read_column(table, of, numeric=True)
    return numbers > np.sort(numbers)[int(0.9 * (len(numbers) - 1))]


def _group_samples(table: DataFrame, by: str, classes: Names) -> tuple[np.ndarray, list[str], bool]:
    """Return the group of every sample, the group names, and whether to sort groups: quintiles are not sorted."""
    values = read_column(table, by)
    labels = by in ("label", "prediction", "suggested_label") and values.dtype.kind in "iu"
    found, which = np.unique(values, return_inverse=True)
    if values.dtype.kind != "f" and (labels or values.dtype.kind not in "iu" or len(found) <= 12):
        return which, class_names(found, classes if labels else None), True
    numbers = read_column(table, by, numeric=True)
    edges = np.unique(np.sort(numbers)[np.arange(1, 5) * len(numbers) // 5])
    found, which = np.unique(np.searchsorted(edges, numbers, "right"), return_inverse=True)
    ends = [f"{edge:.3g}" for edge in edges]
    names = [f"< {ends[0]}", *(f"{a} to {b}" for a, b in itertools.pairwise(ends)), f"≥ {ends[-1]}"]
    return which, [names[group] for group in found], False


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
