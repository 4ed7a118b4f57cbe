"""Two networks whose lists of wrong labels once came with false numbers: what does a run say of them now? On a CPU.

    python benchmarks/label_stories.py --data DIR      results are added to benchmarks/results/label_stories.jsonl

texts     2,000 docstrings of ten packages, a tenth of them labeled wrong; a transformer that has memorized every label.
          It once said "24 wrong, 0 to 34" and "nothing to do".
pictures  3,000 images of CIFAR-10, a tenth (or none) labeled wrong; a small residual network, stopped early, right for
          about half of new images. It once flagged 454, "about 81 % should be wrong", and 37 % were.

Each is analyzed as a user would (`likewise.analyze` at its defaults), and again with `reheat=True`. Written down is
what the run, its manifest and the first screen of its report say, beside the truth.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from images import data_folder, images
from label_texts import by_parts, load, spoil, train
from records import Clock, measured, options, ranked
from torch import Tensor, nn
from torch.nn import functional as F

import likewise as lw
from likewise.report.payload import read_run
from likewise.report.verdict import verdict

EPOCHS = {"texts": 40, "pictures": 18}


class Block(nn.Module):
    """Two convolutions with batch normalization beside what comes in."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after))
        self.second = nn.Sequential(nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after))
        self.beside = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.beside(x) + self.second(F.relu(self.first(x))))


def residual_net(width: int = 16) -> nn.Sequential:
    blocks = [Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2)]
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 2, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10)
    )


def train_on_pictures(x: Tensor, y: Tensor, seed: int) -> nn.Module:
    """Return a residual network after Adam with one cycle of learning rates; images are mirrored and moved."""
    torch.manual_seed(seed)
    model, epochs = residual_net(), EPOCHS["pictures"]
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=epochs * -(-len(x) // 64))
    for _ in range(epochs):
        for chosen in torch.randperm(len(x)).split(64):
            left, top = torch.randint(0, 9, (2,)).tolist()
            picture = F.pad(x[chosen], (4, 4, 4, 4))[:, :, top : top + 32, left : left + 32]
            picture = picture.flip(3) if torch.rand(()) < 0.5 else picture
            optimizer.zero_grad()
            F.cross_entropy(model(picture), y[chosen]).backward()
            optimizer.step()
            rate.step()
    return model.eval()


def story(
    setting: dict[str, Any], given: Any, clock: Clock
) -> tuple[nn.Module, Tensor, Tensor, Tensor, float]:
    """Return a trained network, inputs, labels, which of them are wrong, and its accuracy on new images."""
    seed, share = setting["seed"], setting["share"]
    if setting["story"] == "texts":
        x, y = load("docstrings", seed, given)
        labels = spoil(y, "uniform", share, seed)
        torch.manual_seed(seed)
        model = clock("training", lambda: train(x, labels, 10, EPOCHS["texts"]))
        return model, x, labels, labels != y, float("nan")
    x, y = images("cifar10", given.data, first=3000 * seed, count=3000)
    labels = spoil(y, "uniform", share, seed)
    model = clock("training", lambda: train_on_pictures(x, labels, seed))
    new, truth = images("cifar10", given.data, "test", count=2000)
    return model, x, labels, labels != y, float((by_parts(model, new).argmax(1) == truth).float().mean())


def measure(setting: dict[str, Any], given: Any) -> dict[str, Any]:
    clock = Clock()
    model, x, labels, wrong, accuracy = story(setting, given, clock)
    outputs = by_parts(model, x)
    loss = F.cross_entropy(outputs, labels, reduction="none")
    found: dict[str, Any] = {
        "wrong": int(wrong.sum()),
        "learned": float((outputs.argmax(1) == labels).float().mean()),
        "new images": accuracy,
        "loss": ranked({"loss": loss}, wrong)["loss"] if wrong.any() else None,
    }
    for name, reheat in (("default", False), ("reheated", True)):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            run = clock(name, lambda out=out, hot=reheat: lw.analyze(model, (x, labels), out=out, reheat=hot))
            found[name] = said(run, wrong)
    return {**found, "seconds": clock.seconds}


def said(run: lw.Analysis, wrong: Tensor) -> dict[str, Any]:
    """Return what a run says of wrong labels, beside the truth."""
    flagged = torch.tensor(run.table["label_issue"].to_numpy())
    first = verdict(read_run(run.folder))
    scores = {"likewise": torch.tensor(run.table["label_suspicion"].to_numpy())}
    return {
        "flagged": [int(flagged.sum()), float(wrong[flagged].double().mean()) if flagged.any() else None],
        **{
            name: run.manifest["wrong_labels"][name] for name in ("errors", "precision", "distinct", "reason")
        },
        "first screen": f"{first.headline} {first.detail}",
        "caveats": [caveat[0] for caveat in first.caveats],
        "reheating": run.manifest.get("reheated"),
        "scores": ranked(scores, wrong) if wrong.any() else {},
    }


def main() -> None:
    arguments = options(__doc__, "label_stories")
    data_folder(arguments)
    arguments.add_argument("--texts", type=Path, default=Path("out/label-texts.npz"))
    given = arguments.parse_args()
    cases = (("texts", 0.1), ("pictures", 0.1), ("pictures", 0.0))
    settings = [{"story": s, "share": share, "seed": seed} for seed in given.seeds for s, share in cases]
    measured(settings, measure, given)


if __name__ == "__main__":
    main()
