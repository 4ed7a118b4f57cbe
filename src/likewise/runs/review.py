"""The samples of a run as a reviewer sees them one by one: plain values for a page, the most suspicious first."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from likewise.index.explanation import picture_text
from likewise.runs.result import Analysis
from likewise.thumbnails import Picture, escape_controls

NEIGHBORS = 8


class ReviewQueue:
    """Samples in the order of review: flagged ones by suspicion, then all others.

    Args:
        run: The run.
        find_picture: What to see of a sample that the run keeps no picture of.

    """

    def __init__(self, run: Analysis, find_picture: Callable[[int], Picture | None] | None = None) -> None:
        self.run, self._find_picture = run, find_picture
        table = run.table
        score = table.get("label_suspicion", table["novelty"]).to_numpy()
        flagged = (
            table["label_issue"].to_numpy() if "label_issue" in table else np.zeros(len(table), dtype=bool)
        )
        self.order = np.lexsort((-score, ~flagged))
        self.flagged = int(flagged.sum())

    def __len__(self) -> int:
        return len(self.order)

    def entries(self, start: int, count: int) -> list[dict[str, Any]]:
        """Return so many samples of the queue, from a place on, with their neighbors."""
        return [self.entry(int(i)) for i in self.order[start : start + count]]

    def entry(self, sample: int) -> dict[str, Any]:
        """Return a sample with its neighbors."""
        near = zip(
            self.run.neighbor_matrix[sample, :NEIGHBORS],
            self.run.similarity_matrix[sample, :NEIGHBORS],
            strict=True,
        )
        neighbors = [{**self.describe(int(i)), "similarity": float(similarity)} for i, similarity in near]
        return {**self.describe(sample), "neighbors": neighbors}

    def describe(self, sample: int) -> dict[str, Any]:
        """Return a sample alone."""
        row, table = self.run.table.iloc[sample], self.run.table
        found: dict[str, Any] = {
            "sample": sample,
            "name": escape_controls(str(row["name"])) if "name" in table else f"sample {sample}",
            "picture": describe_picture(self._picture(sample)),
        }
        for column in ("label", "prediction", "suggested_label"):
            if column in table and table[column].dtype.kind in "iu":
                found |= {column: int(row[column]), f"{column}_name": self.class_name(int(row[column]))}
        for column in ("label_suspicion", "chance_wrong", "novelty"):
            if column in table:
                value = float(row[column])
                found[column] = None if np.isnan(value) else value
        found["flagged"] = bool(row.get("label_issue", False))
        return found

    def class_name(self, number: int) -> str:
        """Return the name of a class, with control characters written out."""
        classes = self.run.manifest.get("classes") or []
        return escape_controls(classes[number]) if number < len(classes) else str(number)

    def _picture(self, sample: int) -> Picture | None:
        found = self.run.pictures.get(sample)
        return self._find_picture(sample) if found is None and self._find_picture is not None else found


def describe_picture(picture: Picture | None) -> dict[str, Any] | None:
    """Return what to see of a sample, for a page: images as data addresses, rows and signals as values."""
    if picture is None:
        return None
    if picture.kind in ("image", "text"):
        return {"kind": picture.kind, "content": picture_text(picture)}
    return {"kind": picture.kind, "content": json.loads(picture.content)}
