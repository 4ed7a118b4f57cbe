"""The cost of a statistic, estimated from a dry run on a few samples.

The statistic runs on some samples and on twice as many, and each of its passes is extrapolated: passes over samples by
their number, visits of all pairs by the number of pairs and of gradient evaluations. No statistic needs a formula.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from likewise.data import Batches
from likewise.distributed import Clock, Pass, record_passes
from likewise.engines import Engine, MemoryMeter
from likewise.gram.products import Products
from likewise.gram.strips import Tiles
from likewise.model import Network


class Matrix(Protocol):
    """The part of GramMatrix that is used here."""

    net: Network
    data: Batches
    columns: Batches
    max_memory: int

    @property
    def of_network(self) -> bool: ...  # noqa: D102
    @property
    def engine(self) -> Engine: ...  # noqa: D102
    def products(self) -> Products: ...  # noqa: D102
    def tiles(self) -> Tiles: ...  # noqa: D102
    def take(self, n: int) -> "Matrix": ...  # noqa: D102


@dataclass(frozen=True)
class Plan:
    """The cost of a statistic, estimated from a dry run."""

    method: str  # the engine, and the network with its readout
    passes: int  # over the samples
    visits_of_pairs: int  # of all n × m pairs
    flops: float  # multiplications and additions of matrix products and convolutions
    peak_bytes: int  # of tensors, beside the model and the data
    seconds: float  # on this device, as busy as it is now
    batch: int  # samples of one batch

    def __str__(self) -> str:
        counts = [f"{self.passes} passes"] if self.passes else []
        counts += [f"all pairs {self.visits_of_pairs} times"] if self.visits_of_pairs else []
        return (
            f"about {_duration(self.seconds)}: {' and '.join(counts)} in batches of {self.batch}, "
            f"{self.flops / 1e12:.3g} TFLOP, at most about {self.peak_bytes / 2**20:,.0f} MiB; {self.method}"
        )


@dataclass(frozen=True)
class _DryRun:
    """The passes of a statistic on some samples, by seconds and by operations."""

    n: int
    m: int
    gradient_evaluations: int
    seconds: list[Pass]
    flops: list[Pass]
    peak: int
    result: int


def plan_statistic(gram: Matrix, statistic: Callable[..., Any], options: dict[str, Any]) -> Plan:
    """Return the estimated cost of `statistic(gram, **options)`."""
    _ = gram.engine  # set-up is no part of a batch
    batch = len(gram.products().spans(gram.data)[0])
    trial = min(batch, max(8, gram.data.n // 50))
    few = _dry_run(gram, statistic, options, trial)
    n, m, visits = gram.data.n, gram.columns.n, sum(p.what == "pairs" for p in few.seconds)
    enough = min(128, max(48, n // 12), max(1, n // 2))
    if visits and trial < enough:  # of fewer, the products of pairs do not show
        trial = enough
        few = _dry_run(gram, statistic, options, trial)
    more = _dry_run(gram, statistic, options, 2 * trial)
    gradient_evaluations = _gradient_evaluations(gram) if visits else 0
    seconds, flops = (
        sum(
            _extrapolate(a, b, few, more, n, m, gradient_evaluations)
            for a, b in zip(getattr(few, kind), getattr(more, kind), strict=True)
        )
        for kind in ("seconds", "flops")
    )
    growth = max(0, more.peak - few.peak) / max(1, more.n - few.n)
    reach = n if visits else min(batch, gram.engine.batch_size or batch)
    memory = gram.engine.memory
    batch_bytes = memory.fixed_bytes + memory.bytes_per_sample * min(batch, gram.engine.batch_size or 0)
    peak = max(few.peak + growth * (reach - few.n), batch_bytes) + more.result * n / more.n
    return Plan(
        method=f"engine {gram.engine.name}" + (f", {gram.net!r}" if gram.of_network else ""),
        passes=sum(p.what != "pairs" for p in more.seconds),
        visits_of_pairs=visits,
        flops=flops,
        peak_bytes=int(min(peak, gram.max_memory + more.result * n / more.n)),
        seconds=seconds,
        batch=batch,
    )


def _dry_run(gram: Matrix, statistic: Callable[..., Any], options: dict[str, Any], n: int) -> _DryRun:
    part = gram.take(n)
    cut = {name: _cut(value, gram, part) for name, value in options.items()}
    counter = FlopCounterMode(display=False)
    with counter, MemoryMeter() as meter, record_passes(counter.get_total_flops) as flops:
        returned = statistic(part, **cut)
        result = meter.now
    del returned
    with record_passes(_clock(gram.net)) as seconds:
        statistic(gram.take(n), **cut)  # a new part, which has nothing computed yet
    any_pairs = any(p.what == "pairs" for p in seconds)
    gradient_evaluations = _gradient_evaluations(part) if any_pairs else 0
    return _DryRun(part.data.n, part.columns.n, gradient_evaluations, seconds, flops, meter.peak, result)


def _cut(value: Any, gram: Matrix, part: Matrix) -> Any:
    """Return an option's entries for the dry run's rows or columns, if it has one for each."""
    if isinstance(value, Tensor) and value.dim():
        for whole, some in ((gram.data.n, part.data.n), (gram.columns.n, part.columns.n)):
            if len(value) == whole:
                return value[:some]
    return value


def _gradient_evaluations(gram: Matrix) -> int:
    return gram.tiles().gradient_evaluations


def _clock(net: Network) -> Clock:
    """Return a clock that waits for the device."""
    device = next(net.model.parameters()).device
    if device.type != "cuda":
        return time.perf_counter

    def now() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


def _extrapolate(
    few: Pass, more: Pass, small: _DryRun, large: _DryRun, n: int, m: int, gradient_evaluations: int
) -> float:
    """Return what a pass takes of all samples, given what it took of fewer and of more."""
    if more.what == "summing gradients":
        return more.cost * m / large.m
    if more.what != "pairs":
        return more.cost * n / large.n
    if large.n == small.n:
        return more.cost * (n * m) / (large.n * large.m)
    # cost = formed · gradient_evaluations + met · pairs, from two dry runs
    (a, b), (c, d) = (
        (small.gradient_evaluations, small.n * small.m),
        (large.gradient_evaluations, large.n * large.m),
    )
    det = a * d - b * c
    met = max(0.0, (a * more.cost - c * few.cost) / det) if det else 0.0
    formed = max(0.0, (more.cost - met * d) / c)
    return formed * gradient_evaluations + met * n * m


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
