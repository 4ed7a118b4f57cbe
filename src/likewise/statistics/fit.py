"""Does the network tell the samples apart as far as their labels need? (sec. 4.4)"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from likewise.gram import GramMatrix
from likewise.kernels import CORRELATION, INNER_PRODUCT
from likewise.statistics.density import soft_neighbors
from likewise.statistics.targets import given_labels, numeric

Verdict = Literal["underfit", "fit", "overfit"]


class FitQuality(NamedTuple):
    """The number of neighbors and how much their labels vary."""

    neighbors: Tensor  # (n,) N_S: near 1 if the network can set this sample's output alone
    label_variance: Tensor  # (n,) variance of the labels around x over that of all: 0 pure, 1 as mixed
    verdict: Verdict


def fit_quality(
    gram: GramMatrix, labels: Tensor | None = None, alone: float = 2, mixed: float = 0.5
) -> FitQuality:
    """Return neighbors, label variance around each sample, and what they say together.

    "overfit": half of the samples have fewer than `alone` neighbors, themselves included, so any
    label can be learned by heart. "underfit": neighborhoods are no purer than `mixed` of the whole
    data set, so the network cannot tell apart what has different labels. The label variance is
    E_k[y²] − E_k[y]² with weights k^I(x, ·), summed over classes or components, relative to the
    whole. Weights can be negative: the variance is kept at 0 or above. Two passes each.
    """
    found = given_labels(gram, labels)
    if found is None:
        raise ValueError("Labels are needed: pass them, or give the data as (X, y).")
    y = numeric(found)
    inner = gram.with_kernel(INNER_PRODUCT)
    sums = inner.row_sums(torch.cat([torch.ones(len(y), 1).to(y), y, y.square()], 1)).double().cpu()
    total, first, second = sums.split([1, y.shape[1], y.shape[1]], dim=1)
    weight = torch.where(total == 0, torch.inf, total)
    local = (second / weight - (first / weight).square()).sum(1).clamp(min=0)
    overall = y.var(0, correction=0).sum()
    variance = (local / overall if overall > 0 else torch.zeros_like(local)).to(gram.dtype)
    neighbors = soft_neighbors(gram.with_kernel(CORRELATION))
    return FitQuality(neighbors, variance, _verdict(neighbors, variance, alone, mixed))


def _verdict(neighbors: Tensor, variance: Tensor, alone: float, mixed: float) -> Verdict:
    if neighbors.median() < alone:
        return "overfit"
    return "underfit" if variance.median() > mixed else "fit"
