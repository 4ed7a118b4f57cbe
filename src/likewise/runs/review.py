"""The samples of a run in review order, the most suspicious first, as plain values for a page."""

import html
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from likewise.index.explanation import picture_text
from likewise.report.suggestions import JUDGES, doubtful_suggestions, suggestion_judge
from likewise.thumbnails import Picture, escape_controls

if TYPE_CHECKING:
    from likewise.runs.result import Analysis

NEIGHBORS = 8
SHOWN = 12
MOST_POINTS = 3000
# Okabe and Ito's colors, which color-blind readers can tell apart.
COLORS = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#d55e00",
    "#cc79a7",
    "#56b4e9",
    "#8c6d1f",
    "#7f7f7f",
    "#b8a800",
    "#6a3d9a",
)


class ReviewQueue:
    """Samples in review order: flagged ones by suspicion, then all others.

    Args:
        run: The run to review.
        find_picture: Returns the picture of a sample for which the run holds none.

    """

    def __init__(self, run: "Analysis", find_picture: Callable[[int], Picture | None] | None = None) -> None:
        self.run, self._find_picture = run, find_picture
        table = run.table
        score = table.get("label_suspicion", table["novelty"]).to_numpy()
        flagged = (
            table["label_issue"].to_numpy() if "label_issue" in table else np.zeros(len(table), dtype=bool)
        )
        self.order = np.lexsort((-score, ~flagged))
        self._doubtful = doubtful_suggestions(table, run.neighbor_matrix)
        self._judge = JUDGES[suggestion_judge(run.manifest, table)]
        self.flagged = int(flagged.sum())

    def __len__(self) -> int:
        return len(self.order)

    def entries(self, start: int, count: int) -> list[dict[str, Any]]:
        """Return `count` samples of the queue from position `start`, with their neighbors."""
        return [self.entry(int(i)) for i in self.order[start : start + count]]

    def entry(self, sample: int) -> dict[str, Any]:
        """Return a sample with its neighbors."""
        near = zip(
            self.run.neighbor_matrix[sample, :NEIGHBORS],
            self.run.similarity_matrix[sample, :NEIGHBORS],
            strict=True,
        )
        neighbors = [{**self.describe(int(i)), "similarity": float(similarity)} for i, similarity in near]
        found = {**self.describe(sample), "neighbors": neighbors}
        if "suggested_label" in found and found["suggested_label"] != found.get("label"):
            found["judge"] = f"{self._judge} {found['suggested_label_name']}"
        return found

    def describe(self, sample: int) -> dict[str, Any]:
        """Return a sample without its neighbors."""
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
        found["doubtful"] = bool(self._doubtful[sample])
        return found

    def class_name(self, number: int) -> str:
        """Return the name of a class, with control characters escaped."""
        classes = self.run.manifest.get("classes") or []
        return escape_controls(classes[number]) if number < len(classes) else str(number)

    def _picture(self, sample: int) -> Picture | None:
        found = self.run.pictures.get(sample)
        return self._find_picture(sample) if found is None and self._find_picture is not None else found


def describe_picture(picture: Picture | None) -> dict[str, Any] | None:
    """Return a picture as plain values for a page: images as data URLs, rows and signals as values."""
    if picture is None:
        return None
    if picture.kind in ("image", "text"):
        return {"kind": picture.kind, "content": picture_text(picture)}
    return {"kind": picture.kind, "content": json.loads(picture.content)}


class StaticReview:
    """The map and the most suspicious samples of a run as plain HTML, for places where widgets cannot run."""

    def __init__(self, run: "Analysis") -> None:
        self.run = run

    def _repr_html_(self) -> str:
        return static_html(self.run)


def static_html(run: "Analysis") -> str:
    """Return the map and the most suspicious samples as HTML without scripts; user data are escaped."""
    tiles = "".join(_tile(entry) for entry in ReviewQueue(run).entries(0, min(SHOWN, len(run.table))))
    return (
        '<div style="font:14px/1.4 system-ui,sans-serif">'
        f'{_static_map(run)}<div style="display:flex;flex-wrap:wrap;gap:10px;margin-top:10px">{tiles}</div></div>'
    )


def _tile(entry: dict[str, Any]) -> str:
    picture, name = entry["picture"], html.escape(entry["name"])
    if picture is None:
        shown = name
    elif picture["kind"] == "image":
        source = html.escape(picture["content"], quote=True)
        shown = f'<img src="{source}" alt="{name}" width="84" height="84" style="image-rendering:pixelated">'
    else:
        shown = html.escape(str(picture["content"])[:200])
    caption = html.escape(entry.get("label_name", ""))
    if entry["flagged"]:
        looks = "perhaps" if entry["doubtful"] else "looks like"
        caption += f", {looks} <b>{html.escape(entry['suggested_label_name'])}</b>"
    return f'<figure style="margin:0;width:110px;overflow:hidden">{shown}<figcaption>{caption}</figcaption></figure>'


def _static_map(run: "Analysis") -> str:
    table = run.table
    step = -(-len(table) // MOST_POINTS)
    some = table.iloc[::step]
    x, y = (_scale_to_percent(some[name].to_numpy()) for name in ("map_x", "map_y"))
    group = next((name for name in ("label", "prediction") if name in some), None)
    numbers = np.zeros(len(some), dtype=int)
    if group is not None and some[group].dtype.kind in "iu":
        numbers = some[group].to_numpy()
    points = "".join(
        f'<circle cx="{a:.1f}" cy="{100 - b:.1f}" r=".6" fill="{COLORS[int(i) % len(COLORS)]}"/>'
        for a, b, i in zip(x, y, numbers, strict=True)
    )
    return (
        f'<svg viewBox="-2 -2 104 104" width="360" role="img" aria-label="Map of the samples">{points}</svg>'
    )


def _scale_to_percent(values: np.ndarray) -> np.ndarray:
    low, high = values.min(), values.max()
    return 100 * (values - low) / (high - low if high > low else 1)
