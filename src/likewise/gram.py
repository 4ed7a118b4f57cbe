"""The kernel between two data sets, as a matrix that is never formed.

Two uses serve every statistic. `gram @ weights` is exact in two passes over the data and keeps one
parameter vector per column of weights: Σ_x' S(x) S(x')ᵀ w(x') = push(Σ pull(w)). `over_rows` visits
every pair and keeps one strip of the matrix. Nothing is computed before one of them is asked for.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from likewise.data import Samples, batches
from likewise.fingerprint import Fingerprint
from likewise.gradients import (
    Engine,
    Gradients,
    PartsChanged,
    Vanished,
    chosen,
    refuse_dependent_samples,
)
from likewise.kernels import CORRELATION, INNER_PRODUCT, Kernel, mean_diagonal, whole_block
from likewise.linalg import wide
from likewise.model_state import exclusive
from likewise.network import Network
from likewise.pairs import Pairs
from likewise.parallel import FailedElsewhere, join_over, processes
from likewise.passes import Passes
from likewise.plan import Plan, planned


class GramMatrix:
    """k(x, x') for the samples x of `data` (rows) and x' of `columns` (the same, if None).

    `engine`: how gradients are had; "auto" chooses. `centered`: gradients less their mean over the
    columns, for every pair shares a large common direction that hides structure. `max_memory`:
    bytes for gradients and strips, beside the model and its activations.
    """

    def __init__(
        self,
        net: Network | nn.Module,
        data: Any,
        columns: Any = None,
        kernel: Kernel = CORRELATION,
        engine: Engine | Gradients = "auto",
        centered: bool = False,
        max_memory: int = 2**31,
    ) -> None:
        self.net = net if isinstance(net, Network) else Network(net)
        self.data = batches(data)
        self.columns = self.data if columns is None else batches(columns)
        if not isinstance(kernel, Kernel):
            raise TypeError(f"kernel must be a Kernel such as likewise.CORRELATION, found {kernel!r}.")
        if not isinstance(max_memory, int) or max_memory < 1:
            raise TypeError(f"max_memory is a number of bytes, such as 2**30, found {max_memory!r}.")
        self.kernel = kernel
        self.centered = centered
        self.max_memory = max_memory
        self.of_network = not isinstance(engine, Gradients)  # else rows may be anything
        self._engine = _known(engine)
        self._mean: _Mean | None = None
        self._selected_engine: Gradients | None = None
        self._known_shape: tuple[int, int] | None = None

    def __repr__(self) -> str:
        centered = ", centered" if self.centered else ""
        return f"GramMatrix({self.data.n:,} × {self.columns.n:,}, {self.kernel}, {self.net}{centered})"

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and of columns, in samples."""
        return self.data.n, self.columns.n

    @property
    def square(self) -> bool:
        """Whether rows and columns are the same samples."""
        return self.data is self.columns

    @property
    def device(self) -> torch.device:
        """Where the model is, and its gradients."""
        return next(self.net.model.parameters()).device

    @property
    def d(self) -> int:
        """The number of outputs whose gradients are compared."""
        return self._row_shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """The type of results: the model's, at least float32. Sums are kept in float64."""
        return torch.promote_types(self.net.dtype, torch.float32)

    def with_kernel(self, kernel: Kernel) -> "GramMatrix":
        """Return the same samples and gradients under another kernel."""
        other = copy.copy(self)
        other.kernel = kernel
        return other

    def with_columns(self, columns: Any) -> "GramMatrix":
        """Return the same rows against other samples, centered about the same mean."""
        other = copy.copy(self)
        other._mean = self._mean_now() if self.centered else None
        other.columns = batches(columns)
        return other

    def add_to(self, fingerprint: Fingerprint, name: str) -> None:
        """Add what ranks that share a pass must have in common."""
        fingerprint.add("network", self.net)
        fingerprint.add("rows", self.data)
        fingerprint.add("columns", self.columns)
        fingerprint.add("kernel", (self.kernel.row, self.kernel.column, self.kernel.reduce))
        fingerprint.add("centered", self.centered)
        fingerprint.add("max_memory", self.max_memory)

    def __matmul__(self, weights: Tensor) -> Tensor:
        """Return Σ_x' B(x, x') w(x') for the kernel's blocks B: (m, d, c) -> (n, d, c)."""
        if self.kernel.reduce not in (mean_diagonal, whole_block):
            raise ValueError(
                f"{self.kernel} is not linear in its blocks, so no product of it takes two passes: "
                "use gram.over_rows or gram.row_sums, or gram.with_kernel(likewise.CORRELATION)."
            )
        if weights.dim() != 3 or weights.shape[:2] != (self.columns.n, self.d):
            raise ValueError(
                f"weights must be (m, d, c) = ({self.columns.n}, {self.d}, c), found "
                f"{tuple(weights.shape)}. To weigh samples by one number each: gram.row_sums."
            )
        if not weights.isfinite().all():
            raise ValueError("weights hold NaN or infinity, which would spread to every sum.")
        part = lambda where: weights[where.start : where.stop]  # noqa: E731
        return self.passes.product(part, weights.shape[2]).to(self.dtype)

    def row_sums(self, weights: Tensor | None = None) -> Tensor:
        """Return Σ_x' k(x, x') w(x'), (n,), or (n, c) for weights (m, c); w = 1 if not given.

        Two passes where the reduction is linear, all pairs where it is not.
        """
        sums = self.exact_row_sums(weights).to(self.dtype)
        return sums[:, 0] if weights is None or weights.dim() == 1 else sums

    def exact_row_sums(self, weights: Tensor | None = None) -> Tensor:
        """Return `row_sums` as (n, c) in float64, before they are narrowed: for ratios of sums."""
        given = self._column_weights(weights)
        if self.kernel.reduce is whole_block:
            raise ValueError("Whole blocks have no single row sum: use gram @ weights or over_rows.")
        if self.kernel.reduce is not mean_diagonal:
            return self.over_rows(lambda k: k.to(wide(k)) @ given.to(k.device, wide(k)))
        return self.passes.traces(given)

    def over_rows(self, reduce: Callable[[Tensor], Any], own: float | None = None) -> Any:
        """Return reduce(k) joined over strips k of whole rows, (b, m), or (b, m, d, d) for blocks.

        `reduce` returns a tensor with b rows, or a tuple of such. `own`: what stands in the place
        of a sample's similarity to itself, for example -inf to leave it out.
        """
        return self.map_strips(lambda _, k: reduce(k), own)

    def map_strips(self, function: Callable[[range, Tensor], Any], own: float | None = None) -> Any:
        """Return function(places of the rows, k) joined over strips: `over_rows` that says where."""
        try:
            return self._map_strips(function, own)
        except PartsChanged:
            pass
        except FailedElsewhere as problem:
            if problem.kind != f"{PartsChanged.__module__}.{PartsChanged.__qualname__}":
                raise
        return self._map_strips(function, own)

    def pairs(self) -> Pairs:
        """Return all pairs of this matrix, to be visited strip by strip."""
        return Pairs(
            gradients=self.gradients,
            rows=self.data,
            columns=self.columns,
            kernel=self.kernel,
            d=self.d,
            dtype=self.dtype,
            max_memory=self.max_memory,
            vanished=Vanished(),
        )

    def _map_strips(self, function: Callable[[range, Tensor], Any], own: float | None) -> Any:
        pairs = self.pairs()
        with self.net.evaluating():
            again = pairs.formations / (self.data.n + self.columns.n)
        if again > 8:
            warnings.warn(
                f"max_memory={self.max_memory:_} has room for the gradients of few samples, so that each is "
                f"formed {again:.0f} times: with max_memory={pairs.memory_to_keep:_} once would do.",
                stacklevel=4,
            )
        with self.net.evaluating():
            joined = join_over(
                lambda where: function(where, pairs.strip(where, own)),
                pairs.strips,
                "pairs",
                self,
                pairs.gradients.settle,
            )
        pairs.vanished.warn()
        return joined

    def plan(self, statistic: Callable[..., Any] | None = None, **options: Any) -> Plan:
        """Return what `statistic(gram, **options)` would take, from a trial on a few samples.

        Of no statistic: of `gram.row_sums()`, which N_S is, where that takes two passes, of all pairs
        where it does not. Options that have an entry for each row or column are cut to those of the trial.
        """
        return planned(self, statistic or GramMatrix.row_sums, options)

    def part(self, n: int) -> "GramMatrix":
        """Return the first n rows against the first n columns, with the same engine."""
        other = copy.copy(self)
        other.data = self.data.take(range(min(n, self.data.n)))
        same = self.square
        other.columns = other.data if same else self.columns.take(range(min(n, self.columns.n)))
        return other

    def dense(self) -> Tensor:
        """Return the whole matrix, (n, m), or (n, m, d, d) of whole blocks."""
        return self.over_rows(lambda k: k)

    def diagonal(self) -> Tensor:
        """Return k(x, x) of the rows, (n,)."""
        return self.exact_diagonal().to(self.dtype)

    def exact_diagonal(self) -> Tensor:
        """Return k(x, x) of the rows in float64, before it is narrowed: for ratios."""
        gradients, exponent = self.gradients, 1 + self.kernel.row + self.kernel.column
        return self._over_rows_of_data(
            lambda x: self.kernel.reduce(gradients.self_kernel(x, exponent).matrix)
        )

    def self_kernel(self, exponent: float = 1) -> Tensor:
        """Return K(x, x)ᵉ of the rows, (n, d, d), in float64."""
        gradients = self.gradients  # a centered one takes a pass of its own, before this one
        return self._over_rows_of_data(lambda x: gradients.self_kernel(x, exponent).matrix)

    def ranks(self) -> Tensor:
        """Return the rank of K(x, x), (n,): d if all outputs move freely, 0 if none can move."""
        gradients = self.gradients
        return self._over_rows_of_data(lambda x: gradients.self_kernel(x).rank)

    def vanishing(self) -> Tensor:
        """Return which rows have no gradient, (n,) booleans: nothing is similar to them."""
        return self.ranks() == 0

    def outputs(self) -> Tensor:
        """Return the network's outputs f(x) of the rows, (n, d)."""
        return self._over_rows_of_data(lambda x: self.net.function({}, x.inputs, x.labels, x.ids))

    def of_columns(self) -> "GramMatrix":
        """Return the columns against themselves, about the same mean."""
        other = self.with_columns(self.columns)
        other.data = other.columns
        return other

    def transposed(self) -> "GramMatrix":
        """Return the matrix with rows and columns exchanged, about the same mean."""
        other = copy.copy(self)
        other._mean = self._mean_now() if self.centered else None
        other.data, other.columns = self.columns, self.data
        other.kernel = Kernel(self.kernel.column, self.kernel.row, self.kernel.reduce)
        return other

    @property
    def gradients(self) -> Gradients:
        """Who answers the four questions; a centered one takes a pass over the columns."""
        return self._probed.about(self._mean_now().vectors) if self.centered else self._probed

    def _mean_now(self) -> "_Mean":
        """Return the mean gradient of the columns, anew if the model has changed since."""
        with exclusive:
            state = tuple((p.data_ptr(), p._version) for p in self.net.model.parameters())
        if self._mean is None or self._mean.state != state:
            eye = torch.eye(self.d, dtype=torch.float64) / self.columns.n
            plain = self._passes(self._probed, INNER_PRODUCT)
            self._mean = _Mean(state, plain.pull(lambda where: eye.expand(len(where), -1, -1)))
        return self._mean

    @property
    def passes(self) -> Passes:
        """The passes of products with this matrix."""
        return self._passes(self.gradients, self.kernel)

    def _passes(self, gradients: Gradients, kernel: Kernel) -> Passes:
        d, p = self._row_shape
        return Passes(
            self.net, gradients, self.data, self.columns, kernel.row, kernel.column, d, p, self.max_memory
        )

    def _over_rows_of_data(self, function: Callable[[Samples], Tensor]) -> Tensor:
        with self.net.evaluating():
            data, spans = self.data, self._passes(self._probed, self.kernel).spans(self.data)
            settle = self._probed.settle
            return join_over(lambda where: function(data.samples(where)), spans, "samples", self, settle)

    # Not cached_property: its lock and that of `evaluating` would be taken in either order, by two threads.
    @property
    def _probed(self) -> Gradients:
        """The engine, once the model was seen to be deterministic and its samples independent."""
        with exclusive:
            if self._selected_engine is None:
                self._selected_engine = self._probe()
            return self._selected_engine

    def _probe(self) -> Gradients:
        with self.net.evaluating():
            few, later = self._few()
            for some in (few, later):
                refuse_dependent_samples(self.net.exact(), some)
            if isinstance(self._engine, Gradients):
                return self._engine
            return chosen(
                self.net, few, later, self._engine, self.max_memory // 2, self.data.n // processes()
            )

    def _few(self) -> tuple[Samples, Samples]:
        """Return samples to try the model on: the first three, and three of another batch.

        A model may take only batches that go together, so the two are not mixed.
        """
        generator = torch.Generator().manual_seed(0)
        spans = self.data.spans() if self.data.given else [range(self.data.n)]
        span = (
            spans[1 + int(torch.randint(len(spans) - 1, (), generator=generator))] if spans[1:] else spans[0]
        )
        places = [span.start + i for i in torch.randperm(len(span), generator=generator).tolist()]
        later = self.data.take([i for i in places if i > 2][:3] or [0])
        return self.data.samples(range(min(3, self.data.n))), later.samples(range(later.n))

    @property
    def _row_shape(self) -> tuple[int, int]:
        """The number of outputs and of parameters."""
        with exclusive:
            if self._known_shape is None:
                self._known_shape = self._measure_row()
            return self._known_shape

    def _measure_row(self) -> tuple[int, int]:
        engine, first = self._probed, self.data.samples(range(1))
        with self.net.evaluating():
            if not self.of_network:
                rows = engine.rows(first, 0).rows
                return rows.shape[1], rows.shape[2]
            d = self.net.function({}, first.inputs, first.labels, first.ids).shape[1]
        return d, sum(self.net.numels.values())

    def _column_weights(self, weights: Tensor | None) -> Tensor:
        m = self.columns.n
        if weights is None:
            return torch.ones(m, 1, dtype=torch.float64)
        if weights.dim() not in (1, 2) or len(weights) != m:
            raise ValueError(f"weights must be (m, c) = ({m}, c), found {tuple(weights.shape)}.")
        if not weights.isfinite().all():
            raise ValueError("weights hold NaN or infinity, which would spread to every sum.")
        return weights.reshape(m, -1).to(wide(weights))


class _Mean(NamedTuple):
    state: tuple[tuple[int, int], ...]  # of the model's parameters
    vectors: Tensor  # (d, p)


def _known(engine: Engine | Gradients) -> Engine | Gradients:
    if isinstance(engine, Gradients) or engine in ("auto", "autograd", "layers"):
        return engine
    raise ValueError(f"There is no engine {engine!r}: choose 'auto', 'layers' or 'autograd'.")
