"""The nearest of a few samples, by exact gradients: sketches propose candidates, which are compared again.

Of language models a third of the ten nearest by sketches are not those by gradients: neighbors that a person reads
word by word are worth a second look. Neighbors of all other samples stay those of the sketches.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from likewise.gram import GramMatrix, Sketches
from likewise.index.search import Known, KnownOfSamples, MeanGradient, exact_similarities, mean_gradient
from likewise.kernels import CORRELATION
from likewise.progress import announce
from likewise.statistics.neighbors import NearestReducer
from likewise.wording import counted

CANDIDATES = 32  # by sketches, of each sample (benchmarks/passages.py recall)
IN_MEAN = 128  # samples whose mean gradient is computed; sketches tell by how much that of all differs
TOGETHER = 64  # samples whose candidates are compared in one go


class NeighborLists(NamedTuple):
    """The nearest of every sample, best first."""

    indices: np.ndarray  # (n, k)
    similarities: np.ndarray  # (n, k) centered
    exact: np.ndarray  # (n,) whether they are by exact gradients, not by sketches

    def with_exact(self, found: dict[str, np.ndarray]) -> "NeighborLists":
        """Return these lists with those that `rerank_neighbors` found in their places."""
        lists = NeighborLists(*(part.copy() for part in self))
        rows = found["samples"]
        lists.indices[rows], lists.similarities[rows] = found["indices"], found["similarities"]
        lists.exact[rows] = True
        return lists


def rerank_neighbors(gram: GramMatrix, sketches: Sketches, samples: np.ndarray, k: int) -> dict[str, Tensor]:
    """Return the k nearest of some samples among their candidates, by exact centered similarities.

    Plain similarities are exact. Centering subtracts means over all samples: exact up to 128 of them; beyond that,
    means over 128, and what sketches say of the difference to those over all.

    Args:
        gram: Of the run.
        sketches: Of its samples.
        samples: Which of them, (s,).
        k: How many neighbors of each.

    Returns:
        samples (s,), indices (s, k) and similarities (s, k), best first; error, the standard error of a similarity
        that means over 128 samples leave, 0 where there are no more.

    """
    announce(f"comparing {CANDIDATES} candidates of each of {counted(len(samples), 'text')} exactly")
    plain, rows = gram.with_centering(False).with_kernel(CORRELATION), torch.as_tensor(samples)
    n = gram.data.n
    candidates = _candidates(sketches, rows, min(n - 1, max(k, CANDIDATES)))
    known = torch.linspace(0, n - 1, min(n, IN_MEAN)).long().unique()
    mean = mean_gradient(plain, gram.data.take(known.tolist()))
    parts = [
        _compare(plain, sketches, some, places, mean, known)
        for some, places in zip(rows.split(TOGETHER), candidates.split(TOGETHER), strict=True)
    ]
    best = torch.cat(parts).sort(dim=1, descending=True, stable=True)
    return {
        "samples": rows,
        "indices": candidates.gather(1, best.indices[:, :k]),
        "similarities": best.values[:, :k].clamp(-1, 1).float(),
        "error": torch.tensor(_centering_error(sketches, rows, known)),
    }


def describe_reranking(found: dict[str, np.ndarray]) -> str:
    """Return a sentence for the run's list of approximations."""
    texts = counted(len(found["samples"]), "text")
    error = float(found["error"])
    centered = f"; the mean that they are centered by leaves similarities off by {error:.4f}" if error else ""
    return (
        f"Neighbors of the {texts} with marked passages are by exact gradients: the {CANDIDATES} nearest by sketches "
        f"were compared again{centered}."
    )


def _candidates(sketches: Sketches, rows: Tensor, count: int) -> Tensor:
    """Return the nearest of each row by sketches, (s, count), without itself."""
    ((places, _),) = sketches.take_rows(rows).visit(NearestReducer(count + 1))
    places = places.cpu()
    itself = places == rows[:, None]
    itself[~itself.any(1), -1] = True  # a sample whose gradient is zero may be far from itself
    return places[~itself].view(len(rows), count)


def _compare(
    gram: GramMatrix, sketches: Sketches, rows: Tensor, candidates: Tensor, mean: MeanGradient, known: Tensor
) -> Tensor:
    """Return exact similarities of rows with their candidates, (s, c); a candidate of several is computed once."""
    distinct, where = candidates.unique(return_inverse=True)
    new, others = (gram.data.take(places.tolist()) for places in (rows, distinct))
    said = _known_by_sketches(sketches, rows, distinct, known)
    return exact_similarities(gram, new, others, mean, said).gather(1, where)


def _centering_error(sketches: Sketches, rows: Tensor, known: Tensor) -> float:
    """Return how far centered similarities are off, since means over all samples come from sketches."""
    if len(known) == sketches.shape[1]:
        return 0.0
    vectors, whole = sketches.restore(rows), sketches.mean
    difference = float((whole - sketches.restore(known).mean(0)).norm())
    squared_length = float((vectors - whole).square().sum(1).mean())  # c(x, x)
    return (2 / len(whole)) ** 0.5 * difference / squared_length if squared_length else 0.0


def _known_by_sketches(sketches: Sketches, rows: Tensor, candidates: Tensor, in_mean: Tensor) -> Known:
    """Return what sketches say of samples; nothing is left out of a mean over all, up to rounding."""
    part, whole = sketches.restore(in_mean).mean(0), sketches.mean
    if len(in_mean) == sketches.shape[1]:
        part = whole

    def describe(places: Tensor) -> KnownOfSamples:
        vectors = sketches.restore(places)
        alive = (vectors != 0).any(1).double()
        return KnownOfSamples((vectors @ (whole - part)).cpu(), alive.cpu())

    grand_mean = float(whole.square().sum() - part.square().sum())
    return Known(describe(rows), describe(candidates), grand_mean)
