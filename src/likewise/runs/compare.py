"""Two runs on the same data, two checkpoints say: what has the network come to see differently?"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from likewise.runs.result import Analysis

if TYPE_CHECKING:
    import pandas


class ComparisonSummary(NamedTuple):
    """Two runs in a few numbers."""

    samples: int
    kept_neighbors: float  # mean share of a sample's neighbors that are so in both
    density_correlation: float  # Spearman's, between the two runs
    median_density_before: float
    median_density_after: float
    label_issues_gone: int | None
    label_issues_new: int | None
    predictions_changed: int | None


class Comparison(NamedTuple):
    """Whose neighbors changed, whose density fell."""

    summary: ComparisonSummary
    changes: "pandas.DataFrame"  # kept_neighbors, density_before, density_after, density_rank_change


def compare_runs(before: Analysis, after: Analysis) -> Comparison:
    """Return what changed from one run to another on the same samples."""
    import pandas

    if before.manifest["data"] != after.manifest["data"]:
        raise ValueError(
            f"{before.folder} and {after.folder} are of different data ({len(before.table):,} and "
            f"{len(after.table):,} samples): compare two models, or checkpoints, on the same samples."
        )
    first, second = before.table, after.table
    ranks = [table["density"].rank(pct=True) for table in (first, second)]
    kept = _kept(before.neighbor_matrix, after.neighbor_matrix)
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
        density_correlation=float(np.corrcoef(ranks[0], ranks[1])[0, 1]),
        median_density_before=float(first["density"].median()),
        median_density_after=float(second["density"].median()),
        label_issues_gone=gone,
        label_issues_new=new,
        predictions_changed=int((first["prediction"] != second["prediction"]).sum()) if predicted else None,
    )
    return Comparison(summary, changes)


def _kept(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the share of each row of `first` that is in the same row of `second`."""
    k = min(first.shape[1], second.shape[1])
    return (first[:, :k, None] == second[:, None, :k]).any(2).mean(1)
