"""What does recording cost, as a share of a training step?

A step is forward, cross entropy, backward and SGD on random images; recorded, `watch.update` follows. Blocks of plain
and recorded steps alternate; a pair of blocks gives one ratio. A block holds as many steps as wait on the device, so
that adding them up is part of it.

    python benchmarks/watch.py                    one CPU thread, about 2 minutes
    python benchmarks/watch.py --device cuda --nets mlp paper resnet18
"""

import argparse
import platform
import statistics
import time

import torch
import torch.nn.functional as F
from passes import resnet18
from torch import nn
from training_terms import paper_net

import likewise as lw
from likewise.watch import PENDING_UPDATES

SAMPLES = 50_000


def small_net() -> nn.Module:
    """Two linear layers: a step that takes next to nothing."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))


NETS = {
    "mlp": (small_net, (1, 28, 28)),
    "paper": (paper_net, (1, 28, 28)),
    "resnet18": (lambda: resnet18(10), (3, 32, 32)),
}


class Steps:
    """Training steps of one network on random batches."""

    def __init__(self, model: nn.Module, shape: tuple[int, ...], batch: int, device: str) -> None:
        self.model, self.device = model.to(device), device
        self.optimizer = torch.optim.SGD(model.parameters(), 1e-4)
        self.x = torch.randn(batch, *shape, device=device)
        self.labels = torch.randint(0, 10, (SAMPLES,))
        self.watch = lw.Watch(SAMPLES)

    def seconds(self, count: int, recorded: bool) -> float:
        """Seconds of so many steps: of the CPU, or on a GPU of the wall clock."""
        ids = torch.randint(0, SAMPLES, (count, len(self.x)))
        labels = self.labels[ids].to(self.device)
        now = time.process_time if self.device == "cpu" else time.perf_counter
        self.finish()
        start = now()
        for i, y in zip(ids, labels, strict=True):
            logits = self.model(self.x)
            self.optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(logits, y).backward()
            self.optimizer.step()
            if recorded:
                self.watch.update(logits, y, i)
        self.finish()
        return now() - start

    def finish(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--nets", nargs="+", default=["mlp", "paper"], choices=list(NETS))
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=PENDING_UPDATES, help="steps in a block")
    a = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    name = torch.cuda.get_device_name() if a.device != "cpu" else f"{platform.machine()}, one thread"
    print(
        f"{name}, torch {torch.__version__}, batch {a.batch}, {SAMPLES:,} samples, {a.pairs} pairs of blocks"
    )
    for net in a.nets:
        build, shape = NETS[net]
        steps = Steps(build(), shape, a.batch, a.device)
        steps.seconds(3, recorded=True)
        pairs = []
        for k in range(a.pairs):  # which goes first changes from pair to pair
            first = steps.seconds(a.steps, recorded=bool(k % 2))
            second = steps.seconds(a.steps, recorded=not k % 2)
            pairs.append((second, first) if k % 2 else (first, second))
        plain = statistics.median(p for p, _ in pairs) / a.steps
        ratios = [recorded / p for p, recorded in pairs]
        print(
            f"{net}: plain step {1e3 * plain:.2f} ms, recorded / plain {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f})"
        )


if __name__ == "__main__":
    main()
