"""The pages, from run folders: the report of a run, and the comparison of two runs on the same data.

`likewise.Analysis.report` and `likewise report` write the first; `likewise compare A B --html compare.html` the second,
which has no scripts.
"""

import base64
import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from likewise import files
from likewise.manifest import REPORT, report_ending
from likewise.report.payload import Run, pack_payload, read_run
from likewise.report.verdict import percent, steps, verdict
from likewise.report.words import WORDS
from likewise.thumbnails import media_type
from likewise.wording import counted

STATIC = Path(__file__).parent / "static"
COMPONENTS = Path(__file__).parents[1] / "components"
SCRIPTS = (
    "data.js",
    "state.js",
    "dom.js",
    "scatter.js",
    "map.js",
    "neighborhoods.js",
    "table.js",
    "gallery.js",
    "classes.js",
    "duplicates.js",
    "slices.js",
    "density.js",
    "training.js",
    "drawer.js",
    "spotcheck.js",
    "review.js",
    "main.js",
)
NOT_COLUMNS = {"similarity", "learned", "supported", "duplicate", "spot_check", "map", "passage"}


class Part(NamedTuple):
    """A section of the page, with its title in the navigation."""

    id: str
    title: str


def write_report(folder: str | Path) -> Path:
    """Write report.html into a run folder atomically, and return its path."""
    path = Path(folder) / REPORT
    files.write_text(path, files.seal(page(read_run(Path(folder))), report_ending(Path(folder))))
    return path


def page(run: Run, source: str | None = None) -> str:
    """Return the report as HTML.

    Args:
        run: The run to show.
        source: URL on its own origin from which the page fetches `pack_payload(run)`; None embeds it in the page.

    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def text_of(name: str, folder: Path = STATIC) -> Markup:
        return Markup((folder / name).read_text(encoding="utf-8").replace("</script", "<\\/script"))

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "counted": counted}
    return environment.get_template("page.html").render(
        run=run,
        nonce=secrets.token_urlsafe(24),  # scripts of this page carry it, injected ones would not
        about=run.manifest["about"],
        parts=_parts(run),
        verdict=verdict(run),
        steps=steps(run),
        words={name: word for name, word in WORDS.items() if name not in _absent_words(run)},
        columns=set(WORDS) - NOT_COLUMNS,
        mixes=bool(run.manifest["classes"]) and run.indices.shape[1] > 0,
        style=text_of("style.css"),
        scripts=[text_of("keys.js", COMPONENTS), *(text_of(name) for name in SCRIPTS)],
        source=source,
        data="" if source else base64.b64encode(pack_payload(run)).decode(),
    )


def _parts(run: Run) -> list[Part]:
    parts = [Part("review-part", "Review")] if "label_issue" in run.columns else []
    parts += [Part("map-part", "Map"), Part("samples-part", "Samples")]
    parts += [Part("classes-part", "Classes")] if run.manifest["classes"] else []
    parts += [Part("duplicates-part", "Duplicates"), Part("slices-part", "Slices")]
    has_training = "training_confidence" in run.columns and "label_issue" in run.columns
    parts += [Part("training-part", "Training")] if has_training else []
    return [*parts, Part("run-part", "This run"), Part("words-part", "Glossary")]


def _absent_words(run: Run) -> set[str]:
    """Return the terms, other than columns, that a page of this run does not use."""
    used = {
        "passage": run.passages is not None,
        "learned": bool(run.manifest.get("fit")),
        "supported": bool(run.manifest.get("fit")),
        "spot_check": bool(run.manifest.get("spot_check")),
    }
    return {name for name, is_used in used.items() if not is_used}


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
        encoded = base64.b64encode(found.content).decode()
        content: Any = f"data:{media_type(found.content)};base64,{encoded}"
    else:
        text = found.content.decode("utf-8", "replace")
        content = text if found.kind == "text" else json.loads(text)
    return {"kind": found.kind, "content": content}
