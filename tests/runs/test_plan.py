"""How a run chooses between exact pairs and sketches, which outputs it compares, and what it says of that."""

import re

import pytest
import torch
from torch import nn

import likewise as lw
from likewise.cli.doctor import examine
from likewise.engines import MemoryLimitError, validation
from likewise.gram import cost
from likewise.progress import describe_duration
from likewise.runs import plan
from likewise.runs.plan import Method, choose_method, plan_run

pytestmark = pytest.mark.filterwarnings("ignore::likewise.ReadoutNotice")


def classifier(d=6, n=60):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, d)), (
        torch.randn(n, 5),
        torch.arange(n) % d,
    )


@pytest.fixture
def many_pairs(monkeypatch):
    """Let any number of pairs be too many for exact ones."""
    monkeypatch.setattr(cost, "FEW_MULTIPLICATIONS", 0)


@pytest.mark.parametrize(("d", "compared"), [(6, 6), (10, 10), (11, 8)])
def test_few_pairs_are_exact_with_the_usual_readout(d, compared):
    model, data = classifier(d)
    method = choose_method(lw.Network(model), lw.batches(data))
    gram = lw.GramMatrix(method.net, data)
    assert (method.sketch, method.compared, method.outputs, gram.d) == (0, compared, d, compared)
    assert "exact gradients" in method.describe()
    assert method.describe(method.estimate_cost()).endswith(": a few seconds")
    long = method._replace(multiplications=1e30, epochs=7).estimate_cost()
    assert re.fullmatch(r"at least [\d.]+ h, 7 plain epochs by counting multiplications, .*", long)


@pytest.mark.usefixtures("many_pairs")
@pytest.mark.parametrize(("d", "compared"), [(3, 3), (6, 4), (50, 4)])
def test_many_pairs_are_sketched_from_four_outputs(d, compared):
    model, data = classifier(d)
    method = choose_method(lw.Network(model), lw.batches(data))
    assert method.sketch == plan.WIDTH and lw.GramMatrix(method.net, data).d == compared == method.compared
    assert "sketches" in method.describe()
    assert f"{method.exact_epochs:,.0f}" in method.describe()


@pytest.mark.usefixtures("many_pairs")
def test_a_readout_that_was_given_is_kept():
    model, data = classifier(6)
    for readout in (lw.all_outputs, lw.label_against_rest, lw.projected_outputs(5)):
        assert choose_method(lw.Network(model, readout), lw.batches(data)).net.readout is readout


@pytest.mark.usefixtures("many_pairs")
def test_gradients_shorter_than_a_sketch_are_compared_as_they_are():
    method = choose_method(lw.Network(nn.Linear(5, 3)), lw.batches(torch.randn(50, 5)))
    assert method.sketch == 0


def test_exact_compares_all_outputs():
    model, data = classifier(30)
    method = choose_method(lw.Network(model), lw.batches(data), exact=True)
    assert (method.sketch, method.net.readout) == (0, lw.all_outputs)
    with pytest.raises(ValueError, match="exact=True compares gradients without sketches, found sketch=64"):
        choose_method(lw.Network(model), lw.batches(data), exact=True, sketch=64)


@pytest.mark.usefixtures("many_pairs")
def test_contrasts_are_of_classes_only():
    model, (x, y) = classifier(6)
    names = [
        str(choose_method(lw.Network(model), lw.batches((x, labels))).net.readout)
        for labels in (y, y.double(), torch.randn(len(x), 6), torch.eye(6)[y])
    ]
    assert ["class_contrasts(4" in name for name in names] == [True, False, False, False]
    assert "projected_outputs(4" in str(choose_method(lw.Network(model), lw.batches(x)).net.readout)


@pytest.mark.usefixtures("many_pairs")
def test_a_sketched_run_says_what_it_chose_and_its_error_against_all_outputs(tmp_path):
    model, data = classifier(6, n=80)
    found = lw.analyze(model, data, out=tmp_path / "run")
    assert found.manifest["options"]["readout"] == "class_contrasts(4, seed=0)"
    assert "sketches of 1024" in found.manifest["method"] and "exact: about" in found.manifest["method"]
    (line,) = found.manifest["approximations"]
    assert "in place of 6 outputs" in line and "exact gradients of all outputs" in line
    page = (tmp_path / "run" / "report.html").read_text()
    assert "in place of 6 outputs" in page and "sketches of 1024" in page
    exact = lw.analyze(model, data, out=tmp_path / "exact", exact=True)
    assert exact.manifest["approximations"] == [] and exact.manifest["options"]["readout"] == "all_outputs"
    density = lw.soft_neighbors(lw.GramMatrix(lw.Network(model, lw.all_outputs), data)) / 80
    torch.testing.assert_close(
        torch.tensor(exact.table["density"].to_numpy()), density.double(), atol=1e-6, rtol=0
    )
    assert abs(found.table["density"] - exact.table["density"]).max() < 0.15


def test_an_exact_run_of_many_outputs_says_the_error_of_its_combinations(tmp_path):
    model, data = classifier(40, n=40)
    found = lw.analyze(model, data, out=tmp_path / "run")
    (line,) = found.manifest["approximations"]
    assert "class_contrasts(8, seed=0), in place of 40 outputs" in line and "projected outputs(32" in line


def test_one_epoch_is_no_plural():
    method = Method(
        net=lw.Network(nn.Linear(2, 2)),
        sketch=0,
        outputs=2,
        compared=2,
        epochs=1.2,
        exact_epochs=1.2,
        multiplications=1,
    )
    assert method.describe().endswith("about 1 plain epoch by counting multiplications")
    assert method._replace(epochs=1.6).describe().endswith("about 2 plain epochs by counting multiplications")


def test_a_text_is_no_class(tmp_path):
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    found = lw.analyze(model, torch.randint(0, 9, (12, 5)), out=tmp_path / "run")
    assert "sequence_log_likelihood" in found.manifest["options"]["readout"]
    assert not {"prediction", "shift", "agreement", "status"} & set(found.table)
    assert found.table["log_likelihood"].dtype == float and (found.table["log_likelihood"] < 0).all()
    assert not any("No labels" in caveat for caveat in found.manifest["caveats"])


@pytest.mark.usefixtures("many_pairs")
def test_a_plan_names_readout_sketch_and_both_costs():
    model, data = classifier(6)
    found = plan_run(lw.Network(model), data, None, 2**30)
    assert (found.samples, found.outputs, found.compared, found.readout) == (
        60,
        6,
        4,
        "class_contrasts(4, seed=0)",
    )
    assert found.sketch >= 1024 and found.exact_epochs > 0 and found.epochs > 0 and found.seconds > 0
    cost = f": about {describe_duration(found.seconds)}, {found.epochs:,.0f} plain epochs, timed on a few samples"
    assert cost in found.method
    exact = plan_run(lw.Network(model), data, None, 2**30, exact=True)
    assert (exact.sketch, exact.readout, exact.compared) == (0, "all_outputs", 6)


@pytest.mark.usefixtures("many_pairs")
def test_the_epochs_of_a_plan_are_the_ratio_of_two_times(monkeypatch):
    functions = []

    def seconds(gram, data, function):
        functions.append(function)
        return [2.0, 0.5][len(functions) - 1]  # sketches, then a training step

    monkeypatch.setattr(plan, "_seconds_of_sample", seconds)
    monkeypatch.setattr(plan, "_seconds_of_pairs", lambda n, width: 30.0)
    model, data = classifier(50)
    found = plan_run(lw.Network(model), data, None, 2**30)
    assert found.seconds == 60 * 2.0 + 30.0 and found.epochs == 5.0
    assert ", 5 plain epochs" in found.method


@pytest.mark.parametrize("exact", [False, True])
def test_a_plan_leaves_the_model_as_it_is(exact):
    model, data = classifier(6)
    model[0].bias.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = plan_run(lw.Network(model), data, None, 2**30, exact=exact)
    assert found.epochs > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [p.requires_grad for p in model.parameters()] == [True, False, True, True]
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.usefixtures("many_pairs")
def test_a_plan_of_a_large_network_times_one_combination_of_its_outputs(monkeypatch):
    monkeypatch.setattr(plan, "MANY_OPERATIONS", 0)
    timed = []

    def seconds(gram, data, function):
        with gram.net.evaluation_mode():
            found = function(data.samples(range(2)))
        timed.append(found.shape[1] if isinstance(found, torch.Tensor) else None)
        return [2.0, 0.5][len(timed) - 1]

    monkeypatch.setattr(plan, "_seconds_of_sample", seconds)
    monkeypatch.setattr(plan, "_seconds_of_pairs", lambda n, width: 0.0)
    model, data = classifier(50)
    found = plan_run(lw.Network(model), data, None, 2**30)
    assert found.compared == 4 and timed[1] == 4
    assert found.seconds == 60 * (0.5 + 4 * (2.0 - 0.5)) and len(timed) == 2  # its epochs are counted
    assert f"timed on a few samples, and {found.epochs:,.0f} plain epochs by counting" in found.method


def test_a_plan_of_a_large_network_refuses_outputs_that_do_not_fit(monkeypatch):
    monkeypatch.setattr(plan, "MANY_OPERATIONS", 0)
    monkeypatch.setattr(validation, "LARGE", 0)
    model, data = classifier(6)
    with pytest.raises(MemoryLimitError):
        plan_run(lw.Network(model), data, None, 2**14)


@pytest.mark.usefixtures("many_pairs")
def test_doctor_names_the_readout_of_a_run():
    model, data = classifier(6)
    found = examine(lw.Network(model), *data, 2**30)
    assert found["readout"] == "class_contrasts(4, seed=0), automatic"
    assert (found["outputs"], found["outputs compared"]) == (6, 4)
    given = examine(lw.Network(model, lw.all_outputs), *data, 2**30)
    assert (given["readout"], given["outputs compared"]) == ("all_outputs", 6)
