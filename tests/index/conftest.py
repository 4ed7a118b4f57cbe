import pytest
import torch
from torch import nn

import likewise as lw


class Pooled(nn.Module):
    """Convolutions only, so that every gradient is dense: wide sketches of it are exact."""

    def __init__(self, d=3):
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 3)
        self.out = nn.Conv1d(3, d, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.conv(x))).mean(2)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Pooled().double()


@pytest.fixture
def data():
    chance = torch.Generator().manual_seed(1)
    x = torch.randn(40, 2, 8, generator=chance, dtype=torch.float64)
    return x, torch.randint(3, (40,), generator=chance)


@pytest.fixture
def new():
    return torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.fixture
def build(tmp_path, net, data):
    """Builds an index of the fixtures in a folder, four shards of ten rows."""

    def call(name="index", **options):
        given = {"width": 64, "shard_rows": 10, **options}
        return lw.build_index(given.pop("net", net), given.pop("data", data), tmp_path / name, **given)

    return call


@pytest.fixture
def files_of():
    """Returns the content of the files of a folder, by name."""
    return lambda folder: {
        path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".lock")
    }
