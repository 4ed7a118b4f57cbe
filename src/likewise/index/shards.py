"""Build the shards of an index: fixed ranges of rows, so that one process, ranks and parts write the same files.

Each shard is written atomically and noted; a killed build resumes after the last noted shard.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from likewise import files
from likewise.data import Batches
from likewise.distributed import alone, rank, sum_results, world_size
from likewise.gram import GramMatrix, error_factors
from likewise.gram.last_layer import Features
from likewise.identity import DataRecord, read_data
from likewise.index.layers import dependent_buckets
from likewise.index.pairs import summarize
from likewise.index.pictures import PictureMaker, encode_pictures
from likewise.index.projection import LEAST_COMPARED, Projector, SampleReader, encode_outputs
from likewise.index.store import (
    IndexFolder,
    Shard,
    Sources,
    encode,
    join_sources,
    read_sources,
    refuse_foreign,
    remove_temporary,
    smallest_integers,
)
from likewise.locks import lock_folder
from likewise.readouts import reads_text
from likewise.statistics.targets import finite_labels

SHARDS = 64  # of a data set, as far as shards are neither tiny nor huge
SMALLEST, LARGEST = 64, 16384  # rows of a shard
BATCH = 256  # samples of a batch, where data come in none of their own
ORIGIN_SAMPLES = 64  # at least, whose mean sketch is the origin
COMPARED = 8  # samples by which data sets are told apart before all are read
BUILD = ("model", "readout", "parameters", "precision", "versions", "projection", "dtype", "pictures")


class Task:
    """Builds the shards of one data set.

    Args:
        folder: The folder to write to.
        projector: Computes sketches.
        data: The samples.
        maker: Computes pictures; None for no pictures.
        source_number: Number of the data set within the index.
        first_row: The row of its first sample.
        outputs: The model's outputs for all samples, if known.
        features: The inputs of its last layer, if outputs are known.
        closeness: (n,) mean plain similarity of each sample to its nearest others, if all pairs were compared.

    """

    def __init__(
        self,
        folder: IndexFolder,
        projector: Projector,
        data: Batches,
        maker: PictureMaker | None,
        *,
        source_number: int,
        first_row: int,
        outputs: Tensor | None = None,
        features: Features | None = None,
        closeness: Tensor | None = None,
    ) -> None:
        self.folder, self.projector, self.data = folder, projector, data
        self.closeness = closeness
        self.source_number, self.first_row = source_number, first_row
        self._maker = maker if maker is not None and maker.available else None
        self._reads_text = reads_text(projector.gram.net.readout)
        few = data.samples(range(min(2, data.n)))
        self._reader = SampleReader(projector.gram.net, few, outputs, features)
        self._compared = projector.compared(data.n)
        self._places = _spread_places(data.n, self._compared or ORIGIN_SAMPLES)  # sketched once for both
        self._some = projector.sketch_some(data, self._places)
        self.origin = self._some.mean(0).float()

    @property
    def digest(self) -> str:
        """Which build, data set and place shards belong to."""
        named = {name: value for name, value in self.folder.state.items() if name in BUILD}
        text = json.dumps(
            [named, describe_data(self.data), self.source_number, self.first_row], sort_keys=True
        )
        return hashlib.sha256(text.encode()).hexdigest()

    def reading_outputs(self) -> AbstractContextManager[None]:
        """Read outputs during the passes that form gradients; enter it while evaluating."""
        return self._reader.observing(self.projector.gram.net)

    def build_shard(self, where: range) -> Shard:
        """Compute and write the shard of the samples at these places, and note it."""
        sketches, dead, outputs, labels = [], [], [], []
        features: list[Features] = []
        shown: list[Any] = []
        record = DataRecord()
        self.projector.gram.engine.begin_pass(len(where))
        for span in self.projector.batches(self.data, where):
            samples = self.data.samples(span)
            record.add(range(span.start - where.start, span.stop - where.start), samples)
            projected = self.projector.project(samples, span)
            sketches.append(projected.sketches - self.origin.to(projected.sketches))
            dead.append(projected.dead)
            said, seen = self._reader.read(samples, span)
            outputs.append(said)
            features += [] if seen is None else [seen]
            given = None if self._reads_text else samples.labels  # labels of tokens are the text itself
            labels.append(None if given is None else finite_labels(given).cpu())
            if self._maker is not None:
                shown += self._maker.pictures(span, samples)
        self.projector.gram.engine.finish_checks()  # before anything is written
        dead_rows = torch.cat(dead).nonzero()[:, 0]
        rows = {
            **encode(torch.cat(sketches).index_fill_(0, dead_rows, 0), self.folder.state["dtype"]),
            "dead": dead_rows,
        }
        known = [part for part in outputs if part is not None]
        if known:
            rows["outputs"] = encode_outputs(torch.cat(known)).contiguous()
        if features:
            directions, lengths = map(torch.cat, zip(*features, strict=True))
            rows |= {"features": directions.half().contiguous(), "feature_lengths": lengths.contiguous()}
        classes = [part for part in labels if part is not None]
        if classes:
            rows["labels"] = smallest_integers(torch.cat(classes)).contiguous()
        stored = None if self._maker is None else encode_pictures(shown, self._maker.names(where))
        start = self.first_row + where.start
        digests = self.folder.write_shard(start, rows, stored)
        fingerprint = record.complete(self.data.take(where))[0]
        shard = Shard(start, self.first_row + where.stop, self.source_number, *digests, fingerprint)
        self.folder.note_shard(shard, self.digest)
        return shard

    def find_change(self, shard: Shard) -> str | None:
        """Return what differs between an existing shard and the samples at its positions; None if nothing does.

        Reads the samples; forms no gradient.
        """
        where = range(shard.start - self.first_row, shard.stop - self.first_row)
        if read_data(self.data.take(where))[0] != shard.data:
            return "data set (as many samples, and some of them or of their labels have changed"
        if self._maker is None or shard.pictures is None:
            return None
        return self._maker.find_difference(where, self.folder.read_pictures(shard))

    @property
    def comparison_shards(self) -> int:
        """How many shards take as long to build as `error_factors` does, roughly: a comparison costs 1.4 sketches."""
        return round(1.4 * self._compared / self.folder.state["shard_rows"])

    def error_factors(self) -> Tensor:
        """Return the factors of the standard errors of centered and plain similarities, (2,), from a few samples.

        They are compared exactly; the factors are 1 if that would take too much memory or time, or if similarities are
        not those of plain gradients.
        """
        part, gram = self.folder.state["part"], self.projector.gram
        fitting = gram.max_memory // 2 // (4 * gram.d * sum(gram.net.numels.values()))
        count = min(self._compared, fitting)
        first_part = part is None or part[0] == 1  # the factors of a merged index are those of part 1
        if count < LEAST_COMPARED or not first_part:
            return torch.ones(2)
        chosen = _spread_places(len(self._places), count)
        compared = self.data.take([self._places[i] for i in chosen])
        exact = gram.with_centering(False).with_columns(compared).of_columns().dense().cpu()
        group = dependent_buckets(self.folder.state["projection"])
        return torch.tensor(error_factors(self._some[chosen], exact, gram.d, group))


def fill(task: Task, spans: list[range]) -> None:
    """Build the shards that are missing or damaged, shared by all ranks, and finish the index."""
    folder, gram = task.folder, task.projector.gram
    starts = [task.first_row + span.start for span in spans]

    def look(_: range) -> Tensor:  # on one rank, for all
        listed = {shard.start for shard in folder.shards if shard.source == task.source_number}
        known = {shard.start for shard in _same_shards(task, refuse=bool(listed))}
        whole = folder.state["finished"] and set(starts) <= listed and not folder.find_damage()
        return torch.tensor([float(whole), *(float(start in known) for start in starts)])

    whole, *done = sum_results(look, [range(1)], "looking for shards").tolist()
    missing = [span for span, there in zip(spans, done, strict=True) if not there]
    if whole and not missing:
        return
    factors = _build_missing(task, missing, gram)

    def finish(_: range) -> Tensor:
        _finish(task, starts, factors)
        return torch.zeros(1)

    sum_results(finish, [range(1)], "summary of the index")


def _build_missing(task: Task, missing: list[range], gram: GramMatrix) -> Tensor:
    """Build shards, shared by all ranks, and return the error factors: one rank compares while others build."""
    comparison = range(task.data.n, task.data.n)

    def build(where: range) -> Tensor:
        if where is comparison:
            with alone():
                return task.error_factors()
        if len(where):
            task.build_shard(where)
        return torch.zeros(2)

    with gram.net.evaluation_mode(), task.reading_outputs():
        work = share_work(missing, comparison, task.comparison_shards, world_size())
        return sum_results(build, work, "index", gram, gram.engine.finish_checks)


def share_work(shards: list[range], other: range, weight: int, ranks: int) -> list[range]:
    """Return pieces of work, every `ranks`-th from the r-th for rank r, so that the load is balanced.

    Args:
        shards: The shards to build.
        other: Another piece of work, done by the last rank: the first one writes the summary.
        weight: The number of shards that take as long.
        ranks: The number of ranks.

    """
    if ranks == 1:
        return [*shards, other]
    work: list[range] = []
    left = list(shards)
    while left or len(work) < ranks:
        turn, place = divmod(len(work), ranks)
        if place == ranks - 1 and turn < max(1, weight):
            work.append(other if turn == 0 else range(0))
        else:
            work.append(left.pop(0) if left else range(0))
    return work


def _known_shards(task: Task) -> list[Shard]:
    folder = task.folder
    named = [shard for shard in folder.shards if shard.source == task.source_number]
    return [shard for shard in named if folder.is_intact(shard)] + folder.noted_shards(task.digest)


def _same_shards(task: Task, refuse: bool) -> list[Shard]:
    """Return the existing shards, if all match the current samples; else none, or raise.

    If one differs, none can stay: the mean sketch that is subtracted from all rows may have been another.
    """
    there = _known_shards(task)
    for shard in there:
        changed = task.find_change(shard)
        if changed is not None and refuse:
            raise ValueError(
                f"{task.folder.path} is an index with another {changed}, in rows {shard.start:,} to "
                f"{shard.stop - 1:,}): choose another folder, or delete that one."
            )
        if changed is not None:
            return []
    return there


def _finish(task: Task, starts: list[int], factors: Tensor) -> None:
    """Write origins, summary and the manifest that names all shards."""
    folder = task.folder
    found = {shard.start: shard for shard in _known_shards(task)}
    others = [shard for shard in folder.shards if shard.source != task.source_number]
    shards = sorted([*others, *(found[start] for start in starts)])
    folder.state["shards"] = [shard._asdict() for shard in shards]
    before = [read_sources(folder)] if task.source_number else []
    folder.write_tensors("origins", join_sources([*before, Sources(task.origin[None], factors[None])]))
    if folder.state["part"] is None:
        summarize(folder, task.projector.gram.max_memory, task.closeness)
    folder.state["finished"] = True
    folder.save()


def _spread_places(n: int, count: int) -> list[int]:
    """Return `count` evenly spaced positions of n samples, first to last."""
    return torch.linspace(0, n - 1, min(n, count), dtype=torch.float64).long().unique().tolist()


def describe_data(data: Batches) -> dict[str, Any]:
    """Return what identifies a data set: the number of samples and a fingerprint of a few, first to last."""
    return {
        "samples": data.n,
        "fingerprint": read_data(data.take(_spread_places(data.n, COMPARED)))[0],
    }


@contextmanager
def hold_folder(path: Path, wait: float) -> Iterator[None]:
    """Hold the lock of a folder, on one rank for all, and remove temporary files of killed writers."""
    files.make_folder(path)
    if rank() > 0:
        yield
        return
    with lock_folder(path, wait):
        refuse_foreign(path)
        remove_temporary(path)
        yield


def rows_per_shard(n: int) -> int:
    """Return the rows of a shard of n samples; of more than a batch, whole batches, as a GPU replays only these."""
    rows = min(LARGEST, max(SMALLEST, -(-n // SHARDS)))
    return rows if rows < BATCH else -(-rows // BATCH) * BATCH
