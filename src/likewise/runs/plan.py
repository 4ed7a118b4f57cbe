"""How a run compares gradients, chosen by counting operations, and what it would take, from a dry run on a few samples.

Three ways. Exactly, with the readout that was given or the usual automatic one, where all pairs are few. Else from
sketches of a few random combinations of the outputs: a handful of plain training epochs. And exactly, all outputs and
all pairs, on request.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from likewise.checks import check_flag, check_integer
from likewise.data import Batches, Samples, batches
from likewise.engines import Engine, OperationCounter, TracedEngine, network_outputs, with_combined_outputs
from likewise.gram import GramMatrix
from likewise.gram.blocks import block_spans
from likewise.gram.sketches import Sketch, Sketches, bucket_count, sketch_bytes
from likewise.model import Network, annotate_errors
from likewise.progress import describe_duration
from likewise.readouts import (
    MOST_OUTPUTS,
    AutomaticReadout,
    all_outputs,
    readout_name,
    usual_combinations,
)
from likewise.runs.columns import Request, Targets, visit_pairs
from likewise.wording import agreeing

FEW_MULTIPLICATIONS = 2e11  # of exact pairs: about ten seconds on one core
MANY_OPERATIONS = (
    2.5e8  # multiplications of a sample beyond which one combination of its outputs is timed for all
)
SAMPLES_TIMED = 32  # for a plan, at most
NOTICEABLE = 0.2  # seconds of samples that are timed
SOON = 1.0  # seconds of multiplications, beside which all else that a run does takes longer
WIDTH = 1024  # numbers per sample of a sketch
SKETCHED_OUTPUTS = (
    4  # combinations of outputs where gradients are sketched: labels are ranked as by ten (docs/method.md)
)


class Method(NamedTuple):
    """How a run compares gradients, and what that costs in plain training epochs, counted."""

    net: Network  # with the readout that was chosen
    sketch: int  # numbers a sample; 0: exact pairs
    outputs: int  # of a sample, as the model returns them
    compared: int  # outputs that the readout selects
    epochs: float
    exact_epochs: float  # of all outputs and all pairs
    multiplications: float  # of these epochs
    operations: int = 0  # multiplications of a forward pass of one sample

    def describe(self, time: str = "") -> str:
        """Return the choice in a sentence; `time`, what it takes in words, comes before the epochs."""
        count = f"{self.epochs:,.0f}"
        epochs = f"{count} plain {agreeing(round(self.epochs), 'epoch')}"
        cost = f"{time}, {epochs}" if time else f"about {epochs}"
        readout = readout_name(self.net.readout)
        outputs = f"{readout} of {self.outputs:,} outputs" if self.compared < self.outputs else readout
        if not self.sketch:
            return f"exactly, all pairs of gradients of {outputs}: {cost}"
        return (
            f"from sketches of {self.sketch} numbers a sample, {outputs}: {cost} "
            f"(exactly: about {self.exact_epochs:,.0f})"
        )

    def estimate_time(self) -> str:
        """Return in words what its multiplications take on the device of the model, at the rate of matrix products."""
        rate = _multiplications_per_second(next(self.net.model.parameters()).device)
        seconds = self.multiplications / rate
        return "some seconds" if seconds < SOON else f"about {describe_duration(seconds)} or more"


class RunPlan(NamedTuple):
    """What a run would take."""

    samples: int
    outputs: int
    parameters: int
    readout: str
    compared: int  # outputs that the readout selects
    sketch: int  # numbers a sample; 0: exact
    epochs: float  # plain training epochs, by counting operations
    exact_epochs: float
    seconds: float
    peak_bytes: int  # beside the model and the data
    method: str


def choose_method(
    net: Network, data: Batches, *, exact: bool = False, sketch: int | Literal["auto", "never"] = "auto"
) -> Method:
    """Return how to compare gradients, so that a run costs a handful of epochs unless asked to be exact.

    Args:
        net: A readout that was given to it is kept; an automatic one is chosen here.
        data: The samples, of which one is read.
        exact: All outputs, all pairs.
        sketch: Numbers per sample; "never": all pairs, with the usual readout.

    """
    exact = check_flag("exact", exact)
    if not isinstance(sketch, str) or sketch not in ("auto", "never"):
        sketch = check_integer("sketch", sketch, 16, 2**20, "numbers a sample, or 'auto' or 'never'")
        if exact:
            raise ValueError(f"exact=True compares gradients as they are, found sketch={sketch} beside it.")
    data.samples(
        range(min(2, data.n))
    )  # samples that cannot share a batch are refused before the model is called
    first = data.samples(range(1))
    whole = net.with_readout(AutomaticReadout(net.model, sys.maxsize)) if net.automatic else net
    returned, outputs, d, operations = _count_outputs(whole, first)
    if whole.readout is not all_outputs:  # given, or of a language model: nothing is left to choose
        net = whole.with_readout(whole.readout)
    cost = _Cost(data.n, sum(net.numels.values()), operations)
    if exact:
        return Method(whole, 0, outputs, d, *cost.of(cost.exact(d), d))
    combinations = usual_combinations(net.model)
    usual = d if net.automatic is None or d <= MOST_OUTPUTS else combinations
    few_pairs = data.n**2 * usual * cost.p <= FEW_MULTIPLICATIONS
    is_small = sketch == "auto" and (few_pairs or usual * cost.p <= WIDTH)  # no sketch is shorter than these
    if sketch == "never" or is_small:
        chosen = _fix_readout(net, first, returned, MOST_OUTPUTS, combinations)
        return Method(chosen, 0, outputs, usual, *cost.of(cost.exact(usual), d))
    few = d if net.automatic is None else min(d, SKETCHED_OUTPUTS)
    width = WIDTH if sketch == "auto" else int(sketch)
    chosen = _fix_readout(net, first, returned, SKETCHED_OUTPUTS, SKETCHED_OUTPUTS)
    return Method(chosen, width, outputs, few, *cost.of(cost.sketched(few, width), d))


def _fix_readout(
    net: Network, first: Samples, returned: Any, most_outputs: int, combinations: int
) -> Network:
    """Return the network with an automatic readout that is chosen by its first sample; a given one is kept."""
    if net.automatic is not None:
        net = net.with_readout(AutomaticReadout(net.model, most_outputs, combinations))
        with net.evaluation_mode():
            net.select_outputs(returned, first.inputs, first.labels, first.ids)
    return net


class _Cost(NamedTuple):
    """Costs in plain training epochs, of one forward and two backward units a sample."""

    n: int
    p: int
    operations: int  # multiplications of a forward pass of one sample

    def of(self, epochs: float, d: int) -> tuple[float, float, float, int]:
        """Return the epochs, those of all d outputs and all pairs, and multiplications: of the first, of a sample."""
        return epochs, self.exact(d), 3 * epochs * self.n * self.operations, self.operations

    def exact(self, d: int) -> float:
        """Return what density, uncertainty and all pairs take: two passes each for the first two."""
        return 1 / 3 + 4 * (1 + 2 * d) / 3 + self.n * d * self.p / (3 * self.operations)

    def sketched(self, d: int, width: int) -> float:
        """Return what outputs, the sketches and their pairs take, of which each is multiplied once."""
        return 1 / 3 + (1 + 2 * d) / 3 + self.n * width / (6 * self.operations)


def _count_outputs(net: Network, first: Samples) -> tuple[Any, int, int, int]:
    """Return what the model returns of a sample, its outputs, those that are read, and the multiplications it takes."""
    counter = OperationCounter()
    with net.evaluation_mode(), annotate_errors(net, first.inputs, first.labels, first.ids):
        with counter:
            returned = net.call_model({}, first.inputs)
        read = net.select_outputs(returned, first.inputs, first.labels, first.ids).shape[1]
    tensors = [
        leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    outputs = max((leaf.numel() for leaf in tensors), default=read)
    return returned, outputs, read, max(counter.flops // 2, sum(net.numels.values()), 1)


def plan_run(
    net: Network,
    dataset: Any,
    labels: Any,
    max_memory: int,
    *,
    exact: bool = False,
    sketch: int | Literal["auto", "never"] = "auto",
) -> RunPlan:
    """Return what `analyze` would take; nothing is written."""
    data = batches(dataset, labels=labels)
    method = choose_method(net, data, exact=exact, sketch=sketch)
    few = data.take(range(min(data.n, 3)))  # of two, gradients of all outputs would be formed
    gram = GramMatrix(method.net, few, max_memory=max_memory)
    take = (_plan_sketched if method.sketch else _plan_exact)(gram, data, method)
    readout, p = readout_name(method.net.readout), sum(net.numels.values())
    width = gram.d * bucket_count(method.sketch, gram.d) if method.sketch else 0
    method = method._replace(sketch=width, compared=gram.d)
    costs = round(method.epochs, 1), round(method.exact_epochs, 1)
    told = method.describe(f"about {describe_duration(take[0])}")
    return RunPlan(data.n, method.outputs, p, readout, gram.d, width, *costs, *take, told)


def _plan_exact(gram: GramMatrix, data: Batches, method: Method) -> tuple[float, int]:
    """Return seconds and bytes: four passes and one that forms gradients, timed on a few samples, and the products."""
    n, d, p, engine = data.n, gram.d, sum(gram.net.numels.values()), gram.engine
    each = _seconds_of_outputs(gram, data, method, lambda engine, some: engine.self_kernel(some))
    peak = engine.memory.fixed_bytes + engine.memory.bytes_per_sample * min(n, engine.batch_size or n)
    seconds = 5 * n * each + n * n * d * p / _multiplications_per_second(gram.device)
    return seconds, min(gram.max_memory, max(peak, 4 * min(n, 1024) * d * p)) + 8 * n * n


def _multiplications_per_second(device: torch.device) -> float:
    """Return how fast the device multiplies matrices, measured."""
    a = torch.ones(256, 4096, device=device)
    float((a @ a.T)[0, 0])  # the first product of a device takes longer
    start = time.perf_counter()
    for _ in range(4):
        float((a @ a.T)[0, 0])
    return 4 * 256 * 256 * 4096 / (time.perf_counter() - start)


def _plan_sketched(gram: GramMatrix, data: Batches, method: Method) -> tuple[float, int]:
    """Return seconds and bytes: sketches, timed on a few samples, and their pairs."""
    n, d, q = data.n, gram.d, bucket_count(method.sketch, gram.d)
    each = _seconds_of_outputs(gram, data, method, Sketch(q, 0))
    with gram.net.evaluation_mode():
        size = sketch_bytes(gram.engine, data.samples(range(1)), d)
    peak = 8 * n * d * q + min(gram.max_memory, SAMPLES_TIMED * size + gram.max_memory // 4)
    return each * n + _seconds_of_pairs(n, d * q), peak


def _seconds_of_outputs(
    gram: GramMatrix, data: Batches, method: Method, function: Callable[[Engine, Samples], object]
) -> float:
    """Return what a function takes of each sample, of a large network from one combination of its outputs.

    Beside the forward pass, each output costs the same.
    """
    engine, net, d = gram.engine, gram.net, gram.d
    if d == 1 or method.operations <= MANY_OPERATIONS or not isinstance(engine, TracedEngine):
        return _seconds_of_sample(gram, data, partial(function, engine))
    one = engine.with_network(with_combined_outputs(net, d, 1))
    each = _seconds_of_sample(gram, data, partial(function, one))
    forward = _seconds_of_sample(gram, data, partial(network_outputs, net))
    return forward + d * max(each - forward, 0.0)


def _seconds_of_sample(gram: GramMatrix, data: Batches, function: Callable[[Samples], object]) -> float:
    """Return what a function takes of each sample: of two, or of as many as take a noticeable time together."""
    few, most = min(2, data.n), min(data.n, gram.engine.batch_size or SAMPLES_TIMED, SAMPLES_TIMED)
    with gram.net.evaluation_mode():
        while True:
            samples = data.samples(range(few))
            start = time.perf_counter()
            function(samples)
            seconds = time.perf_counter() - start
            if seconds > NOTICEABLE or few >= most:
                return seconds / few
            few = min(4 * few, most)


def _seconds_of_pairs(n: int, width: int) -> float:
    """Return what all pairs of sketches would take, from those of a few."""
    few = min(n, 1024)
    generator = torch.Generator().manual_seed(0)
    features = torch.nn.functional.normalize(torch.randn(few, width, generator=generator), dim=1)
    start = time.perf_counter()
    targets = Targets(torch.zeros(few, dtype=torch.long), torch.zeros(few, 2))
    visit_pairs(Sketches(features), Request(few, min(10, few - 1), 0.5, targets, 0))
    return (time.perf_counter() - start) * _pairs_of_blocks(n) / _pairs_of_blocks(few)


def _pairs_of_blocks(n: int) -> int:
    count = len(block_spans(n, torch.device("cpu")))
    return count * (count + 1) // 2
