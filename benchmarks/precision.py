"""How far is N_S of a float32 model from that of the same model in float64, over 50,000 samples?

Smooth nets show rounding alone; ReLU nets also the few samples of which a unit changes side. Beside it the
usual way: normalized gradients in float32, added up in float32.

    python benchmarks/precision.py          one CPU thread, about 2 minutes
"""

import platform

import torch
from torch import Tensor, nn

import likewise as lw

N = 50_000


def mlp(activation: type[nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), activation(), nn.Linear(32, 32), activation(), nn.Linear(32, 1))


def conv(activation: type[nn.Module]) -> nn.Module:
    first = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3), activation(), nn.Conv2d(8, 8, 3), activation()]
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(128, 1))


def usual(model: nn.Module, x: Tensor) -> Tensor:
    """N_S by explicit float32 gradients and a running float32 sum."""
    gradients = lw.GramMatrix(model, lw.batches(x, 500), engine="autograd")
    data, total, rows = gradients.data, torch.zeros(()), []
    with gradients.net.evaluation_mode():
        for where in data.spans():
            found = gradients.engine.rows(data.samples(where), -0.5).rows[:, 0]
            for row in found:  # one after another, as a loop over a loader would
                total = total + row
        for where in data.spans():
            rows.append(gradients.engine.rows(data.samples(where), -0.5).rows[:, 0] @ total)
    return torch.cat(rows)


def main() -> None:
    torch.set_num_threads(1)
    print(
        f"{platform.machine()}, one thread, torch {torch.__version__}, N = {N:,}; "
        "relative errors, largest and median"
    )
    for make in (mlp, conv):
        for activation in (nn.Tanh, nn.ReLU):
            torch.manual_seed(0)
            model, x = make(activation), torch.rand(N, 64)
            exact = lw.soft_neighbors(lw.GramMatrix(model.double(), x.double()))
            model.float()
            report = []
            for name, found in (
                ("likewise", lw.soft_neighbors(lw.GramMatrix(model, x))),
                ("usual way", usual(model, x)),
            ):
                error = (found.double() - exact).abs() / exact.abs()
                report.append(f"{name} {error.max():.1e}, {error.median():.1e}")
            print(f"{make.__name__}, {activation.__name__}: " + "; ".join(report), flush=True)


if __name__ == "__main__":
    main()
