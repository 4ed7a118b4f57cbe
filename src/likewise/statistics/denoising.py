"""How much label noise did training average out? (sec. 6.3)

At the optimum of a squared loss, Σ_j K(x_i, x_j)(ŷ_j − ỹ_j) = 0, so the mean of the predictions around
x_i is that of the noisy labels: E_k[ŷ] = E_k[ỹ], with E_k[a] = Σ_j W_ij a_j and the weights
W_ij = (Σ_j K_ij)⁻¹ K_ij. Noise of size σ on each label leaves σ · √(Σ_j ‖W_ij‖² / d) on that mean.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from likewise.data import Samples
from likewise.gram import GramMatrix
from likewise.kernels import INNER_PRODUCT, Kernel, whole_block
from likewise.statistics.bound import output_head, pair_bounds, reach
from likewise.statistics.probes import Squares, row_squares
from likewise.statistics.targets import given_labels, numeric
from likewise.statistics.uncertainty import refuse_centered

BLOCKS = Kernel(0, 0, whole_block)


class Denoising(NamedTuple):
    """What averaging over the neighborhood leaves of the noise, and where it moves the prediction."""

    factor: Tensor  # (n,) noise left: 1/√N if all samples are alike, 1 if each is alone
    floor: float  # 1/√N, the least possible factor
    effective_neighbors: Tensor  # (n,) 1/factor²: as if so many equal samples were averaged
    shift: Tensor  # (n, d) the prediction less the mean prediction around it
    smoothed_prediction: Tensor  # (n, d) E_k[ŷ]
    smoothed_label: Tensor | None  # (n, q) E_k[ỹ], classes one-hot; None without labels
    negative_share: Tensor  # (n,) share of the weights' mass that is negative; 0: a true average
    bound: Tensor  # (n,) of ‖shift‖, from similarities alone; infinite where none is known
    factor_error: Tensor  # (n,) standard error of the factor; 0 if exact
    unreliable: Tensor  # (n,) the weights sum to too little to divide by: factor over 1, or no gradient


def denoising(
    gram: GramMatrix,
    labels: Tensor | None = None,
    draws: int = 200,
    exact: bool = False,
    seed: int = 0,
) -> Denoising:
    """Return the denoising factor of each row with its circumstances.

    Linear in the data set: the factor by `draws` random signs, negative share and bound from as many
    random columns; or exact, from all pairs. A sample without a gradient is alone: factor 1.
    """
    refuse_centered(gram)
    inner = gram.with_kernel(INNER_PRODUCT)
    found = given_labels(gram, labels)
    means = _Means(inner, None if found is None else numeric(found))
    unit = torch.linalg.pinv(means.total, rtol=1e-10)  # zero if all is zero
    squares = _exact_squares(inner, unit) if exact else row_squares(inner, unit, draws, seed)
    alone = squares.sums <= 0
    factor = torch.where(alone, 1, (squares.sums / gram.d).sqrt())
    prediction = gram.outputs().to(means.prediction)
    smoothed = torch.where(alone[:, None], prediction, means.prediction)
    negative, bound = _signs_and_bound(inner, unit, None if exact else draws, seed)
    narrow = [
        value.to(gram.dtype) for value in (factor, 1 / factor.square(), prediction - smoothed, smoothed)
    ]
    return Denoising(
        factor=narrow[0],
        floor=gram.shape[1] ** -0.5,
        effective_neighbors=narrow[1],
        shift=narrow[2],
        smoothed_prediction=narrow[3],
        smoothed_label=means.labels_where(alone),
        negative_share=negative.to(gram.dtype),
        bound=torch.where(alone, 0, bound).to(gram.dtype),
        factor_error=(squares.error / (2 * gram.d * factor)).to(gram.dtype),
        unreliable=alone | ~(factor <= 1 + 1e-6),
    )


class _Means:
    """Σ_j K_ij, E_k[ŷ] and E_k[ỹ], from one product."""

    def __init__(self, inner: GramMatrix, labels: Tensor | None) -> None:
        d, self._square = inner.d, inner.square
        self._labels = labels
        outputs = inner.net.outputs(*_parts(inner.columns.samples(range(1)))).shape[1]
        sizes = [d, _columns(d, outputs), _columns(d, 0 if labels is None else labels.shape[1])]

        def weights(where: range) -> Tensor:
            samples = inner.columns.samples(where)
            predicted = inner.net.function({}, *_parts(samples)).double().cpu()
            values = [predicted] + ([] if labels is None else [labels[where.start : where.stop].cpu()])
            eye = torch.eye(d, dtype=torch.float64).expand(len(where), -1, -1)
            return torch.cat([eye, *(_spread(value, d) for value in values)], 2)

        product = inner.product(weights, sum(sizes))
        self.total, prediction, label = product.split(sizes, dim=2)
        self.prediction = _mean(self.total, prediction, outputs)
        self._mean_label = None if labels is None else _mean(self.total, label, labels.shape[1])

    def labels_where(self, alone: Tensor) -> Tensor | None:
        if self._labels is None or self._mean_label is None:
            return None
        own = self._labels if self._square else self._labels.mean(0, keepdim=True)
        return torch.where(alone[:, None], own.to(self._mean_label), self._mean_label)


def _parts(samples: Samples) -> tuple[object, Tensor | None, Tensor]:
    return samples.inputs, samples.labels, samples.ids


def _columns(d: int, q: int) -> int:
    return 1 if q == d else d * q


def _spread(values: Tensor, d: int) -> Tensor:
    """Return values (b, q) as weights: moved by whole blocks if they match the outputs, else by tr/d."""
    if values.shape[1] == d:
        return values.unsqueeze(2)
    return torch.einsum("nq,de->ndeq", values, torch.eye(d).to(values)).flatten(2)


def _mean(total: Tensor, sums: Tensor, q: int) -> Tensor:
    d = total.shape[1]
    if sums.shape[2] == 1 and q == d:
        return (torch.linalg.pinv(total, rtol=1e-10) @ sums)[:, :, 0]
    traces = sums.unflatten(2, (d, q)).diagonal(dim1=1, dim2=2).sum(-1)
    weight = total.diagonal(dim1=1, dim2=2).sum(-1, keepdim=True)
    return torch.where(weight == 0, 0, traces / weight)


def _exact_squares(inner: GramMatrix, left: Tensor) -> Squares:
    def squares(where: range, blocks: Tensor) -> Tensor:
        weighted = torch.einsum("nde,nmef->nmdf", left[where.start : where.stop], blocks.to(left))
        return weighted.square().sum((1, 2, 3))

    sums = inner.with_kernel(BLOCKS).map_strips(squares)
    return Squares(sums, torch.zeros_like(sums))


def _signs_and_bound(
    inner: GramMatrix, unit: Tensor, columns: int | None, seed: int
) -> tuple[Tensor, Tensor]:
    """Return the negative share and the bound, over all columns or a sample of them."""
    m = inner.shape[1]
    if columns is not None and columns < m:
        chosen = torch.randperm(m, generator=torch.Generator().manual_seed(seed))[:columns].sort().values
        inner = inner.with_columns(inner.columns.take(chosen.tolist()))
    d, scale = inner.d, m / inner.shape[1]
    head = output_head(inner)
    rows = None if head is None else reach(inner, head)
    others = rows if head is None or inner.square else reach(inner.transposed(), head)
    root, other_root = (g.self_kernel(-0.5) for g in (inner, inner.transposed()))

    def read(where: range, blocks: Tensor) -> Tensor:
        part = slice(where.start, where.stop)
        blocks = blocks.to(unit)
        weights = torch.einsum("nde,nmef->nmdf", unit[part], blocks)
        mass = weights.diagonal(dim1=2, dim2=3).mean(-1)
        size = mass.abs().sum(1)
        negative = torch.where(size > 0, (-mass).clamp(min=0).sum(1) / size, 0)
        if head is None or rows is None or others is None:
            return torch.stack([negative, torch.full_like(negative, torch.inf)], 1)
        k = torch.einsum("nde,nmef,mfd->nm", root[part], blocks, other_root) / d
        apart = pair_bounds(type(rows)(*(v[part] for v in rows)), others, k, d, head.slope)
        norms = weights.square().sum((2, 3)).sqrt()
        bound = torch.where(norms > 0, norms * apart, 0).sum(1) * scale
        return torch.stack([negative, bound], 1)

    negative, bound = inner.with_kernel(BLOCKS).map_strips(read).unbind(1)
    return negative, bound
