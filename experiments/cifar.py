"""The paper's training term on CIFAR-10: VGG and ResNet-18, with and without, by likewise's own losses.

Paired runs as in experiments/mnist.py, mixed mini-batches of 16 a side; each term at a tenth of its
usual weight and at a hundredth. The terms are taken in evaluation mode,
with batch normalization's running statistics, the loss in training mode; accuracy with statistics recomputed.
For a GPU. The third part of the figure is of earlier runs of ResNet-18, judged with running statistics.

    likewise reproduce cifar --data DIR --out out/cifar --processes 12
    likewise reproduce cifar --draw           the figure, from the results that are kept
"""

import copy
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mnist import Cell, Images, order, read
from settings import lines, measure_all, options
from stacks import TERMS, Residual, Term, label_against_mean
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import update_bn

from likewise import losses

WEIGHTS = (0.01, 0.1)  # in units of the usual one of MNIST
SAMPLES, TESTS = 3000, 1500  # 200 steps draw 6,400 images
RATE = {"VGG": 3e-4, "ResNet-18": 1e-3}


def vgg() -> nn.Sequential:
    """Eight convolutions and a linear layer, VGG-11's body for images of 32 x 32, without normalization.

    Weights are drawn as by its authors' successors (He et al.): PyTorch's usual ones leave it saying one
    class of every image for hundreds of steps.
    """
    layers: list[nn.Module] = []
    before = 3
    for width in (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool"):
        if isinstance(width, int):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
            before = width
        else:
            layers.append(nn.MaxPool2d(2))
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


class Shortcut(nn.Module):
    """A block of ResNet-18 that halves the image: f(x) plus a 1 x 1 convolution of x."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(*_normed(before, after, 2), nn.ReLU(), *_normed(after, after))
        self.beside = nn.Sequential(nn.Conv2d(before, after, 1, stride=2, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.beside(x)


def _normed(before: int, after: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)]


def resnet18() -> nn.Sequential:
    """Return it in its form for images of 32 x 32."""
    layers: list[nn.Module] = [*_normed(3, 64), nn.ReLU()]
    before = 64
    for width in (64, 128, 256, 512):
        for step in range(2):
            if width != before:
                layers += [Shortcut(before, width), nn.ReLU()]
            else:
                layers += [Residual(*_normed(width, width), nn.ReLU(), *_normed(width, width)), nn.ReLU()]
            before = width if step == 0 else before
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


NETS = {"VGG": vgg, "ResNet-18": resnet18}
FORMER = "ResNet-18, running statistics"  # earlier results, which a term spoils: no longer measured


def cells(runs: int, steps: int, samples: int) -> list[Cell]:
    return [
        Cell("cifar", t, 16, True, weight, runs=runs, steps=steps, data="cifar10", net=net, samples=samples)
        for net in NETS
        for t in TERMS
        for weight in ((1.0,) if t == "none" else WEIGHTS)
    ]


def score(outputs: Tensor, labels: Tensor) -> Tensor:
    return label_against_mean(outputs, labels)[:, None]


def term_of(model: nn.Module, term: Term, x: Tensor, y: Tensor) -> Tensor:
    """Return the term, as likewise has it."""
    if term == "group":
        return losses.group(model, x, y, y, readout=score)
    half = len(x) // 2
    form = "ratio" if term == "ratio" else "cosine"
    sign = -1.0 if term == "+cos" else 1.0
    return losses.two_batches(
        model, x[:half], x[half:], y[:half], y[half:], form=form, readout=score, weight=sign
    )


def trained(cell: Cell, run: int, given: Images, moments: list[int]) -> list[int]:
    """Return how many test images are right at these moments of one run."""
    torch.manual_seed(run)
    model = NETS[cell.net]().to(given.x.device)
    which, labels = (
        torch.tensor(part).to(given.x.device) for part in order(cell, run, given.y.cpu().numpy())
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE[cell.net])
    strength = cell.weight * (1 if cell.term == "ratio" else cell.batch**0.5)
    right = []
    for step in range(cell.steps + 1):
        if step in moments:
            right.append(evaluated(model, given))
        if step < cell.steps:
            x, y = given.x[which[step]], labels[step]
            loss = F.cross_entropy(model(x), y)
            if cell.term != "none":
                loss = loss + strength * term_of(model, cell.term, x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return right


def evaluated(model: nn.Module, given: Images) -> int:
    """Return how many test images are right, with batch norms' statistics recomputed."""
    judged = copy.deepcopy(model)
    update_bn(given.x[:1000].split(250), judged)
    judged.eval()
    with torch.no_grad():
        found = torch.cat([judged(part).argmax(1) for part in given.test.split(2000)])
    return int((found == given.truth).sum())


def measured(cell: Cell, folder: Path, device: str, tests: int) -> dict[str, Any]:
    """Train one setting."""
    given = read("cifar10", folder, device, tests, cell.samples)
    moments = np.unique(np.linspace(0, cell.steps, 11).round().astype(int)).tolist()
    begun = time.perf_counter()
    right = np.array([trained(cell, r, given, moments) for r in range(cell.runs)]).T.tolist()
    seconds = round(time.perf_counter() - begun, 1)
    return {"steps": moments, "right": right, "tests": len(given.test), "seconds": seconds}


def drawn(found: list[dict[str, Any]], folder: Path) -> None:
    """Draw what each term adds, at both weights."""
    import mnist_figures as figures

    nets = [net for net in (*NETS, FORMER) if figures.found(found, net=net)]
    size = (5 * len(nets) + 1, 3.6)
    figure, axes = figures.plt.subplots(
        1, len(nets), figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    wanted = [(t, w) for t in TERMS[1:] for w in WEIGHTS if figures.found(found, term=t, weight=w)]
    places = {case: -i for i, case in enumerate(wanted)}
    for axis, net in zip(axes[0], nets, strict=True):
        for (term, weight), place in places.items():
            for line in figures.found(found, net=net, term=term, weight=weight):
                gain = figures.gains(line, found)
                if gain is not None:
                    wide, color = figures.interval(gain), figures.COLORS[term]
                    axis.errorbar(gain.mean(), place, xerr=wide, fmt="o", color=color)
        axis.axvline(0, color="0.35", lw=1)
        axis.set(title=net, xlabel="what the term adds to accuracy, points")
    axes[0, 0].set_yticks(list(places.values()), [f"{figures.NAMES[t]} × {w:g}" for t, w in places])
    figures.finish(figure, folder / "cifar-gains.png")


def main() -> None:
    arguments = options(__doc__)
    arguments.add_argument("--samples", type=int, default=SAMPLES, help="the first so many training images")
    given = arguments.parse_args()
    out = given.out or Path("out/cifar-quick" if given.quick else "experiments/results")
    file = out / "cifar.jsonl"
    if not given.draw:
        torch.set_num_threads(1)
        todo = cells(5, 200, given.samples)
        if given.quick:
            todo = [cell for cell in cells(2, 4, given.samples) if cell.net == "VGG"][:3]
        tests = 200 if given.quick else TESTS
        measure = partial(measured, folder=given.data, device=given.device, tests=tests)
        measure_all(todo, file, measure, given.processes)
    import mnist_words

    if not lines(file):
        raise SystemExit(f"There are no results in {out} to draw.")
    drawn(lines(file), out)
    mnist_words.told(lines(file))
    print(f"results and figures: {out}")


if __name__ == "__main__":
    main()
