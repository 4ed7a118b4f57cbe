"""Every kernel, reduction and statistic against the formulas written out, over kinds of nets."""

import functools
from math import log

import pytest
import torch

import likewise as lw
import nets
import oracle

ENGINES = ("autograd", "layers")
OUTPUTS = {nets.Added: (1, 2)}  # of the others also 3 and 10
NETS = [(make, d) for make in nets.SHAPES for d in OUTPUTS.get(make, (1, 2, 3, 10))]
GRID = [(make, d, engine) for make, d in NETS for engine in ENGINES]
# For statistics, which only combine kernels: every net with every number of outputs, every net and every number
# of outputs with every engine.
PAIRWISE = [
    (make, d, ENGINES[(list(nets.SHAPES).index(make) + (1, 2, 3, 10).index(d)) % len(ENGINES)])
    for make, d in NETS
]
TOLERANCE = 1e-10
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.func.vmap cannot differentiate Recurrent"),
    pytest.mark.filterwarnings("error:.*reference engine"),
]


def close(found, expected, tolerance=TOLERANCE):
    scale = max(1.0, expected.abs().max().item())
    assert found.shape == expected.shape
    assert (found - expected).abs().max().item() <= tolerance * scale


@functools.lru_cache(maxsize=4)
def build_case(make, d, engine):
    """A gram of 7 rows with 5 other columns and one of the rows with themselves, and Jacobians."""
    model, x = nets.case(make, d, 12)
    left, right = oracle.jacobians(model, x[:7]), oracle.jacobians(model, x[7:])
    net = lw.Network(model)
    cross = lw.GramMatrix(net, lw.batches(x[:7], size=3), lw.batches(x[7:], size=2), engine=engine)
    own = lw.GramMatrix(net, lw.batches(x[:7], size=3), engine=engine)
    return cross, own, left, right


def case_id(case):
    return f"{case[0].__name__}-{case[1]}-{case[2]}"


@pytest.fixture(scope="module", params=GRID, ids=case_id)
def grid_case(request):
    return build_case(*request.param)


@pytest.fixture(scope="module", params=PAIRWISE, ids=case_id)
def case(request):
    return build_case(*request.param)


def test_inner_products(grid_case):
    cross, own, left, right = grid_case
    kernel = lw.Kernel(0, 0, lw.whole_block)
    close(cross.with_kernel(kernel).dense(), oracle.inner(left, right))
    close(own.with_kernel(kernel).dense(), oracle.inner(left, left))


@pytest.mark.parametrize("exponents", [(0, -1), (-1, 0), (-0.5, -0.5)], ids=str)
def test_blocks_of_every_normalization(grid_case, exponents):
    cross, _, left, right = grid_case
    close(
        cross.with_kernel(lw.Kernel(*exponents, lw.whole_block)).dense(),
        oracle.blocks(left, right, *exponents),
    )


def test_reductions(grid_case):
    cross, _, left, right = grid_case
    expected = oracle.correlation(left, right)
    close(cross.dense(), oracle.trace(expected))
    close(cross.with_kernel(lw.NEAR_IDENTITY).dense(), oracle.near_identity(expected))
    close(cross.with_kernel(lw.SUBSPACE_MATCH).dense(), oracle.subspace_match(expected))
    close(cross.with_kernel(lw.IDENTITY_DISTANCE).dense(), oracle.identity_distance(expected))
    influence = oracle.blocks(left, right, 0, -1)
    close(cross.with_kernel(lw.INFLUENCE).dense(), oracle.trace(influence))


def own_correlation(left):
    return oracle.trace(oracle.correlation(left, left))


def test_counts(case):
    _, own, left, _ = case
    k = own_correlation(left)
    close(lw.soft_neighbors(own), k.sum(1))
    close(lw.positive_neighbors(own, exponent=3), torch.where(k > 0, k, 0).pow(3).sum(1))
    threshold = k.median().item() + 1e-6
    assert torch.equal(lw.hard_neighbors(own, threshold), (k >= threshold).sum(1))


def test_nearest_neighbors(case):
    cross, own, left, _ = case
    k = own_correlation(left).clone().fill_diagonal_(-2)
    found = lw.nearest(own, k=3)
    close(found.similarities, k.sort(1, descending=True).values[:, :3])
    close(k.gather(1, found.indices), found.similarities)
    assert lw.nearest(cross, k=2).indices.shape == (7, 2)


def test_histogram(case):
    _, own, left, _ = case
    k = own_correlation(left)
    found = lw.similarity_histogram(own, bins=8)
    assert found.counts.sum(1).eq(7).all()
    for i in range(7):
        expected = torch.histc(k[i].clamp(-1, 1 - TOLERANCE), 8, -1, 1)
        assert (found.counts[i] - expected).abs().sum() <= 2  # a value on an edge may fall either way


def test_uncertainty_and_disturbance(case):
    _, own, left, _ = case
    found = oracle.inner(left, left)
    close(lw.uncertainty(own), oracle.trace(found).diagonal() / oracle.trace(found).sum(1), TOLERANCE)
    inverse = [torch.linalg.inv(found[i, i]) for i in range(7)]
    moves = [sum((found[j, i] @ inverse[i]).norm() for j in range(7)) for i in range(7)]
    close(lw.disturbance(own), torch.stack(moves) / left.shape[1] ** 0.5, TOLERANCE)


def test_denoising(case):
    _, own, left, _ = case
    labels = torch.randn(7, left.shape[1], dtype=torch.float64)
    weights = oracle.denoising_weights(left)
    d = left.shape[1]
    found = lw.denoising(own, labels, exact=True)
    close(found.factor, (weights.pow(2).sum((1, 2, 3)) / d).sqrt(), TOLERANCE)
    assert found.floor == 7**-0.5
    close(found.effective_neighbors, d / weights.pow(2).sum((1, 2, 3)), TOLERANCE)
    outputs = own.outputs()
    close(found.smoothed_prediction, torch.einsum("nmab,mb->na", weights, outputs), TOLERANCE)
    close(found.shift, outputs - torch.einsum("nmab,mb->na", weights, outputs), TOLERANCE)
    close(found.smoothed_label, torch.einsum("nmab,mb->na", weights, labels), TOLERANCE)
    mass = oracle.trace(weights)
    close(found.negative_share, mass.clamp(max=0).abs().sum(1) / mass.abs().sum(1), TOLERANCE)
    assert (found.bound >= found.shift.norm(dim=1)).all()


def test_denoising_by_signs_agrees_within_its_error_bar(case):
    _, own, _, _ = case
    exact, estimated = lw.denoising(own, exact=True), lw.denoising(own, draws=100)
    close(estimated.smoothed_prediction, exact.smoothed_prediction)
    error = (estimated.factor - exact.factor).abs()
    assert (error <= 5 * estimated.factor_error + 1e-6 * exact.factor).all()


def test_predicted_move(case):
    cross, _, left, right = case
    d = left.shape[1]
    own = left[0] @ left[0].T
    move = torch.randn(d, dtype=torch.float64)
    expected = torch.stack([row @ left[0].T @ torch.linalg.inv(own) @ move for row in right])
    at, of = cross.data.samples(range(1)).inputs, cross.columns.samples(range(5)).inputs
    close(lw.predicted_move(cross.net, at, move, of), expected, TOLERANCE)


def test_centered(case):
    _, own, left, _ = case
    centered = own.with_centering(True)
    inner = oracle.centered(oracle.trace(oracle.inner(left, left)))
    close(centered.with_kernel(lw.INNER_PRODUCT).dense(), inner, TOLERANCE)
    k = oracle.centered(own_correlation(left))
    close(centered.dense(), k, TOLERANCE)
    close(lw.soft_neighbors(centered), k.sum(1), 1e-6)
    weights = torch.randn(7, 3, dtype=torch.float64)
    close(centered @ weights, k @ weights, 1e-6)
    close(centered @ weights[:, 0].numpy(), k @ weights[:, 0], 1e-6)
    close(centered.diagonal(), k.diagonal(), TOLERANCE)


def test_classes(case):
    _, own, left, _ = case
    k, labels = own_correlation(left), torch.tensor([0, 1, 0, 1, 1, 0, 0])
    within, between = lw.class_similarity(own, labels).mean[0]
    members = labels == 0
    pairs = k[members][:, members]
    close(within, (pairs.sum() - pairs.diagonal().sum()) / (4 * 3))
    close(between, k[members][:, ~members].mean())


def test_label_votes(case):
    _, own, left, _ = case
    labels = torch.tensor([0, 1, 2, 1, 1, 0, 2])
    c = oracle.centered(own_correlation(left)).fill_diagonal_(0)
    votes = torch.stack([c.clamp(min=0).pow(4)[:, labels == c_].sum(1) for c_ in range(3)], 1)
    found = lw.label_suspicion(own, labels)
    opinion = torch.zeros(7, max(3, own.d), dtype=torch.float64)
    opinion[:, :3] = votes / votes.sum(1, keepdim=True).clamp(min=1e-300)
    if own.d >= 3:
        opinion = (opinion + own.outputs().softmax(1)) / 2
    for i in range(7):
        mine, rest = opinion[i, labels[i]], [opinion[i, k] for k in range(len(opinion[i])) if k != labels[i]]
        contradicted = (1 - mine + max(rest)) / 2 + 0.1 * (1.01 / (mine + 0.01)).log()
        expected = contradicted / (1 + 0.1 * log(101)) if votes[i].sum() > 0 else torch.tensor(0.0)
        close(found.suspicion[i], expected, 1e-7)
    assert ((found.suspicion >= 0) & (found.suspicion <= 1)).all()
    known = (found.chance_wrong >= 0) & (found.chance_wrong <= 1)
    assert known.all() if found.distinct else found.chance_wrong.isnan().all()
    assert (found.flagged <= found.contested).all() and not (found.contested & found.isolated).any()


def test_novelty(case):
    _, own, left, _ = case
    k = own_correlation(left).clone().fill_diagonal_(-torch.inf)
    close(lw.novelty(own, k=3, parameters=None), 1 - k.sort(1, descending=True).values[:, :3].mean(1))


def test_reliability_of_values(case):
    _, own, left, _ = case
    labels = torch.randn(7, own.d, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    c = oracle.centered(own_correlation(left)).fill_diagonal_(0).clamp(min=0).pow(8)
    found, outputs = lw.reliability(own, labels), own.outputs()
    for i in range(7):
        others = (torch.arange(7) != i).double() / 6  # who has no neighbor gets the mean of all others
        weights = c[i] / c[i].sum() if c[i].sum() > 0 else others
        spread = (labels - labels.mean(0)).square().sum(1).mean().sqrt()
        gap, shift = ((outputs[i] - weights @ of).norm() / spread for of in (labels, outputs))
        close(found.agreement[i], (-gap).exp(), 1e-6)
        close(found.shift[i], shift, 1e-6)
    close(found.closeness, 1 - lw.novelty(own, parameters=None))
    assert found.confidence is None


def test_fit_quality(case):
    _, own, left, _ = case
    labels = torch.randn(7, 2, dtype=torch.float64)
    weights = oracle.trace(oracle.inner(left, left))
    weights = weights / weights.sum(1, keepdim=True)
    variance = (weights @ labels.pow(2) - (weights @ labels).pow(2)).sum(1).clamp(min=0)
    found = lw.fit_quality(own, labels)
    close(found.label_variance, variance)
    assert abs(found.total_variance - labels.var(0, correction=0).sum()) < TOLERANCE
    close(found.neighbors, lw.soft_neighbors(own))
    assert found.verdict in ("underfit", "fit", "overfit")
