"""The stages of a run: each computed once, kept in the run's folder, and followed by the tables.

From sketches the gradients are kept shard by shard, each a stage of its own, and compared with the exact on a few.
"""

from collections.abc import Iterator
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from likewise.checks import check_integer
from likewise.engines import PartsChangedError
from likewise.gram import GramMatrix, PairSource
from likewise.gram.sketches import (
    Sketch,
    Sketched,
    Sketches,
    bucket_count,
    measure_error,
    sketch_rows,
    whiten_sketches,
)
from likewise.runs.columns import Request, Results, Targets, pair_statistics, pass_statistics, umap_layout
from likewise.runs.store import Arrays, RunStore
from likewise.runs.tables import Shown, refuse_mismatch, user_columns, write_tables
from likewise.statistics.label_issues import margins_of
from likewise.statistics.targets import model_outputs
from likewise.watch import Watch

MOST_MULTIPLICATIONS = 1e13  # of exact pairs: some minutes on two cores
WIDTH = 1024  # numbers per sample of a sketch
SHARD = 4096  # samples
SEED = 0


def sketch_width(gram: GramMatrix, sketch: int | Literal["auto", "never"]) -> int:
    """Return how many numbers a sketch has per sample, 0 where gradients are compared as they are."""
    if isinstance(sketch, str) and sketch == "never":
        return 0
    if not isinstance(sketch, str) or sketch != "auto":
        return check_integer("sketch", sketch, 16, 2**20, "numbers a sample, or 'auto' or 'never'")
    multiplications = float(gram.shape[0]) ** 2 * gram.d * sum(gram.net.numels.values())
    return WIDTH if multiplications > MOST_MULTIPLICATIONS else 0


def run_stages(
    folder: RunStore,
    gram: GramMatrix,
    labels: Tensor | None,
    shown: Shown,
    watch: Watch | None = None,
    outputs: Tensor | None = None,
) -> None:
    """Compute what is not there yet, and write the tables; `outputs`: the model's, where they are known."""
    options, n = folder.state["options"], gram.shape[0]
    targets = Targets(labels, _outputs(folder, gram, outputs))
    refuse_mismatch(shown, targets, n)
    margins = None if watch is None else _margins(watch, targets)
    added = user_columns(shown.extra, n)
    source: PairSource
    if options["sketch"]:
        found, source = _sketched_statistics(folder, gram, options["sketch"], SEED)
    else:
        found, source = _exact_statistics(folder, gram)
    request = Request(n, min(options["neighbors"], n - 1), options["threshold"], targets, SEED)
    found |= folder.stage("pairs", lambda: pair_statistics(source, request))
    found["layout"] = found["coordinates"][:, :2]
    if options["layout"] == "umap":
        found |= folder.stage("umap", lambda: {"layout": torch.tensor(umap_layout(found, SEED))})
    write_tables(folder, gram.data, Results(found, targets, margins), shown, added)


def _outputs(folder: RunStore, gram: GramMatrix, known: Tensor | None) -> Tensor:
    """Return what the model says, whatever the readout compares."""
    stage = folder.stage("outputs", lambda: {"outputs": model_outputs(gram) if known is None else known})
    return torch.tensor(stage["outputs"])


def _margins(watch: Watch, targets: Targets) -> Tensor:
    if targets.classes is None:
        raise ValueError("A record of training tells of labels that are classes: this data set has none.")
    return margins_of(watch, targets.classes)


def _exact_statistics(folder: RunStore, gram: GramMatrix) -> tuple[Arrays, PairSource]:
    gram = gram.with_feature_cache()  # gradients that fit into memory serve sums and pairs
    found = folder.stage("passes", lambda: pass_statistics(gram))
    folder.state["approximations"] = []
    return found, gram


def _sketched_statistics(
    folder: RunStore, gram: GramMatrix, width: int, seed: int
) -> tuple[Arrays, Sketches]:
    """Return density and uncertainty, estimated, and the pairs of sketches."""
    n, q = gram.shape[0], bucket_count(width, gram.d)
    try:
        features, total = _gather_sketches(folder, gram, Sketch(q, seed))
    except PartsChangedError:  # a model that branches on its data: now all gradients come in the same parts
        folder.forget("sketch-")
        features, total = _gather_sketches(folder, gram, Sketch(q, seed))
    uncertainty = torch.zeros(n)
    for where, part in _sketch_shards(folder, gram, Sketch(q, seed)):
        moved = (part.rows.double() * total).sum((1, 2))
        uncertainty[where.start : where.stop] = torch.where(part.squares > 0, part.squares / moved, 0).float()
    error = folder.stage("error", lambda: _measure_error(gram, features))
    folder.state["approximations"] = [
        f"Gradients were projected at random to {gram.d * q} numbers a sample. On {int(error['samples'])} samples "
        f"compared both ways, a plain similarity is off by {float(error['all_pairs']):.3f} (root mean square), by "
        f"{float(error['similar_pairs']):.3f} among the most similar tenth of pairs. Density and uncertainty are "
        "estimates too."
    ]
    density = (features @ features.sum(0) / n).numpy()
    sketches = Sketches(features.to(gram.device), centered=gram.centered, max_memory=gram.max_memory)
    return {"density": density, "uncertainty": uncertainty.numpy()}, sketches


def _gather_sketches(folder: RunStore, gram: GramMatrix, sketch: Sketch) -> tuple[Tensor, Tensor]:
    """Return the whitened sketches of all samples, (n, d·q), and the sum of the plain ones, (d, q)."""
    features = torch.zeros(gram.shape[0], gram.d * sketch.q)
    total = torch.zeros(gram.d, sketch.q, dtype=torch.float64)
    for where, part in _sketch_shards(folder, gram, sketch):
        features[where.start : where.stop] = whiten_sketches(part)
        total += part.rows.double().sum(0)
    return features, total


def _sketch_shards(folder: RunStore, gram: GramMatrix, sketch: Sketch) -> Iterator[tuple[range, Sketched]]:
    """Yield the sketches of consecutive samples, made now or read from their stage."""
    bytes_per_sample = 4 * (gram.d * sketch.q + gram.d**2)
    with gram.net.evaluation_mode():
        parts = sketch.parts(gram.engine, gram.data.samples(range(1)))
    for number, where in enumerate(
        gram.data.spans(max(64, min(SHARD, gram.max_memory // 8 // bytes_per_sample)))
    ):
        found = folder.stage(f"sketch-{number:05}-{parts}", partial(_compute_shard, gram, sketch, where))
        yield where, Sketched(**{name: torch.tensor(values) for name, values in found.items()})


def _compute_shard(gram: GramMatrix, sketch: Sketch, where: range) -> dict[str, Tensor]:
    return sketch_rows(gram, sketch, where)._asdict()


def _measure_error(gram: GramMatrix, features: Tensor) -> dict[str, Tensor]:
    return {name: torch.tensor(value) for name, value in measure_error(gram, features)._asdict().items()}
