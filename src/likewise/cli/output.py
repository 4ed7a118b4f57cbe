"""Output of the command: results on stdout as text or JSON, everything else on stderr."""

import json
import sys
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from enum import StrEnum
from typing import Any

import typer

from likewise.thumbnails import Picture, escape_controls

EXCERPT = 60  # characters of a sample shown in a table


class Format(StrEnum):
    """Format of results on stdout."""

    text = "text"
    json = "json"


class Failed(Exception):
    """A check failed: --fail-on of analyze, or verify."""


_quiet: ContextVar[bool] = ContextVar("quiet", default=False)  # for one command


def be_quiet(quiet: bool) -> None:
    """Set whether the command prints messages and progress bars on stderr; errors are always printed."""
    from likewise.progress import show_progress, write_line

    _quiet.set(quiet)
    show_progress.set(not quiet)
    write_line.set(print_message)


def print_message(*lines: str) -> None:
    """Write lines to stderr unless the command is quiet."""
    if not _quiet.get():
        print_warning(*lines)


def print_warning(*lines: str) -> None:
    """Write lines to stderr, quiet or not; control characters, which file names may contain, are escaped."""
    for line in lines:
        typer.echo(escape_controls(line), err=True)


def print_result(form: Format, facts: Mapping[str, Any], *lines: str) -> None:
    """Write a result to stdout: the facts as JSON, or the lines as text."""
    if form is Format.json:
        typer.echo(json.dumps(facts, indent=1, default=_plain))
        return
    for line in lines:
        typer.echo(line)


def table(
    rows: Sequence[Mapping[str, Any]], title: str = "", optional: Sequence[str] = ("name", "shown")
) -> str:
    """Format rows as a text table.

    Args:
        rows: All with the same columns.
        title: Printed above the table.
        optional: Columns that are left out if they are empty in every row.

    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    empty = {name for name in optional if all(row.get(name) in ("", None) for row in rows)}
    rows = [{name: value for name, value in row.items() if name not in empty} for row in rows]
    grid = Table(
        title=Text(escape_controls(title)) if title else None, box=box.SIMPLE_HEAD, title_justify="left"
    )
    for name in rows[0] if rows else ():
        grid.add_column(Text(name.replace("_", " ")), justify="right" if _numeric(rows[0][name]) else "left")
    for row in rows:
        grid.add_row(*(Text(escape_controls(_cell(value))) for value in row.values()))
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 140)
    with console.capture() as capture:
        console.print(grid)
    return capture.get().rstrip("\n")


def excerpt(shown: Picture | None) -> str:
    """Return the beginning of a text, or of a row's values, for a table; empty for an image."""
    if shown is None or shown.kind == "image":
        return ""
    text = shown.content.decode("utf-8", "replace")
    if shown.kind == "row":
        text = ", ".join(f"{name} {value}" for name, value in json.loads(text).items())
    text = " ".join(text.split())
    return text if len(text) <= EXCERPT else f"{text[: EXCERPT - 1]}…"


def gigabytes(count: float) -> str:
    """Format a number of bytes in MiB or GiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _numeric(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)
