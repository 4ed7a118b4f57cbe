"""All pairs of a data set layer by layer, where the gradients of all samples do not fit into memory.

Gradients of some parameters are computed for all samples, multiplied with each other and forgotten, then those of the
next. A forward pass and a part of a backward pass are repeated for each group of parameters, but every gradient is
formed once, and every product taken once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from likewise.data import Batches, Samples
from likewise.distributed import join_results
from likewise.engines import Engine, Features, GradientMismatchError, TracedEngine, whiten_rows
from likewise.gram.strips import ExactStrips, Tiles
from likewise.linalg import Power, matrix_power, rank_floor
from likewise.model import Network

COPIES = 3  # of the gradients of a batch while they are formed and written
TOLERANCE = 0.01  # of TF32 and sums in another order
PASS = 0.75  # what a pass for one group costs, relative to one in which all gradients are formed


@dataclass(frozen=True)
class DenseStrips(ExactStrips):
    """Strips of a matrix that is in memory."""

    matrix: Tensor  # (n, m) in float64
    passes: int  # that it took

    @property
    def strips(self) -> list[range]:
        """The positions of the rows of each strip."""
        return self.rows.spans(max(1, self.max_memory // 8 // (8 * self.columns.n)))

    @property
    def gradient_evaluations(self) -> int:
        """How many per-sample gradients are computed for all strips together."""
        return self.rows.n * self.passes

    def strip(self, where: range) -> Tensor:
        """Return k of these rows with all columns, (b, m)."""
        return self._to_result_dtype(self.matrix[where.start : where.stop], where)


def group_parameters(
    entries: dict[str, int], n: int, batch: int, itemsize: int, limit: int
) -> list[tuple[str, ...]] | None:
    """Return consecutive parameters whose gradients fit into memory together, or None if those of one do not.

    Args:
        entries: How many numbers the gradient of each parameter is, of one sample.
        n: Samples.
        batch: Samples of one batch, whose gradients take a few times their size while they are formed.
        itemsize: Bytes of a number.
        limit: Bytes.

    """
    groups, size = list[list[str]](), 0
    for name, count in entries.items():
        own = count * itemsize * (n + COPIES * batch)
        if own > limit:
            return None
        if not groups or size + own > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += own
    return [tuple(group) for group in groups]


def layerwise_strips(
    net: Network,
    engine: TracedEngine,
    tiles: Tiles,
    groups: Sequence[tuple[str, ...]],
    self_kernels: Tensor | None,
) -> DenseStrips:
    """Return the strips of a symmetric matrix of a mean of diagonals, computed group by group.

    Args:
        net: The network.
        engine: Computes its gradients, also of some parameters alone.
        tiles: The same matrix, computed from the gradients of all parameters at once.
        groups: Of parameters, by `group_parameters`.
        self_kernels: (n, d, d) K(x, x) in float64; None for one output, where they come out on the way.

    """
    data, exponent = tiles.rows, tiles.kernel.left_power
    floor = rank_floor(net.dtype)
    powers = None if self_kernels is None else matrix_power(self_kernels, exponent, floor)
    exact = replace(tiles, dtype=torch.float64)  # the sum over groups is rounded once
    total: Tensor | None = None
    with net.evaluation_mode():  # of all groups
        for i, names in enumerate(groups):
            what = f"gradients, part {i + 1} of {len(groups)}"
            features = _join_features(data, engine, names, powers, what)
            products = exact.symmetric_products(features)
            total = products if total is None else total.add_(products)
            del features
        assert total is not None
        _check_diagonal(total, data, engine, exponent if powers is not None else 0)
    if powers is None:
        powers = matrix_power(total.diagonal()[:, None, None].clone(), exponent, floor)
        scales = powers.matrix[:, 0, 0]
        total = total.mul_(scales[:, None]).mul_(scales)
    ids = data.ids
    tiles.zero_gradient_log.note(Samples(ids, None, ids), powers.rank)
    shared = {field.name: getattr(tiles, field.name) for field in fields(ExactStrips)}
    return DenseStrips(**shared, matrix=total, passes=len(groups))


def _check_diagonal(total: Tensor, data: Batches, engine: Engine, exponent: float) -> None:
    """Raise if the sum over groups is not that of gradients of all parameters at once, of samples of some batch."""
    spans = data.spans()
    where = spans[int(torch.randint(len(spans), (), generator=torch.Generator().manual_seed(data.n)))]
    samples = data.samples(where)
    own = engine.self_kernel(samples, 1 + 2 * exponent).matrix.diagonal(dim1=1, dim2=2).mean(1)
    engine.finish_checks()
    apart = (total.diagonal()[where.start : where.stop] - own).abs()
    wrong = ~(apart <= TOLERANCE * own.abs().max())  # NaN is no agreement
    if wrong.any():
        number = int(samples.ids[int(wrong.nonzero()[0])])
        raise GradientMismatchError(
            f"The gradient of sample {number} has another length when it is taken layer by layer: no number of this "
            "pass can be used. A larger max_memory takes all layers at once; please report this model.",
            number,
        )


def _join_features(
    data: Batches, engine: TracedEngine, names: tuple[str, ...], powers: Power | None, what: str
) -> Features:
    """Return S(x) of some parameters of all samples; J(x) where there are no powers."""

    def compute(where: range) -> tuple[Tensor, ...]:
        features = engine.parameter_features(data.samples(where), names)
        if powers is None:
            return tuple(features.tensors)
        own = Power(*(part[where.start : where.stop] for part in powers))
        inputs = [a for a, _ in features.factors]
        deltas = [whiten_rows(delta, own) for _, delta in features.factors]
        rows = whiten_rows(features.rows, own, overwrite=True)
        return (rows, *(part for pair in zip(inputs, deltas, strict=True) for part in pair))

    size = min(data.size, engine.batch_size or data.size)  # whose copies `group_parameters` counts
    spans = data.spans() if data.given else data.spans(size)
    tensors = join_results(compute, spans, what, None, engine.finish_checks)
    return Features(tensors[0], tuple(zip(tensors[1::2], tensors[2::2], strict=True)), None)
