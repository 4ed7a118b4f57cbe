"""The kernel between two data sets, as a matrix that is never formed.

Two uses serve every statistic. `gram @ weights` is exact in two passes over the data and keeps one parameter vector
per column of weights. `over_rows` and `visit` show every pair and keep one strip of the matrix. Nothing is computed
before one of them is called. Matrices made from another one (`with_kernel`, `with_centering`, ...) share its engine,
so that a model is traced and checked once.
"""

import copy
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from likewise.checks import (
    check_choice,
    check_flag,
    check_function,
    check_integer,
    check_tensor,
    check_type,
    describe,
)
from likewise.data import Batches, Samples, batches
from likewise.distributed import RemoteError, alone, is_error, join_results, world_size
from likewise.engines import (
    Engine,
    EngineName,
    Features,
    MemoryLimitError,
    PartsChangedError,
    TracedEngine,
    ZeroGradientLog,
    call_on_pair,
    check_independent_samples,
    default_max_memory,
    first_call,
    select_engine,
)
from likewise.fingerprint import Fingerprint
from likewise.gram.centering import CenteredPair, Centering, CenteringCache, warn_of_cancellation
from likewise.gram.cost import (
    FEW_EPOCHS,
    PAIRS,
    WIDTH,
    PairCost,
    PairOperations,
    Plan,
    count_forward,
    count_pair_operations,
    gradient_epochs,
    pairs_are_few,
    plan_statistic,
)
from likewise.gram.features import KeptFeatures, KeptSketches, StateCache
from likewise.gram.layerwise import (
    FEWEST,
    PASS,
    LayerPlan,
    ParameterBytes,
    layerwise_strips,
    plan_layers,
)
from likewise.gram.products import Products, RowSums
from likewise.gram.strips import (
    DirectionStrips,
    ExactStrips,
    JointStrips,
    Reducer,
    Strip,
    Tiles,
    reduce_strip,
    split_results,
)
from likewise.kernels import CORRELATION, Kernel, mean_diagonal, refuse_out_of_range
from likewise.linalg import accumulation_dtype, rank_floor
from likewise.model import Network
from likewise.progress import advising
from likewise.readouts import all_outputs, has_scores
from likewise.torch_state import exclusive
from likewise.wording import counted

COLUMNS_PER_ROW, FEWEST_COLUMNS = 8, 32  # at least so many, for rows to be tried as directions
SKETCH = "sketch=1024 compares random projections instead: a few passes, for statistics that have this option"
FEW_GRADIENTS = 16  # of all samples and outputs: all their pairs cost less than to whiten each of them


class GramMatrix:
    """k(x, x') for the samples x of `data` (rows) and x' of `columns`.

    Args:
        net: The network, or a model, whose readout is chosen automatically (see `Network`).
        data: The rows: anything that `likewise.batches` accepts.
        columns: The columns; None, or `data` again, for a square matrix.
        kernel: Which kernel; k^C by default.
        engine: How gradients are computed: "auto" chooses, "layers" is the traced engine, "autograd" the reference.
        centered: Double-centered over the columns, then normalized (see `likewise.gram.centering`): every pair
            shares a large common direction that hides structure in plain similarities.
        max_memory: Bytes for activations, gradients and strips, beside the model, the data and the results; None: half
            of what is free on the model's device, rounded down to a power of two.

    Results of the matrix and of every statistic are on `gram.device`, which is the model's; the data may be anywhere.

    Example:
        >>> import torch, likewise as lw
        >>> gram = lw.GramMatrix(torch.nn.Linear(4, 2), torch.randn(5, 4))
        >>> gram.shape, gram.dense().shape, (gram @ torch.ones(5)).shape
        ((5, 5), torch.Size([5, 5]), torch.Size([5]))

    """

    def __init__(
        self,
        net: Network | nn.Module,
        data: Any,
        columns: Any = None,
        *,
        kernel: Kernel = CORRELATION,
        engine: EngineName | Engine = "auto",
        centered: bool = False,
        max_memory: int | None = None,
    ) -> None:
        self.net = net if isinstance(net, Network) else Network(net)
        self.data = batches(data)
        same = columns is None or columns is data
        self.columns = self.data if same else _column_batches(columns, self.data)
        self.kernel = _check_kernel(kernel)
        self.centered = check_flag("centered", centered)
        if max_memory is None:
            max_memory = default_max_memory(self.device)
        bytes_allowed = check_integer("max_memory", max_memory, 1, advice="bytes, such as 2**30")
        self.max_memory = min(bytes_allowed, 2**62)
        self._setup = _Setup(self.net, self.data, _known_engine(engine), self.max_memory, same)
        self._reference = self.columns  # the samples whose mean is taken off
        self._centerings = CenteringCache()
        self._feature_cache: StateCache[KeptFeatures] | None = None
        self.sketch_cache = StateCache[KeptSketches]()
        self._whole: GramMatrix | None = None  # of which this is a part, for a dry run
        self._refuse_centering()

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
        """The device of the model: what a GramMatrix returns (products, sums, strips, the diagonal) is on it."""
        return next(self.net.model.parameters()).device

    @property
    def d(self) -> int:
        """The number of outputs whose gradients are compared."""
        return self._setup.row_shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """The type of results: the model's, at least float32. Sums are accumulated in float64."""
        return torch.promote_types(self.net.dtype, torch.float32)

    @property
    def of_network(self) -> bool:
        """Whether rows are gradients of the network; else they are activations, or your own."""
        return self._setup.of_network

    def with_kernel(self, kernel: Kernel) -> "GramMatrix":
        """Return the same samples under another kernel, with the same engine."""
        other = copy.copy(self)
        other.kernel = _check_kernel(kernel)
        other._refuse_centering()
        other._whole = None if self._whole is None else self._whole.with_kernel(kernel)
        return other

    def with_centering(self, centered: bool) -> "GramMatrix":
        """Return the same matrix, centered or plain, with the same engine."""
        other = copy.copy(self)
        other.centered = check_flag("centered", centered)
        other._refuse_centering()
        return other

    def with_parameters(self, parameters: str | Sequence[str]) -> "GramMatrix":
        """Return the same samples compared by the gradients in other parameters, with an engine of its own.

        Args:
            parameters: As of `Network`: names, glob patterns, "adapters", "last 3 layers".

        """
        if not self.of_network:
            raise ValueError(
                "A GramMatrix of a network's gradients is needed: activations have no parameters."
            )
        net = self.net.with_parameters(parameters)
        if net.names == self.net.names:
            return self
        other = copy.copy(self)
        other.net, other._setup = net, self._setup.of(net)
        other._centerings = CenteringCache()
        other._feature_cache = None if self._feature_cache is None else StateCache()
        other.sketch_cache = StateCache()
        other._whole = None if self._whole is None else self._whole.with_parameters(parameters)
        return other

    def with_feature_cache(self) -> "GramMatrix":
        """Return the same matrix, whose per-sample gradients are kept once they are computed.

        If they fit into a quarter of max_memory, and the matrix is square: what is computed of it, and of the
        matrices made from it by `with_kernel` and `with_centering`, then comes from one pass over the data. The
        memory is free when they are.
        """
        if self._feature_cache is not None:
            return self
        other = copy.copy(self)
        other._feature_cache = StateCache()
        return other

    def with_columns(self, columns: Any) -> "GramMatrix":
        """Return the same rows against other samples, with the same engine and reference for centering."""
        other = copy.copy(self)
        other.columns = _column_batches(columns, self.data)
        other.sketch_cache = StateCache()
        return other

    def of_columns(self, places: Callable[[int], Tensor] | None = None) -> "GramMatrix":
        """Return the columns against themselves, with the same engine and reference for centering.

        Args:
            places: Which of so many columns are the rows; None: all of them.

        """
        other = copy.copy(self)
        columns = self.columns
        other.data = columns if places is None else columns.take(places(columns.n).tolist())
        other.sketch_cache = StateCache()
        other._whole = None if self._whole is None else self._whole.of_columns(places)
        return other

    def take(self, n: int) -> "GramMatrix":
        """Return the first n rows against the first n columns, with the same engine."""
        other = copy.copy(self)
        other.data = self.data.take(range(min(n, self.data.n)))
        other.columns = other.data if self.square else self.columns.take(range(min(n, self.columns.n)))
        other._reference = other.columns
        other._centerings = CenteringCache()
        other._feature_cache = None
        other.sketch_cache = StateCache()
        other._whole = self
        return other

    def add_to(self, fingerprint: Fingerprint, name: str) -> None:
        """Add what ranks that share a pass must have in common."""
        fingerprint.add("network", self.net)
        fingerprint.add("rows", self.data)
        fingerprint.add("columns", self.columns)
        kernel = self.kernel
        fingerprint.add("kernel", (kernel.left_power, kernel.right_power, kernel.reduce))
        fingerprint.add("centered", self.centered)
        fingerprint.add("max_memory", self.max_memory)

    def __matmul__(self, weights: Any) -> Tensor:
        """Return the product with weights, in two passes over the data.

        Args:
            weights: (m,) or (m, c), a tensor, array or Series: Σ_x' k(x, x') w(x') of the reduced kernel; or
                (m, d, c): Σ_x' B(x, x') w(x') of the kernel's (d, d) blocks B.

        Returns:
            (n,), (n, c) or (n, d, c), in `gram.dtype`.

        Raises:
            ValueError: The reduction is not linear, weights do not fit or are not finite.

        """
        given = check_tensor("weights", weights)
        if not self.kernel.linear:
            raise ValueError(
                f"{self.kernel} is not linear in its blocks, so no product of it takes two passes: "
                "use gram.over_rows or gram.row_sums, or gram.with_kernel(likewise.CORRELATION)."
            )
        if given.dim() != 3:
            return self.row_sums(given)
        if self.centered:
            raise ValueError(
                "A centered similarity is one number a pair, so blocks of it have no product: give weights (m,) "
                "or (m, c), or make the GramMatrix with centered=False."
            )
        if given.shape[:2] != (self.columns.n, self.d):
            raise ValueError(
                f"weights must be (m,), (m, c) or (m, d, c) with m = {self.columns.n}, d = {self.d}, found "
                f"{tuple(given.shape)}."
            )
        part = lambda where: given[where.start : where.stop]  # noqa: E731
        return self._to_result_dtype(self.products().product(part, given.shape[2]))

    def row_sums(self, weights: Any = None) -> Tensor:
        """Return Σ_x' k(x, x') w(x').

        Two passes where the reduction is linear, all pairs where it is not.

        Args:
            weights: (m,) or (m, c); all one if None.

        Returns:
            (n,), or (n, c) for weights (m, c).

        """
        given = None if weights is None else check_tensor("weights", weights)
        sums = self._to_result_dtype(self.exact_row_sums(given))
        return sums[:, 0] if given is None or given.dim() == 1 else sums

    def exact_row_sums(self, weights: Tensor | None = None) -> Tensor:
        """Return `row_sums` as (n, c) in float64, for ratios of sums."""
        given = self._column_weights(weights)
        if self.kernel.keeps_blocks:
            raise ValueError("Whole blocks have no single row sum: give weights (m, d, c), or use over_rows.")
        if not self.kernel.linear:
            return self.over_rows(
                lambda k: k.to(accumulation_dtype(k)) @ given.to(k.device, accumulation_dtype(k))
            )
        coefficients, kept = self.kernel.coefficients(self.d), self._kept_features() if self.square else None
        products = self.products() if kept is None else kept.products(self.kernel, self.max_memory)
        if not self.centered:
            return products.reduced(given, coefficients)
        pair = self._centering()
        scaled = pair.scale_weights(given.to(pair.columns.scales))
        return pair.center_product(products.reduced(scaled.cpu(), coefficients), scaled)

    def sums_and_diagonals(self, *kernels: Kernel) -> list[RowSums]:
        """Return the plain Σ_x' k(x, x') and k(x, x) of the rows for each kernel, in float64.

        Two passes for all kernels together, where their vectors fit into memory.
        """
        state = self.state_of(self._reference)
        results = self._joint_sums(kernels)
        reference = self.data is self.columns is self._reference
        if self.centered and reference and self.kernel in kernels:  # centering then needs no more passes
            self._center_reference(results[kernels.index(self.kernel)], state)
        return results

    def over_rows(self, reduce: Callable[[Tensor], Any], *, fill_diagonal: float | None = None) -> Any:
        """Return reduce(k) joined over strips k of whole rows; visits all pairs.

        Args:
            reduce: From (b, m), or (b, m, d, d) for blocks, to a tensor with b rows, or a tuple of such.
            fill_diagonal: Replaces a sample's similarity to itself in a square matrix, for example by -inf to
                leave it out.

        """
        check_function("reduce", reduce, "of a strip k of rows, (b, m)", "such as lambda k: k.max(1).values")
        if fill_diagonal is not None and not isinstance(fill_diagonal, float | int):
            raise TypeError(f"fill_diagonal must be a number or None, found {describe(fill_diagonal)}.")
        return self.map_strips(lambda _, k: reduce(k), fill_diagonal=fill_diagonal)

    def map_strips(
        self, function: Callable[[range, Tensor], Any], *, fill_diagonal: float | None = None
    ) -> Any:
        """Return function(places of the rows, k) joined over strips: `over_rows` that says where."""

        def reduce(strip: Strip) -> Any:
            k = strip.similarity
            if fill_diagonal is not None:
                k = strip.fill_self_(k, fill_diagonal)
            return function(strip.rows, k)

        return self._map_strips(reduce, self.centered)

    def visit(self, *reducers: Reducer) -> list[tuple[Tensor, ...]]:
        """Return what each reducer keeps of every row, joined over strips; one visit of all pairs."""
        if self.kernel.keeps_blocks:
            raise ValueError("Reducers work on one number a pair: use gram.over_rows for whole blocks.")
        with advising(SKETCH if self.kernel == CORRELATION else ""):
            joined = self._map_strips(
                lambda strip: reduce_strip(strip, reducers), any(reducer.centered for reducer in reducers)
            )
        return split_results(joined, reducers)

    def plan(self, statistic: Callable[..., Any] | None = None, **options: Any) -> Plan:
        """Return what `statistic(gram, **options)` would take, from a dry run on a few samples.

        Args:
            statistic: Any function of a GramMatrix; `gram.row_sums()`, which is N_S, if None.
            **options: Its options; those with an entry for each row or column are cut to the dry run's.

        """
        if statistic is not None:
            check_function("statistic", statistic, "of a GramMatrix", "such as likewise.soft_neighbors")
        with warnings.catch_warnings():  # counting operations imports what changes their filters
            return plan_statistic(self, statistic or GramMatrix.row_sums, options)

    def announce_once(self, *about: Hashable) -> bool:
        """Whether something is said for the first time, of this matrix and those that share its engine."""
        first = about not in self._setup.announced
        self._setup.announced.add(about)
        return first

    @property
    def forward_batch_size(self) -> int | None:
        """Samples of which even gradients fit, for forward passes; None as long as no gradient was needed."""
        return self._setup.gradient_batch_size

    @property
    def reference(self) -> Batches:
        """The samples whose mean centering takes off: the columns, unless these were exchanged."""
        return self._reference

    @property
    def is_part(self) -> bool:
        """Whether it is a part of another matrix, for a dry run, which compares gradients as the whole does."""
        return self._whole is not None

    def pair_cost(self) -> PairCost:
        """Return what one visit of all pairs costs, in plain training epochs, by counting multiplications.

        Exact pairs that take seconds, or need no gradients beside those that are kept, cost nothing here.
        """
        whole = self if self._whole is None else self._whole
        (n, m), d, numbers = whole.shape, whole.d, whole._setup.feature_numbers()
        kept = whole._feature_cache is not None and whole.tiles().fits
        if kept or pairs_are_few(n * m, numbers):
            return PairCost(0, 0)
        samples = n if whole.square else n + m
        epoch = 3 * samples * whole._setup.forward_multiplications()
        tiles, plan = whole.tiles(), whole._layer_plan()
        formed = tiles.gradient_evaluations if plan is None else PASS * len(plan.groups) * n
        pairs = n * m / (2 if tiles.fills_matrix else 1)
        exact = gradient_epochs(d) * formed / samples + numbers * pairs / epoch
        if n * d <= 3 * FEW_EPOCHS and whole._directions_are_cheaper():
            counted, strips = whole._pair_operations(), len(whole._direction_strips(None).strips)
            operations = strips * counted.jvp + n * d * counted.per_direction
            exact = (
                gradient_epochs(d) * n + operations * m / (6 * whole._setup.forward_multiplications())
            ) / samples
        return PairCost(exact, gradient_epochs(d) + WIDTH * pairs / epoch)

    def standard_errors(self, found: Tensor, *, centered: bool | None = None) -> Tensor:
        """Return the standard errors of the similarities of each row with the columns at places (n, k): they are 0.

        Args:
            found: (n, k) places of columns.
            centered: Of which similarities, whatever the matrix was asked for.

        """
        del centered
        return torch.zeros(found.shape, dtype=self.dtype, device=self.device)

    def dense(self) -> Tensor:
        """Return the whole matrix, (n, m), or (n, m, d, d) of whole blocks."""
        return self.over_rows(lambda k: k)

    def diagonal(self) -> Tensor:
        """Return k(x, x) of the rows, (n,), or (n, d, d) of whole blocks."""
        return self._to_result_dtype(self.exact_diagonal())

    def exact_diagonal(self) -> Tensor:
        """Return k(x, x) of the rows in float64, for ratios."""
        if self.centered:
            return (self._centering().rows.scales > 0).double()
        kept = self._kept_features() if self.square else None
        if kept is not None:
            return kept.diagonal(self.kernel)
        exponent = 1 + self.kernel.left_power + self.kernel.right_power
        return self._map_rows(lambda x: self.kernel.reduce(self.engine.self_kernel(x, exponent).matrix))

    def self_kernel(self, exponent: float = 1) -> Tensor:
        """Return K(x, x)ᵉ of the rows, (n, d, d), in float64."""
        return self._map_rows(lambda x: self.engine.self_kernel(x, exponent).matrix)

    def ranks(self) -> Tensor:
        """Return the rank of K(x, x), (n,): d if all outputs move freely, 0 if none can move."""
        return self._map_rows(lambda x: self.engine.self_kernel(x).rank)

    def zero_gradients(self) -> Tensor:
        """Return which rows have a zero gradient, (n,) booleans: nothing is similar to them."""
        return self.ranks() == 0

    def outputs(self) -> Tensor:
        """Return the network's outputs f(x) of the rows, (n, d).

        Raises:
            ValueError: An output is NaN or infinite; the samples are named.

        """
        return dataset_outputs(self.net, self.data)

    @property
    def engine(self) -> Engine:
        """The engine that computes gradients; the first access traces and checks the model."""
        return self._setup.engine

    def products(self) -> Products:
        """Return the passes of products with the plain matrix of this kernel."""
        d, p = self._setup.row_shape
        kernel = self.kernel
        return Products(
            net=self.net,
            engine=self.engine,
            rows=self.data,
            columns=self.columns,
            left_power=kernel.left_power,
            right_power=kernel.right_power,
            d=d,
            p=p,
            max_memory=self.max_memory,
        )

    def tiles(self, dtype: torch.dtype | None = None) -> Tiles:
        """Return all pairs of the plain matrix, to be visited strip by strip; in `gram.dtype` if None."""
        return Tiles(
            engine=self.engine,
            rows=self.data,
            columns=self.columns,
            kernel=self.kernel,
            d=self.d,
            dtype=dtype or self.dtype,
            max_memory=self.max_memory,
            bytes_per_sample=self._setup.feature_bytes(),
            zero_gradient_log=ZeroGradientLog(),
        )

    def _map_strips(self, reduce: Callable[[Strip], Any], needs_centering: bool) -> Any:
        needs_centering = needs_centering or self.centered
        # Centering needs sums over all columns first: gradients that are kept are not computed again for them.
        keep = needs_centering and self._feature_cache is None
        gram = self.with_feature_cache() if keep else self
        with self.net.evaluation_mode():  # what the engine computed while it was selected holds until its end
            return retry_changed_parts(self.engine, lambda: gram._map_tiles(reduce, needs_centering))

    def _map_tiles(self, reduce: Callable[[Strip], Any], needs_centering: bool) -> Any:
        center = self._strip_centering() if needs_centering else None
        # Centering leaves little where all similarities are large: it begins before they are rounded.
        exact_dtype = torch.float32 if self.device.type == "mps" else torch.float64
        strips = self._exact_strips(None if center is None else exact_dtype)
        again = strips.gradient_evaluations / (self.data.n + self.columns.n)
        if again > 8:
            warnings.warn(
                f"max_memory={self.max_memory:_} holds the gradients of few samples, so that each is "
                f"formed {again:.0f} times: with max_memory={self.tiles().cache_bytes:_} once would do.",
                stacklevel=5,
            )

        def show(where: range, exact: Tensor) -> Any:
            return reduce(
                Strip(
                    rows=where,
                    square=self.square,
                    use_centered=self.centered,
                    plain=lambda: exact.to(self.dtype),
                    centered=None if center is None else lambda: center(where, exact).to(self.dtype),
                )
            )

        with self.net.evaluation_mode():
            whole = self._share_columns(strips)
            if whole is None:
                joined = join_results(
                    lambda where: show(where, strips.strip(where)),
                    strips.strips,
                    PAIRS,
                    self,
                    strips.engine.finish_checks,
                )
            else:
                with alone():  # every rank has the strip
                    rows = [range(self.data.n)]
                    joined = join_results(lambda where: show(where, whole), rows, "reduction of pairs")
        strips.zero_gradient_log.warn()
        return joined

    def _share_columns(self, strips: ExactStrips) -> Tensor | None:
        """Return all pairs of few rows with columns that ranks have shared, on every rank; None if rows are shared."""
        parts = None if world_size() == 1 or self.square else strips.column_parts()
        if parts is None or len(parts.spans) < 2:
            return None
        joined: Tensor = join_results(
            lambda span: parts.compute(span).transpose(0, 1).contiguous(),
            parts.spans,
            PAIRS,
            self,
            strips.engine.finish_checks,
        )
        return joined.transpose(0, 1).contiguous()

    def _strip_centering(self) -> Callable[[range, Tensor], Tensor]:
        """Return a function that centers a strip: (places of its rows, plain similarities) -> centered ones."""
        if self.data is self._reference or self.columns is not self._reference:
            pair = self._centering()
            return lambda where, exact: pair.take_rows(where).center(exact)
        reference, grand_mean = self._reference_centering()
        exponent = 1 + self.kernel.left_power + self.kernel.right_power

        def center(where: range, exact: Tensor) -> Tensor:  # a strip holds the sums over the reference set
            own = self.engine.self_kernel(self.data.samples(where), exponent).matrix
            sums, diagonal = exact.sum(1), self.kernel.reduce(own)
            rows = Centering.from_sums(sums, diagonal, self._reference.n, self.dtype, grand_mean)
            return CenteredPair(rows, reference, grand_mean).center(exact)

        return center

    def _exact_strips(self, dtype: torch.dtype | None) -> ExactStrips:
        """Return all pairs by the way that takes fewer operations: features of pairs, or directions of few rows."""
        tiles = self.tiles(dtype)
        kept = self._kept_features()
        if kept is not None and kept.exponent == self.kernel.right_power:
            return replace(tiles, kept=kept)
        whole = self if self._whole is None else self._whole  # a dry run does what the whole matrix will
        if whole._directions_are_cheaper():
            return self._direction_strips(dtype)
        if whole._fits_one_batch():
            return self._joint_strips(tiles)
        plan, engine = whole._layer_plan(), self.engine
        if plan is None or not isinstance(engine, TracedEngine):
            return tiles
        self_kernels = self.self_kernel() if self.d > 1 else None
        return layerwise_strips(self.net, engine, tiles, plan, self_kernels)

    def _fits_one_batch(self) -> bool:
        """Whether samples are so few that the inner products of all their gradients cost less than to whiten these."""
        engine, n = self.engine, self.data.n
        few = self.square and n * self.d <= FEW_GRADIENTS and self.tiles().is_mirrored
        if not few or not isinstance(engine, TracedEngine) or n > self.data.size:
            return False
        return n <= engine.fitting(engine.gradient_batch_size, self.data.samples(range(n)))

    def _joint_strips(self, tiles: Tiles) -> JointStrips:
        return JointStrips(**{field.name: getattr(tiles, field.name) for field in fields(ExactStrips)})

    def _layer_plan(self) -> LayerPlan | None:
        """Return how all pairs are computed layer by layer, None if strips of rows cost less."""
        tiles = self.tiles()
        by_groups = self.square and tiles.is_mirrored and self.kernel.reduce is mean_diagonal
        if not by_groups or tiles.fits or world_size() > 1 or 64 * self.data.n**2 > self.max_memory:
            return None
        parameters = self._setup.parameter_bytes()
        if parameters is None:
            return None
        batch, memory = min(self.data.size, self.engine.batch_size or self.data.size), self.engine.memory
        rest = self.max_memory - memory.fixed_bytes - 64 * self.data.n**2
        sizes = [batch]
        while sizes[-1] >= 2 * FEWEST and not self.data.given:
            sizes.append(sizes[-1] // 2)
        limits = {size: int(0.9 * (rest - size * memory.bytes_per_sample)) for size in sizes}
        plan = plan_layers(parameters, self.data.n, limits)
        if plan is None or PASS * len(plan.groups) * self.data.n >= tiles.gradient_evaluations:
            return None
        return plan

    def _direction_strips(self, dtype: torch.dtype | None) -> DirectionStrips:
        products = self.products()
        return DirectionStrips(
            engine=self.engine,
            rows=self.data,
            columns=self.columns,
            kernel=self.kernel,
            d=self.d,
            dtype=dtype or self.dtype,
            max_memory=self.max_memory,
            zero_gradient_log=ZeroGradientLog(),
            rows_per_strip=max(1, products.vectors_per_pass // self.d),
            column_spans=products.spans(self.columns),
        )

    def _directions_are_cheaper(self) -> bool:
        """Whether rows are so few that a jvp over the columns takes fewer operations than features of the columns."""
        if self.square or self.columns.n < max(FEWEST_COLUMNS, COLUMNS_PER_ROW * self.data.n):
            return False
        strips = len(self._direction_strips(None).strips)
        return self._pair_operations().directions_are_cheaper(self.data.n, strips, self.d)

    def _pair_operations(self) -> PairOperations:
        return self._setup.count_operations(self.kernel, self.columns)

    def _kept_features(self) -> KeptFeatures | None:
        """Return the features of all columns if they are kept, computed now if they were not yet."""
        if self._feature_cache is None:
            return None
        state = self.state_of(self.columns)
        kept = self._feature_cache.get((self.columns,), state)
        whole = self if self._whole is None else self._whole  # a dry run does what the whole matrix will
        if kept is None and whole.tiles().fits:
            kept = retry_changed_parts(self.engine, self._compute_features)
            self._feature_cache.put((self.columns,), state, kept)
        return kept

    def state_of(self, *data: Batches) -> tuple[Any, ...]:
        """Return what changes with the model, the reference set, or these samples: of what is kept, it is the key."""
        return self.net.state(), self._reference.state(), *(part.state() for part in data)

    def _compute_features(self) -> KeptFeatures:
        engine, data, exponent = self.engine, self.columns, self.kernel.right_power
        zero_gradients = ZeroGradientLog()

        def compute(where: range) -> tuple[Tensor, ...]:
            samples = data.samples(where)
            features = engine.features(samples, exponent)
            zero_gradients.note(samples, features.ranks)
            gram = engine.self_kernel(samples).matrix if features.self_gram is None else features.self_gram
            return (gram, *features.tensors)

        with self.net.evaluation_mode():
            gram, *tensors = join_results(compute, data.spans(), "features", self, engine.finish_checks)
        zero_gradients.warn()
        factors = tuple(zip(tensors[1::2], tensors[2::2], strict=True))
        return KeptFeatures(Features(tensors[0], factors, None), gram, exponent, rank_floor(self.net.dtype))

    def _centering(self) -> CenteredPair:
        """Return means and scales of rows and columns, recomputed if the model or the data changed since."""
        plain = self.with_centering(False)
        reference_centering, grand_mean = self._reference_centering()

        def of(data: Batches) -> Centering:
            if data is self._reference:
                return reference_centering
            state = self.state_of(data)
            centering = self._centerings.get("other", data, self.kernel, state)
            if centering is None:
                part = copy.copy(plain)
                part.data, part.columns = data, self._reference
                (sums,) = part._joint_sums((self.kernel,))
                centering = Centering.from_sums(*sums, self._reference.n, self.dtype, grand_mean)
                self._centerings.put("other", data, self.kernel, state, centering)
            return centering

        return CenteredPair(of(self.data), of(self.columns), grand_mean)

    def _reference_centering(self) -> tuple[Centering, Tensor]:
        """Return the centering of the reference set and the grand mean, recomputed if model or data changed."""
        state = self.state_of(self._reference)
        known = self._centerings.get("reference", self._reference, self.kernel, state)
        if known is None:
            reference = self.with_centering(False)
            reference.data = reference.columns = self._reference
            known = self._center_reference(reference._joint_sums((self.kernel,))[0], state)
        return known, known.means.mean()

    def _center_reference(self, sums: RowSums, state: tuple[Any, ...]) -> Centering:
        """Return the centering of the reference set, stored for the present state of model and data."""
        centering = Centering.from_sums(*sums, self._reference.n, self.dtype)
        warn_of_cancellation(centering, sums.diagonal, self.dtype)
        self._centerings.put("reference", self._reference, self.kernel, state, centering)
        return centering

    def _joint_sums(self, kernels: tuple[Kernel, ...]) -> list[RowSums]:
        kept = self._kept_features() if self.square else None
        if kept is not None and all(kernel.linear and not kernel.keeps_blocks for kernel in kernels):
            return kept.sums_and_diagonals(kernels, self.max_memory)
        joint = self.products().sums_and_diagonals(kernels)
        if joint is not None:
            return joint
        plain = self.with_centering(False)
        each = [plain.with_kernel(kernel) for kernel in kernels]
        return [RowSums(gram.exact_row_sums()[:, 0], gram.exact_diagonal()) for gram in each]

    def _refuse_centering(self) -> None:
        kernel = self.kernel
        if not self.centered:
            return
        if kernel.keeps_blocks or not kernel.symmetric:
            raise ValueError(
                "centered=True needs a symmetric kernel with one number a pair, such as likewise.CORRELATION or "
                f"INNER_PRODUCT; found {kernel}. Use centered=False with it."
            )

    def _to_result_dtype(self, values: Tensor) -> Tensor:
        """Return values of the rows, (n, ...), in the dtype of results; raise if they overflow."""
        converted = values.to(self.device, self.dtype)
        if not converted.sum().isfinite():
            refuse_out_of_range(converted, self.data.ids, self.kernel)
        return converted

    def _map_rows(self, function: Callable[[Samples], Tensor]) -> Tensor:
        engine = self.engine
        with self.net.evaluation_mode():
            data, spans = self.data, self.products().spans(self.data)
            return join_results(
                lambda where: function(data.samples(where)), spans, "samples", self, engine.finish_checks
            )

    def _column_weights(self, weights: Tensor | None) -> Tensor:
        m = self.columns.n
        if weights is None:
            return torch.ones(m, 1, dtype=torch.float64)
        if weights.dim() not in (1, 2) or len(weights) != m:
            raise ValueError(f"weights must be (m,) or (m, c) with m = {m}, found {tuple(weights.shape)}.")
        return weights.reshape(m, -1).to(accumulation_dtype(weights))


def dataset_outputs(net: Network, data: Batches, *, masked: bool = False, size: int | None = None) -> Tensor:
    """Return the network's outputs f(x) of all samples, (n, d); one forward pass, no gradients.

    Args:
        net: The network.
        data: The samples.
        masked: Accept outputs of -infinity: logits of classes that are ruled out.
        size: Samples that the model is called on at most, as memory allows; the data's batches if None.

    """

    def outputs(where: range) -> Tensor:
        parts = data.samples(where).split(size or len(where))
        return torch.cat([finite_outputs(net, part, masked=masked) for part in parts])

    with net.evaluation_mode():
        return join_results(outputs, data.spans(), "outputs", net)


def finite_outputs(net: Network, samples: Samples, *, masked: bool = False) -> Tensor:
    """Return f(x) of samples, (n, d), or name those for which it is NaN or infinite; call it while evaluating."""
    outputs = net.function({}, samples.inputs, samples.labels, samples.ids)
    refuse_infinite_outputs(outputs, samples.ids, masked=masked)
    return outputs


def count_scores(net: Network, samples: Samples) -> int | None:
    """Return how many outputs the model has, whatever the readout; None where only the readout understands them."""
    whole = net.with_readout(all_outputs)
    with whole.evaluation_mode():
        returned = whole.call_model({}, samples.inputs)
        if not has_scores(returned):
            return None
        return whole.select_outputs(returned, samples.inputs, samples.labels, samples.ids).shape[1]


def refuse_infinite_outputs(outputs: Tensor, ids: Tensor, *, masked: bool) -> None:
    """Raise if outputs are NaN or infinite, and name the samples; -infinity is accepted where classes are masked."""
    finite = outputs < torch.inf if masked else outputs.isfinite()
    if not finite.all():
        bad = ids[~finite.all(1).to(ids.device)]
        raise ValueError(
            f"The outputs of {counted(len(bad), 'sample')} are not finite, the first with ids {bad[:5].tolist()}, "
            "and would spread to the means of others: look at their inputs and labels, or leave them out."
        )


class _Setup:
    """The engine of a network on a data set, made once for all matrices that share it."""

    def __init__(
        self, net: Network, data: Batches, engine: EngineName | Engine, max_memory: int, square: bool
    ) -> None:
        self._net, self._data, self._asked, self._max_memory = net, data, engine, max_memory
        self._square = square
        self.of_network = not isinstance(engine, Engine)
        self._engine: Engine | None = None
        self._row_shape: tuple[int, int] | None = None
        self._feature_bytes: int | None = None
        self._forward_multiplications: int | None = None
        self._operations: dict[Kernel, PairOperations] = {}
        self.announced: set[tuple[Hashable, ...]] = set()  # what users were told

    def of(self, net: Network) -> "_Setup":
        """Return the same for other parameters of the model."""
        return _Setup(net, self._data, self._asked, self._max_memory, self._square)

    # Not cached_property: its lock and that of `evaluating` would be taken in either order, by two threads.
    @property
    def engine(self) -> Engine:
        """The engine, once the model was seen to be deterministic and its samples independent."""
        with exclusive:
            if self._engine is None:
                self._engine = self._select()
            return self._engine

    @property
    def gradient_batch_size(self) -> int | None:
        """That of the engine, None before one was selected."""
        return None if self._engine is None else self._engine.gradient_batch_size

    @property
    def row_shape(self) -> tuple[int, int]:
        """The number of outputs d and of parameters p."""
        with exclusive:
            engine = self.engine  # whose selection may tell
            if self._row_shape is None:
                self._row_shape = self._measure(engine)
            return self._row_shape

    def _select(self) -> Engine:
        with self._net.evaluation_mode():
            first, later = self.few_samples()
            outputs, large = first_call(self._net, first)
            d, pair = outputs.shape[1], None
            if large:
                is_traced = self._asked in ("auto", "layers")
                is_all = self._square and self._data.n <= 2
                pair = call_on_pair(self._net, first, outputs, is_all=is_all, record=is_traced)
            else:
                for samples in (first, later):
                    check_independent_samples(self._net.exact(), samples)
            if isinstance(self._asked, Engine):
                return self._asked
            asked = self._asked
            self._row_shape = d, sum(self._net.numels.values())

            def select(limit: int) -> Engine:
                others = None if large and self._data.n <= len(first) else later
                return select_engine(self._net, first, others, asked, limit, pair, d)

            try:
                return select(self._max_memory // 2)
            except MemoryLimitError:  # one sample at a time needs less beside it
                return select(self._max_memory * 7 // 8)

    def feature_bytes(self) -> int:
        """Return the bytes of the features of one sample with its self kernel, measured on the first."""
        with exclusive:
            if self._feature_bytes is None or isinstance(self.engine, TracedEngine):  # which only counts them
                (d, _), first = self.row_shape, self._data.samples(range(1))
                with self._net.evaluation_mode():
                    self._feature_bytes = 8 * d**2 + self.engine.feature_bytes(first, d)
            return self._feature_bytes

    def feature_numbers(self) -> int:
        """Return how many numbers the features of one sample are."""
        (d, _), itemsize = self.row_shape, max(4, self._net.dtype.itemsize)
        return (self.feature_bytes() - 8 * d**2) // itemsize

    def forward_multiplications(self) -> int:
        """Return the multiplications of a forward pass of one sample, counted."""
        with exclusive:
            if self._forward_multiplications is None:
                with self._net.evaluation_mode(), warnings.catch_warnings():  # as below
                    self._forward_multiplications = count_forward(self._net, self._data.samples(range(1)))[1]
            return self._forward_multiplications

    def parameter_bytes(self) -> dict[str, ParameterBytes] | None:
        """Return what the gradient of each parameter takes, of one sample; None if they cannot be taken alone."""
        with exclusive:
            engine, first, (d, _) = self.engine, self._data.samples(range(1)), self.row_shape
            if not isinstance(engine, TracedEngine):
                return None
            # Counted each time: gradients may turn out to come in other parts.
            with self._net.evaluation_mode():
                itemsize, kept = max(4, self._net.dtype.itemsize), engine.retained_bytes(first, d)
                entries = engine.feature_entries(first, d).items()
            return {name: ParameterBytes(itemsize * count, kept.get(name)) for name, count in entries}

    def count_operations(self, kernel: Kernel, columns: Batches) -> PairOperations:
        """Return what columns cost when they are compared with few rows, counted on two of them."""
        with exclusive:
            if kernel not in self._operations:
                engine, some = self.engine, columns.samples(range(min(2, columns.n)))
                with (
                    self._net.evaluation_mode(),
                    warnings.catch_warnings(),
                ):  # counting imports what changes filters
                    counted = count_pair_operations(engine, some, kernel, self.row_shape[1])
                self._operations[kernel] = counted
            return self._operations[kernel]

    def few_samples(self) -> tuple[Samples, Samples]:
        """Return samples to try the model on: the first three, and three of another batch.

        A model may take only batches that go together, so the two are not mixed.
        """
        data, generator = self._data, torch.Generator().manual_seed(0)
        spans = data.spans() if data.given else [range(data.n)]
        drawn = 1 + int(torch.randint(len(spans) - 1, (), generator=generator)) if spans[1:] else 0
        places = [
            spans[drawn].start + i for i in torch.randperm(len(spans[drawn]), generator=generator).tolist()
        ]
        later = data.take([i for i in places if i > 2][:3] or [0])
        return data.samples(range(min(3, data.n))), later.samples(range(later.n))

    def _measure(self, engine: Engine) -> tuple[int, int]:
        first = self._data.samples(range(1))
        with self._net.evaluation_mode():
            if not self.of_network:
                rows = engine.rows(first, 0).rows
                return rows.shape[1], rows.shape[2]
            d = self._net.function({}, first.inputs, first.labels, first.ids).shape[1]
        return d, sum(self._net.numels.values())


def retry_changed_parts(
    engine: Engine, function: Callable[[], Any], forget: Callable[[], object] = lambda: None
) -> Any:
    """Return function(), called again if gradients turned out to come in other parts than those before, on any rank.

    Args:
        engine: Computes the gradients; of which none are factored the second time.
        function: What to compute.
        forget: Called before the second time, to drop what the first has stored.

    """
    try:
        return function()
    except (PartsChangedError, RemoteError) as problem:
        if not is_error(problem, PartsChangedError):
            raise
    forget()
    engine.form_all_parts()
    return function()


def _known_engine(engine: EngineName | Engine) -> EngineName | Engine:
    if isinstance(engine, Engine):
        return engine
    return cast(EngineName, check_choice("engine", engine, ("auto", "layers", "autograd")))


def _check_kernel(kernel: Any) -> Kernel:
    return cast(Kernel, check_type("kernel", kernel, Kernel, "a Kernel such as likewise.CORRELATION"))


def _column_batches(columns: Any, data: Batches) -> Batches:
    """Return the columns as batches; a table whose columns are not those of the rows' table is refused."""
    try:
        found = batches(columns)
    except (TypeError, ValueError) as error:
        error.add_note("This is about the columns.")
        raise
    if None not in (data.columns, found.columns) and data.columns != found.columns:
        there, here = (", ".join(names[:20]) for names in (found.columns or (), data.columns or ()))
        raise ValueError(
            f"The rows are a table of {here}, the columns one of {there}: which order does the model take? Give both "
            "in that order, table[[...]], or on the command line --columns."
        )
    return found
