"""Over- or underfit: does the network separate samples as far as their labels need, and no further? (sec. 4.4)"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from likewise.checks import check_number
from likewise.gram import (
    GramMatrix,
    Sketch,
    Sketches,
    SketchOption,
    bucket_count,
    choose_width,
    inner_product_sums,
    sketch_rows,
    whiten_sketches,
)
from likewise.gram.matrix import retry_changed_parts
from likewise.gram.strips import PairSource
from likewise.kernels import CORRELATION, INNER_PRODUCT
from likewise.statistics.neighbors import soft_neighbors
from likewise.statistics.reliability import NeighborMeansReducer
from likewise.statistics.targets import (
    class_chances,
    given_labels,
    label_values,
    model_outputs,
    of_classes,
    readout_looks_at_label,
    refuse_centered,
    to_device,
)

Verdict = Literal["underfit", "fit", "overfit"]
UNDERFIT, OVERFIT = 0.05, 0.15  # limits of the share learned minus the share supported
UNDERFIT_VALUES = 0.01  # the same for values, whose noise should not be learned
ALONE = 2  # soft neighbors, the sample included, below which the network can set each output alone
LEARNED = 0.95  # share of the labels from which nothing is left to learn


class FitQuality(NamedTuple):
    """What the network has learned of the labels, and how much of it the neighbors support.

    Attributes:
        neighbors: (n,) N_S: near 1 if the network can set this sample's output alone.
        label_variance: (n,) variance of the labels around x, summed over classes or components.
        verdict: "underfit", "fit" or "overfit".
        total_variance: Variance of all labels, for comparison.
        learned: Share of the labels that the network predicts, for values R²; NaN if it predicts something else.
        supported: The same for predictions by the neighbors' labels, each sample left out.

    Example:
        >>> import torch, likewise as lw
        >>> gram = lw.GramMatrix(torch.nn.Linear(4, 3), (torch.randn(60, 4), torch.arange(60) % 3))
        >>> found = lw.fit_quality(gram)
        >>> bool(found.gap == found.learned - found.supported)
        True

    """

    neighbors: Tensor
    label_variance: Tensor
    verdict: Verdict
    total_variance: float
    learned: float
    supported: float

    @property
    def gap(self) -> float:
        """The share learned that no neighbor supports, an estimate of the gap to new data.

        Negative if neighbors predict better than the network: it could be trained further.
        """
        return self.learned - self.supported

    def __repr__(self) -> str:
        neighbors = f"{float(self.neighbors.median()):.0f} neighbors of {len(self.neighbors)} in the median"
        shares = f"learned {self.learned:.2f}, supported {self.supported:.2f}, gap {self.gap:+.2f}"
        return f"FitQuality({self.verdict}: {shares}; {neighbors})"


def fit_quality(
    gram: GramMatrix,
    labels: Any = None,
    *,
    alone: float = ALONE,
    underfit_below: float | None = None,
    overfit_above: float = OVERFIT,
    sketch: SketchOption = "auto",
) -> FitQuality:
    """Judge whether a network over- or underfits its training data.

    "overfit": more than `overfit_above` of the labels are reproduced by the network but not supported by neighbors; or
    half of the samples have fewer than `alone` neighbors, themselves included (the paper's rule), so that any label can
    be memorized. "underfit": neighbors' labels predict nearly as well as the network, with a difference below
    `underfit_below` (None: .05; for values .01, because a good network does not learn their noise), and less than .95
    of the labels are learned: the network does not use all that it distinguishes. docs/uses.md measures how often the
    verdict is right.

    Wrong labels count as labels; pass the data trained on. Neighbors are weighted by max(centered similarity, 0)^8,
    which visits all pairs. The label variance is the paper's, E_k[y²] − E_k[y]² with weights k^I, at least 0; in most
    networks it is close to that of all labels. Both it and the number of neighbors take two passes, or one pass of
    sketches, from which all of it is estimated then. If the network does not predict the labels, or the readout looks
    at them, `learned` is NaN and only the paper's rule applies.

    Args:
        gram: Plain (not centered), built on the training data, without columns.
        labels: (n,) class numbers, or (n,) or (n, q) values; None uses the labels of the data.
        alone: Median number of neighbors below which the network overfits.
        underfit_below: Difference of learned and supported below which it underfits; None: by the kind of labels.
        overfit_above: Difference above which it overfits.
        sketch: Numbers per sample of the random projections that are compared; None: gradients; "auto": gradients if
            that is cheap, else 1024 numbers (`likewise.SketchNotice`).

    Returns:
        FitQuality with the `verdict` and what it rests on.

    Example:
        >>> import torch, likewise as lw
        >>> gram = lw.GramMatrix(torch.nn.Linear(4, 3), (torch.randn(60, 4), torch.arange(60) % 3))
        >>> lw.fit_quality(gram).verdict in ("underfit", "fit", "overfit")
        True

    """
    refuse_centered(gram)
    alone, overfit_above = check_number("alone", alone), check_number("overfit_above", overfit_above)
    if underfit_below is not None:
        underfit_below = check_number("underfit_below", underfit_below)
    found = given_labels(gram, labels)
    if found is None:
        raise ValueError("Labels are needed: pass them, or give the data as (X, y).")
    if not gram.square:
        raise ValueError("fit_quality needs one data set: build the GramMatrix without columns.")
    given = _Targets.of(gram, found)
    width = choose_width(gram.with_kernel(CORRELATION), sketch)
    neighbors, source, sums = _compare(gram, width)
    y = given.values(gram.d)
    variance, overall = _label_variance(sums, y).to(gram.dtype), float(y.var(0, correction=0).sum())
    learned, supported, classes = _support(source, given)
    verdict: Verdict = "fit"
    if math.isnan(learned - supported):  # the paper's rule is left
        crowd = float(neighbors.median()) > gram.shape[1] / 2
        verdict = "underfit" if crowd and float(variance.median()) > overall / 2 else "fit"
    elif overall > 0:
        usual = UNDERFIT if classes else UNDERFIT_VALUES
        below = usual if underfit_below is None else underfit_below
        verdict = decide_verdict(
            learned, supported, math.inf, underfit_below=below, overfit_above=overfit_above
        )
    if 0 < float(neighbors.median()) < alone:
        verdict = "overfit"
    return to_device(FitQuality(neighbors, variance, verdict, overall, learned, supported), gram.device)


class _Compared(NamedTuple):
    """What the verdict rests on, from gradients or from their sketches."""

    neighbors: Tensor  # (n,) N_S
    source: PairSource  # all pairs
    sums: Callable[[Tensor], Tensor]  # Σ_x' k^I(x, x') w(x') for weights (n, c)


def _compare(gram: GramMatrix, width: int | None) -> _Compared:
    plain, inner = gram.with_kernel(CORRELATION), gram.with_kernel(INNER_PRODUCT)
    if width is None:  # sums and pairs then come from one pass, where gradients fit into memory
        plain = plain.with_feature_cache()
        inner = plain.with_kernel(INNER_PRODUCT)
        return _Compared(soft_neighbors(plain), plain, inner.exact_row_sums)
    sketch = Sketch(bucket_count(width, gram.d), 0)
    sketched = retry_changed_parts(gram.engine, lambda: sketch_rows(plain, sketch))
    pairs = Sketches(whiten_sketches(sketched).to(gram.device), max_memory=gram.max_memory)
    neighbors = (pairs @ torch.ones(gram.shape[0], 1))[:, 0].to(gram.dtype)
    return _Compared(neighbors, pairs, partial(inner_product_sums, sketched))


def explained_shares(classes: Tensor, chances: Tensor, votes: Tensor) -> tuple[float, float]:
    """Return the share of labels that the network predicts, and the share that neighbors' votes predict."""
    learned, supported = (float((guess.argmax(1) == classes).double().mean()) for guess in (chances, votes))
    return learned, supported


def decide_verdict(
    learned: float,
    supported: float,
    neighbors: float,
    *,
    alone: float = ALONE,
    underfit_below: float = UNDERFIT,
    overfit_above: float = OVERFIT,
) -> Verdict:
    """Return the verdict for these shares learned and supported, and this many neighbors (N_S)."""
    gap = learned - supported
    if gap > overfit_above or 0 < neighbors < alone:
        return "overfit"
    return "underfit" if gap < underfit_below and learned < LEARNED else "fit"


class _Targets(NamedTuple):
    """Labels, and what the network predicts; the fields after the first are None if its neighbors know the label."""

    labels: Tensor
    outputs: Tensor | None = None  # (n, q)
    classes: Tensor | None = None  # (n,) class numbers, if the labels are classes

    @classmethod
    def of(cls, gram: GramMatrix, labels: Tensor) -> "_Targets":
        """Return those of labels, (n, ...)."""
        if not gram.of_network or readout_looks_at_label(gram):
            return cls(labels)
        outputs = model_outputs(gram)
        return cls(labels, outputs, of_classes(labels, outputs.shape[1]))

    def values(self, d: int) -> Tensor:
        """Return the labels as numbers to average, (n, q): classes one-hot, integers of one output as they are."""
        return label_values(self.labels, d, None if self.outputs is None else self.outputs.shape[1]).cpu()


def _label_variance(sums: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
    """Return the variance of labels (n, q) around each sample, weighted by k^I, (n,)."""
    y = y - y.mean(0)  # the variance does not change, and does not drown in a large mean
    squares = y.square().sum(1, keepdim=True)  # their sum over components is all that is needed
    found = sums(torch.cat([torch.ones(len(y), 1).to(y), y, squares], 1)).cpu()
    total, first, second = found.split([1, y.shape[1], 1], dim=1)
    weight = torch.where(total == 0, torch.inf, total)
    means = first / weight
    return ((second / weight)[:, 0] - means.square().sum(1)).clamp(min=0)


def _support(source: PairSource, given: _Targets) -> tuple[float, float, bool]:
    """Return the share of labels that outputs predict, the share that neighbors' labels do, and if they are classes."""
    labels, outputs, classes = given
    if outputs is None:
        return math.nan, math.nan, True
    chances = None if classes is None else class_chances(outputs, classes)
    if classes is not None and chances is not None:
        members = torch.nn.functional.one_hot(classes, chances.shape[1]).double()
        votes = _neighbor_means(source, members)
        return *explained_shares(classes, chances, votes), True
    y = labels.reshape(len(labels), -1).double().cpu()
    around = _neighbor_means(source, y)
    spread = (y - y.mean(0)).square().sum().clamp(min=1e-300)
    supported = max(0.0, float(1 - (y - around).square().sum() / spread))
    if y.shape[1] != outputs.shape[1]:
        return math.nan, supported, False  # the outputs do not predict the labels
    return max(0.0, float(1 - (y - outputs.double()).square().sum() / spread)), supported, False


def _neighbor_means(source: PairSource, values: Tensor) -> Tensor:
    ((means,),) = source.visit(NeighborMeansReducer(values))
    return means.cpu()
