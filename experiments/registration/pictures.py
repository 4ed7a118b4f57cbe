"""Figures that show patches and outlines: neighbors, the range of N_S, Nairobi before and after."""

from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from analysis import drawn_sample, representatives
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from patches import Patches, Poses, shown
from summary import looks
from tiles import SMALLEST, area

Results = dict[str, dict[str, Any]]
SHOWN = 2  # patches whose neighbors are shown
LONGER = 3  # times: arrows are drawn so much longer than the displacement


def neighbors(found: Results, study: Any) -> Figure | None:
    """Draw the nearest patches of a few, for each round."""
    if not looks(found):
        return None
    run = looks(found)[0]["looks"]
    rows = []
    for query in range(SHOWN):
        for turn, look in enumerate(run):
            near = look["neighbors"]["centered"]
            rows.append(
                (
                    f"round {turn + 1}",
                    _patches(look, study),
                    near["indices"][query],
                    near["similarities"][query],
                )
            )
    return _strips(rows)


def perceptual(found: Results, study: Any) -> Figure | None:
    """Draw the nearest patches by the kernel and by features, in the last round."""
    if not looks(found):
        return None
    look = looks(found)[0]["looks"][-1]
    names = {"plain": "kernel", "centered": "kernel,\ncentered", "features": "its own\nfeatures"}
    names["perceptual"] = "SqueezeNet"
    patches, rows = _patches(look, study), []
    for query in range(SHOWN):
        for kind, name in names.items():
            if kind in look["neighbors"]:
                near = look["neighbors"][kind]
                rows.append((name, patches, near["indices"][query], near["similarities"][query]))
    return _strips(rows)


def directions(found: Results, study: Any) -> dict[str, list[float]]:
    """Return the mean cosine between the label of a patch and those of its neighbors, by kind and round.

    0: neighbors are moved in any direction; 1: all as the patch itself.
    """
    agreement: dict[str, list[float]] = {}
    for result in looks(found):
        for turn, look in enumerate(result["looks"]):
            unit = torch.nn.functional.normalize(_patches(look, study).label, dim=1).cpu()
            for kind, near in look["neighbors"].items():
                cosines = [(unit[row[1:]] @ unit[row[0]]).mean() for row in near["indices"]]
                agreement.setdefault(f"round {turn + 1}, {kind}", []).append(float(np.mean(cosines)))
    return agreement


def density(found: Results, study: Any) -> Figure | None:
    """Draw the histogram of N_S of each round, a patch for each bin above it."""
    if not looks(found):
        return None
    run = looks(found)[0]["looks"]
    figure = plt.figure(figsize=(9.5, 3.6 * len(run)), layout="constrained")
    for turn, (look, part) in enumerate(
        zip(run, figure.subfigures(len(run), 1, squeeze=False)[:, 0], strict=True)
    ):
        soft = np.array(look["density"]["soft"])
        edges, which = representatives(look["density"]["soft"], len(look["lacking"]))
        patches = _patches(look, study)
        grid = part.add_gridspec(2, len(which), height_ratios=[1, 1.6], wspace=0.05)
        for i, patch in enumerate(which):
            _patch(part.add_subplot(grid[0, i]), patches, patch)
        axis = part.add_subplot(grid[1, :])
        axis.hist(soft, edges, color="tab:gray", rwidth=0.9)
        axis.set(xlabel="N_S", ylabel=f"of {len(soft):,} patches", title=f"round {turn + 1}")
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def nairobi(found: Results, study: Any, side: int = 400) -> Figure | None:
    """Draw parts of Nairobi with outlines as they are and as aligned."""
    runs = [r for r in found.values() if "nairobi" in r]
    if not runs:
        return None
    moved = np.mean([r["nairobi"]["moved"] for r in runs], 0)
    crops = _crowded(study, moved, side)
    figure, axes = plt.subplots(1, len(crops), figsize=(3.2 * len(crops), 3.3), layout="constrained")
    for axis, (image, outlines) in zip(axes, crops, strict=True):
        axis.imshow(image)
        for outline, move in outlines:
            for color, points in (("red", outline), ("lime", outline + move)):
                closed = np.concatenate([points, points[:1]])
                axis.plot(closed[:, 0], closed[:, 1], color=color, lw=1.2)
        axis.set(xlim=(0, side), ylim=(side, 0), xticks=[], yticks=[])
    return figure


def _crowded(study: Any, moved: np.ndarray, side: int, count: int = 4) -> list[Any]:
    """Return the squares with most outlines, no two at one place: image and (outline, move) pairs."""
    squares, index = [], 0
    for region in (r for r in study.regions() if r.role == "nairobi"):
        kept = [o for o in region.outlines if area(o) >= SMALLEST]
        pairs = list(zip(kept, moved[index : index + len(kept)], strict=True))
        index += len(kept)
        h, w = region.image.shape[:2]
        for top in range(0, h - side + 1, side // 2):
            for left in range(0, w - side + 1, side // 2):
                low, high = np.array([left, top]), np.array([left, top]) + side
                here = [(o - low, m) for o, m in pairs if (o.min(0) > low).all() and (o.max(0) < high).all()]
                squares.append(
                    (len(here), id(region), low, region.image[top : top + side, left : left + side], here)
                )
    squares.sort(key=lambda s: -s[0])
    chosen: list[Any] = []
    for s in squares:
        if all(s[1] != c[1] or np.abs(s[2] - c[2]).max() >= side for c in chosen):
            chosen.append(s)
    return [(image, here) for _, _, _, image, here in chosen[:count]]


def _patches(look: dict[str, Any], study: Any) -> Patches:
    """Return the patches that were compared, as they were."""
    of = study.views("train")[study.plan.scale]
    which, poses = drawn_sample(of, study.plan.patches)
    lacking = torch.tensor(look["lacking"])
    n = len(lacking)
    return shown(of.take(which[:n]), lacking, Poses(*(value[:n] for value in poses)))


def _strips(rows: list[tuple[str, Patches, list[int], list[float]]]) -> Figure:
    columns = len(rows[0][2])
    figure, axes = plt.subplots(
        len(rows), columns, figsize=(1.15 * columns + 0.5, 1.32 * len(rows)), layout="constrained"
    )
    for line, (name, patches, indices, similarities) in zip(axes, rows, strict=True):
        for i, (axis, index, k) in enumerate(zip(line, indices, similarities, strict=True)):
            _patch(axis, patches, index)
            axis.set_xlabel("itself" if i == 0 else f"{k:.2f}", fontsize=8, labelpad=1)
        line[0].set_ylabel(name, fontsize=9)
    return figure


def _patch(axis: Axes, patches: Patches, index: int) -> None:
    """Draw an image, the map's outlines on it, and where its label would move the map, as a longer arrow."""
    image = (patches.image[index].permute(1, 2, 0) / 2 + 0.5).clamp(0, 1).cpu().numpy()
    drawn = patches.map[index, 0].cpu().numpy()
    middle = image.shape[0] / 2 - 0.5
    axis.imshow(image)
    axis.contour(drawn, [0.5], colors="yellow", linewidths=0.7)
    x, y = (LONGER * patches.label[index]).tolist()
    arrow = {"arrowstyle": "->", "color": "red", "lw": 1.3, "shrinkA": 0, "shrinkB": 0}
    axis.annotate("", (middle + x, middle + y), (middle, middle), arrowprops=arrow)
    axis.set(xticks=[], yticks=[])
