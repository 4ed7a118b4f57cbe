"""Novelty of an input: the share of the training data that is less unusual.

There are three ingredients: similarity to the nearest training samples by the gradients of all parameters, the same by
the inputs of the last layer (features), and the length of the features. Cosines ignore the length, and inputs of
another kind often have longer or shorter features. Each ingredient is compared with that of training samples, each left
out in turn:

    surprise = −log (share of the training samples that are at least as unusual)

with an exponential tail beyond the most unusual 30 %. The surprise of the length is that of the more surprising side,
and counts only above 1, because no usual length is more usual than another. The sum of the surprises is again compared
with that of training samples. docs/uses.md says which cases these choices were made on.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from likewise.checks import check_integer
from likewise.gram import (
    BlockReducer,
    GramMatrix,
    SketchedMatrix,
    SketchOption,
    Strip,
    choose_width,
    pair_source,
)
from likewise.gram.blocks import block_spans, visit_blocks
from likewise.gram.last_layer import LastLayer, last_layer_inputs
from likewise.statistics.neighbors import Largest, merge_largest
from likewise.statistics.targets import refuse_unbounded

NEIGHBORS = 10  # over which closeness is averaged
REFERENCE = 1024  # training samples, each left out in turn, that inputs are compared with
TAIL = 0.3  # share of the reference whose excess sets the scale of the tail
CLOSEST = 1e-4  # smaller novelties are equal up to rounding
USUAL = 1.0  # surprise up to which a length does not count
STEP = 1e-3  # smallest scale of a tail, in logarithms
FEATURES = "features"


@dataclass(frozen=True)
class ClosenessReducer(BlockReducer):
    """The mean plain similarity of each row to its k most similar columns, a sample itself left out."""

    k: int
    own: Tensor | None = None  # the column that each row is, where rows are some of the columns

    def fold(self, total: tuple[Tensor, ...] | None, block: Strip) -> tuple[Tensor, ...]:
        """Return the k most similar columns so far and their similarities, (b, k) each."""
        others = block.without_self(block.plain, -torch.inf)
        if self.own is not None:
            mine = self.own[block.rows.start : block.rows.stop].to(others.device) - block.first_column
            inside = ((mine >= 0) & (mine < others.shape[1])).nonzero()[:, 0]
            others = others.clone()
            others[inside, mine[inside]] = -torch.inf
        return merge_largest(None if total is None else Largest(*total), others, block.first_column, self.k)

    def finish(self, total: tuple[Tensor, ...], block: Strip) -> tuple[Tensor, ...]:
        """Return the means, (b,); 0 where there is no other sample."""
        similarities = total[1]
        return (similarities.mean(1) if self.k else similarities.new_zeros(len(similarities)),)


def novelty(
    gram: GramMatrix,
    k: int = NEIGHBORS,
    *,
    parameters: str | Sequence[str] | None = "auto",
    sketch: SketchOption = "auto",
) -> Tensor:
    """The share of the training data that is less unusual than each input: .992 is more unusual than 99.2 % of it.

    Combines three ingredients, each compared with training samples that are left out in turn: similarity to the nearest
    training samples by the gradients of all parameters, similarity by the inputs of the last layer (features), and the
    length of the features, in both directions (see `likewise.statistics.novelty`). Beyond the most novel training
    sample, that is, above 1 − 1/2048, values only rank. Test data are more novel than training data that a network has
    memorized: use held-out inputs to choose a threshold.

    Visits all pairs once, and the pairs of up to 1,024 training samples with all once more; one forward pass over both.
    Only the first ingredient is used for texts, for activations, and for models without a last linear or convolutional
    layer.

    Args:
        gram: Rows are the inputs in question, columns the training set: lw.GramMatrix(net, new, columns=training).
            Within one data set, a sample is not its own neighbor. Plain or centered makes no difference.
        k: Number of neighbors to average over.
        parameters: "auto": the share above. Anything else returns one number without a reference: 1 − the mean plain
            similarity to the k nearest, by the gradients of the matrix (None: the paper's kernel), of some parameters
            (as for `Network`, such as "last 3 layers"), or by "features", the inputs of the last layer.
        sketch: Numbers per sample of the random projections that are compared; None: gradients; "auto": gradients if
            that is cheap, else 1024 numbers (`likewise.SketchNotice`).

    Returns:
        (n,) from 0 to 1 for "auto". Otherwise at most 2, and 0 if the input equals k training samples to the network.

    Raises:
        ValueError: There are too few training samples to compare with.

    Example:
        >>> import torch, likewise as lw
        >>> train = torch.randn(60, 4), torch.arange(60) % 3
        >>> gram = lw.GramMatrix(torch.nn.Linear(4, 3), torch.randn(5, 4), columns=train)
        >>> lw.novelty(gram).shape
        torch.Size([5])

    """
    refuse_unbounded(gram)
    k = check_integer("k", k, 1)
    least = 2 if parameters == "auto" or gram.square else 1
    if gram.shape[1] < least:
        raise ValueError(
            f"There is no other sample to compare with: pass more than one, found {gram.shape[1]}."
            + ("" if gram.square or parameters is None else " parameters=None needs one only.")
        )
    if parameters == "auto":
        found, reference = _ingredients(gram, k, sketch)
        return novel_share(found, reference).to(gram.device, gram.dtype)
    count = min(k, gram.shape[1] - gram.square)
    if parameters == FEATURES:
        return (1 - _feature_closeness(_features(gram), count)).to(gram.device, gram.dtype)
    chosen = gram if parameters is None else gram.with_parameters(parameters)
    ((closeness,),) = pair_source(chosen, sketch).visit(ClosenessReducer(count))
    return 1 - closeness


class Ingredients(NamedTuple):
    """The ingredients of novelty; the fields after the first are None without features."""

    gradient_novelty: Tensor  # (n,) 1 − mean similarity to the nearest, by gradients
    feature_novelty: Tensor | None = None  # (n,) the same by inputs of the last layer
    feature_length: Tensor | None = None  # (n,) of these


def novel_share(found: Ingredients, reference: Ingredients) -> Tensor:
    """Return the share of the reference that is less unusual, (n,) in float64.

    Args:
        found: Ingredients of inputs.
        reference: Ingredients of training samples, each left out in turn.

    """
    scores = total_surprise(reference, reference)
    return shares_below(total_surprise(found, reference), scores, scale=_tail(scores)[1])


def counted_share(found: Ingredients, reference: Ingredients) -> Tensor:
    """Return the share of the reference that is less unusual by counting, (n,) in float64; 1 beyond all of it."""
    scores = total_surprise(reference, reference).sort().values
    return torch.searchsorted(scores, total_surprise(found, reference)).double() / len(scores)


def total_surprise(found: Ingredients, reference: Ingredients) -> Tensor:
    """Return the sum of the surprises of all ingredients, (n,) in float64, on the CPU; see the module."""
    total = surprise(_log_novelty(found.gradient_novelty), _log_novelty(reference.gradient_novelty))
    if found.feature_novelty is None or found.feature_length is None:
        return total
    if reference.feature_novelty is None or reference.feature_length is None:
        raise ValueError("The inputs have features, but the training samples to compare them with have none.")
    total = total + surprise(_log_novelty(found.feature_novelty), _log_novelty(reference.feature_novelty))
    lengths, known = (
        part.feature_length.double().clamp(min=1e-30).log()  # type: ignore[union-attr]
        for part in (found, reference)
    )
    either = torch.maximum(surprise(lengths, known), surprise(-lengths, -known))
    return total + (either - math.log(2) - USUAL).clamp(min=0)  # two sides


def _log_novelty(values: Tensor) -> Tensor:
    return values.double().clamp(min=CLOSEST).log()


def surprise(values: Tensor, reference: Tensor) -> Tensor:
    """Return −log of the share of the reference that is at least as large as each value, (n,) in float64, on the CPU.

    Equal values count half. Beyond the largest 30 % of the reference, the logarithm falls linearly, by 1 for each mean
    excess of these 30 %.
    """
    values, reference = values.double().cpu(), reference.double().cpu()
    threshold, scale = _tail(reference)
    inside = -torch.log1p(-shares_below(values.clamp(max=threshold), reference, scale=scale))
    return inside + ((values - threshold) / scale).clamp(min=0)


def _tail(reference: Tensor) -> tuple[float, float]:
    """Return where the largest 30 % of the reference begin, and how far beyond they are on average."""
    ordered = reference.double().sort().values
    threshold = ordered[max(0, math.ceil((1 - TAIL) * len(ordered)) - 1)]
    excess = ordered[ordered > threshold] - threshold
    return float(threshold), max(float(excess.mean()) if len(excess) else 0.0, STEP)


def shares_below(values: Tensor, reference: Tensor, *, scale: float) -> Tensor:
    """Return the share of the reference below each value, (n,) in float64, on the CPU, strictly between 0 and 1.

    Equal values count half. Between values of the reference, the share is interpolated, which keeps the order. Beyond
    the m values of the reference, the remaining 1/2m falls off as 1 / (1 + distance / scale).
    """
    known, counts = reference.double().cpu().unique(return_counts=True)
    asked, m = values.double().cpu(), len(reference)
    middles = (counts.cumsum(0) - counts / 2).double() / m
    right = torch.searchsorted(known, asked).clamp(1, max(1, len(known) - 1))
    left = right - 1
    right = right.clamp(max=len(known) - 1)
    gap = (known[right] - known[left]).clamp(min=torch.finfo(torch.float64).tiny)
    along = ((asked - known[left]) / gap).clamp(0, 1)
    inside = middles[left] + along * (middles[right] - middles[left])
    below, above = (known[0] - asked).clamp(min=0), (asked - known[-1]).clamp(min=0)
    low, high = middles[0] / (1 + below / scale), (1 - middles[-1]) / (1 + above / scale)
    return torch.where(asked < known[0], low, torch.where(asked > known[-1], 1 - high, inside))


def closest_cosines(
    rows: Tensor, columns: Iterable[Tensor], k: int, own: Tensor | None = None, height: int = 512
) -> Tensor:
    """Return the mean cosine of each row with its k most similar columns, (n,).

    Args:
        rows: (n, q) of unit length.
        columns: Parts (m, q) of the columns in order, of unit length.
        k: Number of columns to average over; there must be at least this many besides the row itself.
        own: (n,) the column that each row is, which is left out; None if rows are other samples.
        height: Rows to compare at a time.

    """
    best: dict[int, Largest | None] = dict.fromkeys(range(0, len(rows), height))
    start = 0
    for part in columns:
        part = part.to(rows)
        for first, before in best.items():
            here = slice(first, first + height)
            cosines = rows[here] @ part.T
            if own is not None:
                mine = own[here].to(rows.device) - start
                inside = ((mine >= 0) & (mine < len(part))).nonzero()[:, 0]
                cosines[inside, mine[inside]] = -torch.inf
            best[first] = merge_largest(before, cosines, start, k)
        start += len(part)
    return torch.cat([found.values.mean(1) for found in best.values() if found is not None])


def closest_others(vectors: Tensor, k: int) -> Tensor:
    """Return the mean cosine of each sample with its k most similar others, (n,); each pair is compared once.

    Args:
        vectors: (n, q) of unit length.
        k: Number of others to average over; there must be at least this many.

    """

    def compare(here: range, there: range) -> Strip:
        cosines = vectors[here.start : here.stop] @ vectors[there.start : there.stop].T
        return Strip(
            rows=here,
            square=True,
            use_centered=False,
            plain=lambda: cosines,
            centered=None,
            columns=there,
        )

    spans = block_spans(len(vectors), vectors.device)
    ((closeness,),) = visit_blocks(compare, spans, None, [ClosenessReducer(k)], vectors, "features")
    return closeness


def reference_places(m: int) -> Tensor:
    """Return the positions of the training samples to compare with, evenly spaced over all, (r,)."""
    return torch.linspace(0, m - 1, min(m, REFERENCE), dtype=torch.float64).long().unique()


class _Features(NamedTuple):
    rows: Tensor  # (n, q)
    columns: Tensor  # (m, q); the same tensor for a square matrix


def _features(gram: GramMatrix) -> _Features:
    """Return the features of rows and columns."""
    found = _find_features(gram)
    if found is None:
        raise ValueError(
            'parameters="features" compares the inputs of the last linear or convolutional layer, but this model has '
            "none, or does not call it once for all samples: leave parameters out."
        )
    return found


def _find_features(gram: GramMatrix) -> _Features | None:
    if not gram.of_network:
        return None
    layer = LastLayer.find(gram.net, gram.columns.samples(range(min(2, gram.columns.n))))
    if layer is None:
        return None
    size = gram.forward_batch_size
    columns = last_layer_inputs(layer, gram.net, gram.columns, size)
    return _Features(columns if gram.square else last_layer_inputs(layer, gram.net, gram.data, size), columns)


def _feature_closeness(features: _Features, k: int) -> Tensor:
    if features.rows is features.columns:
        return closest_others(normalize(features.rows, dim=1), k)
    rows, columns = (normalize(part, dim=1) for part in features)
    return closest_cosines(rows, [columns], k)


def _ingredients(gram: GramMatrix, k: int, sketch: SketchOption) -> tuple[Ingredients, Ingredients]:
    """Return those of the rows, and of some columns, each left out in turn."""
    m, features = gram.shape[1], _find_features(gram)
    count, left = min(k, m), min(k, m - 1)
    if gram.square:
        ((closeness,),) = pair_source(gram, sketch).visit(ClosenessReducer(left))
        if features is None:
            found = Ingredients(1 - closeness)
        else:
            near = _feature_closeness(features, left)
            found = Ingredients(1 - closeness, 1 - near, features.rows.norm(dim=1))
        return found, found
    places, left_out = reference_places(m), gram.of_columns(reference_places)
    width = choose_width(gram, sketch)
    if width is None:  # few rows may be cheap, and not the reference
        width = choose_width(left_out, sketch)
    if width is None:
        ((closeness,),) = gram.visit(ClosenessReducer(count))
        ((known,),) = left_out.visit(ClosenessReducer(left, places))
    else:
        source = SketchedMatrix(gram.with_centering(False), width)
        ((closeness,),) = source.visit(ClosenessReducer(count))
        ((known,),) = source.of_columns(places).visit(ClosenessReducer(left, places))
    if features is None:
        return Ingredients(1 - closeness), Ingredients(1 - known)
    rows, columns = (normalize(part, dim=1) for part in features)
    chosen = places.to(columns.device)
    near = closest_cosines(rows, [columns], count)
    others = closest_cosines(columns[chosen], [columns], left, places)
    lengths = [part.norm(dim=1) for part in features]
    return (
        Ingredients(1 - closeness, 1 - near, lengths[0]),
        Ingredients(1 - known, 1 - others, lengths[1][chosen]),
    )
