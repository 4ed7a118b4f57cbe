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


def compare_runs(before: Analysis, after: Analysis, *, across_settings: bool = False) -> Comparison:
    """Return what changed from one run to another on the same samples.

    Args:
        before: A run.
        after: Another one, on the same data.
        across_settings: Compare also runs of other outputs (readout) or parameters; what differs is then not the
            network's doing alone.

    Raises:
        ValueError: The runs are of different data, or compared other outputs or parameters.
    """
    import pandas

    if before.manifest["data"] != after.manifest["data"]:
        raise ValueError(
            f"{before.folder} and {after.folder} are of different data ({len(before.table):,} and "
            f"{len(after.table):,} samples): compare two models, or checkpoints, on the same samples."
        )
    _refuse_other_settings(before, after, across_settings)
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


def _refuse_other_settings(before: Analysis, after: Analysis, across_settings: bool) -> None:
    for name in ("readout", "parameters"):
        found = [run.manifest["options"][name] for run in (before, after)]
        if found[0] != found[1] and not across_settings:
            shown = [", ".join(value) if isinstance(value, list) else str(value) for value in found]
            raise ValueError(
                f"{before.folder} and {after.folder} compared other things: {name} {_cut(shown[0])} and "
                f"{_cut(shown[1])}. Differences would not be the network's alone: run both with the same --{name}, or "
                "ask for it with --across-settings (across_settings=True)."
            )


def _cut(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:79]}…"


def _kept(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the share of each row of `first` that is in the same row of `second`."""
    k = min(first.shape[1], second.shape[1])
    return (first[:, :k, None] == second[:, None, :k]).any(2).mean(1)
