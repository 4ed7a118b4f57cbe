"""Are the numbers beside wrong labels right or absent where classes overlap? Votes for choosing rules, and for checks.

    python benchmarks/label_overlap.py --data DIR --keep FOLDER --seeds 11     rules were chosen on these
    python benchmarks/label_overlap.py --data DIR --keep FOLDER --seeds 0 1    and checked on these, tables only:
        --only-data digits "breast cancer" wine overlapping docstrings         and on benchmarks/label_flags.py
    python benchmarks/label_overlap.py --table                                 what was found
    python benchmarks/label_overlap.py --scores FOLDER                         average precision of rankings, by votes
                                                                               kept here or by label_flags.py

Tables (scikit-learn's, made-up ones whose classes overlap more and less, pairs of digits), docstrings, 2,000 images
each of MNIST, Fashion-MNIST and CIFAR-10 from number 30,000 on; networks early and memorized, these also reheated (two
copies).
`--keep FOLDER` keeps votes, and uses them if they are there: another rule then costs seconds.
"""

from pathlib import Path
from typing import Any

import label_numbers
import label_texts
import numpy as np
import torch
from images import data_folder, images
from records import Clock, lines, measured, options, ranked
from sklearn import datasets
from torch import Tensor, nn

import likewise as lw
from likewise.statistics.label_issues import OpinionAfter, combined_suspicion, opinion_after
from likewise.statistics.neighbors import class_votes, contradiction
from nets import evaluated

IMAGES = ("mnist", "fashion-mnist", "cifar10")
SEPARATION = {"overlapping": 1.0, "separate": 1.5}  # of the made-up classes
DATA = ("digits", "breast cancer", "wine", *SEPARATION, "digit pairs", "docstrings", *IMAGES)
NOISE = (
    ("uniform", 0.1),
    ("none", 0.0),
    ("pair", 0.1),
    ("uniform", 0.3),
    ("pair", 0.2),
    ("instance", 0.1),
    ("uniform", 0.05),
)
SKETCH, COUNT, ROUNDS = 512, 2000, 2
IMAGE_EPOCHS = {"untrained": 0, "early": 6, "memorized": 30}


def load(name: str, seed: int, given: Any) -> tuple[Tensor, Tensor]:
    """Return inputs and true classes."""
    if name in IMAGES:
        return images(name, given.data, first=30_000 + COUNT * (seed % 10), count=COUNT)
    if name in SEPARATION:
        values, classes = datasets.make_classification(
            COUNT, 20, n_informative=8, n_classes=4, class_sep=SEPARATION[name], random_state=seed
        )
        x = torch.tensor(values).float()
        return (x - x.mean(0)) / x.std(0), torch.tensor(classes).long()
    return label_texts.load(name, seed, given)


def spoil(x: Tensor, y: Tensor, setting: dict[str, Any]) -> Tensor:
    """Return labels of which a share is wrong: of the hardest fifth, half get the class they are taken for."""
    kind, share, seed = setting["noise"], setting["share"], setting["seed"]
    if kind in ("uniform", "pair"):
        return label_texts.spoil(y, kind, share, seed)
    if kind == "none":
        return y
    torch.manual_seed(500 + seed)
    if setting["data"] in IMAGES:
        judge = label_numbers.train(label_numbers.fresh(setting["data"], x, 10, 500 + seed), x, y, 4, seed)
    else:
        judge = label_texts.train(x, y, int(y.max()) + 1, 3)
    hard, other = evaluated(judge, x).softmax(1).scatter(1, y[:, None], -1).max(1)
    hardest = hard.argsort(descending=True)[: round(2 * share * len(y))]
    order = torch.randperm(len(hardest), generator=torch.Generator().manual_seed(seed))
    picked = hardest[order[: round(share * len(y))]]
    labels = y.clone()
    labels[picked] = other[picked]
    return labels


def train(x: Tensor, labels: Tensor, classes: int, setting: dict[str, Any]) -> nn.Module:
    name, stage, seed = setting["data"], setting["stage"], setting["seed"]
    torch.manual_seed(seed)
    if name in IMAGES:
        model, epochs = label_numbers.fresh(name, x, classes, seed), IMAGE_EPOCHS[stage]
        return label_numbers.train(model, x, labels, epochs, seed) if epochs else model.eval()
    epochs = label_texts.EPOCHS.get(name, label_texts.TABLE_EPOCHS)[stage == "memorized"]
    return label_texts.train(x, labels, classes, epochs)


def votes_of(setting: dict[str, Any], given: Any) -> dict[str, Tensor]:
    """Return votes, outputs, labels and truth, and what two reheated copies say of a memorized network's labels."""
    x, y = load(setting["data"], setting["seed"], given)
    labels, classes = spoil(x, y, setting), int(y.max()) + 1
    model = train(x, labels, classes, setting)
    readout = lw.all_outputs if classes <= 10 else lw.projected_outputs(8)
    gram = lw.GramMatrix(lw.Network(model, readout), (x, labels))
    votes = class_votes(gram, labels, sketch=SKETCH)
    found = {"votes": votes, "outputs": evaluated(model, x), "labels": labels, "truth": y}
    if setting["stage"] == "memorized" and setting["data"] != "cifar10":
        hot = lw.reheat(gram.net, (x, labels), votes=votes, rounds=ROUNDS, seed=setting["seed"])
        if not hot.skipped:
            after = opinion_after(gram, hot, sketch=SKETCH)._asdict()
            found |= {f"after_{name}": value for name, value in after.items()}
    return found


def measure(setting: dict[str, Any], given: Any) -> dict[str, Any]:
    file = given.keep / f"{'-'.join(str(v) for v in setting.values())}.npz"
    clock = Clock()
    if not file.exists():
        given.keep.mkdir(parents=True, exist_ok=True)
        kept = clock("votes", lambda: votes_of(setting, given))
        np.savez_compressed(file, **{name: value.numpy() for name, value in kept.items()})
    with np.load(file) as arrays:
        of = {name: torch.tensor(arrays[name]) for name in arrays.files}
    wrong, chances = of["labels"] != of["truth"], of["outputs"].softmax(1)
    found = {"before": combined_suspicion(of["votes"], of["labels"], chances)}
    if "after_votes" in of:
        after = OpinionAfter(*(of[f"after_{name}"] for name in OpinionAfter._fields))
        found["after"] = combined_suspicion(of["votes"], of["labels"], chances, None, after)
    said = {stage: label_numbers.numbers(one, wrong) for stage, one in found.items()}
    return {"wrong": int(wrong.sum()), **said, "seconds": clock.seconds}


def settings(given: Any) -> list[dict[str, Any]]:
    """Return what is worth its time: images with five noises, CIFAR-10, where neighbors are no judge, with one."""
    found = []
    for seed in given.seeds:
        for kind, share in NOISE:
            for name in given.only_data:
                rare = (kind, share) in (("pair", 0.2), ("uniform", 0.05))
                usual = (kind, share) == ("uniform", 0.1)
                if (name in IMAGES and rare) or (name == "cifar10" and not usual):
                    continue
                stages = ("untrained",) if name in IMAGES and usual else ()
                found += [
                    {"data": name, "noise": kind, "share": share, "stage": stage, "seed": seed}
                    for stage in (*stages, "early", "memorized")
                ]
    return found


def table(rows: list[dict[str, Any]], choosing: bool) -> str:
    """Return how many numbers were given and how far they are off, of the settings for choosing or checking."""
    runs = [
        (row["wrong"], row[stage])
        for row in rows
        if (row["setting"]["seed"] == 11) == choosing
        for stage in ("before", "after")
        if stage in row
    ]
    told = [(wrong, run["errors"]) for wrong, run in runs if run["errors"][1] == run["errors"][1]]
    inside = sum(low <= wrong <= high for wrong, (low, _, high) in told)
    off = [abs(run["flags"][1] - run["expected"][1]) for _, run in runs]
    known = [value for value in off if value == value]
    return (
        f"{'choosing' if choosing else 'checking'}: {len(runs)} verdicts, an interval {len(told)} times, right "
        f"{inside} times; precision {len(known)} times, off by {np.mean(known):.2f}, at most {max(known):.2f}"
    )


def scores(folder: Path) -> str:
    """Return the mean average precision of suspicion, of its margin alone and of the loss, by stage and noise."""
    found: dict[tuple[str, str], list[list[float]]] = {}
    for file in sorted(folder.glob("*.npz")):
        with np.load(file) as arrays:
            of = {name: torch.tensor(arrays[name]) for name in arrays.files}
        labels, wrong, chances = of["labels"], of["labels"] != of["truth"], of["outputs"].double().softmax(1)
        if not wrong.any():
            continue
        votes = torch.nn.functional.pad(of["votes"].double(), (0, chances.shape[1] - of["votes"].shape[1]))
        opinion = (votes / votes.sum(1, keepdim=True).clamp(min=1e-300) + chances) / 2
        own, other = opinion.gather(1, labels[:, None])[:, 0], opinion.scatter(1, labels[:, None], -1).amax(1)
        rankings = {
            "suspicion": contradiction(own, other),
            "margin": other - own,
            "loss": -chances.gather(1, labels[:, None])[:, 0],
        }
        values = [value[0] for value in ranked(rankings, wrong).values()]
        words = file.stem.split("-")
        stage = {"0": "untrained", "6": "early", "30": "memorized"}.get(words[-2], words[-2])
        for key in ((stage, words[-4]), (stage, "all"), ("all", "all")):
            found.setdefault(key, []).append(values)
    rows = [
        f"| {stage}, {noise} | {len(v)} | " + " | ".join(f"{m:.3f}" for m in np.mean(v, 0)) + " |"
        for (stage, noise), v in sorted(found.items())
    ]
    return "\n".join(
        ["| networks | runs | suspicion | margin alone | loss |", "|---|---|---|---|---|", *rows]
    )


def main() -> None:
    arguments = options(__doc__, "label_overlap")
    data_folder(arguments)
    arguments.add_argument(
        "--keep", type=Path, default=Path("out/label-overlap"), help="folder for the votes"
    )
    arguments.add_argument("--only-data", nargs="+", default=DATA, choices=DATA)
    arguments.add_argument("--texts", type=Path, default=Path("out/label-texts.npz"))
    arguments.add_argument("--table", action="store_true", help="say what was found, and end")
    arguments.add_argument("--scores", type=Path, default=None, help="folder with votes that were kept")
    given = arguments.parse_args()
    if given.scores is not None:
        print(scores(given.scores))
        return
    if not given.table:
        measured(settings(given), measure, given)
    for choosing in (True, False):
        if any((row["setting"]["seed"] == 11) == choosing for row in lines(given.out)):
            print(table(lines(given.out), choosing))


if __name__ == "__main__":
    main()
