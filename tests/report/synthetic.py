"""A run of any size that no network made: for pages of many samples."""

import numpy as np

from likewise.report.payload import Run
from likewise.thumbnails import picture

CLASSES = [f"class {letter}" for letter in "ABCDEFGHIJ"]


def synthetic_run(n, k=10, pictures=1500, seed=0):
    """Return a run of n samples in ten groups of a plane, each with random neighbors of its group."""
    generator = np.random.default_rng(seed)
    label = np.sort(generator.integers(10, size=n))
    centers = generator.normal(size=(10, 2)) * 8
    places = centers[label] + generator.normal(size=(n, 2))
    starts = np.searchsorted(label, np.arange(10))
    sizes = np.bincount(label, minlength=10)
    indices = starts[label][:, None] + generator.integers(1 << 30, size=(n, k)) % sizes[label][:, None]
    suspicion = generator.random(n) ** 8
    flagged = suspicion > np.quantile(suspicion, 0.95)
    suggested = np.where(flagged, (label + 1) % 10, label)
    edges = np.linspace(-1, 1, 41).round(4)
    drawn = generator.permutation(n)[:100]
    columns = {
        "sample": np.arange(n),
        "name": np.array([f"image-{i:06}.png" for i in range(n)], dtype=object),
        "label": label,
        "prediction": suggested,
        "density": generator.random(n),
        "local_density": 1 + 50 * generator.random(n) ** 3,
        "uncertainty": generator.random(n),
        "hard_neighbors": generator.integers(1, 50, size=n),
        "duplicates": np.zeros(n, dtype=int),
        "novelty": generator.random(n),
        "shift": generator.random(n) ** 3,
        "agreement": generator.random(n),
        "status": np.where(flagged, "contested", "ordinary").astype(object),
        "label_suspicion": suspicion,
        "suggested_label": suggested,
        "label_issue": flagged,
        "chance_wrong": suspicion,
        "map_x": places[:, 0],
        "map_y": places[:, 1],
        "camera": np.array([f"camera {i % 4}" for i in range(n)], dtype=object),
    }
    manifest = {
        "about": {
            "model": "Synthetic",
            "samples": n,
            "parameters": 10,
            "device": "cpu",
            "threads": 1,
        },
        "classes": CLASSES,
        "class_similarity": np.eye(10).tolist(),
        "options": {"threshold": 0.5, "layout": "neighbors", "readout": "all_outputs"},
        "stages": {"pairs": {"seconds": 1.0}},
        "versions": {"likewise": "0"},
        "method": "not at all",
        "approximations": [],
        "caveats": [],
        "edges": edges.tolist(),
        "data": f"{n:064}",
        "own_columns": ["camera"],
        "fit": {"learned": 0.9, "supported": 0.85, "verdict": "fit"},
        "wrong_labels": {
            "errors": [1, int(flagged.sum()), n],
            "precision": [0.5, 0.8, 0.9],
            "distinct": True,
            "reason": "",
        },
        "spot_check": {
            "samples": drawn.tolist(),
            "strata": [2] * len(drawn),
            "sizes": [0, 0, n],
        },
    }
    first = [int(i) for i in np.argsort(-suspicion)[: min(n, pictures)]]
    return Run(
        manifest=manifest,
        settings={"model": "none"},
        columns=columns,
        indices=indices,
        similarities=np.sort(generator.random((n, k)), axis=1)[:, ::-1],
        counts=generator.integers(0, 100, size=(n, 40)),
        pictures={i: picture(generator.random((8, 8)) + label[i]) for i in sorted(first)},
        directions=places[:, ::-1],
    )
