"""Who knows an input of a kind it was not trained on? likewise beside what people use, on the same network.

    python benchmarks/novelty.py --data DIR          results are added to benchmarks/results/novelty.jsonl

Networks of benchmarks/labels.py, trained on true labels; known inputs are test images, novel ones those of
another data set, or of two classes that were left out of training. The figure is the area under the ROC
curve.
"""

from typing import Any

import torch
from images import data_folder, images
from labels import COUNT, MEMORY, NETS, SKETCH
from records import Clock, measured, options, ranked
from torch import Tensor, nn
from torch.nn import functional as F

import likewise as lw
from nets import evaluated, trained

EPOCHS = 15
NOVEL = {  # novel inputs, and the classes left out of training
    "mnist": [("fashion-mnist", ()), ("left out", (8, 9)), ("left out", (3, 5))],
    "fashion-mnist": [("mnist", ()), ("left out", (8, 9)), ("left out", (2, 6))],
    "cifar10": [("fashion-mnist", ()), ("left out", (8, 9)), ("left out", (3, 5))],
}


def settings(seeds: list[int]) -> list[dict[str, Any]]:
    return [
        {"data": data, "novel": novel, "classes": list(classes), "seed": seed}
        for seed in seeds
        for data, cases in NOVEL.items()
        for novel, classes in cases
    ]


def inputs(setting: dict[str, Any], given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training images and labels, known inputs, novel inputs; 1,000 of each of the latter."""
    name, left = setting["data"], torch.tensor(setting["classes"], dtype=torch.long)
    x, y = images(name, given.data, count=COUNT[name])
    test, of = images(name, given.data, "test", count=4000)
    kept, known = ~torch.isin(y, left), ~torch.isin(of, left)
    novel = test[~known]
    if not len(left):
        novel = images(setting["novel"], given.data, "test", count=1000)[0]
        if novel.shape[1:] != x.shape[1:]:
            novel = F.interpolate(novel, x.shape[2:]).expand(-1, x.shape[1], -1, -1)
    parts = x[kept], y[kept], test[known][:1000], novel[:1000]
    return tuple(part.to(given.device) for part in parts)  # type: ignore[return-value]


def by_output(outputs: Tensor, features: Tensor) -> dict[str, Tensor]:
    """Return what is said by outputs and features of the queries alone."""
    chances = outputs.softmax(1)
    gradient = features.abs().sum(1) * (chances - 1 / outputs.shape[1]).abs().sum(1)
    return {
        "largest probability": -chances.max(1).values,
        "energy": -outputs.logsumexp(1),
        "GradNorm": -gradient,
    }


def by_features(model: nn.Sequential, x: Tensor, y: Tensor, queries: Tensor) -> dict[str, Tensor]:
    """Return distances in the space of the last layer's inputs: neighbors, Mahalanobis, ViM."""
    here, there = (evaluated(model[:-1], part).double() for part in (x, queries))
    near = (F.normalize(there, dim=1) @ F.normalize(here, dim=1).T).topk(10, dim=1).values[:, -1]
    means = torch.stack([here[y == c].mean(0) for c in y.unique()])
    places = torch.searchsorted(y.unique(), y)
    within = here - means[places]
    precision = torch.linalg.pinv(within.T @ within / len(here), hermitian=True, rtol=1e-6)
    gaps = there[:, None] - means
    squares = torch.einsum("ncf,fg,ncg->nc", gaps, precision, gaps)
    last: Any = model[-1]
    weight, bias = last.weight.detach().double(), last.bias.detach().double()
    origin = -torch.linalg.pinv(weight) @ bias
    centered = here - origin
    _, vectors = torch.linalg.eigh(centered.T @ centered / len(here))
    rest = vectors[:, : -min(64, here.shape[1] // 2)]
    outputs = here @ weight.T + bias
    alpha = outputs.max(1).values.sum() / (centered @ rest).norm(dim=1).sum()
    virtual = alpha * ((there - origin) @ rest).norm(dim=1)
    energy = (there @ weight.T + bias).logsumexp(1)
    return {"neighbors in features": -near, "Mahalanobis": squares.min(1).values, "ViM": virtual - energy}


def measure(setting: dict[str, Any], given: Any) -> dict[str, Any]:
    clock, seed = Clock(), setting["seed"]
    x, y, known, novel = inputs(setting, given)
    torch.manual_seed(seed)
    fresh = NETS[setting["data"]]().to(x.device)
    model = clock("training", lambda: trained(fresh, x, y, EPOCHS, seed).model)
    queries = torch.cat([known, novel])
    gram = lw.GramMatrix(model, queries, columns=(x, y), max_memory=MEMORY)
    scores = {"likewise": clock("likewise", lambda: lw.novelty(gram, sketch=SKETCH))}
    scores["nearest alone"] = lw.novelty(gram, k=1, sketch=SKETCH)
    scores["N_S"] = -lw.soft_neighbors(gram)
    scores["paper's uncertainty"] = lw.uncertainty(gram)
    scores |= by_output(evaluated(model, queries), evaluated(model[:-1], queries))
    scores |= clock("features", lambda: by_features(model, x, y, queries))
    strange = torch.arange(len(queries)) >= len(known)
    return {"scores": ranked(scores, strange), "seconds": clock.seconds}


def main() -> None:
    arguments = options(__doc__, "novelty")
    data_folder(arguments)
    given = arguments.parse_args()
    measured(settings(given.seeds), measure, given)


if __name__ == "__main__":
    main()
