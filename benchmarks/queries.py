"""What does one new image cost against a data set, in plain training epochs? Both ways, in one run.

A ResNet of 78,000 parameters for images of 32 × 32 (random ones: the cost does not depend on them), on one CPU
thread or a GPU. CPU seconds (on a GPU wall-clock), median of the rounds; everything beside the set-up of the engine
is counted.

    python benchmarks/queries.py                      3,000 columns, three rounds: about three minutes
    python benchmarks/queries.py --columns 300 --rounds 1
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import likewise as lw
from likewise.gram.strips import ExactStrips


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        changes = stride > 1 or inputs != outputs
        projection = [nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)]
        self.shortcut = nn.Sequential(*(projection if changes else []))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layers(x) + self.shortcut(x))


def resnet8(classes: int = 10) -> nn.Module:
    """Return a ResNet with one block at each of three resolutions, 78,000 parameters."""
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    blocks = [Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


def plain_epoch(model: nn.Module, x: Tensor, y: Tensor, size: int = 128) -> None:
    """Train for one epoch, as a user would."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for start in range(0, len(x), size):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[start : start + size]), y[start : start + size]).backward()
        optimizer.step()
    model.eval()


def seconds(function: Callable[[], object], rounds: int, device: str) -> tuple[float, float]:
    """Return the median and the spread of what it takes."""
    found = []
    for _ in range(rounds):
        if device == "cuda":
            torch.cuda.synchronize()
        clock = time.perf_counter if device == "cuda" else time.process_time
        start = clock()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(clock() - start)
    return statistics.median(found), max(found) - min(found)


READOUTS = {
    "predicted_class": lw.predicted_class,
    "projected_outputs(4)": lw.projected_outputs(4),
    "all_outputs": lw.all_outputs,
}


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--columns", type=int, default=3000)
    arguments.add_argument("--queries", type=int, nargs="+", default=[1, 8])
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--only", default="", help="readouts that contain this")
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = resnet8().to(given.device)
    x = torch.randn(given.columns, 3, 32, 32, device=given.device)
    y = torch.arange(given.columns, device=given.device) % 10
    new = torch.randn(max(given.queries), 3, 32, 32, device=given.device)
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{platform.machine()}, {given.device}, torch {torch.__version__}; ResNet of {parameters:,} parameters, "
        f"{given.columns:,} columns"
    )
    plain_epoch(model, x, y)
    epoch, spread = seconds(lambda: plain_epoch(model, x, y), given.rounds, given.device)
    print(f"plain epoch {epoch:.2f} s ({spread:.2f})", flush=True)
    for name, readout in READOUTS.items():
        if given.only not in name:
            continue
        for queries in given.queries:
            gram = lw.GramMatrix(lw.Network(model, readout=readout), new[:queries], columns=x)
            _ = gram.engine
            report = []
            for way, function in ways(gram).items():
                took, spread = seconds(function, given.rounds, given.device)
                report.append(f"{way} {took:.2f} s ({spread:.2f}), {took / epoch:.2f} epochs")
            print(f"{name}, {queries} queries: " + "; ".join(report), flush=True)


def ways(gram: lw.GramMatrix) -> dict[str, Callable[[], object]]:
    """Return what is compared: the neighbors as a user asks for them, and the similarities by either way."""

    def by(strips: ExactStrips) -> Tensor:
        with gram.net.evaluation_mode():
            return torch.cat([strips.strip(where) for where in strips.strips])

    return {
        "nearest": lambda: lw.nearest(gram, 10, sketch=None),
        "by directions": lambda: by(gram._direction_strips(None)),
        "by features": lambda: by(gram.tiles()),
    }


if __name__ == "__main__":
    main()
