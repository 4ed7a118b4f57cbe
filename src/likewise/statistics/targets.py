"""Labels in the form that sums over a neighborhood need."""

import torch
from torch import Tensor

from likewise.gram import GramMatrix
from likewise.sources import column

MOST_CLASSES = 100_000


def given_labels(gram: GramMatrix, labels: Tensor | None) -> Tensor | None:
    """Return the labels of the columns: those given, else those that travel with the data."""
    if labels is None:
        return gram.columns.labels()
    found = column("labels", labels)
    if len(found) != gram.columns.n:
        raise ValueError(f"{len(found)} labels for {gram.columns.n} samples.")
    if not found.isfinite().all():
        raise ValueError(f"{int((~found.isfinite()).sum())} labels are NaN or infinite: leave them out.")
    return found


def class_numbers(gram: GramMatrix, labels: Tensor | None) -> Tensor:
    """Return the labels as class numbers, (m,), or say what is wrong with them."""
    found = given_labels(gram, labels)
    if found is None:
        raise ValueError("Labels are needed: pass them, or give the data as (X, y).")
    found = found.squeeze(-1) if found.dim() == 2 and found.shape[1] == 1 else found
    if found.is_floating_point() or found.is_complex() or found.dim() != 1 or int(found.min()) < 0:
        raise ValueError(
            f"Class numbers from 0 are needed, one a sample; found labels of {found.dtype}, shape "
            f"{tuple(found.shape)}, from {found.min()} to {found.max()}. Numbers that are classes: "
            "labels.long(); one-hot: labels.argmax(1)."
        )
    if int(found.max()) >= MOST_CLASSES:
        raise ValueError(
            f"A class number of {int(found.max())} means more than {MOST_CLASSES} classes: number those "
            "there are, for example by torch.unique(labels, return_inverse=True)."
        )
    return found.cpu().long()


def numeric(labels: Tensor, d: int) -> Tensor:
    """Return labels as numbers to average, (m, q): classes one-hot, numbers as they are.

    Integers from 0 to below MOST_CLASSES, one a sample, are classes: at least d of them, so that a
    part of the data in which the last class is missing is treated alike.
    """
    flat = labels.reshape(len(labels), -1)
    whole = not labels.is_floating_point() and flat.shape[1] == 1
    if whole and int(flat.min()) >= 0 and int(flat.max()) < MOST_CLASSES:
        return torch.nn.functional.one_hot(flat[:, 0].long(), max(d, int(flat.max()) + 1)).double()
    return flat.double()
