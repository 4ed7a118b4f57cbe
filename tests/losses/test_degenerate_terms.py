"""Defects of training terms, plans and pairs that were found once, each kept from coming back."""

import gc
import warnings
import weakref
from functools import partial

import pytest
import torch
from torch import nn

import likewise as lw
from likewise import losses

DOUBLE = torch.float64


def mlp(d=2):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, d)).double()


def points(n=40):
    return torch.randn(n, 3, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))


def test_a_plan_of_pairs_leaves_a_model_in_train_mode_alone():
    model = (
        nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 2)).double().train()
    )
    before, state = torch.get_rng_state(), {k: v.clone() for k, v in model.state_dict().items()}
    gram = lw.GramMatrix(model, points())
    gram.plan(lw.nearest, k=3)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert not gram.net._evaluation.copies


def test_parameters_changed_behind_the_back_are_seen():
    model, x = mlp(), points()
    gram = lw.GramMatrix(model, x)
    gram.plan(lw.nearest, k=3)
    net = lw.Network(model)
    _ = net.parameters
    for p in model.parameters():
        p.data.mul_(1.5)  # which leaves the version as it was
    torch.testing.assert_close(gram.dense(), lw.GramMatrix(model, x).dense())
    assert torch.equal(net.parameters["0.weight"], model[0].weight)


def test_options_of_columns_are_cut_too():
    gram = lw.GramMatrix(mlp(), points(), columns=points(300))
    assert gram.plan(lw.GramMatrix.row_sums, weights=torch.ones(300)).passes == 2


def test_a_plan_does_not_exceed_the_memory_allowed():
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2))
    gram = lw.GramMatrix(model, torch.randn(400, 1, 8, 8), max_memory=2**24)
    for statistic in (lw.soft_neighbors, lw.nearest):
        assert gram.plan(statistic).peak_bytes < 2**24 * 1.1


def test_a_reduction_that_is_not_symmetric_is_not_mirrored():
    model, x = mlp(), points(100)
    for reduce in (lambda b: b[..., 0, 1], lambda b: b[..., :1]):
        kernel = lw.Kernel(-0.5, -0.5, reduce)
        whole = lw.GramMatrix(model, x, columns=x.clone(), kernel=kernel).dense()
        torch.testing.assert_close(lw.GramMatrix(model, x, kernel=kernel).dense(), whole)


class Normed(nn.Module):
    """A layer norm by whichever entry point."""

    def __init__(self, norm, follow=True):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 1)
        self.call, self.follow = norm, follow

    def forward(self, x):
        h = self.first(x) if self.follow else torch.stack([self.first(one) * (one.sum() > -99) for one in x])
        return self.last(torch.tanh(self.call(h, (5,), self.norm.weight, self.norm.bias)))


@pytest.mark.parametrize("term", ["group", "along"])
@pytest.mark.parametrize("norm", [torch.layer_norm, nn.functional.layer_norm])
@pytest.mark.parametrize("follow", [True, False])
def test_layer_norms_by_any_name_have_right_derivatives(term, norm, follow):
    model, x = Normed(norm, follow).double(), points(4)
    e = torch.randn_like(x)

    def value():
        return losses.group(model, x) if term == "group" else losses.along(model, x, e)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = torch.autograd.grad(value(), model.first.weight)[0]
        step, values = torch.randn_like(found), []
        for eps in (1e-5, -1e-5):
            model.first.weight.data += eps * step
            values.append(value().detach())
            model.first.weight.data -= eps * step
    quotient = (values[0] - values[1]) / 2e-5
    torch.testing.assert_close((found * step).sum(), quotient, rtol=1e-5, atol=1e-8)


class Heads(nn.Module):
    """One head or another, by the batch."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x):
        return self.a(x) if x.mean() > 0 else self.b(x)


def test_means_in_different_parameters_have_nothing_in_common():
    x = torch.rand(4, 3)
    assert losses.two_batches(Heads(), x, -x, form="cosine") == 1


def test_samples_that_are_not_finite_are_refused_or_left_out_wherever_they_are():
    model, x = mlp(), points(8)
    for place in (0, 5):
        bad = x.clone()
        bad[place, 0] = torch.nan
        with pytest.warns(UserWarning, match="leaves them out"):
            found = losses.group(model, bad)
        assert found.isfinite()
        assert torch.autograd.grad(found, model[0].weight)[0].isfinite().all()
        with pytest.raises(ValueError, match="mean gradient is not finite"):
            losses.two_batches(model, bad[:6], x)


def test_a_copy_of_a_sample_has_the_same_rival():
    model, x, y = mlp(10), points(6), torch.arange(6)
    readout = lw.label_against_random(0)
    one = torch.tensor(1.0, dtype=DOUBLE)
    torch.testing.assert_close(losses.pair(model, x, x, y, readout=readout), -one)
    found = losses.orbit(model, x, lambda x: x.clone(), y, readout=readout)
    torch.testing.assert_close(found, 0 * one, atol=1e-10, rtol=0)


def test_wrong_use_is_named():
    model, x = mlp(), points(8)
    for call, error, text in [
        (lambda: losses.pair(model, x[:3], x[3:]), ValueError, "matched one by one"),
        (lambda: losses.two_batches(model, x, x, form="cos"), ValueError, "ratio"),
        (lambda: losses.group(lw.Network(model), x, parameters=["0.*"]), ValueError, "A Network has its"),
        (lambda: losses.group(model, x.numpy()), TypeError, "x must be a tensor"),
        (lambda: losses.group(model, x[:0]), ValueError, "empty"),
        (
            lambda: losses.group(model, x, readout=lambda outputs, labels: outputs.detach()),
            ValueError,
            "depend on none",
        ),
    ]:
        with pytest.raises(error, match=text):
            call()
    assert losses.group(model, x, [0, 0, 1, 1, 0, 0, 1, 1]).isfinite()


def test_batches_that_mix_are_refused():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            h = self.layer(x)
            return h - h.mean(0)

    with pytest.raises(ValueError, match="depend on the other samples"):
        losses.group(Mixed().double(), points(8))


def test_traces_keep_no_model_alive_and_do_not_pile_up():
    import sys

    from likewise.engines import differentiable_gradients as module  # the function has the name of its module

    traces = sys.modules["likewise.engines.differentiable"]._traces
    model, x = mlp(), points(8)
    for _ in range(20):
        losses.group(model, x, readout=lambda outputs, labels: outputs[:, :1])
    assert len(traces[model]) == 1
    for n in range(20):
        losses.group(nn.Sequential(nn.Flatten(), nn.Linear(n + 1, 2)), torch.randn(3, n + 1))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and module is not None


def test_groups_of_many_tokens_take_no_more_than_the_table():
    from likewise.engines import MemoryMeter

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 4), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 64, 1))
    x = torch.randint(0, 50, (64, 64))
    losses.group(model, x)
    with MemoryMeter() as meter:
        losses.group(model, x)
    assert meter.peak < 20 * 2**20  # of all positions with all, 64 MiB and more


def test_along_works_in_inference_mode_and_constant_densities_are_shuffled():
    model = mlp()
    with torch.inference_mode():
        assert losses.along(model, points(4), torch.ones(4, 3, dtype=DOUBLE)).isfinite()
    order = list(losses.DensitySampler(torch.full((30,), 3.0), temperature=5.0))
    assert sorted(order) == list(range(30)) and order != list(range(30))


def test_soft_labels_go_through_an_orbit():
    model, x = mlp(), points(6)
    soft = torch.rand(6, 2, dtype=DOUBLE)
    found = losses.orbit(model, x, [torch.neg], soft, readout=lambda out, y: (out * y).sum(1, keepdim=True))
    assert found.isfinite()


def test_samples_that_are_left_out_do_not_count():
    model, x = mlp(), points(8)
    group, pair = (partial(term, readout=lw.all_outputs) for term in (losses.group, losses.pair))
    bad = x.clone()
    bad[[1, 5], 0] = torch.nan
    groups, kept = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2]), torch.tensor([0, 2, 3, 4, 6, 7])
    expected = group(model, x[kept], groups[kept]), group(model, x[kept])
    with pytest.warns(UserWarning, match="leaves them out"):
        found = group(model, bad, groups), group(model, bad)
        pairs = pair(model, bad[:4], x[4:])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(pairs, pair(model, x[[0, 2, 3]], x[[4, 6, 7]]))
    with pytest.warns(UserWarning, match="leaves them out"):
        assert pair(model, bad[1:2], x[:1]) == 0  # no pair is left


def test_labels_may_be_an_array_and_are_asked_for_by_their_name_here():
    model, x, y = mlp(3), points(6), torch.arange(6) % 3
    options = {"readout": lw.label_against_rest}
    for term, batch in (
        (losses.group, (x, y)),
        (losses.pair, (x, x.flip(0))),
        (losses.orbit, (x, torch.sin)),
    ):
        given = {"labels": y.numpy(), **options}
        torch.testing.assert_close(term(model, *batch, **given), term(model, *batch, labels=y, **options))
    two = losses.two_batches(model, x[:3], x[3:], y[:3].numpy(), y[3:].numpy(), **options)
    torch.testing.assert_close(two, losses.two_batches(model, x[:3], x[3:], y[:3], y[3:], **options))
    with pytest.raises(ValueError, match="labels_a and labels_b"):
        losses.two_batches(model, x[:3], x[3:], **options)


def test_no_warning_of_running_statistics_where_the_loss_sees_the_same_call(recwarn):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double().train()
    x = points(6)
    losses.group_with_outputs(model, x)
    losses.two_batches_with_outputs(model, x[:3], x[3:])
    assert not [str(w.message) for w in recwarn]
    with pytest.warns(UserWarning, match="running statistics"):
        losses.group(model, x)
