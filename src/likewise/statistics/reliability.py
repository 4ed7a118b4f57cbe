"""How far can a prediction be trusted? Three named ingredients, and what they were worth on held-out data."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from likewise.gram import GramMatrix
from likewise.likeness import likeness
from likewise.readouts import looks_at_label
from likewise.statistics.novelty import closeness, refuse_unbounded
from likewise.statistics.targets import class_chances, given_labels, model_outputs, of_classes

EXPONENT = 8  # of the weights of neighbors: more local than votes on labels


class Reliability(NamedTuple):
    """What speaks for each prediction. Larger is better, but for the shift."""

    density: Tensor  # (n,) mean similarity to the ten most similar training samples, at most 1
    agreement: Tensor  # (n,) in [0, 1]: of neighbors' labels with the prediction
    shift: Tensor  # (n,) ‖ŷ − E_k[ŷ]‖: how far the prediction is from its neighbors' predictions
    prediction: Tensor  # (n,) class numbers, or (n, q) values
    confidence: Tensor | None  # (n,) the network's own probability of its prediction, None for values


def reliability(gram: GramMatrix, labels: Tensor | None = None, sketch: int | None = None) -> Reliability:
    """Return what speaks for the predictions of the rows, by the columns: the training set with its labels.

    Neighbors are weighted by max(likeness, 0)^8, likeness being the similarity less what all training samples
    share. Classes: agreement is the neighbors' share of votes for the predicted class, shift the total
    variation between the probabilities and their mean over neighbors. Values: agreement is exp(−gap), the
    gap that between the prediction and the mean of the neighbors' labels, and shift that to the mean of their
    predictions, both in units of the labels' spread. A data set with itself: each sample is left out of its
    own neighbors. Visits all pairs. `calibrate` turns these into how often such predictions are right.
    """
    refuse_unbounded(gram)
    if gram.centered or not gram.of_network:
        raise ValueError("A GramMatrix of a network with centered=False is needed: centering is done here.")
    if looks_at_label(gram.net.readout):
        raise ValueError("The readout looks at the label, which new inputs lack: use likewise.all_outputs.")
    found = given_labels(gram, labels)
    if found is None:
        raise ValueError("Labels of the columns are needed: pass them, or give columns as (X, y).")
    outputs = model_outputs(gram)
    trained = outputs if gram.square else model_outputs(gram.of_columns())
    classes = of_classes(found, outputs.shape[1])
    chances = None if classes is None else class_chances(torch.cat([outputs, trained]), classes)
    if chances is None:
        return _of_values(gram, sketch, outputs, trained, found.reshape(len(found), -1).double().cpu())
    return _of_classes(gram, sketch, chances[: len(outputs)], chances[len(outputs) :], classes)


def _of_classes(
    gram: GramMatrix, sketch: int | None, chances: Tensor, trained: Tensor, classes: Tensor | None
) -> Reliability:
    assert classes is not None
    count = chances.shape[1]
    density, votes, around = neighbor_means(gram, sketch, one_hot(classes, count).double(), trained)
    confidence, prediction = chances.max(1)
    agreement = votes.gather(1, prediction[:, None])[:, 0]
    shift = (chances - around).abs().sum(1) / 2
    density, agreement, shift, confidence = (
        part.to(gram.dtype) for part in (density, agreement, shift, confidence)
    )
    return Reliability(density, agreement, shift, prediction, confidence)


def _of_values(
    gram: GramMatrix, sketch: int | None, outputs: Tensor, trained: Tensor, labels: Tensor
) -> Reliability:
    if labels.shape[1] != outputs.shape[1]:
        raise ValueError(
            f"Labels have {labels.shape[1]} numbers a sample and outputs {outputs.shape[1]}: they cannot be "
            "compared. Class numbers must be integers below the number of outputs."
        )
    density, known, around = neighbor_means(gram, sketch, labels, trained.double())
    spread = (labels - labels.mean(0)).square().sum(1).mean().sqrt().clamp(min=1e-12)
    gap, shift = ((outputs.double() - part).norm(dim=1) / spread for part in (known, around))
    density, agreement, shift = (part.to(gram.dtype) for part in (density, (-gap).exp(), shift))
    return Reliability(density, agreement, shift, outputs, None)


def neighbor_means(gram: GramMatrix, sketch: int | None, *values: Tensor) -> tuple[Tensor, ...]:
    """Return the density of each row, and the means of these values of the columns over its neighbors."""
    square, joined = gram.square, torch.cat(values, 1)

    def means(where: range, c: Tensor) -> tuple[Tensor, ...]:
        if square:
            rows = torch.arange(len(where), device=c.device)
            c[rows, rows + where.start] = 0
        weights = c.double().clamp_(min=0).pow_(EXPONENT)
        total = weights.sum(1, keepdim=True)
        sums = weights @ joined.to(c.device)
        overall = joined.mean(0).to(c.device)  # of a sample with no neighbor at all
        if square and len(joined) > 1:
            mine = joined[where.start : where.stop].to(c.device)
            overall = (joined.sum(0).to(c.device) - mine) / (len(joined) - 1)
        return (torch.where(total > 0, sums / total.clamp(min=1e-300), overall),)

    density, found = likeness(gram, sketch).map_strips(means, closeness(gram.shape[1], square))
    return density.cpu(), *found.cpu().split([part.shape[1] for part in values], dim=1)
