"""The paper's toy problem (sec. 4.3 and its appendix): does the number of neighbors fall as 1/f?

A network learns sin(2πfα) from points of a circle, (cos 2πα, sin 2πα). The higher the frequency, the more
it must tell points apart. `likewise reproduce toy -- --quick` takes about a minute on one core; without it,
five repeats of each training; with `--full` twenty. Networks of all frequencies and repeats are trained as
one stack. Results are kept in experiments/results/toy.json (`--out`), figures beside it; `--draw` draws
them again.

As written in the paper: 5 hidden layers, 80 epochs. As in the authors' code: 6 hidden layers, 5,000 epochs,
mean absolute error. Every repeat draws its own points.
"""

import argparse
import itertools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn
from tqdm import trange

import likewise as lw

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FREQUENCIES = (1, 2, 4, 8, 16)
THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.925, 0.95, 0.975, 0.99)
EXPONENTS = (1, 2, 3, 4)
ESTIMATORS = ("N_S", *(f"N⁺ {a}" for a in EXPONENTS), *(f"N {t}" for t in THRESHOLDS))
LEARNED = 0.05  # mean squared error below which a function counts as learned
BINS = 60  # of similarity, for histograms
POINTS = 256  # along the circle, at which curves are kept


class Training(NamedTuple):
    """How the networks are trained."""

    name: str
    hidden: int
    epochs: int
    loss: str


TRAININGS = (
    Training("as written", 5, 80, "L2"),
    Training("as written, L1", 5, 80, "L1"),
    Training("as coded", 6, 5000, "L1"),
    Training("5,000 epochs, 5 layers, L2", 5, 5000, "L2"),
)
QUICK = (TRAININGS[0], Training("800 epochs, 6 layers, L1", 6, 800, "L1"))


class Stack(nn.Module):
    """Many fully-connected networks of the same shape, as one."""

    def __init__(self, count: int, widths: list[int]) -> None:
        super().__init__()
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for i, o in itertools.pairwise(widths):
            limit = 1 / math.sqrt(i)  # as torch.nn.Linear draws them
            self.weights.append(nn.Parameter(torch.empty(count, i, o).uniform_(-limit, limit)))
            self.biases.append(nn.Parameter(torch.empty(count, 1, o).uniform_(-limit, limit)))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of every network, (count, n, 1), for its own inputs (count, n, 2)."""
        layers = list(zip(self.weights, self.biases, strict=True))
        for weight, bias in layers[:-1]:
            x = torch.baddbmm(bias, x, weight).relu()
        return torch.baddbmm(layers[-1][1], x, layers[-1][0])

    def one(self, index: int) -> nn.Sequential:
        """Return one of the networks."""
        layers: list[nn.Module] = []
        for weight, bias in zip(self.weights, self.biases, strict=True):
            layer = nn.Linear(weight.shape[1], weight.shape[2])
            layer.weight.data, layer.bias.data = weight.data[index].T.clone(), bias.data[index, 0].clone()
            layers += [layer, nn.ReLU()]
        return nn.Sequential(*layers[:-1])


def circle(n: int, repeats: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return angles in turns (f · repeats, n), sorted, points of the circle, and sines of every frequency."""
    chance = torch.Generator().manual_seed(seed)
    turns = torch.rand(repeats, n, generator=chance).sort(1).values.repeat(len(FREQUENCIES), 1)
    points = torch.stack([(2 * math.pi * turns).cos(), (2 * math.pi * turns).sin()], 2)
    frequency = torch.tensor(FREQUENCIES).repeat_interleave(repeats)[:, None]
    return turns, points, (2 * math.pi * frequency * turns).sin()[:, :, None]


def trained(training: Training, points: Tensor, values: Tensor, seed: int, width: int = 64) -> Stack:
    """Return the stack after training: Adam, 1e-4, batches of 64."""
    torch.manual_seed(seed)
    stack = Stack(len(points), [2, *[width] * training.hidden, 1])
    optimizer = torch.optim.Adam(stack.parameters(), lr=1e-4)
    for _ in trange(training.epochs, desc=training.name, disable=None):
        for batch in torch.randperm(points.shape[1]).split(64):
            gap = stack(points[:, batch]) - values[:, batch]
            loss = gap.abs() if training.loss == "L1" else gap.square()
            optimizer.zero_grad()
            loss.mean((1, 2)).sum().backward()
            optimizer.step()
    return stack


def counted(k: Tensor) -> tuple[Tensor, Tensor]:
    """Return every estimate of the number of neighbors, (b, estimators), and histograms (b, bins)."""
    soft = [k.sum(1), *(k.clamp(min=0).pow(a).sum(1) for a in EXPONENTS)]
    hard = [(k >= t).sum(1).to(k) for t in THRESHOLDS]
    place = ((k + 1) * (BINS / 2)).long().clamp(0, BINS - 1)
    counts = torch.zeros(len(k), BINS, dtype=torch.long).scatter_add(1, place, torch.ones_like(place))
    return torch.stack([*soft, *hard], 1), counts


def measured(training: Training, n: int, repeats: int, seed: int) -> list[dict[str, Any]]:
    """Return a row for every network, kernel and frequency."""
    turns, points, values = circle(n, repeats, seed)
    stack, rows = trained(training, points, values, seed), []
    for index in trange(len(points), desc="neighbors", disable=None):
        model, x = stack.one(index), points[index]
        gap = (model(x) - values[index]).detach()
        f = FREQUENCIES[index // repeats]
        bend = (2 * math.pi * f) ** 2 * values[index, :, 0].abs()  # |second derivative| in turns
        at = torch.linspace(0, n - 1, POINTS).long()
        for centered in (False, True):
            estimates, counts = lw.GramMatrix(model, x, centered=centered).over_rows(counted)
            rows.append(
                {
                    "training": training.name,
                    "frequency": f,
                    "repeat": index % repeats,
                    "centered": centered,
                    "error": float(gap.square().mean()),
                    "estimates": dict(
                        zip(ESTIMATORS, estimates.double().median(0).values.tolist(), strict=True)
                    ),
                    "curvature": float(stats.spearmanr(estimates[:, 0], bend).statistic),
                    "histogram": counts.sum(0).tolist(),
                    "turns": _short(turns[index][at]),
                    "soft": _short(estimates[at, 0]),
                    "function": _short(model(x[at])[:, 0]),
                }
            )
    return rows


def _short(values: Tensor) -> list[float]:
    return [round(v, 4) for v in values.tolist()]


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
    spread = float(stats.sem(found) * stats.t.ppf(0.975, len(found) - 1)) if len(found) > 1 else math.nan
    return float(np.mean(found)), spread


def drawn(rows: list[dict[str, Any]], folder: Path) -> None:
    """Draw every figure from the results."""
    for training in dict.fromkeys(r["training"] for r in rows):
        stem = "".join(c if c.isalnum() else "-" for c in training).strip("-")
        _estimators(rows, training, folder / f"toy-neighbors-{stem}.png")
        _along(rows, training, folder / f"toy-circle-{stem}.png")
        _spread(rows, training, folder / f"toy-similarities-{stem}.png")
        _turning(rows, training, folder / f"toy-circle-{stem}.html")


def _estimators(rows: list[dict[str, Any]], training: str, path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(13, 5), sharey=True, layout="constrained")
    colors = plt.get_cmap("viridis")(np.linspace(0, 0.9, len(ESTIMATORS)))
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
            wide = 2.5 if name == "N_S" else 1.2
            axis.plot(FREQUENCIES, middle, color=color, label=label, lw=wide)
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
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _along(rows: list[dict[str, Any]], training: str, path: Path) -> None:
    figure, axes = plt.subplots(2, len(FREQUENCIES), figsize=(13, 4.5), sharex=True, sharey="row")
    for column, f in enumerate(FREQUENCIES):
        here = [r for r in rows if r["training"] == training and not r["centered"] and r["frequency"] == f]
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
    figure.savefig(path, dpi=150)
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
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _turning(rows: list[dict[str, Any]], training: str, path: Path) -> None:
    """Write one page that shows N_S along the circle in three dimensions, to be turned by hand."""
    shown = []
    for f in FREQUENCIES:
        here = [r for r in rows if (r["training"], r["centered"], r["frequency"]) == (training, False, f)]
        at = np.linspace(0, 1, POINTS, endpoint=False)
        curves = [np.interp(at, r["turns"], r["soft"], period=1) for r in here]
        soft = np.median(curves, 0).round(2).tolist()
        shown.append({"frequency": f, "turns": at.round(4).tolist(), "soft": soft})
    page = Path(__file__).with_name("toy.html").read_text(encoding="utf-8")
    path.write_text(page.replace("__DATA__", json.dumps(shown)), encoding="utf-8")


def told(rows: list[dict[str, Any]]) -> None:
    """Print the exponents."""
    for training in dict.fromkeys(r["training"] for r in rows):
        here = [r for r in rows if r["training"] == training and not r["centered"]]
        errors = {f: np.median([r["error"] for r in here if r["frequency"] == f]) for f in FREQUENCIES}
        print(
            f"\n{training}: mean squared error " + ", ".join(f"{e:.4f} (f = {f})" for f, e in errors.items())
        )
        for name in ("N_S", "N⁺ 4", "N 0.9", "N 0.99"):
            (plain, off), (centered, by) = (slopes(rows, training, c, name) for c in (False, True))
            print(f"  {name:8} plain f^{plain:.2f} ± {off:.2f}, centered f^{centered:.2f} ± {by:.2f}")


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    size = arguments.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true")
    size.add_argument("--full", action="store_true")
    arguments.add_argument("--draw", action="store_true", help="draw figures again, train nothing")
    arguments.add_argument("--out", type=Path, default=None, help="where results and figures go")
    given = arguments.parse_args()
    out = given.out or Path("out/toy-quick" if given.quick else "experiments/results")
    out.mkdir(parents=True, exist_ok=True)
    file = out / "toy.json"
    torch.set_num_threads(1)
    n, repeats, trainings = (512, 3, QUICK) if given.quick else (2048, 20 if given.full else 5, TRAININGS)
    settings = {"n": n, "repeats": repeats, "frequencies": FREQUENCIES, "trainings": trainings, "seed": 0}
    settings = json.loads(json.dumps(settings))
    known = json.loads(file.read_text()) if file.exists() else {"settings": settings, "rows": []}
    if known["settings"] != settings and not given.draw:
        known = {"settings": settings, "rows": []}
    done = {row["training"] for row in known["rows"]}
    for training in () if given.draw else trainings:
        if training.name not in done:  # a run that was stopped goes on
            known["rows"] += measured(training, n, repeats, seed=0)
            file.write_text(json.dumps(known))
    drawn(known["rows"], out)
    told(known["rows"])
    print(f"results and figures: {out}")


if __name__ == "__main__":
    main()
