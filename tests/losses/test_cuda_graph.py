"""Terms by operations that a GPU can record give what they give as they are; tests/test_cuda.py records."""

import copy
import functools
import warnings
from collections import UserDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_functional import NETS, example, similarities
from torch import nn
from torch.utils._pytree import tree_flatten

import likewise as lw
from likewise import losses

TERMS = {
    "pair": (losses.pair, lambda x: (x[:3], x[3:]), {"readout": lw.all_outputs}),
    "group": (
        losses.group,
        lambda x: (x, torch.tensor([0, 0, 1, 1, 1, 2])),
        {"weight": 0.3, "readout": lw.all_outputs},
    ),
    "one group": (losses.group, lambda x: (x,), {"readout": lw.all_outputs}),
    "two_batches": (losses.two_batches, lambda x: (x[:3], x[3:]), {}),
    "cosine": (losses.two_batches, lambda x: (x[:3], x[3:]), {"form": "cosine"}),
    "orbit": (losses.orbit, lambda x: (x[:3], [torch.neg, torch.sin]), {"readout": lw.all_outputs}),
    "along": (losses.along, lambda x: (x, torch.sin), {}),
}


def agrees(term, model, batch, options, named=None):
    """Assert that value and gradient by recordable operations are those of the term."""
    named = named or {}
    recorded = losses.captured(term, model, *batch, **named, **options)
    parameters = list(model.parameters())
    value, gradient, used = recorded.once(*tree_flatten((batch, named)))
    expected = recorded(*batch, **named)  # on a CPU: the term as it is
    every = torch.autograd.grad(expected, parameters, allow_unused=True)
    found = [g for g in every if g is not None]
    assert all(
        p is q
        for p, q in zip(
            used, (p for p, g in zip(parameters, every, strict=True) if g is not None), strict=True
        )
    )
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
    value, *_ = few.once(*tree_flatten(((x, groups), {})))
    assert (value - losses.group(model, x[2:5])).abs() < 1e-12


def test_a_sample_that_is_not_finite_makes_the_term_zero():
    model, x = example("conv", 1)
    spoiled = x.clone()
    spoiled[1, 0, 0, 0] = torch.nan
    for name, (term, batch, options) in TERMS.items():
        recorded = losses.captured(term, model, *batch(x), **options)
        assert recorded.once(*tree_flatten((batch(x), {})))[1].any(), name
        value, gradient, _ = recorded.once(*tree_flatten((batch(spoiled), {})))
        assert value == 0 and not gradient.any(), name


def test_a_recording_reads_its_combinations_of_outputs_from_where_they_are_redrawn():
    model, x = example("mlp", 3)

    def two_terms(model, x):
        return losses.group(model, x) + losses.pair(model, x[:3], x[3:])

    recorded = losses.captured(two_terms, model, x)
    batch = tree_flatten(((x,), {}))
    torch.manual_seed(1)
    expected = [recorded(x) for _ in range(2)]
    torch.manual_seed(1)
    assert torch.allclose(recorded.once(*batch)[0], expected[0])
    columns = [c for one in recorded._combinations._combinations for c in one._columns.values()]
    places = [column.data_ptr() for column in columns]
    assert len(recorded._combinations._combinations) == 2
    assert torch.allclose(recorded.once(*batch)[0], expected[0])  # the same until they are redrawn
    recorded._combinations.redraw()
    assert torch.allclose(recorded.once(*batch)[0], expected[1])
    assert places == [column.data_ptr() for column in columns]


def test_what_cannot_be_recorded_is_refused():
    model, x = example("mlp", 1)
    with pytest.raises(TypeError, match="RunningTotal changes"):
        losses.captured(losses.density, model, x, losses.RunningTotal(), q=0.1)
    with pytest.raises(TypeError, match="returns no outputs"):
        losses.captured(losses.group_with_outputs, model, x)
    with pytest.raises(TypeError, match="RunningTotal changes"):
        losses.captured(functools.partial(losses.density, total=losses.RunningTotal(), q=0.1), model, x)
    with pytest.raises(TypeError, match="returns no outputs"):
        losses.captured(functools.partial(losses.two_batches_with_outputs, weight=2), model, x[:3], x[3:])
    with pytest.raises(TypeError, match="Module or a Network is needed, found str"):
        losses.captured(losses.group, "model", x)
    with pytest.raises(ValueError, match="1 or more, found 0"):
        losses.captured(losses.group, model, x, most_groups=0)
    term = losses.captured(losses.group, model, x, labels=torch.zeros(6))
    with pytest.raises(TypeError, match=r"labels=\.\.\."):
        term(x)
    with pytest.raises(TypeError, match="one number that depends on trained parameters, found a tensor"):
        losses.captured(lambda model, x: model(x), model, x)(x)
    with pytest.raises(TypeError, match="depends on none"):
        losses.captured(lambda model, x: x.sum(), model, x)(x)


def test_batches_may_hold_mappings_arrays_and_lists():
    model, x = example("mlp", 1)
    groups = [0, 0, 1, 1, 1, 2]
    expected = losses.group(model, x, torch.tensor(groups))
    for some in (groups, np.array(groups), torch.tensor(groups)):
        assert losses.captured(losses.group, model, x, some)(x, some) == expected
        assert (
            losses.captured(functools.partial(losses.group, weight=1), model, x, groups=np.array(groups))(
                x, groups=np.array(groups)
            )
            == expected
        )

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return self.inner(x)

    inputs = UserDict(x=x)
    assert losses.captured(losses.group, Named(), inputs, groups)(inputs, groups) == expected


def test_a_term_with_its_model_can_be_copied_and_looked_at():
    model, x = example("mlp", 1)
    term = losses.captured(losses.group, model, x)
    assert repr(term) == "Captured(group, not recorded)"
    with torch.no_grad():
        assert term(x) == losses.group(model, x)
    assert copy.deepcopy(term)(x) == term(x)


class Frames(nn.Module):
    """Folds frames into the batch: a convolution whose batch is not that of the samples."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 2, 3), nn.Linear(2, 1)

    def forward(self, x):
        return self.head(self.conv(x.flatten(0, 1)).tanh().mean((2, 3)).unflatten(0, x.shape[:2]).mean(1))


class Positions(nn.Module):
    """Takes samples for positions of one sequence."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 1, 1)

    def forward(self, x):
        return self.conv(x.T[None]).tanh()[0].T


class Mapped(nn.Module):
    """Maps over samples inside forward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 1, 3, 3))

    def forward(self, x):
        one = lambda image: nn.functional.conv2d(image[None], self.weight)[0].tanh().sum((1, 2))[:1]  # noqa: E731
        return torch.vmap(one)(x)


class Complex(nn.Module):
    """Complex kernels made of real parameters."""

    def __init__(self):
        super().__init__()
        self.real, self.imaginary = nn.Conv1d(1, 2, 2), nn.Conv1d(1, 2, 2)

    def forward(self, x):
        kernel = torch.complex(self.real.weight, self.imaginary.weight)
        return nn.functional.conv1d(x.to(kernel.dtype), kernel).abs().mean((1, 2))[:, None]


@pytest.mark.parametrize(
    ("make", "shape"),
    [(Frames, (3, 1, 5, 5)), (Positions, (4,)), (Mapped, (1, 5, 5)), (Complex, (1, 6))],
)
def test_convolutions_that_no_rule_knows(make, shape):
    torch.manual_seed(0)
    model, x = make().double(), torch.randn(6, *shape, dtype=torch.float64)
    groups = torch.tensor([0, 0, 1, 1, 1, 2])
    k = similarities(model, x)
    inside = [k[:2, :2], k[2:5, 2:5]]
    means = [(part.sum() - part.trace()) / (len(part) * (len(part) - 1)) for part in inside]
    expected = 1 - sum(means) / 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert (losses.group(model, x, groups) - expected).abs() < 1e-10
        agrees(losses.group, model, (x, groups), {})
        agrees(losses.two_batches, model, (x[:3], x[3:]), {})
