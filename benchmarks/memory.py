"""Does the memory of the linear-time statistics grow with the data set?

Peak memory of a fresh process for each statistic and number N of samples: scikit-learn's digits, read
again and again so that the inputs themselves take no more room, and a net of 21 k parameters.

    python benchmarks/memory.py                  1,000 to 100,000 samples, about 20 minutes
    python benchmarks/memory.py --most 10000     about 2 minutes
"""

import argparse
import platform
import resource
import subprocess
import sys
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset

import likewise as lw

STATISTICS = {
    "soft_neighbors": lw.soft_neighbors,
    "uncertainty": lw.uncertainty,
    "denoising": lambda gram: lw.denoising(gram, draws=50),
}


class Digits(Dataset):
    """N digits: the 1,797 of scikit-learn, over and over."""

    def __init__(self, n: int) -> None:
        self.n, (images, labels) = n, load_digits(return_X_y=True)
        self.images, self.labels = torch.tensor(images, dtype=torch.float32) / 16, labels

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int):
        return self.images[i % len(self.images)], int(self.labels[i % len(self.labels)])


def measure(statistic: str, n: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.ReLU())]
    model = nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), *hidden, nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    )
    gram = lw.GramMatrix(model, Digits(n), max_memory=2**28)
    start = time.process_time()
    STATISTICS[statistic](gram)
    seconds = time.process_time() - start
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, seconds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--most", type=int, default=100_000)
    parser.add_argument("--one", nargs=2)
    arguments = parser.parse_args()
    if arguments.one:
        return measure(arguments.one[0], int(arguments.one[1]))
    print(f"{platform.processor() or platform.machine()}, one thread, torch {torch.__version__}")
    print(f"{'statistic':16}{'N':>9}{'peak MiB':>10}{'CPU-s':>8}{'ms a sample':>13}")
    for statistic in STATISTICS:
        for n in (1_000, 3_000, 10_000, 30_000, 100_000):
            if n <= arguments.most:
                command = [sys.executable, __file__, "--one", statistic, str(n)]
                out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
                peak, seconds = map(float, out)
                print(f"{statistic:16}{n:9,}{peak:10.0f}{seconds:8.1f}{1000 * seconds / n:13.2f}", flush=True)


if __name__ == "__main__":
    main()
