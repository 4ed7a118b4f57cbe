"""Neighbors: the largest entries of each row, from columns that come some at a time; counts."""

import pytest
import torch
from torch import nn

import likewise as lw
from likewise.statistics.neighbors import merge_largest

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))


def sorted_rows(values, k):
    """The k largest by a stable sort of everything: of equal entries the first column first."""
    order = values.sort(dim=1, descending=True, stable=True)
    return order.indices[:, :k], order.values[:, :k]


def in_parts(values, k, sizes, transposed=False):
    best, start = None, 0
    for size in sizes:
        part = values[:, start : start + size]
        part = part.T.contiguous().T if transposed else part.contiguous()
        best, start = merge_largest(best, part, start, k), start + size
    assert start == values.shape[1]
    return best


@pytest.mark.parametrize("sizes", [[100], [1, 99], [7, 13, 80], [3] * 33 + [1], [50, 50], [96, 4]], ids=str)
@pytest.mark.parametrize("k", [0, 1, 5, 40, 100])
@pytest.mark.parametrize("levels", [2, 9, 10**6], ids=["mostly equal", "many equal", "none equal"])
@pytest.mark.parametrize("transposed", [False, True])
def test_parts_of_the_columns_give_what_a_stable_sort_gives(sizes, k, levels, transposed):
    generator = torch.Generator().manual_seed(sum(sizes) + k)
    values = torch.randint(0, levels, (17, 100), generator=generator).float() / levels
    values[3] = 0.5  # a row of one value
    values[4] = torch.arange(100)  # every column is better than those before
    values[5] = -values[4]
    found = in_parts(values, k, sizes, transposed)
    indices, largest = sorted_rows(values, k)
    assert torch.equal(found.values, largest)
    assert torch.equal(found.indices, indices)


def test_minus_infinity_is_left_out_as_soon_as_there_are_others():
    values = torch.rand(6, 6, dtype=torch.float64)
    values.fill_diagonal_(-torch.inf)
    for sizes in ([6], [1] * 6, [2, 4], [5, 1]):
        found = in_parts(values, 5, sizes)
        assert found.values.isfinite().all()
        assert torch.equal(found.indices, sorted_rows(values, 5)[0])


def test_many_rows_with_equal_entries():
    values = torch.zeros(200, 30)
    assert torch.equal(merge_largest(None, values, 7, 4).indices, torch.arange(7, 11).expand(200, 4))


def test_thresholds_count_what_equals_them():
    gram = lw.GramMatrix(nn.Linear(3, 2), X[:1].expand(6, 3))
    assert (lw.hard_neighbors(gram, 1.0) == 6).all()
    independent = lw.GramMatrix(nn.Linear(4, 1, bias=False).double(), torch.eye(4).double())
    assert (lw.hard_neighbors(independent, 0.0) == 4).all()  # k = 0 counts at τ = 0
