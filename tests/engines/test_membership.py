"""Rows are given to the sample that they serve, however many there are and wherever they went."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

import likewise as lw
import models
import oracle
from likewise.data import Samples
from likewise.engines import TracedEngine, differentiable_gradients
from likewise.engines.factors import SlicedGradient
from likewise.engines.gradient_batch import compute_gradients
from likewise.engines.membership import SHARED, Members, find_members
from likewise.engines.tracer import RowTrace


def members_of(rows, outputs):
    (found,) = find_members(outputs, [get_gradient_edge(rows)], [rows.dtype])
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 2, 9, 300])
def test_every_row_is_given_to_its_sample(n, dtype):
    x = torch.rand(2 * n, 3, dtype=dtype, requires_grad=True) + 0.5
    order = torch.randperm(2 * n)
    outputs = x[order].view(n, 2, 3).square().sum(1)[:, :2]
    expected = torch.empty(2 * n, dtype=torch.int64)
    expected[order] = torch.arange(n).repeat_interleave(2)
    found = members_of(x, outputs)
    assert isinstance(found, Members)
    assert (found.dimension, found.width) == (0, 1)
    assert torch.equal(found.owners, expected)


def test_rows_that_serve_several_samples_are_shared():
    x = torch.rand(4, 3, requires_grad=True) * 1
    small = torch.tensor([[1.0, 1e-3, 0, 0], [0, 1.0, 0, 0]])  # of one row, a little goes elsewhere
    assert members_of(x, small @ x) is SHARED


def test_rows_without_gradient_belong_to_nobody():
    x = torch.rand(4, 3, requires_grad=True) * 1
    found = members_of(x, x[1:3])
    assert isinstance(found, Members) and found.owners.tolist() == [-1, 0, 1, -1]
    assert members_of(x, (x * 0 + torch.rand(4, 3, requires_grad=True))) == 0


def test_entries_of_two_dimensions_tell_samples_apart():
    x = torch.rand(2, 3, 4, requires_grad=True) * 1
    found = members_of(x, x.flatten(0, 1)[torch.tensor([0, 4, 2, 3, 1, 5])])
    assert isinstance(found, Members) and (found.dimension, found.width) == (0, 2)
    assert found.owners.tolist() == [0, 4, 2, 3, 1, 5]


class TimeMajor(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.out = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.out(self.a(x.transpose(0, 1).reshape(-1, 3)).tanh().view(5, len(x), 4).sum(0))


@pytest.mark.filterwarnings("error")
def test_many_samples_of_single_precision():
    model, x = TimeMajor().eval(), torch.randn(150, 5, 3)
    gram = lw.GramMatrix(model, lw.batches(x, 150), kernel=lw.INNER_PRODUCT)
    assert isinstance(gram.engine, TracedEngine)
    rows = oracle.jacobians(model, x)[:, 0]
    torch.testing.assert_close(gram.dense(), rows @ rows.T, rtol=1e-4, atol=1e-4, check_dtype=False)


@pytest.mark.parametrize("name", list(models.CASES))
def test_any_model_can_be_followed_by_its_rows(name):
    model, x = models.of(name, 3)
    expected = oracle.jacobians(model, x)
    net, samples = lw.Network(model), Samples(x, None, torch.arange(3))
    with net.evaluation_mode():
        found = compute_gradients(net, RowTrace(), samples).by_parameter
    parts = dict(zip(net.numels, expected.split(list(net.numels.values()), 2), strict=True))
    for key, part in parts.items():
        rows = found[key].rows() if key in found else torch.zeros_like(part)
        torch.testing.assert_close(rows, part, rtol=0, atol=1e-9 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["experts in one parameter", "packed sequences", "a loop over samples"])
@pytest.mark.filterwarnings("ignore:.*one sample at a time")
def test_training_terms_of_regrouped_rows_are_differentiable(name):
    model, x = models.of(name)
    net, parameters = lw.Network(model), list(model.parameters())
    own = differentiable_gradients(net, Samples(x, None, torch.arange(len(x)))).self_kernel
    expected = torch.stack([row @ row.T for row in graph_jacobians(model, x)])
    torch.testing.assert_close(own, expected)
    ours, theirs = (
        torch.autograd.grad(value.sum(), parameters, allow_unused=True) for value in (own, expected)
    )
    for mine, right in zip(ours, theirs, strict=True):
        assert (mine is None) == (right is None)
        if mine is not None:
            torch.testing.assert_close(mine, right)


def graph_jacobians(model, x):
    """Gradients of each sample, (d, p), with their graph."""
    parameters = list(model.parameters())
    with torch.backends.mkldnn.flags(enabled=False):
        for i in range(len(x)):
            rows = [
                torch.autograd.grad(
                    one, parameters, create_graph=True, allow_unused=True, materialize_grads=True
                )
                for one in model(x[i : i + 1])[0]
            ]
            yield torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


def test_experts_by_grouped_products_stay_in_slices():
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(num_local_experts=3, **models.EXPERTS)
    model = models.Logits(transformers.MixtralForCausalLM(config)).eval()  # in float32: no other is offered
    x = torch.randint(0, 20, (4, 5))
    expected, net = oracle.jacobians(model, x), lw.Network(model)
    with net.evaluation_mode():
        found = compute_gradients(net, RowTrace(), Samples(x, None, torch.arange(4))).by_parameter
    assert isinstance(found["model.model.layers.0.mlp.experts.down_proj"], SlicedGradient)
    rows = torch.cat([found[name].rows() for name in net.names], 2)
    torch.testing.assert_close(rows, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
