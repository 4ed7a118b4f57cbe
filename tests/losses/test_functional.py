"""Training terms against explicit gradients, finite differences and what they ask for."""

import doctest
import functools
import importlib
import warnings

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import likewise as lw
import oracle
from likewise import losses

DOUBLE = torch.float64


class Attention(nn.Module):
    """A transformer block on four tokens."""

    def __init__(self, d):
        super().__init__()
        self.block = nn.TransformerEncoderLayer(4, 2, 8, activation="gelu", batch_first=True)
        self.head = nn.Linear(4, d)

    def forward(self, x):
        return self.head(self.block(x).mean(1))


def mlp(d):
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Softplus(), nn.Linear(6, d)), (5,)


def conv(d):
    layers = [nn.Conv2d(1, 3, 3, padding=1), nn.PReLU(), nn.AvgPool2d(2), nn.Conv2d(3, 4, 3), nn.PReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, d)), (1, 8, 8)


def norm(d):
    net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, d))
    net[1].running_mean.uniform_(-1, 1)
    net[1].running_var.uniform_(0.5, 2)
    return net, (5,)


def attention(d):
    return Attention(d), (4, 4)


def instance(d):
    layers = [nn.Conv1d(2, 3, 2), nn.InstanceNorm1d(3, affine=True), nn.Tanh(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(12, d)), (2, 5)


NETS = {make.__name__: make for make in (mlp, conv, norm, attention, instance)}
TERMS = {
    "pair": lambda model, x: losses.pair(model, x[:3], x[3:], readout=lw.all_outputs),
    "group": lambda model, x: losses.group(
        model, x, torch.tensor([0, 0, 1, 1, 1, 2]), readout=lw.all_outputs
    ),
    "two_batches": lambda model, x: losses.two_batches(model, x[:3], x[3:]),
    "cosine": lambda model, x: losses.two_batches(model, x[:3], x[3:], form="cosine"),
    "orbit": lambda model, x: losses.orbit(
        model, x[:3], [lambda x: x * 1.1, lambda x: -x], readout=lw.all_outputs
    ),
    "along": lambda model, x: losses.along(model, x, lambda x: x.sin()),
    "density": lambda model, x: losses.density(model, x, _total(model), q=0.3, samples=10),
}


def _total(model):
    p = sum(q.numel() for q in model.parameters())
    d = list(model.parameters())[-1].numel()
    return torch.randn(d, p, dtype=DOUBLE, generator=torch.Generator().manual_seed(3)) / p**0.5 * 10


def example(name, d, n=6, seed=0):
    torch.manual_seed(seed)
    model, shape = NETS[name](d)
    return model.double(), torch.randn(n, *shape, dtype=DOUBLE)


def similarities(model, x, readout=None, labels=None):
    """k^C of all pairs from explicit gradients."""
    rows = oracle.jacobians(model, x, readout, labels)
    roots = torch.stack([oracle.matrix_power(row @ row.T, -0.5) for row in rows])
    s = roots @ rows
    return torch.einsum("ndp,mdp->nm", s, s) / s.shape[1]


@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("term", TERMS)
def test_gradients_are_those_of_finite_differences(term, name, d):
    model, x = example(name, d)
    parameters = dict(model.named_parameters())

    value = TERMS[term](model, x)
    found = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
    generator = torch.Generator().manual_seed(1)
    steps = [torch.randn(p.shape, dtype=DOUBLE, generator=generator) for p in parameters.values()]
    slope = sum((g * s).sum() for g, s in zip(found, steps, strict=True) if g is not None)
    values = []
    for eps in (1e-5, -1e-5):
        with torch.no_grad():
            for p, s in zip(parameters.values(), steps, strict=True):
                p += eps * s
        values.append(TERMS[term](model, x).detach())
        with torch.no_grad():
            for p, s in zip(parameters.values(), steps, strict=True):
                p -= eps * s
    quotient = (values[0] - values[1]) / 2e-5
    torch.testing.assert_close(slope, quotient, rtol=1e-5, atol=1e-7)
    assert value.dim() == 0 and value.requires_grad


@pytest.mark.parametrize("readout", [lw.all_outputs, lw.projected_outputs(1, seed=3)])
def test_gradcheck_of_the_set_term(readout):
    model, x = example("mlp", 2, n=4)
    names = list(dict(model.named_parameters()))

    def term(*values):
        other = _with(model, dict(zip(names, values, strict=True)))
        return losses.group(other, x, readout=readout)

    assert torch.autograd.gradcheck(term, tuple(model.parameters()), atol=1e-6, fast_mode=True)


def _with(model, values):
    """The same model with these parameters, which need be no leaves."""
    import copy

    other = copy.deepcopy(model)
    for name, value in values.items():
        *path, last = name.split(".")
        module = other.get_submodule(".".join(path))
        delattr(module, last)
        value = value if isinstance(value, nn.Parameter) else nn.Parameter(value)
        setattr(module, last, value)
    return other


@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize("name", NETS)
def test_values_are_those_of_explicit_similarities(name, d):
    model, x = example(name, d)
    k = similarities(model, x)
    groups = torch.tensor([0, 0, 1, 1, 1, 2])
    inside = [k[0, 1], (k[2, 3] + k[2, 4] + k[3, 4]) / 3]
    close = torch.testing.assert_close
    close(losses.group(model, x, groups, readout=lw.all_outputs), 1 - sum(inside) / 2, rtol=0, atol=1e-10)
    off = (k.sum() - k.diagonal().sum()) / 30
    close(losses.group(model, x, readout=lw.all_outputs), 1 - off, rtol=0, atol=1e-10)
    pairs = losses.pair(model, x[:3], x[3:], readout=lw.all_outputs)
    close(pairs, -k[[0, 1, 2], [3, 4, 5]].mean(), rtol=0, atol=1e-10)
    every = torch.cat([x[:3], 2 * x[:3]])
    doubled = similarities(model, every)[[0, 1, 2], [3, 4, 5]].mean()
    found = losses.orbit(model, x[:3], [lambda x: 2 * x], readout=lw.all_outputs)
    close(found, 1 - doubled, rtol=0, atol=1e-10)


class Bags(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(9, 4, **options), nn.Linear(4, 2)
        self.weights = nn.Parameter(torch.rand(5)) if options["mode"] == "sum" else None

    def forward(self, x):
        shares = None if self.weights is None else self.weights.expand(x.shape)
        return self.head(self.bag(x, per_sample_weights=shares).tanh())


@pytest.mark.parametrize("padding", [None, 2, -1])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_of_embeddings_can_be_differentiated_twice(mode, padding):
    torch.manual_seed(0)
    model, x = Bags(mode=mode, padding_idx=padding).double(), torch.randint(9, (6, 5))
    x[0] = 2  # nothing but padding, or one word
    groups = torch.arange(6) % 2
    wanted = similarities(model, x[1:])
    found = losses.group(model, x[1:], readout=lw.all_outputs)
    assert (found - (1 - (wanted.sum() - wanted.trace()) / 20)).abs() < 1e-9

    def loss():
        return (
            losses.group(model, x, groups, readout=lw.label_against_rest, labels=groups)
            + losses.pair(model, x[:3], x[3:], readout=lw.all_outputs)
            + losses.two_batches(model, x[:3], x[3:], form="cosine")
        )

    loss().backward()
    for value in model.parameters():
        direction = torch.randn_like(value)
        ends = []
        for step in (1e-5, -2e-5):
            value.data.add_(step * direction)
            ends.append(float(loss().detach()))
        value.data.add_(1e-5 * direction)
        expected = (ends[0] - ends[1]) / 2e-5
        assert abs(float((value.grad * direction).sum()) - expected) < 1e-5 * max(1, abs(expected))


@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize("name", NETS)
def test_two_batches_is_the_papers_formula(name, d):
    model, x = example(name, d)
    first, second = (oracle.jacobians(model, part).mean(0).flatten() for part in (x[:3], x[3:]))
    ratio = 3 * (first - second).square().sum() / (first.norm() * second.norm())
    torch.testing.assert_close(losses.two_batches(model, x[:3], x[3:]), ratio, rtol=1e-10, atol=0)
    cosine = 1 - first @ second / (first.norm() * second.norm())
    found = losses.two_batches(model, x[:3], x[3:], form="cosine")
    torch.testing.assert_close(found, cosine, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize("name", NETS)
def test_along_is_the_limit_of_its_difference_quotient(name, d):
    model, x = example(name, d)
    e = torch.randn_like(x)
    rows = [oracle.jacobians(model, x + eps * e) for eps in (1e-5, -1e-5)]
    quotient = ((rows[0] - rows[1]) / 2e-5).square().sum((1, 2)).mean()
    torch.testing.assert_close(losses.along(model, x, e), quotient, rtol=1e-6, atol=0)


@pytest.mark.parametrize("d", [1, 3])
def test_density_is_that_of_the_statistic(d):
    model, x = example("conv", d, n=12)
    gram = lw.GramMatrix(model, x)
    eye = torch.eye(d, dtype=DOUBLE)
    total = gram.products().vjp(lambda where: eye.expand(len(where), -1, -1))
    expected = (lw.soft_neighbors(gram) / 12 - 0.4).square().sum()
    torch.testing.assert_close(losses.density(model, x, total, q=0.4, samples=12), expected)
    running = losses.RunningTotal()
    chosen = losses.density(model, x, total[:1], q=0.4, samples=12, readout=lw.one_output(0))
    named = losses.density(lw.Network(model, lw.one_output(0)), x, total[:1], q=0.4, samples=12)
    assert torch.equal(chosen, named)
    found = losses.density(model, x, running, q=0.4)  # the first batch is all that is known
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(running.mean, total / 12)


def test_readouts_and_parameters_are_chosen():
    model, x = example("conv", 3)
    y = torch.arange(6) % 3
    k = similarities(model, x, lw.label_against_rest, y)
    off = (k.sum() - k.diagonal().sum()) / 30
    found = losses.group(model, x, None, y, readout=lw.label_against_rest)
    torch.testing.assert_close(found, 1 - off, rtol=0, atol=1e-10)
    net = lw.Network(model, parameters=["8.*"])
    part = 1 - (lw.similarity(net, x).sum() - 6) / 30
    for found in (losses.group(model, x, parameters=["8.*"], readout=lw.all_outputs), losses.group(net, x)):
        torch.testing.assert_close(found, part.double(), rtol=0, atol=1e-9)
    found.backward()
    assert model[0].weight.grad.abs().sum() > 0  # the similarity in the head depends on all below it


@pytest.mark.parametrize("term", TERMS)
def test_weights_scale_and_repel(term, monkeypatch):
    model, x = example("mlp", 1)
    plain = TERMS[term](model, x)
    name = {"cosine": "two_batches"}.get(term, term)
    monkeypatch.setattr(losses, name, functools.partial(getattr(losses, name), weight=-2))
    torch.testing.assert_close(TERMS[term](model, x), -2 * plain)


@pytest.mark.parametrize("name", NETS)
def test_the_model_is_left_as_it_was(name):
    model, x = example(name, 2)
    model.train()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    before = torch.random.get_rng_state()
    for term in TERMS.values():
        term(model, x)
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(before, torch.random.get_rng_state())


def test_outputs_come_with_the_term():
    model, x = example("mlp", 3)
    y = torch.arange(6) % 3
    term, logits = losses.group_with_outputs(model, x, y, labels=y, readout=lw.label_against_rest)
    torch.testing.assert_close(logits, model(x))
    halves, of_halves = losses.two_batches_with_outputs(model, x[:3], x[3:])
    assert torch.equal(halves, losses.two_batches(model, x[:3], x[3:]))
    torch.testing.assert_close(torch.cat(of_halves), model(x))
    shared = torch.autograd.grad(term + nn.functional.cross_entropy(logits, y), list(model.parameters()))
    alone = losses.group(model, x, y, labels=y, readout=lw.label_against_rest)
    apart = torch.autograd.grad(alone + nn.functional.cross_entropy(model(x), y), list(model.parameters()))
    for a, b in zip(shared, apart, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("d", [1, 2])
def test_tiny_and_huge_gradients_give_no_nan(d):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, d, bias=False))
    x = torch.randn(6, 3)
    for bad in (0.0, 1e30, float("nan"), float("inf")):
        x[1] = bad
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            terms = [
                losses.group(model, x),
                losses.pair(model, x[:3], x[3:]),
                losses.orbit(model, x, [lambda x: 2 * x]),
                losses.density(model, x, losses.RunningTotal(), q=0.5),
            ]
            if bad == 0:
                terms.append(losses.two_batches(model, x[:3], x[3:]))
        for term in terms:
            assert term.isfinite(), bad
            for g in torch.autograd.grad(term, list(model.parameters()), allow_unused=True):
                assert g is None or g.isfinite().all(), bad
    with pytest.raises(ValueError, match="No sample of the batch"):
        losses.group(model, torch.full((3, 3), float("nan")))


def test_mean_gradients_that_vanish_give_zero():
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 1, bias=False))
    x = torch.zeros(4, 3)
    for form in ("ratio", "cosine"):
        term = losses.two_batches(model, x, x, form=form)
        assert term == 0
        term.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_pure_relu_still_trains():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1)).double()
    x = torch.randn(8, 4, dtype=DOUBLE)
    losses.group(model, x).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert model[0].weight.grad.abs().sum() > 0


def test_models_that_cannot_be_followed_are_exact_too():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x):
            return torch.stack([self.a(one) if one.sum() > 0 else self.b(one).tanh() for one in x])

    torch.manual_seed(0)
    model, x = Branching().double(), torch.randn(5, 3, dtype=DOUBLE)
    k = similarities(model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = losses.group(model, x, readout=lw.all_outputs)
    torch.testing.assert_close(found, 1 - (k.sum() - 5) / 20, rtol=0, atol=1e-10)


class Experts(nn.Module):
    """Two experts, of which one may get no sample of a batch."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(2)
        )

    def forward(self, x):
        found = x.new_zeros(len(x), 2)
        for expert, chosen in zip(self.experts, (x[:, 0] > 0, x[:, 0] <= 0), strict=True):
            at = chosen.nonzero()[:, 0]
            found = found.index_add(0, at, expert(x[at]))
        return found


@pytest.mark.parametrize("which", ["one", "the other", "both"])
def test_experts_without_a_sample_do_no_harm(which):
    torch.manual_seed(0)
    model, x = Experts().double(), torch.randn(8, 3, dtype=DOUBLE)
    if which != "both":
        x[:, 0] = x[:, 0].abs() * (1 if which == "one" else -1)
    k = similarities(model, x)
    found = losses.group(model, x, readout=lw.all_outputs)
    torch.testing.assert_close(found, 1 - (k.sum() - 8) / 56, rtol=0, atol=1e-10)
    found.backward()


def test_an_error_in_following_a_model_leaves_exact_terms(monkeypatch):
    def fail(*given):
        raise RuntimeError("no rule for this")

    model, x = example("mlp", 2)
    k = similarities(model, x)
    monkeypatch.setattr("likewise.engines.differentiable.TRACE_FUNCTIONS", [fail])
    with pytest.warns(UserWarning, match="no rule for this.*exact but slow"):
        found = losses.group(model, x, readout=lw.all_outputs)
    torch.testing.assert_close(found, 1 - (k.sum() - 6) / 30, rtol=0, atol=1e-10)


def test_bad_groups_and_directions_are_refused():
    model, x = example("mlp", 1)
    with pytest.raises(ValueError, match="groups must have an entry for each of 6"):
        losses.group(model, x, torch.zeros(3))
    with pytest.raises(ValueError, match="shape of the inputs"):
        losses.along(model, x, torch.zeros(6, 2, dtype=DOUBLE))
    with pytest.raises(ValueError, match="at least one transform"):
        losses.orbit(model, x, [])
    with pytest.raises(ValueError, match="samples=N"):
        losses.density(model, x, torch.zeros(1, 3), q=0.5)
    assert losses.group(model, x, torch.arange(6)) == 1  # no pair


def digits():
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images[:60], dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels[:60])


@pytest.mark.parametrize("kind", ["group", "pair", "two_batches", "cosine", "orbit"])
def test_minimizing_a_term_does_what_it_says(kind):
    torch.manual_seed(0)
    x, y = digits()
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    options = {"readout": lw.label_against_rest}
    flipped = x.flip(3)

    def term(sign):
        if kind == "group":
            return losses.group(net, x, y, y, weight=sign, **options)
        if kind == "pair":
            return losses.pair(net, x, flipped, y, weight=sign, **options)
        if kind == "orbit":
            return losses.orbit(net, x, [lambda x: x.flip(3)], y, weight=sign, **options)
        form = "cosine" if kind == "cosine" else "ratio"
        return losses.two_batches(net, x, flipped, y, y, form=form, weight=sign, **options)

    def similarity():
        if kind == "group":
            return float(1 - losses.group(net, x, y, y, **options))
        if kind in ("pair", "orbit"):
            return float(-losses.pair(net, x, flipped, y, **options))
        return float(1 - losses.two_batches(net, x, flipped, y, y, form="cosine", **options))

    def trained(sign, steps):
        optimizer = torch.optim.Adam(net.parameters(), 3e-3)
        for _ in range(steps):
            optimizer.zero_grad()
            term(sign).backward()
            optimizer.step()
        return similarity()

    start = similarity()
    risen = trained(1, 250)
    assert risen > 0.95 and risen > start
    fallen = trained(-1, 40)
    assert fallen < risen - 0.05


def test_density_and_along_fall_when_minimized():
    torch.manual_seed(0)
    x, _ = digits()
    for make in (
        lambda net: losses.density(net, x, losses.RunningTotal(decay=0), q=0.5) / len(x),
        lambda net: losses.along(net, x, losses.directions.rotation),
    ):
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 1))
        optimizer = torch.optim.Adam(net.parameters(), 3e-3)
        start = float(make(net))
        for _ in range(60):
            optimizer.zero_grad()
            make(net).backward()
            optimizer.step()
        assert float(make(net)) < 0.5 * start


def test_directions_are_small_motions():
    y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    y, x = y.double() - 7.5, x.double() - 7.5
    blob = lambda a, b: torch.exp(-((x - a) ** 2 + 2 * (y - b) ** 2) / 40)  # noqa: E731
    eps, inner = 1e-4, (slice(2, -2), slice(2, -2))
    image, d = blob(1, 2), losses.directions
    c, s = torch.tensor(eps, dtype=DOUBLE).cos(), torch.tensor(eps, dtype=DOUBLE).sin()
    turned_x, turned_y = c * x + s * y, -s * x + c * y  # where each pixel comes from, turned clockwise
    f = lambda a, b: torch.exp(-((a - 1) ** 2 + 2 * (b - 2) ** 2) / 40)  # noqa: E731
    for moved, direction in [
        (blob(1 + eps, 2), d.translation(image)),
        (blob(1, 2 + eps), d.translation(image, right=0, down=1)),
        (f(turned_x, turned_y), d.rotation(image)),
        (f(x / (1 + eps), y / (1 + eps)), d.scaling(image)),
        ((1 + eps) * image, d.intensity(image)),
    ]:
        found, right = direction[inner], ((moved - image) / eps)[inner]
        assert (found - right).abs().max() < 0.05 * right.abs().max()


def test_the_sampler_draws_sparse_regions_first():
    density = torch.tensor([5.0, 1.0, 3.0, 2.0, 4.0])
    assert list(losses.DensitySampler(density, temperature=0)) == [1, 3, 2, 4, 0]
    sampler = losses.DensitySampler(torch.cat([torch.ones(50), 10 * torch.ones(50)]), temperature=0.5)
    first, second = list(sampler), list(sampler)
    assert sorted(first) == list(range(100)) and first != second
    assert sum(i < 50 for i in first[:50]) > 35
    assert list(losses.DensitySampler(sampler.density)) == first
    loader = torch.utils.data.DataLoader(
        torch.arange(5), sampler=losses.DensitySampler(density, temperature=0)
    )
    assert [int(b) for b in loader] == [1, 3, 2, 4, 0]
    with pytest.raises(ValueError, match="finite"):
        losses.DensitySampler(torch.tensor([1.0, float("nan")]))


def test_batch_norms_in_training_are_warned_of_once():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), torch.randn(6, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses.group(model.eval(), x)
    model.train()
    with pytest.warns(UserWarning, match="update_bn"):
        losses.group(model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses.group(model, x)


def test_terms_return_one_tensor_and_refuse_options_by_place():
    model, x = example("mlp", 2)
    for term in TERMS.values():
        assert isinstance(term(model, x), torch.Tensor)
    assert isinstance(losses.group_with_outputs(model, x), losses.TermAndOutputs)
    with pytest.raises(TypeError, match="outputs"):
        losses.group(model, x, outputs=True)
    for call in (
        lambda: losses.group(model, x, None, None, lw.all_outputs),
        lambda: losses.density(model, x, losses.RunningTotal(), None, 0.5),
        lambda: losses.DensitySampler(torch.ones(3), 0.5),
        lambda: losses.directions.translation(torch.ones(1, 3, 3), 1, 0),
    ):
        with pytest.raises(TypeError, match="positional"):
            call()


def test_two_batches_sees_frozen_parameters_and_leaves_buffers_alone():
    model, x = example("norm", 1)
    first, second = (oracle.jacobians(model, part).mean(0)[0, :30] for part in (x[:3], x[3:]))
    model[0].weight.requires_grad_(False)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.warns(UserWarning, match="running statistics"):
        found = losses.two_batches(model.train(), x[:3], x[3:], parameters=["0.weight"], form="cosine")
    torch.testing.assert_close(found, 1 - torch.cosine_similarity(first, second, dim=0))
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())


@pytest.mark.parametrize("name", ["functional", "samplers", "cuda_graph"])
def test_examples_in_docstrings_run(name):
    found = doctest.testmod(importlib.import_module(f"likewise.losses.{name}"))
    assert found.attempted and not found.failed


GROUPS = torch.tensor([0, 0, 1, 1, 1, 2])


def combined(jacobians, v):
    """The set term of vᵀf from explicit gradients."""
    rows = torch.einsum("ndp,d->np", jacobians, v)
    k = torch.cosine_similarity(rows[:, None], rows, dim=2)
    return 1 - (k[0, 1] + (k[2, 3] + k[2, 4] + k[3, 4]) / 3) / 2


def directions_on_the_sphere(draws, d):
    v = torch.randn(draws, d, dtype=DOUBLE, generator=torch.Generator().manual_seed(5))
    return v / v.norm(dim=1, keepdim=True)


def test_the_mean_over_draws_is_the_mean_over_all_combinations_of_outputs():
    model, x = example("mlp", 3)
    generator = torch.Generator().manual_seed(0)
    found = torch.stack([losses.group(model, x, GROUPS, generator=generator).detach() for _ in range(200)])
    jacobians = oracle.jacobians(model, x)
    wanted = torch.stack([combined(jacobians, v) for v in directions_on_the_sphere(3000, 3)])
    error = (found.var() / len(found) + wanted.var() / len(wanted)).sqrt()
    assert found.std() > 10 * error  # which tells apart what differs by a tenth of the spread
    assert (found.mean() - wanted.mean()).abs() < 4 * error


def test_the_mean_over_draws_is_that_of_all_outputs_where_these_are_orthogonal_and_alike():
    class Heads(nn.Module):  # outputs with parameters of their own, of equal gradients
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(1, 4, dtype=DOUBLE).repeat(3, 1))
            self.scale = nn.Parameter(torch.ones(3, dtype=DOUBLE))

        def forward(self, x):
            return (x @ self.weight.T).tanh() * self.scale

    torch.manual_seed(0)
    model, x = Heads(), torch.randn(6, 4, dtype=DOUBLE)
    every = losses.group(model, x, GROUPS, readout=lw.all_outputs)
    for _ in range(3):  # K is a multiple of the identity for all pairs: each draw is exact
        torch.testing.assert_close(losses.group(model, x, GROUPS), every)


@pytest.mark.parametrize("name", ["pair", "group", "orbit"])
def test_combinations_are_new_at_each_call_and_follow_the_seed(name):
    model, x = example("mlp", 3)
    term = {
        "pair": lambda **options: losses.pair(model, x[:3], x[3:], **options),
        "group": lambda **options: losses.group(model, x, GROUPS, **options),
        "orbit": lambda **options: losses.orbit(model, x, torch.sin, **options),
    }[name]
    torch.manual_seed(7)
    first, second = term(), term()
    assert first != second
    torch.manual_seed(7)
    assert term() == first and term() == second
    state = torch.get_rng_state()
    one, two = (torch.Generator().manual_seed(3) for _ in range(2))
    assert term(generator=one) == term(generator=two) != term(generator=one)
    assert torch.equal(state, torch.get_rng_state())


def test_one_output_needs_no_choice_and_a_fixed_combination_is_a_readout():
    model, x = example("conv", 1)
    every = losses.group(model, x, GROUPS, readout=lw.all_outputs)
    torch.testing.assert_close(losses.group(model, x, GROUPS), every, rtol=0, atol=1e-14)
    model, x = example("conv", 3)
    v = lw.projected_outputs(1, seed=2)(torch.eye(3, dtype=DOUBLE))[:, 0]
    found = losses.group(model, x, GROUPS, readout=lw.projected_outputs(1, seed=2))
    torch.testing.assert_close(found, combined(oracle.jacobians(model, x), v))


def test_draws_do_not_pile_up_traces():
    model, x = example("mlp", 3)
    traces = importlib.import_module("likewise.engines.differentiable")._traces
    for _ in range(3):
        losses.group(model, x, GROUPS)
    assert len(traces[model]) == 1


def test_a_generator_beside_a_readout_is_refused():
    model, x = example("mlp", 3)
    for call in (
        lambda: losses.group(model, x, readout=lw.all_outputs, generator=torch.Generator()),
        lambda: losses.group(lw.Network(model), x, generator=torch.Generator()),
    ):
        with pytest.raises(ValueError, match="leave out the generator"):
            call()
    with pytest.raises(TypeError, match=r"torch\.Generator"):
        losses.group(model, x, generator=3)
    with pytest.raises(ValueError, match="A Network has its"):
        losses.group(lw.Network(model), x, readout=lw.all_outputs)


def test_many_outputs_are_combined_by_default():
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 12))
    x = torch.randn(8, 3)
    with pytest.warns(lw.ReadoutNotice, match="12 outputs a sample: gradients of 8 random combinations"):
        losses.two_batches(model, x[:4], x[4:])  # once for the model
    for term in (
        lambda **options: losses.two_batches(model, x[:4], x[4:], **options),
        lambda **options: losses.density(model, x, losses.RunningTotal(0.5), q=0.5, **options),
        lambda **options: losses.along(model, x, torch.ones_like(x), **options),
    ):
        found = term()
        assert torch.equal(found, term(readout=lw.projected_outputs(8)))
        assert not torch.allclose(found, term(readout=lw.all_outputs))
