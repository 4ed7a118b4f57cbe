"""Whole copies of models whose parameters are spread over processes or devices.

FSDP2 (`fully_shard`) keeps a shard of every parameter in each process and gathers a layer when it is called; accelerate
(`device_map`, `cpu_offload`) keeps layers on several devices and loads them when they are called. Per-sample gradients
need every parameter where it is used, and processes that share samples call the model a different number of times, so
that neither can run inside a pass. `gather_model` copies such a model into one place, before.
"""

import copy
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

FSDP_STATE = "FSDPState"  # the owner of FSDP2's hooks
FSDP_CLASS = "FSDPModule"  # what it mixes into the class of a module
FSDP_ATTRIBUTES = ("__composable_api", "_is_fsdp_managed_module", "_fsdp_use_orig_params")  # so they begin
OFFLOADED = ("_hf_hook", "_old_forward", "forward", "hf_device_map")  # what accelerate sets on modules
MOVERS = (
    "to",
    "cuda",
    "npu",
    "xpu",
    "mlu",
    "sdaa",
    "musa",
    "neuron",
)  # methods that it replaces on the whole
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def gather_model(model: nn.Module, device: torch.device | str | None = None) -> nn.Module:
    """Return a whole copy of a model that FSDP2 has sharded, or that accelerate has spread over devices.

    The copy has the values that the parameters have now, without the hooks of either, and is compared, indexed and
    analyzed as any model. Each process needs room for all of it. With FSDP2 every process has to make this call, and
    has the same copy then: it shares samples with the others. The model itself stays as it is.

    Args:
        model: Sharded by `fully_shard`, dispatched by `device_map` or `cpu_offload`, or neither.
        device: Where the copy is; where its parameters are, if they are all on one device, if None.

    Returns:
        A plain module, in the precision of the parameters (not that of FSDP2's MixedPrecisionPolicy).

    Raises:
        ValueError: Parameters are on several devices and none was chosen, or the values of one are nowhere.

    Example:
        >>> import torch, likewise as lw
        >>> copied = lw.gather_model(torch.nn.Linear(4, 3))
        >>> lw.similarity(copied, torch.randn(5, 4)).shape
        torch.Size([5, 5])

    """
    place = _choose_device(model) if device is None else torch.device(device)
    memo: dict[int, Any] = {}
    copies: dict[tuple[Any, ...], Tensor] = {}
    for name, held, stored in _tensors_of(model):
        if id(held) in memo:
            continue
        if _is_sharded(held):
            memo[id(held)] = _like(held, held.full_tensor().detach().to(place))  # type: ignore[attr-defined]
            continue
        if stored.is_meta:
            raise ValueError(f"{name} of the model is on the meta device and has no value: load its weights.")
        key = _identify(held, stored)
        if not stored.numel() or key not in copies:  # tied parameters stay tied
            copies[key] = _like(held, stored.detach().to(place, copy=True))
        memo[id(held)] = copies[key]
    modules = list(model.modules())
    for module in modules:
        memo[id(module)] = _original_class(module).__new__(_original_class(module))
    for module in modules:
        memo[id(module)].__dict__.update(copy.deepcopy(_plain_attributes(module), memo))
    found: nn.Module = memo[id(model)]
    return found


def find_spread(model: nn.Module) -> str | None:
    """Return how the parameters of a model are spread over processes or devices; None where they are in one place."""
    every = list(model.parameters())
    if any(_is_sharded(value) for value in every):
        return "sharded over processes (DTensor)"
    if any(value.is_meta for value in every) and any(
        "_hf_hook" in vars(module) for module in model.modules()
    ):
        return "offloaded by accelerate"
    devices = {str(value.device) for value in every}
    return f"on several devices ({', '.join(sorted(devices))})" if len(devices - {"meta"}) > 1 else None


def _is_sharded(value: Tensor) -> bool:
    return hasattr(value, "full_tensor")


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield every parameter and buffer: its name, what its module holds now, and where its values are."""
    loaders: dict[str, list[tuple[str, Mapping[str, Tensor]]]] = {}
    for path, module in model.named_modules():
        parent, _, last = path.rpartition(".")
        above = [(f"{prefix}{last}.", weights) for prefix, weights in loaders.get(parent, [])] if path else []
        loaders[path] = [*above, *(("", weights) for weights in _offloaded_weights(module))]
        for kind in (module._parameters, module._buffers):
            for name, held in kind.items():
                if held is not None:
                    yield f"{path}.{name}".strip("."), held, _stored(name, held, loaders[path])


def _stored(name: str, held: Tensor, loaders: list[tuple[str, Mapping[str, Tensor]]]) -> Tensor:
    """Return where the values of a parameter are: in it, or where accelerate has put them."""
    if held.is_meta:
        for prefix, weights in loaders:
            if f"{prefix}{name}" in weights:
                return torch.as_tensor(weights[f"{prefix}{name}"])
    return held


def _identify(held: Tensor, stored: Tensor) -> tuple[Any, ...]:
    """Return what tied parameters have in common: their memory, or, where each was put on a disk, all their values."""
    if held.is_meta and stored.numel() > 1 and bool((stored != stored.flatten()[0]).any()):
        content = hashlib.sha256(stored.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return stored.dtype, *stored.shape, content.digest()
    return stored.untyped_storage().data_ptr(), stored.storage_offset(), *stored.shape


def _like(held: Tensor, values: Tensor) -> Tensor:
    return nn.Parameter(values, held.requires_grad) if isinstance(held, nn.Parameter) else values


def _offloaded_weights(module: nn.Module) -> list[Mapping[str, Tensor]]:
    """Return where accelerate keeps the weights of a module."""
    hook = vars(module).get("_hf_hook")
    hooks = getattr(hook, "hooks", [hook]) if hook is not None else []
    return [one.weights_map for one in hooks if getattr(one, "weights_map", None) is not None]


def _choose_device(model: nn.Module) -> torch.device:
    devices = {stored.device for _, _, stored in _tensors_of(model)} - {torch.device("meta")}
    if len(devices) > 1:
        listed = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            f"The parameters are on several devices ({listed}): say where the copy should be, "
            f"likewise.gather_model(model, device={listed.split(', ')[0]!r})."
        )
    return next(iter(devices), torch.device("cpu"))


def _original_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module without what FSDP2 mixes in."""
    kind = type(module)
    if any(base.__name__ == FSDP_CLASS for base in kind.__bases__):
        return next(base for base in kind.__bases__ if base.__name__ != FSDP_CLASS)
    return kind


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module without hooks and methods of FSDP2 and accelerate."""
    found = {name: value for name, value in vars(module).items() if not name.startswith(FSDP_ATTRIBUTES)}
    if "_hf_hook" in found:
        old = found.get("_old_forward")
        found = {name: value for name, value in found.items() if name not in (*OFFLOADED, *MOVERS)}
        if old is not None and getattr(old, "__func__", None) is not _original_class(module).forward:
            found["forward"] = old
    for name in HOOKS:
        given = found.get(name)
        if given:
            kept = {key: hook for key, hook in given.items() if not _is_of_fsdp(hook)}
            found[name] = type(given)(kept)
    return found


def _is_of_fsdp(hook: Any) -> bool:
    return type(getattr(hook, "__self__", None)).__name__ == FSDP_STATE
