"""‖Σ S(x)‖² over groups of samples, from their parameter gradients: a sum over all pairs of a group."""

import torch
from torch import Tensor

from likewise.engines.factors import (
    EmbeddingGradient,
    FactoredGradient,
    ParameterGradient,
    StructuredGradient,
)


def group_sums(parts: list[ParameterGradient], roots: Tensor, groups: list[Tensor]) -> Tensor:
    """Return ‖Σ S(x)‖² of each group, (groups,), given roots K(x, x)^-½ and places, small groups first."""
    sizes = sorted({len(at) for at in groups})
    stacked = [torch.stack([at for at in groups if len(at) == size]) for size in sizes]
    which = torch.repeat_interleave(torch.arange(len(groups)), torch.tensor([len(at) for at in groups]))
    places = torch.cat(groups)
    sums = []
    for gradient in parts:
        if isinstance(gradient, StructuredGradient) and not gradient.is_dense:
            sums.append(torch.cat([_sums_of_factors(gradient, roots, at) for at in stacked]))
        else:
            sums.append(_sums_of_rows(gradient.rows(), roots, places, which, len(groups)))
    return torch.stack(sums).sum(0)


def weighted_sums(parts: list[ParameterGradient], roots: Tensor, members: Tensor, weights: Tensor) -> Tensor:
    """Return Σ_g w_g ‖Σ S(x)‖² by operations whose shapes do not depend on the groups.

    Args:
        parts: The gradients by parameter.
        roots: (n, d, d) K(x, x)^-½.
        members: (groups, n) 1 where a sample is in a group, else 0.
        weights: (groups,) w_g.

    """
    pairs = members.T @ (weights[:, None] * members)  # the weight of each pair of samples
    sums = []
    for gradient in parts:
        if (
            isinstance(gradient, FactoredGradient | EmbeddingGradient)
            and not gradient.is_dense
            and _pairs_are_cheaper(gradient, len(members))
        ):
            sums.append((pairs * _pair_traces(gradient, roots)).sum())
        else:
            rows = gradient.rows()
            summing = torch.einsum("gn,nde->gdne", members, roots).to(rows.dtype)
            total = summing.flatten(2).flatten(0, 1) @ rows.flatten(0, 1)
            sums.append((total.square().sum(1).to(roots).view(len(members), -1).sum(1) * weights).sum())
    return torch.stack(sums).sum()


def _pairs_are_cheaper(gradient: FactoredGradient | EmbeddingGradient, groups: int) -> bool:
    """Whether products of all pairs of positions cost less than dense gradients, summed by group."""
    n, d, t, o = gradient.deltas.shape
    i = gradient.inputs.shape[2] if isinstance(gradient, FactoredGradient) else gradient.size
    return (n * t) ** 2 * (d * o + (i if isinstance(gradient, FactoredGradient) else 1)) <= n * d * o * i * (
        t + groups
    )


def _pair_traces(gradient: FactoredGradient | EmbeddingGradient, roots: Tensor) -> Tensor:
    """Return tr S(x) S(x')ᵀ in one parameter of all pairs of samples, (n, n)."""
    n, d, t, o = gradient.deltas.shape
    whitened = gradient.whiten(roots)
    deltas = whitened.deltas
    if isinstance(whitened, FactoredGradient):
        flat = whitened.inputs.flatten(0, 1)
        same = flat @ flat.T
    else:
        index = whitened.indices.flatten()
        same = ((index[:, None] == index) & (index >= 0)).to(deltas)
    by_output = deltas.transpose(0, 1).reshape(d, n * t, o)
    products = (by_output @ by_output.mT).sum(0) * same
    return products.view(n, t, n, t).sum((1, 3), dtype=roots.dtype)


def _sums_of_rows(rows: Tensor, roots: Tensor, places: Tensor, which: Tensor, groups: int) -> Tensor:
    """Return ‖Σ S‖² of each group from explicit rows, (groups,); a place's sample is of group `which`."""
    n, d = roots.shape[:2]
    which = which.to(rows.device)
    if groups <= 16:  # one product; of more groups, most of it would be zeros
        members = roots.new_zeros(groups, n)
        members[which, places] = 1
        weights = torch.einsum("gn,nde->ndge", members, roots).to(rows.dtype)
        total = weights.flatten(0, 1).flatten(1).T @ rows.flatten(0, 1)
        return total.view(groups, -1).square().sum(1).to(roots)
    weighted = roots.to(rows.dtype) @ rows if d > 1 else roots.to(rows.dtype) * rows
    flat = weighted.flatten(1)
    total = flat.new_zeros(groups, flat.shape[1]).index_add(0, which, flat[places])
    return total.square().sum(1).to(roots)


def _sums_of_factors(gradient: StructuredGradient, roots: Tensor, at: Tensor) -> Tensor:
    """Return ‖Σ S‖² of groups of one size, (groups,): a group has the positions of all its samples."""
    sums = gradient.whiten(roots).group(at)
    if sums.rows_are_cheaper:
        return sums.rows().flatten(1).square().sum(1).to(roots)
    return sums.self_gram().diagonal(dim1=1, dim2=2).sum(1)
