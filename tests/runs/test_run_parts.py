"""Parts of a run that are computed apart and merged give the tables of one process; what does not fit is refused."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from net_that_is_killed import MODEL_AND_DATA
from torch import nn
from torch.utils.data import Dataset

import likewise as lw
from likewise.cli.app import exit_code
from likewise.manifest import read_manifest, write_manifest

TABLES = ("samples.parquet", "neighbors.parquet", "details.parquet", "pictures.parquet")


class Interrupted(Dataset):
    """Samples in memory, of which one reading, counted from now on, is interrupted."""

    def __init__(self, x, y):
        self.x, self.y, self.left = x, y, -1

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return self.x[i], self.y[i]


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))


@pytest.fixture
def samples():
    chance = torch.Generator().manual_seed(1)
    x = torch.randn(1100, 6, generator=chance)
    return x, (x @ torch.randn(6, 3, generator=chance)).argmax(1)


SKETCHED = {"sketch": 128, "max_memory": 2**30}
STRIPS = {"exact": True, "max_memory": 2**24}
MATRIX = {"exact": True, "max_memory": 2**30}


@pytest.fixture
def parts(net, samples, tmp_path):
    def call(n, numbers=None, **options):
        for i in numbers or range(1, n + 1):
            lw.analyze_part(net, samples, part=(i, n), out=tmp_path / f"part-{i}", **options)
        return [tmp_path / f"part-{i}" for i in range(n, 0, -1)]

    return call


def contents(run):
    paths = [*(run.folder / name for name in TABLES), *(run.folder / "index").glob("*.safetensors")]
    return {path.name: path.read_bytes() for path in paths}


@pytest.mark.parametrize("options", [SKETCHED, STRIPS, MATRIX], ids=["sketched", "strips", "one matrix"])
def test_merged_parts_are_the_bytes_of_one_process(net, samples, parts, tmp_path, options):
    whole = lw.analyze(net, samples, out=tmp_path / "whole", **options)
    merged = lw.analyze(net, samples, out=tmp_path / "merged", parts=parts(4, **options), **options)
    assert contents(merged) == contents(whole)
    assert merged.manifest["approximations"] == whole.manifest["approximations"]


def test_a_part_that_is_interrupted_ten_times_goes_on_to_the_same_bytes(net, samples, parts, tmp_path):
    folders = parts(2, **SKETCHED)
    expected = {path.name: path.read_bytes() for path in (tmp_path / "part-2" / "stages").iterdir()}
    flaky, chance = Interrupted(*samples), random.Random(0)
    shutil.rmtree(tmp_path / "part-2")
    call = {"part": (2, 2), "out": tmp_path / "part-2", **SKETCHED}
    for _ in range(10):
        flaky.left = chance.randrange(1, 700)
        with pytest.raises(KeyboardInterrupt):
            lw.analyze_part(net, flaky, **call)
            raise KeyboardInterrupt  # it was through before
    flaky.left = -1
    lw.analyze_part(net, flaky, **call)
    assert {path.name: path.read_bytes() for path in (tmp_path / "part-2" / "stages").iterdir()} == expected
    lw.analyze(net, samples, out=tmp_path / "merged", parts=folders, **SKETCHED)


def test_parts_that_do_not_fit_are_refused_by_name(net, samples, parts, tmp_path):
    two, one = parts(2, **SKETCHED)
    out = tmp_path / "merged"

    def merge(*folders, data=samples, **options):
        lw.analyze(net, data, out=out, parts=list(folders), **{**SKETCHED, **options})

    with pytest.raises(ValueError, match="Parts 2 of 2 are missing"):
        merge(one)
    with pytest.raises(ValueError, match="both part 1 of 2"):
        merge(one, one)
    with pytest.raises(ValueError, match=r"part-\d is a part of a run with other options \(neighbors"):
        merge(one, two, neighbors=4)
    x, y = samples
    changed = x.clone()
    changed[700] += 1  # not among the few that tell data sets apart at once
    with pytest.raises(ValueError, match="Samples 512 to 767 are not those"):
        merge(one, two, data=(changed, y))
    shutil.rmtree(out)
    with pytest.raises(ValueError, match="another data set"):
        merge(one, two, data=(x + 1, y))
    state = json.loads((two / "manifest.json").read_text())
    assert state["part"] == [2, 2]
    with torch.no_grad():
        net[2].bias.add_(1)
    with pytest.raises(ValueError, match="another model"):
        merge(one, two)
    with pytest.raises(ValueError, match="another part"):
        lw.analyze_part(net, samples, part=(1, 2), out=two, **SKETCHED)
    assert not out.exists()


def test_a_part_of_another_version_or_number_of_parts_is_refused_by_name(net, samples, parts, tmp_path):
    two, one = parts(2, **SKETCHED)
    state = read_manifest(two)
    write_manifest(two, {**state, "versions": {**state["versions"], "likewise": "0.0.1"}})
    with pytest.raises(ValueError, match=r"part-2 .* other versions \(likewise: there '0.0.1'"):
        lw.analyze(net, samples, out=tmp_path / "merged", parts=[one, two], **SKETCHED)
    other = lw.analyze_part(net, samples, part=(2, 3), out=tmp_path / "other", **SKETCHED)
    with pytest.raises(ValueError, match=r"part 2 of 3, and .*part-1 is of 2"):
        lw.analyze(net, samples, out=tmp_path / "merged", parts=[one, other], **SKETCHED)


def test_a_damaged_or_unfinished_part_is_named_and_redone_alone(net, samples, parts, tmp_path):
    folders = parts(2, **SKETCHED)
    file = sorted((tmp_path / "part-1" / "stages").glob("sketch-*"))[0]
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(ValueError, match=r"part-1.*sketch-00000"):
        lw.analyze(net, samples, out=tmp_path / "merged", parts=folders, **SKETCHED)
    parts(2, [1], **SKETCHED)
    found = lw.analyze(net, samples, out=tmp_path / "merged", parts=folders, **SKETCHED)
    assert contents(found) == contents(lw.analyze(net, samples, out=tmp_path / "whole", **SKETCHED))
    with pytest.raises(ValueError, match="whole run"):
        lw.analyze(net, samples, out=tmp_path / "x", parts=[tmp_path / "whole"], **SKETCHED)


NET = """
import os, signal
import torch
from torch import nn


class Net(nn.Sequential):
    calls = 0

    def forward(self, x):
        Net.calls += 1
        if Net.calls == int(os.environ.get("KILLED_AT", "-1")):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)

"""


def test_commands_compute_parts_one_of_them_killed_and_merge_them(tmp_path, capsys):
    torch.set_num_threads(1)
    (tmp_path / "net.py").write_text(NET + MODEL_AND_DATA)
    words = ["analyze", f"{tmp_path}/net.py:model", f"{tmp_path}/net.py:data", "--sketch", "128", "-q"]
    part = [*words, "--out", str(tmp_path / "1"), "--part", "1/2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KILLED_AT": "30"}
    killed = subprocess.run([sys.executable, "-m", "likewise", *part], env=environment, capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    assert exit_code(["merge", str(tmp_path / "1"), "--out", str(tmp_path / "merged")]) == 2
    assert "part 1 of 2, and not done" in capsys.readouterr().err
    assert exit_code(part) == 0
    assert exit_code([*words, "--out", str(tmp_path / "2"), "--part", "2/2"]) == 0
    assert (
        exit_code(["merge", str(tmp_path / "1"), str(tmp_path / "2"), "--out", str(tmp_path / "merged")]) == 0
    )
    assert exit_code([*words, "--out", str(tmp_path / "whole")]) == 0
    whole = lw.Analysis(tmp_path / "whole")
    assert contents(lw.Analysis(tmp_path / "merged")) == contents(whole)
    assert any("--weights" in caveat for caveat in whole.manifest["caveats"])  # the network was not trained
    assert exit_code([*words, "--part", "3/2", "--out", str(tmp_path / "3")]) == 2
    assert "from 1 to 2" in capsys.readouterr().err
