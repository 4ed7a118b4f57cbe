"""Traces are found once, and hold for every batch."""

import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev

import likewise as lw
from likewise.engines import MemoryMeter, traced, validation
from likewise.engines.gradient_batch import compute_gradients, differentiate_pass
from likewise.engines.tracer import FirstRecorder, UntraceableError, trace_model


def test_a_model_that_does_not_branch_is_traced_once(monkeypatch):
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(108, 2)).eval()
    gram = lw.GramMatrix(model, lw.batches(torch.randn(12, 1, 8, 8), 3))
    gram.engine  # noqa: B018  the first trace
    monkeypatch.setattr(traced, "TRACE_FUNCTIONS", (lambda *_: 1 / 0,))
    lw.soft_neighbors(gram)
    lw.nearest(gram, 2)


WRITES = {
    "whole": lambda h: h.mul_(3).add_(1),
    "part": lambda h: (h[:, :2].mul_(3), h)[1],
    "entries": lambda h: (h.__setitem__((slice(None), 0), 2 * h[:, 1]), h)[1],
    "view": lambda h: (h.view(len(h), -1)[:, 3:].mul_(2), h)[1],
    "activation": lambda h: nn.functional.relu(h, inplace=True),
    "twice": lambda h: h.sin_() + h,
    "none": lambda h: h,
}


class WritingNet(nn.Module):
    """Writes to the output of a linear layer of several positions, which PyTorch returns as a view of a matrix."""

    def __init__(self, write, d):
        super().__init__()
        self.write = write
        self.first, self.last = nn.Linear(3, 4), nn.Linear(20, d)

    def forward(self, x):
        return self.last(self.write(self.first(x)).flatten(1))


@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_to_the_output_of_a_linear_layer_has_the_right_gradient(write, d):
    torch.manual_seed(0)
    model, x = WritingNet(WRITES[write], d).double().eval(), torch.randn(6, 5, 3, dtype=torch.float64)
    kernel = lw.Kernel(0, 0, lw.whole_block)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no slower engine
        found = lw.GramMatrix(model, x, kernel=kernel).dense()
    values = dict(model.named_parameters())
    rows = []
    for one in x:
        jacobian = jacrev(lambda p, one=one: functional_call(model, p, one[None])[0])(values)
        rows.append(torch.cat([part.flatten(1) for part in jacobian.values()], 1).detach())
    expected = torch.einsum("ndp,mep->nmde", torch.stack(rows), torch.stack(rows))
    assert (found - expected).abs().max() < 1e-9 * expected.abs().max()


class Normed(nn.Module):
    """Has weights that are derived from parameters, and parameters that are expanded to the batch."""

    def __init__(self):
        super().__init__()
        self.token, self.weight = nn.Parameter(torch.randn(1, 1, 3)), nn.Parameter(torch.randn(4, 3))

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return nn.functional.linear(x, self.weight / self.weight.norm()).tanh().sum(1)


@pytest.mark.parametrize("write", [*WRITES, "derived"])
def test_a_first_pass_and_a_sample_alone_give_the_trace_and_gradients_of_a_usual_trace(write):
    torch.manual_seed(0)
    model = Normed() if write == "derived" else WritingNet(WRITES[write], 3)
    net = lw.Network(model.double().eval(), lw.all_outputs)
    pair = lw.batches(torch.randn(2, 5, 3, dtype=torch.float64)).samples(range(2))
    with net.evaluation_mode():
        recorder = FirstRecorder(net, pair)
        recorder.run(net, pair)
        trace, alone = recorder.trace(net, pair[1:])
        usual = trace_model(net, pair)
        assert trace == usual
        found = differentiate_pass(net, recorder, pair, recorder.outputs)
        expected = compute_gradients(net, usual, pair)
    assert (alone - expected.outputs[1:]).abs().max() < 1e-12
    for name, gradient in expected.by_parameter.items():
        assert torch.equal(found.by_parameter[name].rows(), gradient.rows())


class TakesOneApart(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x[0])[None] if len(x) == 1 else self.layer(x)


def test_a_model_that_treats_one_sample_in_another_way_is_traced_by_several(monkeypatch):
    monkeypatch.setattr(validation, "LARGE", 0)
    model, x = TakesOneApart().double(), torch.randn(2, 3, dtype=torch.float64)
    net = lw.Network(model, lw.all_outputs)
    pair = lw.batches(x).samples(range(2))
    with net.evaluation_mode(), pytest.raises(UntraceableError, match="number of samples"):
        recorder = FirstRecorder(net, pair)
        recorder.run(net, pair)
        recorder.trace(net, pair[:1])
    gram = lw.GramMatrix(net, x)
    expected = lw.GramMatrix(net, x, engine="autograd").dense()
    assert (gram.dense() - expected).abs().max() < 1e-12 and gram.engine.name == "layers"


def test_outputs_that_no_backward_needs_are_released():
    """The wide output of `up` is only summed: neither it nor a copy of it is kept."""
    net = lw.Network(SummedNet().eval(), lw.all_outputs)
    samples = lw.batches(torch.randn(64, 8, 16)).samples(range(64))
    with net.evaluation_mode():
        trace = trace_model(net, samples[:2])
        _ = net.parameters
        with MemoryMeter() as meter:
            compute_gradients(net, trace, samples)
    wide = 4 * 64 * 8 * 4096
    assert wide < meter.peak < 1.5 * wide  # its value, then its gradient


class SummedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 4096), nn.Linear(512, 1)

    def forward(self, x):
        return self.down(self.up(x).unflatten(2, (512, 8)).sum((1, 3)))
