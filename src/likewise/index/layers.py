"""Sketches of gradients layer by layer: projected from two sides, of unit length each, or as Adam would step.

For readouts of one output, such as the log-likelihood of a text. A two-sided projection (LoGra) takes Lᵀ G R of the
gradient G of a matrix, with random signs in L and R, from the inputs and output gradients of the layer: G is never
formed. It consists of blocks of 8 × 8 numbers, and all layers are added up in the same blocks, with signs of their own,
so that E⟨s, s'⟩ = ⟨g, g'⟩. Its error is larger than that of `Sketch`, 1/√width: about four times where one layer of
rank one has all of the gradient, and about the same where many layers share in it; replicates tell.
"""

import hashlib
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from likewise.checks import check_choice, check_number
from likewise.data import Samples
from likewise.engines import GradientParts, RowBlock
from likewise.engines.base import check_finite
from likewise.engines.factors import DenseGradient, ParameterGradient, gram_from_rows
from likewise.gram import GramMatrix, whiten_sketches
from likewise.gram.sketches import REPLICATES, sketch_bytes
from likewise.index.optimizer import AdamMoments, read_moments
from likewise.index.projection import Projected, Projector, fit_buckets
from likewise.model import Network

SIDE = 8  # rows and columns of a block of a two-sided projection
Projection = Literal["signs", "two-sided"]
Unit = Literal["sample", "layer", "matrix"]


class LayerSettings(NamedTuple):
    """How gradients are sketched layer by layer; the defaults are those of `Sketch`."""

    projection: Projection = "signs"
    unit: Unit = "sample"
    moments: AdamMoments | None = None  # of rows; queries are plain
    learning_rate: float | None = None  # the weight of the index beside those of other checkpoints

    def facts(self) -> dict[str, Any]:
        """Return what an index says of them, of those that are not the default."""
        known: dict[str, Any] = {}
        if self.projection != "signs":
            known["method"] = self.projection
        if self.unit != "sample":
            known["unit"] = self.unit
        if self.moments is not None:
            known["optimizer"] = self.moments.describe()
        return known


def read_settings(
    gram: GramMatrix, projection: Any, unit: Any, optimizer_state: Any, learning_rate: Any
) -> LayerSettings:
    """Return checked settings of an index.

    Raises:
        ValueError: The readout has several outputs, and the settings are for one.

    """
    check_choice("projection", projection, ("signs", "two-sided"))
    check_choice("unit", unit, ("sample", "layer", "matrix"))
    rate = None if learning_rate is None else check_number("learning_rate", learning_rate, 0)
    moments = None if optimizer_state is None else read_moments(optimizer_state, gram.net)
    settings = LayerSettings(projection, unit, moments, rate)
    if settings.facts() and gram.d != 1:
        raise ValueError(
            f"projection='two-sided', unit='layer' or 'matrix' and optimizer_state are for readouts of one output, "
            f"such as likewise.sequence_log_likelihood(), and this one has {gram.d}."
        )
    return settings


def hidden_matrices(net: Network) -> tuple[str, ...]:
    """Return the selected parameters of two dimensions or more that are no embedding and not the output layer.

    Tables are those of `nn.Embedding`; the output layer is the one that models of transformers name, if it is not a
    table as well.
    """
    tables: set[int] = set()
    for module in net.model.modules():
        find_head = getattr(module, "get_output_embeddings", None)
        for one in (module, find_head() if callable(find_head) else None):
            if isinstance(one, nn.Embedding) or (isinstance(one, nn.Module) and one is not module):
                tables |= {id(p) for p in one.parameters()}
    every = dict(net.model.named_parameters())
    return tuple(name for name in net.names if every[name].ndim > 1 and id(every[name]) not in tables)


def make_projector(gram: GramMatrix, width: int, seed: int, settings: LayerSettings) -> Projector:
    """Return what projects the rows of a new index.

    Args:
        gram: A matrix of the network.
        width: About how many numbers per sample.
        seed: Of the projection.
        settings: Of layers.

    """
    if not settings.facts():
        return Projector(gram, fit_buckets(width, gram.d), seed)
    blocks = max(1, round(width / SIDE**2 / REPLICATES))
    buckets = (
        REPLICATES * blocks * SIDE**2 if settings.projection == "two-sided" else fit_buckets(width, gram.d)
    )
    return LayerProjector(gram, buckets, seed, settings)


def restore_projector(gram: GramMatrix, facts: Mapping[str, Any]) -> Projector:
    """Return what projects queries as an index says; rows of an index by Adam cannot be projected by it."""
    if not {"method", "unit", "optimizer"} & facts.keys():
        return Projector(gram, facts["buckets"], facts["seed"])
    settings = LayerSettings(facts.get("method", "signs"), facts.get("unit", "sample"))
    return LayerProjector(gram, facts["buckets"], facts["seed"], settings, optimizer=facts.get("optimizer"))


def dependent_buckets(facts: Mapping[str, Any]) -> int:
    """Return how many consecutive numbers of a sketch are not independent: those of a two-sided block."""
    return SIDE**2 if facts.get("method") == "two-sided" else int(facts.get("dependent", 1))


def are_plain(facts: Mapping[str, Any]) -> bool:
    """Whether the similarities of an index are those of plain gradients."""
    return not {"unit", "optimizer"} & facts.keys()


def refuse_exact(facts: Mapping[str, Any], what: str = "exact=True") -> None:
    """Raise if the similarities of an index are not those of plain gradients."""
    if not are_plain(facts):
        raise ValueError(
            f"{what} compares plain gradients, and this index has scaled layers or steps of Adam: leave it out, or "
            "build the index with unit='sample' (--unit sample) and without the state of an optimizer."
        )


class LayerProjector(Projector):
    """Projects gradients layer by layer.

    Args:
        gram: A matrix of the network, with one output.
        buckets: Numbers of a sketch.
        seed: Of the projection.
        settings: How.
        optimizer: What an index says of the moments that its rows were made with, where they are not at hand.

    """

    def __init__(
        self,
        gram: GramMatrix,
        buckets: int,
        seed: int,
        settings: LayerSettings,
        *,
        optimizer: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(gram, buckets, seed)
        self._settings, self._optimizer = settings, optimizer
        self._numels = gram.net.numels
        self._shapes = {name: tuple(value.shape) for name, value in gram.net.parameters.items()}
        if settings.unit == "matrix":
            kept = hidden_matrices(gram.net)
            if not kept:
                raise ValueError(
                    f"unit='matrix' compares gradients of hidden matrices, and none of the {len(self._shapes)} "
                    "selected parameters is one: choose other parameters, or unit='layer'."
                )
            self._shapes = {name: self._shapes[name] for name in kept}
        self._maps: dict[str, tuple[Tensor, Tensor]] = {}

    def compared(self, n: int) -> int:
        """Return how many of n samples are compared exactly: none where sketches are not those of plain gradients."""
        return super().compared(n) if are_plain(self._settings.facts()) else 0

    def facts(self, samples: Samples) -> dict[str, Any]:
        """Return what must be equal for sketches to match."""
        del samples
        text = str((REPLICATES, SIDE, self._sketch.q, self.seed, list(self._shapes.items())))
        draws = torch.randint(0, 2**31, (64,), generator=torch.Generator().manual_seed(self.seed))
        facts = {
            "width": self.width,
            "outputs": self.d,
            "buckets": self._sketch.q,
            "seed": self.seed,
            "layout": hashlib.sha256(text.encode()).hexdigest()[:8],
            "draws": hashlib.sha256(draws.numpy().tobytes()).hexdigest()[:16],
            **self._settings.facts(),
        }
        return facts if self._optimizer is None else {**facts, "optimizer": self._optimizer}

    def project(self, samples: Samples, where: range) -> Projected:
        """Return the sketches of rows: by Adam, where its moments are known."""
        del where
        if self._optimizer is not None and self._settings.moments is None:
            raise ValueError(
                "The rows of this index are preconditioned by the state of an optimizer, which it does not hold: rows "
                "cannot be added; build another index of them, and merge both."
            )
        return self._by_length(samples, lambda part: self._project(part, self._settings.moments))

    def project_query(self, samples: Samples) -> Projected:
        """Return the sketches of plain gradients."""
        return self._by_length(samples, lambda part: self._project(part, None))

    def _bytes_per_sample(self, first: Samples) -> int:
        if self._settings.projection == "two-sided" and self._settings.moments is None:
            return 4 * self.width
        return 3 * sketch_bytes(self.gram.engine, first, self.gram.d)

    def _project(self, samples: Samples, moments: AdamMoments | None) -> Projected:
        (sketches,) = self.gram.engine.map_by_parameter(
            samples,
            self._numels,
            lambda gradients: (self._project_chunk(gradients, moments),),
            reads=self if moments is None else moments,
        )
        check_finite(sketches, samples)
        return Projected(sketches.cpu(), (sketches == 0).all(1).cpu())

    def _project_chunk(
        self, gradients: Mapping[str, ParameterGradient], moments: AdamMoments | None
    ) -> Tensor:
        if not gradients:
            raise ValueError(
                "The readout depends on none of the parameters: there is no gradient to project."
            )
        layers = self._layers(gradients, moments)
        if self._settings.projection == "two-sided":
            return self._sum_two_sided(layers)
        square = torch.zeros(1, 1, 1, device=self.gram.device)
        parts = GradientParts(square, self._size, self._explicit(layers), ())
        return whiten_sketches(self._sketch.project(parts))

    def _layers(
        self, gradients: Mapping[str, ParameterGradient], moments: AdamMoments | None
    ) -> Iterator[tuple[str, ParameterGradient, Tensor | None]]:
        """Yield name, gradient and factor of each parameter: 1 over its length, where each is of unit length.

        A layer whose gradient is rounding beside the longest one, such as that of a bias of attention's keys, which
        moves nothing, gets a factor of 0: it would be noise of unit length.
        """
        factors: dict[str, Tensor] = {}
        if self._settings.unit != "sample":
            layers = self._unscaled(gradients, moments)
            # Of a copy, or each would keep a dense gradient.
            squares = {name: one.part(slice(None)).self_gram()[:, 0, 0] for name, one in layers}
            lengths = torch.stack(list(squares.values())).clamp(min=0).sqrt()
            floor = torch.finfo(self.gram.net.dtype).eps * lengths.amax(0)
            inverse = torch.where(lengths > floor, 1 / lengths, 0)
            factors = dict(zip(squares, inverse, strict=True))
        for name, gradient in self._unscaled(gradients, moments):
            yield name, gradient, factors.get(name)

    def _unscaled(
        self, gradients: Mapping[str, ParameterGradient], moments: AdamMoments | None
    ) -> Iterator[tuple[str, ParameterGradient]]:
        for name in self._shapes:
            gradient = gradients.get(name)
            if moments is not None:
                rows = self._rows(name, gradient, gradients)
                yield name, DenseGradient(moments.update(name, rows)[:, None])
            elif gradient is not None:
                yield name, gradient

    @property
    def _size(self) -> int:
        """How many entries the gradients of all layers have."""
        return sum(self._numels[name] for name in self._shapes)

    def _rows(
        self, name: str, gradient: ParameterGradient | None, others: Mapping[str, ParameterGradient]
    ) -> Tensor:
        """Return (n, numel) gradients of a parameter, 0 where outputs do not depend on it."""
        if gradient is None:
            like = next(iter(others.values())).self_gram()
            return torch.zeros(len(like), self._numels[name], device=like.device)
        rows = gradient.part(slice(None)).rows()[:, 0]
        return rows.to(torch.promote_types(rows.dtype, torch.float32))

    def _explicit(
        self, layers: Iterator[tuple[str, ParameterGradient, Tensor | None]]
    ) -> Iterator[tuple[int, list[RowBlock]]]:
        starts, start = {}, 0
        for name in self._shapes:
            starts[name], start = start, start + self._numels[name]
        for name, gradient, factor in layers:
            rows = gradient.part(slice(None)).rows()  # of a copy, which is dropped
            rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
            if factor is not None:
                rows = rows * factor.to(rows)[:, None, None]
            yield starts[name], [RowBlock(rows, gram_from_rows(rows))]

    def _sum_two_sided(self, layers: Iterator[tuple[str, ParameterGradient, Tensor | None]]) -> Tensor:
        total: Tensor | None = None
        for name, gradient, factor in layers:
            term = gradient.project_two_sided(*self._signs(name, gradient))[:, 0].flatten(1)
            if factor is not None:
                term = term * factor.to(term)[:, None]
            total = term if total is None else total.add_(term)
        assert total is not None
        return normalize(total, dim=1)

    def _signs(self, name: str, gradient: ParameterGradient) -> tuple[Tensor, Tensor]:
        """Return L and R of a parameter, (blocks, rows, 8) and (blocks, columns, 8); drawn once."""
        if name not in self._maps:
            shape, place = self._shapes[name], list(self._shapes).index(name)
            rows, columns = (shape[0], prod(shape[1:])) if shape else (1, 1)
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + place) % 2**63)
            blocks = self._sketch.q // SIDE**2
            dtype = torch.promote_types(gradient.dtype, torch.float32)

            def draw(size: int) -> Tensor:
                signs = torch.randint(0, 2, (blocks, size, SIDE), generator=generator, dtype=torch.int8)
                return (signs * 2 - 1).to(self.gram.device, dtype)

            self._maps[name] = draw(rows), draw(columns)
        return self._maps[name]
