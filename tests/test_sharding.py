"""Models that FSDP2 has sharded or accelerate has spread are refused by name, and compared as whole copies."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import likewise as lw

HERE = Path(__file__).parent


@pytest.mark.distributed
def test_a_model_sharded_by_fsdp2_gives_the_numbers_of_the_whole_one(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, HERE / "sharded_ranks.py", tmp_path], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert "gather_model" in found.pop("refused")
        assert found.pop("untouched")
        assert found.pop("class") == "Sequential"
        assert found.pop("frozen") == ["5.bias"]
        assert found and max(found.values()) < 1e-6, found


class Tied(nn.Module):
    """An embedding that is also the last layer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.hidden = nn.Linear(5, 5)
        self.out = nn.Linear(5, 7, bias=False)
        self.out.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        return self.out(torch.tanh(self.hidden(self.embedding(x).mean(1)))) * self.scale


@pytest.fixture
def tied():
    torch.manual_seed(0)
    return Tied()


@pytest.fixture
def tokens():
    return torch.randint(7, (9, 4), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("way", ["cpu_offload", "dispatch", "disk"])
def test_a_model_offloaded_by_accelerate_gives_the_numbers_of_the_whole_one(tied, tokens, way, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    expected, outputs = lw.similarity(tied, tokens), tied(tokens)
    cpu = torch.device("cpu")
    if way == "cpu_offload":
        spread = accelerate.cpu_offload(tied, execution_device=cpu)
    elif way == "disk":
        spread = accelerate.disk_offload(tied, tmp_path / "weights", execution_device=cpu)
    else:
        devices = {"embedding": "cpu", "hidden": "disk", "out": "cpu", "scale": "cpu"}
        spread = accelerate.dispatch_model(
            tied, devices, main_device="cpu", offload_dir=tmp_path / "weights", force_hooks=True
        )
    assert torch.allclose(spread(tokens), outputs)
    with pytest.raises(ValueError, match=r"offloaded by accelerate.*gather_model"):
        lw.similarity(spread, tokens)
    copied = lw.gather_model(spread)
    assert torch.allclose(lw.similarity(copied, tokens), expected, atol=1e-6)
    assert len(list(copied.parameters())) == 3  # the tied one once
    assert copied.to(torch.float64)(tokens).dtype == torch.float64
    assert torch.allclose(spread(tokens), outputs)


def test_a_plain_model_is_copied_with_its_own_hooks_and_replaced_forward(tied, tokens):
    calls = []
    tied.hidden.register_forward_hook(lambda module, given, result: calls.append(module))
    tied.forward = lambda x: 3 * Tied.forward(tied, x)
    copied = lw.gather_model(tied)
    copied(tokens)
    assert calls and torch.equal(copied(tokens), tied(tokens))
    with torch.no_grad():
        copied.embedding.weight.add_(1)
    assert (
        copied.out.weight is copied.embedding.weight and copied.embedding.weight is not tied.embedding.weight
    )


def test_values_that_are_nowhere_are_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match=r"1\.weight of the model is on the meta device"):
        lw.gather_model(model)
