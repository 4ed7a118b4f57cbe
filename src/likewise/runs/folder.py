"""A run folder: written stage by stage, whole or not at all, and refused to another model or data set.

Each file is written under another name, seen to the disk and renamed, then noted in the manifest with its
checksum: a run that is killed goes on after the last stage that was noted.
"""

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

SCHEMA = 3
Arrays = dict[str, np.ndarray]
Stage = Callable[[], Mapping[str, Tensor]]


class Folder:
    """A folder that stages write into, one after another."""

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path, self._manifest = path, path / "manifest.json"
        if self._manifest.exists():
            self.state: dict[str, Any] = json.loads(self._manifest.read_text())
            self._refuse_another(identity)
            if self.finished:
                self._tidy()
        elif path.exists() and any(not _is_part(inner) for inner in path.iterdir()):
            raise ValueError(f"{path} holds something else than a run: choose another folder.")
        else:
            path.mkdir(parents=True, exist_ok=True)
            names = ("likewise", "torch", "numpy")
            versions = {"python": sys.version.split()[0], **{name: version(name) for name in names}}
            self.state = {"schema": SCHEMA, "versions": versions, **identity, "stages": {}, "finished": False}
            self.save()

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        return bool(self.state["finished"])

    def stage(self, name: str, stage: Stage) -> Arrays:
        """Return what a stage found, now or when it was done before."""
        path, known = self.path / "stages" / f"{name}.npz", self.state["stages"].get(name)
        if known is not None and path.exists() and _checksum(path) == known["sha256"]:
            return _loaded(path)
        start = time.perf_counter()
        found = {key: _array(value) for key, value in stage().items()}
        path.parent.mkdir(exist_ok=True)
        replaced(path, lambda part: np.savez(part, allow_pickle=False, **found))
        seconds = round(time.perf_counter() - start, 3)
        self.state["stages"][name] = {"sha256": _checksum(path), "seconds": seconds}
        self.save()
        return found

    def forget(self, prefix: str) -> None:
        """Drop what stages of such names found, to be done anew."""
        for name in [name for name in self.state["stages"] if name.startswith(prefix)]:
            del self.state["stages"][name]
            (self.path / "stages" / f"{name}.npz").unlink(missing_ok=True)
        self.save()

    def write_text(self, name: str, text: str) -> None:
        """Write a small file, and note its checksum."""
        replaced(self.path / name, lambda part: part.write_text(text, encoding="utf-8"))
        self._note(name)

    def write_table(self, name: str, columns: Mapping[str, Any]) -> None:
        """Write a table, and note its checksum."""
        replaced(self.path / name, partial(_write_table, columns=columns))
        self._note(name)

    def finish(self) -> None:
        """Say that nothing is left to do, and drop the stages."""
        self.state |= {**_peak(), "finished": True}
        self.save()
        self._tidy()

    def save(self) -> None:
        """Write the manifest."""
        text = json.dumps(self.state, indent=1)
        replaced(self._manifest, lambda part: part.write_text(text, encoding="utf-8"))

    def _note(self, name: str) -> None:
        self.state.setdefault("files", {})[name] = _checksum(self.path / name)

    def _tidy(self) -> None:
        if (self.path / "stages").exists():
            shutil.rmtree(self.path / "stages")

    def _refuse_another(self, identity: dict[str, Any]) -> None:
        if self.state.get("schema") != SCHEMA:
            raise ValueError(f"{self.path} is of another version of likewise: choose another folder.")
        for what, value in identity.items():
            if self.state.get(what) != value:
                raise ValueError(
                    f"{self.path} is a run with another {what}{_difference(self.state.get(what), value)}: "
                    "choose another folder, or delete that one."
                )


def replaced(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file under another name, see it to the disk, and give it its name: whole or not at all."""
    part = path.with_name(f"{path.stem}.part{path.suffix}")
    write(part)
    with part.open("rb+") as file:
        os.fsync(file.fileno())
    part.replace(path)


def bytes_of(value: Tensor) -> bytes:
    """Return the bytes of a tensor."""
    return value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _array(value: Tensor) -> np.ndarray:
    return (value.float() if value.dtype == torch.bfloat16 else value).cpu().numpy()


def _peak() -> dict[str, int]:
    """Return the most memory that this process has used, where the system tells."""
    try:
        import resource
    except ImportError:  # not on Windows
        return {}
    unit = 1 if sys.platform == "darwin" else 1024
    return {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}


def _write_table(path: Path, columns: Mapping[str, Any]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(dict(columns)), path, compression="zstd")


def _loaded(path: Path) -> Arrays:
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _is_part(path: Path) -> bool:
    """Whether a file is what a run that was killed left half written."""
    return path.stem.endswith(".part")


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _difference(there: Any, here: Any) -> str:
    """Return what differs, where that can be told in words."""
    if not isinstance(there, dict) or not isinstance(here, dict):
        return ""
    apart = [name for name in here if there.get(name) != here[name]]
    return " (" + ", ".join(f"{n}: there {there.get(n)!r:.60}, here {here[n]!r:.60}" for n in apart) + ")"
