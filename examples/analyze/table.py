"""A multilayer perceptron and a table, for `likewise analyze`.

python examples/analyze/table.py out/table        # writes wine.csv, trains, saves the weights
likewise analyze examples/analyze/table.py:model out/table/wine.csv \
        --label cultivar --weights out/table/mlp.pt --out out/table/run
"""

import sys
from pathlib import Path

import torch
from sklearn.datasets import load_wine
from torch import Tensor, nn


class Standardized(nn.Module):
    """Columns less their mean, over their deviation: kept with the weights, as in a pipeline."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(columns))
        self.register_buffer("deviation", torch.ones(columns))

    def forward(self, x: Tensor) -> Tensor:
        """Return the columns on one scale."""
        return (x - self.mean) / self.deviation


def model() -> nn.Module:
    """Return the network that `likewise analyze` asks for."""
    return nn.Sequential(Standardized(13), nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 3))


def main(folder: Path, epochs: int = 60) -> None:
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    wine = load_wine(as_frame=True)
    table = wine.data.assign(cultivar=wine.target.map(lambda number: "ABC"[number]))
    table.to_csv(folder / "wine.csv", index=False)
    x, y = torch.tensor(wine.data.to_numpy(), dtype=torch.float32), torch.tensor(wine.target.to_numpy())
    net = model()
    net[0].mean.copy_(x.mean(0))
    net[0].deviation.copy_(x.std(0))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(epochs):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    torch.save(net.state_dict(), folder / "mlp.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
