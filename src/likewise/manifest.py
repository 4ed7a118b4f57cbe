"""The manifest of a run folder, and whether the files that it names are as they were written.

manifest.json ends with the checksum of its own bytes, and report.html with that of its own and of the
manifest that it shows; all other files have theirs in the manifest. So every flipped bit is noticed.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from likewise import files

SCHEMA = 4
NAME, REPORT = "manifest.json", "report.html"
MISSING, DIFFERENT = "missing", "its checksum differs"
_ENDING = ',\n "sha256": "{}"\n}\n'


class DamagedRunError(ValueError):
    """Files of a run are not as they were written.

    Attributes:
        folder: The folder of the run.
        parts: What is wrong with each damaged file, by its name.
    """

    def __init__(self, folder: Path, parts: Mapping[str, str]) -> None:
        self.folder, self.parts = folder, dict(parts)
        listed = ", ".join(f"{name} ({reason})" for name, reason in parts.items())
        super().__init__(
            f"The run in {folder} is damaged: {listed}. The same command, or call of likewise.analyze, that "
            "wrote it rebuilds what is damaged."
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


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return what the manifest of a folder says.

    Raises:
        FileNotFoundError: There is no run in the folder.
        DamagedRunError: The manifest is not as it was written.
        ValueError: The run is of another version of likewise.
    """
    path = folder / NAME
    if not path.exists():
        raise FileNotFoundError(f"{folder} holds no run: there is no {NAME} in it.")
    content = path.read_bytes()
    if not files.is_sealed(content, _ENDING):
        _refuse_schema(folder, _unsealed_schema(content))
        raise DamagedRunError(folder, {NAME: DIFFERENT})
    state: dict[str, Any] = json.loads(content)
    _refuse_schema(folder, state["schema"])
    del state["sha256"]
    return state


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


def _unsealed_schema(content: bytes) -> int:
    """Return the schema number of a manifest from before they were sealed, else the present one."""
    try:
        schema = json.loads(content).get("schema")
    except (ValueError, AttributeError):
        return SCHEMA
    return schema if schema in (1, 2, 3) else SCHEMA


def _refuse_schema(folder: Path, schema: int) -> None:
    if schema != SCHEMA:
        raise ValueError(
            f"{folder} holds a run of another version of likewise (schema {schema}; this version reads and "
            f"writes {SCHEMA}): choose another folder."
        )
