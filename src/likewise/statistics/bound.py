"""How far apart can two outputs be whose gradients are alike? (sec. 6.3 and its appendix)

With S = K^-½ J and the last layer h(W a + b), S holds S_b = K^-½ ∂f/∂b and, for each activity, a_k S_b.
From (a_k − a'_k) S'_b = (a_k S_b − a'_k S'_b) − a_k (S_b − S'_b) follows

    ‖a − a'‖ ≤ ‖S_(W,b)(x)‖ · ‖S(x) − S(x')‖ / (‖S_b(x)‖ ‖S_b(x')‖),    ‖S(x) − S(x')‖² = r + r' − 2d k^C,

r the ranks (d as a rule), and ‖f − f'‖ ≤ slope · ‖a − a'‖. For d = 1 this is the paper's bound with
√(1 + ‖a‖²) for its larger √Σ(1 + |a_i|)²; it also holds for several outputs.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from likewise.gram import GramMatrix
from likewise.head import Head, last_linear
from likewise.kernels import CORRELATION
from likewise.statistics.uncertainty import refuse_centered


class Reach(NamedTuple):
    """What the bound needs of each sample."""

    layer: Tensor  # (n,) ‖S_(W,b)‖
    bias: Tensor  # (n,) ‖S_b‖
    rank: Tensor  # (n,)


def lipschitz_bound(gram: GramMatrix) -> Tensor:
    """Return a bound of ‖f(x) − f(x')‖ for each pair, (n, m), from similarities alone.

    Infinite where the outputs are not those of a last linear layer with a bias, or an activation of
    it, whose parameters are used once and chosen.
    """
    refuse_centered(gram)
    head = output_head(gram)
    if head is None:
        return torch.full(gram.shape, torch.inf, dtype=gram.dtype)
    left = reach(gram, head)
    right = left if gram.square else reach(gram.transposed(), head)
    d = gram.d

    def bounds(where: range, k: Tensor) -> Tensor:
        part = Reach(*(v[where.start : where.stop] for v in left))
        bounds = pair_bounds(part, right, k.double(), d, head.slope).to(k)
        if gram.square:  # no rounding where x' is x
            bounds[torch.arange(len(k)), torch.tensor(list(where))] = 0
        return bounds

    return gram.with_kernel(CORRELATION).map_strips(bounds)


def output_head(gram: GramMatrix) -> Head | None:
    """Return the network's last linear layer, seen on the first samples."""
    if not gram.of_network:
        return None
    with gram.net.evaluating():
        return last_linear(gram.net, gram.data.samples(range(min(3, gram.data.n))))


def reach(gram: GramMatrix, head: Head) -> Reach:
    """Return what the bound needs of the rows: ‖S_b‖² = tr(K⁻¹ K_b), and the same for the layer."""
    inverse = gram.self_kernel(-1)

    def norm(names: list[str]) -> Tensor:
        part = GramMatrix(gram.net.with_parameters(names), gram.data, max_memory=gram.max_memory)
        return (inverse * part.self_kernel()).sum((1, 2)).clamp(min=0).sqrt()

    return Reach(norm([head.weight, head.bias]), norm([head.bias]), gram.ranks().double())


def pair_bounds(left: Reach, right: Reach, k: Tensor, d: int, slope: float) -> Tensor:
    """Return the bounds of all pairs, (n, m), given their k^C."""
    apart = (left.rank[:, None] + right.rank - 2 * d * k).clamp(min=0).sqrt()
    layer = torch.minimum(left.layer[:, None], right.layer)
    bias = left.bias[:, None] * right.bias
    return torch.where(bias > 0, slope * layer * apart / bias, torch.inf)
