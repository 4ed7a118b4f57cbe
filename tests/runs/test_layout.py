"""The map: neighbors near each other, others apart, the same each time."""

import numpy as np
import pytest

from likewise.runs.layout import neighbor_graph, neighbor_layout, preserved_neighbors


def clusters(n=240, groups=6, k=8):
    """Return the neighbors of points around a few centers in ten dimensions, and the group of each."""
    generator = np.random.default_rng(0)
    group = np.arange(n) % groups
    points = generator.normal(size=(groups, 10))[group] * 3 + generator.normal(size=(n, 10))
    unit = points / np.linalg.norm(points, axis=1, keepdims=True)
    cosine = unit @ unit.T
    np.fill_diagonal(cosine, -2)
    indices = np.argsort(-cosine, axis=1, kind="stable")[:, :k]
    return indices, np.take_along_axis(cosine, indices, 1), points, group


def test_neighbors_are_near_on_the_map_and_groups_apart():
    indices, similarities, points, group = clusters()
    directions = points @ np.linalg.svd(points - points.mean(0))[2].T
    places = neighbor_layout(indices, similarities, directions)
    drawn, flat = (preserved_neighbors(where, indices) for where in (places, directions[:, :2]))
    assert drawn > 0.45 and drawn > 1.6 * flat
    near = np.linalg.norm(places[:, None] - places[None], axis=2)
    same = group[:, None] == group[None]
    assert near[same].mean() < 0.5 * near[~same].mean()
    assert np.array_equal(places, neighbor_layout(indices, similarities, directions))


def test_preserved_neighbors_is_what_counting_gives():
    indices, _, points, _ = clusters(n=40, k=5)
    gaps = np.linalg.norm(points[:, None, :2] - points[None, :, :2], axis=2)
    np.fill_diagonal(gaps, np.inf)
    near = np.argsort(gaps, axis=1)[:, :5]
    expected = np.mean([len(set(a) & set(b)) / 5 for a, b in zip(near, indices, strict=True)])
    assert preserved_neighbors(points[:, :2], indices) == pytest.approx(expected)


def test_the_graph_joins_both_directions():
    indices, similarities = np.array([[1, 2], [0, 2], [1, 0]]), np.array([[0.9, 0.5], [0.9, 0.7], [0.7, 0.5]])
    found = neighbor_graph(indices, similarities).toarray()
    beyond = np.array([[0, 0.4], [0, 0.2], [0, 0.2]])
    weights = np.exp(-beyond / beyond.mean(1, keepdims=True))
    one_way = np.zeros((3, 3))
    np.put_along_axis(one_way, indices, weights, 1)
    assert found == pytest.approx(one_way + one_way.T - one_way * one_way.T)
    assert found[0, 1] == 1 and (found == found.T).all()


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_few_samples_and_copies_have_a_place(n):
    k = min(2, n - 1)
    indices = np.array([[j for j in range(n) if j != i][:k] for i in range(n)], dtype=int).reshape(n, k)
    places = neighbor_layout(indices, np.ones((n, k)), np.zeros((n, 10)))
    assert places.shape == (n, 2) and np.isfinite(places).all()
