"""What a run folder holds, as arrays."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from likewise.manifest import read_manifest


class Picture(NamedTuple):
    """What a person sees of a sample."""

    kind: str
    content: bytes


class Run(NamedTuple):
    """Everything that a report shows."""

    folder: Path
    manifest: dict[str, Any]
    settings: str
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
    import pyarrow.parquet

    known = read_manifest(folder)
    if not (folder / "samples.parquet").exists():
        raise ValueError(
            f"The run in {folder} is not finished: start it again to go on, then write its report."
        )
    samples = pyarrow.parquet.read_table(folder / "samples.parquet")
    columns = {name: samples[name].to_numpy() for name in samples.column_names}
    n = len(columns["sample"])
    pairs = pyarrow.parquet.read_table(folder / "neighbors.parquet")
    counts = pyarrow.parquet.read_table(folder / "details.parquet")["counts"].combine_chunks()
    pictures = pyarrow.parquet.read_table(folder / "pictures.parquet").to_pylist()
    return Run(
        folder=folder,
        manifest=known,
        settings=(folder / "settings.toml").read_text(encoding="utf-8"),
        columns=columns,
        indices=pairs["neighbor"].to_numpy().reshape(n, len(pairs) // n),
        similarities=pairs["similarity"].to_numpy().reshape(n, len(pairs) // n),
        counts=counts.flatten().to_numpy().reshape(n, -1),
        pictures={row["sample"]: Picture(row["kind"], row["content"]) for row in pictures},
    )
