"""Files of an index: whole or absent, verified, resumed, refused to another."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import torch

import likewise as lw
from likewise import files
from likewise.manifest import DamagedIndexError
from nets import Words


class Killed(BaseException):
    pass


@pytest.mark.parametrize("after", [0, 1, 2, 5, 9, 10, 11, 12])
def test_a_build_that_was_killed_goes_on_to_the_same_bytes(build, tmp_path, monkeypatch, after, files_of):
    whole = files_of(build("whole").path)
    write, calls = files.write_atomically, []

    def killed(path, *arguments):
        calls.append(path)
        if len(calls) > after:
            (path.parent / f"{path.stem}.1-2.part{path.suffix}").touch()
            raise Killed
        return write(path, *arguments)

    with monkeypatch.context() as context:
        context.setattr(files, "write_atomically", killed)
        with pytest.raises(Killed):
            build("index")
    if (tmp_path / "index" / "manifest.json").exists():
        with pytest.raises(ValueError, match="not finished"):
            lw.Index(tmp_path / "index")
    finished = sum(not files.is_temporary(path) for path in (tmp_path / "index").glob("shard-*.json"))
    calls.clear()
    monkeypatch.setattr(files, "write_atomically", lambda *a: calls.append(a[0]) or write(*a))
    build("index")
    assert files_of(tmp_path / "index") == whole
    written = [path for path in calls if path.name.startswith("shard-") and path.suffix == ".safetensors"]
    assert len(written) == 4 - finished


def test_an_addition_that_was_killed_leaves_the_index_whole_and_goes_on(build, new, monkeypatch, files_of):
    more = (new, torch.zeros(5, dtype=torch.int64))
    whole = build("whole")
    whole.add(more)
    index = build("index")
    before = index.nearest(new)
    write, calls = files.write_atomically, []

    def killed(path, *arguments):
        calls.append(path)
        if len(calls) > 2:
            raise Killed
        return write(path, *arguments)

    with monkeypatch.context() as context:
        context.setattr(files, "write_atomically", killed)
        with pytest.raises(Killed):
            index.add(more)
    opened = lw.Index(index.path, model=index.network)
    assert len(opened) == 40 and torch.equal(opened.nearest(new).indices, before.indices)
    opened.add(more)
    assert files_of(index.path) == files_of(whole.path)


@pytest.mark.slow
def test_a_process_that_is_killed_at_any_moment_leaves_what_can_go_on(tmp_path, files_of):
    script = tmp_path / "build.py"
    script.write_text(
        "import sys, torch, likewise as lw\n"
        "torch.set_num_threads(1); torch.manual_seed(0)\n"
        "from torch import nn\n"
        "net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 3))\n"
        "x = torch.randn(600, 1, 8, 8); y = torch.randint(3, (600,))\n"
        "print('ready', flush=True)\n"
        "lw.build_index(net, (x, y), sys.argv[1], width=64, shard_rows=10)\n"
    )
    words = [sys.executable, str(script)]
    subprocess.run([*words, str(tmp_path / "whole")], check=True, capture_output=True)
    whole = files_of(tmp_path / "whole")
    delays = torch.rand(10, generator=torch.Generator().manual_seed(0)) * 1.5
    for delay in delays.tolist():
        process = subprocess.Popen([*words, str(tmp_path / "index")], stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(delay)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    subprocess.run([*words, str(tmp_path / "index")], check=True, capture_output=True)
    assert files_of(tmp_path / "index") == whole


def test_every_damaged_file_is_noticed_and_rebuilt(build, files_of):
    path = build().path
    whole = files_of(path)
    for name in whole:
        content = bytearray(whole[name])
        content[len(content) // 2] ^= 1
        (path / name).write_bytes(bytes(content))
        with pytest.raises(DamagedIndexError, match=name.split("-")[0]):
            lw.Index(path)
        if name == "manifest.json":
            (path / name).write_bytes(whole[name])
            continue
        build()
        assert files_of(path) == whole


def test_a_damaged_manifest_is_rebuilt_with_the_rest(build, files_of):
    path = build().path
    whole = files_of(path)
    (path / "manifest.json").write_text("{}")
    build()
    assert files_of(path) == whole


def test_a_missing_shard_is_told_without_verification(build):
    path = build().path
    next(path.glob("shard-*")).unlink()
    with pytest.raises(DamagedIndexError, match="missing"):
        lw.Index(path, verify=False)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"width": 100}, "another projection"),
        ({"dtype": "int8"}, "another dtype"),
        ({"readout": lw.one_output(0)}, "another readout"),
        ({"classes": ["a", "b", "c"]}, "other classes"),
        ({"shard_rows": 20}, "another size of shards"),
        ({"part": (1, 2)}, "another part"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_a_folder_of_another_index_is_refused_by_name(build, change, name, files_of):
    path = build().path
    before = files_of(path)
    with pytest.raises(ValueError, match=name):
        build(**change)
    assert files_of(path) == before


def test_other_data_and_other_folders_are_refused(build, data, tmp_path):
    build()
    with pytest.raises(ValueError, match="another data set"):
        build(data=(data[0], 1 - data[1]))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(ValueError, match="thesis"):
        build("other")


def test_another_schema_is_refused(build):
    path = build().path
    state = json.loads((path / "manifest.json").read_text())
    from likewise.manifest import SCHEMA, read_manifest, write_manifest

    state.pop("sha256")
    write_manifest(path, {**state, "schema": 99})
    with pytest.raises(ValueError, match="another version of likewise"):
        lw.Index(path)
    write_manifest(path, {**state, "kind": "run", "schema": SCHEMA})
    with pytest.raises(ValueError, match="something else"):
        lw.Index(path)
    assert read_manifest(path)["schema"] == SCHEMA


def test_another_version_of_likewise_is_refused(build, net):
    from likewise.index.store import INDEX
    from likewise.manifest import read_manifest, write_manifest

    path = build().path
    state = read_manifest(path, INDEX)
    write_manifest(path, {**state, "versions": {**state["versions"], "likewise": "0.0.1"}})
    with pytest.raises(ValueError, match=r"another version of likewise \(0.0.1"):
        lw.Index(path, model=net)


@pytest.mark.parametrize(("dtype", "most"), [("float16", 2100), ("int8", 1100)])
def test_a_row_takes_few_bytes(tmp_path, dtype, most):
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 10)
    data = torch.randn(1500, 20), torch.randint(10, (1500,))
    index = lw.build_index(model, data, tmp_path / "index", dtype=dtype, shard_rows=782)
    size = index.bytes
    fixed = (index.path / "manifest.json").stat().st_size + 4 * index.width + 8 * index.width + 4 * 1024
    assert (size["all"] - size["pictures"] - fixed) / 1500 <= most


def test_another_order_of_classes_is_called_that_and_not_another_data_set(build, data, tmp_path):
    index = build(classes=["a", "b", "c"])
    turned = (data[0], 2 - data[1])
    with pytest.raises(ValueError, match=r"the classes in another order \(there a, b, c; here c, b, a\)"):
        build(classes=["c", "b", "a"], data=turned)
    with pytest.raises(ValueError, match=r"other classes \(there a, b, c; here a, b, d\)"):
        build(classes=["a", "b", "d"])
    other = build("other", classes=["c", "b", "a"], data=turned)
    with pytest.raises(ValueError, match="the classes in another order"):
        index.merge(other)
    with pytest.raises(ValueError, match="the classes in another order"):
        lw.merge_indexes([index.path, other.path], tmp_path / "both")
    assert len(lw.Index(index.path)) == 40


@pytest.mark.parametrize("form", ["tensors", "TensorDataset", "items with labels apart"])
@pytest.mark.parametrize("what", ["label", "input"])
def test_an_index_of_data_that_changed_in_one_sample_is_not_opened_for_them(form, what, build, data):
    x, y = (part.clone() for part in data)

    def call():
        if form == "items with labels apart":
            return build(data=list(x), labels=y)
        return build(data=(x, y) if form == "tensors" else torch.utils.data.TensorDataset(x, y))

    call()
    assert len(call()) == 40
    if what == "label":
        y[2] = (y[2] + 1) % 3
    else:
        x[2] += 1
    with pytest.raises(ValueError, match=r"another data set .*have changed"):
        call()


class Items(torch.utils.data.Dataset):
    """Samples that are read one by one."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


@pytest.mark.parametrize("what", ["nothing", "input", "names", "show"])
def test_a_build_that_was_stopped_keeps_no_shard_of_what_changed_since(
    build, data, tmp_path, monkeypatch, files_of, what
):
    x, y = (part.clone() for part in data)
    names, shown = [f"n{i}" for i in range(40)], [f"text {i}" for i in range(40)]
    note, noted = lw.index.store.IndexFolder.note_shard, []

    def stop(self, shard, of):
        note(self, shard, of)
        noted.append(shard.start)
        if len(noted) == 2:
            raise Killed

    with monkeypatch.context() as context:
        context.setattr(lw.index.store.IndexFolder, "note_shard", stop)
        with pytest.raises(Killed):
            build(data=Items(x, y), names=names, show=shown)
    if what == "input":
        x[2] += 1  # none of those by which data sets are told apart
    elif what == "names":
        names[3] = "other"
    elif what == "show":
        shown = [f"other {i}" for i in range(40)]
    write, written = lw.index.store.IndexFolder.write_shard, []
    monkeypatch.setattr(
        lw.index.store.IndexFolder,
        "write_shard",
        lambda self, start, *a: written.append(start) or write(self, start, *a),
    )
    build(data=Items(x, y), names=names, show=shown)
    assert written == ([20, 30] if what == "nothing" else [0, 10, 20, 30])
    fresh = build("fresh", data=Items(x, y), names=names, show=shown)
    assert files_of(tmp_path / "index") == files_of(fresh.path)


@pytest.mark.parametrize("what", ["label", "names", "show"])
def test_a_finished_index_of_items_is_not_opened_for_others_of_them(build, data, what):
    x, y = (part.clone() for part in data)
    names, shown = [f"n{i}" for i in range(40)], [f"text {i}" for i in range(40)]
    build(data=Items(x, y), names=names, show=shown)
    assert len(build(data=Items(x, y), names=names, show=shown)) == 40
    assert len(build(data=Items(x, y))) == 40  # what is not given is not compared
    if what == "label":
        y[12] = (y[12] + 1) % 3
    elif what == "names":
        names[12] = "other"
    else:
        shown[10] = "other"
    expected = {"label": "data set .*changed", "names": "list of names", "show": "show"}[what]
    with pytest.raises(ValueError, match=rf"another {expected}.* in rows 10 to 19"):
        build(data=Items(x, y), names=names, show=shown)


def test_the_same_data_in_another_container_open_an_index(build, data):
    build()
    assert len(build(data=torch.utils.data.TensorDataset(*data))) == 40


def test_texts_of_one_token_and_of_several_have_no_projection_in_common(tmp_path):
    texts = [torch.tensor(tokens) for tokens in ([3], [4], [5, 6], [7, 8, 9])]
    pad_all = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    loader = torch.utils.data.DataLoader(texts, batch_size=2, collate_fn=pad_all)
    with pytest.raises(ValueError, match=r"first\.weight had one position .* pad inputs to one length"):
        lw.build_index(Words(), lw.batches(loader), tmp_path / "index", width=64, readout=lw.all_outputs)
