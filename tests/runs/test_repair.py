"""Damage to a run is noticed, named and repaired; what is whole is left alone."""

import json

import pytest
import torch
from torch import nn

import likewise as lw
from likewise.gram import Reducer
from likewise.manifest import SCHEMA, DamagedRunError, check_integrity, read_manifest, write_manifest
from likewise.runs import columns, stages

PARTS = (
    "details.parquet",
    "duplicates.parquet",
    "manifest.json",
    "neighbors.parquet",
    "pictures.parquet",
    "report.html",
    "samples.parquet",
    "settings.toml",
)


def example(seed=0, n=30):
    torch.manual_seed(seed)
    return (
        nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)),
        torch.randn(n, 5),
        torch.arange(n) % 3,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    torch.set_num_threads(1)
    model, x, y = example()
    return lw.analyze(model, (x, y), out=tmp_path_factory.mktemp("whole") / "run").folder


@pytest.fixture
def run(whole, tmp_path):
    import shutil

    return shutil.copytree(whole, tmp_path / "run")


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def flip(path, place, bit=0):
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1 << bit
    path.write_bytes(raw)


def test_every_file_of_a_run_is_known(whole):
    assert sorted(path.name for path in whole.iterdir()) == sorted(PARTS)
    found = check_integrity(whole)
    assert found.whole and found.files == len(PARTS)
    assert found.bytes == sum(path.stat().st_size for path in whole.iterdir())


@pytest.mark.parametrize("name", PARTS)
def test_a_flipped_bit_is_noticed_wherever_it_is(run, name):
    size = (run / name).stat().st_size
    for i, place in enumerate([0, 7, size // 3, size // 2, size - 40, size - 1]):
        flip(run / name, place, i)
        assert list(check_integrity(run).damaged) == [name]
        if name == "report.html":
            with pytest.warns(UserWarning, match="report.html is damaged"):
                lw.Analysis(run)
        else:
            with pytest.raises(DamagedRunError, match=name) as caught:
                lw.Analysis(run)
            assert list(caught.value.parts) == [name]
        flip(run / name, place, i)
        assert check_integrity(run).whole


@pytest.mark.parametrize("name", PARTS)
def test_the_same_call_rebuilds_what_is_damaged_and_leaves_the_rest(run, name):
    before, times = content(run), {path.name: path.stat().st_mtime_ns for path in run.iterdir()}
    flip(run / name, (run / name).stat().st_size // 2)
    model, x, y = example()
    lw.analyze(model, (x, y), out=run)
    assert check_integrity(run).whole
    after = content(run)
    same = {part for part in PARTS if after[part] == before[part]}
    touched = {path.name for path in run.iterdir() if path.stat().st_mtime_ns != times[path.name]}
    if name == "manifest.json":  # it says what the run took, and the report shows that
        assert same >= set(PARTS) - {name, "report.html"} and touched <= {name, "report.html"}
    else:
        assert same >= set(PARTS) - {"report.html"} and touched - {"manifest.json"} == {name}


@pytest.mark.parametrize("name", ["samples.parquet", "settings.toml", "report.html"])
@pytest.mark.parametrize("damage", ["empty", "missing"])
def test_an_empty_or_missing_file_is_rebuilt(run, name, damage):
    before = content(run)
    if damage == "empty":
        (run / name).write_bytes(b"")
    else:
        (run / name).unlink()
    assert list(check_integrity(run).damaged) == [name]
    model, x, y = example()
    lw.analyze(model, (x, y), out=run)
    after = content(run)
    assert check_integrity(run).whole and len(after["report.html"]) == len(before["report.html"])
    if name == "report.html":  # its scripts carry a random number
        del before[name], after[name]
    assert after == before


def test_a_damaged_run_is_not_rebuilt_for_another_model(run):
    _, x, y = example()
    flip(run / "samples.parquet", 100)
    with pytest.raises(ValueError, match="another model"):
        lw.analyze(example(1)[0], (x, y), out=run)
    flip(run / "manifest.json", 100)
    with pytest.raises(ValueError, match="of another run"):
        lw.analyze(example(1)[0], (x, y), out=run)


def test_the_schema_is_checked(run):
    model, x, y = example()
    state = read_manifest(run)
    for other in (SCHEMA + 1, 4, 3):
        write_manifest(run, {**state, "schema": other})
        for act in (
            lambda: lw.Analysis(run),
            lambda: check_integrity(run),
            lambda: lw.analyze(model, (x, y), out=run),
        ):
            with pytest.raises(ValueError, match=f"schema {other}"):
                act()
    (run / "manifest.json").write_text(
        json.dumps({**state, "schema": 3})
    )  # from before manifests were sealed
    with pytest.raises(ValueError, match="schema 3"):
        lw.Analysis(run)


def test_stages_of_other_versions_are_recomputed(tmp_path, whole, monkeypatch):
    model, x, y = example()
    monkeypatch.setattr("likewise.runs.tables._neighbor_table", lambda *_: 1 / 0)
    out = tmp_path / "run"
    with pytest.raises(ZeroDivisionError):
        lw.analyze(model, (x, y), out=out)
    monkeypatch.undo()
    assert not check_integrity(out).finished and not check_integrity(out).damaged
    state = read_manifest(out)
    state["stages"]["pairs"]["versions"] = {"torch": "2.0.0", "likewise": "0.0.1"}
    write_manifest(out, state)
    done = []
    plain = {name: getattr(stages, name) for name in ("pair_statistics", "pass_statistics")}
    for name in plain:
        monkeypatch.setattr(stages, name, lambda *a, name=name: (done.append(name), plain[name](*a))[1])
    lw.analyze(model, (x, y), out=out)
    assert done == ["pair_statistics"]
    assert (out / "samples.parquet").read_bytes() == (whole / "samples.parquet").read_bytes()


class StrongestReducer(Reducer):
    """The largest similarity of each row to another sample."""

    def __call__(self, strip):
        return (strip.without_self(strip.similarity, -torch.inf).amax(1),)


def add_columns(monkeypatch):
    """Let runs have one more column from pairs and one from passes, as a newer state of the code would."""
    passes = columns.pass_statistics
    monkeypatch.setattr(
        stages, "pass_statistics", lambda gram: {**passes(gram), "one": torch.ones(gram.shape[0])}
    )
    monkeypatch.setattr(stages, "PASS_ARRAYS", (*columns.PASS_ARRAYS, "one"))
    strongest = columns.PairStatistic(("strongest",), lambda request: StrongestReducer())
    monkeypatch.setattr(columns, "PAIR_STATISTICS", (*columns.PAIR_STATISTICS, strongest))
    for name in ("strongest", "one"):
        monkeypatch.setitem(columns.COLUMNS, name, lambda results, name=name: results.found[name])


def test_a_stopped_run_computes_the_columns_that_newer_code_adds(tmp_path, monkeypatch):
    model, x, y = example()
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr("likewise.runs.tables._neighbor_table", lambda *_: 1 / 0)
        lw.analyze(model, (x, y), out=tmp_path / "run")
    add_columns(monkeypatch)
    run = lw.analyze(model, (x, y), out=tmp_path / "run")
    assert run.table.strongest.iloc[7] == pytest.approx(run.neighbors(7).similarity.iloc[0], abs=1e-6)
    assert run.table.one.eq(1).all()
    assert run.table.equals(lw.analyze(model, (x, y), out=tmp_path / "new").table)


@pytest.mark.parametrize("n", [40, 1100], ids=["one matrix", "strips"])
def test_parts_without_a_column_that_newer_code_adds_are_refused_by_name(tmp_path, monkeypatch, n):
    model, x, y = example(n=n)
    options = {"exact": True, "max_memory": 2**24}
    folders = [tmp_path / "one", tmp_path / "two"]
    for i, folder in enumerate(folders, 1):
        lw.analyze_part(model, (x, y), part=(i, 2), out=folder, **options)
    add_columns(monkeypatch)
    with pytest.raises(
        ValueError, match=r"one lacks statistics .*: delete that folder, compute the part again"
    ):
        lw.analyze(model, (x, y), out=tmp_path / "run", parts=folders, **options)
