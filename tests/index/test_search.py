"""Approximate search finds nearly the neighbors of the exhaustive one, and says how nearly."""

import sys

import pytest
import torch
from torch import nn

import likewise as lw


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    pytest.importorskip("faiss")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 3))
    centers = 2 * torch.randn(12, 6)
    x = centers[torch.arange(900) % 12] + 0.4 * torch.randn(900, 6)
    return lw.build_index(net, x, tmp_path_factory.mktemp("index"), width=128, readout=lw.all_outputs)


@pytest.fixture
def new():
    return torch.randn(20, 6, generator=torch.Generator().manual_seed(3))


def shared(one, other):
    pairs = zip(one.indices.tolist(), other.indices.tolist(), strict=True)
    return sum(len(set(a) & set(b)) for a, b in pairs) / one.indices.numel()


def test_neighbors_are_nearly_those_of_all_rows_with_the_same_similarities(index, new):
    found, expected = index.nearest(new, 8, approximate=True), index.nearest(new, 8)
    assert shared(found, expected) > 0.9
    assert index.recall > 0.9
    for row in range(len(new)):
        values = [
            dict(zip(part.indices[row].tolist(), part.similarities[row].tolist(), strict=True))
            for part in (found, expected)
        ]
        for place in values[0].keys() & values[1].keys():
            assert values[0][place] == pytest.approx(values[1][place], abs=1e-5)
    assert (found.similarities.diff(dim=1) <= 0).all() and (found.errors > 0).any()


def test_rows_that_were_removed_are_not_found(index, new, tmp_path):
    import shutil

    shutil.copytree(index.path, tmp_path / "index")
    smaller = lw.Index(tmp_path / "index", model=index.network)
    before = smaller.nearest(new, 5, approximate=True).indices
    smaller.remove(before[:, 0].unique())
    assert smaller.recall is None  # the lists were of other rows
    after = smaller.nearest(new, 5, approximate=True)
    assert not torch.isin(after.indices, before[:, 0]).any()
    assert shared(after, smaller.nearest(new, 5)) > 0.9


def test_plain_similarities_and_a_missing_faiss_are_told(index, new, monkeypatch):
    with pytest.raises(ValueError, match="centered"):
        index.nearest(new, centered=False, approximate=True)
    other = lw.Index(index.path, model=index.network)
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ImportError, match=r"likewise\[faiss\]"):
        other.nearest(new, approximate=True)
    other.nearest(new)
