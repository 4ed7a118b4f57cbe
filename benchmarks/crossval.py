"""Are the numbers beside a cross-validated list of labels right? Beside those of one network.

    python benchmarks/crossval.py           32 cross-validations, about a minute on one thread
    python benchmarks/crossval.py --table   what they found

scikit-learn's digits, breast cancer and wine, and a made-up table whose classes overlap; no noise, 10 % or 30 % wrong
labels; networks of 8 and of 60 epochs (128 hidden units).
"""

from typing import Any

import torch
from records import Clock, lines, measured, options, ranked
from sklearn import datasets
from torch import Tensor, nn
from torch.nn import functional as F

import likewise as lw

DATA = {
    "digits": lambda: datasets.load_digits(return_X_y=True),
    "breast cancer": lambda: datasets.load_breast_cancer(return_X_y=True),
    "wine": lambda: datasets.load_wine(return_X_y=True),
    "overlapping": lambda: datasets.make_classification(
        2000, 20, n_informative=8, n_classes=4, class_sep=1.0, random_state=0
    ),
}
NOISE = (("none", 0.0), ("uniform", 0.1), ("pair", 0.1), ("uniform", 0.3))


def settings(seeds: list[int]) -> list[dict[str, Any]]:
    return [
        {"data": data, "noise": kind, "share": share, "epochs": epochs, "seed": seed}
        for seed in seeds
        for data in DATA
        for kind, share in NOISE
        for epochs in (8, 60)
    ]


def noisy(setting: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    pixels, classes = DATA[setting["data"]]()
    x, y = torch.tensor(pixels).float(), torch.tensor(classes).long()
    x = (x - x.mean(0)) / x.std(0).clamp(min=1e-6)
    chance, count = torch.Generator().manual_seed(1 + setting["seed"]), int(y.max()) + 1
    wrong = torch.rand(len(y), generator=chance) < setting["share"]
    step = torch.randint(1, count, (len(y),), generator=chance) if setting["noise"] == "uniform" else 1
    return x, y, torch.where(wrong, (y + step) % count, y)


def trainer(classes: int, epochs: int) -> Any:
    def train(data: Any) -> nn.Module:
        x, y = (torch.stack([data[i][part] for i in range(len(data))]) for part in (0, 1))
        model = nn.Sequential(nn.Linear(x.shape[1], 128), nn.ReLU(), nn.Linear(128, classes))
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        for _ in range(epochs):
            for batch in torch.randperm(len(x)).split(64):
                optimizer.zero_grad()
                F.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
        return model

    return train


def measure(setting: dict[str, Any], given: Any) -> dict[str, Any]:
    clock, (x, y, labels) = Clock(), noisy(setting)
    wrong = labels != y
    train = trainer(int(y.max()) + 1, setting["epochs"])
    found = clock("cross-validation", lambda: lw.crossval(train, (x, labels), seed=setting["seed"]))
    judged = lw.label_suspicion(found)
    right = float(wrong[judged.flagged].double().mean()) if judged.flagged.any() else None
    return {
        "accuracy": found.accuracy,
        "errors": [int(wrong.sum()), *judged.errors],
        "flagged": int(judged.flagged.sum()),
        "precision": [
            right,
            *([None] * 3 if judged.precision.likely != judged.precision.likely else judged.precision),
        ],
        "distinct": judged.distinct,
        "scores": ranked({"cross-validation": found.suspicion}, wrong) if wrong.any() else None,
        "seconds": clock.seconds,
    }


def table(given: Any) -> None:
    found = lines(given.out)
    inside = [line["errors"][1] <= line["errors"][0] <= line["errors"][3] for line in found]
    known = [
        line["precision"]
        for line in found
        if line["precision"][2] is not None and line["precision"][0] is not None
    ]
    off = [abs(precision[0] - precision[2]) for precision in known]
    print(f"{len(found)} cross-validations: the number of errors lies in the interval {sum(inside)} times")
    print(
        f"precision given {len(off)} times, off by {sum(off) / max(1, len(off)):.3f} (mean), {max(off):.3f} (most)"
    )


def main() -> None:
    arguments = options(__doc__, "crossval")
    arguments.set_defaults(seeds=[0])
    arguments.add_argument("--table", action="store_true", help="only show what was found")
    given = arguments.parse_args()
    if not given.table:
        measured(settings(given.seeds), measure, given)
    table(given)


if __name__ == "__main__":
    main()
