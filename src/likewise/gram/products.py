"""Products with a Gram matrix in two passes: a vjp over the columns, a jvp over the rows.

Σ_x' S(x) S(x')ᵀ w(x') = S(x) u with u = Σ S(x')ᵀ w(x'), one parameter vector for each column of weights. S(x) is the
whitened Jacobian K(x, x)ᵉ J(x), so that these are products with whitened Jacobians. Exact, linear in N, and nothing
is stored per sample.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from likewise.data import Batches
from likewise.distributed import join_results, sum_results
from likewise.engines import Engine, SelfKernelCache, ZeroGradientLog
from likewise.fingerprint import Fingerprint
from likewise.model import Network

Weights = Callable[[range], Tensor]  # the weights (b, d, c) of the samples at these places
Read = Callable[[range, Tensor], Tensor]  # maps the products (b, d, c) at these places


@dataclass(frozen=True)
class Products:
    """Passes over rows and columns, with the powers of a kernel."""

    net: Network
    engine: Engine
    rows: Batches
    columns: Batches
    left_power: float
    right_power: float
    d: int
    p: int
    max_memory: int

    @property
    def vectors_per_pass(self) -> int:
        """How many parameter vectors in float64, twice, fit into a quarter of max_memory."""
        return max(1, self.max_memory // 8 // (8 * self.p))

    def spans(self, data: Batches) -> list[range]:
        """Return the batches to load: the user's, or multiples of the engine's batch size."""
        batch_size = self.engine.batch_size
        if data.given or batch_size is None:
            return data.spans()
        return data.spans(batch_size * (256 // batch_size) if batch_size < 256 else min(batch_size, 2048))

    def add_to(self, fingerprint: Fingerprint, name: str) -> None:
        """Add what ranks that share a pass must have in common."""
        fingerprint.add("network", self.net)
        fingerprint.add("rows", self.rows)
        fingerprint.add("columns", self.columns)
        fingerprint.add("exponents", (self.left_power, self.right_power))
        fingerprint.add("engine", type(self.engine).__name__)

    def vjp(self, weights: Weights, cache: SelfKernelCache | None = None) -> Tensor:
        """Return Σ S(x')ᵀ w(x') over the columns: a parameter vector a weight, (c, p)."""
        zero_gradients = ZeroGradientLog()

        def term(where: range) -> Tensor:
            samples = self.columns.samples(where)
            result = self.engine.vjp(samples, weights(where), self.right_power)
            if result.self_kernel is not None:
                zero_gradients.note(samples, result.self_kernel.rank)
                if cache is not None:
                    cache.put(where, result.self_kernel)
            return result.total

        with self.net.evaluation_mode():
            settle = self.engine.finish_checks
            total = sum_results(term, self.spans(self.columns), "summing gradients", self, settle)
        if self.rows is not self.columns:  # else the second pass names them
            zero_gradients.warn()
        return total

    def jvp(self, directions: Tensor, read: Read, cache: SelfKernelCache | None = None) -> Tensor:
        """Return read(places, S(x) u) of the rows; u are the rows of (c, p) directions."""
        zero_gradients = ZeroGradientLog()

        def project(where: range) -> Tensor:
            samples = self.rows.samples(where)
            self_kernel = None if cache is None else cache.get(where)
            result = self.engine.jvp(samples, directions, self.left_power, self_kernel)
            zero_gradients.note(samples, result.ranks)
            return read(where, result.outputs)

        with self.net.evaluation_mode():
            outputs = join_results(
                project, self.spans(self.rows), "reading off", self, self.engine.finish_checks
            )
        zero_gradients.warn()
        return outputs

    def product(self, weights: Weights, c: int, read: Read = lambda _, outputs: outputs) -> Tensor:
        """Return read(places, S(x) Σ S(x')ᵀ w(x')) in float64, in as many rounds as vectors need to fit."""
        group = self.vectors_per_pass
        if c > group:
            rounds = [
                self.product(_some_columns(weights, slice(i, i + group)), min(group, c - i))
                for i in range(0, c, group)
            ]
            return read(range(self.rows.n), torch.cat(rounds, 2))
        same = self.rows is self.columns and self.left_power == self.right_power
        fits = 8 * self.rows.n * self.d**2 <= self.max_memory // 8
        cache = SelfKernelCache(self.rows.n) if same and fits else None
        return self.jvp(self.vjp(weights, cache), read, cache)

    def reduced(self, weights: Tensor, coefficients: Tensor) -> Tensor:
        """Return Σ_x' reduce(S(x) S(x')ᵀ) w(x') for weights (m, c), (n, c), in float64.

        Args:
            weights: One number per column sample and column of weights.
            coefficients: A, (d, d), with reduce(B) = Σ A ∘ B.

        """
        used = [i for i in range(self.d) if coefficients[i].any()]
        outputs_per_pass = max(1, min(len(used), self.vectors_per_pass))
        columns_per_pass = max(1, self.vectors_per_pass // outputs_per_pass)
        sums = []
        for some in weights.split(columns_per_pass, dim=1):
            groups = (used[i : i + outputs_per_pass] for i in range(0, len(used), outputs_per_pass))
            parts = [self._reduced_part(some, coefficients, group) for group in groups]
            sums.append(torch.stack(parts).sum(0))
        return torch.cat(sums, 1)

    def _reduced_part(self, weights: Tensor, coefficients: Tensor, outputs: list[int]) -> Tensor:
        """Return the part of the sums that some outputs of the rows contribute."""
        c, some = weights.shape[1], len(outputs)
        selected = coefficients[outputs].to(weights)  # (some, d)

        def blocks(where: range) -> Tensor:
            return torch.einsum("nc,ed->ndec", weights[where.start : where.stop], selected).flatten(2)

        def read(_: range, products: Tensor) -> Tensor:
            mine = products[:, outputs].unflatten(2, (some, c))
            return mine.diagonal(dim1=1, dim2=2).sum(-1)

        return self.product(blocks, some * c, read)


def _some_columns(weights: Weights, which: slice) -> Weights:
    return lambda where: weights(where)[:, :, which]
