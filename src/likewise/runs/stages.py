"""What the stages of a run compute: from a likeness, labels and outputs to columns of its tables."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from likewise.gram import GramMatrix
from likewise.likeness import Likeness
from likewise.statistics.fit import verdict_of
from likewise.statistics.labels import EXPONENT, LabelSuspicion, judged
from likewise.statistics.novelty import closeness
from likewise.statistics.reliability import EXPONENT as NEAR
from likewise.statistics.targets import class_chances, of_classes
from likewise.statistics.uncertainty import uncertainty

Arrays = dict[str, np.ndarray]
BINS = 40  # of likeness, from -1 to 1
PROBES = 64  # random directions for the map
DIRECTIONS = 10  # kept of it; two are drawn
COLUMNS = frozenset(
    [
        "sample",
        "name",
        "label",
        "prediction",
        "error",
        "density",
        "local_density",
        "uncertainty",
        "near",
        "isolation",
        "shift",
        "agreement",
        "quadrant",
        "label_suspicion",
        "suggested_label",
        "label_issue",
        "chance_wrong",
        "map_x",
        "map_y",
        "picture",
    ]
)
QUADRANTS = ("ordinary", "isolated", "contested", "indistinguishable")
SPARSE = 0.25  # of the median local density: fewer are like it


class Targets(NamedTuple):
    """What the samples are said to be, and what the network says."""

    labels: Tensor | None  # (n,) class numbers, or numbers (n, ...)
    outputs: Tensor  # (n, d)

    @property
    def classes(self) -> Tensor | None:
        """The labels, if they are class numbers."""
        return None if self.labels is None else of_classes(self.labels, self.outputs.shape[1])

    @property
    def chances(self) -> Tensor | None:
        """The probability of each class, (n, c), where outputs are those of classes."""
        classes = self.classes
        return None if self.labels is not None and classes is None else class_chances(self.outputs, classes)

    @property
    def groups(self) -> Tensor | None:
        """The class by which neighbors agree or not: the label, or the prediction if there is none."""
        if self.labels is not None:
            return self.classes
        return None if self.chances is None else self.chances.argmax(1)


def on_an_edge(threshold: float) -> float:
    """Return the threshold if histograms have an edge there, so that they can count by it."""
    if not -1 < threshold < 1 or abs(threshold * 20 - round(threshold * 20)) > 1e-9:
        raise ValueError(f"threshold is a multiple of 0.05 between -1 and 1, found {threshold}.")
    return round(threshold * 20) / 20


def passes(gram: GramMatrix) -> dict[str, Tensor]:
    """Return Σ k(x, x'), k(x, x) and the uncertainty of each sample, in linear time."""
    sums, own = gram.exact_row_sums()[:, 0], gram.exact_diagonal()
    return {"sums": sums, "own": own, "uncertainty": uncertainty(gram)}


def pairs(likeness: Likeness, groups: Tensor | None, k: int, seed: int) -> dict[str, Tensor]:
    """Return, from one visit of all pairs, neighbors, histograms, votes and what the map is made of."""
    n, k = likeness.n, min(k, likeness.n - 1)
    probes = torch.randn(n, min(PROBES, n), generator=torch.Generator().manual_seed(seed))
    members = torch.zeros(n, 0) if groups is None else torch.nn.functional.one_hot(groups).float()
    weights = torch.cat([probes, members], 1)

    def strip(where: range, c: Tensor) -> tuple[Tensor, ...]:
        sums, rows = c @ weights.to(c), torch.arange(len(where), device=c.device)
        own = c[rows, rows + where.start].clone()
        c[rows, rows + where.start] = 1  # a sample counts as its own neighbor
        counts = _counts(c)
        c[rows, rows + where.start] = -torch.inf
        best, places = c.topk(k, dim=1)
        local = c.clamp_(min=0).pow_(EXPONENT)
        votes, total = local @ members.to(c), local.sum(1)
        closer = local.pow_(NEAR / EXPONENT) @ members.to(c)
        return places, best, counts, sums, votes, closer, own, total

    close, places, best, counts, sums, votes, closer, own, local = likeness.map_strips(
        strip, closeness(n, square=True)
    )
    apart = {"close": close, "indices": places, "similarities": best, "counts": counts, "local": local}
    r = probes.shape[1]
    mapped = {"map": _map(sums[:, :r].double().cpu(), probes.double())}
    if groups is None:
        return {**apart, **mapped}
    return {**apart, **mapped, "votes": votes, "closer": closer, "class_sums": sums[:, r:], "own": own}


def _counts(c: Tensor) -> Tensor:
    """Return the histogram of each row, (b, BINS) integers."""
    place = ((c + 1) * (BINS / 2)).clamp_(0, BINS - 1).to(torch.int32)  # not negative: cut is floor
    place += torch.arange(len(c), dtype=torch.int32, device=c.device)[:, None] * BINS
    return torch.bincount(place.flatten(), minlength=len(c) * BINS).view(len(c), BINS).to(torch.int32)


def _map(product: Tensor, probes: Tensor) -> Tensor:
    """Return the leading principal coordinates of a matrix of which its product with probes is known."""
    core = probes.T @ product
    values, vectors = torch.linalg.eigh((core + core.T) / 2)
    alive = values > 1e-6 * values[-1].clamp(min=1e-300)
    basis = product @ (vectors[:, alive] * values[alive].rsqrt())
    left, sizes, _ = torch.linalg.svd(basis, full_matrices=False)
    found = torch.zeros(len(product), DIRECTIONS, dtype=product.dtype)
    count = min(DIRECTIONS, left.shape[1])
    found[:, :count] = left[:, :count] * sizes[:count]
    signs = found.gather(0, found.abs().argmax(0, keepdim=True)).sign()
    return found * torch.where(signs == 0, 1, signs)


def umap_layout(found: Arrays, seed: int) -> np.ndarray:
    """Return two coordinates of each sample by UMAP, from the neighbors found: (n, 2)."""
    try:
        from umap import UMAP
    except ImportError as error:
        raise ImportError('A map by UMAP needs umap-learn: pip install "likewise[umap]".') from error
    n = len(found["indices"])
    places = np.concatenate([np.arange(n)[:, None], found["indices"]], 1)  # itself first, as UMAP counts
    apart = np.concatenate([np.zeros((n, 1)), 1 - found["similarities"]], 1).clip(min=0)
    made = UMAP(
        n_neighbors=places.shape[1],
        precomputed_knn=(places.astype(np.int64), apart.astype(np.float32), None),
        random_state=seed,
        n_jobs=1,
    )
    return made.fit_transform(found["map"].astype(np.float32)).astype(np.float64)


def suspicion(found: Arrays, targets: Targets) -> LabelSuspicion | None:
    """Return what is to be said of labels, if they are classes."""
    if targets.classes is None:
        return None
    return judged(torch.tensor(found["votes"]), targets.classes, targets.chances)


def fit(found: Arrays, targets: Targets) -> dict[str, float | str] | None:
    """Return how much of the labels the network tells, how much the neighbors, and what that means."""
    classes, chances = targets.classes, targets.chances
    if classes is None or chances is None:
        return None
    learned = float((chances.argmax(1) == classes).double().mean())
    supported = float((torch.tensor(found["closer"]).argmax(1) == classes).double().mean())
    return {"learned": learned, "supported": supported, "verdict": verdict_of(learned, supported)}


def samples(
    found: Arrays, targets: Targets, suspicion: LabelSuspicion | None, k: int, threshold: float
) -> Arrays:
    """Return the columns of the table of samples."""
    n = len(found["density"])
    columns: Arrays = {"sample": np.arange(n)}
    columns |= _targets(targets)
    columns |= {
        "density": found["density"],
        "local_density": found["local"],
        "uncertainty": found["uncertainty"],
    }
    columns["near"] = found["counts"][:, round((threshold + 1) * BINS / 2) :].sum(1)
    columns["isolation"] = 1 - found["close"]
    if k:
        columns["shift"] = _shift(targets, found)
    if targets.groups is not None and k:
        groups = targets.groups.numpy()
        columns["agreement"] = (groups[found["indices"]] == groups[:, None]).mean(1)
        columns["quadrant"] = _quadrants(columns["local_density"], columns["agreement"])
    if suspicion is not None:
        columns |= _suspicion(suspicion)
    columns["map_x"], columns["map_y"] = found["layout"].T
    return columns


def _targets(targets: Targets) -> Arrays:
    columns: Arrays = {}
    classes, chances, outputs = targets.classes, targets.chances, targets.outputs
    if classes is not None:
        columns["label"] = classes.numpy()
    elif targets.labels is not None and targets.labels[0].numel() == 1:
        columns["label"] = targets.labels.reshape(-1).double().numpy()
    if chances is not None:
        columns["prediction"] = chances.argmax(1).numpy()
    elif outputs.shape[1] == 1:
        columns["prediction"] = outputs[:, 0].double().numpy()
    if classes is None and targets.labels is not None and targets.labels[0].numel() == outputs.shape[1]:
        gap = targets.labels.reshape(len(outputs), -1).double() - outputs.double()
        columns["error"] = gap.norm(dim=1).numpy()
    return columns


def _shift(targets: Targets, found: Arrays) -> np.ndarray:
    """Return how far each prediction is from the mean of its neighbors', weighted by likeness."""
    chances = targets.chances
    of = targets.outputs.double() if chances is None else chances
    indices, weights = torch.tensor(found["indices"]), torch.tensor(found["similarities"]).clamp(min=0)
    total = weights.sum(1, keepdim=True).double()
    around = torch.einsum("nk,nkd->nd", weights.double(), of[indices])
    gap = torch.where(total > 0, of - around / total.clamp(min=1e-12), 0)
    if chances is not None:
        return (gap.abs().sum(1) / 2).numpy()  # total variation, in [0, 1]
    spread = (of - of.mean(0)).square().sum(1).mean().sqrt()
    return (gap.norm(dim=1) / spread.clamp(min=1e-12)).numpy()


def _quadrants(local: np.ndarray, agreement: np.ndarray) -> np.ndarray:
    sparse, against = local < SPARSE * np.median(local), agreement < 0.5
    return np.array(QUADRANTS)[
        np.select([~sparse & ~against, sparse & ~against, sparse & against], [0, 1, 2], 3)
    ]


def _suspicion(found: LabelSuspicion) -> Arrays:
    return {
        "label_suspicion": found.suspicion.numpy(),
        "suggested_label": found.suggested.numpy(),
        "label_issue": found.flagged.numpy(),
        "chance_wrong": found.chance_wrong.numpy(),
    }


def class_similarity(found: Arrays, groups: Tensor) -> np.ndarray:
    """Return the mean likeness of different samples, class by class; NaN where there is no pair."""
    members = torch.nn.functional.one_hot(groups).double().numpy()
    counts = members.sum(0)
    sums = members.T @ found["class_sums"] - np.diag(members.T @ found["own"])
    with np.errstate(invalid="ignore", divide="ignore"):
        return sums / (np.outer(counts, counts) - np.diag(counts))
