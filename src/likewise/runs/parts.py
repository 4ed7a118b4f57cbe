"""Parts of a run, computed apart, on any machines, and adopted by the run that they are of."""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from likewise.checks import describe
from likewise.data import Batches
from likewise.distributed import on_first_rank
from likewise.gram import GramMatrix
from likewise.gram.last_layer import Features
from likewise.gram.sketches import Sketch, bucket_count
from likewise.identity import read_data, same_behavior
from likewise.manifest import read_manifest
from likewise.runs.columns import pair_arrays, strip_arrays
from likewise.runs.stages import SEED, described_name, name_shards, pairs_name
from likewise.runs.store import RunStore, describe_difference


class Adopted(NamedTuple):
    """What a run has from its parts."""

    outputs: Tensor | None  # of the model, (n, d); None where the run finds them in a stage
    pairs: int  # parts of exact pairs, 0 for none
    features: Features | None = None  # of the last layer; None where there are none, or a stage has them


class Part(NamedTuple):
    """A folder of part i of n, and what its manifest says."""

    path: Path
    state: dict[str, Any]

    @property
    def number(self) -> int:
        """Which part, from 1."""
        return int(self.state["part"][0])

    @property
    def parts(self) -> int:
        """Of how many."""
        return int(self.state["part"][1])


def read_parts(folders: Any) -> list[Part]:
    """Return the parts in these folders, in order.

    Raises:
        FileNotFoundError: A folder holds no part.
        ValueError: A part is not done, given twice or missing, or they are not of one number.

    """
    if isinstance(folders, str | PathLike) or not isinstance(folders, Sequence) or not folders:
        raise TypeError(f"parts must be a list of folders, found {describe(folders)}.")
    parts = [Part(Path(folder), read_manifest(Path(folder))) for folder in folders]
    for part in parts:
        if part.state.get("part") is None:
            raise ValueError(f"{part.path} is a whole run, not a part of one: there is nothing to merge.")
        if not part.state.get("part_done"):
            raise ValueError(
                f"{part.path} is part {part.number} of {part.parts}, and not done: give the command or call that began "
                "it again, it goes on."
            )
    _refuse_gaps(parts)
    return sorted(parts, key=lambda part: part.number)


def _refuse_gaps(parts: Sequence[Part]) -> None:
    first, known = parts[0], dict[int, Path]()
    for part in parts:
        if part.parts != first.parts:
            raise ValueError(
                f"{part.path} is part {part.number} of {part.parts}, and {first.path} is of {first.parts}."
            )
        if part.number in known:
            raise ValueError(
                f"{part.path} and {known[part.number]} are both part {part.number} of {part.parts}."
            )
        known[part.number] = part.path
    missing = [str(i) for i in range(1, first.parts + 1) if i not in known]
    if missing:
        raise ValueError(
            f"Parts {', '.join(missing)} of {first.parts} are missing: compute them, then merge all."
        )


def refuse_other_parts(parts: Sequence[Part], identity: Mapping[str, Any]) -> None:
    """Raise, by name, if a part is of another model, data set, readout, precision, options or versions."""
    for part in parts:
        for what, here in identity.items():
            if what == "part":
                continue
            there = part.state.get(what)
            same = same_behavior(there, here) if what == "behavior" and there else there == here
            if not same:
                raise ValueError(
                    f"{part.path} is a part of a run with {describe_difference(what, there, here)}: it cannot be "
                    "merged into this one."
                )


def adopt_parts(folder: RunStore, parts: Sequence[Part], gram: GramMatrix, width: int) -> Adopted:
    """Take over what parts found, once it is seen to be of these samples.

    Args:
        folder: Of the run.
        parts: All of them, of the same model, data set and options.
        gram: The matrix of the run.
        width: Numbers per sample of a sketch; 0: exact pairs.

    Raises:
        DamagedRunError: A file of a part is missing or damaged.
        ValueError: Samples differ from those of a part, or a part is of other versions, or lacks a statistic.

    """
    on_first_rank(lambda: _adopt(folder, parts), "adopting parts")
    if not width:
        return Adopted(None, _adopted_pairs(folder, parts))
    shards = name_shards(gram, Sketch(bucket_count(width, gram.d), SEED))
    missing = folder.missing([*shards, *map(described_name, shards)])
    if missing:
        raise ValueError(
            f"The parts lack {len(missing)} of {len(shards)} shards: they were computed in batches of another size, or "
            "from gradients that come in other parts on those machines."
        )
    outputs, features = [], []
    for name, where in shards.items():
        found = folder.read_stage(described_name(name))
        if bytes(found["data"].tolist()).decode() != _fingerprint(gram.data, where):
            raise ValueError(
                f"Samples {where.start} to {where.stop - 1} are not those that a part was computed from: give every "
                "part and the merge the same data in the same order."
            )
        outputs.append(torch.tensor(found["outputs"]))
        features.append(Features(*(torch.tensor(found[name]) for name in Features._fields)))
    return Adopted(torch.cat(outputs), 0, Features(*map(torch.cat, zip(*features, strict=True))))


def _adopt(folder: RunStore, parts: Sequence[Part]) -> None:
    for part in parts:
        there = {name: part.state["versions"].get(name) for name in folder.versions}
        if there != folder.versions:
            raise ValueError(
                f"{part.path} is a part of a run with {describe_difference('versions', there, folder.versions)}: it "
                "cannot be merged into this one."
            )
        folder.adopt(part.path, part.state["stages"])


def _adopted_pairs(folder: RunStore, parts: Sequence[Part]) -> int:
    """Return how many parts the pairs came in, 0 where one part has all of them.

    Raises:
        ValueError: A part lacks a statistic of this version.

    """
    whole = [part for part in parts if "pairs" in part.state["stages"]]
    for part in whole or parts:
        name = "pairs" if whole else pairs_name(part.number, part.parts)
        if folder.missing([name], pair_arrays() if whole else strip_arrays()):
            raise ValueError(
                f"{part.path} lacks statistics that this code computes from pairs, though its version has the same "
                "number: delete that folder, compute the part again, then merge."
            )
    return 0 if whole else len(parts)


def _fingerprint(data: Batches, where: range) -> str:
    return read_data(data.take(where))[0]
