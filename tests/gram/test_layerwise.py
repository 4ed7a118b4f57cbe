"""All pairs layer by layer are those of gradients of all parameters at once."""

import pytest
import torch
from torch import nn

import likewise as lw
from likewise.gram.layerwise import DenseStrips, group_parameters


class Network(nn.Module):
    """Convolutions, a norm, a weight that is used twice, and a linear layer of one position."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 24, 3, padding=1), nn.BatchNorm2d(24)
        self.shared = nn.Conv2d(24, 24, 3, padding=1)
        self.last, self.head = nn.Conv2d(24, 32, 3, stride=2), nn.Linear(32 * 9, 3)

    def forward(self, x):
        x = torch.tanh(self.norm(self.first(x)))
        x = torch.tanh(self.shared(torch.tanh(self.shared(x))))
        return self.head(torch.tanh(self.last(x)).flatten(1))


def make_matrix(max_memory, readout=lw.all_outputs, **options):
    torch.manual_seed(0)
    model, x = Network().double().eval(), torch.randn(40, 3, 8, 8, dtype=torch.float64)
    data = lw.batches((x, torch.arange(40) % 3), size=8)
    return lw.GramMatrix(lw.Network(model, readout), data, max_memory=max_memory, **options)


@pytest.mark.parametrize("kernel", [lw.CORRELATION, lw.INNER_PRODUCT], ids=["correlation", "inner product"])
@pytest.mark.parametrize("readout", [lw.label_against_rest, lw.all_outputs], ids=["one", "three"])
def test_layer_by_layer_is_all_at_once(readout, kernel):
    memory = 8_000_000 if readout is lw.label_against_rest else 26_000_000
    few, whole = (make_matrix(limit, readout, kernel=kernel) for limit in (memory, 2**31))
    assert len(few._parameter_groups()) > 1 and whole._parameter_groups() is None
    assert isinstance(few._exact_strips(None), DenseStrips)
    expected = whole.dense()
    assert (few.dense() - expected).abs().max() < 1e-10 * expected.abs().max()


def test_statistics_take_pairs_layer_by_layer():
    few, whole = (make_matrix(memory, lw.label_against_rest, centered=True) for memory in (8_000_000, 2**31))
    assert len(few._parameter_groups()) > 1
    found, expected = (lw.nearest(gram, 3) for gram in (few, whole))
    assert torch.equal(found.indices, expected.indices)
    assert (found.similarities - expected.similarities).abs().max() < 1e-9


def test_a_sample_without_a_gradient_is_named():
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(256, 1)
    )
    for parameter in model.parameters():
        parameter.data.abs_()
    model[0].bias.data.zero_()
    model[2].bias.requires_grad_(False)
    model[4].weight.requires_grad_(False)
    model[4].bias.requires_grad_(False)
    x = torch.rand(60, 1, 8, 8)
    x[7] = 0
    few = lw.GramMatrix(model, lw.batches(x, size=4), max_memory=2_000_000)
    assert few._parameter_groups() is not None
    with pytest.warns(lw.ZeroGradientWarning, match=r"1 of 60 samples .*ids 7"):
        similarities = few.dense()
    assert not similarities[7].any() and (similarities.diagonal()[:7] - 1).abs().max() < 1e-5


def test_a_wrong_sum_over_layers_is_refused(monkeypatch):
    few = make_matrix(8_000_000, lw.label_against_rest)
    groups = few._parameter_groups()
    monkeypatch.setattr(type(few), "_parameter_groups", lambda gram: groups[1:])
    with pytest.raises(lw.GradientMismatchError, match="layer by layer"):
        few.dense()


def test_groups_hold_what_fits():
    entries = {"a": 10, "b": 10, "c": 5, "d": 20}
    assert group_parameters(entries, n=7, batch=1, itemsize=4, limit=1000) == [("a", "b", "c"), ("d",)]
    assert group_parameters(entries, n=7, batch=1, itemsize=4, limit=800) == [("a", "b"), ("c",), ("d",)]
    assert group_parameters(entries, n=7, batch=1, itemsize=4, limit=799) is None
