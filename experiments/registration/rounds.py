"""Train on wrong annotations, align them with the result, train again: three rounds, and what each part does.

`lacking` (n, 2) is what annotations lack, in pixels at reference scale: ‖lacking‖ is their error. Networks
never see it. One network for each scale, coarse to fine; each learns displacements of up to ± 4 pixels of its
own.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from net import Alignment
from patches import FARTHEST, REACH, Patches, Sites, drawn_noise, drawn_poses, shown
from torch import Tensor, nn
from tqdm import trange

Models = dict[int, nn.Module]  # for each scale, coarse to fine: image, map -> displacement in its pixels
Views = dict[int, Sites]  # the same buildings at each scale
LARGEST = 1.0  # norm of a gradient; longer ones are cut


@dataclass(frozen=True)
class Settings:
    """How networks are made and trained."""

    scales: tuple[int, ...]
    size: int  # pixels of a patch
    width: int
    deep: int
    steps: int
    batch: int
    rate: float
    sigma: float  # of annotations along x and y, pixels at reference scale: median error 1.18 σ
    extra: float  # of the noise added to them in the control
    rounds: int = 3


def trained(
    of: Sites, lacking: Tensor, settings: Settings, seed: int, seconds: float = math.inf
) -> Alignment:
    """Return a network for the sites' scale, trained to carry displaced maps back to these annotations.

    Each step shows other buildings in new poses. After `seconds` it ends, the learning rate gone down as
    if that were all its steps.
    """
    device = str(of.images.device)
    torch.manual_seed(seed)
    model = Alignment(settings.width, settings.deep).to(device)
    chance = generator(seed, device)
    lacking = lacking.to(device)

    def batch() -> Patches:
        which = torch.randint(len(of), (settings.batch,), generator=chance, device=device)
        poses = drawn_poses(settings.batch, of.scale, chance, device=device)
        return shown(of.nameless(which), lacking[which], poses)

    fitted(model, batch, settings, settings.rate, seconds, f"scale {of.scale}")
    return model.eval()


def generator(seed: int, device: str) -> torch.Generator | None:
    """Return chance for a device; on a GPU none, for its own, which recorded steps may draw from."""
    torch.manual_seed(seed)
    return torch.Generator().manual_seed(seed) if device == "cpu" else None


def trained_all(
    train: Views, lacking: Tensor, settings: Settings, seed: int, turn: int, seconds: float
) -> Models:
    """Return the networks of one round, one for each scale."""
    seeds = {scale: 1000 * seed + 100 * turn + scale for scale in train}
    return {scale: trained(of, lacking, settings, seeds[scale], seconds) for scale, of in train.items()}


def fitted(
    model: Alignment,
    batch: Callable[[], Patches],
    settings: Settings,
    rate: float,
    seconds: float,
    name: str,
) -> None:
    """Train a model on batches by Adam, its rate rising and falling, the mean square of what it misses."""
    device = next(model.parameters()).device.type
    pace = torch.zeros((), device=device)  # the learning rate, where a recorded step finds it
    fast = {"fused": True, "capturable": True} if device == "cuda" else {}
    optimizer = torch.optim.AdamW(model.parameters(), pace, weight_decay=1e-4, **fast)

    def step() -> None:
        patches = batch()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda", cache_enabled=False):
            found = model(*patches.inputs)
        optimizer.zero_grad(set_to_none=True)
        (found.float() - patches.label).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), LARGEST)
        optimizer.step()

    take = recorded(step) if device == "cuda" else step
    start = time.perf_counter()
    for i in trange(settings.steps, desc=name, disable=None, leave=False):
        if device == "cuda" and i % 20 == 0:
            torch.cuda.synchronize()  # the clock is the device's
        done = max(i / settings.steps, (time.perf_counter() - start) / seconds)
        if done >= 1:
            break
        pace.fill_(rate * min(1, 20 * done + 0.02) * (1 + math.cos(math.pi * done)) / 2)
        take()
        model.seen += settings.batch
    optimizer.zero_grad(set_to_none=True)


def recorded(step: Callable[[], None]) -> Callable[[], None]:
    """Return a step recorded as a CUDA graph: hundreds of small kernels, started at once."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@torch.no_grad()
def aligned(models: Models, views: Views, lacking: Tensor) -> Tensor:
    """Return what annotations still lack after each scale's network has moved them, coarse to fine."""
    for scale, model in models.items():
        of, found = views[scale], []
        still = drawn_poses(len(of), scale, torch.Generator(), moving=False, turning=False)
        patches = shown(of, lacking, still)
        for i in range(0, len(of), 256):
            found.append(model(*patches.take(slice(i, i + 256)).inputs))
        lacking = (lacking - scale * torch.cat(found).to(lacking)).clamp(-FARTHEST, FARTHEST)
    return lacking


def chain(
    kind: str,
    train: Views,
    settings: Settings,
    seed: int,
    apart: dict[str, Views],
    seconds: float = math.inf,
    first: Models | None = None,
) -> tuple[dict[str, list[Tensor]], list[Models]]:
    """Return what annotations lack before and after each round, by role, and the networks of each round.

    Kinds: "original", the paper's; "extra noise", the same from worse annotations; "aligned again", each
    round moves what the last one left; "no retraining", the same with the first networks; "true labels",
    one round that is told the truth. Any other is as "original".
    `first`: the networks of the first round, if they are known.
    """
    sigma = math.hypot(settings.sigma, settings.extra if kind == "extra noise" else 0)
    views = {"train": train, **apart}
    lacking = {
        name: [drawn_noise(len(next(iter(view.values()))), sigma, 1000 * seed + i)]
        for i, (name, view) in enumerate(views.items())
    }
    networks: list[Models] = []
    for turn in range(1 if kind == "true labels" else settings.rounds):
        if turn == 0 or kind != "no retraining":
            told = 0 * lacking["train"][0] if kind == "true labels" else lacking["train"][-1]
            known = first if turn == 0 else None
            networks.append(known or trained_all(train, told, settings, seed, turn, seconds))
        begin = -1 if kind in ("aligned again", "no retraining") else 0
        for name, view in views.items():
            lacking[name].append(aligned(networks[-1], view, lacking[name][begin]))
    return lacking, networks


def best_possible(moved: Tensor, lacking: Tensor, reach: float) -> Tensor:
    """Return E[v | v + a = moved], what a network that knows all but the labels' noise should answer, (n, 2).

    v is even on ± reach and a one of `lacking`, each axis by itself. It answers too little: a map that is
    far off has an annotation that is off on the same side. No number of patches mends that.
    """
    v = moved[:, None] - lacking  # (n, m, 2): what each annotation would mean
    likely = (v.abs() <= reach).to(v)
    total = likely.sum(1)
    mean = (v * likely).sum(1) / total.clamp(min=1)
    return torch.where(total > 0, mean, moved.clamp(-reach, reach))


def met(lacking: Tensor) -> Tensor:
    """Return errors of annotations as networks meet them, (4n, 2): turned patches have them either way."""
    along = lacking.flatten()
    return torch.cat([along, -along])[:, None].expand(-1, 2)


def best_chain(settings: Settings, lacking: Tensor) -> list[Tensor]:
    """Return what annotations lack after each round if each network gave the mean of its labels.

    That is what least squares teach a network that can tell all displacements apart.
    """
    found = [lacking]
    for _ in range(settings.rounds):
        told, left = met(found[-1]), found[0]
        for scale in settings.scales:
            left = left - best_possible(left, told, REACH * scale)
        found.append(left)
    return found
