"""Colors, names, legends, images and argument checks shared by all figures."""

from __future__ import annotations

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
BLUE = "#0072B2"
VERMILION = "#D55E00"
GRAY = "#8C8C8C"
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


def make_axes(ax: Axes | None, width: float, height: float) -> Axes:
    """Return `ax`, or the Axes of a new figure of that size in inches, open above and to the right."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError('Figures need matplotlib: pip install "likewise[figures]"') from error
    ax = pyplot.subplots(figsize=(width, height), layout="constrained")[1] if ax is None else ax
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def check_numbers(values: ArrayLike, name: str, *sizes: int | None) -> np.ndarray:
    """Return finite numbers with these sizes; None allows any size but 0."""
    found = np.asarray(values)
    fits = len(sizes) == found.ndim and all(s in (None, n) for s, n in zip(sizes, found.shape, strict=True))
    if not (fits and found.size and found.dtype.kind in "biuf" and np.isfinite(found).all()):
        raise ValueError(f"{name}: {found.dtype} {found.shape} found, pass finite numbers of shape {sizes}.")
    return found


def read_column(table: DataFrame, name: str, numeric: bool = False) -> np.ndarray:
    """Return a column, checked to be finite numbers if it must be numeric."""
    if name not in table:
        raise ValueError(f"No column {name!r} found: choose from {', '.join(table)}, or analyze again.")
    return check_numbers(table[name], name, None).astype(float) if numeric else np.asarray(table[name])


def read_images(images: ArrayLike, places: np.ndarray) -> np.ndarray:
    """Return the images at these positions, gray or RGB with the channels last, scaled to 0..1 together."""
    found = np.asarray(images)
    found = np.moveaxis(found, 1, -1) if found.ndim == 4 and found.shape[1] in (1, 3) else found
    if found.ndim != 3 and (found.ndim != 4 or found.shape[-1] not in (1, 3)):
        raise ValueError(f"Images of shape {found.shape} found: pass n x h x w, with 1 or 3 channels if any.")
    if places.min() < 0 or places.max() >= len(found):
        raise ValueError(f"Places {places.min()} to {places.max()} found: choose from 0 to {len(found) - 1}.")
    shown = found[places].astype(float)
    return (shown - shown.min()) / (np.ptp(shown) or 1)


def draw_image(ax: Axes, image: np.ndarray, box: Box, frame: str, above: str = "", below: str = "") -> None:
    """Draw a framed image in a box of `ax`, given in fractions of its size, with texts above and below."""
    inset = ax.inset_axes(box, anchor="S", xticks=[], yticks=[])
    inset.imshow(image, cmap="gray", vmin=0, vmax=1)
    inset.set_title(above, fontsize="small", pad=3)
    inset.set_xlabel(below, fontsize="small", labelpad=3)
    inset.spines[:].set(color=frame, linewidth=0.8 if frame == GRAY else 2)


def plain_text(text: object, width: int = 24) -> str:
    """Return a text in one line of at most `width`, escaped so that matplotlib does not parse it as a formula."""
    line = " ".join(str(text).split())
    return (line if len(line) <= width else line[: width - 1] + "…").replace("$", r"\$")


def class_names(values: np.ndarray, classes: Names, width: int = 24) -> list[str]:
    """Return the names of these classes; without names, the values."""
    if classes is not None and not (0 <= values.min() and values.max() < len(classes)):
        raise ValueError(f"Classes up to {values.max()} found, but {len(classes)} names: name each class.")
    return [plain_text(value if classes is None else classes[int(value)], width) for value in values]


def draw_legend(ax: Axes, keys: Sequence[Artist], names: Sequence[str], beside: bool) -> None:
    """Draw a legend without a frame, beside or above the plot; inside if there is no room."""
    texts = [f" {name}" for name in names]  # matplotlib before 3.10 leaves out those that start with "_"
    style = {"ncols": 1 if beside else 2, "markerscale": 1.5, "handletextpad": 0.2}
    if beside and ax.figure.get_layout_engine() is None:  # beside it, it would lie on the next plot
        ax.legend(keys, texts, loc="best", framealpha=0.8, edgecolor="none", **style)
        return
    legend = ax.legend(keys, texts, loc="center left" if beside else "lower center", **style)
    legend.set(frame_on=False, bbox_to_anchor=(1.0, 0.5) if beside else (0.5, 1.0))
