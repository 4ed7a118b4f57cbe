"""What a run folder holds, as arrays."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import numpy as np

from likewise.escapes import escape_controls
from likewise.manifest import read_manifest


class Picture(NamedTuple):
    """What a person sees of a sample."""

    kind: str
    content: bytes


class Run(NamedTuple):
    """Everything that a report shows: names and texts with control characters written out, no full paths."""

    manifest: dict[str, Any]
    settings: dict[str, str]
    columns: dict[str, np.ndarray]
    indices: np.ndarray  # (n, k)
    similarities: np.ndarray  # (n, k)
    counts: np.ndarray  # (n, bins)
    pictures: dict[int, Picture]

    @property
    def n(self) -> int:
        """The number of samples."""
        return len(self.columns["sample"])

    @property
    def costs(self) -> dict[str, float]:
        """The seconds of each stage; the parts of a stage together."""
        found: dict[str, float] = {}
        for name, stage in self.manifest["stages"].items():
            what = name.split("-")[0]
            found[what] = found.get(what, 0.0) + stage["seconds"]
        return found

    @property
    def own_columns(self) -> list[str]:
        """The columns that the user added."""
        return [name for name in self.manifest.get("own_columns", []) if name in self.columns]


def read_run(folder: Path) -> Run:
    """Return a finished run, or say what is missing."""
    known = read_manifest(folder)
    if not (folder / "samples.parquet").exists():
        raise ValueError(
            f"The run in {folder} is not finished: start it again to go on, then write its report."
        )
    samples = _read_table(folder / "samples.parquet")
    columns = {escape_controls(name): _escaped(samples[name].to_numpy()) for name in samples.column_names}
    n = len(columns["sample"])
    pairs = _read_table(folder / "neighbors.parquet")
    counts = _read_table(folder / "details.parquet")["counts"].combine_chunks()
    pictures = _read_table(folder / "pictures.parquet").to_pylist()
    return Run(
        manifest=_shown_manifest(known),
        settings=_shown_settings(tomllib.loads((folder / "settings.toml").read_text(encoding="utf-8"))),
        columns=columns,
        indices=pairs["neighbor"].to_numpy().reshape(n, len(pairs) // n),
        similarities=pairs["similarity"].to_numpy().reshape(n, len(pairs) // n),
        counts=counts.flatten().to_numpy().reshape(n, -1),
        pictures={row["sample"]: Picture(row["kind"], row["content"]) for row in pictures},
    )


def _escaped(values: np.ndarray) -> np.ndarray:
    if values.dtype != object:
        return values
    return np.array([escape_controls(v) if isinstance(v, str) else v for v in values], dtype=object)


def _shown_manifest(manifest: Mapping[str, Any]) -> dict[str, Any]:
    names = {name: manifest.get(name) for name in ("classes", "own_columns")}
    shown = {key: [escape_controls(name) for name in given] for key, given in names.items() if given}
    return {**manifest, **shown}


def _shown_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return settings as text, of a path from the root or from someone's home only the last part."""
    return {name: escape_controls(_written(value)) for name, value in settings.items()}


def _written(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_written(part) for part in value)
    if not isinstance(value, str):
        return json.dumps(value)
    paths = (PurePosixPath(value), PureWindowsPath(value))
    absolute = [path for path in paths if path.is_absolute() or value.startswith("~")]
    return f"…/{min((path.name for path in absolute), key=len)}" if absolute else value


def _read_table(path: Path) -> Any:
    """Return a table, read without threads: pyarrow waits for ever if memory for their stacks is short."""
    import pyarrow.parquet

    return pyarrow.parquet.read_table(path, use_threads=False, pre_buffer=False)
