"""All pairs of a data set layer by layer, where the gradients of all samples do not fit into memory.

Gradients of some parameters are computed for all samples, multiplied with each other and forgotten, then those of the
next. A forward pass and a part of a backward pass are repeated for each group of parameters, but every gradient is
formed once, and every product taken once.

What gradients are formed from, the inputs and output gradients of an operation, is often much smaller than they are:
where a weight is larger than what it is applied to. Then this is what a pass keeps, so that groups are large and
passes few, and the gradients of one layer after the other are formed from it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from likewise.data import Batches, Samples
from likewise.distributed import join_results
from likewise.engines import Engine, Features, GradientMismatchError, TracedEngine, whiten_rows
from likewise.engines.retained import RetainedGradients
from likewise.gram.strips import ExactStrips, Tiles
from likewise.linalg import Power, matrix_power, rank_floor
from likewise.model import Network

COPIES = 3  # of the gradients of a batch while they are formed and written
FEWEST = 16  # samples of a batch that is made smaller so that more parameters fit
GAIN = 2  # how many times smaller than a gradient is what is kept in its place
SLACK = 4096  # bytes by which what a batch keeps of a parameter may exceed its share of what was measured
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


class ParameterBytes(NamedTuple):
    """What the gradient of a parameter takes, of one sample."""

    formed: int  # as numbers that are multiplied: dense, or the factors of an outer product
    kept: int | None  # as what it is formed from; None for factors


class Group(NamedTuple):
    """Consecutive parameters whose gradients one pass computes."""

    formed: tuple[str, ...]  # batch by batch
    kept: tuple[tuple[str, ...], ...]  # as what they are formed from; those of a tuple are formed together
    kept_bytes: int


class LayerPlan(NamedTuple):
    """By which passes all pairs are computed, in batches of how many samples."""

    groups: list[Group]
    batch: int


def plan_layers(parameters: dict[str, ParameterBytes], n: int, limits: dict[int, int]) -> LayerPlan | None:
    """Return the fewest groups of parameters that fit into memory, or None if the gradients of one do not.

    Args:
        parameters: In the order of the model.
        n: Samples.
        limits: Bytes for gradients, by the samples of a batch, whose gradients take a few times their size while they
            are formed; the batch to prefer first.

    """
    plain = {name: size._replace(kept=None) for name, size in parameters.items()}
    known = (
        (group_parameters(sizes, n, batch, limit), batch)
        for sizes in (parameters, plain)  # where little fits, what is kept takes memory that a gradient needs
        for batch, limit in limits.items()
    )
    plans = [LayerPlan(groups, batch) for groups, batch in known if groups is not None]
    return min(plans, key=lambda plan: len(plan.groups), default=None)


def group_parameters(
    parameters: dict[str, ParameterBytes], n: int, batch: int, limit: int
) -> list[Group] | None:
    """Return groups for batches of one size, as few as possible, or None if the gradients of one do not fit."""
    groups, group = list[Group](), _OpenGroup(n, n + COPIES * batch)
    for name, size in parameters.items():
        if group.parameters and group.with_one(size).total > limit:
            groups.append(group.close())
            group = _OpenGroup(n, n + COPIES * batch)
        if group.with_one(size).total > limit:
            return None
        group.add(name, size)
    return [*groups, group.close()]


class _Need(NamedTuple):
    """What a group takes, in bytes."""

    formed: int = 0  # while batches are computed
    kept: int = 0
    buffer: int = 0  # while the largest of those that are kept is formed

    @property
    def total(self) -> int:
        return self.kept + max(self.formed, self.buffer)


class _OpenGroup:
    """A group of parameters to which others may be added."""

    def __init__(self, n: int, copies: int) -> None:
        self.parameters: dict[str, ParameterBytes] = {}
        self._need, self._n, self._copies = _Need(), n, copies

    def with_one(self, size: ParameterBytes) -> _Need:
        """Return the bytes with one more parameter."""
        formed, kept, buffer = self._need
        own = size.formed * self._copies
        if _is_kept(size):
            assert size.kept is not None
            return _Need(formed, kept + size.kept * self._n, max(buffer, own))
        return _Need(formed + own, kept, buffer)

    def add(self, name: str, size: ParameterBytes) -> None:
        """Add a parameter."""
        self._need = self.with_one(size)
        self.parameters[name] = size

    def close(self) -> Group:
        """Return the group; as many of its kept parameters are formed together as the largest takes memory."""
        together, size = list[list[str]](), 0
        for name in (name for name, own in self.parameters.items() if _is_kept(own)):
            own = self.parameters[name].formed * self._copies
            if not together or size + own > self._need.buffer:
                together.append([])
                size = 0
            together[-1].append(name)
            size += own
        formed = tuple(name for name, own in self.parameters.items() if not _is_kept(own))
        return Group(formed, tuple(map(tuple, together)), self._need.kept)


def _is_kept(size: ParameterBytes) -> bool:
    return size.kept is not None and GAIN * size.kept <= size.formed


def layerwise_strips(
    net: Network, engine: TracedEngine, tiles: Tiles, plan: LayerPlan, self_kernels: Tensor | None
) -> DenseStrips:
    """Return the strips of a symmetric matrix of a mean of diagonals, computed group by group.

    Args:
        net: The network.
        engine: Computes its gradients, also of some parameters alone.
        tiles: The same matrix, computed from the gradients of all parameters at once.
        plan: Groups of parameters.
        self_kernels: (n, d, d) K(x, x) in float64; None for one output, where they come out on the way.

    """
    data, exponent = tiles.rows, tiles.kernel.left_power
    floor = rank_floor(net.dtype)
    powers = None if self_kernels is None else matrix_power(self_kernels, exponent, floor)
    exact = replace(tiles, dtype=torch.float64)  # the sum over groups is rounded once
    source, passes = _GroupFeatures(net, engine, data, powers, plan.batch), len(plan.groups)
    total: Tensor | None = None
    with net.evaluation_mode():  # of all groups
        for i, group in enumerate(plan.groups):
            for features in source.of_group(group, f"gradients, part {i + 1} of {passes}"):
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
    return DenseStrips(**shared, matrix=total, passes=passes)


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


class _GroupFeatures:
    """S(x) of some parameters of all samples; J(x) where there are no powers.

    Args:
        net: The network.
        engine: Computes its gradients.
        data: All samples.
        powers: K(x, x) to the power of S(x), or None.
        batch: How many samples are computed together.

    """

    def __init__(
        self, net: Network, engine: TracedEngine, data: Batches, powers: Power | None, batch: int
    ) -> None:
        self._net, self._engine, self._data, self._powers = net, engine, data, powers
        self._spans = data.spans() if data.given else data.spans(batch)

    def of_group(self, group: Group, what: str) -> Iterator[Features]:
        """Yield the features of some parameters of a group after those of others, each to be used up at once."""
        retained = self._retained(group)
        yield self._join(
            lambda where: self._engine.parameter_features(self._data.samples(where), group.formed, retained),
            what,
        )
        for i, names in enumerate(group.kept):
            assert retained is not None
            of_names = partial(self._formed, names=names, retained=retained)
            yield self._join(of_names, f"{what}: layer {i + 1} of {len(group.kept)}")

    def _retained(self, group: Group) -> RetainedGradients | None:
        names = tuple(name for names in group.kept for name in names)
        if not names:
            return None
        size = group.kept_bytes + SLACK * len(self._spans) * len(names)
        return RetainedGradients(size, self._data.n, self._net.parameters, least_bytes=0, names=names)

    def _formed(self, where: range, names: tuple[str, ...], retained: RetainedGradients) -> Features:
        """Return J(x) of parameters whose gradients were kept, or, if they did not fit after all, once more."""
        ids = self._data.ids[where.start : where.stop]
        known = self._engine.retained_features(ids, names, retained)
        return known or self._engine.parameter_features(self._data.samples(where), names)

    def _join(self, compute: Callable[[range], Features], what: str) -> Features:
        def tensors(where: range) -> tuple[Tensor, ...]:
            features = compute(where)
            if self._powers is None:
                return tuple(features.tensors)
            own = Power(*(part[where.start : where.stop] for part in self._powers))
            inputs = [a for a, _ in features.factors]
            deltas = [whiten_rows(delta, own) for _, delta in features.factors]
            rows = whiten_rows(features.rows, own, overwrite=True)
            return (rows, *(part for pair in zip(inputs, deltas, strict=True) for part in pair))

        joined = join_results(tensors, self._spans, what, None, self._engine.finish_checks)
        return Features(joined[0], tuple(zip(joined[1::2], joined[2::2], strict=True)), None)
