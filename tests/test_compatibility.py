"""Folders that earlier versions wrote (old_folders): read as written, or refused with what to do."""

import importlib
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

import likewise as lw
from likewise.cli.app import exit_code
from likewise.manifest import check_integrity

DATA = Path(__file__).parent / "old_folders"
RUN, INDEX = DATA / "run-0.1.0", DATA / "index-schema-1"
DIRECTIONS = (
    r"written by 0\.1\.0 with schema 3, .* reads and writes schema 5\. Analyze again into a new folder"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a copy of the data, as the current folder: its settings name files beside them."""
    shutil.copytree(DATA, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def model(monkeypatch):
    monkeypatch.syspath_prepend(DATA)
    net = importlib.import_module("net").model
    net.load_state_dict(load_file(DATA / "net.safetensors"))
    return net


def rows():
    return torch.tensor(pd.read_csv(DATA / "data.csv").drop(columns="label").to_numpy("float32"))


def test_a_run_of_0_1_is_refused_with_what_to_do(model, folder):
    run = folder / "run-0.1.0"
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    for act in (
        lambda: lw.Analysis(run),
        lambda: check_integrity(run),
        lambda: lw.analyze(model, rows(), out=run),
    ):
        with pytest.raises(ValueError, match=DIRECTIONS):
            act()
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


def test_commands_refuse_a_run_of_0_1_in_one_line(folder, capsys):
    for command in ("report", "verify"):
        assert exit_code([command, "run-0.1.0"]) == 2, command
        said = " ".join(capsys.readouterr().err.split())
        assert "likewise analyze RUN/settings.toml --out NEW" in said, command


def test_the_settings_of_a_run_of_0_1_start_it_again(folder):
    """The advice of the message works; what both versions define alike has the same numbers."""
    assert exit_code(["analyze", "run-0.1.0/settings.toml", "--out", "again", "-q"]) == 0
    old, new = pd.read_parquet(RUN / "samples.parquet"), lw.Analysis(folder / "again").table
    for name in ("label", "prediction"):
        assert new[name].tolist() == old[name].tolist()
    for name in ("density", "uncertainty"):
        assert new[name].to_numpy() == pytest.approx(old[name].to_numpy(), rel=1e-4), name
    assert new["hard_neighbors"].tolist() == old["near"].tolist()


def test_the_first_index_is_opened_as_it_was_written():
    index = lw.Index(INDEX)
    labels = pd.read_csv(DATA / "data.csv")["label"]
    assert [index.class_name(label) for label in index.labels.tolist()] == labels.tolist()
    raw = load_file(INDEX / "shard-000000000000.safetensors")
    origin = load_file(next(INDEX.glob("origins-*")))
    assert (index.width, len(index.rows)) == (56, 40)
    found = index.sketches([0, 7]).double()
    assert found.shape == (2, 56)
    (stored,) = [value for value in raw.values() if value.shape == (40, 56)]
    (shift,) = [value for value in origin.values() if value.shape[-1] == 56]
    assert torch.allclose(found, stored[[0, 7]].double() + shift.double().view(-1, 56)[:1], atol=1e-6)


def test_the_first_index_is_not_compared_with_sketches_of_this_version(model):
    with pytest.raises(
        ValueError, match=r"another version of likewise \(0\.1\.0, here .*rebuild it with this one"
    ):
        lw.Index(INDEX, model=model)
