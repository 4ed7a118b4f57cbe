"""Do gradients of word embeddings, or words alone, tell wrong labels of texts? Networks for choosing, on a CPU.

    python benchmarks/label_words.py --out FOLDER      trains networks, keeps what is known of each label in FOLDER
    python benchmarks/label_words.py --out FOLDER --table      rankings of what is there

Docstrings of twenty packages, none of which `benchmarks/label_texts.py` or `label_numbers.py` reads, in two sets of
ten classes; 120 texts of a class. A convolution of words, the mean of words, and a transformer; 10 % uniform errors
(first set) and 20 % of the next class (second set); stopped early and memorized, memorized ones reheated twice. With
two seeds twelve settings, and four with made-up texts: random words, four classes told by the order of two pairs of
words ("order"), or one bit by an order and one by a word ("half"), which words alone cannot tell. A minute or two
each.
"""

import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from label_numbers import LENGTH, docstrings
from label_texts import Transformer, by_parts, linear_chances, spoil
from records import options
from sklearn.metrics import average_precision_score
from torch import Tensor, nn
from torch.nn import functional as F

import likewise as lw
from likewise.statistics.label_issues import (
    WORDS_WEIGHT,
    OpinionAfter,
    _mean_rank,
    _weight_of_words,
    combined_suspicion,
    opinion_after,
    suspicion_from_votes,
)
from likewise.statistics.neighbors import class_votes
from likewise.statistics.shared_words import distinct_tokens, resemblance_of_tokens

WORDS, PER_CLASS, SKETCH = 3000, 120, 1024
SETS = {
    "a": (
        [
            "sympy",
            "numba",
            "networkx",
            "IPython",
            "fontTools",
            "huggingface_hub",
            "pydantic",
            "tornado",
            "hypothesis",
            "torchmetrics",
        ]
    ),
    "b": [
        "setuptools",
        "mypy",
        "playwright",
        "narwhals",
        "peft",
        "accelerate",
        "prompt_toolkit",
        "rich",
        "PIL",
        "fsspec",
    ],
}
NOISE = (("uniform", 0.1), ("pair", 0.2))
MADE_UP, MADE_UP_EPOCHS, TEXTS = ("order", "half"), (8, 40), 1200
EPOCHS = {"transformer": (6, 50), "convolution": (6, 40), "mean": (10, 80)}  # early, memorized


class Convolution(nn.Module):
    """A convolution over three words, the largest value of each channel, a linear layer."""

    def __init__(self, classes: int, width: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS + 2, width)
        self.convolution = nn.Conv1d(width, 128, 3, padding=1)
        self.last = nn.Linear(128, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.convolution(self.words(tokens).mT).relu().amax(2))


class Mean(nn.Module):
    """The mean of the words of a text, a hidden layer."""

    def __init__(self, classes: int, width: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS + 2, width, padding_idx=0)
        self.hidden, self.last = nn.Linear(width, 128), nn.Linear(128, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        count = (tokens > 0).sum(1, keepdim=True).clamp(min=1)
        return self.last(self.hidden(self.words(tokens).sum(1) / count).relu())


NETS = {
    "transformer": lambda classes: Transformer(LENGTH, classes),
    "convolution": Convolution,
    "mean": Mean,
}


def texts(packages: list[str], seed: int) -> tuple[Tensor, Tensor]:
    """Return docstrings as numbers of words, (n, LENGTH), and the number of their package."""
    chance, rows = np.random.default_rng(seed), list[tuple[list[str], int]]()
    names = {package.lower() for package in packages}
    for label, package in enumerate(packages):
        every = sorted(set(docstrings(package)))
        for i in chance.choice(len(every), min(len(every), PER_CLASS), replace=False):
            words = [w for w in re.findall(r"[a-z]+", every[i].lower()) if w not in names]
            rows.append((words[:LENGTH], label))
    common = Counter(word for words, _ in rows for word in words).most_common(WORDS)
    number = {word: i + 2 for i, (word, _) in enumerate(common)}
    tokens = torch.zeros(len(rows), LENGTH, dtype=torch.long)
    for i, (words, _) in enumerate(rows):
        tokens[i, : len(words)] = torch.tensor([number.get(word, 1) for word in words])
    order = torch.tensor(chance.permutation(len(rows)))
    return tokens[order], torch.tensor([label for _, label in rows])[order]


def train(model: Any, x: Tensor, y: Tensor, epochs: int, watch: lw.Watch) -> Any:
    """Return the model after so many epochs of Adam, one cycle of learning rates, batches of 64."""
    optimizer = torch.optim.Adam(model.parameters())
    steps = epochs * -(-len(x) // 64)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.2)
    model.train()
    for _ in range(epochs):
        for chosen in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            outputs = model(x[chosen])
            F.cross_entropy(outputs, y[chosen]).backward()
            optimizer.step()
            rate.step()
            watch.update(outputs.detach(), y[chosen], chosen)
    return model.eval()


def word_gradients(model: Any, x: Tensor, readout: Any) -> Tensor:
    """Return the gradients of outputs by the looked-up vectors, (n, t, outputs × width)."""
    parts = []
    for part in x.split(200):
        held: list[Tensor] = []
        handle = model.words.register_forward_hook(
            lambda _m, _i, out, held=held: held.append(out.detach().requires_grad_()) or held[0]
        )
        outputs = readout(model(part))
        handle.remove()
        columns = [
            torch.autograd.grad(outputs[:, o].sum(), held[0], retain_graph=True)[0]
            for o in range(outputs.shape[1])
        ]
        parts.append(torch.cat(columns, 2))
    return torch.cat(parts)


def word_products(
    gradients: Tensor, x: Tensor, weights: Tensor | None = None, skip: int | None = None
) -> Tensor:
    """Return inner products of gradients of the embedding table, (n, n): Σ of words that two texts share."""
    n = len(x)
    products = torch.zeros(n, n, dtype=torch.float64)
    flat, rows = x.flatten(), torch.arange(n).repeat_interleave(x.shape[1])
    values, order = gradients.flatten(0, 1), flat.argsort(stable=True)
    for places in order.split(flat.bincount()[flat.bincount() > 0].tolist()):
        word = int(flat[places[0]])
        if word == skip:
            continue
        texts_of, which = rows[places].unique(return_inverse=True)
        summed = torch.zeros(len(texts_of), values.shape[1]).index_add_(0, which, values[places])
        scale = 1.0 if weights is None else float(weights[word])
        products[texts_of[:, None], texts_of] += scale * (summed @ summed.T).double()
    return products


def kept(model: Any, x: Tensor) -> dict[str, Tensor]:
    """Return similarities of gradients of the words, in half precision, (n, n) each."""
    texts_with = torch.zeros(WORDS + 2)
    for row in x:
        texts_with[row.unique()] += 1
    idf = ((1 + len(x)) / (1 + texts_with)).log() + 1
    found = {}
    for name, readout in (("logits", lambda z: z), ("log p", lambda z: z.log_softmax(1))):
        gradients = word_gradients(model, x, readout)
        skip = model.words.padding_idx
        plain = {"": None, " idf": idf, " idf²": idf**2} if name == "logits" else {"": None}
        for variant, weights in plain.items():
            found[name + variant] = word_products(gradients, x, weights, skip)
    return found


def unit(products: Tensor) -> Tensor:
    length = products.diagonal().clamp(min=1e-300).sqrt()
    return products / length[:, None] / length


def made_up(kind: str, seed: int) -> tuple[Tensor, Tensor]:
    """Return random words with two pairs among them, whose order, or whose words, tell one of four classes."""
    chance = torch.Generator().manual_seed(seed)
    x = torch.randint(20, 2000, (TEXTS, LENGTH), generator=chance)
    y = torch.randint(0, 4, (TEXTS,), generator=chance)
    second = ([5, 4], [4, 5]) if kind == "order" else ([5, 5], [4, 4])
    for i, label in enumerate(y.tolist()):
        p, q = torch.randint(1, LENGTH - 2, (2,), generator=chance).sort().values.tolist()
        x[i, p : p + 2] = torch.tensor([2, 3] if label % 2 else [3, 2])
        q = min(max(q, p + 2), LENGTH - 2)
        x[i, q : q + 2] = torch.tensor(second[label // 2])
    return x, y


def measure_made_up(kind: str, seed: int, file: Path) -> None:
    x, y = made_up(kind, seed)
    labels = spoil(y, "uniform", 0.1, seed)
    found: dict[str, Any] = {"x": x, "labels": labels, "wrong": labels != y}
    for stage, epochs in zip(("early", "memorized"), MADE_UP_EPOCHS, strict=True):
        torch.manual_seed(seed)
        model = train(Convolution(4), x, labels, epochs, lw.Watch(len(x)))
        gram = lw.GramMatrix(lw.Network(model, lw.all_outputs), (x, labels))
        found[stage] = {
            "votes": class_votes(gram, labels, sketch=SKETCH),
            "chances": by_parts(model, x).softmax(1),
        }
    torch.save(found, file)


def measure(case: tuple[Any, ...], file: Path) -> None:
    which, net, kind, share, seed = case
    x, y = texts(SETS[which], seed)
    labels = spoil(y, kind, share, seed)
    found: dict[str, Any] = {
        "x": x,
        "labels": labels,
        "wrong": labels != y,
        "linear": linear_chances(x, labels),
    }
    for stage, epochs in zip(("early", "memorized"), EPOCHS[net], strict=True):
        torch.manual_seed(seed)
        watch = lw.Watch(len(x))
        model = train(NETS[net](10), x, labels, epochs, watch)
        network = lw.Network(model, lw.all_outputs)
        gram = lw.GramMatrix(network, (x, labels))
        votes = class_votes(gram, labels, sketch=SKETCH)
        words = lw.GramMatrix(lw.Network(model, lw.all_outputs, parameters=["words.*"]), (x, labels))
        record = {"chances": by_parts(model, x).softmax(1), "votes": votes, "margins": watch.early_margins}
        record["words"] = {k: unit(v).half() for k, v in kept(model, x).items()}
        record["sketched words"] = class_votes(words, labels, sketch=SKETCH)
        if stage == "memorized":
            hot = lw.reheat(network, (x, labels), votes=votes, rounds=2, seed=seed)
            if not hot.skipped:
                record["after"] = opinion_after(gram, hot, sketch=SKETCH)._asdict()
        found[stage] = record
    torch.save(found, file)


def centered(similarities: Tensor) -> Tensor:
    mean = similarities.mean(0)
    return unit(similarities - mean - mean[:, None] + mean.mean())


def cast(similarities: Tensor, labels: Tensor, power: float) -> Tensor:
    weights = centered(similarities.double()).clamp(min=0).pow(power).fill_diagonal_(0)
    return weights @ F.one_hot(labels).double()


def left_out_ridge(similarities: Tensor, labels: Tensor, penalty: float) -> Tensor:
    """Return what kernel ridge regression says of each text from the others, less what it says of its label."""
    kernel, y = centered(similarities.double()), F.one_hot(labels).double()
    inverse = torch.linalg.inv(kernel + penalty * torch.eye(len(kernel)))
    y = y - y.mean(0)
    return margin(y - inverse @ y / inverse.diagonal()[:, None], labels)


def margin(scores: Tensor, labels: Tensor) -> Tensor:
    own = scores.gather(1, labels[:, None])
    return (scores.scatter(1, labels[:, None], -torch.inf).amax(1, keepdim=True) - own)[:, 0]


def tfidf(x: Tensor) -> Tensor:
    counts = torch.zeros(len(x), WORDS + 2).scatter_add_(1, x, torch.ones(x.shape))
    counts[:, 0] = 0
    idf = ((1 + len(x)) / (1 + (counts > 0).sum(0))).log() + 1
    vectors = F.normalize(torch.where(counts > 0, 1 + counts.clamp(min=1).log(), 0) * idf, dim=1)
    return vectors @ vectors.T


def rankings(found: dict[str, Any], stage: str) -> dict[str, Tensor]:
    """Return scores of the labels by name."""
    x, labels, record = found["x"], found["labels"], found[stage]
    chances, votes = record["chances"].double(), record["votes"]
    words = resemblance_of_tokens(*distinct_tokens(x), labels)
    scores = {
        "loss": -chances.gather(1, labels[:, None])[:, 0],
        "votes of all parameters": suspicion_from_votes(votes, labels).suspicion,
        "likewise without words": suspicion_from_votes(votes, labels, chances).suspicion,
        "words alone, no network": margin(words, labels),
    }
    if "linear" in found:
        scores["TF-IDF, logistic regression, CV"] = -found["linear"].gather(1, labels[:, None])[:, 0]
        alike = tfidf(x)
        scores["votes by cosine of TF-IDF, power 2, no network"] = suspicion_from_votes(
            cast(alike, labels, 2), labels
        ).suspicion
        scores["left-out ridge of TF-IDF, penalty 4, no network"] = left_out_ridge(alike, labels, 4)
        scores["votes of embeddings, whitened, sketched, power 4"] = suspicion_from_votes(
            record["sketched words"], labels
        ).suspicion
        for name, similarities in record["words"].items():
            for power in (1, 2, 4):
                scores[f"votes of embeddings, {name}, power {power}"] = suspicion_from_votes(
                    cast(similarities, labels, power), labels
                ).suspicion
            scores[f"left-out ridge of embeddings, {name}, penalty 1"] = left_out_ridge(
                similarities, labels, 1
            )
    bases = {"likewise": (scores["likewise without words"], votes)}
    if "after" in record:
        after = OpinionAfter(**record["after"])
        scores["reheated"] = combined_suspicion(votes, labels, chances, None, after).suspicion
        bases["reheated"] = scores["reheated"], after.votes
    for name, (base, judge) in bases.items():
        ratio = (_weight_of_words(words, judge, labels) / WORDS_WEIGHT) ** (1 / 3)
        for weight in (2, 4):
            for power in (0, 1, 2, 3, 4):
                weights = [(1.0, base), (weight * ratio**power, margin(words, labels))]
                scores[f"{name}, words {weight} r^{power}"] = _mean_rank(weights)
        if "words" in record:
            embedded = scores["votes of embeddings, logits, power 2"]
            scores[f"{name}, votes of embeddings 1"] = _mean_rank([(1.0, base), (1.0, embedded)])
    return scores


def table(folder: Path) -> None:
    """Print average precision of rankings: means of the networks, the lowest, and means of the made-up ones."""
    rows: dict[str, dict[str, list[float]]] = {}
    for file in sorted(folder.glob("*.pt")):
        found = torch.load(file)
        for stage in ("early", "memorized"):
            column = stage if "linear" in found else f"made up: {file.stem.split('-')[0]}, {stage}"
            for name, score in rankings(found, stage).items():
                value = average_precision_score(found["wrong"].numpy(), score.double().nan_to_num().numpy())
                rows.setdefault(name, {}).setdefault(column, []).append(float(value))
    columns = sorted({column for row in rows.values() for column in row})
    print(f"| ranking | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for name, row in rows.items():
        cells = [f"{np.mean(row[c]):.3f} (lowest {min(row[c]):.3f})" if c in row else "" for c in columns]
        print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    arguments = options(__doc__, "label_words")
    arguments.set_defaults(out=Path("out/label-words"), seeds=[21, 22])
    arguments.add_argument("--table", action="store_true")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    given.out.mkdir(parents=True, exist_ok=True)
    for seed in [] if given.table else given.seeds:
        for net in NETS:
            for which, (kind, share) in zip(SETS, NOISE, strict=True):
                file = given.out / f"{which}-{net}-{kind}-{seed}.pt"
                if not file.exists() and given.only in file.stem:
                    measure((which, net, kind, share, seed), file)
        for kind in MADE_UP:
            file = given.out / f"{kind}-{seed}.pt"
            if not file.exists() and given.only in file.stem:
                measure_made_up(kind, seed, file)
    table(given.out)


if __name__ == "__main__":
    main()
