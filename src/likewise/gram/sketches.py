"""Random projections of gradients, and all pairs from them: a fraction of the exact cost, with an error.

A sketch is a random projection of a sample's whitened gradient that keeps inner products on average. It consists of
REPLICATES independent ones. For each, explicit coordinates get random signs and are added up in b buckets, every b-th
in one; an outer product a δᵀ, never formed, becomes (P a) ∘ (Q δ) with random signs in P and Q; and of the gradient G
of a matrix with long sides, never formed either, blocks Lᵀ G R of few numbers are added, with random signs in L and R,
from the inputs and output gradients at each position. Every way E⟨s, s'⟩ = ⟨S, S'⟩, and with unit vectors of length
d·q after whitening, q = b · REPLICATES, the error of a similarity is about 1/√(d·q), less the more alike two samples
are: the map is linear, so that what is equal stays equal. How far replicates differ tells the standard error of every
similarity (`similarity_errors`); `measure_error` compares a few samples both ways.

`pair_source` decides for every statistic of pairs whether it compares gradients or sketches.
"""

import copy
import hashlib
import warnings
from collections.abc import Callable
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from likewise.checks import check_integer
from likewise.data import Samples
from likewise.distributed import alone, join_results, own_share
from likewise.engines import Engine, GradientParts, RowBlock
from likewise.engines.factors import ParameterGradient, concatenate
from likewise.engines.memory import equal_size
from likewise.fingerprint import Fingerprint
from likewise.gram.blocks import block_spans, visit_blocks
from likewise.gram.centering import rounding_floor, warn_of_lost_differences
from likewise.gram.cost import PAIRS_OF_SKETCHES, SKETCHING, SKETCHING_COLUMNS, WIDTH, PairCost
from likewise.gram.features import KeptSketches
from likewise.gram.matrix import GramMatrix, retry_changed_parts
from likewise.gram.strips import (
    BlockReducer,
    PairSource,
    ProductReducer,
    Reducer,
    Strip,
    reduce_strip,
    split_results,
)
from likewise.kernels import CORRELATION
from likewise.linalg import accumulation_dtype, matrix_power, rank_floor
from likewise.readouts import depth_in_package
from likewise.torch_state import send

SketchOption = (
    int | Literal["auto"] | None
)  # numbers per sample; "auto": exact where that is cheap; None: exact
NARROWEST = 16  # numbers a sample
REPLICATES = (
    4  # of 2, an error made by two large coordinates shows in one sign only; of 8, narrow sketches err more
)
COORDINATES = "small parameters last, signs of 64 bits"  # their order and signs: others give other sketches
# Rows and columns of a block Lᵀ G R, by the least sums that a replicate has for each output. Smaller blocks err less
# and take longer: of a gradient of rank one, n sums in blocks of s × s have a variance of 4 (s + 1) / n. Several
# outputs share L and R, so that little is averaged out over them. Where many layers share in a gradient, errors are
# those of formed gradients, within their spread; of two layers with few positions they are larger (2026-11-19).
SIDES = {128: 4, 32: 2, 0: 1}
# Entries of a matrix below which a gradient is formed, and its coordinates added up: on a CPU while it is in its cache
# (a ResNet with matrices of 37,000: 3 % less time, 2026-11-19).
FEWEST_ENTRIES = 2**16
LEAST_ERROR = 1e-4  # below, similarities of sketches differ from exact ones by rounding
FEWEST_PAIRS = 400  # by which the errors of a projection are told
COMPARED = 64  # samples that are compared exactly, to tell the errors of a projection
TOGETHER = 256  # rows whose errors are computed at a time
CHUNK = 4096  # vectors that are converted to float64 at a time


class Sketched(NamedTuple):
    """Random projections of the gradients of some samples."""

    rows: Tensor  # (n, d, q) of J(x)
    whitening: Tensor  # (n, d, d) K(x, x)^-½, exact up to float32
    squares: Tensor  # (n,) tr K(x, x), exact
    ranks: Tensor  # (n,) of K(x, x): 0 where no parameter moves the outputs


class Sketch:
    """A random map from gradients to q numbers per output, the same for every call with a seed.

    Args:
        q: A multiple of REPLICATES, as `bucket_count` gives it.
        seed: Of the random signs.

    """

    def __init__(self, q: int, seed: int) -> None:
        if q < 1 or q % REPLICATES:
            raise ValueError(
                f"q must be a multiple of {REPLICATES}, found {q}: see likewise.gram.bucket_count."
            )
        self.q, self._seed = q, seed
        self._maps: _Maps | None = None
        self._layout: object = None  # of the gradients that the maps are for
        self._buffer: Tensor | None = None
        self._matrices: dict[str, tuple[int, int]] = {}  # that the engine's parts have apart

    @property
    def buckets(self) -> int:
        """How many sums each replicate consists of."""
        return self.q // REPLICATES

    def add_to(self, fingerprint: Fingerprint, name: str) -> None:
        """Add what ranks that share a pass must have in common: not the signs that only some have drawn yet."""
        fingerprint.put("options", name, f"{self.q} numbers, seed {self._seed}")

    def __call__(self, engine: Engine, samples: Samples) -> Sketched:
        """Return the sketches of samples; call it inside `net.evaluation_mode`."""
        self._matrices = self._find_matrices(engine, samples)
        return _whiten(*engine.map_parts(samples, self._project, self, self._matrices))

    def parts(self, engine: Engine, samples: Samples) -> str:
        """Return in what parts gradients come: sketches of other parts are no match."""
        shapes = [tuple(part.shape[1:]) for part in engine.features(samples, 0).tensors]
        matrices = self._find_matrices(engine, samples)
        facts = (COORDINATES, REPLICATES, self.q, self._seed, shapes, self._side, matrices)
        return hashlib.sha256(str(facts).encode()).hexdigest()[:8]

    def dependent_buckets(self, engine: Engine, samples: Samples) -> int:
        """Return how many consecutive sums of a replicate are not independent of each other: those of a block."""
        return self._side**2 if self._find_matrices(engine, samples) else 1

    @property
    def _side(self) -> int:
        return next(side for least, side in SIDES.items() if self.buckets >= least)

    @property
    def _blocks(self) -> int:
        """How many blocks Lᵀ G R each replicate has."""
        return self.buckets // self._side**2

    def _find_matrices(self, engine: Engine, samples: Samples) -> dict[str, tuple[int, int]]:
        """Return rows and columns of the parameters that are projected from both sides: of large ones."""
        length = REPLICATES * self._blocks * self._side
        return {
            name: sides
            for name, sides in engine.matrices(samples).items()
            if min(sides) >= length and prod(sides) >= FEWEST_ENTRIES
        }

    def project(self, parts: GradientParts) -> Sketched:
        """Return the sketches of gradients that come in parts, the same parts at every call."""
        return _whiten(*self._project(parts))

    def _project(self, parts: GradientParts) -> tuple[Tensor, Tensor]:
        """Return the sketches (n, d, q) of J(x), and K(x, x)."""
        square, total = parts.factors_gram, None
        for start, blocks in parts.explicit:
            terms, grams = zip(*(self._project_block(parts, start, block) for block in blocks), strict=True)
            term = concatenate(list(terms), 0)
            total = term if total is None else total.add_(term)
            square = square + concatenate(list(grams), 0)
        for i, (a, delta) in enumerate(parts.factors):
            left, right = self._maps_of(parts, a).factors[i]
            term = (a @ left)[:, None] * (delta @ right)
            total = term if total is None else total.add_(term)
        for name, gradients in parts.matrices:
            terms, grams = zip(*(self._project_matrix(parts, name, part) for part in gradients), strict=True)
            term = concatenate(list(terms), 0)
            total = term if total is None else total.add_(term)
            square = square + concatenate(list(grams), 0)
        if total is None:  # no parameter moves the outputs
            total = torch.zeros(*square.shape[:2], self.q, device=square.device)
        return total, square

    def _project_matrix(self, parts: GradientParts, name: str, gradient: ParameterGradient) -> RowBlock:
        """Return the blocks Lᵀ G R of some samples, the first sums of each replicate, and their G Gᵀ."""
        square = gradient.self_gram()  # first: a gradient that it forms serves the projection too
        like = square.new_empty(0, dtype=torch.promote_types(gradient.dtype, torch.float32))
        blocks = gradient.project_two_sided(*self._maps_of(parts, like).matrices[name])
        sums = blocks.unflatten(2, (REPLICATES, -1)).flatten(3) * blocks[0, 0].numel() ** -0.5
        return RowBlock(pad(sums, (0, self.buckets - sums.shape[3])).flatten(2), square)

    def _project_block(self, parts: GradientParts, start: int, block: RowBlock) -> RowBlock:
        maps = self._maps_of(parts, block.rows)
        rows = _sum_buckets(block.rows, maps.signs, maps.run_signs, start, self.buckets, self._scratch)
        return RowBlock(rows, block.gram)

    def _scratch(self, like: Tensor, size: int) -> Tensor:
        """Return memory of so many entries: on a CPU, to touch fresh memory takes longer than to multiply."""
        if like.device.type != "cpu":
            return like.new_empty(size)
        known = self._buffer
        if known is None or known.numel() < size or known.dtype != like.dtype:
            self._buffer = known = like.new_empty(size)
        return known[:size]

    def _maps_of(self, parts: GradientParts, like: Tensor) -> "_Maps":
        """Return the random signs for gradients in these parts; drawn once."""
        layout = parts.width, [(a.shape[1], delta.shape[2]) for a, delta in parts.factors], self._matrices
        if self._maps is None or self._layout != layout:
            self._layout, self._maps = layout, self._draw(parts, like)
        return self._maps

    def _draw(self, parts: GradientParts, like: Tensor) -> "_Maps":
        generator = torch.Generator().manual_seed(self._seed)

        def signs(*shape: int) -> Tensor:
            return draw_signs(prod(shape), generator, like).view(shape)

        runs = 1 + parts.width // self.buckets
        run_signs = signs(REPLICATES, runs) * REPLICATES**-0.5
        explicit = signs(max(parts.width, 1))
        factors = [
            (signs(a.shape[1], self.q) * self.q**-0.5, signs(delta.shape[2], self.q))
            for a, delta in parts.factors
        ]
        blocks, side = REPLICATES * self._blocks, self._side
        matrices = {
            name: (signs(blocks, rows, side), signs(blocks, columns, side))
            for name, (rows, columns) in self._matrices.items()
        }
        return _Maps(explicit, run_signs, factors, matrices)


class _Maps(NamedTuple):
    """The random signs of a sketch."""

    signs: Tensor  # of explicit coordinates
    run_signs: Tensor  # (replicates, runs) of their runs
    factors: list[tuple[Tensor, Tensor]]  # P and Q of each outer product
    matrices: dict[str, tuple[Tensor, Tensor]]  # L (blocks, rows, side) and R (blocks, columns, side)


def draw_signs(count: int, generator: torch.Generator, like: Tensor) -> Tensor:
    """Return random signs, of 64 from one draw on the host: of 86 million, single draws take half a second."""
    words = torch.empty(-(-count // 64), dtype=torch.int64).random_(
        torch.iinfo(torch.int64).min, None, generator=generator
    )
    octets = send(words.view(torch.uint8), like.device)
    bits = octets[:, None] >> torch.arange(8, dtype=torch.uint8, device=like.device) & 1
    return bits.flatten()[:count].to(like.dtype).mul_(2).sub_(1)


def _whiten(total: Tensor, square: Tensor) -> Sketched:
    """Return sketches (n, d, q) with what whitens them, given K(x, x)."""
    white = matrix_power(square, -0.5, rank_floor(total.dtype))
    squares = square.diagonal(dim1=1, dim2=2).sum(1)
    return Sketched(total, white.matrix.to(total), squares, white.rank)


def _sum_buckets(
    rows: Tensor,
    signs: Tensor,
    run_signs: Tensor,
    start: int,
    buckets: int,
    scratch: Callable[[Tensor, int], Tensor],
) -> Tensor:
    """Return the sketch of consecutive coordinates, (n, d, replicates · buckets).

    Coordinate i is in bucket i % buckets and run i // buckets. Replicates differ in the signs of runs, so that the
    terms which two coordinates of a bucket add to an inner product are independent between replicates.

    Args:
        rows: (n, d, p) coordinates from `start` on.
        signs: Of all coordinates.
        run_signs: (replicates, runs) of all runs.
        start: The place of the first coordinate.
        buckets: How many.
        scratch: Returns memory like a tensor, of so many entries, that is used again by the next part.

    """
    first, p = start % buckets, rows.shape[2]
    runs = -(-(first + p) // buckets)
    shape = (*rows.shape[:2], runs * buckets)
    padded = scratch(rows, prod(shape)).view(shape)
    padded[:, :, :first] = 0
    padded[:, :, first + p :] = 0
    torch.mul(rows, signs[start : start + p], out=padded[:, :, first : first + p])
    here = run_signs[:, start // buckets : start // buckets + runs]
    return (here @ padded.unflatten(2, (runs, buckets))).flatten(2)


def sketch_bytes(engine: Engine, samples: Samples, d: int) -> int:
    """Return the bytes that sketching adds for a sample with d outputs: three times the largest part."""
    return 3 * 4 * engine.largest_part(samples, d)


def whiten_sketches(sketched: Sketched) -> Tensor:
    """Return whitened sketches as vectors (n, d·q), with inner products k(x, x'); k(x, x) is rank/d."""
    flat = (sketched.whitening @ sketched.rows).flatten(1)
    squared_norms = sketched.ranks.to(flat) / sketched.rows.shape[1]
    return normalize(flat, dim=1) * squared_norms.sqrt()[:, None]


def inner_product_sums(sketched: Sketched, weights: Tensor) -> Tensor:
    """Estimate Σ_x' k^I(x, x') w(x') for weights (n, c), (n, c) in float64, from the sketches of a data set."""
    rows, wide = sketched.rows.flatten(1), accumulation_dtype(sketched.rows)
    weights = weights.to(rows.device, wide)
    spans = [slice(start, start + CHUNK) for start in range(0, len(rows), CHUNK)]
    total = sum(rows[some].to(wide).T @ weights[some] for some in spans)
    return torch.cat([rows[some].to(wide) @ total for some in spans]) / sketched.rows.shape[1]


def bucket_count(numbers: int, d: int) -> int:
    """Return q for a sketch of about so many numbers; buckets are a prime, so that no layer's width is a multiple."""
    buckets = max(5, -(-numbers // (REPLICATES * d)))
    while any(buckets % i == 0 for i in range(2, int(buckets**0.5) + 1)):
        buckets += 1
    return REPLICATES * buckets


def similarity_errors(rows: Tensor, columns: Tensor, d: int, group: int = 1) -> Tensor:
    """Return the standard error of each similarity of sketches, (..., n, m), from the sketches alone.

    The replicates of a sketch are independent estimates of the same similarities, bucket by bucket, and the error is
    estimated from how far they differ. Lengths are exact or divided by, which is taken into account: a sample's
    similarity to itself has no error. An interval of ±1.96 errors holds about 95 % of the exact similarities, over
    pairs and projections; for the pairs of one projection see `error_factors`.

    Args:
        rows: (..., n, d·q) whitened sketches, or unit vectors of sketches less their mean, for centered similarities.
        columns: (..., m, d·q) likewise; of k neighbors of each row, columns[indices] with rows[:, None].
        d: The number of outputs that were sketched.
        group: So many consecutive buckets of a replicate are not independent of each other.

    Returns:
        (..., n, m) errors of rows @ columns.mT.

    """
    width = d * REPLICATES
    if rows.shape[-1] % width or columns.shape[-1] != rows.shape[-1]:
        raise ValueError(
            f"Sketches of {d} outputs have a multiple of {width} entries, found {rows.shape[-1]} and "
            f"{columns.shape[-1]}."
        )
    left, right = _by_bucket(rows, d), _by_bucket(columns, d)
    own, other = _squared_shares(left), _squared_shares(right)
    similarity = (rows @ columns.mT)[..., None, None, :, :]
    variance = similarity.new_zeros(similarity[..., 0, 0, :, :].shape)
    squared, step = torch.zeros_like(variance), group * max(1, 2**20 // (group * similarity.numel()))
    for start in range(0, left.shape[-4], step):
        part = slice(start, start + step)
        terms = left[..., part, :, :, :] @ right[..., part, :, :, :].mT  # (..., buckets, replicates, n, m)
        shares = own[..., part, :, :, None] + other[..., part, :, None, :]
        centered = terms.sub_(shares.mul_(similarity).div_(2))
        if group > 1:
            missing = -centered.shape[-4] % group  # buckets that belong to no block come last
            centered = pad(centered, (0, 0) * 3 + (0, missing))
            centered = centered.unflatten(-4, (-1, group)).sum(-4)
        by_bucket = _variance(centered).mul_(REPLICATES)
        variance += by_bucket.sum(-3)
        squared += by_bucket.square_().sum(-3)
    # Few buckets that matter: Student's t with as many degrees of freedom has wider intervals than a normal.
    least = torch.finfo(squared.dtype).tiny
    freedom = ((REPLICATES + 1) * variance.square() / squared.clamp(min=least) - 2).clamp(min=1)
    return variance.sqrt_() * (1 + 1.21 / freedom + 1.44 / freedom.square())


class ErrorFactors(NamedTuple):
    """By how much the errors of one projection are larger than their standard errors: 95 % are within 1.96 of these."""

    centered: float
    plain: float


def error_factors(sketches: Tensor, exact: Tensor, d: int, group: int = 1) -> ErrorFactors:
    """Return the factors of standard errors by which 95 % of some similarities are within ±1.96, 1 for too few pairs.

    `similarity_errors` hold on average over projections. All pairs of an index share one projection, and where
    gradients have few directions, as those of texts do, its errors are larger or smaller than usual for all pairs.

    Args:
        sketches: (n, d·q) whitened sketches.
        exact: (n, n) exact plain similarities.
        d: The number of outputs that were sketched.
        group: As of `similarity_errors`.

    """
    exact = exact.to(sketches)
    means = exact.mean(0)
    left = exact - means[:, None] - means + exact.mean()
    lengths = left.diagonal().clamp(min=0).sqrt()
    scale = torch.where(lengths > 0, 1 / lengths, 0)
    vectors = normalize(sketches - sketches.mean(0), dim=1)
    centered = _error_ratio(vectors, left * scale * scale[:, None], d, group)
    return ErrorFactors(centered, _error_ratio(sketches, exact, d, group))


def _error_ratio(vectors: Tensor, exact: Tensor, d: int, group: int) -> float:
    above = torch.ones_like(exact, dtype=torch.bool).triu(1)
    rounded = vectors.float()  # of an error, two digits are enough
    errors = similarity_errors(rounded, rounded, d, group).to(exact)[above]
    off = (vectors @ vectors.mT - exact)[above]
    known = errors > LEAST_ERROR
    if known.sum() < FEWEST_PAIRS:
        return 1.0
    # Of 64 samples, a root mean square is less exact than this quantile: a few pairs decide it (measured 2026-11-16).
    return float((off[known] / errors[known]).abs().quantile(0.95)) / 1.96


def _variance(terms: Tensor) -> Tensor:
    """Return terms.var(-3), which takes several times as long over few terms along a stride."""
    first, *rest = terms.unbind(-3)
    mean = sum(rest, first) / terms.shape[-3]
    squares = (first - mean).square_()
    for term in rest:
        squares += (term - mean).square_()
    return squares / len(rest)


def _by_bucket(vectors: Tensor, d: int) -> Tensor:
    """Return sketches (..., n, d·q) as (..., buckets, replicates, n, d)."""
    return vectors.unflatten(-1, (d, REPLICATES, -1)).movedim(-1, -4).movedim(-1, -3)


def _squared_shares(sums: Tensor) -> Tensor:
    """Return the share of each sum in the squared length of its sketch, (..., buckets, replicates, n)."""
    squares = sums.square().sum(-1)
    total = squares.sum((-3, -2), keepdim=True)
    return squares / torch.where(total > 0, total, 1)


class Sketches:
    """k^C of all pairs from whitened sketches, plain and centered.

    Args:
        rows: (n, q) vectors whose squared lengths are k(x, x).
        columns: (m, q) of other samples; None for a square matrix.
        mean: (q,) the mean of other samples, by which centering compares; None: that of the columns.
        centered: Whether `strip.similarity` is the centered one.
        max_memory: Bytes for a strip and what reducers make of it.

    """

    def __init__(
        self,
        rows: Tensor,
        *,
        columns: Tensor | None = None,
        mean: Tensor | None = None,
        centered: bool = False,
        max_memory: int = 2**30,
    ) -> None:
        if mean is None:
            mean = (rows if columns is None else columns).mean(0)
        self._mean = mean
        self._grand_mean = mean.square().sum()
        self._rows = _Directions.from_sketches(rows, mean)
        self._columns = self._rows if columns is None else _Directions.from_sketches(columns, mean)
        self._centered, self._max_memory = centered, max_memory
        if centered:
            lost = (self._columns.lengths == 0) & (self._columns.alive > 0)
            warn_of_lost_differences(int(lost.sum()), len(lost))

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and columns."""
        return len(self._rows.means), len(self._columns.means)

    @property
    def square(self) -> bool:
        """Whether rows and columns are the same samples."""
        return self._rows is self._columns

    def take_rows(self, places: Tensor) -> "Sketches":
        """Return the similarities of the rows at some places with all columns: no longer a square matrix."""
        other = copy.copy(self)
        other._rows = _Directions(*(part[places.to(part.device)] for part in self._rows))
        return other

    def restore(self, places: Tensor) -> Tensor:
        """Return the sketches of the rows at some places, (b, q), in float64."""
        vectors, lengths, _, alive = (part.double() for part in self.take_rows(places)._rows)
        return (vectors * lengths[:, None] + self._mean.double()) * alive[:, None]

    @property
    def mean(self) -> Tensor:
        """The mean sketch of the reference set, (q,), in float64: of the columns if no other was given."""
        return self._mean.double()

    def visit(self, *reducers: Reducer) -> list[tuple[Tensor, ...]]:
        """Return what each reducer keeps of every row.

        Products need no pairs. Of the others, those that can be given some columns at a time are shown blocks, each
        pair of blocks once; the rest whole strips, from products of their own.
        """
        products = {i: r for i, r in enumerate(reducers) if isinstance(r, ProductReducer)}
        blocks = {i: r for i, r in enumerate(reducers) if isinstance(r, BlockReducer) and i not in products}
        strips = {i: r for i, r in enumerate(reducers) if i not in products and i not in blocks}
        found: dict[int, tuple[Tensor, ...]] = {i: (self @ r.weights,) for i, r in products.items()}
        if blocks:
            found |= dict(zip(blocks, self._visit_blocks(tuple(blocks.values())), strict=True))
        if strips:
            found |= dict(zip(strips, self._visit_strips(tuple(strips.values())), strict=True))
        return [found[i] for i in range(len(reducers))]

    def __matmul__(self, weights: Tensor) -> Tensor:
        """Return the product with weights (m, c), (n, c) in float64; linear in the number of samples."""
        rows, columns = self._rows, self._columns
        weights = weights.to(columns.vectors.device, accumulation_dtype(columns.vectors))
        if self._centered:
            return _multiply(rows.vectors, _multiply_transposed(columns.vectors, weights))
        weights = weights * columns.alive[:, None]
        moved = _multiply_transposed(columns.vectors, weights * columns.lengths[:, None])
        shared = (columns.means - self._grand_mean).to(weights) @ weights
        product = _multiply(rows.vectors, moved) * rows.lengths[:, None]
        return (product + rows.means[:, None] * weights.sum(0) + shared) * rows.alive[:, None]

    def _visit_blocks(self, reducers: tuple[BlockReducer, ...]) -> list[tuple[Tensor, ...]]:
        rows, columns = (
            block_spans(count, self._rows.vectors.device, self._max_memory) for count in self.shape
        )
        about = (self._rows, self._columns)
        columns_or_none = None if self.square else columns
        return visit_blocks(self._block, rows, columns_or_none, reducers, about, PAIRS_OF_SKETCHES)

    def _visit_strips(self, reducers: tuple[Reducer, ...]) -> list[tuple[Tensor, ...]]:
        n, m = self.shape
        height = max(1, min(512, self._max_memory // 8 // (8 * m)))

        def show(where: range) -> tuple[Tensor, ...]:
            return reduce_strip(self._block(where, None), reducers)

        spans = [range(start, min(start + height, n)) for start in range(0, n, height)]
        about = (self._rows, self._columns)
        return split_results(join_results(show, spans, PAIRS_OF_SKETCHES, about), reducers)

    def _block(self, here: range, there: range | None) -> Strip:
        """Return the rows at some places with the columns at others, or with all."""
        rows = self._rows.take(here)
        columns = self._columns if there is None else self._columns.take(there)
        centered = rows.vectors @ columns.vectors.T

        def plain() -> Tensor:
            k = (centered * rows.lengths[:, None]).mul_(columns.lengths)
            k = k.add_(rows.means[:, None]).add_(columns.means - self._grand_mean)
            return k if self._all_alive else k.mul_(rows.alive[:, None]).mul_(columns.alive)

        return Strip(
            rows=here,
            square=self.square,
            use_centered=self._centered,
            plain=plain,
            centered=lambda: centered,
            columns=there,
        )

    @cached_property
    def _all_alive(self) -> bool:
        return bool(self._rows.alive.all() and self._columns.alive.all())


def _multiply(vectors: Tensor, weights: Tensor) -> Tensor:
    """Return vectors (n, q) @ weights (q, c) in the weights' dtype, without a copy of all vectors in it."""
    return torch.cat([part.to(weights) @ weights for part in vectors.split(CHUNK)])


def _multiply_transposed(vectors: Tensor, weights: Tensor) -> Tensor:
    """Return vectors (m, q)ᵀ @ weights (m, c) in the weights' dtype, without a copy of all vectors in it."""
    total = weights.new_zeros(vectors.shape[1], weights.shape[1])
    for part, some in zip(vectors.split(CHUNK), weights.split(CHUNK), strict=True):
        total += part.to(weights).T @ some
    return total


class _Directions(NamedTuple):
    """Sketches less their mean: subtracted before any product, or small differences would drown in float32."""

    vectors: Tensor  # (n, q) of unit length, 0 where centering leaves only rounding
    lengths: Tensor  # (n,) before
    means: Tensor  # (n,) mean similarity to the reference set
    alive: Tensor  # (n,) 1, and 0 for a sample with a zero gradient, which is similar to nothing

    @classmethod
    def from_sketches(cls, sketches: Tensor, mean: Tensor) -> "_Directions":
        left = sketches - mean
        squares = sketches.square().sum(1)
        left[(squares == 0) | (left.square().sum(1) <= rounding_floor(sketches.dtype) * squares)] = 0
        vectors = normalize(left, dim=1)
        return cls(vectors, left.norm(dim=1), sketches @ mean, (squares > 0).to(sketches))

    def take(self, where: range) -> "_Directions":
        """Return those at some places."""
        return _Directions(*(part[where.start : where.stop] for part in self))


class SketchNotice(UserWarning):
    """Says that a statistic compares sketches of gradients, with what error, and how to compare gradients exactly.

    Example:
        >>> import torch, likewise as lw
        >>> import warnings
        >>> gram = lw.GramMatrix(torch.nn.Linear(4, 3), torch.randn(9, 4))
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", lw.SketchNotice)      # sketches are fine
        ...     found = lw.nearest(gram, k=3)

    """


class GradientPairs(PairSource, Protocol):
    """All pairs of the gradients of two data sets, exact or of sketches, with their errors."""

    def standard_errors(self, found: Tensor, *, centered: bool | None = None) -> Tensor:
        """Return the standard errors of the similarities of each row with the columns at places (n, k)."""


def pair_source(gram: GramMatrix, sketch: SketchOption) -> GradientPairs:
    """Return the matrix itself, or its sketches of about `sketch` numbers a sample; see `choose_width`."""
    width = choose_width(gram, sketch)
    return gram if width is None else SketchedMatrix(gram, width)


def choose_width(gram: GramMatrix, sketch: SketchOption) -> int | None:
    """Return by how many numbers per sample pairs are compared; None: by gradients, exactly.

    "auto" is exact where that is cheap, by counting multiplications: all pairs take seconds, at most ten plain
    training epochs, or not many more than sketches. It is also exact where gradients are kept anyway
    (`gram.with_feature_cache`), and where there are no sketches: of other kernels, and of activations. Else it is
    1024, and a SketchNotice says so, once for a matrix and those made from it.

    Args:
        gram: The matrix.
        sketch: The option of the statistic.

    """
    if sketch is None:
        return None
    if not (isinstance(sketch, str) and sketch == "auto"):
        advice = (
            "numbers a sample, such as 1024, 'auto' (sketches where exact pairs take long) or None (exact)"
        )
        return check_integer("sketch", sketch, NARROWEST, 2**20, advice)
    if gram.kernel != CORRELATION or not gram.of_network:
        return None
    with alone():  # what is chosen does not depend on how many processes share the work
        cost = gram.pair_cost()
    if cost.exact_is_cheap:
        return None
    if not gram.is_part and gram.announce_once("sketches", gram.shape):
        warnings.warn(_notice(gram, cost), SketchNotice, stacklevel=depth_in_package())
    return WIDTH


def _notice(gram: GramMatrix, cost: PairCost) -> str:
    numbers = gram.d * bucket_count(WIDTH, gram.d)
    return (
        f"{gram.shape[0]:,} × {gram.shape[1]:,} pairs are compared by sketches of {numbers:,} numbers per sample, with "
        f"a standard error of about {numbers**-0.5:.2f} per similarity. Exact gradients take at least "
        f"{cost.exact:,.0f} plain training epochs, sketches at least {cost.sketched:,.0f} "
        "(multiplications, counted): sketch=None compares gradients exactly, sketch=4096 halves the error."
    )


class SketchedMatrix:
    """k^C of all pairs of a matrix from sketches of its gradients, which the matrix keeps.

    Args:
        gram: The matrix, plain or centered.
        width: About how many numbers a sketch has.

    """

    def __init__(self, gram: GramMatrix, width: int) -> None:
        _refuse_other_kernel(gram)
        self._gram, self._kept = gram, _kept_sketches(gram, width)
        self._pairs = self._compare(self._kept.rows, None if gram.square else self._kept.columns)

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and columns."""
        return self._gram.shape

    @property
    def square(self) -> bool:
        """Whether rows and columns are the same samples."""
        return self._gram.square

    def visit(self, *reducers: Reducer) -> list[tuple[Tensor, ...]]:
        """Return what each reducer keeps of every row."""
        return self._pairs.visit(*reducers)

    def of_columns(self, places: Tensor) -> Sketches:
        """Return the columns at some places against all columns."""
        columns = self._kept.columns
        return self._compare(columns[places.to(columns.device)], columns)

    def _compare(self, rows: Tensor, columns: Tensor | None) -> Sketches:
        gram, mean = self._gram, self._kept.mean
        return Sketches(rows, columns=columns, mean=mean, centered=gram.centered, max_memory=gram.max_memory)

    def standard_errors(self, found: Tensor, *, centered: bool | None = None) -> Tensor:
        """Return the standard errors of the similarities of each row with the columns at places (n, k).

        Estimated from the sketches; a few samples that are compared exactly tell the factor of this projection.

        Args:
            found: (n, k) places of columns.
            centered: Of which similarities; None: of those that the matrix was asked for.

        """
        kept, k = self._kept, found.shape[1]
        centered = self._gram.centered if centered is None else centered
        if not found.numel():
            return torch.zeros(found.shape, dtype=self._gram.dtype, device=self._gram.device)
        if kept.error_factors is None:
            kept.error_factors = _measure_factors(self._gram, kept)
        mean, errors = kept.mean.double(), list[Tensor]()
        together = max(1, min(TOGETHER, self._gram.max_memory // (64 * k * kept.rows.shape[1])))
        for rows, places in zip(kept.rows.split(together), found.split(together), strict=True):
            one, others = rows.double()[:, None], kept.columns[places].double()
            if centered:
                one, others = (normalize(part - mean, dim=2) for part in (one, others))
            errors.append(similarity_errors(one, others, kept.d, kept.dependent)[:, 0])
        factor = kept.error_factors[0 if centered else 1]
        return (torch.cat(errors) * factor).to(self._gram.dtype)


def _kept_sketches(gram: GramMatrix, width: int) -> KeptSketches:
    """Return the whitened sketches of rows and columns, computed again if model or data have changed.

    The matrix keeps them if they fit into a quarter of max_memory. Of samples that are not in memory, a change is
    noticed at sixteen of them.
    """
    data, given, buckets = (gram.data, gram.columns), Fingerprint(), bucket_count(width, gram.d)
    for name, part in zip(("rows", "columns", "reference"), (*data, gram.reference), strict=True):
        given.add(name, part)
    given.add("readout", gram.net.readout)
    state = (*gram.state_of(*data), given.entries, buckets)
    kept = gram.sketch_cache.get(data, state)
    if kept is None:
        kept = retry_changed_parts(gram.engine, lambda: _sketch_all(gram, Sketch(buckets, 0)))
        size = kept.rows.nbytes + (0 if gram.square else kept.columns.nbytes)
        if size <= gram.max_memory // 4:
            gram.sketch_cache.put(data, state, kept)
    return kept


def _measure_factors(gram: GramMatrix, kept: KeptSketches) -> ErrorFactors:
    """Return the factors of the standard errors of centered and plain similarities, by a few columns.

    They are 1 where there are few samples, where the gradients of enough of them do not fit into memory, and in dry
    runs, in which these pairs would be taken for those of all samples.
    """
    m = gram.shape[1]
    fitting = gram.max_memory // 2 // (4 * gram.d * sum(gram.net.numels.values()))
    if gram.is_part or min(m, fitting) < COMPARED:
        return ErrorFactors(1.0, 1.0)
    places, compared = gram.columns.spread(COMPARED)
    exact = gram.with_centering(False).with_columns(compared).of_columns().dense().cpu()
    few = kept.columns[torch.tensor(places, device=kept.columns.device)].cpu()
    return error_factors(few, exact, kept.d, kept.dependent)


def _refuse_other_kernel(gram: GramMatrix) -> None:
    if gram.kernel != CORRELATION:
        raise ValueError(
            f"Sketches are of likewise.CORRELATION, found {gram.kernel}: leave sketch out, or use that kernel."
        )


def _sketch_all(gram: GramMatrix, projection: Sketch) -> KeptSketches:
    """Return whitened sketches of rows and columns, one tensor for a square matrix, and what centering needs."""

    def sketch(part: GramMatrix, what: str) -> Tensor:
        return whiten_sketches(sketch_rows(part, projection, what=what)).to(gram.device)

    rows = columns = sketch(gram, SKETCHING)
    if not gram.square:
        columns = sketch(gram.of_columns(), SKETCHING_COLUMNS)
    known = next(
        (found for data, found in ((gram.columns, columns), (gram.data, rows)) if data is gram.reference),
        None,
    )
    if known is None:  # columns were exchanged
        known = sketch(gram.with_columns(gram.reference).of_columns(), SKETCHING_COLUMNS)
    with gram.net.evaluation_mode():
        dependent = projection.dependent_buckets(gram.engine, gram.data.samples(range(1)))
    return KeptSketches(rows, columns, known.mean(0), gram.d, dependent)


def sketch_rows(
    gram: GramMatrix, sketch: Sketch, where: range | None = None, what: str = SKETCHING
) -> Sketched:
    """Return the sketches of the rows at these places, of all if None; `what` is the name of the progress."""
    data = gram.data if where is None else gram.data.take(where)
    engine = gram.engine
    with gram.net.evaluation_mode():
        size = max(1, sketch_bytes(engine, data.samples(range(1)), gram.d))
        most = min(data.size, gram.max_memory // 2 // size, engine.gradient_batch_size or data.size)
        spans = data.spans(equal_size(data.size, most))
        engine.begin_pass(sum(map(len, own_share(spans, what))))
        joined = join_results(
            lambda w: tuple(sketch(engine, data.samples(w))),
            spans,
            what,
            gram,
            engine.finish_checks,
        )
    return Sketched(*joined)


class SketchError(NamedTuple):
    """How far sketched similarities are off, measured on a few samples compared both ways."""

    samples: int
    all_pairs: float  # root mean square
    similar_pairs: float  # among the most similar tenth of pairs


def measure_error(gram: GramMatrix, sketches: Tensor, samples: int = 128) -> SketchError:
    """Return the error of whitened sketches (n, q) against exact similarities of some of the samples."""
    part = gram.with_kernel(CORRELATION).with_centering(False)
    places, part.data = gram.data.spread(samples)
    part.columns = part.data
    few = sketches[torch.tensor(places, device=sketches.device)].cpu().double()
    return similarity_error(few @ few.T, part.dense().cpu().double())


def similarity_error(estimate: Tensor, exact: Tensor) -> SketchError:
    """Return how far similarities of some samples with each other, (n, n), are off."""
    n = len(exact)
    if n == 1:
        return SketchError(1, 0.0, 0.0)
    squares, apart = (estimate - exact).square(), ~torch.eye(n, dtype=torch.bool)
    similar = exact[apart] >= exact[apart].quantile(0.9)
    every, top = squares[apart].mean().sqrt(), squares[apart][similar].mean().sqrt()
    return SketchError(n, float(every), float(top))
