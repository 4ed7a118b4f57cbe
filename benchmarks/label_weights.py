"""How much should votes, margins of training and reheated copies count in the suspicion of a label?

30 small networks that have memorized their labels (2,000 images each from number 30,000 on of MNIST, Fashion-MNIST and
CIFAR-10, which no table of docs/uses.md is measured on): average precision of mean ranks with other weights than the
shipped ones. Takes half a minute of CPU time a network; what was computed is kept in --out, and not computed again.

    python benchmarks/label_weights.py --data DIR
"""

import warnings
from pathlib import Path
from typing import Any

import torch
from images import data_folder, images
from label_flags import net
from labels import default_method
from records import options
from scipy.stats import rankdata
from sklearn.metrics import average_precision_score
from torch import Tensor

import likewise as lw
from likewise.statistics.label_issues import ROUNDS, opinion_after, suspicion_from_votes
from likewise.votes import class_votes
from nets import evaluated, spoiled, trained

COUNT, EPOCHS, FIRST_SEED = 2000, 60, 5
NOISE = (("instance", 0.1), ("instance", 0.3), ("uniform", 0.05), ("uniform", 0.2), ("pair", 0.2))
WEIGHTS = {  # of votes, margins of training (plain, early), margins while hot, votes of copies
    "votes": (1, 0, 0, 0, 0),
    "plain margins": (0, 1, 0, 0, 0),
    "early margins": (0, 0, 1, 0, 0),
    "votes, plain margins": (2, 2, 0, 0, 0),
    "**votes, early margins**": (2, 0, 2, 0, 0),
    "votes, early margins more": (1, 0, 4, 0, 0),
    "**reheated**": (2, 0, 0, 1, 2),
    "reheated, votes less": (1, 0, 0, 1, 2),
    "reheated alone": (0, 0, 0, 1, 2),
    "**reheated, early margins**": (2, 0, 2, 1, 2),
    "reheated, early margins more": (2, 0, 4, 1, 2),
    "reheated alone, early margins": (0, 0, 3, 1, 2),
}


def scores(name: str, kind: str, share: float, seed: int, folder: Path) -> dict[str, Any]:
    """Return what is known of each label of a memorized network, and which labels are wrong."""
    x, y = images(name, folder, first=30_000 + COUNT * (seed - FIRST_SEED), count=COUNT)
    torch.manual_seed(500 + seed)
    chances = None
    if kind == "instance":
        chances = evaluated(trained(net(x.shape[1]), x, y, 6, seed).model, x).softmax(1)
    labels = spoiled(y, kind, share, seed, chances)
    torch.manual_seed(seed)
    fit = trained(net(x.shape[1]), x, labels, EPOCHS, seed)
    method = default_method(fit.model, x, labels)
    gram, sketch = lw.GramMatrix(method.net, (x, labels)), method.sketch or None
    votes = class_votes(gram, labels, sketch=sketch)
    hot = lw.reheat(gram.net, (x, labels), votes=votes, rounds=ROUNDS)
    after = opinion_after(gram, hot, sketch=sketch)
    outputs = evaluated(fit.model, x).softmax(1)
    known = suspicion_from_votes(votes, labels, outputs).suspicion
    parts = [known, -fit.margins, -fit.early_margins, -after.margins, after.ranks]
    return {"scores": torch.stack([part.double() for part in parts]), "wrong": labels != y}


def precision(found: dict[str, Tensor], weights: tuple[float, ...]) -> float:
    """Return the average precision of a weighted mean of ranks."""
    ranks = sum(
        weight * rankdata(part.numpy())
        for weight, part in zip(weights, found["scores"], strict=True)
        if weight
    )
    return float(average_precision_score(found["wrong"].numpy(), ranks))


def main() -> None:
    """Print the table."""
    arguments = options(__doc__, "label_weights")
    arguments.set_defaults(out=Path("out/label-weights"), seeds=[FIRST_SEED, FIRST_SEED + 1])
    data_folder(arguments)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    given.out.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[dict[str, Tensor]]] = {}
    for name in ("mnist", "fashion-mnist", "cifar10"):
        for kind, share in NOISE:
            for seed in given.seeds:
                file = given.out / f"{name}-{kind}-{share}-{seed}.pt"
                if not file.exists():
                    torch.save(scores(name, kind, share, seed, given.data), file)
                rows.setdefault(kind, []).append(torch.load(file))
    kinds = sorted(rows)
    print("| ranks of | weights | " + " | ".join(kinds) + " | mean |\n|" + "---|" * (len(kinds) + 3))
    every = [found for kind in kinds for found in rows[kind]]
    for name, weights in WEIGHTS.items():
        cells = [
            sum(precision(f, weights) for f in some) / len(some)
            for some in (*(rows[k] for k in kinds), every)
        ]
        print(f"| {name} | {weights} | " + " | ".join(f"{cell:.3f}" for cell in cells) + " |")


if __name__ == "__main__":
    main()
