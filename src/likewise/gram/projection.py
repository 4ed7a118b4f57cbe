"""Random projections of gradients that keep inner products, for data sets of many pairs.

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
from likewise.engines import Engine, GradientParts
from likewise.linalg import matrix_power, rank_floor


class Sketched(NamedTuple):
    """Random projections of the gradients of some samples."""

    rows: Tensor  # (n, d, q) of J(x)
    whitening: Tensor  # (n, d, d) K(x, x)^-½, exact up to float32
    squares: Tensor  # (n,) tr K(x, x), exact
    ranks: Tensor  # (n,) of K(x, x): 0 where no parameter moves the outputs


class Sketch:
    """A random map from gradients to q numbers per output, the same for every call with a seed."""

    def __init__(self, q: int, seed: int) -> None:
        self.q, self._seed = q, seed
        self._maps: list[Tensor] | None = None

    def __call__(self, gradients: Engine, samples: Samples) -> Sketched:
        """Return the sketches of samples; call it inside `net.evaluation_mode`."""
        sketches = [self._project(parts) for parts in gradients.parts(samples)]
        return sketches[0] if len(sketches) == 1 else Sketched(*map(torch.cat, zip(*sketches, strict=True)))

    def parts(self, gradients: Engine, samples: Samples) -> str:
        """Return in what parts gradients come: sketches of other parts are no match."""
        shapes = [tuple(part.shape[1:]) for part in gradients.features(samples, 0).tensors]
        return hashlib.sha256(str((self.q, self._seed, shapes)).encode()).hexdigest()[:8]

    def _project(self, parts: GradientParts) -> Sketched:
        square, total = parts.factors_gram, None
        for start, rows, gram in parts.explicit:
            signs = self._drawn(parts, rows)[0][start : start + rows.shape[2]]
            term = _fold_buckets(rows, signs, start % self.q, self.q)
            total = term if total is None else total.add_(term)
            square = square + gram
        for (a, delta), (left, right) in zip(parts.factors, self._sides(parts), strict=True):
            term = (a @ left)[:, None] * (delta @ right)
            total = term if total is None else total.add_(term)
        if total is None:  # no parameter moves the outputs
            total = torch.zeros(*square.shape[:2], self.q, device=square.device)
        white = matrix_power(square, -0.5, rank_floor(total.dtype))
        squares = square.diagonal(dim1=1, dim2=2).sum(1)
        return Sketched(total, white.matrix.to(total), squares, white.rank)

    def _sides(self, parts: GradientParts) -> list[tuple[Tensor, Tensor]]:
        if not parts.factors:
            return []
        rest = self._drawn(parts, parts.factors[0][0])[1:]
        return list(zip(rest[::2], rest[1::2], strict=True))

    def _drawn(self, parts: GradientParts, like: Tensor) -> list[Tensor]:
        if self._maps is None:
            chance = torch.Generator().manual_seed(self._seed)
            self._maps = [(torch.randint(0, 2, (max(parts.width, 1),), generator=chance) * 2.0 - 1).to(like)]
            for a, delta in parts.factors:
                for size, scale in ((a.shape[1], self.q**-0.5), (delta.shape[2], 1.0)):
                    drawn = torch.randint(0, 2, (size, self.q), generator=chance) * 2.0 - 1
                    self._maps.append((drawn * scale).to(like))
        return self._maps


def _fold_buckets(rows: Tensor, signs: Tensor, first: int, q: int) -> Tensor:
    """Return rows (n, d, p) times signs, added up in q buckets in turn, beginning with the `first`."""
    p = rows.shape[2]
    padded = rows.new_zeros(*rows.shape[:2], -(-(first + p) // q) * q)
    torch.mul(rows, signs, out=padded[:, :, first : first + p])
    return padded.unflatten(2, (-1, q)).sum(2)


def sketch_bytes(gradients: Engine, samples: Samples) -> int:
    """Return the bytes per sample that sketching adds to the engine's: three times the largest part."""
    return 3 * 4 * gradients.largest_part(samples)


def whiten_sketches(sketched: Sketched) -> Tensor:
    """Return whitened sketches as vectors (n, d·q), with inner products k(x, x'); k(x, x) is rank/d."""
    flat = (sketched.whitening @ sketched.rows).flatten(1)
    squared_norms = sketched.ranks.to(flat) / sketched.rows.shape[1]
    return torch.nn.functional.normalize(flat, dim=1) * squared_norms.sqrt()[:, None]


def bucket_count(numbers: int, d: int) -> int:
    """Return q for a sketch of about so many numbers: a prime, so that no layer's width is a multiple."""
    q = max(17, -(-numbers // d))
    while any(q % i == 0 for i in range(2, int(q**0.5) + 1)):
        q += 1
    return q
