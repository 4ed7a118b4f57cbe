"""The paper's training term (sec. 5 and its appendix): does it speed up learning, and by which sign?

Paired runs, the same initialization and the same samples in the same order, of: no term, the set term
(`losses.group`), minus and plus the cosine of two mini-batches' mean gradients (the authors' published code
adds plus), the paper's ratio. Mini-batches of one class as in that code, or mixed: two images of every label
drawn. The figure is the mean test accuracy over the first 150 steps; all test images are used.

    likewise reproduce mnist --quick --data DIR      two minutes on a laptop: six runs of 50 steps, batches of
                                                     1, accuracy on 1,000 test images
    likewise reproduce mnist --data DIR --out out/mnist --processes 14 --points 15
                                                     everything, on a GPU: seven minutes of an H200; with
                                                     twice as many points, as the kept results have, about ten
    likewise reproduce mnist --draw                  figures from the results that are kept

Results are added to mnist.jsonl in `--out`, a line per setting: a run that was stopped goes on. Without
`--out` that is experiments/results, where nothing is missing. Processes share a GPU well if NVIDIA's MPS was
started before (`nvidia-cuda-mps-control -d`); each takes up to 8 GB of its memory.
"""

import time
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from data import scaled
from settings import lines, measure_all, options
from stacks import TERMS, Residual, Stack, Term, label_against_mean, step_loss
from torch import Tensor, nn
from torch.func import functional_call

import likewise as lw

EARLY = 150  # steps, over which accuracy is averaged
POINTS = 30  # moments after the beginning, at which accuracy is looked at
SIMILAR = 8  # runs whose similarities are followed
AT_ONCE = 20  # runs, where every sample has its copy of the parameters


class Cell(NamedTuple):
    """One setting: so many runs of it are trained as one stack."""

    study: str
    term: Term
    batch: int = 1  # images of each of the two mini-batches
    mixed: bool = False  # all classes in a mini-batch, or one
    weight: float = 1.0  # times √batch; of the ratio times 1
    runs: int = 60
    steps: int = EARLY
    data: str = "mnist"
    net: str = "paper"
    samples: int = 60_000
    noise: float = 0.0  # share of wrong training labels
    score: str = "mean"  # the label's output against the mean of the others, or "rest": their log-sum-exp


def paper_net() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 5), nn.PReLU(), nn.AvgPool2d(2)),
        *(nn.Conv2d(32, 64, 5), nn.PReLU(), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(1024, 256), nn.PReLU(), nn.Linear(256, 10)),
    )


def tanh_net() -> nn.Sequential:
    return nn.Sequential(*(nn.Tanh() if isinstance(layer, nn.PReLU) else layer for layer in paper_net()))


def residual_net() -> nn.Sequential:
    def block(c: int) -> Residual:
        return Residual(nn.Conv2d(c, c, 3, padding=1), nn.PReLU(), nn.Conv2d(c, c, 3, padding=1), nn.PReLU())

    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.PReLU(), block(16), nn.AvgPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.PReLU(), block(32), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 49, 10)),
    )


def deep_net() -> nn.Sequential:
    """Eight convolutions."""
    layers: list[nn.Module] = []
    for i, (before, after) in enumerate([(1, 16), *[(16, 16)] * 3, (16, 32), *[(32, 32)] * 3]):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.PReLU()]
        layers += [nn.AvgPool2d(2)] if i in (3, 7) else []
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 49, 10))


NETS = {"paper": paper_net, "tanh": tanh_net, "residual": residual_net, "eight convolutions": deep_net}


def cells() -> list[Cell]:
    """Return every setting. With two images in all the set term is 1 − cos: it is not run again."""

    def terms(batch: int) -> list[Term]:
        return [t for t in TERMS if batch > 1 or t != "group"]

    shapes = [(1, False), (16, False), (16, True)]
    found = [Cell("main", t, b, m) for b, m in shapes for t in terms(b)]
    found += [
        Cell("fashion", t, b, m, data="fashion-mnist") for b, m in (shapes[0], shapes[2]) for t in terms(b)
    ]
    for b, m in (shapes[0], shapes[2]):
        found += [Cell("nets", t, b, m, runs=10, net=net) for net in list(NETS)[1:] for t in terms(b)]
        found += [Cell("score", t, b, m, runs=20, score="rest") for t in terms(b)]
        for weight in (0.03, 0.1, 0.3, 3.0, 10.0) if b == 1 else (0.03, 0.1, 0.3, 3.0):
            found += [Cell("weights", t, b, m, weight, runs=20) for t in terms(b)[1:]]
    for samples, noise in ((60_000, 0.0), (60_000, 0.2), (300, 0.0)):
        found += [
            Cell("long", t, 16, True, weight, runs=20, steps=400, samples=samples, noise=noise)
            for t in TERMS
            for weight in ((1.0,) if t == "none" else (0.1, 1.0))
        ]
    return found


def quick_cells() -> list[Cell]:
    return [Cell("main", t, runs=6, steps=50) for t in TERMS if t != "group"]


class Images(NamedTuple):
    """For training and for tests."""

    x: Tensor
    y: Tensor
    test: Tensor
    truth: Tensor


@cache
def read(name: str, folder: Path, device: str, tests: int | None, samples: int | None = None) -> Images:
    parts = [*scaled(name, folder, count=samples), *scaled(name, folder, "test", count=tests)]
    return Images(*(part.to(device) for part in parts))


def order(cell: Cell, run: int, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which images a run sees and as what, (steps, 2 · batch) each; the same for every term."""
    chance = np.random.default_rng(1000 + run)
    kept = chance.permutation(len(truth))[: cell.samples]
    labels = truth[kept].copy()
    wrong = chance.random(len(labels)) < cell.noise
    labels[wrong] = (labels[wrong] + chance.integers(1, 10, wrong.sum())) % 10
    of_class = [np.flatnonzero(labels == c) for c in range(10)]
    drawn = chance.integers(10, size=(cell.steps, cell.batch if cell.mixed else 1))
    drawn = np.tile(drawn, 2 if cell.mixed else 2 * cell.batch)
    places = chance.random(drawn.shape)
    sizes = np.array([len(members) for members in of_class])
    inside = (places * sizes[drawn]).astype(int)
    which = np.stack([np.pad(members, (0, sizes.max() - len(members))) for members in of_class])[
        drawn, inside
    ]
    return kept[which], drawn


def evaluated(stack: Stack, given: Images, runs: int) -> list[int]:
    """Return how many test images each network gets right."""
    right = []
    with torch.no_grad():
        for run in range(runs):
            own = {name: p[run] for name, p in stack.parameters.items()}
            found = [functional_call(stack.shape, own, part).argmax(1) for part in given.test.split(5000)]
            right.append((torch.cat(found) == given.truth).sum())
    return [int(r) for r in right]


def similarities(stack: Stack, given: Images, runs: int, each: int = 20) -> list[list[float]]:
    """Return the mean similarity of test images of one class, and of two, by each of the first networks."""
    chosen = torch.cat([(given.truth == c).nonzero()[:each, 0] for c in range(10)])
    x, y = given.test[chosen], given.truth[chosen]
    readout = lambda outputs, labels: label_against_mean(outputs, labels)[:, None]  # noqa: E731
    same = (y[:, None] == y).cpu()
    other = same.logical_not()
    same.fill_diagonal_(False)
    found = []
    for run in range(runs):
        k = lw.GramMatrix(lw.Network(stack.one(run), readout), (x, y)).over_rows(lambda block: block)
        found.append([float(k.cpu()[pairs].mean()) for pairs in (same, other)])
    return found


def scores(name: str) -> Any:
    if name == "mean":
        return label_against_mean
    return lambda outputs, labels: lw.label_against_rest(outputs.flatten(0, 1), labels.flatten()).reshape_as(
        labels
    )


def trained(cell: Cell, given: Images, points: int, followed: int = SIMILAR) -> dict[str, Any]:
    """Return the accuracy of every run, before the first step and at `points` moments after.

    And the similarities of the first `followed` runs, at six of these.
    """
    device = str(given.x.device)
    stack = Stack.made(NETS[cell.net], list(range(cell.runs)), device)
    orders = [order(cell, run, given.y.cpu().numpy()) for run in range(cell.runs)]
    which, labels = (torch.tensor(np.stack(part, 1)).to(device) for part in zip(*orders, strict=True))
    optimizer = torch.optim.Adam(stack.parameters.values(), lr=1e-3)
    strength = cell.weight * (1 if cell.term == "ratio" else cell.batch**0.5)
    moments = np.unique(np.linspace(0, cell.steps, points + 1).round().astype(int)).tolist()
    looks = moments[:: max(1, points // 5)]
    found: dict[str, Any] = {"steps": moments, "right": [], "looks": looks, "similar": []}
    size = AT_ONCE if cell.term == "group" else cell.runs
    parts = [slice(first, first + size) for first in range(0, cell.runs, size)]
    begun, followed = time.perf_counter(), min(cell.runs, followed)
    for step in range(cell.steps + 1):
        if step in moments:
            found["right"].append(evaluated(stack, given, cell.runs))
        if step in looks and followed:
            found["similar"].append(similarities(stack, given, followed))
        if step < cell.steps:
            optimizer.zero_grad()
            for part in parts:
                x, y = given.x[which[step, part]], labels[step, part]
                step_loss(stack.part(part), cell.term, strength, x, y, scores(cell.score)).sum().backward()
            optimizer.step()
    found["similar"] = np.round(found["similar"], 4).tolist()
    return {**found, "tests": len(given.test), "seconds": round(time.perf_counter() - begun, 1)}


def measured(cell: Cell, folder: Path, device: str, tests: int, points: int, followed: int) -> dict[str, Any]:
    """Train one setting."""
    given = read(cell.data, folder, device, tests)
    return trained(cell, given, points, followed if cell.study == "main" else 0)


def run(
    todo: list[Cell],
    file: Path,
    folder: Path,
    device: str,
    quick: bool,
    tests: int | None = None,
    points: int | None = None,
    processes: int = 1,
) -> None:
    """Train what has no result in the file yet, and add it."""
    usual = (10, 1000, 2) if quick else (POINTS, 10_000, SIMILAR)
    how = {"folder": folder, "device": device, "tests": tests or usual[1], "points": points or usual[0]}
    if processes > 1:  # the longest first
        todo = sorted(todo, key=lambda cell: -cell.runs * cell.steps * cell.batch)
    measure_all(todo, file, partial(measured, followed=usual[2], **how), processes)


def main() -> None:
    arguments = options(__doc__)
    arguments.add_argument(
        "--only", default="", help="one study: main, fashion, nets, score, weights or long"
    )
    arguments.add_argument(
        "--runs", type=int, default=None, help="of each setting, instead of its own number"
    )
    arguments.add_argument("--tests", type=int, help="the first so many test images, instead of all")
    arguments.add_argument("--points", type=int, help=f"moments at which accuracy is taken, usually {POINTS}")
    arguments.add_argument("--against", type=Path, help="a file of other results, to compare with")
    given = arguments.parse_args()
    if given.against and not lines(given.against):
        raise SystemExit(f"There are no results in {given.against} to compare with.")
    out = given.out or Path("out/mnist-quick" if given.quick else "experiments/results")
    file = out / "mnist.jsonl"
    if not given.draw:
        torch.set_num_threads(1)
        todo = [cell for cell in (quick_cells() if given.quick else cells()) if given.only in cell.study]
        if not todo:
            known = ", ".join(dict.fromkeys(cell.study for cell in cells()))
            raise SystemExit(f"There is no study {given.only!r}; there are: {known}.")
        if given.runs:
            todo = [cell._replace(runs=given.runs) for cell in todo]
        chosen = (given.quick, given.tests, given.points, given.processes)
        run(todo, file, given.data, given.device, *chosen)
    import mnist_figures
    import mnist_words

    if not lines(file):
        raise SystemExit(f"There are no results in {out} to draw.")
    mnist_figures.drawn(lines(file), out)
    mnist_words.told(lines(file))
    if given.against:
        mnist_words.compared(lines(file), lines(given.against))
    print(f"results and figures: {out}")


if __name__ == "__main__":
    main()
