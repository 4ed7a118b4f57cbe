"""`likewise index`, `ask` and `merge`, from words to answers."""

import io
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import likewise as lw
from likewise.cli.app import exit_code

EXAMPLES = Path(__file__).parents[2] / "examples" / "analyze"


def words(made, kind):
    own = made / kind
    return {
        "images": [
            *(f"{EXAMPLES}/images.py:model", f"{own}/digits", "--gray", "--limit", "70"),
            *("--weights", f"{own}/resnet.safetensors"),
        ],
        "table": [
            *(f"{EXAMPLES}/table.py:model", f"{own}/wine.csv", "--label", "cultivar"),
            *("--weights", f"{own}/mlp.pt"),
        ],
        "text": [
            *(f"{EXAMPLES}/text.py:model", f"{own}/docstrings.csv", "--label", "package", "--limit", "40"),
            *("--text", "docstring", "--prepare", f"{EXAMPLES}/text.py:tokens"),
            *("--weights", f"{own}/bag.pt"),
        ],
    }[kind]


@pytest.fixture(scope="module")
def indexes(made, tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("indexes")
    for kind in ("images", "table", "text"):
        assert exit_code(["index", *words(made, kind), "--out", str(folder / kind), "--width", "64"]) == 0
    return folder


def test_a_width_that_is_rounded_is_told(made, tmp_path, capsys):
    given = ["index", *words(made, "table"), "--out", str(tmp_path / "index")]
    assert exit_code([*given, "--width", "100"]) == 0
    width = lw.Index(tmp_path / "index").width
    assert width != 100 and f"rows have {width} numbers instead of 100" in capsys.readouterr().err


def answers(capsys, *given):
    assert exit_code(["ask", *map(str, given), "--json", "--quiet"]) == 0
    return json.loads(capsys.readouterr().out)["answers"]


def test_images_are_asked_about(indexes, made, capsys):
    index = lw.Index(indexes / "images")
    known = [index.sample(row).name for row in (0, 40)]
    files = [made / "images" / "digits" / name for name in known]
    capsys.readouterr()
    found = answers(capsys, indexes / "images", *files, "-k", 3)
    assert [one["name"] for one in found] == [str(file) for file in files]
    first = found[0]["neighbors"][0]
    assert first["name"] == known[0] and first["label_name"] == "0"
    assert first["similarity"] == pytest.approx(1, abs=1e-3) and first["picture"].startswith(
        "data:image/webp"
    )
    assert found[0]["novelty_percentile"] is not None and isinstance(found[0]["trusted"], bool)


def test_labels_of_a_new_table_are_the_classes_of_the_index(indexes, made, capsys, tmp_path):
    lines = (made / "table" / "wine.csv").read_text().splitlines()
    last = [line for line in lines[1:] if line.endswith(lines[-1].rpartition(",")[2])]  # of one class only
    (tmp_path / "new.csv").write_text("\n".join([lines[0], *last[:3]]))
    index = lw.Index(indexes / "table")
    for found in answers(capsys, indexes / "table", tmp_path / "new.csv"):
        assert (
            found["label_name"] == last[0].rpartition(",")[2]
            and index.classes[found["label"]] == found["label_name"]
        )
        assert ("its own label" in " ".join(found["reasons"])) == (found["label"] != found["prediction"])
    other = [line.rpartition(",")[0] + ",vinegar" for line in last[:2]]
    (tmp_path / "other.csv").write_text("\n".join([lines[0], *other]))
    assert exit_code(["ask", str(indexes / "table"), str(tmp_path / "other.csv")]) == 0
    heard = capsys.readouterr()
    assert "note: vinegar is not a class of the index" in heard.err and "its own label" not in heard.out
    assert "the network was not trained again" in heard.out  # what would change the prediction


@pytest.mark.parametrize("numbers", [(-1, 0, 1), (1000, 1001, 5000)])
def test_new_labels_that_are_integers_are_the_classes_of_the_index(tmp_path, capsys, numbers):
    (tmp_path / "net.py").write_text("import torch\ntorch.manual_seed(0)\nmodel = torch.nn.Linear(2, 3)\n")
    rows = [f"{i % 7},{i % 4},{numbers[i % 3]}" for i in range(30)]
    (tmp_path / "data.csv").write_text("u,v,y\n" + "\n".join(rows))
    (tmp_path / "new.csv").write_text("u,v,y\n" + "\n".join(row for row in rows if not row.endswith("-1")))
    given = ["index", f"{tmp_path}/net.py:model", f"{tmp_path}/data.csv", "--label", "y", "--out"]
    assert exit_code([*given, f"{tmp_path}/index", "-q"]) == 0
    capsys.readouterr()
    found = answers(capsys, f"{tmp_path}/index", f"{tmp_path}/new.csv")
    expected = [row.rsplit(",", 1)[1] for row in rows if not row.endswith("-1")]
    assert [one["label_name"] for one in found] == expected


def test_a_column_of_labels_that_is_not_filled_in_is_left_out(tmp_path, capsys):
    (tmp_path / "net.py").write_text("import torch\ntorch.manual_seed(0)\nmodel = torch.nn.Linear(2, 3)\n")
    rows = [f"{i % 7},{i % 4},{'abc'[i % 3]}" for i in range(30)]
    (tmp_path / "data.csv").write_text("u,v,y\n" + "\n".join(rows))
    (tmp_path / "new.csv").write_text("u,v,y\n1,2,\n3,1,a\n")
    given = ["index", f"{tmp_path}/net.py:model", f"{tmp_path}/data.csv", "--label", "y", "--out"]
    assert exit_code([*given, f"{tmp_path}/index", "-q"]) == 0
    assert exit_code(["ask", f"{tmp_path}/index", f"{tmp_path}/new.csv", "--json"]) == 0
    told = capsys.readouterr()
    assert "the label 'y' is missing in some rows" in " ".join(told.err.split())
    assert [one["label"] for one in json.loads(told.out[told.out.index("{") :])["answers"]] == [None, None]


def test_columns_of_a_new_table_are_found_by_their_names(indexes, made, capsys, tmp_path):
    lines = (made / "table" / "wine.csv").read_text().splitlines()
    (tmp_path / "new.csv").write_text("\n".join(lines[:4]))
    rows = [line.split(",") for line in lines[:4]]
    turned = [",".join([str(i), *reversed(row)]) for i, row in enumerate(rows)]
    turned[0] = "bottle" + turned[0][1:]  # a column more, before the others in reverse
    (tmp_path / "turned.csv").write_text("\n".join(turned))
    plain, other = (answers(capsys, indexes / "table", tmp_path / name) for name in ("new.csv", "turned.csv"))
    assert [found["prediction"] for found in plain] == [found["prediction"] for found in other]
    for one, two in zip(plain, other, strict=True):
        assert one["confidence"] == pytest.approx(two["confidence"])
        assert [n["row"] for n in one["neighbors"]] == [n["row"] for n in two["neighbors"]]
    fewer = [line.rsplit(",", 2)[0] for line in lines[:4]]
    (tmp_path / "fewer.csv").write_text("\n".join(fewer))
    assert exit_code(["ask", str(indexes / "table"), str(tmp_path / "fewer.csv")]) == 2
    assert "has no column" in capsys.readouterr().err


def test_table_rows_are_asked_about_also_from_standard_input(indexes, made, capsys, monkeypatch, tmp_path):
    lines = (made / "table" / "wine.csv").read_text().splitlines()
    (tmp_path / "new.csv").write_text("\n".join(lines[:3]))
    capsys.readouterr()
    found = answers(capsys, indexes / "table", tmp_path / "new.csv")
    assert [one["neighbors"][0]["row"] for one in found] == [0, 1]
    bare = "\n".join(line.rpartition(",")[0] for line in lines[:3])
    assert lines[0].endswith("cultivar")
    monkeypatch.setattr(sys, "stdin", io.StringIO(bare))
    assert [one["neighbors"][0]["row"] for one in answers(capsys, indexes / "table", "-")] == [0, 1]


def test_a_run_is_asked_by_the_index_that_it_keeps(made, capsys, tmp_path, monkeypatch):
    lines = (made / "table" / "wine.csv").read_text().splitlines()
    (tmp_path / "new.csv").write_text("\n".join(lines[:3]))
    run = tmp_path / "run"
    assert exit_code(["analyze", *words(made, "table"), "--out", str(run), "-q"]) == 0
    with monkeypatch.context() as patched:
        patched.setattr("likewise.cli.index.load_network", None)  # refused before the model is loaded
        assert exit_code(["ask", str(run), str(tmp_path / "new.csv")]) == 2
    said = f"has no index. Build one with likewise index {run / 'settings.toml'} --out index"
    assert said in " ".join(capsys.readouterr().err.split())
    assert exit_code(["index", str(run / "settings.toml"), "--out", str(run / "index"), "--width", "64"]) == 0
    header = (run / "index" / "settings.toml").read_text().splitlines()[0]
    assert "likewise index THIS_FILE" in header
    assert "likewise analyze THIS_FILE" in (run / "settings.toml").read_text().splitlines()[0]
    capsys.readouterr()
    found = answers(capsys, run, tmp_path / "new.csv")
    assert [one["neighbors"][0]["row"] for one in found] == [0, 1]


def test_answers_show_what_the_index_keeps(indexes, made, capsys):
    assert exit_code(["ask", str(indexes / "text"), "Return the mean of an array", "-q"]) == 0
    told, kept = capsys.readouterr().out, lw.Index(indexes / "text")
    row = answers(capsys, indexes / "text", "Return the mean of an array")[0]["neighbors"][0]["row"]
    text = " ".join(kept.sample(row).picture.content.decode().split())
    assert text[:59] in told and "shown" in told and " name " not in told
    image = made / "images" / "digits" / lw.Index(indexes / "images").sample(0).name
    assert exit_code(["ask", str(indexes / "images"), str(image), "-q"]) == 0
    told = capsys.readouterr().out
    assert " name " in told and "shown" not in told


def test_the_recall_of_an_approximate_search_is_told(indexes, made, capsys, tmp_path):
    pytest.importorskip("faiss")
    lines = (made / "table" / "wine.csv").read_text().splitlines()
    (tmp_path / "new.csv").write_text("\n".join(lines[:3]))
    assert exit_code(["ask", str(indexes / "table"), str(tmp_path / "new.csv"), "--approximate"]) == 0
    assert "recall" in capsys.readouterr().err


def test_texts_are_asked_about_exactly_too(indexes, capsys, monkeypatch):
    capsys.readouterr()
    texts = ["Return the mean of an array", "note: open a file"]
    found = answers(capsys, indexes / "text", *texts, "--exact")
    assert [one["name"] for one in found] == texts
    assert all(near["error"] == 0 for one in found for near in one["neighbors"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("fit a model\n\nread a file\n"))
    assert len(answers(capsys, indexes / "text", "-")) == 2


def test_what_stays_sketched_beside_exact_similarities_is_told(indexes, capsys):
    assert exit_code(["ask", str(indexes / "text"), "Return the mean of an array", "--exact", "-q"]) == 0
    assert (
        "similarities are exact, agreement, shift, novelty, counterfactual from sketches"
        in capsys.readouterr().out
    )
    assert answers(capsys, indexes / "text", "fit a model")[0]["sketched"][0] == "similarity"


def test_an_index_is_asked_from_another_folder_and_after_it_was_moved(tmp_path, capsys, monkeypatch):
    project = tmp_path / "project"
    (project / "deep").mkdir(parents=True)
    (project / "net.py").write_text(
        "import torch\ndef model():\n    torch.manual_seed(0)\n    return torch.nn.Linear(2, 2)\n"
    )
    rows = "\n".join(f"{i / 7:.3f},{i % 5},{'ab'[i % 2]}" for i in range(12))
    (project / "rows.csv").write_text(f"x,y,label\n{rows}\n")
    monkeypatch.chdir(project)
    given = ["index", "net.py:model", "rows.csv", "--label", "label", "--out", "deep/index", "--width", "64"]
    assert exit_code([*given, "-q"]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    Path("new.csv").write_text("x,y\n0.1,1\n")
    capsys.readouterr()
    assert len(answers(capsys, project / "deep" / "index", "new.csv", "--exact")) == 1
    shutil.move(project / "deep" / "index", tmp_path / "elsewhere" / "moved")
    assert exit_code(["ask", "moved", "new.csv", "-q"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "was built with net.py, which is neither in" in said and "--model" in said
    assert len(answers(capsys, "moved", "new.csv", "--model", f"{project / 'net.py'}:model")) == 1
    shutil.move(tmp_path / "elsewhere" / "moved", project / "moved")
    assert len(answers(capsys, project / "moved", "new.csv", "--exact")) == 1


def test_a_page_shows_the_answers_escaped(indexes, tmp_path, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    page = tmp_path / "answers.html"
    given = ["ask", str(indexes / "text"), "<script>alert(1)</script>", "--open", "--page", str(page)]
    assert exit_code(given) == 0
    content = page.read_text()
    assert opened == [page.resolve().as_uri()]
    assert (
        "<script>" not in content
        and "&lt;script&gt;" in content
        and "http" not in content.split("</style>")[1]
    )
    assert "±" in capsys.readouterr().out
    assert '<p class="change">' in content


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["table", "no.png"], "no.png"),
        (["nowhere", "no.png"], "There is no index in"),
        (["table", "new.csv", "other.csv"], "of one kind"),
        (["table", "some text"], "of one kind"),
        (["text", " "], "empty text"),
    ],
    ids=["missing", "no index", "two kinds", "text", "empty"],
)
def test_what_cannot_be_asked_is_told(indexes, capsys, given, message):
    assert exit_code(["ask", str(indexes / given[0]), *given[1:]]) == 2
    assert message in capsys.readouterr().err


def test_pictures_of_another_size_are_told_that_of_the_index(indexes, made, capsys, tmp_path):
    from PIL import Image

    known = made / "images" / "digits" / lw.Index(indexes / "images").sample(0).name
    width, height = Image.open(known).size
    Image.new("L", (width + 3, height)).save(tmp_path / "wide.png")
    assert exit_code(["ask", str(indexes / "images"), str(known), str(tmp_path / "wide.png")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"is {width + 3} x {height} (width x height), the index holds {width} x {height} images" in said
    assert "build the index with --image-size" in said


def test_merged_parts_of_the_command_are_the_bytes_of_one(made, indexes, tmp_path, files_of, capsys):
    given = words(made, "images")
    for i in (1, 2):
        out = str(tmp_path / str(i))
        assert exit_code(["index", *given, "--out", out, "--width", "64", "--part", f"{i}/2", "-q"]) == 0
    assert exit_code(["merge", str(tmp_path / "2"), str(tmp_path / "1"), "--out", str(tmp_path / "all")]) == 0
    assert files_of(tmp_path / "all") == files_of(indexes / "images")
    assert exit_code(["index", *given, "--out", str(tmp_path / "x"), "--part", "3/2"]) == 2
    assert "from 1 to 2" in capsys.readouterr().err


def test_an_index_is_verified(indexes, tmp_path, capsys):
    shutil.copytree(indexes / "table", tmp_path / "index")
    assert exit_code(["verify", str(tmp_path / "index")]) == 0
    shard = next((tmp_path / "index").glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    assert exit_code(["verify", str(tmp_path / "index")]) == 1
    assert shard.name in capsys.readouterr().out


def test_an_index_built_from_python_is_asked_with_its_model_named(tmp_path, capsys):
    source = tmp_path / "net.py"
    source.write_text(
        "import torch\ndef model():\n    torch.manual_seed(0)\n    return torch.nn.Linear(2, 3)\n"
        "def new():\n    return torch.ones(1, 2)\n"
    )
    torch.manual_seed(0)
    lw.build_index(torch.nn.Linear(2, 3), torch.randn(9, 2), tmp_path / "index")
    assert exit_code(["ask", str(tmp_path / "index"), f"{source}:new"]) == 2
    assert "--model" in capsys.readouterr().err
    assert exit_code(["ask", str(tmp_path / "index"), f"{source}:new", "--model", f"{source}:model"]) == 0


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_processes_share_the_work_and_write_the_same_bytes(made, indexes, tmp_path, files_of, ranks):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    given = ["index", *words(made, "images"), "--width", "64", "--quiet"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def run(*more):
        command = [*launcher, "-m", "likewise", *given, "--out", str(tmp_path / "index"), *more]
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    first = run()
    assert first.returncode == 0, first.stderr
    assert first.stdout.count("Index(") == 1
    assert files_of(tmp_path / "index") == files_of(indexes / "images")
    next((tmp_path / "index").glob("shard-*")).unlink()
    assert run().returncode == 0
    assert files_of(tmp_path / "index") == files_of(indexes / "images")


def test_rows_like_targets_are_selected(indexes, made, capsys, tmp_path):
    lines = (made / "table" / "wine.csv").read_text().splitlines()
    (tmp_path / "targets.csv").write_text("\n".join([lines[0], lines[1], lines[60]]))
    out = tmp_path / "chosen.jsonl"
    given = [
        "select",
        indexes / "table",
        "--target",
        tmp_path / "targets.csv",
        "--count",
        4,
        "--out",
        out,
        "-q",
    ]
    assert exit_code([str(word) for word in [*given, "--format", "json"]]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    found = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [one["row"] for one in found] == rows and {0, 59} <= set(rows)
    assert [one["rank"] for one in found] == [1, 2, 3, 4]
    assert all(first["score"] >= second["score"] for first, second in itertools.pairwise(found))
    assert exit_code([str(word) for word in [*given[:4], "--share", "2"]]) == 2
