"""Wrong gradients are noticed before the first number and in every later pass; right ones raise no alarm."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import likewise as lw
from likewise.data import Samples
from likewise.engines import TracedEngine, differentiable_gradients, factors, pass_check, rules, validation
from likewise.engines.comparison import find_mismatch


class Tokens(nn.Module):
    """BatchNorm2d, then positions as tokens: its output gradient has transposed strides."""

    def __init__(self):
        super().__init__()
        self.conv, self.batch_norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 2)
        self.batch_norm.running_var.uniform_(0.5, 1.5)

    def forward(self, x):
        tokens = self.batch_norm(self.conv(x)).flatten(2).transpose(1, 2)
        return self.out(torch.tanh(self.norm(tokens))).mean(1)


def jacobians(model, x):
    """(n, d, p) by autograd on two copies of each sample, which PyTorch gets right."""
    values = list(model.parameters())
    rows = []
    for sample in x:
        outputs = model(torch.stack([sample, sample]))[0]
        found = [
            torch.autograd.grad(output, values, retain_graph=True, materialize_grads=True, allow_unused=True)
            for output in outputs
        ]
        rows.append(torch.stack([torch.cat([g.flatten() for g in one]) for one in found]))
    return torch.stack(rows)


def expected_kernel(model, x):
    rows = jacobians(model, x).flatten(1)
    return rows @ rows.T / len(model(x[:2])[0])


def assert_right(model, x, size, **options):
    gram = lw.GramMatrix(model, lw.batches(x, size), kernel=lw.INNER_PRODUCT, **options)
    expected = expected_kernel(model, x)
    torch.testing.assert_close(gram.dense(), expected)
    torch.testing.assert_close(gram.row_sums(), expected.sum(1))
    return gram


@pytest.mark.xfail(strict=True, reason="PyTorch 2.13, CPU: see docs/upstream.md; when mended, ask it again")
def test_torch_differentiates_batch_norm_in_a_batch_of_one():
    conv, batch_norm, norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8).eval(), nn.LayerNorm(8)
    image = torch.randn(1, 3, 6, 6)

    def gradient(x):
        tokens = norm(batch_norm(conv(x)).flatten(2).transpose(1, 2))
        return torch.autograd.grad(tokens[0].tanh().sum(), conv.weight)[0]

    torch.testing.assert_close(gradient(image), gradient(image.repeat(2, 1, 1, 1)))


@pytest.mark.parametrize("engine", ["auto", "autograd"])
@pytest.mark.parametrize("size", [1, 2, 5])  # five samples: the last batch of two has one
@pytest.mark.filterwarnings("error")
def test_batch_norm_before_tokens_is_right_in_any_batches(engine, size):
    model = Tokens().double().eval()
    gram = assert_right(model, torch.randn(5, 3, 6, 6, dtype=torch.float64), size, engine=engine)
    assert isinstance(gram.engine, TracedEngine) == (engine == "auto")


def test_one_by_one_is_right_where_torch_is_wrong_about_one():
    class Branching(Tokens):
        def forward(self, x):
            return super().forward(x) if float(x.sum()) > -1e9 else x.flatten(1)

    model = Branching().double().eval()
    with pytest.warns(UserWarning, match="vmap cannot differentiate"):
        assert_right(model, torch.randn(3, 3, 6, 6, dtype=torch.float64), 2, engine="autograd")


def test_a_training_term_of_one_sample_is_right_where_torch_is_wrong():
    model, x = Tokens().double().eval(), torch.randn(1, 3, 6, 6, dtype=torch.float64)
    found = differentiable_gradients(lw.Network(model), Samples(x, None, torch.arange(1)))
    rows = jacobians(model, x)
    torch.testing.assert_close(found.self_kernel, rows @ rows.mT)
    assert found.returned.shape == (1, 2)


class Regrouping(nn.Module):
    """Linear layers on samples or tokens that were put into another order, and back."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.scale = nn.Parameter(torch.rand(3, 6))

    def inner(self, x):
        return self.b(torch.tanh(self.a(x)))

    def forward(self, x):
        h = self.regrouped(x)
        return self.out(torch.tanh(h if h.dim() == 2 else h.sum(1)))


def length(x):
    return (x.abs().sum(2) > 0).sum(1)


class SortedByValue(Regrouping):
    def regrouped(self, x):
        order = x[:, 0, 0].argsort()
        return self.inner(x[order])[order.argsort()]


class SortedByLength(Regrouping):
    def regrouped(self, x):
        order = length(x).argsort(descending=True, stable=True)
        return self.inner(x[order])[order.argsort()]


class Unpadded(Regrouping):
    def regrouped(self, x):
        mask = x.abs().sum(2) > 0
        return x.new_zeros(*x.shape[:2], 6).index_put((mask,), self.inner(x[mask]))


class ByExpert(Regrouping):
    def regrouped(self, x):
        tokens = x.flatten(0, 1)
        expert = tokens[:, :3].argmax(1)
        order = expert.argsort(stable=True)
        h = self.inner(tokens[order]) * self.scale[expert[order]]
        return h[order.argsort()].unflatten(0, x.shape[:2])


class Backwards(Regrouping):
    def regrouped(self, x):
        return self.inner(x.flip(0)).flip(0)


class Rolled(Regrouping):
    def regrouped(self, x):
        return self.inner(x.roll(1, 0)).roll(-1, 0)


def tokens_in_order(n):
    """Sequences of tokens; the first four are whole, alike, and in the order of their first value."""
    lengths = torch.randint(1, 6, (n,))
    lengths[:4] = 5
    x = torch.randn(n, 5, 4, dtype=torch.float64)
    x[:4] = x[0, 0] + 1e-3 * torch.arange(4)[:, None, None]
    return x * (torch.arange(5) < lengths[:, None])[:, :, None]


@pytest.mark.parametrize("make", [SortedByValue, SortedByLength, Unpadded, ByExpert, Backwards, Rolled])
@pytest.mark.parametrize("known", [4, 12], ids=["unlike anything later", "like some later"])
@pytest.mark.filterwarnings("error")
def test_samples_regrouped_inside_forward_are_right_from_the_first_number(make, known):
    model, x = make().double().eval(), tokens_in_order(12)
    gram = lw.GramMatrix(model, lw.batches(x[:known], 4))
    assert isinstance(gram.engine, TracedEngine)
    assert_right(model, x, 4)


class LateSort(Regrouping):
    """Sorts only samples that have a mark, which nothing in the first ones hints at."""

    def regrouped(self, x):
        order = (x[:, 0] * (x[:, 1] > 10)).argsort(stable=True)
        return self.inner(x[order])[order.argsort()]


class LateDependence(Regrouping):
    def regrouped(self, x):
        h = self.inner(x)
        return h + (x[:, 1:2] > 10) * h.mean(0)


class LateChance(Regrouping):
    def regrouped(self, x):
        h = self.inner(x)
        return h + (x[:, 1:2] > 10) * torch.rand_like(h)


PASSES = {
    "pairs": lambda gram: gram.dense(),
    "products": lambda gram: gram.row_sums(),
    "diagonal": lambda gram: gram.diagonal(),
}


def marked_later():
    x = torch.randn(64, 4, dtype=torch.float64).clamp(-3, 3)
    x[3:, 1] = 11
    for tried in lw.GramMatrix(Regrouping(), lw.batches(x, 16))._setup.few_samples():
        x[tried.ids, 1] = 0
    return x


@pytest.mark.parametrize("how", ["pairs", "products", "diagonal"])
@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (LateSort, lw.GradientMismatchError, 'engine="autograd"'),
        (LateDependence, lw.DependentSampleError, "depend on the other samples"),
        (LateChance, lw.DependentSampleError, "random"),
    ],
)
def test_what_shows_only_in_later_samples_is_refused_in_every_pass(make, error, text, how):
    x = marked_later()
    gram = lw.GramMatrix(make().double().eval(), lw.batches(x, 16), kernel=lw.INNER_PRODUCT)
    assert isinstance(gram.engine, TracedEngine)
    with pytest.raises(error, match=text) as caught:
        PASSES[how](gram)
    assert f"sample {caught.value.id} " in str(caught.value)


@pytest.mark.filterwarnings("ignore:torch.func.vmap cannot")
@pytest.mark.parametrize("make", [LateDependence, LateChance])
def test_the_reference_engine_refuses_dependent_samples_too(make):
    gram = lw.GramMatrix(make().double().eval(), lw.batches(marked_later(), 16), engine="autograd")
    with pytest.raises((lw.DependentSampleError, RuntimeError), match=r"depend on the other|random"):
        gram.dense()


def test_rows_that_samples_cannot_share_evenly_stop_a_pass():
    class LateUnpadding(Regrouping):
        def regrouped(self, x):
            mask = (x[:, :, 1] < 10) | (torch.arange(5) > 0)
            return x.new_zeros(*x.shape[:2], 6).index_put((mask,), self.inner(x[mask]))

    x = torch.randn(64, 5, 4, dtype=torch.float64).clamp(-3, 3)
    gram = lw.GramMatrix(LateUnpadding().double().eval(), lw.batches(x, 16))
    assert isinstance(gram.engine, TracedEngine)
    x[33, 0, 1] = 11
    with pytest.raises(lw.GradientMismatchError, match="79 rows of 16 samples"):
        gram.dense()


class RoundedByBatch(nn.Module):
    """Two units at zero up to rounding, which is another in a batch of one, of two and of more."""

    def __init__(self):
        super().__init__()
        self.a, self.out = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, x):
        n, zero = len(x), torch.zeros(len(x), 6)
        rounding = torch.cat([torch.full((n, 1), n - 1.5), torch.full((n, 1), n - 2.5), zero], 1) * 1e-9
        at_zero = torch.tensor([0.0, 0, 1, 1, 1, 1, 1, 1])
        h = self.a(x)
        return self.out(torch.relu(h - h.detach() * (1 - at_zero) + rounding))


@pytest.mark.filterwarnings("error")
def test_a_relu_that_rounding_moves_is_no_alarm():
    gram = lw.GramMatrix(RoundedByBatch().eval(), lw.batches(torch.randn(12, 3), 4))
    assert isinstance(gram.engine, TracedEngine)
    gram.dense(), gram.row_sums()


class HalfSlope(torch.autograd.Function):
    """w · 1 with half its derivative."""

    @staticmethod
    def forward(ctx, w, x):
        ctx.save_for_backward(x)
        return x @ w

    @staticmethod
    def backward(ctx, delta):
        return ctx.saved_tensors[0].T @ delta / 2, None


@pytest.mark.parametrize("torch_is_right", [True, False])
def test_a_finite_difference_decides_who_is_right(torch_is_right):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 2))

        def forward(self, x):
            return x @ self.w if torch_is_right else HalfSlope.apply(self.w, x)

    net, x, weights = lw.Network(Model()), torch.randn(4, 3), torch.randn(4, 2)
    samples = Samples(x, None, torch.arange(4))
    right = (x.T @ weights).flatten()
    with net.evaluation_mode():
        if torch_is_right:
            assert find_mismatch(net, lambda other: [right.to(other.dtype) / 2], samples, weights) == "w"
        else:
            with pytest.warns(UserWarning, match="PyTorch's own gradient of Model in w is wrong"):
                assert find_mismatch(net, lambda other: [right.to(other.dtype)], samples, weights) is None


def test_a_training_term_follows_convolutions_by_their_operations():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).eval()
    found = differentiable_gradients(
        lw.Network(model), Samples(torch.randn(6, 1, 8, 8), None, torch.arange(6))
    )
    assert found.chunk.outputs is not None  # of one forward pass, not of a sample at a time


class SumsInFloat32(nn.Module):
    """A float64 model that adds in float32, in another order for one sample than for several."""

    def __init__(self, shared=0.0):
        super().__init__()
        self.linear, self.shared = nn.Linear(4, 50, dtype=torch.float64), shared

    def forward(self, x):
        columns = self.linear(x).float().unbind(1)
        total = sum(columns if len(x) > 1 else reversed(columns)).double().unsqueeze(1)
        return total + self.shared * total.mean()


def test_rounding_of_float32_inside_a_float64_model_is_no_dependence_on_other_samples():
    x = torch.randn(6, 4, dtype=torch.float64)
    similarities = lw.GramMatrix(SumsInFloat32(), x).dense()
    expected = torch.nn.functional.normalize(torch.cat([x, torch.ones(6, 1, dtype=torch.float64)], 1))
    torch.testing.assert_close(similarities, expected @ expected.T, rtol=0, atol=1e-6)


def test_dependence_is_refused_also_where_a_float64_model_rounds_to_float32():
    with pytest.raises(ValueError, match="depend on the other samples"):
        lw.GramMatrix(SumsInFloat32(shared=0.01), torch.randn(6, 4, dtype=torch.float64)).dense()


class HalfInside(nn.Module):
    """A float32 model that works in half precision by itself, by autocast or by casts."""

    def __init__(self, dtype, casts):
        super().__init__()
        torch.manual_seed(0)
        self.dtype, self.casts = dtype, casts
        self.a, self.b, self.out = nn.Linear(20, 32), nn.Linear(32, 32), nn.Linear(32, 3)

    def forward(self, x):
        if self.casts:
            h = x.to(self.dtype)
            for layer in (self.a, self.b):
                h = torch.tanh(
                    nn.functional.linear(h, layer.weight.to(self.dtype), layer.bias.to(self.dtype))
                )
        else:
            with torch.autocast("cpu", dtype=self.dtype):
                h = torch.tanh(self.b(torch.tanh(self.a(x))))
        return self.out(h.to(x.dtype))


@pytest.mark.parametrize("engine", ["auto", "autograd"])
@pytest.mark.parametrize("casts", [False, True], ids=["autocast", "casts"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_inside_forward_is_rounding_and_no_fault(dtype, casts, engine):
    model, x = HalfInside(dtype, casts), torch.randn(40, 20, generator=torch.Generator().manual_seed(1))
    exact = HalfInside(torch.float32, casts=True).double()
    exact.dtype = torch.float64
    found = lw.soft_neighbors(lw.GramMatrix(lw.Network(model, lw.all_outputs), x, engine=engine))
    expected = lw.soft_neighbors(lw.GramMatrix(lw.Network(exact, lw.all_outputs), x.double()))
    torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.05)


X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))


class Tasks(nn.Module):
    """One head per task, chosen by the batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.heads = nn.Linear(3, 6), nn.ModuleList([nn.Linear(6, 2), nn.Linear(6, 2)])

    def forward(self, x, task):
        return self.heads[int(task[0])](torch.tanh(self.body(x)))


class Swapped(nn.Module):
    """The same two layers, in an order that depends on the batch but not on its numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x):
        chosen = x[:, :1] > 1
        if chosen.any():
            p, q = self.b(x), self.a(x)
        else:
            q, p = self.a(x), self.b(x)
        return torch.where(chosen, p, q)


class Twice(nn.Module):
    """Works more on batches with an unusual sample."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.out = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        unusual, h = x[:, :1] > 1, self.a(x)
        if unusual.any():
            h = torch.where(unusual, self.a(h), h)
        return self.out(h)


@pytest.mark.parametrize("make", [Tasks, Swapped, Twice])
@pytest.mark.filterwarnings("ignore:.*one sample at a time in some batches")
@pytest.mark.filterwarnings("ignore:torch.func.vmap cannot")
def test_models_that_branch_on_the_batch_are_noticed(make):
    x = X.clone()
    x[:, 0] = torch.tensor([0.0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0])
    data = (x, torch.tensor([0] * 4 + [1] * 8)) if make is Tasks else x
    labels = False if make is Tasks else None
    grams = [
        lw.GramMatrix(make(), lw.batches(data, 4, labels=labels), engine=engine)
        for engine in ("layers", "autograd")
    ]
    for statistic in (lambda g: g.dense(), lw.soft_neighbors, lambda g: g.diagonal(), lw.uncertainty):
        found, expected = (statistic(gram) for gram in grams)
        assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.filterwarnings("ignore:torch.func.vmap cannot")
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_padded_batches_among_full_ones(kind):
    from test_model import tiny_hugging_face

    model = tiny_hugging_face()[kind]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 20, (8, 6), generator=generator)
    readout = lambda outputs, labels: outputs.logits.flatten(1)[:, :2]  # noqa: E731
    for padded in (slice(0, 4), slice(4, 8), slice(5, 6), slice(1, 3)):
        mask = torch.ones(8, 6, dtype=torch.int64)
        mask[padded, 4:] = 0
        data = lw.batches({"input_ids": ids, "attention_mask": mask}, 4)
        found, expected = (
            lw.GramMatrix(lw.Network(model, readout), data, engine=engine)
            for engine in ("layers", "autograd")
        )
        assert torch.allclose(found.dense(), expected.dense(), atol=1e-8)
        assert torch.allclose(lw.soft_neighbors(found), lw.soft_neighbors(expected), atol=1e-8)


def test_lengths_that_differ_from_batch_to_batch():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.e, self.p = nn.Embedding(9, 4), nn.Parameter(torch.randn(1, 10, 4))
            self.w, self.out = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 2)

        def forward(self, ids):
            tokens = self.e(ids) + self.p[:, : ids.shape[1]]
            flat = torch.mm(tokens.view(-1, 4), self.w).tanh()
            return self.out(flat.view(len(ids), -1, 4).mean(1))

    rows = [torch.randint(0, 9, (length,)) for length in (3, 3, 5, 5, 4, 4)]
    data = DataLoader(rows, 2, collate_fn=lambda batch: nn.utils.rnn.pad_sequence(batch, batch_first=True))
    model = Tokens().double()
    found, expected = (lw.GramMatrix(model, data, engine=e, max_memory=2**20) for e in ("layers", "autograd"))
    assert torch.allclose(lw.soft_neighbors(found), lw.soft_neighbors(expected))
    assert torch.allclose(found.diagonal(), expected.diagonal())


def test_recurrent_nets_in_float32_keep_the_fast_engine(recwarn):
    lstm = nn.LSTM(3, 4, batch_first=True)

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = lstm

        def forward(self, x):
            return self.lstm(x)[0][:, -1]

    x = torch.randn(6, 5, 3)
    found = lw.similarity(Last(), x)
    assert not [str(w.message) for w in recwarn]
    assert torch.allclose(found, lw.similarity(Last().double(), x.double()).float(), atol=1e-5)


def test_little_chance_is_still_chance():
    class Whisper(nn.Linear):
        def forward(self, x):
            return nn.functional.dropout(super().forward(x), 0.5) * 1e-4

    with pytest.raises(ValueError, match="random"):
        lw.similarity(Whisper(3, 8), X)

    class Flipped(Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, i):
            return X[i].flip(0) if torch.rand(()) < 0.5 else X[i]

    for seed in range(10):
        torch.manual_seed(seed)
        with pytest.raises(ValueError, match="differs each time"):
            lw.batches(Flipped())


def test_a_large_network_is_called_on_few_samples_before_the_first_number(monkeypatch):
    monkeypatch.setattr(validation, "LARGE", 0)
    called = []

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 2)

        def forward(self, x):
            called.append(len(x))
            return self.last(self.first(x).tanh())

    model, x = Net().double(), torch.randn(2, 4, dtype=torch.float64)
    gram = lw.GramMatrix(model, x)
    gram.engine  # noqa: B018
    assert gram.d == 2
    # the first alone; both by autograd; both, recorded; the other alone, for the trace
    assert called == [1, 2, 2, 1]


def test_similarities_of_two_samples_of_a_large_network_are_those_of_the_gradients_that_were_checked(
    monkeypatch,
):
    monkeypatch.setattr(validation, "LARGE", 0)
    called = []
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    model.register_forward_pre_hook(lambda _, given: called.append(len(given[0])))
    x = torch.randn(2, 4, dtype=torch.float64)
    gram = lw.GramMatrix(lw.Network(model, lw.all_outputs), x)
    first = gram.dense()
    assert called == [1, 2, 2, 1]
    expected = lw.GramMatrix(gram.net, x, engine="autograd").dense()
    assert (first - expected).abs().max() < 1e-12
    called.clear()
    assert (gram.dense() - expected).abs().max() < 1e-12 and called  # nothing was kept for the second time


def test_gradients_that_were_checked_are_not_used_once_weights_have_changed(monkeypatch):
    monkeypatch.setattr(validation, "LARGE", 0)
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double(), torch.randn(2, 4).double()
    gram = lw.GramMatrix(lw.Network(model, lw.all_outputs), x)
    gram.engine  # noqa: B018  the gradients are computed and checked
    with torch.no_grad():
        model[0].weight.mul_(3)
    expected = lw.GramMatrix(gram.net, x, engine="autograd").dense()
    assert (gram.dense() - expected).abs().max() < 1e-12


@pytest.mark.parametrize("n", [2, 6])
@pytest.mark.parametrize("part", ["rows", "vjp", "bias"])
def test_a_wrong_rule_shows_in_two_samples_of_a_large_network(monkeypatch, part, n):
    monkeypatch.setattr(validation, "LARGE", 0)
    right = rules.RULES[torch.nn.functional.linear]

    def wrong(call):
        found = right(call)
        for place, gradient in found.items():
            if part == "bias" and isinstance(gradient, factors.DenseGradient):
                found[place] = factors.DenseGradient(1.1 * gradient.gradients)
        return found

    if part == "bias":
        monkeypatch.setitem(rules.RULES, torch.nn.functional.linear, wrong)
    else:
        name = "_dense" if part == "rows" else "vjp"
        original = getattr(factors.FactoredGradient, name)
        changed = (
            property(lambda self: 1.1 * original.func(self))
            if part == "rows"
            else (lambda self, weights: 1.1 * original(self, weights))
        )
        monkeypatch.setattr(factors.FactoredGradient, name, changed)
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double(), torch.randn(n, 4).double()
    with pytest.warns(UserWarning, match=r"slower reference engine .*0\.(weight|bias)"):
        assert lw.GramMatrix(lw.Network(model, lw.all_outputs), x).engine.name == "dense"


@pytest.mark.parametrize("n", [2, 6])
def test_samples_of_a_large_network_that_depend_on_their_batch_are_refused(monkeypatch, n):
    monkeypatch.setattr(validation, "LARGE", 0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, 3))
    with pytest.raises(ValueError, match="depend on the other samples"):
        lw.similarity(lw.Network(model, lw.all_outputs), torch.randn(n, 4))

    class Second(nn.Module):
        """Adds the mean of the batch to all samples but the first, whichever that is."""

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(torch.cat([x[:1], x[1:] + x.mean(0)]))

    with pytest.raises(ValueError, match="depend on the other samples"):
        lw.similarity(lw.Network(Second(), lw.all_outputs), torch.randn(n, 4))


@pytest.mark.parametrize("how", ["products", "similarity"])
def test_columns_of_a_large_network_are_checked_though_their_ids_are_those_of_rows_verified_before(
    monkeypatch, how
):
    monkeypatch.setattr(validation, "LARGE", 0)
    rows, columns = (torch.randn(2, 4, dtype=torch.float64).clamp(-3, 3) for _ in range(2))
    columns[:, 1] = 11
    model = LateDependence().double().eval()
    with pytest.raises((lw.DependentSampleError, lw.GradientMismatchError)):
        if how == "similarity":
            lw.similarity(model, rows, columns)
        else:
            lw.GramMatrix(model, rows, columns=columns) @ torch.ones(2, dtype=torch.float64)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_samples_verified_before_the_first_pass_are_checked_again_only_with_autocast(monkeypatch, autocast):
    monkeypatch.setattr(validation, "LARGE", 0)
    checked = []
    monkeypatch.setattr(
        pass_check.PassCheck, "_conclude", lambda self, candidate, _: checked.append(candidate)
    )
    net = lw.Network(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), autocast=autocast)
    gram = lw.GramMatrix(net, torch.randn(2, 4))
    gram.diagonal()
    assert len(checked) == (0 if autocast is None else 1)
    gram.diagonal()  # every later pass is checked
    assert len(checked) == (1 if autocast is None else 2)


class Interrupted(torch.utils.data.Dataset):
    """Samples of which reading stops at one, once."""

    def __init__(self, x):
        self.x, self.stops = x, False

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        if self.stops and i == 150:
            self.stops = False
            raise KeyboardInterrupt
        return self.x[i]


@pytest.mark.parametrize("engine", ["layers", "autograd"])
@pytest.mark.parametrize("statistic", [lw.soft_neighbors, lambda gram: gram.dense().sum(1)])
def test_a_pass_that_was_stopped_leaves_nothing_to_check_to_the_next(engine, statistic):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    data = Interrupted(torch.randn(200, 4, dtype=torch.float64))
    gram = lw.GramMatrix(model, lw.batches(data, 16), engine=engine)
    statistic(gram)
    data.stops = True
    with pytest.raises(KeyboardInterrupt):
        statistic(gram)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value))
    expected = statistic(lw.GramMatrix(model, data.x, engine=engine))
    torch.testing.assert_close(statistic(gram), expected)
