"""Wrong targets that are not one class a sample: several labels, values, masks, words. Beside cleanlab's scores.

    python benchmarks/beyond_classes.py                      several labels, values, words; about a minute on one thread
    python benchmarks/beyond_classes.py --aerial FOLDER      masks of aerial tiles, too (the five places' tiles)
    python benchmarks/beyond_classes.py --table              what was found

    labels   4,000 pairs of scikit-learn's digits, labels: which of the ten digits occur; 3 % of the 0s and 1s flipped
    values   scikit-learn's diabetes and Friedman's first function, 1,000 samples; 5 % of the values exchanged
    words    Python source of the standard library, 24 words a sample, class: keyword, name, number, operator, ...;
             5 % of the classes wrong
    masks    building outlines of aerial tiles, 64 x 64; in a fifth of the tiles outlines shifted by 6 pixels, or erased

Networks stopped early and trained long; each score is by the same network's predictions on the data that it was trained
on. Average precision: of cells of the label matrix, of values, of words; of tiles, and of 16 x 16 cells of all tiles.
"""

import argparse
import io
import keyword
import sysconfig
import tokenize
from pathlib import Path
from typing import Any

import numpy as np
import torch
from records import FOLDER, Clock, add, lines, ranked
from sklearn import datasets
from torch import Tensor, nn
from torch.nn import functional as F

import likewise as lw

EPOCHS = {"labels": (10, 60), "values": (30, 400), "words": (4, 40), "masks": (15, 60)}
CELL, SIDE, SHIFT = 16, 64, 6
BUCKETS, LENGTH = 512, 24
KINDS = ("keyword", "name", "number", "string", "operator", "other")


def train(model: nn.Module, x: Tensor, loss: Any, epochs: int, seed: int, size: int = 64) -> nn.Module:
    """Return the model after so many epochs of Adam; loss: (outputs, places) -> a number."""
    chance = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(epochs):
        for chosen in torch.randperm(len(x), generator=chance).split(size):
            optimizer.zero_grad()
            loss(model(x[chosen]), chosen).backward()
            optimizer.step()
    return model.eval()


def perceptron(inputs: int, outputs: int, width: int = 128) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)
    )


def several_labels(seed: int, epochs: int, given: Any) -> dict[str, Any]:
    from cleanlab.internal.multilabel_scorer import (
        ClassLabelScorer,
        MultilabelScorer,  # its score of each label
    )

    chance = np.random.default_rng(seed)
    pixels, classes = datasets.load_digits(return_X_y=True)
    left, right = chance.integers(0, len(pixels), (2, 4000))
    x = torch.tensor(np.concatenate([pixels[left], pixels[right]], 1) / 16).float()
    truth = torch.zeros(len(x), 10)
    truth[torch.arange(len(x)), torch.tensor(classes[left])] = 1
    truth[torch.arange(len(x)), torch.tensor(classes[right])] = 1
    wrong = torch.tensor(chance.random(truth.shape) < 0.03)
    y = torch.where(wrong, 1 - truth, truth)
    torch.manual_seed(seed)
    loss = lambda outputs, chosen: F.binary_cross_entropy_with_logits(outputs, y[chosen])  # noqa: E731
    model = train(perceptron(128, 10), x, loss, epochs, seed)
    chances = model(x).sigmoid().detach()
    gram = lw.GramMatrix(lw.Network(model, lw.all_outputs), (x, y.long()))
    found = lw.multilabel_suspicion(gram, sketch=1024)
    scorer = MultilabelScorer(base_scorer=ClassLabelScorer.SELF_CONFIDENCE)
    quality = scorer.get_class_label_quality_scores(y.numpy().astype(int), chances.numpy().astype(float))
    scores = {
        "likewise": found.suspicion.flatten(),
        "loss, which is cleanlab's order of each label": -torch.tensor(quality).flatten(),
    }
    return {
        "scores": ranked(scores, wrong.flatten()),
        "learned": float(((chances > 0.5) == (y > 0.5)).float().mean()),
    }


def values(seed: int, epochs: int, given: Any) -> dict[str, Any]:
    from cleanlab.regression.rank import get_label_quality_scores

    results = {}
    for name, (inputs, targets) in {
        "diabetes": datasets.load_diabetes(return_X_y=True),
        "friedman": datasets.make_friedman1(1000, 10, noise=1.0, random_state=seed),
    }.items():
        chance = np.random.default_rng(seed)
        x = torch.tensor((inputs - inputs.mean(0)) / inputs.std(0)).float()
        true = torch.tensor((targets - targets.mean()) / targets.std()).float()
        picked = torch.tensor(chance.permutation(len(x))[: len(x) // 20])
        y = true.clone()
        y[picked] = true[picked].roll(1)
        wrong = (y - true).abs() > 0.5  # an exchange of nearly the same value is no error
        torch.manual_seed(seed)
        loss = lambda outputs, chosen, y=y: F.mse_loss(outputs[:, 0], y[chosen])  # noqa: E731
        model = train(perceptron(x.shape[1], 1), x, loss, epochs, seed)
        predicted = model(x)[:, 0].detach()
        found = lw.value_suspicion(lw.GramMatrix(model, (x, y)), sketch=None)
        flagged = found.flagged
        scores = {
            "likewise": found.score,
            "residual": (y - predicted).abs(),
            "cleanlab (OUTRE)": -torch.tensor(get_label_quality_scores(y.numpy(), predicted.numpy())),
        }
        results[name] = {
            "scores": ranked(scores, wrong),
            "flagged": [int(flagged.sum()), float(wrong[flagged].double().mean()), int(wrong.sum())],
        }
    return results


class Tagger(nn.Module):
    """A class for every word, from it and its neighbors."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(BUCKETS, 32)
        self.around = nn.Conv1d(32, 64, 5, padding=2)
        self.last = nn.Linear(64, len(KINDS))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.around(self.words(tokens).transpose(1, 2)).relu()
        return self.last(hidden.transpose(1, 2))


def source_words(count: int) -> tuple[Tensor, Tensor]:
    """Return words of the standard library's source, (count, LENGTH), as numbers of buckets, and their classes."""
    words, kinds = list[int](), list[int]()
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        try:
            found = list(tokenize.generate_tokens(io.StringIO(file.read_text()).readline))
        except (tokenize.TokenError, UnicodeDecodeError, SyntaxError):
            continue
        for token in found:
            if not token.string.strip() or token.type == tokenize.COMMENT:
                continue
            words.append(sum((i + 1) * ord(c) for i, c in enumerate(token.string[:12])) % BUCKETS)
            kinds.append(kind_of(token))
        if len(words) > count * LENGTH:
            break
    shape = (count, LENGTH)
    return torch.tensor(words[: count * LENGTH]).reshape(shape), torch.tensor(
        kinds[: count * LENGTH]
    ).reshape(shape)


def kind_of(token: tokenize.TokenInfo) -> int:
    if token.type == tokenize.NAME:
        return 0 if keyword.iskeyword(token.string) else 1
    return {tokenize.NUMBER: 2, tokenize.STRING: 3, tokenize.OP: 4}.get(token.type, 5)


def words(seed: int, epochs: int, given: Any) -> dict[str, Any]:
    from cleanlab.token_classification.rank import get_label_quality_scores

    chance = np.random.default_rng(seed)
    x, truth = source_words(250)
    wrong = torch.tensor(chance.random(truth.shape) < 0.05)
    y = torch.where(
        wrong, (truth + torch.tensor(chance.integers(1, len(KINDS), truth.shape))) % len(KINDS), truth
    )
    torch.manual_seed(seed)
    loss = lambda outputs, chosen: F.cross_entropy(outputs.flatten(0, 1), y[chosen].flatten())  # noqa: E731
    model = train(Tagger(), x, loss, epochs, seed, size=16)
    chances = model(x).softmax(2).detach().numpy().astype(float)
    found = lw.cell_suspicion(model, (x, y), sketch=1024)
    by_sentence, by_word = get_label_quality_scores(y.tolist(), list(chances))
    cleanlab = torch.tensor(np.concatenate([np.asarray(scores) for scores in by_word]))
    return {
        "scores": ranked({"likewise": found.cells.flatten(), "cleanlab": -cleanlab}, wrong.flatten()),
        "sentences": ranked(
            {"likewise": found.samples, "cleanlab": -torch.tensor(by_sentence)}, wrong.any(1)
        ),
        "learned": float((torch.tensor(chances.argmax(2)) == y).float().mean()),
    }


def small_net() -> nn.Module:
    """A little U: two classes for every pixel."""

    def block(i: int, o: int, stride: int = 1) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(i, o, 3, stride, 1), nn.GroupNorm(4, o), nn.ReLU())

    return nn.Sequential(
        block(3, 16, 2), block(16, 32, 2), block(32, 32), nn.Upsample(scale_factor=2), block(32, 16),
        nn.Upsample(scale_factor=2), nn.Conv2d(16, 2, 3, padding=1),
    )  # fmt: skip


def tiles(folder: Path, count: int) -> tuple[Tensor, Tensor]:
    """Return tiles with buildings as images and masks, of places whose outlines are aligned, the wider zoom."""
    from PIL import Image

    images, masks = list[np.ndarray](), list[np.ndarray]()
    for place in ("zanzibar", "kampala", "catanduanes"):
        for file in sorted((folder / place).glob("20-*.mask.png")):
            mask = (
                np.asarray(Image.open(file).convert("L").resize((SIDE, SIDE), Image.Resampling.NEAREST)) > 0
            )
            picture = next(
                p for p in file.parent.glob(file.name.replace(".mask.png", ".*")) if ".mask" not in p.name
            )
            if mask.mean() > 0.03:
                images.append(np.asarray(Image.open(picture).convert("RGB").resize((SIDE, SIDE))))
                masks.append(mask)
    chosen = np.random.default_rng(0).permutation(len(images))[:count]
    x = torch.tensor(np.stack([images[i] for i in chosen])).permute(0, 3, 1, 2).float() / 128 - 1
    return x, torch.tensor(np.stack([masks[i] for i in chosen])).long()


def masks(seed: int, epochs: int, given: Any) -> dict[str, Any]:
    from cleanlab.segmentation.rank import get_label_quality_scores

    x, truth = tiles(given.aerial, 100)
    chance = np.random.default_rng(seed)
    y, wrong = truth.clone(), torch.zeros(len(x), dtype=torch.bool)
    for i in chance.permutation(len(x))[: len(x) // 5]:
        wrong[i] = True
        erase = chance.random() < 0.5
        y[i] = torch.zeros_like(y[i]) if erase else y[i].roll((SHIFT, -SHIFT), (0, 1))
    torch.manual_seed(seed)
    loss = lambda outputs, chosen: F.cross_entropy(outputs, y[chosen])  # noqa: E731
    model = train(small_net(), x, loss, epochs, seed, size=16)
    chances = model(x).softmax(1).detach()
    clock = Clock()
    found = clock(
        "likewise",
        lambda: lw.cell_suspicion(model, (x, y), cell=CELL, parameters=["4.*", "6.*"], sketch=1024),
    )
    quality, pixels = get_label_quality_scores(
        y.numpy(), chances.numpy().astype(float), verbose=False, n_jobs=1
    )
    if given.keep is not None:
        np.savez(
            given.keep,
            x=x,
            y=y,
            truth=truth,
            wrong=wrong,
            chances=chances,
            cells=found.cells,
            samples=found.samples,
        )
    differ = F.avg_pool2d((y != truth).float()[:, None], CELL)[:, 0] > 0.25  # cells that are a quarter wrong
    per_cell = F.avg_pool2d(torch.tensor(1 - pixels).float()[:, None], CELL)[:, 0]
    return {
        "tiles": ranked({"likewise": found.samples, "cleanlab": -torch.tensor(quality)}, wrong),
        "scores": ranked(
            {"likewise": found.cells.flatten(), "cleanlab": per_cell.flatten()}, differ.flatten()
        ),
        "learned": float((chances.argmax(1) == y).float().mean()),
        "seconds": clock.seconds,
    }


TASKS = {"labels": several_labels, "values": values, "words": words, "masks": masks}


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--aerial", type=Path, default=None, help="folder of the tiles of five places")
    arguments.add_argument("--only", nargs="+", default=list(TASKS))
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    arguments.add_argument("--out", type=Path, default=FOLDER / "beyond_classes.jsonl")
    arguments.add_argument("--keep", type=Path, default=None, help="file for the scores of masks")
    arguments.add_argument("--table", action="store_true", help="only show what was found")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    done = [line["setting"] for line in lines(given.out)]
    for seed in given.seeds if not given.table else ():
        for task in given.only:
            for stage, epochs in zip(("early", "long"), EPOCHS[task], strict=True):
                setting = {"task": task, "stage": stage, "seed": seed}
                if setting not in done and (task != "masks" or given.aerial is not None):
                    add(given.out, setting, **TASKS[task](seed, epochs, given))
    for line in lines(given.out):
        kinds = {name: value for name, value in line.items() if isinstance(value, dict) and name != "setting"}
        print(line["setting"], {k: v for k, v in line.items() if isinstance(v, float)})
        for name, value in kinds.items():
            print("   ", name, value)


if __name__ == "__main__":
    main()
