"""Results in the forms of other tools."""

from pathlib import Path
from typing import Any

import numpy as np

from likewise.analysis import Analysis

FORMS = ("parquet", "csv", "knn", "projector")


def exported(found: Analysis, to: str, out: Path | None) -> Path:
    """Write a run as a table, a graph of neighbors or a folder for TensorBoard; return where."""
    if to not in FORMS:
        raise ValueError(f"There is no export to {to!r}: choose {', '.join(FORMS)}.")
    suffix = {
        "parquet": "samples-export.parquet",
        "csv": "samples.csv",
        "knn": "knn_graph.npz",
        "projector": "projector",
    }
    path = out or found.folder / suffix[to]
    if path.resolve() in {
        (found.folder / name).resolve() for name in (*found.manifest["files"], "manifest.json")
    }:
        raise ValueError(f"{path} is a file of the run itself: export to another.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {path.parent}.")
    if to == "csv":
        found.table.to_csv(path)
    elif to == "parquet":
        found.table.reset_index().to_parquet(path)
    elif to == "knn":
        _write_graph(path, found)
    else:
        _write_projector(path, found)
    return path


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
    table.to_csv(path / "metadata.tsv", sep="\t", index=False)
    lines = [
        "embeddings {",
        '  tensor_name: "likewise"',
        '  tensor_path: "tensors.tsv"',
        '  metadata_path: "metadata.tsv"',
        "}",
    ]
    (path / "projector_config.pbtxt").write_text("\n".join(lines) + "\n", encoding="utf-8")
