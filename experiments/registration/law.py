"""Does noise of size σ on the labels leave σ · factor on the predictions? The paper's law, measured.

One set of patches is fixed, and their labels are the truth plus i.i.d. noise that the inputs know nothing of.
Several networks, the same but for the noise, are trained on it: what their predictions differ by is the noise
that is left. Beside the paper's factor, the norm of a row of the hat matrix H = K (K + λ)⁻¹ of kernel
regression with the network's own kernel, λ such that it misses the labels by as much as the network does:
it needs no truth either. All in pixels at the scale of the patches.
"""

import copy
import math
from typing import Any, NamedTuple

import torch
from analysis import matrix
from net import Alignment
from patches import Patches, Sites, drawn_poses, shown, turned
from rounds import Settings, fitted, generator
from torch import Tensor

import likewise as lw

BLOCKS = lw.Kernel(0, 0, lw.whole_block)


class Case(NamedTuple):
    """One set of patches with noise on its labels."""

    n: int  # buildings
    sigma: float  # of the noise, pixels at the scale of the patches
    copies: int = 1  # turns in which each building is shown
    fresh: bool = True  # whether each copy has its own noise, else its building's, as augmentation does
    warm: bool = False  # whether training begins with a network that knows the task


def measured(
    of: Sites,
    beside: Sites,
    case: Case,
    settings: Settings,
    seed: int,
    draws: int,
    seconds: float = math.inf,
    start: Alignment | None = None,
) -> dict[str, Any]:
    """Return noise left, as measured and as predicted.

    `beside` are buildings that were not trained on. `start`: a network that all begin with, for cases that
    are warm; its training knows nothing of the noise that follows.
    """
    base, other = _fixed(of, case.n, seed), _fixed(beside, min(len(beside), 200), seed)
    found = []
    for draw in range(draws):
        patches = noisy(base, case, 100 * seed + draw)
        found.append((_fit(patches, settings, seed, seconds, start), patches))
    left, predicted = _left(found, other, case.n), _predicted(*found[0], other, case)
    return {**case._asdict(), "seed": seed, **left, **predicted}


def noisy(base: Patches, case: Case, seed: int) -> Patches:
    """Return the patches in their first `copies` turns, the upright ones first, with noise on the labels."""
    chance = torch.Generator().manual_seed(seed)
    noise = case.sigma * torch.randn(len(base.label), 2, generator=chance).to(base.label)
    parts = []
    for turn in range(case.copies):
        if case.fresh and turn:
            noise = case.sigma * torch.randn(noise.shape, generator=chance).to(base.label)
        parts.append([turned(v, turn) for v in base._replace(label=base.truth + noise)])
    return Patches(*(torch.cat(values) for values in zip(*parts, strict=True)))


def hat_matrix(blocks: Tensor, across: Tensor, label: Tensor, missed: float) -> Tensor:
    """Return H = K(x, X) (K + λ)⁻¹, (m d, n d), with λ where ‖ỹ − K (K + λ)⁻¹ ỹ‖² = missed.

    `blocks` (n, n, d, d) are K of the training set, `across` (m, n, d, d) those of others with it.
    """
    k, rows = (b.permute(0, 2, 1, 3).flatten(2).flatten(0, 1) for b in (blocks, across))
    values, vectors = torch.linalg.eigh((k + k.T) / 2)
    values = values.clamp(min=0)
    parts = (vectors.T @ label.flatten()).square()
    low, high = float(values.mean()) * 1e-8, float(values.max()) * 1e4
    for _ in range(60):
        middle = math.sqrt(low * high)
        left = float(((middle / (values + middle)).square() * parts).sum())
        low, high = (middle, high) if left < missed else (low, middle)
    return rows @ vectors / (values + low) @ vectors.T


def _fixed(of: Sites, n: int, seed: int) -> Patches:
    """Return patches of n buildings in fixed poses, upright, none of whose annotations lacks anything."""
    chance = torch.Generator().manual_seed(seed)
    which = torch.randperm(len(of), generator=chance)[:n]
    poses = drawn_poses(len(which), of.scale, chance, turning=False)
    return shown(of.take(which), torch.zeros(len(which), 2), poses)


def _fit(
    patches: Patches, settings: Settings, seed: int, seconds: float, start: Alignment | None
) -> Alignment:
    device = str(patches.label.device)
    chance = generator(seed, device)
    model = Alignment(settings.width, settings.deep).to(device) if start is None else copy.deepcopy(start)
    rate = settings.rate if start is None else settings.rate / 3
    many = len(patches.label)

    def batch() -> Patches:
        return patches.take(torch.randint(many, (settings.batch,), generator=chance, device=device))

    fitted(model, batch, settings, rate, seconds, f"{many} fixed patches")
    return model


def _left(found: list[tuple[Alignment, Patches]], other: Patches, n: int) -> dict[str, Any]:
    """Return what predictions of the networks differ by, as the deviation of one, and their errors."""
    here, there = [], []
    for model, patches in found:
        here.append(_outputs(model, patches.take(slice(0, n))))
        there.append(_outputs(model, other))
    truth, beyond = found[0][1].truth[:n].double(), other.truth.double()
    return {
        "left": _spread(torch.stack(here)),
        "left beside": _spread(torch.stack(there)),
        "error": _size(here[0] - truth),
        "error beside": _size(there[0] - beyond),
    }


def _predicted(model: Alignment, patches: Patches, other: Patches, case: Case) -> dict[str, Any]:
    """Return what the factor and the hat matrix say is left, on the upright patches and beside."""
    label, truth = patches.label.double(), patches.truth.double()
    blocks = matrix(model, patches).with_kernel(BLOCKS).dense().to(label)
    across = matrix(model, other, patches, kernel=BLOCKS).dense().to(label)
    outputs = _outputs(model, patches)
    gap = outputs - label
    hat = hat_matrix(blocks, torch.cat([blocks, across]), label, float(gap.square().sum()))
    rows = hat.square().sum(1).unflatten(0, (-1, 2))
    factor = factors(blocks)[: case.n]
    estimates = {"labels": label, "outputs": outputs, "smoothed labels": _means(blocks, label)}
    return {
        "missed": _size(gap),
        "factor": float(factor.median()),
        "floor": len(label) ** -0.5,
        "σ factor": case.sigma * float(factor.median()),
        "σ hat": case.sigma * float(rows[: case.n].mean().sqrt()),
        "σ hat beside": case.sigma * float(rows[len(label) :].mean().sqrt()),
        **{f"error of {k}": float((v - truth)[: case.n].norm(dim=1).median()) for k, v in estimates.items()},
    }


def factors(blocks: Tensor) -> Tensor:
    """Return the denoising factor of each row of blocks (n, n, d, d) of k^I, as the library has it."""
    weights = torch.einsum("nde,nmef->nmdf", torch.linalg.inv(blocks.sum(1)), blocks)
    return (weights.square().sum((1, 2, 3)) / blocks.shape[-1]).sqrt()


def _means(blocks: Tensor, values: Tensor) -> Tensor:
    sums = torch.einsum("nmde,me->nd", blocks, values)
    return torch.linalg.solve(blocks.sum(1), sums)


@torch.no_grad()
def _outputs(model: Alignment, patches: Patches) -> Tensor:
    parts = range(0, len(patches.label), 512)
    return torch.cat([model(*patches.take(slice(i, i + 512)).inputs) for i in parts]).double()


def _spread(outputs: Tensor) -> float:
    """Return the deviation of one network's predictions, (networks, n, d), along x or y."""
    return float(outputs.var(0).mean().sqrt())


def _size(values: Tensor) -> float:
    return float(values.square().mean().sqrt())
