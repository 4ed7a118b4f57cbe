"""The figures of the experiment, each from the results alone; those that show patches read the data again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from summary import by_kind, interval, laws, looks, said, told

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Results = dict[str, dict[str, Any]]
ROUNDS = ("tab:red", "tab:blue", "tab:green")
NAMES = {
    "original": "train, align the originals, train again",
    "extra noise": "the same, extra noise on the annotations",
    "aligned again": "align what was aligned",
    "no retraining": "first networks, applied three times",
    "true labels": "trained on true labels",
    "longer": "one round, four times longer",
}

__all__ = ["drawn", "told"]


def drawn(found: Results, study: Any, out: Path) -> None:
    """Draw every figure whose results are there."""
    import pictures

    if by_kind(found):
        _saved(_rounds(found), out / "rounds.png")
    if laws(found):
        _saved(_law(found), out / "law.png")
    if looks(found):
        for name, draw in {"similarities": _similarities, "trust": _trust, "answers": _answers}.items():
            _saved(draw(found), out / f"{name}.png")
    shown: dict[str, Callable[[Results, Any], Figure | None]] = {
        "neighbors": pictures.neighbors,
        "perceptual": pictures.perceptual,
        "density": pictures.density,
        "nairobi": pictures.nairobi,
    }
    for kind, values in pictures.directions(found, study).items():
        print(f"neighbors moved as the patch itself: {kind:24} {said(values)}")
    for name, picture in shown.items():
        _saved(picture(found, study), out / f"{name}.jpg")


def _saved(figure: Figure | None, path: Path) -> None:
    if figure is not None:
        options = {"pil_kwargs": {"quality": 80}} if path.suffix == ".jpg" else {}
        figure.savefig(path, dpi=110, **options)
        plt.close(figure)


def _bare(*axes: Axes) -> None:
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)


def _rounds(found: Results) -> Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for kind, style in (("original", "-"), ("extra noise", "--")):
        runs = by_kind(found).get(kind, [])
        for turn in range(len(runs[0]["errors"]["train"]) if runs else 0):
            quantiles = np.mean([r["errors"]["train"][turn]["quantiles"] for r in runs], 0)
            color = "black" if turn == 0 else ROUNDS[turn - 1]
            name = ("annotations" if turn == 0 else f"round {turn}") if style == "-" else None
            left.plot(quantiles, np.linspace(0, 1, 101), style, color=color, label=name)
    if "true labels" in by_kind(found):
        runs = by_kind(found)["true labels"]
        quantiles = np.mean([r["errors"]["train"][1]["quantiles"] for r in runs], 0)
        left.plot(quantiles, np.linspace(0, 1, 101), ":", color="gray", label="true labels")
    if "extra noise" in by_kind(found):
        left.plot([], [], "--", color="gray", label="with extra noise")
    left.set(xlim=(0, 40), ylim=(0, 1), xlabel="error below (pixels)", ylabel="share of the buildings")
    left.legend(frameon=False)
    _medians(found, right)
    _bare(left, right)
    return figure


def _medians(found: Results, axis: Axes) -> None:
    for i, (kind, runs) in enumerate(by_kind(found).items()):
        curves = np.array([[e["median"] for e in r["errors"]["train"]] for r in runs])
        spread = [interval(list(column))[1] for column in curves.T]
        turns, half = np.arange(curves.shape[1]), np.nan_to_num(spread)
        axis.errorbar(
            turns + 0.04 * (i - 2), curves.mean(0), half, marker="o", ms=4, capsize=2, label=NAMES[kind]
        )
    runs = [r for r in by_kind(found).get("original", []) if "best possible" in r["errors"]]
    if runs:
        best = np.mean([[e["median"] for e in r["errors"]["best possible"]] for r in runs], 0)
        axis.plot(best, ":", color="black", label="the mean of the labels, answered")
        beyond = np.mean([[e["median"] for e in r["errors"]["held-out"]] for r in runs], 0)
        axis.plot(beyond, "--", color="tab:blue", alpha=0.6, label="held-out places (as the first)")
    axis.set(ylim=(0, 26), xlabel="round", ylabel="median error (pixels)", xticks=range(4))
    axis.legend(frameon=False, fontsize=8)


def _law(found: Results) -> Figure:
    figure, axes = plt.subplots(1, 3, figsize=(12.5, 4.2), layout="constrained")
    rows = laws(found)
    groups = {
        "from scratch": ("o", [r for r in rows if not r["warm"] and r["copies"] == 1]),
        "from a trained network": ("^", [r for r in rows if r["warm"] and r["copies"] == 1]),
        "copies, from scratch": ("s", [r for r in rows if r["copies"] > 1]),
    }
    top = 1.3 * max(r["left"] for r in rows)
    least = 0.7 * min(min(r["σ factor"], r["left"]) for r in rows)
    for axis, name, title in zip(
        axes, ("σ factor", "σ hat"), ("σ · factor (the paper's)", "σ · ‖row of H‖"), strict=False
    ):
        for start, (marker, here) in groups.items():
            if here:
                colors = np.log2([r["n"] for r in here])
                dots = axis.scatter(
                    [r[name] for r in here],
                    [r["left"] for r in here],
                    30,
                    colors,
                    marker,
                    label=start,
                    vmin=7,
                    vmax=10.2,
                    alpha=0.8,
                )
        axis.plot([least, top], [least, top], color="gray", lw=1)
        axis.set(xscale="log", yscale="log", xlim=(least, top), ylim=(least, top), title=title)
        axis.set(xlabel="predicted noise left (pixels)", ylabel="measured between networks (pixels)")
        axis.legend(frameon=False, loc="lower right", fontsize=8)
    bar = figure.colorbar(dots, ax=axes[1], ticks=[7, 8, 9, 10])
    bar.ax.set_yticklabels(["128", "256", "512", "1,024"])
    bar.ax.set_title("N", fontsize=10)
    several = {(r["n"], r["sigma"], r["warm"]) for r in rows if r["copies"] > 1}
    for case in sorted(several)[:1]:
        _copies([r for r in rows if (r["n"], r["sigma"], r["warm"]) == case], axes[2])
    _bare(*axes)
    return figure


def _copies(rows: list[dict[str, Any]], axis: Axes) -> None:
    first = [r for r in rows if r["copies"] == 1]
    for key, style in (("left beside", "-"), ("factor", ":")):
        base = np.mean([r[key] for r in first]) if first else np.nan
        for fresh, color in ((False, "tab:blue"), (True, "tab:orange")):
            counts = [1, *sorted({r["copies"] for r in rows} - {1})]
            means = [
                base,
                *(
                    np.mean([r[key] for r in rows if (r["copies"], r["fresh"]) == (c, fresh)])
                    for c in counts[1:]
                ),
            ]
            noise = "own noise" if fresh else "the same noise"
            name = (
                f"noise left, copies with {noise}" if key == "left beside" else f"factor, copies with {noise}"
            )
            axis.plot(counts, np.array(means) / base, style, marker="o", ms=4, color=color, label=name)
    counts = np.array([1, 2, 4, 8])
    axis.plot(counts, counts**-0.5, color="gray", lw=1, label="1/√copies")
    axis.set(
        xscale="log", yscale="log", xlabel="copies", ylabel="relative to one copy", title="Augmented copies"
    )
    axis.set_xticks(counts, [str(c) for c in counts])
    axis.set_yticks([0.4, 0.6, 0.8, 1, 1.2, 1.4], ["0.4", "0.6", "0.8", "1", "1.2", "1.4"])
    axis.minorticks_off()
    axis.legend(frameon=False, fontsize=7)


def _similarities(found: Results) -> Figure:
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True, layout="constrained")
    for axis, kind in zip(axes, ("plain", "centered"), strict=True):
        for turn, color in enumerate(ROUNDS):
            runs = [r["looks"][turn]["histograms"][kind] for r in looks(found) if turn < len(r["looks"])]
            for run in runs:
                counts = np.array(run["all"], float)
                middle = (np.arange(len(counts)) + 0.5) * 2 / len(counts) - 1
                label = (
                    f"round {turn + 1}: mean {np.mean([r['mean'] for r in runs]):.2f}"
                    if run is runs[0]
                    else None
                )
                axis.step(
                    middle,
                    counts / counts.sum() * len(counts) / 2,
                    where="mid",
                    color=color,
                    lw=1,
                    label=label,
                )
            for each in runs[0]["each"][:3] if runs else []:
                counts = np.array(each, float)
                axis.plot(middle, counts / counts.sum() * len(counts) / 2, color=color, lw=0.6, alpha=0.25)
        axis.set(xlabel="similarity of two patches", title=f"{kind} kernel", xlim=(-1, 1))
        axis.legend(frameon=False, fontsize=8)
    axes[0].set_ylabel("share of pairs per unit")
    _bare(*axes)
    return figure


def _trust(found: Results) -> Figure:
    turns = len(looks(found)[0]["looks"])
    figure, axes = plt.subplots(
        1, turns, figsize=(3.6 * turns, 3.6), sharey=True, layout="constrained", squeeze=False
    )
    for turn, axis in enumerate(axes[0]):
        points = np.array(looks(found)[0]["looks"][turn]["denoising"]["points"])
        axis.plot(points[:, 0], points[:, 1], ".", color=ROUNDS[turn], alpha=0.5)
        ranks = said([r["looks"][turn]["denoising"]["shift against error"] for r in looks(found)])
        axis.set(xscale="symlog", xlabel="shift ‖ŷ − E_k[ŷ]‖ (pixels)", xlim=(0, None))
        axis.set_title(f"round {turn + 1}: rank correlation {ranks}", fontsize=10)
    axes[0, 0].set_ylabel("true error (pixels)")
    _bare(*axes[0])
    return figure


def _answers(found: Results) -> Figure:
    run = looks(found)[0]["looks"]
    scales = list(run[0]["answers"])
    figure, axes = plt.subplots(
        1, len(scales), figsize=(3.8 * len(scales), 3.6), layout="constrained", squeeze=False
    )
    for scale, axis in zip(scales, axes[0], strict=True):
        reach = 4 * int(scale)
        for turn, look in enumerate(run):
            curve = look["answers"][scale]
            axis.plot(
                curve["true"], curve["answer"], "o", ms=3, color=ROUNDS[turn], label=f"round {turn + 1}"
            )
            axis.plot(curve["true"], curve["best"], "-", lw=1, color=ROUNDS[turn])
        axis.plot([-reach, reach], [-reach, reach], ":", color="gray", label="the truth")
        axis.set(
            xlabel="true displacement (pixels)",
            title=f"1/{scale}, displaced by up to ± {reach}",
            ylim=(-1.1 * reach, 1.1 * reach),
        )
    axes[0, 0].plot([], [], "-", color="gray", lw=1, label="mean of its labels")
    axes[0, 0].set_ylabel("mean answer (pixels)")
    axes[0, 0].legend(frameon=False, fontsize=8)
    _bare(*axes[0])
    return figure
