"""A second look at the nearest neighbors of a few samples: exact order, and the passages that it rests on.

Sketches propose candidates, which are compared again by exact gradients. Of language models a third of the ten nearest
by sketches are not those by gradients: neighbors that a person reads word by word are worth a second look. Neighbors of
all other samples stay those of the sketches.

Passages are computed for a few texts of a run and kept as a table. Only for language models that are compared by the
log-likelihood of a text, whose similarities are sums over tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from likewise.engines import GradientMismatchError
from likewise.engines.memory import is_out_of_memory
from likewise.gram import GramMatrix, Sketches, join_passages, passages_by
from likewise.index.search import Known, KnownOfSamples, MeanGradient, exact_similarities, mean_gradient
from likewise.kernels import CORRELATION
from likewise.marked_text import mark_text
from likewise.progress import announce
from likewise.runs.store import Arrays
from likewise.statistics.neighbors import NearestReducer
from likewise.wording import counted

CANDIDATES = 32  # by sketches, of each sample (benchmarks/passages.py recall)
IN_MEAN = 128  # samples whose mean gradient is computed; sketches tell by how much that of all differs
TOGETHER = 64  # samples whose candidates are compared in one go
NEIGHBORS = 3  # of each text, whose passages are computed
# A pair takes about eight training steps (benchmarks/passages.py, 2026-11-18), and a run about five of each text: one
# text in 200 with three neighbors is a fortieth of its cost, more for tiny models, whose calls take longer than sums.
LEAST, MOST, ONE_IN = 8, 32, 200
TokenTexts = Callable[[int], tuple[str, Sequence[tuple[int, int]] | None]]


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


def passage_count(n: int) -> int:
    """Return for how many texts of n passages are computed, where no number is given."""
    return min(n, MOST, max(LEAST, n // ONE_IN))


def compute_passages(gram: GramMatrix, samples: np.ndarray, indices: np.ndarray) -> dict[str, Tensor]:
    """Return what tokens of neighbors contribute to the plain similarities of some texts with them.

    Args:
        gram: Of the run.
        samples: The texts, (s,).
        indices: (n, k) the neighbors of every text, nearest first.

    Returns:
        pairs (p, 2), similarities (p,), contributions (p, T), strongest (p, 2); or `problem`, the bytes of a sentence,
        where the model cannot be differentiated twice, or not in the memory that there is.

    """
    announce(f"finding the passages that similarities of {counted(len(samples), 'text')} rest on")
    near = indices[:, :NEIGHBORS]
    try:
        found = [passages_by(gram, gram.data.take([i]), gram.data.take(near[i].tolist())) for i in samples]
    except (GradientMismatchError, MemoryError, RuntimeError) as error:  # all else of the run is there
        if not isinstance(error, GradientMismatchError) and not is_out_of_memory(error):
            raise
        reason = str(error).strip().rstrip(".")
        problem = f"memory ran out ({reason})" if is_out_of_memory(error) else reason
        announce(f"passages are not marked: {problem}")
        return {"problem": torch.tensor(list(problem.encode("utf-8", "replace")), dtype=torch.uint8)}
    whole = join_passages(found, 0)
    pairs = np.stack([np.repeat(samples, near.shape[1]), near[samples].ravel()], 1)
    return {
        "pairs": torch.tensor(pairs),
        "similarities": whole.similarities.flatten(),
        "contributions": whole.contributions.flatten(0, 1),
        "strongest": whole.strongest().flatten(0, 1),
    }


def passage_table(found: Arrays, token_text: TokenTexts, excerpt_length: int) -> tuple[dict[str, Any], int]:
    """Return the table of marked excerpts, a row for each pair, and of how many neighbors tokens have no known place.

    Args:
        found: What `compute_passages` returned.
        token_text: Text i, and where its tokens lie in it.
        excerpt_length: Characters of an excerpt.

    """
    import pyarrow

    rows, unplaced = list[dict[str, Any]](), 0
    pairs = found.get("pairs", np.zeros((0, 2), np.int64)).tolist()
    for at, (sample, neighbor) in enumerate(pairs):
        text, spans = token_text(neighbor)
        if spans is None:
            unplaced += 1
            continue
        first, end = found["strongest"][at].tolist()
        try:
            marked = mark_text(text, spans, found["contributions"][at].tolist(), (first, end), excerpt_length)
        except ValueError as error:
            raise ValueError(f"token_text({neighbor}) does not fit: {error}") from error
        rows.append(
            {
                "sample": sample,
                "neighbor": neighbor,
                "similarity": float(found["similarities"][at]),
                "text": marked.text.encode("utf-8", "replace").decode(),
                "passage_start": marked.passage[0],
                "passage_end": marked.passage[1],
                "starts": marked.starts,
                "ends": marked.ends,
                "contributions": marked.contributions,
                "unshown": marked.unshown,
            }
        )
    whole, places = pyarrow.int64(), pyarrow.list_(pyarrow.int32())
    types = {
        "sample": whole,
        "neighbor": whole,
        "similarity": pyarrow.float64(),
        "text": pyarrow.string(),
        "passage_start": pyarrow.int32(),
        "passage_end": pyarrow.int32(),
        "starts": places,
        "ends": places,
        "contributions": pyarrow.list_(pyarrow.float64()),
        "unshown": pyarrow.float64(),
    }
    columns = {name: pyarrow.array([row[name] for row in rows], kind) for name, kind in types.items()}
    return columns, unplaced


def describe_passages(found: Arrays, table: dict[str, Any], unplaced: int) -> dict[str, Any]:
    """Return what the manifest says of the table: how many texts and pairs, and why there are not more."""
    problem = bytes(found["problem"].tolist()).decode("utf-8", "replace") if "problem" in found else ""
    if unplaced:
        problem = (
            f"of {counted(unplaced, 'neighbor')} it is not known where tokens lie in the text: the tokenizer tells "
            "no places, "
            "and decoding its tokens does not give the text back"
        )
    pairs = len(table["sample"])
    samples = len(set(table["sample"].to_pylist()))
    asked = found["pairs"][:, 0] if "pairs" in found else np.zeros(0)
    neighbors = len(asked) // max(1, len(np.unique(asked)))
    return {"samples": samples, "neighbors": neighbors, "pairs": pairs, "problem": problem}


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
