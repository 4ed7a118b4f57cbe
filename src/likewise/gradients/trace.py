"""Every operation on a parameter, whoever calls it, as it happens in a forward pass.

Tied weights, a weight used by F.linear outside its module, raw parameters, modules called twice: all
are operations on the same tensor. Which dimension of a tensor is the batch is not guessed: the model is
called on 2 and on 3 samples, and what grows with them belongs to the batch. What does not grow is
derived from parameters alone (a normalized or sliced weight) and treated as a parameter that is
computed: gradients in it are chained on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from likewise.data import Samples
from likewise.network import Network, Parameters


class Untraceable(Exception):
    """The model's operations are not the same from call to call."""


class Batched(NamedTuple):
    """A dimension of a tensor that holds `each` entries a sample."""

    dim: int
    each: int


@dataclass(frozen=True)
class Derived:
    """A tensor computed from parameters alone."""

    function: Callable[..., Any]
    leaves: tuple[Any, ...]
    spec: TreeSpec
    sources: dict[int, "str | Derived"]  # which leaves are parameters or derived
    which: int  # of the outputs

    def value(self, parameters: Parameters) -> Tensor:
        """Return it, differentiable in the parameters."""
        leaves = list(self.leaves)
        for place, source in self.sources.items():
            leaves[place] = parameters[source] if isinstance(source, str) else source.value(parameters)
        args, kwargs = tree_unflatten(leaves, self.spec)
        return outputs_of(self.function(*args, **kwargs))[self.which]

    def names(self) -> set[str]:
        """Return the parameters that it depends on."""
        parts = [{s} if isinstance(s, str) else s.names() for s in self.sources.values()]
        return set[str]().union(*parts)


Source = str | Derived


@dataclass(frozen=True)
class Layout:
    """What is known of one operation from calls on 2 and 3 samples."""

    function: Callable[..., Any]
    spec: TreeSpec
    sources: dict[int, Source]
    batched: dict[int, Batched]  # tensors among the arguments that hold samples
    counts: dict[int, int]  # integers among the arguments that are so many times the batch size
    outputs: dict[int, Batched]  # outputs that hold samples; empty: derived


@dataclass
class Step:
    """One operation of a forward pass on a whole batch."""

    layout: Layout
    leaves: list[Any]
    edges: dict[int, GradientEdge]  # to the gradients of its outputs
    versions: list[int]

    @property
    def name(self) -> str:
        """What the operation is called."""
        return _name(self.layout.function)

    def unchanged(self) -> bool:
        """Whether no argument was written to since."""
        return self.versions == [leaf._version for leaf in self.leaves if isinstance(leaf, Tensor)]


def outputs_of(result: Any) -> list[Any]:
    """Return the tensors of a result, in order."""
    return [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]


def layouts(net: Network, samples: Samples) -> dict[int, Layout]:
    """Return the operations on parameters by their place in the sequence of all operations."""
    few = [_repeated(samples, n) for n in (2, 3)]
    _Scout(net.parameters, set()).run(net, few[0])  # models may set up caches on their first call
    derived: set[int] = set()
    while True:
        two, three = (_Scout(net.parameters, derived).run(net, part) for part in few)
        if two.calls != three.calls or two.seen.keys() != three.seen.keys():
            raise Untraceable("the operations depend on the number of samples")
        found = {place: _compared(two.seen[place], three.seen[place]) for place in two.seen}
        more = {place for place, layout in found.items() if not layout.outputs} - derived
        if not more:
            return {place: layout for place, layout in found.items() if layout.outputs}
        derived |= more


class _Seen(NamedTuple):
    function: Callable[..., Any]
    leaves: list[Any]
    spec: TreeSpec
    sources: dict[int, Source]
    outputs: list[Tensor]


class _Scout(TorchFunctionMode):
    """Finds the operations on parameters, and on what is known to be derived from them."""

    def __init__(self, parameters: Parameters, derived: set[int]) -> None:
        super().__init__()
        self.parameters = {name: value.requires_grad_() for name, value in parameters.items()}
        self.known: dict[int, Source] = {id(value): name for name, value in self.parameters.items()}
        self.alive: list[Tensor] = []
        self.derived, self.calls, self.seen = derived, 0, dict[int, _Seen]()

    def run(self, net: Network, samples: Samples) -> "_Scout":
        _called(self, net, self.parameters, samples)
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place, self.calls = self.calls, self.calls + 1
        result = func(*args, **(kwargs or {}))
        leaves, spec = tree_flatten((args, kwargs or {}))
        sources = {i: self.known[id(v)] for i, v in enumerate(leaves) if id(v) in self.known}
        outputs = outputs_of(result)
        if not sources or not any(out.requires_grad for out in outputs):
            return result
        if all(id(out) in self.known for out in outputs):
            return result
        self.alive += outputs  # an id is only unique among the living
        self.seen[place] = _Seen(func, leaves, spec, sources, outputs)
        if place in self.derived:
            for which, out in enumerate(outputs):
                self.known[id(out)] = Derived(func, tuple(leaves), spec, sources, which)
        return result


class Recorder(TorchFunctionMode):
    """Records the known operations of one forward pass."""

    def __init__(self, known: dict[int, Layout]) -> None:
        super().__init__()
        self._known, self._calls, self.steps = known, 0, list[Step]()

    def run(self, net: Network, samples: Samples) -> Tensor:
        """Return the outputs of the samples, with the operations recorded in `steps`."""
        parameters = {name: value.requires_grad_() for name, value in net.parameters.items()}
        outputs = _called(self, net, parameters, samples)
        if len(self.steps) != len(self._known):
            raise Untraceable(f"{len(self.steps)} operations on parameters instead of {len(self._known)}")
        return outputs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        layout, self._calls = self._known.get(self._calls), self._calls + 1
        result = func(*args, **(kwargs or {}))
        if layout is None:
            return result
        leaves, spec = tree_flatten((args, kwargs or {}))
        if (func is not layout.function and func != layout.function) or spec != layout.spec:
            raise Untraceable(f"{_name(func)} was called where {_name(layout.function)} was expected")
        outputs = outputs_of(result)
        edges = {i: get_gradient_edge(outputs[i]) for i in layout.outputs if outputs[i].requires_grad}
        versions = [leaf._version for leaf in leaves if isinstance(leaf, Tensor)]
        self.steps.append(Step(layout, leaves, edges, versions))
        return result


def _called(mode: TorchFunctionMode, net: Network, parameters: Parameters, samples: Samples) -> Tensor:
    inputs, labels, ids = net.placed((samples.inputs, samples.labels, samples.ids))
    with torch.enable_grad(), mode:
        return net.function(parameters, inputs, labels, ids)


def _name(function: Any) -> str:
    return getattr(function, "__name__", str(function))


def _repeated(samples: Samples, n: int) -> Samples:
    places = [i % len(samples) for i in range(n)]
    labels = None if samples.labels is None else samples.labels[places]
    inputs = torch.utils._pytree.tree_map(lambda t: t[places], samples.inputs)
    return Samples(inputs, labels, samples.ids[places])


def _compared(two: _Seen, three: _Seen) -> Layout:
    if two.function != three.function or two.spec != three.spec:
        raise Untraceable(f"{_name(two.function)} became {_name(three.function)} with more samples")
    batched, counts = {}, {}
    for place, (a, b) in enumerate(zip(two.leaves, three.leaves, strict=True)):
        if isinstance(a, Tensor) and place not in two.sources:
            where = _batch_dimension(a, b)
            if where is not None:
                batched[place] = where
        elif isinstance(a, int) and not isinstance(a, bool) and a != b:
            if a * 3 != b * 2:
                raise Untraceable(f"{_name(two.function)} has an argument {a} of 2 samples, {b} of 3")
            counts[place] = a // 2
    outputs = {}
    for place, (a, b) in enumerate(zip(two.outputs, three.outputs, strict=True)):
        where = _batch_dimension(a, b)
        if where is not None and a.requires_grad:
            outputs[place] = where
    return Layout(two.function, two.spec, two.sources, batched, counts, outputs)


def _batch_dimension(two: Tensor, three: Tensor) -> Batched | None:
    if two.dim() != three.dim():
        raise Untraceable("the number of dimensions depends on the number of samples")
    grown = [i for i, (a, b) in enumerate(zip(two.shape, three.shape, strict=True)) if a != b]
    if not grown:
        return None
    dim = grown[0]
    if len(grown) > 1 or two.shape[dim] * 3 != three.shape[dim] * 2:
        raise Untraceable(f"shape {tuple(two.shape)} of 2 samples became {tuple(three.shape)} of 3")
    return Batched(dim, two.shape[dim] // 2)
