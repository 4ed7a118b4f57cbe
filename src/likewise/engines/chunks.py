"""Chunks of a pass: the gradients of some samples and what follows from them, on a GPU recorded and replayed.

A chunk of a deep network is thousands of small operations, which take Python longer to launch than a GPU to compute.
So the second chunk of one shape is recorded, step by step, as CUDA graphs (its gradients, their self kernels, their
products), and those after it are replayed. In later passes, which are known to be recordable, the first chunk is
recorded. Graphs live as long as the evaluation of the network in which they were recorded: no weight, mode or setting
can change meanwhile. A model that synchronizes with the GPU, for instance to branch on a value, cannot be recorded and
is called as it is.
"""

import gc
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from likewise.data import Samples
from likewise.engines.gradient_batch import GradientBatch
from likewise.engines.memory import is_out_of_memory
from likewise.model import Network
from likewise.torch_state import is_recording, recording

Step = Callable[..., Any]  # of a GradientBatch and tensors, returns a tensor or a tuple of such
Compute = Callable[[Samples], GradientBatch]


@dataclass
class Chunk:
    """The gradients of some samples.

    Attributes:
        samples: The samples.
        batch: Their gradients; a recorded one may have further samples at its end, which belong to no chunk.
    """

    samples: Samples
    batch: GradientBatch

    @property
    def d(self) -> int:
        """The number of outputs."""
        return self.batch.d

    @property
    def outputs(self) -> Tensor | None:
        """(n, d) of the batch that the model was called on, where one forward pass had them."""
        return self.batch.outputs

    def observed(self, count: int) -> tuple[Tensor, ...] | None:
        """Return what the network's observer read of the first samples; None where it read nothing."""
        found = self.batch.observed
        return None if found is None else tuple(tensor[:count].clone() for tensor in found)

    @property
    def gradients(self) -> GradientBatch:
        """The gradients, to compute with directly."""
        return self.batch

    @property
    def called_on(self) -> Samples:
        """The batch that the model was called on: the samples, and others behind them."""
        return self.samples

    def first(self) -> "Chunk":
        """Return the gradients of the first sample alone."""
        return Chunk(self.samples[:1], self.batch.part(slice(0, 1)))

    def per_sample(self, name: str, step: Step, reads: object = None) -> Any:
        """Return step(gradients): tensors with one entry for each sample.

        Args:
            name: Of the step.
            step: What to compute; the same for the same name.
            reads: What it computes with beside the gradients; the step is recorded anew for another object.

        """
        return tree_map(lambda result: result[: len(self.samples)], self._run(name, step, reads))

    def sum(self, name: str, step: Step, weights: Tensor) -> Tensor:
        """Return step(gradients, weights), a sum over samples with weights (n, ...)."""
        total: Tensor = self._run(name, step, None, weights)
        return total

    def _run(self, name: str, step: Step, reads: object, *tensors: Tensor) -> Any:
        return step(self.batch, *tensors)


class _Recording(NamedTuple):
    """One step as a graph that reads and writes the same memory at each replay."""

    graph: Any  # torch.cuda.CUDAGraph
    inputs: list[Tensor]
    output: Any
    batch: GradientBatch  # with what the step computed and kept
    reads: object = None


@dataclass
class _RecordedChunk(Chunk):
    """A chunk whose steps are recorded or replayed."""

    graphs: "ChunkGraphs"
    path: tuple[str, ...] = ()  # the steps so far: gradients may keep what these computed
    called: bool = False  # whether a step was called as it is, so that those after it are too

    @property
    def gradients(self) -> GradientBatch:
        """The gradients; what is computed from them is kept in a copy, since the next replay overwrites them."""
        copied = self.batch.copy()
        n = len(self.samples)
        return copied if n == len(copied.samples) else copied.part(slice(0, n))

    @property
    def called_on(self) -> Samples:
        """The batch that the model was called on: the samples, and others behind them."""
        own = self.batch.samples
        if len(own) == len(self.samples):
            return self.samples
        return Samples(*tree_map(_clone, (own.inputs, own.labels, own.ids)))  # the next replay overwrites it

    def first(self) -> "Chunk":
        """Return the gradients of the first sample alone."""
        return replace(self, samples=self.samples[:1])

    def sum(self, name: str, step: Step, weights: Tensor) -> Tensor:
        """Return step(gradients, weights); samples that belong to no chunk have no weight."""
        missing = len(self.batch.samples) - len(self.samples)
        padding = weights.new_zeros(missing, *weights.shape[1:])
        total: Tensor = self._run(name, step, None, torch.cat([weights, padding]))
        return total

    def _run(self, name: str, step: Step, reads: object, *tensors: Tensor) -> Any:
        self.path = (*self.path, name)
        played = None if self.called else self.graphs.play(self.path, step, reads, self.batch, tensors)
        if played is None:
            self.called, self.batch = True, self.batch.copy()
            return step(self.batch, *tensors)
        self.batch = played.batch
        return tree_map(torch.clone, played.output)


@dataclass
class _State:
    """What was recorded in one evaluation."""

    last: Any = None  # number and shapes of the samples of the last chunk
    shapes: Any = None  # of samples whose gradients are recorded
    samples: Samples | None = None  # the memory that graphs read
    gradients: _Recording | None = None
    steps: dict[Any, _Recording] = field(default_factory=dict)  # by their path and the shapes of tensors
    called: dict[Any, object] = field(default_factory=dict)  # likewise, what steps that were called once read
    read: list[tuple[Tensor, int]] = field(default_factory=list)  # copies of parameters, with their versions
    of: object = None  # which parameters, None for all
    replaced: int = 0  # recordings that other shapes took the place of
    launched: deque[Any] = field(default_factory=deque)  # torch.cuda.Event of each of the last chunks

    def fits(self, samples: Samples, shapes: Any) -> bool:
        """Whether recorded gradients are of samples of these shapes, and read what is current."""
        assert self.samples is not None
        current = all(tensor._version == version for tensor, version in self.read)
        return shapes == self.shapes and len(samples) <= len(self.samples) and current

    def forget(self) -> None:
        """Release the memory of all graphs."""
        self.gradients = self.samples = self.shapes = None
        self.steps.clear()
        self.called.clear()
        self.read.clear()


MOST_REPLACED = 2  # in one evaluation: recording takes as long as two chunks
MOST_AHEAD = 16  # chunks that are launched before a GPU has computed them: progress shows what is launched
FEWEST = 3  # chunks of a pass of which the first is recorded


class ChunkGraphs:
    """Records and replays the chunks of a network on a GPU.

    Args:
        net: The network.

    Attributes:
        problem: Why chunks are not recorded; None as long as they are.
        in_use: Whether any chunk was replayed.

    """

    def __init__(self, net: Network) -> None:
        self._net = net
        self._state: _State | None = None
        self._stream: Any = None
        self._rehearsed = self.in_use = False
        self._recorded: list[tuple[int, Any]] = []  # number and shapes of samples whose gradients once were
        self._recorded_steps: set[Any] = set()  # by path and shapes of tensors
        self._announced = 0  # samples of the pass that begins
        self.problem = _find_obstacle(net)

    def begin_pass(self, n: int) -> None:
        """Announce a pass over n samples."""
        self._announced = n

    def chunk(self, samples: Samples, compute: Compute, of: object = None) -> Chunk | None:
        """Return the gradients of samples, recorded or replayed; None where that is impossible or of no use.

        Args:
            samples: A chunk; call this inside `net.evaluation_mode`.
            compute: Returns the gradients of samples.
            of: Which parameters, if not all; gradients of others are recorded anew.

        """
        observed = torch._C._len_torch_dispatch_stack() > 0  # operations are counted, say
        if self.problem is not None or observed or is_recording():
            return None
        state, shapes = self._open(), _shapes(samples)
        last, state.last = state.last, (len(samples), shapes)
        is_repeated = last == state.last or (last is None and self._follows_recorded(state.last))
        if state.gradients is not None:
            if state.of == of and state.fits(samples, shapes):
                return self._replay(state, samples)
            state.replaced += (
                state.of == of
            )  # other parameters are taken one after another, other shapes in turns
            state.forget()
        state.of = of
        if not is_repeated or state.replaced > MOST_REPLACED:
            return None
        if not self._rehearsed:
            return self._rehearse(samples, compute)
        return self._replay(state, samples) if self._record_gradients(state, samples, compute) else None

    def _follows_recorded(self, chunk: tuple[int, Any]) -> bool:
        """Whether the first chunk of an evaluation is recorded: others like it were, and several follow.

        What a model caches for such samples, it has cached outside of a recording.
        """
        return chunk in self._recorded and self._announced >= FEWEST * chunk[0]

    def play(
        self,
        path: tuple[str, ...],
        step: Step,
        reads: object,
        batch: GradientBatch,
        tensors: tuple[Tensor, ...],
    ) -> _Recording | None:
        """Return a step of the chunk that was replayed last; None where it must be called as it is.

        The first call of a step is not recorded, since it may set up what all others read; but for a step that reads
        nothing beside gradients and has been recorded before.
        """
        state = self._state
        assert state is not None
        key = path, tuple((t.shape, t.dtype) for t in tensors)
        known = state.steps.get(key)
        if known is None or known.reads is not reads:
            was_called = state.called.get(key, self) is reads or (
                reads is None and key in self._recorded_steps
            )
            if not was_called or self.problem is not None:
                state.called[key] = reads
                return None
            state.steps.pop(key, None)
            known = self._record_step(step, reads, batch, tensors)
            if known is None:
                return None
            state.steps[key] = known
            self._recorded_steps.add(key)
        with self._on_device():
            for mine, given in zip(known.inputs, tensors, strict=True):
                mine.copy_(given)
            known.graph.replay()
        return known

    def _record_step(
        self, step: Step, reads: object, batch: GradientBatch, tensors: tuple[Tensor, ...]
    ) -> _Recording | None:
        copied, inputs = batch.copy(), [tensor.clone() for tensor in tensors]
        recorded = self._try_to_record(lambda: step(copied, *inputs))
        return None if recorded is None else _Recording(recorded[0], inputs, recorded[1], copied, reads)

    def _open(self) -> _State:
        if self._state is None:
            self._state = _State()
            reference = weakref.ref(self)  # an engine may be gone before the evaluation ends

            def close() -> None:
                graphs = reference()
                if graphs is not None:
                    graphs._state, graphs._announced = None, 0

            self._net.call_on_leaving(close)
        return self._state

    def _placed(self, samples: Samples) -> Samples:
        inputs, labels, ids = self._net.to_device((samples.inputs, samples.labels, samples.ids))
        return Samples(inputs, labels, ids)

    def _rehearse(self, samples: Samples, compute: Compute) -> Chunk | None:
        """Return the gradients of a chunk, computed as they will be recorded, or None if something is in the way.

        To record what synchronizes with the GPU would leave PyTorch's random generator and allocator in disorder.
        """
        self._rehearsed, placed = True, self._placed(samples)
        with self._on_device(), _watch_synchronization() as found:
            try:
                batch = compute(placed)
            except Exception as error:  # called as it is, the model will say what is wrong, or work
                if is_out_of_memory(error):
                    raise
                self.problem = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
                return None
        if found:
            self.problem = found[0]
        return Chunk(samples, batch)

    def _record_gradients(self, state: _State, samples: Samples, compute: Compute) -> bool:
        """Record the gradients of a chunk; return whether that was possible."""
        placed = self._placed(samples)
        own = Samples(*tree_map(_clone, (placed.inputs, placed.labels, placed.ids)))
        self._net.copy_state()
        torch.cuda.empty_cache()  # a graph cannot use memory that other work left behind
        recorded = self._try_to_record(lambda: compute(own))
        if recorded is None:
            return False
        state.samples, state.shapes = own, _shapes(samples)
        if state.last not in self._recorded:
            self._recorded.append(state.last)
        state.gradients = _Recording(recorded[0], [], None, recorded[1])
        state.read = [(t, t._version) for t in self._net.copied_state()]
        return True

    def _try_to_record(self, function: Callable[[], Any]) -> tuple[Any, Any] | None:
        """Return the graph of a function and what it returned; None if it cannot be recorded."""
        try:
            with self._on_device():
                return self._record(function)
        except Exception as error:  # called as it is, it will say what is wrong, or work
            if is_out_of_memory(error):
                raise
            self.problem = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
            return None

    def _replay(self, state: _State, samples: Samples) -> Chunk:
        assert state.gradients is not None and state.samples is not None
        placed, n, own = self._placed(samples), len(samples), state.samples
        targets, sources = (tree_leaves((s.inputs, s.labels, s.ids)) for s in (own, placed))
        with self._on_device():
            for target, source in zip(targets, sources, strict=True):
                if isinstance(target, Tensor):
                    target[:n].copy_(source)
            state.gradients.graph.replay()
            _limit_launched(state.launched)
        self.in_use = True
        return _RecordedChunk(samples, state.gradients.batch, self)

    def _record(self, function: Callable[[], Any]) -> tuple[Any, Any]:
        """Return a graph of what a function launches, and what it returned: nothing is computed yet."""
        state = self._state
        pool = None if state is None or state.gradients is None else state.gradients.graph.pool()
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), _without_garbage_collection(), _own_generator(), recording(0):
            options = {} if pool is None else {"pool": pool}
            graph.capture_begin(**options, capture_error_mode="thread_local")  # other threads may go on
            try:
                output = function()
            except BaseException:
                with suppress(RuntimeError):  # that the recording is broken is known already
                    graph.capture_end()
                raise
            with warnings.catch_warnings(record=True) as caught:  # of a graph in which nothing is recorded
                warnings.simplefilter("always")
                graph.capture_end()
        current.wait_stream(self._stream)
        if caught:
            raise RuntimeError(str(caught[0].message))
        return graph, output

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        with torch.cuda.device(next(iter(self._net.parameters.values())).device):
            yield


def _find_obstacle(net: Network) -> str | None:
    """Return why chunks of a network cannot be recorded, as far as that is known."""
    devices = {tensor.device for tensor in (*net.model.parameters(), *net.model.buffers())}
    if len(devices) > 1 or next(iter(devices)).type != "cuda":
        return f"the model is on {', '.join(sorted(map(str, devices)))}"
    return None


def _limit_launched(events: deque[Any]) -> None:
    """Wait for the GPU where Python is far ahead of it."""
    event = torch.cuda.Event()
    event.record()
    events.append(event)
    if len(events) > MOST_AHEAD:
        events.popleft().synchronize()


def _clone(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _shapes(samples: Samples) -> Any:
    """Return what samples must have in common with those recorded, beside their number."""
    leaves = tree_leaves((samples.inputs, samples.labels))
    return [(t.shape[1:], t.dtype) if isinstance(t, Tensor) else t for t in leaves]


@contextmanager
def _watch_synchronization() -> Iterator[list[str]]:
    """Collect what waits for the GPU, as PyTorch warns of it; other warnings are shown as ever."""
    found: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for warning in caught:
        text = str(warning.message)
        if "synchronizing CUDA operation" in text:
            found.append(f"{warning.filename}:{warning.lineno} waits for the GPU")
        elif "Synchronization debug mode" not in text:  # of itself it warns too
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


@contextmanager
def _own_generator() -> Iterator[None]:
    """Record with a copy of the random generator's state: a recording that fails would leave it unusable."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    before = generator.graphsafe_get_state()
    generator.graphsafe_set_state(generator.clone_state())
    try:
        yield
    finally:
        generator.graphsafe_set_state(before)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Destroy nothing while a graph is recorded: what is found may own memory of a GPU."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
