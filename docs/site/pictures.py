"""The pictures of docs/understand: `python docs/site/pictures.py` writes similarity.png and centered.png."""

from pathlib import Path

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import likewise as lw
from likewise.figures.drawing import BLUE, GRAY, VERMILION

IMAGES = Path(__file__).parents[1] / "images"
GREEN = "#009E73"


def train(model: nn.Module, x: Tensor, y: Tensor, loss: nn.Module, steps: int) -> None:
    """Fit the model by Adam on all samples at once."""
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()


def draw_similarity(path: Path) -> None:
    """A curve that is smooth on the left and fast on the right, and the similarity to three inputs."""
    torch.manual_seed(0)
    x = torch.linspace(0, 1, 400)[:, None]
    y = torch.sin(20 * x**2)
    features = nn.Sequential(nn.Linear(1, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1))
    with torch.no_grad():
        features[0].weight.mul_(12)
        features[0].bias.copy_(torch.linspace(-6, 6, 128))
    train(features, x, y, nn.MSELoss(), 1500)
    queries = torch.tensor([[0.15], [0.6], [0.9]])
    similar = lw.similarity(features, queries, x, readout=lw.all_outputs)
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
    left.plot(x, y, color=GRAY, lw=4, alpha=0.5, label="data")
    left.plot(x, features(x).detach(), color="black", lw=1, label="network")
    left.set(xlabel="x", title="what was learned")
    left.legend(frameon=False, loc="lower left")
    for query, row, color in zip(queries, similar, (BLUE, GREEN, VERMILION), strict=True):
        right.plot(x, row, color=color, label=f"to x = {query.item():g}")
        right.axvline(query.item(), color=color, lw=0.8, ls=":")
    right.set(xlabel="x'", ylim=(-0.3, 1.25), title="similarity k(x, x')")
    right.legend(frameon=False, loc="upper center", ncols=3, fontsize="small")
    fig.savefig(path, dpi=110)


def draw_centered(path: Path) -> None:
    """Plain and centered similarities of pairs of digits, of one class and of two."""
    torch.manual_seed(0)
    digits, classes = load_digits(return_X_y=True)
    x, y = torch.tensor(digits[:400], dtype=torch.float32) / 16, torch.tensor(classes[:400])
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    train(model, x, y, nn.CrossEntropyLoss(), 60)
    gram = lw.GramMatrix(lw.Network(model, lw.all_outputs), x)
    same = y[:, None] == y
    other = ~torch.eye(len(x), dtype=torch.bool)
    fig, axes = plt.subplots(1, 2, figsize=(9, 3), sharey=True, layout="constrained")
    for ax, centered in zip(axes, (False, True), strict=True):
        k = gram.with_centering(centered).dense()
        for pairs, color, label in ((same & other, BLUE, "one class"), (~same, VERMILION, "two classes")):
            ax.hist(k[pairs], bins=60, range=(-1, 1), density=True, color=color, alpha=0.6, label=label)
        ax.set(xlabel="similarity", title="centered" if centered else "plain", yticks=[])
    axes[0].legend(frameon=False, loc="upper left")
    fig.savefig(path, dpi=110)


if __name__ == "__main__":
    plt.switch_backend("Agg")
    torch.set_num_threads(1)
    draw_similarity(IMAGES / "similarity.png")
    draw_centered(IMAGES / "centered.png")
