"""The manifest of a folder of results, and whether the files that it names are as they were written.

A folder is a run or an index, each with a schema of its own. manifest.json ends with the checksum of its own
bytes, and report.html with that of its own and of the manifest that it shows; all other files have theirs in the
manifest. So every flipped bit is noticed.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from likewise import files
from likewise.version import VERSION

SCHEMA = 5
NAME, REPORT = "manifest.json", "report.html"
MISSING, DIFFERENT = "missing", "its checksum differs"
_ENDING = ',\n "sha256": "{}"\n}\n'


class DamagedRunError(ValueError):
    """Files of a run are not as they were written.

    Attributes:
        folder: The folder of the run.
        parts: What is wrong with each damaged file, by its name.
    """

    noun = "run"
    advice = "The same command, or call of likewise.analyze, that wrote it rebuilds what is damaged."

    def __init__(self, folder: Path, parts: Mapping[str, str]) -> None:
        self.folder, self.parts = folder, dict(parts)
        listed = ", ".join(f"{name} ({reason})" for name, reason in parts.items())
        super().__init__(f"The {self.noun} in {folder} is damaged: {listed}. {self.advice}")


class DamagedIndexError(DamagedRunError):
    """Files of an index are not as they were written; attributes as for a run."""

    noun = "index"
    advice = (
        "Delete the damaged files and give the same command, or call of likewise.build_index, that wrote it: "
        "only what is missing is computed again."
    )


class Kind(NamedTuple):
    """What a folder holds."""

    noun: str
    schema: int  # that this version reads and writes
    damaged: type[DamagedRunError]
    again: str  # what to do with a folder of another schema


RUN = Kind(
    "run",
    SCHEMA,
    DamagedRunError,
    "Analyze again into a new folder: likewise analyze RUN/settings.toml --out NEW, or likewise.analyze(out=NEW).",
)


class Integrity(NamedTuple):
    """Whether a run is as it was written."""

    finished: bool
    files: int  # that were checked
    bytes: int  # of them
    damaged: dict[str, str]  # what is wrong with each damaged file, by its name

    @property
    def whole(self) -> bool:
        """Whether the run is finished and undamaged."""
        return self.finished and not self.damaged


def write_manifest(folder: Path, state: Mapping[str, Any]) -> None:
    """Write the manifest, with the checksum of its own bytes at its end."""
    body = json.dumps(state, indent=1).removesuffix("\n}")
    files.write_text(folder / NAME, files.seal(body, _ENDING))


def read_manifest(folder: Path, kind: Kind = RUN) -> dict[str, Any]:
    """Return what the manifest of a folder says.

    Args:
        folder: The folder.
        kind: What it should hold.

    Raises:
        FileNotFoundError: There is no such thing in the folder.
        DamagedRunError: The manifest is not as it was written; DamagedIndexError of an index.
        ValueError: It is something else, or of another version of likewise.
    """
    path = folder / NAME
    if not path.exists():
        raise FileNotFoundError(f"{folder} holds no {kind.noun}: there is no {NAME} in it.")
    content = path.read_bytes()
    if not files.is_sealed(content, _ENDING):
        if kind == RUN:
            _refuse_schema(folder, _unsealed(content), RUN)
        raise kind.damaged(folder, {NAME: DIFFERENT})
    state: dict[str, Any] = json.loads(content)
    if state.get("kind", RUN.noun) != kind.noun:
        raise ValueError(
            f"{folder} holds something else: {state.get('kind', RUN.noun)}, expected {kind.noun}."
        )
    _refuse_schema(folder, state, kind)
    del state["sha256"]
    return state


def kind_of(folder: Path) -> str:
    """Return what a folder says it holds, "run" or "index"; "run" where that cannot be read."""
    try:
        found = json.loads((folder / NAME).read_bytes()).get("kind", RUN.noun)
    except (OSError, ValueError, AttributeError):
        return RUN.noun
    return str(found)


def check_integrity(folder: Path) -> Integrity:
    """Return which files of a run are missing or differ from what was written.

    Raises:
        FileNotFoundError: There is no run in the folder.
        ValueError: The run is of another version of likewise.
    """
    try:
        state = read_manifest(folder)
    except DamagedRunError as error:
        return Integrity(False, 1, (folder / NAME).stat().st_size, error.parts)
    noted = dict(state.get("files", {}))
    if not state["finished"]:
        noted |= {f"stages/{name}.npz": stage["sha256"] for name, stage in state["stages"].items()}
    states = {name: _state_of(folder / name, expected) for name, expected in noted.items()}
    if state["finished"]:
        states[REPORT] = check_report(folder)
    sizes = [(folder / name).stat().st_size for name in (NAME, *states) if (folder / name).exists()]
    damaged = {name: found for name, found in states.items() if found is not None}
    return Integrity(state["finished"], len(sizes), sum(sizes), damaged)


def report_ending(folder: Path) -> str:
    """Return the ending of a report, which names the manifest that it shows; see `files.seal`."""
    return f"<!-- manifest {files.checksum(folder / NAME)} page {{}} -->\n"


def check_report(folder: Path) -> str | None:
    """Return what is wrong with the report of a finished run, None where it is as it was written."""
    path = folder / REPORT
    if not path.exists():
        return MISSING
    return None if files.is_sealed(path.read_bytes(), report_ending(folder)) else DIFFERENT


def _state_of(path: Path, expected: str) -> str | None:
    if not path.exists():
        return MISSING
    return None if files.checksum(path) == expected else DIFFERENT


def _unsealed(content: bytes) -> Mapping[str, Any]:
    """Return a manifest from before they were sealed (schemas 1 to 3), else one of the present schema."""
    try:
        state = json.loads(content)
    except ValueError:
        state = None
    old = isinstance(state, dict) and state.get("schema") in (1, 2, 3)
    return state if old else {"schema": SCHEMA}


def _refuse_schema(folder: Path, state: Mapping[str, Any], kind: Kind) -> None:
    if state["schema"] != kind.schema:
        writer = state.get("versions", {}).get("likewise", "unknown")
        raise ValueError(
            f"{folder} holds {'an' if kind.noun == 'index' else 'a'} {kind.noun} of another version of likewise: "
            f"written by {writer} with schema {state['schema']}, this is {VERSION} and reads and writes "
            f"schema {kind.schema}. {kind.again} Or read it with the version that wrote it."
        )
