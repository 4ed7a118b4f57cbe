"""On real images, with labels known to be wrong."""

import pytest
import torch
from torch import nn

import likewise as lw


@pytest.fixture(scope="module")
def digits():
    """300 real digits, 30 of them mislabeled, and a net that learned them all by heart."""
    images, labels = pytest.importorskip("sklearn.datasets").load_digits(return_X_y=True)
    torch.manual_seed(0)
    x = torch.tensor(images[:300], dtype=torch.float32) / 16
    truth = torch.tensor(labels[:300])
    wrong = torch.zeros(300, dtype=torch.bool)
    wrong[torch.randperm(300)[:30]] = True
    given = torch.where(wrong, (truth + torch.randint(1, 10, (300,))) % 10, truth)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), given).backward()
        optimizer.step()
    assert (model(x).argmax(1) == given).all()
    return lw.GramMatrix(model, (x, given)), truth, wrong


def average_precision(score, wrong):
    hits = wrong[score.argsort(descending=True)].double()
    precision = hits.cumsum(0) / torch.arange(1, len(hits) + 1)
    return float((precision * hits).sum() / hits.sum())


def test_labels_learned_by_heart_are_found(digits):
    gram, truth, wrong = digits
    found = lw.label_suspicion(gram)
    assert average_precision(found.suspicion, wrong) > 0.85
    assert (found.suggested == truth)[wrong].double().mean() > 0.85
    assert found.contested[wrong].double().mean() > 0.8
    assert found.contested[~wrong].double().mean() < 0.1


def test_evidence_is_the_most_alike_of_the_suggested_class(digits):
    gram, _, wrong = digits
    found = lw.label_suspicion(gram)
    evidence, labels = lw.label_evidence(gram, found, k=3), gram.columns.labels()
    assert (labels[evidence.indices] == found.suggested[:, None]).all()
    assert (evidence.indices != torch.arange(300)[:, None]).all()
    k = gram.dense().double()
    h = torch.eye(300, dtype=torch.float64) - 1 / 300
    c = h @ k @ h
    c = c / (c.diagonal()[:, None] * c.diagonal()).sqrt()
    one = int(wrong.nonzero()[0])
    others = [i for i in range(300) if labels[i] == found.suggested[one] and i != one]
    best = max(others, key=lambda i: float(c[one, i]))
    assert int(evidence.indices[one, 0]) == best
    with pytest.raises(ValueError, match="Suspicions of 2"):
        lw.label_evidence(gram, found._replace(suggested=found.suggested[:2]))


def test_neighbors_share_the_true_class(digits):
    gram, truth, wrong = digits
    indices = lw.nearest(gram, 1).indices[:, 0]
    assert (truth[indices] == truth)[~wrong].double().mean() > 0.8


def test_classes_are_kept_together(digits):
    gram, _, _ = digits
    mean = lw.class_similarity(gram).mean
    within, between = mean.diagonal().mean(), (mean.sum() - mean.diagonal().sum()) / 90
    assert within > between
