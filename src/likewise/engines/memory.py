"""Peak memory of tensors during a computation, counted on any device."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryMeter(TorchDispatchMode):
    """Counts the bytes of tensors created inside it: `now` alive, `peak` at most.

    Scratch memory inside one operation and memory cached by an allocator are not counted.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes a second

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, Any] = {}  # by the storage's address in Python

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and _key(leaf) not in inputs:
                self._count(leaf)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage, key = tensor.untyped_storage(), _key(tensor)
        if key in self._seen:
            return
        size = storage.nbytes()
        self._seen[key] = weakref.finalize(storage, self._release, key, size)
        self.now += size
        self.peak = max(self.peak, self.now)

    def _release(self, key: int, size: int) -> None:
        self.now -= size
        self._seen.pop(key, None)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
