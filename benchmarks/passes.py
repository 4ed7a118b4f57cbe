"""What does N_S of a whole data set cost, in plain forward+backward epochs?

ResNet-18 for 32 × 32 images (11.2 M parameters), random images, evaluation mode; the reference engine
(per-sample gradients by torch.func.vmap, twice) beside the default one in the same run.

    python benchmarks/passes.py                       one CPU thread, about 3 minutes
    python benchmarks/passes.py --device cuda --samples 8192 --batch 512
"""

import argparse
import platform
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import likewise as lw


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o)
        self.second, self.norm2 = nn.Conv2d(o, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o)
        same = stride == 1 and i == o
        around = [] if same else [nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o)]
        self.around = nn.Sequential(*around)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.second(F.relu(self.norm1(self.first(x)))))
        return F.relu(y + self.around(x))


def resnet18(d: int) -> nn.Module:
    sizes = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
    sizes += [(128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
    stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    return nn.Sequential(
        *stem, *(Block(*s) for s in sizes), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, d)
    )


def clock(function, repeats: int, cuda: bool) -> tuple[float, float]:
    """Median and spread of CPU seconds, or of wall-clock seconds on a GPU."""
    now = time.perf_counter if cuda else time.process_time
    seconds = []
    for _ in range(repeats):
        if cuda:
            torch.cuda.synchronize()
        start = now()
        function()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(now() - start)
    return statistics.median(seconds), max(seconds) - min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--outputs", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", type=int, default=8, help="GiB for gradients")
    parser.add_argument("--skip-reference", action="store_true")
    parser.add_argument("--tf32", action="store_true")
    a = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cuda = a.device != "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = a.tf32
    model = resnet18(a.outputs).eval().to(a.device)
    x = torch.randn(a.samples, 3, 32, 32).to(a.device)

    def epoch() -> None:
        for part in x.split(a.batch):
            model.zero_grad(set_to_none=True)
            model(part).sum().backward()

    epoch()
    unit, spread = clock(epoch, a.repeats, cuda)
    model.zero_grad(set_to_none=True)
    name = torch.cuda.get_device_name() if cuda else f"{platform.machine()}, one thread"
    print(f"{name}, torch {torch.__version__}, {a.samples} samples, batches of {a.batch}, d = {a.outputs}")
    print(f"plain epoch {unit:.2f} s (spread {spread:.2f})")
    engines = ["layers"] if a.skip_reference else ["layers", "autograd"]
    for engine in engines:
        gram = lw.GramMatrix(model, lw.batches(x, a.batch), engine=engine, max_memory=a.memory * 2**30)
        start, _ = clock(lambda g=gram: g.engine, 1, cuda)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            lw.soft_neighbors(gram)
        median, spread = clock(lambda g=gram: lw.soft_neighbors(g), a.repeats, cuda)
        peak = f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if cuda else ""
        print(
            f"{engine:9} N_S {median / unit:6.2f} epochs (spread {spread / unit:.2f}){peak}; "
            f"set-up and check once {start / unit:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
