"""Figures and figures in words of experiments/mnist.py, from its results."""

import math
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from scipy import stats

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

Line = dict[str, Any]
COLORS = {"none": "0.35", "group": "tab:green", "-cos": "tab:blue", "+cos": "tab:red", "ratio": "tab:orange"}
NAMES = {
    "none": "no term",
    "group": "set term",
    "-cos": "− cosine (attracts)",
    "+cos": "+ cosine (repels, as coded)",
    "ratio": "paper's ratio (attracts)",
}


def accuracy(line: Line) -> np.ndarray:
    """Return percent right, (moments, runs)."""
    return 100 * np.array(line["right"]) / line["tests"]


def areas(line: Line) -> np.ndarray:
    """Return the mean accuracy over the steps of each run, by the trapezoidal rule."""
    return np.trapezoid(accuracy(line), line["steps"], axis=0) / line["steps"][-1]


def interval(values: np.ndarray) -> float:
    """Return half of the 95 % interval of the mean."""
    if len(values) < 2:
        return math.nan
    return float(stats.sem(values) * stats.t.ppf(0.975, len(values) - 1))


def found(lines: list[Line], **wanted: Any) -> list[Line]:
    return [line for line in lines if all(line["cell"][k] == v for k, v in wanted.items())]


def plain(line: Line, lines: list[Line]) -> Line | None:
    """Return the runs without a term that are paired with these."""
    pairs = [
        other
        for other in lines
        if other["cell"]["term"] == "none"
        and all(
            other["cell"][k] == line["cell"][k]
            for k in ("batch", "mixed", "data", "net", "samples", "noise", "steps")
        )
        and other["cell"]["runs"] >= line["cell"]["runs"]
    ]
    return pairs[0] if pairs else None


def gains(line: Line, lines: list[Line], of: Any = areas) -> np.ndarray | None:
    """Return what the term adds, in points, in each pair of runs."""
    other = plain(line, lines)
    if other is None:
        return None
    mine = of(line)
    return mine - of(other)[: len(mine)]


def final(line: Line) -> np.ndarray:
    return accuracy(line)[-1]


def drawn(lines: list[Line], folder: Path) -> None:
    """Draw every figure that there are results for."""
    if found(lines, study="main"):
        _curves(lines, folder / "mnist-curves.png")
        _likenesses(found(lines, study="main"), folder / "mnist-similarities.png")
    if found(lines, study="nets"):
        _forest(lines, folder / "mnist-gains.png")
    if found(lines, study="weights"):
        _weights(lines, folder / "mnist-weights.png")
    if found(lines, study="long"):
        _long(lines, folder / "mnist-final.png")


def finish(figure: Any, path: Path) -> None:
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def shape(cell: dict[str, Any]) -> str:
    return f"batch {cell['batch']}, {'mixed' if cell['mixed'] else 'one class'}"


def _curves(lines: list[Line], path: Path) -> None:
    main = found(lines, study="main")
    shapes = sorted({(line["cell"]["batch"], line["cell"]["mixed"]) for line in main})
    size = (3.6 * len(shapes) + 0.6, 6.4)
    figure, axes = plt.subplots(
        2, len(shapes), figsize=size, sharex=True, sharey="row", squeeze=False, layout="constrained"
    )
    for column, (batch, mixed) in enumerate(shapes):
        for line in found(main, batch=batch, mixed=mixed):
            _curve(line, lines, axes[0, column], axes[1, column])
        axes[0, column].set_title(shape(line["cell"]))
        axes[1, column].axhline(0, color=COLORS["none"], lw=1)
        axes[1, column].set_xlabel("step")
    axes[0, 0].set_ylabel("test accuracy, %: mean ± sd")
    axes[1, 0].set_ylabel("difference to no term, points\n(paired, 95 % interval)")
    handles = {h.get_label(): h for axis in axes[0] for h in axis.get_lines()}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False)
    runs = main[0]["cell"]["runs"]
    figure.suptitle(f"Training with the paper's term and its relatives, MNIST, {runs} paired runs")
    finish(figure, path)


def _curve(line: Line, lines: list[Line], above: Axes, below: Axes) -> None:
    term = line["cell"]["term"]
    values, steps, color = accuracy(line), line["steps"], COLORS[term]
    mean, spread = values.mean(1), values.std(1)
    above.plot(steps, mean, color=color, label=NAMES[term])
    above.fill_between(steps, mean - spread, mean + spread, color=color, alpha=0.12, lw=0)
    other = plain(line, lines)
    if term != "none" and other is not None:
        gap = values - accuracy(other)[:, : values.shape[1]]
        mean, wide = gap.mean(1), np.array([interval(row) for row in gap])
        below.plot(steps, mean, color=color)
        below.fill_between(steps, mean - wide, mean + wide, color=color, alpha=0.2, lw=0)


def _likenesses(main: list[Line], path: Path) -> None:
    shapes = sorted({(line["cell"]["batch"], line["cell"]["mixed"]) for line in main})
    size = (3.6 * len(shapes) + 0.6, 3.8)
    figure, axes = plt.subplots(1, len(shapes), figsize=size, sharey=True, layout="constrained")
    for axis, (batch, mixed) in zip(np.atleast_1d(axes), shapes, strict=True):
        for line in found(main, batch=batch, mixed=mixed):
            similar = np.array(line["similar"]).mean(1)
            color, name = COLORS[line["cell"]["term"]], NAMES[line["cell"]["term"]]
            axis.plot(line["looks"], similar[:, 0], color=color, label=name)
            axis.plot(line["looks"], similar[:, 1], color=color, ls="--")
        axis.set(title=shape(line["cell"]), xlabel="step", ylim=(-0.2, 1))
    np.atleast_1d(axes)[0].set_ylabel("mean k^C of pairs\n(solid: one class, dashed: two)")
    handles = {
        h.get_label(): h for axis in np.atleast_1d(axes) for h in axis.get_lines() if h.get_label()[0] != "_"
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle("What the terms do to the similarity of test images")
    finish(figure, path)


def settings(lines: list[Line]) -> dict[str, list[Line]]:
    """Return the lines with weight 1 by name of the setting, those of no term left out."""
    rows: dict[str, list[Line]] = {}
    for line in lines:
        cell = line["cell"]
        if cell["study"] in ("main", "fashion", "nets", "score") and cell["term"] != "none":
            what = {
                "main": "MNIST",
                "fashion": "Fashion-MNIST",
                "nets": cell["net"],
                "score": "against log-sum-exp",
            }
            rows.setdefault(f"{what[cell['study']]}, {shape(cell)}", []).append(line)
    return rows


def _forest(lines: list[Line], path: Path) -> None:
    rows = settings(lines)
    figure, axis = plt.subplots(figsize=(8.5, 0.48 * len(rows) + 1.6), layout="constrained")
    for place, here in enumerate(rows.values()):
        for line in here:
            gain, term = gains(line, lines), line["cell"]["term"]
            if gain is None:
                continue
            at = -place + 0.24 * (1.5 - ["group", "-cos", "+cos", "ratio"].index(term))
            axis.errorbar(
                gain.mean(), at, xerr=interval(gain), fmt="o", ms=4, color=COLORS[term], label=NAMES[term]
            )
    axis.axvline(0, color=COLORS["none"], lw=1)
    axis.set_yticks([-i for i in range(len(rows))], list(rows))
    axis.set_xlabel(
        f"accuracy over the first {lines[0]['cell']['steps']} steps less that without a term, points"
    )
    handles = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False)
    finish(figure, path)


def _weights(lines: list[Line], path: Path) -> None:
    shapes = sorted(
        {(line["cell"]["batch"], line["cell"]["mixed"]) for line in found(lines, study="weights")}
    )
    figure, axes = plt.subplots(1, len(shapes), figsize=(10, 4), sharey=True, layout="constrained")
    for axis, (batch, mixed) in zip(np.atleast_1d(axes), shapes, strict=True):
        here = found(lines, batch=batch, mixed=mixed, data="mnist", net="paper", score="mean", steps=150)
        for term in NAMES:
            points = (
                sorted(
                    (line["cell"]["weight"], gain[:20])
                    for line in found(here, term=term)
                    if term != "none" and (gain := gains(line, lines)) is not None
                )
                if term != "none"
                else []
            )
            if points:
                weights, values = zip(*points, strict=True)
                means, wide = [v.mean() for v in values], [interval(v) for v in values]
                axis.errorbar(
                    weights, means, yerr=wide, color=COLORS[term], label=NAMES[term], marker="o", ms=4
                )
        axis.axhline(0, color=COLORS["none"], lw=1)
        axis.set(xscale="log", xlabel="weight of the term, in units of its usual one")
        axis.set_title(f"batch {batch}, {'mixed' if mixed else 'one class'}")
    np.atleast_1d(axes)[0].set_ylabel("gain in accuracy over 150 steps, points")
    figure.legend(
        *np.atleast_1d(axes)[-1].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=4,
        frameon=False,
    )
    figure.suptitle("No sign wins by its scale: every term at six weights, 20 paired runs, 95 % intervals")
    finish(figure, path)


def _long(lines: list[Line], path: Path) -> None:
    here = found(lines, study="long")
    cases = list(dict.fromkeys((line["cell"]["samples"], line["cell"]["noise"]) for line in here))
    figure, axes = plt.subplots(1, len(cases), figsize=(4 * len(cases), 4), layout="constrained")
    for axis, (samples, noise) in zip(np.atleast_1d(axes), cases, strict=True):
        rows = found(here, samples=samples, noise=noise)
        for place, line in enumerate(rows):
            values, cell = final(line), line["cell"]
            axis.errorbar(
                values.mean(), -place, xerr=interval(values), fmt="o", ms=5, color=COLORS[cell["term"]]
            )
        names = [
            NAMES[r["cell"]["term"]] + ("" if r["cell"]["term"] == "none" else f" × {r['cell']['weight']:g}")
            for r in rows
        ]
        axis.set_yticks([-i for i in range(len(rows))], names)
        if axis is not np.atleast_1d(axes)[0]:
            axis.set_yticklabels([])
        axis.set(title=f"{samples:,} images, {noise:.0%} wrong labels", xlabel="test accuracy, %")
    figure.suptitle("After 1,000 steps of mixed batches of 16, 20 runs, 95 % intervals")
    finish(figure, path)


def told(lines: list[Line]) -> None:
    """Print what each term adds in each setting."""
    for line in lines:
        cell = line["cell"]
        about = f"{cell['study']:8} {cell['data']:13} {cell['net']:18} {shape(cell):20}"
        extra = f" n {cell['samples']} noise {cell['noise']}" if cell["study"] == "long" else ""
        values, of = (final(line), final) if cell["study"] == "long" else (areas(line), areas)
        gain = None if cell["term"] == "none" else gains(line, lines, of)
        adds = "" if gain is None else f"  adds {gain.mean():+.2f} ± {interval(gain):.2f}"
        print(f"{about} {cell['term']:5} × {cell['weight']:<5g}{extra} {values.mean():.2f}{adds}")
