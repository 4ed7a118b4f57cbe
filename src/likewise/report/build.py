"""The page of a report, from a run folder: `likewise.Analysis.report`, `likewise report`."""

import base64
import secrets
from pathlib import Path

from likewise import files
from likewise.manifest import REPORT, report_ending
from likewise.report.cards import cards
from likewise.report.payload import MOST_POINTS_AS_SVG, Run, pack_payload, read_run

STATIC = Path(__file__).parent / "static"
LIBRARIES = ("vendor/plotly-gl2d.min.js", "vendor/tabulator.min.js")
SCRIPTS = (
    "data.js",
    "state.js",
    "dom.js",
    "map.js",
    "neighborhoods.js",
    "table.js",
    "gallery.js",
    "matrices.js",
    "density.js",
    "drawer.js",
    "review.js",
    "main.js",
)


def write_report(folder: str | Path) -> Path:
    """Write report.html into a run folder, whole or not at all, and return where it is."""
    path = Path(folder) / REPORT
    files.write_text(path, files.seal(page(read_run(Path(folder))), report_ending(Path(folder))))
    return path


def page(run: Run) -> str:
    """Return the report as HTML."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def source(name: str) -> Markup:
        return Markup((STATIC / name).read_text(encoding="utf-8").replace("</script", "<\\/script"))

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        run=run,
        nonce=secrets.token_urlsafe(24),  # what scripts of this page carry, and injected ones would not
        # Plotly's WebGL compiles its drawing code as it runs; what is drawn as SVG does without.
        evaluates=run.n > MOST_POINTS_AS_SVG,
        about=run.manifest["about"],
        cards=cards(run),
        styles=[source("vendor/tabulator.min.css"), source("style.css")],
        libraries=[source(name) for name in LIBRARIES],
        scripts=[source(name) for name in SCRIPTS],
        data=base64.b64encode(pack_payload(run)).decode(),
    )
