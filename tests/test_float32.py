"""Every statistic of pairs in float32, for nets of up to 25 million parameters, to 1e-5.

Expected values come from the float32 gradients of plain autograd, multiplied and added in float64. A model
in float64 would also differ by what float32 does to activations, which is not what is tested here.
"""

import functools

import pytest
import torch
from torch import nn

import likewise as lw
import oracle
from likewise.linalg import LONG_RUN, SHORT_RUN, matrix_power, product
from likewise.statistics.neighbors import class_votes

TOLERANCE = 1e-5


class MeanOverPositions(nn.Module):
    def forward(self, x):
        return x.mean(1)


def positions(width, d):
    """Layers that several positions share: their gradients are explicit rows, about width² numbers long."""
    hidden = [nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*hidden, MeanOverPositions(), nn.Linear(width, d)), (3, 8)


def outer_products(width, d):
    """Layers with one position: their gradients are outer products that are never formed."""
    return nn.Sequential(
        nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, d)
    ), (8,)


CASES = {  # net, width, outputs, rows
    "1M": (positions, 1000, 1, 5),
    "1M-10-outputs": (positions, 1000, 10, 2),
    "1M-many-rows": (positions, 1000, 1, 34),
    "300k-10-outputs": (positions, 550, 10, 4),
    "300k-outer-products": (outer_products, 550, 10, 6),
    "10M": (positions, 3150, 1, 3),
    "25M": (positions, 5000, 1, 2),
}


@functools.cache
def made(name):
    return Case(*CASES[name])


class Case:
    """A gram of a float32 net, and its inner products in float64."""

    def __init__(self, make, width, d, n):
        torch.manual_seed(0)
        model, shape = make(width, d)
        self.n, self.d = n, d
        self.x = torch.randn(n, *shape)
        self.gram = lw.GramMatrix(model, self.x)
        rows = oracle.jacobians(model, self.x).flatten(0, 1)
        self.inner = self._blocks(rows)
        roots = matrix_power(self.inner[range(n), range(n)], -0.5, 1e-12).matrix
        self.blocks = torch.einsum("nab,nmbc,mcd->nmad", roots, self.inner, roots)
        self.k = oracle.trace(self.blocks)

    def _blocks(self, rows):
        total = sum(part @ part.T for part in (c.double() for c in rows.split(2**15, dim=1)))
        return total.view(self.n, self.d, self.n, self.d).transpose(1, 2)


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request):
    return made(request.param)


@pytest.fixture(
    scope="module", params=["1M", "1M-many-rows", "300k-10-outputs", "300k-outer-products"], ids=str
)
def small(request):
    return made(request.param)


def close(found, expected, tolerance=TOLERANCE):
    assert found.shape == expected.shape
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


def test_a_sample_is_fully_similar_to_itself(case):
    k = case.gram.dense().diagonal()
    close(k, torch.ones(case.n).double())


def test_dense_matrices(case):
    close(case.gram.dense(), case.k)
    close(case.gram.with_kernel(lw.INNER_PRODUCT).dense(), oracle.trace(case.inner))
    close(case.gram.row_sums(), case.k.sum(1))


def test_blocks_and_reductions(small):
    gram = small.gram
    close(gram.with_kernel(lw.Kernel(0, 0, lw.whole_block)).dense(), small.inner)
    close(gram.with_kernel(lw.SUBSPACE_MATCH).dense(), oracle.subspace_match(small.blocks))
    close(gram.with_kernel(lw.NEAR_IDENTITY).dense(), oracle.near_identity(small.blocks))
    inverse = matrix_power(small.inner[range(small.n), range(small.n)], -1, 1e-12).matrix
    influence = torch.einsum("nmab,mbc->nmac", small.inner, inverse)
    close(gram.with_kernel(lw.INFLUENCE).dense(), oracle.trace(influence))


def test_neighbors(small):
    k, count = small.k.clone().fill_diagonal_(-2), min(3, small.n - 1)
    best = k.sort(1, descending=True).values[:, :count]
    close(lw.nearest(small.gram, count).similarities, best)
    close(
        lw.novelty(small.gram, count, parameters=None),
        1 - best.mean(1),
        TOLERANCE / (1 - best.mean(1)).abs().max().item(),
    )
    close(lw.positive_neighbors(small.gram, 3), small.k.clamp(min=0).pow(3).sum(1))


def test_counts(small):
    values = small.k.flatten().sort().values
    gap = values.diff().argmax()
    threshold = float(values[gap : gap + 2].mean())
    assert torch.equal(lw.hard_neighbors(small.gram, threshold), (small.k >= threshold).sum(1))
    found = lw.similarity_histogram(small.gram, bins=2, low=2 * threshold - 2, high=2).counts
    assert torch.equal(found[:, 1], (small.k >= threshold).sum(1)) and (found.sum(1) == small.n).all()


def test_centered_similarities(small):
    centered = small.gram.with_centering(True)
    expected = oracle.centered(small.k)
    close(centered.dense(), expected)
    close(centered.row_sums(), expected.sum(1), TOLERANCE * small.n / expected.sum(1).abs().max().item())
    close(centered.dense().diagonal(), torch.ones(small.n).double())


def test_classes_and_votes(small):
    labels = torch.arange(small.n) % 2
    members = torch.nn.functional.one_hot(labels).double()
    counts = members.sum(0)
    sums = members.T @ (small.k - torch.diag(small.k.diagonal())) @ members
    expected = sums / (counts[:, None] * counts - torch.diag(counts))
    found = lw.class_similarity(small.gram, labels).mean
    assert torch.equal(found.isnan(), expected.isnan())
    close(found.nan_to_num(), expected.nan_to_num())
    votes = oracle.centered(small.k).fill_diagonal_(0).clamp(min=0).pow(4) @ members
    close(class_votes(small.gram, labels).float(), votes)


def test_denoising_and_disturbance(small):
    weights = torch.stack([torch.linalg.inv(row.sum(0)) @ row for row in small.inner])
    factor = (weights.pow(2).sum((1, 2, 3)) / small.d).sqrt()
    close(lw.denoising(small.gram, exact=True).factor, factor)
    own = matrix_power(small.inner[range(small.n), range(small.n)], -1, 1e-12).matrix
    moves = torch.einsum("mnab,nbc->mnac", small.inner, own).square().sum((2, 3)).sqrt().sum(0)
    close(lw.disturbance(small.gram), moves / small.d**0.5)


@pytest.mark.parametrize("n", [1, 4, 16])
@pytest.mark.parametrize("p", [1, SHORT_RUN, SHORT_RUN + 1, LONG_RUN + 1, 10**6 + 7], ids=str)
def test_products_of_any_length(p, n):
    a = torch.full((n, p), 0.1)  # equal terms are rounded alike, the worst there is
    assert (product(a, a) / (p * a[0, 0].double() ** 2) - 1).abs().max() < TOLERANCE


def test_products_of_a_hundred_million_numbers():
    a = torch.full((1, 10**8), 0.1)
    assert abs(product(a, a).item() / (10**8 * a[0, 0].double().item() ** 2) - 1) < TOLERANCE


def test_products_of_batches_of_matrices():
    a, b = torch.randn(2, 3, 40_000), torch.randn(2, 5, 40_000)
    expected = a.double() @ b.double().mT
    found = product(a, b)
    assert found.dtype == torch.float64 and (found - expected).abs().max() < 1e-5 * expected.abs().max()


X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("engine", ["autograd", "layers"])
def test_normalization_does_not_lose_float32(engine):
    class Parallel(nn.Module):
        """Two outputs that are nearly the same."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(3, 1), nn.Linear(3, 1)

        def forward(self, x):
            a = self.a(x)
            return torch.cat([a, a + 1e-2 * self.b(x)], 1)

    found = lw.similarity(Parallel(), X, kernel=lw.INFLUENCE, engine=engine)
    exact = lw.similarity(Parallel().double(), X, kernel=lw.INFLUENCE, engine=engine)
    assert (found - exact).abs().max() < 1e-4 * exact.abs().max()


@pytest.mark.parametrize("scale", [1e-15, 1e15])
def test_tiny_and_huge_gradients_give_the_ratios_of_ordinary_ones(scale):
    class Scaled(nn.Module):
        def __init__(self, scale):
            super().__init__()
            torch.manual_seed(0)
            self.out, self.scale = nn.Linear(3, 2), scale

        def forward(self, x):
            return self.out(x) * self.scale

    plain, scaled = (lw.GramMatrix(Scaled(s), X) for s in (1.0, scale))
    labels = torch.randn(12)
    assert torch.allclose(lw.uncertainty(scaled), lw.uncertainty(plain), rtol=1e-4)
    assert torch.allclose(lw.disturbance(scaled), lw.disturbance(plain), rtol=1e-4)
    assert torch.allclose(lw.soft_neighbors(scaled), lw.soft_neighbors(plain), rtol=1e-4)
    for exact in (True, False):
        found, expected = (lw.denoising(g, exact=exact).factor for g in (scaled, plain))
        assert torch.allclose(found, expected, rtol=1e-3)
    found, expected = (lw.fit_quality(g, labels).label_variance for g in (scaled, plain))
    assert torch.allclose(found, expected, rtol=1e-3)


def test_autocast_around_a_call_does_not_coarsen_it():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    expected = lw.similarity(model, X)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(lw.similarity(model, X), expected)
