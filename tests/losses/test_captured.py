"""Terms by operations that a GPU can record give what they give as they are; tests/test_cuda.py records."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_terms import NETS, example
from torch import nn
from torch.utils._pytree import tree_flatten

import likewise as lw
from likewise import losses

TERMS = {
    "pair": (losses.pair, lambda x: (x[:3], x[3:]), {}),
    "group": (losses.group, lambda x: (x, torch.tensor([0, 0, 1, 1, 1, 2])), {"weight": 0.3}),
    "one group": (losses.group, lambda x: (x,), {}),
    "two_batches": (losses.two_batches, lambda x: (x[:3], x[3:]), {}),
    "cosine": (losses.two_batches, lambda x: (x[:3], x[3:]), {"form": "cosine"}),
    "orbit": (losses.orbit, lambda x: (x[:3], [torch.neg, torch.sin]), {}),
    "along": (losses.along, lambda x: (x, torch.sin), {}),
}


def agrees(term, model, batch, options, named=None):
    """Assert that value and gradient by recordable operations are those of the term."""
    named = named or {}
    recorded = losses.captured(term, model, *batch, **named, **options)
    value, gradient = recorded.once(*tree_flatten((batch, named)))
    expected = recorded(*batch, **named)  # on a CPU: the term as it is
    parameters = list(model.parameters())
    found = torch.autograd.grad(expected, parameters, allow_unused=True, materialize_grads=True)
    assert (value - expected).abs() < 1e-10 * (1 + expected.abs())
    joined = torch.cat([part.flatten() for part in found])
    assert (gradient - joined).abs().max() < 1e-9 * (1 + joined.abs().max())
    assert not value.requires_grad
    assert all(now is before for now, before in zip(model.parameters(), parameters, strict=True))


@pytest.mark.parametrize("d", [1, 2])
@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("net", NETS)
def test_recordable_operations_give_the_term(net, name, d):
    model, x = example(net, d)
    term, batch, options = TERMS[name]
    agrees(term, model, batch(x), options)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=2, max_size=9), st.integers(0, 100))
def test_any_groups(groups, seed):
    model, x = example("conv", 3, len(groups), seed)
    y = torch.tensor(groups) % 3
    agrees(losses.group, model, (x, torch.tensor(groups)), {"readout": lw.label_against_rest}, {"labels": y})


def test_words_tied_to_outputs():
    torch.manual_seed(0)

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(7, 4)
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return (self.inner(self.table(x)).tanh() @ self.table.weight.T).mean(1)

    model, x = Words().double(), torch.randint(7, (6, 5))
    agrees(losses.group, model, (x, torch.arange(6) % 2), {"readout": lw.one_output(1)})


def test_only_the_largest_groups_count_where_there_is_room_for_few():
    model, x = example("mlp", 1)
    groups = torch.tensor([0, 0, 1, 1, 1, 5])
    few = losses.captured(losses.group, model, x, groups, most_groups=1)
    value, _ = few.once(*tree_flatten(((x, groups), {})))
    assert (value - losses.group(model, x[2:5])).abs() < 1e-12


def test_a_sample_that_is_not_finite_makes_the_term_zero():
    model, x = example("conv", 1)
    spoiled = x.clone()
    spoiled[1, 0, 0, 0] = torch.nan
    for name, (term, batch, options) in TERMS.items():
        recorded = losses.captured(term, model, *batch(x), **options)
        assert recorded.once(*tree_flatten((batch(x), {})))[1].any(), name
        value, gradient = recorded.once(*tree_flatten((batch(spoiled), {})))
        assert value == 0 and not gradient.any(), name


def test_what_cannot_be_recorded_is_refused():
    model, x = example("mlp", 1)
    with pytest.raises(TypeError, match="RunningTotal changes"):
        losses.captured(losses.density, model, x, losses.RunningTotal(), 0.1)
    with pytest.raises(TypeError, match="returns no outputs"):
        losses.captured(losses.group, model, x, outputs=True)
    term = losses.captured(losses.group, model, x, labels=torch.zeros(6))
    with pytest.raises(TypeError, match="every call gives labels"):
        term(x)
