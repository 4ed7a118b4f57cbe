"""Approximate search with faiss, for more rows than a question should read: an extra, likewise[faiss].

The unit vectors (u − μ) / |u − μ| of all rows, reduced to at most 256 directions and 8 bits each, are put into lists
around centers; a question reads a few lists. What it finds is compared again by the whole sketches, so that
similarities and their order are those of the exhaustive search; only rows that no list gave are missing. How many
lists are read depends on the share of true neighbors that random rows of the index find (recall), which is reported.
"""

from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from likewise.index.pairs import Columns, IndexPairs
from likewise.statistics.neighbors import NearestReducer

BEYOND = 10**7  # rows, from which on it is used without being asked for
DIRECTIONS = 256
TRAINING = 64  # rows for each list
CANDIDATES = 64  # rows a question compares again, for each neighbor
SAMPLED, NEIGHBORS = 128, 10  # rows and neighbors that the recall is measured on
WANTED = 0.99
SEED = 0


class Approximation(NamedTuple):
    """Lists of rows, and their recall."""

    lists: Any  # of faiss
    recall: float  # share of the ten nearest of random rows that were found

    def candidates(self, vectors: Tensor, count: int) -> Tensor:
        """Return the places of rows that may be nearest to unit vectors (n, width), (n, count); −1 for none."""
        _, places = self.lists.search(vectors.float().cpu().contiguous().numpy(), count)
        return torch.from_numpy(places)


def import_faiss() -> Any:
    """Import faiss, or say how to install it."""
    try:
        import faiss
    except ImportError as error:
        raise ImportError('Approximate search needs faiss: pip install "likewise[faiss]".') from error
    return faiss


def has_faiss() -> bool:
    """Whether faiss is installed."""
    return find_spec("faiss") is not None


def approximate_columns(columns: Columns, max_memory: int) -> Approximation:
    """Return the lists of an index's rows, of which as many are read as find WANTED of the neighbors of random rows."""
    faiss = import_faiss()
    m, width = columns.m, columns.origins.shape[1]
    count = max(1, min(round(4 * m**0.5), m // TRAINING))
    factory = f"PCAR{min(DIRECTIONS, width)},IVF{count},SQ8"
    lists = faiss.index_factory(width, factory, faiss.METRIC_INNER_PRODUCT)
    chance = torch.Generator().manual_seed(SEED)
    some = torch.randperm(m, generator=chance)[: max(TRAINING * count, 4 * DIRECTIONS)].sort().values
    lists.train(columns.directions(columns.sketches(some)).vectors.float().numpy())
    for vectors in columns.unit_vectors():
        lists.add(vectors.contiguous().numpy())
    return _set_width(faiss, lists, columns, count, max_memory)


def _set_width(faiss: Any, lists: Any, columns: Columns, count: int, max_memory: int) -> Approximation:
    """Return the approximation that reads the fewest lists, doubled each time, with the recall that is wanted."""
    chance = torch.Generator().manual_seed(SEED + 1)
    drawn = torch.randperm(columns.m, generator=chance)[: 2 * SAMPLED]
    k = min(NEIGHBORS, columns.m - 1)
    settings = faiss.extract_index_ivf(lists)
    tuned, told = drawn[: len(drawn) // 2], drawn[len(drawn) // 2 :]
    settings.nprobe = min(8, count)
    true = _true_neighbors(columns, tuned, k, max_memory)
    while _recall(Approximation(lists, 0), columns, tuned, true, k) < WANTED and settings.nprobe < count:
        settings.nprobe = min(2 * settings.nprobe, count)
    true = _true_neighbors(columns, told, k, max_memory)
    return Approximation(lists, _recall(Approximation(lists, 0), columns, told, true, k))


def _true_neighbors(columns: Columns, places: Tensor, k: int, max_memory: int) -> Tensor:
    pairs = IndexPairs(columns, places=places.tolist(), max_memory=max_memory)
    return pairs.visit(NearestReducer(k))[0][0].cpu()


def _recall(approximation: Approximation, columns: Columns, places: Tensor, true: Tensor, k: int) -> float:
    """Return the share of the true neighbors of rows, themselves left out, that are found."""
    if not true.numel():
        return 1.0
    vectors = columns.directions(columns.sketches(places)).vectors
    found, _ = search(approximation, columns, vectors, k + 1)
    others = [
        [row for row in near if row != own][:k]
        for near, own in zip(found.tolist(), places.tolist(), strict=True)
    ]
    hits = sum(len(set(near) & set(best)) for near, best in zip(others, true.tolist(), strict=True))
    return hits / true.numel()


def search(approximation: Approximation, columns: Columns, vectors: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the places and centered similarities of the k nearest rows that the lists give, (n, k) each.

    Args:
        approximation: The lists.
        columns: The rows.
        vectors: (n, width) unit vectors, in float64.
        k: How many; a question that finds fewer reads all rows.

    """
    count = min(columns.m, max(CANDIDATES * k, 256))
    near, similarities = [], []
    for vector, found in zip(vectors, approximation.candidates(vectors, count), strict=True):
        places = found[found >= 0]
        if len(places) < k:
            places = torch.arange(columns.m)
        exact = columns.directions(columns.sketches(places)).vectors @ vector
        best = exact.topk(k)
        near.append(places[best.indices])
        similarities.append(best.values.float())
    return torch.stack(near), torch.stack(similarities)
