"""Decisions back into the data: corrected, logged, and never over the original."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from PIL import Image

import likewise as lw
from likewise.cli.app import exit_code
from likewise.runs.review import Decision, OtherRunError, write_decisions

NET = """
import torch
from torch import nn

def images():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))

def rows():
    torch.manual_seed(0)
    return nn.Linear(2, 3)
"""
CLASSES = ("ant", "bee", "cow")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder of images, a table, and a run of each; what is in it is never changed."""
    folder = tmp_path_factory.mktemp("apply")
    (folder / "net.py").write_text(NET)
    chance = np.random.default_rng(0)
    for name in CLASSES:
        (folder / "images" / name).mkdir(parents=True)
        for i in range(6):
            pixels = chance.integers(0, 255, (4, 4), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "images" / name / f"{i}.png")
    rows = [f"{chance.normal():.4f},{chance.normal():.4f},{CLASSES[i % 3]},NA{i}" for i in range(18)]
    (folder / "rows.csv").write_text("u,v,kind,note\n" + "\n".join(rows) + "\n")
    frame = pandas.read_csv(folder / "rows.csv", keep_default_na=False)
    (folder / "lines.jsonl").write_text(frame.to_json(orient="records", lines=True) + "\n")
    frame.assign(kind=np.arange(18) % 3).to_parquet(folder / "numbered.parquet")
    told = ["--quiet", "--out"]
    words = {
        "image-run": ["net.py:images", "images", "--gray"],
        "line-run": ["net.py:rows", "lines.jsonl", "--label", "kind", "--columns", "u,v"],
        "row-run": ["net.py:rows", "rows.csv", "--label", "kind"],
        "number-run": [
            "net.py:rows",
            "numbered.parquet",
            "--label",
            "kind",
            "--columns",
            "u,v",
            "--limit",
            "12",
        ],
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, given in words.items():
            assert exit_code(["analyze", *given, *told, name]) == 0
    return folder


@pytest.fixture
def here(place, tmp_path, monkeypatch):
    """The working folder of a test, with data and runs of its own."""
    own = tmp_path / "own"
    shutil.copytree(place, own)
    monkeypatch.chdir(own)
    return own


def decide(run, *decisions, path="decisions.json"):
    found = lw.Analysis(run)
    write_decisions(found.folder.parent / path, decisions, found.manifest)
    return str(found.folder.parent / path)


def content(folder):
    return {p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_labels_come_back_by_name_with_a_log(here):
    decided = decide(
        "row-run",
        Decision(0, "relabel", 1),
        Decision(4, "wrong"),
        Decision(5, "right"),
        Decision(6, "unsure"),
    )
    assert exit_code(["apply", "row-run", decided, "--to", "labels.csv", "--quiet"]) == 0
    labels, log = pandas.read_csv("labels.csv"), pandas.read_csv("labels-changes.csv")
    assert labels["sample"].tolist() == [i for i in range(18) if i != 4]
    expected = {i: CLASSES[i % 3] for i in range(18)} | {0: "bee"}
    assert labels["label"].tolist() == [expected[i] for i in labels["sample"]]
    assert labels["sample"][labels["changed"]].tolist() == [0]
    assert log["sample"].tolist() == [0, 4, 5, 6]
    assert log["action"].tolist() == ["relabeled", "dropped", "kept", "kept"]
    assert log["label_before"].tolist() == ["ant", "bee", "cow", "ant"]
    assert log["label_after"].fillna("").tolist() == ["bee", "", "cow", "ant"]
    assert log["reason"].str.contains("judged|relabeled").all()


def test_the_table_changes_in_its_labels_only(here):
    decided = decide("row-run", Decision(0, "relabel", 2), Decision(17, "drop"))
    before = content(here)
    assert exit_code(["apply", "row-run", decided, "--to", "table", "-o", "clean.csv", "--quiet"]) == 0
    lines, found = (here / "rows.csv").read_text().splitlines(), (here / "clean.csv").read_text().splitlines()
    assert found[1] == lines[1].replace("ant", "cow") and found[2:] == lines[2:-1]
    assert {k: v for k, v in content(here).items() if k in before} == before


def test_json_lines_change_in_their_labels_only(here):
    decided = decide("line-run", Decision(0, "relabel", 2), Decision(17, "drop"))
    assert exit_code(["apply", "line-run", decided, "--to", "table", "--quiet"]) == 0
    lines, found = (Path(name).read_text().splitlines() for name in ("lines.jsonl", "corrected.jsonl"))
    lines = [line for line in lines if line]
    assert json.loads(found[0]) == {**json.loads(lines[0]), "kind": "cow"} and found[1:] == lines[1:-1]
    assert exit_code(["apply", "line-run", decided, "--to", "lines.parquet", "--quiet"]) == 0
    assert pandas.read_parquet("lines.parquet")["kind"].tolist() == [
        "cow",
        *(CLASSES[i % 3] for i in range(1, 17)),
    ]


@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_names_of_columns_stay_as_they_are_written(here, start):
    lines = (here / "rows.csv").read_text().splitlines()
    columns = len(lines[0].split(","))
    header = ["", *["same" if name != "kind" else name for name in lines[0].split(",")]]
    text = "".join(
        f"{line}\n" for line in [",".join(header), *(f"{i},{line}" for i, line in enumerate(lines[1:]))]
    )
    (here / "odd.csv").write_text(start + text, encoding="utf-8")
    assert header.count("same") == columns - 1 >= 2
    decided = decide("row-run", Decision(0, "relabel", 2))
    options = ["--to", "table", "-o", "clean.csv", "--data", "odd.csv", "--quiet"]
    assert exit_code(["apply", "row-run", decided, *options]) == 0
    found = (here / "clean.csv").read_text(encoding="utf-8").splitlines()
    assert found[0] == ",".join(header) and found[2:] == text.splitlines()[2:]


def test_json_lines_with_other_separators_of_lines_are_corrected(here):
    text = "one\u2028two\x85"
    rows = [json.loads(line) for line in (here / "lines.jsonl").read_text().splitlines() if line]
    written = [json.dumps({**row, "note": text}, ensure_ascii=False) for row in rows]
    (here / "odd.jsonl").write_text("\n".join(written), encoding="utf-8")
    decided = decide("line-run", Decision(0, "relabel", 2))
    options = ["--to", "table", "-o", "clean.jsonl", "--data", "odd.jsonl", "--quiet"]
    assert exit_code(["apply", "line-run", decided, *options]) == 0
    found = (here / "clean.jsonl").read_text(encoding="utf-8").split("\n")
    assert found[1:-1] == written[1:] and json.loads(found[0])["note"] == text


def test_parquet_keeps_types_and_rows_that_were_not_analyzed(here):
    decided = decide("number-run", Decision(3, "relabel", 2), Decision(4, "drop"))
    assert exit_code(["apply", "number-run", decided, "--to", "clean.parquet", "--quiet"]) == 0
    before, found = pandas.read_parquet("numbered.parquet"), pandas.read_parquet("clean.parquet")
    expected = before.copy()
    expected.loc[3, "kind"] = 2
    pandas.testing.assert_frame_equal(found, expected.drop(index=4).reset_index(drop=True))


def test_a_folder_of_images_is_copied_into_its_classes(here):
    decided = decide("image-run", Decision(0, "relabel", 1), Decision(1, "drop"))
    before = content(here)
    assert exit_code(["apply", "image-run", decided, "--to", "folder", "--quiet"]) == 0
    found = {str(k): v for k, v in content(here / "corrected").items()}
    assert found["bee/0-from-ant.png"] == before[(here / "images/ant/0.png").relative_to(here)]
    assert "ant/1.png" not in found and len(found) == 17 + 1
    assert {k: v for k, v in content(here).items() if k in before} == before
    assert exit_code(["apply", "image-run", decided, "--to", "folder", "--quiet"]) == 2
    assert exit_code(["apply", "image-run", decided, "--to", "folder", "--quiet", "--force"]) == 0
    assert {str(k): v for k, v in content(here / "corrected").items()} == found


def test_a_hugging_face_dataset_has_class_names(here):
    datasets = pytest.importorskip("datasets")
    for run, count in (("image-run", 17), ("row-run", 17)):
        decided = decide(run, Decision(0, "relabel", 2), Decision(1, "drop"))
        assert exit_code(["apply", run, decided, "--to", "hf-dataset", "-o", f"{run}-hf", "--quiet"]) == 0
        found = datasets.load_from_disk(f"{run}-hf")
        column = "label" if run == "image-run" else "kind"
        assert len(found) == count and found.features[column].names == list(CLASSES)
        assert found[0][column] == 2
    shutil.rmtree("images")
    assert datasets.load_from_disk("image-run-hf")[3]["image"].size == (4, 4)
    names = datasets.ClassLabel(names=list(CLASSES))
    whole = datasets.Dataset.from_dict({"id": list(range(18)), "kind": [i % 3 for i in range(18)]})
    lw.apply_decisions("row-run", {2: "ant"}, "hf-dataset", "again", data=whole.cast_column("kind", names))
    again = datasets.load_from_disk("again")
    assert again["kind"][:4] == [0, 1, 0, 0] and again.features["kind"] == names


def test_a_wrong_label_that_its_neighbors_vote_for_does_not_stay(here):
    run = lw.Analysis("row-run")
    table = run.table
    same = int((table["suggested_label"] == table["label"]).idxmax())
    other = int((table["suggested_label"] != table["label"]).idxmax())
    with pytest.warns(
        UserWarning, match=rf"1 of the labels .* no other label suggested.* are left out: {same}\."
    ):
        found = lw.apply_decisions(run, {same: "wrong", other: "wrong"}, wrong="suggested")
    assert not found.kept[same] and found.kept[other] and found.relabeled == 1 and found.dropped == 1


def test_what_the_reviewer_left_open_is_dropped_suggested_or_kept(here):
    run = lw.Analysis("row-run")
    votes = run.table["suggested_label"]
    other = int((votes != run.table["label"]).to_numpy().argmax())
    kept = {
        wrong: lw.apply_decisions(run, {other: "wrong"}, wrong=wrong)
        for wrong in ("drop", "suggested", "keep")
    }
    assert not kept["drop"].kept[other] and kept["keep"].labels[other] == run.table["label"][other]
    assert kept["suggested"].labels[other] == votes[other] and kept["suggested"].relabeled == 1


def test_decisions_that_cannot_be_of_the_run_are_refused(here):
    run = lw.Analysis("row-run")
    known = run.manifest["data"]
    cases = {
        "another data set": {"run": "0" * 64, "decisions": []},
        "does not have": {"run": known, "decisions": [{"sample": 18, "verdict": "right"}]},
        "not a class of the run": {
            "run": known,
            "decisions": [{"sample": 1, "verdict": "relabel", "label": "dog"}],
        },
        "not a class": {"run": known, "decisions": [{"sample": 1, "verdict": "relabel", "label": 3}]},
        "unknown verdict": {"run": known, "decisions": [{"sample": 1, "verdict": "delete"}]},
        "expected the number of a sample": {"run": known, "decisions": [{"sample": "1", "verdict": "right"}]},
        "two decisions on sample 1": {
            "run": known,
            "decisions": [{"sample": 1, "verdict": v} for v in ("right", "wrong")],
        },
        'no "label"': {"run": known, "decisions": [{"sample": 1, "verdict": "relabel"}]},
        "not a decisions file": {"run": known},
    }
    for message, given in cases.items():
        (here / "d.json").write_text(json.dumps(given))
        with pytest.raises(ValueError, match=message):
            lw.apply_decisions(run, "d.json")
    (here / "d.json").write_text(json.dumps(cases["another data set"]))
    with pytest.raises(OtherRunError) as caught:
        lw.apply_decisions(run, here / "d.json")
    assert caught.value.expected == known
    assert exit_code(["apply", "image-run", decide("row-run", Decision(0, "right")), "--quiet"]) == 2
    assert not (here / "labels.csv").exists()


def test_neither_data_nor_run_nor_a_stranger_is_overwritten(here):
    decided = decide("image-run", Decision(0, "relabel", 1))
    (here / "mine").mkdir()
    (here / "mine" / "diary.txt").write_text("dear diary")
    (here / "link").symlink_to(here / "images")
    (here / "kept.csv").write_text("mine")
    before = content(here)
    refused = (
        *(
            ["folder", "-o", place]
            for place in ("images", "images/new", ".", "mine", "link", "link/x", "image-run")
        ),
        *(
            ["labels.csv", "-o", place]
            for place in ("images/l.csv", "image-run/samples.parquet", "image-run/index/x.csv")
        ),
        ["parquet", "-o", "image-run/samples.parquet"],
        ["labels.csv", "-o", "nowhere/labels.csv"],
        ["table"],
        ["spreadsheet"],
    )
    for words in refused:
        assert exit_code(["apply", "image-run", decided, "--quiet", "--force", "--to", *words]) == 2, words
    assert exit_code(["apply", "image-run", decided, "--quiet", "--to", "kept.csv"]) == 2
    table = decide("row-run", Decision(0, "relabel", 1), path="rows.json")
    assert exit_code(["apply", "row-run", table, "--quiet", "--force", "--to", "rows.csv"]) == 2
    (here / "rows.json").unlink()
    assert content(here) == before


def test_data_that_changed_since_are_refused(here):
    lines = (here / "rows.csv").read_text().splitlines()
    (here / "rows.csv").write_text("\n".join([lines[0], *lines[2:], lines[1]]) + "\n")
    with pytest.raises(ValueError, match="The data have changed since the analysis"):
        lw.apply_decisions("row-run", {0: "bee"}, "table")
    (here / "rows.csv").write_text("\n".join(lines[:9]) + "\n")
    with pytest.raises(ValueError, match="The data have changed since the analysis"):
        lw.apply_decisions("row-run", {0: "bee"}, "parquet")
    (here / "images" / "cow" / "3.png").unlink()
    with pytest.raises(ValueError, match=r"images has changed since the analysis: no cow/3\.png"):
        lw.apply_decisions("image-run", {0: "bee"}, "folder")
    (here / "images").rename("moved")
    with pytest.raises(FileNotFoundError, match="--data"):
        lw.apply_decisions("image-run", {0: "bee"}, "folder")


def test_names_that_are_formulas_are_escaped_and_said(tmp_path):
    x, y = torch.randn(12, 4), torch.arange(12) % 2
    run = lw.analyze(
        torch.nn.Linear(4, 2),
        (x, y),
        out=tmp_path / "run",
        classes=["=1+1", "b"],
        names=[f"@{i}" for i in range(12)],
    )
    with pytest.warns(UserWarning, match="apostrophe"):
        lw.apply_decisions(run, {0: "b"}, "labels.csv", tmp_path / "labels.csv")
    found = pandas.read_csv(tmp_path / "labels.csv")
    assert found["name"][0] == "'@0" and found["label"][2] == "'=1+1"
