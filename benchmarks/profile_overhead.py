"""What share of a statistic's time is spent outside of convolutions and matrix products?

A small ResNet (78 k parameters) on images of 32 × 32 with ten classes, one CPU thread. A plain training epoch and each
statistic are recorded by torch.profiler, and every operation is assigned to one of four kinds: convolutions and matrix
products, other arithmetic (norms, activations, sums), copies and allocation, and what is left: Python.

    python benchmarks/profile_overhead.py                 256 images, about a minute
    python benchmarks/profile_overhead.py --top 15        also the operations that take longest
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import likewise as lw

PRODUCTS = ("convolution", "mkldnn", "addmm", "bmm", "aten::mm", "baddbmm", "dot", "addmv", "aten::mv")
COPIES = (
    "copy_",
    "empty",
    "clone",
    "contiguous",
    "aten::cat",
    "zeros",
    "zero_",
    "fill_",
    "constant_pad",
    "im2col",
)
COPIES += ("resize", "aten::stack", "to_copy", "index", "set_", "lift")


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o)
        self.second, self.norm2 = nn.Conv2d(o, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o)
        same = stride == 1 and i == o
        self.shortcut = nn.Identity() if same else nn.Conv2d(i, o, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.second(F.relu(self.norm1(self.first(x)))))
        return F.relu(y + self.shortcut(x))


def small_resnet() -> nn.Module:
    """Return a ResNet of about 78 thousand parameters."""
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    blocks = [Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def kind(name: str) -> str:
    if any(part in name for part in PRODUCTS):
        return "products"
    return "copies" if any(part in name for part in COPIES) else "other"


def seconds(function: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Return the median of the CPU seconds, and their spread."""
    taken = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        taken.append(time.process_time() - start)
    return statistics.median(taken), max(taken) - min(taken)


def shares(function: Callable[[], Any], top: int) -> str:
    """Return the share of each kind of operation in a recorded run; what they leave of its time is Python's."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        start = time.perf_counter()
        function()
        total = time.perf_counter() - start
    sums = {"products": 0.0, "other": 0.0, "copies": 0.0}
    events = recorded.key_averages()
    for event in events:
        if event.key.startswith("aten::"):
            sums[kind(event.key)] += event.self_cpu_time_total / 1e6
    if top:
        print(events.table(sort_by="self_cpu_time_total", row_limit=top, max_name_column_width=50))
    sums["Python"] = max(0.0, total - sum(sums.values()))
    parts = ", ".join(f"{name} {100 * value / total:.0f} %" for name, value in sums.items())
    return f"{parts}; copies and Python {100 * (sums['copies'] + sums['Python']) / total:.0f} %"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--top", type=int, default=0)
    a = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = small_resnet().eval()
    x, y = torch.randn(a.samples, 3, 32, 32), torch.arange(a.samples) % 10

    def epoch() -> None:
        for start in range(0, a.samples, a.batch):
            model.zero_grad(set_to_none=True)
            part = slice(start, start + a.batch)
            F.cross_entropy(model(x[part]), y[part]).backward()

    epoch()
    unit, spread = seconds(epoch, a.repeats)
    print(
        f"torch {torch.__version__}, one thread, {sum(p.numel() for p in model.parameters()):,} parameters, "
        f"{a.samples} images; plain epoch {unit:.3f} s (spread {spread:.3f})"
    )
    print(f"{'plain epoch':34}  1.00 epochs: {shares(epoch, a.top)}", flush=True)
    readouts = {"label_against_rest": lw.label_against_rest, "projected_outputs(4)": lw.projected_outputs(4)}
    tasks = {"soft_neighbors": lw.soft_neighbors, "sketch": lambda gram: lw.nearest(gram, 10, sketch=256)}
    for readout_name, readout in readouts.items():
        for name, statistic in tasks.items():
            gram = lw.GramMatrix(lw.Network(model, readout), lw.batches((x, y), a.batch))
            statistic(gram)
            run = lambda gram=gram, statistic=statistic: statistic(gram)  # noqa: E731
            total, spread = seconds(run, a.repeats)
            found = shares(run, a.top)
            print(
                f"{name + ', ' + readout_name:34} {total / unit:5.2f} epochs (spread {spread / unit:.2f}, chunks of "
                f"{gram.engine.batch_size}): {found}",
                flush=True,
            )


if __name__ == "__main__":
    main()
