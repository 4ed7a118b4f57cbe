"""Scores of novelty and of trust from the ingredients that benchmarks/shift.py kept, on every case and network.

    python benchmarks/shift_scores.py FOLDER ...      results are written to benchmarks/results/shift.jsonl

The figure of novelty is the area under the ROC curve against known test inputs, of trust the area under the
risk-coverage curve. benchmarks/uses.py makes the tables of docs/uses.md from them. `NOVELTY` and `TRUST` hold what
`lw.novelty`, `lw.reliability` and `lw.calibrate` do by default, what was tried beside it, and what others use.
"""

import argparse
import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from records import FOLDER, add
from scipy.stats import rankdata

from likewise.statistics.novelty import Ingredients, novel_share

Array = np.ndarray


class Network:
    """All ingredients of one network, by name; rows by group."""

    def __init__(self, about: str, values: Array, truth: Array, group: Array) -> None:
        found = json.loads(about)
        self.setting, self.groups, self._names = found["setting"], found["groups"], found["names"]
        self.parts, self.truth = len(found["parts"]), truth.astype(int)
        self._values, self._group = values, group

    def __getitem__(self, name: str) -> Array:
        return self._values[self._names.index(name)].astype(np.float64)

    def rows(self, name: str) -> Array:
        """Return where the samples of a group are."""
        return np.flatnonzero(self._group == self.groups.index(name))

    def novelty(self, parameters: str) -> Array:
        """Return 1 - the mean similarity to the ten nearest, by a part of the network."""
        return self[
            "novelty " + (f"part {self.parts - 1}" if parameters == "last layer" else parameters)
        ].clip(0)

    @cached_property
    def outputs(self) -> Array:
        return np.stack([self[f"output {j}"] for j in range(8)], 1)

    @property
    def right(self) -> Array:
        return self.outputs.argmax(1) == self.truth

    def confidence(self, temperature: float = 1.0) -> Array:
        return self.chances(temperature).max(1)

    def chances(self, temperature: float = 1.0) -> Array:
        scaled = self.outputs / temperature
        found = np.exp(scaled - scaled.max(1, keepdims=True))
        return found / found.sum(1, keepdims=True)

    @cached_property
    def temperature(self) -> float:
        """The temperature at which labels of held-out samples are most likely."""
        held, grid = self.rows("held"), np.logspace(-1, 1, 60)
        likely = [np.log(self.chances(t)[held, self.truth[held]].clip(1e-12)).mean() for t in grid]
        return float(grid[int(np.argmax(likely))])

    def calibrated(self, *features: Array) -> Array:
        """Return the log-odds of being right, by logistic regression on the held-out samples."""
        from sklearn.linear_model import LogisticRegression

        held, stacked = self.rows("held"), np.stack(features, 1)
        mean, spread = stacked[held].mean(0), stacked[held].std(0) + 1e-9
        standard = (stacked - mean) / spread
        return LogisticRegression(C=1.0).fit(standard[held], self.right[held]).decision_function(standard)

    @cached_property
    def novel_share(self) -> Array:
        """What `lw.novelty` returns: the share of the training samples, each left out, that are less novel."""
        found = [
            torch.tensor(part)
            for part in (
                self.novelty("all"),
                self.novelty("last layer"),
                np.exp(self[f"length part {self.parts - 1}"]),
            )
        ]
        rows = torch.tensor(self.rows("training"))
        return novel_share(Ingredients(*found), Ingredients(*(part[rows] for part in found))).numpy()

    def calibrated_by(
        self,
        parameters: str,
        unseen: float | None,
        *,
        weight: float = 1.0,
        tempered: bool = False,
        edge: float | None = None,
    ) -> Array:
        """Return log-odds of being right from the ingredients of `lw.reliability`.

        Args:
            parameters: Which gradients.
            unseen: Below this quantile of held-out closeness, no more than the log-odds by confidence alone.
            weight: Of these log-odds, the rest by confidence alone.
            tempered: Take the confidence at the best temperature.
            edge: Both, weighted by the share of held-out predictions that are no closer, up to this share.

        """
        closeness = 1 - self.novelty(parameters)
        confidence = log_odds(self.confidence(self.temperature if tempered else 1))
        agreement, shift = (
            log_odds(self[f"agreement {parameters}"]),
            np.log(self[f"shift {parameters}"] + 1e-3),
        )
        found, alone = (
            self.calibrated(closeness, agreement, shift, confidence),
            self.calibrated(confidence),
        )
        if edge is not None:
            inside = np.searchsorted(np.sort(closeness[self.rows("held")]), closeness, side="right")
            share = (inside / len(self.rows("held")) / edge).clip(max=1)
            return share * found + (1 - share) * alone
        found = weight * found + (1 - weight) * alone
        if unseen is None:
            return found
        far = closeness < np.quantile(closeness[self.rows("held")], unseen)
        return np.where(far, np.minimum(found, alone), found)


def log_odds(share: Array) -> Array:
    share = share.clip(1e-4, 1 - 1e-4)
    return np.log(share / (1 - share))


def energy(net: Network) -> Array:
    top = net.outputs.max(1, keepdims=True)
    return -np.log(np.exp(net.outputs - top).sum(1)) - top[:, 0]


NOVELTY: dict[str, Callable[[Network], Array]] = {
    "likewise": lambda net: net.novel_share,
    "all parameters": lambda net: net.novelty("all"),
    "all and last layer": lambda net: np.sqrt(net.novelty("all") * net.novelty("last layer")),
    "last layer": lambda net: net.novelty("last layer"),
    "last three layers": lambda net: net.novelty("last 3"),
    "neighbors in features": lambda net: net["feature tenth"],
    "GradNorm": lambda net: net["GradNorm"],
    "largest probability": lambda net: -net.confidence(),
    "energy": energy,
    "ViM": lambda net: net["ViM"],
    "Mahalanobis": lambda net: net["Mahalanobis"],
}
TRUST: dict[str, Callable[[Network], Array]] = {
    "likewise": lambda net: net.calibrated_by("all", 0.01, weight=0.4, tempered=True),
    "half, no temperature": lambda net: net.calibrated_by("all", 0.01, weight=0.5),
    "weighted by closeness": lambda net: net.calibrated_by("all", None, edge=0.3),
    "neighbors alone": lambda net: net.calibrated_by("all", 0.01),
    "last three layers": lambda net: net.calibrated_by("last 3", 0.01, weight=0.4, tempered=True),
    "largest probability": lambda net: net.confidence(),
    "temperature": lambda net: net.confidence(net.temperature),
    "neighbors in features": lambda net: net["feature agreement"] + 1e-3 * net.confidence(),
    "energy": lambda net: -energy(net),
}


def area(novel: Array, known: Array) -> float:
    """Return the chance that a novel input has the larger score, half for equal ones."""
    ranks = rankdata(np.concatenate([novel, known]))
    n, m = len(novel), len(known)
    return float((ranks[:n].sum() - n * (n + 1) / 2) / (n * m))


def risk_coverage(trust: Array, wrong: Array) -> float:
    """Return the mean share of errors among the most trusted, over all shares."""
    ordered = wrong[np.argsort(-trust, kind="stable")].astype(float)
    return float((ordered.cumsum() / np.arange(1, len(ordered) + 1)).mean())


def load(folders: list[Path]) -> list[Network]:
    found = []
    for file in sorted(file for folder in folders for file in folder.glob("part-*.npz")):
        with np.load(file) as arrays:
            for i in sorted({key.split("/")[0] for key in arrays.files}):
                about, *rest = (arrays[f"{i}/{name}"] for name in ("about", "values", "truth", "group"))
                found.append(Network(str(about), *rest))
    return found


def measure(net: Network) -> dict[str, dict[str, dict[str, float]]]:
    """Return both figures of every case, by case and score."""
    known, wrong = net.rows("known"), ~net.right
    novelty = {name: score(net) for name, score in NOVELTY.items()}
    trust = {name: score(net) for name, score in TRUST.items()}
    areas: dict[str, dict[str, float]] = {}
    risks = {"none": {name: risk_coverage(t[known], wrong[known]) for name, t in trust.items()}}
    for group in net.groups:
        rows = net.rows(group)
        if ": novel: " in group:
            areas[group] = {name: area(s[rows], s[known]) for name, s in novelty.items()}
        elif ": " in group:
            risks[group] = {name: risk_coverage(t[rows], wrong[rows]) for name, t in trust.items()}
    return {"areas": areas, "risks": risks}


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("folders", type=Path, nargs="+", help="what benchmarks/shift.py wrote")
    arguments.add_argument("--out", type=Path, default=FOLDER / "shift.jsonl")
    given = arguments.parse_args()
    given.out.unlink(missing_ok=True)
    for net in load(given.folders):
        add(given.out, net.setting, **measure(net))


if __name__ == "__main__":
    main()
