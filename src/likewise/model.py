"""A trained model as a function f(θ, x) of selected parameters, with selected outputs.

A readout (readouts.py) turns what the model returns into the (n, d) outputs whose gradients are compared.

Nothing here changes the model: it is in evaluation mode inside `Network.evaluation_mode`, and afterwards its
attributes, its mode and every random generator are restored (torch_state.py).
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import reduce
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from likewise.checks import check_names, check_type, describe, refuse_unreadable
from likewise.fingerprint import ChecksumCache, Fingerprint, describe_module, tensor_states
from likewise.module_attributes import take_snapshot
from likewise.readouts import (
    AutomaticReadout,
    ExtraArguments,
    Readout,
    check_readout,
    looks_at_label,
    readout_name,
)
from likewise.sharding import find_spread
from likewise.torch_state import (
    ParameterWriteError,
    WriteGuard,
    evaluation,
    exclusive,
    is_recording,
    preserve_attributes,
    send,
)
from likewise.wording import agreeing, counted

SHARED_BYTES = 2**20  # parameters from this size on are not copied for a call; smaller ones always are
Parameters = dict[str, Tensor]
Inputs = Any  # a tensor, or a tuple, list or dict of such: what the model is called with


class _Copy(NamedTuple):
    of: Tensor
    value: Tensor
    versions: tuple[int, int]


@dataclass
class _Evaluation:
    """State that networks of one model share during an evaluation, with what is known about its forward pass."""

    depth: int = 0  # of nested evaluations; 0: none
    parameters: Parameters | None = None  # the model's own by name, while it is evaluated
    buffers: Parameters | None = None
    placement: tuple[torch.device, torch.dtype | None] | None = None  # device, and dtype if it has only one
    copies: dict[str, _Copy] = field(default_factory=dict)  # of parameters and buffers
    guarded: bool = False  # whether a call has shown which parameters forward writes to
    written: set[str] = field(default_factory=set)  # these
    on_leaving: list[Callable[[], None]] = field(default_factory=list)  # called when the outermost one ends


class Observer(Protocol):
    """Reads what a model computes in passes that form gradients, which saves another call."""

    def take(self) -> tuple[Tensor, ...] | None:
        """Return what was read in the last call of the model, one entry for each sample; None if nothing was."""

    def keep(self, ids: Tensor, found: tuple[Tensor, ...]) -> None:
        """Store what was read of samples that belong to a pass."""


class Network:
    """A model as f(θ, x), with the outputs and parameters whose gradients are compared.

    Args:
        model: Any torch.nn.Module, including Lightning's; or a fitted skorch net, whose module is used.
        readout: Turns what the model returns into outputs (n, d). None chooses at the model's first call, then keeps
            the choice: all outputs up to ten, `projected_outputs(8)` for more (4 beyond ten million parameters), the
            log-likelihood of the text for a causal language model. A `ReadoutNotice` says what was chosen.
        parameters: None for all that require grad, "adapters" for those of peft's active adapters (LoRA and others),
            "last layer" or "last 3 layers" for those of the last layers, or names and glob patterns like "layer4.*".
            Values are read from the model at each call, so a Network follows a model in training.
        autocast: torch.bfloat16 or torch.float16 runs the model under PyTorch's autocast; gradients stay in the
            parameters' dtype. See the guide for what that costs in precision.

    Example:
        >>> import torch, likewise as lw
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> lw.Network(model, lw.all_outputs, parameters=["2.*"])
        Network(Sequential, all_outputs, 27 parameters)

    """

    def __init__(
        self,
        model: nn.Module,
        readout: Readout | None = None,
        *,
        parameters: str | Sequence[str] | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        model = check_model(model)
        if not any(autocast is known for known in (None, torch.bfloat16, torch.float16)):
            raise TypeError(f"autocast must be torch.bfloat16, torch.float16 or None, found {autocast!r}.")
        self.model = _unwrap(model)
        self._readout = AutomaticReadout(self.model) if readout is None else readout
        self._known_arguments = (self._readout, check_readout(self._readout))
        self.autocast = autocast
        with exclusive:  # while another thread evaluates the model, other tensors stand for its parameters
            self.names = _select_parameters(self.model, parameters)
        self._reads_labels: bool | None = None  # of a custom readout tested on first use
        self._cast: torch.dtype | None = None  # the compute dtype, if not the model's
        self._evaluation = _Evaluation()
        self.observer: Observer | None = None
        self._checksums = ChecksumCache()

    def __repr__(self) -> str:
        p = sum(self.numels.values())
        return f"Network({type(self.model).__name__}, {readout_name(self._readout)}, {p:,} parameters)"

    @property
    def readout(self) -> Readout:
        """Turns the model's result into outputs (n, d); the automatic one until it has been chosen."""
        given = self._readout
        return given.chosen or given if isinstance(given, AutomaticReadout) else given

    @property
    def automatic(self) -> AutomaticReadout | None:
        """How the readout was or will be chosen; None if it was given."""
        return self._readout if isinstance(self._readout, AutomaticReadout) else None

    def choose_readout(self, inputs: Inputs, labels: Tensor | None, ids: Tensor | None) -> Readout:
        """Return the readout; if it is automatic and not chosen yet, choose it by calling the model on samples."""
        if self.automatic is not None and self.automatic.chosen is None:
            self.outputs(inputs, labels, ids)
        return self.readout

    @property
    def parameters(self) -> Parameters:
        """The selected parameters' current values by name, detached; copies if forward may write to them."""
        with exclusive:
            every = self._own_parameters()
            return {name: self._detached(name, every[name]) for name in self.names}

    @property
    def dtype(self) -> torch.dtype:
        """The promoted dtype of the selected parameters."""
        if self._cast is not None:
            return self._cast
        every = self._own_parameters()
        return reduce(torch.promote_types, {every[name].dtype for name in self.names})

    @property
    def numels(self) -> dict[str, int]:
        """The number of entries of each selected parameter."""
        every = self._own_parameters()
        return {name: every[name].numel() for name in self.names}

    def with_parameters(self, parameters: str | Sequence[str]) -> "Network":
        """Return the same model and readout with other parameters selected."""
        return self._share(Network(self.model, self._readout, parameters=parameters, autocast=self.autocast))

    def with_readout(self, readout: Readout) -> "Network":
        """Return the same model and parameters with another readout."""
        return self._share(Network(self.model, readout, parameters=self.names, autocast=self.autocast))

    def exact(self, readout: Readout | None = None) -> "Network":
        """Return the network without autocast, as a reference; with another readout if one is given."""
        return self._share(Network(self.model, readout or self._readout, parameters=self.names))

    def _share(self, other: "Network") -> "Network":
        """Return another network of the same model, inside the same evaluation."""
        other._evaluation = self._evaluation
        return other

    def in_float64(self) -> "Network":
        """Return the network in float64: parameters, buffers and inputs are cast at each call.

        The model itself does not change. A model that fixes a dtype inside forward may fail.
        """
        net = self.exact()
        net._cast = torch.float64
        return net

    def outputs(self, inputs: Inputs, labels: Tensor | None = None, ids: Tensor | None = None) -> Tensor:
        """Return f(θ, x) for a batch, (n, d), in evaluation mode and without gradients."""
        with self.evaluation_mode():
            return self.function({}, inputs, labels, ids)

    def function(
        self,
        parameters: Parameters,
        inputs: Inputs,
        labels: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> Tensor:
        """Return f(θ, x), (n, d), differentiable in `parameters`; call it inside `evaluation_mode`."""
        with annotate_errors(self, inputs, labels, ids):
            return self.select_outputs(self.call_model(parameters, inputs), inputs, labels, ids)

    def call_model(self, parameters: Parameters, inputs: Inputs) -> Any:
        """Return what the model returns; call it inside `evaluation_mode`."""
        with torch._C.DisableTorchFunction():  # none of this is an operation of the model's
            inputs = tree_map(lambda value: value.clone(), self.to_device(inputs))
            own, buffers = self._own_parameters(), self._own_buffers()
        if not parameters and self._can_guard():
            return self._call_guarded(inputs)
        with torch._C.DisableTorchFunction():
            state = {**own, **buffers}
            others = {k: self._detached(k, value) for k, value in state.items() if k not in parameters}
            versions = [0 if value.is_inference() else value._version for value in own.values()]
        returned = self._call(inputs, {**others, **parameters})
        if self._evaluation.guarded:
            with torch._C.DisableTorchFunction():
                for (name, value), version in zip(own.items(), versions, strict=True):
                    if not value.is_inference() and value._version != version:
                        raise _written_error(self.model, name)
        return returned

    def _call(self, inputs: Inputs, state: Parameters) -> Any:
        """Return what the model returns with this state instead of its own."""
        device, low = next(iter(state.values())).device.type, self.autocast
        cast = torch.autocast(device, dtype=low, enabled=low is not None, cache_enabled=False)
        with preserve_attributes(self.model), cast:
            return functional_call(self.model, state, *call_arguments(inputs))

    def _can_guard(self) -> bool:
        """Whether this call can detect which parameters forward writes to."""
        evaluation = self._evaluation
        free = not is_recording() and not torch._C._are_functorch_transforms_active()
        return free and evaluation.depth > 0 and not evaluation.guarded and self._cast is None

    def _call_guarded(self, inputs: Inputs) -> Any:
        """Return what the model returns; only parameters that forward writes to are copied."""
        evaluation = self._evaluation
        while True:
            state = {**self._own_parameters(), **self._own_buffers()}
            shared = {k: v for k, v in self._own_parameters().items() if _can_share(v)}
            shared = {k: v.detach() for k, v in shared.items() if k not in evaluation.written}
            others = {k: self._detached(k, value) for k, value in state.items() if k not in shared}
            given = tree_map(lambda value: value.clone(), inputs)
            try:
                with WriteGuard(shared):
                    returned = self._call(given, {**others, **shared})
            except ParameterWriteError as problem:
                evaluation.written.add(problem.name)
                continue
            except (
                Exception
            ):  # compiled parts may not run under the guard; an error of the model's own comes again
                evaluation.guarded = True
                evaluation.written.update(shared)
                state = {k: self._detached(k, value) for k, value in state.items()}
                return self._call(inputs, state)
            evaluation.guarded = True
            return returned

    def select_outputs(
        self, outputs: Any, inputs: Inputs, labels: Tensor | None, ids: Tensor | None
    ) -> Tensor:
        """Return the outputs, (n, d), that the readout selects from what the model returned."""
        with torch._C.DisableTorchFunction():
            labels, ids = self.to_device((labels, ids))
            readout_inputs = self.to_device(inputs) if self._extra_arguments.has("inputs") else inputs
            n = len(tree_leaves(inputs)[0])
            is_squeezed = n == 1 and isinstance(outputs, Tensor) and (outputs.dim() == 0 or len(outputs) != 1)
        if is_squeezed:
            outputs = outputs.unsqueeze(0)  # the model squeezed a batch of one away
        outputs_read = _check_outputs(self.read(outputs, labels, ids, readout_inputs), n)
        return outputs_read if self.autocast is None else outputs_read.to(self.dtype)

    def read(self, outputs: Any, labels: Tensor | None, ids: Tensor | None, inputs: Inputs) -> Tensor:
        """Return what the readout makes of the model's outputs."""
        if self.automatic is not None and self.automatic.chosen is None:
            self.automatic.choose(outputs, labels, inputs)
        known, extra = {"ids": ids, "inputs": inputs}, self._extra_arguments
        more = {name: known[name] for name in extra.by_name}
        return self.readout(outputs, labels, *(known[name] for name in extra.by_place), **more)

    @property
    def _extra_arguments(self) -> ExtraArguments:
        """What the readout takes besides outputs and labels."""
        readout = self.readout
        if self._known_arguments[0] is not readout:
            self._known_arguments = (readout, check_readout(readout))
        return self._known_arguments[1]

    def reads_labels(self, inputs: Inputs, labels: Tensor | None, ids: Tensor | None = None) -> bool:
        """Whether the readout's result depends on the labels.

        A custom readout is tested once on these samples, with their labels and with permuted ones; the result for the
        first samples with labels holds for all.

        Args:
            inputs: A few samples, best with different labels.
            labels: Their labels; None if there are none to depend on.
            ids: Their numbers.

        """
        if self._reads_labels is None and labels is not None:
            self._reads_labels = looks_at_label(self.choose_readout(inputs, labels, ids))
        if self._reads_labels is None and labels is not None:
            with self.evaluation_mode():
                returned = self.call_model({}, inputs)
                one, other = (
                    self.select_outputs(returned, inputs, y, ids) for y in (labels, _other_labels(labels))
                )
            self._reads_labels = not torch.equal(one.nan_to_num(), other.nan_to_num())
        return bool(self._reads_labels) and labels is not None

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """Evaluation mode, without gradients unless enabled inside; on leaving, everything is restored.

        Only one thread at a time is inside, over all networks; others wait.

        Raises:
            ValueError: A selected parameter has a gradient hook.

        """
        with evaluation(self.model, torch_generators=not is_recording()):
            if not self._evaluation.depth:  # inside, other tensors may stand for the parameters
                _refuse_gradient_hooks(self.model, self.names)
            self._evaluation.depth += 1
            try:
                yield
            finally:
                self._evaluation.depth -= 1
                self._evaluation.parameters = self._evaluation.buffers = self._evaluation.placement = None
                if not self._evaluation.depth:
                    self._evaluation.copies.clear()
                    callbacks, self._evaluation.on_leaving = self._evaluation.on_leaving, []
                    for callback in callbacks:
                        callback()

    @contextmanager
    def observed_by(self, observer: Observer) -> Iterator[None]:
        """Show an observer every pass that forms gradients of this network."""
        before, self.observer = self.observer, observer
        try:
            yield
        finally:
            self.observer = before

    def call_on_leaving(self, callback: Callable[[], None]) -> None:
        """Call a function when the current evaluation ends, because its cache is no longer valid then."""
        if not self._evaluation.depth:
            raise RuntimeError("There is no current evaluation: call this inside `evaluation_mode`.")
        self._evaluation.on_leaving.append(callback)

    def copy_state(self) -> None:
        """Make the copies that calls in the current evaluation need, now instead of inside the first call."""
        with exclusive:
            for name, value in {**self._own_parameters(), **self._own_buffers()}.items():
                self._detached(name, value)

    def copied_state(self) -> list[Tensor]:
        """Return the copies of parameters and buffers that replace them in the current evaluation."""
        return [copy.value for copy in self._evaluation.copies.values()]

    def _own_parameters(self) -> Parameters:
        """Return the model's own parameters by name."""
        evaluation = self._evaluation
        with exclusive:
            if evaluation.parameters is None or not evaluation.depth:
                evaluation.parameters = dict(self.model.named_parameters())
            return evaluation.parameters

    def _own_buffers(self) -> Parameters:
        """Return the model's own buffers by name."""
        evaluation = self._evaluation
        with exclusive:
            if evaluation.buffers is None or not evaluation.depth:
                evaluation.buffers = dict(self.model.named_buffers())
            return evaluation.buffers

    def _detached(self, name: str, value: Tensor) -> Tensor:
        """Return a parameter or buffer for one call: itself if forward only reads it, else a copy.

        A copy that was not written to is reused.
        """
        evaluation = self._evaluation
        if self._cast is not None and value.is_floating_point():
            return value.detach().to(self._cast, copy=True)
        if value.is_inference() or not evaluation.depth:  # without a version, or a time in which it holds
            return value.detach().clone()
        is_read = evaluation.guarded and isinstance(value, nn.Parameter) and name not in evaluation.written
        if is_read and _can_share(value):
            return value.detach()
        copy = evaluation.copies.get(name)
        if copy is None or copy.of is not value or copy.versions != (value._version, copy.value._version):
            copied = value.detach().clone()
            copy = evaluation.copies[name] = _Copy(value, copied, (value._version, copied._version))
        return copy.value.detach()

    def state(self) -> tuple[Any, ...]:
        """Return a value that changes whenever part of the model is modified or replaced.

        It covers parameters and buffers, and what else forward reads: attributes, modules without parameters, hooks.
        """
        with exclusive:
            held = take_snapshot(self.model)
            tensors = [*self.model.parameters(), *self.model.buffers(), *held.tensors]
            return held.values, tensor_states(tensors)

    def add_to(self, fingerprint: Fingerprint, name: str) -> None:
        """Add weights, modules and readout, which must be equal on all ranks that share a pass."""
        with exclusive:
            state = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
            for part, checksum in self._checksums.get(state).items():
                fingerprint.put("weights", part, checksum)
            fingerprint.put("weights", "modules", describe_module(self.model))
        fingerprint.add("readout", self._readout)
        fingerprint.add("parameters", list(self.names))
        fingerprint.add("autocast", self.autocast)

    def to_device(self, inputs: Inputs) -> Inputs:
        """Return inputs on the model's device and in its precision, as `function` makes them."""
        device, common = self._find_placement()
        dtype = common and (self._cast or common)

        def place(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            kind = dtype if dtype is not None and value.is_floating_point() else value.dtype
            return send(_outside_inference(value), device, kind)

        return tree_map(place, inputs)

    def _find_placement(self) -> tuple[torch.device, torch.dtype | None]:
        """Return the model's device, and its floating type if it has only one; kept while evaluating."""
        evaluation = self._evaluation
        if evaluation.placement is None or not evaluation.depth:
            own = self._own_parameters().values()
            dtypes = {p.dtype for p in own if p.is_floating_point()}
            evaluation.placement = next(iter(own)).device, next(iter(dtypes)) if len(dtypes) == 1 else None
        return evaluation.placement


def to_network(
    model: nn.Module | Network,
    readout: Readout | None = None,
    parameters: str | Sequence[str] | None = None,
) -> Network:
    """Return a Network of the model with this readout and these parameters; return a Network unchanged.

    Args:
        model: A model, or a Network.
        readout: The outputs whose gradients are compared; None chooses automatically.
        parameters: Names or patterns; None uses all that require grad.

    Raises:
        ValueError: A readout or parameters were passed together with a Network.

    """
    if not isinstance(model, Network):
        return Network(model, readout, parameters=parameters)
    given = [name for name, value in (("readout", readout), ("parameters", parameters)) if value is not None]
    if given:
        raise ValueError(
            f"A Network has its own readout and parameters, found {' and '.join(given)} besides {model}: choose them "
            "in Network(model, readout, parameters=...), or pass the bare model."
        )
    return model


def _can_share(parameter: Tensor) -> bool:
    """Whether a parameter is worth sharing, and writes to it can be detected before they happen."""
    strided = parameter.layout == torch.strided and not parameter.is_inference()
    return strided and parameter.nbytes >= SHARED_BYTES


def _written_error(model: nn.Module, name: str) -> RuntimeError:
    return RuntimeError(
        f"{type(model).__name__} wrote to its parameter {name} in forward, which it did not in its first call: the "
        "parameter has changed. Load the model again, and write to a buffer, or to a copy, instead."
    )


def _refuse_gradient_hooks(model: nn.Module, names: tuple[str, ...]) -> None:
    """Raise if selected parameters have hooks that may change their gradients.

    A hook sees the gradient of a whole batch. Its effect on a single sample's gradient is unknown, and gradients are
    not formed one by one if that can be avoided.
    """
    every = dict(model.named_parameters())
    hooked = [name for name in names if every[name]._backward_hooks]
    if hooked:
        raise ValueError(
            f"{counted(len(hooked), 'parameter')} {agreeing(len(hooked), 'has', 'have')} gradient hooks "
            f"(Parameter.register_hook), the first {hooked[0]}: "
            "a hook acts on the gradient of a batch, not of a single sample, so similarities would ignore it. Remove "
            "it for this call (handle.remove(); wandb: unwatch), leave the parameter out with "
            "Network(model, parameters=[...]), or move what the hook does into the forward pass, such as a mask with "
            "torch.nn.utils.parametrize.register_parametrization."
        )


def check_model(model: Any) -> nn.Module:
    """Return the model if its parameters can be differentiated; raise saying why not otherwise."""
    model = _module_of_skorch(model)
    check_type(
        "model", model, nn.Module, "a torch.nn.Module", "give the model itself, with its weights loaded"
    )
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("A TorchScript module cannot be differentiated by parts: pass the original model.")
    with exclusive:
        state = [*model.named_parameters(), *model.named_buffers()]
    if not any(isinstance(value, nn.Parameter) for _, value in state):
        raise ValueError(
            f"The model must have parameters, {type(model).__name__} has no parameters to differentiate in "
            f"({counted(len(state), 'buffer')}): a quantized or exported model has lost them, so pass the original one."
        )
    spread = find_spread(model)
    for name, value in state:
        if nn.parameter.is_lazy(value):
            raise ValueError(
                f"Parameter {name} of the model has no shape yet: call the model on a batch first."
            )
        if value.is_meta and spread is None:
            raise ValueError(
                f"{name} of the model is on the meta device and has no value: load its weights, for example "
                "with model.to_empty(device='cpu') and model.load_state_dict(...)."
            )
    if spread is not None:
        raise ValueError(
            f"The parameters of {type(model).__name__} are {spread}: call likewise.gather_model(model) in every "
            "process; it returns a complete copy."
        )
    return model


def _module_of_skorch(model: Any) -> Any:
    """Return the module inside a skorch net, and anything else unchanged; skorch need not be installed."""
    if isinstance(model, type | nn.Module) or not (hasattr(model, "module") and hasattr(model, "initialize")):
        return model
    if not isinstance(getattr(model, "module_", None), nn.Module):
        raise ValueError(
            f"The skorch net {type(model).__name__} has no module yet: call net.fit(X, y) first, or net.initialize() "
            "and net.load_params(...)."
        )
    return model.module_


@contextmanager
def annotate_errors(net: Network, inputs: Inputs, labels: Any, ids: Any) -> Iterator[None]:
    """Add to errors of the model or the readout how they were called, and with which samples."""
    try:
        yield
    except Exception as error:
        if not getattr(error, "__notes__", None):
            error.add_note(_description(net, inputs, labels, ids))
        raise


def _description(net: Network, inputs: Inputs, labels: Any, ids: Any) -> str:
    def shown(value: Any) -> str:
        return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else describe(value)

    if isinstance(inputs, Mapping):
        called = ", ".join(f"{name}={shown(value)}" for name, value in inputs.items())
    else:
        called = ", ".join(map(shown, inputs if isinstance(inputs, tuple | list) else [inputs]))
    which = "samples"
    if isinstance(ids, Tensor):
        which = f"samples {', '.join(map(str, ids[:8].tolist()))}{', ...' if len(ids) > 8 else ''}"
    return (
        f"This happened when {type(net.model).__name__}({called}) was called on {which}, with "
        f"{'no labels' if labels is None else f'labels {shown(labels)}'} and the readout "
        f"{readout_name(net.readout)!r}. Samples lie along the first dimension: one "
        "alone needs x[None]. Of a tuple or pair the last is the label unless labels=False; a dict becomes "
        "keyword arguments. Integers are passed as they are: images may need x.float() / 255."
    )


def _unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside torch.compile, DataParallel or DistributedDataParallel."""
    compiled = getattr(model, "_orig_mod", None)
    if isinstance(compiled, nn.Module):
        return _unwrap(compiled)
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return _unwrap(model.module)
    return model


LAST_LAYERS = re.compile(r"last layer|last ([1-9]\d*) layers")


def _last_layer_names(model: nn.Module, names: tuple[str, ...], count: int) -> list[str]:
    """Return the parameters that belong to the last layers, in the order in which the model registers them.

    A layer is a module with a parameter of at least two dimensions. A module with vectors only, such as a
    normalization, belongs to the layer before it.
    """
    values, layers = dict(model.named_parameters()), list[list[str]]()
    owners: dict[str, list[str]] = {}
    for name in names:
        owner, parametrized, _ = name.partition(".parametrizations.")
        owners.setdefault(owner if parametrized else name.rpartition(".")[0], []).append(name)
    for owned in owners.values():
        if not layers or any(values[name].dim() > 1 for name in owned):
            layers.append([])
        layers[-1] += owned
    return [name for layer in layers[-count:] for name in layer]


def _select_parameters(model: nn.Module, parameters: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of the selected parameters, a tied one once, under its first name."""
    first = {id(value): name for name, value in reversed(list(model.named_parameters()))}
    aliases = [
        (name, first[id(value)], value) for name, value in model.named_parameters(remove_duplicate=False)
    ]
    if parameters is None:
        selected = [name for _, name, value in aliases if value.requires_grad]
        if not selected:
            raise ValueError(
                f"None of the {len(aliases)} parameters of {type(model).__name__} requires grad: "
                'choose some by name, for example parameters=["*"] for all of them.'
            )
    else:
        advice = (
            'names or glob patterns such as \'layer4.*\', "adapters", "last 3 layers", or None for all that '
            "require grad"
        )
        patterns = check_names("parameters", parameters, advice)
        if patterns == ["adapters"]:
            selected = _adapter_names(model, aliases)
        elif len(patterns) == 1 and (last := LAST_LAYERS.fullmatch(patterns[0])):
            selected = _last_layer_names(model, _select_parameters(model, None), int(last[1] or 1))
        else:
            selected = [name for pattern in patterns for name in _matching(pattern, aliases)]
    values = dict(model.named_parameters())
    for name in selected:
        if not values[name].is_floating_point():
            raise ValueError(
                f"Parameter {name} is {values[name].dtype}: only real floating parameters have "
                "gradients that can be compared; choose others with parameters=[...]."
            )
    return tuple(name for name in values if name in set(selected))


def _adapter_names(model: nn.Module, aliases: list[tuple[str, str, nn.Parameter]]) -> list[str]:
    """Return the parameters of active adapters: those of modules that list adapters like peft's, and of prompts."""
    starts = []
    for path, module in model.named_modules():
        if hasattr(module, "adapter_layer_names"):
            active = getattr(module, "active_adapters", [])
            starts += [
                ".".join(filter(None, (path, attribute, name)))
                for attribute in module.adapter_layer_names
                for name in active
            ]
    starts += [f"prompt_encoder.{name}" for name in getattr(model, "active_adapters", ())]
    selected = [
        name
        for alias, name, _ in aliases
        if any(alias == start or alias.startswith(start + ".") for start in starts)
    ]
    if not selected:
        raise ValueError(
            f"{type(model).__name__} has no adapters as peft adds them: select parameters by name, such as "
            'parameters=["*lora_*"], or leave parameters out for all that require grad.'
        )
    return selected


def _matching(pattern: str, aliases: list[tuple[str, str, nn.Parameter]]) -> list[str]:
    matches = [name for alias, name, _ in aliases if fnmatchcase(alias, pattern)]
    if not matches:
        names = [alias for alias, _, _ in aliases]
        inside = [name for name in names if name.startswith(pattern + ".")]
        near = get_close_matches(pattern, names, 5, 0.3) or names[:5]
        advice = f"did you mean '{pattern}.*'?" if inside else f"did you mean one of {', '.join(near)}?"
        raise ValueError(f"No parameter of the {len(names)} matches {pattern!r}: {advice}")
    return matches


def call_arguments(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the named arguments that a model is called with."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def _other_labels(labels: Tensor) -> Tensor:
    """Return labels permuted between samples; if all are equal, 1 where they are 0 and 0 elsewhere."""
    exchanged = labels.roll(1, 0)
    return torch.where(labels == 0, 1, 0).to(labels) if torch.equal(labels, exchanged) else exchanged


def _check_outputs(outputs: Tensor, n: int) -> Tensor:
    if not isinstance(outputs, Tensor) or not outputs.is_floating_point():
        found = outputs.dtype if isinstance(outputs, Tensor) else type(outputs).__name__
        raise TypeError(f"The readout must return a floating (n, d) tensor, found {found}.")
    refuse_unreadable("What the readout returns", outputs)
    if outputs.dim() == 0 and n == 1:
        outputs = outputs.unsqueeze(0)
    if outputs.dim() == 0 or len(outputs) != n:
        raise ValueError(
            f"A batch of {counted(n, 'sample')} gave outputs of shape {tuple(outputs.shape)}: expected "
            f"({n}, d), samples first. Pass a readout that returns this shape."
        )
    if outputs.numel() == 0:
        raise ValueError(
            f"A batch of {counted(n, 'sample')} gave outputs of shape {tuple(outputs.shape)}, no outputs at all, so "
            "there is nothing to differentiate."
        )
    return outputs.reshape(n, -1)


def _outside_inference(value: Tensor) -> Tensor:
    return value.clone() if value.is_inference() else value
