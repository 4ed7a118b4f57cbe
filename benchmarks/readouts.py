"""How close few random combinations of the outputs come to all of them.

Networks with 10, 100 and 1,000 classes (the digits of scikit-learn; Gaussian clusters), trained until most samples are
right. For each r: k^C of `projected_outputs(r)` against that of `all_outputs`, over all pairs of different samples.

    python benchmarks/readouts.py            # one thread, about five minutes
"""

import argparse
import time

import torch
from torch import Tensor, nn

import likewise as lw

SAMPLES, FEWER = 40, 16  # fewer of 1,000 outputs, whose exact blocks are large
HIDDEN, SEEDS, NEAREST = 16, 5, 5
COMBINATIONS = (1, 2, 4, 8, 16, 32)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--outputs", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| outputs d | accuracy | combinations r | correlation, plain | correlation, centered | bias | "
        "spread | five nearest kept | CPU seconds |\n|" + "---|" * 9
    )
    for d in options.outputs:
        report(d, options.seeds)


def report(d: int, seeds: int) -> None:
    """Print the rows of one network."""
    model, x, accuracy = trained(d)
    exact, seconds = similarities(model, x, lw.all_outputs)
    for r in [r for r in COMBINATIONS if r < d]:
        found = [similarities(model, x, lw.projected_outputs(r, seed)) for seed in range(seeds)]
        plain, centered = (torch.stack([matrices[i] for matrices, _ in found]) for i in range(2))
        off = ~torch.eye(len(x), dtype=torch.bool)
        error = (plain - exact[0])[:, off]
        shown = [
            f"{d:,}",
            f"{accuracy:.0%}",
            str(r),
            *(f"{agreement(a, b):.3f}" for a, b in zip((plain, centered), exact, strict=True)),
            f"{error.mean():+.3f}",
            f"{(error - error.mean()).square().mean().sqrt():.3f}",
            f"{kept(centered, exact[1]):.0%}",
            f"{sum(t for _, t in found) / seeds:.1f}",
        ]
        print("| " + " | ".join(shown) + " |", flush=True)
    print(f"| {d:,} | {accuracy:.0%} | all | 1 | 1 | 0 | 0 | 100% | {seconds:.1f} |", flush=True)


def trained(d: int) -> tuple[nn.Module, Tensor, float]:
    """Return a network of d classes, samples to compare, and its accuracy on the training data."""
    torch.manual_seed(0)
    if d == 10:
        from sklearn.datasets import load_digits

        digits = load_digits()
        x, y = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    else:
        centers = torch.randn(d, 64)
        y = torch.arange(d).repeat(max(2, 2000 // d))
        x = (centers[y] + 0.5 * torch.randn(len(y), 64)) / 2
    model = nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, d)
    )
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    few = torch.randperm(len(x))[: SAMPLES if d < 1000 else FEWER]
    return model.eval(), x[few], float((model(x).argmax(1) == y).double().mean())


def similarities(model: nn.Module, x: Tensor, readout: lw.readouts.Readout) -> tuple[list[Tensor], float]:
    """Return k^C, plain and centered, and the CPU seconds that the plain one took."""
    gram = lw.GramMatrix(lw.Network(model, readout), x, max_memory=2**32)
    start = time.process_time()
    plain = gram.dense()
    return [plain, gram.with_centering(True).dense()], time.process_time() - start


def agreement(found: Tensor, exact: Tensor) -> float:
    """Return the mean correlation, over seeds, of similarities of different samples."""
    off = ~torch.eye(len(exact), dtype=torch.bool)
    return float(
        torch.stack([torch.corrcoef(torch.stack([one[off], exact[off]]))[0, 1] for one in found]).mean()
    )


def kept(found: Tensor, exact: Tensor) -> float:
    """Return the share of each sample's nearest that are the same."""
    own = torch.eye(len(exact), dtype=torch.bool)
    best = exact.masked_fill(own, -2).topk(NEAREST, 1).indices
    near = [one.masked_fill(own, -2).topk(NEAREST, 1).indices for one in found]
    return float(
        torch.stack([(one[:, :, None] == best[:, None]).double().sum() / best.numel() for one in near]).mean()
    )


if __name__ == "__main__":
    main()
