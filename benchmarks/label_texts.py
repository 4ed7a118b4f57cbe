"""Who finds wrong labels in texts, tables and a hundred classes? likewise beside what people use.

    python benchmarks/label_texts.py --prepare                                 texts into one file, out/label-texts.npz
    python benchmarks/label_texts.py --device cuda --processes 8 --out FILE    all settings, eight side by side
    python benchmarks/label_texts.py --table --out FILE                        the table of what is there

Texts: 2,000 docstrings of ten packages that pip installs with this one (numpy, scipy, pandas, torch, scikit-learn,
matplotlib, transformers, pyarrow, lightning, datasets), whose class is the package, its name left out; a transformer
of two blocks, 260,000 parameters. Tables: scikit-learn's digits, breast cancer and wine, and a made-up one whose
classes overlap; a perceptron. A hundred classes: 4,000 pairs of scikit-learn's digits side by side; a perceptron.
Networks stopped early, and after they have memorized their labels. Average precision of rankings of the labels:

    likewise             label_suspicion of the network; reheated (four rounds) where it is memorized; + record with
                         margins of its training; words: also by the words that texts share, the default for texts
    loss, deep k-NN      of the same network; k-NN by its last features, 20 neighbors
    relation graph       Kim et al., 2023: a graph of all samples by last features and predictions, cut in two
    AUM, cartography     margin and confidence over training, which need its logs
    cross-validation     five more networks, stopped early (likewise.crossval)
    linear, CV           five-fold logistic regression: of TF-IDF for texts, of the columns for tables
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from crossval import DATA as TABLES
from label_numbers import WORDS, texts
from labels import of_neighbors
from records import Clock, add, lines, named, ranked
from sklearn.feature_extraction.text import TfidfTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from torch import Tensor, nn
from torch.nn import functional as F

import likewise as lw
from likewise.statistics.label_issues import combined_suspicion, opinion_after
from likewise.statistics.neighbors import class_votes
from likewise.statistics.shared_words import class_resemblance

DATA = ("docstrings", "digit pairs", *TABLES)
NOISE = (("uniform", 0.1), ("pair", 0.2), ("uniform", 0.3))
EPOCHS = {"docstrings": (5, 40), "digit pairs": (15, 80)}  # early, memorized
TABLE_EPOCHS = (15, 200)
SKETCH = 1024
PAIRS = 4000


class Transformer(nn.Module):
    """Two blocks of attention over the words of a text, their mean, a linear layer."""

    def __init__(self, length: int, classes: int, width: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS + 2, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
                for _ in range(2)
            )
        )
        self.last = nn.Linear(width, classes)

    def features(self, tokens: Tensor) -> Tensor:
        """Return what the last layer sees."""
        return self.blocks(self.words(tokens) + self.places).mean(1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.features(tokens))


class Perceptron(nn.Module):
    """Two hidden layers."""

    def __init__(self, inputs: int, classes: int, width: int = 128) -> None:
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.last = nn.Linear(width, classes)

    def features(self, x: Tensor) -> Tensor:
        """Return what the last layer sees."""
        return self.hidden(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.hidden(x))


def prepare(given: argparse.Namespace) -> None:
    """Write the texts to one file, since they are of installed packages."""
    given.texts.parent.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for seed in given.seeds:
        tokens, labels, _ = texts(seed)
        arrays |= {f"tokens {seed}": tokens.numpy().astype(np.int16), f"labels {seed}": labels.numpy()}
    np.savez_compressed(given.texts, **arrays)
    print(f"{given.texts}: {given.texts.stat().st_size:,} bytes")


def load(name: str, seed: int, given: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Return inputs and true classes."""
    if name == "docstrings":
        if not given.texts.exists():
            return texts(seed)[:2]
        with np.load(given.texts) as file:
            return torch.tensor(file[f"tokens {seed}"]).long(), torch.tensor(file[f"labels {seed}"]).long()
    if name == "digit pairs":
        pixels, classes = TABLES["digits"]()
        chance = np.random.default_rng(seed)
        left, right = chance.integers(0, len(pixels), (2, PAIRS))
        x = torch.tensor(np.concatenate([pixels[left], pixels[right]], 1) / 16).float()
        return x, torch.tensor(10 * classes[left] + classes[right]).long()
    values, classes = TABLES[name]()
    x = torch.tensor(values).float()
    return (x - x.mean(0)) / x.std(0).clamp(min=1e-6), torch.tensor(classes).long()


def spoil(y: Tensor, kind: str, share: float, seed: int) -> Tensor:
    """Return labels of which a share is wrong: any other class, or the next one."""
    chance, classes = torch.Generator().manual_seed(1000 + seed), int(y.max()) + 1
    picked = torch.randperm(len(y), generator=chance)[: round(share * len(y))]
    step = torch.randint(1, classes, (len(y),), generator=chance) if kind == "uniform" else torch.ones_like(y)
    found = y.clone()
    found[picked] = ((y + step) % classes)[picked]
    return found


def fresh(x: Tensor, classes: int) -> Any:
    model = Perceptron(x.shape[1], classes) if x.is_floating_point() else Transformer(x.shape[1], classes)
    return model.to(x.device)


def train(x: Tensor, y: Tensor, classes: int, epochs: int, watch: lw.Watch | None = None) -> Any:
    """Return a model after so many epochs of Adam, one cycle of learning rates, batches of 64."""
    model = fresh(x, classes)
    optimizer = torch.optim.Adam(model.parameters())
    steps = epochs * -(-len(x) // 64)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.2)
    model.train()
    for _ in range(epochs):
        for chosen in torch.randperm(len(x)).split(64):
            here = chosen.to(x.device)
            optimizer.zero_grad()
            outputs = model(x[here])
            F.cross_entropy(outputs, y[here]).backward()
            optimizer.step()
            rate.step()
            if watch is not None:
                watch.update(outputs.detach(), y[here], chosen)
    return model.eval()


def by_parts(function: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([function(part) for part in x.split(500)])


def relation_graph(features: Tensor, chances: Tensor, labels: Tensor, rounds: int = 10) -> Tensor:
    """Return how much the relations of each sample speak against its label.

    Edges are the cosine of features, positive part, to the fourth power, times the agreement of predictions; positive
    between equal labels, negative between others. Samples whose edges to the rest add up to less than 0 are taken out
    of it, and add their own edges with the opposite sign, until nothing changes.
    """
    unit = F.normalize(features.double(), dim=1)
    edges = (unit @ unit.T).clamp(min=0).pow(4) * (chances.double() @ chances.double().T)
    edges *= torch.where(labels[:, None] == labels, 1.0, -1.0)
    edges.fill_diagonal_(0)
    side = torch.ones(len(labels), dtype=torch.float64, device=features.device)
    for _ in range(rounds):
        new = torch.where(edges @ side < 0, -1.0, 1.0).to(side)
        if torch.equal(new, side):
            break
        side = new
    return -(edges @ side)


def linear_chances(x: Tensor, labels: Tensor) -> Tensor:
    """Return out-of-fold probabilities of logistic regression, of TF-IDF for texts."""
    values = x.cpu()
    if values.is_floating_point():
        model, inputs = LogisticRegression(max_iter=100), values.numpy()
    else:
        counts = torch.zeros(len(values), WORDS + 2).scatter_add_(1, values, torch.ones(values.shape))
        counts[:, 0] = 0  # padding
        model, inputs = (
            make_pipeline(TfidfTransformer(sublinear_tf=True), LogisticRegression(C=10, max_iter=100)),
            counts.numpy(),
        )
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    found = cross_val_predict(model, inputs, labels.cpu().numpy(), cv=folds, method="predict_proba")
    return torch.tensor(found)


def mean_rank(*scores: Tensor) -> Tensor:
    return torch.stack([score.double().cpu().argsort().argsort().double() for score in scores]).mean(0)


def judge(stage: str, setting: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    x, y, labels, clock = (shared[name] for name in ("x", "y", "labels", "clock"))
    classes, wrong = int(y.max()) + 1, (labels != y).cpu()
    epochs = EPOCHS.get(setting["data"], TABLE_EPOCHS)[stage == "memorized"]
    watch = lw.Watch(len(x))
    torch.manual_seed(setting["seed"])
    model = clock(f"train {stage}", lambda: train(x, labels, classes, epochs, watch))
    outputs, features = by_parts(model, x), by_parts(model.features, x)
    readout = lw.all_outputs if classes <= 10 else lw.projected_outputs(8)
    gram = lw.GramMatrix(lw.Network(model, readout), (x, labels), max_memory=4 * 2**30)
    votes = clock("votes", lambda: class_votes(gram, labels.cpu(), sketch=SKETCH).cpu())
    chances, given = outputs.softmax(1).cpu(), labels.cpu()
    found = combined_suspicion(votes, given, chances)
    shared_words = clock("words", lambda: class_resemblance(gram, given))
    validated, linear = shared["validated"], shared["linear"]
    mine = linear.gather(1, labels.cpu()[:, None])[:, 0]
    scores = {
        "likewise": found.suspicion,
        "likewise + record": combined_suspicion(votes, given, chances, watch.early_margins).suspicion,
        "likewise + cross-validation": combined_suspicion(
            votes, given, chances, validated=validated
        ).suspicion,
        "loss": F.cross_entropy(outputs, labels, reduction="none"),
        "deep k-NN": of_neighbors(features, labels, k=20),
        "relation graph": clock(
            "relation graph", lambda: relation_graph(features, outputs.softmax(1), labels)
        ),
        "AUM": -watch.margins,
        "cartography": -watch.confidence,
        "cross-validation": validated.suspicion,
        "linear, CV": -mine,
    }
    facts = {"learned": float((outputs.argmax(1) == labels).float().mean())}
    if shared_words is not None:
        own = shared_words.gather(1, given[:, None])[:, 0]
        scores["words alone"] = shared_words.scatter(1, given[:, None], -1).amax(1) - own
        found = combined_suspicion(votes, given, chances, resemblance=shared_words)
        both = combined_suspicion(votes, given, chances, watch.early_margins, resemblance=shared_words)
        scores |= {"likewise, words": found.suspicion, "likewise + record, words": both.suspicion}
        facts["words weight"] = found.words_weight
    if stage == "memorized":
        options = {"votes": votes, "rounds": 4, "seed": setting["seed"]}
        hot = clock("reheat", lambda: lw.reheat(gram.net, (x, labels), **options))
        facts |= {"skipped": hot.skipped, "rate": hot.learning_rate, "after": hot.accuracy_after}
        if hot.model is not None:
            after = clock("votes after", lambda: opinion_after(gram, hot, sketch=SKETCH))
            found = combined_suspicion(votes, given, chances, None, after)
            both = combined_suspicion(votes, given, chances, watch.early_margins, after)
            scores |= {"likewise, reheated": found.suspicion, "likewise, reheated + record": both.suspicion}
            scores["margins while hot"] = -hot.margins
            if shared_words is not None:
                found = combined_suspicion(votes, given, chances, None, after, None, shared_words)
                both = combined_suspicion(
                    votes, given, chances, watch.early_margins, after, None, shared_words
                )
                scores["likewise, reheated, words"] = found.suspicion
                scores["likewise, reheated + record, words"] = both.suspicion
                facts["words weight, reheated"] = found.words_weight
    numbers = {"errors": [float(wrong.sum()), *found.errors], "precision": list(found.precision)}
    numbers["flagged"] = [int(found.flagged.sum()), float(wrong[found.flagged.cpu()].double().mean())]
    return {"scores": ranked({k: v.cpu() for k, v in scores.items()}, wrong), **facts, **numbers}


def measure(setting: dict[str, Any], given: argparse.Namespace) -> None:
    clock, seed = Clock(), setting["seed"]
    x, y = (part.to(given.device) for part in load(setting["data"], seed, given))
    labels = spoil(y.cpu(), setting["noise"], setting["share"], seed).to(given.device)
    classes, early = int(y.max()) + 1, EPOCHS.get(setting["data"], TABLE_EPOCHS)[0]

    def trained_on(data: Any) -> nn.Module:
        inputs, targets = zip(*(data[i] for i in range(len(data))), strict=True)
        return train(
            torch.stack(inputs).to(given.device), torch.stack(targets).to(given.device), classes, early
        )

    validated = clock("cross-validation", lambda: lw.crossval(trained_on, (x.cpu(), labels.cpu()), seed=seed))
    linear = clock("linear", lambda: linear_chances(x, labels))
    if linear.shape[1] < classes:
        raise RuntimeError("A class has no label left.")
    shared = {"x": x, "y": y, "labels": labels, "validated": validated, "linear": linear, "clock": clock}
    results = {stage: judge(stage, setting, shared) for stage in ("early", "memorized")}
    add(given.out, setting, **results, seconds=clock.seconds)


def settings(given: argparse.Namespace) -> list[dict[str, Any]]:
    every = [
        {"data": data, "noise": kind, "share": share, "seed": seed}
        for seed in given.seeds
        for data in DATA
        for kind, share in NOISE
    ]
    return [setting for setting in every if given.only in named(setting)]


def table(given: argparse.Namespace) -> None:
    """Print average precision by data and stage, means over noises and seeds."""
    found = [line for file in given.out.parent.glob(f"{given.out.stem}*.jsonl") for line in lines(file)]
    columns = [
        (data, stage)
        for data in DATA
        for stage in ("early", "memorized")
        if any(line["setting"]["data"] == data for line in found)
    ]
    names = list(
        dict.fromkeys(n for line in found for stage in ("memorized", "early") for n in line[stage]["scores"])
    )
    print(f"| ranking | {' | '.join(' '.join(c) for c in columns)} |\n| --- |{' --- |' * len(columns)}")
    for name in names:
        cells = []
        for data, stage in columns:
            of = [line[stage]["scores"] for line in found if line["setting"]["data"] == data]
            values = [scores[name][0] for scores in of if name in scores]
            cells.append(
                f"{np.mean(values):.2f}" + (f" ({len(values)})" if len(values) < len(of) else "")
                if values
                else "–"
            )
        print(f"| {name} | {' | '.join(cells)} |")
    runs = [line[stage] for line in found for stage in ("early", "memorized")]
    given_errors = [run["errors"] for run in runs if run["errors"][2] == run["errors"][2]]
    inside = sum(low <= truth <= high for truth, low, _, high in given_errors)
    print(
        f"{len(runs)} networks: an interval for the number of errors {len(given_errors)} times, right {inside} times"
    )
    known = [
        (run["flagged"][1], run["precision"][1]) for run in runs if run["precision"][1] == run["precision"][1]
    ]
    off = [abs(truth - said) for truth, said in known]
    if off:
        print(
            f"precision given {len(off)} times, off by {np.mean(off):.3f} on the mean, {max(off):.3f} at most"
        )


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--texts", type=Path, default=Path("out/label-texts.npz"))
    arguments.add_argument("--prepare", action="store_true", help="write --texts, and end")
    arguments.add_argument(
        "--table", action="store_true", help="print the table of what is in --out, and end"
    )
    arguments.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "label_texts.jsonl"
    )
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    arguments.add_argument("--only", default="", help="settings that contain this")
    arguments.add_argument("--processes", type=int, default=1)
    arguments.add_argument("--part", default="1/1", help="i/k: every k-th setting from the i-th")
    given = arguments.parse_args()
    if given.prepare:
        prepare(given)
        return
    if not given.table:
        run_settings(given)
    table(given)


def run_settings(given: argparse.Namespace) -> None:
    """Measure this process's part of the settings, or start a process for each part, which writes a file of its own."""
    if given.processes > 1:
        rest = [a for a in sys.argv[1:] if not a.startswith("--processes=")]
        if "--processes" in rest:
            place = rest.index("--processes")
            rest = rest[:place] + rest[place + 2 :]
        parts = [f"{i + 1}/{given.processes}" for i in range(given.processes)]
        started = [subprocess.Popen([sys.executable, __file__, *rest, "--part", part]) for part in parts]
        if any([process.wait() for process in started]):
            raise SystemExit("A process failed: see above.")
        return
    torch.set_num_threads(1)
    first, every = (int(v) for v in given.part.split("/"))
    if every > 1:
        given.out = given.out.with_name(f"{given.out.stem}-{first}.jsonl")
    done = [
        line["setting"]
        for file in given.out.parent.glob(f"{given.out.stem.split('-')[0]}*.jsonl")
        for line in lines(file)
    ]
    for setting in settings(given)[first - 1 :: every]:
        if setting not in done:
            measure(setting, given)


if __name__ == "__main__":
    main()
