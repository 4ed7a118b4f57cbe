"""Who finds wrong labels? likewise beside what people use, on the same trained network.

    python benchmarks/labels.py --data DIR           results are added to benchmarks/results/labels.jsonl
    python benchmarks/labels.py --own --data DIR     likewise's own rankings alone, to labels_own.jsonl
    python benchmarks/labels.py --cost --data DIR    seconds of one setting of each data set, to label_cost.jsonl
    python benchmarks/labels.py --pack --data DIR    images into one file, out/label-images.npz, for --images
    python benchmarks/uses.py                        the tables of docs/uses.md, from the results

MNIST and Fashion-MNIST (5,000 images, a convolutional net of 290,000 parameters), CIFAR-10 (10,000 images,
ResNet-9 of 1.6 million); a share of the labels made wrong, uniformly, into the next class, or by how hard
an image is; networks stopped early and after they have memorized nearly all labels. Cross-validation
trains five more networks, with the early schedule, its better one; its ranking and flags are cleanlab's.
`--own` leaves all peers out, compares gradients as `analyze` chooses to by default (sketches of 1,024 numbers of four
combinations of the outputs; lines with "outputs": 10 are of all outputs, and of plain margins), and adds what one
network can do more: four reheated copies where it has memorized its labels (as `label_suspicion(gram,
reheat="auto")`), and the margins of its own training (`likewise.Watch`). `--processes 8` measures so many side by side;
`--keep FOLDER` keeps trained networks and opinions there, and uses networks that are there.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from images import data_folder, images, pack_images, unpack_images
from records import FOLDER, Clock, measured, named, options, ranked
from torch import Tensor, nn
from torch.nn import functional as F

import likewise as lw
from likewise.data import batches
from likewise.gram.sketches import Sketch, sketch_rows
from likewise.runs.plan import Method, choose_method
from likewise.statistics.label_issues import ROUNDS, LabelSuspicion, combined_suspicion, opinion_after
from likewise.statistics.neighbors import class_votes
from nets import Trained, conv6, evaluated, margin, resnet9, spoiled, trained

SKETCH = 1024
OUTPUTS = 4  # combinations of the outputs that analyze compares by default
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


def own_settings(seeds: list[int]) -> list[dict[str, Any]]:
    """Return a setting for each network, those first that most is to be learned from."""
    return [
        {**setting, "stage": stage, "outputs": OUTPUTS}
        for seed in seeds
        for stage in ("memorized", "early")
        for setting in sorted(settings([seed]), key=lambda s: s["data"] != "cifar10")
    ]


def read(name: str, given: Any) -> tuple[Tensor, Tensor]:
    """Return images and true labels, on the device."""
    if given.images is None:
        x, y = images(name, given.data, first=FIRST, count=COUNT[name])
    else:
        x, y = unpack_images(given.images, name)
    return x[: given.count].to(given.device), y[: given.count].to(given.device)


def noisy(setting: dict[str, Any], given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return images, true labels and labels of which a share is wrong."""
    name, seed = setting["data"], setting["seed"]
    x, y = read(name, given)
    chances = None
    if setting["noise"] == "instance":
        torch.manual_seed(500 + seed)
        chances = evaluated(trained(fresh(name, x.device), x, y, 4, seed).model, x).softmax(1)
    return x, y, spoiled(y, setting["noise"], setting["share"], seed, chances).to(x.device)


def fresh(name: str, device: torch.device) -> nn.Sequential:
    """Return a network before training, laid out as convolutions like it: three times as fast on a CPU."""
    return NETS[name]().to(device, memory_format=torch.channels_last)


def made(name: str, x: Tensor, y: Tensor, epochs: int, seed: int) -> Trained:
    torch.manual_seed(seed)
    return trained(fresh(name, x.device), x, y, epochs, seed)


def kept_file(folder: Path, setting: dict[str, Any], what: str) -> Path:
    return folder / f"{named(setting).replace(' ', '-')}-{what}.pt"


def made_once(setting: dict[str, Any], x: Tensor, labels: Tensor, folder: Path | None) -> Trained:
    """Return the network of a setting of `--own`, from the folder if it is kept there."""
    name, seed = setting["data"], setting["seed"]
    epochs = EPOCHS[name][setting["stage"] == "memorized"]
    if folder is None:
        return made(name, x, labels, epochs, seed)
    file = kept_file(folder, setting, "network")
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        fit = made(name, x, labels, epochs, seed)
        record = {"margins": fit.margins, "early margins": fit.early_margins, "labels": labels}
        torch.save({"state": fit.model.state_dict(), **record}, file)
    kept = torch.load(file, map_location=x.device)
    if not torch.equal(kept["labels"], labels):
        raise RuntimeError(f"{file} is of other labels.")
    model = fresh(name, x.device)
    model.load_state_dict(kept["state"])
    return Trained(model.eval(), kept["margins"], kept["early margins"])


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


def default_method(model: nn.Module, x: Tensor, labels: Tensor) -> Method:
    """Return how `likewise analyze` compares gradients if nothing else is asked for."""
    return choose_method(lw.Network(model), batches((x, labels)))


def own_rankings(
    setting: dict[str, Any], x: Tensor, y: Tensor, labels: Tensor, folder: Path | None = None
) -> dict[str, Any]:
    """Return what likewise makes of one network, of reheated copies and of its training's margins."""
    clock, wrong = Clock(), (labels != y).cpu()
    fit = clock("train", lambda: made_once(setting, x, labels, folder))
    outputs, given = evaluated(fit.model, x), labels.cpu()
    method = default_method(fit.model, x, labels)
    sketch = method.sketch or None
    gram = lw.GramMatrix(method.net, (x, labels), max_memory=MEMORY)
    votes = clock("votes", lambda: class_votes(gram, given, sketch=sketch).cpu())
    hot = clock("reheat", lambda: lw.reheat(gram.net, (x, labels), votes=votes, rounds=ROUNDS))
    after = None
    if not hot.skipped:
        after = clock("votes of copies", lambda: opinion_after(gram, hot, sketch=sketch))
    chances, margins = outputs.softmax(1).cpu(), fit.early_margins.cpu()
    if folder is not None:
        parts = {"votes": votes, "chances": chances, "after": after and after._asdict(), "truth": y.cpu()}
        torch.save(parts, kept_file(folder, setting, "opinions"))
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
        "compared": method.describe(),
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
        "seconds": clock.seconds,
        "device": x.device.type,
        "version": lw.__version__,
    }


def cost(setting: dict[str, Any], given: Any) -> dict[str, Any]:
    """Return the seconds of five cross-validated networks, and of suspicion by one, early, memorized and reheated."""
    name, seed = setting["data"], setting["seed"]
    x, _, labels = noisy(setting, given)
    early, long = EPOCHS[name]
    few = (x[:512], labels[:512])
    lw.label_suspicion(lw.GramMatrix(made(name, *few, 1, seed).model, few), sketch=SKETCH)  # warms up
    clock, models = Clock(), dict[str, nn.Module]()
    clock("cross-validation", lambda: cross_validated(name, x, labels, early, seed))
    for stage, epochs in (("early", early), ("memorized", long)):
        models[stage] = clock(f"train {stage}", lambda e=epochs: made(name, x, labels, e, seed).model)
    for what, stage, reheat in (("early", "early", None), ("reheated", "memorized", "auto")):
        method = default_method(models[stage], x, labels)
        gram = lw.GramMatrix(method.net, (x, labels), max_memory=MEMORY)
        clock(
            what, lambda g=gram, m=method, r=reheat: lw.label_suspicion(g, sketch=m.sketch or None, reheat=r)
        )
    seconds = clock.seconds
    share = {what: seconds[what] / seconds["cross-validation"] for what in ("early", "reheated")}
    return {"seconds": seconds, "share": share, "device": str(x.device), "count": len(x)}


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
    if given.own:
        return own_rankings(setting, x, y, labels, given.keep)
    early = EPOCHS[setting["data"]][0]
    validated = clock(
        "cross-validation", lambda: cross_validated(setting["data"], x, labels, early, setting["seed"])
    )
    shared = {"x": x, "y": y, "labels": labels, "validated": validated, "clock": clock}
    results = {stage: judged(setting, stage, shared) for stage in ("early", "memorized")}
    peer = flags(pruned(labels, validated), (labels != y).cpu())
    return {**results, "cleanlab flags": peer, "seconds": clock.seconds}


def main() -> None:
    arguments = options(__doc__, "labels")
    arguments.set_defaults(out=None)
    data_folder(arguments)
    arguments.add_argument("--images", type=Path, help="file that --pack wrote, instead of --data")
    arguments.add_argument("--pack", action="store_true", help="write that file, and end")
    arguments.add_argument("--own", action="store_true", help="likewise's own rankings, without peers")
    arguments.add_argument("--keep", type=Path, help="folder of trained networks, with --own")
    arguments.add_argument("--cost", action="store_true", help="seconds of one setting, alone on the device")
    arguments.add_argument("--count", type=int, default=None, help="so many images only, for a try")
    given = arguments.parse_args()
    if given.pack:
        pack_images(Path("out/label-images.npz"), {name: read(name, given) for name in NETS})
        return
    name = "labels_own" if given.own else "label_cost" if given.cost else "labels"
    given.out = given.out or FOLDER / f"{name}.jsonl"
    if given.cost:
        setting = {"noise": "uniform", "share": 0.1, "seed": 0}
        measured([{"data": data, **setting} for data in ("cifar10", "fashion-mnist")], cost, given)
        return
    measured(own_settings(given.seeds) if given.own else settings(given.seeds), measure, given)


if __name__ == "__main__":
    main()
