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
    found = []
    for piece in parts:
        if _is_formed(piece):
            found.append(_sums_of_rows(piece.rows(), roots, places, which, len(groups)))
        else:
            found.append(torch.cat([_sums_of_factors(piece, roots, at) for at in stacked]))
    return torch.stack(found).sum(0)


def weighted_sums(parts: list[ParameterGradient], roots: Tensor, members: Tensor, weights: Tensor) -> Tensor:
    """Return Σ_g w_g ‖Σ S(x)‖² by operations that do not depend on who is in which group.

    members: 1 for each sample of a group, (groups, n); roots as (n, d, d), weights (groups,).
    """
    pairs = members.T @ (weights[:, None] * members)  # what each pair of samples counts
    found = []
    for piece in parts:
        if (
            isinstance(piece, FactoredGradient | EmbeddingGradient)
            and not _is_formed(piece)
            and _meets(piece, len(members))
        ):
            found.append((pairs * _met(piece, roots)).sum())
        else:
            rows = piece.rows()
            summing = torch.einsum("gn,nde->gdne", members, roots).to(rows.dtype)
            total = summing.flatten(2).flatten(0, 1) @ rows.flatten(0, 1)
            found.append((total.square().sum(1).to(roots).view(len(members), -1).sum(1) * weights).sum())
    return torch.stack(found).sum()


def _is_formed(piece: ParameterGradient) -> bool:
    return (
        not isinstance(piece, FactoredGradient | EmbeddingGradient | SharedGradient)
        or "_formed" in piece.__dict__
    )


def _meets(piece: FactoredGradient | EmbeddingGradient, groups: int) -> bool:
    """Whether all positions meeting all takes less than gradients, formed and added up by group."""
    n, d, t, o = piece.deltas.shape
    i = piece.inputs.shape[2] if isinstance(piece, FactoredGradient) else piece.size
    return (n * t) ** 2 * (d * o + (i if isinstance(piece, FactoredGradient) else 1)) <= n * d * o * i * (
        t + groups
    )


def _met(piece: FactoredGradient | EmbeddingGradient, roots: Tensor) -> Tensor:
    """Return tr S(x) S(x')ᵀ in one parameter of all pairs of samples, (n, n)."""
    n, d, t, o = piece.deltas.shape
    inputs, deltas = _normalized(piece, roots)
    if isinstance(piece, FactoredGradient):
        flat = inputs.flatten(0, 1)
        same = flat @ flat.T
    else:
        index = piece.indices.flatten()
        same = ((index[:, None] == index) & (index >= 0)).to(deltas)
    turned = deltas.transpose(0, 1).reshape(d, n * t, o)
    found = (turned @ turned.mT).sum(0) * same
    return found.view(n, t, n, t).sum((1, 3), dtype=roots.dtype)


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


def _sums_of_factors(piece: ParameterGradient, roots: Tensor, at: Tensor) -> Tensor:
    """Return ‖Σ S‖² of groups of one size, (groups,): a group's positions are those of its samples."""
    together = _together(piece, roots, at)
    table = together.table if isinstance(together, SharedGradient) else together
    if isinstance(table, EmbeddingGradient):  # positions meet all positions, or the table is formed
        t, o = table.deltas.shape[2:]
        if t * t > table.size * o:
            return together.rows().flatten(1).square().sum(1).to(roots)
    return together.own().diagonal(dim1=1, dim2=2).sum(1)


def _together(piece: ParameterGradient, roots: Tensor, at: Tensor) -> ParameterGradient:
    """Return Σ S over the samples of each group as a piece whose samples are the groups."""
    if isinstance(piece, SharedGradient):
        matrix, table = _together(piece.matrix, roots, at), _together(piece.table, roots, at)
        assert isinstance(matrix, FactoredGradient) and isinstance(table, EmbeddingGradient)
        return SharedGradient(matrix, table)
    assert isinstance(piece, FactoredGradient | EmbeddingGradient)
    inputs, deltas = _normalized(piece, roots)
    side_by_side = deltas[at].transpose(1, 2).flatten(2, 3)  # of (groups, size, d, t, o)
    if isinstance(piece, FactoredGradient):
        return FactoredGradient(inputs[at].flatten(1, 2), side_by_side, piece.inputs_first)
    return EmbeddingGradient(inputs[at].flatten(1), side_by_side, piece.size)


def _normalized(piece: FactoredGradient | EmbeddingGradient, roots: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs, or indices, and output gradients of which S(x) is made as J(x) is of the piece's."""
    if isinstance(piece, EmbeddingGradient):
        return piece.indices, (roots.to(piece.deltas.dtype) @ piece.deltas.flatten(2)).view_as(piece.deltas)
    # large inputs meet small output gradients: neither may overflow alone
    scale = piece.inputs.detach().abs().amax((1, 2), keepdim=True).to(roots)
    scale = torch.where(scale > 0, scale, 1)
    weights = (roots * scale).to(piece.deltas.dtype)
    deltas = (weights @ piece.deltas.flatten(2)).view_as(piece.deltas)
    return piece.inputs / scale.to(piece.inputs.dtype), deltas
