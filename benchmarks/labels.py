"""Who finds wrong labels? likewise beside what people use, on the same trained network.

    python benchmarks/labels.py --data DIR           results are added to benchmarks/results/labels.jsonl
    python benchmarks/labels.py --own --data DIR     likewise's own rankings alone, to labels_own.jsonl
    python benchmarks/labels.py --pack --data DIR    images into one file, out/label-images.npz, for --images
    python benchmarks/uses.py                        the tables of docs/uses.md, from the results

MNIST and Fashion-MNIST (5,000 images, a convolutional net of 290,000 parameters), CIFAR-10 (10,000 images,
ResNet-9 of 1.6 million); a share of the labels made wrong, uniformly, into the next class, or by how hard
an image is; networks stopped early and after they have memorized nearly all labels. Cross-validation
trains five more networks, with the early schedule, its better one; its ranking and flags are cleanlab's.
`--own` leaves all peers out and adds what one network can do more: four reheated copies where it has memorized
its labels (as `label_suspicion(gram, reheat="auto")`), and the margins of its own training.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from images import data_folder, images
from records import FOLDER, Clock, measured, options, ranked
from torch import Tensor, nn
from torch.nn import functional as F

import likewise as lw
from likewise.gram.sketches import Sketch, sketch_rows
from likewise.statistics.label_issues import ROUNDS, LabelSuspicion, combined_suspicion, opinion_after
from likewise.votes import class_votes
from nets import conv6, evaluated, margin, resnet9, spoiled, trained

SKETCH = 1024
MEMORY = 8 * 2**30
NETS = {"mnist": conv6, "fashion-mnist": conv6, "cifar10": partial(resnet9, width=32)}
COUNT = {"mnist": 5000, "fashion-mnist": 5000, "cifar10": 10_000}
EPOCHS = {"mnist": (8, 40), "fashion-mnist": (8, 40), "cifar10": (8, 30)}  # stopped early, memorized
FIRST = 0  # of the images: defaults were chosen on others


def settings(seeds: list[int]) -> list[dict[str, Any]]:
    return [
        {"data": data, "noise": kind, "share": share, "seed": seed}
        for seed in seeds
        for share in (0.1, 0.2, 0.4, 0.05)
        for kind in ("uniform", "pair", "instance")
        for data in NETS
    ]


def read(name: str, given: Any) -> tuple[Tensor, Tensor]:
    """Return images and true labels, on the device."""
    if given.images is None:
        x, y = images(name, given.data, first=FIRST, count=COUNT[name])
    else:
        with np.load(given.images) as file:
            pixels, y = torch.tensor(file[f"{name} x"]), torch.tensor(file[f"{name} y"])
            low, high = file[f"{name} range"].tolist()
        x = pixels.float() / 255 * (high - low) + low
    return x.to(given.device), y.to(given.device)


def pack(given: Any, target: Path = Path("out/label-images.npz")) -> None:
    """Write all images into one file, as bytes."""
    arrays = dict[str, np.ndarray]()
    for name in NETS:
        x, y = read(name, given)
        low, high = float(x.amin()), float(x.amax())  # images are scaled linearly: bytes again
        arrays[f"{name} x"] = ((x - low) / (high - low) * 255).round().byte().cpu().numpy()
        arrays[f"{name} y"], arrays[f"{name} range"] = y.cpu().numpy(), np.array([low, high])
    target.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(target, **arrays)  # type: ignore[arg-type]
    print(f"{target}: {target.stat().st_size:,} bytes")


def noisy(setting: dict[str, Any], given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return images, true labels and labels of which a share is wrong."""
    name, seed = setting["data"], setting["seed"]
    x, y = read(name, given)
    chances = None
    if setting["noise"] == "instance":
        torch.manual_seed(500 + seed)
        chances = evaluated(trained(NETS[name]().to(x.device), x, y, 4, seed).model, x).softmax(1)
    return x, y, spoiled(y, setting["noise"], setting["share"], seed, chances).to(x.device)


def made(name: str, x: Tensor, y: Tensor, epochs: int, seed: int) -> Any:
    torch.manual_seed(seed)
    return trained(NETS[name]().to(x.device), x, y, epochs, seed)


def cross_validated(name: str, x: Tensor, y: Tensor, epochs: int, seed: int, folds: int = 5) -> Tensor:
    """Return probabilities of each sample by a network that has not seen it."""
    found = torch.zeros(len(x), 10, device=x.device)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(x.device)
    for fold in range(folds):
        held, kept = order[fold::folds], torch.ones(len(x), dtype=torch.bool, device=x.device)
        kept[held] = False
        model = made(name, x[kept], y[kept], epochs, 100 * seed + fold + 1).model
        found[held] = evaluated(model, x[held]).softmax(1)
    return found


def of_neighbors(features: Tensor, y: Tensor, k: int = 50) -> Tensor:
    """Return the share of the nearest neighbors in feature space with another label."""
    unit, other = F.normalize(features, dim=1), []
    for start in range(0, len(unit), 2000):
        near = unit[start : start + 2000] @ unit.T
        near[torch.arange(len(near)), torch.arange(len(near)) + start] = -1
        places = near.topk(k, dim=1).indices
        other.append((y[places] != y[start : start + 2000, None]).float().mean(1))
    return torch.cat(other)


def self_influence(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return ‖∇ loss‖² of each sample: TracIn's self-influence at the last checkpoint."""
    loss = lambda outputs, labels: F.cross_entropy(outputs, labels, reduction="none")[:, None]  # noqa: E731
    gram = lw.GramMatrix(lw.Network(model, loss), (x, y), kernel=lw.INNER_PRODUCT, max_memory=MEMORY)
    return gram.diagonal()


def trak(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return TRAK's self-influence, φᵀ(ΦᵀΦ + λ)⁻¹φ (1 − p), from sketches of the label's gradient."""
    gram = lw.GramMatrix(lw.Network(model, lw.label_against_rest), (x, y), max_memory=MEMORY)
    rows = sketch_rows(gram, Sketch(1032, 0)).rows[:, 0].double()
    square = rows.T @ rows
    damped = square + 1e-3 * square.diagonal().mean() * torch.eye(len(square)).to(square)
    leverage = (rows * torch.linalg.solve(damped, rows.T).T).sum(1)
    mine = evaluated(model, x).softmax(1).gather(1, y[:, None])[:, 0]
    return leverage * (1 - mine.double())


def judged(setting: dict[str, Any], stage: str, shared: dict[str, Any]) -> dict[str, Any]:
    x, y, labels, clock = (shared[name] for name in ("x", "y", "labels", "clock"))
    wrong, epochs = labels != y, EPOCHS[setting["data"]][stage == "memorized"]
    fit = clock(f"train {stage}", lambda: made(setting["data"], x, labels, epochs, setting["seed"]))
    model, outputs = fit.model, evaluated(fit.model, x)
    gram = lw.GramMatrix(model, (x, labels), max_memory=MEMORY)
    found = clock("likewise", lambda: lw.label_suspicion(gram, sketch=SKETCH))
    chances = outputs.softmax(1)
    target = F.one_hot(labels, 10)
    scores = {
        "likewise": found.suspicion,
        "loss": F.cross_entropy(outputs, labels, reduction="none"),
        "margin": -margin(outputs, labels),
        "margin over training": -fit.margins,
        "neighbors in features": clock("features", lambda: of_neighbors(evaluated(model[:-1], x), labels)),
        "self-influence": clock("self-influence", lambda: self_influence(model, x, labels)),
        "EL2N": (chances - target).norm(dim=1),
        "TRAK": clock("TRAK", lambda: trak(model, x, labels)),
        "cross-validation": -shared["validated"].gather(1, labels[:, None])[:, 0],
    }
    flagged, mask = found.flagged.cpu(), wrong.cpu()
    return {
        "scores": ranked(scores, wrong),
        "learned": float((outputs.argmax(1) == labels)[wrong].float().mean()),
        "flags": flags(flagged, mask),
        "expected precision": list(found.precision),
        "errors": [float(mask.sum()), *found.errors],
        "suggested right": float((found.suggested.cpu() == y.cpu())[mask].float().mean()),
    }


def own_rankings(setting: dict[str, Any], stage: str, shared: dict[str, Any]) -> dict[str, Any]:
    """Return what likewise makes of one network, of reheated copies and of its training's margins."""
    x, y, labels, clock = (shared[name] for name in ("x", "y", "labels", "clock"))
    wrong, epochs = (labels != y).cpu(), EPOCHS[setting["data"]][stage == "memorized"]
    fit = clock(f"train {stage}", lambda: made(setting["data"], x, labels, epochs, setting["seed"]))
    outputs, given = evaluated(fit.model, x), labels.cpu()
    gram = lw.GramMatrix(fit.model, (x, labels), max_memory=MEMORY)
    votes = clock("votes", lambda: class_votes(gram, given, sketch=SKETCH).cpu())
    hot = clock("reheat", lambda: lw.reheat(fit.model, (x, labels), votes=votes, rounds=ROUNDS))
    after = None
    if not hot.skipped:
        after = clock("votes of copies", lambda: opinion_after(gram, hot, sketch=SKETCH))
    chances, margins = outputs.softmax(1).cpu(), fit.early_margins.cpu()
    found: dict[str, LabelSuspicion] = {
        "likewise": combined_suspicion(votes, given, chances),
        "with record": combined_suspicion(votes, given, chances, margins),
        "reheated": combined_suspicion(votes, given, chances, after=after),
        "reheated with record": combined_suspicion(votes, given, chances, margins, after),
    }
    scores = {name: one.suspicion for name, one in found.items()}
    told = found["reheated"]
    return {
        "scores": ranked(
            {**scores, "margin over training": -fit.margins.cpu(), "early margin": -margins}, wrong
        ),
        "learned": float((outputs.argmax(1) == labels)[wrong.to(x.device)].float().mean()),
        "reheated": {
            "skipped": hot.skipped,
            "rate": hot.learning_rate,
            "target": hot.target,
            "after": hot.accuracy_after,
            "epochs": hot.epochs,
        },
        "flags": flags(told.flagged.cpu(), wrong),
        "expected precision": list(told.precision),
        "errors": [float(wrong.sum()), *told.errors],
        "distinct": told.distinct,
    }


def flags(flagged: Tensor, wrong: Tensor) -> list[float]:
    """Return how many are flagged, how many of these are wrong, and how many of the wrong are flagged."""
    hits = float((flagged & wrong).sum())
    return [int(flagged.sum()), hits / max(1, int(flagged.sum())), hits / max(1, int(wrong.sum()))]


def pruned(labels: Tensor, validated: Tensor) -> Tensor:
    """Return the labels that cleanlab flags."""
    from cleanlab.filter import find_label_issues

    chances = validated.double().cpu().numpy()
    return torch.tensor(
        find_label_issues(labels.cpu().numpy(), chances / chances.sum(1, keepdims=True), n_jobs=1)
    )


def measure(setting: dict[str, Any], given: Any) -> dict[str, Any]:
    clock = Clock()
    x, y, labels = noisy(setting, given)
    early = EPOCHS[setting["data"]][0]
    if given.own:
        shared = {"x": x, "y": y, "labels": labels, "clock": clock}
        stages = {stage: own_rankings(setting, stage, shared) for stage in given.stages}
        return {**stages, "seconds": clock.seconds}
    validated = clock(
        "cross-validation", lambda: cross_validated(setting["data"], x, labels, early, setting["seed"])
    )
    shared = {"x": x, "y": y, "labels": labels, "validated": validated, "clock": clock}
    results = {stage: judged(setting, stage, shared) for stage in ("early", "memorized")}
    peer = flags(pruned(labels, validated), (labels != y).cpu())
    return {**results, "cleanlab flags": peer, "seconds": clock.seconds}


def main() -> None:
    arguments = options(__doc__, "labels")
    data_folder(arguments)
    arguments.add_argument("--images", type=Path, help="file that --pack wrote, instead of --data")
    arguments.add_argument("--pack", action="store_true", help="write that file, and end")
    arguments.add_argument("--own", action="store_true", help="likewise's own rankings, without peers")
    arguments.add_argument("--stages", nargs="+", default=["early", "memorized"], help="of --own")
    given = arguments.parse_args()
    if given.pack:
        pack(given)
        return
    if given.own and given.out == arguments.get_default("out"):
        given.out = FOLDER / "labels_own.jsonl"
    measured(settings(given.seeds), measure, given)


if __name__ == "__main__":
    main()
