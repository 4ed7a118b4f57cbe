"""Is max_memory kept? Peak memory of statistics, in shares of what was promised.

Network × statistic × readout × promise, each in a fresh process on a CPU: `counted` are the bytes of tensors alive at
once (MemoryMeter), `resident` is how far the process grew over what it took with model, data and one plain training
step; on a GPU `allocated` is torch.cuda.max_memory_allocated over what model and data take. Both include activations.

    python benchmarks/memory.py                          about 15 minutes on one thread
    python benchmarks/memory.py --rows conv,128          rows whose name contains both
    python benchmarks/memory.py --device cuda            ResNet-50 and ViT-B/16, 60 and 8 GiB
    python benchmarks/memory.py --growth 10000           does memory grow with the data set? 1,000 to 10,000 samples
"""

import argparse
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from networks import LanguageModel, VisionTransformer, resnet
from torch import nn
from torch.utils.data import Dataset

import likewise as lw
from likewise.engines import MemoryMeter

MIB = 2**20


class Network(NamedTuple):
    """A network and its data."""

    model: nn.Module
    inputs: Any
    labels: torch.Tensor
    step: Callable[[], Any]  # a plain training step of a few samples


def image_network(model: nn.Module, n: int, side: int, classes: int, device: str) -> Network:
    model = model.to(device)
    x, y = torch.randn(n, 3, side, side, device=device), torch.arange(n, device=device) % classes
    return Network(model, (x, y), y, lambda: F.cross_entropy(model(x[:4]), y[:4]).backward())


def conv_network(device: str) -> Network:
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()]
    layers += [nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(2)]
    return image_network(nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 10)), 96, 32, 10, device)


def small_vit(device: str) -> Network:
    return image_network(VisionTransformer(4, 96, 4, 4, 32, 10), 96, 32, 10, device)


def small_gpt2(device: str) -> Network:
    model, tokens = (
        LanguageModel(4, 96, 4, 1000, 64).to(device),
        torch.randint(0, 1000, (96, 64), device=device),
    )
    step = lambda: model(tokens[:4]).logsumexp(-1).mean().backward()  # noqa: E731
    return Network(model, {"input_ids": tokens}, torch.arange(96) % 4, step)


def resnet50(device: str) -> Network:
    return image_network(resnet(), 256, 224, 1000, device)


def vit_b16(device: str) -> Network:
    return image_network(VisionTransformer(), 256, 224, 1000, device)


STATISTICS: dict[str, Callable[[lw.GramMatrix, torch.Tensor], Any]] = {
    "soft_neighbors": lambda gram, _: lw.soft_neighbors(gram),
    "nearest": lambda gram, _: lw.nearest(gram, 10, sketch=None),
    "uncertainty": lambda gram, _: lw.uncertainty(gram),
    "label_suspicion": lambda gram, labels: lw.label_suspicion(gram, labels, sketch=None),
    "novelty": lambda gram, _: lw.novelty(gram, sketch=None),
    "sketch": lambda gram, _: lw.nearest(gram, 10, sketch=256),
}
READOUTS: dict[str, Any] = {
    "label_against_rest": lw.label_against_rest,
    "projected_outputs(4)": lw.projected_outputs(4),
    "all_outputs": lw.all_outputs,
    "sequence_log_likelihood": lw.sequence_log_likelihood(),
}
NETWORKS = {
    "conv": (conv_network, ["label_against_rest", "projected_outputs(4)", "all_outputs"]),
    "vit": (small_vit, ["label_against_rest", "projected_outputs(4)"]),
    "gpt2": (small_gpt2, ["sequence_log_likelihood", "projected_outputs(4)"]),
}
LARGE = {
    "resnet50": (resnet50, ["label_against_rest", "projected_outputs(4)"]),
    "vit-b16": (vit_b16, ["label_against_rest", "projected_outputs(4)"]),
}


class Row(NamedTuple):
    """One setting."""

    network: str
    statistic: str
    readout: str
    promise: int  # bytes

    @property
    def name(self) -> str:
        return f"{self.network},{self.statistic},{self.readout},{self.promise // MIB}"


def rows(device: str) -> list[Row]:
    networks = LARGE if device == "cuda" else NETWORKS
    promises = (60 * 2**30, 8 * 2**30) if device == "cuda" else (128 * MIB, 512 * MIB)
    return [
        Row(network, statistic, readout, promise)
        for network, (_, readouts) in networks.items()
        for readout in readouts
        for statistic in STATISTICS
        for promise in promises
    ]


def measure(row: Row, device: str) -> str:
    """Return the shares of the promise that a setting takes, and its batch size."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = {**NETWORKS, **LARGE}[row.network][0](device)
    network.step()
    network.model.zero_grad(set_to_none=True)
    network.model.eval()

    def run(n: int | None = None) -> lw.GramMatrix:
        data = lw.batches(network.inputs, 128, limit=n)
        gram = lw.GramMatrix(lw.Network(network.model, READOUTS[row.readout]), data, max_memory=row.promise)
        STATISTICS[row.statistic](gram, network.labels[:n])
        return gram

    start = time.process_time()
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        gram = run()
        peaks = f"allocated {(torch.cuda.max_memory_allocated() - before) / row.promise:5.2f}"
    else:
        run(12)  # loads the code that is imported late
        before = _resident_peak(reset=True)
        gram = run()
        grown = _resident_peak() - before
        with MemoryMeter() as meter:
            run()
        peaks = f"counted {meter.peak / row.promise:5.2f}  resident {grown / row.promise:5.2f}"
    return f"{peaks}  batch {gram.engine.batch_size}  {time.process_time() - start:.1f} s"


def _resident_peak(reset: bool = False) -> int:
    """Return the largest resident size of this process, since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    line = next(
        text for text in Path("/proc/self/status").read_text().splitlines() if text.startswith("VmHWM")
    )
    return int(line.split()[1]) * 1024


GROWING = {
    "soft_neighbors": lw.soft_neighbors,
    "uncertainty": lw.uncertainty,
    "denoising": lambda gram: lw.denoising(gram, draws=50),
}


class Digits(Dataset):
    """N digits: the 1,797 of scikit-learn, over and over, so that the inputs themselves take no more memory."""

    def __init__(self, n: int) -> None:
        from sklearn.datasets import load_digits

        self.n, (images, labels) = n, load_digits(return_X_y=True)
        self.images, self.labels = torch.tensor(images, dtype=torch.float32) / 16, labels

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int):
        return self.images[i % len(self.images)], int(self.labels[i % len(self.labels)])


def measure_growth(statistic: str, n: int) -> str:
    """Return peak MiB and CPU seconds of a statistic of n digits and a net of 21 k parameters."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())]
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), *hidden, nn.Linear(64, 1))
    gram = lw.GramMatrix(model, Digits(n), max_memory=2**28)
    start = time.process_time()
    GROWING[statistic](gram)
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return f"{peak:10.0f} MiB{seconds:8.1f} CPU-s{1000 * seconds / n:9.3f} ms a sample"


def in_new_process(*arguments: str) -> str:
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True)
    if done.returncode:
        return f"failed: {(done.stderr.strip().splitlines() or ['?'])[-1][:200]}"
    return done.stdout.strip().splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", default="", help="parts of the names of rows, separated by commas")
    parser.add_argument("--growth", type=int, metavar="N", help="measure growth up to N samples instead")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.one and a.growth:
        return print(measure_growth(a.one, a.growth))
    if a.one:
        network, statistic, readout, promise = a.one.split(",")
        return print(measure(Row(network, statistic, readout, int(promise) * MIB), a.device))
    machine = torch.cuda.get_device_name() if a.device == "cuda" else f"{platform.machine()}, one thread"
    print(f"{machine}, torch {torch.__version__}")
    if a.growth:
        for statistic in GROWING:
            for n in (1_000, 3_000, 10_000, 30_000, 100_000):
                if n <= a.growth:
                    found = in_new_process("--growth", str(n), "--one", statistic)
                    print(f"{statistic:16}{n:9,}{found}", flush=True)
        return None
    for row in rows(a.device):
        if all(part in row.name for part in a.rows.split(",")):
            print(f"{row.name:58}{in_new_process('--one', row.name, '--device', a.device)}", flush=True)


if __name__ == "__main__":
    main()
