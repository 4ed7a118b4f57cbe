"""`likewise demo`: train on digits with some wrong labels, and write the report that finds them."""

import time
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
import typer
from torch import Tensor, nn

from likewise.cli.options import Form, Quiet
from likewise.cli.output import Format, be_quiet, print_message, print_result
from likewise.runs.analyze import analyze
from likewise.runs.result import Analysis
from likewise.wording import counted


def demo(
    out: Annotated[Path, typer.Option(help="The folder for results.")] = Path("likewise-demo"),
    browser: Annotated[bool, typer.Option("--open", help="Open the report in the browser.")] = False,
    form: Form = Format.text,
    quiet: Quiet = False,
) -> None:
    """Find planted label errors in handwritten digits, and write a report; takes a minute.

    Example: `likewise demo --open`
    """
    be_quiet(quiet)
    start = time.perf_counter()
    found = run_demo(out, print_message)
    path = found.analysis.folder / "report.html"
    facts = {**found._asdict(), "analysis": str(found.analysis.folder), "report": str(path)}
    print_result(
        form,
        facts,
        f"{counted(found.planted, 'label')} wrong on purpose, {found.learned} of them memorized by the network. "
        f"likewise flags {counted(found.flagged, 'label')}: {found.hits} of them are planted errors. "
        f"The {found.planted} most suspicious labels contain {found.top}.",
        f"report: {path}",
    )
    print_message(
        f"({time.perf_counter() - start:.0f} s) Open the report in a browser. Then try your own model and data: "
        "likewise analyze --help"
    )
    if browser:
        webbrowser.open(path.resolve().as_uri())


SEED = 0
FLIPPED = 0.05  # share of labels that are made wrong


class Found(NamedTuple):
    """Results of the demo."""

    analysis: Analysis
    planted: int  # labels made wrong on purpose
    learned: int  # planted errors that the network reproduces
    flagged: int  # labels that look wrong
    hits: int  # planted errors among the flagged labels
    top: int  # planted errors among the `planted` most suspicious samples


def run_demo(out: Path, say: Callable[[str], None]) -> Found:
    """Train on digits of which 5 % are mislabeled, analyze, and count the errors found."""
    x, y, planted = digits()
    say(
        f"training a small network on {len(y):,} digits, {int(planted.sum())} of them mislabeled on purpose ..."
    )
    model = train_network(x, y)
    with torch.no_grad():
        learned = int((model(x).argmax(1) == y)[planted].sum())
    say(f"the network has memorized {learned} of the {int(planted.sum())} wrong labels; analyzing ...")
    found = analyze(model, (x, y), out=out, extra={"planted_error": planted})
    flagged = found.table["label_issue"].to_numpy()
    mask = planted.numpy()
    worst = np.argsort(-found.table["label_suspicion"].to_numpy(), kind="stable")[: mask.sum()]
    return Found(
        found,
        int(mask.sum()),
        learned,
        int(flagged.sum()),
        int((flagged & mask).sum()),
        int(mask[worst].sum()),
    )


def digits() -> tuple[Tensor, Tensor, Tensor]:
    """Return scikit-learn's digits (n, 1, 8, 8), labels of which 5 % are wrong, and a mask of the wrong ones."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("The demo needs scikit-learn for its digits: pip install scikit-learn") from error
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y, chance = torch.tensor(labels), torch.Generator().manual_seed(SEED)
    planted = torch.rand(len(y), generator=chance) < FLIPPED
    other = (y + torch.randint(1, 10, (len(y),), generator=chance)) % 10
    return x, torch.where(planted, other, y), planted


class DigitNet(nn.Sequential):
    """Two convolutions and a linear layer, 5,114 parameters."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, stride=2, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(256, 10),
        )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run on one thread: such small operations are slower on several, much slower if the cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train_network(x: Tensor, y: Tensor, epochs: int = 50, seed: int = SEED) -> nn.Module:
    """Train a small convolutional network until it has memorized all labels, right or wrong."""
    with torch.random.fork_rng(), _one_thread():
        torch.manual_seed(seed)
        model = DigitNet()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for _ in range(epochs):
            for batch in torch.randperm(len(x)).split(64):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
    return model.eval()
