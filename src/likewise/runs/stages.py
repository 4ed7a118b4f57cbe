"""The stages of a run: each computed once, kept in the run's folder, and followed by the tables.

From sketches the gradients are kept shard by shard, each a stage of its own, and compared with the exact on a few.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from likewise.distributed import (
    alone,
    as_one_process,
    join_results,
    on_first_rank,
    only_part,
    world_size,
)
from likewise.engines import EngineName
from likewise.gram import GramMatrix, PairSource
from likewise.gram.last_layer import Features, LastLayer, last_layer_features
from likewise.gram.matrix import dataset_outputs, retry_changed_parts
from likewise.gram.sketches import (
    Sketch,
    Sketched,
    SketchError,
    Sketches,
    bucket_count,
    measure_error,
    similarity_error,
    sketch_rows,
    whiten_sketches,
)
from likewise.identity import read_data
from likewise.index.build import keep_sketches
from likewise.index.projection import SampleReader
from likewise.index.store import IndexFolder
from likewise.progress import announce
from likewise.readouts import Readout, all_outputs, projected_outputs, readout_name, reads_text
from likewise.runs.columns import (
    PASS_ARRAYS,
    Request,
    Results,
    Targets,
    complete_pairs,
    pair_arrays,
    pair_statistics,
    pass_statistics,
    sample_columns,
    strip_arrays,
    visit_pairs,
)
from likewise.runs.layout import LAYOUTS
from likewise.runs.neighbors import NeighborLists, compute_passages, describe_reranking, rerank_neighbors
from likewise.runs.store import Arrays, RunStore
from likewise.runs.tables import Shown, refuse_mismatch, user_columns, write_tables
from likewise.statistics.crossval import CrossValidated
from likewise.statistics.label_issues import (
    ROUNDS,
    OpinionAfter,
    margins_of,
    opinion_after,
    validated_for,
)
from likewise.statistics.novelty import NEIGHBORS, closest_others
from likewise.statistics.reheat import Reheated
from likewise.statistics.reheat import reheat as reheat_network
from likewise.statistics.shared_words import TokenInput, find_token_input, resemblance_of_texts
from likewise.statistics.targets import model_outputs
from likewise.watch import Watch
from likewise.wording import counted

SHARDS = 64  # of a run, as far as shards are neither tiny nor huge
SMALLEST_SHARD, LARGEST_SHARD = 256, 4096  # samples
SHARD_BYTES = 2**30
COMPARED = 24  # samples on which the error is measured, of at most a twentieth of the cost of the sketches
FEW_ROWS = 2**28  # bytes of gradients that are formed as they are: no engine needs to be set up
MOST_REFERENCE_OUTPUTS = 32  # that the error is measured against
SEED = 0
INDEX_FOLDER = "index"


def run_stages(
    folder: RunStore,
    gram: GramMatrix,
    labels: Tensor | None,
    shown: Shown,
    watch: Watch | None = None,
    outputs: Tensor | None = None,
    is_classifier: bool = True,
    keep_index: bool = False,
    settings: str | None = None,
    reheat: bool = False,
    crossval: CrossValidated | None = None,
    parts: int = 0,
    features: Features | None = None,
    words: bool = True,
) -> None:
    """Compute what is not there yet, and write the tables.

    `outputs`: the model's, where they are known; `is_classifier`: whether they may be those of classes; `keep_index`:
    whether sketches stay as an index, with the `settings` of a command; `reheat`: whether labels are also judged by
    reheated copies of a memorized network; `crossval`: what networks that have not seen the samples say; `parts`: how
    many parts of the pairs were adopted; `features`: what the last layer sees, where that is known; `words`: whether
    labels of texts are also judged by the words that texts share.
    """
    options, n = folder.state["options"], gram.shape[0]
    reader: _OutputReader | None = None
    if outputs is None and reads_on_the_way(options["sketch"], is_classifier) and folder.missing(["outputs"]):
        reader = _OutputReader(gram)
    known = _outputs(folder, gram, outputs, is_classifier) if reader is None else reader.first_outputs()
    targets = Targets(labels, known, is_classifier, reads_text(gram.net.readout))
    refuse_mismatch(shown, targets, n)  # before anything takes long, as far as a few outputs tell
    margins = None if watch is None else _margins(watch, targets)
    validated = None if crossval is None else _validated(crossval, targets)
    added = user_columns(shown.extra, n)
    source: PairSource
    announce("computing gradients")
    if options["sketch"]:
        found, source, sketches = _sketched_statistics(folder, gram, options["sketch"], SEED, reader)
    else:
        found, source = _exact_statistics(folder, gram)
    if reader is not None:
        outputs, features = reader.found()
        targets = replace(targets, outputs=_outputs(folder, gram, outputs, is_classifier))
        refuse_mismatch(shown, targets, n)
    seen = _features(folder, gram, features)
    request = Request(n, min(options["neighbors"], n - 1), options["threshold"], targets, SEED)
    announce("comparing all pairs")
    compare = partial(_add_parts, folder, parts) if parts else partial(_compare_pairs, source)
    shared = not parts and _has_independent_strips(source)
    found |= folder.stage("pairs", lambda: compare(request), shared=shared, arrays=pair_arrays())
    if options["sketch"] and keep_index:
        _keep_index(folder, gram, sketches, targets, seen, found["closeness"], shown, settings)
    found |= _feature_statistics(folder, gram, seen)
    found["layout"] = found["coordinates"][:, :2]
    if options["layout"] in LAYOUTS:
        announce("drawing the map")
        found |= folder.stage(f"layout-{options['layout']}", lambda: _layout(found, options["layout"]))
    after = _reheat(folder, gram, targets, found["votes"]) if reheat else None
    tokens = find_token_input(gram)  # every rank: a sharded network needs all
    resemblance = _resemblance(folder, gram, targets, tokens) if words else None
    announce("writing tables and pictures")
    results = Results(found, targets, margins, after, validated, watch, resemblance)

    near = NeighborLists(found["indices"], found["similarities"], np.full(n, not options["sketch"]))
    passages = None
    if "passages" in options:
        shown_first = np.argsort(-sample_columns(results)["novelty"], kind="stable")[: options["passages"]]
        if isinstance(source, Sketches):
            near = _exact_neighbors(folder, gram, source, shown_first, near)
        passages = _passages(folder, gram, shown_first, near)

    def write() -> None:
        path = folder.path / INDEX_FOLDER
        index = IndexFolder.open(path, verify=False) if keep_index and options["sketch"] else None
        write_tables(folder, gram.data, results, near, shown, added, index, passages, tokens)

    on_first_rank(write, "the tables")


def run_part(
    folder: RunStore,
    gram: GramMatrix,
    labels: Tensor | None,
    part: tuple[int, int],
    outputs: Tensor | None,
    features: Features | None,
    is_classifier: bool,
) -> None:
    """Compute part i of n of a run: sketches and outputs of some samples, or some strips of exact pairs.

    `outputs`: the model's of all samples, for exact pairs; `features`: what its last layer sees of them.
    """
    options, n = folder.state["options"], gram.shape[0]
    announce("computing gradients")
    if options["sketch"]:

        def compute() -> dict[str, range]:
            sketch = Sketch(bucket_count(options["sketch"], gram.d), SEED)
            shards = dict(_share(list(name_shards(gram, sketch).items()), part))
            compute_shards(folder, gram, sketch, shards)
            return shards

        for name, where in _retry_changed_parts(folder, gram, compute).items():
            folder.stage(described_name(name), partial(_describe_samples, gram, where, is_classifier))
        return
    known = _outputs(folder, gram, outputs, is_classifier)
    targets = Targets(labels, known, is_classifier, reads_text(gram.net.readout))
    _features(folder, gram, features)
    _, source = _exact_statistics(folder, gram)
    request = Request(n, min(options["neighbors"], n - 1), options["threshold"], targets, SEED)
    announce("comparing all pairs")
    if _has_independent_strips(source):
        strips = partial(_compare_strips, source, request, part)
        folder.stage(pairs_name(*part), strips, shared=True, arrays=strip_arrays())
    elif part[0] == 1:  # so few pairs that one process does all of them
        folder.stage("pairs", lambda: _compare_pairs(source, request), arrays=pair_arrays())


def pairs_name(i: int, n: int) -> str:
    """Return the name of the stage of part i of n of the pairs."""
    return f"pairs-{i}-of-{n}"


def described_name(shard: str) -> str:
    """Return the name of the stage that tells of the samples of a shard: their fingerprint and outputs."""
    return shard.replace("sketch-", "samples-", 1)


def _describe_samples(gram: GramMatrix, where: range, is_classifier: bool) -> dict[str, Tensor]:
    some = copy.copy(gram)
    some.data = gram.data.take(where)
    outputs = model_outputs(some) if is_classifier else dataset_outputs(some.net, some.data).cpu()
    return {
        **_compute_features(some)._asdict(),
        "outputs": outputs,
        "data": torch.tensor(list(read_data(some.data)[0].encode()), dtype=torch.uint8),
    }


def _share(items: list[Any], part: tuple[int, int]) -> list[Any]:
    """Return part i of n of a list."""
    i, n = part
    return items[(i - 1) * len(items) // n : i * len(items) // n]


def _compare_strips(source: PairSource, request: Request, part: tuple[int, int]) -> dict[str, Tensor]:
    with as_one_process(), only_part("pairs", *part):
        return visit_pairs(source, request)


def _add_parts(folder: RunStore, parts: int, request: Request) -> dict[str, Tensor]:
    """Return what parts found of the pairs: each has zeros in the rows of the others."""
    total: dict[str, Tensor] = {}
    for i in range(1, parts + 1):
        found = folder.read_stage(pairs_name(i, parts))
        for name, values in found.items():
            term = torch.tensor(values)
            total[name] = term if name not in total else total[name] + term
    return complete_pairs(total, request)


def _compare_pairs(source: PairSource, request: Request) -> dict[str, Tensor]:
    with as_one_process():
        return pair_statistics(source, request)


def _has_independent_strips(source: PairSource) -> bool:
    """Whether ranks can share the strips; where pairs are so few that the matrix is mirrored, one rank does them."""
    return not (isinstance(source, GramMatrix) and source.tiles().fills_matrix)


def _keep_index(
    folder: RunStore,
    gram: GramMatrix,
    sketches: Tensor,
    targets: Targets,
    features: Features | None,
    closeness: np.ndarray,
    shown: Shown,
    settings: str | None,
) -> None:
    """Write the sketches as an index; nothing of an index that is there is written again."""
    announce("keeping the index")
    write = partial(
        keep_sketches,
        gram,
        sketches,
        bucket_count(folder.state["options"]["sketch"], gram.d),
        SEED,
        folder.path / INDEX_FOLDER,
        outputs=targets.outputs,
        features=features,
        closeness=torch.tensor(closeness),
        classes=shown.classes,
        names=shown.names,
        show=shown.show,
        excerpt_length=shown.excerpt_length,
        settings=settings,
    )
    on_first_rank(write, "the index")


def _layout(found: Arrays, name: str) -> dict[str, Tensor]:
    """Return where samples are on the map, from their neighbors."""
    places = LAYOUTS[name](found["indices"], found["similarities"], found["coordinates"], SEED)
    return {"layout": torch.tensor(places)}


def _outputs(folder: RunStore, gram: GramMatrix, known: Tensor | None, is_classifier: bool) -> Tensor:
    """Return the model's outputs, whatever the readout compares; of a text, or too many to keep, what it selects."""

    def compute() -> Tensor:
        if known is not None:
            return known
        return model_outputs(gram) if is_classifier else dataset_outputs(gram.net, gram.data)

    return torch.tensor(folder.stage("outputs", lambda: {"outputs": compute()}, shared=True)["outputs"])


def reads_on_the_way(sketch: int, is_classifier: bool) -> bool:
    """Whether outputs are read on the way of the pass that sketches gradients, rather than by one of their own."""
    return bool(sketch) and is_classifier and world_size() == 1


class _OutputReader:
    """Outputs of samples, and what the last layer sees of them, read on the way of the pass that sketches them."""

    def __init__(self, gram: GramMatrix) -> None:
        self._gram, self._few = gram, range(min(2, gram.data.n))
        self._reader = SampleReader(gram.net, gram.data.samples(self._few))
        self._found: dict[range, tuple[Tensor, Features | None]] = {}

    def first_outputs(self) -> Tensor:
        """Return the outputs of a few samples, by a pass of their own."""
        some = copy.copy(self._gram)
        some.data = self._gram.data.take(self._few)
        return model_outputs(some)

    def observing(self) -> AbstractContextManager[None]:
        """Read what the passes over samples come by."""
        return self._reader.observing(self._gram.net)

    def collect(self, where: range) -> None:
        """Store what was read of the samples at these places, which were sketched just now."""
        kept = self._reader.take_kept(self._gram.data.ids[where.start : where.stop])
        if kept is not None:
            self._found[where] = kept

    def found(self) -> tuple[Tensor | None, Features | None]:
        """Return outputs and features of all samples; None where a run that was stopped has sketched some of them."""
        places = sorted(self._found, key=lambda where: where.start)
        if sum(map(len, places)) != self._gram.data.n:
            return None, None
        outputs, features = zip(*(self._found[where] for where in places), strict=True)
        known = [part for part in features if part is not None]
        whole = len(known) == len(features)
        return torch.cat(outputs), Features(*map(torch.cat, zip(*known, strict=True))) if whole else None


def find_last_layer(gram: GramMatrix) -> LastLayer | None:
    """Return the last layer of the model, if its inputs can be read."""
    return LastLayer.find(gram.net, gram.data.samples(range(min(2, gram.data.n))))


def _compute_features(gram: GramMatrix) -> Features:
    """Return what the last layer sees of the rows, from a forward pass; of no width where there is no such layer."""
    layer = find_last_layer(gram)
    if layer is None:
        return Features(torch.zeros(gram.data.n, 0), torch.zeros(gram.data.n))
    return last_layer_features(layer, gram.net, gram.data)


def _features(folder: RunStore, gram: GramMatrix, known: Features | None) -> Features | None:
    """Return what the last layer sees of all samples; None where there is no such layer."""

    def compute() -> dict[str, Tensor]:
        return (_compute_features(gram) if known is None else known)._asdict()

    found = folder.stage("features", compute, shared=True)
    features = Features(*(torch.tensor(found[name]) for name in Features._fields))
    return features if features.directions.shape[1] else None


def _feature_statistics(folder: RunStore, gram: GramMatrix, features: Features | None) -> Arrays:
    """Return the novelty of samples by features, each left out, and their lengths; nothing without features."""
    n = gram.shape[0]
    if features is None or n < 2:
        return {}
    directions = features.directions.to(gram.device)

    def compute() -> dict[str, Tensor]:
        near = closest_others(directions, min(NEIGHBORS, n - 1))
        return {"feature_novelty": 1 - near.cpu(), "feature_length": features.lengths}

    return folder.stage("feature-novelty", compute)


def _reheat(folder: RunStore, gram: GramMatrix, targets: Targets, votes: np.ndarray) -> OpinionAfter | None:
    """Return what reheated copies of the network say of the labels, None where there is nothing to heat."""
    classes = targets.classes
    if classes is None:
        raise ValueError("Reheating is for labels that are classes: this data set has none.")

    def compute() -> dict[str, Tensor]:
        announce("reheating copies of the network")
        hot = reheat_network(gram.net, gram.data, labels=classes, votes=torch.tensor(votes), rounds=ROUNDS)
        found = {"note": torch.tensor(list(_describe_reheating(hot).encode("utf-8")), dtype=torch.uint8)}
        if hot.skipped:
            return found
        opinion = opinion_after(gram, hot, sketch=folder.state["options"]["sketch"] or None)._asdict()
        return found | {name: value for name, value in opinion.items() if value is not None}

    found = {name: torch.tensor(value) for name, value in folder.stage("reheat", compute).items()}
    folder.state["reheated"] = bytes(found.pop("note").tolist()).decode("utf-8")
    announce(folder.state["reheated"])
    return OpinionAfter(**{"chances": None, **found}) if found else None  # type: ignore[arg-type]


def _resemblance(
    folder: RunStore, gram: GramMatrix, targets: Targets, tokens: TokenInput | None
) -> Tensor | None:
    """Return how much each text resembles each class by its words; None if inputs are not texts or have no classes."""
    classes = targets.classes
    if classes is None or tokens is None:
        return None

    def compute() -> dict[str, Tensor]:
        with alone():
            return {"resemblance": resemblance_of_texts(gram.data, tokens, classes)}

    return torch.tensor(folder.stage("words", compute)["resemblance"])


def _exact_neighbors(
    folder: RunStore, gram: GramMatrix, sketches: Sketches, samples: np.ndarray, near: NeighborLists
) -> NeighborLists:
    """Return neighbors, of some samples by exact gradients of the candidates that sketches found."""

    def compute() -> dict[str, Tensor]:
        with alone():
            return rerank_neighbors(gram, sketches, samples, near.indices.shape[1])

    found = folder.stage("exact-neighbors", compute)
    folder.state["approximations"] = [*folder.state["approximations"], describe_reranking(found)]
    return near.with_exact(found)


def _passages(folder: RunStore, gram: GramMatrix, samples: np.ndarray, near: NeighborLists) -> Arrays:
    """Return what tokens of neighbors contribute to the similarities of some texts."""

    def compute() -> dict[str, Tensor]:
        with alone():
            return compute_passages(gram, samples, near.indices)

    return folder.stage("passages", compute)


def _describe_reheating(hot: Reheated) -> str:
    if hot.skipped:
        return f"Not reheated: {hot.skipped}."
    return (
        f"Reheated {counted(len(hot.rounds), 'time')} at a learning rate of {hot.learning_rate:.1e}, "
        f"{hot.epochs:.1f} epochs in "
        f"{hot.seconds:,.0f} s: training accuracy fell from {hot.accuracy_before:.1%} to {hot.accuracy_after:.1%}."
    )


def _validated(crossval: CrossValidated, targets: Targets) -> CrossValidated:
    if targets.classes is None:
        raise ValueError("A cross-validation tells of labels that are classes: this data set has none.")
    return validated_for(crossval, targets.classes)


def _margins(watch: Watch, targets: Targets) -> Tensor:
    if targets.classes is None:
        raise ValueError("A record of training tells of labels that are classes: this data set has none.")
    return margins_of(watch, targets.classes)


def _exact_statistics(folder: RunStore, gram: GramMatrix) -> tuple[Arrays, PairSource]:
    gram = gram.with_feature_cache()  # gradients that fit into memory serve sums and pairs

    def passes() -> dict[str, Tensor]:
        with alone():  # sums over ranks would be rounded otherwise, and centering needs them on all
            return pass_statistics(gram)

    found = folder.stage("passes", passes, shared=True, arrays=PASS_ARRAYS)
    folder.state["approximations"] = []
    if _stands_in(gram):
        error = folder.stage("error", lambda: _measure_readout_error(gram))
        folder.state["approximations"] = [
            f"Gradients{_replaced_outputs(gram)} were compared. On {counted(int(error['samples']), 'sample')} compared "
            f"{_reference_name(gram)}, a plain similarity is off by {float(error['all_pairs']):.3f} (root mean "
            f"square), by {float(error['similar_pairs']):.3f} among the most similar tenth of pairs."
        ]
    return found, gram


def _measure_readout_error(gram: GramMatrix) -> dict[str, Tensor]:
    """Return how far similarities of few combinations of outputs are off from those of all, or of more."""
    count = _compared(gram)
    few, reference = gram.with_centering(False).take(count), _reference(gram).take(count)
    return _as_tensors(similarity_error(few.dense().cpu().double(), reference.dense().cpu().double()))


def _sketched_statistics(
    folder: RunStore, gram: GramMatrix, width: int, seed: int, reader: _OutputReader | None
) -> tuple[Arrays, Sketches, Tensor]:
    """Return density and uncertainty, estimated, the pairs of sketches, and the whitened sketches on the CPU."""
    n, q = gram.shape[0], bucket_count(width, gram.d)
    sketch = Sketch(q, seed)
    with nullcontext() if reader is None else reader.observing():
        shards, features, total = _retry_changed_parts(
            folder, gram, lambda: _gather_sketches(folder, gram, Sketch(q, seed), reader)
        )
    uncertainty = torch.zeros(n)
    for where, part in _read_shards(folder, gram, sketch, shards):
        moved = (part.rows.double() * total).sum((1, 2))
        uncertainty[where.start : where.stop] = torch.where(part.squares > 0, part.squares / moved, 0).float()
    announce("measuring the error on a few samples")
    error = folder.stage("error", lambda: _measure_error(gram, features))
    folder.state["approximations"] = [
        f"Gradients{_replaced_outputs(gram)} were projected at random to {gram.d * q} numbers a sample. On "
        f"{counted(int(error['samples']), 'sample')} compared {_reference_name(gram)}, a plain similarity is off by "
        f"{float(error['all_pairs']):.3f} (root mean square), by {float(error['similar_pairs']):.3f} among the most "
        "similar tenth of pairs. Density and uncertainty are estimates too."
    ]
    density = (features @ features.sum(0) / n).numpy()
    sketches = Sketches(features.to(gram.device), centered=gram.centered, max_memory=gram.max_memory)
    return {"density": density, "uncertainty": uncertainty.numpy()}, sketches, features


def _retry_changed_parts(folder: RunStore, gram: GramMatrix, compute: Callable[[], Any]) -> Any:
    """Return compute(), called again where a model branches on its data: then gradients come in the same parts."""
    return retry_changed_parts(gram.engine, compute, partial(folder.forget, "sketch-"))


def _gather_sketches(
    folder: RunStore, gram: GramMatrix, sketch: Sketch, reader: _OutputReader | None
) -> tuple[dict[str, range], Tensor, Tensor]:
    """Return the stages of sketches, the whitened ones of all samples, (n, d·q), and the sum of the plain, (d, q)."""
    shards = name_shards(gram, sketch)
    compute_shards(folder, gram, sketch, shards, reader)
    features = torch.zeros(gram.shape[0], gram.d * sketch.q)
    total = torch.zeros(gram.d, sketch.q, dtype=torch.float64)
    for where, part in _read_shards(folder, gram, sketch, shards):
        features[where.start : where.stop] = whiten_sketches(part)
        total += part.rows.double().sum(0)
    return shards, features, total


def _read_shards(
    folder: RunStore, gram: GramMatrix, sketch: Sketch, shards: Mapping[str, range]
) -> Iterator[tuple[range, Sketched]]:
    """Yield the sketches of consecutive samples from their stages; one that was damaged meanwhile is computed again."""
    for name, where in shards.items():
        found = folder.stage(name, partial(_compute_shard, gram, sketch, where), shared=True)
        yield where, Sketched(**{key: torch.tensor(values) for key, values in found.items()})


def name_shards(gram: GramMatrix, sketch: Sketch) -> dict[str, range]:
    """Return the names of the stages of sketches, and their samples: whole batches, the same on any machine."""
    with gram.net.evaluation_mode():
        parts = sketch.parts(gram.engine, gram.data.samples(range(1)))
    size, bytes_per_sample = gram.data.size, 4 * (gram.d * sketch.q + gram.d**2)
    rows = min(LARGEST_SHARD, max(SMALLEST_SHARD, -(-gram.data.n // SHARDS)))
    whole = min(-(-rows // size) * size, max(64, SHARD_BYTES // bytes_per_sample))
    return {
        f"sketch-{number:05}-{len(where)}-{parts}": where
        for number, where in enumerate(gram.data.spans(whole))
    }


def compute_shards(
    folder: RunStore,
    gram: GramMatrix,
    sketch: Sketch,
    shards: Mapping[str, range],
    reader: _OutputReader | None = None,
) -> None:
    """Compute the stages that are missing: each shard by one rank, as many at a time as there are ranks.

    `reader`: collects what the pass reads of the samples, where there is one rank.
    """
    missing = folder.missing(list(shards))
    for start in range(0, len(missing), world_size()):
        names = missing[start : start + world_size()]
        count = f", part {start + 1:,} of {len(missing):,}" if len(missing) > world_size() else ""
        block = _Block(gram, sketch, [shards[name] for name in names], f"sketches{count}")
        for number, name in enumerate(names):
            folder.stage(name, partial(block.shard, number), shared=True)
            if reader is not None:
                reader.collect(shards[name])


class _Block:
    """The sketches of some shards, shared by ranks when the first of them is asked for."""

    def __init__(self, gram: GramMatrix, sketch: Sketch, places: list[range], what: str) -> None:
        self._gram, self._sketch, self._what = gram, sketch, what
        stops = list(accumulate(len(where) for where in places))
        self._spans = [
            range(stop - len(where), stop) for stop, where in zip(stops, places, strict=True)
        ]  # in the block
        self._places = dict(zip(self._spans, places, strict=True))

    def shard(self, number: int) -> dict[str, Tensor]:
        """Return the sketches of one shard."""
        here = self._spans[number]
        return {
            name: part[here.start : here.stop]
            for name, part in zip(Sketched._fields, self._joined, strict=True)
        }

    @cached_property
    def _joined(self) -> tuple[Tensor, ...]:
        def compute(span: range) -> tuple[Tensor, ...]:
            with alone():
                return tuple(sketch_rows(self._gram, self._sketch, self._places[span], self._what))

        if len(self._spans) == 1:
            return compute(self._spans[0])
        return join_results(compute, self._spans, self._what, self._gram)


def _compute_shard(gram: GramMatrix, sketch: Sketch, where: range) -> dict[str, Tensor]:
    with alone():
        return sketch_rows(gram, sketch, where)._asdict()


def _measure_error(gram: GramMatrix, features: Tensor) -> dict[str, Tensor]:
    """Return how far sketches are off from exact similarities, of all outputs if a few combinations stand in."""
    if not _stands_in(gram):
        return _as_tensors(measure_error(gram, features, COMPARED))
    reference, count = _reference(gram), _compared(gram)
    return _as_tensors(measure_error(reference, features, count))


def _as_tensors(error: SketchError) -> dict[str, Tensor]:
    return {name: torch.tensor(value) for name, value in error._asdict().items()}


def _stands_in(gram: GramMatrix) -> bool:
    """Whether combinations of outputs were chosen in place of all outputs."""
    automatic = gram.net.automatic
    return automatic is not None and automatic.outputs > gram.d


def _reference(gram: GramMatrix) -> GramMatrix:
    """Return the matrix of all outputs, or of so many combinations that their error is small beside that of a few."""
    readout, d = _reference_readout(gram)
    row_bytes = 4 * d * sum(gram.net.numels.values()) * _compared(gram)
    engine: EngineName = "autograd" if row_bytes <= FEW_ROWS else "auto"
    return GramMatrix(gram.net.with_readout(readout), gram.data, engine=engine, max_memory=gram.max_memory)


def _reference_readout(gram: GramMatrix) -> tuple[Readout, int]:
    outputs = 0 if gram.net.automatic is None else gram.net.automatic.outputs
    if outputs <= MOST_REFERENCE_OUTPUTS:
        return all_outputs, outputs
    return projected_outputs(MOST_REFERENCE_OUTPUTS), MOST_REFERENCE_OUTPUTS


def _compared(gram: GramMatrix) -> int:
    """Return on how many samples few outputs are compared with more of them."""
    d = _reference_readout(gram)[1]
    return min(COMPARED, max(8, gram.shape[0] * gram.d // (20 * d)))


def _replaced_outputs(gram: GramMatrix) -> str:
    automatic = gram.net.automatic
    if automatic is None or not _stands_in(gram):
        return ""
    return f" of {readout_name(gram.net.readout)}, in place of {automatic.outputs:,} outputs,"


def _reference_name(gram: GramMatrix) -> str:
    reference = readout_name(_reference_readout(gram)[0]).replace("_", " ")
    return f"with exact gradients of {reference}" if _stands_in(gram) else "both ways"
