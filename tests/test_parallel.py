"""Two real processes give the numbers of one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import likewise as lw
import nets

HERE = Path(__file__).parent


def results():
    """Every kind of use, as plain numbers. Three batches, so that two processes share unevenly."""
    model, x = nets.case(nets.conv, 2, 11)
    y = torch.arange(11) % 2
    gram = lw.GramMatrix(model, lw.batches((x, y), size=4))
    few = lw.GramMatrix(model, lw.batches(x[:2], size=4), lw.batches(x, size=20))
    weights = torch.linspace(-1, 1, 22, dtype=torch.float64).view(11, 2, 1)
    denoised = lw.denoising(gram, draws=8)
    return {
        "soft": lw.soft_neighbors(gram),
        "hard": lw.hard_neighbors(gram, 0.5),
        "nearest": lw.nearest(gram, 3).indices,
        "product": gram @ weights,
        "dense": gram.dense(),
        "few": lw.soft_neighbors(few),
        "centered": lw.soft_neighbors(lw.GramMatrix(model, lw.batches(x, size=4), centered=True)),
        "uncertainty": lw.uncertainty(gram),
        "factor": denoised.factor,
        "shift": denoised.shift,
        "suspicion": lw.label_suspicion(gram).suspicion,
        "classes": lw.class_similarity(gram).mean,
    }


def torchrun(script, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, script, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=300
    )


def test_two_processes_give_the_numbers_of_one(tmp_path):
    done = torchrun(HERE / "two_processes.py", "results", tmp_path)
    assert done.returncode == 0, done.stderr
    expected = results()
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        for name, value in expected.items():
            difference = torch.tensor(found[name], dtype=torch.float64) - value
            assert difference.abs().max() < 1e-10, (rank, name)


def test_an_error_in_one_process_is_raised_in_all(tmp_path):
    done = torchrun(HERE / "two_processes.py", "error", tmp_path)
    assert done.returncode == 0, done.stderr
    texts = [(tmp_path / f"{rank}.json").read_text() for rank in range(2)]
    assert all("not finite" in text for text in texts), texts


@pytest.mark.parametrize("items", [1, 5])
def test_one_process_is_a_plain_loop(items):
    from likewise.parallel import join_over, processes, sum_over

    spans = [range(i, i + 1) for i in range(items)]
    assert processes() == 1
    squares = join_over(lambda span: torch.tensor([span.start**2]), spans, "squares")
    assert squares.tolist() == [i * i for i in range(items)]
    assert sum_over(lambda span: torch.tensor(float(span.start)), spans, "sum") == sum(range(items))
