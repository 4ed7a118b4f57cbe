"""The labels of a cross-validation as a table, most suspicious first."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from likewise import files
from likewise.statistics.crossval import CrossValidated
from likewise.statistics.label_issues import LabelSuspicion

NAME = "labels.csv"


def class_name(number: int, classes: Sequence[str] | None) -> str:
    """Return the name of a class, or its number where it has none."""
    return str(classes[number]) if classes is not None and number < len(classes) else str(number)


def write_labels(
    folder: Path,
    found: CrossValidated,
    judged: LabelSuspicion,
    names: Sequence[str] | None,
    classes: Sequence[str] | None,
) -> Path:
    """Write labels.csv, with the columns of `likewise analyze`, and return where it is."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = ("label", "suggested_label", "label_suspicion", "label_issue", "chance_wrong", "probability")
    writer.writerow(["sample", *([] if names is None else ["name"]), *columns])
    mine = found.probabilities.gather(1, found.labels[:, None])[:, 0]
    for i in judged.suspicion.argsort(descending=True, stable=True).tolist():
        writer.writerow(
            [
                i,
                *([] if names is None else [names[i]]),
                class_name(int(found.labels[i]), classes),
                class_name(int(judged.suggested[i]), classes),
                f"{judged.suspicion[i]:.6g}",
                int(judged.flagged[i]),
                f"{judged.chance_wrong[i]:.6g}",
                f"{mine[i]:.6g}",
            ]
        )
    files.write_text(folder / NAME, text.getvalue())
    return folder / NAME
