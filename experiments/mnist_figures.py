"""Figures of experiments/mnist.py, from its results."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from spread import interval

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

Line = dict[str, Any]
COLORS = {"none": "0.35", "group": "tab:green", "-cos": "tab:blue", "+cos": "tab:red", "ratio": "tab:orange"}
NAMES = {
    "none": "no term",
    "group": "set term (attracts)",
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
        and (other["steps"], other["tests"]) == (line["steps"], line["tests"])
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


def sorted_lines(lines: list[Line]) -> list[Line]:
    """Return the lines in one order, whichever process wrote them first."""
    studies, terms = ("main", "fashion", "nets", "score", "weights", "long", "cifar"), list(NAMES)

    def place(line: Line) -> tuple[Any, ...]:
        c = line["cell"]
        setting = (c["net"], c["batch"], c["mixed"], -c["samples"], c["noise"])
        return studies.index(c["study"]), *setting, terms.index(c["term"]), c["weight"]

    return sorted(lines, key=place)


def drawn(lines: list[Line], folder: Path) -> None:
    """Draw every figure that there are results for."""
    lines = sorted_lines(lines)
    if found(lines, study="main"):
        _curves(lines, folder / "mnist-curves.png")
        _similarities(found(lines, study="main"), folder / "mnist-similarities.png")
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
    size = (max(8.5, 3.6 * len(shapes) + 0.6), 6.4)
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
    _legend(figure, axes[0])
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


def _similarities(main: list[Line], path: Path) -> None:
    shapes = sorted({(line["cell"]["batch"], line["cell"]["mixed"]) for line in main})
    size = (max(8.5, 3.6 * len(shapes) + 0.6), 3.8)
    figure, axes = plt.subplots(
        1, len(shapes), figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    for axis, (batch, mixed) in zip(axes[0], shapes, strict=True):
        for line in found(main, batch=batch, mixed=mixed):
            similar, looks = np.array(line["similar"]), line["looks"]  # (moments, runs, one class or two)
            color, name = COLORS[line["cell"]["term"]], NAMES[line["cell"]["term"]]
            for pairs, dash in ((0, "-"), (1, "--")):
                mean = similar[:, :, pairs].mean(1)
                wide = np.array([interval(row) for row in similar[:, :, pairs]])
                axis.plot(looks, mean, color=color, ls=dash, label=None if pairs else name)
                if similar.shape[1] >= 5:
                    axis.fill_between(looks, mean - wide, mean + wide, color=color, alpha=0.2, lw=0)
        axis.set(title=shape(line["cell"]), xlabel="step", ylim=(-0.2, 1))
    axes[0, 0].set_ylabel("mean k^C of pairs, 95 % interval\n(solid: one class, dashed: two)")
    _legend(figure, axes[0])
    figure.suptitle(
        f"Similarity of test images, each by its own label against the rest; {similar.shape[1]} runs"
    )
    finish(figure, path)


def _legend(figure: Any, axes: Any) -> None:
    """Draw one legend below, of all that the axes name."""
    named = [axis.get_legend_handles_labels() for axis in axes]
    every = {
        label: handle for handles, labels in named for handle, label in zip(handles, labels, strict=True)
    }
    figure.legend(every.values(), every.keys(), loc="outside lower center", ncols=3, frameon=False)


def by_setting(lines: list[Line]) -> dict[str, list[Line]]:
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
    rows = by_setting(lines)
    figure, axis = plt.subplots(figsize=(8.5, 0.48 * len(rows) + 1.6), layout="constrained")
    for place, here in enumerate(rows.values()):
        for line in here:
            gain, term = gains(line, lines), line["cell"]["term"]
            if gain is not None:
                at = -place + 0.2 * (2 - list(NAMES).index(term))
                axis.errorbar(
                    gain.mean(), at, xerr=interval(gain), fmt="o", ms=4, color=COLORS[term], label=NAMES[term]
                )
    axis.axvline(0, color=COLORS["none"], lw=1)
    axis.set_yticks([-i for i in range(len(rows))], list(rows))
    steps = next(iter(rows.values()))[0]["cell"]["steps"]
    axis.set_xlabel(f"what the term adds to accuracy over the first {steps} steps, points")
    _legend(figure, [axis])
    finish(figure, path)


def _weights(lines: list[Line], path: Path) -> None:
    swept = found(lines, study="weights")
    shapes = sorted({(line["cell"]["batch"], line["cell"]["mixed"]) for line in swept})
    figure, axes = plt.subplots(
        1, len(shapes), figsize=(10, 4), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, (batch, mixed) in zip(axes[0], shapes, strict=True):
        of = {"batch": batch, "mixed": mixed}
        for term in list(NAMES)[1:]:
            here = [*found(swept, term=term, **of), *found(lines, study="main", term=term, **of)]
            found_gains = {line["cell"]["weight"]: gains(line, lines) for line in here}
            points = sorted((w, gain[:20]) for w, gain in found_gains.items() if gain is not None)
            if points:
                weights, values = zip(*points, strict=True)
                means, wide = [v.mean() for v in values], [interval(v) for v in values]
                axis.errorbar(
                    weights, means, yerr=wide, color=COLORS[term], label=NAMES[term], marker="o", ms=4
                )
        axis.axhline(0, color=COLORS["none"], lw=1)
        axis.set(xscale="log", xlabel="weight of the term, in units of its usual one", title=shape(of))
        axis.set_yscale("symlog", linthresh=5)
        axis.set_yticks(ticks := [-50, -20, -10, -5, -2, 0, 2, 5], [str(v) for v in ticks])
    axes[0, 0].set_ylabel("what the term adds to accuracy\nover the first steps, points")
    _legend(figure, axes[0])
    figure.suptitle("Every term at several weights, 20 paired runs, 95 % intervals")
    finish(figure, path)


def _long(lines: list[Line], path: Path) -> None:
    here = found(lines, study="long")
    cases = list(dict.fromkeys((line["cell"]["samples"], line["cell"]["noise"]) for line in here))
    rows = list(dict.fromkeys((line["cell"]["term"], line["cell"]["weight"]) for line in here))
    figure, axes = plt.subplots(
        1, len(cases), figsize=(4 * len(cases), 4), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, (samples, noise) in zip(axes[0], cases, strict=True):
        for line in found(here, samples=samples, noise=noise):
            values, cell = final(line), line["cell"]
            place = -rows.index((cell["term"], cell["weight"]))
            axis.errorbar(
                values.mean(), place, xerr=interval(values), fmt="o", ms=5, color=COLORS[cell["term"]]
            )
        axis.set(title=f"{samples:,} images, {noise:.0%} wrong labels", xlabel="test accuracy, %")
    names = [NAMES[t] + ("" if t == "none" else f" × {w:g}") for t, w in rows]
    axes[0, 0].set_yticks([-i for i in range(len(rows))], names)
    steps, runs = here[0]["cell"]["steps"], here[0]["cell"]["runs"]
    figure.suptitle(f"After {steps:,} steps of mixed batches of 16, {runs} runs, 95 % intervals")
    finish(figure, path)
