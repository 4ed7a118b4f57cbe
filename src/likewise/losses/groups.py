"""How alike samples are inside groups: counted as they come, or by operations that can be recorded."""

import torch
from torch import Tensor

from likewise.cuda_graphs import is_recording, most_groups
from likewise.engines import DifferentiableGradients


def similarity_inside(found: DifferentiableGradients, groups: Tensor | None) -> Tensor:
    """Return the mean over groups of the mean k^C of different samples in each; 0 without a pair."""
    n, device = len(found.self_kernel), found.self_kernel.device
    if groups is None and not is_recording():
        return _mean_similarity(found, _counted(found, [torch.arange(n, device=device)]))
    groups = torch.zeros(n, device=device) if groups is None else torch.as_tensor(groups)
    if groups.shape != (n,):
        raise ValueError(f"groups must be one number for each of {n} samples, found {tuple(groups.shape)}.")
    groups = groups.to(device)
    if is_recording():
        return _recorded_similarity(found, groups)
    return _mean_similarity(found, _counted(found, _places(groups)))


def _places(groups: Tensor) -> list[Tensor]:
    """Return the places of the samples of each group."""
    counts = groups.unique(return_counts=True)[1].tolist()
    return list(groups.argsort(stable=True).split(counts))


def _counted(found: DifferentiableGradients, groups: list[Tensor]) -> list[Tensor]:
    """Return the groups that have a pair, small ones first, without samples that are left out."""
    if found.finite is not None:
        groups = [places[found.finite[places]] for places in groups]
    return sorted((places for places in groups if len(places) > 1), key=len)


def _mean_similarity(found: DifferentiableGradients, groups: list[Tensor]) -> Tensor:
    """Return the mean over groups of the mean k^C of different samples in each."""
    if not groups:
        return found.self_kernel.sum() * 0
    ranks = found.root.rank
    own = torch.stack([ranks[at].sum() for at in groups])
    pairs = torch.tensor([len(at) * (len(at) - 1) for at in groups], device=own.device)
    return ((found.sums(groups) - own) / found.d / pairs).mean()


def _recorded_similarity(found: DifferentiableGradients, groups: Tensor) -> Tensor:
    """Return the same by operations that do not depend on how many groups there are, nor on their sizes."""
    same = groups[:, None] == groups
    sizes = same.sum(1)
    leads = ~same.tril(-1).any(1)  # the first sample of each group stands for it
    sizes, order = torch.where(leads, sizes, 0).sort(descending=True, stable=True)
    most = max(1, min(len(groups) // 2, most_groups()))  # no more than half as many groups have a pair
    members, sizes = same[order[:most]].to(found.self_kernel), sizes[:most].to(found.self_kernel)
    several = sizes > 1
    weights = several / (sizes * (sizes - 1)).clamp(min=1) / several.sum().clamp(min=1)
    own = members @ found.root.rank.to(found.self_kernel)
    return (found.weighted_sums(members, weights) - (weights * own).sum()) / found.d
