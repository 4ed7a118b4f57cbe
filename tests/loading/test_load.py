import io
import json
import os
import pickle
import struct
import subprocess
import sys
import tracemalloc
import zipfile
import zlib

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import likewise as lw
from likewise.loading import Read, data, import_object, model, new_inputs


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The current folder; what imports leave behind is undone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def draw(path, size=(6, 4), color=(255, 0, 51), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, color).save(path)
    return path


def read_back(read, n):
    """All inputs and labels, the way likewise.batches reads them."""
    batches = lw.batches(read.dataset, 2, labels=read.labels)
    assert batches.n == n
    labels = batches.labels()
    if read.labels is not None:
        assert torch.equal(labels, read.labels)
    return [batch.inputs for batch in batches], labels


# Import strings


def test_a_file_may_use_its_siblings_and_dataclasses_and_is_run_once(folder):
    write(folder / "far" / "sibling.py", "answer = 42")
    file = write(
        folder / "far" / "net.py",
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom sibling import answer\n"
        "@dataclass\nclass Box:\n    size: int = answer\n    class Inner:\n        deep = [1]\n",
    )
    box = import_object(f"{file}:Box")
    assert box().size == 42 and sys.modules[box.__module__].Box is box
    assert import_object("far/net.py:Box") is box
    assert import_object(f"{file}:Box.Inner.deep") == [1]
    assert str(folder / "far") in sys.path


def test_a_module_is_found_in_the_current_folder_and_in_the_library(folder):
    write(folder / "shop" / "parts.py", "class A:\n    b = 3")
    write(folder / "shop" / "__init__.py", "")
    assert import_object("shop.parts:A.b") == 3
    assert import_object("torch.nn:Linear") is nn.Linear


def test_files_of_one_name_are_two_modules(folder):
    one, two = write(folder / "a" / "net.py", "v = 1"), write(folder / "b" / "net.py", "v = 2")
    assert (import_object(f"{one}:v"), import_object(f"{two}:v")) == (1, 2)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("net.py", ValueError, r"no import string: expected .* for example net.py:object"),
        ("net.py:", ValueError, "no import string"),
        (":model", ValueError, "no import string"),
        ("net.py:model()", ValueError, "without brackets or arguments"),
        ("nets.py:model", FileNotFoundError, "no nets.py: did you mean net.py"),
        ("none/deep/net.py:model", FileNotFoundError, "and no such folder"),
        ("./net:model", FileNotFoundError, "did you mean net.py"),
        ("./data.csv:model", ValueError, "not a Python file"),
        ("a-b:model", ValueError, "not the name of a module"),
        ("nett:model", ValueError, "no module nett .did you mean net in"),
        ("torch.nowhere:x", ValueError, "no module torch.nowhere"),
        ("net.py:modle", ValueError, r"net.py has no 'modle', as in net.py:modle: did you mean model\?"),
        ("net.py:zzz", ValueError, "there is model"),
        (
            "needs.py:x",
            ValueError,
            r"ModuleNotFoundError: No module named 'not_there' \(.*needs.py, line 2\)",
        ),
        ("needs:x", ValueError, r"ModuleNotFoundError: No module named 'not_there' \(.*needs.py, line 2\)"),
        ("broken.py:x", ValueError, r"SyntaxError.*broken.py, line 1"),
        ("fails.py:x", ValueError, r"Importing fails.py raised ZeroDivisionError.*fails.py, line 3"),
        ("exits.py:x", ValueError, "SystemExit: 2.*__main__"),
        ("relative.py:x", ValueError, "package.module:object"),
    ],
)
def test_what_cannot_be_imported_is_said(folder, text, error, message):
    write(folder / "net.py", "model = 1")
    write(folder / "data.csv", "a\n1")
    write(folder / "needs.py", "\nimport not_there")
    write(folder / "broken.py", "def x(:")
    write(folder / "fails.py", "def f():\n    1 / 0\nf()")
    write(folder / "exits.py", "import sys\nsys.exit(2)")
    write(folder / "relative.py", "from . import x")
    with pytest.raises(error, match=message) as caught:
        import_object(text)
    if "raised" in str(caught.value):
        assert caught.value.__cause__ is not None
    assert not any(name.startswith(("fails_", "needs_")) for name in sys.modules)


# Models

NET = """
import torch
from torch import nn
def make():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
class Sized(nn.Module):
    def __init__(self, width: int):
        super().__init__()
class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Linear(3, 2)
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight
def fails():
    raise RuntimeError("no luck")
def nothing():
    return {"a": 1}
ready = make()
number = 3
"""


@pytest.fixture
def net(folder):
    return write(folder / "net.py", NET)


def test_a_model_is_an_object_or_made_by_a_class_or_function(net):
    assert model(f"{net}:ready") is import_object(f"{net}:ready")
    assert isinstance(model(f"{net}:make"), nn.Sequential)
    assert type(model(f"{net}:Wrapped")).__name__ == "Wrapped"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Sized", r"Sized\(width: int\).*without arguments, raised TypeError.*small function"),
        ("fails", r"fails\(\), called without arguments, raised RuntimeError: no luck"),
        ("nothing", r"gave dict, expected a torch.nn.Module.*weights="),
        ("number", "gave int"),
    ],
)
def test_what_gives_no_model_is_said(net, name, message):
    with pytest.raises(TypeError, match=message):
        model(f"{net}:{name}")


def states():
    state = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).state_dict()

    def under(prefix):
        return {prefix + name: value for name, value in state.items()}

    return state, {
        "plain": state,
        "under state_dict": {"state_dict": state, "epoch": 3},
        "under model_state_dict": {"model_state_dict": state, "optimizer": {"lr": 0.1}},
        "under model": {"model": state},
        "of DataParallel": under("module."),
        "of torch.compile": under("_orig_mod."),
        "of Lightning": {"state_dict": under("model."), "pytorch-lightning_version": "2"},
        "of all": under("module.model._orig_mod."),
    }


@pytest.mark.parametrize("kind", states()[1])
def test_weights_are_found_whatever_wraps_them(folder, net, kind):
    torch.manual_seed(1)
    state, wrapped = states()
    torch.save(wrapped[kind], folder / "weights.pt")
    loaded = model(f"{net}:make", "weights.pt").state_dict()
    assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_weights_of_safetensors_are_read_also_where_tied_ones_are_left_out(folder, net):
    state, _ = states()
    save_file(state, folder / "weights.safetensors")
    assert torch.equal(model(f"{net}:make", "weights.safetensors")[0].weight, state["0.weight"])
    tied = {"a.weight": torch.eye(3), "a.bias": torch.ones(3), "b.bias": torch.zeros(3)}
    save_file(tied, folder / "tied.safetensors")
    loaded = model(f"{net}:Tied", "tied.safetensors")
    assert torch.equal(loaded.b.weight, torch.eye(3)) and torch.equal(loaded.a.bias, torch.ones(3))


def test_a_prefix_that_the_model_has_itself_stays(folder, net):
    torch.save({"model.weight": torch.ones(2, 3), "model.bias": torch.ones(2)}, folder / "w.pt")
    assert torch.equal(model(f"{net}:Wrapped", "w.pt").model.weight, torch.ones(2, 3))
    torch.save({"module.model.weight": torch.ones(2, 3), "module.model.bias": torch.ones(2)}, folder / "w.pt")
    assert torch.equal(model(f"{net}:Wrapped", "w.pt").model.weight, torch.ones(2, 3))


def test_weights_that_do_not_fit_are_listed(folder, net):
    state, _ = states()
    state["0.weight"] = torch.ones(5, 3)
    state["extra"] = state.pop("2.bias")
    torch.save({f"module.{name}": value for name, value in state.items()}, folder / "w.pt")
    before = [value.clone() for value in import_object(f"{net}:ready").state_dict().values()]
    with pytest.raises(ValueError) as caught:
        model(f"{net}:ready", "w.pt")
    for part in (
        "missing in the file: 2.bias",
        "not in the model: extra",
        "0.weight is (5, 3) there and (4, 3) in the model",
    ):
        assert part in str(caught.value)
    after = import_object(f"{net}:ready").state_dict().values()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


class Evil:
    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("protocol", [2, 4])
def test_weights_that_are_pickles_do_not_run(folder, net, monkeypatch, protocol):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save({"state_dict": states()[0], "extra": Evil()}, folder / "zip.pt", pickle_protocol=protocol)
    (folder / "raw.pt").write_bytes(pickle.dumps(Evil(), protocol=protocol))
    (folder / "raw.safetensors").write_bytes(pickle.dumps(Evil(), protocol=protocol))
    torch.save(nn.Linear(2, 2), folder / "whole.pt")
    for name in ("zip.pt", "raw.pt", "whole.pt"):
        with pytest.raises(ValueError, match=r"would run code in it \(pickle\).*model.state_dict\(\)"):
            model(f"{net}:make", name)
    with pytest.raises(ValueError, match="safetensors"):
        model(f"{net}:make", "raw.safetensors")
    assert not (folder / "ran").exists()
    pickle.loads(pickle.dumps(Evil()))
    assert (folder / "ran").exists(), "it would have run, had it been read"


def test_files_that_are_no_weights_are_said(folder, net):
    (folder / "empty.pt").write_bytes(b"")
    torch.save(torch.ones(2), folder / "tensor.pt")
    torch.save({"epoch": 3, "weights": {"a": torch.ones(2)}}, folder / "odd.pt")
    torch.save({}, folder / "nothing.pt")
    torch.save(states()[0], folder / "good.pt")
    (folder / "cut.pt").write_bytes((folder / "good.pt").read_bytes()[:500])
    for name, message in {
        "empty.pt": "cannot be read as weights",
        "cut.pt": "cannot be read as weights",
        "tensor.pt": "holds a Tensor, expected a state dict",
        "odd.pt": "holds no state dict.*it has epoch, weights",
        "nothing.pt": "it has nothing",
        ".": "is a folder: name the weights file",
    }.items():
        with pytest.raises(ValueError, match=message):
            model(f"{net}:make", name)
    with pytest.raises(FileNotFoundError, match=r"did you mean good.pt"):
        model(f"{net}:make", "goud.pt")


# Folders of images


@pytest.fixture
def pets(folder):
    draw(folder / "pets" / "dog" / "b.PNG", color=(0, 255, 0))
    draw(folder / "pets" / "dog" / "a.jpg", color=(0, 0, 0))
    draw(folder / "pets" / "cat" / "1.gif")
    draw(folder / "pets" / "cat" / "2.webp")
    draw(folder / "pets" / "cat" / "3.bmp")
    draw(folder / "pets" / "dog" / ".hidden.png", size=(1, 1))
    draw(folder / "pets" / ".cache" / "x.png", size=(1, 1))
    write(folder / "pets" / "dog" / "notes.txt", "none")
    write(folder / "pets" / "README.md", "none")
    return "pets"


def test_a_folder_of_classes_gives_images_labels_and_names(pets):
    read = data(pets)
    assert read.classes == ("cat", "dog") and read.labels.tolist() == [0, 0, 0, 1, 1]
    assert read.labels.dtype == torch.long
    assert read.names == ("cat/1.gif", "cat/2.webp", "cat/3.bmp", "dog/a.jpg", "dog/b.PNG")
    inputs, _ = read_back(read, 5)
    assert inputs[0].shape == (2, 3, 4, 6) and inputs[0].dtype == torch.float32
    assert torch.allclose(read.dataset[2], torch.tensor([1.0, 0.0, 0.2]).reshape(3, 1, 1).expand(3, 4, 6))
    assert read.show(4).size == (6, 4) and read.show(4).getpixel((0, 0)) == (0, 255, 0)
    assert len(list(read.dataset)) == 5


def test_images_that_are_not_read_are_noted(pets, folder):
    assert data(pets).notes == ()  # files of other kinds, and what is hidden, are none
    draw(folder / "pets" / "cat" / "more" / "deep" / "x.png")
    write(folder / "pets" / "dog" / "c.HEIC", "none")
    (folder / "pets" / "dog" / "empty").mkdir()
    read = data(pets)
    assert len(read.names) == 5
    assert len(read.notes) == 1 and "not read in pets: cat/more, dog/c.HEIC. " in read.notes[0]


def test_a_flat_folder_has_no_labels(folder):
    for i in range(4):
        draw(folder / "flat" / f"{i}.tif")
    (folder / "flat" / "more").mkdir()
    read = data("flat", limit=3)
    assert read.labels is None and read.classes is None and read.names == ("0.tif", "1.tif", "2.tif")
    read_back(read, 3)


def test_images_are_resized_and_made_gray_and_shown_as_they_are(folder):
    draw(folder / "f" / "a.png")
    draw(folder / "f" / "b.png", size=(9, 9), color=51, mode="L")
    draw(folder / "f" / "c.png", size=(3, 3), color=(51, 51, 51, 9), mode="RGBA")
    read = data("f", image_size=5, gray=True)
    inputs, _ = read_back(read, 3)
    assert torch.cat(inputs).shape == (3, 1, 5, 5)
    assert torch.allclose(read.dataset[1], torch.full((1, 5, 5), 0.2)) and read.show(1).size == (9, 9)
    assert torch.allclose(data("f", image_size=5).dataset[2], torch.full((3, 5, 5), 0.2))


def test_images_of_different_sizes_are_named(folder):
    for i in range(3):
        draw(folder / "f" / f"{i}.png", size=(6, 4 + i // 2))
    with pytest.raises(ValueError, match=r"f/0.png is 6 x 4, f/2.png is 6 x 5 .*--image-size"):
        data("f")


def test_broken_images_are_named(folder):
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    for name in "abc":
        draw(folder / "f" / f"{name}.png", size=(40, 40))
    Image.fromarray(noise).save(folder / "f" / "c.png")
    whole = (folder / "f" / "c.png").read_bytes()
    (folder / "f" / "c.png").write_bytes(whole[: len(whole) // 2])
    read = data("f")
    with pytest.raises(ValueError, match=r"f/c.png cannot be read as an image"):
        read.dataset[2]
    write(folder / "f" / "b.png", "no image")
    for size in (None, 8):
        with pytest.raises(ValueError, match=r"f/b.png cannot be read as an image \(UnidentifiedImageError"):
            data("f", image_size=size)


def test_images_of_sixteen_bits_are_not_clipped_in_silence(folder):
    (folder / "f").mkdir()
    Image.fromarray(np.full((4, 4), 40000, np.uint16)).save(folder / "f" / "a.png")
    with pytest.raises(ValueError, match=r"a.png.*more than 8 bits.*prepare"):
        data("f")
    write(folder / "p.py", "import numpy as np\ndef scale(image):\n    return np.array(image)[None] / 65535")
    assert data("f", prepare="p.py:scale").dataset[0][0, 0, 0] == pytest.approx(40000 / 65535)


def test_a_limit_on_classes_is_spread_over_all(folder):
    for name in "abc":
        for i in range(4):
            draw(folder / "f" / name / f"{i}.png")
    read = data("f", limit=3)
    assert read.names == ("a/0.png", "b/0.png", "c/0.png") and read.labels.tolist() == [0, 1, 2]
    assert data("f", limit=100).names == data("f").names


def test_own_preparation_of_images(folder, pets):
    write(
        folder / "p.py",
        "import numpy as np\ndef mean(image):\n    return np.asarray(image).mean((0, 1)).tolist()\n"
        "def size(image):\n    return [image.size[0]], {'y': image.size[1]}\n"
        "def same(image):\n    return image\n",
    )
    read = data(pets, prepare="p.py:mean")
    assert read.dataset[4].tolist() == [0, 255, 0] and read.dataset[4].dtype == torch.float32
    read_back(read, 5)
    inputs, _ = read_back(data(pets, prepare="p.py:size", image_size=7), 5)
    assert inputs[0][0].tolist() == [[7], [7]] and inputs[0][1]["y"].tolist() == [7, 7]
    with pytest.raises(TypeError, match=r"p.py:same gave for sample 0 \(cat/1.gif\).*Image is no tensor"):
        data(pets, prepare="p.py:same")


def test_folders_that_hold_no_images_or_too_much_are_said(folder):
    (folder / "empty").mkdir()
    draw(folder / "both" / "a.png")
    draw(folder / "both" / "cat" / "a.png")
    draw(folder / "one" / "cat" / "a.png")
    (folder / "one" / "dog").mkdir()
    draw(folder / "split" / "train" / "cat" / "a.png")
    for name, message in {
        "empty": "No images .*in empty, which holds nothing: expected folder/class/image.png",
        "both": "holds images .a.png. and folders of images .cat.",
        "one": "There are no images in dog of one",
        "split": "deeper, give split/train",
    }.items():
        with pytest.raises(ValueError, match=message):
            data(name)


# Tables


@pytest.fixture
def frame():
    return pandas.DataFrame(
        {
            "size": [1, 2, 3, 4],
            "weight": [0.5, 1.5, 2.5, 3.5],
            "wild": [True, False, True, False],
            "name": ["ann", "bob", "cid", "dan"],
            "kind": ["dog", "cat", "eel", "cat"],
            "code": [7, 3, 7, 9],
            "rank": [2, 0, 1, 1],
            "price": [1.0, 2.0, 4.0, 8.0],
        }
    )


def save(frame, path):
    if path.suffix == ".parquet":
        frame.to_parquet(path)
    else:
        frame.to_csv(path, index=False, sep="\t" if path.suffix == ".tsv" else ",")
    return str(path)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet", ".CSV"])
def test_tables_give_numbers_and_classes(folder, frame, suffix):
    path = folder / f"t{suffix}"
    save(frame, path)
    read = data(str(path), label="kind", columns=["weight", "size", "wild"])
    assert read.dataset.tolist() == [[0.5, 1, 1], [1.5, 2, 0], [2.5, 3, 1], [3.5, 4, 0]]
    assert read.dataset.dtype == torch.float32
    assert read.labels.tolist() == [1, 0, 2, 0] and read.classes == ("cat", "dog", "eel")
    read_back(read, 4)
    seen = read.show(1)
    assert seen == {"kind": "cat", "weight": 1.5, "size": 2, "wild": False}
    assert type(seen["size"]) is int and type(seen["wild"]) is bool


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize(
    ("label", "values", "classes"),
    [
        ("kind", [1, 0, 2, 0], ("cat", "dog", "eel")),
        ("wild", [1, 0, 1, 0], ("False", "True")),
        ("code", [7, 3, 7, 9], None),
        ("rank", [2, 0, 1, 1], None),
        ("price", [1.0, 2.0, 4.0, 8.0], None),
    ],
)
def test_labels_are_classes_or_numbers(folder, frame, suffix, label, values, classes):
    read = data(save(frame, folder / f"t{suffix}"), label=label)
    assert read.labels.tolist() == values and read.classes == classes
    assert read.labels.dtype == (torch.float32 if label == "price" else torch.long)
    assert read.dataset.shape == (4, 6 - (label != "kind"))
    read_back(read, 4)


def test_a_line_of_json_ends_with_a_line_feed_only(folder):
    rows = [{"text": "one\u2028two\x85three\x0c", "kind": "a"}, {"text": "four", "kind": "b"}]
    lines = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (folder / "t.jsonl").write_bytes(f"\ufeff{lines}\r\n\r\n".encode())
    (folder / "length.py").write_text("def of(text):\n    return [len(text)]\n")
    read = data("t.jsonl", label="kind", text_column="text", prepare="length.py:of")
    assert [read.show(i) for i in range(2)] == [row["text"] for row in rows]
    told = {"text_column": "text", "prepare": "length.py:of", "columns": None, "image_size": None}
    asked = new_inputs(["-"], lambda: "\ufeffa\u2028b\nc\n", **told, limit=None, show_columns=None)
    assert asked.names == ("a\u2028b", "c")


def test_labels_of_pandas_own_types(folder, frame):
    frame["kind"] = frame["kind"].astype("category")
    frame["wild"] = frame["wild"].astype("boolean")
    frame["code"] = frame["code"].astype("Int64")
    path = save(frame, folder / "t.parquet")
    assert data(path, label="kind").classes == ("cat", "dog", "eel")
    assert data(path, label="wild").labels.tolist() == [1, 0, 1, 0]
    assert data(path, label="code").labels.tolist() == [7, 3, 7, 9]
    assert data(path, columns=["code", "wild"]).dataset.tolist() == [[7, 1], [3, 0], [7, 1], [9, 0]]


def test_a_limit_leaves_the_numbers_of_classes(folder, frame):
    path = save(frame, folder / "t.csv")
    read = data(path, label="kind", limit=2)
    assert read.labels.tolist() == [1, 0] and read.classes == ("cat", "dog", "eel")
    read_back(read, 2)
    assert data(path).labels is None and len(data(path, limit=99).dataset) == 4


def test_what_is_shown_of_a_wide_table_is_limited(folder):
    path = save(pandas.DataFrame(np.ones((2, 60))), folder / "t.csv")
    read = data(path)
    assert read.dataset.shape == (2, 60) and len(read.show(0)) == 50
    with pytest.raises(IndexError):
        read.show(2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label": "nope"}, "no column 'nope': it has size, weight"),
        ({"label": "wieght"}, r"no column 'wieght': it has size, weight.*\. Did you mean weight\?$"),
        (
            {"columns": ["size", "nope", "none"]},
            "no column 'nope', nor 1 more of those asked for: it has size",
        ),
        ({"columns": ["size", "nope"]}, "no column 'nope'"),
        ({"columns": ["size", "name"]}, "'name' of .* holds no numbers .*'ann'"),
        ({"columns": []}, "There are no numeric columns"),
        ({"columns": ["kind"], "label": "kind"}, "asked for twice"),
        ({"columns": ["size", "size"]}, "asked for twice"),
        ({"text_column": "name"}, "needs prepare"),
        ({"gray": True, "image_size": 3}, "image_size, gray cannot be used with the table"),
        ({"limit": 0}, "limit must be at least 1, found 0"),
    ],
)
def test_what_a_table_cannot_give_is_said(folder, frame, options, message):
    with pytest.raises(ValueError, match=message):
        data(save(frame, folder / "t.csv"), **options)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_missing_values_are_named(folder, frame, suffix):
    frame.loc[2, "weight"] = np.nan
    frame.loc[3, "kind"] = None
    path = save(frame, folder / f"t{suffix}")
    with pytest.raises(ValueError, match=r"'weight' of .* holds nan in row 2"):
        data(path)
    with pytest.raises(ValueError, match=r"label 'kind' of .* is missing in row 3"):
        data(path, label="kind", columns=["size"])
    assert data(path, columns=["size"]).dataset.shape == (4, 1)
    frame["weight"] = pandas.array([1, None, 3, 4], dtype="Int64")
    with pytest.raises(ValueError, match="holds nan in row 1"):
        data(save(frame, folder / f"t{suffix}"))


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".jsonl"])
def test_booleans_with_missing_cells_are_named(folder, suffix):
    frame, path = pandas.DataFrame({"size": [1, 2, 3], "wild": [True, None, False]}), folder / f"t{suffix}"
    if suffix == ".jsonl":
        frame.to_json(path, orient="records", lines=True)
    else:
        save(frame, path)
    for options in ({}, {"columns": ["size", "wild"]}):
        with pytest.raises(ValueError, match=r"'wild' of .* holds nan in row 1 .* 1 cells"):
            data(str(path), **options)
    assert data(str(path), columns=["size"]).columns == ("size",)


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".jsonl"])
def test_a_word_among_numbers_is_named_and_columns_of_text_are_noted(folder, frame, suffix):
    path = folder / f"t{suffix}"

    def write_frame():
        return save(frame, path) if suffix != ".jsonl" else frame.to_json(path, orient="records", lines=True)

    write_frame()
    assert data(str(path)).notes == (
        f"the columns name, kind of {path} hold text and are not inputs; --columns names inputs, --show-columns "
        "columns that are only shown.",
    )
    assert data(str(path), label="kind", show_columns=["name"]).notes == ()
    assert data(str(path), columns=["size"]).notes == ()
    frame["weight"] = ["0.5", "unknown", "2.5", "3.5"]
    write_frame()
    with pytest.raises(ValueError, match=r"'weight' of .* but for 1 of 4 cells: 'unknown' in row 1"):
        data(str(path))
    assert data(str(path), columns=["size", "price"]).columns == ("size", "price")


def test_labels_that_are_no_labels_are_said(folder):
    frame = pandas.DataFrame({"x": [1.0, 2.0], "y": [[1], [2]]})
    with pytest.raises(TypeError, match="'y' are of the types"):
        data(save(frame, folder / "t.parquet"), label="y")


@pytest.mark.parametrize("first", [0, 1, 5, "ann"])
@pytest.mark.parametrize("options", [{}, {"text_column": "b", "prepare": "p.py:padded"}])
def test_cells_without_a_column_name_do_not_shift_the_others(folder, first, options):
    write(folder / "p.py", TEXT)
    path = write(folder / "t.csv", f"a,b,y\n{first},2,0,9\n{first},4,1,8\n")
    with pytest.raises(ValueError, match="more cells than there are column names"):
        data(path, label="y", **options)


def test_a_separator_at_the_end_of_rows_is_no_cell(folder):
    read = data(write(folder / "t.csv", "a,b,y\n1,2,0,\n3,4,1,\n"), label="y")
    assert read.dataset.tolist() == [[1, 2], [3, 4]] and read.labels.tolist() == [0, 1]


def test_broken_and_empty_tables_are_said(folder):
    write(folder / "a.parquet", "no table")
    write(folder / "b.csv", "")
    write(folder / "c.csv", "x,y\n")
    write(folder / "d.csv", "x,y\nann,bob")
    (folder / "e.csv").write_bytes(b"x\n\xff\xfe")
    for name, message in {
        "a.parquet": "a.parquet cannot be read as a table",
        "b.csv": "b.csv cannot be read as a table",
        "c.csv": "has no rows",
        "d.csv": "There are no numeric columns in d.csv, only x, y",
        "e.csv": "e.csv cannot be read as a table",
    }.items():
        with pytest.raises(ValueError, match=message):
            data(name)


TEXT = """
import torch
def padded(text):
    return {"ids": [ord(c) for c in text[:3].ljust(3)], "mask": [1.0] * 3}
def ragged(text):
    return [ord(c) for c in text]
def words(text):
    return text
def fails(text):
    return text.nope
def row(row):
    assert "kind" not in row
    return torch.tensor([row["size"], len(row["name"])])
count = 3
"""


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_text_is_prepared(folder, suffix):
    write(folder / "p.py", TEXT)
    frame = pandas.DataFrame({"text": ["NA", "a cat", "", "None"], "kind": ["x", "y", "x", "y"]})
    read = data(save(frame, folder / f"t{suffix}"), text_column="text", label="kind", prepare="p.py:padded")
    inputs, labels = read_back(read, 4)
    assert inputs[0]["ids"].tolist() == [[78, 65, 32], [97, 32, 99]]
    assert inputs[0]["ids"].dtype == torch.long and inputs[0]["mask"].dtype == torch.float32
    assert labels.tolist() == [0, 1, 0, 1]
    assert [read.show(i) for i in range(4)] == ["NA", "a cat", "", "None"]


def test_text_that_looks_like_numbers_stays_text(folder):
    write(folder / "p.py", TEXT)
    write(folder / "t.csv", "text,y\n007,0\n1e5,1\n")
    read = data("t.csv", text_column="text", label="y", prepare="p.py:padded")
    assert [read.show(i) for i in range(2)] == ["007", "1e5"]


def test_preparations_that_do_not_work_are_said(folder, frame):
    write(folder / "p.py", TEXT)
    frame["name"] = ["ann", "bo", "cid", "dan"]
    path = save(frame, folder / "t.csv")
    for name, error, message in [
        ("ragged", ValueError, r"gave \(3,\) for sample 0, but \(2,\) for sample 1: .*pad"),
        (
            "words",
            TypeError,
            "p.py:words gave for sample 0 something that is not a model input: str is no tensor",
        ),
        ("fails", ValueError, "p.py:fails raised AttributeError for sample 0"),
        ("count", TypeError, "p.py:count is a int, expected a function"),
    ]:
        with pytest.raises(error, match=message):
            data(path, text_column="name", prepare=f"p.py:{name}")
    frame["name"] = ["ann", "bob", "ci", "dan"]
    read = data(save(frame, folder / "t.csv"), text_column="name", prepare="p.py:ragged")
    with pytest.raises(ValueError, match=r"for sample 2: .*pad"):
        read.dataset[2]
    frame["name"] = ["ann", None, "ci", "dan"]
    with pytest.raises(TypeError, match=r"row 1 .*expected text"):
        data(save(frame, folder / "t.parquet"), text_column="name", prepare="p.py:padded")


def test_rows_are_prepared_as_dicts_without_the_label(folder, frame):
    write(folder / "p.py", TEXT)
    read = data(save(frame, folder / "t.csv"), label="kind", prepare="p.py:row", show_columns=["name"])
    assert torch.cat(read_back(read, 4)[0]).tolist() == [[1, 3], [2, 3], [3, 3], [4, 3]]
    assert read.show(0) == {"kind": "dog", "name": "ann"}


def test_tokenizers_of_hugging_face_give_one_sample_without_a_batch(folder, frame):
    pytest.importorskip("transformers")
    write(
        folder / "p.py",
        "import torch\nfrom transformers import BatchEncoding\n"
        "def batch(text):\n    return BatchEncoding({'input_ids': torch.tensor([[1, 2]])})\n"
        "def one(text):\n    return BatchEncoding({'input_ids': [5]})\n",
    )
    path = save(frame, folder / "t.csv")
    for name, shape in (("batch", (2, 2)), ("one", (2, 1))):
        inputs, labels = read_back(data(path, text_column="name", prepare=f"p.py:{name}"), 4)
        assert inputs[0]["input_ids"].shape == shape and labels is None


# What a person sees of a row


@pytest.fixture
def clients(frame):
    return frame.assign(
        email=[f"{name}@home" for name in frame["name"]], account=["DE1", "DE2", "DE3", "DE4"]
    )


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_of_a_row_inputs_label_and_named_columns_are_shown(folder, clients, suffix):
    path, given = save(clients, folder / f"t{suffix}"), {"label": "kind", "columns": ["size", "price"]}
    assert data(path, **given).show(1) == {"kind": "cat", "size": 2, "price": 2.0}
    assert data(path, **given, show_columns=["email"]).show(1)["email"] == "bob@home"
    every = {"size": 1, "weight": 0.5, "wild": True, "code": 7, "rank": 2, "price": 1.0}
    assert data(path).show(0) == every  # the model is called with all numbers
    with pytest.raises(ValueError, match="no column 'phone': it has size"):
        data(path, show_columns=["phone"])
    with pytest.raises(TypeError, match="show_columns must be a list"):
        data(path, show_columns="email")


def test_of_what_is_prepared_only_text_label_and_named_columns_are_shown(folder, clients):
    write(folder / "p.py", TEXT)
    path = save(clients, folder / "t.csv")
    assert data(path, label="kind", prepare="p.py:row").show(0) == {"kind": "dog"}
    assert data(path, prepare="p.py:row", columns=["size", "name"]).show(0) == {"size": 1, "name": "ann"}
    texts = {"text_column": "name", "prepare": "p.py:padded", "label": "kind"}
    assert data(path, **texts).show(2) == "cid"
    shown = data(path, **texts, show_columns=["account"]).show(2)
    assert shown == {"kind": "eel", "account": "DE3", "name": "cid"}


def test_of_items_of_code_only_named_columns_are_shown(folder):
    write(
        folder / "rows.py",
        "import torch\nrows = [{'x': 1.0, 'email': 'ann@home', 'kind': 0}] * 3\n"
        "def first(row): return torch.tensor([row['x']])\n",
    )
    given = {"label": "kind", "prepare": "rows.py:first"}
    assert data("rows.py:rows", **given).show is None
    assert data("rows.py:rows", **given, show_columns=["kind", "x"]).show(1) == {"kind": 0, "x": 1.0}
    with pytest.raises(ValueError, match="no column 'age' to show"):
        data("rows.py:rows", show_columns=["age"])


# Files that are made to do harm


def png(width, height, pixels=b""):
    """A PNG that declares this size, and stores what it is told."""

    def chunk(name, content):
        body = name + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [2000, 13_000, 60_000])
def test_an_image_that_declares_more_pixels_than_fit_is_not_decoded(folder, side):
    (folder / "pets").mkdir()
    (folder / "pets" / "huge.png").write_bytes(png(side, side, zlib.compress(b"")))
    with pytest.raises(MemoryError, match=rf"{side:,} x {side:,} pixels .*max_memory=") as caught:
        data("pets", image_size=4, max_memory=10**6)
    assert caught.value.enough == side * side * 8 and caught.value.allowed == 10**6
    with pytest.raises(MemoryError) as caught:
        data("pets", max_memory=10**6)  # as it is, and as float32
    assert caught.value.enough == side * side * 32


def test_the_limit_of_pixels_is_max_memory_and_pillows_own_stays(folder, monkeypatch):
    draw(folder / "pets" / "a.png", (60, 40))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    assert data("pets").dataset[0].shape == (3, 40, 60)
    assert Image.MAX_IMAGE_PIXELS == 10


def test_other_formats_under_the_name_of_an_image_are_not_decoded(folder):
    (folder / "pets").mkdir()
    Image.new("RGB", (4, 4)).save(folder / "pets" / "a.png", "PPM")
    with pytest.raises(ValueError, match="cannot be read as an image"):
        data("pets")


def test_arrays_that_expand_to_more_than_fits_are_not_decompressed(folder):
    np.savez_compressed(folder / "bomb.npz", x=np.zeros((4, 2_000_000)), y=np.arange(4))
    assert (folder / "bomb.npz").stat().st_size < 10**5
    tracemalloc.start()
    with pytest.raises(MemoryError, match="max_memory=64_000_032"):
        data("bomb.npz", max_memory=10**7)
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()
    assert data("bomb.npz", max_memory=10**8).dataset.shape == (4, 2_000_000)
    np.savez(folder / "stored.npz", x=np.ones((4, 1000)))
    assert data("stored.npz", max_memory=100).dataset.shape == (4, 1000)  # nothing to decompress


def test_arrays_that_declare_more_than_they_store_are_refused(folder):
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        head, {"descr": "<f8", "fortran_order": False, "shape": (10**9, 10**3)}
    )
    with zipfile.ZipFile(folder / "a.npz", "w") as archive:
        archive.writestr("x.npy", head.getvalue() + b"\0" * 80)
    with pytest.raises(ValueError, match=r"declares the shape .*, 8,000,000,000,000 bytes, and stores 80"):
        data("a.npz")
    np.savez(folder / "cut.npz", x=np.ones((100, 100)))
    (folder / "cut.npz").write_bytes((folder / "cut.npz").read_bytes()[:50_000])
    with pytest.raises(ValueError, match="cut off"):
        data("cut.npz")


@pytest.mark.parametrize("value", [1.5, "x" * 1000])
def test_tables_that_expand_to_more_than_fits_are_not_read(folder, value):
    path = save(pandas.DataFrame({"a": [value] * 20_000}), folder / "t.parquet")
    assert os.stat(path).st_size < 10**4
    with pytest.raises(MemoryError, match="max_memory="):
        data(path, max_memory=10**5)


def test_weights_that_are_compressed_are_refused(folder, net):
    torch.save(states()[0], folder / "plain.pt")
    with (
        zipfile.ZipFile(folder / "plain.pt") as plain,
        zipfile.ZipFile(folder / "w.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in plain.namelist():
            packed.writestr(name, plain.read(name) + b"\0" * 10**6)
    with pytest.raises(ValueError, match=r"torch.save compresses nothing"):
        model(f"{net}:make", "w.pt")


@pytest.mark.parametrize("target", ["file", "folder"])
def test_links_to_outside_of_the_data_folder_need_a_flag(folder, target):
    draw(folder / "private" / "scan.png")
    draw(folder / "pets" / "cat" / "a.png")
    os.symlink("a.png", folder / "pets" / "cat" / "same.png")
    assert data("pets").names == ("cat/a.png", "cat/same.png")
    if target == "file":
        os.symlink(folder / "private" / "scan.png", folder / "pets" / "cat" / "z.png")
    else:
        os.symlink(folder / "private", folder / "pets" / "dog")
    with pytest.raises(ValueError, match=r"link to outside of the data folder.*--follow-links"):
        data("pets")
    names = data("pets", follow_links=True).names
    assert names[-1] == ("cat/z.png" if target == "file" else "dog/scan.png")
    with pytest.raises(ValueError, match="follow_links cannot be used with the table"):
        data(write(folder / "t.csv", "a\n1"), follow_links=True)


def test_links_to_nowhere_loops_and_pipes_are_named_and_never_waited_for(folder):
    for make, message in {
        lambda path: os.symlink("nothing.png", path): "leads nowhere",
        lambda path: os.symlink(path.name, path): "leads nowhere",
        os.mkfifo: "no file",
    }.items():
        draw(folder / "pets" / "a.png")
        make(folder / "pets" / "odd.png")
        with pytest.raises(ValueError, match=f"odd.png is .*{message}"):
            data("pets")
        (folder / "pets" / "odd.png").unlink()
    os.symlink(folder / "pets", folder / "pets" / "again")
    with pytest.raises(ValueError, match=r"holds images .* and folders of images"):
        data("pets")


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".npz"])
def test_pipes_and_links_to_nowhere_are_no_data(folder, net, suffix):
    os.mkfifo(folder / f"pipe{suffix}")
    os.symlink(f"loop{suffix}", folder / f"loop{suffix}")
    with pytest.raises(ValueError, match="pipe, device or socket"):
        data(f"pipe{suffix}")
    with pytest.raises(ValueError, match="pipe, device or socket"):
        model(f"{net}:make", f"pipe{suffix}")
    with pytest.raises(FileNotFoundError, match="link that leads nowhere"):
        data(f"loop{suffix}")


# Arrays

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("name", ["x", "X", "inputs", "images"])
@pytest.mark.parametrize("label", ["y", "labels", "other"])
def test_arrays_are_found_by_their_names(folder, name, label):
    x, y = RNG.normal(size=(5, 3)), np.array([3, 1, 1, 2, 3])
    np.savez(folder / "a.npz", **{name: x, label: y, "more": np.ones(2)})
    read = data("a.npz", label="other" if label == "other" else None)
    assert read.dataset.dtype == torch.float32 and np.allclose(read.dataset, x)
    assert read.labels.tolist() == [3, 1, 1, 2, 3] and read.classes is None and read.show is None
    read_back(read, 5)
    read_back(data("a.npz", limit=2), 2)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((4, 6, 5), (4, 1, 6, 5)),
        ((4, 6, 5, 3), (4, 3, 6, 5)),
        ((4, 6, 5, 1), (4, 1, 6, 5)),
        ((4, 3, 6, 5), (4, 3, 6, 5)),
    ],
)
def test_bytes_become_images(folder, shape, expected):
    x = RNG.integers(0, 256, shape, dtype=np.uint8)
    np.savez(folder / "a.npz", x=x, y=np.array(["b", "a", "b", "a"]))
    read = data("a.npz")
    assert read.dataset.shape == expected and read.dataset.dtype == torch.float32
    assert read.classes == ("a", "b") and read.labels.tolist() == [1, 0, 1, 0]
    shown = read.show(2)
    assert shown.dtype == np.uint8 and shown.shape[:2] == (6, 5)
    first = shown if shown.ndim == 2 else shown[..., 0]
    assert np.allclose(read.dataset[2, 0], first / 255)
    read_back(read, 4)


def test_arrays_are_prepared_and_integers_stay(folder):
    np.savez(folder / "a.npz", x=np.arange(12, dtype=np.int32).reshape(4, 3), y=np.ones((4, 1)))
    write(folder / "p.py", "def half(x):\n    return x[:2] / 2, x[2]")
    read = data("a.npz")
    assert read.dataset.dtype == torch.long and read.labels.tolist() == [1.0] * 4
    inputs, _ = read_back(data("a.npz", prepare="p.py:half"), 4)
    assert inputs[0][0].tolist() == [[0, 0.5], [1.5, 2]] and inputs[0][1].tolist() == [2, 5]


def test_several_inputs_without_labels_are_all_inputs(folder):
    np.savez(folder / "a.npz", x=np.ones((4, 3)))
    write(folder / "p.py", "def two(x):\n    return x, x + 1\ndef one(x):\n    return (x,)")
    inputs, labels = read_back(data("a.npz", prepare="p.py:two"), 4)
    assert labels is None and len(inputs[0]) == 2 and inputs[0][1].tolist() == [[2.0] * 3] * 2
    inputs, labels = read_back(data("a.npz", prepare="p.py:one"), 4)
    assert labels is None and inputs[0][0].shape == (2, 3)


def test_arrays_with_pickles_do_not_run(folder):
    np.savez(folder / "a.npz", x=np.array([Evil(), Evil()], dtype=object))
    np.savez(folder / "b.npz", x=np.ones((1, 2)), y=np.array([Evil()], dtype=object))
    (folder / "c.npz").write_bytes(pickle.dumps(Evil()))
    for name in "abc":
        with pytest.raises(ValueError, match="cannot be read as arrays"):
            data(f"{name}.npz")
    assert not (folder / "ran").exists()


def test_arrays_that_are_no_data_are_said(folder):
    np.savez(folder / "names.npz", x_train=np.ones(2), y_train=np.ones(2))
    np.savez(folder / "lengths.npz", x=np.ones((3, 2)), y=np.ones(2))
    np.savez(folder / "nothing.npz", x=np.ones((0, 2)))
    np.savez(folder / "text.npz", x=np.array(["a"]))
    np.savez(folder / "hot.npz", x=np.ones((2, 2)), y=np.eye(2, dtype=int))
    np.savez(folder / "gap.npz", x=np.ones((2, 2)), y=np.array([1, np.nan]))
    with open(folder / "one.npz", "wb") as file:
        np.save(file, np.ones(2))
    for name, error, message in [
        ("names", ValueError, "holds x_train, y_train: expected inputs under x, X, inputs, images"),
        ("lengths", ValueError, "2 labels .'y'. for 3 samples"),
        ("nothing", ValueError, "no samples"),
        ("text", TypeError, "expected numbers"),
        ("hot", TypeError, r"'y' are int64 of shape \(2, 2\)"),
        ("gap", ValueError, "no value for sample 1"),
        ("one", ValueError, "one array without a name"),
    ]:
        with pytest.raises(error, match=message):
            data(f"{name}.npz")
    with pytest.raises(ValueError, match="labels under kind"):
        data("lengths.npz", label="kind")
    with pytest.raises(ValueError, match="text_column cannot be used with the arrays"):
        data("lengths.npz", text_column="x")


# Objects

OBJECTS = """
import numpy as np, pandas, torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from likewise.loading import Read
X, Y = torch.arange(12.0).reshape(4, 3), torch.tensor([5, 0, 5, 2])
class Rows(Dataset):
    def __len__(self): return 4
    def __getitem__(self, i):
        if not 0 <= i < 4: raise IndexError
        return {"x": X[i], "kind": "abca"[i]}
class Stream(IterableDataset):
    def __iter__(self): return iter(X)
tensor = X
pair = (X, Y)
columns = {"x": X, "labels": Y}
items = TensorDataset(X, Y)
pairs = list(zip(X, Y.tolist()))
loader = DataLoader(items, batch_size=2)
def make(): return items
def read(): return Read(X, Y, tuple("abcdef"), tuple("klmn"), lambda i: f"sample {i}")
def named(): return {"dataset": X, "labels": ["u", "v", "u", "w"], "names": range(4)}
def typo(): return {"dataset": X, "label": Y}
def uneven(): return {"dataset": X, "labels": Y, "names": "ab"}
def frame(): return pandas.DataFrame({"a": [1, 2], "b": ["x", "y"], 3: [0.5, 0.5]})
def images(): return [(Image.new("RGB", (2, 2), (i, 0, 0)), i % 2) for i in range(4)]
def texts(): return ["ab", "cd"]
def told(): return [("ab", "x"), ("cd", "y")]
def path(): return "data.csv"
def nothing(): return None
def empty(): return []
def asks(folder): return X
def double(x): return 2 * x
def pixel(image): return list(image.getpixel((0, 0)))
def letters(text): return [ord(c) for c in text]
def inner(row): return {"input": row["x"] + len(row)}
number = 3
"""


@pytest.fixture
def objects(folder):
    return write(folder / "objects_here.py", OBJECTS)


X, Y = torch.arange(12.0).reshape(4, 3), torch.tensor([5, 0, 5, 2])


@pytest.mark.parametrize("name", ["tensor", "pair", "columns", "items", "pairs", "loader", "make", "read"])
def test_objects_go_to_batches_as_they_are(objects, name):
    read = data(f"{objects}:{name}")
    inputs, labels = read_back(read, 4)
    inputs = [part["x"] if isinstance(part, dict) else part for part in inputs]
    assert torch.equal(torch.cat(inputs), X)
    assert labels is None if name == "tensor" else torch.equal(labels, Y)


@pytest.mark.parametrize("name", ["tensor", "pair", "columns", "items", "pairs", "make", "read"])
def test_objects_are_limited(objects, name):
    read = data(f"objects_here:{name}", limit=2)
    inputs, labels = read_back(read, 2)
    inputs = inputs[0]["x"] if isinstance(inputs[0], dict) else inputs[0]
    assert torch.equal(inputs, X[:2])
    assert labels is None if name == "tensor" else labels.tolist() == [5, 0]
    assert name != "read" or read.names == ("k", "l")


@pytest.mark.parametrize("name", ["tensor", "pair", "items", "pairs", "make", "read"])
def test_objects_are_prepared(objects, name):
    read = data(f"{objects}:{name}", prepare=f"{objects}:double", limit=3)
    inputs, labels = read_back(read, 3)
    assert torch.equal(torch.cat(inputs), 2 * X[:3])
    assert labels is None if name == "tensor" else labels.tolist() == [5, 0, 5]


def test_columns_are_prepared_as_rows_without_their_label(objects):
    for name, options in {"columns": {}, "Rows": {"label": "kind"}}.items():
        read = data(f"{objects}:{name}", prepare=f"{objects}:inner", show_columns=["x"], **options)
        inputs, _ = read_back(read, 4)
        assert torch.equal(torch.cat([part["input"] for part in inputs]), X + 1)
        assert set(read.show(0)) == {"x"}


def test_a_label_names_a_column_of_an_object(objects):
    read = data(f"{objects}:Rows", label="kind")
    assert read.labels.tolist() == [0, 1, 2, 0] and read.classes == ("a", "b", "c")
    inputs, _ = read_back(read, 4)
    assert set(inputs[0]) == {"x"}
    read = data(f"{objects}:columns", label="labels")
    assert read.labels.tolist() == Y.tolist() and read.classes is None
    read_back(read, 4)


def test_a_read_or_a_dict_of_its_keys_is_taken(objects):
    read = data(f"{objects}:read")
    assert isinstance(read, Read) and read.classes == tuple("abcdef") and read.show(2) == "sample 2"
    read = data(f"{objects}:named")
    assert read.labels.tolist() == [0, 1, 0, 2] and read.classes == ("u", "v", "w")
    assert read.names == ("0", "1", "2", "3")
    read_back(read, 4)


def test_a_frame_of_code_is_a_table(objects):
    read = data(f"{objects}:frame", label="b", columns=["3", "a"])
    assert read.dataset.tolist() == [[0.5, 1], [0.5, 2]] and read.classes == ("x", "y")
    read_back(read, 2)


def test_images_and_text_of_code_are_prepared_and_shown(objects):
    read = data(f"{objects}:images", prepare=f"{objects}:pixel")
    inputs, labels = read_back(read, 4)
    assert torch.cat(inputs)[:, 0].tolist() == [0, 1, 2, 3] and labels.tolist() == [0, 1, 0, 1]
    assert isinstance(read.show(1), Image.Image) and len(list(read.dataset)) == 4
    read = data(f"{objects}:texts", prepare=f"{objects}:letters")
    assert read.show(1) == "cd"
    read_back(read, 2)


def test_hugging_face_datasets_are_read(folder):
    datasets = pytest.importorskip("datasets")
    write(
        folder / "hub.py",
        "import datasets\n"
        "features = datasets.Features({'text': datasets.Value('string'), "
        "'label': datasets.ClassLabel(names=['neg', 'pos'])})\n"
        "rows = {'text': ['ab', 'cd', 'ef'], 'label': [1, 1, 1]}\n"
        "def train(): return datasets.Dataset.from_dict(rows, features=features)\n"
        "def all(): return datasets.DatasetDict(train=train())\n"
        "def codes(row): return [ord(c) for c in row['text']]\n",
    )
    assert datasets is not None
    read = data("hub.py:train", prepare="hub.py:codes", limit=2, show_columns=["text"])
    assert read.classes == ("neg", "pos") and read.labels.tolist() == [1, 1]
    assert torch.cat(read_back(read, 2)[0]).tolist() == [[97, 98], [99, 100]]
    assert read.show(0) == {"text": "ab"}
    with pytest.raises(TypeError, match="gave the parts train: return one"):
        data("hub.py:all")


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("number", {}, TypeError, "gave int: expected a torch Dataset"),
        ("path", {}, TypeError, "gave str"),
        ("nothing", {}, TypeError, "gave NoneType"),
        ("Stream", {}, TypeError, "gave Stream"),
        ("asks", {}, TypeError, r"asks\(folder\), called without arguments"),
        ("typo", {}, ValueError, "gave label besides a dataset: expected only dataset, labels"),
        ("uneven", {}, ValueError, "2 names for 4 labels"),
        ("loader", {"limit": 2}, TypeError, "in batches already: return its data set"),
        ("loader", {"prepare": "double"}, TypeError, "in batches already"),
        ("tensor", {"gray": True}, ValueError, "gray cannot be used with the Tensor"),
        ("pair", {"label": "kind"}, ValueError, "no column 'kind': it has nothing"),
        ("columns", {"label": "kind"}, ValueError, "no column 'kind': it has x, labels"),
        ("empty", {"prepare": "double"}, ValueError, "without samples"),
        ("told", {"prepare": "letters"}, TypeError, "the text 'x': return a"),
    ],
)
def test_objects_that_are_no_data_are_said(objects, name, options, error, message):
    if "prepare" in options:
        options = {"prepare": f"{objects}:{options['prepare']}"}
    with pytest.raises(error, match=message):
        data(f"{objects}:{name}", **options)


# Words


def test_words_that_name_nothing_are_said(folder):
    write(folder / "digits.csv", "a\n1")
    write(folder / "notes.txt", "a")
    for text, error, message in [
        ("digit.csv", FileNotFoundError, "did you mean digits.csv"),
        ("elsewhere/digits.csv", FileNotFoundError, "and no such folder"),
        ("C:\\digits.csv", FileNotFoundError, "There is no C:"),
        (
            "notes.txt",
            ValueError,
            "Unknown kind of data: notes.txt. Pass a folder of images, a .csv, .tsv, .parquet, .jsonl, .npz file, "
            "or an import",
        ),
        ("https://example.org/a.csv", ValueError, "is a URL: download it"),
        ("nowhere:x", ValueError, "no module nowhere"),
    ]:
        with pytest.raises(error, match=message):
            data(text)
    with pytest.raises(TypeError, match="columns must be a list of names"):
        data("digits.csv", columns="a")
    with pytest.raises(ValueError, match="image_size must be at least 1"):
        data("digits.csv", image_size=0)


def test_a_path_with_a_colon_that_is_there_is_a_path(folder):
    write(folder / "a:b.csv", "a\n1")
    assert data("a:b.csv").dataset.tolist() == [[1.0]]


def test_nothing_heavy_is_imported_for_it():
    heavy = "{'pandas', 'pyarrow', 'PIL', 'safetensors'}"
    code = f"import sys, likewise.loading; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
