"""The answers of an index as one HTML file that opens from disk."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from likewise import files
from likewise.index.explanation import Explanation, picture_text
from likewise.thumbnails import Picture
from likewise.wording import counted


class Answer(NamedTuple):
    """A new input and what the index says of it."""

    name: str
    picture: Picture | None
    explanation: Explanation


def write_page(path: Path, index: str, answers: Sequence[Answer]) -> None:
    """Write the answers, with the pictures inside; everything of the user's is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["counted"] = counted
    template = environment.get_template("page.html")
    marked = any(near.passage is not None for one in answers for near in one.explanation.neighbors)
    text = template.render(
        index=index, answers=answers, picture=picture_text, row=_row, marks_passages=marked
    )
    files.write_text(path, text)


def _row(picture: Picture) -> dict[str, Any]:
    """Return the columns of a row, or the numbers of a signal by place."""
    found = json.loads(picture.content)
    return found if isinstance(found, dict) else {"signal": ", ".join(str(v) for v in found[:12])}
