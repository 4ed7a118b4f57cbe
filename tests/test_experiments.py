"""Experiments stand on the library; what they build themselves is checked here."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

import likewise as lw

FOLDER = Path(__file__).parent.parent / "experiments"


@pytest.fixture(scope="module")
def toy():
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("toy", FOLDER / "toy.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_stack_is_its_networks(toy):
    torch.manual_seed(0)
    stack, x = toy.Stack(3, [2, 8, 8, 1]), torch.randn(3, 5, 2)
    for i in range(3):
        torch.testing.assert_close(stack(x)[i], stack.one(i)(x[i]))


def test_networks_of_a_stack_train_alone(toy):
    training = toy.Training("short", 2, 3, "L2")
    _, points, values = toy.circle(64, 1, seed=0)
    stack = toy.trained(training, points, values, seed=0, width=8)
    torch.manual_seed(0)
    alone = toy.Stack(len(points), [2, 8, 8, 1])
    model = alone.one(2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for _ in range(3):
        for batch in torch.randperm(64).split(64):
            optimizer.zero_grad()
            (model(points[2, batch]) - values[2, batch]).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(stack.one(2)(points[2]), model(points[2]), rtol=1e-4, atol=1e-5)


def test_all_estimators_at_once_are_those_of_the_library(toy):
    torch.manual_seed(0)
    model, x = toy.Stack(1, [2, 8, 8, 1]).one(0), torch.randn(30, 2)
    gram = lw.GramMatrix(model, x)
    estimates, counts = gram.over_rows(toy.counted)
    expected = [lw.soft_neighbors(gram), *(lw.positive_neighbors(gram, a) for a in toy.EXPONENTS)]
    expected += [lw.hard_neighbors(gram, t).float() for t in toy.THRESHOLDS]
    torch.testing.assert_close(estimates, torch.stack(expected, 1), rtol=1e-4, atol=1e-4)
    assert (counts.sum(1) == 30).all()


def test_exponents_are_those_of_a_power_law(toy):
    rows = [
        {
            "training": "t",
            "frequency": f,
            "repeat": r,
            "centered": False,
            "error": 0.0 if f < 16 else 1.0,
            "estimates": {"N_S": (100 + r) * f**-0.5 if f < 16 else 1e6},
        }
        for f in toy.FREQUENCIES
        for r in range(3)
    ]
    slope, spread = toy.slopes(rows, "t", False, "N_S")
    assert abs(slope + 0.5) < 1e-9 and spread < 1e-9  # what was not learned does not count


def test_figures_are_drawn_from_results(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(toy, "FREQUENCIES", (1, 2, 4))
    rows = toy.measured(toy.Training("short", 2, 1, "L1"), n=48, repeats=2, seed=0)
    rows = json.loads(json.dumps(rows))
    toy.drawn(rows, tmp_path)
    assert len(list(tmp_path.glob("*.png"))) == 3
    page = next(tmp_path.glob("*.html")).read_text(encoding="utf-8")
    assert "__DATA__" not in page and '"frequency": 4' in page
