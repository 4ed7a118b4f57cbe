"""What a plan says, against what then happens."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import likewise as lw
from likewise.distributed import record_passes
from likewise.engines import MemoryMeter, OperationCounter
from likewise.gram import cost

STATISTICS = {
    "soft_neighbors": (lw.soft_neighbors, {}),
    "uncertainty": (lw.uncertainty, {}),
    "nearest": (lw.nearest, {"k": 3}),
    "label_suspicion": (lw.label_suspicion, {"labels": torch.arange(300) % 4}),
    "denoising": (lw.denoising, {"draws": 8}),
    "hard_neighbors": (lw.hard_neighbors, {"threshold": 0.5}),
}


@pytest.fixture(autouse=True)
def without_haste(monkeypatch):
    """Try as many samples on a machine that is busy as on an idle one."""
    monkeypatch.setattr(cost, "QUICK", 10**6)


def example(n=300, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    return lw.GramMatrix(model, torch.randn(n, 1, 8, 8), **options)


@pytest.mark.parametrize("name", STATISTICS)
def test_passes_are_those_that_are_made(name):
    statistic, options = STATISTICS[name]
    gram = example()
    plan = gram.plan(statistic, **options)
    with record_passes(lambda: 0) as made:
        statistic(gram, **options)
    assert plan.visits_of_pairs == sum(p.what == "pairs" for p in made)
    assert plan.passes == len(made) - plan.visits_of_pairs
    assert plan.seconds > 0 and plan.flops > 0


@pytest.mark.parametrize("name", STATISTICS)
def test_operations_and_memory_are_foretold(name):
    statistic, options = STATISTICS[name]
    gram = example()
    plan = gram.plan(statistic, **options)
    with OperationCounter() as counter, MemoryMeter() as meter:
        statistic(gram, **options)
    assert plan.flops == pytest.approx(counter.flops, rel=0.25)
    assert meter.peak / 2.5 < plan.peak_bytes < 4 * meter.peak


def test_planning_changes_nothing_and_reads_well():
    gram = example()
    before = {k: v.clone() for k, v in gram.net.model.state_dict().items()}
    text = str(gram.plan())
    assert "2 passes" in text and "MiB" in text and "engine layers" in text
    assert all(torch.equal(before[k], v) for k, v in gram.net.model.state_dict().items())


def test_the_reference_and_other_columns_are_planned_too():
    plan = example(engine="autograd").plan(lw.nearest)
    assert "dense" in plan.method
    other = lw.GramMatrix(example().net, torch.randn(300, 1, 8, 8), columns=torch.randn(90, 1, 8, 8))
    assert other.plan().passes == 2


def test_a_meter_counts_what_is_alive():
    with MemoryMeter() as meter:
        a = torch.ones(1000, dtype=torch.float64)
        b = a + 1
        del a
        _ = b.view(10, 100)
    assert meter.peak == 16_000 and meter.now == 8_000


@pytest.mark.parametrize("megabytes", [4, 16, 64])
def test_the_memory_allowed_is_kept(megabytes):
    gram = example(1000, max_memory=megabytes * 2**20)
    _ = gram.engine
    for statistic in (lw.soft_neighbors, lw.nearest, lw.hard_neighbors, lw.uncertainty):
        with MemoryMeter() as meter:
            statistic(gram)
        assert meter.peak < megabytes * 2**20, statistic.__name__


def test_batches_are_as_large_as_fits_when_no_size_is_given():
    small, large = example(3000, max_memory=2**22), example(3000)
    spans = [gram.products().spans(gram.data) for gram in (small, large)]
    assert len(spans[0][0]) < len(spans[1][0]) <= 2048
    given = lw.GramMatrix(large.net, lw.batches(torch.randn(100, 1, 8, 8), 7))
    assert len(given.products().spans(given.data)[0]) == 7
    close = torch.testing.assert_close
    close(lw.soft_neighbors(small), lw.soft_neighbors(large), rtol=1e-5, atol=0)


def test_too_little_memory_says_how_much_is_needed():
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    with pytest.raises(MemoryError, match="allow max_memory="):
        lw.soft_neighbors(lw.GramMatrix(net, torch.randn(8, 64), max_memory=2**10))


def test_planning_does_not_import_a_compiler():
    """It takes a second or more, which is most of the time of a plan."""
    program = """
import sys, torch, likewise as lw
from likewise.runs.plan import plan_run
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
plan_run(lw.Network(model), torch.randn(20, 4), None, 2**30)
lw.GramMatrix(model, torch.randn(20, 4)).plan(lw.soft_neighbors)
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_counted_operations_are_those_of_pytorch():
    """PyTorch's counter itself calls functions inside of modules, by which a trace no longer fits."""
    from torch.utils.flop_counter import FlopCounterMode

    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 2))
    x = torch.randn(4, 1, 8, 8)
    with OperationCounter() as ours:
        model(x).sum().backward()
    with FlopCounterMode(display=False) as theirs:
        model(x).sum().backward()
    assert ours.flops == theirs.get_total_flops() > 0


@pytest.mark.parametrize("quick", [0, 10**6])
def test_where_few_pairs_take_long_no_more_are_tried(quick, monkeypatch):
    monkeypatch.setattr(cost, "QUICK", quick)
    model, rows = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)), []
    gram = lw.GramMatrix(model, lw.batches(torch.randn(400, 6), 8))
    _ = gram.engine
    take = type(gram).take
    monkeypatch.setattr(type(gram), "take", lambda self, n: rows.append(n) or take(self, n))
    plan = gram.plan(lw.nearest, k=3)
    assert plan.visits_of_pairs == 1
    assert max(rows) == (2 * 48 if quick else 16)


def test_passes_that_a_few_samples_do_not_take_are_planned(monkeypatch):
    """Denoising of fewer samples than its directions takes fewer passes: this was an error."""
    monkeypatch.setattr(cost, "QUICK", 0)
    plan = example().plan(lw.denoising, draws=8)
    assert plan.passes > 4 and plan.seconds > 0 and plan.peak_bytes > 0
