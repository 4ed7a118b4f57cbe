"""Does it help to learn from denoised labels? Test accuracy after training again, beside plain training.

    python benchmarks/relabel.py --data DIR          results are added to benchmarks/results/relabel.jsonl

Labels spoiled as in benchmarks/labels.py. A network is trained (15 epochs); what it says of its labels
changes them, and the same network is trained anew: on the labels averaged over neighbors, E_k[y], without
the flagged labels, with the suggested ones; beside it without cleanlab's flags (five networks more) and on
the samples of least loss, the true share of noise given.
"""

from typing import Any

import torch
from images import data_folder, images
from labels import EPOCHS as VALIDATED
from labels import MEMORY, SKETCH, cross_validated, made, noisy, pruned
from records import Clock, measured, options
from torch import Tensor
from torch.nn import functional as F

import likewise as lw
from likewise.statistics.reliability import neighbor_means
from nets import evaluated

EPOCHS = 15


def settings(seeds: list[int]) -> list[dict[str, Any]]:
    return [
        {"data": data, "noise": kind, "share": share, "seed": seed}
        for seed in seeds
        for share in (0.2, 0.4)
        for kind in ("uniform", "pair", "instance")
        for data in ("fashion-mnist", "cifar10")
    ]


def measure(setting: dict[str, Any], given: Any) -> dict[str, Any]:
    name, seed, clock = setting["data"], setting["seed"], Clock()
    x, y, labels = noisy(setting, given)
    test, truth = (part.to(given.device) for part in images(name, given.data, "test", count=4000))
    first = clock("training", lambda: made(name, x, labels, EPOCHS, seed).model)
    gram = lw.GramMatrix(first, (x, labels), max_memory=MEMORY)
    found = clock("likewise", lambda: lw.label_suspicion(gram, sketch=SKETCH))
    target = F.one_hot(labels, 10).double()
    around = neighbor_means(gram, SKETCH, target.cpu())[1].to(target)
    validated = clock("validation", lambda: cross_validated(name, x, labels, VALIDATED[name][0], seed))
    loss = F.cross_entropy(evaluated(first, x), labels, reduction="none")
    least = loss.argsort()[: round(len(loss) * (1 - setting["share"]))]
    flagged = found.flagged.to(x.device)
    keep: dict[str, tuple[Tensor | slice, Tensor]] = {
        "flagged left out": (~flagged, labels),
        "flagged relabeled": (slice(None), torch.where(flagged, found.suggested.to(x.device), labels)),
        "labels of neighbors": (slice(None), around.float()),
        "half labels of neighbors": (slice(None), ((around + target) / 2).float()),
        "cleanlab's left out": (~pruned(labels, validated).to(x.device), labels),
        "least loss": (least, labels),
        "true labels": (slice(None), y),
    }
    right = {"as they are": accuracy(first, test, truth)}
    for label, (places, changed) in keep.items():
        right[label] = accuracy(made(name, x[places], changed[places], EPOCHS, seed).model, test, truth)
    return {"right": right, "seconds": clock.seconds}


def accuracy(model: Any, x: Tensor, y: Tensor) -> float:
    return float((evaluated(model, x).argmax(1) == y).float().mean())


def main() -> None:
    arguments = options(__doc__, "relabel")
    data_folder(arguments)
    given = arguments.parse_args()
    measured(settings(given.seeds), measure, given)


if __name__ == "__main__":
    main()
