"""What the command says: results on stdout as text or JSON, all else on stderr."""

import json
import sys
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from enum import StrEnum
from typing import Any

import typer

from likewise.escapes import escape_controls


class Format(StrEnum):
    """How results are written."""

    text = "text"
    json = "json"


class Failed(Exception):
    """What a command checks is not so: --fail-on of analyze, or verify."""


_quiet: ContextVar[bool] = ContextVar("quiet", default=False)  # of one command


def be_quiet(quiet: bool) -> None:
    """Say nothing on stderr but errors until the command ends, if so wished; no progress bars either."""
    from likewise.distributed import show_progress

    _quiet.set(quiet)
    show_progress.set(not quiet)


def said(*lines: str) -> None:
    """Write lines to stderr, unless told to be quiet."""
    if not _quiet.get():
        warned(*lines)


def warned(*lines: str) -> None:
    """Write lines to stderr in any case; a file's name cannot give orders to the terminal."""
    for line in lines:
        typer.echo(escape_controls(line), err=True)


def told(form: Format, facts: Mapping[str, Any], *lines: str) -> None:
    """Write a result to stdout: the facts as JSON, or lines for people."""
    if form is Format.json:
        typer.echo(json.dumps(facts, indent=1, default=_plain))
        return
    for line in lines:
        typer.echo(line)


def table(rows: Sequence[Mapping[str, Any]], title: str = "") -> str:
    """Return rows as a table for people."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    made = Table(
        title=Text(escape_controls(title)) if title else None, box=box.SIMPLE_HEAD, title_justify="left"
    )
    for name in rows[0] if rows else ():
        made.add_column(Text(name.replace("_", " ")), justify="right" if _numeric(rows[0][name]) else "left")
    for row in rows:
        made.add_row(*(Text(escape_controls(_cell(value))) for value in row.values()))
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 140)
    with console.capture() as capture:
        console.print(made)
    return capture.get().rstrip("\n")


def gigabytes(count: float) -> str:
    """Return a number of bytes as people say it."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def byte_count(text: str) -> int:
    """Return the bytes that a text such as 4GB, 500MiB or 2e9 names."""
    units = {"": 1, "b": 1, "k": 2**10, "kb": 2**10, "kib": 2**10, "m": 2**20, "mb": 2**20, "mib": 2**20}
    units |= {"g": 2**30, "gb": 2**30, "gib": 2**30, "t": 2**40, "tb": 2**40, "tib": 2**40}
    stripped = text.strip().lower().replace("_", "")
    digits = stripped.rstrip("bgikmt")
    try:
        found = int(float(digits) * units[stripped[len(digits) :].strip()])
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"--max-memory is a number of bytes such as 4GB or 500MB, found {text!r}."
        ) from error
    if found < 1:
        raise ValueError(f"--max-memory must be positive, found {text!r}.")
    return found


def _numeric(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)
