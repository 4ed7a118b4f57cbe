"""The gradients of a convolution's kernel for a batch.

G of a sample is a product over positions of a window of the inputs and the output gradient there. For a transposed
convolution the roles swap: windows of the output gradient, and the inputs. The fastest strategy is selected from
shapes and what PyTorch was built with, never from timings, so that runs are reproducible bit for bit.
"""

import itertools
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from operator import index
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor

from likewise.engines.factors import (
    COPIES,
    DenseGradient,
    FactoredGradient,
    ParameterGradient,
    concatenate,
    gram_from_positions,
    gram_from_rows,
    project_last,
    squared_norms,
    sum_positions,
)
from likewise.engines.memory import equal_size
from likewise.linalg import product
from likewise.torch_state import products_like_convolutions

CACHED = 2**20  # entries that are written and read again while they are in a CPU's cache
FEWEST_POSITIONS = (
    64  # from which oneDNN's kernels with a group for each sample take less time than a product
)
FEWEST_CHANNELS = 16  # as many as its fastest kernels take at a time
HAS_ONEDNN = torch.backends.mkldnn.is_available() and platform.machine().lower() in ("x86_64", "amd64")


class ConvolutionOptions(NamedTuple):
    """The arguments of torch's convolution beside inputs, kernel and bias."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int

    def forward(self, inputs: Tensor, kernel: Tensor) -> Tensor:
        """Return the outputs of the convolution."""
        return torch.ops.aten.convolution(inputs, kernel, None, *self)

    def kernel_gradient(self, inputs: Tensor, deltas: Tensor, kernel: Tensor) -> Tensor:
        """Return the gradient in the kernel, summed over samples."""
        only_kernel = [False, True, False]
        return torch.ops.aten.convolution_backward(deltas, inputs, kernel, None, *self, only_kernel)[1]

    def pad(self, images: Tensor) -> Tensor:
        """Return zero-padded images."""
        if not any(self.padding):
            return images
        return F.pad(images, [p for p in reversed(self.padding) for _ in range(2)])

    def windows(self, images: Tensor, sides: torch.Size) -> Tensor:
        """Return the window of the images at each position, for a kernel with these sides, (n, t, i)."""
        if prod(sides) == 1:
            pixels = self.pad(images)
            for i, step in enumerate(self.stride):
                pixels = pixels[(slice(None),) * (2 + i) + (slice(None, None, step),)]
            return pixels.flatten(2).mT
        images = self.pad(images)
        dims = len(sides)
        for i in range(dims):
            reach = self.dilation[i] * (sides[i] - 1) + 1
            images = images.unfold(2 + i, reach, self.stride[i])[..., :: self.dilation[i]]
        positions, offsets = range(2, 2 + dims), range(2 + dims, 2 + 2 * dims)
        # Whole rows of positions are copied: on a CPU several times as fast as F.unfold.
        return images.permute(0, 1, *offsets, *positions).flatten(1, 1 + dims).flatten(2).mT

    def window_products(self, images: Tensor, sides: torch.Size, positions: torch.Size) -> Tensor:
        """Return the inner products of windows, (n, t, t), from those of pixels where these are fewer."""
        pixels = self.pad(images)
        if prod(pixels.shape[2:]) ** 2 >= prod(positions) ** 2 * prod(sides):
            windows = self.windows(images, sides)
            return windows @ windows.mT
        flat, dims = pixels.flatten(2), range(len(sides))
        products = (flat.mT @ flat).view(len(images), *pixels.shape[2:], *pixels.shape[2:])
        step = products.stride()[1:]
        along = [step[i] * self.stride[i % len(sides)] for i in range(2 * len(sides))]
        both = [(step[i] + step[i + len(sides)]) * self.dilation[i] for i in dims]
        shifted = products.as_strided(
            (len(images), *positions, *positions, *sides), (products.stride(0), *along, *both)
        )
        t = prod(positions)
        return shifted.sum([-1 - i for i in dims]).view(len(images), t, t)


def convolution_arguments(transposed: bool) -> list[str]:
    """Return the names of the positional arguments of torch's convolution functions."""
    rest = ["output_padding", "groups", "dilation"] if transposed else ["dilation", "groups"]
    return ["input", "weight", "bias", "stride", "padding", *rest]


def bind_convolution(
    x: Tensor, weight: Tensor, a: dict[str, Any], dims: int, transposed: bool
) -> tuple[Tensor, ConvolutionOptions]:
    """Return the inputs, padded where the padding is asymmetric, and the options of the convolution."""

    def each(name: str, default: int) -> list[int]:
        value = a.get(name, default)
        value = [index(v) for v in (value if isinstance(value, list | tuple) else [value])]
        return value * dims if len(value) == 1 else value

    dilation, padding = each("dilation", 1), [0] * dims
    if a.get("padding") == "same":
        reach = [step * (size - 1) for step, size in zip(dilation, weight.shape[2:], strict=True)]
        x = F.pad(x, [side for r in reversed(reach) for side in (r // 2, r - r // 2)])
    elif a.get("padding") != "valid":
        padding = each("padding", 0)
    output_padding = each("output_padding", 0)
    options = ConvolutionOptions(
        each("stride", 1), padding, dilation, transposed, output_padding, a.get("groups", 1)
    )
    return x, options


@final
@dataclass(frozen=True)
class ConvolutionGradient(ParameterGradient):
    """G of a kernel that is convolved with `inputs`."""

    inputs: Tensor  # (n, channels, ...)
    deltas: Tensor  # (n, d, outputs, ...)
    kernel: Tensor
    options: ConvolutionOptions

    @property
    def dtype(self) -> torch.dtype:
        """The floating type of G."""
        return self.deltas.dtype

    def self_gram(self) -> Tensor:
        """Return G Gᵀ, from products of positions where these are fewer than the entries of G."""
        known = "_dense" in self.__dict__ and not self._positions_are_cheaper
        if known or self._dense_is_cheaper:
            k, n, d, _ = self._dense.shape
            if d == 1:
                return squared_norms(self._dense.flatten(0, 1)).view(k, n, 1, 1).sum(0)
            return torch.stack([gram_from_rows(part) for part in self._dense]).sum(0)
        with products_like_convolutions(self.inputs.device):
            products = self.options.window_products(self.inputs, self.kernel.shape[2:], self.deltas.shape[3:])
            return gram_from_positions(products, self.deltas.flatten(3).mT)

    @property
    def _positions(self) -> int:
        return prod(self.inputs.shape[2:] if self.options.transposed else self.deltas.shape[3:])

    @property
    def _dense_is_cheaper(self) -> bool:
        if self.options.transposed or self.options.groups > 1:
            return True
        d, o, t, i = self.deltas.shape[1], len(self.kernel), self._positions, self.kernel[0].numel()
        sides = prod(self.kernel.shape[2:])
        pixels = prod(s + 2 * p for s, p in zip(self.inputs.shape[2:], self.options.padding, strict=True))
        products = min(pixels**2 * self.inputs.shape[1], t * t * i) + t * t * d * o + d * d * t * o
        shifting = 40 * t * t * (sides + 4 * d * d)  # shifted sums: bound by memory, not arithmetic
        return d * t * i * o + d * d * i * o <= products + shifting

    @property
    def _positions_are_cheaper(self) -> bool:
        """Whether a CPU has G Gᵀ sooner from few positions than from a G that is there, cast to float64; measured."""
        d, o, t, i = self.deltas.shape[1], len(self.kernel), self._positions, self.kernel[0].numel()
        nanoseconds = t * t * i / 10 + (t * t * d * o + d * d * t * o) / 4
        return self.inputs.device.type == "cpu" and d > 1 and nanoseconds < d * i * o

    def differentiable(self) -> ParameterGradient:
        """Return the same gradients by differentiable operations: dense, or factored by positions."""
        if not self._dense_is_cheaper:
            windows = self.options.windows(self.inputs, self.kernel.shape[2:])
            return FactoredGradient(windows, self.deltas.flatten(3).mT)
        on_cpu = self.inputs.device.type == "cpu"  # elsewhere, convolutions of many groups are slow
        if self.options.transposed or self.options.groups > 1 or not on_cpu:
            return DenseGradient(self._from_windows())
        return DenseGradient(_DenseInGraph.apply(self.inputs, self.deltas, self.kernel, self.options))

    def rows(self) -> Tensor:
        """Return G."""
        if self._strategy != "shifts":
            return self._dense[0]  # in the order of the kernel
        n, d = self.deltas.shape[:2]
        out = self.inputs.new_empty(n, d, self.kernel.numel())
        self.write(out)
        return out

    def write(self, out: Tensor) -> None:
        """Write G to `out`."""
        if "_dense" not in self.__dict__ and self._strategy == "per_sample":
            self._per_sample(out)
        elif "_dense" not in self.__dict__ and self._strategy == "groups":
            self._write_groups(out)
        elif "_dense" not in self.__dict__ and out.device.type != "cpu":  # in order; permuting would be slow
            out.copy_(self._from_windows())
        else:
            k, *_, r = self._dense.shape
            out.unflatten(2, (r, k)).copy_(self._dense.permute(1, 2, 3, 0))

    def vjp(self, weights: Tensor) -> Tensor:
        """Return Σ Gᵀ w, from G if it is dense already, else by the kernel's backward on weighted output gradients."""
        if "_dense" in self.__dict__:
            sums = weights.flatten(0, 1).T @ self._dense.flatten(1, 2)
            return sums.permute(1, 2, 0).flatten(1)
        if self.options.transposed or self.options.groups > 1:
            return concatenate([self._vjp_columns(column) for column in weights.split(1, dim=2)], 0)
        return self._vjp_columns(weights)

    def _vjp_columns(self, weights: Tensor) -> Tensor:
        """Return Σ Gᵀ w of a few columns, as the outputs of one larger kernel."""
        c, n = weights.shape[2], len(weights)
        deltas = torch.einsum("ndc,ndq->ncq", weights, self.deltas.flatten(2))
        kernel = self.kernel if c == 1 else self.kernel.repeat(c, *[1] * (self.kernel.dim() - 1))
        shape = (n, c * self.deltas.shape[2], *self.deltas.shape[3:])
        return self.options.kernel_gradient(self.inputs, deltas.view(shape), kernel).reshape(c, -1)

    def jvp(self, directions: Tensor) -> Tensor:
        """Return G u, from G if it is dense already, else by a convolution with u.

        Several directions are outputs of one larger kernel.
        """
        if "_dense" in self.__dict__ and self.deltas.shape[1] <= self._positions:
            return self._jvp_dense(directions)
        plain = not self.options.transposed and self.options.groups == 1
        parts = [directions] if plain else directions.split(1)
        return concatenate([self._jvp_directions(some) for some in parts], 2)

    def _jvp_directions(self, directions: Tensor) -> Tensor:
        c = len(directions)
        kernel = directions.reshape(c * self.kernel.shape[0], *self.kernel.shape[1:])
        transformed = self.options.forward(self.inputs, kernel)
        return product(self.deltas.flatten(2), transformed.reshape(len(self.inputs), c, -1))

    @property
    def column_entries(self) -> int:
        """Numbers that a column takes: a sum with two kernels, and output gradients of one output in two orders."""
        return (COPIES + 2) * self.kernel.numel() + 2 * self.deltas[:, 0].numel()

    def _jvp_dense(self, directions: Tensor) -> Tensor:
        k, n, d, r = self._dense.shape
        by_offset = directions.view(len(directions), r, k)
        total = sum(product(self._dense[i].flatten(0, 1), by_offset[:, :, i]) for i in range(k))
        assert isinstance(total, Tensor)
        return total.unflatten(0, (n, d))

    def project_two_sided(self, left: Tensor, right: Tensor) -> Tensor:
        """Return Lᵀ G R = Σ_t (Lᵀ δ_t) (Rᵀ a_t)ᵀ: a convolution with R as the kernel has Rᵀ a_t of all windows."""
        n, d, o = self.deltas.shape[:3]
        i, t = self.kernel[0].numel(), self._positions
        plain = not self.options.transposed and self.options.groups == 1
        is_view = (left.shape[1], right.shape[1]) != (o, i)  # the parameter has other sides
        if not plain or is_view or ("_dense" in self.__dict__ and d * o * i < t * (i + d * o)):
            return super().project_two_sided(left, right)
        blocks, _, k = right.shape
        kernel = right.mT.reshape(blocks * k, *self.kernel.shape[1:]).to(self.dtype)
        inputs = self.options.forward(self.inputs, kernel).reshape(n, 1, blocks, k, t)
        with products_like_convolutions(self.inputs.device):
            deltas = project_last(self.deltas.flatten(3).mT, left)
            return sum_positions(deltas, inputs.to(deltas.dtype).permute(0, 1, 4, 2, 3))

    def part(self, where: slice | Tensor) -> "ConvolutionGradient":
        """Return the gradients of some of the samples."""
        return ConvolutionGradient(self.inputs[where], self.deltas[where], self.kernel, self.options)

    def blocks(self) -> Iterator["ConvolutionGradient"]:
        """Yield the gradients of consecutive samples, on a CPU of so few that G and the windows stay in its cache."""
        n = len(self.inputs)
        size = equal_size(n, self._samples_in_cache) if self.inputs.device.type == "cpu" else n
        if size >= n:
            yield self
            return
        for start in range(0, n, size):
            yield self.part(slice(start, start + size))

    @property
    def _samples_in_cache(self) -> int:
        """Of how many samples G, and the windows or what takes their place, stay in a CPU's cache."""
        read = self._positions * self.kernel[0].numel()
        if self._strategy == "groups":
            read = max(self.inputs[0].numel(), self.deltas[0].numel())
        return max(1, CACHED // max(1, read, self.deltas.shape[1] * self.kernel.numel()))

    @cached_property
    def _strategy(self) -> str:
        """How to compute G: with torch's backward of samples as groups or one by one, from shifts, or from windows."""
        d, o, t = self.deltas.shape[1], len(self.kernel), self._positions
        on_cpu = self.inputs.device.type == "cpu"
        if self._groups_are_fastest:
            return "groups"
        if on_cpu and d == 1 and t * self.kernel[0].numel() * o >= 2_000_000:
            return "per_sample"
        # On a GPU, shifts are many small products: 1.2 to 2.5 times the time of windows (3 × 3, an H200, 2026-11-19).
        is_plain = (
            not self.options.transposed and self.options.groups == 1 and set(self.options.stride) == {1}
        )
        return "shifts" if on_cpu and d == 1 and is_plain else "windows"

    @property
    def _groups_are_fastest(self) -> bool:
        """Whether oneDNN has G sooner, with a group of channels for each sample: no window is copied.

        Mostly .35 to .7 of the time with AVX-512; with AVX2 likewise for one output, and about 1 for four (2026-11-19).
        """
        options, d, channels = self.options, self.deltas.shape[1], self.inputs.shape[1]
        if self.inputs.device.type != "cpu" or not (HAS_ONEDNN and torch.backends.mkldnn.enabled):
            return False
        if options.transposed or options.groups > 1 or not self.inputs.dtype == self.dtype == torch.float32:
            return False
        strided = set(options.stride) != {1} and d == 1 and channels < FEWEST_CHANNELS
        return prod(self.kernel.shape[2:]) > 1 and self._positions >= FEWEST_POSITIONS and not strided

    @cached_property
    def _dense(self) -> Tensor:
        """G as (k, n, d, numel / k): k = 1, or the number of offsets of the kernel."""
        if self._strategy == "shifts":
            return self._from_shifts()
        if self._strategy == "windows":
            return self._from_windows().unsqueeze(0)
        if self._strategy == "groups" and len(self.inputs) <= self._samples_in_cache:
            return self._from_groups(self.inputs, self.deltas).unsqueeze(0)
        out = self.inputs.new_empty(1, *self.deltas.shape[:2], self.kernel.numel())
        (self._write_groups if self._strategy == "groups" else self._per_sample)(out[0])
        return out

    def _per_sample(self, out: Tensor) -> None:
        """Compute G sample by sample: on a CPU, torch's backward is faster than unfolding for large images."""
        for i in range(out.shape[0]):
            for j in range(out.shape[1]):
                inputs, deltas = self.inputs[i : i + 1], self.deltas[i : i + 1, j]
                out[i, j] = self.options.kernel_gradient(inputs, deltas, self.kernel).flatten()

    def _write_groups(self, out: Tensor) -> None:
        """Write G to `out`, of a few samples at a time."""
        size = self._samples_in_cache
        parts = zip(self.inputs.split(size), self.deltas.split(size), out.split(size), strict=True)
        for inputs, deltas, rows in parts:
            rows.copy_(self._from_groups(inputs, deltas))

    def _from_groups(self, inputs: Tensor, deltas: Tensor) -> Tensor:
        """Compute G of some samples by torch's backward: samples are groups, outputs further channels."""
        n, d, o = deltas.shape[:3]
        kernel = self.kernel.new_empty(()).expand(n * d * o, *self.kernel.shape[1:])  # only its shape is read
        images, channels = inputs.flatten(0, 1).unsqueeze(0), deltas.flatten(0, 2).unsqueeze(0)
        rows = self.options._replace(groups=n).kernel_gradient(images, channels, kernel)
        return rows.reshape(n, d, -1)

    def _from_windows(self) -> Tensor:
        """Compute G as a product of one factor with windows of the other, for each group of channels."""
        n, d = self.deltas.shape[:2]
        inputs, sides, g = self.inputs.unsqueeze(1), self.kernel.shape[2:], self.options.groups
        met, other = (self.deltas, inputs) if self.options.transposed else (inputs, self.deltas)
        images = met.unflatten(2, (g, -1)).flatten(0, 2)
        windows = self.options.windows(images, sides).unflatten(0, (n, met.shape[1], g))
        left = other.flatten(3).unflatten(2, (g, -1))
        with products_like_convolutions(self.inputs.device):
            if self.options.transposed:
                return (left @ windows).reshape(n, d, -1)
            # all outputs in one product: windows are read once
            rows = left.transpose(1, 2).flatten(2, 3) @ windows[:, 0]
        return rows.unflatten(2, (d, -1)).transpose(1, 2).reshape(n, d, -1)

    def _from_shifts(self) -> Tensor:
        """Compute G by a product for each offset of the kernel, with shifted inputs: no window is copied.

        With rows as long as the padded ones in both factors, a shift along any dimension is a shift of the flat tensor.
        """
        pixels, sides = self.options.pad(self.inputs), self.kernel.shape[2:]
        n, d, o = self.deltas.shape[:3]
        row = [int(prod(pixels.shape[3 + i :])) for i in range(len(sides))]  # pixels that a step skips
        missing = [p - s for p, s in zip(pixels.shape[3:], self.deltas.shape[4:], strict=True)]
        deltas = F.pad(self.deltas, [side for m in reversed(missing) for side in (0, m)]).flatten(3)
        t = deltas.shape[3]
        places = itertools.product(*map(range, sides))
        steps = [
            sum(p * r * e for p, r, e in zip(at, row, self.options.dilation, strict=True)) for at in places
        ]
        flat = F.pad(pixels.flatten(2), (0, max(0, t + max(steps) - prod(pixels.shape[2:]))))
        left = deltas.flatten(1, 2)
        products = flat.new_empty(len(steps), n, d * o, flat.shape[1])
        with products_like_convolutions(self.inputs.device):
            for place, step in enumerate(steps):
                torch.bmm(left, flat[:, :, step : step + t].mT, out=products[place])
        return products.view(len(steps), n, d, -1)


class _DenseInGraph(torch.autograd.Function):
    """G by the fastest strategy; its backward is one convolution with a group for each sample."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, deltas: Tensor, kernel: Tensor, options: ConvolutionOptions
    ) -> Tensor:
        ctx.save_for_backward(inputs, deltas)
        ctx.options, ctx.sides = options, kernel.shape[1:]
        return ConvolutionGradient(inputs, deltas, kernel, options).rows()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, Tensor, None, None]:
        inputs, deltas = ctx.saved_tensors
        n, d, o = deltas.shape[:3]
        kernels = grad_outputs[0].reshape(n * d * o, *ctx.sides)
        each = ctx.options._replace(groups=n)  # samples as groups of channels
        images = inputs.reshape(1, -1, *inputs.shape[2:])
        for_deltas = each.forward(images, kernels).view_as(deltas)
        grouped = deltas.reshape(1, -1, *deltas.shape[3:])
        only_inputs = [True, False, False]
        for_inputs = torch.ops.aten.convolution_backward(grouped, images, kernels, None, *each, only_inputs)[
            0
        ]
        return for_inputs.view_as(inputs), for_deltas, None, None
