"""Results in the forms of other tools: `likewise export`.

tables        csv, parquet, TensorBoard's projector
suspects      which labels are sent to be reviewed, and what is shown of them
label_studio  tasks with suggested labels, and decisions from its export
argilla       records with suggested labels, and decisions from its export
fiftyone      images with mistakenness and uniqueness
spotlight     a table with embeddings and pictures, and a list of issues
datalab       graph of neighbors, label scores and an issue manager for cleanlab
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from likewise.runs.export.argilla import write_records
from likewise.runs.export.datalab import knn_graph, write_graph, write_issues
from likewise.runs.export.fiftyone import write_fiftyone
from likewise.runs.export.label_studio import write_tasks
from likewise.runs.export.spotlight import write_spotlight
from likewise.runs.export.suspects import Suspects, select_suspects
from likewise.runs.export.tables import escape_formulas, write_csv, write_parquet, write_projector
from likewise.runs.result import Analysis

__all__ = ["EXPORTS", "Export", "escape_formulas", "export_run", "knn_graph"]


class Export(NamedTuple):
    """A form in which a run, or its suspects, can be written."""

    name: str  # of the file or folder, inside the run unless another is named
    write: Callable[[Path, Analysis], None] | None = None
    write_suspects: Callable[[Path, Suspects], None] | None = None


EXPORTS = {
    "parquet": Export("samples-export.parquet", write_parquet),
    "csv": Export("samples.csv", write_csv),
    "knn": Export("knn_graph.npz", write_graph),
    "cleanlab": Export("cleanlab-issues.csv", write_issues),
    "projector": Export("projector", write_projector),
    "spotlight": Export("spotlight", write_spotlight),
    "fiftyone": Export("fiftyone", write_fiftyone),
    "label-studio": Export("label-studio", write_suspects=write_tasks),
    "argilla": Export("argilla", write_suspects=write_records),
}


def export_run(found: Analysis, to: str, out: Path | None = None, *, count: int | None = None) -> Path:
    """Write a run in a form that another tool reads; return where.

    Args:
        found: The run.
        to: One of EXPORTS.
        out: The file or folder; inside the run by default.
        count: For tools of annotation: how many of the most suspicious samples; all that are flagged if None.

    """
    if to not in EXPORTS:
        raise ValueError(f"There is no export to {to!r}: choose {', '.join(EXPORTS)}.")
    export = EXPORTS[to]
    path = out or found.folder / export.name
    own = (*found.manifest["files"], "manifest.json", "report.html", "index", "decisions.json")
    if path.resolve() in {(found.folder / name).resolve() for name in own}:
        raise ValueError(f"{path} is a file of the run itself: export to another.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {path.parent}.")
    if export.write_suspects is not None:
        export.write_suspects(path, select_suspects(found, count))
    elif count is not None:
        raise ValueError(f"All samples are exported to {to}: a count is for label-studio and argilla.")
    elif export.write is not None:
        export.write(path, found)
    return path
