"""The page of a report, from a run folder: `likewise.Analysis.report`, `likewise report`."""

import base64
import secrets
from pathlib import Path
from typing import NamedTuple

from likewise import files
from likewise.manifest import REPORT, report_ending
from likewise.report.payload import Run, pack_payload, read_run
from likewise.report.verdict import percent, steps, verdict
from likewise.report.words import WORDS
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
