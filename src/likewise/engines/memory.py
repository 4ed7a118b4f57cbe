"""Memory: the bytes of tensors during a computation, measured on any device, and how many samples fit into a limit."""

import errno
import gc
import os
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from likewise.distributed import world_size


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


# Libraries allocate scratch memory inside an operation, which MemoryMeter does not count.
SLACK = 1.25
PRODUCT_BYTES = 2**27  # beyond which products with several columns of weights gain nothing


class MemoryUse(NamedTuple):
    """The bytes that an engine takes for a batch, as measured in a dry run."""

    fixed_bytes: int  # independent of the batch size
    bytes_per_sample: int
    entries_per_sample: int = 0  # of the inputs by which it was measured; 0 if unknown
    product_bytes: int = PRODUCT_BYTES  # beside a batch, for products with several columns of weights


def entries_per_sample(inputs: Any) -> int:
    """Return how many numbers the tensors among the inputs have for each sample."""
    tensors = (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim())
    return sum(tensor.numel() // max(1, len(tensor)) for tensor in tensors)


UNKNOWN_MEMORY = MemoryUse(0, 0)


def default_max_memory(device: torch.device) -> int:
    """Return half of the bytes that are free on a device, rounded down to a power of two: runs then have equal batches.

    Where several processes share a pass they must agree, so that each takes 2 GiB.
    """
    if world_size() > 1:
        return 2**31
    half = free_bytes(device) // 2
    return int(2 ** max(half, 2**26).bit_length() // 2)


def free_bytes(device: torch.device) -> int:
    """Return the bytes that are free on a device; of a CPU, what the system and limits of its container leave."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min([_system_bytes(), *_container_bytes()])


def _system_bytes() -> int:
    """Return the bytes that programs can get without swapping."""
    for line in _read_lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2  # the system does not say


def _container_bytes() -> list[int]:
    """Return what the limits of control groups leave, where there are any."""
    folder = "/sys/fs/cgroup"
    files = [
        (f"{folder}/memory.max", f"{folder}/memory.current"),
        (f"{folder}/memory/memory.limit_in_bytes", f"{folder}/memory/memory.usage_in_bytes"),
    ]
    limits = []
    for limit, usage in files:
        allowed, used = _read_lines(limit), _read_lines(usage)
        if allowed and used and allowed[0].isdigit() and used[0].isdigit():
            limits.append(max(0, int(allowed[0]) - int(used[0])))
    return limits


def _read_lines(path: str) -> list[str]:
    """Return the lines of a system file, none if there is no such file."""
    return Path(path).read_text().splitlines() if os.access(path, os.R_OK) else []


def keep_freed_memory() -> None:
    """Let the C library keep up to 64 MiB of freed memory for the next batch of a pass.

    glibc returns more than that to the system, or more than twice the largest block freed so far if that is less. Every
    batch then waits for the system to clear its pages again: up to a fifth of a pass (measured 2026-11-18). Freeing one
    block that was never written to raises the threshold. With other C libraries nothing changes.
    """
    np.empty(2**25 - 2**13, dtype=np.uint8)  # no tensor, which a MemoryMeter would count


@contextmanager
def freeze_objects() -> Iterator[None]:
    """Leave objects that exist now out of garbage collections inside: among them are all of PyTorch's and pandas'.

    A full collection scans them in .2 s, and in a new process one comes in the first seconds (measured 2026-11-19).
    Where the caller has frozen objects, nothing changes.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class MemoryLimitError(MemoryError):
    """Not even one sample fits into max_memory.

    Attributes:
        enough: A sufficient max_memory, in bytes.
        outputs: How many outputs at most would fit, None if not even one would, or it is not known.
    """

    def __init__(self, message: str, enough: int, outputs: int | None = None) -> None:
        super().__init__(message)
        self.enough, self.outputs = enough, outputs


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on any device."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # PyTorch's CPU allocator and the dynamic loader raise no specific exception; only the text identifies it
    if isinstance(error, ImportError):
        return "failed to map segment" in str(error)
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def equal_size(n: int, most: int) -> int:
    """Return the size of the fewest parts of about one size that n samples divide into, at most so many in each.

    Parts of one size are recorded once on a GPU, and a small rest would cost almost as much as a whole part.
    """
    parts = -(-max(n, 1) // max(most, 1))
    return -(-max(n, 1) // parts)


def fit_batch_size(
    size: int, d: int, p: int, max_memory: int, rest: int = 0, bytes_of: Callable[[int], int] | None = None
) -> int:
    """Return how many samples fit into memory.

    Args:
        size: Bytes of one sample.
        d: The number of outputs.
        p: The number of parameters.
        max_memory: Bytes for all.
        rest: Bytes that do not depend on the number of samples.
        bytes_of: Bytes of one sample with fewer outputs, to name how many would fit.

    Raises:
        MemoryLimitError: Not even one sample fits.

    """
    if size + rest <= max_memory:
        return int((max_memory - rest) // size)
    enough, outputs = 2 * (size + rest), None
    if bytes_of is not None:
        powers = [2**i for i in range((d - 1).bit_length())]
        fitting = bisect_right(powers, max_memory - rest, key=bytes_of)
        outputs = powers[fitting - 1] if fitting else None
    fewer = (
        "a readout of fewer outputs"
        if outputs is None
        else f"the readout likewise.projected_outputs({outputs}), {outputs} random combinations of the outputs"
    )
    advice = f"choose {fewer}, or fewer parameters" if d > 1 and outputs != d else "choose fewer parameters"
    raise MemoryLimitError(
        f"The gradients of one sample, {d:,} outputs × {p:,} parameters, take about "
        f"{(size + rest) / 2**20:,.1f} MiB, over the {max_memory / 2**20:,.1f} MiB that max_memory "
        f"leaves for them: allow max_memory={enough:_}, or {advice} by Network(model, readout, parameters=[...]).",
        enough,
        outputs,
    )
