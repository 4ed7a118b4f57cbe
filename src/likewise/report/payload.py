"""The data of a report: a run folder read into arrays, packed as one gzipped blob for the page.

The blob is a JSON header, then arrays at offsets that are multiples of 8.
"""

import gzip
import json
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import numpy as np

from likewise.manifest import read_manifest
from likewise.report.suggestions import JUDGES, doubtful_suggestions, suggestion_judge
from likewise.report.words import WORDS, status_words
from likewise.thumbnails import Picture, escape_controls

RANKED = ("label_suspicion", "target_suspicion", "error", "novelty")  # columns that order samples
GZIP_LEVEL = 6  # 9 takes 2.7 times as long, for 0.4 % fewer bytes (measured 2026-11-18)


class Run(NamedTuple):
    """Everything that a report shows, with control characters escaped and without full paths."""

    manifest: dict[str, Any]
    settings: dict[str, str]
    columns: dict[str, np.ndarray]
    indices: np.ndarray  # (n, k)
    similarities: np.ndarray  # (n, k)
    counts: np.ndarray  # (n, bins)
    pictures: dict[int, Picture]
    directions: np.ndarray | None = None  # (n, 2) along the leading directions of the kernel, for the PCA map
    duplicates: dict[str, np.ndarray] | None = None  # first, second, similarity, input_similarity of pairs
    passages: list[dict[str, Any]] | None = None  # marked excerpts of neighbors, as passages.parquet has them
    folder: str = "RUN"  # its name, without the folders that it is in

    @property
    def n(self) -> int:
        """The number of samples."""
        return len(self.columns["sample"])

    @property
    def command(self) -> str:
        """The shell command that applies decisions to the data, run from the folder that contains the run."""
        return apply_command(self.folder, "decisions.json")

    @property
    def saved_command(self) -> str:
        """The same command for decisions saved in the run folder."""
        return apply_command(self.folder, f"{self.folder}/decisions.json")

    @property
    def costs(self) -> dict[str, float]:
        """The seconds of each stage; parts of a stage are added up."""
        found: dict[str, float] = {}
        for name, stage in self.manifest["stages"].items():
            what = name.split("-")[0]
            found[what] = found.get(what, 0.0) + stage["seconds"]
        return found

    @property
    def own_columns(self) -> list[str]:
        """The columns that the user added."""
        return [name for name in self.manifest.get("own_columns", []) if name in self.columns]


def apply_command(folder: str, decisions: str) -> str:
    """Return the shell command that applies a decisions file to the data of a run."""
    return f"likewise apply {shlex.quote(folder)} {shlex.quote(decisions)}"


def read_run(folder: Path) -> Run:
    """Read a finished run.

    Raises:
        ValueError: The run is not finished.

    """
    known = read_manifest(folder)
    if not (folder / "samples.parquet").exists():
        raise ValueError(
            f"The run in {folder} is not finished. Repeat the command that started it to resume it; then write its "
            "report."
        )
    samples = _read_table(folder / "samples.parquet")
    columns = {
        escape_controls(name): _escape_texts(samples[name].to_numpy()) for name in samples.column_names
    }
    n = len(columns["sample"])
    pairs = _read_table(folder / "neighbors.parquet")
    details = _read_table(folder / "details.parquet")
    counts = details["counts"].combine_chunks()
    coordinates = details["coordinates"].combine_chunks().flatten().to_numpy().reshape(n, -1)
    pictures = _read_table(folder / "pictures.parquet").to_pylist()
    return Run(
        manifest=_shown_manifest(known),
        settings=_shown_settings(tomllib.loads((folder / "settings.toml").read_text(encoding="utf-8"))),
        columns=columns,
        indices=pairs["neighbor"].to_numpy().reshape(n, len(pairs) // n),
        similarities=pairs["similarity"].to_numpy().reshape(n, len(pairs) // n),
        counts=counts.flatten().to_numpy().reshape(n, -1),
        pictures={row["sample"]: Picture(row["kind"], row["content"]) for row in pictures},
        directions=coordinates[:, :2],
        duplicates=_read_duplicates(folder),
        passages=_read_passages(folder),
        folder=escape_controls(folder.resolve().name),
    )


def pack_payload(run: Run, picture_source: str | None = None) -> bytes:
    """Return the data that the page's scripts read.

    Args:
        run: The run to show.
        picture_source: URL on its own origin from which a served page fetches pictures that the run does not hold, as
            JSON of kind and content, with {sample} in place of the sample's number; None shows the number instead.

    """
    blob = _Blob()
    manifest = run.manifest
    judge = suggestion_judge(manifest, run.columns)
    header: dict[str, Any] = {
        "n": run.n,
        "k": run.indices.shape[1],
        "edges": manifest["edges"],
        "threshold": manifest["options"]["threshold"],
        "classes": manifest["classes"],
        "classSimilarity": manifest.get("class_similarity"),
        "run": manifest["data"],
        "command": run.command,
        "words": {name: word._asdict() for name, word in WORDS.items()},
        "statuses": {name: word._asdict() for name, word in status_words(judge).items()},
        "spotCheck": manifest.get("spot_check"),
        "pictureSource": picture_source,
        "ownColumns": run.own_columns,
        "columns": {
            name: blob.column(values, name in RANKED)
            for name, values in run.columns.items()
            if name != "sample"
        },
        "directions": _directions(run, blob),
        "duplicates": _duplicates(run, blob),
        "passages": _passages(run, blob),
        "judge": {"name": judge, "says": JUDGES[judge]},
        "neighbors": blob.array(run.indices.astype("u4")),
        "doubtful": blob.array(doubtful_suggestions(run.columns, run.indices).astype("u1")),
        "similarities": blob.array(np.round((run.similarities.clip(-1, 1) + 1) * 5000).astype("u2")),
        "counts": blob.array(run.counts.astype("u2" if run.n < 2**16 else "u4")),
        "pictures": {
            "samples": blob.array(np.array(list(run.pictures), dtype="u4")),
            "kinds": [picture.kind for picture in run.pictures.values()],
            "ends": blob.array(np.cumsum([len(p.content) for p in run.pictures.values()], dtype="u4")),
            "content": blob.add(b"".join(p.content for p in run.pictures.values())),
        },
    }
    text = json.dumps(header, ensure_ascii=False).encode()
    start = np.array([len(text)], dtype="<u4").tobytes()
    whole = start + text + b"\0" * (-(len(text) + 4) % 8) + blob.joined()
    return gzip.compress(whole, GZIP_LEVEL, mtime=0)


def _read_duplicates(folder: Path) -> dict[str, np.ndarray] | None:
    if not (folder / "duplicates.parquet").exists():  # a run of a version that did not search for them
        return None
    table = _read_table(folder / "duplicates.parquet")
    return {name: table[name].to_numpy() for name in ("first", "second", "similarity", "input_similarity")}


def _read_passages(folder: Path) -> list[dict[str, Any]] | None:
    if not (folder / "passages.parquet").exists():  # only language models have it
        return None
    found: list[dict[str, Any]] = _read_table(folder / "passages.parquet").to_pylist()
    return found


def _passages(run: Run, blob: "_Blob") -> dict[str, Any] | None:
    if not run.passages:  # the section "This run" says why
        return None
    rows, about = run.passages, run.manifest["passages"]
    ends = np.cumsum([len(row["starts"]) for row in rows], dtype="u4")
    numbers = {"sample": "u4", "neighbor": "u4", "similarity": "f4", "unshown": "f4"}
    numbers |= {"passage_start": "u4", "passage_end": "u4"}
    lists = {"starts": "u4", "ends": "u4", "contributions": "f4"}
    return {
        "samples": about["samples"],
        "perSample": about["neighbors"],
        "texts": [row["text"] for row in rows],
        "markEnds": blob.array(ends),
        **{name: blob.array(np.array([row[name] for row in rows], kind)) for name, kind in numbers.items()},
        **{
            name: blob.array(np.array([value for row in rows for value in row[name]], kind))
            for name, kind in lists.items()
        },
    }


def _duplicates(run: Run, blob: "_Blob") -> dict[str, Any] | None:
    if run.duplicates is None:
        return None
    pairs = run.duplicates
    numbers = {name: blob.array(pairs[name].astype("u4")) for name in ("first", "second")}
    return numbers | {
        name: blob.array(pairs[name].astype("f4")) for name in ("similarity", "input_similarity")
    }


def _directions(run: Run, blob: "_Blob") -> list[dict[str, Any]] | None:
    if run.directions is None or run.manifest["options"]["layout"] == "pca":
        return None  # the map shows them already
    return [blob.array(_short(run.directions[:, axis])) for axis in (0, 1)]


def _escape_texts(values: np.ndarray) -> np.ndarray:
    if values.dtype != object:
        return values
    return np.array([escape_controls(v) if isinstance(v, str) else v for v in values], dtype=object)


def _shown_manifest(manifest: Mapping[str, Any]) -> dict[str, Any]:
    names = {name: manifest.get(name) for name in ("classes", "own_columns")}
    shown = {key: [escape_controls(name) for name in given] for key, given in names.items() if given}
    return {**manifest, **shown}


def _shown_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return settings as text, with only the last part of a path from the root or a home folder."""
    return {name: escape_controls(_setting_text(value)) for name, value in settings.items()}


def _setting_text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_setting_text(part) for part in value)
    if not isinstance(value, str):
        return json.dumps(value)
    paths = (PurePosixPath(value), PureWindowsPath(value))
    absolute = [path for path in paths if path.is_absolute() or value.startswith("~")]
    return f"…/{min((path.name for path in absolute), key=len)}" if absolute else value


def _read_table(path: Path) -> Any:
    """Read a table without threads: pyarrow waits forever if there is no memory for their stacks."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path, pre_buffer=False) as file:  # half the time of read_table
        return file.read(use_threads=False)


class _Blob:
    """Arrays stored one after another, with their offsets."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def array(self, values: np.ndarray) -> dict[str, Any]:
        """Append an array; return its type and location."""
        little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
        return {"type": values.dtype.str[1:], **self.add(little.tobytes())}

    def add(self, content: bytes) -> dict[str, Any]:
        """Append bytes; return their location."""
        location = {"at": self._size, "bytes": len(content)}
        padded = content + b"\0" * (-len(content) % 8)
        self._parts.append(padded)
        self._size += len(padded)
        return location

    def column(self, values: np.ndarray, exact: bool) -> dict[str, Any]:
        """Append a column; return its kind and location. Texts are stored as codes."""
        kind = values.dtype.kind
        if kind == "f":
            return {**self.array(values.astype("f4") if exact else _short(values)), "kind": kind}
        small = kind in "biu" and (not len(values) or abs(values.astype(object)).max() < 2**31)
        if small:
            return {
                **self.array(values.astype("u1" if kind == "b" else "i4")),
                "kind": "truth" if kind == "b" else "i",
            }
        texts, codes = np.unique(values.astype(str), return_inverse=True)
        return {**self.array(codes.astype("u4")), "kind": "text", "texts": texts.tolist()}

    def joined(self) -> bytes:
        """Return all bytes."""
        return b"".join(self._parts)


def _short(values: np.ndarray) -> np.ndarray:
    """Return float32 with 12 bits of fraction, about four digits, which compress to half the size."""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    rounded = ((bits + np.uint32(1 << 10)) & np.uint32(0xFFFFF800)).view("<f4")
    return np.where(np.isfinite(values), rounded, values).astype("f4")
