"""Commands about labels."""

import json

import numpy as np
import pandas
import pytest
import torch

from likewise.cli.app import exit_code

TRAIN = """
import torch

def model():
    return torch.nn.Linear(3, 2)

def train(data):
    x = torch.stack([data[i][0] for i in range(len(data))])
    y = torch.stack([data[i][1] for i in range(len(data))])
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    for _ in range(30):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net
"""


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("crossval")
    torch.manual_seed(0)
    x = torch.randn(120, 3)
    y = (x[:, 0] > 0).long()
    y[:6] = 1 - y[:6]
    frame = pandas.DataFrame(x.numpy(), columns=["a", "b", "c"])
    frame["kind"] = [("no", "yes")[int(v)] for v in y]
    frame.to_csv(folder / "data.csv", index=False)
    (folder / "net.py").write_text(TRAIN)
    return folder


def test_crossval_writes_labels_that_analyze_takes(table, capsys):
    words = [f"{table}/net.py:train", f"{table}/data.csv", "--label", "kind", "--folds", "3"]
    given = ["crossval", *words, "--out", f"{table}/cv", "--format", "json"]
    assert exit_code(given) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["samples"] == 120
    assert facts["accuracy"] > 0.85
    labels = pandas.read_csv(table / "cv" / "labels.csv")
    assert (labels["sample"].head(6) < 6).sum() >= 5
    assert set(labels["label"]) == {"no", "yes"}
    assert exit_code([*given[:-2], "--format", "text"]) == 0  # nothing is trained again
    told = capsys.readouterr().out
    assert "yes" in told and "no" in told  # names of classes, not numbers
    run = ["analyze", f"{table}/net.py:model", f"{table}/data.csv", "--label", "kind", "--quiet"]
    assert exit_code([*run, "--crossval", f"{table}/cv", "--out", f"{table}/run"]) == 0
    flagged = pandas.read_parquet(table / "run" / "samples.parquet").set_index("sample")["label_issue"]
    assert flagged.sum() == labels["label_issue"].sum()  # as many, the first by both rankings
    assert set(flagged.index[flagged]) <= set(labels["sample"].head(2 * int(flagged.sum())))


def test_crossval_without_labels_or_with_a_model_says_so(table, capsys):
    given = [
        "crossval",
        f"{table}/net.py:train",
        f"{table}/data.csv",
        "--columns",
        "a,b,c",
        "--out",
        f"{table}/x",
    ]
    assert exit_code(given) == 2
    assert "Labels are needed" in capsys.readouterr().err
    given = [
        "crossval",
        f"{table}/net.py:model",
        f"{table}/data.csv",
        "--label",
        "kind",
        "--out",
        f"{table}/y",
    ]
    assert exit_code(given) == 2
    assert "train" in capsys.readouterr().err


def test_duplicates_writes_pairs_within_and_between_data_sets(table, capsys):
    frame = pandas.read_csv(table / "data.csv")
    frame.iloc[50:90].to_csv(table / "test.csv", index=False)
    more = pandas.concat([frame, frame.iloc[[7]].assign(kind="other")], ignore_index=True)
    more.to_csv(table / "more.csv", index=False)
    words = ["duplicates", f"{table}/net.py:model", "--label", "kind", "--format", "json"]
    given = [*words, "--columns", "a,b,c", "--classes", "no,yes,other"]
    assert exit_code([*given, f"{table}/more.csv", "--out", f"{table}/within.csv"]) == 0
    assert json.loads(capsys.readouterr().out) == {"out": f"{table}/within.csv", "pairs": 1, "other_label": 1}
    text = [word for word in given if word not in ("--format", "json")]
    assert exit_code([*text, f"{table}/more.csv", "--out", f"{table}/again.csv"]) == 0
    printed = capsys.readouterr().out
    assert "1 pair of 2 samples" in printed and "120" in printed and "different labels" in printed
    within = pandas.read_csv(table / "within.csv")
    assert within[["first", "second"]].to_numpy().tolist() == [[7, 120]]
    between = [f"{table}/test.csv", "--against", f"{table}/data.csv", "--out", f"{table}/between.csv"]
    assert exit_code([*words, *between]) == 0
    found = pandas.read_csv(table / "between.csv")
    assert set(found["second"]) == set(range(50, 90))
    assert (found["second"] - found["first"] == 50).all()


def test_duplicates_between_data_sets_compare_labels_by_name_and_columns_in_one_order(tmp_path, capsys):
    (tmp_path / "net.py").write_text("import torch\ntorch.manual_seed(0)\nmodel = torch.nn.Linear(2, 3)\n")
    chance = np.random.default_rng(0)
    train = pandas.DataFrame(chance.normal(size=(60, 2)), columns=["u", "v"])
    train["kind"] = ["ant", "bee", "cow"] * 20
    train.to_csv(tmp_path / "train.csv", index=False)
    own = train[train["kind"] != "ant"].reset_index(drop=True)
    own.loc[0, "kind"] = "cow"  # was bee
    own.to_csv(tmp_path / "test.csv", index=False)
    own[["kind", "v", "u"]].to_csv(tmp_path / "shuffled.csv", index=False)
    own.assign(kind=1).to_csv(tmp_path / "numbers.csv", index=False)
    words = [
        "duplicates",
        f"{tmp_path}/net.py:model",
        "--label",
        "kind",
        "--against",
        f"{tmp_path}/train.csv",
    ]

    def found(name, *options):
        given = [*words, f"{tmp_path}/{name}.csv", "--out", f"{tmp_path}/{name}-pairs.csv", *options]
        return exit_code(given), capsys.readouterr()

    assert found("test")[0] == 0
    pairs = pandas.read_csv(tmp_path / "test-pairs.csv")
    same = [own["kind"][i] == train["kind"][j] for i, j in zip(pairs["first"], pairs["second"], strict=True)]
    assert pairs["same_label"].tolist() == same and 0 < same.count(False) < len(same)
    code, told = found("shuffled")
    assert code == 2 and "--columns" in told.err
    assert found("shuffled", "--columns", "u,v")[0] == 0
    again = pandas.read_csv(tmp_path / "shuffled-pairs.csv")
    pandas.testing.assert_frame_equal(again, pairs)
    code, told = found("numbers")
    assert code == 0 and "labels of pairs are not compared" in told.err
    assert "different labels" not in told.out


def test_no_command_replaces_what_it_reads_or_what_is_there(table, capsys):
    data = (table / "data.csv").read_bytes()
    words = ["duplicates", f"{table}/net.py:model", f"{table}/data.csv", "--label", "kind", "--quiet"]
    for force in ([], ["--force"]):
        assert exit_code([*words, "--out", f"{table}/data.csv", *force]) == 2
        assert "which is read" in capsys.readouterr().err
        assert (table / "data.csv").read_bytes() == data
    mine = table / "mine.csv"
    mine.write_text("mine")
    assert exit_code([*words, "--out", str(mine)]) == 2
    assert "--force" in capsys.readouterr().err and mine.read_text() == "mine"
    run = ["analyze", f"{table}/net.py:model", f"{table}/data.csv", "--label", "kind", "--quiet"]
    assert exit_code([*run, "--out", f"{table}/plain"]) == 0
    export = ["export", f"{table}/plain", "--quiet", "-o"]
    assert exit_code([*export, str(mine)]) == 2 and mine.read_text() == "mine"
    assert exit_code([*export, f"{table}/data.csv", "--force"]) == 2
    assert (table / "data.csv").read_bytes() == data
    assert exit_code([*export, str(mine), "--force"]) == 0 and len(pandas.read_csv(mine)) == 120
