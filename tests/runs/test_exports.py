"""Exports: class names, scores in the receiver's direction, and decisions that come back as they were made.

The receivers' own validators run where they are installed: `make test-exports`, or LIKEWISE_RECEIVERS, a folder
with one environment for each (TOOL/bin/python), since some of them ask for older versions than this project.
"""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch

import likewise as lw
from likewise.cli.app import exit_code
from likewise.runs.apply import read_decisions
from likewise.runs.export import EXPORTS, export_run
from likewise.runs.export.datalab import datalab_issues, register_issue_manager
from likewise.runs.export.suspects import OTHER_ANSWERS, select_suspects
from likewise.runs.review import Decision, OtherRunError

CLASSES = ["ant & <bee>", "cow", "Ünïcode 猫"]
MODULES = {
    "label-studio": "label_studio_sdk",
    "argilla": "argilla",
    "fiftyone": "fiftyone",
    "spotlight": "renumics.spotlight",
}
ANSWERS = {verdict: answer for answer, verdict in OTHER_ANSWERS.items()}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """150 small images of three classes, a tenth of them mislabeled."""
    torch.set_num_threads(1)
    chance = torch.Generator().manual_seed(0)
    truth = torch.arange(150) % 3
    x = torch.rand(150, 1, 8, 8, generator=chance) * 0.4
    x[torch.arange(150), 0, truth * 2] += 0.6
    y = torch.where(torch.arange(150) % 10 == 3, (truth + 1) % 3, truth)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return lw.analyze(net, (x, y), out=tmp_path_factory.mktemp("exports") / "run", classes=CLASSES)


def decisions_on(run, samples):
    """Decisions of every kind, by turns, about samples."""
    labels, found = run.table["label"].to_numpy(), []
    for place, sample in enumerate(samples):
        kind = ("relabel", "right", "wrong", "unsure", "drop")[place % 5]
        number = (int(labels[sample]) + 1 + place % 2) % 3 if kind == "relabel" else None
        found.append(Decision(sample, kind, number))
    return found


def answer(run, decision):
    """What a reviewer chooses in a tool of annotation to say so."""
    if decision.verdict == "right":
        return CLASSES[run.table["label"][decision.sample]]
    return CLASSES[decision.label] if decision.verdict == "relabel" else ANSWERS[decision.verdict]


def receiver(tool, folder):
    """What the receiver's own code says of a folder, in its own environment."""
    place = os.environ.get("LIKEWISE_RECEIVERS")
    python = sys.executable if place is None else f"{place}/{tool}/bin/python"
    known = subprocess.run([python, "-c", f"import {MODULES[tool]}"], capture_output=True, text=True)
    if known.returncode:
        pytest.skip(f'{tool} is not installed: make test-exports, or pip install "likewise[exports]"')
    script = Path(__file__).with_name("receivers.py")
    found = subprocess.run([python, script, tool, folder], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-3000:]
    return int(found.stdout.split()[-1])


def test_suspects_come_worst_first_with_names_and_confidence(run):
    suspects = select_suspects(run, 100)
    suspicions = [s.suspicion for s in suspects.samples]
    assert len(suspects.samples) == 100 and suspicions == sorted(suspicions, reverse=True)
    assert {s.label for s in suspects.samples} <= set(CLASSES) and suspects.shows_images
    flagged = select_suspects(run)
    assert {s.sample for s in flagged.samples} == set(run.table.index[run.table["label_issue"]])
    for suspect in suspects.samples:
        row = run.table.loc[suspect.sample]
        assert (suspect.label, suspect.suggested) == (CLASSES[row["label"]], CLASSES[row["suggested_label"]])
        expected = row["label_suspicion"] if np.isnan(row["chance_wrong"]) else row["chance_wrong"]
        assert abs(suspect.confidence - np.clip(expected, 0, 1)) < 1e-6


def annotated(run, folder, tool):
    """The file that a tool of annotation exports, with the decisions that were made in it."""
    suspects = select_suspects(run, 100).samples
    made = decisions_on(run, [s.sample for s in suspects])
    answers = [answer(run, decision) for decision in made]
    (folder / "decided.json").write_text(json.dumps(answers))
    content = json.loads((folder / ("tasks.json" if tool == "label-studio" else "records.json")).read_text())
    for entry, chosen in zip(content, answers, strict=True):
        if tool == "label-studio":
            region = {
                "from_name": "label",
                "to_name": "sample",
                "type": "choices",
                "value": {"choices": [chosen]},
            }
            entry["annotations"] = [{"result": [region], "was_cancelled": False}]
        else:
            entry["responses"] = {"label": [{"value": chosen, "user_id": "x"}]}
    return content, sorted(made)


@pytest.mark.parametrize("tool", ["label-studio", "argilla"])
def test_a_hundred_decisions_come_back_identical(run, tmp_path, tool):
    words = [
        "export",
        str(run.folder),
        "--to",
        tool,
        "-o",
        str(tmp_path / "out"),
        "--count",
        "100",
        "--quiet",
    ]
    assert exit_code(words) == 0
    content, made = annotated(run, tmp_path / "out", tool)
    (tmp_path / "export.json").write_text(json.dumps(content))
    assert read_decisions(run, tmp_path / "export.json") == made
    applied = lw.apply_decisions(run, tmp_path / "export.json")
    assert len(applied.changes) == 100 and applied.relabeled == 20 and applied.dropped == 40
    content[3]["annotations" if tool == "label-studio" else "responses"] = (
        [] if tool == "label-studio" else {}
    )
    (tmp_path / "export.json").write_text(json.dumps(content))
    skipped = select_suspects(run, 100).samples[3].sample
    assert read_decisions(run, tmp_path / "export.json") == [d for d in made if d.sample != skipped]


@pytest.mark.parametrize("tool", ["label-studio", "argilla"])
def test_answers_of_others_and_disagreement_are_refused(run, tmp_path, tool):
    export_run(run, tool, tmp_path / "out", count=100)
    content, _ = annotated(run, tmp_path / "out", tool)
    about = "data" if tool == "label-studio" else "metadata"

    def refused(message, change, kind=ValueError):
        changed = json.loads(json.dumps(content))
        change(changed[0])
        (tmp_path / "export.json").write_text(json.dumps(changed))
        with pytest.raises(kind, match=message):
            read_decisions(run, tmp_path / "export.json")

    def disagree(entry):
        if tool == "label-studio":
            other = json.loads(json.dumps(entry["annotations"][0]).replace(CLASSES[0], CLASSES[1]))
            other["result"][0]["value"]["choices"] = ["[drop]"]
            entry["annotations"].append(other)
        else:
            entry["responses"]["label"].append({"value": "[drop]", "user_id": "y"})

    refused("another data set", lambda e: e[about].update(run="0" * 64), OtherRunError)
    refused("samples are 0 to 149", lambda e: e[about].update(sample=150))
    refused("without run and sample", lambda e: e[about].pop("sample"))
    refused("disagree", disagree)


@pytest.mark.parametrize("tool", ["label-studio", "argilla"])
def test_the_receiver_of_suspects_accepts_them_and_gives_decisions_back(run, tmp_path, tool):
    export_run(run, tool, tmp_path / "out", count=100)
    _, made = annotated(run, tmp_path / "out", tool)
    assert receiver(tool, tmp_path / "out") == 100
    assert read_decisions(run, tmp_path / "out" / "export.json") == made


@pytest.mark.parametrize("tool", ["fiftyone", "spotlight"])
def test_the_receiver_of_a_run_reads_it(run, tmp_path, tool):
    export_run(run, tool, tmp_path / "out")
    assert receiver(tool, tmp_path / "out") == 150


def test_fiftyone_and_spotlight_have_names_and_directions(run, tmp_path):
    for tool in ("fiftyone", "spotlight"):
        assert (
            exit_code(["export", str(run.folder), "--to", tool, "-o", str(tmp_path / tool), "--quiet"]) == 0
        )
    samples = json.loads((tmp_path / "fiftyone" / "samples.json").read_text())["samples"]
    worst = int(run.table["label_suspicion"].to_numpy().argmax())
    assert samples[worst]["mistakenness"] == max(s["mistakenness"] for s in samples)
    assert samples[worst]["ground_truth"]["label"] == CLASSES[run.table["label"][worst]]
    found = pandas.read_parquet(tmp_path / "spotlight" / "samples.parquet")
    assert found["label"].tolist() == [CLASSES[i] for i in run.table["label"]]
    issues = json.loads((tmp_path / "spotlight" / "issues.json").read_text())
    assert issues[0]["rows"][0] == int(run.table["label_suspicion"][run.table["label_issue"]].idxmax())


def test_datalab_takes_issues_by_its_own_manager(run):
    datalab = pytest.importorskip("cleanlab.datalab.datalab")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lab = datalab.Datalab({"y": run.table["label"].tolist()}, label_name="y", verbosity=0)
        assert register_issue_manager() is register_issue_manager()
        lab.find_issues(issue_types={"likewise_label": {"run": run}})
    found = lab.get_issues("likewise_label")
    assert found["is_likewise_label_issue"].tolist() == run.table["label_issue"].tolist()
    worst = int(run.table["label_suspicion"].to_numpy().argmax())
    assert found["likewise_label_score"].idxmin() == worst  # there, small is bad
    assert datalab_issues(run)["given_label"][0] == CLASSES[run.table["label"][0]]
    other = datalab.Datalab({"y": [0, 1, 2]}, label_name="y", verbosity=0)
    with pytest.raises(ValueError, match="same samples"):
        register_issue_manager()(other).find_issues(run=run)
    with pytest.raises(ValueError, match="Give the run, or label suspicions"):
        register_issue_manager()(other).find_issues()


def test_label_suspicions_are_issues_of_datalab_without_a_run():
    datalab = pytest.importorskip("cleanlab").Datalab
    x, y = torch.randn(60, 4), torch.arange(60) % 2
    x[:, 0] += torch.where(y == 1, 4.0, -4.0)
    y[7] = 1 - y[7]
    net = torch.nn.Linear(4, 2)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[-1.0, 0, 0, 0], [1, 0, 0, 0]]))
    suspicion = lw.label_suspicion(lw.GramMatrix(net, (x, y)))
    register_issue_manager()
    lab = datalab({"y": y.tolist()}, label_name="y", verbosity=0)
    lab.find_issues(issue_types={"likewise_label": {"suspicion": suspicion}})
    found = lab.get_issues("likewise_label")
    assert found["is_likewise_label_issue"].tolist() == suspicion.flagged.tolist()
    assert found["likewise_label_score"].idxmin() == 7
    assert lab.get_info("likewise_label")["suggested_label"].tolist() == suspicion.suggested.tolist()


def test_tables_hold_class_names_beside_numbers(run, tmp_path):
    export_run(run, "parquet", tmp_path / "t.parquet")
    found = pandas.read_parquet(tmp_path / "t.parquet")
    assert found["label"].tolist() == run.table["label"].tolist()
    assert found["suggested_label_name"].tolist() == [CLASSES[i] for i in run.table["suggested_label"]]


def test_names_that_could_not_come_back_are_refused(tmp_path):
    x, y = torch.randn(20, 4), torch.arange(20) % 2
    for number, names in enumerate((["a", "a"], ["[drop]", "b"], ["", "b"], ["a\n", "b"])):
        run = lw.analyze(torch.nn.Linear(4, 2), (x, y), out=tmp_path / str(number), classes=names)
        with pytest.raises(ValueError, match="class"):
            export_run(run, "label-studio", tmp_path / "out", count=5)


def test_every_export_refuses_the_files_of_the_run(run):
    before = {p.name: p.read_bytes() for p in run.folder.iterdir() if p.is_file()}
    for to in EXPORTS:
        for name in ("samples.parquet", "manifest.json", "report.html", "index"):
            with pytest.raises(ValueError, match="run itself"):
                export_run(run, to, run.folder / name)
    with pytest.raises(ValueError, match="a count is for"):
        export_run(run, "csv", count=3)
    assert {p.name: p.read_bytes() for p in run.folder.iterdir() if p.is_file()} == before
