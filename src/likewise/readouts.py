"""Readouts: which numbers of what a model returns are the outputs whose gradients are compared.

A readout is any function (outputs, labels) -> (n, d), whatever its two arguments are called; those below
serve common cases. One with a further argument named `ids` also gets the samples' numbers.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from likewise.checks import check_integer, check_seed, check_type, describe, refuse_unreadable

Outputs = Any  # whatever the model returns
Readout = Callable[..., Tensor]


def all_outputs(outputs: Outputs, labels: Tensor | None = None) -> Tensor:
    """Return every output of the sample, flattened."""
    return _scores(outputs).flatten(1)


@dataclass(frozen=True)
class _OneOutput:
    index: int

    def __call__(self, outputs: Outputs, labels: Tensor | None = None) -> Tensor:
        every = all_outputs(outputs)
        if not -every.shape[1] <= self.index < every.shape[1]:
            raise ValueError(
                f"one_output({self.index}) asks for an output that is not there: the model has "
                f"{every.shape[1]} outputs, numbered from 0."
            )
        return every[:, self.index].unsqueeze(1)


def one_output(index: int) -> Readout:
    """Return the readout of one output, counted over the flattened outputs: d = 1."""
    return _OneOutput(check_integer("index", index))


def log_probabilities(outputs: Outputs, labels: Tensor | None = None) -> Tensor:
    """Return log-softmax over dimension 1. Its d rows have rank d − 1, so k^C(x, x) = (d − 1)/d."""
    scores = _scores(outputs)
    if scores.shape[1] < 2:
        raise ValueError("log_probabilities needs two outputs or more: of one, log-softmax is always 0.")
    return scores.log_softmax(1).flatten(1)


def label_against_rest(outputs: Outputs, labels: Tensor | None) -> Tensor:
    """Return the label's logit minus the log-sum-exp of the others; d = 1; sec. 3.

    Of a model with a single output, the logit of class 1 against class 0, signed by the label.
    """
    scores, target = _scores_and_labels(outputs, labels, "label_against_rest")
    if scores.shape[1] == 1:
        signs = torch.tensor([-1, 1]).to(scores).expand(len(scores), 2)
        with _labels_are_classes(2):
            return scores * signs.gather(1, target)
    with _labels_are_classes(scores.shape[1]):
        others = scores.scatter(1, target, -torch.inf).logsumexp(1, keepdim=True)
        return scores.gather(1, target) - others


@dataclass(frozen=True)
class _LabelAgainstRandom:
    seed: int

    def __call__(self, outputs: Outputs, labels: Tensor | None, ids: Tensor) -> Tensor:
        scores, target = _scores_and_labels(outputs, labels, "label_against_random")
        if scores.shape[1] < 2:
            return label_against_rest(outputs, labels)
        shift = 1 + _scrambled(ids, self.seed).remainder(scores.shape[1] - 1).unsqueeze(1)
        rival = (target + shift).remainder(scores.shape[1])
        with _labels_are_classes(scores.shape[1]):
            return scores.gather(1, target) - scores.gather(1, rival)


def label_against_random(seed: int = 0) -> Readout:
    """Return the readout of the label's logit minus that of another class drawn per sample; d = 1.

    The draw depends on the seed and the sample's id alone, not on batches or processes.
    """
    return _LabelAgainstRandom(check_seed("seed", seed))


def looks_at_label(readout: Readout) -> bool:
    """Return whether it is one of those here that compare what the network says of the label."""
    return readout is label_against_rest or isinstance(readout, _LabelAgainstRandom)


def main_tensor(outputs: Outputs) -> Tensor:
    """Return the tensor to read: `logits` where there are any, a tuple's first, a dict's only one.

    More than one candidate in a dict is an error, not a guess.
    """
    if isinstance(outputs, Tensor):
        return outputs
    named = _named_tensors(outputs)
    if "logits" in named:
        return named["logits"]
    if isinstance(outputs, tuple | list) and len(outputs) and isinstance(outputs[0], Tensor):
        return outputs[0]
    if len(named) == 1:
        return next(iter(named.values()))
    found = f"{type(outputs).__name__} with tensors {sorted(named)}" if named else type(outputs)
    raise TypeError(
        f"The model returned {found}, and it is not clear which tensor is meant: pass a readout, "
        "for example readout=lambda outputs, labels: outputs['name'].flatten(1)."
    )


def _named_tensors(outputs: Outputs) -> dict[str, Tensor]:
    items = outputs if isinstance(outputs, Mapping) else getattr(outputs, "__dict__", {})
    return {str(k): v for k, v in items.items() if isinstance(v, Tensor) and v.is_floating_point()}


def _scores(outputs: Outputs) -> Tensor:
    scores = main_tensor(outputs)
    refuse_unreadable("The model's output", scores)
    if not scores.is_floating_point():
        raise TypeError(
            f"The model's output must be real floating numbers, found {describe(scores)}: it has no "
            "gradients. Let the model return scores, not classes."
        )
    if scores.dim() == 0:
        raise ValueError(
            "The model returned one number, of shape (), for the whole batch: outputs of each sample are "
            "needed, (n, d). Let the model return them rather than their loss."
        )
    return scores.unsqueeze(1) if scores.dim() == 1 else scores


def _scores_and_labels(outputs: Outputs, labels: Tensor | None, name: str) -> tuple[Tensor, Tensor]:
    scores = _scores(outputs)
    if labels is None:
        raise ValueError(
            f"{name} needs labels: give the data as (X, y) or batches(X, labels=y), or a training term "
            "labels=y (two_batches: labels_a and labels_b)."
        )
    check_type("labels", labels, Tensor, "a tensor of class numbers")
    wrong = labels.is_floating_point() or labels.is_complex() or labels.numel() != len(scores)
    if wrong or scores.dim() != 2:
        raise ValueError(
            f"{name} needs one class number a sample and (n, classes) outputs, found labels of "
            f"{labels.dtype} {tuple(labels.shape)} and outputs {tuple(scores.shape)}. Numbers that are "
            "classes: labels.long(); one-hot: labels.argmax(1)."
        )
    return scores, labels.reshape(-1, 1).long()


@contextmanager
def _labels_are_classes(classes: int) -> Iterator[None]:
    """Say it in these words if a label is none of the classes."""
    try:
        yield
    except RuntimeError as error:
        if "out of bounds" not in str(error):
            raise
        raise ValueError(
            f"A label is none of the {classes} classes that the model tells, 0 to {classes - 1} ({error})."
        ) from error


def _scrambled(ids: Tensor, seed: int) -> Tensor:
    """Return non-negative integers that look random in id and seed, by the steps of SplitMix64."""
    mixed = (ids.long() + 1 + (seed + 1) * 0x632BE59BD9B4E019 % 2**62) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed = (mixed ^ ((mixed >> shift) & (2 ** (64 - shift) - 1))) * factor
    return (mixed ^ ((mixed >> 31) & (2**33 - 1))) & (2**62 - 1)
