"""Traces the operations on parameters in a forward pass.

Tied weights, a weight used by F.linear outside its module, raw parameters and modules called twice are all operations
on the same tensor. The batch dimension is measured, not guessed: the model is called on n and on n + 1 samples, and a
dimension that grows is the batch. A tensor that does not grow is derived from parameters alone (a normalized or
sliced weight), and its gradient is backpropagated to them. A pass whose operations differ from the trace raises
UntraceableError: the model branches on its data, and another trace may fit.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from likewise.data import Samples
from likewise.engines.double_backward import Substitutes
from likewise.model import Network, Parameters, annotate_errors


class UntraceableError(Exception):
    """The model's operations differ from the trace, or cannot be traced."""


class RegroupedError(UntraceableError):
    """The rows of an operation do not divide evenly among samples: forward drops, sorts or groups them."""


@dataclass(frozen=True)
class Derived:
    """A tensor computed from parameters alone."""

    place: int  # of the operation in the sequence of all
    which: int  # of its outputs
    names: frozenset[str]  # the parameters that it depends on


Source = str | Derived


class Released(NamedTuple):
    """What is known of an output that is no longer held: many are needed by no backward pass."""

    shape: torch.Size
    dtype: torch.dtype
    nbytes: int


@dataclass(frozen=True)
class Operation:
    """One operation on parameters, or on tensors derived from them."""

    function: Callable[..., Any]
    leaves: list[Any]
    spec: TreeSpec
    sources: dict[int, Source]  # which leaves are parameters or derived
    edges: dict[int, GradientEdge]  # of the derived ones, as they were when the operation took place
    outputs: list[Any]  # tensors; Released once their gradient edges are known
    call: tuple[Any, dict[str, Any]] | None = (
        None  # the leaves as arguments, where they are still those of the call
    )

    @property
    def arguments(self) -> tuple[Any, dict[str, Any]]:
        """Positional and keyword arguments."""
        args, kwargs = tree_unflatten(self.leaves, self.spec) if self.call is None else self.call
        return args, kwargs

    @property
    def name(self) -> str:
        """The name of the function."""
        return getattr(self.function, "__name__", str(self.function))

    @property
    def signature(self) -> tuple[Any, ...]:
        """What must be the same in every pass."""
        keys = {i: s if isinstance(s, str) else (s.place, s.which) for i, s in self.sources.items()}
        return self.function, self.spec, keys


class Layout(NamedTuple):
    """The batch dimensions of one operation, from calls on n and n + 1 samples."""

    signature: tuple[Any, ...]
    batched: dict[int, int]  # tensors among the arguments that hold samples: along which dimension
    counts: tuple[int, ...]  # integers among the arguments that grow with the batch
    outputs: dict[int, int]  # outputs that hold samples; none: derived from parameters alone


@dataclass(frozen=True)
class RowTrace:
    """Instead of layouts: the sample of each row is determined in every pass (membership.py)."""

    checked: set[Any] = field(default_factory=set)  # signatures of operations whose sums were compared


Layouts = dict[int, Layout]  # by place in the sequence of all operations
Trace = Layouts | RowTrace


@dataclass(frozen=True)
class Step:
    """One operation of a forward pass on a whole batch."""

    operation: Operation
    layout: Layout
    edges: dict[int, GradientEdge]  # to the gradients of its outputs
    versions: list[int]

    def reaches(self, names: Collection[str]) -> bool:
        """Whether the operation depends on one of these parameters."""
        return any(name in names for source in self.operation.sources.values() for name in _names(source))

    def present_versions(self) -> list[int]:
        """Return the current version counter of each argument."""
        return _versions(self.operation)

    def refuse_overwritten(self) -> None:
        """Raise UntraceableError if an argument was written to since."""
        if self.versions != _versions(self.operation):
            raise UntraceableError(f"the inputs of {self.operation.name} were overwritten in place")


def output_tensors(result: Any) -> list[Any]:
    """Return the tensors of a result, in order."""
    return [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]


def trace_model(net: Network, samples: Samples) -> Layouts:
    """Return the operations on parameters, from calls on these samples and on one more of them."""
    samples = repeat_samples(samples, max(2, len(samples)))  # one alone may be squeezed away
    more = repeat_samples(samples, len(samples) + 1)
    tracer: OperationTracer = DerivedGuesser(net, len(samples))
    is_first = True
    while True:
        fewer, larger = tracer.run(net, samples), OperationTracer(net, tracer.derived).run(net, more)
        is_guess = isinstance(tracer, DerivedGuesser) and bool(tracer.derived)
        if fewer.calls != larger.calls or fewer.seen.keys() != larger.seen.keys():
            if is_first:  # models may set up caches on their first call
                is_first, tracer = False, OperationTracer(net)
                continue
            raise UntraceableError("the operations depend on the number of samples")
        try:
            trace = {p: _compare_calls(fewer.seen[p], larger.seen[p], len(samples)) for p in fewer.seen}
        except UntraceableError:
            if not is_guess:
                raise
            tracer = OperationTracer(net)
            continue
        unbatched = {place for place, layout in trace.items() if not layout.outputs}
        if is_guess and not tracer.derived <= unbatched:  # what was guessed grows with the batch
            tracer = OperationTracer(net)
        elif unbatched <= tracer.derived:
            return trace
        else:
            tracer = OperationTracer(net, tracer.derived | unbatched)


@dataclass(frozen=True)
class Write:
    """Where the result of an operation in place goes."""

    target: Tensor
    index: Any = ...

    def apply(self, result: Tensor) -> None:
        """Write it."""
        self.target[self.index] = result

    @property
    def tensors(self) -> list[Tensor]:
        """What changed: the target, and what it is a view of."""
        return [self.target] if self.target._base is None else [self.target, self.target._base]


def trace_rows(net: Network, samples: Samples) -> RowTrace:
    """Return a RowTrace, valid for any model whose samples share no rows; costs extra backward passes."""
    return RowTrace()


TraceFunction = Callable[[Network, Samples], Trace]
TRACE_FUNCTIONS: tuple[TraceFunction, ...] = (trace_model, trace_rows)  # the faster first


class OperationTracer(TorchFunctionMode):
    """Intercepts the operations on parameters, and on tensors derived from them."""

    def __init__(
        self, net: Network, derived: set[int] | None = None, parameters: Parameters | None = None
    ) -> None:
        super().__init__()
        if parameters is None:
            parameters = {name: value.requires_grad_() for name, value in net.parameters.items()}
        self.parameters = parameters
        self.substitutes: Substitutes = {}
        self.calls, self.seen, self.derived = 0, dict[int, Operation](), derived or set()
        self._known: dict[int, Source] = {id(parameters[name]): name for name in net.names}
        self._alive: list[Tensor] = []  # an id is only unique among the living
        self.inside = False  # an operation: what it calls in turn is no operation of the model's

    def run(self, net: Network, samples: Samples) -> "OperationTracer":
        """Return itself, after a call of the network on these samples."""
        inputs, labels, ids = net.to_device((samples.inputs, samples.labels, samples.ids))
        intercepted = _intercept_custom_functions(self)
        with annotate_errors(net, inputs, labels, samples.ids), torch.enable_grad(), intercepted, self:
            self.returned = net.call_model(self.parameters, inputs)
            self.outputs = net.select_outputs(self.returned, inputs, labels, ids)
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place, self.calls = self.calls, self.calls + 1
        kwargs = kwargs or {}
        if not self._uses_parameters((args, kwargs)):
            result = self._call(func, args, kwargs)
            self.on_result(func, (args, kwargs), result)
            return result
        func, args, write = self._out_of_place(func, args)
        leaves, spec = tree_flatten((args, kwargs))
        sources = {i: self._known[id(v)] for i, v in enumerate(leaves) if id(v) in self._known}
        edges = {
            i: get_gradient_edge(leaves[i])
            for i, source in sources.items()
            if isinstance(source, Derived) and leaves[i].requires_grad
        }
        overwritten = write is not None and leaves[0] is write.target
        if overwritten and func not in _VALUE_FREE:
            leaves[0] = leaves[0].clone()
            args, kwargs = tree_unflatten(leaves, spec)
        result = self._call(func, args, kwargs)
        outputs = [result] if isinstance(result, Tensor) else output_tensors(result)
        seen = any(out.requires_grad for out in outputs) and not all(id(o) in self._known for o in outputs)
        call: tuple[Any, dict[str, Any]] | None = (args, kwargs)
        if overwritten and func in _VALUE_FREE:
            leaves[0] = result.detach()  # of the same shape
            call = None
        operation = Operation(func, leaves, spec, sources, edges, outputs, call) if sources and seen else None
        if operation is not None and not self.is_derived(place, operation):
            separate = tree_map(partial(self.separate, func, several=len(outputs) > 1), result)
            if separate is not result:
                result = separate
                operation = replace(operation, outputs=output_tensors(result))
        if write is not None:
            write.apply(result)
        if operation is not None:
            self._record(place, operation, [] if write is None else write.tensors)
        return result if write is None else write.target

    def separate(self, func: Any, value: Any, several: bool) -> Any:
        """Return an output whose gradient is of what is done with it later, and of all of that.

        A write to a view of a view's base would go around its gradient, and one of several outputs may be
        computed from another.
        """
        return value.clone() if isinstance(value, Tensor) and (several or value._is_view()) else value

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.inside = True
        try:
            return self.substitutes.get(func, func)(*args, **kwargs)
        finally:
            self.inside = False

    def _record(self, place: int, operation: Operation, written: list[Tensor]) -> None:
        self.seen[place] = operation
        self.on_operation(place, operation)
        if self.is_derived(place, operation):
            self._derive(place, operation, written)
        else:
            for tensor in written:
                self._known.pop(id(tensor), None)
            self.on_result(operation.function, operation.leaves, [*operation.outputs, *written])

    def is_derived(self, place: int, operation: Operation) -> bool:
        """Whether the outputs are computed from parameters alone."""
        return place in self.derived

    def on_result(self, func: Any, leaves: Any, results: Any) -> None:
        """Called for results that are not derived from parameters alone."""

    def _derive(self, place: int, operation: Operation, written: list[Tensor]) -> None:
        """Mark outputs, and the tensors they were written to, as derived from parameters."""
        names = frozenset[str]().union(*(_names(source) for source in operation.sources.values()))
        for which, out in enumerate(operation.outputs):
            self._known[id(out)] = Derived(place, which, names)
        for tensor in written:
            before = self._known.get(id(tensor))
            old = frozenset[str]() if before is None else _names(before)
            self._known[id(tensor)] = Derived(place, 0, names | old)
        self._alive += [*operation.outputs, *written]

    def _out_of_place(self, func: Any, args: Any) -> "tuple[Any, Any, Write | None]":
        """Return the out-of-place version of a function, its arguments, and where to write the result.

        The result then has a separate gradient, also if a view is written to and its base is used later.
        """
        name = getattr(func, "__name__", "")
        if func is torch.Tensor.__setitem__:
            target, index, value = args
            if id(target) in self._known:
                return _set_item, args, Write(target)
            with torch.no_grad():
                shape = target[index].shape
            return torch.Tensor.expand, (value, *shape), Write(target, index)
        if name == "copy_" and id(args[0]) not in self._known:
            return torch.Tensor.expand, (args[1], *args[0].shape), Write(args[0])
        is_in_place = name.endswith("_") and not name.endswith("__") and name not in _NO_WRITES
        plain = getattr(torch.Tensor, name[:-1], None) if is_in_place else None
        if plain is None or isinstance(self._known.get(id(args[0])), str):
            return func, args, None
        return plain, args, Write(args[0])

    def _uses_parameters(self, value: Any) -> bool:
        """Whether a parameter is among the arguments; fast, since most operations have none."""
        if isinstance(value, tuple | list):
            return any(map(self._uses_parameters, value))
        if isinstance(value, dict):
            return any(map(self._uses_parameters, value.values()))
        return id(value) in self._known

    def on_operation(self, place: int, operation: Operation) -> None:
        """Called for each operation on parameters."""


class DerivedGuesser(OperationTracer):
    """Guesses which operations derive tensors from parameters alone; a right guess saves two calls of the model."""

    def __init__(self, net: Network, n: int) -> None:
        super().__init__(net, set())
        self._n = n

    def is_derived(self, place: int, operation: Operation) -> bool:
        """Whether only parameters and integers, such as positions, go in, and no side is as long as the batch."""
        others = [leaf for i, leaf in enumerate(operation.leaves) if i not in operation.sources]
        tensors = [leaf for leaf in others if isinstance(leaf, Tensor)]
        sizes = {size for tensor in (*tensors, *operation.outputs) for size in tensor.shape}
        is_fixed = not any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)
        if is_fixed and self._n not in sizes:
            self.derived.add(place)
        return place in self.derived


class FirstRecorder(DerivedGuesser):
    """Records a forward pass of two samples before there is a trace, and traces it by another of one alone.

    Costs less than a trace and then a pass that follows it. Where it fails, `trace_model` may still succeed: a model
    may treat one sample alone in another way.
    """

    def __init__(self, net: Network, samples: Samples) -> None:
        assert len(samples) == 2
        super().__init__(net, 2)
        self.samples, self.steps = samples, list[Step]()
        self._edges = dict[int, dict[int, GradientEdge]]()
        self._versions = dict[int, list[int]]()

    def separate(self, func: Any, value: Any, several: bool) -> Any:
        """Return an output with a gradient of its own, without a copy where nothing else can reach its memory."""
        return value if _has_own_memory(func, value, several) else super().separate(func, value, several)

    def on_operation(self, place: int, operation: Operation) -> None:
        """Record the operation, with the edges to the gradients of all its outputs."""
        if not self.is_derived(place, operation):
            outputs = operation.outputs
            self._edges[place] = {i: _output_edge(out) for i, out in enumerate(outputs) if out.requires_grad}
            self._versions[place] = _versions(operation)
            self.seen[place] = replace(operation, outputs=list(map(_release, outputs)))

    def trace(self, net: Network, one: Samples) -> tuple[Layouts, Tensor]:
        """Return the trace, with the operations in `steps`, and the outputs of one sample alone.

        Args:
            net: The network; `run` was called before.
            one: A sample.

        Raises:
            UntraceableError: The model takes one sample alone in another way, or what was guessed is wrong.

        """
        alone = OperationTracer(net, self.derived).run(net, one)
        if alone.calls != self.calls or alone.seen.keys() != self.seen.keys():
            raise UntraceableError("the operations depend on the number of samples")
        trace = {p: _compare_calls(alone.seen[p], self.seen[p], 1) for p in self.seen}
        if self.derived != {place for place, layout in trace.items() if not layout.outputs}:
            raise UntraceableError("what is derived from parameters alone was not guessed")
        for place, layout in trace.items():
            if layout.outputs:
                edges = {i: edge for i, edge in self._edges[place].items() if i in layout.outputs}
                self.steps.append(Step(self.seen[place], layout, edges, self._versions[place]))
        return trace, alone.outputs.detach()


class PassRecorder(OperationTracer):
    """Records one forward pass that follows a trace, or raises UntraceableError."""

    def __init__(
        self,
        net: Network,
        trace: Layouts,
        parameters: Parameters | None = None,
        substitutes: Substitutes | None = None,
    ) -> None:
        derived = {place for place, layout in trace.items() if not layout.outputs}
        super().__init__(net, derived, parameters)
        self.substitutes = substitutes or {}
        self._trace, self.steps, self._n = trace, list[Step](), 1

    def separate(self, func: Any, value: Any, several: bool) -> Any:
        """Return an output with a gradient of its own, without a copy where nothing else can reach its memory."""
        return value if _has_own_memory(func, value, several) else super().separate(func, value, several)

    def on_operation(self, place: int, operation: Operation) -> None:
        """Record the operation if it is the one in the trace."""
        layout = self._trace.get(place)
        if layout is None or layout.signature != operation.signature:
            raise UntraceableError(f"{operation.name} was called where the trace has something else")
        self._refuse_regrouped(operation, layout)
        if layout.outputs:
            outputs = operation.outputs
            edges = {i: _output_edge(outputs[i]) for i in layout.outputs if outputs[i].requires_grad}
            operation = self.seen[place] = replace(operation, outputs=list(map(_release, outputs)))
            self.steps.append(Step(operation, layout, edges, _versions(operation)))

    def record_pass(self, net: Network, samples: Samples) -> Tensor:
        """Return the outputs of the samples, with the operations in `steps`."""
        self._n = len(samples)
        self.run(net, samples)
        if self.seen.keys() != self._trace.keys():
            raise UntraceableError(f"{len(self.seen)} operations on parameters instead of {len(self._trace)}")
        return self.outputs

    def _refuse_regrouped(self, operation: Operation, layout: Layout) -> None:
        """Raise if a batch dimension does not divide evenly among the samples."""
        sizes = [operation.leaves[place].shape[dim] for place, dim in layout.batched.items()]
        sizes += [operation.outputs[place].shape[dim] for place, dim in layout.outputs.items()]
        sizes += [operation.leaves[place] for place in layout.counts]
        for size in sizes:
            if size % self._n:
                raise RegroupedError(f"{operation.name} is called on {size} rows of {self._n} samples")


# In place, and yet nothing that depends on a parameter is written.
_NO_WRITES = ("requires_grad_", "detach_", "zero_", "fill_", "copy_")
# Their result shares no memory with what they are given; of several dimensions it is a view of a matrix.
_NEW_MEMORY = (
    torch.nn.functional.linear,
    torch.matmul,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
)
# Gradients in the second argument do not depend on the value of the first.
_VALUE_FREE = (torch.Tensor.add, torch.Tensor.sub)


def _set_item(target: Tensor, index: Any, value: Any) -> Tensor:
    result = target.clone()
    result[index] = value
    return result


def _release(output: Tensor) -> Released:
    return Released(output.shape, output.dtype, output.nbytes)


def _has_own_memory(func: Any, value: Any, several: bool) -> bool:
    """Whether nothing else can reach the memory of an output."""
    return func in _NEW_MEMORY and not several and _is_whole_view(value)


def _is_whole_view(value: Any) -> bool:
    """Whether a tensor is a base in another shape."""
    if not isinstance(value, Tensor) or value._base is None or value.numel() != value._base.numel():
        return False
    return value.is_contiguous() and value._base.is_contiguous()


def _output_edge(output: Tensor) -> GradientEdge:
    """Return the edge to the gradient of an output: of its base, where it is a view, which later writes change too."""
    return get_gradient_edge(output if output._base is None else output._base)


def _names(source: Source) -> frozenset[str]:
    return frozenset([source]) if isinstance(source, str) else source.names


@contextmanager
def _intercept_custom_functions(watch: OperationTracer) -> Iterator[None]:
    """Intercept calls of autograd.Function, which a TorchFunctionMode does not see."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if watch.inside:
            return original.__get__(None, cls)(*args, **kwargs)
        with torch._C.DisableTorchFunction():  # its inner operations are not traced
            return watch.__torch_function__(original.__get__(None, cls), (), args, kwargs)

    holder: Any = torch.autograd.Function
    holder.apply = classmethod(apply)
    try:
        yield
    finally:
        holder.apply = original


def _versions(operation: Operation) -> list[int]:
    return [leaf._version for leaf in operation.leaves if isinstance(leaf, Tensor)]


def repeat_samples(samples: Samples, n: int) -> Samples:
    """Return n samples: these, repeated cyclically."""
    places = [i % len(samples) for i in range(n)]
    labels = None if samples.labels is None else samples.labels[places]
    return Samples(tree_map(lambda t: t[places], samples.inputs), labels, samples.ids[places])


def _compare_calls(fewer: Operation, larger: Operation, n: int) -> Layout:
    if fewer.signature != larger.signature:
        raise UntraceableError(f"{fewer.name} became {larger.name} with one sample more")
    batched: dict[int, int] = {}
    counts = []
    for place, (a, b) in enumerate(zip(fewer.leaves, larger.leaves, strict=True)):
        if isinstance(a, Tensor) and place not in fewer.sources:
            dimension = _batch_dimension(a, b, n)
            if dimension is not None:
                batched[place] = dimension
        elif isinstance(a, int) and not isinstance(a, bool) and a != b:
            if a * (n + 1) != b * n:
                raise UntraceableError(f"{fewer.name} has an argument {a} of {n} samples, {b} of {n + 1}")
            counts.append(place)
    outputs: dict[int, int] = {}
    for place, (a, b) in enumerate(zip(fewer.outputs, larger.outputs, strict=True)):
        dimension = _batch_dimension(a, b, n)
        if dimension is not None and a.requires_grad:
            outputs[place] = dimension
    return Layout(fewer.signature, batched, tuple(counts), outputs)


def _batch_dimension(fewer: Tensor | Released, larger: Tensor | Released, n: int) -> int | None:
    if len(fewer.shape) != len(larger.shape):
        raise UntraceableError("the number of dimensions depends on the number of samples")
    grown = [i for i, (a, b) in enumerate(zip(fewer.shape, larger.shape, strict=True)) if a != b]
    if not grown:
        return None
    dim = grown[0]
    problem = f"shape {tuple(fewer.shape)} of {n} samples became {tuple(larger.shape)} with one more"
    if len(grown) > 1:
        raise UntraceableError(problem)
    if fewer.shape[dim] * (n + 1) != larger.shape[dim] * n:
        raise RegroupedError(problem)
    return dim
