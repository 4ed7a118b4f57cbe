"""Which layout of the map keeps neighbors together, and how long does it take? One CPU thread, CPU seconds.

    python benchmarks/layouts.py              digits, 1,797 samples: all layouts
    python benchmarks/layouts.py --many 50000 points around 100 centers in 16 dimensions: neighbors alone

`kept`: share of the ten nearest neighbors that are among the ten nearest on the map; `classes`: share of the ten
nearest on the map with the same class.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from scipy.spatial import cKDTree
from sklearn.manifold import TSNE

from likewise.cli.demo import run_demo
from likewise.runs.layout import neighbor_layout, preserved_neighbors, umap_layout

Neighbors = tuple[np.ndarray, np.ndarray, np.ndarray]


def digits() -> tuple[Neighbors, np.ndarray]:
    with tempfile.TemporaryDirectory() as folder:
        run = run_demo(Path(folder), lambda _: None).analysis
        return (run.neighbor_matrix, run.similarity_matrix, run.coordinates), run.table["label"].to_numpy()


def many(n: int, k: int = 10) -> tuple[Neighbors, np.ndarray]:
    generator = np.random.default_rng(0)
    classes = generator.integers(100, size=n)
    points = generator.normal(size=(100, 16))[classes] * 3 + generator.normal(size=(n, 16))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    gaps, indices = cKDTree(points).query(points, k + 1)
    directions = points @ np.linalg.svd(points - points.mean(0), full_matrices=False)[2].T
    return (indices[:, 1:], 1 - gaps[:, 1:] ** 2 / 2, directions[:, :10]), classes


def measure(
    name: str, layout: Callable[..., np.ndarray], found: Neighbors, classes: np.ndarray, repeats: int
) -> None:
    seconds = []
    for _ in range(repeats):
        begun = time.process_time()
        places = layout(*found)
        seconds.append(time.process_time() - begun)
    near = cKDTree(places).query(places, 11)[1][:, 1:]
    share = (classes[near] == classes[:, None]).mean()
    kept = preserved_neighbors(places, found[0])
    print(
        f"{name:10} kept {kept:.3f}  classes {share:.3f}  {np.median(seconds):7.2f} s (spread {np.ptp(seconds):.2f})"
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--many", type=int, default=0)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    if given.many:
        found, classes = many(given.many)
        measure("neighbors", neighbor_layout, found, classes, 1)
        return
    found, classes = digits()
    tsne = TSNE(init="pca", random_state=0, n_jobs=1)
    measure("pca", lambda i, s, c: c[:, :2], found, classes, 1)
    measure("neighbors", neighbor_layout, found, classes, 3)
    umap_layout(*(part[:200] % 200 if part.dtype.kind == "i" else part[:200] for part in found))  # compiles
    measure("umap", umap_layout, found, classes, 3)
    measure("t-SNE", lambda i, s, c: tsne.fit_transform(c), found, classes, 1)


if __name__ == "__main__":
    main()
