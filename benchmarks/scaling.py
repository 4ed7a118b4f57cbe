"""How do time and memory grow with samples N, outputs d and parameters p? `python benchmarks/scaling.py`, two minutes.

Each point in a process of its own (forked after the imports), one CPU thread: CPU seconds of the second of two calls,
and peak memory above the model and the data. Results are added to results/scaling.jsonl; `--points` prints them only.
"""

import argparse
import datetime
import multiprocessing
import resource
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import records
import torch
from torch import Tensor, nn

import likewise as lw

MEMORY = 2**28  # max_memory of likewise
CHUNK = 64  # samples whose gradients torch.func forms at once


class Point(NamedTuple):
    """One network and data set."""

    n: int = 1000
    d: int = 1
    width: int = 16


AXES = {
    "N": [Point(n=n) for n in (500, 1000, 2000, 4000)],
    "d": [Point(d=d) for d in (1, 2, 4, 8)],
    "p": [Point(width=width) for width in (8, 16, 32, 64)],
}


def network(point: Point) -> nn.Module:
    w = point.width
    return nn.Sequential(
        nn.Conv2d(1, w, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(w, w, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(64 * w, point.d),
    )


def plain_epoch(model: nn.Module, x: Tensor) -> None:
    for batch in x.split(CHUNK):
        model(batch).sum().backward()


def soft_neighbors(model: nn.Module, x: Tensor) -> None:
    lw.soft_neighbors(lw.GramMatrix(lw.Network(model, readout=lw.all_outputs), x, max_memory=MEMORY))


def nearest(model: nn.Module, x: Tensor) -> None:
    lw.nearest(
        lw.GramMatrix(lw.Network(model, readout=lw.all_outputs), x, max_memory=MEMORY), k=10, sketch=None
    )


def by_torch_func(model: nn.Module, x: Tensor) -> Tensor:
    """N_S with torch.func: the same two passes, with whole gradients of 64 samples at a time."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def outputs(values: dict[str, Tensor], sample: Tensor) -> Tensor:
        return torch.func.functional_call(model, values, (sample[None],))[0]

    jacobian = torch.func.vmap(torch.func.jacrev(outputs), (None, 0))

    def rows(batch: Tensor) -> Tensor:
        parts = jacobian(parameters, batch)
        return torch.cat([part.flatten(2) for part in parts.values()], 2)  # (batch, d, p)

    def whiten(block: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(block @ block.mT)
        return vectors @ (values.rsqrt()[..., None] * (vectors.mT @ block))

    total = torch.stack([whiten(rows(batch)).sum(0) for batch in x.split(CHUNK)]).sum(0)
    return torch.cat([(whiten(rows(batch)) * total).sum((1, 2)) / len(total) for batch in x.split(CHUNK)])


WAYS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "plain training epoch": plain_epoch,
    "likewise: N_S, two passes": soft_neighbors,
    "likewise: nearest, all pairs": nearest,
    "torch.func: N_S, two passes": by_torch_func,
}


def measure(way: str, point: Point) -> dict[str, float]:
    """Measure in a process of its own: CPU seconds of the second call, peak MiB above the start."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    worker = context.Process(target=_measure, args=(theirs, way, point))
    worker.start()
    found: dict[str, float] = ours.recv()
    worker.join()
    return found


def _measure(pipe: Connection, way: str, point: Point) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, x = network(point).eval(), torch.randn(point.n, 1, 16, 16)
    model(x[:2])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(2):
        start = time.process_time()
        WAYS[way](model, x)
        seconds.append(time.process_time() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    p = sum(parameter.numel() for parameter in model.parameters())
    pipe.send({"seconds": round(seconds[-1], 4), "mebibytes": round((peak - before) / 1024, 1), "p": p})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", action="store_true", help="print, and write nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    out = records.FOLDER / "scaling.jsonl"
    for axis, points in AXES.items():
        for point in points:
            for way in WAYS:
                found = measure(way, point)
                print(axis, point, way, found, flush=True)
                if not given.points:
                    setting = {"axis": axis, "n": point.n, "d": point.d, "way": way}
                    today = datetime.date.today().isoformat()
                    versions = {"torch": torch.__version__, "likewise": lw.__version__}
                    records.add(out, setting | {"p": found["p"]}, **found, date=today, versions=versions)


if __name__ == "__main__":
    main()
