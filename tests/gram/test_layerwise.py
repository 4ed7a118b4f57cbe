"""All pairs layer by layer are those of gradients of all parameters at once."""

import pytest
import torch
from torch import nn

import likewise as lw
from likewise.gram.layerwise import (
    DenseStrips,
    Group,
    LayerPlan,
    ParameterBytes,
    group_parameters,
    plan_layers,
)


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


def in_groups(plan, sizes):
    """Return the same plan with the parameters of its group in three, one of which keeps two layers."""
    (group,), names = plan.groups, list(sizes)
    kept = (("shared.weight",), ("last.weight",))
    rest = tuple(name for name in names[4:] if name not in ("shared.weight", "last.weight"))
    kept_bytes = sum(40 * sizes[name].kept for (name,) in kept)
    groups = [Group((names[0],), (), 0), Group(tuple(names[1:4]), (), 0), Group(rest, kept, kept_bytes)]
    assert {*group.formed, "last.weight"} == set(names)
    return plan._replace(groups=groups)


@pytest.mark.parametrize("kernel", [lw.CORRELATION, lw.INNER_PRODUCT], ids=["correlation", "inner product"])
@pytest.mark.parametrize("readout", [lw.label_against_rest, lw.all_outputs], ids=["one", "three"])
def test_layer_by_layer_is_all_at_once(readout, kernel, monkeypatch):
    memory = 10_000_000 if readout is lw.label_against_rest else 30_000_000
    few, whole = (make_matrix(limit, readout, kernel=kernel) for limit in (memory, 2**31))
    plan = few._layer_plan()
    assert plan.groups[0].kept == (("last.weight",),) and whole._layer_plan() is None
    assert isinstance(few._exact_strips(None), DenseStrips)
    expected = whole.dense()
    assert (few.dense() - expected).abs().max() < 1e-10 * expected.abs().max()
    groups = in_groups(plan, few._setup.parameter_bytes())
    monkeypatch.setattr(type(few), "_layer_plan", lambda gram: groups)
    again = make_matrix(memory, readout, kernel=kernel)
    assert (again.dense() - expected).abs().max() < 1e-10 * expected.abs().max()


def test_gradients_that_do_not_fit_after_all_are_computed_again(monkeypatch):
    limit = 10_000_000
    expected = make_matrix(2**31, lw.label_against_rest).dense()
    few, calls = make_matrix(limit, lw.label_against_rest), []
    few.net.model.register_forward_pre_hook(lambda _, inputs: calls.append(len(inputs[0])))
    few.dense()
    kept = len(calls)
    monkeypatch.setattr("likewise.gram.layerwise.SLACK", -(10**9))
    calls.clear()
    again = make_matrix(limit, lw.label_against_rest)
    again.net.model.register_forward_pre_hook(lambda _, inputs: calls.append(len(inputs[0])))
    assert (again.dense() - expected).abs().max() < 1e-10
    assert len(calls) == kept + 5  # once more for each batch of the layer


def test_what_a_large_model_keeps_is_counted_for_all_outputs(monkeypatch):
    expected = make_matrix(2**31)._setup.parameter_bytes()
    monkeypatch.setattr("likewise.engines.validation.LARGE", 0)  # one combination of outputs is known of it
    assert make_matrix(2**31)._setup.parameter_bytes() == expected


def test_a_gradient_that_is_no_outer_product_after_all_is_counted_anew():
    gram = make_matrix(2**31)
    before = gram._setup.parameter_bytes()["head.weight"]
    gram.engine._outer = frozenset()  # as when a batch has several positions per sample
    after = gram._setup.parameter_bytes()["head.weight"]
    factors, dense = 8 * (32 * 9 + 3 * 3), 8 * 3 * (32 * 9 * 3)
    assert (before.formed, before.kept, after.formed) == (factors, None, dense)
    assert after.kept is not None


def test_statistics_take_pairs_layer_by_layer():
    few, whole = (make_matrix(memory, lw.label_against_rest, centered=True) for memory in (8_000_000, 2**31))
    assert len(few._layer_plan().groups) > 1
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
    assert few._layer_plan() is not None
    with pytest.warns(lw.ZeroGradientWarning, match=r"1 of 60 samples .*ids 7"):
        similarities = few.dense()
    assert not similarities[7].any() and (similarities.diagonal()[:7] - 1).abs().max() < 1e-5


def test_a_wrong_sum_over_layers_is_refused(monkeypatch):
    few = make_matrix(10_000_000, lw.label_against_rest)
    (group,), batch = few._layer_plan()
    without = LayerPlan([group._replace(formed=group.formed[1:])], batch)
    monkeypatch.setattr(type(few), "_layer_plan", lambda gram: without)
    with pytest.raises(lw.GradientMismatchError, match="layer by layer"):
        few.dense()


def of_bytes(*sizes):
    return {name: ParameterBytes(*size) for name, size in zip("abcdef", sizes, strict=False)}


def test_groups_hold_what_fits():
    sizes = of_bytes(
        (40, None), (40, 25), (20, None), (80, None)
    )  # times 7 samples and 3 copies of a batch of one
    formed = [[("a", "b", "c"), ("d",)], [("a", "b"), ("c",), ("d",)]]
    for limit, expected in zip((1000, 800), formed, strict=True):
        groups = group_parameters(sizes, n=7, batch=1, limit=limit)
        assert [group.formed for group in groups] == expected and not any(group.kept for group in groups)
    assert group_parameters(sizes, n=7, batch=1, limit=799) is None


def test_small_inputs_of_large_gradients_are_kept():
    sizes = of_bytes((20, None), (40, 10), (80, 10), (30, 10), (10, None))
    (group,) = group_parameters(sizes, n=7, batch=1, limit=1010)
    assert group == Group(
        ("a", "e"), (("b",), ("c",), ("d",)), 210
    )  # 210 and 80 · (7 + 3), more than 30 · (7 + 3)
    assert len(group_parameters(sizes, n=7, batch=1, limit=1009)) == 2


def test_nothing_is_kept_where_gradients_would_not_fit_beside_it():
    sizes = of_bytes((40, 10), (40, 10))
    assert plan_layers(sizes, 7, {1: 469}) == ([Group(("a",), (), 0), Group(("b",), (), 0)], 1)
    assert plan_layers(sizes, 7, {1: 540}) == ([Group((), (("a",), ("b",)), 140)], 1)


def test_smaller_batches_are_taken_for_fewer_groups_only():
    sizes = of_bytes((40, None), (40, None))
    assert plan_layers(sizes, 7, {4: 2000, 2: 2000}).batch == 4
    assert plan_layers(sizes, 7, {4: 1100, 2: 1100}) == ([Group(("a", "b"), (), 0)], 2)
    assert plan_layers(sizes, 7, {4: 100, 2: 100}) is None
