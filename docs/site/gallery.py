"""The gallery of figures: `make gallery` draws every function of likewise.figures and writes docs/gallery.md.

The code on the page is the code that drew the picture: each function below returns what its picture shows.
"""

import inspect
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from PIL import Image
from torch import nn

import likewise as lw
from likewise.cli.demo import DigitNet, digits

DOCS = Path(__file__).parents[1]
FOLDER = DOCS / "images" / "gallery"


class Results(NamedTuple):
    """What is drawn: digits of which 5 % are labeled wrong."""

    run: lw.Analysis  # with the record of training
    images: np.ndarray  # (n, 1, 8, 8)
    early: list[lw.Analysis]  # at three checkpoints of the same training
    calibration: lw.Calibration


def kernel_map(run: lw.Analysis) -> Axes:
    """The map: similar samples lie near each other."""
    return lw.figures.kernel_map(run.table, color="label")


def kernel_map_by_value(run: lw.Analysis) -> Axes:
    """The map colored by any column of numbers."""
    return lw.figures.kernel_map(run.table, color="label_suspicion")


def neighbor_grid(run: lw.Analysis, images: np.ndarray) -> Axes:
    """The most suspicious labels, and the samples that contradict them."""
    worst = run.table["label_suspicion"].nlargest(4).index.to_numpy()
    near, similar = run.neighbor_matrix[worst, :6], run.similarity_matrix[worst, :6]
    return lw.figures.neighbor_grid(images, worst, near, similar, run.table["label"])


def pair_grid(run: lw.Analysis, images: np.ndarray) -> Axes:
    """The most similar pairs; vermilion where their labels differ. Near-duplicates: pairs of `run.duplicates`."""
    near, similar = run.neighbor_matrix[:, 0], run.similarity_matrix[:, 0]
    once = np.flatnonzero(near > np.arange(len(near)))
    first = once[np.argsort(-similar[once])[:8]]
    return lw.figures.pair_grid(images, first, near[first], similar[first], run.table["label"])


def neighborhoods(run: lw.Analysis) -> Axes:
    """Who is isolated, who is contested."""
    return lw.figures.neighborhoods(run.table)


def cartography(run: lw.Analysis) -> Axes:
    """The training story of every sample, for a run with the record of training."""
    return lw.figures.cartography(run.table)


def slices(run: lw.Analysis) -> Axes:
    """Where problems concentrate: shares with 95 % intervals, by any column."""
    return lw.figures.slices(run.table, by="label", of="label_issue")


def slices_by_value(run: lw.Analysis) -> Axes:
    """The same by a column of numbers, cut at its quintiles; counted is the most novel tenth."""
    return lw.figures.slices(run.table, by="density", of="novelty")


def confusion(run: lw.Analysis) -> Axes:
    """Labels against what the neighbors vote for."""
    return lw.figures.confusion(run.confusion)


def class_similarity(run: lw.Analysis) -> Axes:
    """Which classes the network treats alike."""
    return lw.figures.class_similarity(run.class_similarity)


def density_histogram(run: lw.Analysis, images: np.ndarray) -> Axes:
    """Rare and ordinary samples, with a typical one of each bin."""
    return lw.figures.density_histogram(run.table["density"], images)


def similarity_histogram(run: lw.Analysis) -> Axes:
    """All similarities of one sample, with those above a threshold."""
    return lw.figures.similarity_histogram(*run.histogram(42), threshold=0.5)


def calibration(calibration: lw.Calibration) -> Axes:
    """Whether chances to be right can be believed: `calibration = lw.calibrate(found, truth)`."""
    return lw.figures.calibration(calibration.levels)


def dynamics(early: list[lw.Analysis]) -> Axes:
    """A column across checkpoints, with single samples."""
    tables = [run.table for run in early]
    return lw.figures.dynamics(tables, "local_density", steps=[2, 8, 30], samples=[3, 42])


FIGURES: tuple[Callable[..., Axes], ...] = (
    kernel_map,
    kernel_map_by_value,
    neighbor_grid,
    pair_grid,
    neighborhoods,
    cartography,
    slices,
    slices_by_value,
    confusion,
    class_similarity,
    density_histogram,
    similarity_histogram,
    calibration,
    dynamics,
)
INTRODUCTION = """# Gallery

Every plot of the report is a function of [`likewise.figures`](reference/figures.md): it draws into `ax=`, or into
a new figure, and returns the matplotlib `Axes`, for you to change and save. Colors are told apart by color-blind
readers. Needs `pip install "likewise[figures]"`.

Below, `run = lw.analyze(model, data, out="run/", watch=watch)` on digits of which 5 % are labeled wrong, and
`images` are the digits. Several in one figure:

```python
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
lw.figures.kernel_map(run.table, ax=left)
lw.figures.slices(run.table, by="label", ax=right)
figure.savefig("paper.pdf")
```

`make gallery` draws all of this page's pictures again and writes the page.
"""


def analyze_digits(folder: Path) -> Results:
    """Train on digits with wrong labels, and analyze at three moments."""
    x, y, _ = digits()
    held_out = torch.arange(len(x)) % 4 == 3
    inputs, labels = x[~held_out], y[~held_out]
    torch.manual_seed(0)
    model, watch, early = DigitNet(), lw.Watch(len(labels)), []
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(1, 31):
        model.train()
        for batch in torch.randperm(len(inputs)).split(64):
            optimizer.zero_grad()
            logits = model(inputs[batch])
            nn.functional.cross_entropy(logits, labels[batch]).backward()
            optimizer.step()
            watch.update(logits.detach(), labels[batch], batch)
        if epoch in (2, 8, 30):
            out = folder / f"epoch-{epoch}"
            record = watch if epoch == 30 else None
            early.append(lw.analyze(model.eval(), (inputs, labels), out=out, watch=record))
    gram = lw.GramMatrix(model.eval(), x[held_out], columns=(inputs, labels))
    calibration = lw.calibrate(lw.reliability(gram), y[held_out])
    return Results(early[-1], inputs.numpy(), early, calibration)


def code_of(draw: Callable[..., Axes]) -> str:
    """Return the body of a function as a reader would type it."""
    body = inspect.getsource(draw).split('"""', 2)[2]
    lines = [line.removeprefix("    ") for line in body.strip("\n").splitlines()]
    return re.sub(r"^return ", "ax = ", "\n".join(lines), flags=re.MULTILINE)


def write_page(path: Path) -> None:
    """Write the page with every picture and its code."""
    parts = [INTRODUCTION]
    for draw in FIGURES:
        title, name = inspect.getdoc(draw), draw.__name__
        parts.append(f"## {name.replace('_', ' ').capitalize()}\n\n{title}\n")
        parts.append(f"![{title.rstrip('.')}](images/gallery/{name}.png)\n")
        parts.append(f"```python\n{code_of(draw)}\n```\n")
    path.write_text("\n".join(parts), encoding="utf-8")


def main() -> None:
    """Draw every figure, and write the page."""
    plt.switch_backend("Agg")
    torch.set_num_threads(1)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        results = analyze_digits(Path(folder))._asdict()
        for draw in FIGURES:
            ax = draw(**{name: results[name] for name in inspect.signature(draw).parameters})
            path = FOLDER / f"{draw.__name__}.png"
            ax.figure.savefig(path, dpi=110)
            plt.close(ax.figure)
            with Image.open(path) as picture:  # half of the bytes, no difference to the eye
                picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    write_page(DOCS / "gallery.md")


if __name__ == "__main__":
    main()
