"""What a run would take, from a dry run on a few samples."""

import time
from typing import Any, NamedTuple

import torch

from likewise.data import batches
from likewise.gram import GramMatrix
from likewise.gram.sketches import Sketch, Sketches, bucket_count, sketch_bytes
from likewise.model import Network
from likewise.runs.columns import Request, Targets, pair_statistics
from likewise.runs.stages import sketch_width
from likewise.statistics.neighbors import nearest
from likewise.statistics.uncertainty import uncertainty


class RunPlan(NamedTuple):
    """What a run would take."""

    samples: int
    outputs: int
    parameters: int
    sketch: int  # numbers a sample; 0: exact
    seconds: float
    peak_bytes: int  # beside the model and the data


def plan_run(net: Network, dataset: Any, labels: Any, max_memory: int) -> RunPlan:
    """Return what `analyze` would take; nothing is written."""
    data = batches(dataset, labels=labels)
    gram = GramMatrix(net, data, max_memory=max_memory)
    d, p, width = gram.d, sum(net.numels.values()), sketch_width(gram, "auto")
    if not width:
        parts = [gram.plan(), gram.plan(uncertainty), gram.plan(nearest)]
        seconds = sum(part.seconds for part in parts)
        return RunPlan(data.n, d, p, 0, seconds, max(part.peak_bytes for part in parts))
    q = bucket_count(width, d)
    gradients, sketch = gram.engine, Sketch(q, 0)
    few = min(data.n, gradients.batch_size or 32, 64)
    with net.evaluation_mode():
        samples = data.samples(range(few))
        size = sketch_bytes(gradients, samples)
        sketch(gradients, samples)
        start = time.perf_counter()
        sketch(gradients, samples)
        each = (time.perf_counter() - start) / few
    pairs = _seconds_of_pairs(data.n, d * q)
    peak = 8 * data.n * d * q + min(max_memory, few * size + max_memory // 4)
    return RunPlan(data.n, d, p, d * q, each * data.n + pairs, peak)


def _seconds_of_pairs(n: int, width: int) -> float:
    """Return what all pairs of sketches would take, from those of a few."""
    few = min(n, 4096)
    chance = torch.Generator().manual_seed(0)
    features = torch.nn.functional.normalize(torch.randn(few, width, generator=chance), dim=1)
    start = time.perf_counter()
    targets = Targets(torch.zeros(few, dtype=torch.long), torch.zeros(few, 2))
    pair_statistics(Sketches(features), Request(few, min(10, few - 1), 0.5, targets, 0))
    return (time.perf_counter() - start) * (n / few) ** 2
