"""What a run found, read from its folder: a table, neighbors, a summary. No model is needed."""

import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pandas


class Summary(NamedTuple):
    """A run in a few numbers."""

    samples: int
    contested: int | None  # labels that the neighbors vote against; None without classes
    isolated: int | None  # too few neighbors to judge
    median_density: float  # share of the data that a sample is like
    seconds: float  # of all stages


class Analysis:
    """The results in a run folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        manifest = self.folder / "manifest.json"
        if not manifest.exists():
            raise FileNotFoundError(f"{self.folder} holds no run: there is no manifest.json in it.")
        self.manifest: dict[str, Any] = json.loads(manifest.read_text())
        if not self.manifest["finished"]:
            raise ValueError(
                f"The run in {self.folder} is not finished: call likewise.analyze again to go on."
            )

    @cached_property
    def table(self) -> "pandas.DataFrame":
        """One row a sample: density, isolation, uncertainty, and with classes label_suspicion and more."""
        return self._read("samples.parquet").set_index("sample")

    def neighbors(self, sample: int, k: int | None = None) -> "pandas.DataFrame":
        """Return the k most similar samples of a sample, best first: neighbor, similarity."""
        if sample not in self.table.index:
            raise KeyError(f"There is no sample {sample}: they are numbered from 0 to {len(self.table) - 1}.")
        found = self._pairs[self._pairs["sample"] == sample].drop(columns="sample").set_index("rank")
        return found if k is None else found.head(k)

    @property
    def summary(self) -> Summary:
        """The run in a few numbers."""
        table, seconds = self.table, sum(s["seconds"] for s in self.manifest["stages"].values())
        contested = int(table["contested"].sum()) if "contested" in table else None
        isolated = int(table["isolated"].sum()) if "isolated" in table else None
        return Summary(len(table), contested, isolated, float(table["density"].median()), round(seconds, 1))

    def __repr__(self) -> str:
        s = self.summary
        labels = "" if s.contested is None else f", {s.contested:,} labels contested, {s.isolated:,} isolated"
        return f"Analysis({s.samples:,} samples{labels}; {self.folder})"

    def _repr_html_(self) -> str:
        columns = "label_suspicion" if "label_suspicion" in self.table else "isolation"
        top = self.table.sort_values(columns, ascending=False).head(10)
        return top.to_html(escape=True, float_format="{:.3f}".format)

    @cached_property
    def _pairs(self) -> "pandas.DataFrame":
        return self._read("neighbors.parquet")

    def _read(self, name: str) -> "pandas.DataFrame":
        import pandas

        return pandas.read_parquet(self.folder / name)
