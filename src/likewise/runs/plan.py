"""Choose how a run compares gradients by counting operations, and estimate its cost by a dry run on a few samples.

There are three ways. If pairs are few: all of them exactly, with the given readout or the usual automatic one. If they
are many: sketches of a few random combinations of the outputs, contrasts of the classes of a classifier, which cost a
handful of plain training epochs. On request: all outputs and all pairs exactly.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from likewise.checks import check_flag, check_integer
from likewise.data import Batches, Samples, batches
from likewise.engines import Engine, TracedEngine, network_outputs, with_combined_outputs
from likewise.gram import GramMatrix
from likewise.gram.blocks import block_spans
from likewise.gram.cost import WIDTH, choose_outputs, gradient_epochs
from likewise.gram.sketches import Sketch, Sketches, bucket_count, sketch_bytes
from likewise.model import Network
from likewise.progress import describe_duration
from likewise.readouts import (
    readout_name,
)
from likewise.runs.columns import Request, Targets, visit_pairs
from likewise.wording import agreeing

MANY_OPERATIONS = 2.5e8  # multiplications per sample beyond which one combination of outputs is timed for all
SAMPLES_TIMED = 32  # samples timed for a plan, at most
NOTICEABLE = 0.2  # seconds that the timed samples should take
SOON = 1.0  # seconds of multiplications below which the rest of a run takes longer


class Method(NamedTuple):
    """How a run compares gradients, and the cost in plain training epochs, by counting operations."""

    net: Network  # with the chosen readout
    sketch: int  # numbers per sample; 0: exact pairs
    outputs: int  # outputs of the model per sample
    compared: int  # outputs that the readout selects
    epochs: float
    exact_epochs: float  # for all outputs and all pairs
    multiplications: float  # in `epochs`
    operations: int = 0  # multiplications of a forward pass of one sample

    def describe(self, cost: str = "") -> str:
        """Describe the choice in a sentence, with its cost in words; by default the epochs, which are counted."""
        cost = cost or f"about {self.counted_epochs}"
        readout = readout_name(self.net.readout)
        outputs = f"{readout} of {self.outputs:,} outputs" if self.compared < self.outputs else readout
        if not self.sketch:
            return f"exact gradients of {outputs}, all pairs: {cost}"
        return (
            f"sketches of {self.sketch} numbers per sample, {outputs}: {cost} "
            f"(exact: about {self.exact_epochs:,.0f})"
        )

    @property
    def counted_epochs(self) -> str:
        """The plain training epochs in words, with how they are known."""
        return f"{_plain_epochs(self.epochs)} by counting multiplications"

    def estimate_cost(self) -> str:
        """Return the cost in words: the multiplications, and how long they take alone at the speed of products.

        Nothing is timed but a product of matrices: `plan_run` times the steps of a run.
        """
        rate = _multiplications_per_second(next(self.net.model.parameters()).device)
        seconds = self.multiplications / rate
        if seconds < SOON:
            return "a few seconds"
        return f"at least {describe_duration(seconds)}, {self.counted_epochs}, which likewise plan times"


def _plain_epochs(epochs: float) -> str:
    return f"{epochs:,.0f} plain {agreeing(round(epochs), 'epoch')}"


class RunPlan(NamedTuple):
    """The estimated cost of a run."""

    samples: int
    outputs: int
    parameters: int
    readout: str
    compared: int  # outputs that the readout selects
    sketch: int  # numbers per sample; 0: exact
    epochs: float  # plain training epochs: timed, of a large network by counting operations
    exact_epochs: float  # by counting operations
    seconds: float
    peak_bytes: int  # besides the model and the data
    method: str


def choose_method(
    net: Network, data: Batches, *, exact: bool = False, sketch: int | Literal["auto", "never"] = "auto"
) -> Method:
    """Choose how to compare gradients, so that a run costs a handful of epochs unless `exact`.

    Args:
        net: The network. A readout given to it is kept; an automatic one is chosen here.
        data: The samples; one of them is read.
        exact: Compare all outputs and all pairs.
        sketch: Numbers per sample; "never" compares all pairs, with the usual readout.

    """
    exact = check_flag("exact", exact)
    if not isinstance(sketch, str) or sketch not in ("auto", "never"):
        sketch = check_integer("sketch", sketch, 16, 2**20, "numbers per sample, or 'auto' or 'never'")
        if exact:
            raise ValueError(
                f"exact=True compares gradients without sketches, found sketch={sketch} too: pass one of them."
            )
    choice = choose_outputs(net, data, None if sketch == "auto" else sketch != "never", every_output=exact)
    cost = _Cost(data.n, sum(net.numels.values()), choice.operations)
    compared, width = choice.compared, 0
    epochs = cost.exact(compared)
    if choice.sketched:
        width = WIDTH if isinstance(sketch, str) else sketch
        epochs = cost.sketched(compared, width)
    return Method(choice.net, width, choice.outputs, compared, *cost.of(epochs, choice.every))


class _Cost(NamedTuple):
    """Costs in plain training epochs, which take one forward and two backward units per sample."""

    n: int
    p: int
    operations: int  # multiplications of a forward pass of one sample

    def of(self, epochs: float, d: int) -> tuple[float, float, float, int]:
        """Return the epochs, those for all d outputs and all pairs, and multiplications: in the former, per sample."""
        return epochs, self.exact(d), 3 * epochs * self.n * self.operations, self.operations

    def exact(self, d: int) -> float:
        """Return the epochs for density, uncertainty and all pairs: two passes each for the first two."""
        return 1 / 3 + 4 * gradient_epochs(d) + self.n * d * self.p / (3 * self.operations)

    def sketched(self, d: int, width: int) -> float:
        """Return the epochs for outputs, sketches and their pairs, each of which is multiplied once."""
        return 1 / 3 + gradient_epochs(d) + self.n * width / (6 * self.operations)


def plan_run(
    net: Network,
    dataset: Any,
    labels: Any,
    max_memory: int,
    *,
    exact: bool = False,
    sketch: int | Literal["auto", "never"] = "auto",
) -> RunPlan:
    """Estimate the cost of `analyze`; writes nothing."""
    data = batches(dataset, labels=labels)
    method = choose_method(net, data, exact=exact, sketch=sketch)
    few = data.take(range(min(data.n, 3)))  # of two, gradients of all outputs would be formed
    gram = GramMatrix(method.net, few, max_memory=max_memory)
    estimate = (_plan_sketched if method.sketch else _plan_exact)(gram, data, method)
    readout, p = readout_name(method.net.readout), sum(net.numels.values())
    width = gram.d * bucket_count(method.sketch, gram.d) if method.sketch else 0
    epochs = round(_timed_epochs(gram, data, method, estimate[0]), 1)
    method = method._replace(sketch=width, compared=gram.d, epochs=epochs)
    costs = round(method.epochs, 1), round(method.exact_epochs, 1)
    timed = f"about {describe_duration(estimate[0])}"
    if method.operations > MANY_OPERATIONS:
        timed = f"{timed}, timed on a few samples, and {method.counted_epochs}"
    else:
        timed = f"{timed}, {_plain_epochs(epochs)}, timed on a few samples"
    description = method.describe(timed)
    return RunPlan(data.n, method.outputs, p, readout, gram.d, width, *costs, *estimate, description)


def _timed_epochs(gram: GramMatrix, data: Batches, method: Method, seconds: float) -> float:
    """Return how many plain training epochs take so many seconds; of a large network, the count of its operations.

    A small network spends most of its time beside multiplications, and training it less so than comparing gradients.
    """
    if method.operations > MANY_OPERATIONS:
        return method.epochs
    return seconds / (data.n * _seconds_of_sample(gram, data, partial(_train, gram.net)))


def _train(net: Network, samples: Samples) -> None:
    """Do what takes the time of a training step: compute outputs and the gradient of their sum."""
    parameters = {name: value.requires_grad_() for name, value in net.parameters.items()}
    with torch.enable_grad():
        total = network_outputs(net, samples, parameters).sum()
    if total.requires_grad:
        gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
        float(next(gradient for gradient in gradients if gradient is not None).sum())  # waits for a GPU


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
    float((a @ a.T)[0, 0])  # the first product on a device takes longer
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
    """Return the seconds per sample of a function, timed on two samples or on enough to measure."""
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
    """Return the estimated seconds for all pairs of sketches, timed on a few."""
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
