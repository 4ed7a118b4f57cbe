"""Two real processes share one record of training."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import likewise as lw

SCRIPT = Path(__file__).parent / "two_ranks.py"


@pytest.mark.distributed
@pytest.mark.parametrize("framework", ["lightning", pytest.param("transformers", marks=pytest.mark.slow)])
def test_two_processes_count_as_one(tmp_path, framework):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, SCRIPT, framework, tmp_path], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    watch = lw.Watch.load(tmp_path / "watch.parquet")
    ranks = [json.loads((tmp_path / f"seen{rank}.json").read_text()) for rank in (0, 1)]
    rows = sorted(row for rank in ranks for row in rank)
    for sample in range(watch.n):
        correct = [c for _, i, c in rows if i == sample]  # one per epoch, in order
        assert len(correct) == 4 == int(watch.updates[sample])
        assert int(watch.forgetting[sample]) == sum(a and not b for a, b in pairwise(correct))
        assert float(watch.correctness[sample]) == sum(correct) / 4
    assert watch.forgetting.sum() > 0
    places = [{i: {e for e, j, _ in rank if j == i} for _, i, _ in rank} for rank in ranks]
    assert any(i in places[1] for i in places[0])  # samples change processes
