"""What of a user's data is in a report and in the files beside it: what was asked for, and nothing else."""

import base64
import gzip
import json
import re

import numpy as np
import pandas
import pytest
import torch

import likewise as lw
from likewise.cli.app import exit_code
from likewise.report.pages import write_report

HEAD = "from torch import nn\nimport torch\n"
NET = HEAD + "def model():\n    torch.manual_seed(0)\n    return nn.Linear(2, 2)\n"
PRIVATE = ("ann@home", "DE00 1234")


def write_table(folder):
    """Write a model, and a table of which two columns are inputs."""
    (folder / "net.py").write_text(NET)
    numbers = np.random.default_rng(0).normal(size=(40, 2))
    frame = pandas.DataFrame(numbers, columns=["age", "income"])
    frame["kind"] = np.where(numbers[:, 0] > 0, 'quote"d', "</script><i>")
    frame["email"], frame["account"], frame["note"] = *PRIVATE, "x" * 900
    frame.to_csv(folder / "clients.csv", index=False)


def texts_of(report):
    """Return everything that a report holds of data, as text."""
    html = report.read_text()
    packed = re.search(r'id="data">([^<]*)<', html)[1]
    return html.replace(packed, "") + gzip.decompress(base64.b64decode(packed)).decode("latin1")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Analyze the table from its own folder, with paths from the root."""
    home = tmp_path / "ann-private-home"
    home.mkdir()
    monkeypatch.chdir(home)
    monkeypatch.setenv("HOME", str(home))
    write_table(home)

    def analyze(out, *options):
        words = [f"{home}/net.py:model", f"{home}/clients.csv", "--label", "kind", "--columns", "age,income"]
        assert exit_code(["analyze", *words, "--out", out, "--quiet", *options]) == 0
        return home / out

    return analyze


def test_columns_that_were_not_asked_for_are_nowhere(run):
    folder = run("run")
    held = texts_of(folder / "report.html")
    tables = [pandas.read_parquet(path).to_csv() for path in folder.glob("*.parquet")]
    for text in (held, *tables, *(path.read_text() for path in (folder / "manifest.json",))):
        assert not any(secret in text for secret in (*PRIVATE, "xxx"))
    assert '"income"' in held and '"kind"' in held
    shown = texts_of(run("named", "--show-columns", "email,note") / "report.html")
    assert PRIVATE[0] in shown and PRIVATE[1] not in shown
    assert "x" * 199 + "…".encode().decode("latin1") in shown and "x" * 200 not in shown
    longer = texts_of(run("long", "--show-columns", "note", "--excerpt-length", "500") / "report.html")
    assert "x" * 499 in longer and "x" * 500 not in longer


def test_a_folder_with_other_columns_shown_is_not_taken_for_the_same(run, capsys):
    run("run", "--show-columns", "email")
    words = ["analyze", "net.py:model", "clients.csv", "--label", "kind", "--columns", "age,income"]
    assert exit_code([*words, "--out", "run", "-q"]) == 2
    assert "another naming" in capsys.readouterr().err


def test_no_path_tells_whose_machine_it_was(run, tmp_path):
    folder = run("run")
    for name in ("report.html", "manifest.json", "settings.toml"):
        text = texts_of(folder / name) if name == "report.html" else (folder / name).read_text()
        assert "ann-private-home" not in text and str(tmp_path) not in text
    assert exit_code(["analyze", str(folder / "settings.toml"), "--out", "again", "--quiet"]) == 0


def test_a_path_elsewhere_is_kept_for_going_on_but_not_in_the_report(run, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "ann-private-home" / "clients.csv").rename(elsewhere / "clients.csv")
    words = ["net.py:model", f"{elsewhere}/clients.csv", "--label", "kind", "--columns", "age,income"]
    assert exit_code(["analyze", *words, "--out", "run", "--quiet"]) == 0
    folder = tmp_path / "ann-private-home" / "run"
    assert f"{elsewhere}/clients.csv" in (folder / "settings.toml").read_text()
    held = texts_of(folder / "report.html")
    assert "…/clients.csv" in held and str(tmp_path) not in held


def test_paths_in_the_home_folder_are_written_without_its_name(tmp_path, monkeypatch):
    from likewise.runs.settings import Settings, read_settings

    home, here = tmp_path / "ann", tmp_path / "here"
    for folder in (home, here):
        folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    given = Settings(model=f"{home}/net.py:model", data=f"{here}/data/x.csv", weights="/mnt/w.pt")
    text = given.text()
    assert 'model = "~/net.py:model"' in text and 'data = "data/x.csv"' in text and '"/mnt/w.pt"' in text
    (here / "settings.toml").write_text(text)
    assert read_settings("settings.toml").model == "~/net.py:model"


def test_each_report_has_a_nonce_of_its_own_and_no_script_of_a_user(run):
    folder = run("run")
    once = (folder / "report.html").read_text()
    again = write_report(folder).read_text()
    nonces = [re.search(r"'nonce-([^']+)'", text)[1] for text in (once, again)]
    assert nonces[0] != nonces[1] and all(len(nonce) >= 22 for nonce in nonces)
    assert json.loads((folder / "manifest.json").read_text())["data"][:24] not in nonces
    assert (
        "unsafe-eval" not in once and "</script><i>" not in texts_of(folder / "report.html").split("{", 1)[0]
    )


def test_no_cell_of_an_exported_table_is_a_formula(tmp_path):
    x = torch.randn(8, 3)
    names = ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(1)", "\tx", "x\r=1+1", "＝1+1", "-1.5e3"]
    extra = {"=own": names, "below": -torch.arange(8), "plain": list("abcdefgh")}
    found = lw.analyze(torch.nn.Linear(3, 2), x, out=tmp_path / "run", names=names, extra=extra)
    from likewise.runs.export import export_run

    table = pandas.read_csv(export_run(found, "csv", tmp_path / "t.csv"))
    escaped = [name if name.startswith("x") else f"'{name}" for name in names[:-1]]
    assert table["name"].tolist() == [*escaped, "-1.5e3"]
    assert table["'=own"].tolist() == table["name"].tolist()
    assert table["below"].tolist() == [-i for i in range(8)] and table["plain"].tolist() == list("abcdefgh")
    assert table["sample"].tolist() == list(range(8))
    metadata = (export_run(found, "projector", tmp_path / "p") / "metadata.tsv").read_text()
    assert not re.search(r"(^|\t)[=+@]", metadata, re.MULTILINE)
