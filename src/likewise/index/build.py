"""Builds an index: every sample's gradient is projected once, shard by shard.

A shard is a fixed range of rows, so that one process, several ranks and independent parts write the same files. Each is
written complete and noted; a build that is killed goes on after the last shard that was noted.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from likewise import files
from likewise.checks import check_choice, check_flag, check_integer, check_seed, check_type, describe
from likewise.data import Batches, batches
from likewise.distributed import rank, sum_results
from likewise.engines import PartsChangedError
from likewise.gram import GramMatrix
from likewise.identity import DataRecord, read_data
from likewise.index.pairs import summarize
from likewise.index.pictures import PictureMaker, Show, encode_pictures
from likewise.index.projection import (
    OutputReader,
    Projector,
    describe_inputs,
    describe_network,
    encode_outputs,
    tell_difference,
)
from likewise.index.query import Index
from likewise.index.store import (
    DTYPES,
    INDEX,
    IndexFolder,
    Shard,
    encode,
    refuse_foreign,
    remove_temporary,
    smallest_integers,
)
from likewise.locks import lock_folder
from likewise.manifest import NAME, DamagedIndexError, read_manifest
from likewise.model import Network, to_network
from likewise.readouts import Readout
from likewise.statistics.targets import finite_labels
from likewise.thumbnails import EXCERPT

SHARDS = 64  # of a data set, as far as shards are neither tiny nor huge
SMALLEST, LARGEST = 64, 16384  # rows of a shard
ORIGIN_SAMPLES = 64  # whose mean sketch is the origin
COMPARED = 8  # samples by which data sets are told apart before all are read


def build_index(
    model: nn.Module | Network,
    data: Any,
    out: str | Path = "index",
    *,
    width: int = 1024,
    dtype: Literal["float16", "int8", "float32"] = "float16",
    labels: Any = None,
    readout: Readout | None = None,
    parameters: Any = None,
    classes: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    show: Show | None = None,
    pictures: bool = True,
    excerpt_length: int = EXCERPT,
    seed: int = 0,
    part: tuple[int, int] | None = None,
    shard_rows: int | None = None,
    max_memory: int = 2**31,
    wait: float = math.inf,
    settings: Mapping[str, Any] | None = None,
) -> Index:
    """Return an index of a data set by a model, kept in the folder `out`; a build that was stopped goes on.

    One gradient and one forward pass a sample; nothing of the data is kept but thumbnails or excerpts. About 2.1 KB
    a sample (float16) or 1.1 KB (int8) at width 1024, and pictures. Under torchrun the ranks share the shards. The
    same call on a finished index opens it, and replaces damaged files.

    Args:
        model: A model or Network.
        data: Anything that `likewise.batches` accepts.
        out: The folder.
        width: About how many numbers a sample: the standard error of a similarity is about 1/√width.
        dtype: How they are stored.
        labels: Of the samples; those that travel with the data if None.
        readout: Whose gradients are compared; all outputs if None.
        parameters: Names or patterns; all that require grad if None.
        classes: Names of the classes.
        names: Names of the samples.
        show: What a person should see of sample i (image, text, dict, array): a function or a sequence.
        pictures: Whether to keep what a person sees.
        excerpt_length: Characters that are kept of a text.
        seed: Of the projection.
        part: (i, n), i from 1: only this part of the shards; `merge_indexes` puts the n folders together.
        shard_rows: Rows of a shard; a 64th of the data, 64 to 16,384, if None.
        max_memory: Bytes for gradients.
        wait: Seconds to wait if another process writes into the folder.
        settings: What a command was told, kept for `likewise ask`.

    Raises:
        ValueError: The folder holds another index, or something else.

    Example:
        >>> import torch, tempfile, likewise as lw
        >>> net, x, y = torch.nn.Linear(4, 3), torch.randn(9, 4), torch.randint(3, (9,))
        >>> index = lw.build_index(net, x, tempfile.mkdtemp(), labels=y)
        >>> index.nearest(torch.randn(2, 4), k=3).indices.shape
        torch.Size([2, 3])

    """
    net = to_network(model, readout, parameters)
    source = batches(data, labels=labels)
    dtype = check_choice("dtype", dtype, DTYPES)  # type: ignore[assignment]
    width, seed = check_integer("width", width, 16, 2**20), check_seed("seed", seed)
    rows = _shard_rows(source.n) if shard_rows is None else check_integer("shard_rows", shard_rows, 1)
    chosen = None if part is None else check_part(part)
    _check_listed(source.n, classes=classes, names=names, show=show)
    gram = GramMatrix(net, source, max_memory=max_memory)
    projector = Projector(gram, width, seed)
    first = source.samples(range(1))
    state = {
        "kind": INDEX.noun,
        "schema": INDEX.schema,
        **describe_network(net),
        "projection": projector.facts(first),
        "dtype": dtype,
        "shard_rows": rows,
        "data": [describe_data(source)],
        "classes": None if classes is None else [str(name) for name in classes],
        "pictures": check_flag("pictures", pictures),
        "inputs": describe_inputs(first),
        "part": None if chosen is None else list(chosen),
        "settings": None if settings is None else dict(settings),
        "finished": False,
        "shards": [],
        "files": {},
    }
    path = _check_out(out)
    maker = PictureMaker(source, show, names, excerpt_length) if pictures else None
    with hold_folder(path, wait):
        folder = _begin(path, state)
        task = Task(folder, projector, source, maker, source_number=0, first_row=0)
        fill(task, _shards_of_part(source.spans(rows), chosen))
    return Index(path, model=net, verify=False)


class Task:
    """Builds the shards of one data set.

    Args:
        folder: Where to.
        projector: Makes sketches.
        data: The samples.
        maker: Makes pictures; None for none.
        source_number: Which of the data sets of the index.
        first_row: The row of its first sample.

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
    ) -> None:
        self.folder, self.projector, self.data = folder, projector, data
        self.source_number, self.first_row = source_number, first_row
        self._maker = maker if maker is not None and maker.available else None
        self._outputs = OutputReader(projector.gram.net, data.samples(range(1)))
        places = torch.linspace(0, data.n - 1, min(data.n, ORIGIN_SAMPLES), dtype=torch.float64).long().unique()
        few = projector.project_all(data.take(places.tolist()))
        self.origin = few.sketches.double().mean(0).float()

    @property
    def digest(self) -> str:
        """Which build, data set and place shards belong to."""
        named = {name: value for name, value in self.folder.state.items() if name in BUILD}
        text = json.dumps([named, describe_data(self.data), self.source_number, self.first_row], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def build_shard(self, where: range) -> Shard:
        """Compute and write the shard of the samples at these places, and note it."""
        sketches, dead, outputs, labels = [], [], [], []
        shown: list[Any] = []
        record = DataRecord()
        for span in self.projector.batches(self.data, where):
            samples = self.data.samples(span)
            record.add(range(span.start - where.start, span.stop - where.start), samples)
            projected = self.projector.project(samples)
            sketches.append(projected.sketches - self.origin.to(projected.sketches))
            dead.append(projected.dead)
            outputs.append(self._outputs.read(samples))
            labels.append(None if samples.labels is None else finite_labels(samples.labels).cpu())
            if self._maker is not None:
                shown += self._maker.pictures(span, samples)
        self.projector.gram.engine.finish_checks()  # before anything is written
        dead_rows = torch.cat(dead).nonzero()[:, 0]
        rows = {**encode(torch.cat(sketches).index_fill_(0, dead_rows, 0), self.folder.state["dtype"]), "dead": dead_rows}
        known = [part for part in outputs if part is not None]
        if known:
            rows["outputs"] = encode_outputs(torch.cat(known)).contiguous()
        given = [part for part in labels if part is not None]
        if given:
            rows["labels"] = smallest_integers(torch.cat(given)).contiguous()
        stored = None if self._maker is None else encode_pictures(shown, self._maker.names(where))
        start = self.first_row + where.start
        digests = self.folder.write_shard(start, rows, stored)
        fingerprint = record.complete(self.data.take(where))[0]
        shard = Shard(start, self.first_row + where.stop, self.source_number, *digests, fingerprint)
        self.folder.note_shard(shard, self.digest)
        return shard


BUILD = ("model", "readout", "parameters", "precision", "versions", "projection", "dtype", "pictures")


def fill(task: Task, spans: list[range]) -> None:
    """Build the shards that are missing or damaged, shared by all ranks, and finish the index."""
    folder, gram = task.folder, task.projector.gram
    starts = [task.first_row + span.start for span in spans]

    def look(_: range) -> Tensor:  # on one rank, for all
        known = {shard.start for shard in _known_shards(task)}
        whole = folder.state["finished"] and not folder.find_damage()
        return torch.tensor([float(whole), *(float(start in known) for start in starts)])

    whole, *done = sum_results(look, [range(1)], "looking for shards").tolist()
    missing = [span for span, there in zip(spans, done, strict=True) if not there]
    if missing:
        _build_missing(task, missing, gram)

    def finish(_: range) -> Tensor:
        _finish(task, starts)
        return torch.zeros(1)

    if not whole:
        sum_results(finish, [range(1)], "summary of the index")


def _build_missing(task: Task, missing: list[range], gram: GramMatrix) -> None:
    def build(where: range) -> Tensor:
        task.build_shard(where)
        return torch.ones(1)

    try:
        with gram.net.evaluation_mode():
            sum_results(build, missing, "index", gram, gram.engine.finish_checks)
    except PartsChangedError as error:
        raise ValueError(
            f"The model takes other branches for some samples ({error}), so that a projection cannot be the same for "
            "all: leave these parameters out by parameters=[...], or pad inputs to one length."
        ) from error


def _known_shards(task: Task) -> list[Shard]:
    folder = task.folder
    named = [shard for shard in folder.shards if shard.source == task.source_number]
    return [shard for shard in named if folder.is_intact(shard)] + folder.noted_shards(task.digest)


def _finish(task: Task, starts: list[int]) -> None:
    """Write origins, summary and the manifest that names all shards."""
    folder = task.folder
    found = {shard.start: shard for shard in _known_shards(task)}
    others = [shard for shard in folder.shards if shard.source != task.source_number]
    shards = sorted([*others, *(found[start] for start in starts)])
    folder.state["shards"] = [shard._asdict() for shard in shards]
    before = folder.read_tensors("origins") if task.source_number else {}
    origins = torch.cat([before["origins"], task.origin[None]]) if before else task.origin[None]
    folder.write_tensors("origins", {"origins": origins})
    if folder.state["part"] is None:
        summarize(folder, task.projector.gram.max_memory)
    folder.state["finished"] = True
    folder.save()


def describe_data(data: Batches) -> dict[str, Any]:
    """Return what tells data sets apart: the number of samples and a fingerprint of a few, first to last."""
    places = torch.linspace(0, data.n - 1, min(data.n, COMPARED), dtype=torch.float64).long().unique()
    return {"samples": data.n, "fingerprint": read_data(data.take(places.tolist()))[0]}


def check_part(part: Any) -> tuple[int, int]:
    """Return (i, n), i from 1 to n, or say what is wrong with it."""
    if not isinstance(part, tuple | list) or len(part) != 2:
        raise TypeError(f"part must be (i, n), such as (2, 8), found {describe(part)}.")
    n = check_integer("the number of parts", part[1], 1)
    return check_integer("part", part[0], 1, n), n


@contextmanager
def hold_folder(path: Path, wait: float) -> Iterator[None]:
    """Hold the lock of a folder, on one rank for all, and remove what killed writers left."""
    files.make_folder(path)
    if rank() > 0:
        yield
        return
    with lock_folder(path, wait):
        refuse_foreign(path)
        remove_temporary(path)
        yield


def _begin(path: Path, state: dict[str, Any]) -> IndexFolder:
    """Return the folder of a new index, or of one that is there and the same; another one is refused."""
    folder = IndexFolder(path, state)
    if rank() > 0:
        return folder
    try:
        there = read_manifest(path, INDEX)
    except (FileNotFoundError, DamagedIndexError):
        folder.save()
        return folder
    refuse_another(path, there, state)
    return IndexFolder(path, there)


def refuse_another(path: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise, by name, if a folder holds an index of something else."""
    for name in (*BUILD, "shard_rows", "data", "classes", "part"):
        if there[name] != here[name]:
            words = {"data": "data set", "shard_rows": "size of shards", "part": "part of the data"}.get(name, name)
            raise ValueError(
                f"{path} is an index with another {words}{tell_difference(there[name], here[name])}: choose another "
                "folder, or delete that one."
            )


def _shard_rows(n: int) -> int:
    return min(LARGEST, max(SMALLEST, -(-n // SHARDS)))


def _shards_of_part(spans: list[range], part: tuple[int, int] | None) -> list[range]:
    if part is None:
        return spans
    i, n = part
    return spans[(i - 1) * len(spans) // n : i * len(spans) // n]


def _check_out(out: Any) -> Path:
    check_type("out", out, (str, PathLike), "the path of a folder")
    if not str(out):
        raise ValueError("out must be the path of a folder, found an empty one.")
    return Path(out)


def _check_listed(n: int, *, classes: Any, names: Any, show: Any) -> None:
    for name, given in (("classes", classes), ("names", names)):
        if given is not None and (isinstance(given, str) or not isinstance(given, Sequence)):
            raise TypeError(f"{name} must be a list of text, found {describe(given)}.")
    for name, given in (("names", names), ("show", show)):
        if given is not None and not callable(given) and len(given) != n:
            raise ValueError(f"{name} has {len(given)} entries for {n} samples.")
