"""Run folders: what is in them, that a killed run goes on, that nothing is half written or mixed up."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import likewise as lw


def example(n=40, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.randn(n, 5), torch.arange(n) % 3


def test_the_table_holds_what_the_statistics_say(tmp_path):
    model, x, y = example()
    found = lw.analyze(model, (x, y), out=tmp_path / "run", neighbors=4)
    plain, centered = lw.GramMatrix(model, (x, y)), lw.GramMatrix(model, (x, y), centered=True)
    table, votes = found.table, lw.label_suspicion(centered)
    near = lw.nearest(centered, 4)
    close = torch.testing.assert_close
    close(torch.tensor(table["density"].to_numpy()), lw.soft_neighbors(plain) / 40)
    close(torch.tensor(table["uncertainty"].to_numpy()), lw.uncertainty(plain))
    close(torch.tensor(table["isolation"].to_numpy()), 1 - near.similarities[:, 0])
    close(torch.tensor(table["label_suspicion"].to_numpy()), votes.suspicion)
    assert table["suggested_label"].tolist() == votes.suggested.tolist()
    assert table["prediction"].tolist() == model(x).argmax(1).tolist()
    same = (y[near.indices] == y[:, None]).double().mean(1)
    close(torch.tensor(table["agreement"].to_numpy()), same)
    assert found.neighbors(7)["neighbor"].tolist() == near.indices[7].tolist()
    assert len(found.neighbors(7, 2)) == 2
    assert found.summary.samples == 40 and found.summary.contested == int(votes.contested.sum())
    assert "40 samples" in repr(found) and "<table" in found._repr_html_()
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "manifest.json",
        "neighbors.parquet",
        "samples.parquet",
    ]


def test_labels_are_optional_and_may_be_numbers(tmp_path):
    model, x, _ = example()
    assert "label_suspicion" not in lw.analyze(model, x, out=tmp_path / "a").table
    assert lw.analyze(model, (x, torch.randn(40)), out=tmp_path / "b").summary.contested is None


def test_a_finished_run_is_not_done_again(tmp_path, monkeypatch):
    model, x, y = example()
    first = lw.analyze(model, (x, y), out=tmp_path / "run")
    before = {p.name: p.read_bytes() for p in first.folder.iterdir()}
    monkeypatch.setattr("likewise.runs._stages", lambda *_: 1 / 0)
    again = lw.analyze(model, (x, y), out=tmp_path / "run")
    assert {p.name: p.read_bytes() for p in again.folder.iterdir()} == before


def test_another_model_data_set_or_option_is_refused(tmp_path):
    model, x, y = example()
    out = tmp_path / "run"
    lw.analyze(model, (x, y), out=out)
    with pytest.raises(ValueError, match="another model"):
        lw.analyze(example(seed=1)[0], (x, y), out=out)
    with pytest.raises(ValueError, match="another data"):
        lw.analyze(model, (x + 1, y), out=out)
    with pytest.raises(ValueError, match="another options"):
        lw.analyze(model, (x, y), out=out, neighbors=3)
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="something else than a run"):
        lw.analyze(model, (x, y), out=tmp_path / "else")
    with pytest.raises(FileNotFoundError, match="no run"):
        lw.Analysis(tmp_path)


def test_a_stage_that_was_tampered_with_is_done_again(tmp_path, monkeypatch):
    from likewise import runs

    model, x, y = example()
    out = tmp_path / "run"
    monkeypatch.setattr(runs._Run, "finish", lambda self, n: None)
    with pytest.raises(ValueError, match="not finished"):
        lw.analyze(model, (x, y), out=out)
    monkeypatch.undo()
    (out / "stages" / "neighbors.npz").write_bytes(b"broken")
    assert len(lw.analyze(model, (x, y), out=out).table) == 40


SCRIPT = """
import sys, time, torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[2])
from test_runs import example
import likewise as lw
model, x, y = example(400)
from likewise import runs
plain = runs._replaced
runs._replaced = lambda path, write: (time.sleep(0.05), plain(path, write), time.sleep(0.05))
lw.analyze(model, (x, y), out=sys.argv[1])
"""


def killed_and_resumed(tmp_path, times):
    def start(out):
        return subprocess.Popen([sys.executable, "-c", SCRIPT, str(out), str(Path(__file__).parent)])

    assert start(tmp_path / "whole").wait() == 0
    begun = time.perf_counter()
    assert start(tmp_path / "again").wait() == 0
    whole, chance = time.perf_counter() - begun, random.Random(0)
    for i in range(times):
        out = tmp_path / f"killed{i}"
        process = start(out)
        time.sleep(chance.uniform(0.4, 1) * whole)
        process.kill()
        process.wait()
        assert start(out).wait() == 0
        for name in ("samples.parquet", "neighbors.parquet"):
            assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), (i, name)
        assert json.loads((out / "manifest.json").read_text())["finished"]
        assert not list(out.glob("**/*.part*"))


def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path):
    killed_and_resumed(tmp_path, 2)


@pytest.mark.slow
def test_a_run_killed_at_ten_moments_goes_on_to_the_same_bytes(tmp_path):
    killed_and_resumed(tmp_path, 10)


def test_a_run_killed_before_its_first_note_goes_on(tmp_path):
    model, x, y = example()
    (tmp_path / "manifest.part.json").write_text("{")
    assert len(lw.analyze(model, (x, y), out=tmp_path).table) == 40
