"""A run from sketches: built shard by shard, each a stage of its own, and compared with the exact on a few."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from likewise.engines import PartsChangedError
from likewise.gram import GramMatrix
from likewise.gram.sketches import (
    Sketch,
    Sketched,
    Sketches,
    bucket_count,
    measure_error,
    sketch_rows,
    whiten_sketches,
)
from likewise.runs.store import Arrays, RunStore

SHARD = 4096  # samples


def sketched_statistics(folder: RunStore, gram: GramMatrix, width: int, seed: int) -> tuple[Arrays, Sketches]:
    """Return density and uncertainty, estimated, and the pairs of sketches."""
    n, q = gram.shape[0], bucket_count(width, gram.d)
    try:
        features, total = _gathered(folder, gram, Sketch(q, seed))
    except PartsChangedError:  # a model that branches on its data: now all gradients come in the same parts
        folder.forget("sketch-")
        features, total = _gathered(folder, gram, Sketch(q, seed))
    uncertainty = torch.zeros(n)
    for where, part in _shards(folder, gram, Sketch(q, seed)):
        moved = (part.rows.double() * total).sum((1, 2))
        uncertainty[where.start : where.stop] = torch.where(part.squares > 0, part.squares / moved, 0).float()
    error = folder.stage("error", lambda: _error(gram, features))
    folder.state["approximations"] = [
        f"Gradients were projected at random to {gram.d * q} numbers a sample. On {int(error['samples'])} samples "
        f"compared both ways, a plain similarity is off by {float(error['all_pairs']):.3f} (root mean square), by "
        f"{float(error['similar_pairs']):.3f} among the most similar tenth of pairs. Density and uncertainty are "
        "estimates too."
    ]
    density = (features @ features.sum(0) / n).numpy()
    sketches = Sketches(features.to(gram.device), centered=gram.centered, max_memory=gram.max_memory)
    return {"density": density, "uncertainty": uncertainty.numpy()}, sketches


def _gathered(folder: RunStore, gram: GramMatrix, sketch: Sketch) -> tuple[Tensor, Tensor]:
    """Return the whitened sketches of all samples, (n, d·q), and the sum of the plain ones, (d, q)."""
    features = torch.zeros(gram.shape[0], gram.d * sketch.q)
    total = torch.zeros(gram.d, sketch.q, dtype=torch.float64)
    for where, part in _shards(folder, gram, sketch):
        features[where.start : where.stop] = whiten_sketches(part)
        total += part.rows.double().sum(0)
    return features, total


def _shards(folder: RunStore, gram: GramMatrix, sketch: Sketch) -> Iterator[tuple[range, Sketched]]:
    """Yield the sketches of consecutive samples, made now or read from their stage."""
    room = 4 * (gram.d * sketch.q + gram.d**2)
    with gram.net.evaluation_mode():
        parts = sketch.parts(gram.engine, gram.data.samples(range(1)))
    for number, where in enumerate(gram.data.spans(max(64, min(SHARD, gram.max_memory // 8 // room)))):
        found = folder.stage(f"sketch-{number:05}-{parts}", partial(_shard, gram, sketch, where))
        yield where, Sketched(**{name: torch.tensor(values) for name, values in found.items()})


def _shard(gram: GramMatrix, sketch: Sketch, where: range) -> dict[str, Tensor]:
    return sketch_rows(gram, sketch, where)._asdict()


def _error(gram: GramMatrix, features: Tensor) -> dict[str, Tensor]:
    return {name: torch.tensor(value) for name, value in measure_error(gram, features)._asdict().items()}
