"""The results of a run, read from its folder without the model: table, neighbors, summary, report."""

import warnings
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from likewise.locks import lock_folder
from likewise.manifest import MISSING, REPORT, DamagedRunError, check_integrity, read_manifest
from likewise.runs.review import DecisionReader, count_verdicts
from likewise.statistics.reliability import wilson_interval
from likewise.thumbnails import Picture
from likewise.wording import counted

if TYPE_CHECKING:
    import pandas

    from likewise.runs.notebook import ReviewWidget
    from likewise.runs.review import StaticReview


class Summary(NamedTuple):
    """A run in a few numbers."""

    samples: int
    label_issues: int | None  # labels that look wrong; None without classes
    isolated: int | None  # samples with too few neighbors to judge by; None without classes
    median_density: float  # share of the data that a sample is like
    seconds: float  # of all stages
    label_errors: tuple[int, int, int] | None = None  # how many labels seem wrong: at least, about, at most
    fit: str | None = None  # underfit, fit or overfit; None without classes


class Histogram(NamedTuple):
    """Histogram of the similarities of all samples to one."""

    edges: np.ndarray  # (bins + 1,)
    counts: np.ndarray  # (bins,)


class Precision(NamedTuple):
    """How many of the reviewed flagged labels are wrong."""

    wrong: int
    right: int
    unsure: int
    dropped: int  # samples to drop, whether their label is wrong or not
    share: float  # wrong / (wrong + right); NaN where none was decided
    low: float  # 95 % interval of it, by Wilson's formula
    high: float


class Analysis:
    """The results in a run folder, whose files are checked against their checksums when it is opened.

    Args:
        folder: The folder written by `analyze` or `likewise analyze`.

    Raises:
        FileNotFoundError: There is no run in the folder.
        DamagedRunError: Files of the run are missing or have changed.
        ValueError: The run is not finished, or belongs to another version of likewise.

    Example:
        >>> import tempfile, torch, likewise as lw
        >>> x, y, folder = torch.randn(60, 8), torch.arange(60) % 3, tempfile.mkdtemp()
        >>> _ = lw.analyze(torch.nn.Linear(8, 3), (x, y), out=folder)
        >>> run = lw.Analysis(folder)
        >>> len(run.table), len(run.neighbors(7, k=5))
        (60, 5)

    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest: dict[str, Any] = read_manifest(self.folder)
        if not self.manifest["finished"]:
            raise ValueError(
                f"The run in {self.folder} is not finished: repeat likewise.analyze to resume it."
            )
        damaged = check_integrity(self.folder).damaged
        if any(name != REPORT for name in damaged):
            raise DamagedRunError(self.folder, damaged)
        if damaged.get(REPORT, MISSING) != MISSING:  # no result is read from it
            warnings.warn(
                f"{self.folder / REPORT} is damaged: likewise report {self.folder} rewrites it.", stacklevel=2
            )

    @cached_property
    def table(self) -> "pandas.DataFrame":
        """One row per sample: density, novelty, uncertainty, and with classes label_suspicion and more."""
        return self._read("samples.parquet").set_index("sample")

    def neighbors(self, sample: int | str, k: int | None = None) -> "pandas.DataFrame":
        """Return the k most similar samples of a sample, by number or name, best first.

        Of a run of sketches they are by sketches, but for texts with marked passages, whose neighbors are exact:
        column `exact` of neighbors.parquet.
        """
        import pandas

        place = self.place(sample)
        columns = {"neighbor": self.neighbor_matrix[place], "similarity": self.similarity_matrix[place]}
        found = pandas.DataFrame(columns).rename_axis("rank")
        return found if k is None else found.head(k)

    @cached_property
    def neighbor_matrix(self) -> np.ndarray:
        """The nearest samples of each, best first, (n, k)."""
        return self._by_sample("neighbor")

    @cached_property
    def similarity_matrix(self) -> np.ndarray:
        """The similarities of the nearest samples of each, (n, k)."""
        return self._by_sample("similarity")

    @cached_property
    def coordinates(self) -> np.ndarray:
        """The samples along the leading directions of the kernel, (n, 10); the map shows two."""
        return np.stack(self._read("details.parquet")["coordinates"].to_numpy())

    @cached_property
    def pictures(self) -> dict[int, Picture]:
        """Pictures of samples by number: thumbnails, excerpts, rows."""
        rows = self._read("pictures.parquet").itertuples()
        return {int(row.sample): Picture(row.kind, row.content) for row in rows}

    @cached_property
    def duplicates(self) -> "pandas.DataFrame":
        """Pairs that are nearly the same to the network: first, second, similarity, input_similarity, same_label.

        With a column `split` of your own (`extra`), also first_split and second_split.
        """
        return self._read("duplicates.parquet")

    @cached_property
    def passages(self) -> "pandas.DataFrame | None":
        """Of a language model: excerpts of neighbors, and what their tokens contribute to the plain similarity.

        A row for each pair that it was computed of; None where similarities are no sums over tokens. `starts`, `ends`
        and `contributions` are lists, places in `text`; `unshown` is of tokens outside of it. See
        `likewise.matched_passages`.
        """
        return self._read("passages.parquet") if "passages.parquet" in self.manifest["files"] else None

    def place(self, sample: int | str) -> int:
        """Return the number of a sample given by number or name."""
        names = self.table.get("name")
        if isinstance(sample, str) and names is not None and (names == sample).any():
            return int((names == sample).to_numpy().argmax())
        if (isinstance(sample, str) and not sample.isdigit()) or int(sample) not in self.table.index:
            raise KeyError(
                f"There is no sample {sample}: samples are numbered from 0 to {len(self.table) - 1}."
            )
        return int(sample)

    def histogram(self, sample: int | str) -> Histogram:
        """Return the histogram of similarities of all samples to one, itself included."""
        return Histogram(np.array(self.manifest["edges"]), self._counts[self.place(sample)])

    @property
    def class_similarity(self) -> "pandas.DataFrame | None":
        """The mean similarity of different samples, class by class; None without classes."""
        return self._by_class(self.manifest.get("class_similarity"))

    @property
    def confusion(self) -> "pandas.DataFrame | None":
        """How many samples of a class (rows) have neighbors that vote for another (columns)."""
        if "suggested_label" not in self.table:
            return None
        classes = self.manifest["classes"]
        found = np.zeros((len(classes), len(classes)), dtype=int)
        np.add.at(found, (self.table["label"], self.table["suggested_label"]), 1)
        return self._by_class(found)

    @property
    def summary(self) -> Summary:
        """The run in a few numbers."""
        table, seconds = self.table, sum(s["seconds"] for s in self.manifest["stages"].values())
        issues = int(table["label_issue"].sum()) if "label_issue" in table else None
        isolated = int((table["status"] == "isolated").sum()) if "status" in table else None
        told, fit = self.manifest.get("wrong_labels"), self.manifest.get("fit")
        return Summary(
            len(table),
            issues,
            isolated,
            float(table["density"].median()),
            round(seconds, 1),
            None if told is None or told["errors"] is None else tuple(told["errors"]),
            None if fit is None else fit["verdict"],
        )

    def precision(self, decisions: str | Path | Mapping[int, str]) -> Precision:
        """Return how many of the reviewed flagged labels are wrong.

        `decisions`: the file that the report's review downloads, or sample -> "wrong", "right", "unsure", "drop" or
        "relabel". Samples to drop do not count, nor those that were not flagged.
        """
        given = (
            decisions
            if isinstance(decisions, Mapping)
            else {d.sample: d.verdict for d in self.decision_reader.read(Path(decisions))}
        )
        flagged = set(self.table.index[self.table["label_issue"]]) if "label_issue" in self.table else set()
        verdicts = [verdict for sample, verdict in given.items() if sample in flagged]
        counts = count_verdicts(verdicts)
        return Precision(*counts, *wilson_interval(counts.wrong, counts.wrong + counts.right))

    @property
    def decision_reader(self) -> DecisionReader:
        """Reads decisions about the samples of this run."""
        return DecisionReader(self.manifest, len(self.table))

    def show(self) -> "ReviewWidget | StaticReview":
        """Return the map with a lasso and the review queue, for a notebook.

        `.selected` holds the circled samples, `.decisions` the decisions, for `likewise.apply_decisions`. Without
        anywidget (`pip install "likewise[notebook]"`), the map and the most suspicious samples are static.
        """
        from likewise.runs.review import StaticReview

        try:
            from likewise.runs.notebook import ReviewWidget
        except ImportError:
            return StaticReview(self)
        return ReviewWidget(self)

    def report(self) -> Path:
        """Rewrite report.html, and return its path."""
        from likewise.report.pages import write_report

        with lock_folder(self.folder):
            return write_report(self.folder)

    def __repr__(self) -> str:
        s = self.summary
        labels = "" if s.label_issues is None else f", labels that look wrong: {s.label_issues:,}"
        told = self.manifest.get("wrong_labels") or {}
        if told.get("reason"):
            labels += " (one network cannot tell how many are wrong)"
        elif s.label_issues and not told.get("distinct", True):
            labels += " (not a group of their own: they may as well be rare or ambiguous)"
        return f"Analysis({counted(s.samples, 'sample')}{labels}; {self.folder})"

    def _repr_html_(self) -> str:
        column = "label_suspicion" if "label_suspicion" in self.table else "novelty"
        top = self.table.sort_values(column, ascending=False).head(10)
        return top.to_html(escape=True, float_format="{:.3f}".format)

    def _by_class(self, matrix: Any) -> "pandas.DataFrame | None":
        import pandas

        classes = self.manifest.get("classes")
        if matrix is None or classes is None:
            return None
        rows = np.array(matrix, dtype=None if isinstance(matrix, np.ndarray) else float)
        names = classes[: len(rows)]
        return pandas.DataFrame(rows, names, names)

    def _by_sample(self, column: str) -> np.ndarray:
        n = len(self.table)
        return self._pairs[column].to_numpy().reshape(n, len(self._pairs) // n)

    @cached_property
    def _pairs(self) -> "pandas.DataFrame":
        return self._read("neighbors.parquet")

    @cached_property
    def _counts(self) -> np.ndarray:
        return np.stack(self._read("details.parquet")["counts"].to_numpy())

    def _read(self, name: str) -> "pandas.DataFrame":
        import pandas

        # without threads: where memory for their stacks is lacking, pyarrow waits for ever
        return pandas.read_parquet(self.folder / name, use_threads=False, pre_buffer=False)
