"""How freely can a prediction move? (sec. 4.4) And what moves with it? (Theorem 3)"""

import math
from typing import Any

import torch
from torch import Tensor

from likewise.checks import check_tensor
from likewise.gram import GramMatrix, RowSums
from likewise.kernels import INNER_PRODUCT, Kernel, whole_block
from likewise.linalg import matrix_power, rank_floor
from likewise.model import Network
from likewise.readouts import all_outputs
from likewise.statistics.targets import refuse_centered


def uncertainty(gram: GramMatrix) -> Tensor:
    """How far f(x) moves at unit disturbance of the data, ‖∇f(x)‖² / Σ k^I(x, x'), (n,); sec. 4.4.

    Large: f(x) could have come out differently without disturbing the data. This is the paper's quick form, in two
    passes. Negative similarities cancel in it; `disturbance` is the exact form. A sample with a zero gradient cannot
    move and gets 0.

    Args:
        gram: Plain (not centered); its kernel is ignored.

    Returns:
        (n,) non-negative if similarities are; larger means less constrained by the rest of the data.

    Example:
        >>> import torch, likewise as lw
        >>> gram = lw.GramMatrix(torch.nn.Linear(4, 3), (torch.randn(60, 4), torch.arange(60) % 3))
        >>> lw.uncertainty(gram).shape
        torch.Size([60])

    """
    refuse_centered(gram)
    (inner,) = gram.sums_and_diagonals(INNER_PRODUCT)
    return uncertainty_from_sums(inner).to(gram.device, gram.dtype)


def uncertainty_from_sums(inner: RowSums) -> Tensor:
    """Return `uncertainty` from k^I(x, x) and its row sums, (n,) in float64."""
    return torch.where(inner.diagonal == 0, 0, inner.diagonal / inner.sums)


def disturbance(gram: GramMatrix) -> Tensor:
    """How much a unit move of f(x) moves the data, Σ ‖K(x', x) K(x, x)⁻¹‖_F / √d, (n,).

    The exact L¹ of sec. 4.4: for d = 1, Σ |k^I(x, x')| / ‖∇f(x)‖²; for d > 1, the root mean square over directions of
    the move. 1 for a sample that is alone, N for N samples that are alike. Visits all pairs. A sample with a zero
    gradient cannot be moved and gets infinity.

    Args:
        gram: Plain (not centered); its kernel is ignored.

    Returns:
        (n,) at least 1 for a sample of the data set; infinite if the gradient is zero.

    Example:
        >>> import torch, likewise as lw
        >>> gram = lw.GramMatrix(torch.nn.Linear(4, 3), (torch.randn(60, 4), torch.arange(60) % 3))
        >>> bool((lw.disturbance(gram) >= 0.999).all())
        True

    """
    refuse_centered(gram)
    moves = gram.with_kernel(Kernel(-1, 0, whole_block))
    total = moves.over_rows(lambda b: b.square().sum((2, 3)).sqrt().sum(1)) / math.sqrt(gram.d)
    return torch.where(gram.zero_gradients(), torch.inf, total) if (total == 0).any() else total


def predicted_move(net: Network, at: Any, move: Tensor, of: Any) -> Tensor:
    """Predict how f(of) moves to first order, (m, d), when f(at) is moved by `move`; Theorem 3.

    K(of, at) K(at, at)⁻¹ move: the effect of the smallest parameter change that makes the move. `at` may hold several
    samples that move together, by (n, d) or by the same (d,) for all. Directions in which no parameter moves them are
    left out.

    Args:
        net: A network or a model.
        at: The samples whose outputs are moved.
        move: (n, d), or (d,) for all.
        of: The samples whose moves are predicted.

    Returns:
        (m, d) moves.

    Example:
        >>> import torch, likewise as lw
        >>> net, x = torch.nn.Linear(4, 2), torch.randn(9, 4)
        >>> lw.predicted_move(net, x[:1], torch.tensor([1.0, 0.0]), x)[0].round(decimals=3).abs()
        tensor([1., 0.])

    """
    net = net if isinstance(net, Network) else Network(net, all_outputs)
    move = check_tensor("move", move)
    here = GramMatrix(net, at, kernel=Kernel(0, 0, whole_block))
    n, d = here.data.n, here.d
    if move.dim() == 0 or move.shape[-1:] != (d,) or move.numel() not in (d, n * d):
        raise ValueError(f"move must be ({n}, {d}) or ({d},), found {tuple(move.shape)}.")
    with net.evaluation_mode():
        rows = here.engine.rows(here.data.samples(range(n)), 0).rows.flatten(0, 1).double()
    inverse = matrix_power(rows @ rows.T, -1, rank_floor(net.dtype)).matrix
    target = move.to(inverse).reshape(-1, d).expand(n, d).reshape(n * d, 1)
    weights = (inverse @ target).reshape(n, d, 1)
    there = GramMatrix(net, of, columns=here.columns, kernel=INNER_PRODUCT)
    moves = there.products().product(lambda where: weights[where.start : where.stop], 1)
    return moves[:, :, 0].to(there.dtype)
