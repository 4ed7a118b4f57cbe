"""Verdicts on how well a network fits its labels."""

import pytest
import torch
from torch import nn

import likewise as lw

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))


def test_verdicts():
    alone = lw.GramMatrix(nn.Linear(12, 1, bias=False), torch.eye(12))
    assert lw.fit_quality(alone, torch.randn(12)).verdict == "overfit"
    crowd = lw.GramMatrix(nn.Linear(3, 1), 0.01 * X)
    assert lw.fit_quality(crowd, torch.randn(12)).verdict == "underfit"
    assert lw.fit_quality(crowd, torch.ones(12)).verdict == "fit"


@pytest.mark.parametrize("statistic", [lw.fit_quality, lw.denoising, lw.label_suspicion, lw.reliability])
def test_labels_that_losses_ignore_are_no_values(statistic):
    labels = torch.arange(12) % 3
    labels[[2, 5]] = -100
    with pytest.raises(ValueError, match=r"2 labels are -100.*samples \[2, 5\]"):
        statistic(lw.GramMatrix(nn.Linear(3, 3), (X, labels)))


def test_one_label_that_is_ignored_is_one_label():
    labels = torch.arange(len(X)) % 3
    labels[2] = -100
    with pytest.raises(ValueError, match="1 label is -100"):
        lw.fit_quality(lw.GramMatrix(nn.Linear(3, 3), (X, labels)))


def variance_of_all(outputs, labels):
    return lw.fit_quality(lw.GramMatrix(nn.Linear(3, outputs), X), labels).total_variance


def test_label_variance_is_of_the_labels_that_are_learned():
    counts, classes = torch.arange(12) ** 2, torch.arange(12) % 3
    assert variance_of_all(1, counts) == pytest.approx(float(counts.double().var(correction=0)))
    assert variance_of_all(1, counts) == pytest.approx(variance_of_all(1, counts.float()))
    one_hot = nn.functional.one_hot(classes)
    written = classes, classes[:, None], classes.float(), classes.double()[:, None], one_hot, one_hot.float()
    assert [variance_of_all(3, labels) for labels in written] == pytest.approx([2 / 3] * len(written))
    bits = classes % 2
    assert variance_of_all(1, bits) == pytest.approx(variance_of_all(1, bits.float()))
