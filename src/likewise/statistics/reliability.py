"""Reliability of predictions: how close an input is to the training data, and whether similar samples agree.

`calibrate` turns these ingredients into probabilities that predictions are right.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from likewise.gram import GramMatrix, Strip, SumReducer, pair_source
from likewise.linalg import product_by_chunks
from likewise.statistics.novelty import NEIGHBORS, ClosenessReducer
from likewise.statistics.targets import (
    class_chances,
    given_labels,
    model_outputs,
    of_classes,
    readout_looks_at_label,
    refuse_unbounded,
    to_device,
)

EXPONENT = 8  # of the weights of neighbors: more local than votes on labels


class Reliability(NamedTuple):
    """Evidence for each prediction. Larger is better, except for the shift.

    Attributes:
        closeness: (n,) mean similarity to the ten most similar training samples: 1 − novelty(gram, parameters=None).
        agreement: (n,) in [0, 1]: agreement of the neighbors' labels with the prediction.
        shift: (n,) how far the prediction is from its neighbors' predictions.
        prediction: (n,) class numbers, or (n, q) values.
        confidence: (n,) the network's own probability of its prediction; None for values.
        probabilities: (n, c) of all classes, from which `calibrate` fits a temperature; None for values.

    Example:
        >>> import torch, likewise as lw
        >>> train = torch.randn(60, 4), torch.arange(60) % 3
        >>> gram = lw.GramMatrix(torch.nn.Linear(4, 3), torch.randn(5, 4), columns=train)
        >>> lw.reliability(gram)._fields[:3]
        ('closeness', 'agreement', 'shift')

    """

    closeness: Tensor
    agreement: Tensor
    shift: Tensor
    prediction: Tensor
    confidence: Tensor | None
    probabilities: Tensor | None = None


@dataclass(frozen=True)
class NeighborMeansReducer(SumReducer):
    """The mean of values of the columns over each row's neighbors, weighted by max(centered, 0)^8."""

    values: Tensor  # (m, q)
    centered: ClassVar[bool] = True

    def terms(self, block: Strip) -> tuple[Tensor, ...]:
        """Return weighted sums of the values, (b, q), and the sums of the weights, (b, 1)."""
        weights = block.without_self(block.positive_power(EXPONENT, centered=True), 0)
        return product_by_chunks(weights, self.values[block.column_places]), weights.sum(1, keepdim=True)

    def finish(self, total: tuple[Tensor, ...], block: Strip) -> tuple[Tensor, ...]:
        """Return the means, (b, q) in float64; of a sample with no neighbor at all, that of all others."""
        sums, weight = total
        values = self.values.to(sums)
        overall = values.mean(0)
        if block.square and len(values) > 1:
            mine = values[block.rows.start : block.rows.stop]
            overall = (values.sum(0) - mine) / (len(values) - 1)
        return (torch.where(weight > 0, sums / weight.clamp(min=1e-300), overall),)


def reliability(
    gram: GramMatrix,
    labels: Any = None,
    *,
    parameters: str | Sequence[str] | None = None,
    sketch: int | None = None,
) -> Reliability:
    """Evidence for the predictions of the rows from the columns, the training set with its labels.

    Neighbors are weighted by max(centered similarity, 0)^8; a sample is not its own neighbor. For classes, agreement is
    the neighbors' share of votes for the predicted class, and shift is the total variation between the probabilities
    and their mean over neighbors. For values, agreement is exp(−gap), with the gap between the prediction and the mean
    of the neighbors' labels, and shift is the gap to the mean of their predictions, both in units of the labels'
    spread. Visits all pairs. `calibrate` turns these into probabilities that predictions are right.

    Args:
        gram: Rows are the predictions in question, columns the training set. Plain or centered makes no
            difference: closeness is plain, weights are centered.
        labels: Labels of the columns; None uses the labels of the data.
        parameters: Parameters whose gradients are compared, as for `Network`; None uses those of the matrix. The "last
            3 layers" err less in the worst case if data have shifted, all parameters less on tables (docs/uses.md).
        sketch: Estimate from random projections with this many numbers per sample.

    Returns:
        Reliability; each field is (n,), except for the probabilities, (n, c).

    Example:
        >>> import torch, likewise as lw
        >>> train = torch.randn(60, 4), torch.arange(60) % 3
        >>> gram = lw.GramMatrix(torch.nn.Linear(4, 3), torch.randn(5, 4), columns=train)
        >>> lw.reliability(gram).agreement.shape
        torch.Size([5])

    """
    refuse_unbounded(gram)
    if not gram.of_network:
        raise ValueError(
            "reliability needs a GramMatrix of a network's gradients: activations make no predictions."
        )
    if readout_looks_at_label(gram):
        raise ValueError("The readout looks at the label, which new inputs lack: use likewise.all_outputs.")
    found = given_labels(gram, labels)
    if found is None:
        raise ValueError("Labels of the columns are needed: pass them, or give columns as (X, y).")
    targets = PredictionTargets.of(
        model_outputs(gram), None if gram.square else model_outputs(gram.of_columns()), found
    )
    count = min(NEIGHBORS, gram.shape[1] - gram.square)
    chosen = gram if parameters is None else gram.with_parameters(parameters)
    (closeness,), (means,) = pair_source(chosen, sketch).visit(
        ClosenessReducer(count), NeighborMeansReducer(targets.values)
    )
    return to_device(targets.reliability(closeness.cpu(), means.cpu(), gram.dtype), gram.device)


@dataclass(frozen=True)
class PredictionTargets:
    """Predictions of the rows, and what is averaged over their neighbors: labels and predictions of the columns."""

    predictions: Tensor  # (n, q) probabilities of classes, or values
    labels: Tensor  # (m, q) one-hot, or values
    column_predictions: Tensor  # (m, q)
    classes: bool

    @classmethod
    def of(cls, outputs: Tensor, column_outputs: Tensor | None, labels: Tensor) -> "PredictionTargets":
        """Return them for outputs (n, d), those of the columns (None: the same) and labels of the columns."""
        trained = outputs if column_outputs is None else column_outputs
        classes = of_classes(labels, outputs.shape[1])
        chances = None if classes is None else class_chances(torch.cat([outputs, trained]), classes)
        if chances is not None and classes is not None:
            return cls.of_classes(chances[: len(outputs)], chances[len(outputs) :], classes)
        return cls.of_values(outputs, trained, labels)

    @classmethod
    def of_classes(cls, chances: Tensor, column_chances: Tensor, classes: Tensor) -> "PredictionTargets":
        """Return those of classes: probabilities (n, c), those of the columns, their class numbers."""
        return cls(chances, one_hot(classes, chances.shape[1]).double(), column_chances, True)

    @classmethod
    def of_values(cls, outputs: Tensor, column_outputs: Tensor, labels: Tensor) -> "PredictionTargets":
        """Return those of values: outputs (n, d), those of the columns, their labels."""
        values = labels.reshape(len(labels), -1).double().cpu()
        if values.shape[1] != outputs.shape[1]:
            raise ValueError(
                f"Labels have {values.shape[1]} numbers per sample and outputs {outputs.shape[1]}: they cannot be "
                "compared. Class numbers must be integers below the number of outputs."
            )
        if not (outputs.isfinite().all() and column_outputs.isfinite().all()):
            raise ValueError(
                "Some outputs are infinite, and values are averaged: use a readout with finite outputs."
            )
        return cls(outputs.double(), values, column_outputs.double(), False)

    @property
    def values(self) -> Tensor:
        """What a NeighborMeansReducer averages, (m, 2q)."""
        return torch.cat([self.labels, self.column_predictions.to(self.labels)], 1)

    def reliability(self, closeness: Tensor, means: Tensor, dtype: torch.dtype) -> Reliability:
        """Return the ingredients, from closeness (n,) and the means of `values` over neighbors (n, 2q)."""
        labels, around = means.split(self.labels.shape[1], dim=1)
        if self.classes:
            confidence, prediction = self.predictions.max(1)
            agreement = labels.gather(1, prediction[:, None])[:, 0]
            shift = (self.predictions - around).abs().sum(1) / 2
            precise = torch.promote_types(dtype, torch.float32)  # small ones count at a high temperature
            return Reliability(
                closeness.to(dtype),
                agreement.to(dtype),
                shift.to(dtype),
                prediction,
                confidence.to(dtype),
                self.predictions.to(precise),
            )
        spread = (self.labels - self.labels.mean(0)).square().sum(1).mean().sqrt().clamp(min=1e-12)
        gap, shift = ((self.predictions - part).norm(dim=1) / spread for part in (labels, around))
        return Reliability(
            closeness.to(dtype), (-gap).exp().to(dtype), shift.to(dtype), self.predictions.to(dtype), None
        )
