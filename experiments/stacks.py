"""Many networks of one shape, trained side by side as one: paired runs at the price of few.

A `Stack` holds the parameters of r networks, (r, ...), and runs each on its own samples, (r, b, ...). Sums
over networks have gradients that are those of each network alone, and Adam works on every number by itself,
so that a stack trains as its networks do. Given a copy of the parameters for every sample, autograd gives the
gradients of the samples: what the training terms of the paper compare.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Term = Literal["none", "group", "-cos", "+cos", "ratio"]
TERMS: tuple[Term, ...] = ("none", "group", "-cos", "+cos", "ratio")
SMALL = 1e-12


class Residual(nn.Sequential):
    """x + f(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Stack(NamedTuple):
    """The parameters of several networks, by name (r, ...), and a module of their shape."""

    shape: nn.Sequential
    parameters: dict[str, Tensor]

    @classmethod
    def made(cls, make: Callable[[], nn.Sequential], seeds: list[int], device: str = "cpu") -> "Stack":
        """Return the networks that `make` makes after each of these seeds."""
        networks = []
        for seed in seeds:
            torch.manual_seed(seed)
            networks.append(make().to(device))
        named = [dict(net.named_parameters()) for net in networks]
        stacked = {name: torch.stack([p[name].detach() for p in named]).requires_grad_() for name in named[0]}
        return cls(networks[0], stacked)

    def part(self, where: slice) -> "Stack":
        """Return some of the networks, with gradients to all."""
        return Stack(self.shape, {name: p[where] for name, p in self.parameters.items()})

    def one(self, index: int) -> nn.Sequential:
        """Return one of the networks, in the stack's only module: it serves until the next call."""
        with torch.no_grad():
            for name, parameter in self.shape.named_parameters():
                parameter.copy_(self.parameters[name][index])
        return self.shape

    def copies(self, samples: int) -> list[Tensor]:
        """Return the parameters with a copy for every sample, (r, b, ...); with one for all, (r, 1, ...)."""
        return [p[:, None].expand(-1, samples, *p.shape[1:]) for p in self.parameters.values()]

    def outputs(self, x: Tensor, copies: list[Tensor] | None = None) -> Tensor:
        """Return what the networks say of their samples, (r, b, outputs)."""
        return _run(self.shape, iter(copies or self.copies(1)), x)


def _run(net: nn.Sequential, parameters: Iterator[Tensor], x: Tensor) -> Tensor:
    for layer in net:
        if isinstance(layer, Residual):
            x = x + _run(layer, parameters, x)
        elif isinstance(layer, nn.Conv2d):
            x = _convolved(layer, x, next(parameters), next(parameters))
        elif isinstance(layer, nn.Linear):
            x = _times(next(parameters), x[..., None])[..., 0] + next(parameters)
        elif isinstance(layer, nn.PReLU):
            slope = next(parameters)
            x = torch.where(x > 0, x, x * slope.reshape(*slope.shape[:2], *[1] * (x.dim() - 2)))
        elif isinstance(layer, nn.Flatten):
            x = x.flatten(2)
        elif next(layer.parameters(), None) is None:
            x = layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        else:
            raise TypeError(
                f"A stack cannot run {type(layer).__name__}: it knows convolutions, Linear, PReLU."
            )
    return x


def _convolved(layer: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the convolution, stride 1, as a product with patches: each network has its kernel."""
    pad, side = int(layer.padding[0]), layer.kernel_size[0]
    x = F.pad(x, [pad] * 4)
    size = x.shape[-1] - side + 1
    found = _times(weight.flatten(3), _Patches.apply(x, side)) + bias[..., None]
    return found.unflatten(-1, (size, size))


class _Patches(torch.autograd.Function):
    """Square patches of images (r, b, c, h, h) as columns (r, b, c · side², p); by one copy.

    F.unfold would start a kernel for each image, and its derivative another.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, side: int) -> Tensor:
        ctx.sizes = (x.shape[-1], side)
        return x.unfold(3, side, 1).unfold(4, side, 1).permute(0, 1, 2, 5, 6, 3, 4).flatten(5).flatten(2, 4)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Tensor, None]:
        return _Folded.apply(given[0], *ctx.sizes), None


class _Folded(torch.autograd.Function):
    """The derivative of `_Patches`: columns are added up where they came from."""

    @staticmethod
    def forward(ctx: Any, columns: Tensor, size: int, side: int) -> Tensor:
        ctx.side = side
        many = size - side + 1
        parts = columns.unflatten(2, (-1, side, side)).unflatten(-1, (many, many))
        found = columns.new_zeros(*parts.shape[:3], size, size)
        for i in range(side):
            for j in range(side):  # on a GPU a third of the time of F.fold
                found[..., i : i + many, j : j + many] += parts[:, :, :, i, j]
        return found

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Tensor, None, None]:
        return _Patches.apply(given[0], ctx.side), None, None


def _times(weight: Tensor, columns: Tensor) -> Tensor:
    """Return weight (r, b or 1, o, i) times columns (r, b, i, p)."""
    if weight.shape[1] == 1:
        return torch.einsum("roi,rbip->rbop", weight[:, 0], columns)
    return weight @ columns


def label_against_mean(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the label's output less the mean of the others: Σ m_c log p_c, m = 1 for it, else −1/9."""
    mine = outputs.gather(-1, labels[..., None])[..., 0]
    return mine - (outputs.sum(-1) - mine) / (outputs.shape[-1] - 1)


def mean_terms(term: Term, stack: Stack, halves: Sequence[Tensor]) -> Tensor:
    """Return a term of the mean gradients of two mini-batches, (r,); halves: scores (r, b) of each."""
    first, second = (
        torch.autograd.grad(part.mean(1).sum(), list(stack.parameters.values()), create_graph=True)
        for part in halves
    )
    pairs = [(a.flatten(1), b.flatten(1)) for a, b in zip(first, second, strict=True)]
    inner = sum((a * b).sum(1) for a, b in pairs)
    sizes = [sum(m.square().sum(1) for m in side) for side in zip(*pairs, strict=True)]
    scale = (sizes[0] * sizes[1]).clamp(min=SMALL).sqrt()
    if term == "ratio":
        return halves[0].shape[1] * (sizes[0] + sizes[1] - 2 * inner) / scale
    return (inner if term == "+cos" else -inner) / scale


def group_term(stack: Stack, copies: list[Tensor], scores: Tensor, labels: Tensor) -> Tensor:
    """Return 1 − mean k^C of the pairs of one class, the mean over classes, (r,): as `losses.group`."""
    gradients = torch.autograd.grad(scores.sum(), copies, create_graph=True)
    flat = torch.cat([g.flatten(2) for g in gradients], 2)
    unit = flat / flat.square().sum(2, keepdim=True).clamp(min=SMALL).sqrt()
    members = F.one_hot(labels, 10).to(unit)
    sums = torch.einsum("rbc,rbp->rcp", members, unit).square().sum(2)
    count = members.sum(1)
    several = count > 1
    means = torch.where(several, (sums - count) / (count * (count - 1)).clamp(min=1), 0)
    return 1 - means.sum(1) / several.sum(1).clamp(min=1)


def step_loss(
    stack: Stack, term: Term, weight: float, x: Tensor, labels: Tensor, score: Callable[..., Tensor]
) -> Tensor:
    """Return cross-entropy plus the weighted term, (r,), of samples (r, 2b, ...): two mini-batches of b."""
    copies = stack.copies(x.shape[1] if term == "group" else 1)
    parts = 1 if term in ("none", "group") else 2  # mini-batches whose gradients are taken apart
    outputs = [stack.outputs(part, copies) for part in x.chunk(parts, 1)]
    loss = F.cross_entropy(torch.cat(outputs, 1).flatten(0, 1), labels.flatten(), reduction="none")
    loss = loss.unflatten(0, labels.shape).mean(1)
    if term == "none":
        return loss
    scores = [score(*part) for part in zip(outputs, labels.chunk(parts, 1), strict=True)]
    if term == "group":
        return loss + weight * group_term(stack, copies, scores[0], labels)
    return loss + weight * mean_terms(term, stack, scores)
