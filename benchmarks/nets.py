"""The networks of the benchmarks of uses, how they are trained, and how labels are spoiled."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import likewise as lw


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def block(i: int, o: int, pool: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU()]
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))


def resnet9(classes: int = 10, width: int = 64) -> nn.Sequential:
    """6.6 million parameters at width 64, 1.6 at 32, for images of 32 x 32; the last layer is linear."""
    return nn.Sequential(
        block(3, width),
        block(width, 2 * width, pool=True),
        Residual(block(2 * width, 2 * width), block(2 * width, 2 * width)),
        block(2 * width, 4 * width, pool=True),
        block(4 * width, 8 * width, pool=True),
        Residual(block(8 * width, 8 * width), block(8 * width, 8 * width)),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(8 * width, classes),
    )


def conv6(classes: int = 10, channels: int = 1) -> nn.Sequential:
    """Six convolutions with batch normalization, 290 thousand parameters."""
    return nn.Sequential(
        block(channels, 32),
        block(32, 32, pool=True),
        block(32, 64),
        block(64, 64, pool=True),
        block(64, 128),
        block(128, 128),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, classes),
    )


class Trained(NamedTuple):
    """A model, and how its labels fared while it learned."""

    model: nn.Sequential
    margins: Tensor  # (n,) logit of the label less the largest other, mean over training
    early_margins: Tensor  # (n,) the same, weighted by what was still to be learned


def trained(model: nn.Sequential, x: Tensor, y: Tensor, epochs: int, seed: int, batch: int = 256) -> Trained:
    """Return the model after so many epochs of Adam, one cycle of learning rates up to 1e-3, no augmentation.

    y: class numbers, or probabilities of classes (n, c). Call it with `torch.manual_seed` before `model`
    is made: the seed here is of the order of samples alone.
    """
    if epochs == 0:
        return Trained(model.eval(), *torch.zeros(2, len(x)))
    chance = torch.Generator().manual_seed(seed)
    if x.is_cuda:
        x, model = (
            x.contiguous(memory_format=torch.channels_last),
            model.to(memory_format=torch.channels_last),
        )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    steps = epochs * -(-len(x) // batch)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.2)
    hard = y if y.dim() == 1 else y.argmax(1)
    record = lw.Watch(len(x))
    fast = torch.autocast("cuda", torch.bfloat16, enabled=x.is_cuda)
    model.train()
    for _ in range(epochs):
        for chosen in torch.randperm(len(x), generator=chance).to(x.device).split(batch):
            optimizer.zero_grad()
            with fast:
                outputs = model(x[chosen]).float()
            F.cross_entropy(outputs, y[chosen]).backward()
            optimizer.step()
            rate.step()
            record.update(outputs, hard[chosen], chosen)
    return Trained(model.eval(), record.margins, record.early_margins)


def margin(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the output of each label less the largest other."""
    mine = outputs.gather(1, labels[:, None])
    others = outputs.scatter(1, labels[:, None], -torch.inf)
    return (mine - others.max(1, keepdim=True).values)[:, 0]


def evaluated(model: nn.Module, x: Tensor, size: int = 1000) -> Tensor:
    """Return the outputs of x, in float32."""
    with torch.no_grad():
        return torch.cat([model(part) for part in x.split(size)])


def spoiled(labels: Tensor, kind: str, share: float, seed: int, chances: Tensor | None = None) -> Tensor:
    """Return labels of which a share is wrong.

    uniform: any other class. pair: the next class, as one annotator who confuses two. instance: the hardest
    samples get the best wrong guess of a network that has seen the true labels, by its `chances` (n, c).
    """
    chance = torch.Generator().manual_seed(1000 + seed)
    n, labels = len(labels), labels.cpu()
    if kind == "instance":
        assert chances is not None
        wrong_chance = chances.cpu().scatter(1, labels[:, None], 0)
        picked = torch.multinomial(wrong_chance.max(1).values + 1e-3 / n, round(share * n), generator=chance)
        other = wrong_chance.argmax(1)
    else:
        picked = torch.randperm(n, generator=chance)[: round(share * n)]
        step = (
            torch.randint(1, 10, (n,), generator=chance)
            if kind == "uniform"
            else torch.ones(n, dtype=torch.long)
        )
        other = (labels + step) % 10
    found = labels.clone()
    found[picked] = other[picked]
    return found
