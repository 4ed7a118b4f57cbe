"""What to call in the place of functions whose higher derivatives are wrong, or slow."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from likewise.gradients import norms
from likewise.gradients.convolved import CONVOLUTIONS

Instead = dict[Callable[..., Any], Callable[..., Any]]
TWICE: Instead = {  # for second derivatives, which are wrong under vmap where there is no rule
    F.instance_norm: norms.instance_norm,
    torch.instance_norm: norms.torch_instance_norm,
    torch.layer_norm: norms.torch_layer_norm,
    **CONVOLUTIONS,
}
THRICE: Instead = {**TWICE, F.layer_norm: norms.layer_norm}  # for third ones


class Substituting(TorchFunctionMode):
    """Calls something else in the place of some functions."""

    def __init__(self, instead: Instead) -> None:
        super().__init__()
        self._instead = instead

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._instead.get(func, func)(*args, **(kwargs or {}))
