"""Who knows which predictions are wrong? likewise beside what people use, on the same network.

    python benchmarks/reliability.py --data DIR      results are added to benchmarks/results/reliability.jsonl

Test images of MNIST, Fashion-MNIST and CIFAR-10, networks of benchmarks/labels.py trained on true labels,
and as a regression the angle by which digits are turned. 1,000 test images calibrate, 2,000 others are
judged: area under the risk-coverage curve (mean error of the most trusted, over all shares), and how far
calibrated chances are off.
"""

import math
from typing import Any

import torch
from images import data_folder, images
from labels import COUNT, MEMORY, NETS, SKETCH
from novelty import EPOCHS
from records import Clock, measured, options, risk_coverage
from torch import Tensor, nn
from torch.nn import functional as F

import likewise as lw
from nets import conv6, evaluated, margin, trained

HELD, ASKED = 1000, 2000
TURNED = "turned mnist"


def settings(seeds: list[int]) -> list[dict[str, Any]]:
    return [
        {"data": data, "share": share, "seed": seed}
        for seed in seeds
        for data in (*NETS, TURNED)
        for share in (0.0, 0.2)
        if not (data == TURNED and share)
    ]


def with_dropout(name: str) -> nn.Sequential:
    model = NETS[name]()
    return nn.Sequential(*model[:-1], nn.Dropout(0.3), model[-1])


def dropped(model: nn.Sequential, x: Tensor, passes: int = 20) -> Tensor:
    """Return mean probabilities over passes with dropout, the rest of the model as in evaluation."""
    features = evaluated(model[:-2], x)
    model[-2].train()
    found = torch.stack([evaluated(model[-2:], features).softmax(1) for _ in range(passes)]).mean(0)
    model[-2].eval()
    return found


def laplace(model: nn.Sequential, x: Tensor, queries: Tensor, prior: float = 1.0) -> Tensor:
    """Return probabilities with the last layer's Gaussian posterior, by the probit approximation."""
    here, there = evaluated(model[:-1], x).double(), evaluated(model[:-1], queries).double()
    chances = evaluated(model, x).double().softmax(1)
    outputs = evaluated(model, queries).double()
    spread = torch.empty_like(outputs)
    for c in range(outputs.shape[1]):
        weight = (chances[:, c] * (1 - chances[:, c]))[:, None]
        precision = here.T @ (weight * here) + prior * torch.eye(here.shape[1]).to(here)
        spread[:, c] = (there * torch.linalg.solve(precision, there.T).T).sum(1)
    return (outputs / (1 + math.pi / 8 * spread).sqrt()).softmax(1)


def agreeing(model: nn.Sequential, x: Tensor, y: Tensor, queries: Tensor, k: int = 50) -> Tensor:
    """Return the share of the nearest training samples in feature space that have the predicted label."""
    here, there = (F.normalize(evaluated(model[:-1], part), dim=1) for part in (x, queries))
    places = (there @ here.T).topk(k, dim=1).indices
    return (y[places] == evaluated(model, queries).argmax(1)[:, None]).float().mean(1)


def tempered(outputs: Tensor, labels: Tensor) -> float:
    """Return the temperature at which held-out labels are most likely."""
    grid = torch.logspace(-1, 1, 60).tolist()
    return min(grid, key=lambda t: float(F.cross_entropy(outputs / t, labels)))


def calibration_error(chance: Tensor, right: Tensor, bins: int = 15) -> float:
    """Return the mean distance of chances from shares, over bins of equal size."""
    order = chance.cpu().argsort()
    parts = zip(chance.cpu()[order].tensor_split(bins), right.cpu()[order].tensor_split(bins), strict=True)
    return sum(abs(float(c.double().mean() - r.double().mean())) * len(c) for c, r in parts) / len(order)


def of_classes(setting: dict[str, Any], given: Any) -> dict[str, Any]:
    name, seed, clock = setting["data"], setting["seed"], Clock()
    x, y = (part.to(given.device) for part in images(name, given.data, count=COUNT[name]))
    if setting["share"]:
        from nets import spoiled

        y = spoiled(y, "uniform", setting["share"], seed).to(x.device)
    test, truth = (p.to(given.device) for p in images(name, given.data, "test", count=HELD + ASKED))
    make = lambda s, net=NETS[name]: trained(_seeded(s, net).to(x.device), x, y, EPOCHS, s).model  # noqa: E731
    model = clock("training", lambda: make(seed))
    others = clock("ensemble", lambda: [make(100 * seed + i + 10) for i in range(4)])
    noisy = clock("dropout", lambda: make(seed, lambda: with_dropout(name)))
    gram = lw.GramMatrix(model, test, columns=(x, y), max_memory=MEMORY)
    found = clock("likewise", lambda: lw.reliability(gram, sketch=SKETCH))
    outputs = evaluated(model, test)
    right = outputs.argmax(1) == truth
    held = lw.Reliability(*(part[:HELD] for part in found))
    chance = lw.calibrate(held, truth[:HELD].cpu())(lw.Reliability(*(part[HELD:] for part in found)))
    plain, ensemble = (
        outputs.softmax(1),
        torch.stack([evaluated(m, test).softmax(1) for m in (model, *others)]).mean(0),
    )
    heat = tempered(outputs[:HELD], truth[:HELD])
    mine = outputs.argmax(1)
    take = lambda chances: chances.gather(1, mine[:, None])[HELD:, 0]  # noqa: E731
    trust = {
        "likewise": chance,
        "agreement alone": found.agreement[HELD:],
        "closeness alone": found.closeness[HELD:],
        "shift alone": -found.shift[HELD:],
        "neighbors in features": agreeing(model, x, y, test)[HELD:],
        "largest probability": take(plain),
        "margin": margin(plain, mine)[HELD:],
        "temperature": take((outputs / heat).softmax(1)),
        "energy": outputs.logsumexp(1)[HELD:],
        "Laplace": take(laplace(model, x, test)),
        "paper's uncertainty": -lw.uncertainty(gram)[HELD:],
    }
    loss = (~right[HELD:]).double()
    areas = {name: risk_coverage(score, loss) for name, score in trust.items()}
    for label, chances in (("dropout", dropped(noisy, test)), ("ensemble of five", ensemble)):
        wrong = (chances.argmax(1) != truth)[HELD:].double()  # another predictor: judged by its own errors
        areas[label] = risk_coverage(chances.max(1).values[HELD:], wrong)
    calibrated = {
        name: calibration_error(trust[name], right[HELD:])
        for name in ("likewise", "largest probability", "temperature", "Laplace")
    }
    return {"areas": areas, "off": calibrated, "right": float(right.float().mean()), "seconds": clock.seconds}


def turned(x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return digits turned by up to 60 degrees, and by how much, in radians."""
    chance = torch.Generator().manual_seed(seed)
    angle = (torch.rand(len(x), generator=chance) * 2 - 1) * math.pi / 3
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros(len(x))
    maps = torch.stack([torch.stack([cos, -sin, zero], 1), torch.stack([sin, cos, zero], 1)], 1)
    grid = F.affine_grid(maps, list(x.shape), align_corners=False)
    low = float(x.min())
    return F.grid_sample(x - low, grid, align_corners=False) + low, angle[:, None]


def of_angles(setting: dict[str, Any], given: Any) -> dict[str, Any]:
    seed, clock = setting["seed"], Clock()
    x, angle = turned(images("mnist", given.data, count=COUNT["mnist"])[0], seed)
    test, truth = turned(images("mnist", given.data, "test", count=HELD + ASKED)[0], 1000 + seed)
    x, angle, test, truth = (part.to(given.device) for part in (x, angle, test, truth))
    make = lambda s: regressed(_seeded(s, lambda: conv6(1)).to(x.device), x, angle, s)  # noqa: E731
    model = clock("training", lambda: make(seed))
    others = clock("ensemble", lambda: [make(100 * seed + i + 10) for i in range(4)])
    gram = lw.GramMatrix(model, test, columns=(x, angle), max_memory=MEMORY)
    found = clock("likewise", lambda: lw.reliability(gram, sketch=SKETCH))
    held = lw.Reliability(*(None if part is None else part[:HELD] for part in found))
    asked = lw.Reliability(*(None if part is None else part[HELD:] for part in found))
    expected = lw.calibrate(held, truth[:HELD].cpu())(asked)
    outputs = evaluated(model, test)
    error = (outputs - truth).abs()[HELD:, 0]
    here, there = (F.normalize(evaluated(model[:-1], part), dim=1) for part in (x, test))
    every = torch.stack([evaluated(m, test) for m in (model, *others)])
    trust = {
        "likewise": -expected,
        "agreement alone": found.agreement[HELD:],
        "closeness alone": found.closeness[HELD:],
        "shift alone": -found.shift[HELD:],
        "neighbors in features": (there @ here.T).topk(10, dim=1).values[HELD:, -1],
        "paper's uncertainty": -lw.uncertainty(gram)[HELD:],
        "ensemble of five": -every.std(0)[HELD:, 0],
    }
    together = (every.mean(0) - truth).abs()[HELD:, 0]  # another predictor: judged by its own errors
    areas = {
        name: risk_coverage(score, together if name == "ensemble of five" else error)
        for name, score in trust.items()
    }
    areas["no order"] = float(error.mean())
    return {"areas": areas, "off": {}, "right": float(error.mean()), "seconds": clock.seconds}


def regressed(model: nn.Sequential, x: Tensor, y: Tensor, seed: int) -> nn.Sequential:
    """Return the model trained on values, as `nets.trained` does on classes."""
    chance, batch = torch.Generator().manual_seed(seed), 128
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    steps = EPOCHS * -(-len(x) // batch)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.2)
    model.train()
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(x), generator=chance).to(x.device).split(batch):
            optimizer.zero_grad()
            F.mse_loss(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
            rate.step()
    return model.eval()


def _seeded(seed: int, make: Any) -> nn.Sequential:
    torch.manual_seed(seed)
    return make()


def measure(setting: dict[str, Any], given: Any) -> dict[str, Any]:
    return of_angles(setting, given) if setting["data"] == TURNED else of_classes(setting, given)


def main() -> None:
    arguments = options(__doc__, "reliability")
    data_folder(arguments)
    given = arguments.parse_args()
    measured(settings(given.seeds), measure, given)


if __name__ == "__main__":
    main()
