"""A text classifier and a table of texts, for `likewise analyze`: which package is a docstring from?

python examples/analyze/text.py out/text          # collects docstrings, trains, saves the weights
likewise analyze examples/analyze/text.py:model out/text/docstrings.csv --label package \
        --text docstring --prepare examples/analyze/text.py:tokens \
        --weights out/text/bag.pt --out out/text/run
"""

import importlib
import inspect
import re
import sys
import zlib
from pathlib import Path

import pandas
import torch
from torch import Tensor, nn

PACKAGES = {
    "files": ("pathlib", "shutil", "tempfile", "zipfile", "tarfile", "os", "glob"),
    "network": ("socket", "ssl", "http.client", "urllib.request", "smtplib", "ftplib", "email.message"),
    "tests": ("unittest.case", "unittest.mock", "doctest", "unittest.suite", "unittest.loader"),
}
WORDS, LENGTH = 4000, 40


def tokens(text: str) -> Tensor:
    """Return the first words of a text as numbers, 0 where there are no more."""
    words = [1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in re.findall(r"[a-z]+", text.lower())]
    return torch.tensor((words + [0] * LENGTH)[:LENGTH])


class Bag(nn.Module):
    """The mean of word vectors, then a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.out = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, len(PACKAGES)))

    def forward(self, words: Tensor) -> Tensor:
        """Return a number for each package."""
        known = (words > 0).unsqueeze(-1).float()
        return self.out((self.words(words) * known).sum(1) / known.sum(1).clamp(min=1))


def model() -> nn.Module:
    """Return the network that `likewise analyze` asks for."""
    return Bag()


def docstrings() -> pandas.DataFrame:
    """Return the docstrings of Python's own functions and classes, and where each is from."""
    rows = {}
    for package, modules in PACKAGES.items():
        for name in modules:
            module = importlib.import_module(name)
            for _, owner in [("", module), *inspect.getmembers(module, inspect.isclass)]:
                for _, member in inspect.getmembers(owner, inspect.isroutine):
                    text = inspect.cleandoc(member.__doc__ or "")
                    if len(text) > 40 and getattr(member, "__module__", "") == name:
                        rows.setdefault(text, package)
    return pandas.DataFrame({"docstring": list(rows), "package": list(rows.values())})


def main(folder: Path, epochs: int = 30) -> None:
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    table = docstrings()
    table.to_csv(folder / "docstrings.csv", index=False)
    x = torch.stack([tokens(text) for text in table["docstring"]])
    y = torch.tensor(table["package"].astype("category").cat.codes.to_numpy().astype("int64"))
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(epochs):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    torch.save(net.state_dict(), folder / "bag.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
