"""What does a training step cost with each term, in plain steps?

A plain step is forward, cross entropy, backward and SGD. A step with a term adds it to the loss, from the
same forward pass where the term can share it; on a GPU also as `losses.captured` plays it: beside a main loss
that is called as usual, beside one that is played too, or both as one. Beside it the naive way: each sample's
gradient by vmap(grad), kept in the graph. Random images; the paper's net for MNIST, and a ResNet-18 for
32 × 32.

    python benchmarks/training_terms.py                    one CPU thread, about 5 minutes
    python benchmarks/training_terms.py --device cuda
"""

import argparse
import platform
from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from passes import clock, resnet18
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import likewise as lw
from likewise import losses


def paper_net() -> nn.Module:
    first = [nn.Conv2d(1, 32, 5), nn.PReLU(), nn.AvgPool2d(2)]
    second = [nn.Conv2d(32, 64, 5), nn.PReLU(), nn.AvgPool2d(2), nn.Flatten()]
    return nn.Sequential(*first, *second, nn.Linear(1024, 256), nn.PReLU(), nn.Linear(256, 10))


def naive_group(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The set term by explicit gradients of each sample."""
    parameters = dict(model.named_parameters())

    def score(theta: dict[str, Tensor], one: Tensor, label: Tensor) -> Tensor:
        return lw.label_against_rest(functional_call(model, theta, (one[None],)), label[None])[0, 0]

    found = vmap(grad(score), (None, 0, 0))(parameters, x, y)
    rows = torch.cat([g.flatten(1) for g in found.values()], 1)
    rows = rows / rows.norm(dim=1, keepdim=True)
    terms = []
    for label in y.unique():
        mine = rows[y == label]
        n = len(mine)
        terms.append(1 - (mine.sum(0).square().sum() - n) / (n * (n - 1)))
    return torch.stack(terms).mean()


def build_steps(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Callable[[], None]]:
    """Training steps by name; classes are five, so that each has several samples."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    half = len(x) // 2
    chosen = {"readout": lw.label_against_rest}

    def step(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            optimizer.zero_grad(set_to_none=True)
            loss().backward()
            optimizer.step()

        return run

    def with_group(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        value, logits = losses.group_with_outputs(model, x, y, y, **chosen)
        return F.cross_entropy(logits, y) + 0.1 * value

    def with_two_batches(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        halves = x[:half], x[half:], y[:half], y[half:]
        value, logits = losses.two_batches_with_outputs(model, *halves, **chosen)
        return F.cross_entropy(torch.cat(logits), y) + 0.1 * value

    def apart(term: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return lambda: F.cross_entropy(model(x), y) + 0.1 * term()

    def recorded(term: Callable[..., Tensor], *batch: Tensor, **named: Tensor) -> Callable[[], Tensor]:
        record = cache(lambda: losses.captured(term, model, *batch, **named, most_groups=5))
        return lambda: record()(*batch, **named)

    found = {
        "plain": step(lambda: F.cross_entropy(model(x), y)),
        "group": step(lambda: with_group(model, x, y)),
        "group, forward of its own": step(apart(lambda: losses.group(model, x, y, y, **chosen))),
        "group, no readout": step(apart(lambda: losses.group(model, x, y))),
        "group, all outputs": step(apart(lambda: losses.group(model, x, y, readout=lw.all_outputs))),
        "naive group": step(apart(lambda: naive_group(model, x, y))),
        "two_batches": step(lambda: with_two_batches(model, x, y)),
        "pair": step(apart(lambda: losses.pair(model, x[:half], x[half:], y[:half], y[half:], **chosen))),
        "orbit": step(
            apart(lambda: losses.orbit(model, x[:half], [lambda x: x.flip(3)], y[:half], **chosen))
        ),
        "density": step(apart(lambda: losses.density(model, x, total, y, q=0.5, **chosen))),
        "along": step(apart(lambda: losses.along(model, x, losses.directions.rotation, y, **chosen))),
    }
    if x.device.type != "cuda":
        return found
    plain = recorded(lambda model, x, y: F.cross_entropy(model(x), y), x, y)
    group = recorded(partial(losses.group, **chosen), x, y, labels=y)
    labels = {"labels_a": y[:half], "labels_b": y[half:]}
    two = recorded(partial(losses.two_batches, **chosen), x[:half], x[half:], **labels)
    return {
        **found,
        "plain, recorded": step(plain),
        "group, recorded": step(apart(group)),
        "two_batches, recorded": step(apart(two)),
        "plain and group, recorded": step(lambda: plain() + 0.1 * group()),
        "plain and two_batches, recorded": step(lambda: plain() + 0.1 * two()),
        "plain and group, recorded as one": step(recorded(with_group, x, y)),
        "plain and two_batches, recorded as one": step(recorded(with_two_batches, x, y)),
    }


total = losses.RunningTotal()


def main() -> None:
    global total
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--nets", nargs="+", default=["paper", "resnet18"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[16, 64, 256])
    parser.add_argument("--terms", nargs="+", help="only these; default: all")
    parser.add_argument("--repeats", type=int, default=5)
    a = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cuda = a.device != "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    name = torch.cuda.get_device_name() if cuda else f"{platform.machine()}, one thread"
    print(f"{name}, torch {torch.__version__}; plain steps, median of {a.repeats} (spread)")
    for net in a.nets:
        for n in a.sizes:
            total = losses.RunningTotal()
            model = (paper_net() if net == "paper" else resnet18(10)).to(a.device).eval()
            shape = (1, 28, 28) if net == "paper" else (3, 32, 32)
            x, y = torch.randn(n, *shape, device=a.device), (torch.arange(n) % 5).to(a.device)
            unit, cells = 1.0, []
            for what, step in build_steps(model, x, y).items():
                if a.terms and what not in ("plain", *a.terms):
                    continue
                try:
                    step()
                    seconds, spread = clock(step, a.repeats, cuda)
                except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
                    cells.append(f"{what} failed ({type(error).__name__})")
                    continue
                if what == "plain":
                    unit = seconds
                    cells.append(f"plain {1000 * seconds:.1f} ms")
                else:
                    cells.append(f"{what} {seconds / unit:.2f} ({spread / unit:.2f})")
            print(f"{net}, n = {n}: " + "; ".join(cells), flush=True)


if __name__ == "__main__":
    main()
