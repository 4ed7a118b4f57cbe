"""`likewise demo`: planted label errors in handwritten digits."""

import time
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from likewise.cli.options import Form, Quiet
from likewise.cli.output import Format, be_quiet, print_message, print_result


def demo(
    out: Annotated[Path, typer.Option(help="The folder for results.")] = Path("likewise-demo"),
    browser: Annotated[bool, typer.Option("--open", help="Open the report in the browser.")] = False,
    form: Form = Format.text,
    quiet: Quiet = False,
) -> None:
    """Find planted label errors in handwritten digits: a minute from nothing to a report.

    Example: `likewise demo --open`
    """
    be_quiet(quiet)
    start = time.perf_counter()
    from likewise.demo import run_demo

    found = run_demo(out, print_message)
    path = found.analysis.folder / "report.html"
    facts = {**found._asdict(), "analysis": str(found.analysis.folder), "report": str(path)}
    print_result(
        form,
        facts,
        f"Of {found.planted} labels made wrong on purpose, {found.learned} of them memorized, "
        f"{found.hits} are among the {found.flagged} that look wrong; of the {found.planted} most "
        f"suspicious, {found.top} are.",
        f"report: {path}",
    )
    print_message(
        f"({time.perf_counter() - start:.0f} s) Open the report in a browser; then try your own: likewise "
        "analyze --help"
    )
    if browser:
        webbrowser.open(path.resolve().as_uri())
