"""How many of the labels that `analyze` flags are wrong? Planted errors, networks from underfit to memorized.

8,000 images of CIFAR-10 (--data DIR or $LIKEWISE_DATA), 5 % of the labels flipped; the same convolutional
net as benchmarks/analyze.py after 3, 25 and 60 epochs: `python benchmarks/label_flags.py --data DIR`.
Compared: every label that the neighbors' majority votes against, and the label's loss.
"""

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from analyze import cifar, trained
from sklearn.metrics import average_precision_score
from torch import Tensor, nn

import likewise as lw


def planted(y: Tensor, share: float, seed: int) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    wrong = torch.rand(len(y), generator=chance) < share
    other = (y + torch.randint(1, 10, (len(y),), generator=chance)) % 10
    return torch.where(wrong, other, y), wrong


def line(name: str, flagged: np.ndarray, wrong: np.ndarray) -> str:
    count, hits = flagged.sum(), (flagged & wrong).sum()
    precision, recall = hits / max(1, count), hits / wrong.sum()
    return f"  {name:<26} {count:>5} flagged, precision {precision:.2f}, recall {recall:.2f}"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--data", type=Path, default=os.environ.get("LIKEWISE_DATA", "data"))
    arguments.add_argument("--samples", type=int, default=8000)
    arguments.add_argument("--seed", type=int, default=1)
    given = arguments.parse_args()
    x, y = (part[: given.samples] for part in cifar(Path(given.data)))
    labels, mask = planted(y, 0.05, given.seed)
    wrong = mask.numpy()
    for epochs in (3, 25, 60):
        model = trained(x, labels, epochs)
        with tempfile.TemporaryDirectory() as folder:
            table = lw.analyze(model, (x, labels), out=Path(folder) / "run").table
        with torch.no_grad():
            loss = nn.functional.cross_entropy(model(x), labels, reduction="none").numpy()
        right = (table["prediction"] == table["label"]).mean()
        precision = average_precision_score(wrong, table["label_suspicion"])
        print(f"{epochs} epochs, {right:.0%} of the labels learned")
        print(
            f"  average precision: suspicion {precision:.2f}, loss {average_precision_score(wrong, loss):.2f}"
        )
        print(line("label_issue (odds of 20)", table["label_issue"].to_numpy(), wrong))
        print(line("any majority against it", (table["suggested_label"] != table["label"]).to_numpy(), wrong))


if __name__ == "__main__":
    main()
