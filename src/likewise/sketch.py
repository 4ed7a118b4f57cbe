"""Gradients made small: a random linear map that keeps inner products, for data sets of many pairs.

Explicit coordinates get a random sign each and are added up in q buckets, every q-th in one; an outer
product a δᵀ, never formed, becomes (P a) ∘ (Q δ) with random signs in P and Q. Either way
E⟨s, s'⟩ = ⟨S, S'⟩, and with unit vectors of length d·q after whitening the error of a similarity is about
1/√(d·q), less the more alike two samples are: the map is linear, so that what is equal stays equal.
"""

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor

from likewise.data import Samples
from likewise.gradients import Features, Gradients
from likewise.linalg import power, rank_floor


class Sketched(NamedTuple):
    """The gradients of some samples, made small."""

    rows: Tensor  # (n, d, q) of J(x)
    whitening: Tensor  # (n, d, d) K(x, x)^-½, exact up to float32
    squares: Tensor  # (n,) tr K(x, x), exact
    ranks: Tensor  # (n,) of K(x, x): 0 where no parameter moves the outputs


class Sketch:
    """A random map from gradients to q numbers per output, the same for every call with a seed."""

    def __init__(self, q: int, seed: int) -> None:
        self.q, self._seed = q, seed
        self._maps: list[Tensor] | None = None

    def __call__(self, gradients: Gradients, samples: Samples) -> Sketched:
        """Return the sketches of samples; call it inside `net.evaluating`."""
        features = gradients.features(samples, 0)
        square = _self_kernel(features)
        own = power(square, -0.5, rank_floor(features.rows.dtype))
        squares = square.diagonal(dim1=1, dim2=2).sum(1)
        return Sketched(self._mapped(features), own.matrix.to(features.rows), squares, own.rank)

    def parts(self, gradients: Gradients, samples: Samples) -> str:
        """Return in what parts gradients come: sketches of other parts are no match."""
        shapes = [tuple(part.shape[1:]) for part in gradients.features(samples, 0).tensors]
        return hashlib.sha256(str((self.q, self._seed, shapes)).encode()).hexdigest()[:8]

    def _mapped(self, features: Features) -> Tensor:
        if self._maps is None:
            self._maps = self._drawn(features)
        signs, *rest = self._maps
        rows = torch.nn.functional.pad(features.rows, (0, len(signs) - features.rows.shape[2]))
        total = rows.mul_(signs).unflatten(2, (-1, self.q)).sum(2)
        for (a, delta), left, right in zip(features.factors, rest[::2], rest[1::2], strict=True):
            total += (a @ left)[:, None] * (delta @ right)
        return total

    def _drawn(self, features: Features) -> list[Tensor]:
        chance = torch.Generator().manual_seed(self._seed)
        width, like = features.rows.shape[2], features.rows
        padded = -(-max(width, 1) // self.q) * self.q
        maps = [(torch.randint(0, 2, (padded,), generator=chance) * 2.0 - 1).to(like)]
        for a, delta in features.factors:
            for size, scale in ((a.shape[1], self.q**-0.5), (delta.shape[2], 1.0)):
                drawn = torch.randint(0, 2, (size, self.q), generator=chance) * 2.0 - 1
                maps.append((drawn * scale).to(like))
        return maps


def sketch_bytes(features: Features) -> int:
    """Return what sketching takes per sample: the parts, permuted, and in float64 for K(x, x)."""
    return 4 * sum(part.numel() * part.element_size() for part in features.tensors) // len(features.rows)


def whitened(sketched: Sketched) -> Tensor:
    """Return whitened sketches as vectors (n, d·q), with inner products k(x, x'); k(x, x) is rank/d."""
    flat = (sketched.whitening @ sketched.rows).flatten(1)
    own = sketched.ranks.to(flat) / sketched.rows.shape[1]
    return torch.nn.functional.normalize(flat, dim=1) * own.sqrt()[:, None]


def width_of(numbers: int, d: int) -> int:
    """Return q for a sketch of about so many numbers: a prime, so that no layer's width is a multiple."""
    q = max(17, -(-numbers // d))
    while any(q % i == 0 for i in range(2, int(q**0.5) + 1)):
        q += 1
    return q


def _self_kernel(features: Features) -> Tensor:
    """Return K(x, x) in float64; where no direction is small, sums in the precision of the rows will do."""
    found = _products(features, features.rows.dtype).double()
    values = torch.linalg.eigvalsh(found)
    doubtful = (values[:, 0] < 1e-3 * values[:, -1]).nonzero()[:, 0]
    if len(doubtful):
        found[doubtful] = _products(
            features.over([part[doubtful] for part in features.tensors]), torch.float64
        )
    return found


def _products(features: Features, dtype: torch.dtype) -> Tensor:
    rows = features.rows.to(dtype)
    total = rows @ rows.mT
    for a, delta in features.factors:
        wide = delta.to(dtype)
        total += a.to(dtype).square().sum(1)[:, None, None] * (wide @ wide.mT)
    return total
