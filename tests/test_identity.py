"""A run that is there is returned only to the model, data, readout and precision that it is of."""

import functools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import likewise as lw
from likewise.identity import DataRecord, fingerprint_code, fingerprint_model, read_data


class Scaled(nn.Module):
    """A network whose forward is edited in the tests."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.detached = False
        self.factor = 1.0

    def forward(self, x):
        hidden = self.layers[:2](x.flatten(1))
        return self.factor * self.layers[2](hidden.detach() if self.detached else hidden)


class Negated(Scaled):
    def forward(self, x):
        return -self.layers(x.flatten(1))


@pytest.fixture
def run(tmp_path):
    """A model, its data and the folder of its run."""
    torch.manual_seed(0)
    model, x, y = Scaled(), torch.randn(24, 6), torch.arange(24) % 3
    lw.analyze(model, (x, y), out=tmp_path / "run", readout=lambda outputs, labels: 2 * outputs)
    return model, x, y, tmp_path / "run"


def doubled():
    return lambda outputs, labels: 2 * outputs


def scaled(factor):
    return lambda outputs, labels: factor * outputs


def test_the_same_run_is_returned(run):
    model, x, y, out = run
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    lw.analyze(model, (x, y), out=out, readout=doubled())
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_an_edited_forward_is_another_model(run, monkeypatch):
    model, x, y, out = run
    monkeypatch.setattr(Scaled, "forward", Negated.forward)
    with pytest.raises(ValueError, match="another model"):
        lw.analyze(model, (x, y), out=out, readout=doubled())


def test_a_forward_edited_where_the_samples_do_not_go_is_another_model(run, monkeypatch):
    model, x, y, out = run

    def forward(self, x):
        hidden = self.layers[:2](x.flatten(1))
        outputs = self.factor * self.layers[2](hidden.detach() if self.detached else hidden)
        return outputs if x.abs().max() < 100 else -outputs

    monkeypatch.setattr(Scaled, "forward", forward)
    with pytest.raises(ValueError, match="another model"):
        lw.analyze(model, (x, y), out=out, readout=doubled())


@pytest.mark.parametrize(("attribute", "value"), [("factor", 1.1), ("detached", True)])
def test_an_attribute_that_changes_outputs_or_gradients_makes_another_model(run, attribute, value):
    model, x, y, out = run
    setattr(model, attribute, value)
    with pytest.raises(ValueError, match="outputs or gradients differ"):
        lw.analyze(model, (x, y), out=out, readout=doubled())


def test_functions_that_a_module_holds_belong_to_the_model():
    model = Scaled()
    prints = [fingerprint_model(lw.Network(model))]
    for activation in (
        lambda x: x.clamp(min=-100),
        lambda x: x.clamp(min=-200),
        functools.partial(torch.clamp, min=-100),
    ):
        model.activation = activation
        prints.append(fingerprint_model(lw.Network(model)))
    assert len(set(prints)) == 4


def test_another_lambda_is_another_readout(run):
    model, x, y, out = run
    with pytest.raises(ValueError, match="another readout"):
        lw.analyze(model, (x, y), out=out, readout=lambda outputs, labels: 3 * outputs)
    with pytest.raises(ValueError, match="another readout"):
        lw.analyze(model, (x, y), out=out, readout=scaled(2))


def test_reshaped_data_are_other_data(run):
    model, x, y, out = run
    with pytest.raises(ValueError, match="another data"):
        lw.analyze(model, (x.view(24, 2, 3), y), out=out, readout=doubled())


def test_another_precision_is_another_run(run):
    model, x, y, out = run
    low = lw.Network(model, doubled(), autocast=torch.bfloat16)
    with pytest.raises(ValueError, match=r"another precision \(autocast"):
        lw.analyze(low, (x, y), out=out)
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(ValueError, match=r"another precision \(matmul"):
            lw.analyze(model, (x, y), out=out, readout=doubled())
    finally:
        torch.set_float32_matmul_precision("highest")


def test_the_same_data_in_other_batches_are_the_same_data(run):
    model, x, y, out = run
    before = (out / "manifest.json").read_bytes()
    for size in (1, 7, 24):
        lw.analyze(model, lw.batches((x, y), size=size), out=out, readout=doubled())
    assert (out / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("first", [[range(1)], [range(3), range(2, 7)], [range(5, 8)], [range(10)]])
def test_what_is_read_before_a_pass_does_not_keep_data_from_being_recorded(first):
    data = lw.batches((torch.randn(10, 3), torch.arange(10)), size=4)
    record = DataRecord()
    observed = record.observe(data)
    for where in (*first, *data.spans()[:2]):
        observed.samples(where)
    fingerprint, labels = record.complete(data)
    expected, expected_labels = read_data(data)
    assert fingerprint == expected and torch.equal(labels, expected_labels)


def test_data_differ_by_dtype_names_and_what_is_label():
    x, y = torch.randn(8, 4), torch.arange(8)
    sets = [
        (x, y),
        (x.view(torch.int32), y),
        (x, y.int()),
        (x.view(8, 2, 2), y),
        {"a": x, "labels": y},
        {"b": x, "labels": y},
        x,
    ]
    assert len({read_data(lw.batches(data, size=3))[0] for data in sets}) == len(sets)


OFFSET = 1.0


def shifted(outputs, labels):
    return outputs + OFFSET


def calling(outputs, labels):
    return shifted(outputs, labels)


def test_code_differs_by_closure_defaults_constants_globals_and_what_it_calls(monkeypatch):
    callables = [
        scaled(1.0),
        scaled(torch.ones(2)),
        scaled(torch.ones(3)),
        functools.partial(shifted, labels=1),
        functools.partial(shifted, labels=2),
        lambda outputs, labels=1: outputs,
        lambda outputs, labels=2: outputs,
        lambda outputs, labels: outputs in {"a", "b", "c"},
        lw.one_output(0),
        lw.one_output(1),
        lw.label_against_random(0),
        lw.label_against_random(1),
        calling,
    ]
    prints = [fingerprint_code(each) for each in callables]
    assert len(set(prints)) == len(prints) and prints == [fingerprint_code(each) for each in callables]
    monkeypatch.setitem(globals(), "OFFSET", 2.0)
    assert fingerprint_code(calling) != prints[-1]


def test_globals_named_like_attributes_do_not_count(monkeypatch):
    torch.manual_seed(0)
    net = lw.Network(Scaled())
    before = fingerprint_model(net)
    for name in (
        "layers",
        "factor",
        "flatten",
    ):  # as a script that defines the model may call its own variables
        monkeypatch.setitem(globals(), name, torch.ones(2))
    assert fingerprint_model(net) == before


class Shifted(nn.Linear):
    def forward(self, x):
        return self.shifted(shifted(super().forward(x), None))

    def shifted(self, x):
        return x + 1


def test_a_method_counts_beside_a_global_of_its_name(monkeypatch):
    net = lw.Network(Shifted(2, 2))
    before = fingerprint_model(net)
    with monkeypatch.context() as patched:
        patched.setattr(Shifted, "shifted", lambda self, x: x - 1)
        assert fingerprint_model(net) != before
    assert fingerprint_model(net) == before
    monkeypatch.setitem(globals(), "OFFSET", 2.0)
    assert fingerprint_model(net) != before


def test_fingerprints_of_code_do_not_depend_on_the_process():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_identity as t\n"
        "from likewise.model import Network; from likewise import identity\n"
        "import torch; torch.manual_seed(0)\n"
        "f = [t.calling, t.scaled(2), lambda a, b: a in {'a', 'b', 'c', 'd', 'e'}]\n"
        "print(identity.fingerprint_code(*f), identity.fingerprint_model(Network(t.Scaled())))"
    )
    words = [sys.executable, "-c", code, str(Path(__file__).parent)]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    functions = [calling, scaled(2), lambda a, b: a in {"a", "b", "c", "d", "e"}]
    torch.manual_seed(0)
    assert printed == [fingerprint_code(*functions), fingerprint_model(lw.Network(Scaled()))]


def test_a_finished_run_of_other_versions_is_refused_and_can_be_read(run):
    from likewise.manifest import read_manifest, write_manifest

    model, x, y, out = run
    state = read_manifest(out)
    state["versions"]["torch"] = "2.0.0"
    write_manifest(out, state)
    with pytest.raises(ValueError, match=r"other versions \(torch: there '2.0.0'"):
        lw.analyze(model, (x, y), out=out, readout=doubled())
    with pytest.warns(UserWarning, match="report.html is damaged"):  # it shows another manifest
        assert len(lw.Analysis(out).table) == 24


def test_a_readout_is_the_same_after_torch_has_wrapped_its_own_functions():
    code = """
import likewise as lw
from likewise.identity import fingerprint_code
before = fingerprint_code(lw.projected_outputs(4))
import torch._dynamo
print(before == fingerprint_code(lw.projected_outputs(4)))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "True"


def test_options_of_a_module_count_and_its_mode_does_not():
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    assert fingerprint_code(loss) == fingerprint_code(nn.CrossEntropyLoss(label_smoothing=0.1).eval())
    assert fingerprint_code(loss) != fingerprint_code(nn.CrossEntropyLoss(label_smoothing=0.2))
    assert fingerprint_code(nn.Sequential(nn.Dropout(0.1))) != fingerprint_code(
        nn.Sequential(nn.Dropout(0.2))
    )


def test_stores_that_calls_write_to_may_be_left_out():
    calls = []

    def function(x):
        calls.append(x)

    before = fingerprint_code(function), fingerprint_code(function, stores=False)
    calls.append(1)
    assert fingerprint_code(function) != before[0]
    assert fingerprint_code(function, stores=False) == before[1]
