"""cleanlab: the graph of neighbors, label and outlier scores, and an issue manager for its Datalab.

lab = Datalab(data, label_name="label")
lab.find_issues(knn_graph=scipy.sparse.load_npz("knn_graph.npz"))          # likewise export --to knn
register_issue_manager()
lab.find_issues(issue_types={"likewise_label": {"run": run}})                # or {"suspicion": label_suspicion(gram)}
"""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from likewise import files
from likewise.checks import check_type
from likewise.runs.export.tables import escape_formulas
from likewise.runs.result import Analysis
from likewise.statistics.label_issues import LabelSuspicion
from likewise.wording import counted

if TYPE_CHECKING:
    import pandas

ISSUE = "likewise_label"


def knn_graph(found: Analysis) -> Any:
    """Return the neighbors as cleanlab reads them: sparse (n, n) distances 1 − similarity, sorted."""
    from scipy.sparse import csr_matrix

    places, similar = found.neighbor_matrix, found.similarity_matrix
    n, k = places.shape
    distances = np.maximum(1 - similar, 1e-12)  # a zero would be no entry
    return csr_matrix((distances.ravel(), places.ravel(), np.arange(n + 1) * k), shape=(n, n))


def datalab_issues(found: Analysis) -> "pandas.DataFrame":
    """Return what `Datalab.get_issues` returns: scores from 0, worst, to 1, and labels by name."""
    import pandas

    table, classes = found.table, found.manifest.get("classes")
    if "label_issue" not in table or classes is None:
        raise ValueError(
            f"The run in {found.folder} has no labels that are classes: there are no label issues."
        )
    names = np.array(classes, dtype=object)
    return pandas.DataFrame(
        {
            "is_label_issue": table["label_issue"].to_numpy(),
            "label_score": (1 - table["label_suspicion"].to_numpy()).clip(0, 1),
            "given_label": names[table["label"].to_numpy()],
            "predicted_label": names[table["suggested_label"].to_numpy()],
            "outlier_score": (1 - table["novelty"].to_numpy()).clip(0, 1),
        }
    )


def register_issue_manager() -> type:
    """Make "likewise_label" a type of issue of cleanlab's Datalab, for classification; return its manager.

    `lab.find_issues(issue_types={"likewise_label": {"run": run}})` with a run on the same samples in the same order, or
    `{"suspicion": found}` with what `likewise.label_suspicion` returned for them.
    """
    import pandas
    from cleanlab.datalab.internal.issue_manager import IssueManager
    from cleanlab.datalab.internal.issue_manager_factory import REGISTRY, register
    from cleanlab.datalab.internal.task import Task

    known = REGISTRY[Task.CLASSIFICATION].get(ISSUE)
    if known is not None:
        return known

    class LikewiseLabelIssues(IssueManager):
        """Labels that the network's neighbors contradict."""

        description = "The samples that the network treats like this one carry another label."
        issue_name = ISSUE

        def find_issues(
            self, run: Analysis | None = None, suspicion: LabelSuspicion | None = None, **_: Any
        ) -> None:
            """Take issues and scores from a run, or from what `label_suspicion` returned."""
            if (run is None) == (suspicion is None):
                raise ValueError(
                    f'Give the run, or label suspicions: find_issues(issue_types={{"{ISSUE}": {{"run": run}}}}) or '
                    f'{{"suspicion": found}}.'
                )
            found = datalab_issues(run) if run is not None else _suspicion_issues(suspicion)
            if len(found) != len(self.datalab.data):
                raise ValueError(
                    f"The run judged {counted(len(found), 'sample')}, the Datalab has {len(self.datalab.data):,}: "
                    "they must be "
                    "the same samples, in the same order."
                )
            scores = found["label_score"].to_numpy()
            self.issues = pandas.DataFrame(
                {f"is_{self.issue_name}_issue": found["is_label_issue"], self.issue_score_key: scores}
            )
            self.summary = self.make_summary(score=float(scores.mean()))
            self.info = {"suggested_label": found["predicted_label"].to_numpy()}

    register(LikewiseLabelIssues, task="classification")
    return LikewiseLabelIssues


def _suspicion_issues(found: Any) -> "pandas.DataFrame":
    import pandas

    check_type("suspicion", found, LabelSuspicion, "what likewise.label_suspicion returned")
    return pandas.DataFrame(
        {
            "is_label_issue": found.flagged.cpu().numpy(),
            "label_score": (1 - found.suspicion.double().cpu().numpy()).clip(0, 1),
            "predicted_label": found.suggested.cpu().numpy(),
        }
    )


def write_graph(path: Path, found: Analysis) -> None:
    """Write the graph of neighbors as .npz."""
    from scipy.sparse import save_npz

    if path.suffix != ".npz":
        raise ValueError(f"A graph of neighbors is written as .npz, found {path.name}.")
    content = io.BytesIO()
    save_npz(content, knn_graph(found))
    files.write_bytes(path, content.getvalue())


def write_issues(path: Path, found: Analysis) -> None:
    """Write label and outlier scores as .csv."""
    files.write_text(path, escape_formulas(datalab_issues(found)).to_csv(None, index_label="sample"))
