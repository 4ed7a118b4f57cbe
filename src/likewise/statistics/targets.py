"""Checks and conversions for statistics: labels, predictions, and which matrices they accept."""

from typing import Any, TypeVar

import torch
from torch import Tensor

from likewise.checks import describe
from likewise.data import Batches, column
from likewise.gram import GramMatrix
from likewise.gram.matrix import count_scores, dataset_outputs
from likewise.model import Network
from likewise.padding import IGNORED
from likewise.readouts import all_outputs, are_chances, reads_text
from likewise.wording import agreeing, counted

MOST_CLASSES = 100_000
LABELS_TRIED = 8  # samples on which a readout is tried with other labels


def refuse_other(gram: GramMatrix) -> None:
    """Raise if this is not a GramMatrix, and say how to build one."""
    if not isinstance(gram, GramMatrix):
        raise TypeError(
            f"Expected a GramMatrix, found {type(gram).__name__}: pass likewise.GramMatrix(model, data), or for new "
            "inputs and training data likewise.GramMatrix(model, new, columns=training)."
        )


def refuse_centered(gram: GramMatrix) -> None:
    """Raise if the matrix is centered: the statistic divides by a sum of gradients, which centering makes zero."""
    refuse_other(gram)
    if gram.centered:
        raise ValueError(
            "Centered gradients sum to zero over the data, so this statistic cannot divide by their sum, and "
            "they do not bound the outputs: build the GramMatrix with centered=False."
        )


def refuse_unbounded(gram: GramMatrix) -> None:
    """Raise if similarities have no largest value to compare with."""
    refuse_other(gram)
    if not gram.kernel.bounded:
        raise ValueError(
            f"This statistic needs similarities of at most 1, and those of {gram.kernel} have no limit: use "
            "gram.with_kernel(likewise.CORRELATION)."
        )


Result = TypeVar("Result", bound=tuple[Any, ...])


def to_device(result: Result, device: torch.device) -> Result:
    """Move the tensors of a NamedTuple to a device: results are where the model is."""
    moved = (value.to(device) if isinstance(value, Tensor) else value for value in result)
    return type(result)(*moved)


def given_labels(gram: GramMatrix, labels: Any) -> Tensor | None:
    """Return the labels of the columns: the given ones, or those of the data."""
    if labels is None:
        known = gram.columns.labels()
        return None if known is None else finite_labels(known)
    found = column("labels", labels)
    if found.dim() == 0 or len(found) != gram.columns.n:
        given = len(found) if found.dim() else 1
        raise ValueError(f"{given} labels for {gram.columns.n} samples: expected one for each.")
    return finite_labels(found)


def finite_labels(labels: Tensor) -> Tensor:
    """Return labels if all are finite real numbers; otherwise raise, naming the samples."""
    if labels.is_complex():
        raise TypeError(f"labels must be real numbers, found {describe(labels)}: take labels.real.")
    wrong = (~labels.isfinite()).reshape(len(labels), -1).any(1).nonzero()[:, 0]
    if len(wrong):
        raise ValueError(
            f"{counted(len(wrong), 'label')} {agreeing(len(wrong), 'is', 'are')} NaN or infinite, the first of "
            f"samples {wrong[:5].tolist()}: leave these samples out."
        )
    _refuse_ignored(labels)
    return labels


def _refuse_ignored(labels: Tensor) -> None:
    """Raise if class numbers contain −100: PyTorch's losses ignore it, and it must not be averaged."""
    found = labels.reshape(len(labels), -1)
    if found.is_floating_point() or found.shape[1] != 1:
        return
    ignored = (found[:, 0] == IGNORED).nonzero()[:, 0]
    if len(ignored) and int((found < 0).sum()) == len(ignored):
        raise ValueError(
            f"{counted(len(ignored), 'label')} {agreeing(len(ignored), 'is', 'are')} {IGNORED}, which tells losses to "
            f"ignore a sample, the first of samples {ignored[:5].tolist()}: leave these samples out."
        )


def class_numbers(gram: GramMatrix, labels: Any) -> Tensor:
    """Return the labels as class numbers, (m,); raise if they are not class numbers."""
    found = given_labels(gram, labels)
    if found is None:
        raise ValueError("Labels are needed: pass them, or give the data as (X, y).")
    return check_class_numbers(found)


def check_class_numbers(labels: Tensor) -> Tensor:
    """Return labels as class numbers, (m,), if they are integers from 0, one per sample; otherwise raise."""
    found = labels.squeeze(-1) if labels.dim() == 2 and labels.shape[1] == 1 else labels
    if found.is_floating_point() or found.is_complex() or found.dim() != 1 or int(found.min()) < 0:
        raise ValueError(
            f"Class numbers from 0 are needed, one per sample; found labels of {found.dtype}, shape "
            f"{tuple(found.shape)}, from {found.min()} to {found.max()}. If floats are classes, pass "
            "labels.long(); if one-hot, labels.argmax(1)."
        )
    if int(found.max()) >= MOST_CLASSES:
        raise ValueError(
            f"A class number of {int(found.max())} means more than {MOST_CLASSES} classes: renumber the classes, for "
            "example with torch.unique(labels, return_inverse=True)."
        )
    return found.cpu().long()


def of_classes(labels: Tensor, d: int) -> Tensor | None:
    """Return labels as class numbers for a network with d outputs, (n,); None if they are values.

    Classes are integers, also as floats, or one-hot with d columns. With one output, only 0 and 1 are classes.
    """
    found = labels[:, 0] if labels.dim() == 2 and labels.shape[1] == 1 else labels
    if d > 1 and found.dim() == 2 and found.shape[1] == d and _are_one_hot(found):
        return found.to(torch.float64).argmax(1).cpu()
    if found.dim() != 1 or found.min() < 0:
        return None
    if found.is_floating_point() and (found.max() >= max(d, 2) or (found != found.round()).any()):
        return None
    return found.long().cpu() if d > 1 or found.max() <= 1 else None  # one output, many integers: values


def _are_one_hot(labels: Tensor) -> bool:
    """Whether each row of labels (n, c) is a single 1 among 0s."""
    binary = (labels == 0) | (labels == 1)
    return bool(binary.all()) and bool((labels.sum(1) == 1).all())


def readout_looks_at_label(gram: GramMatrix) -> bool:
    """Whether the readout's result depends on the labels."""
    return _reads_labels(gram.net, gram.data) or _reads_labels(gram.net, gram.columns)


def _reads_labels(net: Network, data: Batches) -> bool:
    first = data.spread(LABELS_TRIED)[1][0]
    return net.reads_labels(first.inputs, first.labels, first.ids)


def model_outputs(gram: GramMatrix, net: Network | None = None) -> Tensor:
    """Return the model's outputs for the rows, (n, d), whatever the readout compares.

    Args:
        gram: The matrix.
        net: As `outputs_network` returns it, which calls the model with a sample; None: that of the matrix.

    """
    net = outputs_network(gram) if net is None else net
    return dataset_outputs(net, gram.data, masked=True, size=gram.forward_batch_size).cpu()


def outputs_network(gram: GramMatrix) -> Network:
    """Return the network with all outputs, or as it is if only its readout understands what the model returns."""
    net = gram.net
    if net.readout is all_outputs:
        return net
    if count_scores(net, gram.data.samples(range(1))) is None and not readout_looks_at_label(gram):
        return net
    return net.with_readout(all_outputs)


def class_outputs(gram: GramMatrix) -> Tensor | None:
    """Return the model's outputs if they may be those of classes, (n, d); None of a language model: words are not."""
    return model_outputs(gram) if gram.of_network and not reads_text(gram.net.readout) else None


def count_outputs(gram: GramMatrix) -> int | None:
    """Return how many outputs the model has, whatever the readout compares; None if the readout looks at the label."""
    if not gram.of_network or readout_looks_at_label(gram):
        return None
    net, first = gram.net, gram.data.samples(range(1))
    if net.readout is all_outputs:
        return gram.d
    scores = count_scores(net, first)
    return gram.d if scores is None else scores  # only the readout understands what the model returns


def class_chances(outputs: Tensor, classes: Tensor | None) -> Tensor | None:
    """Return the probability of each class, (n, c), if outputs (n, d) can be classes; else None.

    Outputs are logits or probabilities; a single one is the logit or probability of class 1 of two.
    """
    d, values = outputs.shape[1], outputs.double()
    if d > 1 and (classes is None or int(classes.max()) < d):
        return values if are_chances(outputs) else values.softmax(1)
    if d == 1 and classes is not None and int(classes.max()) <= 1:
        ones = values if are_chances(outputs) else values.sigmoid()
        return torch.cat([1 - ones, ones], 1)
    return None


def accuracy_warning(chances: Tensor | None, classes: Tensor) -> str | None:
    """Return a warning if predictions are no better than chance; else None."""
    if chances is None:
        return None
    right = float((chances.argmax(1) == classes).double().mean())
    chance = 1 / chances.shape[1]
    if right > chance + 2 * (chance * (1 - chance) / len(classes)) ** 0.5 + 0.02:
        return None
    return (
        f"Only {right:.1%} of the predictions match the labels, no more than by chance: is the network "
        "trained, and are classes numbered as they were then? Otherwise, its gradients, and the votes of neighbors, "
        "mean little."
    )


def label_values(labels: Tensor, d: int, outputs: int | None = None) -> Tensor:
    """Return labels as numbers to average, (m, q): classes one-hot, numbers unchanged.

    Args:
        labels: (m, ...).
        d: Least number of columns of classes, so that a part of the data without the last class is treated the same.
        outputs: How many outputs the model has: `of_classes` decides what a class is, and other labels of one output
            are values. None if unknown: integers from 0 to below MOST_CLASSES, one per sample, are classes.

    """
    classes = None if outputs is None else of_classes(labels, outputs)
    flat = (labels if classes is None else classes).reshape(len(labels), -1)
    is_whole = not flat.is_floating_point() and flat.shape[1] == 1 and (classes is not None or outputs != 1)
    if is_whole and int(flat.min()) >= 0 and int(flat.max()) < MOST_CLASSES:
        return torch.nn.functional.one_hot(flat[:, 0].long(), max(d, int(flat.max()) + 1)).double()
    return flat.double()
