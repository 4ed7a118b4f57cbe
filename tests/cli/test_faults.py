"""What goes wrong while the command runs: signals, many starts at once, a full disk, no memory, damage."""

import json
import random
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from likewise.cli.app import exit_code

TABLES = ("samples.parquet", "neighbors.parquet", "duplicates.parquet", "details.parquet", "pictures.parquet")
MODEL = """
import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


class Greedy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        return self.layer(x) + torch.ones(2**38).sum()


greedy = Greedy()


class Failing(Greedy):
    def forward(self, x):
        raise MemoryError


failing = Failing()
"""


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """The words of a command that takes a second."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("given")
    (folder / "net.py").write_text(MODEL)
    chance = np.random.default_rng(0)
    np.savez(folder / "x.npz", x=chance.normal(size=(60, 5)).astype("f4"), y=np.arange(60) % 3)
    return ["analyze", f"{folder}/net.py:model", f"{folder}/x.npz"]


@pytest.fixture(scope="module")
def whole(given, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    assert exit_code([*given, "--out", str(out), "-q"]) == 0
    return out


def same_tables(a, b):
    return all((a / name).read_bytes() == (b / name).read_bytes() for name in TABLES)


def test_verify_tells_whole_damaged_unfinished_and_no_run(given, tmp_path, capsys):
    run = tmp_path / "run"
    assert exit_code(["verify", str(run)]) == 2 and "no run" in capsys.readouterr().err
    assert exit_code([*given, "--out", str(run), "-q"]) == 0
    capsys.readouterr()
    assert exit_code(["verify", str(run)]) == 0 and "is intact: 8 files" in capsys.readouterr().out
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    for name in ("samples.parquet", "report.html", "settings.toml"):
        raw = bytearray(before[name])
        raw[len(raw) // 2] ^= 4
        (run / name).write_bytes(raw)
    assert exit_code(["verify", str(run), "--format", "json"]) == 1
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert set(found["damaged"]) == {"samples.parquet", "report.html", "settings.toml"} and not found["whole"]
    assert "likewise analyze" in told.err
    assert exit_code(["neighbors", str(run), "0"]) == 2 and "samples.parquet" in capsys.readouterr().err
    assert exit_code([*given, "--out", str(run), "-q"]) == 0 and exit_code(["verify", str(run)]) == 0
    after = {path.name: path.read_bytes() for path in run.iterdir()}
    del before["report.html"], after["report.html"]  # its scripts carry a random number
    assert after == before


def test_an_empty_report_is_rewritten(given, tmp_path, capsys):
    run = tmp_path / "run"
    command = [*given, "--out", str(run), "-q"]
    assert exit_code(command) == 0
    size = (run / "report.html").stat().st_size
    for again in (command, ["report", str(run)]):
        (run / "report.html").write_bytes(b"")
        assert exit_code(["verify", str(run)]) == 1
        assert exit_code(again) == 0 and (run / "report.html").stat().st_size == size
        assert exit_code(["verify", str(run)]) == 0


START = """
import os, sys, time, traceback
import torch
torch.set_num_threads(1)
import jinja2, pandas, pyarrow.parquet, pydantic, tomlkit
import likewise.cli.app as cli
from likewise.runs import analyze, settings
out, count, log = sys.argv[1], int(sys.argv[2]), sys.argv[3]
plain = analyze.run_stages
def write(*given):
    with open(log, "a") as file:
        file.write(f"{os.getpid()}\\n")
    return plain(*given)
analyze.run_stages = write
children = []
begin = time.time() + 0.2
for _ in range(count):
    child = os.fork()
    if child == 0:
        time.sleep(max(0, begin - time.time()))
        code = cli.exit_code([*sys.argv[4:], "--out", out])
        os._exit(code)
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
print(codes)
"""


def start_many(given, whole, tmp_path, count):
    log, out = tmp_path / "writers", tmp_path / "run"
    words = [sys.executable, "-c", START, str(out), str(count), str(log), *given]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert json.loads(done.stdout.splitlines()[-1]) == [0] * count, done.stderr
    assert len(log.read_text().split()) == 1  # the others waited, and found it done
    assert re.search(r"is being written by process \d+ on \S+, since 20.*: waiting", done.stderr)
    assert exit_code(["verify", str(out)]) == 0 and same_tables(out, whole)
    assert not list(out.glob(".lock*"))


def test_eight_simultaneous_starts_end_well_with_one_writer(given, whole, tmp_path):
    start_many(given, whole, tmp_path, 8)


@pytest.mark.slow
def test_fifty_simultaneous_starts_end_well_with_one_writer(given, whole, tmp_path):
    start_many(given, whole, tmp_path, 50)


TELLING = """
import sys, time
from likewise import files
plain = files.write_atomically
def write(path, *given):
    print(path.name, flush=True)
    time.sleep(0.02)
    digest = plain(path, *given)
    time.sleep(0.02)
    return digest
files.write_atomically = write
import likewise.cli.app as cli
cli.main(sys.argv[1:])
"""


def terminate_and_resume(given, whole, tmp_path, moments):
    """Terminate a run as it writes its i-th file, or just before or after, and go on."""
    for i in moments:
        out = tmp_path / f"run{i}"
        words = [sys.executable, "-c", TELLING, *given, "--out", str(out)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(i + 1):
            assert process.stdout.readline()
        time.sleep(random.Random(i).uniform(0, 0.05))
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130, err
        assert "To resume: likewise analyze" in err and "Traceback" not in err
        assert not list(out.glob(".lock*")) and not list(out.glob("**/*.part*"))
        assert exit_code([*given, "--out", str(out), "-q"]) == 0
        assert same_tables(out, whole) and exit_code(["verify", str(out)]) == 0


def test_a_terminated_run_exits_130_and_resumes_to_the_same_bytes(given, whole, tmp_path):
    terminate_and_resume(given, whole, tmp_path, [7])


@pytest.mark.slow
def test_a_run_terminated_at_ten_moments_resumes_to_the_same_bytes(given, whole, tmp_path):
    terminate_and_resume(given, whole, tmp_path, range(10))


def test_handlers_and_warnings_are_as_before_after_a_command(given, whole):
    import warnings

    import tqdm

    def state():
        return signal.getsignal(signal.SIGTERM), warnings.showwarning, vars(tqdm.tqdm)["__init__"]

    before = state()
    assert exit_code([*given, "--out", str(whole), "-q"]) == 0
    assert state() == before


LIMITED = """
import resource, sys
import likewise.cli.app as cli
kind, limit = getattr(resource, sys.argv[1]), int(sys.argv[2])
resource.setrlimit(kind, (limit, limit))
cli.main(sys.argv[3:])
"""


def limited(kind, limit, words):
    command = [sys.executable, "-c", LIMITED, kind, str(limit), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_full_disk_names_the_file_and_the_bytes_and_the_run_goes_on(given, whole, tmp_path):
    run = tmp_path / "run"
    done = limited("RLIMIT_FSIZE", 9_000, [*given, "--out", str(run)])
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert re.search(rf"{run}\S* needs about [\d,]+ bytes, and [\d,]+ are free", done.stderr), done.stderr
    assert "To resume: likewise analyze" in done.stderr
    assert not list(run.glob("**/*.part*"))
    assert exit_code([*given, "--out", str(run), "-q"]) == 0 and same_tables(run, whole)


@pytest.mark.parametrize("name", ["greedy", "failing"])
def test_lack_of_memory_exits_3_and_says_so(given, tmp_path, name):
    words = [given[0], given[1].replace(":model", f":{name}"), given[2], "--out", str(tmp_path / "run")]
    done = limited("RLIMIT_AS", 2**36, words)
    assert done.returncode == 3, done.stderr
    message = re.search(r"error: out of memory: (.+)", done.stderr)
    assert message and "Traceback" not in done.stderr and "To resume" in done.stderr
    assert name == "failing" or f"{4 * 2**38}" in message[1]
