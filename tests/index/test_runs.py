"""A run keeps its sketches as an index."""

import pytest
import torch
from torch import nn

import likewise as lw
from likewise.cli.app import exit_code
from likewise.gram import error_factors
from likewise.index.pairs import summarize
from likewise.index.store import IndexFolder


def test_a_sketched_run_keeps_an_index_that_can_be_asked(tmp_path, files_of):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    x, y = torch.randn(90, 6), torch.randint(3, (90,))
    lw.analyze(model, (x, y), out=tmp_path / "run", sketch=128, classes=["a", "b", "c"])
    index = lw.Index(tmp_path / "run" / "index", model=model, data=(x, y))
    assert len(index) == 90 and index.classes == ["a", "b", "c"] and torch.equal(index.labels, y)
    new = torch.randn(4, 6)
    built = lw.build_index(index.network, (x, y), tmp_path / "built", width=index.width)
    assert built.manifest["projection"] == index.manifest["projection"]
    assert torch.allclose(built.sketches(), index.sketches(), atol=1e-3)
    assert torch.equal(index.nearest(new).indices, built.nearest(new).indices)
    found = lw.nearest(lw.GramMatrix(index.network, new, columns=(x, y), centered=True), 10)
    again = index.nearest(new, exact=True, candidates=90)
    assert torch.allclose(again.similarities, found.similarities, atol=1e-4)
    assert exit_code(["verify", str(tmp_path / "run")]) == 0
    before = files_of(index.path)
    lw.analyze(model, (x, y), out=tmp_path / "run", sketch=128, classes=["a", "b", "c"])
    assert files_of(index.path) == before


def test_the_novelty_that_a_run_gives_its_index_is_that_of_the_rows(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    x, y = torch.randn(1500, 6), torch.randint(3, (1500,))
    lw.analyze(model, (x, y), out=tmp_path / "run", sketch=128)
    folder = IndexFolder.open(tmp_path / "run" / "index")
    given = folder.read_tensors("summary")
    summarize(folder)
    found = folder.read_tensors("summary")
    assert given.keys() == found.keys()
    for name, values in found.items():
        torch.testing.assert_close(given[name], values, rtol=0, atol=1e-3, msg=name)


def test_new_tables_are_read_by_the_names_of_columns(tmp_path):
    pandas = pytest.importorskip("pandas")
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 3), torch.randn(60, 4), torch.arange(60) % 3
    table, turned = pandas.DataFrame(x.numpy(), columns=list("abcd")), ["d", "b", "a", "c"]
    lw.analyze(model, (table, y), out=tmp_path / "run", sketch=64)
    lw.build_index(model, lw.batches(x, labels=y, columns=list("abcd")), tmp_path / "index")
    for path in (tmp_path / "run" / "index", tmp_path / "index"):
        index = lw.Index(path, model=model, data=(table[turned], y))
        assert index.columns == list("abcd")
        assert index.nearest(table[turned][:5], k=1).indices.flatten().tolist() == [0, 1, 2, 3, 4]
        assert index.nearest(x[:5], k=1, exact=True).indices.flatten().tolist() == [0, 1, 2, 3, 4]
        with pytest.raises(ValueError, match="no column 'c'"):
            index.explain(table.rename(columns={"c": "e"}))
        index.add(table[turned][:3], labels=y[:3])
        assert torch.allclose(index.sketches([60, 61, 62]), index.sketches([0, 1, 2]), atol=1e-2)
    other = lw.build_index(model, (table[turned], y), tmp_path / "other", width=index.width)
    with pytest.raises(ValueError, match="from the columns d, b, a, c"):
        index.merge(other)


def test_a_run_keeps_no_index_if_told_not_to(tmp_path):
    x, y = torch.randn(40, 4), torch.randint(3, (40,))
    lw.analyze(nn.Linear(4, 3), (x, y), out=tmp_path / "run", sketch=64, index=False)
    assert not (tmp_path / "run" / "index").exists()


def test_the_index_of_a_run_with_projected_outputs_is_asked_without_naming_them(tmp_path):
    torch.manual_seed(0)
    net, x = torch.nn.Linear(6, 20), torch.randn(60, 6)
    lw.analyze(net, (x, torch.arange(60) % 20), out=tmp_path / "run", sketch=64)
    index = lw.Index(tmp_path / "run" / "index", model=net)
    assert index.manifest["readout"]["arguments"] == {"r": 4, "seed": 0}
    assert index.nearest(x[:3], k=1).indices.flatten().tolist() == [0, 1, 2]


def test_the_index_of_a_run_states_the_errors_of_its_own_projection(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(640, 2) @ torch.randn(2, 20)  # few directions, so that projections differ
    model = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 1))
    y = torch.arange(640) % 2
    lw.analyze(model, (x, y), out=tmp_path / "run", sketch=64, readout=lw.all_outputs)
    index = lw.Index(tmp_path / "run" / "index", model=model)
    factors = index._columns.error_factors
    places = torch.linspace(0, 639, 32, dtype=torch.float64).long()
    exact = lw.GramMatrix(index.network, x[places]).dense()
    expected = error_factors(index.sketches(places), exact.double(), 1)
    assert torch.allclose(factors, torch.tensor(expected), rtol=0.005)
    assert (factors - 1).abs().max() > 0.05
