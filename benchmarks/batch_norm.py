"""Does a training term go with batch normalization? Test accuracy on scikit-learn's digits.

The term is taken with BatchNorm's running statistics, the loss with those of the batch: what each asks of the
weights is not quite of the same network. Six seeds, 30 epochs, `losses.group` of classes; accuracy as the
network stands, after its statistics were recomputed, and with what goes around it. ± is half of the 95 %
interval of the mean.

    python benchmarks/batch_norm.py            about fourteen minutes of one thread
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

import likewise as lw

sys.path.append(str(Path(__file__).parent.parent / "experiments"))
from spread import interval

NORMS = {
    "BatchNorm": lambda: nn.BatchNorm2d(16),
    "BatchNorm, momentum .5": lambda: nn.BatchNorm2d(16, momentum=0.5),
    "BatchNorm, shared forward": lambda: nn.BatchNorm2d(16),
    "GroupNorm": lambda: nn.GroupNorm(4, 16),
}


def net(norm: str) -> nn.Sequential:
    first = [nn.Conv2d(1, 16, 3, padding=1), NORMS[norm](), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(128, 10))


def loss_of(model: nn.Module, x: Tensor, y: Tensor, weight: float, shared: bool) -> Tensor:
    if not weight:
        return F.cross_entropy(model(x), y)
    options = {"labels": y, "readout": lw.label_against_rest, "weight": weight}
    if shared:
        term, outputs = lw.losses.group_with_outputs(model, x, y, **options)
        return term + F.cross_entropy(outputs, y)
    return lw.losses.group(model, x, y, **options) + F.cross_entropy(model(x), y)


def accuracies(norm: str, weight: float, seed: int) -> tuple[float, float]:
    """Return the accuracy as the network stands, and with statistics recomputed."""
    x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
    x = (x.float().view(-1, 1, 8, 8) - 5) / 6
    torch.manual_seed(seed)
    order = torch.randperm(len(x))
    (x, test), (y, truth) = ((part[order[:1297]], part[order[1297:]]) for part in (x, y))
    model = net(norm)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(30):
        for at in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            loss_of(model, x[at], y[at], weight, norm.endswith("shared forward")).backward()
            optimizer.step()

    def right() -> float:
        return float((model.eval()(test).argmax(1) == truth).float().mean())

    before = right()
    update_bn(x.split(64), model.train())
    return before, right()


def main() -> None:
    torch.set_num_threads(1)
    for norm in NORMS:
        for weight in (0.0, 0.1, 1.0):
            found = [accuracies(norm, weight, seed) for seed in range(6)]
            columns = zip(*found, strict=True)
            told = [f"{sum(c) / len(c):.3f} ± {interval(c):.3f}" for c in columns]
            print(f"{norm:24} weight {weight:<4g} {told[0]}   statistics anew {told[1]}", flush=True)


if __name__ == "__main__":
    main()
