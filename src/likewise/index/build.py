"""The calls that make an index: build one of a data set, or put several together."""

import math
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from likewise.checks import check_choice, check_flag, check_integer, check_seed, check_type, describe
from likewise.data import Batches, batches
from likewise.distributed import rank
from likewise.gram import GramMatrix
from likewise.gram.cost import choose_outputs
from likewise.gram.last_layer import Features
from likewise.index.layers import Projection, Unit, make_projector, read_settings
from likewise.index.parts import concatenate, merge_parts
from likewise.index.pictures import PictureMaker, Show
from likewise.index.projection import (
    KnownSketches,
    Projector,
    describe_inputs,
    describe_network,
    tell_difference,
)
from likewise.index.query import Index
from likewise.index.shards import BUILD, Task, describe_data, fill, hold_folder, rows_per_shard
from likewise.index.store import DTYPES, INDEX, IndexFolder, refuse_other_classes
from likewise.manifest import DamagedIndexError, read_manifest
from likewise.model import Network, to_network
from likewise.readouts import Readout
from likewise.thumbnails import EXCERPT


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
    projection: Projection = "signs",
    unit: Unit = "sample",
    optimizer_state: Any = None,
    learning_rate: float | None = None,
    part: tuple[int, int] | None = None,
    shard_rows: int | None = None,
    max_memory: int = 2**31,
    wait: float = math.inf,
    settings: str | None = None,
) -> Index:
    """Return an index of a data set by a model, kept in the folder `out`; a build that was stopped goes on.

    One gradient a sample, with its outputs from the same pass; nothing of the data is kept but thumbnails or
    excerpts. About 2.1 KB a sample (float16) or 1.1 KB (int8) at width 1024, up to .5 KB of features, and pictures.
    Under torchrun the ranks share the shards. The same call on a finished index opens it, and replaces damaged files.

    Args:
        model: A model or Network.
        data: Anything that `likewise.batches` accepts.
        out: The folder.
        width: About how many numbers a sample: the standard error of a similarity is about 1/√width.
        dtype: How they are stored.
        labels: Of the samples; those that travel with the data if None.
        readout: Whose gradients are compared; if None, chosen by cost as `likewise.analyze` does: all outputs of few
            samples (of more than ten outputs, random combinations), of many four combinations, contrasts of classes.
        parameters: Names or patterns; all that require grad if None.
        classes: Names of the classes.
        names: Names of the samples.
        show: What a person should see of sample i (image, text, dict, array): a function or a sequence.
        pictures: Whether to keep what a person sees.
        excerpt_length: Characters that are kept of a text.
        seed: Of the projection.
        projection: "signs", or "two-sided" (LoGra) for readouts of one output: sketches are taken from inputs and
            output gradients of layers, and no gradient is formed. Cheaper for large models, with a larger error.
        unit: What is scaled to length 1: "sample" the gradient as a whole, "layer" that of each parameter, so that a
            similarity is the mean of theirs, "matrix" that of each hidden matrix, without embeddings, output layer,
            norms and biases: to choose texts by. The last two are for readouts of one output, and have no exact twin.
        optimizer_state: Of Adam or AdamW: the optimizer, its state dict, or a checkpoint folder of the Trainer of
            transformers. Rows are then the step that Adam would make on that sample alone, queries plain gradients, as
            in LESS; minus the readout must be the training loss, such as sequence_log_likelihood().
        learning_rate: The weight of this index in `likewise.select([index, ...], ...)` over checkpoints.
        part: (i, n), i from 1: only this part of the shards; `merge_indexes` puts the n folders together.
        shard_rows: Rows of a shard; about a 64th of the data, 64 to 16,384, if None.
        max_memory: Bytes for gradients, and for strips of the index that is returned.
        wait: Seconds to wait if another process writes into the folder.
        settings: What a command was told, as TOML, kept for `likewise ask`.

    Returns:
        The index, opened, with its data set attached: `exact=True` works at once.

    Raises:
        ValueError: The folder holds another index, or something else. All samples of finished shards are read and
            compared, names too, and of what `show` returns one sample a shard. A build that was stopped, and whose
            data, names or pictures changed since, begins anew; `Index(out)` opens an index without reading the data.

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
    rows = rows_per_shard(source.n) if shard_rows is None else check_integer("shard_rows", shard_rows, 1)
    chosen = None if part is None else check_part(part)
    _check_listed(source.n, classes=classes, names=names, show=show)
    net = choose_outputs(net, source).net
    gram = GramMatrix(net, source, max_memory=max_memory)
    path = _check_out(out)
    layers = read_settings(gram, projection, unit, optimizer_state, learning_rate)
    projector = make_projector(gram, width, seed, layers)
    state = {
        **_new_state(projector, source, dtype, rows),
        "classes": None if classes is None else [str(name) for name in classes],
        "pictures": check_flag("pictures", pictures),
        "part": None if chosen is None else list(chosen),
    }
    if layers.learning_rate is not None:
        state["learning_rate"] = layers.learning_rate
    maker = PictureMaker(source, show, names, excerpt_length) if pictures else None
    with hold_folder(path, wait):
        folder = _begin(path, state, settings)
        task = Task(folder, projector, source, maker, source_number=0, first_row=0)
        fill(task, _shards_of_part(source.spans(rows), chosen))
    attached = source if chosen is None else None  # a part answers nothing
    return Index(path, model=net, data=attached, verify=False, max_memory=max_memory)


def keep_sketches(
    gram: GramMatrix,
    sketches: Tensor,
    buckets: int,
    seed: int,
    out: Path,
    *,
    outputs: Tensor,
    features: Features | None,
    closeness: Tensor,
    classes: Sequence[str] | None,
    names: Sequence[str] | None,
    show: Show | None,
    excerpt_length: int,
    settings: str | None,
) -> None:
    """Write the index of sketches that were computed before; gradients are formed of few, to tell errors.

    Args:
        gram: The matrix of the network and the samples.
        sketches: (n, width) whitened sketches by `Sketch(buckets, seed)`.
        buckets: Numbers for each output.
        seed: Of the projection.
        out: The folder.
        outputs: What the model says of the samples.
        features: What its last layer sees of them.
        closeness: (n,) their mean plain similarity to the most similar others, as `ClosenessReducer` finds it.
        classes: Names of the classes.
        names: Names of the samples.
        show: What a person should see of sample i.
        excerpt_length: Characters that are kept of a text.
        settings: What a command was told.

    """
    data = gram.data
    projector = KnownSketches(gram, buckets, seed, sketches)
    rows = max(rows_per_shard(data.n), 4096)  # nothing is computed that would have to be done again
    state = {
        **_new_state(projector, data, "float16", rows),
        "classes": None if classes is None else [str(name) for name in classes],
        "pictures": True,
        "part": None,
    }
    maker = PictureMaker(data, show, names, excerpt_length)
    with hold_folder(out, math.inf):
        folder = _begin(out, state, settings)
        task = Task(
            folder,
            projector,
            data,
            maker,
            source_number=0,
            first_row=0,
            outputs=outputs,
            features=features,
            closeness=closeness,
        )
        fill(task, data.spans(rows))


def _new_state(projector: Projector, data: Batches, dtype: str, shard_rows: int) -> dict[str, Any]:
    """Return what the manifest of a new index says."""
    first = data.samples(range(1))
    return {
        "kind": INDEX.noun,
        "schema": INDEX.schema,
        **describe_network(projector.gram.net),
        "projection": projector.facts(first),
        "inputs": describe_inputs(first),
        "columns": None if data.columns is None else list(data.columns),
        "dtype": dtype,
        "shard_rows": shard_rows,
        "data": [describe_data(data)],
        "in_memory": data.memory_checksum(),
        "finished": False,
        "shards": [],
        "files": {},
    }


def merge_indexes(
    folders: Sequence[str | Path], out: str | Path, *, wait: float = math.inf, max_memory: int = 2**31
) -> Index:
    """Return one index of several, in the folder `out`: all parts of one build, or indexes of several data sets.

    Parts give the bytes that one process would have written. Indexes of several data sets, by the same model, are put
    one after another in the order given.

    Args:
        folders: Of the parts, in any order, or of the indexes.
        out: A new folder.
        wait: Seconds to wait if another process writes into it.
        max_memory: Bytes for strips of the summary.

    Returns:
        The index, opened.

    Raises:
        ValueError: Parts are missing, or something is of another model, data set or version; it is named.

    Example:
        >>> import tempfile, torch, likewise as lw
        >>> net, x = torch.nn.Linear(4, 3), torch.randn(40, 4)
        >>> parts = [tempfile.mkdtemp() for _ in range(2)]
        >>> for i, folder in enumerate(parts, 1):
        ...     _ = lw.build_index(net, x, folder, part=(i, 2), shard_rows=20)
        >>> len(lw.merge_indexes(parts, tempfile.mkdtemp()))
        40

    """
    if isinstance(folders, str | Path) or not folders:
        raise TypeError(f"folders must be a list of folders, found {describe(folders)}.")
    opened = [IndexFolder.open(Path(folder), verify=False) for folder in folders]
    path = _check_out(out)
    if any(folder.path.resolve() == path.resolve() for folder in opened):
        raise ValueError(f"{path} is one of those to merge: choose a new folder.")
    if all(folder.state["part"] is not None for folder in opened):
        merge_parts(opened, path, wait, max_memory)
    else:
        concatenate(opened, path, wait, max_memory)
    return Index(path, verify=False)


def check_part(part: Any) -> tuple[int, int]:
    """Return (i, n), i from 1 to n, or say what is wrong with it."""
    if not isinstance(part, tuple | list) or len(part) != 2:
        raise TypeError(f"part must be (i, n), such as (2, 8), found {describe(part)}.")
    n = check_integer("the number of parts", part[1], 1)
    return check_integer("part", part[0], 1, n), n


def _begin(path: Path, state: dict[str, Any], settings: str | None) -> IndexFolder:
    """Return the folder of a new index, or of one that is there and the same; another one is refused."""
    folder = IndexFolder(path, state)
    if rank() > 0:
        return folder
    try:
        there = read_manifest(path, INDEX)
    except (FileNotFoundError, DamagedIndexError):
        folder.save()
        if settings is not None:
            folder.write_settings(settings)
            folder.save()
        return folder
    refuse_another(path, there, state)
    return IndexFolder(path, there)


def refuse_another(path: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise, by name, if a folder holds an index of something else."""
    refuse_other_classes(f"The index in {path}", there["classes"], here["classes"])
    for name in (*BUILD, "shard_rows", "data", "part"):
        if there[name] != here[name]:
            words = {"data": "data set", "shard_rows": "size of shards", "part": "part of the data"}.get(
                name, name
            )
            raise ValueError(
                f"{path} is an index with another {words}{tell_difference(there[name], here[name])}: choose another "
                "folder, or delete that one."
            )
    _refuse_changed_data(path, there.get("in_memory"), here["in_memory"])


def _refuse_changed_data(path: Path, there: str | None, here: str | None) -> None:
    """Raise if data in memory, of the same form, are not all those that an index was built from."""
    if there is None or here is None:
        return
    forms = [text.partition(":")[0] for text in (there, here)]
    if forms[0] == forms[1] and there != here:
        raise ValueError(
            f"{path} is an index with another data set (as many samples, and some of them or of their labels have "
            "changed): choose another folder, or delete that one."
        )


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
