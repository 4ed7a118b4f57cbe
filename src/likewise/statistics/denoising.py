"""How much label noise did training average out? (sec. 6.3)

At the optimum of a squared loss, Σ_j K(x_i, x_j)(ŷ_j − ỹ_j) = 0, so the mean of the predictions around
x_i is that of the noisy labels: E_k[ŷ] = E_k[ỹ], with E_k[a] = Σ_j W_ij a_j and the weights
W_ij = (Σ_j K_ij)⁻¹ K_ij. Noise of size σ on each label leaves σ · √(Σ_j ‖W_ij‖² / r) on that mean, r the
rank of Σ_j K_ij: d as a rule, less for outputs that cannot move independently.

The sums of squares come from random signs r, in linear time: E[(Σ_j r_j k_ij)²] = Σ_j k_ij². Since every pair shares
a common direction, plain probes err alike for all samples; so the leading directions U of Σ Sᵀ S are found first, by a
randomized range finder, their part is taken exactly, and only the rest is probed:

    tr S C Sᵀ = 2 (S Uᵀ)·(S C Uᵀ) − (S Uᵀ)·(S Uᵀ U C Uᵀ) + tr S (I − P) C (I − P) Sᵀ

with C = Σ_j S(x_j)ᵀ S(x_j), which is never formed, and P = Uᵀ U. Nothing grows with the data set.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from likewise.checks import check_flag, check_integer, check_seed
from likewise.gram import GramMatrix
from likewise.gram.matrix import finite_outputs
from likewise.gram.products import Products, Weights
from likewise.kernels import INNER_PRODUCT, Kernel, whole_block
from likewise.statistics.lipschitz import Reach, output_head, pair_bounds, reach
from likewise.statistics.targets import count_outputs, given_labels, label_values, refuse_centered

DRAWN_TOGETHER = 16  # samples whose random signs come from one generator
FEWEST_DRAWS, MOST_DRAWS = 4, 1_000_000  # fewer have no error bar
RELATIVE = Kernel(-1, 0, whole_block)  # K(x,x)⁻¹ K(x,x'): free of the scale of gradients


class Denoising(NamedTuple):
    """How much noise remains after averaging over the neighborhood, and where the average moves the prediction.

    Attributes:
        factor: (n,) noise left: 1/√N if all samples are alike, 1 if each is alone.
        floor: 1/√N, the smallest possible factor.
        effective_neighbors: (n,) 1/factor²: the number of equal samples that would average out as much.
        shift: (n, d) the prediction minus the mean prediction around it.
        smoothed_prediction: (n, d) E_k[ŷ].
        smoothed_label: (n, q) E_k[ỹ], classes one-hot, integers of a network with one output as values (0 and 1 are
            classes); None without labels.
        negative_share: (n,) share of the weights' mass that is negative; 0: a true average.
        bound: (n,) bound on ‖shift‖, from similarities alone; infinite if none is known, see denoising.
        factor_error: (n,) standard error of the factor; 0 if exact.
        unreliable: (n,) the weights sum to too little to divide by: factor over 1, or a zero gradient.

    Example:
        >>> import torch, likewise as lw
        >>> gram = lw.GramMatrix(torch.nn.Linear(4, 3), (torch.randn(60, 4), torch.arange(60) % 3))
        >>> found = lw.denoising(gram, exact=True)
        >>> bool((found.factor >= found.floor - 1e-6).all())
        True

    """

    factor: Tensor
    floor: float
    effective_neighbors: Tensor
    shift: Tensor
    smoothed_prediction: Tensor
    smoothed_label: Tensor | None
    negative_share: Tensor
    bound: Tensor
    factor_error: Tensor
    unreliable: Tensor


def denoising(
    gram: GramMatrix,
    labels: Any = None,
    *,
    draws: int = 200,
    exact: bool = False,
    seed: int = 0,
) -> Denoising:
    """How much label noise training averaged out for each row (sec. 6.3).

    Linear in the data set: the factor is estimated with `draws` random signs, and has an error. Negative share and
    bound are estimated from as many random columns, so such a bound can be too small. exact=True computes them from all
    pairs. A sample with a zero gradient is alone: its factor is 1.

    Args:
        gram: Plain (not centered); its kernel is ignored.
        labels: Labels to smooth; None uses the labels of the data.
        draws: Number of random signs, and of random columns.
        exact: Use all pairs.
        seed: Seed of the random signs.

    Returns:
        Denoising, with `factor` (n,) first.

    Example:
        >>> import torch, likewise as lw
        >>> gram = lw.GramMatrix(torch.nn.Linear(4, 3), (torch.randn(60, 4), torch.arange(60) % 3))
        >>> lw.denoising(gram, draws=50).factor.shape
        torch.Size([60])

    """
    refuse_centered(gram)
    draws = check_integer("draws", draws, FEWEST_DRAWS, MOST_DRAWS)
    exact, seed = check_flag("exact", exact), check_seed("seed", seed)
    inner = gram.with_kernel(INNER_PRODUCT)
    found = given_labels(gram, labels)
    means = _Means(inner, None if found is None else label_values(found, gram.d, count_outputs(gram)))
    unit = means.unit
    pairs = _from_pairs(inner, unit, None if exact else draws, seed)
    squares = Squares(pairs.squares, torch.zeros_like(pairs.squares))
    if not exact:
        squares = row_squares(inner, unit, draws, seed)
    alone = squares.sums <= 0
    factor = torch.where(alone, 1, (squares.sums / means.rank.clamp(min=1)).sqrt())
    shift = torch.where(alone[:, None], 0, means.shift)
    error = squares.error / (2 * means.rank.clamp(min=1) * factor)
    smoothed_label = means.labels_where(alone)
    return Denoising(
        factor=factor.to(gram.dtype),
        floor=gram.shape[1] ** -0.5,
        effective_neighbors=(1 / factor.square()).to(gram.dtype),
        shift=shift.to(gram.dtype),
        smoothed_prediction=(means.outputs - shift).to(gram.dtype),
        smoothed_label=None if smoothed_label is None else smoothed_label.to(gram.dtype),
        negative_share=pairs.negative.to(gram.dtype),
        bound=torch.where(alone, 0, pairs.bound).to(gram.dtype),
        factor_error=torch.where(alone, 0, error).to(gram.dtype),
        unreliable=alone | ~(factor <= 1 + 1e-6),
    )


class _Means:
    """The means E_k around each row, from one product.

    `unit` is (Σ_j K_ij)⁻¹ on its range. If that is not the whole space, as for softmax outputs, E_k averages the part
    in the range and keeps the rest of the sample's own value.
    """

    def __init__(self, inner: GramMatrix, labels: Tensor | None) -> None:
        d, self._square, self._labels = inner.d, inner.square, labels
        self.outputs = inner.outputs().double()
        q = self.outputs.shape[1]
        sizes = [d, _columns(d, q), _columns(d, 0 if labels is None else labels.shape[1])]

        def weights(where: range) -> Tensor:
            x = inner.columns.samples(where)
            values = [finite_outputs(inner.net, x).double().cpu()]
            values += [] if labels is None else [labels[where.start : where.stop].cpu()]
            eye = torch.eye(d, dtype=torch.float64).expand(len(where), -1, -1)
            return torch.cat([eye, *(_spread(value, d) for value in values)], 2)

        self.total, predictions, sums = inner.products().product(weights, sum(sizes)).split(sizes, dim=2)
        rounding = max(64 * torch.finfo(inner.net.dtype).eps, 1e-10)
        self.unit = torch.linalg.pinv(self.total, rtol=rounding)
        self._range = self.unit @ self.total
        self.rank = self._range.diagonal(dim1=1, dim2=2).sum(-1).round()
        self.shift = self._departure(self.outputs, predictions)
        self._label_sums = sums

    def labels_where(self, alone: Tensor) -> Tensor | None:
        """Return E_k[ỹ]; for a sample that is alone, its own label, or the mean of all."""
        if self._labels is None:
            return None
        own = self._labels if self._square else self._labels.mean(0).expand(len(alone), -1)
        own = own.to(self.unit)
        return torch.where(alone[:, None], own, own - self._departure(own, self._label_sums))

    def _departure(self, own: Tensor, sums: Tensor) -> Tensor:
        """Return E_k[own − a] given Σ_j K_ij a_j."""
        d, q = self.total.shape[1], own.shape[1]
        if q == d:
            return (self._range @ own[:, :, None] - self.unit @ sums)[:, :, 0]
        traces = sums.unflatten(2, (d, q)).diagonal(dim1=1, dim2=2).sum(-1)
        weight = self.total.diagonal(dim1=1, dim2=2).sum(-1, keepdim=True)
        return torch.where(weight == 0, 0, own - traces / weight)


def _columns(d: int, q: int) -> int:
    return 1 if q == d else d * q


def _spread(values: Tensor, d: int) -> Tensor:
    """Return values (b, q) as weights: averaged by whole blocks if they match the outputs, else by tr/d."""
    if values.shape[1] == d:
        return values.unsqueeze(2)
    return torch.einsum("nq,de->ndeq", values, torch.eye(d).to(values)).flatten(2)


class _Pairs(NamedTuple):
    """Quantities of each row that need its pairs."""

    negative: Tensor  # (n,) the share of the weights' mass that is negative
    bound: Tensor  # (n,)
    squares: Tensor  # (n,) Σ ‖W_ij‖² over the visited columns


def _from_pairs(inner: GramMatrix, unit: Tensor, columns: int | None, seed: int) -> _Pairs:
    """Compute the quantities from all columns, or from this many drawn at random."""
    m = inner.shape[1]
    if columns is not None and columns < m:
        places = torch.randperm(m, generator=torch.Generator().manual_seed(seed))[:columns].sort().values
        inner = inner.with_columns(inner.columns.take(places.tolist()))
    scale, bounds = m / inner.shape[1], _Bounds(inner)
    left = unit @ inner.self_kernel()

    def read(where: range, blocks: Tensor) -> Tensor:
        blocks = blocks.to(unit)
        weights = torch.einsum("nde,nmef->nmdf", left[where.start : where.stop], blocks)
        mass = weights.diagonal(dim1=2, dim2=3).mean(-1)
        size = mass.abs().sum(1)
        negative = torch.where(size > 0, (-mass).clamp(min=0).sum(1) / size, 0)
        squares = weights.square().sum((2, 3))
        apart = torch.where(squares > 0, squares.sqrt() * bounds.of(where, blocks), 0).sum(1) * scale
        return torch.stack([negative, apart, squares.sum(1)], 1)

    return _Pairs(*inner.with_kernel(RELATIVE).map_strips(read).unbind(1))


class _Bounds:
    """Bounds of the distance of outputs, from blocks K(x,x)⁻¹ K(x,x')."""

    def __init__(self, inner: GramMatrix) -> None:
        self._d, self._head = inner.d, output_head(inner)
        if self._head is not None:
            self._rows = reach(inner, self._head)
            self._columns = self._rows if inner.square else reach(inner.of_columns(), self._head)
            self._root, self._other = inner.self_kernel(0.5), inner.of_columns().self_kernel(-0.5)

    def of(self, where: range, blocks: Tensor) -> Tensor:
        """Return those of the rows at these places with all columns, (b, m)."""
        if self._head is None:
            return torch.full_like(blocks[:, :, 0, 0], torch.inf)
        part = slice(where.start, where.stop)
        k = torch.einsum("nde,nmef,mfd->nm", self._root[part], blocks, self._other) / self._d
        rows = Reach(*(value[part] for value in self._rows))
        return pair_bounds(rows, self._columns, k, self._d, self._head.slope)


class Squares(NamedTuple):
    """Σ_j ‖L_i B_ij‖² over the columns j, for each row i."""

    sums: Tensor  # (n,)
    error: Tensor  # (n,) standard error


def row_squares(gram: GramMatrix, left: Tensor, draws: int, seed: int) -> Squares:
    """Return Σ_x' ‖L(x) B(x, x')‖² of the kernel's blocks B, for L (n, d, d), by random signs."""
    if draws < 4:
        raise ValueError(f"At least 4 draws are needed for an error bar, found {draws}.")
    products = gram.products()
    with products.use_memory(products.vectors_per_pass):
        return _squares_by_signs(products, left, draws, seed)


def _squares_by_signs(products: Products, left: Tensor, draws: int, seed: int) -> Squares:
    leading = min(draws // 4, 32, max(1, products.vectors_per_pass // 3))
    signs = _Signs(products.d, draws, seed)
    basis = torch.linalg.qr(products.vjp(signs.columns(0, leading)).T).Q.T
    exact = _exact_part(products, left, basis)

    def squares(where: range, outputs: Tensor) -> Tensor:
        size = (left[where.start : where.stop] @ outputs).square().sum(1)
        return torch.stack([size.sum(1), size.square().sum(1)], 1)

    count, moments = draws - leading, exact.new_zeros(len(exact), 2)
    for start in range(leading, draws, products.vectors_per_pass):
        probes = products.vjp(signs.columns(start, min(start + products.vectors_per_pass, draws)))
        probes -= (probes @ basis.T) @ basis
        moments += products.jvp(probes, squares) / count
    rest, second = moments.unbind(1)
    error = ((second - rest.square()).clamp(min=0) / (count - 1)).sqrt()
    return Squares((exact + rest).clamp(min=0), error)


class _Signs:
    """Random signs for each column sample, the same on every call and rank, and in batches of every size."""

    def __init__(self, d: int, draws: int, seed: int) -> None:
        self._d, self._draws, self._seed = d, draws, seed

    def columns(self, start: int, stop: int) -> Weights:
        """Return the weights of draws start to stop, by place."""

        def weights(where: range) -> Tensor:
            groups = range(where.start // DRAWN_TOGETHER, (where.stop - 1) // DRAWN_TOGETHER + 1)
            first = where.start - groups.start * DRAWN_TOGETHER
            signs = torch.cat([self._draw(group)[:, :, start:stop] for group in groups])
            return signs[first : first + len(where)].double() * 2 - 1

        return weights

    def _draw(self, group: int) -> Tensor:
        """Return zeros and ones of a group of consecutive samples, (DRAWN_TOGETHER, d, draws)."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + group)
        shape = (DRAWN_TOGETHER, self._d, self._draws)
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.int8)


def _exact_part(products: Products, left: Tensor, basis: Tensor) -> Tensor:
    def along(where: range) -> Tensor:
        return products.engine.jvp(products.columns.samples(where), basis, products.right_power).outputs

    spread = products.vjp(along)  # U C
    inner = spread @ basis.T

    def read(where: range, outputs: Tensor) -> Tensor:
        near, far = (left[where.start : where.stop] @ outputs).split(len(basis), dim=2)
        return (near * (2 * far - near @ inner)).sum((1, 2))

    return products.jvp(torch.cat([basis, spread]), read)
