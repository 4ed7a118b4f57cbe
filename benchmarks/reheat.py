"""Does a memorized network find its wrong labels when it is reheated? Beside cross-validation and logged margins.

    python benchmarks/reheat.py --prepare --data DIR                      images into one file, out/cifar10-small.npz
    python benchmarks/reheat.py --device cuda --processes 4 --out FOLDER  four settings side by side, results in FOLDER
    python benchmarks/reheat.py --table --out FOLDER                      the table of what is there
    python benchmarks/reheat.py --forgotten --out FOLDER                  who is forgotten: digits, and what is there

ResNet-9 of 1.6 million parameters, 10,000 images of CIFAR-10, 20 % of the labels wrong, uniformly or into the next
class; 30 epochs, after which nearly every label is reproduced. Average precision of rankings of the labels.
Cross-validation trains five more networks of 8 epochs each. Every score of every sample is kept in FOLDER, for other
combinations.
"""

import argparse
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from images import data_folder, images, pack_images, unpack_images
from records import Clock, add, lines, named, ranked
from sklearn.metrics import roc_auc_score
from torch import Tensor

import likewise as lw
from likewise.statistics.label_issues import suspicion_from_votes
from likewise.statistics.neighbors import class_votes
from nets import evaluated, margin, resnet9, spoiled, trained

RATES = (1e-3, 2e-3, 3e-3, 5e-3, 8e-3)  # of which the range test should find a good one
ROUNDS = 4
FOLDS, EARLY = 5, 8  # of cross-validation: networks, and epochs of each
FIRST = 20_000  # of the images: not those of docs/uses.md
SKETCH = 1024


def settings(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the settings, the first seed of every noise first."""
    return [
        {"data": "cifar10", "noise": kind, "share": 0.2, "count": given.count, "seed": seed}
        for seed in given.seeds
        for kind in given.noise
    ]


def prepare(given: argparse.Namespace) -> None:
    """Write the images to one file."""
    training = images("cifar10", given.data, first=FIRST, count=10_000)
    pack_images(given.images, {"train": training, "test": images("cifar10", given.data, "test", 0, 2000)})


def load(given: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training images and labels, test images and labels, on the device."""
    (x, y), (new, truth) = (unpack_images(given.images, name) for name in ("train", "test"))
    x = x[: given.count]
    mean, deviation = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
    parts = (x - mean) / deviation, y[: given.count].long(), (new - mean) / deviation, truth.long()
    return tuple(part.to(given.device) for part in parts)  # type: ignore[return-value]


def judge(model: torch.nn.Module, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return votes, outputs and suspicion by one network."""
    gram = lw.GramMatrix(model, (x, labels), max_memory=8 * 2**30)
    outputs = evaluated(model, x)
    votes = class_votes(gram, labels.cpu(), sketch=SKETCH).cpu()
    return {
        "votes": votes,
        "outputs": outputs.cpu(),
        "suspicion": suspicion_from_votes(votes, labels.cpu(), outputs.softmax(1).cpu()).suspicion,
        "margin": margin(outputs, labels).cpu(),
    }


def cross_validate(x: Tensor, labels: Tensor, seed: int, given: argparse.Namespace) -> Tensor:
    """Return the probability of each label by a network that has not seen the sample."""
    found = torch.zeros(len(x))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    for fold in range(FOLDS):
        held = order[fold::FOLDS]
        kept = torch.ones(len(x), dtype=torch.bool)
        kept[held] = False
        torch.manual_seed(100 * seed + fold + 1)
        fresh = resnet9(width=given.width).to(x.device)
        model = trained(fresh, x[kept.to(x.device)], labels[kept.to(x.device)], EARLY, seed).model
        chances = evaluated(model, x[held.to(x.device)]).softmax(1).cpu()
        found[held] = chances.gather(1, labels.cpu()[held][:, None])[:, 0]
    return found


def rank(values: Tensor) -> Tensor:
    """Return places from 0 to 1."""
    return values.double().argsort().argsort().double() / (len(values) - 1)


def combine(*scores: Tensor) -> Tensor:
    return torch.stack([rank(score) for score in scores]).mean(0)


def reheated_scores(
    before: dict[str, Tensor], runs: list[tuple[Tensor, dict[str, Tensor]]]
) -> dict[str, Tensor]:
    """Return rankings from the memorized network and from reheated ones: margins while hot, opinions after."""
    hot = torch.stack([margins for margins, _ in runs]).mean(0)
    after = torch.stack([rank(found["suspicion"]) for _, found in runs]).mean(0)
    cold = torch.stack([rank(-found["margin"]) for _, found in runs]).mean(0)
    return {
        "margins": -hot,
        "suspicion after": after,
        "margin after": cold,
        "before + margins": combine(before["suspicion"], -hot),
        "before + after": combine(before["suspicion"], after),
        "margins + after": combine(-hot, after),
        "before + margins + margin after": combine(before["suspicion"], -hot, cold),
        "before + margins + after": combine(before["suspicion"], -hot, after),
        "likewise (2, 1, 2)": 2 * rank(before["suspicion"]) + rank(-hot) + 2 * rank(after),
    }


def measure(setting: dict[str, Any], given: argparse.Namespace) -> None:
    seed, clock, arrays = setting["seed"], Clock(), dict[str, Tensor]()
    x, y, new, truth = load(given)
    labels = spoiled(y, setting["noise"], setting["share"], seed).to(x.device)
    wrong = (labels != y).cpu()
    torch.manual_seed(seed)
    fresh = resnet9(width=given.width).to(x.device)
    fit = clock("memorize", lambda: trained(fresh, x, labels, given.epochs, seed))
    before = clock("votes", lambda: judge(fit.model, x, labels))
    supported = float((before["votes"].argmax(1) == labels.cpu()).double().mean())
    facts: dict[str, Any] = {
        "test accuracy": float((evaluated(fit.model, new).argmax(1) == truth).float().mean()),
        "learned": float((before["outputs"].argmax(1) == labels.cpu()).float().mean()),
        "supported": supported,
    }
    arrays |= {"labels": labels.cpu(), "truth": y.cpu(), "over training": fit.margins.cpu()}
    arrays |= {f"before {name}": value for name, value in before.items()}
    scores = {"votes": before["suspicion"], "loss": -before["margin"], "over training": -fit.margins.cpu()}
    scores["votes + over training"] = combine(before["suspicion"], -fit.margins.cpu())
    say(setting, facts, scores, wrong)
    if not given.short:
        validated = clock("cross-validation", lambda: cross_validate(x, labels, seed, given))
        scores["cross-validation"], arrays["validated"] = -validated, validated
        scores["votes + cross-validation"] = combine(before["suspicion"], -validated)

    def run(name: str, **options: Any) -> None:
        hot = clock(f"reheat {name}", lambda: lw.reheat(fit.model, (x, labels), **options))
        done = list[tuple[Tensor, dict[str, Tensor]]]()
        for i, one in enumerate(hot.rounds):
            found = clock("votes after", lambda one=one: judge(one.model, x, labels))
            done.append((one.watch.margins, found))
            learned = (found["outputs"].argmax(1) == labels.cpu())[wrong].float().mean()
            facts[f"{name} {i + 1}"] = {
                "rate": one.learning_rate,
                "hot": list(one.accuracies),
                "after": one.accuracy_after,
                "wrong learned": float(learned),
                "new": float((evaluated(one.model, new).argmax(1) == truth).float().mean()),
            }
            arrays.update({f"{name} {i + 1} {key}": value for key, value in found.items()})
            arrays[f"{name} {i + 1} margins"] = one.watch.margins
            times = f"{name}, {i + 1} times" if options.get("rounds") else name
            scores.update({f"{times}: {k}": v for k, v in reheated_scores(before, done).items()})
            say(setting, facts, scores, wrong)
        facts[f"{name}, in all"] = {"target": hot.target, "epochs": hot.epochs, "seconds": hot.seconds}

    run("reheated", votes=before["votes"], rounds=ROUNDS)
    save(setting, given, arrays)
    for rate in RATES if seed == given.seeds[0] and not given.short else ():
        run(f"rate {rate:g}", learning_rate=rate)
    save(setting, given, arrays)
    add(given.out / "reheat.jsonl", setting, facts=facts, scores=ranked(scores, wrong), seconds=clock.seconds)


def say(setting: dict[str, Any], facts: dict[str, Any], scores: dict[str, Tensor], wrong: Tensor) -> None:
    """Print what is known so far."""
    found = {name: round(value[0], 3) for name, value in ranked(scores, wrong).items()}
    short = {k: v if isinstance(v, dict) else round(v, 3) for k, v in facts.items()}
    print(f"{time.strftime('%X')} {named(setting)} {json.dumps(short)} {json.dumps(found)}", flush=True)


def save(setting: dict[str, Any], given: argparse.Namespace, arrays: dict[str, Tensor]) -> None:
    name = named(setting).replace(" ", "-")
    halves = {k: v.half().numpy() if v.is_floating_point() else v.numpy() for k, v in arrays.items()}
    np.savez_compressed(given.out / f"scores-{name}.npz", **halves)


def table(given: argparse.Namespace) -> None:
    """Print the mean over seeds of each ranking, a row each."""
    found = lines(given.out / "reheat.jsonl")
    kinds = list(dict.fromkeys(line["setting"]["noise"] for line in found))
    names = list(dict.fromkeys(name for line in found for name in line["scores"]))
    print(f"| ranking | {' | '.join(kinds)} |\n| --- |{' --- |' * len(kinds)}")
    for name in names:
        cells = []
        for kind in kinds:
            of_kind = [
                line["scores"][name][0]
                for line in found
                if line["setting"]["noise"] == kind and name in line["scores"]
            ]
            cells.append(f"{np.mean(of_kind):.3f} ({len(of_kind)})" if of_kind else "–")
        print(f"| {name} | {' | '.join(cells)} |")


def describe_forgotten(
    title: str, forgotten: np.ndarray, wrong: np.ndarray, quantities: dict[str, np.ndarray]
) -> None:
    """Print how well each quantity of the memorized network tells who will be forgotten: area under the ROC curve."""
    print(
        f"{title}: forgotten {forgotten[wrong].mean():.2f} of the wrong, {forgotten[~wrong].mean():.2f} of the right"
    )
    parts = {"all": np.ones_like(wrong), "right": ~wrong, "wrong": wrong}
    for name, values in quantities.items():
        areas = [f"{part} {roc_auc_score(forgotten[m], -values[m]):.2f}" for part, m in parts.items()]
        print(f"    little {name}: {', '.join(areas)}")
    support = quantities["share of votes for the label"]
    for low, high in itertools.pairwise(np.quantile(support, np.linspace(0, 1, 6))):
        here = (support >= low) & (support <= high)
        rates = [f"{forgotten[here & m].mean():.2f}" if (here & m).any() else "–" for m in (wrong, ~wrong)]
        print(
            f"    support {low:.2f} to {high:.2f}: forgotten {rates[0]} of the wrong, {rates[1]} of the right"
        )


def support_of(votes: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """Return what votes say of each label, and how many there are."""
    density = votes.sum(1)
    own = votes[np.arange(len(labels)), labels]
    return {
        "share of votes for the label": own / density,
        "votes for the label": own,
        "local density": density,
    }


def forgotten_digits() -> None:
    """Print who is forgotten of scikit-learn's digits, a fifth of them labeled wrong, by a perceptron."""
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(classes)
    for seed in range(3):
        labels = spoiled(y, "uniform", 0.2, seed)
        torch.manual_seed(seed)
        layers = [
            torch.nn.Linear(64, 256),
            torch.nn.BatchNorm1d(256),
            torch.nn.ReLU(),
            torch.nn.Linear(256, 10),
        ]
        model = trained(torch.nn.Sequential(*layers), x, labels, 150, seed, batch=64).model
        gram = lw.GramMatrix(lw.Network(model, lw.all_outputs), (x, labels))
        votes = class_votes(gram, labels, sketch=None)
        hot = lw.reheat(model, (x, labels), votes=votes, seed=seed)
        if hot.model is None:
            raise RuntimeError(hot.skipped)
        gone = (evaluated(hot.model, x).argmax(1) != labels).numpy()
        quantities = support_of(votes.numpy(), labels.numpy())
        quantities["N_S"] = lw.soft_neighbors(gram).numpy()
        quantities["own gradient, squared"] = -gram.with_kernel(lw.INNER_PRODUCT).diagonal().numpy()
        quantities["margin"] = margin(evaluated(model, x), labels).numpy()
        describe_forgotten(f"digits, seed {seed}, {hot}", gone, (labels != y).numpy(), quantities)


def forgotten(given: argparse.Namespace) -> None:
    forgotten_digits()
    for file in sorted(given.out.glob("scores-*.npz")):
        with np.load(file) as found:
            labels, wrong = found["labels"], found["labels"] != found["truth"]
            quantities = support_of(found["before votes"].astype(float), labels)
            quantities["margin"] = found["before margin"].astype(float)
            for name in sorted(key.removesuffix(" outputs") for key in found if key.endswith(" outputs")):
                gone = found[f"{name} outputs"].argmax(1) != labels
                if name != "before" and gone[wrong].mean() > 0.2:
                    describe_forgotten(f"{file.stem}, {name}", gone, wrong, quantities)


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    data_folder(arguments)
    arguments.add_argument("--images", type=Path, default=Path("out/cifar10-small.npz"))
    arguments.add_argument("--prepare", action="store_true", help="write --images from --data, and end")
    arguments.add_argument(
        "--table", action="store_true", help="print the table of what is in --out, and end"
    )
    arguments.add_argument("--forgotten", action="store_true", help="print who is forgotten, and end")
    arguments.add_argument("--out", type=Path, default=Path("out/reheat"), help="folder of the results")
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    arguments.add_argument("--noise", nargs="+", default=["uniform", "pair"])
    arguments.add_argument("--count", type=int, default=10_000)
    arguments.add_argument("--epochs", type=int, default=30)
    arguments.add_argument("--width", type=int, default=32)
    arguments.add_argument(
        "--short", action="store_true", help="no cross-validation, and no rates but the one found"
    )
    arguments.add_argument("--processes", type=int, default=1)
    arguments.add_argument("--part", default="1/1", help="i/k: every k-th setting from the i-th")
    given = arguments.parse_args()
    if given.prepare:
        prepare(given)
        return
    if given.forgotten:
        torch.set_num_threads(1)
        forgotten(given)
        return
    given.out.mkdir(parents=True, exist_ok=True)
    if not given.table:
        run_settings(given)
    table(given)


def run_settings(given: argparse.Namespace) -> None:
    """Measure this process's part of the settings, or start a process for each part."""
    if given.processes > 1:
        parts = [f"{i + 1}/{given.processes}" for i in range(given.processes)]
        rest = [a for a in sys.argv[1:] if not a.startswith("--processes=")]
        if "--processes" in rest:
            place = rest.index("--processes")
            rest = rest[:place] + rest[place + 2 :]
        started = [subprocess.Popen([sys.executable, __file__, *rest, "--part", part]) for part in parts]
        if any([process.wait() for process in started]):
            raise SystemExit("A process failed: see above.")
        return
    torch.set_num_threads(1 if given.device == "cpu" else 4)
    first, every = (int(v) for v in given.part.split("/"))
    done = [line["setting"] for line in lines(given.out / "reheat.jsonl")]
    for setting in settings(given)[first - 1 :: every]:
        if setting not in done:
            measure(setting, given)


if __name__ == "__main__":
    main()
