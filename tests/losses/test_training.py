"""Training terms inside real training: autocast, accumulation, clipping, compile, two processes, trainers."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import likewise as lw
from likewise import losses
from test_distributed import torchrun

group = partial(losses.group, readout=lw.all_outputs)  # which draws nothing
EXAMPLES = Path(__file__).parents[2] / "examples"


def example(n=8):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.PReLU(), nn.Flatten(), nn.Linear(144, 8), nn.Tanh(), nn.Linear(8, 3)
    )
    return net, torch.randn(n, 1, 8, 8), torch.arange(n) % 3


def gradients(net, loss):
    net.zero_grad()
    loss.backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in net.parameters()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_around_a_term_changes_nothing(dtype):
    net, x, y = example()
    plain = group(net, x, y)
    with torch.autocast("cpu", dtype=dtype):
        logits = net(x)
        inside = group(net, x, y)
        two = losses.two_batches(net, x[:4], x[4:])
        loss = nn.functional.cross_entropy(logits, y) + inside + two
    assert logits.dtype == dtype and inside.dtype == torch.float32
    assert torch.equal(plain, inside)
    assert torch.equal(two, losses.two_batches(net, x[:4], x[4:]))
    assert all(g.isfinite().all() for g in gradients(net, loss))


def test_a_loss_scaled_for_half_precision_scales_the_gradients():
    net, x, y = example()
    plain = gradients(net, group(net, x, y))
    scaled = gradients(net, group(net, x, y) * 2.0**10)
    for a, b in zip(plain, scaled, strict=True):
        torch.testing.assert_close(a * 2**10, b)


def test_accumulation_and_clipping():
    net, x, _ = example()
    sum_of_two = gradients(net, group(net, x[:4]) + group(net, x[4:]))
    net.zero_grad()
    group(net, x[:4]).backward()
    group(net, x[4:]).backward()
    for p, g in zip(net.parameters(), sum_of_two, strict=True):
        torch.testing.assert_close(torch.zeros_like(p) if p.grad is None else p.grad, g)
    before = nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    after = torch.stack([p.grad.norm() for p in net.parameters() if p.grad is not None]).norm()
    assert before > 1e-3 and after < 1.01e-3


def test_a_compiled_model_is_differentiated_uncompiled():
    net, x, y = example()
    assert torch.equal(group(torch.compile(net, backend="eager"), x, y), group(net, x, y))


def test_train_mode_is_evaluated_with_running_statistics():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 1))
    x = torch.randn(8, 4)
    net[1].running_mean.normal_()
    value = group(net.train(), x)
    assert torch.equal(value, group(net.eval(), x))
    k = lw.similarity(net, x)
    torch.testing.assert_close(value, 1 - (k.sum() - 8) / 56, rtol=0, atol=1e-5)


def term_of_a_process(rank):
    """The loss of one process's half of the batch."""
    net, x, y = example()
    half = slice(4 * rank, 4 * rank + 4)
    return net, x[half], y[half]


def test_two_processes_average_their_gradients(tmp_path):
    done = torchrun(Path(__file__).parent / "two_processes_ddp.py", tmp_path)
    assert done.returncode == 0, done.stderr
    expected = []
    for rank in range(2):
        net, x, y = term_of_a_process(rank)
        term = group(net, x) + losses.two_batches(net, x[:2], x[2:])
        expected.append(gradients(net, nn.functional.cross_entropy(net(x), y) + term))
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        for g, a, b in zip(found, *expected, strict=True):
            torch.testing.assert_close(torch.tensor(g), (a + b) / 2, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("training_loop.py", ["--steps", "5"]),
        ("training_lightning.py", ["--epochs", "1"]),
        ("training_transformers.py", ["--steps", "5"]),
    ],
)
def test_examples_run(script, options):
    command = [sys.executable, str(EXAMPLES / script), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "similarity within classes" in done.stdout
