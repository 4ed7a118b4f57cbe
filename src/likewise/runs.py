"""From a model and a data set to a folder of results: the only place that writes them.

    run/  manifest.json      what was run, on what, by which versions, at what cost; checksums
          samples.parquet    one row a sample
          neighbors.parquet  the most similar samples of each
          stages/            what each stage found, until all are done

Each stage is written under another name, then renamed, then noted in the manifest with its checksum: a run
that is killed goes on after the last stage that was noted. A folder of another model, data set or options is
refused. Nothing of the data is copied, and no pickle is written or read.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from likewise.analysis import Analysis
from likewise.data import Batches, batches
from likewise.gram import GramMatrix
from likewise.network import Network
from likewise.readouts import Readout, all_outputs
from likewise.statistics.density import soft_neighbors
from likewise.statistics.labels import label_suspicion
from likewise.statistics.neighbors import nearest
from likewise.statistics.uncertainty import uncertainty

SCHEMA = 1
Arrays = dict[str, np.ndarray]
Stage = Callable[[], Mapping[str, Tensor]]


def analyze(
    model: nn.Module | Network,
    dataset: Any,
    labels: Any = None,
    *,
    out: str | Path = "run",
    readout: Readout = all_outputs,
    parameters: Any = None,
    neighbors: int = 10,
    max_memory: int = 2**31,
) -> Analysis:
    """Return an Analysis of a data set by a model, kept in the folder `out`; one that is there goes on.

    Density of each sample, how freely its prediction moves, its most similar samples, and, where labels are
    classes, which of them look wrong. Two passes over the data for the first two, all pairs once each for
    neighbors and votes, with gradients centered about their mean.
    """
    net = model if isinstance(model, Network) else Network(model, readout, parameters)
    data = dataset if isinstance(dataset, Batches) else batches(dataset, labels=labels)
    options = {"readout": _name(net.readout), "parameters": list(net.names), "neighbors": neighbors}
    run = _Run(Path(out), {"model": _model_print(net), "data": _data_print(data), "options": options})
    if not run.finished:
        plain = GramMatrix(net, data, max_memory=max_memory)
        stages = _stages(
            plain, GramMatrix(net, data, centered=True, max_memory=max_memory), data.labels(), neighbors
        )
        for name, stage in stages.items():
            run.stage(name, stage)
        run.finish(data.n)
    return Analysis(run.folder)


def _stages(plain: GramMatrix, centered: GramMatrix, labels: Tensor | None, k: int) -> dict[str, Stage]:
    """Return what is to be done, in order, by name."""

    def passes() -> Mapping[str, Tensor]:
        found = {"density": soft_neighbors(plain) / plain.shape[1], "uncertainty": uncertainty(plain)}
        outputs = plain.outputs()
        if labels is None or not _are_classes(labels) or outputs.shape[1] < 2:
            return found
        return {**found, "prediction": outputs.argmax(1), "label": labels}

    def closest() -> Mapping[str, Tensor]:
        found = nearest(centered, k)
        return {"indices": found.indices, "similarities": found.similarities}

    def votes() -> Mapping[str, Tensor]:
        return label_suspicion(centered, labels)._asdict()

    with_votes = {"votes": votes} if labels is not None and _are_classes(labels) else {}
    return {"passes": passes, "neighbors": closest, **with_votes}


def _are_classes(labels: Tensor) -> bool:
    return not labels.is_floating_point() and labels.dim() == 1


class _Run:
    """A folder that stages write into, one after another."""

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self.folder, self._manifest = folder, folder / "manifest.json"
        if self._manifest.exists():
            self._state = json.loads(self._manifest.read_text())
            self._refuse_another(identity)
            if self.finished:
                self._tidy()
        elif folder.exists() and any(not _is_part(path) for path in folder.iterdir()):
            raise ValueError(f"{folder} holds something else than a run: choose another folder.")
        else:
            folder.mkdir(parents=True, exist_ok=True)
            versions = {"torch": torch.__version__, "numpy": np.__version__}
            self._state = {
                "schema": SCHEMA,
                "versions": versions,
                **identity,
                "stages": {},
                "finished": False,
            }
            self._save()

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        return bool(self._state["finished"])

    def stage(self, name: str, stage: Stage) -> None:
        """Do a stage, unless it is there as it was left."""
        path, known = self.folder / "stages" / f"{name}.npz", self._state["stages"].get(name)
        if known is not None and path.exists() and _checksum(path) == known["sha256"]:
            return
        start = time.perf_counter()
        found = {key: value.cpu().numpy() for key, value in stage().items()}
        path.parent.mkdir(exist_ok=True)
        _replaced(path, lambda part: np.savez(part, allow_pickle=False, **found))
        seconds = round(time.perf_counter() - start, 3)
        self._state["stages"][name] = {"sha256": _checksum(path), "seconds": seconds}
        self._save()

    def finish(self, n: int) -> None:
        """Write the tables and drop the stages."""
        stages = {name: _loaded(self.folder / "stages" / f"{name}.npz") for name in self._state["stages"]}
        for name, columns in _tables(stages, n).items():
            path = self.folder / name
            _replaced(path, partial(_write_table, columns=columns))
            self._state.setdefault("files", {})[name] = _checksum(path)
        self._state["finished"] = True
        self._save()
        self._tidy()

    def _tidy(self) -> None:
        if (self.folder / "stages").exists():
            shutil.rmtree(self.folder / "stages")

    def _refuse_another(self, identity: dict[str, Any]) -> None:
        if self._state.get("schema") != SCHEMA:
            raise ValueError(f"{self.folder} is of another version of likewise: choose another folder.")
        for what, value in identity.items():
            if self._state[what] != value:
                raise ValueError(
                    f"{self.folder} is a run with another {what}, found {_short(self._state[what])}, not "
                    f"{_short(value)}: choose another folder, or delete that one."
                )

    def _save(self) -> None:
        text = json.dumps(self._state, indent=1)
        _replaced(self._manifest, lambda part: part.write_text(text))


def _tables(stages: dict[str, Arrays], n: int) -> dict[str, Arrays]:
    passes, closest, votes = stages["passes"], stages["neighbors"], stages.get("votes", {})
    k = closest["indices"].shape[1]
    samples: Arrays = {"sample": np.arange(n), **passes}
    samples["isolation"] = 1 - closest["similarities"][:, 0] if k else np.ones(n)
    renamed = {"suspicion": "label_suspicion", "suggested": "suggested_label"}
    samples |= {renamed.get(name, name): values for name, values in votes.items()}
    if "label" in samples and k:
        same = samples["label"][closest["indices"]] == samples["label"][:, None]
        samples["agreement"] = same.mean(1)
    pairs = {
        "sample": np.repeat(np.arange(n), k),
        "rank": np.tile(np.arange(k), n),
        "neighbor": closest["indices"].ravel(),
        "similarity": closest["similarities"].ravel(),
    }
    return {"samples.parquet": samples, "neighbors.parquet": pairs}


def _write_table(path: Path, columns: Arrays) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def _loaded(path: Path) -> Arrays:
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _replaced(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file under another name, see it to the disk, and give it its name: whole or not at all."""
    part = path.with_name(f"{path.stem}.part{path.suffix}")
    write(part)
    with part.open("rb+") as file:
        os.fsync(file.fileno())
    part.replace(path)


def _is_part(path: Path) -> bool:
    """Whether a file is what a run that was killed left half written."""
    return path.stem.endswith(".part")


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _model_print(net: Network) -> str:
    digest = hashlib.sha256(type(net.model).__name__.encode())
    for name, value in net.model.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(_bytes(value))
    return digest.hexdigest()


def _data_print(data: Batches) -> str:
    digest = hashlib.sha256(str(data.n).encode())
    for batch in data:
        for value in tree_leaves((batch.inputs, batch.labels)):
            if isinstance(value, Tensor):
                digest.update(_bytes(value))
    return digest.hexdigest()


def _bytes(value: Tensor) -> bytes:
    return value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _name(readout: Readout) -> str:
    return getattr(readout, "__name__", repr(readout))


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) < 60 else text[:57] + "..."
