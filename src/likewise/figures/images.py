"""Grids of sample images: neighbors and pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from likewise.figures.drawing import (
    BLUE,
    GRAY,
    VERMILION,
    Names,
    check_numbers,
    class_names,
    draw_image,
    draw_legend,
    make_axes,
    read_images,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def neighbor_grid(
    images: ArrayLike,
    queries: ArrayLike,
    neighbors: ArrayLike,
    similarities: ArrayLike | None = None,
    labels: ArrayLike | None = None,
    classes: Names = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw one row per query: its image, then its neighbors, framed blue if they have its label.

    Args:
        images: (n, h, w), (n, c, h, w) or (n, h, w, c), in any range.
        queries: (q,) places in the images.
        neighbors: (q, k) places in the images.
        similarities: (q, k), written above the neighbors.
        labels: (n,) class numbers.
        classes: Names of the classes.
        ax: Axes to draw into; None creates a new figure.

    Returns:
        The Axes, with an inset for each image.

    Example:
        >>> import numpy as np, likewise as lw
        >>> from matplotlib.figure import Figure
        >>> ax = lw.figures.neighbor_grid(np.random.rand(9, 8, 8), [0, 1], [[3, 4], [5, 6]], ax=Figure().add_subplot())

    """
    q = len(check_numbers(queries, "queries", None))
    places = np.column_stack([np.asarray(queries), check_numbers(neighbors, "neighbors", q, None)]).astype(
        int
    )
    pictures = read_images(images, places)
    titles, names, frames = (np.full(places.shape, text, object) for text in ("", "", GRAY))
    if similarities is not None:
        found = check_numbers(similarities, "similarities", q, places.shape[1] - 1)
        titles[:, 0], titles[:, 1:] = "query", np.vectorize("{:.2f}".format)(found)
    if labels is not None:
        own = check_numbers(labels, "labels", len(np.asarray(images)))[places]
        names[:] = np.reshape(class_names(own.ravel(), classes, 10), own.shape)
        frames[:, 1:] = np.where(own[:, 1:] == own[:, :1], BLUE, VERMILION)
    ratio, below = pictures.shape[2] / pictures.shape[3], 0.05 if labels is None else 0.3
    width, pitch = places.shape[1] + 0.25, ratio + below + (0.05 if similarities is None else 0.3)
    ax = make_axes(ax, 0.8 * width, 0.8 * pitch * q + 0.3)
    ax.set_axis_off()
    for row, column in np.ndindex(places.shape):
        left, bottom = column + 0.25 * (column > 0) + 0.04, (q - 1 - row) * pitch + below
        box = (left / width, bottom / pitch / q, 0.92 / width, ratio / pitch / q)
        texts = [str(text[row, column]) for text in (frames, titles, names)]
        draw_image(ax, pictures[row, column], box, *texts)
    if labels is not None:
        keys = [ax.plot([], [], "s", mfc="none", mec=color, mew=1.8)[0] for color in (BLUE, VERMILION)]
        draw_legend(ax, keys, ["the query's label", "another label"], beside=False)
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
    """Draw pairs of images side by side: near-duplicates, or the most similar samples of two classes.

    Args:
        images: (n, h, w), (n, c, h, w) or (n, h, w, c), in any range.
        first: (pairs,) places in the images, as `Analysis.duplicates["first"]`.
        second: (pairs,) places in the images.
        similarities: (pairs,), written above the pairs.
        labels: (n,) class numbers, written below; pairs of two labels are framed vermilion.
        classes: Names of the classes.
        pairs_per_row: Number of pairs per row.
        ax: Axes to draw into; None creates a new figure.

    Returns:
        The Axes, with two insets for each pair.

    Example:
        >>> import numpy as np, likewise as lw
        >>> from matplotlib.figure import Figure
        >>> ax = Figure().add_subplot()
        >>> ax = lw.figures.pair_grid(np.random.rand(9, 8, 8), [0, 1], [3, 4], similarities=[0.99, 0.98], ax=ax)
        >>> [text.get_text() for text in ax.texts]
        ['0.990', '0.980']

    """
    count = len(check_numbers(first, "first", None))
    if pairs_per_row < 1:
        raise ValueError(f"{pairs_per_row} pairs per row found: pass at least one.")
    places = np.column_stack([np.asarray(first), check_numbers(second, "second", count)]).astype(int)
    pictures = read_images(images, places)
    names, frames = np.full(places.shape, "", object), np.full(count, GRAY, object)
    if labels is not None:
        own = check_numbers(labels, "labels", len(np.asarray(images)))[places]
        names[:] = np.reshape(class_names(own.ravel(), classes, 10), own.shape)
        frames[own[:, 0] != own[:, 1]] = VERMILION
    texts = np.full(count, "", object)
    if similarities is not None:
        texts[:] = np.vectorize("{:.3f}".format)(check_numbers(similarities, "similarities", count))
    columns = min(pairs_per_row, count)
    rows = -(-count // columns)
    above, below = 0.05 if similarities is None else 0.3, 0.08 if labels is None else 0.34
    ratio = pictures.shape[2] / pictures.shape[3]
    pitch, width = ratio + above + below, 2.3 * columns - 0.3
    ax = make_axes(ax, 0.75 * width, 0.75 * pitch * rows)
    ax.set_axis_off()
    for pair in range(count):
        row, column = divmod(pair, columns)
        bottom = (rows - 1 - row) * pitch + below
        for side in (0, 1):
            left = 2.3 * column + side + 0.02
            box = (left / width, bottom / pitch / rows, 0.96 / width, ratio / pitch / rows)
            draw_image(ax, pictures[pair, side], box, frames[pair], below=str(names[pair, side]))
        if texts[pair]:
            middle, top = (2.3 * column + 1) / width, (bottom + ratio + 0.04) / pitch / rows
            ax.text(
                middle, top, texts[pair], transform=ax.transAxes, ha="center", va="bottom", fontsize="small"
            )
    return ax
