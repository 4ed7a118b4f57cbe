"""‖Σ S(x)‖² of the samples of a group, from the pieces of their gradients: all pairs at once."""

import torch
from torch import Tensor

from likewise.engines.factors import EmbeddingGradient, FactoredGradient, ParameterGradient, SharedGradient


def group_sums(parts: list[ParameterGradient], roots: Tensor, groups: list[Tensor]) -> Tensor:
    """Return ‖Σ S(x)‖² of each group, (groups,), given roots K(x, x)^-½ and places, small groups first."""
    sizes = sorted({len(at) for at in groups})
    stacked = [torch.stack([at for at in groups if len(at) == size]) for size in sizes]
    which = torch.repeat_interleave(torch.arange(len(groups)), torch.tensor([len(at) for at in groups]))
    places = torch.cat(groups)
    sums = []
    for gradient in parts:
        if _is_formed(gradient):
            sums.append(_sums_of_rows(gradient.rows(), roots, places, which, len(groups)))
        else:
            sums.append(torch.cat([_sums_of_factors(gradient, roots, at) for at in stacked]))
    return torch.stack(sums).sum(0)


def weighted_sums(parts: list[ParameterGradient], roots: Tensor, members: Tensor, weights: Tensor) -> Tensor:
    """Return Σ_g w_g ‖Σ S(x)‖² by operations that do not depend on who is in which group.

    members: 1 for each sample of a group, (groups, n); roots as (n, d, d), weights (groups,).
    """
    pairs = members.T @ (weights[:, None] * members)  # what each pair of samples counts
    sums = []
    for gradient in parts:
        if (
            isinstance(gradient, FactoredGradient | EmbeddingGradient)
            and not _is_formed(gradient)
            and _meets(gradient, len(members))
        ):
            sums.append((pairs * _met(gradient, roots)).sum())
        else:
            rows = gradient.rows()
            summing = torch.einsum("gn,nde->gdne", members, roots).to(rows.dtype)
            total = summing.flatten(2).flatten(0, 1) @ rows.flatten(0, 1)
            sums.append((total.square().sum(1).to(roots).view(len(members), -1).sum(1) * weights).sum())
    return torch.stack(sums).sum()


def _is_formed(gradient: ParameterGradient) -> bool:
    return (
        not isinstance(gradient, FactoredGradient | EmbeddingGradient | SharedGradient)
        or "_dense" in gradient.__dict__
    )


def _meets(gradient: FactoredGradient | EmbeddingGradient, groups: int) -> bool:
    """Whether all positions meeting all takes less than gradients, formed and added up by group."""
    n, d, t, o = gradient.deltas.shape
    i = gradient.inputs.shape[2] if isinstance(gradient, FactoredGradient) else gradient.size
    return (n * t) ** 2 * (d * o + (i if isinstance(gradient, FactoredGradient) else 1)) <= n * d * o * i * (
        t + groups
    )


def _met(gradient: FactoredGradient | EmbeddingGradient, roots: Tensor) -> Tensor:
    """Return tr S(x) S(x')ᵀ in one parameter of all pairs of samples, (n, n)."""
    n, d, t, o = gradient.deltas.shape
    inputs, deltas = _normalized(gradient, roots)
    if isinstance(gradient, FactoredGradient):
        flat = inputs.flatten(0, 1)
        same = flat @ flat.T
    else:
        index = gradient.indices.flatten()
        same = ((index[:, None] == index) & (index >= 0)).to(deltas)
    turned = deltas.transpose(0, 1).reshape(d, n * t, o)
    products = (turned @ turned.mT).sum(0) * same
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


def _sums_of_factors(gradient: ParameterGradient, roots: Tensor, at: Tensor) -> Tensor:
    """Return ‖Σ S‖² of groups of one size, (groups,): a group's positions are those of its samples."""
    together = _together(gradient, roots, at)
    table = together.table if isinstance(together, SharedGradient) else together
    if isinstance(table, EmbeddingGradient):  # positions meet all positions, or the table is formed
        t, o = table.deltas.shape[2:]
        if t * t > table.size * o:
            return together.rows().flatten(1).square().sum(1).to(roots)
    return together.self_gram().diagonal(dim1=1, dim2=2).sum(1)


def _together(gradient: ParameterGradient, roots: Tensor, at: Tensor) -> ParameterGradient:
    """Return Σ S over the samples of each group as a piece whose samples are the groups."""
    if isinstance(gradient, SharedGradient):
        matrix, table = _together(gradient.matrix, roots, at), _together(gradient.table, roots, at)
        assert isinstance(matrix, FactoredGradient) and isinstance(table, EmbeddingGradient)
        return SharedGradient(matrix, table)
    assert isinstance(gradient, FactoredGradient | EmbeddingGradient)
    inputs, deltas = _normalized(gradient, roots)
    concatenated = deltas[at].transpose(1, 2).flatten(2, 3)  # of (groups, size, d, t, o)
    if isinstance(gradient, FactoredGradient):
        return FactoredGradient(inputs[at].flatten(1, 2), concatenated, gradient.inputs_first)
    return EmbeddingGradient(inputs[at].flatten(1), concatenated, gradient.size)


def _normalized(gradient: FactoredGradient | EmbeddingGradient, roots: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs, or indices, and output gradients of which S(x) is made as J(x) is of the piece's."""
    if isinstance(gradient, EmbeddingGradient):
        return gradient.indices, (roots.to(gradient.deltas.dtype) @ gradient.deltas.flatten(2)).view_as(
            gradient.deltas
        )
    # large inputs meet small output gradients: neither may overflow alone
    scale = gradient.inputs.detach().abs().amax((1, 2), keepdim=True).to(roots)
    scale = torch.where(scale > 0, scale, 1)
    weights = (roots * scale).to(gradient.deltas.dtype)
    deltas = (weights @ gradient.deltas.flatten(2)).view_as(gradient.deltas)
    return gradient.inputs / scale.to(gradient.inputs.dtype), deltas
