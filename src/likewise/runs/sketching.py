"""A run from sketches: made shard by shard, each a stage of its own, and compared with the exact on a few."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from likewise.gradients import PartsChanged
from likewise.gram import GramMatrix
from likewise.likeness import Likeness, SketchedLikeness
from likewise.likeness import sketched as sketches
from likewise.runs.folder import Arrays, Folder
from likewise.sketch import Sketch, Sketched, whitened, width_of

SHARD = 4096  # samples


def sketched(folder: Folder, gram: GramMatrix, width: int, seed: int) -> tuple[Arrays, Likeness]:
    """Return density and uncertainty, estimated, and the likeness of sketches."""
    n, q = gram.shape[0], width_of(width, gram.d)
    try:
        features, total = _gathered(folder, gram, Sketch(q, seed))
    except PartsChanged:  # a model that branches on its data: now all gradients come in the same parts
        folder.forget("sketch-")
        features, total = _gathered(folder, gram, Sketch(q, seed))
    uncertainty = torch.zeros(n)
    for where, part in _shards(folder, gram, Sketch(q, seed)):
        moved = (part.rows.double() * total).sum((1, 2))
        uncertainty[where.start : where.stop] = torch.where(part.squares > 0, part.squares / moved, 0).float()
    error = folder.stage("error", lambda: _error(gram, features))
    folder.state["approximations"] = [
        f"Gradients were made small: {gram.d * q} random numbers a sample. Of {len(error['places'])} samples "
        f"compared both ways, a similarity is off by {float(error['all']):.3f} (root mean square), by "
        f"{float(error['high']):.3f} among the most similar tenth of pairs. Density and uncertainty are "
        "estimates too."
    ]
    density = (features @ features.sum(0) / n).numpy()
    likeness = SketchedLikeness(features.to(gram.device), gram.max_memory)
    return {"density": density, "uncertainty": uncertainty.numpy()}, likeness


def _gathered(folder: Folder, gram: GramMatrix, sketch: Sketch) -> tuple[Tensor, Tensor]:
    """Return the whitened sketches of all samples, (n, d·q), and the sum of the plain ones, (d, q)."""
    features = torch.zeros(gram.shape[0], gram.d * sketch.q)
    total = torch.zeros(gram.d, sketch.q, dtype=torch.float64)
    for where, part in _shards(folder, gram, sketch):
        features[where.start : where.stop] = whitened(part)
        total += part.rows.double().sum(0)
    return features, total


def _shards(folder: Folder, gram: GramMatrix, sketch: Sketch) -> Iterator[tuple[range, Sketched]]:
    """Yield the sketches of consecutive samples, made now or read from their stage."""
    room = 4 * (gram.d * sketch.q + gram.d**2)
    with gram.net.evaluating():
        parts = sketch.parts(gram.gradients, gram.data.samples(range(1)))
    for number, where in enumerate(gram.data.spans(max(64, min(SHARD, gram.max_memory // 8 // room)))):
        found = folder.stage(f"sketch-{number:05}-{parts}", partial(_shard, gram, sketch, where))
        yield where, Sketched(**{name: torch.tensor(values) for name, values in found.items()})


def _shard(gram: GramMatrix, sketch: Sketch, where: range) -> dict[str, Tensor]:
    return sketches(gram, sketch, where)._asdict()


def _error(gram: GramMatrix, features: Tensor) -> dict[str, Tensor]:
    """Return how far sketched similarities are off, on some samples compared both ways."""
    n = gram.shape[0]
    places = torch.linspace(0, n - 1, min(n, 128)).long().unique()
    exact = GramMatrix(gram.net, gram.data.take(places.tolist()), max_memory=gram.max_memory).dense()
    exact, few = exact.cpu().double(), features[places].double()
    off, apart = (few @ few.T - exact).square(), ~torch.eye(len(places), dtype=torch.bool)
    if n == 1:
        return {"places": places, "all": off.new_zeros(()), "high": off.new_zeros(())}
    high = exact[apart] >= exact[apart].quantile(0.9)
    return {"places": places, "all": off[apart].mean().sqrt(), "high": off[apart][high].mean().sqrt()}
