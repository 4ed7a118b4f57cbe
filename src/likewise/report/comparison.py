"""A page without scripts that compares two runs on the same data: `likewise compare A B --html compare.html`."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from likewise.report.payload import Run

HERE = Path(__file__).parent


class Shown(NamedTuple):
    """A sample on the page."""

    sample: int
    label: str
    picture: dict[str, Any] | None
    similarity: float = 0.0
    differs: bool = False  # not among the neighbors in the other run


class Row(NamedTuple):
    """A sample with its neighbors in both runs."""

    sample: Shown
    name: str
    predictions: str
    kept: int
    before: list[Shown]
    after: list[Shown]


def comparison_page(
    before: Run, after: Run, headline: str, lines: Sequence[tuple[str, str]], samples: Sequence[int]
) -> str:
    """Return the comparison page as HTML.

    Args:
        before: The earlier run.
        after: The later run, on the same samples.
        headline: What changed, in one sentence.
        lines: What changed in numbers: names and values.
        samples: The samples whose neighbors are shown, in this order.

    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    names = [before.folder, after.folder]
    if names[0] == names[1]:
        names = [f"{names[0]} (before)", f"{names[1]} (after)"]
    return environment.get_template("comparison.html").render(
        before=names[0],
        after=names[1],
        n=before.n,
        headline=headline,
        lines=lines,
        rows=[_row(before, after, int(sample)) for sample in samples],
        wide=any(picture.kind in ("text", "row") for picture in before.pictures.values()),
        style=Markup((HERE / "static" / "style.css").read_text(encoding="utf-8")),
    )


def _row(before: Run, after: Run, sample: int) -> Row:
    k = min(before.indices.shape[1], after.indices.shape[1])
    near = [run.indices[sample, :k] for run in (before, after)]
    sides = [
        [
            _describe_sample(run, int(i), float(s), bool(differs))
            for i, s, differs in zip(mine, run.similarities[sample], ~np.isin(mine, others), strict=False)
        ]
        for run, mine, others in ((before, near[0], near[1]), (after, near[1], near[0]))
    ]
    first, second = (_class_name(run, "prediction", sample) for run in (before, after))
    predictions = first if first == second else f"{first}, then {second}"
    name = str(before.columns["name"][sample]) if "name" in before.columns else f"Sample {sample}"
    kept = int(np.isin(near[0], near[1]).sum())
    return Row(_describe_sample(before, sample), name, predictions, kept, sides[0], sides[1])


def _describe_sample(run: Run, sample: int, similarity: float = 0.0, differs: bool = False) -> Shown:
    return Shown(sample, _class_name(run, "label", sample), _picture(run, sample), similarity, differs)


def _class_name(run: Run, column: str, sample: int) -> str:
    """Return the name of a class, or a value with four digits; empty if the run has no such column."""
    if column not in run.columns:
        return ""
    value, classes = run.columns[column][sample], run.manifest["classes"]
    if classes and run.columns[column].dtype.kind in "iu" and 0 <= value < len(classes):
        return str(classes[value])
    return f"{value:.4g}" if run.columns[column].dtype.kind == "f" else str(value)


def _picture(run: Run, sample: int) -> dict[str, Any] | None:
    """Return the picture of a sample: an image as a data URL, a row as its values."""
    found = run.pictures.get(sample)
    if found is None:
        return None
    if found.kind == "image":
        content: Any = "data:image/webp;base64," + base64.b64encode(found.content).decode()
    else:
        text = found.content.decode("utf-8", "replace")
        content = text if found.kind == "text" else json.loads(text)
    return {"kind": found.kind, "content": content}
