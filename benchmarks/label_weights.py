"""How much should votes, margins of training and reheated copies count in the suspicion of a label?

Networks that have memorized their labels, on images from number 20,000 on, which no table of docs/uses.md is measured
on: average precision of mean ranks with other weights than the shipped ones. 30 small networks (2,000 images each of
MNIST, Fashion-MNIST and CIFAR-10, half a minute of CPU time a network), and those of benchmarks/labels.py with fewer
images (`--net conv6`, three to five minutes each). What was computed is kept in --out, and not computed again.

    python benchmarks/label_weights.py --data DIR
    python benchmarks/label_weights.py --data DIR --net conv6
"""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from images import data_folder, images
from label_flags import net
from labels import default_method, fresh
from records import named, options
from scipy.stats import rankdata
from sklearn.metrics import average_precision_score
from torch import nn

import likewise as lw
from likewise.statistics.label_issues import ROUNDS, opinion_after, suspicion_from_votes
from likewise.statistics.neighbors import class_votes
from nets import evaluated, spoiled, trained


class Case(NamedTuple):
    """Noisy labels of some images, and how long a network is trained on them."""

    data: str
    noise: str
    share: float
    seed: int
    first: int
    count: int
    epochs: int
    judge_epochs: int  # of the network that tells which images are hard


FIRST_SEED = 5
NOISE = (("instance", 0.1), ("instance", 0.3), ("uniform", 0.05), ("uniform", 0.2), ("pair", 0.2))
LARGE = (
    Case("mnist", "instance", 0.1, 7, 20_000, 2500, 40, 4),
    Case("mnist", "pair", 0.2, 20, 23_000, 1500, 40, 4),
    Case("fashion-mnist", "pair", 0.2, 21, 24_500, 1500, 40, 4),
    Case("mnist", "uniform", 0.1, 22, 26_000, 1500, 40, 4),
)
RANKINGS = {  # weights of votes, margins of training (plain, early), margins while hot, votes of copies
    "votes": (1, 0, 0, 0, 0),
    "plain margins": (0, 1, 0, 0, 0),
    "early margins": (0, 0, 1, 0, 0),
    "votes, plain margins": (2, 2, 0, 0, 0),
    "votes, early margins": (2, 0, 2, 0, 0),
    "votes, early margins more": (1, 0, 4, 0, 0),
    "reheated": (2, 0, 0, 1, 2),
    "reheated, votes less": (1, 0, 0, 1, 2),
    "reheated alone": (0, 0, 0, 1, 2),
    "reheated, early margins": (2, 0, 2, 1, 2),
    "reheated, early margins more": (2, 0, 4, 1, 2),
    "reheated alone, early margins": (0, 0, 3, 1, 2),
}
BY_RATIO = {  # the same, and the exponent of the ratio of contested labels that the first weight is multiplied by
    "**votes, ratio⁴, early margins**": (2, 0, 2, 0, 0, 4),
    "reheated, ratio²": (2, 0, 0, 1, 2, 2),
    "**reheated, ratio⁴**": (2, 0, 0, 1, 2, 4),
    "reheated, ratio⁸": (2, 0, 0, 1, 2, 8),
    "**reheated, ratio⁴, early margins**": (2, 0, 2, 1, 2, 4),
}


def small_cases(seeds: list[int]) -> Iterator[Case]:
    for name in ("mnist", "fashion-mnist", "cifar10"):
        for kind, share in NOISE:
            for seed in seeds:
                yield Case(name, kind, share, seed, 30_000 + 2000 * (seed - FIRST_SEED), 2000, 60, 6)


def make(case: Case, large: bool) -> nn.Sequential:
    if large:
        return fresh(case.data, torch.device("cpu"))
    return net(3 if case.data == "cifar10" else 1)


def scores(case: Case, large: bool, folder: Path) -> dict[str, Any]:
    """Return what is known of each label of a memorized network, and which labels are wrong."""
    x, y = images(case.data, folder, first=case.first, count=case.count)
    torch.manual_seed(500 + case.seed)
    chances = None
    if case.noise == "instance":
        judge = trained(make(case, large), x, y, case.judge_epochs, case.seed).model
        chances = evaluated(judge, x).softmax(1)
    labels = spoiled(y, case.noise, case.share, case.seed, chances)
    torch.manual_seed(case.seed)
    fit = trained(make(case, large), x, labels, case.epochs, case.seed)
    method = default_method(fit.model, x, labels)
    gram, sketch = lw.GramMatrix(method.net, (x, labels)), method.sketch or None
    votes = class_votes(gram, labels, sketch=sketch)
    hot = lw.reheat(gram.net, (x, labels), votes=votes, rounds=ROUNDS)
    after = opinion_after(gram, hot, sketch=sketch)
    outputs = evaluated(fit.model, x).softmax(1)
    known = suspicion_from_votes(votes, labels, outputs).suspicion
    parts = [known, -fit.margins, -fit.early_margins, -after.margins, after.ranks]
    contested = [float((cast.argmax(1) != labels).double().mean()) for cast in (votes, after.votes)]
    return {
        "scores": torch.stack([part.double() for part in parts]),
        "wrong": labels != y,
        "contested": contested,  # by the network's votes, and by its copies'
    }


def precision(found: dict[str, Any], weights: tuple[float, ...]) -> float:
    """Return the average precision of a weighted mean of ranks."""
    before, by_copies = found["contested"]
    by_record = float((found["scores"][2] > 0).double().mean())
    most = max(by_record if weights[2] else 0.0, by_copies if weights[4] else 0.0, before)
    first = weights[0] * (before / most) ** (weights[5] if len(weights) > 5 else 0)
    ranks = sum(
        weight * rankdata(part.numpy())
        for weight, part in zip((first, *weights[1:5]), found["scores"], strict=True)
        if weight
    )
    return float(average_precision_score(found["wrong"].numpy(), ranks))


def main() -> None:
    """Print the table."""
    arguments = options(__doc__, "label_weights")
    arguments.set_defaults(out=Path("out/label-weights"), seeds=[FIRST_SEED, FIRST_SEED + 1])
    data_folder(arguments)
    arguments.add_argument("--net", choices=("small", "conv6"), default="small")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    given.out.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[dict[str, Any]]] = {}
    large = given.net == "conv6"
    for case in LARGE if large else small_cases(given.seeds):
        file = given.out / f"{given.net} {named(case._asdict())}.pt".replace(" ", "-")
        if given.only not in file.stem:
            continue
        if not file.exists():
            torch.save(scores(case, large, given.data), file)
        found = torch.load(file)
        print(f"{file.stem}: contested {found['contested'][0]:.3f}, by copies {found['contested'][1]:.3f}")
        rows.setdefault(f"{case.data} {case.noise}" if large else case.noise, []).append(found)
    kinds = sorted(rows)
    print("| ranks of | weights | " + " | ".join(kinds) + " | mean |\n|" + "---|" * (len(kinds) + 3))
    every = [found for kind in kinds for found in rows[kind]]
    for name, weights in (RANKINGS | BY_RATIO).items():
        cells = [
            sum(precision(f, weights) for f in some) / len(some)
            for some in (*(rows[k] for k in kinds), every)
        ]
        print(f"| {name} | {weights} | " + " | ".join(f"{cell:.3f}" for cell in cells) + " |")


if __name__ == "__main__":
    main()
