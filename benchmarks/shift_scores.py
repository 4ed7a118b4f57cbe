"""Scores of novelty and of trust from the ingredients that benchmarks/shift.py kept, and the tables of docs/uses.md.

    python benchmarks/shift_scores.py FOLDER --choose       candidates on the choosing cases
    python benchmarks/shift_scores.py FOLDER                tables of the reporting cases, as Markdown

The figure of novelty is the area under the ROC curve against known test inputs, of reliability the area under the
risk-coverage curve. A case counts once: the mean over its networks. ± is the 95 % interval with cases as the unit.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import rankdata
from scipy.stats import t as student

Array = np.ndarray


@dataclass
class Network:
    """All ingredients of one network."""

    setting: dict[str, Any]
    groups: list[str]
    names: list[str]
    values: Array  # (v, n)
    truth: Array  # (n,)
    group: Array  # (n,)
    parts: int

    def __getitem__(self, name: str) -> Array:
        return self.values[self.names.index(name)].astype(np.float64)

    def rows(self, name: str) -> Array:
        """Return where the samples of a group are."""
        return np.flatnonzero(self.group == self.groups.index(name))

    @cached_property
    def outputs(self) -> Array:
        """Logits, (n, 8)."""
        return np.stack([self[f"output {j}"] for j in range(8)], 1)

    @cached_property
    def training(self) -> Array:
        return self.rows("training")

    @property
    def prediction(self) -> Array:
        return self.outputs.argmax(1)

    def chances(self, temperature: float = 1.0) -> Array:
        scaled = self.outputs / temperature
        found = np.exp(scaled - scaled.max(1, keepdims=True))
        return found / found.sum(1, keepdims=True)

    def percentile(self, scores: Array) -> Array:
        """Return the share of training samples with smaller scores, (n,)."""
        reference = np.sort(scores[self.training])
        below = np.searchsorted(reference, scores, "left") + np.searchsorted(reference, scores, "right")
        return below / (2 * len(reference))


def load(folder: Path) -> list[Network]:
    """Return the networks of all files."""
    found = []
    for file in sorted(folder.glob("part-*.npz")):
        with np.load(file) as arrays:
            numbers = sorted({int(key.split("/")[0]) for key in arrays.files})
            for i in numbers:
                about = json.loads(str(arrays[f"{i}/about"]))
                found.append(
                    Network(
                        about["setting"],
                        about["groups"],
                        about["names"],
                        arrays[f"{i}/values"],
                        arrays[f"{i}/truth"].astype(int),
                        arrays[f"{i}/group"],
                        len(about["parts"]),
                    )
                )
    return found


def auc(novel: Array, known: Array) -> float:
    """Return the chance that a novel input has the larger score, half for equal ones."""
    ranks = rankdata(np.concatenate([novel, known]))
    n, m = len(novel), len(known)
    return float((ranks[:n].sum() - n * (n + 1) / 2) / (n * m))


def novelty_cases(net: Network, part: str) -> list[str]:
    return [g for g in net.groups if g.startswith(f"{part}: novel: ")]


Scores = Callable[[Network], dict[str, Array]]


def novelty_areas(
    nets: list[Network], scores: Scores, part: str
) -> dict[str, dict[tuple[str, str], list[float]]]:
    """Return by score and (data, case) the areas of all networks."""
    found: dict[str, dict[tuple[str, str], list[float]]] = {}
    for net in nets:
        known = net.rows("known")
        for name, values in scores(net).items():
            for case in novelty_cases(net, part):
                cell = (net.setting["data"], case.split(": ")[2])
                found.setdefault(name, {}).setdefault(cell, []).append(
                    auc(values[net.rows(case)], values[known])
                )
    return found


def interval(differences: Array) -> float:
    """Return the half width of the 95 % interval of the mean."""
    n = len(differences)
    return float(student.ppf(0.975, n - 1) * differences.std(ddof=1) / math.sqrt(n))


def peers(net: Network) -> dict[str, Array]:
    """Return what others use, from the same network."""
    return {
        "neighbors in features": net["feature tenth"],
        "Mahalanobis": net["Mahalanobis"],
        "ViM": net["ViM"],
        "energy": -np.log(np.exp(net.outputs - net.outputs.max(1, keepdims=True)).sum(1))
        - net.outputs.max(1),
        "largest probability": -net.chances().max(1),
        "GradNorm": net["GradNorm"],
    }


def log_odds(share: Array) -> Array:
    share = share.clip(1e-4, 1 - 1e-4)
    return np.log(share / (1 - share))


def temperature(net: Network) -> float:
    """Return the temperature at which labels of held-out samples are most likely."""
    held = net.rows("held")
    truth = net.truth[held]
    grid = np.logspace(-1, 1, 60)
    likely = [np.log(net.chances(t)[held, truth].clip(1e-12)).mean() for t in grid]
    return float(grid[int(np.argmax(likely))])


def logistic(features: Array, right: Array, net: Network) -> Array:
    """Return the chance to be right of all samples, by logistic regression on the held-out ones."""
    from sklearn.linear_model import LogisticRegression

    held = net.rows("held")
    mean, spread = features[held].mean(0), features[held].std(0) + 1e-9
    standard = (features - mean) / spread
    return LogisticRegression(C=1.0).fit(standard[held], right[held]).predict_proba(standard)[:, 1]


def risk_coverage(trust: Array, wrong: Array) -> float:
    """Return the mean share of errors among the most trusted, over all shares."""
    ordered = wrong[np.argsort(-trust, kind="stable")].astype(float)
    return float((ordered.cumsum() / np.arange(1, len(ordered) + 1)).mean())


def corrupted_cases(net: Network, part: str) -> list[str]:
    return [g for g in net.groups if g.startswith(f"{part}: ") and ": novel: " not in g]


Cell = tuple[str, float, str]  # data, share of wrong labels, corruption


def trust_areas(nets: list[Network], scores: Scores, part: str) -> dict[str, dict[Cell, list[float]]]:
    """Return by score and cell the areas of all networks; the cell "none" is of known inputs as they are."""
    found: dict[str, dict[Cell, list[float]]] = {}
    for net in nets:
        wrong = net.prediction != net.truth
        for name, trust in scores(net).items():
            for case in ["known", *corrupted_cases(net, part)]:
                rows = net.rows(case)
                kind = "none" if case == "known" else case.split(": ", 1)[1]
                cell = (net.setting["data"], net.setting["share"], kind)
                found.setdefault(name, {}).setdefault(cell, []).append(
                    risk_coverage(trust[rows], wrong[rows])
                )
    return found


def trust_peers(net: Network) -> dict[str, Array]:
    chances = net.chances()
    return {
        "largest probability": chances.max(1),
        "temperature": net.chances(temperature(net)).max(1),
        "energy": -peers(net)["energy"],
        "neighbors in features": net["feature agreement"] + 1e-3 * chances.max(1),
    }
