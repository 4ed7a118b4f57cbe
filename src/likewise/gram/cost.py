"""The cost of a statistic, estimated from a dry run on a few samples, and choices by counted operations.

The statistic runs on some samples and on twice as many, and each of its passes is extrapolated: passes over samples by
their number, visits of all pairs by the number of pairs and of gradient evaluations. No statistic needs a formula.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from likewise.data import Batches, Samples
from likewise.distributed import Clock, Pass, record_passes
from likewise.engines import Engine, MemoryMeter, OperationCounter
from likewise.gram.products import SUMMING, Products
from likewise.gram.strips import Tiles
from likewise.kernels import Kernel, mean_diagonal
from likewise.linalg import accumulation_dtype
from likewise.model import Network, annotate_errors
from likewise.progress import describe_duration
from likewise.readouts import MOST_OUTPUTS, AutomaticReadout, all_outputs, usual_combinations

# An entry of the features of a column is written, whitened (of several outputs in float64) and read again: on a CPU as
# long as so many operations of products (a ResNet of 78,000 parameters, 1, 4 and 10 outputs, 2026-11-16).
STORED_ENTRY, STORED_ENTRY_OF_SEVERAL = 150, 400
FEW_MULTIPLICATIONS = 2e11  # for exact pairs: about ten seconds on one core
FEW_EPOCHS = 10  # plain training epochs that exact pairs may take
FEW_TIMES = 2  # times the epochs of sketches that they may take
WIDTH = 1024  # numbers per sample of a sketch
# Combinations of outputs, or contrasts of classes, where gradients are sketched (docs/method.md).
SKETCHED_OUTPUTS = 4
PAIRS, PAIRS_OF_SKETCHES = VISITS = "pairs", "pairs of sketches"  # what visits of all pairs are called
SKETCHING, SKETCHING_COLUMNS = "sketches", "sketches of the columns"  # and passes that project gradients
# Seconds of a dry run on more samples, in which the products of pairs show; where it takes longer, gradients take most.
QUICK = 4


class Matrix(Protocol):
    """The part of GramMatrix that is used here."""

    net: Network
    data: Batches
    columns: Batches
    max_memory: int

    @property
    def of_network(self) -> bool: ...  # noqa: D102
    @property
    def engine(self) -> Engine: ...  # noqa: D102
    def products(self) -> Products: ...  # noqa: D102
    def tiles(self) -> Tiles: ...  # noqa: D102
    def take(self, n: int) -> "Matrix": ...  # noqa: D102


@dataclass(frozen=True)
class Plan:
    """The cost of a statistic, estimated from a dry run.

    Attributes:
        method: The engine, and the network with its readout.
        passes: Over the samples.
        visits_of_pairs: Of all n × m pairs.
        flops: Multiplications and additions of matrix products and convolutions.
        peak_bytes: Of tensors, beside the model and the data.
        seconds: On this device, as busy as it is now.
        batch: Samples of one batch.

    Example:
        >>> import torch, likewise as lw
        >>> gram = lw.GramMatrix(torch.nn.Linear(4, 3), (torch.randn(60, 4), torch.arange(60) % 3))
        >>> plan = gram.plan(lw.nearest, k=3)
        >>> plan.visits_of_pairs
        1

    """

    method: str
    passes: int
    visits_of_pairs: int
    flops: float
    peak_bytes: int
    seconds: float
    batch: int

    def __str__(self) -> str:
        counts = [f"{self.passes} passes"] if self.passes else []
        counts += [f"all pairs {self.visits_of_pairs} times"] if self.visits_of_pairs else []
        return (
            f"about {describe_duration(self.seconds)}: {' and '.join(counts)} in batches of {self.batch}, "
            f"{self.flops / 1e12:.3g} TFLOP, at most about {self.peak_bytes / 2**20:,.0f} MiB; {self.method}"
        )


@dataclass(frozen=True)
class _DryRun:
    """The passes of a statistic on some samples, by seconds and by operations."""

    n: int
    m: int
    gradient_evaluations: int
    seconds: list[Pass]
    flops: list[Pass]
    peak: int
    result: int


class PairOperations(NamedTuple):
    """What one column costs when it is compared with a few rows, in multiplications and additions."""

    features: float  # its features, once for all rows
    per_row: float  # their product with those of a row
    jvp: float  # its outputs, gradients and self kernel, once for all directions of a strip
    per_direction: float  # its outputs differentiated in one direction

    def directions_are_cheaper(self, rows: int, strips: int, d: int) -> bool:
        """Whether so many rows with d outputs each, in so many strips, cost less as directions than by features."""
        return strips * self.jvp + rows * d * self.per_direction < self.features + rows * self.per_row


class PairCost(NamedTuple):
    """What all pairs cost in plain training epochs of their samples, by counting multiplications."""

    exact: float  # as all gradients are formed and multiplied
    sketched: float  # as gradients are projected

    @property
    def exact_is_cheap(self) -> bool:
        """Whether exact pairs take few epochs, or not many more than sketches."""
        return self.exact <= max(FEW_EPOCHS, FEW_TIMES * self.sketched)


def pairs_are_few(pairs: int, numbers: int) -> bool:
    """Whether so many pairs of gradients of so many numbers take seconds, or a sketch would not be shorter."""
    return pairs * numbers <= FEW_MULTIPLICATIONS or numbers <= WIDTH


def gradient_epochs(d: int) -> float:
    """Return the plain training epochs, a forward and two backward units, of the gradients of d outputs."""
    return (1 + 2 * d) / 3


def count_forward(net: Network, first: Samples) -> tuple[Any, int]:
    """Return what the model returns of one sample, and its multiplications; call it inside `net.evaluation_mode`."""
    with OperationCounter() as counter:
        returned = net.call_model({}, first.inputs)
    return returned, max(counter.flops // 2, sum(net.numels.values()), 1)


class OutputChoice(NamedTuple):
    """Which outputs of a network are compared, and the counts that decided it."""

    net: Network  # with the chosen readout
    sketched: bool  # whether pairs are so many that gradients are sketched
    compared: int  # outputs that the readout selects
    outputs: int  # of the model, of one sample
    every: int  # outputs that an exact comparison selects: all, or those of a readout that was given
    operations: int  # multiplications of a forward pass of one sample


def choose_outputs(
    net: Network, data: Batches, sketched: bool | None = None, *, every_output: bool = False
) -> OutputChoice:
    """Choose the readout of an automatic network by the cost of comparing all pairs; a given readout is kept.

    Few pairs are compared with the usual readout. Of many, gradients are sketched, and fewer outputs are compared:
    contrasts of the classes of a classifier, else random combinations.

    Args:
        net: The network.
        data: The samples; two of them are read.
        sketched: Whether gradients are sketched; None: the number of pairs decides.
        every_output: Compare all outputs, however many.

    """
    data.samples(
        range(min(2, data.n))
    )  # samples that cannot share a batch are refused before the model is called
    first = data.samples(range(1))
    whole = net.with_readout(AutomaticReadout(net.model, sys.maxsize)) if net.automatic else net
    returned, outputs, every, operations = _count_outputs(whole, first)
    if every_output:
        return OutputChoice(whole, False, every, outputs, every, operations)
    if whole.readout is not all_outputs:  # given, or that of a language model: nothing to choose
        net = whole.with_readout(whole.readout)
    combinations = usual_combinations(net.model)
    usual = every if net.automatic is None or every <= MOST_OUTPUTS else combinations
    if sketched is None:
        sketched = not pairs_are_few(data.n**2, usual * sum(net.numels.values()))
    if not sketched:
        chosen = _fix_readout(net, first, returned, MOST_OUTPUTS, combinations)
        return OutputChoice(chosen, False, usual, outputs, every, operations)
    few = every if net.automatic is None else min(every, SKETCHED_OUTPUTS)
    chosen = _fix_readout(net, first, returned, SKETCHED_OUTPUTS, SKETCHED_OUTPUTS)
    return OutputChoice(chosen, True, few, outputs, every, operations)


def _fix_readout(
    net: Network, first: Samples, returned: Any, most_outputs: int, combinations: int
) -> Network:
    """Return the network with its automatic readout chosen by the first sample; a given readout is kept."""
    if net.automatic is not None:
        contrasts = _are_class_numbers(first.labels)
        net = net.with_readout(AutomaticReadout(net.model, most_outputs, combinations, contrasts))
        with net.evaluation_mode():
            net.select_outputs(returned, first.inputs, first.labels, first.ids)
    return net


def _are_class_numbers(labels: Tensor | None) -> bool:
    return labels is not None and labels.dim() == 1 and not labels.is_floating_point()


def _count_outputs(net: Network, first: Samples) -> tuple[Any, int, int, int]:
    """Return the model's result for a sample, its outputs, those the readout selects, and its multiplications."""
    with net.evaluation_mode(), annotate_errors(net, first.inputs, first.labels, first.ids):
        returned, operations = count_forward(net, first)
        read = net.select_outputs(returned, first.inputs, first.labels, first.ids).shape[1]
    tensors = [
        leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    outputs = max((leaf.numel() for leaf in tensors), default=read)
    return returned, outputs, read, operations


def count_pair_operations(engine: Engine, columns: Samples, kernel: Kernel, p: int) -> PairOperations:
    """Return the operations for each of some columns; they are counted, not timed, so that choices are reproducible."""
    exponent, features = kernel.right_power, engine.features(columns, kernel.right_power)
    d, device, dtype = features.rows.shape[1], features.rows.device, accumulation_dtype(features.rows)
    numel = sum(tensor[0].numel() for tensor in features.tensors)
    stored = (STORED_ENTRY if d == 1 else STORED_ENTRY_OF_SEVERAL) * numel
    formed = _count_operations(lambda: engine.features(columns, exponent)) / len(columns)

    def differentiate(directions: int) -> float:
        vectors = torch.zeros(directions, p, dtype=dtype, device=device)
        return _count_operations(lambda: engine.jvp(columns, vectors, exponent)) / len(columns)

    one, two = differentiate(1), differentiate(2)
    per_row = 2 * numel * (1 if kernel.reduce is mean_diagonal else d)
    return PairOperations(formed + stored, per_row, 2 * one - two, two - one)


def _count_operations(function: Callable[[], Any]) -> int:
    """Return the multiplications and additions of a function, without those of checks that are made now and then."""
    counts = []
    for _ in range(2):
        with OperationCounter() as counter:
            function()
        counts.append(counter.flops)
    return min(counts)


def plan_statistic(gram: Matrix, statistic: Callable[..., Any], options: dict[str, Any]) -> Plan:
    """Return the estimated cost of `statistic(gram, **options)`."""
    _ = gram.engine  # set-up is no part of a batch
    batch = len(gram.products().spans(gram.data)[0])
    trial = min(batch, max(8, gram.data.n // 50))
    few = _dry_run(gram, statistic, options, trial)
    n, m, visits = gram.data.n, gram.columns.n, sum(p.what in VISITS for p in few.seconds)
    enough = min(128, max(48, n // 12), max(1, n // 2))
    if visits and trial < enough and _expected_seconds(few, 2 * enough / trial) < QUICK:
        trial = enough  # of fewer, the products of pairs do not show
        few = _dry_run(gram, statistic, options, trial)
    more = _dry_run(gram, statistic, options, 2 * trial)
    if len(few.seconds) != len(more.seconds):  # so few samples take fewer passes
        few = more
    gradient_evaluations = _gradient_evaluations(gram) if visits else 0
    seconds, flops = (
        sum(
            _extrapolate(a, b, few, more, n, m, gradient_evaluations)
            for a, b in zip(getattr(few, kind), getattr(more, kind), strict=True)
        )
        for kind in ("seconds", "flops")
    )
    sums = any(p.what == SUMMING for p in more.seconds)
    counted = gram.products().count_memory(gram.products().d) if sums else None
    growth = max(0, more.peak - few.peak) / (more.n - few.n) if more.n > few.n else more.peak / more.n
    reach = n if visits else min(batch, gram.engine.batch_size or batch)
    memory = gram.engine.memory
    batch_bytes = memory.fixed_bytes + memory.bytes_per_sample * min(batch, gram.engine.batch_size or 0)
    batch_bytes = max(batch_bytes, 0 if counted is None else counted.bytes)
    peak = max(few.peak + growth * (reach - few.n), batch_bytes) + more.result * n / more.n
    sketched = ", sketches of gradients" if any(p.what == SKETCHING for p in more.seconds) else ""
    return Plan(
        method=f"engine {gram.engine.name}" + (f", {gram.net!r}" if gram.of_network else "") + sketched,
        passes=sum(p.what not in VISITS for p in more.seconds),
        visits_of_pairs=visits,
        flops=flops,
        peak_bytes=int(min(peak, gram.max_memory + more.result * n / more.n)),
        seconds=seconds,
        batch=batch if counted is None else counted.batch,
    )


def _expected_seconds(run: _DryRun, times: float) -> float:
    """Return what a dry run on so many times as many samples takes, at most."""
    return sum(p.cost * times ** (2 if p.what in VISITS else 1) for p in run.seconds)


def _dry_run(gram: Matrix, statistic: Callable[..., Any], options: dict[str, Any], n: int) -> _DryRun:
    part = gram.take(n)
    cut = {name: _cut(value, gram, part) for name, value in options.items()}
    counter = OperationCounter()
    with counter, MemoryMeter() as meter, record_passes(lambda: counter.flops) as flops:
        returned = statistic(part, **cut)
        result = meter.now
    del returned
    with record_passes(_clock(gram.net)) as seconds:
        statistic(gram.take(n), **cut)  # a new part, which has nothing computed yet
    any_pairs = any(p.what in VISITS for p in seconds)
    gradient_evaluations = _gradient_evaluations(part) if any_pairs else 0
    return _DryRun(part.data.n, part.columns.n, gradient_evaluations, seconds, flops, meter.peak, result)


def _cut(value: Any, gram: Matrix, part: Matrix) -> Any:
    """Return an option's entries for the dry run's rows or columns, if it has one for each."""
    if isinstance(value, Tensor) and value.dim():
        for whole, some in ((gram.data.n, part.data.n), (gram.columns.n, part.columns.n)):
            if len(value) == whole:
                return value[:some]
    return value


def _gradient_evaluations(gram: Matrix) -> int:
    return gram.tiles().gradient_evaluations


def _clock(net: Network) -> Clock:
    """Return a clock that waits for the device."""
    device = next(net.model.parameters()).device
    if device.type != "cuda":
        return time.perf_counter

    def now() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


def _extrapolate(
    few: Pass, more: Pass, small: _DryRun, large: _DryRun, n: int, m: int, gradient_evaluations: int
) -> float:
    """Return what a pass takes of all samples, given what it took of fewer and of more."""
    if more.what in (SUMMING, SKETCHING_COLUMNS):
        return more.cost * m / large.m
    if more.what not in VISITS:
        return more.cost * n / large.n
    if large.n == small.n:
        return more.cost * (n * m) / (large.n * large.m)
    if more.what == PAIRS_OF_SKETCHES:  # which need no gradients
        small, large = (
            replace(small, gradient_evaluations=small.n),
            replace(large, gradient_evaluations=large.n),
        )
        gradient_evaluations = n
    # cost = formed · gradient_evaluations + met · pairs, from two dry runs
    (a, b), (c, d) = (
        (small.gradient_evaluations, small.n * small.m),
        (large.gradient_evaluations, large.n * large.m),
    )
    det = a * d - b * c
    met = max(0.0, (a * more.cost - c * few.cost) / det) if det else 0.0
    formed = max(0.0, (more.cost - met * d) / c)
    return formed * gradient_evaluations + met * n * m
