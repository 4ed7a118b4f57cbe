"""What does a whole run cost, from a model to the report, in plain training epochs?

3,000 images of 32 × 32 and a ResNet of 78 k parameters with BatchNorm, or 50,000 images and a convolutional net of
291 k parameters (--large), ten classes, one CPU thread. CPU time, in units of one plain training epoch of the same
model on the same machine in the same run: the whole run after the imports, its stages, `likewise plan`. Images are
random unless --data names a folder with CIFAR-10: timings are the same.

--calls measures single calls of the library at their defaults instead, such as a new user would type them.

    python benchmarks/analyze.py                       # 3,000 images
    python benchmarks/analyze.py --large               # 50,000 images
    python benchmarks/analyze.py --exact --limit 300   # all pairs exactly, of fewer images
    python benchmarks/analyze.py --profile             # where the time goes, by function
    python benchmarks/analyze.py --calls nearest label_suspicion build_index
    python benchmarks/analyze.py --calls nearest --classes 1000
"""

import argparse
import cProfile
import platform
import pstats
import resource
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2  # noqa: F401  what a run imports on its way is no part of its cost
import pandas  # noqa: F401
import pyarrow.parquet  # noqa: F401
import scipy.optimize
import scipy.sparse.linalg  # noqa: F401
import sklearn.isotonic
import sklearn.linear_model
import sklearn.mixture  # noqa: F401
import torch
from images import images
from PIL import Image  # noqa: F401
from torch import Tensor, nn

import likewise as lw
from likewise.runs import settings  # noqa: F401  pydantic
from likewise.runs.plan import plan_run


class Block(nn.Module):
    """Two convolutions with BatchNorm beside a shortcut."""

    def __init__(self, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(i, o, 3, stride, 1, bias=False),
            nn.BatchNorm2d(o),
            nn.ReLU(),
            nn.Conv2d(o, o, 3, 1, 1, bias=False),
            nn.BatchNorm2d(o),
        )
        same = i == o and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(i, o, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def small_resnet(stride: int, classes: int = 10) -> nn.Module:
    """Return a ResNet of 78 k parameters; its first convolution may halve the image."""
    stem = [nn.Conv2d(3, 16, 3, stride, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    blocks = [Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


def convolutional() -> nn.Module:
    """Return a net of 291 k parameters."""

    def block(i: int, o: int) -> list[nn.Module]:
        return [nn.Conv2d(i, o, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]

    head = [nn.Flatten(), nn.Linear(2048, 96), nn.ReLU(), nn.Linear(96, 10)]
    return nn.Sequential(*block(3, 32), *block(32, 64), *block(64, 128), *head)


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> float:
    """Train the model, and return the CPU seconds of an epoch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    seconds = []
    for _ in range(epochs):
        begun = time.process_time()
        for batch in torch.randperm(len(x)).split(128):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        seconds.append(time.process_time() - begun)
    model.eval()
    return min(seconds)


def timed(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """Return a result with its CPU and wall-clock seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return result, time.process_time() - cpu, time.perf_counter() - wall


def load(given: argparse.Namespace, count: int) -> tuple[Tensor, Tensor]:
    """Return CIFAR-10, or random images; of other than ten classes with random labels."""
    labels = torch.randint(0, given.classes, (count,))
    if given.data is not None:
        x, y = images("cifar10", given.data, count=count)
        return x, y if given.classes == 10 else labels
    return torch.randn(count, 3, 32, 32), labels


CALLS: dict[str, Callable[[nn.Module, Tensor, Tensor, Path], Any]] = {
    "nearest": lambda model, x, y, _: lw.nearest(lw.GramMatrix(model, (x, y))),
    "label_suspicion": lambda model, x, y, _: lw.label_suspicion(lw.GramMatrix(model, (x, y))),
    "fit_quality": lambda model, x, y, _: lw.fit_quality(lw.GramMatrix(model, (x, y))),
    "build_index": lambda model, x, y, out: lw.build_index(model, (x, y), out / "index"),
}


def measure_calls(names: list[str], model: nn.Module, x: Tensor, y: Tensor, epoch: float, out: Path) -> None:
    """Print what calls take at their defaults; the first also pays for what Python imports on its way."""
    small = x[:64], y[:64]
    for name in names:
        CALLS[name](model, *small, out / "few")
        _, cpu, wall = timed(lambda name=name: CALLS[name](model, x, y, out))
        print(f"{name}: {cpu:.1f} s of CPU time, {wall:.1f} s, {cpu / epoch:.1f} plain epochs", flush=True)


def main() -> None:
    """Print the table."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--data", type=Path, default=None, help="folder with CIFAR-10")
    arguments.add_argument("--large", action="store_true", help="50,000 images, 291 k parameters")
    arguments.add_argument("--stride", type=int, default=2, help="of the ResNet's first convolution: 1 or 2")
    arguments.add_argument("--limit", type=int, default=None, help="so many images")
    arguments.add_argument("--epochs", type=int, default=3)
    arguments.add_argument("--exact", action="store_true", help="all outputs, all pairs")
    arguments.add_argument("--calls", nargs="+", choices=CALLS, help="single calls at their defaults")
    arguments.add_argument("--classes", type=int, default=10, help="of the ResNet")
    arguments.add_argument("--profile", action="store_true")
    arguments.add_argument("--out", type=Path, default=Path("out/analyze"))
    given = arguments.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore", lw.ReadoutNotice)
    x, y = load(given, given.limit or (50_000 if given.large else 3_000))
    model = convolutional() if given.large else small_resnet(given.stride, given.classes)
    p = sum(parameter.numel() for parameter in model.parameters())
    epoch = train(model, x, y, given.epochs)
    print(f"{platform.machine()}, one thread, torch {torch.__version__}; {len(x):,} images, {p:,} parameters")
    print(f"a plain training epoch: {epoch:.2f} s of CPU time\n")
    shutil.rmtree(given.out, ignore_errors=True)
    if given.calls:
        measure_calls(given.calls, model, x, y, epoch, given.out)
        return
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    plan, cpu, wall = timed(lambda: plan_run(lw.Network(model), (x, y), None, 2**31, exact=given.exact))
    print(f"plan: {cpu:.2f} s of CPU time, {wall:.2f} s\n  {plan}\n")
    profile = cProfile.Profile() if given.profile else None
    run = lambda: lw.analyze(model, (x, y), out=given.out, exact=given.exact)  # noqa: E731
    found, cpu, wall = timed(run if profile is None else lambda: profile.runcall(run))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print("| stage | CPU seconds | plain epochs |\n|---|---|---|")
    stages: dict[str, float] = {}
    for name, stage in found.manifest["stages"].items():
        kind = name.split("-")[0]
        stages[kind] = stages.get(kind, 0.0) + stage["cpu_seconds"]
    for name, seconds in [*stages.items(), ("all else", cpu - sum(stages.values())), ("whole run", cpu)]:
        print(f"| {name} | {seconds:.2f} | {seconds / epoch:.2f} |")
    print(f"\n{wall:.1f} s in all; peak memory {after:.2f} GiB, {before:.2f} before")
    print(found, found.manifest["approximations"])
    if profile is not None:
        pstats.Stats(profile).sort_stats("cumulative").print_stats(70)


if __name__ == "__main__":
    main()
