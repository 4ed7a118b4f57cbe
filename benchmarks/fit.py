"""Does `fit_quality` tell under- from overfitting by training data alone? And the gap to new data? On a CPU.

    python benchmarks/fit.py --data DIR              results are added to benchmarks/results/fit.jsonl

1,000 images of MNIST and of Fashion-MNIST, convolutional nets of three widths after 2, 10 and 60 epochs,
with no, 20 % and 50 % of the labels made wrong. The gap is the share of training labels that the network
predicts less that of new samples labeled by the same noisy hand; beside it proxies that people use.
"""

from typing import Any

import torch
from images import data_folder, images
from records import Clock, measured, options
from torch import Tensor, nn
from torch.nn import functional as F

import likewise as lw
from nets import evaluated, spoiled, trained

COUNT = 1000


def net(width: int) -> nn.Sequential:
    def block(i: int, o: int, size: int) -> list[nn.Module]:
        return [nn.Conv2d(i, o, size, stride=2, padding=size // 2), nn.ReLU()]

    layers = [*block(1, width, 5), *block(width, 2 * width, 3), *block(2 * width, 4 * width, 3)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * width, 10))


def settings(seeds: list[int]) -> list[dict[str, Any]]:
    return [
        {"data": data, "share": share, "width": width, "epochs": epochs, "seed": seed}
        for seed in seeds
        for data in ("mnist", "fashion-mnist")
        for share in (0.0, 0.2, 0.5)
        for width in (1, 4, 12)
        for epochs in (2, 10, 60)
    ]


def gradient_norm(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the mean squared norm of the loss's gradient, sample by sample."""
    loss = lambda outputs, labels: F.cross_entropy(outputs, labels, reduction="none")[:, None]  # noqa: E731
    return float(lw.GramMatrix(lw.Network(model, loss), (x, y), kernel=lw.INNER_PRODUCT).diagonal().mean())


def sharpness(model: nn.Module, x: Tensor, y: Tensor, by: float = 0.1, draws: int = 5) -> float:
    """Return how much the loss rises, on average, when every parameter moves by a tenth of its size."""
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    before, rises = float(F.cross_entropy(evaluated(model, x), y)), []
    for draw in range(draws):
        chance = torch.Generator().manual_seed(draw)
        model.load_state_dict(
            {name: v * (1 + by * torch.randn(v.shape, generator=chance)) for name, v in kept.items()}
        )
        rises.append(float(F.cross_entropy(evaluated(model, x), y)) - before)
    model.load_state_dict(kept)
    return sum(rises) / draws


def measure(setting: dict[str, Any], given: Any) -> dict[str, Any]:
    seed, share, clock = setting["seed"], setting["share"], Clock()
    x, y = images(setting["data"], given.data, first=COUNT * seed, count=COUNT)
    labels = spoiled(y, "uniform", share, seed) if share else y
    test, truth = images(setting["data"], given.data, "test", count=4000)
    torch.manual_seed(seed)
    model = trained(net(setting["width"]), x, labels, setting["epochs"], seed, batch=50).model
    found = clock("likewise", lambda: lw.fit_quality(lw.GramMatrix(model, (x, labels)), sketch=1024))
    right = float((evaluated(model, test).argmax(1) == truth).float().mean())
    return {
        "learned": found.learned,
        "supported": found.supported,
        "new": right * (1 - share) + (1 - right) * share / 9,
        "verdict": found.verdict,
        "density": float(found.neighbors.median()) / COUNT,
        "variance": float(found.label_variance.median()) / found.total_variance,
        "loss": float(F.cross_entropy(evaluated(model, x), labels)),
        "gradient": gradient_norm(model, x, labels),
        "sharpness": sharpness(model, x, labels),
        "seconds": clock.seconds,
    }


def main() -> None:
    arguments = options(__doc__, "fit")
    data_folder(arguments)
    given = arguments.parse_args()
    measured(settings(given.seeds), measure, given)


if __name__ == "__main__":
    main()
