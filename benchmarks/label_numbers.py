"""Are the numbers beside the list of wrong labels right, or absent? On images, text and tables, on a CPU.

    python benchmarks/label_numbers.py --data DIR      results are added to benchmarks/results/label_numbers.jsonl

Images: 2,000 each of MNIST, Fashion-MNIST and CIFAR-10, a small convolutional net. Text: 2,000 docstrings of ten
packages that are installed with this one, whose class is the package, a small transformer. Tables: scikit-learn's
digits and breast cancer, a perceptron. No label made wrong on purpose, or a share of them; networks stopped early and
after they have learned every label. Memorized ones are reheated as well. `--keep FOLDER` keeps all votes.
"""

import ast
import re
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from images import data_folder, images
from label_flags import net as conv_net
from labels import flags
from records import Clock, measured, options, ranked
from torch import Tensor, nn
from torch.nn import functional as F

import likewise as lw
from likewise.statistics.label_issues import LabelSuspicion, suspicion_from_votes
from likewise.statistics.neighbors import class_votes
from nets import evaluated, spoiled

COUNT, SKETCH = 2000, 512
NOISE = (("uniform", 0.1), ("none", 0.0), ("pair", 0.1), ("uniform", 0.3), ("instance", 0.1))
DATA = ("text", "digits", "breast cancer", "mnist", "fashion-mnist", "cifar10")
EPOCHS = {"text": (5, 40), "digits": (15, 300), "breast cancer": (15, 400)}  # early, memorized
PACKAGES = [
    "numpy",
    "scipy",
    "pandas",
    "torch",
    "sklearn",
    "matplotlib",
    "transformers",
    "pyarrow",
    "lightning",
    "datasets",
]
WORDS, LENGTH = 3000, 32  # of the vocabulary, and of a text


class Transformer(nn.Module):
    """One block of attention over the words of a text, their mean, a linear layer."""

    def __init__(self, classes: int, width: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS + 2, width)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.block = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.last = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.block(self.words(tokens) + self.places)
        return self.last(hidden.mean(1))


def docstrings(package: str) -> list[str]:
    """Return the docstrings of a package's functions and classes, in the order of its files."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed: pip install 'likewise[test]' brings it.")
    found = []
    for file in sorted(Path(spec.origin).parent.rglob("*.py"))[:600]:
        tree = ast.parse(file.read_text(encoding="utf-8", errors="replace"))
        nodes = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef))
        found += [text for node in nodes if (text := ast.get_docstring(node)) and len(text) > 120]
    return found


def texts(seed: int) -> tuple[Tensor, Tensor, int]:
    """Return docstrings as numbers of words, (n, LENGTH), and the number of their package."""
    chance, rows = np.random.default_rng(seed), list[tuple[list[str], int]]()
    for label, package in enumerate(PACKAGES):
        every = sorted(set(docstrings(package)))
        picked = chance.choice(len(every), min(len(every), COUNT // len(PACKAGES)), replace=False)
        for i in picked:
            words = [w for w in re.findall(r"[a-z]+", every[i].lower()) if w not in PACKAGES]
            rows.append((words[:LENGTH], label))
    common = Counter(word for words, _ in rows for word in words).most_common(WORDS)
    number = {word: i + 2 for i, (word, _) in enumerate(common)}
    tokens = torch.zeros(len(rows), LENGTH, dtype=torch.long)
    for i, (words, _) in enumerate(rows):
        tokens[i, : len(words)] = torch.tensor([number.get(word, 1) for word in words])
    order = torch.tensor(chance.permutation(len(rows)))
    return tokens[order], torch.tensor([label for _, label in rows])[order], len(PACKAGES)


def tables(name: str) -> tuple[Tensor, Tensor, int]:
    """Return columns with mean 0 and deviation 1, and classes."""
    from sklearn.datasets import load_breast_cancer, load_digits

    values, classes = {"digits": load_digits, "breast cancer": load_breast_cancer}[name](return_X_y=True)
    x = torch.tensor(values, dtype=torch.float32)
    return (x - x.mean(0)) / x.std(0).clamp(min=1e-6), torch.tensor(classes).long(), int(classes.max()) + 1


def load(name: str, seed: int, given: Any) -> tuple[Tensor, Tensor, int]:
    if name == "text":
        return texts(seed)
    if name in EPOCHS:
        return tables(name)
    return *images(name, given.data, first=30_000 + COUNT * seed, count=COUNT), 10


def fresh(name: str, x: Tensor, classes: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    if name == "text":
        return Transformer(classes)
    if name in EPOCHS:
        layers = [nn.Linear(x.shape[1], 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(128, classes))
    return conv_net(x.shape[1])


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, seed: int) -> nn.Module:
    """Return the model after so many epochs of Adam, one cycle of learning rates, batches of 64."""
    chance = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters())
    steps = epochs * -(-len(x) // 64)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.2)
    model.train()
    for _ in range(epochs):
        for chosen in torch.randperm(len(x), generator=chance).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
            rate.step()
    return model.eval()


def settings(seeds: list[int]) -> list[dict[str, Any]]:
    return [
        {"data": data, "noise": kind, "share": share, "stage": stage, "seed": seed}
        for seed in seeds
        for kind, share in NOISE
        for data in DATA
        for stage in ("early", "memorized")
    ]


def spoil(y: Tensor, classes: int, setting: dict[str, Any], chances: Tensor | None) -> Tensor:
    """Return labels of which a share is wrong; two classes are exchanged."""
    if setting["noise"] == "none":
        return y
    found = spoiled(y, setting["noise"], setting["share"], setting["seed"], chances)
    return torch.where(found != y, (y + 1) % 2, y) if classes == 2 else found


def measure(setting: dict[str, Any], given: Any) -> dict[str, Any]:
    name, seed, clock = setting["data"], setting["seed"], Clock()
    x, y, classes = load(name, seed, given)
    early, memorized = EPOCHS.get(name, (6, 30))
    chances = None
    if setting["noise"] == "instance":
        chances = evaluated(train(fresh(name, x, classes, 500 + seed), x, y, early, seed), x).softmax(1)
        chances = F.pad(chances, (0, 10 - classes)) if classes < 10 else chances
    labels = spoil(y, classes, setting, chances)
    wrong, epochs = labels != y, early if setting["stage"] == "early" else memorized
    model = clock("train", lambda: train(fresh(name, x, classes, seed), x, labels, epochs, seed))
    votes = clock("votes", lambda: class_votes(lw.GramMatrix(model, (x, labels)), labels, sketch=SKETCH))
    outputs = evaluated(model, x)
    found = suspicion_from_votes(votes, labels, outputs.softmax(1))
    kept = {"votes": votes, "outputs": outputs, "labels": labels, "truth": y}
    result = {
        "learned": float((outputs.argmax(1) == labels).float().mean()),
        "supported": float((votes.argmax(1) == labels).float().mean()),
        "wrong": int(wrong.sum()),
        "before": numbers(found, wrong),
    }
    if setting["stage"] == "memorized":
        hot = clock("reheat", lambda: lw.reheat(model, (x, labels), sketch=SKETCH))
        result["reheated"] = {"skipped": hot.skipped, "rate": hot.learning_rate, "target": hot.target}
        if hot.model is not None:
            gram = lw.GramMatrix(hot.model, (x, labels))
            kept["votes after"] = class_votes(gram, labels, sketch=SKETCH)
            kept["outputs after"], kept["margins"] = evaluated(hot.model, x), hot.margins
            chances = kept["outputs after"].softmax(1)
            result["after"] = numbers(suspicion_from_votes(kept["votes after"], labels, chances), wrong)
            result["reheated"]["accuracy"] = hot.accuracy_after
    if given.keep is not None:
        given.keep.mkdir(parents=True, exist_ok=True)
        file = given.keep / f"{'-'.join(str(v) for v in setting.values()).replace(' ', '_')}.npz"
        np.savez_compressed(file, **{k: v.numpy() for k, v in kept.items()})
    return {**result, "seconds": clock.seconds}


def numbers(found: LabelSuspicion, wrong: Tensor) -> dict[str, Any]:
    """Return what is said of the number of wrong labels, beside the truth."""
    return {
        "flags": flags(found.flagged, wrong),
        "expected": list(found.precision),
        "errors": list(found.errors),
        "distinct": found.distinct,
        "scores": ranked({"likewise": found.suspicion}, wrong) if wrong.any() else {},
    }


def main() -> None:
    arguments = options(__doc__, "label_numbers")
    data_folder(arguments)
    arguments.add_argument("--keep", type=Path, default=None, help="folder for the votes of each setting")
    given = arguments.parse_args()
    measured(settings(given.seeds), measure, given)


if __name__ == "__main__":
    main()
