"""Does the network tell the samples apart as far as their labels need? (sec. 4.4)"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from likewise.gram import GramMatrix
from likewise.kernels import CORRELATION, INNER_PRODUCT
from likewise.statistics.density import soft_neighbors
from likewise.statistics.targets import given_labels, numeric
from likewise.statistics.uncertainty import refuse_centered

Verdict = Literal["underfit", "fit", "overfit"]


class FitQuality(NamedTuple):
    """The number of neighbors and how much their labels vary."""

    neighbors: Tensor  # (n,) N_S: near 1 if the network can set this sample's output alone
    label_variance: Tensor  # (n,) variance of the labels around x, summed over classes or components
    verdict: Verdict
    total_variance: float  # that of all labels, to compare with


def fit_quality(
    gram: GramMatrix,
    labels: Tensor | None = None,
    alone: float = 2,
    crowd: float = 0.5,
    mixed: float = 0.5,
) -> FitQuality:
    """Return neighbors, label variance around each sample, and what they say together; sec. 4.4.

    "overfit": half of the samples have fewer than `alone` neighbors, themselves included, so that any
    label can be learned by heart. "underfit": neighborhoods hold more than a share `crowd` of the data,
    with more than a share `mixed` of its label variance, so that the network cannot tell apart what has
    different labels. The variance is E_k[y²] − E_k[y]² with weights k^I(x, ·), kept at 0 or above since
    weights can be negative. Two passes each. The rule is the paper's; see docs/findings.md for its worth.
    """
    refuse_centered(gram)
    found = given_labels(gram, labels)
    if found is None:
        raise ValueError("Labels are needed: pass them, or give the data as (X, y).")
    y = numeric(found, gram.d).cpu()
    y = y - y.mean(0)  # the variance does not change, and does not drown in a large mean
    inner = gram.with_kernel(INNER_PRODUCT)
    sums = inner.exact_row_sums(torch.cat([torch.ones(len(y), 1).to(y), y, y.square()], 1)).cpu()
    total, first, second = sums.split([1, y.shape[1], y.shape[1]], dim=1)
    weight = torch.where(total == 0, torch.inf, total)
    variance = (second / weight - (first / weight).square()).sum(1).clamp(min=0).to(gram.dtype)
    neighbors = soft_neighbors(gram.with_kernel(CORRELATION))
    overall = float(y.var(0, correction=0).sum())
    share = float(neighbors.median()) / gram.shape[1]
    verdict: Verdict = "fit"
    if float(neighbors.median()) < alone:
        verdict = "overfit"
    elif share > crowd and float(variance.median()) > mixed * overall:
        verdict = "underfit"
    return FitQuality(neighbors, variance, verdict, overall)
