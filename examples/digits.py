"""What does a small network treat alike among handwritten digits, and which labels look wrong?

Trains a convolutional net on scikit-learn's digits with 5 % of the labels flipped, asks likewise for the
neighbors of unseen digits, the density of the training set and the labels that look wrong, and draws it:
out/digits.png. Under a minute on one core; `make demo`.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import likewise as lw

OUT = Path("out/digits.png")


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1,500 digits to train on and their labels, which of those were flipped, 297 unseen digits."""
    images, digits = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.tensor(digits)
    flipped = torch.rand(1500) < 0.05
    y[:1500] = torch.where(flipped, (y[:1500] + torch.randint(1, 10, (1500,))) % 10, y[:1500])
    return x[:1500], y[:1500], flipped, x[1500:]


def trained(x: Tensor, y: Tensor) -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(60):
        for batch in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return model


def strip(axes, images, titles, colors) -> None:
    for ax, image, title, color in zip(axes, images, titles, colors, strict=True):
        ax.imshow(image[0], cmap="gray_r")
        ax.set_title(title, fontsize=8, color=color)
        ax.set_xticks([])
        ax.set_yticks([])


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x, y, flipped, unseen = data()
    model = trained(x, y)
    learned = (model.eval()(x).argmax(1) == y)[flipped].float().mean()
    print(
        f"Trained on 1,500 digits; {flipped.sum()} labels are wrong, "
        f"and the net has learned {learned:.0%} of them by heart."
    )

    queries = unseen[[9, 21, 29]]
    similar = lw.nearest(lw.GramMatrix(model, queries, columns=x), k=10)
    print(f"The three unseen digits resemble these training digits most: {similar.indices[:, 0].tolist()}")

    labels = lw.label_suspicion(lw.GramMatrix(model, (x, y), centered=True))
    worst = labels.suspicion.argsort(descending=True)
    hits = int(flipped[worst[: flipped.sum()]].sum())
    print(f"Of the {flipped.sum()} labels that look most wrong, {hits} are the flipped ones.")

    density = lw.soft_neighbors(lw.GramMatrix(model, x))
    alone, crowded = density.argsort()[[0, -1]].tolist()
    print(
        f"Training digit {alone} stands most alone, N_S = {density[alone]:.0f} of 1,500; "
        f"{crowded} has most company, N_S = {density[crowded]:.0f}."
    )

    figure, axes = plt.subplots(5, 11, figsize=(11, 6.2))
    for row, query, indices, k in zip(axes, queries, similar.indices, similar.similarities, strict=False):
        titles = ["unseen", *(f"{v:.2f}" for v in k)]
        strip(row, [query, *x[indices]], titles, ["tab:blue"] + ["black"] * 10)
    for row, places in zip(axes[3:], worst[:22].split(11), strict=True):
        titles = [f"{y[i]}, looks {labels.suggested[i]}" for i in places]
        strip(row, x[places], titles, ["tab:red" if flipped[i] else "black" for i in places])
    figure.suptitle(
        "Rows 1-3: an unseen digit and the ten training digits the network treats most like it.\n"
        "Rows 4-5: labels that look most wrong (red: they were flipped).",
        fontsize=10,
    )
    figure.tight_layout()
    OUT.parent.mkdir(exist_ok=True)
    figure.savefig(OUT, dpi=120)
    print(f"Drawn in {OUT}.")


if __name__ == "__main__":
    main()
