"""What `likewise` tells of a trained network, without the truth, and then how far the truth bears it out.

All of one round's network at one scale, on patches drawn as it was trained. Errors and shifts are in pixels
at reference scale.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from patches import FARTHEST, REACH, Patches, Poses, Sites, drawn_poses, shown, turned
from rounds import best_possible, met
from scipy import stats
from torch import Tensor, nn

import likewise as lw

BINS = 80
FEATURES = ["image.out", "map.out", "match"]  # the network's own, for the perceptual similarity


def drawn_sample(of: Sites, n: int, seed: int = 0) -> tuple[Tensor, Poses]:
    """Return n buildings, different ones as far as there are any, and poses."""
    chance = torch.Generator().manual_seed(seed)
    which = torch.cat([torch.randperm(len(of), generator=chance) for _ in range(-(-n // len(of)))])[:n]
    return which, drawn_poses(n, of.scale, chance)


def matrix(
    model: nn.Module, patches: Patches, others: Patches | None = None, **options: Any
) -> lw.GramMatrix:
    """Return the kernel between patches, or of patches with others; their labels travel along."""
    device, room = patches.label.device, 2**33
    if device.type == "cuda":  # a third of what is free: its allocator keeps more than is asked for
        room = torch.cuda.mem_get_info(device)[0] // 3
    columns = None if others is None else others.labeled
    return lw.GramMatrix(model, patches.labeled, columns, max_memory=room, **options)


def density(model: nn.Module, patches: Patches) -> dict[str, Any]:
    """Return N_S of every patch, and how long it took."""
    gram = matrix(model, patches)
    lw.soft_neighbors(gram.take(16))  # checks of the model are no part of the time
    start = time.perf_counter()
    soft = lw.soft_neighbors(gram)
    taken = float(soft.sum()) * 0 + time.perf_counter() - start  # the sum waits for the device
    return {"n": len(soft), "soft": _rounded(soft, 1), "seconds": taken}


def histograms(model: nn.Module, patches: Patches, queries: list[int]) -> dict[str, Any]:
    """Return histograms of similarities, of all pairs and of chosen patches, plain and centered."""
    found: dict[str, Any] = {}
    for name, centered in (("plain", False), ("centered", True)):
        gram = matrix(model, patches, centered=centered)
        counts = lw.similarity_histogram(gram, BINS, sketch=None).counts
        middle = torch.linspace(-1, 1, BINS + 1)[:-1] + 1 / BINS
        share = counts.sum(0).double().cpu() / int(counts.sum())
        mean = float((share * middle).sum())
        deviation = float((share * (middle - mean).square()).sum().sqrt())
        skew = float((share * ((middle - mean) / deviation) ** 3).sum())
        found[name] = {
            "all": counts.sum(0).tolist(),
            "each": counts[queries].tolist(),
            "mean": mean,
            "deviation": deviation,
            "skew": skew,
        }
    return found


def self_denoising(model: nn.Module, patches: Patches, scale: int) -> dict[str, Any]:
    """Return factor and shift, which need no truth, and what they are worth beside the true errors."""
    gram = matrix(model, patches)
    found = lw.denoising(gram, exact=True)
    outputs, label, truth = (t.double().cpu() for t in (gram.outputs(), patches.label, patches.truth))
    smoothed, shift, factor = (t.double().cpu() for t in (found.smoothed_label, found.shift, found.factor))
    error, far = scale * (outputs - truth).norm(dim=1), scale * shift.norm(dim=1)
    trusted, known = far <= far.median(), ~found.unreliable.cpu()
    return {
        "factor": _quantiles(factor),
        "floor": found.floor,
        "neighbors": _quantiles(found.effective_neighbors),
        "negative": _quantiles(found.negative_share),
        "unreliable": float(found.unreliable.double().mean()),
        "bound": _quantiles(scale * found.bound),
        "shift": _quantiles(far),
        "shift mean": float(far[known].mean()),
        "shift deviation": float(far[known].std()),
        "shift against error": _rank_correlation(far, error),
        "size of the answer against error": _rank_correlation(outputs.norm(dim=1), error),
        "N_S against error": _rank_correlation(lw.soft_neighbors(gram).cpu(), error),
        "error": _quantiles(error),
        "error of the trusted half": float(error[trusted].median()),
        "error of labels": float(scale * (label - truth).norm(dim=1).median()),
        "error of smoothed labels": float(scale * (smoothed - truth).norm(dim=1).median()),
        "optimum": _optimum(gram, outputs - label),
        "points": _rounded(torch.stack([far, error], 1)[:300], 1),
    }


def among_all(model: nn.Module, patches: Patches, rows: int = 100) -> dict[str, Any]:
    """Return the factor of the first patches, averaging over all of them."""
    found = lw.denoising(matrix(model, patches.take(slice(0, rows)), patches), exact=True)
    return {
        "n": len(patches.label),
        "factor": _quantiles(found.factor),
        "floor": found.floor,
        "neighbors": _quantiles(found.effective_neighbors),
        "negative": _quantiles(found.negative_share),
        "unreliable": float(found.unreliable.double().mean()),
    }


def neighborhoods(model: nn.Module, patches: Patches, queries: list[int], k: int) -> dict[str, Any]:
    """Return the nearest patches of the chosen ones, plain, centered and by the network's own features."""
    chosen = patches.take(torch.tensor(queries))
    kinds = {
        "plain": matrix(model, chosen, patches),
        "centered": matrix(model, chosen, patches, centered=True),
        "features": lw.perceptual(model, FEATURES, chosen.labeled, patches.labeled),
    }
    return {name: _nearest(gram, k) for name, gram in kinds.items()}


def perceived(patches: Patches, queries: list[int], k: int, weights: Path) -> dict[str, Any]:
    """Return the nearest patches by an ImageNet network's features of the image alone."""
    size = (128, 128)
    image = nn.functional.interpolate(patches.image, size=size, mode="bilinear") / 2 + 0.5
    center = image.new_tensor([0.485, 0.456, 0.406])[:, None, None]
    image = (image - center) / image.new_tensor([0.229, 0.224, 0.225])[:, None, None]
    model = squeezenet(weights).to(image.device)
    gram = lw.perceptual(model, ["3", "6", "9", "12"], image[torch.tensor(queries)], image)
    return _nearest(gram, k)


def rotations(model: nn.Module, patches: Patches, n: int) -> dict[str, Any]:
    """Return how alike patches and their quarter turns are, by the plain and the rotation-invariant kernel.

    `own`: mean similarity of a patch and its turn; `other`: of different patches; `found`: how often the most
    similar of all turned patches is the patch's own.
    """
    upright = patches.take(slice(0, n))
    other = Patches(*(turned(value, 1) for value in upright))
    kinds = {"plain": lw.CORRELATION, "rotation invariant": lw.ROTATION_INVARIANT}
    found: dict[str, Any] = {}
    for centered in (False, True):
        for name, kernel in kinds.items():
            k = matrix(model, upright, other, kernel=kernel, centered=centered).dense().double().cpu()
            own, rest = k.diagonal(), k[~torch.eye(len(k), dtype=torch.bool)]
            found[name + (", centered" if centered else "")] = {
                "own": float(own.mean()),
                "other": float(rest.mean()),
                "found": float((k.argmax(1) == torch.arange(len(k))).double().mean()),
            }
    return found


@torch.no_grad()
def answers(model: nn.Module, of: Sites, lacking: Tensor, bins: int = 24) -> dict[str, Any]:
    """Return the mean answer to true displacements along x or y, and the best that its labels allow."""
    poses = drawn_poses(len(of), of.scale, torch.Generator().manual_seed(1), turning=False)
    patches = shown(of, lacking, poses)
    parts = [model(*patches.take(slice(i, i + 256)).inputs) for i in range(0, len(of), 256)]
    found, truth = of.scale * torch.cat(parts).cpu().double(), of.scale * patches.truth.cpu().double()
    best = best_possible(truth, met(lacking.double()), REACH * of.scale)
    edges = np.linspace(-FARTHEST, FARTHEST, bins + 1)
    place = np.digitize(truth.flatten().numpy(), edges[1:-1])
    counts = np.bincount(place, minlength=bins)
    means = [
        np.bincount(place, v.flatten().numpy(), bins) / np.maximum(counts, 1) for v in (truth, found, best)
    ]
    kept = counts >= 20
    return dict(zip(("true", "answer", "best"), (m[kept].round(3).tolist() for m in means), strict=True))


def representatives(soft: list[float], among: int, bins: int = 8) -> tuple[list[float], list[int]]:
    """Return edges of bins of N_S and for each the patch nearest to its right edge, as in the paper."""
    values = np.array(soft)
    edges = np.linspace(values.min(), values.max(), bins + 1)
    return edges.tolist(), [int(np.abs(values[:among] - edge).argmin()) for edge in edges[1:]]


def squeezenet(weights: Path) -> nn.Sequential:
    """Return SqueezeNet 1.1's layers up to its last but one fire module, with weights from an npz file."""
    with np.load(weights, allow_pickle=False) as stored:
        values = {name: torch.from_numpy(stored[name]) for name in stored.files}
    squeezes = {3: (64, 16, 64), 4: (128, 16, 64), 6: (128, 32, 128), 7: (256, 32, 128)}
    squeezes |= {9: (256, 48, 192), 10: (384, 48, 192), 11: (384, 64, 256), 12: (512, 64, 256)}
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 2), nn.ReLU()]
    layers += [Fire(*squeezes[i]) if i in squeezes else nn.MaxPool2d(3, 2) for i in range(2, 13)]
    model = nn.Sequential(*layers)
    names = model.state_dict()
    model.load_state_dict({name: values[f"features.{name}"] for name in names})
    return model.eval()


class Fire(nn.Module):
    """SqueezeNet's block: few channels, then many, half of them seen 3 × 3."""

    def __init__(self, i: int, few: int, many: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(i, few, 1)
        self.expand1x1 = nn.Conv2d(few, many, 1)
        self.expand3x3 = nn.Conv2d(few, many, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.squeeze(x).relu()
        return torch.cat([self.expand1x1(x), self.expand3x3(x)], 1).relu()


def _optimum(gram: lw.GramMatrix, residual: Tensor) -> float:
    """Return ‖Σ Jᵀ(ŷ − ỹ)‖ / √Σ‖Jᵀ(ŷ − ỹ)‖²: 0 at the optimum, 1 for random directions, √N for equal."""
    inner = gram.with_kernel(lw.Kernel(0, 0, lw.whole_block))
    weights = residual[:, :, None]
    together = (weights * (inner @ weights).double().cpu()).sum()
    alone = torch.einsum("nd,nde,ne->", residual, inner.self_kernel().double().cpu(), residual)
    return float((together.clamp(min=0) / alone).sqrt())


def _nearest(gram: lw.GramMatrix, k: int) -> dict[str, Any]:
    found = lw.nearest(gram, k, sketch=None)
    return {"indices": found.indices.tolist(), "similarities": _rounded(found.similarities, 3)}


def _quantiles(values: Tensor) -> list[float]:
    """Return the 5, 25, 50, 75 and 95 % quantiles."""
    return np.quantile(values.double().cpu().numpy(), [0.05, 0.25, 0.5, 0.75, 0.95]).tolist()


def _rank_correlation(a: Tensor, b: Tensor) -> float:
    return float(stats.spearmanr(a.numpy(), b.numpy())[0])


def _rounded(values: Tensor, digits: int) -> list[Any]:
    return np.round(values.double().cpu().numpy(), digits).tolist()
