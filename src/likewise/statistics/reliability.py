"""Reliability of predictions: how close an input is to the training data, and whether similar samples agree.

`calibrate` turns these ingredients, on held-out data, into the probability that a prediction is right.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from likewise.checks import check_integer, check_tensor, describe
from likewise.gram import GramMatrix, SketchOption, Strip, SumReducer, pair_source
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
from likewise.torch_state import preserve_generators

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
    sketch: SketchOption = "auto",
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
        sketch: Numbers per sample of the random projections that are compared; None: gradients; "auto": gradients if
            that is cheap, else 1024 numbers (`likewise.SketchNotice`).

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


FEWEST = 50
UNSEEN = 0.01  # share of the held-out predictions that are less close than what the calibration applies to
SHIFTED = 0.05  # share of predictions beyond that from which a warning is given
BY_NEIGHBORS = 0.4  # weight of the log-odds by all ingredients; the rest is by the confidence alone
TEMPERATURES = 0.1, 10.0
SMALLEST = 1e-30  # probability
ROUNDING = 1e-9  # of the spread of an ingredient


class CalibrationWarning(UserWarning):
    """Many inputs are unlike those calibrated on; `Calibration.applies` is False for these.

    Example:
        >>> import torch, likewise as lw
        >>> import warnings
        >>> share, classes = torch.linspace(0, 1, 60), torch.zeros(60, dtype=torch.long)
        >>> held_out = lw.Reliability(share, share, 1 - share, classes, share)
        >>> calibration = lw.calibrate(held_out, torch.arange(60) % 2)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     _ = calibration(held_out._replace(closeness=share - 2))
        >>> [found.category.__name__ for found in caught]
        ['CalibrationWarning']

    """


class Level(NamedTuple):
    """Held-out predictions of about the same expected quality."""

    expected: float  # mean of what was expected of them
    found: float  # share that was right, or mean error
    low: float  # 95 % interval of it, by their number
    high: float
    samples: int


class Calibration:
    """The probability that a prediction is right, or for values the expected size of its error.

    Call it with the Reliability of other predictions; `levels` shows the results on the held-out ones. The log-odds of
    being right are a weighted mean: 40 % from all ingredients, 60 % from the network's confidence alone, at the
    `temperature` at which held-out labels are most likely. Each fails under shifts that the other survives. If an input
    is less similar to the training data than 99 % of the held-out ones (`applies` is False), nothing like it was seen,
    and neighbors can only lower the confidence. Many such inputs raise a `CalibrationWarning`.

    Example:
        >>> import torch, likewise as lw
        >>> _ = torch.manual_seed(0)
        >>> net, train, held_out = torch.nn.Linear(4, 3), torch.randn(90, 4), torch.randn(80, 4)
        >>> found = lw.reliability(lw.GramMatrix(net, held_out, columns=(train, net(train).argmax(1))))
        >>> calibration = lw.calibrate(found, torch.randint(3, (80,)))      # their true labels
        >>> calibration.levels[0].samples
        10

    """

    def __init__(
        self,
        weights: Tensor,
        scale: tuple[Tensor, Tensor],
        factor: float | None,
        cautious: Tensor | None = None,
        closeness: Tensor | None = None,
        temperature: float | None = None,
    ) -> None:
        self._weights, self._scale, self._factor = weights, scale, factor
        self._cautious = cautious  # weights of the confidence alone, 0 for the others
        self._closeness = torch.zeros(0) if closeness is None else closeness  # of the held-out predictions
        self.temperature = temperature  # of the probabilities; None if there were none
        self.levels: list[Level] = []

    def __repr__(self) -> str:
        seen = self._closeness
        span = f", closeness {float(seen.min()):.3f} to {float(seen.max()):.3f}" if len(seen) else ""
        kind = "chances" if self._factor is None else "errors"
        return f"Calibration({kind}, {len(seen):,} held-out predictions{span})"

    def __call__(self, found: Reliability) -> Tensor:
        """Return the probability that each prediction is right, (n,), or for values its expected error."""
        _check_reliability(found)
        if (found.confidence is None) != (self._factor is not None):
            raise ValueError("Calibrated on classes and applied to values, or the other way round.")
        if self.temperature is not None and found.probabilities is None:
            raise ValueError("Calibrated with the probabilities of all classes, found none: pass them too.")
        self._warn_of_shift(found)
        mean, spread = self._scale
        standard = (_ingredients(found, self.temperature) - mean) / spread
        score = standard @ self._weights[1:] + self._weights[0]
        if self._cautious is not None:
            alone = standard @ self._cautious[1:] + self._cautious[0]
            score = BY_NEIGHBORS * score + (1 - BY_NEIGHBORS) * alone
            score = torch.where(self.applies(found).cpu(), score, torch.minimum(score, alone))
        expected = score.sigmoid() if self._factor is None else self._factor * score.exp()
        return expected.to(found.closeness.device)

    def applies(self, found: Reliability) -> Tensor:
        """Return whether each prediction is as close to the training data as 99 % of the held-out ones, (n,)."""
        closeness = found.closeness.double()
        return closeness >= (self._closeness.quantile(UNSEEN) if len(self._closeness) else -torch.inf)

    def _warn_of_shift(self, found: Reliability) -> None:
        outside = int((~self.applies(found)).sum())
        if outside > SHIFTED * len(found.closeness) and outside >= 5:
            warnings.warn(
                f"{outside} of {len(found.closeness)} inputs are less similar to the training data than 99 % of those "
                "calibrated on: the data have shifted, and the calibration was not measured on such inputs. "
                "Calibration.applies is False for them; calibrate on such data if you can.",
                CalibrationWarning,
                stacklevel=3,
            )


@preserve_generators()  # importing scikit-learn draws from Python's
def calibrate(found: Reliability, truth: Tensor, levels: int = 10) -> Calibration:
    """Fit a Calibration to held-out predictions whose true labels are known.

    Fits a logistic regression on closeness, agreement, shift and the network's confidence at the best temperature, and
    one on this confidence alone; `Calibration` describes how they are combined. For values, a linear regression
    predicts the logarithm of the error, so the result is an expected error, larger for less reliable predictions. Pass
    at least 50 held-out samples, better 500; levels have intervals. Makes no pass over the data.

    Args:
        found: The result of `reliability` for held-out inputs.
        truth: (n,) their true labels, or (n, q) values.
        levels: Number of groups in `Calibration.levels`, each with the measured share or error.

    Returns:
        A function of a Reliability: (n,) probabilities of being right, or for values expected errors.

    Example:
        >>> import torch, likewise as lw
        >>> _ = torch.manual_seed(0)
        >>> net, train, held_out = torch.nn.Linear(4, 3), torch.randn(90, 4), torch.randn(80, 4)
        >>> found = lw.reliability(lw.GramMatrix(net, held_out, columns=(train, net(train).argmax(1))))
        >>> calibration = lw.calibrate(found, torch.randint(3, (80,)))      # their true labels
        >>> calibration(found).shape
        torch.Size([80])

    """
    levels = check_integer("levels", levels, 1)
    values = _check_truth(found, truth)
    temperature = None if found.probabilities is None else _fit_temperature(found.probabilities, values[:, 0])
    features = _ingredients(found, temperature)
    spread = features.std(0, correction=0)
    # What is the same for all held-out predictions says nothing about others.
    spread[spread < ROUNDING] = math.inf
    scale = features.mean(0), spread
    standard = (features - scale[0]) / scale[1]
    if found.confidence is not None:
        outcome = (found.prediction.cpu() == values[:, 0]).double()
        weights, cautious = _fit_logistic(standard, outcome), _fit_logistic(standard[:, 3:], outcome)
        zeros = torch.zeros(3, dtype=cautious.dtype)  # of closeness, agreement and shift
        alone = torch.cat([cautious[:1], zeros, cautious[1:]])
        calibration = Calibration(weights, scale, None, alone, found.closeness.double().cpu(), temperature)
    else:
        outcome = (found.prediction.cpu().double() - values).norm(dim=1)
        weights = _fit_least_squares(standard, outcome.clamp(min=1e-9 * float(outcome.max()) + 1e-300).log())
        raw = Calibration(weights, scale, 1.0)(found).cpu()
        factor = float(outcome.sum() / raw.sum())
        calibration = Calibration(weights, scale, factor, closeness=found.closeness.double().cpu())
    calibration.levels = _held_out_levels(
        calibration(found).cpu(), outcome, levels, shares=found.confidence is not None
    )
    return calibration


def _check_truth(found: Reliability, truth: Tensor) -> Tensor:
    """Return true labels as numbers, (n, q); raise if they do not fit."""
    _check_reliability(found)
    n, truth = len(found.closeness), check_tensor("truth", truth, finite=False)
    if truth.dim() == 0 or len(truth) != n:
        given = len(truth) if truth.dim() else 1
        raise ValueError(
            f"truth must hold one label per prediction: found {given} true labels for {n} predictions."
        )
    values = truth.double().cpu().reshape(n, -1)
    width = 1 if found.confidence is not None else found.prediction.shape[1]
    if values.shape[1] != width or not values.isfinite().all():
        raise ValueError(
            f"truth must be {width} finite number{'s' if width > 1 else ''} per sample, found "
            f"{tuple(truth.shape)}, {int((~values.isfinite()).sum())} of them not finite."
        )
    if n < FEWEST:
        raise ValueError(f"Only {n} held-out predictions found: pass at least {FEWEST}, better 500.")
    return values


def _ingredients(found: Reliability, temperature: float | None) -> Tensor:
    """Return them as columns, (n, 3 or 4), on scales where equal steps weigh the same."""
    parts = {
        "closeness": found.closeness,
        "agreement": _log_odds(found.agreement),
        "shift": (found.shift.double() + 1e-3).log(),
    }
    if found.confidence is not None:
        confidence = found.confidence
        if found.probabilities is not None and temperature is not None:
            confidence = (_logarithms(found.probabilities) / temperature).softmax(1).max(1).values
        parts["confidence"] = _log_odds(confidence)
    unknown = [name for name, part in parts.items() if part.isnan().any()]
    if unknown:
        raise ValueError(
            f"Some predictions have NaN for {' and '.join(unknown)}, so their probability would be NaN. An index with "
            "more than 64 outputs per sample does not store them and has no shift: use likewise.reliability(gram)."
        )
    return torch.stack([part.double().cpu() for part in parts.values()], 1)


def _fit_temperature(probabilities: Tensor, classes: Tensor) -> float:
    """Return the temperature at which the true classes are most likely; classes the network lacks are skipped."""
    with warnings.catch_warnings():  # importing it changes their filters
        from scipy.optimize import minimize_scalar

    known = (classes >= 0) & (classes < probabilities.shape[1]) & (classes == classes.round())
    logits, truth = _logarithms(probabilities)[known], classes[known].long()
    if not len(truth):
        return 1.0

    def loss(temperature: float) -> float:
        return float(cross_entropy(logits / math.exp(temperature), truth))

    bounds = tuple(math.log(end) for end in TEMPERATURES)
    return math.exp(minimize_scalar(loss, bounds=bounds, method="bounded").x)


def _logarithms(probabilities: Tensor) -> Tensor:
    return probabilities.double().cpu().clamp(min=SMALLEST).log()


def _log_odds(share: Tensor) -> Tensor:
    return share.double().clamp(1e-4, 1 - 1e-4).logit()


def _fit_logistic(features: Tensor, right: Tensor) -> Tensor:
    with warnings.catch_warnings():  # importing it changes their filters
        from sklearn.linear_model import LogisticRegression

    if right.min() == right.max():  # all right, or all wrong: nothing to separate
        share = (right.sum() + 0.5) / (len(right) + 1)
        return torch.cat([share.logit()[None], torch.zeros(features.shape[1], dtype=torch.float64)])
    fitted = LogisticRegression(C=1.0).fit(features.numpy(), right.numpy())
    return torch.tensor(np.concatenate([fitted.intercept_, fitted.coef_[0]]))


def _fit_least_squares(features: Tensor, target: Tensor) -> Tensor:
    """Return weights with fixed signs: evidence for a prediction never increases its expected error."""
    from scipy.optimize import nnls

    signs = torch.tensor([-1.0, -1.0, 1.0], dtype=torch.float64)  # closeness, agreement, shift
    found, _ = nnls((features * signs).numpy(), (target - target.mean()).numpy())
    return torch.cat([target.mean()[None], torch.tensor(found) * signs])


def _check_reliability(found: Reliability) -> None:
    if not isinstance(found, Reliability):
        raise TypeError(f"found must be a result of likewise.reliability(gram), found {describe(found)}.")


def wilson_interval(hits: int, n: int) -> tuple[float, float, float]:
    """Return the share of hits among n and its 95 % interval by Wilson; NaN, 0 and 1 if n is 0."""
    from scipy.stats import binomtest

    if n == 0:
        return float("nan"), 0.0, 1.0
    interval = binomtest(hits, n).proportion_ci(confidence_level=0.95, method="wilson")
    return hits / n, float(interval.low), float(interval.high)


def _held_out_levels(expected: Tensor, outcome: Tensor, levels: int, shares: bool) -> list[Level]:
    found = []
    for places in expected.argsort().tensor_split(min(levels, len(expected) // 10)):
        part, count = outcome[places], len(places)
        mean, half = float(part.mean()), 1.96 * float(part.std()) / count**0.5
        low, high = max(0.0, mean - half), mean + half
        if shares:
            mean, low, high = wilson_interval(int(part.sum()), count)
        found.append(Level(float(expected[places].mean()), mean, low, high, count))
    return found
