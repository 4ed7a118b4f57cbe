"""Does a learned combination of scores rank labels better than the mean of ranks that is shipped?

    python benchmarks/learned_combination.py            24 small networks, about a minute on one thread
    python benchmarks/learned_combination.py --table    what they say

Perceptrons on 500 samples each of scikit-learn's digits, breast cancer, a made-up table whose classes overlap, and sums
of pairs of digits; labels made wrong uniformly, into the next class, or for hard samples, 20 %; early and memorized
(then reheated twice). Of each label the ranks of: votes, votes after reheating, margin while hot, loss, self-influence
‖∇ loss‖², N_S and local density. Logistic regression of wrong or right on these ranks, learned with all data sets but
one, is judged on the one left out: average precision beside that of the shipped combination.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from crossval import DATA as TABLES
from labels import self_influence
from records import FOLDER
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score
from torch import Tensor, nn
from torch.nn import functional as F

import likewise as lw
from likewise.statistics.label_issues import combined_suspicion, opinion_after
from likewise.statistics.neighbors import class_votes
from nets import margin

DATA = ("digits", "breast cancer", "overlapping", "digit pairs")
COUNT = 500
NOISE = (("uniform", 0.2), ("pair", 0.2), ("hard", 0.2))
EPOCHS = {"early": 12, "memorized": 150}


def load(name: str) -> tuple[Tensor, Tensor]:
    if name == "digit pairs":
        pixels, classes = TABLES["digits"]()
        left, right = np.random.default_rng(0).integers(0, len(pixels), (2, COUNT))
        x = torch.tensor(np.concatenate([pixels[left], pixels[right]], 1) / 16).float()
        return x, torch.tensor((classes[left] + classes[right]) % 10).long()
    values, classes = TABLES[name]()
    x = torch.tensor(values).float()
    return ((x - x.mean(0)) / x.std(0).clamp(min=1e-6))[:COUNT], torch.tensor(classes).long()[:COUNT]


def train(x: Tensor, y: Tensor, classes: int, epochs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(x.shape[1], 128), nn.ReLU(), nn.Linear(128, classes))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(epochs):
        for chosen in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
    return model.eval()


def spoil(x: Tensor, y: Tensor, kind: str, share: float, seed: int) -> Tensor:
    """Return labels of which a share is wrong."""
    classes, chance = int(y.max()) + 1, torch.Generator().manual_seed(seed)
    found, count = y.clone(), round(share * len(y))
    if kind == "hard":
        chances = train(x, y, classes, 5, 99)(x).softmax(1).detach().scatter(1, y[:, None], 0)
        picked = torch.multinomial(chances.max(1).values + 1e-5, count, generator=chance)
        found[picked] = chances.argmax(1)[picked]
        return found
    picked = torch.randperm(len(y), generator=chance)[:count]
    step = torch.randint(1, classes, (len(y),), generator=chance) if kind == "uniform" else torch.ones_like(y)
    found[picked] = ((y + step) % classes)[picked]
    return found


def rank(values: Tensor) -> np.ndarray:
    return (values.double().cpu().argsort().argsort() / (len(values) - 1)).numpy()


def measure(name: str, kind: str, share: float, stage: str) -> dict[str, Any]:
    """Return the ranks of each score, the shipped suspicion, and which labels are wrong."""
    x, y = load(name)
    labels = spoil(x, y, kind, share, 0)
    model = train(x, labels, int(y.max()) + 1, EPOCHS[stage], 0)
    outputs = model(x).detach()
    gram = lw.GramMatrix(lw.Network(model, lw.all_outputs), (x, labels))
    votes = class_votes(gram, labels, sketch=512)
    chances = outputs.softmax(1)
    found = combined_suspicion(votes, labels, chances)
    scores = {
        "votes": found.suspicion,
        "loss": F.cross_entropy(outputs, labels, reduction="none"),
        "margin": -margin(outputs, labels),
        "self-influence": self_influence(model, x, labels),
        "N_S": -lw.soft_neighbors(gram),
        "local density": -votes.sum(1),
    }
    if stage == "memorized":
        hot = lw.reheat(model, (x, labels), rounds=2, votes=votes)
        if hot.skipped:
            scores |= {"votes after": found.suspicion, "margin while hot": scores["margin"]}
        else:
            after = opinion_after(gram, hot, sketch=512)
            found = combined_suspicion(votes, labels, chances, None, after)
            scores |= {"votes after": after.ranks, "margin while hot": -after.margins}
    ranks = np.stack([rank(score) for score in scores.values()], 1)
    return {
        "names": list(scores),
        "ranks": ranks,
        "shipped": found.suspicion.numpy(),
        "wrong": (labels != y).numpy(),
    }


def compare(given: argparse.Namespace) -> None:
    """Print what a combination learned on other data sets is worth on each."""
    with np.load(given.out) as file:
        runs = {key: file[key] for key in file}
    for stage in EPOCHS:
        keys = [key.removesuffix("/ranks") for key in runs if key.endswith("/ranks") and f"/{stage}" in key]
        names = runs[f"{keys[0]}/names"].tolist()
        print(f"{stage}: {', '.join(names)}")
        gains = []
        for held in DATA:
            seen = [key for key in keys if not key.startswith(f"{held}/")]
            x = np.concatenate([features(runs[f"{key}/ranks"]) for key in seen])
            y = np.concatenate([runs[f"{key}/wrong"] for key in seen])
            model = LogisticRegression(C=1.0, max_iter=500).fit(x, y)
            here = [key for key in keys if key.startswith(f"{held}/")]
            learned = [
                average_precision_score(
                    runs[f"{key}/wrong"], model.decision_function(features(runs[f"{key}/ranks"]))
                )
                for key in here
            ]
            shipped = [average_precision_score(runs[f"{key}/wrong"], runs[f"{key}/shipped"]) for key in here]
            gains += [a - b for a, b in zip(learned, shipped, strict=True)]
            print(
                f"  {held:14} shipped {np.mean(shipped):.3f}  learned {np.mean(learned):.3f}  "
                f"coefficients {np.round(model.coef_[0][: len(names)], 1).tolist()}"
            )
        error = np.std(gains) / len(gains) ** 0.5
        print(
            f"  gain {np.mean(gains):+.3f} ± {error:.3f}, better in {np.mean(np.array(gains) > 0):.0%} of {len(gains)}"
        )


def features(ranks: np.ndarray) -> np.ndarray:
    """Return ranks, and squares of them, since the top of a list matters most."""
    return np.concatenate([ranks, ranks**4], 1)


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument(
        "--out", type=Path, default=FOLDER.parent.parent / "out" / "learned_combination.npz"
    )
    arguments.add_argument("--table", action="store_true", help="only show what was found")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    if not given.table:
        arrays = dict[str, Any]()
        for name in DATA:
            for kind, share in NOISE:
                for stage in EPOCHS:
                    found = measure(name, kind, share, stage)
                    arrays |= {
                        f"{name}/{kind} {share}/{stage}/{key}": np.asarray(v) for key, v in found.items()
                    }
                    print(name, kind, share, stage, flush=True)
        given.out.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(given.out, **arrays)
    compare(given)


if __name__ == "__main__":
    main()
