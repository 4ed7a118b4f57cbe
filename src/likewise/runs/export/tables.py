"""A run as a table, and as a folder for TensorBoard's projector."""

import io
import re
from csv import QUOTE_NONNUMERIC
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from likewise import files
from likewise.runs.result import Analysis

if TYPE_CHECKING:
    import pandas

# What a spreadsheet takes for a formula, also in the full width of East Asian text, and what is a number.
_FORMULA = re.compile("[=+\\-@\t\r\n＝＋－＠]")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
CLASS_COLUMNS = ("label", "prediction", "suggested_label")


def named_table(found: Analysis) -> "pandas.DataFrame":
    """Return the table of a run, with the names of classes in columns beside their numbers."""
    table = found.table.reset_index()
    classes = found.manifest.get("classes")
    if classes is None:
        return table
    names = np.array(classes, dtype=object)
    for column in CLASS_COLUMNS:
        if column in table and table[column].dtype.kind in "iu":
            place = list(table.columns).index(column) + 1
            table.insert(place, f"{column}_name", names[table[column].to_numpy()])
    return table


def escape_formulas(table: "pandas.DataFrame") -> "pandas.DataFrame":
    """Return a table in which no text or name of a column is a formula to a spreadsheet.

    Texts that start like one get an apostrophe in front, by which spreadsheets know text; numbers, also
    those that are text, stay as they are.
    """
    escaped = table.copy()
    for name, dtype in table.dtypes.items():
        if dtype.kind not in "biuf":
            escaped[name] = [_as_text(value) if isinstance(value, str) else value for value in table[name]]
    return escaped.set_axis([_as_text(str(name)) for name in table.columns], axis=1)


def write_csv(path: Path, found: Analysis) -> None:
    """Write the table as .csv."""
    # Texts in quotes: a carriage return outside of them would start a row, and its rest a cell.
    files.write_text(
        path, escape_formulas(named_table(found)).to_csv(None, index=False, quoting=QUOTE_NONNUMERIC)
    )


def write_parquet(path: Path, found: Analysis) -> None:
    """Write the table as .parquet."""
    table = named_table(found)

    def write(file: BinaryIO) -> None:
        table.to_parquet(file)

    files.write_atomically(path, write, int(table.memory_usage(deep=True).sum()))


def write_projector(path: Path, found: Analysis) -> None:
    """Write the leading directions of the kernel and the table, for `tensorboard --logdir`."""
    path.mkdir(parents=True, exist_ok=True)
    numbers = io.StringIO()
    np.savetxt(numbers, found.coordinates, delimiter="\t", fmt="%.6g")
    files.write_text(path / "tensors.tsv", numbers.getvalue())
    table = named_table(found).drop(columns=["map_x", "map_y"])
    for name in table.select_dtypes(exclude="number"):
        table[name] = table[name].astype(str).str.replace(r"[\t\r\n]", " ", regex=True)
    files.write_text(path / "metadata.tsv", escape_formulas(table).to_csv(None, sep="\t", index=False))
    lines = [
        "embeddings {",
        '  tensor_name: "likewise"',
        '  tensor_path: "tensors.tsv"',
        '  metadata_path: "metadata.tsv"',
        "}",
    ]
    files.write_text(path / "projector_config.pbtxt", "\n".join(lines) + "\n")


def _as_text(cell: str) -> str:
    return f"'{cell}" if _FORMULA.match(cell) and not _NUMBER.fullmatch(cell) else cell
