"""What do exact gradient kernels of all pairs cost? torch.func beside both engines, in one run.

python benchmarks/pairs.py          one CPU thread, about a minute
"""

import platform
import statistics
import time

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import likewise as lw


def lenet(d: int) -> nn.Module:
    convolutions = [nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU()]
    return nn.Sequential(
        *convolutions, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 170), nn.ReLU(), nn.Linear(170, d)
    )


def allconv(d: int) -> nn.Module:
    first = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    third = [nn.Conv2d(64, 144, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*first, *second, *third, nn.Flatten(), nn.Linear(144, d))


def toy(d: int) -> nn.Module:
    hidden = [layer for _ in range(5) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), *hidden, nn.Linear(64, d))


def by_torch_func(model: nn.Module, x: Tensor) -> Tensor:
    """The usual recipe: per-sample gradients of each output by vmap, then matrix products."""
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    d = model(x[:1]).shape[1]

    def output(theta: dict[str, Tensor], one: Tensor, i: int) -> Tensor:
        return functional_call(model, theta, (one[None],))[0, i]

    rows = []
    for i in range(d):
        found = vmap(grad(lambda t, one, i=i: output(t, one, i)), (None, 0), chunk_size=256)(parameters, x)
        rows.append(torch.cat([g.flatten(1) for g in found.values()], 1))
    flat = torch.stack(rows, 1).flatten(0, 1)
    return (flat @ flat.T).view(len(x), d, len(x), d).transpose(1, 2)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{platform.machine()}, one thread, torch {torch.__version__}; CPU seconds, median of 3 (spread)")
    image = (1, 28, 28)
    for name, make, n, d, shape in [
        ("lenet", lenet, 256, 1, image),
        ("allconv", allconv, 256, 1, image),
        ("lenet", lenet, 128, 10, image),
        ("allconv", allconv, 128, 10, image),
        ("toy MLP", toy, 2048, 1, (2,)),
    ]:
        model, x = make(d).eval(), torch.randn(n, *shape)
        kernel = lw.Kernel(0, 0, lw.whole_block)
        ways = {"torch.func": lambda m=model, x=x: by_torch_func(m, x)}
        for engine in ("autograd", "layers"):
            gram = lw.GramMatrix(model, x, kernel=kernel, engine=engine)
            assert gram.d == d  # set-up and check once
            ways[engine] = gram.dense
        report = []
        for way, function in ways.items():
            seconds = []
            for _ in range(3):
                start = time.process_time()
                found = function()
                seconds.append(time.process_time() - start)
            exact = by_torch_func(model.double(), x[:16].double())
            model.float()
            error = (found[:16, :16].double() - exact).norm() / exact.norm()
            spread = max(seconds) - min(seconds)
            report.append(f"{way} {statistics.median(seconds):.2f} ({spread:.2f}), error {error:.0e}")
        print(f"{name:8} N = {n}, d = {d}: " + "; ".join(report), flush=True)


if __name__ == "__main__":
    main()
