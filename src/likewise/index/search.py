"""Search of an index other than by all sketches: approximate with faiss, and exact by gradients.

Approximate, for more rows than a question should read; an extra, likewise[faiss]. The unit vectors (u − μ) / |u − μ| of
all rows, reduced to at most 256 directions and 8 bits each, are put into lists around centers; a question reads a few
lists. What it finds is compared again by the whole sketches, so that similarities and their order are those of the
exhaustive search; only rows that no list gave are missing. How many lists are read depends on the share of true
neighbors that random rows of the index find (recall), which is reported.

Exact, for a few pairs, to re-rank what sketches found. A centered similarity needs the mean gradient of the whole data
set: one pass over it, made when the first exact answer is asked for and kept in the index.
"""

from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from likewise.data import Batches
from likewise.gram import GramMatrix
from likewise.gram.centering import rounding_floor
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


class MeanGradient(NamedTuple):
    """The sum of the whitened gradients of all rows."""

    total: Tensor  # (d, p), float64
    samples: int

    @property
    def grand_mean(self) -> float:
        """The mean plain similarity of all pairs."""
        return float(self.total.square().sum()) / self.samples**2 / len(self.total)


def mean_gradient(gram: GramMatrix, data: Batches) -> MeanGradient:
    """Return the mean gradient of a data set, in one pass; `gram` has the engine."""
    d = gram.d
    over = gram.with_columns(data)

    def weights(where: range) -> Tensor:
        return torch.eye(d, dtype=torch.float64).expand(len(where), d, d)

    return MeanGradient(over.products().vjp(weights).cpu(), data.n)


class KnownOfSamples(NamedTuple):
    """What sketches say of some samples."""

    left_out: (
        Tensor  # (n,) mean plain similarity to all rows, less that to those that the mean gradient is of
    )
    diagonal: Tensor  # (n,) plain similarity to themselves: 1, or 0 where the gradient is zero


class Known(NamedTuple):
    """What sketches say of the samples that are compared, and of those that a mean gradient leaves out."""

    new: KnownOfSamples
    candidates: KnownOfSamples
    grand_mean: (
        float  # mean plain similarity of all pairs, less that of the pairs that the mean gradient is of
    )


class Centering(NamedTuple):
    """What centering needs to know of some samples."""

    means: Tensor  # (n,) mean plain similarity to all rows
    lengths: Tensor  # (n,) c(x, x)^½, 0 where only rounding is left


def exact_similarities(
    gram: GramMatrix,
    new: Batches,
    candidates: Batches,
    mean: MeanGradient | None,
    known: Known | None = None,
) -> Tensor:
    """Return the exact similarities of new inputs with candidates, (n, m), in float64.

    Args:
        gram: Has the engine; plain.
        new: The new inputs.
        candidates: Samples of the data set.
        mean: For centered similarities; None for plain ones.
        known: What sketches say, where the mean is not of all rows; one output only. None where it is of all.

    """
    rows = gram.with_columns(new).of_columns()
    plain = rows.with_columns(candidates).dense().cpu().double()
    if mean is None:
        return plain
    grand_mean = mean.grand_mean + (0 if known is None else known.grand_mean)
    sides = (
        ((new, None), (candidates, None))
        if known is None
        else ((new, known.new), (candidates, known.candidates))
    )
    one, other = (
        _center(gram.with_columns(data).of_columns(), mean, grand_mean, said) for data, said in sides
    )
    shift = one.means[:, None] + other.means - grand_mean
    lengths = one.lengths[:, None] * other.lengths
    return torch.where(lengths > 0, (plain - shift) / torch.where(lengths > 0, lengths, 1), 0)


def _center(
    rows: GramMatrix, mean: MeanGradient, grand_mean: float, known: KnownOfSamples | None
) -> Centering:
    def trace(_: range, products: Tensor) -> Tensor:
        return products.diagonal(dim1=1, dim2=2).sum(-1)

    sums = rows.products().jvp(mean.total.to(rows.device), trace).cpu().double()
    means = sums / len(mean.total) / mean.samples
    if known is None:
        diagonal = rows.exact_diagonal().cpu()
    else:
        means, diagonal = means + known.left_out, known.diagonal
    left = diagonal - 2 * means + grand_mean
    alive = (diagonal > 0) & (left > rounding_floor(rows.dtype) * diagonal)
    return Centering(means, torch.where(alive, left.clamp(min=0).sqrt(), 0))
