"""Products with many columns of weights: one direction for each column and output, or gradients formed once for all?

A ResNet of 78 k parameters, random images, sums Σ k(x, x') w(x') of several columns both ways, in plain epochs of
forward and backward passes; and the gradients of 3 × 3 kernels by windows and by shifted inputs.

    python benchmarks/columns.py                       one CPU thread, about 3 minutes
    python benchmarks/columns.py --kernels --device cuda
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import likewise as lw
from likewise.engines.convolution import ConvolutionGradient, ConvolutionOptions
from likewise.gram.products import LinearProducts

KERNELS = ((64, 56), (128, 28), (256, 14), (512, 7))  # channels and sides of images, as in a ResNet-50


def seconds(function: Callable[[], Any], repeats: int, cuda: bool) -> float:
    """Return the median of CPU seconds, or on a GPU of wall-clock seconds."""
    found = []
    for _ in range(repeats + 1):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter() if cuda else time.process_time()
        function()
        if cuda:
            torch.cuda.synchronize()
        found.append((time.perf_counter() if cuda else time.process_time()) - start)
    return statistics.median(found[1:])


def compare_columns(n: int, repeats: int) -> None:
    """Print what sums of several columns cost by gradients formed once, and by directions."""
    from analyze import small_resnet  # which imports what a run needs

    x, y = torch.randn(n, 3, 32, 32), torch.randint(0, 10, (n,))
    model = small_resnet(2).eval()

    def epoch() -> None:
        for start in range(0, n, 128):
            part = slice(start, start + 128)
            F.cross_entropy(model(x[part]), y[part]).backward()

    unit = seconds(epoch, 3, False)
    print(
        f"a plain epoch of {n} images: {unit:.2f} s\n\n| outputs | columns | kernel | formed | directions |\n"
        + "|---" * 5
        + "|"
    )
    for readout in (lw.label_against_rest, lw.class_contrasts(4), lw.all_outputs):
        gram = lw.GramMatrix(lw.Network(model, readout), (x, y))
        for c in (3, 6, 12):
            weights = torch.randn(n, c, dtype=torch.float64)
            for name, kernel in (("correlation", lw.CORRELATION), ("inner product", lw.INNER_PRODUCT)):
                products, coefficients = gram.with_kernel(kernel).products(), kernel.coefficients(gram.d)
                formed = partial(products._reduced_by_output, weights, coefficients.diagonal())
                directions = partial(LinearProducts.reduced, products, weights, coefficients)
                costs = [seconds(way, repeats, False) / unit for way in (formed, directions)]
                print(f"| {gram.d} | {c} | {name} | {costs[0]:.1f} | {costs[1]:.1f} |", flush=True)


def compare_kernels(device: str, repeats: int) -> None:
    """Print the milliseconds of gradients of 3 × 3 kernels by windows and by shifted inputs, in TF32 on a GPU."""
    cuda = device == "cuda"
    torch.backends.cuda.matmul.allow_tf32 = True
    print("| images | channels | side | windows | shifts |\n" + "|---" * 5 + "|")
    for n in (64, 16):
        for channels, side in KERNELS:
            inputs = torch.randn(n, channels, side, side, device=device)
            kernel = torch.randn(channels, channels, 3, 3, device=device)
            deltas = torch.randn(n, 1, channels, side, side, device=device)
            options = ConvolutionOptions([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
            gradient = ConvolutionGradient(inputs, deltas, kernel, options)
            windows, shifts = (
                1e3 * seconds(function, repeats, cuda)
                for function in (gradient._from_windows, gradient._from_shifts)
            )
            print(f"| {n} | {channels} | {side} | {windows:.2f} | {shifts:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="for --kernels")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--kernels", action="store_true", help="gradients of kernels instead")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore", lw.ReadoutNotice)
    print(
        f"torch {torch.__version__}, {torch.cuda.get_device_name() if given.device == 'cuda' else 'CPU, one thread'}"
    )
    if given.kernels:
        return compare_kernels(given.device, max(20, given.repeats))
    compare_columns(given.samples, given.repeats)


if __name__ == "__main__":
    main()
