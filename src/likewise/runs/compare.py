"""Compare two runs on the same data, such as two checkpoints: what does the network treat differently?"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from likewise import files
from likewise.report.pages import comparison_page
from likewise.report.payload import read_run
from likewise.report.verdict import percent
from likewise.runs.result import Analysis

if TYPE_CHECKING:
    import pandas


class ComparisonSummary(NamedTuple):
    """Two runs in a few numbers."""

    samples: int
    kept_neighbors: float  # mean share of a sample's neighbors that are so in both
    density_correlation: (
        float | None
    )  # Spearman's, of the two runs; None where all densities of one are equal
    median_density_before: float
    median_density_after: float
    label_issues_gone: int | None
    label_issues_new: int | None
    predictions_changed: int | None


class Comparison(NamedTuple):
    """Whose neighbors changed, whose density fell."""

    summary: ComparisonSummary
    changes: "pandas.DataFrame"  # kept_neighbors, density_before, density_after, density_rank_change


def compare_runs(before: Analysis, after: Analysis, *, across_settings: bool = False) -> Comparison:
    """Compare two runs on the same samples.

    Args:
        before: The earlier run.
        after: The later run, on the same data.
        across_settings: Also compare runs with different outputs (readout) or parameters; differences then do not come
            from the network alone.

    Raises:
        ValueError: The runs have different data, or different outputs or parameters.
    """
    import pandas

    _refuse_other_data(before, after)
    _refuse_other_settings(before, after, across_settings)
    first, second = before.table, after.table
    ranks = [table["density"].rank(pct=True) for table in (first, second)]
    kept = _kept_share(before.neighbor_matrix, after.neighbor_matrix)
    changes = pandas.DataFrame(
        {
            "kept_neighbors": kept,
            "density_before": first["density"],
            "density_after": second["density"],
            "density_rank_change": ranks[1] - ranks[0],
        }
    )
    if "name" in first:
        changes.insert(0, "name", first["name"])
    gone, new = None, None
    if "label_issue" in first and "label_issue" in second:
        gone = int((first["label_issue"] & ~second["label_issue"]).sum())
        new = int((second["label_issue"] & ~first["label_issue"]).sum())
    predicted = "prediction" in first and "prediction" in second
    summary = ComparisonSummary(
        samples=len(first),
        kept_neighbors=float(np.mean(kept)) if len(kept) else 0.0,
        density_correlation=_rank_correlation(first["density"], second["density"]),
        median_density_before=float(first["density"].median()),
        median_density_after=float(second["density"].median()),
        label_issues_gone=gone,
        label_issues_new=new,
        predictions_changed=int((first["prediction"] != second["prediction"]).sum()) if predicted else None,
    )
    return Comparison(summary, changes)


def write_comparison(
    before: Analysis, after: Analysis, path: str | Path, *, count: int = 24, across_settings: bool = False
) -> Path:
    """Write a page that shows two runs side by side: the samples whose neighbors changed most, with pictures.

    Args:
        before: A run.
        after: Another one, on the same data.
        path: Of the page.
        count: How many samples.
        across_settings: As of `compare_runs`.

    """
    found = compare_runs(before, after, across_settings=across_settings)
    summary, changes = found.summary, found.changes
    order = changes.assign(rank=changes["density_rank_change"].abs()).sort_values(
        ["kept_neighbors", "rank"], ascending=[True, False], kind="stable"
    )
    headline = f"{percent(summary.kept_neighbors)} of the neighbors stay the same."
    text = comparison_page(
        read_run(before.folder),
        read_run(after.folder),
        headline,
        _lines(summary),
        order.index[:count].tolist(),
    )
    files.write_text(Path(path), text)
    return Path(path)


def _rank_correlation(first: "pandas.Series", second: "pandas.Series") -> float | None:
    """Return Spearman's correlation of the values that both have; None if those of one are all the same."""
    known = first.notna() & second.notna()
    if min(first[known].nunique(), second[known].nunique()) < 2:
        return None
    return float(np.corrcoef(first[known].rank(), second[known].rank())[0, 1])


def _lines(summary: ComparisonSummary) -> list[tuple[str, str]]:
    correlation = summary.density_correlation
    found = [
        ("Neighbors that stay", f"{percent(summary.kept_neighbors)}, the mean over samples"),
        (
            "Mean similarity to all others",
            f"median {summary.median_density_before:.3f}, then {summary.median_density_after:.3f}"
            + ("" if correlation is None else f"; rank correlation {correlation:.2f}"),
        ),
    ]
    if summary.predictions_changed is not None:
        found.append(("Predictions that changed", f"{summary.predictions_changed:,} of {summary.samples:,}"))
    if summary.label_issues_gone is not None:
        found.append(
            (
                "Labels that look wrong",
                f"{summary.label_issues_gone:,} no longer do, {summary.label_issues_new:,} newly do",
            )
        )
    return found


def _refuse_other_settings(before: Analysis, after: Analysis, across_settings: bool) -> None:
    for name in ("readout", "parameters"):
        found = [run.manifest["options"][name] for run in (before, after)]
        if found[0] != found[1] and not across_settings:
            shown = [", ".join(value) if isinstance(value, list) else str(value) for value in found]
            raise ValueError(
                f"{before.folder} and {after.folder} compared other things: {name} {_cut(shown[0])} and "
                f"{_cut(shown[1])}. Differences would not come from the network alone: run both with the same "
                f"--{name}, or pass --across-settings (across_settings=True)."
            )


def _cut(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:79]}…"


def neighbors_side_by_side(
    before: Analysis,
    after: Analysis,
    sample: int | str,
    k: int | None = None,
    *,
    across_settings: bool = False,
) -> "pandas.DataFrame":
    """Return the neighbors of a sample in two runs, best first: who left, who came, who stayed.

    Args:
        before: A run.
        after: Another one, on the same data.
        sample: By number or name.
        k: How many neighbors; all that both runs keep if None.
        across_settings: As of `compare_runs`.

    Returns:
        For each rank: neighbor, name and label where there are any, similarity and whether it `stays` (`before_...`);
        neighbor, ... and whether it `is_new` (`after_...`).

    """
    import pandas

    _refuse_other_data(before, after)
    _refuse_other_settings(before, after, across_settings)
    place = before.place(sample)
    most = min(before.neighbor_matrix.shape[1], after.neighbor_matrix.shape[1])
    k = most if k is None else min(k, most)
    columns: dict[str, Any] = {}
    sides = {"before": (before, after, "stays"), "after": (after, before, "is_new")}
    for side, (run, other, flag) in sides.items():
        near = run.neighbor_matrix[place, :k]
        shared = np.isin(near, other.neighbor_matrix[place, :k])
        columns[f"{side}_neighbor"] = near
        if "name" in run.table:
            columns[f"{side}_name"] = run.table["name"].to_numpy()[near]
        classes = run.manifest.get("classes")
        if "label" in run.table and classes is not None:
            columns[f"{side}_label"] = np.array(classes, dtype=object)[run.table["label"].to_numpy()[near]]
        columns[f"{side}_similarity"] = run.similarity_matrix[place, :k]
        columns[f"{side}_{flag}"] = shared if flag == "stays" else ~shared
    return pandas.DataFrame(columns).rename_axis("rank")


def _refuse_other_data(before: Analysis, after: Analysis) -> None:
    classes = [run.manifest.get("classes") or [] for run in (before, after)]
    if classes[0] != classes[1] and sorted(classes[0]) == sorted(classes[1]):
        raise ValueError(
            f"{before.folder} and {after.folder} have their classes in different orders ({_cut(', '.join(classes[0]))} "
            f"and {_cut(', '.join(classes[1]))}), so class numbers mean different things: run both with the same "
            "--classes."
        )
    if before.manifest["data"] != after.manifest["data"]:
        raise ValueError(
            f"{before.folder} and {after.folder} have different data ({len(before.table):,} and "
            f"{len(after.table):,} samples): compare two models, or checkpoints, on the same samples."
        )


def _kept_share(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the share of each row of `first` that is in the same row of `second`; 1 of no neighbors."""
    k = min(first.shape[1], second.shape[1])
    if k == 0:
        return np.ones(len(first))
    return (first[:, :k, None] == second[:, None, :k]).any(2).mean(1)
