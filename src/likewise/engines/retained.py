"""Gradients that are needed again, kept in the memory that batches leave.

The two passes of a product read the same gradients. What these are computed from, the inputs and output gradients of
each operation, is smaller than the gradients. To read it replaces a forward and a backward pass: two thirds of the
second pass of a transformer or a deep convolutional network.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from likewise.data import Samples
from likewise.engines.factors import ParameterGradient, map_tensors
from likewise.engines.gradient_batch import GradientBatch
from likewise.engines.memory import is_out_of_memory
from likewise.model import Parameters

ALIGNMENT = 512  # bytes, as PyTorch aligns tensors on a GPU
# Bytes of a tensor, on the mean of a batch, below which Python takes longer to start its copy and its product than a
# GPU takes to replay both passes of the operation: .3 ms on an H200 (2026-11-18).
LEAST_BYTES = 2**24

Place = tuple[Any, ...]  # where a tensor lies: the same for views of the same entries


class RetainedGradients:
    """The gradients of batches of one data set, as many as fit; none of batches of small tensors.

    Args:
        max_bytes: Of all of them.
        n: Samples of the data set: no more memory is taken than these need.
        parameters: Of the network, which are not copied.
        least_bytes: Of a tensor, on the mean of a batch that is kept; LEAST_BYTES if None.
        names: Of the parameters whose gradients are kept; all if None.

    """

    def __init__(
        self,
        max_bytes: int,
        n: int,
        parameters: Parameters,
        *,
        least_bytes: int | None = None,
        names: tuple[str, ...] | None = None,
    ) -> None:
        self.names = names
        self._max_bytes, self._n = max_bytes, n
        self._least_bytes = LEAST_BYTES if least_bytes is None else least_bytes
        self._parameters = {_place(value) for value in parameters.values()}
        self._batches: dict[tuple[int, ...], GradientBatch] = {}
        self._left: Tensor | None = None  # (bytes,) not written yet
        self._is_closed = False  # to further batches

    def get(self, samples: Samples) -> GradientBatch | None:
        """Return the gradients of samples; what is computed from them is not kept here."""
        known = self._batches.get(tuple(samples.ids.tolist()))
        return None if known is None else replace(known.copy(), samples=samples)

    def batches(self, ids: Tensor) -> list[GradientBatch] | None:
        """Return the gradients of samples in the batches in which they were kept; None where some were not."""
        found, start, places = list[GradientBatch](), 0, ids.tolist()
        sizes = {key[0]: len(key) for key in self._batches}
        while start < len(places):
            stop = start + sizes.get(places[start], len(places))
            gradients = self.get(Samples(ids[start:stop], None, ids[start:stop]))
            if gradients is None:
                return None
            found.append(gradients)
            start = stop
        return found

    def keep(self, samples: Samples, gradients: GradientBatch) -> None:
        """Copy the gradients of samples, as long as they fit."""
        if self._is_closed:
            return
        if self.names is not None:
            named = gradients.by_parameter
            gradients = replace(gradients, by_parameter={k: named[k] for k in self.names if k in named})
        tensors: dict[Place, Tensor] = {}
        _map_batch(gradients, lambda tensor: tensors.setdefault(_place(tensor), tensor))
        copied = {place: tensor for place, tensor in tensors.items() if place not in self._parameters}
        sizes = [_padded_bytes(tensor) for tensor in copied.values()]
        is_worthwhile = sum(sizes) >= self._least_bytes * len(sizes)
        block = self._take(sum(sizes), len(samples), gradients) if is_worthwhile else None
        if block is None:
            self._is_closed = True
            return
        copies = _copy_all(copied, block.split(sizes))
        kept = _map_batch(gradients, lambda tensor: copies.get(_place(tensor), tensor))
        only_ids = Samples(samples.ids, None, samples.ids)  # inputs may be large
        outputs = None if gradients.outputs is None else gradients.outputs[: len(samples)].clone()
        self._batches[tuple(samples.ids.tolist())] = replace(kept, samples=only_ids, outputs=outputs)

    def _take(self, size: int, count: int, gradients: GradientBatch) -> Tensor | None:
        """Return so many bytes, None where they are not left; what the first batch takes tells how many all need."""
        if self._left is None:
            batches = -(-self._n // count)
            most = min(size * batches, self._max_bytes)
            self._left = _allocate(most if size <= most else 0, gradients)
        if not 0 < size <= len(self._left):
            return None
        block, self._left = self._left.split([size, len(self._left) - size])
        return block


def retained_bytes(gradient: ParameterGradient, shape: torch.Size) -> int:
    """Return the bytes that a gradient takes when it is kept; `shape` is the parameter's, which is not copied."""
    tensors: dict[Place, Tensor] = {}
    map_tensors(gradient, lambda tensor: tensors.setdefault(_place(tensor), tensor))
    return sum(_padded_bytes(tensor) for tensor in tensors.values() if tensor.shape != shape)


def _map_batch(gradients: GradientBatch, convert: Callable[[Tensor], Tensor]) -> GradientBatch:
    """Return the gradients of a batch of converted tensors."""
    named = {name: map_tensors(gradient, convert) for name, gradient in gradients.by_parameter.items()}
    return GradientBatch(gradients.samples, gradients.d, named)


def _allocate(size: int, gradients: GradientBatch) -> Tensor:
    """Return memory, none where the device has less: gradients are then computed again."""
    like = (
        next(iter(gradients.by_parameter.values())).tensors[0] if gradients.by_parameter else torch.empty(0)
    )
    try:
        return like.new_empty(size, dtype=torch.uint8)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return like.new_empty(0, dtype=torch.uint8)


def _place(tensor: Tensor) -> Place:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _padded_bytes(tensor: Tensor) -> int:
    """Return the bytes of the distinct entries of a tensor: those of expanded dimensions are one."""
    return -(-_without_repeats(tensor).numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT


def _without_repeats(tensor: Tensor) -> Tensor:
    """Return the distinct entries of a tensor: of size 1 along dimensions in which it is expanded."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _copy_all(tensors: dict[Place, Tensor], memory: Sequence[Tensor]) -> dict[Place, Tensor]:
    """Return copies of tensors in these parts of memory, written by one call."""
    distinct = [_without_repeats(tensor) for tensor in tensors.values()]
    copies = list(map(_view_like, distinct, memory))
    if copies:
        torch._foreach_copy_(copies, distinct)
    pairs = zip(tensors.items(), copies, strict=True)
    return {place: copy.expand(tensor.shape) for (place, tensor), copy in pairs}


def _view_like(tensor: Tensor, memory: Tensor) -> Tensor:
    """Return memory as a tensor of this shape, its dimensions in the order of the tensor's own memory."""
    order = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
    numbers = memory[: tensor.numel() * tensor.element_size()].view(tensor.dtype)
    ordered = numbers.view([tensor.shape[dim] for dim in order])
    return ordered.permute([order.index(dim) for dim in range(tensor.dim())])
