"""Where samples are drawn on the map: two coordinates of each, from its nearest neighbors.

The layout of neighbors minimizes UMAP's cross-entropy between a weighted neighbor graph and closeness in the plane,
(1 + a s^b)⁻¹ at a squared distance s, with the attraction of all edges and the repulsion of random samples in every
step. It needs numpy and scipy only; benchmarks/layouts.py compares it with UMAP, t-SNE and principal directions.
"""

from typing import Any

import numpy as np

SPREAD, STEEPNESS = 1.577, 0.895  # a, b: closeness of UMAP at a minimum distance of 0.1
REPULSIONS = 8  # random samples that each sample is pushed away from in a step
STEPS = 200  # twice as many keep .001 to .011 more of the neighbors
MOST_MOVE = 4.0  # of one step, in units in which near samples are about 1 apart
START = 10.0  # half the width of the map at the start
INERTIA = 0.5


def neighbor_layout(
    indices: np.ndarray, similarities: np.ndarray, coordinates: np.ndarray, seed: int = 0
) -> np.ndarray:
    """Return two coordinates of each sample: neighbors near each other, others apart.

    The same numbers give the same map; rounding in the similarities may turn or exchange groups. Half a second for
    2,000 samples, ten for 50,000.

    Args:
        indices: (n, k) the nearest other samples of each.
        similarities: (n, k) how similar they are, at most 1, largest first.
        coordinates: (n, r) leading directions, r at least 2; the first two are where the layout starts.
        seed: Of the random samples that push each other away.

    Returns:
        (n, 2) float64; directions and units have no meaning of their own.
    """
    n, k = indices.shape
    start = coordinates[:, :2].astype(np.float64)
    if n < 4 or k < 1:
        return start
    graph = neighbor_graph(indices, similarities)
    degree = np.bincount(graph.row, graph.data, minlength=n).astype(np.float32)
    once = graph.row < graph.col  # each pair of neighbors
    head, tail, weight = graph.row[once], graph.col[once], graph.data[once].astype(np.float32)
    generator = np.random.default_rng(seed)
    centered = start - start.mean(0)
    centered *= START / max(float(np.abs(centered).max()), 1e-12)
    # (2, n): numpy takes several times as long for sums over pairs of numbers that lie side by side.
    places = np.ascontiguousarray((centered + generator.normal(scale=0.01, size=(n, 2))).T, dtype=np.float32)
    velocity = np.zeros_like(places)
    for step in range(STEPS):
        force = _attraction(places, head, tail, weight) + _repulsion(places, degree, generator)
        move = np.clip(force / (1 + degree), -MOST_MOVE, MOST_MOVE)
        velocity = INERTIA * velocity + np.float32(1 - step / STEPS) * move
        places = places + velocity
    return places.T.astype(np.float64, order="C")


def neighbor_graph(indices: np.ndarray, similarities: np.ndarray) -> Any:
    """Return the symmetric graph of nearest neighbors, each weighted 1 for the nearest and less for those behind it.

    Weights of the two directions are joined as probabilities are: w + w' − w w'. A scipy.sparse.coo_array (n, n).
    """
    from scipy import sparse  # a second, and only runs need it

    n, k = indices.shape
    distances = (1 - similarities.astype(np.float64)).clip(min=0)
    beyond = distances - distances[:, :1]
    scale = np.maximum(beyond.mean(1, keepdims=True), 1e-9)
    rows = np.repeat(np.arange(n), k)
    one_way = sparse.csr_array((np.exp(-beyond / scale).ravel(), (rows, indices.ravel())), shape=(n, n))
    return (one_way + one_way.T - one_way.multiply(one_way.T)).tocoo()


def preserved_neighbors(places: np.ndarray, indices: np.ndarray) -> float:
    """Return the share of each sample's k neighbors that are among its k nearest on the map, on average."""
    from scipy.spatial import cKDTree

    n, k = indices.shape
    near = cKDTree(places).query(places, k + 1)[1]
    own = near == np.arange(n)[:, None]
    near[~own.any(1), -1] = np.arange(n)[~own.any(1)]  # copies at one place may crowd a sample out
    near = near[near != np.arange(n)[:, None]].reshape(n, k)
    return float((near[:, :, None] == indices[:, None, :]).any(2).mean())


def umap_layout(
    indices: np.ndarray, similarities: np.ndarray, coordinates: np.ndarray, seed: int = 0
) -> np.ndarray:
    """Return two coordinates of each sample by UMAP, from its nearest neighbors; arguments as `neighbor_layout`."""
    try:
        from umap import UMAP
    except ImportError as error:
        raise ImportError('A map by UMAP needs umap-learn: pip install "likewise[umap]".') from error
    n = len(indices)
    places = np.concatenate([np.arange(n)[:, None], indices], 1)  # itself first, as UMAP counts
    distances = np.concatenate([np.zeros((n, 1)), 1 - similarities], 1).clip(min=0)
    layout = UMAP(
        n_neighbors=places.shape[1],
        precomputed_knn=(places.astype(np.int64), distances.astype(np.float32), None),
        random_state=seed,
        n_jobs=1,
    )
    return layout.fit_transform(coordinates.astype(np.float32)).astype(np.float64)


LAYOUTS = {"neighbors": neighbor_layout, "umap": umap_layout}


def _attraction(places: np.ndarray, head: np.ndarray, tail: np.ndarray, weight: np.ndarray) -> np.ndarray:
    difference, square = _apart(places.take(head, axis=1), places.take(tail, axis=1))
    square = np.maximum(square, 1e-6)
    power = np.power(square, STEEPNESS)
    pull = weight * (-2 * SPREAD * STEEPNESS) * power / square / (1 + SPREAD * power)
    n, force = places.shape[1], np.empty_like(places)
    for total, pulled in zip(force, pull * difference, strict=True):
        total[:] = np.bincount(head, pulled, minlength=n) - np.bincount(tail, pulled, minlength=n)
    return force


def _repulsion(places: np.ndarray, degree: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    n, total = places.shape[1], np.zeros_like(places)
    strength = degree * 2 * STEEPNESS
    for _ in range(REPULSIONS):
        difference, square = _apart(places, places.take(generator.integers(n, size=n), axis=1))
        push = strength / ((0.001 + square) * (1 + SPREAD * np.power(square, STEEPNESS)))
        total += np.clip(push * difference, -MOST_MOVE, MOST_MOVE)
    return total


def _apart(places: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the differences of places, (2, n), and their squared lengths."""
    difference = places - others
    return difference, difference[0] * difference[0] + difference[1] * difference[1]
