"""Figures and figures in words of experiments/toy.py, from its results."""

import json
import math
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from scipy import stats
from spread import interval

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FREQUENCIES = (1, 2, 4, 8, 16)
THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.925, 0.95, 0.975, 0.99)
EXPONENTS = (1, 2, 3, 4)
ESTIMATORS = ("N_S", *(f"N⁺ {a}" for a in EXPONENTS), *(f"N {t}" for t in THRESHOLDS))
LEARNED = 0.05  # mean squared error below which a function counts as learned
BINS = 60  # of similarity, for histograms
POINTS = 128  # along the circle, at which curves are kept


def slopes(rows: list[dict[str, Any]], training: str, centered: bool, name: str) -> tuple[float, float]:
    """Return the exponent e of N ~ f^e where the function was learned, and half its 95 % interval."""
    found = []
    here = [
        r for r in rows if r["training"] == training and r["centered"] == centered and r["error"] < LEARNED
    ]
    for repeat in sorted({r["repeat"] for r in here}):
        mine = [r for r in here if r["repeat"] == repeat and r["estimates"][name] > 0]
        if len({r["frequency"] for r in mine}) >= 3:
            logs = [(math.log(r["frequency"]), math.log(r["estimates"][name])) for r in mine]
            found.append(float(stats.linregress(*zip(*logs, strict=True)).slope))
    if not found:
        return math.nan, math.nan
    return float(np.mean(found)), interval(found)


def drawn(rows: list[dict[str, Any]], folder: Path) -> None:
    """Draw every figure from the results."""
    for training in dict.fromkeys(r["training"] for r in rows):
        stem = "".join(c if c.isalnum() else "-" for c in training).strip("-")
        _estimators(rows, training, folder / f"toy-neighbors-{stem}.png")
        _along(rows, training, folder / f"toy-circle-{stem}.png")
        _spread(rows, training, folder / f"toy-similarities-{stem}.png")
    _turning(rows, training, folder / "toy-circle.html")  # of the last, the longest training


def _estimators(rows: list[dict[str, Any]], training: str, path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(13, 5), sharey=True, layout="constrained")
    soft, hard = (
        plt.get_cmap(name)(np.linspace(*ends, many))
        for name, ends, many in (
            ("Oranges", (0.45, 0.95), len(EXPONENTS)),
            ("viridis", (0, 0.9), len(THRESHOLDS)),
        )
    )
    colors = [np.array([0.0, 0.0, 0.0, 1.0]), *soft, *hard]  # N_S, N⁺ and N of thresholds: a family each
    for axis, centered in zip(axes, (False, True), strict=True):
        here = [r for r in rows if r["training"] == training and r["centered"] == centered]
        learned = [
            np.median([r["error"] for r in here if r["frequency"] == f]) < LEARNED for f in FREQUENCIES
        ]
        for name, color in zip(ESTIMATORS, colors, strict=True):
            if centered and name == "N_S":
                continue  # centered similarities sum to nothing
            middle = [
                np.median([r["estimates"][name] for r in here if r["frequency"] == f]) for f in FREQUENCIES
            ]
            slope, spread = slopes(rows, training, centered, name)
            label = f"{name:8} f^{slope:.2f} ± {spread:.2f}" if math.isfinite(slope) else name
            wide, dash = 2.5 if name == "N_S" else 1.4, "-." if "⁺" in name else "-"
            axis.plot(FREQUENCIES, middle, dash, color=color, label=label, lw=wide)
            for f, value, known in zip(FREQUENCIES, middle, learned, strict=True):
                axis.plot(f, value, "o", color=color, ms=5, mfc=color if known else "white")
        top = max(r["estimates"]["N_S"] for r in rows if r["training"] == training)
        axis.plot(FREQUENCIES, top / np.array(FREQUENCIES), "--", color="gray", label="1/f")
        axis.set(xscale="log", yscale="log", xlabel="frequency f", title="centered" if centered else "plain")
        axis.set_xticks(FREQUENCIES, [str(f) for f in FREQUENCIES])
        axis.legend(
            fontsize=8,
            frameon=False,
            loc="upper left",
            bbox_to_anchor=(1, 1),
            prop={"family": "monospace", "size": 8},
        )
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("number of neighbors, median")
    figure.suptitle(f"How many neighbors? {training}; hollow: the function was not learned")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _along(rows: list[dict[str, Any]], training: str, path: Path) -> None:
    figure, axes = plt.subplots(2, len(FREQUENCIES), figsize=(13, 4.5), sharex=True, sharey="row")
    for column, f in enumerate(FREQUENCIES):
        here = [r for r in rows if r["training"] == training and r["frequency"] == f and "soft" in r]
        for r in here:
            axes[0, column].plot(r["turns"], r["function"], color="tab:blue", alpha=0.5, lw=1)
            axes[1, column].plot(r["turns"], r["soft"], color="tab:orange", alpha=0.5, lw=1)
        axes[0, column].set_title(f"f = {f}")
        axes[1, column].set_xlabel("turn")
    axes[0, 0].set_ylabel("learned function")
    axes[1, 0].set_ylabel("N_S")
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Function and number of neighbors along the circle ({training})")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _spread(rows: list[dict[str, Any]], training: str, path: Path) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    colors = plt.get_cmap("viridis")(np.linspace(0, 0.9, len(FREQUENCIES)))
    middles = (np.arange(BINS) + 0.5) * 2 / BINS - 1
    for axis, centered in zip(axes, (False, True), strict=False):
        for f, color in zip(FREQUENCIES, colors, strict=True):
            here = [
                r for r in rows if (r["training"], r["centered"], r["frequency"]) == (training, centered, f)
            ]
            counts = np.sum([r["histogram"] for r in here], 0)
            axis.step(middles, counts / counts.sum() * BINS / 2, where="mid", color=color, label=f"f = {f}")
        title = "centered kernel" if centered else "plain kernel"
        axis.set(xlabel="similarity of a pair", ylabel="share of pairs per unit", title=title)
    axes[0].legend(frameon=False)
    for f in FREQUENCIES:
        here = [r for r in rows if (r["training"], r["centered"], r["frequency"]) == (training, False, f)]
        axes[2].plot([f] * len(here), [r["curvature"] for r in here], "o", color="tab:orange", alpha=0.6)
    axes[2].axhline(0, color="gray", lw=1)
    axes[2].set(xscale="log", xlabel="frequency f", ylim=(-1, 1), title="N_S against curvature")
    axes[2].set_ylabel("rank correlation along the circle")
    axes[2].set_xticks(FREQUENCIES, [str(f) for f in FREQUENCIES])
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Similarities of all pairs, and where neighbors are few ({training})")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _turning(rows: list[dict[str, Any]], training: str, path: Path) -> None:
    """Write one page that shows N_S along the circle in three dimensions, to be turned by hand."""
    shown = []
    for f in FREQUENCIES:
        here = [r for r in rows if r["training"] == training and r["frequency"] == f and "soft" in r]
        at = np.linspace(0, 1, POINTS, endpoint=False)
        curves = [np.interp(at, r["turns"], r["soft"], period=1) for r in here]
        soft = np.median(curves, 0).round(2).tolist()
        shown.append({"frequency": f, "turns": at.round(4).tolist(), "soft": soft})
    page = Path(__file__).with_name("toy.html").read_text(encoding="utf-8")
    path.write_text(page.replace("__DATA__", json.dumps(shown)), encoding="utf-8")


def between(rows: list[dict[str, Any]], training: str, name: str) -> list[float]:
    """Return the exponents from each frequency to its double, of medians, plain, while both are learned."""
    here = [r for r in rows if r["training"] == training and not r["centered"] and r["error"] < LEARNED]
    values = {
        f: np.median([r["estimates"][name] for r in here if r["frequency"] == f])
        for f in FREQUENCIES
        if any(r["frequency"] == f for r in here)
    }
    pairs = zip(values, list(values)[1:], strict=False)
    return [float(np.log2(values[b] / values[a]) / np.log2(b / a)) for a, b in pairs]


def told(rows: list[dict[str, Any]]) -> None:
    """Print the exponents, with intervals over repeats."""
    print("\nnumber of neighbors N ~ f^exponent, over the frequencies whose function was learned")
    for training in dict.fromkeys(r["training"] for r in rows):
        here = [r for r in rows if r["training"] == training and not r["centered"]]
        errors = {f: np.median([r["error"] for r in here if r["frequency"] == f]) for f in FREQUENCIES}
        print(
            f"\n{training}: mean squared error " + ", ".join(f"{e:.4f} (f = {f})" for f, e in errors.items())
        )
        for name in ("N_S", "N⁺ 4", "N 0.8", "N 0.9", "N 0.99"):
            (plain, off), (centered, by) = (slopes(rows, training, c, name) for c in (False, True))
            local = ", ".join(f"{e:.2f}" for e in between(rows, training, name))
            more = "" if name == "N_S" else f"; centered f^{centered:.2f} ± {by:.2f}"
            print(f"  {name:8} f^{plain:.2f} ± {off:.2f} (from f to 2f: {local}){more}")
