"""How many of the labels that are flagged are wrong, and is the number of errors told right? On a CPU.

    python benchmarks/label_flags.py --data DIR      results are added to benchmarks/results/label_flags.jsonl
    ... --keep FOLDER --out FILE                     votes are kept there, and used if they are there

3,000 images each of MNIST, Fashion-MNIST and CIFAR-10, a small convolutional net with batch normalization
after 6 epochs and after 30 (with 10 % uniform noise also before any), when it has learned all labels; no
label made wrong on purpose, or a share of them.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from images import data_folder, images
from labels import flags
from records import Clock, measured, options, ranked
from torch import Tensor, nn

import likewise as lw
from likewise.statistics.label_issues import combined_suspicion
from likewise.statistics.neighbors import class_votes
from nets import evaluated, spoiled, trained

COUNT, WIDTH = 3000, 16
NOISE = (("none", 0.0), ("uniform", 0.1), ("pair", 0.1), ("instance", 0.1), ("uniform", 0.3))


def net(channels: int) -> nn.Sequential:
    def block(i: int, o: int, size: int) -> list[nn.Module]:
        return [nn.Conv2d(i, o, size, stride=2, padding=size // 2), nn.BatchNorm2d(o), nn.ReLU()]

    layers = [*block(channels, WIDTH, 5), *block(WIDTH, 2 * WIDTH, 3), *block(2 * WIDTH, 4 * WIDTH, 3)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * WIDTH, 10))


def settings(seeds: list[int]) -> list[dict[str, Any]]:
    return [
        {"data": data, "noise": kind, "share": share, "epochs": epochs, "seed": seed}
        for seed in seeds
        for kind, share in NOISE
        for data in ("mnist", "fashion-mnist", "cifar10")
        for epochs in ((0, 6, 30) if (kind, share) == ("uniform", 0.1) else (6, 30))
    ]


def votes_of(setting: dict[str, Any], given: Any, clock: Clock) -> dict[str, Tensor]:
    """Return the votes on labels and the outputs of a network trained with them, beside the labels and the truth."""
    seed = setting["seed"]
    x, y = images(setting["data"], given.data, first=COUNT * seed, count=COUNT)
    chances, labels = None, y
    if setting["noise"] == "instance":
        torch.manual_seed(500 + seed)
        chances = evaluated(trained(net(x.shape[1]), x, y, 4, seed, batch=64).model, x).softmax(1)
    if setting["noise"] != "none":
        labels = spoiled(y, setting["noise"], setting["share"], seed, chances)
    torch.manual_seed(seed)
    fresh = net(x.shape[1])
    model = clock("training", lambda: trained(fresh, x, labels, setting["epochs"], seed, batch=64).model)
    gram = lw.GramMatrix(model, (x, labels))
    votes = clock("likewise", lambda: class_votes(gram, labels, sketch=1024))
    return {"votes": votes, "outputs": evaluated(model, x), "labels": labels, "truth": y}


def kept_votes(setting: dict[str, Any], given: Any, clock: Clock) -> dict[str, Tensor]:
    """Return what `votes_of` does, from the folder `--keep` where it is there, and write it there where not."""
    if given.keep is None:
        return votes_of(setting, given, clock)
    file = given.keep / f"{'-'.join(str(v) for v in setting.values())}.npz"
    if not file.exists():
        given.keep.mkdir(parents=True, exist_ok=True)
        found = votes_of(setting, given, clock)
        np.savez_compressed(file, **{k: v.numpy() for k, v in found.items()})
    with np.load(file) as arrays:
        return {name: torch.tensor(arrays[name]) for name in arrays.files}


def measure(setting: dict[str, Any], given: Any) -> dict[str, Any]:
    clock = Clock()
    votes, outputs, labels, truth = kept_votes(setting, given, clock).values()
    found, wrong = combined_suspicion(votes, labels, outputs.softmax(1)), labels != truth
    return {
        "learned": float((outputs.argmax(1) == labels).float().mean()),
        "flags": flags(found.flagged, wrong),
        "expected": list(found.precision),
        "errors": [int(wrong.sum()), *found.errors],
        "distinct": found.distinct,
        "scores": ranked({"likewise": found.suspicion}, wrong) if wrong.any() else {},
        "seconds": clock.seconds,
    }


def main() -> None:
    arguments = options(__doc__, "label_flags")
    data_folder(arguments)
    arguments.add_argument("--keep", type=Path, default=None, help="folder for the votes of each setting")
    given = arguments.parse_args()
    measured(settings(given.seeds), measure, given)


if __name__ == "__main__":
    main()
