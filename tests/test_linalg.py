import pytest
import torch

from likewise.linalg import LONG_RUN, matrix_power, power_, rank_floor, split_product
from likewise.statistics.reliability import wilson_interval


@pytest.mark.parametrize("d", [1, 2, 5])
@pytest.mark.parametrize("exponent", [-1, -0.5, 0.5, 1, 2])
def test_power_of_positive_matrices(d, exponent):
    a = torch.randn(4, d, d + 2, dtype=torch.float64)
    found = matrix_power(a @ a.mT, exponent, 1e-12)
    values, vectors = torch.linalg.eigh(a @ a.mT)
    assert torch.allclose(found.matrix, vectors @ torch.diag_embed(values**exponent) @ vectors.mT)
    assert (found.rank == d).all()


@pytest.mark.parametrize("d", [1, 3])
def test_null_directions_stay_null(d):
    zero = torch.zeros(2, d, d, dtype=torch.float64)
    assert (matrix_power(zero, -0.5, 1e-12).matrix == 0).all() and (
        matrix_power(zero, -0.5, 1e-12).rank == 0
    ).all()
    a = torch.randn(2, d, 1, dtype=torch.float64)
    found = matrix_power(a @ a.mT, -1, 1e-12)
    assert torch.allclose(found.matrix, torch.linalg.pinv(a @ a.mT)) and (found.rank == 1).all()


def test_floor_is_relative_to_what_was_subtracted():
    small = torch.full((1, 1, 1), 1e-14, dtype=torch.float64)
    assert matrix_power(small, -1, 1e-12).rank == 1
    assert matrix_power(small, -1, 1e-12, scale=torch.ones(1, dtype=torch.float64)).rank == 0


def test_floor_grows_with_the_units_of_rounding():
    floors = [rank_floor(t) for t in (torch.float64, torch.float32, torch.float16, torch.bfloat16)]
    assert floors == sorted(floors) and floors[-1] < 0.02


@pytest.mark.parametrize("hits, misses", [(0, 5), (5, 0), (1, 1), (40, 60)])
def test_wilson_interval_solves_its_equation(hits, misses):
    n = hits + misses
    share, low, high = wilson_interval(hits, n)
    for end in (low, high):  # where the share is 1.96 deviations away, each counted at that end
        assert min(end, 1 - end) < 1e-9 or abs((share - end) ** 2 - 1.959964**2 * end * (1 - end) / n) < 1e-6
    assert 0 <= low <= share <= high <= 1 and wilson_interval(0, 0)[1:] == (0.0, 1.0)


@pytest.mark.parametrize("stacks", [((), (3,)), ((3,), ()), ((2, 1), (3,)), ((), ())], ids=str)
def test_long_products_of_stacks_that_broadcast(stacks):
    p = LONG_RUN + 7  # several runs, and a rest
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*stack, n, p, generator=generator) for stack, n in zip(stacks, (2, 4), strict=True))
    torch.testing.assert_close(split_product(a, b).double(), a.double() @ b.double().mT, atol=1e-3, rtol=0)


@pytest.mark.parametrize("exponent", [1, 2, 3, 4, 4.0, 8, 2.5])
def test_powers_in_place_are_powers(exponent):
    values = torch.linspace(0, 2, 41, dtype=torch.float64)
    found = power_(kept := values.clone(), exponent)
    assert found is kept
    torch.testing.assert_close(found, values**exponent, rtol=1e-14, atol=0)


@pytest.mark.parametrize("exponent", [-1, -0.5, 0.5])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_matrix_that_is_not_finite_does_not_spread_to_others(exponent, bad):
    a = torch.randn(4, 3, 3, dtype=torch.float64)
    symmetric = a @ a.mT
    expected = matrix_power(symmetric, exponent, 1e-12)
    symmetric[2, 0, 1] = bad
    found = matrix_power(symmetric, exponent, 1e-12)
    others = [0, 1, 3]
    assert torch.equal(found.matrix[others], expected.matrix[others]) and found.rank.tolist() == [3, 3, 0, 3]
    assert found.matrix[2].isnan().all()
