"""From underfit to overfit on the toy problem: what density, label variance and the verdict say (sec. 4.4).

256 noisy points of sin(4πα), networks of four widths, looked at four times while they train. The truth is how
much of the variance of the points, and of as many new ones, the network tells.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from spread import interval
from torch import Tensor, nn
from tqdm import trange

import likewise as lw

matplotlib.use("Agg")
import matplotlib.pyplot as plt

WIDTHS, EPOCHS = (4, 16, 64, 256), (3, 30, 300, 3000)
QUICK = (4, 64), (3, 30, 300)
NOISE, SAMPLES, FREQUENCY = 0.4, 256, 2
SETTINGS = {"widths": WIDTHS, "epochs": EPOCHS, "noise": NOISE, "samples": SAMPLES, "frequency": FREQUENCY}
COLORS = {"underfit": "tab:blue", "fit": "tab:green", "overfit": "tab:red"}


def noisy(repeats: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return points of the circle (repeats, n, 2) and their noisy values (repeats, n, 1)."""
    chance = torch.Generator().manual_seed(seed)
    turns = torch.rand(repeats, SAMPLES, generator=chance)
    points = torch.stack([(2 * math.pi * turns).cos(), (2 * math.pi * turns).sin()], 2)
    values = (2 * math.pi * FREQUENCY * turns).sin()[:, :, None]
    return points, values + NOISE * torch.randn(values.shape, generator=chance)


def measured(
    stacked: Callable[[int, list[int]], Any], repeats: int, quick: bool = False
) -> list[dict[str, Any]]:
    """Return a row for every width, moment and repeat; `stacked(count, widths)` makes the networks."""
    rows, (widths, epochs) = [], QUICK if quick else (WIDTHS, EPOCHS)
    x, y = noisy(repeats, 10)
    new = noisy(repeats, 11)
    for width in widths:
        torch.manual_seed(width)
        stack = stacked(repeats, [2, *[width] * 5, 1])
        optimizer = torch.optim.Adam(stack.parameters(), lr=1e-3, fused=True)
        for epoch in trange(1, epochs[-1] + 1, desc=f"fit, width {width}", disable=None):
            for batch in torch.randperm(SAMPLES).split(64):
                optimizer.zero_grad()
                (stack(x[:, batch]) - y[:, batch]).square().mean((1, 2)).sum().backward()
                optimizer.step()
            if epoch in epochs:
                judged = [_judged(stack.one(i), x[i], y[i], new[0][i], new[1][i]) for i in range(repeats)]
                rows += [
                    {"width": width, "epochs": epoch, "repeat": i, **row} for i, row in enumerate(judged)
                ]
    return rows


def _judged(model: nn.Module, x: Tensor, y: Tensor, new: Tensor, truth: Tensor) -> dict[str, Any]:
    gram = lw.GramMatrix(model, (x, y))
    found = lw.fit_quality(gram, sketch=None)
    return {
        "told": _told(model, x, y),
        "told of new": _told(model, new, truth),
        "density": float(found.neighbors.median()) / len(x),
        "close": float(lw.positive_neighbors(gram, 4, sketch=None).median()) / len(x),
        "variance": float(found.label_variance.median()) / found.total_variance,
        "learned": found.learned,
        "supported": found.supported,
        "verdict": found.verdict,
    }


def _told(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float(1 - (model(x) - y).square().mean() / y.var(correction=0))


def drawn(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the paper's two quantities, what is learned and supported, and the verdicts beside the truth."""
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.9), layout="constrained")
    widths = sorted({row["width"] for row in rows})
    colors = plt.get_cmap("viridis")(np.linspace(0, 0.9, len(widths)))
    for place, (width, color) in enumerate(zip(widths, colors, strict=True)):
        here = [row for row in rows if row["width"] == width]
        for axis, name, dash in (
            (axes[0], "density", "-"),
            (axes[0], "close", "--"),
            (axes[1], "variance", "-"),
            (axes[2], "learned", "-"),
            (axes[2], "supported", "--"),
        ):
            moments = sorted({row["epochs"] for row in here})
            values = [[row[name] for row in here if row["epochs"] == e] for e in moments]
            label = f"width {width}" if dash == "-" else None
            means, wide = np.array([np.mean(v) for v in values]), np.array([interval(v) for v in values])
            inside = np.stack([np.minimum(wide, means), np.minimum(wide, 1 - means)]).clip(0)  # of a share
            beside = np.array(moments) * 1.12**place  # so that none hides another
            axis.errorbar(beside, means, inside, color=color, ls=dash, label=label, capsize=2)
    for row in rows:
        color = COLORS[row["verdict"]]
        axes[3].plot(row["told of new"], row["told"], "o", color=color, alpha=0.6, ms=5)
    for verdict, color in COLORS.items():
        axes[3].plot([], [], "o", color=color, label=verdict)
    low = min(-0.2, *(row["told of new"] for row in rows))
    axes[3].plot([low, 1], [low, 1], color="gray", lw=1)
    titles = (
        "neighbors / N (dashed: N⁺ 4)",
        "label variance / total",
        "learned (dashed: supported)",
        "verdict and truth",
    )
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[:3]:
        axis.set(xscale="log", xlabel="epochs", ylim=(-0.05, 1.1))
    axes[3].set(xlabel="R² on new points", ylabel="R² on training points", xlim=(-0.1, 1), ylim=(-0.1, 1))
    axes[1].legend(frameon=False, loc="lower left")
    axes[3].legend(frameon=False)
    figure.suptitle(f"From underfit to overfit: {SAMPLES} points of sin(4πα), noise {NOISE}")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def told(rows: list[dict[str, Any]]) -> None:
    """Print the means of every width and moment."""
    print(
        f"\nfrom underfit to overfit ({NOISE} noise): R² told, of new ones; density, label variance; "
        "a verdict per repeat"
    )
    for width, epochs in dict.fromkeys((row["width"], row["epochs"]) for row in rows):
        here = [row for row in rows if (row["width"], row["epochs"]) == (width, epochs)]
        mean = {
            k: np.mean([r[k] for r in here])
            for k in ("told", "told of new", "density", "variance", "supported")
        }
        verdicts = ", ".join(sorted(row["verdict"] for row in here))
        print(
            f"  width {width:3} epochs {epochs:4}: {mean['told']:+.2f}, {mean['told of new']:+.2f}; "
            f"{mean['density']:.2f}, {mean['variance']:.2f}; supported {mean['supported']:.2f}: {verdicts}"
        )
