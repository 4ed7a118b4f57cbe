"""The command: from words to results, with the exit codes and messages that a person can act on."""

import inspect
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch

import likewise as lw
from likewise.cli.app import app, exit_code
from likewise.runs.result import Analysis
from likewise.runs.settings import INPUTS, Settings

EXAMPLES = Path(__file__).parents[2] / "examples" / "analyze"
COMMANDS = (
    "demo",
    "analyze",
    "plan",
    "index",
    "ask",
    "select",
    "merge",
    "crossval",
    "duplicates",
    "neighbors",
    "report",
    "compare",
    "export",
    "apply",
    "serve",
    "verify",
    "doctor",
    "reproduce",
)


def words(made, kind):
    own = made / kind
    return {
        "images": [
            f"{EXAMPLES}/images.py:model",
            f"{own}/digits",
            "--weights",
            f"{own}/resnet.safetensors",
            "--gray",
        ],
        "table": [
            f"{EXAMPLES}/table.py:model",
            f"{own}/wine.csv",
            "--label",
            "cultivar",
            "--weights",
            f"{own}/mlp.pt",
        ],
        "text": [
            *(
                f"{EXAMPLES}/text.py:model",
                f"{own}/docstrings.csv",
                "--label",
                "package",
                "--text",
                "docstring",
            ),
            *("--prepare", f"{EXAMPLES}/text.py:tokens", "--weights", f"{own}/bag.pt"),
        ],
    }[kind]


@pytest.fixture(scope="module")
def runs(made, tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("runs")
    for kind in ("images", "table", "text"):
        assert exit_code(["analyze", *words(made, kind), "--out", str(folder / kind), "--quiet"]) == 0
    return folder


def facts(capsys, *given):
    capsys.readouterr()
    assert exit_code([*map(str, given), "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("kind", ["images", "table", "text"])
def test_a_model_and_data_become_a_sensible_report(runs, kind):
    table = pandas.read_parquet(runs / kind / "samples.parquet")
    assert (table["prediction"] == table["label"]).mean() > 0.9
    assert table["agreement"].mean() > 0.75 and table["label_issue"].mean() < 0.1
    html = (runs / kind / "report.html").read_text()
    assert len(html) < 4e6 and "Is this label wrong?" in html
    pictures = pandas.read_parquet(runs / kind / "pictures.parquet")
    assert set(pictures["kind"]) == {{"images": "image", "table": "row", "text": "text"}[kind]}
    assert len(pictures) == len(table)


def test_a_record_of_training_ranks_labels_and_is_kept_in_the_settings(runs, tmp_path):
    labels = torch.tensor(pandas.read_parquet(runs / "table" / "samples.parquet")["label"].to_numpy())
    watch = lw.Watch(len(labels))
    torch.manual_seed(0)
    watch.update(torch.randn(len(labels), int(labels.max()) + 1), labels, torch.arange(len(labels)))
    watch.save(tmp_path / "watch.parquet")
    given = ["analyze", str(runs / "table" / "settings.toml"), "--watch", str(tmp_path / "watch.parquet")]
    assert exit_code([*given, "--out", str(tmp_path / "run"), "-q"]) == 0
    table = lw.Analysis(tmp_path / "run").table
    assert table["margin"].to_numpy() == pytest.approx(watch.margins.numpy())
    assert "watch.parquet" in (tmp_path / "run" / "settings.toml").read_text()
    assert (
        exit_code([*given[:-1], str(tmp_path / "none.parquet"), "--out", str(tmp_path / "other"), "-q"]) == 2
    )


def test_a_run_starts_again_from_its_settings(runs, tmp_path, capsys):
    again = tmp_path / "again"
    assert exit_code(["analyze", str(runs / "table" / "settings.toml"), "--out", str(again)]) == 0
    for name in ("samples.parquet", "neighbors.parquet", "details.parquet", "pictures.parquet"):
        assert (again / name).read_bytes() == (runs / "table" / name).read_bytes()
    changed = ["analyze", str(runs / "table" / "settings.toml"), "--neighbors", "3", "--out"]
    assert exit_code([*changed, str(tmp_path / "three"), "-q"]) == 0
    assert json.loads((tmp_path / "three" / "manifest.json").read_text())["options"]["neighbors"] == 3
    assert exit_code([*changed[:-1], "-q"]) == 2  # not in its own folder
    before = (runs / "table" / "manifest.json").read_bytes()
    assert (
        exit_code(["analyze", str(runs / "table" / "settings.toml")]) == 0
    )  # done already, in its own folder
    assert (runs / "table" / "manifest.json").read_bytes() == before


def test_results_are_on_stdout_and_the_rest_on_stderr(made, tmp_path):
    given = ["analyze", *words(made, "table"), "--out", str(tmp_path / "run"), "--format", "json"]
    done = subprocess.run(
        [sys.executable, "-m", "likewise", *given], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found["samples"] == 178 and Path(found["report"]).exists()
    assert "analyzing" in done.stderr
    quiet = subprocess.run(
        [sys.executable, "-m", "likewise", *given, "--quiet"], capture_output=True, text=True, check=True
    )
    assert quiet.stderr == "" and json.loads(quiet.stdout) == found


def test_the_most_suspicious_labels_are_listed_at_the_end(runs, capsys):
    given = ["analyze", str(runs / "text" / "settings.toml"), "--out", str(runs / "text"), "-q"]
    table, classes = lw.Analysis(runs / "text").table, lw.Analysis(runs / "text").manifest["classes"]
    flagged = table[table["label_issue"]].sort_values("label_suspicion", ascending=False, kind="stable")
    assert len(flagged)
    assert exit_code([*given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["suspects"]
    assert [row["sample"] for row in found] == flagged.index[:5].tolist()
    assert [row["suggested"] for row in found] == [classes[i] for i in flagged["suggested_label"][:5]]
    assert exit_code(given) == 0
    printed = capsys.readouterr().out
    assert "the most suspicious labels" in printed and f"{found[0]['suspicion']:.3f}" in printed


def test_neighbors_by_number_and_by_name(runs, capsys):
    found = facts(capsys, "neighbors", runs / "images", "5", "-k", "3")
    assert len(found["neighbors"]) == 3 and found["of"]["sample"] == 5
    named = facts(capsys, "neighbors", runs / "images", found["of"]["name"], "-k", "3")
    assert named == found
    assert exit_code(["neighbors", str(runs / "images"), "5"]) == 0
    told = capsys.readouterr().out
    assert found["neighbors"][0]["name"] in told and " shown " not in told
    nearest = facts(capsys, "neighbors", runs / "text", "5", "-k", "1")["neighbors"][0]["sample"]
    assert exit_code(["neighbors", str(runs / "text"), "5"]) == 0
    told, kept = capsys.readouterr().out, Analysis(runs / "text").pictures[nearest].content.decode()
    assert " ".join(kept.split())[:50] in told and " name " not in told


def test_two_checkpoints_are_compared(made, runs, tmp_path, capsys):
    same = facts(capsys, "compare", runs / "table", runs / "table")["summary"]
    assert same["kept_neighbors"] == 1 and same["density_correlation"] == pytest.approx(1)
    untrained = [*words(made, "table")[:4], "--out", str(tmp_path / "before"), "--quiet"]
    assert exit_code(["analyze", *untrained]) == 0
    found = facts(capsys, "compare", tmp_path / "before", runs / "table", "-k", "4")
    assert found["summary"]["kept_neighbors"] < 0.9 and found["summary"]["predictions_changed"] > 20
    assert len(found["neighbors_changed"]) == len(found["density_fell"]) == 4
    worst = found["density_fell"][0]
    assert worst["density_rank_change"] < 0
    assert exit_code(["compare", str(runs / "table"), str(runs / "text")]) == 2
    assert "different data" in capsys.readouterr().err


def test_exports_are_read_by_other_tools(runs, tmp_path, capsys):
    from scipy.sparse import load_npz

    run, table = runs / "table", pandas.read_parquet(runs / "table" / "samples.parquet")
    facts(capsys, "export", run, "--to", "csv", "-o", tmp_path / "t.csv")
    found = pandas.read_csv(tmp_path / "t.csv")
    pandas.testing.assert_frame_equal(found[table.columns], table, check_dtype=False, rtol=1e-5)
    facts(capsys, "export", run, "--to", "parquet", "-o", tmp_path / "t.parquet")
    found = pandas.read_parquet(tmp_path / "t.parquet")
    pandas.testing.assert_frame_equal(found[table.columns], table)
    classes = lw.Analysis(run).manifest["classes"]
    assert found["label_name"].tolist() == [classes[i] for i in table["label"]]
    facts(capsys, "export", run, "--to", "knn", "-o", tmp_path / "graph.npz")
    graph = load_npz(tmp_path / "graph.npz")
    assert graph.shape == (178, 178) and (np.diff(graph.indptr) == 10).all()
    distances = graph.data.reshape(178, 10)
    assert (np.diff(distances, axis=1) >= 0).all()
    facts(capsys, "export", run, "--to", "projector", "-o", tmp_path / "projector")
    points = np.loadtxt(tmp_path / "projector" / "tensors.tsv", delimiter="\t")
    assert points.shape == (178, 10)
    assert len((tmp_path / "projector" / "metadata.tsv").read_text().splitlines()) == 179
    assert exit_code(["export", str(run), "--to", "word"]) == 2


def test_cleanlab_takes_the_graph(runs, tmp_path):
    from cleanlab.datalab.datalab import Datalab
    from scipy.sparse import load_npz

    assert (
        exit_code(["export", str(runs / "table"), "--to", "knn", "-o", str(tmp_path / "graph.npz"), "-q"])
        == 0
    )
    table = pandas.read_parquet(runs / "table" / "samples.parquet")
    lab = Datalab({"y": table["label"].to_numpy()}, label_name="y", verbosity=0)
    lab.find_issues(
        knn_graph=load_npz(tmp_path / "graph.npz"), issue_types={"outlier": {}, "near_duplicate": {}}
    )
    assert len(lab.get_issues()) == 178


def test_plan_and_doctor_tell_without_writing(made, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = facts(capsys, "plan", *words(made, "images"))
    assert (
        found["samples"] == 600 and found["outputs"] == 10 and found["seconds"] > 0 and found["sketch"] == 0
    )
    told = facts(capsys, "doctor", *words(made, "table")[:4], "--limit", "30", "--readout", "predicted_class")
    assert told["samples"] == 30 and told["outputs"] == 1
    told = facts(capsys, "doctor", *words(made, "table")[:4])
    assert told["outputs"] == 3 and told["engine"].startswith("traced") and told["torch"]
    assert list(tmp_path.iterdir()) == []


def test_fail_on_leaves_with_one(runs, capsys):
    settings = str(runs / "text" / "settings.toml")
    assert exit_code(["analyze", settings, "--fail-on", "label_issue>50%", "-q"]) == 0
    assert exit_code(["analyze", settings, "--fail-on", "isolated > 3", "-q"]) == 1
    assert re.search(r"isolated: \d+ of the samples, over the limit of 3", capsys.readouterr().err)
    assert exit_code(["analyze", settings, "--fail-on", "beauty>3", "-q"]) == 2
    assert "label_issue" in capsys.readouterr().err
    assert exit_code(["analyze", settings, "--fail-on", "label_issue<3", "-q"]) == 2


def test_fail_on_warns_where_wrong_labels_cannot_be_told(tmp_path, capsys):
    generator = np.random.default_rng(0)
    rows = pandas.DataFrame(generator.normal(size=(120, 3)), columns=list("abc"))
    rows["kind"] = generator.choice(["x", "y"], 120)  # at random: neighbors support no label
    rows.to_csv(tmp_path / "data.csv", index=False)
    (tmp_path / "net.py").write_text(
        "import torch\n\n\ndef model():\n    torch.manual_seed(0)\n    return torch.nn.Linear(3, 2)\n"
    )
    given = [
        "analyze",
        f"{tmp_path}/net.py:model",
        f"{tmp_path}/data.csv",
        "--label",
        "kind",
        "--out",
        tmp_path / "run",
    ]
    given = [*map(str, given), "--quiet"]
    found = facts(capsys, *given, "--fail-on", "label_issue>100%")
    reason = json.loads((tmp_path / "run" / "manifest.json").read_text())["wrong_labels"]["reason"]
    assert reason and found["fail_on_warning"].endswith(reason)
    assert exit_code([*given, "--fail-on", " label_issue > 100%"]) == 0
    assert reason in capsys.readouterr().err.removeprefix("warning: ")
    for rule in (["--fail-on", "isolated>100%"], []):
        assert "fail_on_warning" not in facts(capsys, *given, *rule)
        assert exit_code([*given, *rule]) == 0 and "warning" not in capsys.readouterr().err


def test_decisions_tell_the_precision(runs, tmp_path, capsys):
    table = pandas.read_parquet(runs / "text" / "samples.parquet")
    manifest = json.loads((runs / "text" / "manifest.json").read_text())
    flagged = table["sample"][table["label_issue"]].tolist()
    assert flagged
    listed = [{"sample": sample, "verdict": "wrong" if i else "right"} for i, sample in enumerate(flagged)]
    path = tmp_path / "decisions.json"
    path.write_text(json.dumps({"run": manifest["data"], "decisions": listed}))
    found = facts(capsys, "analyze", runs / "text" / "settings.toml", "--decisions", path)
    assert found["precision"]["wrong"] == len(flagged) - 1 and found["precision"]["right"] == 1
    dropped = [{"sample": flagged[0], "verdict": "drop"}]
    path.write_text(json.dumps({"run": manifest["data"], "decisions": dropped}))
    assert exit_code(["analyze", str(runs / "text" / "settings.toml"), "--decisions", str(path), "-q"]) == 0
    assert "0 unsure, 1 dropped, not counted" in capsys.readouterr().out


def test_decisions_on_labels_that_are_not_flagged_count_too(runs, tmp_path, capsys):
    table = pandas.read_parquet(runs / "text" / "samples.parquet")
    manifest = json.loads((runs / "text" / "manifest.json").read_text())
    others, flagged = (
        table["sample"][table["label_issue"] == is_flagged].tolist() for is_flagged in (False, True)
    )
    verdicts = ("wrong", "relabel", "right", "unsure", "drop")
    listed = [{"sample": s, "verdict": verdict} for s, verdict in zip(others[:5], verdicts, strict=True)]
    listed[1]["label"] = 0
    path, settings = tmp_path / "decisions.json", runs / "text" / "settings.toml"
    path.write_text(json.dumps({"run": manifest["data"], "decisions": listed}))
    found = facts(capsys, "analyze", settings, "--decisions", path)
    assert found["decided"] == {"wrong": 2, "right": 1, "unsure": 1, "dropped": 1}
    assert found["precision"]["wrong"] == found["precision"]["right"] == 0
    every = "of 3 labels decided, flagged or not, 2 are wrong; 1 unsure, 1 dropped, not counted"
    assert exit_code(["analyze", str(settings), "--decisions", str(path), "-q"]) == 0
    told = capsys.readouterr().out
    assert every in told and "no flagged label" not in told
    listed.append({"sample": flagged[0], "verdict": "wrong"})
    path.write_text(json.dumps({"run": manifest["data"], "decisions": listed}))
    assert exit_code(["analyze", str(settings), "--decisions", str(path), "-q"]) == 0
    told = capsys.readouterr().out
    assert "of 1 flagged label decided, 1 is wrong" in told
    assert "of 4 labels decided, flagged or not, 3 are wrong" in told


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["analyze"], "missing argument"),
        (["analyze", "net.py:model"], "name the data after the model"),
        (["analyze", "nowhere.py:model", "x.npz"], "nowhere.py"),
        (["analyze", "torch.nn:Identity", "nothing.npz"], "nothing.npz"),
        (["analyze", "no-colon", "x.npz"], "no-colon"),
        (["analyze", "a:b", "c", "--threshold", "1.5"], "threshold"),
        (["analyze", "a:b", "c", "--neighbors", "0"], "neighbors"),
        (["analyze", "a:b", "c", "--max-memory", "much"], "4gb"),
        (["neighbors", "nowhere", "3"], "no run"),
        (["report", "nowhere"], "no run"),
        (["reproduce", "everything"], "no experiment"),
        (["frobnicate"], "no such command"),
    ],
)
def test_bad_usage_leaves_with_two_and_says_what_to_do(given, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert exit_code(given) == 2
    told = capsys.readouterr()
    assert message in told.err.lower() and told.out == ""
    assert "Traceback" not in told.err


def test_what_expands_leaves_with_three_and_names_cannot_give_orders_to_the_terminal(tmp_path, capsys):
    bomb = str(tmp_path / "b\x1b[2J\u202e.npz")
    np.savez_compressed(bomb, x=np.zeros((100, 10_000)))
    assert exit_code(["plan", "torch.nn:Identity", bomb, "--max-memory", "1MB"]) == 3
    told = capsys.readouterr().err
    assert "once decompressed" in told and "--max-memory" in told.split("This would fit:")[1]
    assert "\x1b" not in told and "\u202e" not in told and "b⟨U+001B⟩[2J⟨U+202E⟩.npz" in told


def test_too_little_memory_leaves_with_three_and_the_command_that_fits(made, tmp_path, capsys):
    given = ["analyze", *words(made, "images"), "--out", str(tmp_path / "run")]
    assert exit_code([*given, "--max-memory", "100KB"]) == 3
    told = capsys.readouterr().err
    fits = re.search(r"This would fit: likewise (.*)", told)
    assert fits and "--max-memory" in fits[1] and "100KB" not in fits[1]


def test_an_interrupted_run_says_how_to_go_on(made, tmp_path):
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import sys, time\nsys.path.insert(0, "
        + repr(str(EXAMPLES))
        + ")\nimport table\nmodel = table.model\n"
        "import likewise.runs.stages as stages\nplain = stages.pair_statistics\n"
        "stages.pair_statistics = lambda *a: (open("
        + repr(str(tmp_path / "begun"))
        + ", 'w').close(), time.sleep(300), plain(*a))[2]\n"
    )
    given = ["analyze", f"{slow}:model", *words(made, "table")[1:], "--out", str(tmp_path / "run")]
    process = subprocess.Popen(
        [sys.executable, "-m", "likewise", *given],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # else ignored by what runs in the background
    )
    while process.poll() is None and not (tmp_path / "begun").exists():
        time.sleep(0.1)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "To resume: likewise analyze" in err
    assert exit_code(["analyze", *words(made, "table"), "--out", str(tmp_path / "run"), "-q"]) == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command, capsys):
    assert exit_code([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "Example" in text and f"likewise {command}" in text


def test_there_is_no_other_command():
    assert {command.callback.__name__ for command in app.registered_commands} == set(COMMANDS)


def test_the_demo_finds_the_planted_errors(tmp_path, capsys):
    found = facts(capsys, "demo", "--out", tmp_path / "demo")
    assert found["planted"] > 80 and found["learned"] > 0.95 * found["planted"]
    assert found["hits"] > 0.9 * found["planted"] and found["top"] > 0.9 * found["planted"]
    html = Path(found["report"]).read_text()
    assert "lanted error" in html and f"{found['hits']} of {found['planted']}" in html


def test_classes_can_be_put_in_the_order_of_the_outputs(made, tmp_path, capsys):
    given = ["analyze", *words(made, "table"), "-q", "--out", str(tmp_path / "run"), "--classes", "C,A,B"]
    assert exit_code(given) == 0
    caveats = json.loads((tmp_path / "run" / "manifest.json").read_text())["caveats"]
    assert any("classes numbered as they were then" in line for line in caveats)
    assert exit_code([*given[:-1], "A,B", "--out", str(tmp_path / "other")]) == 2
    assert "it lacks C" in capsys.readouterr().err


def test_commands_that_open_a_model_take_the_same_options_from_one_declaration():
    commands = {command.callback.__name__: command.callback for command in app.registered_commands}
    options = {
        name: set(inspect.signature(commands[name]).parameters) for name in ("analyze", "plan", "doctor")
    }
    assert options["analyze"] >= set(Settings.model_fields)
    for name, more in (("plan", {"sketch", "exact"}), ("doctor", set())):
        assert options[name] - {"context", "form", "quiet"} == set(INPUTS) | more
    for name, parameter in inspect.signature(lw.analyze).parameters.items():
        if name in Settings.model_fields and parameter.default not in (None, inspect.Parameter.empty):
            assert parameter.default == Settings.model_fields[name].default, name


@pytest.mark.parametrize("given, expected", [("500MB", 500_000_000), ("1.5GiB", 3 * 2**29), ("4096", 4096)])
def test_sizes_of_memory_have_units(given, expected):
    assert Settings(model="a:b", data="c", max_memory=given).max_memory == expected


@pytest.mark.parametrize("readout", ["torch.nn:Linear", "net.py:model", "math:pi", "json:loads", "softmax"])
def test_what_is_no_readout_is_refused(tmp_path, monkeypatch, capsys, readout):
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text("import torch\nmodel = torch.nn.Linear(3, 2)\n")
    np.savez("x.npz", x=np.zeros((4, 3), dtype=np.float32))
    assert exit_code(["plan", "net.py:model", "x.npz", "--readout", readout]) == 2
    assert "readout" in capsys.readouterr().err.splitlines()[-1]


def test_json_is_short_for_format_json_in_every_command(capsys):
    for words in (["doctor", "--json"], ["doctor", "--format", "json"]):
        assert exit_code(words) == 0
        assert "python" in json.loads(capsys.readouterr().out)


def test_columns_that_the_model_does_not_take_are_named(tmp_path, capsys):
    (tmp_path / "net.py").write_text("import torch\nmodel = torch.nn.Linear(2, 2)\n")
    rows = "\n".join(f"{i},{i % 3},{i % 5},{'ab'[i % 2]}" for i in range(12))
    (tmp_path / "data.csv").write_text(f"number,width,height,kind\n{rows}\n")
    given = ["analyze", f"{tmp_path}/net.py:model", f"{tmp_path}/data.csv", "--label", "kind", "--out"]
    assert exit_code([*given, str(tmp_path / "run"), "-q"]) == 2
    assert "--columns (the inputs are now number, width, height)" in " ".join(capsys.readouterr().err.split())
    assert exit_code([*given, str(tmp_path / "run"), "-q", "--columns", "width,height"]) == 0


@pytest.mark.parametrize(
    "labels, options, note",
    [
        ("123", [], "labels range from 1 to 3, but the network has 3 outputs (classes 0 to 2)"),
        ("bc", [], "the data name 2 classes (b, c), but the network has 3 outputs"),
        ("bc", ["--classes", "a,b,c"], None),
        ("abc", [], None),
        ("01", [], None),
    ],
)
def test_labels_that_are_not_numbered_as_the_outputs_are_noted(
    tmp_path, monkeypatch, capsys, labels, options, note
):
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text("import torch\nmodel = torch.nn.Linear(2, 3)\n")
    rows = "".join(f"{i},{i % 5},{labels[i % len(labels)]}\n" for i in range(12))
    Path("data.csv").write_text(f"width,height,kind\n{rows}")
    assert exit_code(["index", "net.py:model", "data.csv", "--label", "kind", *options]) == 0
    told = " ".join(capsys.readouterr().err.split())
    assert ("outputs (classes" in told or "all of them with --classes" in told) == (note is not None)
    assert note is None or note in told
