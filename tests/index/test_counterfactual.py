"""What would change a vote: the fewest samples, against all subsets."""

from itertools import combinations, product

import pytest
import torch
from torch import nn

import likewise as lw
from likewise.gram import Strip
from likewise.index.counterfactual import Flip, FlipReducer, MeanShiftReducer

EXPONENT = 8  # of the method: docs/method.md


def strip_of(similarity):
    return Strip(
        rows=range(len(similarity)),
        square=False,
        use_centered=True,
        plain=lambda: similarity,
        centered=lambda: similarity,
    )


def lead(weights, labels, count):
    """Return the class with the most votes."""
    votes = [sum(w for w, label in zip(weights, labels, strict=True) if label == c) for c in range(count)]
    return max(range(count), key=votes.__getitem__)


def fewest_left_out(weights, labels, count):
    """Return the size of the smallest subset without which another class leads, by trying all; 0 if none does."""
    before, m = lead(weights, labels, count), len(weights)
    for size in range(1, m + 1):
        for gone in combinations(range(m), size):
            left = [(w, c) for i, (w, c) in enumerate(zip(weights, labels, strict=True)) if i not in gone]
            if sum(w for w, _ in left) and lead(*zip(*left, strict=True), count) != before:
                return size
    return 0


def fewest_relabeled(weights, labels, count):
    before, m = lead(weights, labels, count), len(weights)
    for size in range(1, m + 1):
        for chosen in combinations(range(m), size):
            for new in product(range(count), repeat=size):
                changed = list(labels)
                for i, label in zip(chosen, new, strict=True):
                    changed[i] = label
                if lead(weights, changed, count) != before:
                    return size
    return 0


@pytest.mark.parametrize("seed", range(30))
def test_the_set_is_the_smallest_of_all_subsets(seed):
    generator = torch.Generator().manual_seed(seed)
    m, count = 7, 3
    similarity = torch.rand(1, m, generator=generator, dtype=torch.float64) * 1.2 - 0.2
    labels = torch.randint(count - (seed % 3 == 0), (m,), generator=generator)
    found = Flip(*(part[0] for part in FlipReducer(labels, count)(strip_of(similarity))))
    weights = similarity[0].clamp(min=0).pow(EXPONENT).tolist()
    given = labels.tolist()
    assert int(found.leader) == lead(weights, given, count)
    assert int(found.leave_out) == fewest_left_out(weights, given, count)
    others = len({c for w, c in zip(weights, given, strict=True) if w}) > 1
    assert (int(found.other) >= 0) == others
    if others:
        assert int(found.relabel) == fewest_relabeled(weights, given, count)
        kept = [i for i in range(m) if i not in found.places[: int(found.leave_out)].tolist()]
        left = lead([weights[i] for i in kept], [given[i] for i in kept], count)
        assert left == int(found.other) != int(found.leader)


def test_without_any_similar_sample_nothing_is_said_to_change():
    found = Flip(*FlipReducer(torch.tensor([0, 1]), 2)(strip_of(torch.tensor([[-0.5, -0.1]]))))
    assert float(found.share) == 0 and int(found.leave_out) == int(found.relabel) == 0
    assert int(found.other) == -1 and (found.places == -1).all()


@pytest.mark.parametrize("seed", range(5))
def test_the_mean_moves_most_without_the_row_that_is_named(seed):
    generator = torch.Generator().manual_seed(seed)
    similarity = torch.rand(2, 9, generator=generator, dtype=torch.float64) - 0.2
    values = torch.randn(9, 2, generator=generator, dtype=torch.float64)
    means, without, places = MeanShiftReducer(values)(strip_of(similarity))
    weights = similarity.clamp(min=0).pow(EXPONENT)
    for i in range(2):
        mean = (weights[i][:, None] * values).sum(0) / weights[i].sum()
        moved = []
        for j in range(9):
            rest = weights[i].clone()
            rest[j] = 0
            moved.append((rest[:, None] * values).sum(0) / rest.sum())
        best = max(range(9), key=lambda j: (moved[j] - mean).norm())
        torch.testing.assert_close(means[i], mean)
        torch.testing.assert_close(without[i], moved[best])
        assert int(places[i]) == best


def test_an_index_says_what_would_change_a_prediction(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(60, 5)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    net = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 3))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.03)
    for _ in range(80):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    lw.build_index(net, (x, y), tmp_path / "index", classes=["ant", "bee", "cow"])
    index = lw.Index(tmp_path / "index", model=net)
    index.remove([3, 4])  # row numbers are not places
    new = torch.randn(12, 5)
    rows = [i for i in range(60) if i not in (3, 4)]
    sketches, mean = index.sketches(), index.sketches().mean(0)
    unit = nn.functional.normalize(sketches - mean, dim=1)
    asked = nn.functional.normalize(index._project(index._read(new)).double() - mean, dim=1)
    weights = (asked @ unit.T).clamp(min=0).pow(EXPONENT)
    seen = set()
    for told, votes in zip(index.explain(new), weights, strict=True):
        change = told.counterfactual
        by_class = torch.zeros(3, dtype=torch.float64).index_add_(0, y[rows], votes)
        assert change.votes_for == ["ant", "bee", "cow"][int(by_class.argmax())]
        assert change.share == pytest.approx(float(by_class.max() / by_class.sum()), rel=1e-3)
        seen.add(change.votes_for == told.prediction_name)
        if change.leave_out is None or change.leave_out > len(change.rows):
            continue
        left = votes.clone()
        left[[rows.index(row) for row in change.rows[:-1]]] = 0
        assert ["ant", "bee", "cow"][
            int(_vote(left, y[rows]).argmax())
        ] == change.votes_for  # one fewer is too few
        left[rows.index(change.rows[-1])] = 0
        assert ["ant", "bee", "cow"][int(_vote(left, y[rows]).argmax())] == change.would_be
        assert told.as_dict()["counterfactual"]["leave_out"] == change.leave_out
        if change.votes_for == told.prediction_name:
            assert f"vote for {change.would_be} instead of {change.votes_for}" in change.text
        assert "was not trained again" in change.text
    assert True in seen


def _vote(weights, labels):
    return torch.zeros(3, dtype=torch.float64).index_add_(0, labels, weights)


def test_an_index_of_values_names_the_row_that_matters_most(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(40, 4)
    net = nn.Linear(4, 1)
    lw.build_index(net, (x, x.sum(1, keepdim=True)), tmp_path / "index", names=[f"n{i}" for i in range(40)])
    (told,) = lw.Index(tmp_path / "index", model=net).explain(torch.randn(1, 4))
    change = told.counterfactual
    assert len(change.rows) == 1 and f"n{change.rows[0]}" in change.text
    assert change.votes_for != change.would_be and change.share is None
