"""Arguments of training terms: check batches, labels, groups and models, and convert them to one form.

The default readout is one random combination of the model's outputs per step: v is uniform on the unit sphere of all d
outputs, the same for all samples of a batch, and new at each call. A term then costs one output, whatever d is.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map

from likewise.checks import check_type, describe, refuse_unreadable, to_tensor
from likewise.data import Samples
from likewise.engines import DifferentiableGradients, differentiable_gradients
from likewise.model import Inputs, Network, check_model
from likewise.readouts import Outputs, Readout, all_outputs, orthonormal_columns
from likewise.torch_state import is_recording

ParameterNames = str | Sequence[str] | None
Transform = Callable[[Any], Any]
Function = TypeVar("Function", bound=Callable[..., Any])
_warned: WeakSet[nn.Module] = WeakSet()


def full_precision(term: Function) -> Function:
    """Return the term with any autocast around the call switched off."""

    @wraps(term)
    def precise(model: nn.Module | Network, *args: Any, **options: Any) -> Any:
        module = model.model if isinstance(model, Network) else check_model(model)
        with torch.autocast(next(module.parameters()).device.type, enabled=False):
            return term(model, *args, **options)

    return cast(Function, precise)


def build_network(
    model: nn.Module | Network,
    readout: Readout | None,
    parameters: ParameterNames,
    *,
    shares_forward: bool = False,
) -> Network:
    """Return the model with a readout and parameters; a Network keeps its own.

    Args:
        model: The model that is trained.
        readout: None: all outputs up to ten, beyond that eight random combinations of them.
        parameters: None: all that require grad.
        shares_forward: Whether the main loss is computed from the term's own call of the model.

    """
    module = model.model if isinstance(model, Network) else model
    _refuse_inference(module)
    if not shares_forward:
        _warn_of_running_statistics(module)
    if not isinstance(model, Network):
        return Network(model, readout, parameters=parameters)
    if readout is not None or parameters is not None:
        raise ValueError(
            "A Network has its own readout and parameters: choose them there, or pass the bare model."
        )
    return model.exact()


def choose_readout(
    model: nn.Module | Network, readout: Readout | None, generator: torch.Generator | None
) -> Readout | None:
    """Return the readout of a term that compares samples: a random combination of all outputs if none is given."""
    if readout is None and not isinstance(model, Network):
        return draw_combination(generator)
    if generator is not None:
        raise ValueError(
            "generator draws the combination of outputs if no readout is given: leave out the generator, or the "
            "readout (a Network has one)."
        )
    return readout


def batch_gradients(
    net: Network, x: Inputs, labels: Tensor | None, ids: Tensor | None = None
) -> DifferentiableGradients:
    """Return the differentiable gradients of a batch."""
    ids = sample_numbers(x) if ids is None else ids
    return differentiable_gradients(net, Samples(plain(x), check_labels(labels, len(ids)), ids))


def plain(x: Inputs) -> Inputs:
    """Return a dict for any other mapping."""
    return dict(x) if isinstance(x, Mapping) else x


def check_labels(labels: Any, n: int, name: str = "labels") -> Tensor | None:
    """Return labels with an entry for each sample, or None if there are none."""
    return None if labels is None else check_per_sample(name, labels, n)


def check_per_sample(name: str, values: Any, n: int) -> Tensor:
    """Return numbers with an entry for each sample; raise if they do not fit."""
    tensor = to_tensor(name, values, "numbers are needed, an entry for each sample")
    if tensor.dim() == 0 or len(tensor) != n:
        raise ValueError(f"{name} must have an entry for each of {n} samples, found {describe(tensor)}.")
    return tensor


def check_groups(groups: Any, n: int) -> Tensor | None:
    """Return the number of each sample's group, (n,), or None if all are one group."""
    if groups is None:
        return None
    numbers = check_per_sample("groups", groups, n)
    if numbers.shape != (n,) or numbers.is_complex():
        raise ValueError(f"groups must be one number for each of {n} samples, found {describe(numbers)}.")
    if numbers.is_floating_point() and not is_recording() and not numbers.isfinite().all():
        wrong = (~numbers.isfinite()).nonzero()[:5, 0].tolist()
        raise ValueError(f"groups must be finite, found NaN or infinity for samples {wrong}: leave them out.")
    return numbers


def count_samples(x: Inputs, name: str = "x") -> int:
    """Return the number of samples; raise if the inputs do not fit."""
    leaves = tree_leaves(plain(x))
    if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
        found = describe(x) if len(leaves) != 1 else describe(leaves[0])
        raise TypeError(f"{name} must be a tensor, or a tuple or dict of tensors, found {found}.")
    for leaf in leaves:
        refuse_unreadable(name, leaf)
        if leaf.dim() == 0:
            raise ValueError(
                f"{name} must have samples along the first dimension, found {describe(leaf)}: pass a single "
                "sample as x[None]."
            )
    lengths = sorted({len(leaf) for leaf in leaves})
    if len(lengths) > 1:
        raise ValueError(f"{name} holds tensors that differ in length, {lengths}: samples come first.")
    if lengths[0] == 0:
        raise ValueError(f"The batch {name} is empty, so there is nothing to compare.")
    return lengths[0]


def sample_numbers(x: Inputs) -> Tensor:
    """Return 0, 1, ... for the samples of a batch, on the device of the inputs."""
    return torch.arange(count_samples(x), device=tree_leaves(plain(x))[0].device)


def concatenate(x: Inputs, other: Inputs) -> Inputs:
    """Return one batch of the samples of both."""
    try:
        return tree_map(lambda a, b: torch.cat([a, b]), x, other)
    except (RuntimeError, ValueError, TypeError) as error:
        form = " and ".join(describe(value) for value in (x, other))
        raise ValueError(
            f"Both inputs must have the same structure and the same shape per sample, found {form}."
        ) from error


def apply_transform(x: Inputs, transform: Transform) -> Inputs:
    """Return the transformed inputs; an exception names the transform."""
    try:
        return transform(x)
    except Exception as error:
        error.add_note(f"The transform {getattr(transform, '__name__', transform)!r} raised this.")
        raise


def find_nonfinite(x: Inputs) -> list[int]:
    """Return the first few samples whose inputs hold NaN or infinity."""
    wrong = [(~leaf.detach().isfinite()).reshape(len(leaf), -1).any(1) for leaf in tree_leaves(plain(x))]
    return torch.stack([part.cpu() for part in wrong]).any(0).nonzero()[:5, 0].tolist()


def _refuse_inference(model: nn.Module) -> None:
    """Raise if autograd cannot differentiate in a parameter, so that no term can train it."""
    for name, value in model.named_parameters():
        if value.is_inference():
            raise ValueError(
                f"Parameter {name} of the model was created in inference mode and cannot be trained: create "
                "or load the model outside of torch.inference_mode()."
            )


def _warn_of_running_statistics(model: nn.Module) -> None:
    """Warn once per model that training normalizes by other statistics than the term sees."""
    if model in _warned or not any(isinstance(m, _BatchNorm) and m.training for m in model.modules()):
        return
    _warned.add(model)
    warnings.warn(
        "The term sees BatchNorm with its running statistics, training with those of the batch: the two can "
        "drift apart until the model in evaluation mode is worthless. Recompute the statistics after "
        "training (torch.optim.swa_utils.update_bn), or see docs/training.md for other ways.",
        stacklevel=5,
    )


class RandomCombination:
    """Readout vᵀf of all outputs, (n, 1), with one v for as long as it is not drawn again.

    Only a seed is drawn at first: how many outputs there are is known when the model has been called, and by then
    the global generators are those that its evaluation restores.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self._generator = generator
        self._columns: dict[tuple[int, torch.device, torch.dtype], Tensor] = {}
        self._seed = self._draw()

    def __call__(self, outputs: Outputs, labels: Tensor | None = None) -> Tensor:
        """Return vᵀf, (n, 1)."""
        every = all_outputs(outputs)
        return every @ self._column(every)

    def __repr__(self) -> str:
        return "random combination of outputs"  # one name for all draws: traces are kept by it

    def redraw(self) -> None:
        """Draw another v, in the memory of the last: what has been recorded reads it there."""
        self._seed = self._draw()
        for (d, device, dtype), column in self._columns.items():
            new = orthonormal_columns(d, 1, self._seed).to(dtype)
            on_gpu = device.type == "cuda"
            column.copy_(new.pin_memory() if on_gpu else new, non_blocking=on_gpu)

    def _draw(self) -> int:
        device = "cpu" if self._generator is None else self._generator.device
        return int(torch.randint(2**62, (1,), generator=self._generator, device=device))

    def _column(self, every: Tensor) -> Tensor:
        key = (every.shape[1], every.device, every.dtype)
        if key not in self._columns:
            # A new thread has no vmap, trace or inference mode around it: a constant is built there.
            with ThreadPoolExecutor(1) as thread:
                build = thread.submit(lambda: orthonormal_columns(key[0], 1, self._seed).to(*key[1:]))
            self._columns[key] = build.result()
        return self._columns[key]


class RecordedCombinations:
    """The combinations of a recorded term, in the order in which it asks for them."""

    def __init__(self) -> None:
        self._combinations: list[RandomCombination] = []
        self._asked = 0

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let terms read these combinations instead of drawing their own."""
        self._asked = 0
        before = _recorded.set(self)
        try:
            yield
        finally:
            _recorded.reset(before)

    def take(self, generator: torch.Generator | None) -> RandomCombination:
        """Return the next combination; draw it where there is none yet."""
        if self._asked == len(self._combinations):
            self._combinations.append(RandomCombination(generator))
        self._asked += 1
        return self._combinations[self._asked - 1]

    def redraw(self) -> None:
        """Draw all of them again, in place."""
        for combination in self._combinations:
            combination.redraw()


_recorded: ContextVar[RecordedCombinations | None] = ContextVar("recorded_combinations", default=None)


def draw_combination(generator: torch.Generator | None) -> RandomCombination:
    """Return a new random combination; inside a recording, the one that it redraws at each play."""
    if generator is not None:
        check_type("generator", generator, torch.Generator, "a torch.Generator or None")
    recorded = _recorded.get()
    return RandomCombination(generator) if recorded is None else recorded.take(generator)
