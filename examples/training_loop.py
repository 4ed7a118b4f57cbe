"""A plain training loop with a similarity term: digits of one class are asked to be seen alike.

    python examples/training_loop.py

Prints accuracy on held-out digits, and how similar two digits of one class and of two classes are, with
and without the term. The term shares the forward pass of the main loss.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import likewise as lw


def digits() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)[order] / 16, torch.tensor(labels)[
        order
    ]


def make_net() -> nn.Module:
    torch.manual_seed(0)
    first = [nn.Conv2d(1, 16, 3, padding=1), nn.PReLU(), nn.AvgPool2d(2)]
    second = [nn.Conv2d(16, 32, 3, padding=1), nn.PReLU(), nn.AvgPool2d(2), nn.Flatten()]
    return nn.Sequential(*first, *second, nn.Linear(128, 10))


def train(net: nn.Module, x: Tensor, y: Tensor, weight: float, steps: int) -> None:
    optimizer = torch.optim.Adam(net.parameters(), 5e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        some = torch.randint(len(x), (64,), generator=generator)
        term, logits = lw.losses.group_with_outputs(
            net, x[some], y[some], y[some], readout=lw.label_against_rest, weight=weight
        )
        optimizer.zero_grad()
        (F.cross_entropy(logits, y[some]) + term).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    x, y = digits()
    for weight in (0, 0.3, -0.3):
        net = make_net()
        train(net, x[:1000], y[:1000], weight, steps)
        accuracy = (net(x[1000:]).argmax(1) == y[1000:]).float().mean()
        gram = lw.GramMatrix(lw.Network(net, lw.label_against_rest), (x[1000:], y[1000:]))
        k = lw.class_similarity(gram).mean
        inside, between = k.diagonal().mean(), (k.sum() - k.diagonal().sum()) / 90
        print(
            f"weight {weight:4}: accuracy {accuracy:.3f}, similarity within classes {inside:.3f}, "
            f"between {between:.3f}"
        )


if __name__ == "__main__":
    main()
