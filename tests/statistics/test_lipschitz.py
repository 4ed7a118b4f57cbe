"""Bounds on how fast similarities change."""

import pytest
import torch
from torch import nn

import likewise as lw

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))


def test_sampled_bound_is_of_the_size_of_the_exact_one():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    gram = lw.GramMatrix(model, torch.randn(300, 3, dtype=torch.float64))
    ratio = lw.denoising(gram, draws=60).bound / lw.denoising(gram, exact=True).bound
    assert 0.7 < ratio.min() and ratio.max() < 1.4


def test_a_bare_linear_layer_has_a_bound():
    assert lw.lipschitz_bound(lw.GramMatrix(nn.Linear(3, 2), X)).isfinite().all()


class Scaled(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x):
        return 40 * super().forward(x)


@pytest.mark.parametrize("how", ["hook", "hook before", "subclass"])
def test_no_bound_is_stated_where_the_last_layer_is_not_affine_in_its_weights(how):
    model = nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), (Scaled if how == "subclass" else nn.Linear)(8, 2)
    ).double()
    if how == "hook":
        model[2].register_forward_hook(lambda *given: 40 * given[2])
    if how == "hook before":
        model[2].register_forward_pre_hook(lambda _, given: (40 * given[0],))
    gram = lw.GramMatrix(lw.Network(model, lw.all_outputs), 3 * torch.randn(12, 4, dtype=torch.float64))
    outputs = gram.outputs()
    assert (torch.cdist(outputs, outputs) <= lw.lipschitz_bound(gram) + 1e-9).all()


def label_output(outputs, labels):
    return outputs.gather(1, labels[:, None])


@pytest.mark.parametrize("columns", [False, True])
def test_no_bound_is_stated_where_the_output_depends_on_the_label(columns):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    with torch.no_grad():
        model[2].weight[0] *= 0.01
    x, y = torch.randn(30, 4, dtype=torch.float64), torch.arange(30) // 10  # as sorted data are
    rows, others = ((x[:10], y[:10]), (x, y)) if columns else ((x, y), None)
    gram = lw.GramMatrix(lw.Network(model, label_output), rows, columns=others)
    assert lw.lipschitz_bound(gram).isinf().all()


def test_the_map_to_the_outputs_is_looked_for_in_all_samples():
    torch.manual_seed(0)
    steep = nn.LeakyReLU(30.0)  # the identity where its inputs are positive
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1), steep).double()
    x = torch.randn(40, 4, dtype=torch.float64)
    x = x[model(x)[:, 0].argsort(descending=True)]
    gram = lw.GramMatrix(lw.Network(model, lw.all_outputs), x)
    outputs = gram.outputs()
    assert (outputs[:3] > 0).all() and (outputs < 0).any()
    assert (torch.cdist(outputs, outputs) <= lw.lipschitz_bound(gram) + 1e-9).all()


@pytest.mark.parametrize("readout", [lw.all_outputs, lw.one_output(1), lw.log_probabilities])
def test_a_bound_holds_and_is_stated_for_the_outputs_of_the_last_layer(readout):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x = torch.randn(600, 4, dtype=torch.float64)
    gram = lw.GramMatrix(lw.Network(model, readout), x[:40], columns=x)
    bound, columns = lw.lipschitz_bound(gram), gram.of_columns().outputs()
    assert bound.isfinite().all()
    assert (torch.cdist(gram.outputs(), columns) <= bound + 1e-6).all()  # cdist rounds
