"""What does an analysis look like? The report's plots, one matplotlib function each.

Each draws into `ax`, or into a new figure, and returns the Axes. Tables have the columns of `Analysis.table`. The
gallery of the documentation shows all of them (`make gallery`).
Colors are Okabe and Ito's, told apart by color-blind readers. Names are never parsed as formulas.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from pandas import DataFrame

Names = Sequence[str] | None
Box = tuple[float, float, float, float]
BLUE, VERMILION, GRAY = "#0072B2", "#D55E00", "#8C8C8C"
COLORS = [BLUE, "#E69F00", "#009E73", "#CC79A7", "#56B4E9", VERMILION, "#000000", "#C9BC00", GRAY, "#7B3F00"]
MARKERS = "osD^vP<X>p"
STATUSES = {"ordinary": GRAY, "isolated": BLUE, "contested": VERMILION}
TITLES = {
    "density": "density $N_S / N$",
    "local_density": "local density",
    "agreement": "agreement with the prediction",
    "training_confidence": "confidence (mean over training)",
    "training_variability": "variability (standard deviation over training)",
    "label_issue": "labels that look wrong",
    "mistakes": "predictions that differ from the label",
    "isolated": "samples with few neighbors",
}


def neighbor_grid(
    images: ArrayLike,
    queries: ArrayLike,
    neighbors: ArrayLike,
    similarities: ArrayLike | None = None,
    labels: ArrayLike | None = None,
    classes: Names = None,
    ax: Axes | None = None,
) -> Axes:
    """Return one row per query: its image, then its neighbors', framed blue where they have its label.

    Args:
        images: (n, h, w), (n, c, h, w) or (n, h, w, c), in any range.
        queries: (q,) places in the images.
        neighbors: (q, k) places in the images.
        similarities: (q, k), written above the neighbors.
        labels: (n,) class numbers.
        classes: Names of the classes.
        ax: Where to draw; a new figure if None.

    Returns:
        The Axes.

    Example:
        >>> import matplotlib.pyplot as plt, numpy as np, pandas, likewise as lw
        >>> plt.switch_backend("Agg")                                         # no window
        >>> ax = lw.figures.neighbor_grid(np.random.rand(9, 8, 8), [0, 1], [[3, 4], [5, 6]])
        >>> plt.close(ax.figure)

    """
    q = len(_numbers(queries, "queries", None))
    places = np.column_stack([np.asarray(queries), _numbers(neighbors, "neighbors", q, None)]).astype(int)
    pictures = _pictures(images, places)
    titles, names, frames = (np.full(places.shape, text, object) for text in ("", "", GRAY))
    if similarities is not None:
        found = _numbers(similarities, "similarities", q, places.shape[1] - 1)
        titles[:, 0], titles[:, 1:] = "query", np.vectorize("{:.2f}".format)(found)
    if labels is not None:
        own = _numbers(labels, "labels", len(np.asarray(images)))[places]
        names[:] = np.reshape(_names(own.ravel(), classes, 10), own.shape)
        frames[:, 1:] = np.where(own[:, 1:] == own[:, :1], BLUE, VERMILION)
    ratio, below = pictures.shape[2] / pictures.shape[3], 0.05 if labels is None else 0.3
    width, pitch = places.shape[1] + 0.25, ratio + below + (0.05 if similarities is None else 0.3)
    ax = _axes(ax, 0.8 * width, 0.8 * pitch * q + 0.3)
    ax.set_axis_off()
    for row, column in np.ndindex(places.shape):
        left, bottom = column + 0.25 * (column > 0) + 0.04, (q - 1 - row) * pitch + below
        box = (left / width, bottom / pitch / q, 0.92 / width, ratio / pitch / q)
        texts = [str(text[row, column]) for text in (frames, titles, names)]
        _draw_image(ax, pictures[row, column], box, *texts)
    if labels is not None:
        keys = [ax.plot([], [], "s", mfc="none", mec=color, mew=1.8)[0] for color in (BLUE, VERMILION)]
        _legend(ax, keys, ["the query's label", "another label"], beside=False)
    return ax


def pair_grid(
    images: ArrayLike,
    first: ArrayLike,
    second: ArrayLike,
    similarities: ArrayLike | None = None,
    labels: ArrayLike | None = None,
    classes: Names = None,
    pairs_per_row: int = 4,
    ax: Axes | None = None,
) -> Axes:
    """Return pairs of images side by side: near-duplicates, or the most similar samples of two classes.

    Args:
        images: (n, h, w), (n, c, h, w) or (n, h, w, c), in any range.
        first: (pairs,) places in the images, as `Analysis.duplicates["first"]`.
        second: (pairs,) places in the images.
        similarities: (pairs,), written above the pairs.
        labels: (n,) class numbers, written below; pairs of two labels are framed vermilion.
        classes: Names of the classes.
        pairs_per_row: How many pairs a row has.
        ax: Where to draw; a new figure if None.

    Returns:
        The Axes.

    Example:
        >>> import matplotlib.pyplot as plt, numpy as np, pandas, likewise as lw
        >>> plt.switch_backend("Agg")                                         # no window
        >>> ax = lw.figures.pair_grid(np.random.rand(9, 8, 8), [0, 1], [3, 4], similarities=[0.99, 0.98])
        >>> [text.get_text() for text in ax.texts]
        ['0.990', '0.980']
        >>> plt.close(ax.figure)

    """
    count = len(_numbers(first, "first", None))
    if pairs_per_row < 1:
        raise ValueError(f"{pairs_per_row} pairs per row found: pass at least one.")
    places = np.column_stack([np.asarray(first), _numbers(second, "second", count)]).astype(int)
    pictures = _pictures(images, places)
    names, frames = np.full(places.shape, "", object), np.full(count, GRAY, object)
    if labels is not None:
        own = _numbers(labels, "labels", len(np.asarray(images)))[places]
        names[:] = np.reshape(_names(own.ravel(), classes, 10), own.shape)
        frames[own[:, 0] != own[:, 1]] = VERMILION
    texts = np.full(count, "", object)
    if similarities is not None:
        texts[:] = np.vectorize("{:.3f}".format)(_numbers(similarities, "similarities", count))
    columns = min(pairs_per_row, count)
    rows = -(-count // columns)
    above, below = 0.05 if similarities is None else 0.3, 0.08 if labels is None else 0.34
    ratio = pictures.shape[2] / pictures.shape[3]
    pitch, width = ratio + above + below, 2.3 * columns - 0.3
    ax = _axes(ax, 0.75 * width, 0.75 * pitch * rows)
    ax.set_axis_off()
    for pair in range(count):
        row, column = divmod(pair, columns)
        bottom = (rows - 1 - row) * pitch + below
        for side in (0, 1):
            left = 2.3 * column + side + 0.02
            box = (left / width, bottom / pitch / rows, 0.96 / width, ratio / pitch / rows)
            _draw_image(ax, pictures[pair, side], box, frames[pair], below=str(names[pair, side]))
        if texts[pair]:
            middle, top = (2.3 * column + 1) / width, (bottom + ratio + 0.04) / pitch / rows
            ax.text(
                middle, top, texts[pair], transform=ax.transAxes, ha="center", va="bottom", fontsize="small"
            )
    return ax


def similarity_histogram(
    edges: ArrayLike, counts: ArrayLike, threshold: float | None = None, ax: Axes | None = None
) -> Axes:
    """Return the histogram of similarities on a log axis, with how many are at or above the threshold.

    Args:
        edges: (bins + 1,) edges of the bins, as of `Analysis.histogram`.
        counts: (bins,) samples in each.
        threshold: Bins from there on are colored and counted.
        ax: Where to draw; a new figure if None.

    Returns:
        The Axes.

    Example:
        >>> import matplotlib.pyplot as plt, numpy as np, pandas, likewise as lw
        >>> plt.switch_backend("Agg")                                         # no window
        >>> ax = lw.figures.similarity_histogram([-1, 0, 0.5, 1], [3, 20, 7], threshold=0.5)
        >>> ax.get_title(loc="right")
        '7 at or above 0.5'
        >>> plt.close(ax.figure)

    """
    ends = _numbers(edges, "edges", None)
    heights = _numbers(counts, "counts", len(ends) - 1)
    ax = _axes(ax, 5.0, 3.2)
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
    """Return the histogram of N_S / N; with images, above each bar the sample nearest the bar's median.

    Args:
        density: (n,) N_S / N, as in the table of a run.
        images: (n, ...) as of `neighbor_grid`.
        bins: How many.
        ax: Where to draw; a new figure if None.

    Returns:
        The Axes.

    Example:
        >>> import matplotlib.pyplot as plt, numpy as np, pandas, likewise as lw
        >>> plt.switch_backend("Agg")                                         # no window
        >>> ax = lw.figures.density_histogram(np.linspace(0.1, 0.9, 50), bins=5)
        >>> len(ax.patches)
        5
        >>> plt.close(ax.figure)

    """
    values = _numbers(density, "density", None)
    if bins < 1:
        raise ValueError(f"{bins} bins found: pass at least one.")
    if images is not None and len(np.asarray(images)) != len(values):
        raise ValueError(f"{len(np.asarray(images))} images found for {len(values)} densities: pass as many.")
    pad = 0.05 if np.ptp(values) < 1e-9 else 0.0  # all alike: one bar in the middle
    ends = np.linspace(values.min() - pad, values.max() + pad, bins + 1)
    which = np.searchsorted(ends[1:-1], values, "right")
    ax = _axes(ax, 6.0, 3.4)
    ax.bar(ends[:-1], np.bincount(which, minlength=bins), np.diff(ends), align="edge", color=BLUE, ec="white")
    ax.set(xlim=(ends[0], ends[-1]), xlabel=TITLES["density"], ylabel="samples")
    if images is not None:
        members = [np.flatnonzero(which == place) for place in np.unique(which)]
        middle = [m[np.abs(values[m] - np.median(values[m])).argmin()] for m in members]
        for place, picture in zip(np.unique(which), _pictures(images, np.array(middle)), strict=True):
            _draw_image(ax, picture, ((place + 0.05) / bins, 1.03, 0.9 / bins, 0.2), GRAY)
    return ax


def neighborhoods(table: DataFrame, ax: Axes | None = None) -> Axes:
    """Return local density against agreement, colored by status; labels that look wrong are crosses.

    Args:
        table: `Analysis.table`.
        ax: Where to draw; a new figure if None.

    Returns:
        The Axes.

    Example:
        >>> import matplotlib.pyplot as plt, numpy as np, pandas, likewise as lw
        >>> plt.switch_backend("Agg")                                         # no window
        >>> table = pandas.DataFrame({"local_density": [1, 2], "agreement": [0, 1], "status": ["isolated", "ordinary"]})
        >>> ax = lw.figures.neighborhoods(table)
        >>> ax.get_xlabel()
        'local density'
        >>> plt.close(ax.figure)

    """
    x, agreement = _column(table, "local_density", numeric=True), _column(table, "agreement", numeric=True)
    status = _column(table, "status")
    has_labels = "label_issue" in table
    issue = _column(table, "label_issue").astype(bool) if has_labels else np.zeros(len(x), dtype=bool)
    if unknown := set(status) - set(STATUSES):
        raise ValueError(f"Statuses {sorted(map(str, unknown))} found: expected {', '.join(STATUSES)}.")
    ax = _axes(ax, 5.5, 4.0)
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
    _legend(ax, keys, names, beside=False)
    return ax


def kernel_map(table: DataFrame, color: str = "label", classes: Names = None, ax: Axes | None = None) -> Axes:
    """Return the samples at map_x, map_y, colored by a column; up to ten classes have a marker each.

    Similar samples lie near each other. The axes have no name: only with `layout="pca"` are they directions.

    Args:
        table: `Analysis.table`.
        color: A column of it.
        classes: Names of the classes.
        ax: Where to draw; a new figure if None.

    Returns:
        The Axes.

    Example:
        >>> import matplotlib.pyplot as plt, numpy as np, pandas, likewise as lw
        >>> plt.switch_backend("Agg")                                         # no window
        >>> table = pandas.DataFrame({"map_x": [0, 1, 2], "map_y": [0, 1, 0], "density": [0.2, 0.4, 0.6]})
        >>> ax = lw.figures.kernel_map(table, color="density")
        >>> ax.collections[0].get_array().tolist()
        [0.2, 0.4, 0.6]
        >>> plt.close(ax.figure)

    """
    x, y = _column(table, "map_x", numeric=True), _column(table, "map_y", numeric=True)
    values = _column(table, color)
    labels = color in ("label", "prediction", "suggested_label") and values.dtype.kind in "iu"
    found, which = np.unique(values, return_inverse=True)
    names = _names(found, classes if labels else None)
    ax = _axes(ax, 6.2, 4.2)
    size = float(np.clip(16000 / len(x), 4, 24))
    if len(found) > len(COLORS) or (values.dtype.kind in "iuf" and not labels):
        shades = values if values.dtype.kind in "iuf" else which
        points = ax.scatter(x, y, size, shades, lw=0, cmap="viridis", rasterized=True)
        ax.figure.colorbar(points, ax=ax, label=TITLES.get(color, _plain(color)))
    else:
        # A class keeps its color whichever column is shown and whichever classes are in it; rare ones on top.
        slots = found if labels and found[0] >= 0 and found[-1] < len(COLORS) else np.arange(len(found))
        keys = []
        for place, slot in enumerate(slots):
            here, shade = which == place, STATUSES.get(str(found[place]), COLORS[slot])
            keys.append(ax.scatter(x[here], y[here], size, shade, marker=MARKERS[slot], lw=0))
            keys[-1].set(zorder=2 + 1 / here.sum(), rasterized=True)
        _legend(ax, keys, names, beside=True)
    ax.set(xticks=[], yticks=[], aspect="equal")
    ax.set_adjustable("datalim")
    ax.spines[:].set_visible(False)
    return ax


def confusion(matrix: ArrayLike, classes: Names = None, ax: Axes | None = None) -> Axes:
    """Return the counts of labels (rows) by neighbors' votes (columns), colored off the diagonal.

    Args:
        matrix: (classes, classes) counts, as `Analysis.confusion`.
        classes: Names of the classes.
        ax: Where to draw; a new figure if None.

    Returns:
        The Axes.

    Example:
        >>> import matplotlib.pyplot as plt, numpy as np, pandas, likewise as lw
        >>> plt.switch_backend("Agg")                                         # no window
        >>> ax = lw.figures.confusion([[9, 1], [2, 8]], classes=["cat", "dog"])
        >>> ax.get_ylabel()
        'label'
        >>> plt.close(ax.figure)

    """
    counts = _numbers(matrix, "matrix", len(np.asarray(matrix)), len(np.asarray(matrix)))
    shades = np.ma.masked_array(counts, np.eye(len(counts), dtype=bool))
    texts = np.where(shades.filled(1) == 0, "", np.vectorize("{:,.0f}".format)(counts))
    ax = _heat_map(ax, shades, texts if len(counts) <= 20 else None, classes, diverging=False)
    ax.set(xlabel="neighbors' vote", ylabel="label")
    return ax


def class_similarity(matrix: ArrayLike, classes: Names = None, ax: Axes | None = None) -> Axes:
    """Return the heat map of mean similarity, class by class, white at 0; NaN, where no pair is, is gray.

    Args:
        matrix: (classes, classes) means, as `Analysis.class_similarity`.
        classes: Names of the classes.
        ax: Where to draw; a new figure if None.

    Returns:
        The Axes.

    Example:
        >>> import matplotlib.pyplot as plt, numpy as np, pandas, likewise as lw
        >>> plt.switch_backend("Agg")                                         # no window
        >>> ax = lw.figures.class_similarity([[0.6, -0.1], [-0.1, 0.5]], classes=["cat", "dog"])
        >>> plt.close(ax.figure)

    """
    shades = np.ma.masked_invalid(np.asarray(matrix, float))
    means = _numbers(shades.filled(0), "matrix", len(shades), len(shades))
    signed = np.char.replace(np.vectorize("{:.2f}".format)(means.round(2) + 0.0), "-", "−")  # never −0.00
    texts = np.where(shades.mask, "", signed)
    return _heat_map(ax, shades, texts if len(means) <= 12 else None, classes, diverging=True)


def cartography(table: DataFrame, ax: Axes | None = None) -> Axes:
    """Return how training went, sample by sample: variability against confidence, labels that look wrong on top.

    Top left: easy to learn. Right: ambiguous. Bottom left: hardly ever believed, often a wrong label.
    From Swayamdipta et al., *Dataset Cartography*, 2020.

    Args:
        table: `Analysis.table` of a run with the record of training (`analyze(..., watch=)`).
        ax: Where to draw; a new figure if None.

    Returns:
        The Axes.

    Example:
        >>> import matplotlib.pyplot as plt, numpy as np, pandas, likewise as lw
        >>> plt.switch_backend("Agg")                                         # no window
        >>> table = pandas.DataFrame({"training_confidence": [0.9, 0.1], "training_variability": [0.1, 0.2]})
        >>> ax = lw.figures.cartography(table.assign(label_issue=[False, True]))
        >>> [text.get_text().strip() for text in ax.get_legend().get_texts()]
        ['looks right: 1', 'looks wrong: 1']
        >>> plt.close(ax.figure)

    """
    x, y = (_column(table, name, numeric=True) for name in ("training_variability", "training_confidence"))
    wrong = _column(table, "label_issue").astype(bool)
    ax = _axes(ax, 5.0, 4.0)
    size = float(np.clip(16000 / len(x), 4, 18))
    keys, names = [], []
    for here, name, color, marker in ((~wrong, "right", GRAY, "o"), (wrong, "wrong", VERMILION, "X")):
        scale = 1 if name == "right" else 2
        keys.append(ax.scatter(x[here], y[here], scale * size, color, marker=marker, lw=0, rasterized=True))
        names.append(f"looks {name}: {here.sum():,}")
    ax.set(xlim=(-0.02, max(0.5, x.max()) + 0.02), ylim=(-0.04, 1.04))
    ax.set(xlabel=TITLES["training_variability"], ylabel=TITLES["training_confidence"])
    _legend(ax, keys, names, beside=False)
    return ax


def slices(
    table: DataFrame,
    by: str = "label",
    of: str = "label_issue",
    classes: Names = None,
    most: int = 30,
    ax: Axes | None = None,
) -> Axes:
    """Return the share of samples for which something holds, group by group, with Wilson's 95 % intervals.

    The dashed line is the share among all samples. As in the report, a column of numbers is cut into five groups of
    about equal size, in their order; other groups come with the largest share first.

    Args:
        table: `Analysis.table`.
        by: The column whose groups are compared.
        of: What is counted: a column of truth values, "mistakes" (the prediction is not the label), "isolated" (its
            status), or a column of numbers, of which the largest tenth is counted.
        classes: Names of the classes, where `by` holds class numbers.
        most: How many groups are shown.
        ax: Where to draw; a new figure if None.

    Returns:
        The Axes.

    Example:
        >>> import matplotlib.pyplot as plt, numpy as np, pandas, likewise as lw
        >>> plt.switch_backend("Agg")                                         # no window
        >>> table = pandas.DataFrame({"source": ["a", "a", "b", "b"], "label_issue": [True, False, False, False]})
        >>> ax = lw.figures.slices(table, by="source")
        >>> [float(bar.get_width()) for bar in ax.patches]
        [0.5, 0.0]
        >>> plt.close(ax.figure)

    """
    from scipy.stats import binomtest

    hits = _counted(table, of)
    groups, names, ranked = _grouped(table, by, classes)
    sizes = np.bincount(groups, minlength=len(names))
    found = np.bincount(groups, weights=hits, minlength=len(names)).astype(int)
    shares = found / sizes
    order = np.argsort(-shares, kind="stable")[:most] if ranked else np.arange(len(names))
    rows = range(len(order))
    ends = [binomtest(int(found[g]), int(sizes[g])).proportion_ci(method="wilson") for g in order]
    ax = _axes(ax, 5.5, 0.28 * len(order) + 1.1)
    from matplotlib.ticker import PercentFormatter

    ax.barh(rows, shares[order], 0.72, color=BLUE, alpha=0.75)
    ax.hlines(rows, [end.low for end in ends], [end.high for end in ends], color="black", lw=1.2)
    ax.axvline(hits.mean(), color=VERMILION, lw=1.2, ls="--")
    ax.set_title(f"all samples: {hits.mean():.1%}", loc="right", color=VERMILION, fontsize="medium")
    ax.set_yticks(rows, [f"{names[g]} (n = {sizes[g]:,})" for g in order])
    ax.set(xlim=(0, min(1.0, 1.02 * max(end.high for end in ends))), ylim=(len(order) - 0.4, -0.6))
    ax.set(xlabel=f"share of {TITLES.get(of, f'the largest tenth of {_plain(of)}')}")
    ax.xaxis.set_major_formatter(PercentFormatter(1))
    ax.tick_params(axis="y", length=0)
    return ax


def calibration(levels: ArrayLike, ax: Axes | None = None) -> Axes:
    """Return what was expected of held-out predictions against what was found; on the diagonal they agree.

    Args:
        levels: `Calibration.levels`: rows of expected, found, low and high ends of its 95 % interval, and samples.
        ax: Where to draw; a new figure if None.

    Returns:
        The Axes.

    Example:
        >>> import matplotlib.pyplot as plt, numpy as np, pandas, likewise as lw
        >>> plt.switch_backend("Agg")                                         # no window
        >>> ax = lw.figures.calibration([(0.6, 0.55, 0.4, 0.7, 30), (0.9, 0.93, 0.85, 0.97, 40)])
        >>> ax.get_title(loc="right")
        '70 held-out predictions'
        >>> plt.close(ax.figure)

    """
    rows = _numbers([tuple(level) for level in np.asarray(levels)], "levels", None, 5).astype(float)
    x, y, low, high, samples = rows.T
    if (low > y).any() or (high < y).any():
        raise ValueError("levels: intervals that do not hold what was found, pass low <= found <= high.")
    ax = _axes(ax, 4.0, 4.0)
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
    """Return a column across checkpoints: median, 10-90 % band, and the curves of single samples.

    Args:
        tables: Tables of runs on the same samples, one for each checkpoint.
        column: Which column.
        steps: (checkpoints,) where they are on the axis; 0, 1, 2, ... if None.
        samples: Those that get a curve each.
        ax: Where to draw; a new figure if None.

    Returns:
        The Axes.

    Example:
        >>> import matplotlib.pyplot as plt, numpy as np, pandas, likewise as lw
        >>> plt.switch_backend("Agg")                                         # no window
        >>> table = pandas.DataFrame({"map_x": [0, 1, 2], "map_y": [0, 1, 0], "density": [0.2, 0.4, 0.6]})
        >>> ax = lw.figures.dynamics([table, table], "density", samples=[0])
        >>> ax.get_xlabel()
        'checkpoint'
        >>> plt.close(ax.figure)

    """
    columns = [_column(table, column, numeric=True) for table in tables]
    if len({len(values) for values in columns}) != 1:
        raise ValueError(f"Tables of {[*map(len, columns)]} samples found: pass tables of the same samples.")
    times = _numbers(range(len(tables)) if steps is None else steps, "steps", len(tables))
    picks = [] if samples is None else list(samples)
    if outside := [pick for pick in picks if not 0 <= pick < len(columns[0])]:
        raise ValueError(f"Samples {outside} found: choose from 0 to {len(columns[0]) - 1}.")
    curves = np.stack(columns, axis=1)
    low, median, high = np.percentile(curves, (10, 50, 90), axis=0)
    ax = _axes(ax, 5.6, 3.2)
    keys: list[Artist] = [ax.fill_between(times, low, high, color=BLUE, alpha=0.2, lw=0)]
    keys += ax.plot(times, median, color=BLUE, lw=2, marker="o", ms=4)
    for slot, pick in enumerate(picks, 1):
        keys += ax.plot(times, curves[pick], color=COLORS[slot % 10], marker=MARKERS[slot % 10], lw=1, ms=4)
    _legend(ax, keys, ["10–90 % of samples", "median", *(f"sample {pick}" for pick in picks)], beside=True)
    ax.set(xlabel="checkpoint" if steps is None else "step", ylabel=TITLES.get(column, _plain(column)))
    return ax


def _axes(ax: Axes | None, width: float, height: float) -> Axes:
    """Return `ax`, or the Axes of a new figure of that size in inches, open above and to the right."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError('Figures need matplotlib: pip install "likewise[figures]"') from error
    ax = pyplot.subplots(figsize=(width, height), layout="constrained")[1] if ax is None else ax
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def _numbers(values: ArrayLike, name: str, *sizes: int | None) -> np.ndarray:
    """Return finite numbers of these sizes, where None is any but 0."""
    found = np.asarray(values)
    fits = len(sizes) == found.ndim and all(s in (None, n) for s, n in zip(sizes, found.shape, strict=True))
    if not (fits and found.size and found.dtype.kind in "biuf" and np.isfinite(found).all()):
        raise ValueError(f"{name}: {found.dtype} {found.shape} found, pass finite numbers of shape {sizes}.")
    return found


def _column(table: DataFrame, name: str, numeric: bool = False) -> np.ndarray:
    """Return a column, checked to be finite numbers if it must be numeric."""
    if name not in table:
        raise ValueError(f"No column {name!r} found: choose from {', '.join(table)}, or analyze again.")
    return _numbers(table[name], name, None).astype(float) if numeric else np.asarray(table[name])


def _counted(table: DataFrame, of: str) -> np.ndarray:
    """Return for which samples something holds."""
    if of == "mistakes":
        return _column(table, "prediction") != _column(table, "label")
    if of == "isolated":
        return _column(table, "status") == "isolated"
    values = _column(table, of)
    if values.dtype.kind == "b":
        return values
    numbers = _column(table, of, numeric=True)
    return numbers > np.sort(numbers)[int(0.9 * (len(numbers) - 1))]


def _grouped(table: DataFrame, by: str, classes: Names) -> tuple[np.ndarray, list[str], bool]:
    """Return the group of every sample, their names, and whether they are ranked: quintiles of numbers are not."""
    values = _column(table, by)
    labels = by in ("label", "prediction", "suggested_label") and values.dtype.kind in "iu"
    found, which = np.unique(values, return_inverse=True)
    if values.dtype.kind != "f" and (labels or values.dtype.kind not in "iu" or len(found) <= 12):
        return which, _names(found, classes if labels else None), True
    numbers = _column(table, by, numeric=True)
    edges = np.unique(np.sort(numbers)[np.arange(1, 5) * len(numbers) // 5])
    found, which = np.unique(np.searchsorted(edges, numbers, "right"), return_inverse=True)
    ends = [f"{edge:.3g}" for edge in edges]
    names = [f"< {ends[0]}", *(f"{a} to {b}" for a, b in itertools.pairwise(ends)), f"≥ {ends[-1]}"]
    return which, [names[group] for group in found], False


def _pictures(images: ArrayLike, places: np.ndarray) -> np.ndarray:
    """Return the images at these places, gray or RGB with the channels last, scaled to 0..1 together."""
    found = np.asarray(images)
    found = np.moveaxis(found, 1, -1) if found.ndim == 4 and found.shape[1] in (1, 3) else found
    if found.ndim != 3 and (found.ndim != 4 or found.shape[-1] not in (1, 3)):
        raise ValueError(f"Images of shape {found.shape} found: pass n x h x w, with 1 or 3 channels if any.")
    if places.min() < 0 or places.max() >= len(found):
        raise ValueError(f"Places {places.min()} to {places.max()} found: choose from 0 to {len(found) - 1}.")
    shown = found[places].astype(float)
    return (shown - shown.min()) / (np.ptp(shown) or 1)


def _draw_image(ax: Axes, image: np.ndarray, box: Box, frame: str, above: str = "", below: str = "") -> None:
    """Draw a framed image in a box of `ax`, given in fractions of its size, with texts above and below."""
    inset = ax.inset_axes(box, anchor="S", xticks=[], yticks=[])
    inset.imshow(image, cmap="gray", vmin=0, vmax=1)
    inset.set_title(above, fontsize="small", pad=3)
    inset.set_xlabel(below, fontsize="small", labelpad=3)
    inset.spines[:].set(color=frame, linewidth=0.8 if frame == GRAY else 2)


def _plain(text: object, width: int = 24) -> str:
    """Return a text in one line of at most `width`, which matplotlib does not take for a formula."""
    line = " ".join(str(text).split())
    return (line if len(line) <= width else line[: width - 1] + "…").replace("$", r"\$")


def _names(values: np.ndarray, classes: Names, width: int = 24) -> list[str]:
    """Return the names of these classes; without names, the values."""
    if classes is not None and not (0 <= values.min() and values.max() < len(classes)):
        raise ValueError(f"Classes up to {values.max()} found, but {len(classes)} names: name each class.")
    return [_plain(value if classes is None else classes[int(value)], width) for value in values]


def _legend(ax: Axes, keys: Sequence[Artist], names: Sequence[str], beside: bool) -> None:
    """Draw a legend without a frame, beside the plot or above; inside where nothing makes room for it beside."""
    texts = [f" {name}" for name in names]  # matplotlib before 3.10 leaves out those that start with "_"
    style = {"ncols": 1 if beside else 2, "markerscale": 1.5, "handletextpad": 0.2}
    if beside and ax.figure.get_layout_engine() is None:  # beside it, it would lie on the next plot
        ax.legend(keys, texts, loc="best", framealpha=0.8, edgecolor="none", **style)
        return
    legend = ax.legend(keys, texts, loc="center left" if beside else "lower center", **style)
    legend.set(frame_on=False, bbox_to_anchor=(1.0, 0.5) if beside else (0.5, 1.0))


def _heat_map(
    ax: Axes | None, shades: np.ma.MaskedArray, texts: np.ndarray | None, classes: Names, diverging: bool
) -> Axes:
    """Return a matrix of classes by classes, masked cells gray, with texts in the cells or none."""
    ticks = np.arange(0, len(shades), -(-len(shades) // 20))
    names, size = _names(ticks, classes), np.abs(shades.filled(0))
    most, side = size.max() or 1, float(np.clip(0.42 * len(shades) + 1.3, 2.5, 8))
    ax = _axes(ax, side + 0.8 * (diverging or texts is None), side)
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
