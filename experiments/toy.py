"""The paper's toy problem (sec. 4.3 and its appendix): does the number of neighbors fall as 1/f?

A network learns sin(2πfα) from points of a circle, (cos 2πα, sin 2πα). The higher the frequency, the more
it must tell points apart. `likewise reproduce toy --quick` takes about a minute on one core; without it,
five repeats of each training; with `--full` twenty of the short ones, on a GPU of all: twenty minutes of two
cores. Networks of all frequencies and repeats are trained as one stack. Results are kept in toy.json in
experiments/results, where none is missing (`--out` for a run of your own), figures beside it; `--draw` draws
them again.

As written in the paper: 5 hidden layers, 80 epochs. As in the authors' code: 6 hidden layers, 5,000 epochs,
mean absolute error. Every repeat draws its own points.
"""

import argparse
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import toy_fit
from scipy import stats
from torch import Tensor, nn
from toy_figures import BINS, ESTIMATORS, EXPONENTS, FREQUENCIES, POINTS, THRESHOLDS, drawn, told
from tqdm import trange

import likewise as lw

CURVES = 5  # repeats whose curves along the circle are kept


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
            layer = nn.Linear(weight.shape[1], weight.shape[2], device=weight.device)
            layer.weight.data, layer.bias.data = (
                weight.data[index].T.contiguous(),
                bias.data[index, 0].clone(),
            )
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
    stack = Stack(len(points), [2, *[width] * training.hidden, 1]).to(points.device)
    optimizer = torch.optim.Adam(stack.parameters(), lr=1e-4, fused=True)
    for _ in trange(training.epochs, desc=training.name, disable=None):
        for batch in torch.randperm(points.shape[1]).to(points.device).split(64):
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
    counts = torch.zeros_like(place[:, :1]).repeat(1, BINS).scatter_add(1, place, torch.ones_like(place))
    return torch.stack([*soft, *hard], 1), counts


def measured(
    training: Training, n: int, repeats: int, seed: int, device: str = "cpu"
) -> list[dict[str, Any]]:
    """Return a row for every network, kernel and frequency."""
    turns, points, values = (part.to(device) for part in circle(n, repeats, seed))
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
                    "curvature": float(stats.spearmanr(estimates[:, 0].cpu(), bend.cpu()).statistic),
                    "histogram": counts.sum(0).tolist(),
                }
            )
            if index % repeats < CURVES and not centered:
                rows[-1]["turns"] = _short(turns[index][at])
                rows[-1]["soft"] = _short(estimates[at, 0])
                rows[-1]["function"] = _short(model(x[at])[:, 0])
    return rows


def _short(values: Tensor) -> list[float]:
    return [round(v, 4) for v in values.tolist()]


class Known:
    """Results in a file, by part, with their settings: a run that was stopped goes on."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.parts: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}

    def add(self, name: str, settings: dict[str, Any], measure: Callable[[], list[dict[str, Any]]]) -> None:
        """Measure a part that is not there with these settings and as many repeats, and keep it."""
        known = self.parts.get(name, {}).get("settings", {"repeats": 0})
        if known["repeats"] < settings["repeats"] or {**known, "repeats": 0} != {**settings, "repeats": 0}:
            self.parts[name] = {"settings": settings, "rows": measure()}
            part = self.file.with_suffix(".part")
            part.write_text(json.dumps(self.parts))
            part.replace(self.file)


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    size = arguments.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true")
    size.add_argument("--full", action="store_true")
    arguments.add_argument("--draw", action="store_true", help="draw figures again, train nothing")
    arguments.add_argument("--only", default=None, help="one training, by its name, or fit")
    arguments.add_argument("--out", type=Path, default=None, help="where results and figures go")
    arguments.add_argument("--data", help="not needed: the points are drawn")
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = arguments.parse_args()
    out = given.out or Path("out/toy-quick" if given.quick else "experiments/results")
    out.mkdir(parents=True, exist_ok=True)
    known = Known(out / "toy.json")
    torch.set_num_threads(1 if given.quick else 2)
    n, trainings = (512, QUICK) if given.quick else (2048, TRAININGS)
    for training in () if given.draw else trainings:
        repeats = 3 if given.quick else 5
        if given.full and (training.epochs < 1000 or given.device != "cpu"):
            repeats = 20
        if given.only in (None, training.name):
            settings = {"n": n, "repeats": repeats, "seed": 0, **training._asdict()}
            known.add(
                training.name, settings, lambda t=training, r=repeats: measured(t, n, r, 0, given.device)
            )
    if not given.draw and given.only in (None, "fit"):
        repeats = 3 if given.quick else 5
        settings = json.loads(json.dumps({"repeats": repeats, "quick": given.quick, **toy_fit.SETTINGS}))
        known.add("fit", settings, lambda: toy_fit.measured(Stack, repeats, given.quick))
    if not known.parts:
        names = ", ".join([*(t.name for t in trainings), "fit"])
        raise SystemExit(f"There are no results in {out} to draw; what --only can name: {names}.")
    rows = [row for name, part in known.parts.items() if name != "fit" for row in part["rows"]]
    drawn(rows, out)
    told(rows)
    if "fit" in known.parts:
        toy_fit.drawn(known.parts["fit"]["rows"], out / "toy-fit.png")
        toy_fit.told(known.parts["fit"]["rows"])
    print(f"results and figures: {out}")


if __name__ == "__main__":
    main()
