"""A run folder: written stage by stage, by one process at a time, and refused to another run.

Each file is written whole, then noted in the manifest with its checksum: a run that is killed goes on after
the last stage that was noted. A finished run whose files were damaged is opened again, and what differs is
replaced.
"""

import copy
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from likewise import files
from likewise.distributed import on_first_rank
from likewise.identity import same_behavior
from likewise.locks import CREATED_NAME, LOCK_NAME, lock_folder
from likewise.manifest import (
    DIFFERENT,
    MISSING,
    NAME,
    REPORT,
    SCHEMA,
    DamagedRunError,
    check_integrity,
    check_report,
    read_manifest,
    write_manifest,
)
from likewise.version import VERSION

Arrays = dict[str, np.ndarray]
Stage = Callable[[], Mapping[str, Tensor]]
STAGES = "stages"
IDENTITY_KEY = b"likewise.identity"  # in the metadata of tables


@contextmanager
def open_folder(path: Path, identity: Mapping[str, Any], wait: float) -> "Iterator[RunStore]":
    """Hold a run folder for writing, on one rank for all; another process that holds it is waited for.

    Raises:
        ValueError: The folder holds another run, or something else.
        FolderLockedError: Another process held it for `wait` seconds.
    """
    files.make_folder(path)
    opened: list[RunStore] = []
    with ExitStack() as stack:

        def begin() -> None:
            stack.enter_context(lock_folder(path, wait))
            opened.append(RunStore(path, identity))

        on_first_rank(begin, "opening the folder")
        yield opened[0] if opened else FollowingStore(path, identity)


class RunStore:
    """A folder that stages write into, one after another; see `open_folder`."""

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path, self._identity = path, dict(identity)
        self.versions = {"likewise": VERSION, "torch": version("torch")}
        self._damaged: dict[str, str] = {}
        self._original: dict[str, Any] | None = None  # of a finished run that is being repaired
        self._remove_temporary()
        try:
            self.state = read_manifest(path)
        except FileNotFoundError:
            self._refuse_foreign_files()
            self.state = self._new_state()
            self.save()
        except DamagedRunError:
            self._refuse_tables_of_another()
            self.state = self._new_state()
            self.save()
        self._refuse_another()
        if self.finished:
            self._refuse_other_versions()
            self._check()

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to compute."""
        return bool(self.state["finished"])

    def needs(self, name: str) -> bool:
        """Whether a small file is missing, damaged, or of another state of the run."""
        if name == REPORT:
            return check_report(self.path) is not None
        return name in self._damaged or name not in self.state.get("files", {})

    def stage(self, name: str, stage: Stage, *, shared: bool = False, arrays: Collection[str] = ()) -> Arrays:
        """Return what a stage found, now or when it was done before by the same versions.

        Args:
            name: Of the stage.
            stage: Computes it.
            shared: Every rank calls it and finds the same; else rank 0 alone, and the others read its file.
            arrays: The names of what it finds, as far as they are known: a file that lacks one, because code of
                the same version number wrote it, is computed again.

        """
        path, found = self._stage_path(name), dict[str, np.ndarray]()
        if not self.missing([name], arrays):
            return _load_arrays(path)
        start, cpu = time.perf_counter(), time.process_time()

        def compute() -> None:
            found.update({key: _array(value) for key, value in stage().items()})

        def keep() -> None:
            if not found:
                compute()
            files.make_folder(path.parent)
            size = sum(values.nbytes for values in found.values())
            digest = files.write_atomically(
                path, lambda file: np.savez(file, allow_pickle=False, **found), size
            )
            self.state["stages"][name] = {
                "sha256": digest,
                "seconds": round(time.perf_counter() - start, 3),
                "cpu_seconds": round(time.process_time() - cpu, 3),
                "versions": self.versions,
            }
            self.save()

        if shared:
            compute()
        on_first_rank(keep, name)
        return found or _load_arrays(path)

    def read_stage(self, name: str) -> Arrays:
        """Return what a stage that is done found."""
        return _load_arrays(self._stage_path(name))

    def missing(self, names: Sequence[str], arrays: Collection[str] = ()) -> list[str]:
        """Return the stages, of those named, that are not done yet, or whose file lacks one of these arrays."""

        def look() -> list[str]:
            return [name for name in names if not self._is_usable(self._stage_path(name), name, arrays)]

        return list(on_first_rank(look, "looking for stages"))

    def adopt(self, source: Path, stages: Mapping[str, Any]) -> None:
        """Take over what stages of another folder found, checked; those that are here already stay.

        Raises:
            DamagedRunError: A file is missing there, or is not as it was written.

        """
        files.make_folder(self.path / STAGES)
        for name, entry in stages.items():
            if self.state["stages"].get(name, {}).get("sha256") == entry["sha256"] and not self.missing(
                [name]
            ):
                continue
            path = source / STAGES / f"{name}.npz"
            if not path.exists():
                raise DamagedRunError(source, {f"{STAGES}/{path.name}": MISSING})
            if files.copy_atomically(path, self._stage_path(name)) != entry["sha256"]:
                self._stage_path(name).unlink()
                raise DamagedRunError(source, {f"{STAGES}/{path.name}": DIFFERENT})
            self.state["stages"][name] = dict(entry)
        self.save()

    def has_damaged_stage(self) -> bool:
        """Whether a stage that was done is missing now, or not as it was written."""
        return bool(self.missing(list(self.state["stages"])))

    def finish_part(self) -> None:
        """Say that a part of a run is done; its stages stay, for the run that adopts them."""
        self.state["part_done"] = True
        self.save()

    def forget(self, prefix: str) -> None:
        """Drop what stages of such names found, to be recomputed."""
        for name in [name for name in self.state["stages"] if name.startswith(prefix)]:
            del self.state["stages"][name]
            (self.path / STAGES / f"{name}.npz").unlink(missing_ok=True)
        self.save()

    def write_text(self, name: str, text: str) -> None:
        """Write a small file, and note its checksum."""
        self._note(name, files.write_text(self.path / name, text))
        if self.finished:
            self.save()

    def write_table(self, name: str, columns: Mapping[str, Any]) -> None:
        """Write a table, and note its checksum; one that is there with the same bytes stays untouched."""
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.table(dict(columns))
        table = table.replace_schema_metadata({IDENTITY_KEY: self._identity_digest()})

        # Floats hardly repeat: a dictionary of them takes longer to write, and more bytes.
        repeating = [field.name for field in table.schema if not pyarrow.types.is_floating(field.type)]

        def write(file: BinaryIO) -> None:
            pyarrow.parquet.write_table(table, file, compression="zstd", use_dictionary=repeating)

        self._note(name, files.write_atomically(self.path / name, write, table.nbytes))

    def finish(self) -> None:
        """Say that nothing is left to do, and drop the stages."""
        if self._original is not None and self._original["files"] == self.state["files"]:
            self.state = self._original  # repaired: it says what the run took, not what its repair did
        else:
            self.state |= {**_peak(), "finished": True}
        self.save()
        self._drop_stages()

    def save(self) -> None:
        """Write the manifest."""
        write_manifest(self.path, self.state)

    def _new_state(self) -> dict[str, Any]:
        versions = {"python": sys.version.split()[0], **self.versions, "numpy": version("numpy")}
        return {"schema": SCHEMA, "versions": versions, **self._identity, "stages": {}, "finished": False}

    def _check(self) -> None:
        """Open a finished run again if one of its tables is damaged."""
        self._damaged = check_integrity(self.path).damaged
        if any(name.endswith(".parquet") for name in self._damaged):
            self._original = copy.deepcopy(self.state)
            self.state["finished"] = False
            self.save()
        else:
            self._drop_stages()

    def _stage_path(self, name: str) -> Path:
        return self.path / STAGES / f"{name}.npz"

    def _is_usable(self, path: Path, name: str, arrays: Collection[str]) -> bool:
        known = self.state["stages"].get(name)
        if known is None or known["versions"] != self.versions or not path.exists():
            return False
        return files.checksum(path) == known["sha256"] and set(arrays) <= _array_names(path)

    def _note(self, name: str, digest: str) -> None:
        self.state.setdefault("files", {})[name] = digest

    def _drop_stages(self) -> None:
        if (self.path / STAGES).exists():
            shutil.rmtree(self.path / STAGES)

    def _remove_temporary(self) -> None:
        """Remove what writers that were killed left half written."""
        for path in [*self.path.glob("*"), *(self.path / STAGES).glob("*")]:
            if files.is_temporary(path) and path.is_file():
                path.unlink()

    def _refuse_foreign_files(self) -> None:
        own = (LOCK_NAME, CREATED_NAME)
        if any(inner.name not in own for inner in self.path.iterdir()):
            raise ValueError(f"{self.path} holds something else than a run: choose another folder.")

    def _refuse_tables_of_another(self) -> None:
        """Raise if tables beside a damaged manifest say that they are of another run."""
        for path in self.path.glob("*.parquet"):
            found = _identity_in(path)
            if found is not None and found != self._identity_digest():
                raise ValueError(
                    f"{self.path / NAME} is damaged, and {path.name} beside it is of another run: choose "
                    "another folder, or delete that one."
                )

    def _identity_digest(self) -> bytes:
        """Return the digest of what must be equal, bit by bit, for the run to be the same."""
        exact = {name: value for name, value in self._identity.items() if name != "behavior"}
        return hashlib.sha256(json.dumps(exact, sort_keys=True).encode()).hexdigest().encode()

    def _refuse_another(self) -> None:
        for what, value in self._identity.items():
            there = self.state.get(what)
            same = same_behavior(there, value) if what == "behavior" and there else there == value
            if not same:
                raise ValueError(
                    f"{self.path} is a run with {describe_difference(what, there, value)}: choose another folder, or "
                    "delete that one."
                )

    def _refuse_other_versions(self) -> None:
        there = {name: self.state["versions"].get(name) for name in self.versions}
        if there != self.versions:
            raise ValueError(
                f"{self.path} is a finished run of other versions{_difference(there, self.versions)}: it "
                "can be read as it is (likewise.Analysis, likewise report); to compute it again choose "
                "another folder."
            )


class FollowingStore(RunStore):
    """The folder as ranks other than the first see it: they read what the first has written, and write nothing."""

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path, self._identity = path, dict(identity)
        self.versions = {"likewise": VERSION, "torch": version("torch")}
        self._damaged: dict[str, str] = {}
        self.state = read_manifest(path)

    def forget(self, prefix: str) -> None:
        """Do nothing: the first rank does."""

    def write_text(self, name: str, text: str) -> None:
        """Do nothing: the first rank does."""

    def write_table(self, name: str, columns: Mapping[str, Any]) -> None:
        """Do nothing: the first rank does."""

    def finish(self) -> None:
        """Do nothing: the first rank does."""

    def finish_part(self) -> None:
        """Do nothing: the first rank does."""

    def save(self) -> None:
        """Do nothing: the first rank does."""


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


def _array_names(path: Path) -> set[str]:
    with np.load(path, allow_pickle=False) as file:
        return set(file.files)


def _load_arrays(path: Path) -> Arrays:
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _identity_in(path: Path) -> bytes | None:
    """Return the identity of the run that a table is of, None where it cannot be read."""
    import pyarrow
    import pyarrow.parquet

    try:
        metadata = pyarrow.parquet.read_schema(path).metadata
    except (pyarrow.ArrowException, OSError):
        return None
    return None if metadata is None else metadata.get(IDENTITY_KEY)


def describe_difference(what: str, there: Any, here: Any) -> str:
    """Return in which of the things that make a run two runs differ, and how where that can be told in words."""
    names = {
        "behavior": "another model (its outputs or gradients differ)",
        "options": "other options",
        "data": "another data set",
        "versions": "other versions",
    }
    return names.get(what, f"another {what}") + ("" if what == "behavior" else _difference(there, here))


def _difference(there: Any, here: Any) -> str:
    """Return what differs, where that can be told in words."""
    if not isinstance(there, dict) or not isinstance(here, dict):
        return ""
    apart = [name for name in {**here, **there} if there.get(name) != here.get(name)]
    return " (" + ", ".join(f"{n}: there {there.get(n)!r:.60}, here {here.get(n)!r:.60}" for n in apart) + ")"
