"""Merge the parts of an index, or indexes of several data sets.

Parts are built separately, on any machines, with the same model, data and options. Their shards are ranges of the same
rows, so the merged folder has the bytes that one process would have written.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from likewise import files
from likewise.index.pairs import summarize
from likewise.index.projection import tell_difference
from likewise.index.shards import BUILD, hold_folder
from likewise.index.store import (
    INDEX,
    SETTINGS,
    IndexFolder,
    Shard,
    join_sources,
    read_sources,
    refuse_other_classes,
)
from likewise.manifest import NAME, DamagedIndexError, read_manifest

SAME = ("model", "readout", "parameters", "precision", "versions", "projection", "dtype")
SAME_PARTS = (*BUILD, "shard_rows", "data", "classes", "inputs")


def merge_parts(folders: Sequence[IndexFolder], out: Path, wait: float, max_memory: int) -> None:
    """Merge parts 1 to n into an index; repeat a merge that was stopped.

    Raises:
        ValueError: Parts are missing, given twice, or belong to another model, data set or version.

    """
    first = folders[0]
    for other in folders[1:]:
        refuse_other_classes(
            f"{first.path}, merged with {other.path},", first.state["classes"], other.state["classes"]
        )
        refuse_mismatch(first, other, SAME_PARTS, "part")
    _refuse_gaps(folders)
    origins = [read_sources(folder).origins for folder in folders]
    for folder, origin in zip(folders, origins, strict=True):
        if not torch.allclose(origin, origins[0], atol=1e-4):
            raise ValueError(
                f"{folder.path} computed other gradients than {first.path} for the same samples: were the parts built "
                "in the same precision, on machines that agree?"
            )
    ordered = sorted(folders, key=lambda folder: folder.state["part"])
    state = {**ordered[0].state, "part": None, "finished": False, "shards": [], "files": {}}
    with hold_folder(out, wait):
        _refuse_other_folder(out, state)
        merged = IndexFolder(out, state)
        merged.save()
        for folder in ordered:
            for shard in folder.shards:
                _copy_shard(folder, merged, shard, shard)
        _copy_settings(ordered[0], merged)
        merged.write_tensors("origins", join_sources([read_sources(ordered[0])]))
        summarize(merged, max_memory)
        state["finished"] = True
        merged.save()


def concatenate(folders: Sequence[IndexFolder], out: Path, wait: float, max_memory: int) -> None:
    """Merge the indexes of several data sets, in order."""
    first = folders[0]
    for other in folders[1:]:
        refuse_mismatch(first, other, SAME, "index")
    state = {**first.state, "data": [], "finished": False, "shards": [], "files": {}}
    with hold_folder(out, wait):
        if (out / NAME).exists() and read_manifest(out, INDEX)["finished"]:
            raise ValueError(f"{out} holds an index: choose another folder, or delete that one.")
        merged = IndexFolder(out, state)
        merged.save()
        _copy_settings(first, merged)
        for folder in folders:
            append_index(merged, folder)
        summarize(merged, max_memory)
        state["finished"] = True
        merged.save()


def append_index(folder: IndexFolder, other: IndexFolder) -> None:
    """Append the shards of another index to a folder; the caller writes summary and manifest.

    Raises:
        ValueError: The other index is a part, or has another model, readout, projection or version.

    """
    refuse_mismatch(folder, other, SAME, "index")
    for one in (folder, other):
        if one.state["part"] is not None:
            i, n = one.state["part"]
            raise ValueError(
                f"{one.path} is part {i} of {n}: merge it with all other parts of its index first."
            )
    refuse_other_classes(
        f"{folder.path}, merged with {other.path},", folder.state["classes"], other.state["classes"]
    )
    _refuse_other_columns(folder, other)
    if folder.shards and other.shards:
        refuse_other_labels(*(one.read_rows(one.shards[0]).labels for one in (folder, other)))
    rows, sources = folder.rows, len(folder.state["data"])
    removed = [part.read_tensors("removed").get("rows") for part in (folder, other)]
    for shard in other.shards:
        moved = shard._replace(
            start=shard.start + rows, stop=shard.stop + rows, source=shard.source + sources
        )
        _copy_shard(other, folder, shard, moved)
    before = [read_sources(folder)] if sources else []
    folder.write_tensors("origins", join_sources([*before, read_sources(other)]))
    shifted = [None if removed[1] is None else removed[1] + rows]
    every = [part for part in (removed[0], *shifted) if part is not None]
    if every:
        folder.write_tensors("removed", {"rows": torch.cat(every)})
    folder.state["data"] = [*folder.state["data"], *other.state["data"]]


def refuse_mismatch(one: IndexFolder, other: IndexFolder, names: Sequence[str], what: str) -> None:
    """Raise, by name, if two folders differ in one of these."""
    for name in names:
        there, here = one.state[name], other.state[name]
        if there != here:
            word = {"data": "data set", "shard_rows": "size of shards"}.get(name, name)
            raise ValueError(
                f"{other.path} is a{'n' if what == 'index' else ''} {what} of another {word} than {one.path}"
                f"{tell_difference(there, here)}: they cannot be merged."
            )


def refuse_other_labels(there: Tensor | None, here: Tensor | None) -> None:
    """Raise if labels are not of the kind of those in an index: they are read as one tensor.

    Args:
        there: Some labels of the index; None where it has none.
        here: Some of those to be added.

    """
    if there is None or here is None:
        if there is not here:
            raise ValueError("Labels are needed for all samples of an index, or for none.")
        return
    if there.shape[1:] != here.shape[1:] or (here.is_floating_point() and not there.is_floating_point()):
        one, other = (
            f"{'values' if labels.is_floating_point() else 'class numbers'} of shape {tuple(labels.shape[1:])}"
            for labels in (there, here)
        )
        raise ValueError(
            f"The labels of the index are {one} a sample, and those to be added {other}: give labels of the same kind, "
            "one-hot classes by labels.argmax(1), floats that are class numbers by labels.long()."
        )


def _refuse_other_columns(one: IndexFolder, other: IndexFolder) -> None:
    """Raise if two indexes of tables differ in their columns, or in their order."""
    there, here = one.state.get("columns"), other.state.get("columns")
    if there is not None and here is not None and there != here:
        raise ValueError(
            f"{other.path} was built from the columns {', '.join(here)}, and {one.path} from {', '.join(there)}: the "
            "model sees them in that order. Rebuild it from a table with the same columns in the same order."
        )


def _refuse_gaps(folders: Sequence[IndexFolder]) -> None:
    numbers: dict[int, Path] = {}
    count = folders[0].state["part"][1]
    for folder in folders:
        i, n = folder.state["part"]
        if n != count:
            raise ValueError(
                f"{folder.path} is part {i} of {n}, but {folders[0].path} is one of {count} parts: pass parts of "
                "one index."
            )
        if i in numbers:
            raise ValueError(f"{folder.path} and {numbers[i]} are both part {i} of {n}: pass one of them.")
        numbers[i] = folder.path
    missing = [i for i in range(1, count + 1) if i not in numbers]
    if missing:
        raise ValueError(
            f"Parts {', '.join(map(str, missing))} of {count} are missing: build them, then merge all."
        )


def _refuse_other_folder(out: Path, state: Mapping[str, Any]) -> None:
    """Raise if the folder holds another index; an unfinished merge is written again."""
    try:
        there = read_manifest(out, INDEX)
    except (FileNotFoundError, DamagedIndexError):
        return
    for name in SAME_PARTS:
        if there[name] != state[name]:
            raise ValueError(
                f"{out} holds an index with another {name}: choose another folder, or delete that one."
            )


def _copy_settings(source: IndexFolder, target: IndexFolder) -> None:
    if "settings" in source.state["files"]:
        target.write_settings((source.path / SETTINGS).read_text(encoding="utf-8"))


def _copy_shard(source: IndexFolder, target: IndexFolder, shard: Shard, moved: Shard) -> None:
    """Copy the files of a shard, checked, and add it to the target's manifest."""
    names = [(shard.name, moved.name, shard.sha256)]
    if shard.pictures is not None:
        names.append((shard.pictures_name, moved.pictures_name, shard.pictures))
    for name, new_name, digest in names:
        path = source.path / name
        if not path.exists():
            raise DamagedIndexError(source.path, {name: "missing"})
        written = files.copy_atomically(path, target.path / new_name)
        if written != digest:
            raise DamagedIndexError(source.path, {name: "its checksum differs"})
    target.state["shards"] = [*target.state["shards"], moved._asdict()]
