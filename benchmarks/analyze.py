"""How long and how much memory does a whole run take, from a model to the report?

50,000 real images (CIFAR-10, --data DIR or $LIKEWISE_DATA) and a convolutional net of 291,000 parameters with
ten outputs, on the machine's own threads: `python benchmarks/analyze.py --data DIR`.
"""

import argparse
import platform
import resource
import shutil
import time
from pathlib import Path

import torch
from images import data_folder, images
from torch import Tensor, nn

import likewise as lw


def net() -> nn.Module:
    def block(i: int, o: int) -> list[nn.Module]:
        return [nn.Conv2d(i, o, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(
        *block(3, 32),
        *block(32, 64),
        *block(64, 128),
        nn.Flatten(),
        nn.Linear(2048, 96),
        nn.ReLU(),
        nn.Linear(96, 10),
    )


def trained(x: Tensor, y: Tensor, epochs: int) -> nn.Module:
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(128):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return model.eval()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    data_folder(arguments)
    arguments.add_argument("--samples", type=int, default=50_000)
    arguments.add_argument("--epochs", type=int, default=3)
    arguments.add_argument("--out", type=Path, default=Path("out/analyze"))
    given = arguments.parse_args()
    x, y = images("cifar10", given.data, count=given.samples)
    print(
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch "
        f"{torch.__version__}"
    )
    start = time.perf_counter()
    model = trained(x, y, given.epochs)
    epoch = (time.perf_counter() - start) / given.epochs
    print(f"a plain training epoch of {len(x):,} samples: {epoch:.0f} s")
    shutil.rmtree(given.out, ignore_errors=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    start, cpu = time.perf_counter(), time.process_time()
    found = lw.analyze(model, (x, y), out=given.out)
    print(f"analyze: {time.perf_counter() - start:.0f} s, {time.process_time() - cpu:.0f} s of CPU time")
    print(
        f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB, {before:.2f} "
        "before"
    )
    print({name: round(stage["seconds"], 1) for name, stage in found.manifest["stages"].items()})
    for path in sorted(given.out.iterdir()):
        print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB")
    print(found, found.manifest["approximations"])


if __name__ == "__main__":
    main()
