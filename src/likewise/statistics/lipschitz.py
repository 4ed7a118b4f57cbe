"""How far apart can two outputs be whose gradients are alike? (sec. 6.3 and its appendix)

With S = K^-½ J and the last layer h(W a + b), S holds S_b = K^-½ ∂f/∂b and, for each activity, a_k S_b.
From (a_k − a'_k) S'_b = (a_k S_b − a'_k S'_b) − a_k (S_b − S'_b) follows

    ‖a − a'‖ ≤ ‖S_(W,b)(x)‖ · ‖S(x) − S(x')‖ / (‖S_b(x)‖ ‖S_b(x')‖),    ‖S(x) − S(x')‖² = r + r' − 2d k^C,

r the ranks (d as a rule), and ‖f − f'‖ ≤ slope · ‖a − a'‖. For d = 1 this is the paper's bound with
√(1 + ‖a‖²) for its larger √Σ(1 + |a_i|)²; it also holds for several outputs.
"""

from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from likewise.data import Samples
from likewise.engines import jacobians_one_by_one, record_calls
from likewise.gram import GramMatrix
from likewise.kernels import CORRELATION
from likewise.model import Network
from likewise.statistics.targets import refuse_centered

# Activations and a bound of their derivative.
ACTIVATIONS: tuple[tuple[Callable[[Tensor], Tensor], float], ...] = (
    (lambda c: c, 1.0),
    (torch.relu, 1.0),
    (torch.tanh, 1.0),
    (torch.sigmoid, 0.25),
    (nn.functional.softplus, 1.0),
    (nn.functional.leaky_relu, 1.0),
    (nn.functional.elu, 1.0),
    (nn.functional.logsigmoid, 1.0),
    (nn.functional.softsign, 1.0),
    (nn.functional.hardtanh, 1.0),
    (nn.functional.silu, 1.1),
    (nn.functional.gelu, 1.13),
)


class Head(NamedTuple):
    """‖f(x) − f(x')‖ ≤ slope · ‖a(x) − a(x')‖, a being the inputs of this layer."""

    weight: str  # the name of W
    bias: str
    slope: float


class Reach(NamedTuple):
    """What the bound needs of each sample."""

    layer: Tensor  # (n,) ‖S_(W,b)‖
    bias: Tensor  # (n,) ‖S_b‖
    rank: Tensor  # (n,)


def lipschitz_bound(gram: GramMatrix) -> Tensor:
    """Return a bound of ‖f(x) − f(x')‖ for each pair, (n, m), from similarities alone.

    Infinite where the outputs are not those of a last linear layer with a bias, or an activation of
    it, whose parameters are used once and among those compared; or where a readout takes another
    output for another sample.

    Args:
        gram: Plain or centered; its kernel is ignored.

    Returns:
        (n, m) bounds, non-negative.

    Example:
        >>> import torch, likewise as lw
        >>> net, x = torch.nn.Linear(4, 2), torch.randn(9, 4)
        >>> distances = torch.cdist(net(x), net(x))
        >>> bool((distances <= lw.lipschitz_bound(lw.GramMatrix(net, x)) + 1e-3).all())
        True

    """
    refuse_centered(gram)
    head = output_head(gram)
    if head is None:
        gram.ranks()  # no bound is known, but a gradient that is not finite, or depends on chance, is named
        return torch.full(gram.shape, torch.inf, dtype=gram.dtype, device=gram.device)
    left = reach(gram, head)
    right = left if gram.square else reach(gram.of_columns(), head)
    d = gram.d

    def bounds(where: range, k: Tensor) -> Tensor:
        part = Reach(*(v[where.start : where.stop] for v in left))
        bounds = pair_bounds(part, right, k.double(), d, head.slope).to(k)
        if gram.square:  # no rounding where x' is x
            bounds[torch.arange(len(k)), torch.tensor(list(where))] = 0
        return bounds

    return gram.with_kernel(CORRELATION).map_strips(bounds)


def output_head(gram: GramMatrix) -> Head | None:
    """Return the last linear layer if all outputs, of rows and columns, are those of it or of one activation of it.

    A readout by label or by prediction is one output for some samples and another for others: it has no head. One
    forward pass.
    """
    if not gram.of_network:
        return None
    with gram.net.evaluation_mode():
        first = gram.data.samples(range(min(3, gram.data.n)))
        layer = last_linear(gram.net, first)
        if layer is None:
            return None
        slopes: dict[_Map, float] | None = None
        for samples in chain(gram.data, () if gram.square else gram.columns):
            found = _slopes(gram.net, layer, samples)
            slopes = found if slopes is None else {one: slopes[one] for one in slopes if one in found}
            if not slopes:
                return None
        return Head(*layer, min(slopes.values())) if slopes else None


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


class _Call(NamedTuple):
    name: str
    module: nn.Linear
    inputs: Tensor
    outputs: Tensor

    @property
    def parameters(self) -> tuple[str, str]:
        """The names of its weight and bias."""
        prefix = f"{self.name}." if self.name else ""
        return f"{prefix}weight", f"{prefix}bias"


_Map = tuple[Callable[..., Tensor], int | None]  # an activation, and the column of it that is the only output


def last_linear(net: Network, samples: Samples) -> tuple[str, str] | None:
    """Return the names of its weight and bias, or None if there is none, it has no bias, or they are shared.

    Call it inside `net.evaluation_mode`.
    """
    call, _ = _last_call(net, samples)
    if call is None or not set(call.parameters) <= set(net.names) or not _is_used_once(net, call, samples):
        return None
    return call.parameters


def _last_call(net: Network, samples: Samples) -> tuple[_Call | None, Tensor]:
    """Return the last call of a linear layer with a bias, None unless it is of one vector a sample; and the outputs."""
    layers = {
        name: module
        for name, module in net.model.named_modules()
        if isinstance(module, nn.Linear) and module.bias is not None
    }
    last: _Call | None = None

    def record(name: str, inputs: tuple[Tensor, ...], outputs: Tensor) -> None:
        nonlocal last
        last = _Call(name, layers[name], inputs[0].clone(), outputs.clone())

    with record_calls(net.model, layers, record):
        outputs = net.function({}, samples.inputs, samples.labels, samples.ids)
    return (last if last is not None and last.outputs.dim() == 2 else None), outputs


def _slopes(net: Network, layer: tuple[str, str], samples: Samples) -> dict[_Map, float]:
    """Return Lipschitz constants from a layer's inputs to the outputs, by each map from one to the other that fits."""
    call, outputs = _last_call(net, samples)
    if call is None or call.parameters != layer:
        return {}
    weight, bias = call.module.weight.detach(), call.module.bias.detach()
    affine = torch.nn.functional.linear(call.inputs, weight, bias)
    if not torch.allclose(
        affine, call.outputs, rtol=1e-3, atol=1e-6
    ):  # a hook, or a subclass with its own forward
        return {}
    found, norm = dict[_Map, float](), float(torch.linalg.matrix_norm(weight.double(), 2))
    for activation, steepest in ACTIVATIONS:
        active = activation(call.outputs)
        if active.shape == outputs.shape and torch.allclose(active, outputs):
            found[activation, None] = steepest * norm
        elif outputs.shape == (len(active), 1):
            fits = torch.isclose(active, outputs).all(0).nonzero()[:, 0].tolist()
            found |= {(activation, i): steepest * float(weight[i].double().norm()) for i in fits}
    log_softmax = call.outputs.log_softmax(1)
    if log_softmax.shape == outputs.shape and torch.allclose(log_softmax, outputs):
        # The derivative Id − 1 pᵀ is longest where p is certain: √classes.
        found[torch.log_softmax, None] = outputs.shape[1] ** 0.5 * norm
    return found


def _is_used_once(net: Network, call: _Call, samples: Samples) -> bool:
    """Whether ∂f/∂W = ∂f/∂b ⊗ a: W and b have no other use."""
    weight, bias = call.parameters
    layer = net.with_parameters([weight, bias])
    with torch.enable_grad():
        jacobian = jacobians_one_by_one(layer, samples)
    sizes = [layer.parameters[name].numel() for name in layer.names]
    parts = dict(zip(layer.names, jacobian.split(sizes, dim=2), strict=True))
    expected = torch.einsum("ndo,ni->ndoi", parts[bias], call.inputs)
    return torch.allclose(parts[weight], expected.flatten(2), rtol=1e-3, atol=1e-6)
