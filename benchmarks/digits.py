"""Findings on scikit-learn's digits, of ten networks that memorized 5 % wrong labels.

Which readouts make neighbors that know of wrong labels? Does N_S tell who stands alone? How tight is the
bound on the shift? Means over networks (each its own seed, split of the digits and wrong labels), ± half of
the 95 % interval.

    python benchmarks/digits.py            about three minutes of one thread
"""

import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from scipy.stats import spearmanr
from sklearn.datasets import load_digits
from sklearn.metrics import average_precision_score
from torch import Tensor, nn
from tqdm import trange

import likewise as lw
from likewise.cli.demo import train_network
from likewise.statistics.label_issues import suspicion_from_votes

sys.path.append(str(Path(__file__).parent.parent / "experiments"))
from spread import interval

NETWORKS, SAMPLES, WRONG = 10, 1500, 0.05
READOUTS = {
    "all_outputs": lw.all_outputs,
    "log_probabilities": lw.log_probabilities,
    "sum of the outputs": lambda outputs, labels: outputs.sum(1, keepdim=True),
    "label_against_rest": lw.label_against_rest,
}


def digits(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return images, labels of which some are wrong, and which."""
    x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
    chance = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=chance)[:SAMPLES]
    x, y = x[order].float().view(-1, 1, 8, 8) / 16, y[order]
    wrong = torch.rand(len(y), generator=chance) < WRONG
    other = (y + torch.randint(1, 10, (len(y),), generator=chance)) % 10
    return x, torch.where(wrong, other, y), wrong


def centered(k: Tensor) -> Tensor:
    """Return similarities less what all samples share: a cosine again."""
    means = k.mean(1)
    left = k - means[:, None] - means + means.mean()
    scale = left.diagonal().clamp(min=1e-12).rsqrt()
    return left * scale[:, None] * scale


def suspicion(similar: Tensor, y: Tensor, exponent: int) -> Tensor:
    """Return how much votes by these similarities speak against each label."""
    votes = similar.clamp(min=0).pow(exponent).fill_diagonal_(0) @ nn.functional.one_hot(y).to(similar)
    return suspicion_from_votes(votes, y, dtype=torch.float64).suspicion


def alone(density: Tensor, distance: Tensor) -> Iterator[tuple[str, float]]:
    """Give how far the nearest is from the tenth with the least density, and from the others."""
    least = density <= density.quantile(0.1)
    yield "distance to the nearest, tenth with least", float(distance[least].mean())
    yield "distance to the nearest, others", float(distance[~least].mean())
    yield "rank correlation with that distance", float(spearmanr(density, distance).statistic)


def measured(seed: int) -> Iterator[tuple[str, float]]:
    x, y, wrong = digits(seed)
    model = train_network(x, y, epochs=60, seed=seed)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(x), y, reduction="none")
    yield "labels memorized", float((model(x).argmax(1) == y).float().mean())
    yield "precision of the loss", average_precision_score(wrong, loss)
    for name, readout in READOUTS.items():
        k = lw.GramMatrix(lw.Network(model, readout), (x, y)).dense().double()
        for kind, similar in (("plain", k), ("centered", centered(k))):
            for exponent in (4, 8, 16):
                found = suspicion(similar, y, exponent)
                yield f"precision, {name}, {kind}, {exponent}", average_precision_score(wrong, found)
        if name == "all_outputs":
            near = centered(k).fill_diagonal_(-1)
            local = near.clamp(min=0).pow(4).sum(1)
            for what, density in (("N_S", k.sum(1)), ("local density", local)):
                for about, value in alone(density, 1 - near.amax(1)):
                    yield f"{what}: {about}", value
    found = lw.denoising(lw.GramMatrix(model, x[:300]), exact=True)
    yield "shift of 300, median", float(found.shift.norm(dim=1).median())
    yield "bound of its length, median", float(found.bound.median())


def main() -> None:
    torch.set_num_threads(1)
    every = defaultdict(list)
    for seed in trange(NETWORKS, desc="networks", disable=None):
        for name, value in measured(seed):
            every[name].append(value)
    for name, values in every.items():
        print(f"{name:60} {sum(values) / len(values):10.3f} ± {interval(values):.3f}")


if __name__ == "__main__":
    main()
