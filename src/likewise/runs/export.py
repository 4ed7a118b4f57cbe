"""Results in the forms of other tools."""

import re
from collections.abc import Callable
from csv import QUOTE_NONNUMERIC
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from likewise.runs.result import Analysis

if TYPE_CHECKING:
    import pandas

# What a spreadsheet takes for a formula, also in the full width of East Asian text, and what is a number.
_FORMULA = re.compile("[=+\\-@\t\r\n＝＋－＠]")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def export_run(found: Analysis, to: str, out: Path | None) -> Path:
    """Write a run as a table, a graph of neighbors or a folder for TensorBoard; return where."""
    if to not in EXPORTS:
        raise ValueError(f"There is no export to {to!r}: choose {', '.join(EXPORTS)}.")
    export = EXPORTS[to]
    path = out or found.folder / export.name
    if path.resolve() in {
        (found.folder / name).resolve() for name in (*found.manifest["files"], "manifest.json")
    }:
        raise ValueError(f"{path} is a file of the run itself: export to another.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {path.parent}.")
    export.write(path, found)
    return path


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


def _as_text(cell: str) -> str:
    return f"'{cell}" if _FORMULA.match(cell) and not _NUMBER.fullmatch(cell) else cell


def knn_graph(found: Analysis) -> Any:
    """Return the neighbors as cleanlab reads them: sparse (n, n) distances 1 − similarity, sorted."""
    from scipy.sparse import csr_matrix

    places, similar = found.neighbor_matrix, found.similarity_matrix
    n, k = places.shape
    distances = np.maximum(1 - similar, 1e-12)  # a zero would be no entry
    return csr_matrix((distances.ravel(), places.ravel(), np.arange(n + 1) * k), shape=(n, n))


def _write_graph(path: Path, found: Analysis) -> None:
    from scipy.sparse import save_npz

    if path.suffix != ".npz":
        raise ValueError(f"A graph of neighbors is written as .npz, found {path.name}.")
    save_npz(path, knn_graph(found))


def _write_projector(path: Path, found: Analysis) -> None:
    """Write the leading directions of the kernel and the table, for `tensorboard --logdir`."""
    path.mkdir(parents=True, exist_ok=True)
    np.savetxt(path / "tensors.tsv", found.coordinates, delimiter="\t", fmt="%.6g")
    table = found.table.drop(columns=["map_x", "map_y"]).reset_index()
    for name in table.select_dtypes(exclude="number"):
        table[name] = table[name].astype(str).str.replace(r"[\t\r\n]", " ", regex=True)
    table = escape_formulas(table)
    table.to_csv(path / "metadata.tsv", sep="\t", index=False)
    lines = [
        "embeddings {",
        '  tensor_name: "likewise"',
        '  tensor_path: "tensors.tsv"',
        '  metadata_path: "metadata.tsv"',
        "}",
    ]
    (path / "projector_config.pbtxt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _write_csv(path: Path, found: Analysis) -> None:
    # Texts in quotes: a carriage return outside of them would start a row, and its rest a cell.
    escape_formulas(found.table.reset_index()).to_csv(path, index=False, quoting=QUOTE_NONNUMERIC)


def _write_parquet(path: Path, found: Analysis) -> None:
    found.table.reset_index().to_parquet(path)


class Export(NamedTuple):
    """A form in which a run can be written."""

    name: str  # of the file or folder, inside the run unless another is named
    write: Callable[[Path, Analysis], None]


EXPORTS = {
    "parquet": Export("samples-export.parquet", _write_parquet),
    "csv": Export("samples.csv", _write_csv),
    "knn": Export("knn_graph.npz", _write_graph),
    "projector": Export("projector", _write_projector),
}
