"""The paper's formulas, written out naively in float64: one backward per sample and output."""

import copy
import itertools

import torch
from torch import Tensor


def jacobians(model, inputs, readout=None, labels=None) -> Tensor:
    """(n, d, p): gradients of each output in all parameters that require grad."""
    model = copy.deepcopy(model).eval()
    wanted = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for i in range(len(inputs)):
        outputs = model(inputs[i : i + 1])
        if readout is not None:
            outputs = readout(outputs, None if labels is None else labels[i : i + 1])
        outputs = outputs.reshape(-1)
        row = []
        for output in outputs:
            found = torch.autograd.grad(output, wanted, retain_graph=True, allow_unused=True)
            filled = [torch.zeros_like(p) if g is None else g for g, p in zip(found, wanted, strict=True)]
            row.append(torch.cat([g.flatten() for g in filled]))
        rows.append(torch.stack(row))
    return torch.stack(rows).detach()


def inner(left: Tensor, right: Tensor) -> Tensor:
    """(n, m, d, d): K^ij(x, x') = ∇f^i(x) · ∇f^j(x')."""
    n, m, d = len(left), len(right), left.shape[1]
    blocks = torch.zeros(n, m, d, d, dtype=left.dtype)
    for a, b, i, j in itertools.product(range(n), range(m), range(d), range(d)):
        blocks[a, b, i, j] = left[a, i] @ right[b, j]
    return blocks


def matrix_power(symmetric: Tensor, exponent: float) -> Tensor:
    """By inverse and by Newton's iteration for the square root, no eigenvalues."""
    if exponent == -1:
        return torch.linalg.inv(symmetric)
    assert exponent == -0.5
    scale = symmetric.norm()
    root, inverse = symmetric / scale, torch.eye(len(symmetric), dtype=symmetric.dtype)
    for _ in range(60):  # Denman-Beavers
        root, inverse = (
            (root + torch.linalg.inv(inverse)) / 2,
            (inverse + torch.linalg.inv(root)) / 2,
        )
    return inverse / scale**0.5


def blocks(left: Tensor, right: Tensor, row: float = 0, column: float = 0) -> Tensor:
    """(n, m, d, d): K(x,x)^row K(x,x') K(x',x')^column."""
    found = inner(left, right)
    for a, b in itertools.product(range(len(left)), range(len(right))):
        if row:
            found[a, b] = matrix_power(left[a] @ left[a].T, row) @ found[a, b]
        if column:
            found[a, b] = found[a, b] @ matrix_power(right[b] @ right[b].T, column)
    return found


def correlation(left: Tensor, right: Tensor) -> Tensor:
    return blocks(left, right, -0.5, -0.5)


def trace(found: Tensor) -> Tensor:
    d = found.shape[-1]
    return sum(found[..., i, i] for i in range(d)) / d


def near_identity(found: Tensor) -> Tensor:
    d = found.shape[-1]
    distance = (found - torch.eye(d, dtype=found.dtype)).pow(2).sum((-1, -2))
    return 1 - distance / (2 * d)


def identity_distance(found: Tensor) -> Tensor:
    d = found.shape[-1]
    return 1 - (found - torch.eye(d, dtype=found.dtype)).pow(2).sum((-1, -2)).sqrt() / d**0.5


def subspace_match(found: Tensor) -> Tensor:
    return found.pow(2).sum((-1, -2)) / found.shape[-1]


def centered(k: Tensor) -> Tensor:
    """Similarities less what all samples share, normalized; 0 for a sample with nothing of its own."""
    n = len(k)
    h = torch.eye(n, dtype=k.dtype) - torch.full((n, n), 1 / n, dtype=k.dtype)
    c = h @ k @ h
    own = c.diagonal()
    scale = torch.tensor(
        [float(v) ** -0.5 if v > 1e-12 * k[i, i] else 0.0 for i, v in enumerate(own)], dtype=k.dtype
    )
    return scale[:, None] * c * scale


def denoising_weights(jacobian: Tensor, columns: Tensor | None = None) -> Tensor:
    """(n, m, d, d): W_ij = (Σ_j K_ij)⁻¹ K_ij."""
    found = inner(jacobian, jacobian if columns is None else columns)
    return torch.stack([torch.linalg.inv(row.sum(0)) @ row for row in found])
