"""Pairs of samples that are nearly the same, as a table."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from likewise import files
from likewise.statistics.duplicates import DUPLICATE_COLUMNS, Duplicates


def write_duplicates(
    path: Path, found: Duplicates, rows: Sequence[str] | None, columns: Sequence[str] | None
) -> None:
    """Write the pairs as CSV, with the names of the samples where they have any."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    known = [name for name in DUPLICATE_COLUMNS if getattr(found, name) is not None and name != "across"]
    named = rows is not None and columns is not None
    writer.writerow([*known, *(["first_name", "second_name"] if named else [])])
    values = [getattr(found, name).tolist() for name in known]
    for pair in zip(*values, strict=True):
        cells = [f"{value:.6g}" if isinstance(value, float) else int(value) for value in pair]
        names = [] if rows is None or columns is None else [rows[pair[0]], columns[pair[1]]]
        writer.writerow([*cells, *names])
    files.make_folder(path.absolute().parent)
    files.write_text(path, text.getvalue())
