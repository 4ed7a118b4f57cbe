"""Processes of torchrun share a run and give the bytes of one; one that is killed is started again and goes on."""

import os
import subprocess
import sys

import pytest
import torch
from net_that_is_killed import MODEL_AND_DATA

from likewise.cli.app import exit_code

NET = """
import os, signal
from pathlib import Path
import torch
from torch import nn

STAGES = Path(__file__).parent / "shared" / "stages"


class Net(nn.Sequential):
    def forward(self, x):
        done = sorted(path.name for path in STAGES.glob("sketch-*.npz"))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
        if attempt == "0" and os.environ["RANK"] == os.environ.get("KILLED") and done:
            (STAGES.parent.parent / "done-when-killed").write_text(" ".join(done))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)
"""
TABLES = (
    "samples.parquet",
    "neighbors.parquet",
    "duplicates.parquet",
    "details.parquet",
    "pictures.parquet",
    "settings.toml",
)
SKETCHED, EXACT = ("--sketch", "128"), ("--exact",)


@pytest.fixture
def run(tmp_path):
    """Analyzes in one process, or in several that torchrun starts; returns the bytes of tables and index."""
    (tmp_path / "net.py").write_text(NET + MODEL_AND_DATA)

    def call(folder, *options, ranks=0, killed=None, restarts=0):
        words = ["analyze", f"{tmp_path}/net.py:model", f"{tmp_path}/net.py:data"]
        words += [*options, "--out", str(tmp_path / folder), "-q"]
        if ranks:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            launcher += ["--max-restarts", str(restarts), "-m", "likewise"]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "KILLED": str(killed)}
            done = subprocess.run(
                [sys.executable, *launcher, *words], env=environment, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout.count("Analysis(") == 1
        else:
            torch.set_num_threads(1)
            assert exit_code(words) == 0
        paths = [*(tmp_path / folder / name for name in TABLES), *(tmp_path / folder / "index").glob("*")]
        return {path.name: path.read_bytes() for path in paths if not path.name.startswith(".lock")}

    return call


@pytest.mark.distributed
def test_a_killed_process_is_started_again_and_all_go_on_to_the_bytes_of_one(run, tmp_path):
    options = (*SKETCHED, "--max-memory", "1GiB")
    expected = run("one", *options)
    assert sum(name.startswith("shard-") for name in expected) >= 1
    assert run("shared", *options, ranks=2, killed=1, restarts=1) == expected
    assert len((tmp_path / "done-when-killed").read_text().split()) >= 2  # stages of the first attempt


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        (*SKETCHED, "--max-memory", "1GiB"),
        (*EXACT, "--max-memory", "1GiB"),
        (*EXACT, "--max-memory", "24MiB"),
    ],
    ids=["sketched", "exact, one matrix", "exact, in strips"],
)
def test_three_processes_give_the_bytes_of_one(run, options):
    assert run("shared", *options, ranks=3) == run("one", *options)
