"""Defects that were found once, each with the case that showed it."""

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset

import likewise as lw

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))


class Caching(nn.Module):
    """Keeps a tensor computed from its weights in the first call."""

    def __init__(self):
        super().__init__()
        self.v, self.w = nn.Parameter(torch.randn(2, 3)), None

    def forward(self, x):
        if self.w is None:
            self.w = self.v / self.v.norm(dim=1, keepdim=True)
        return x @ self.w.T


@pytest.mark.parametrize("engine", ["autograd", "layers"])
def test_tensors_kept_between_calls_carry_no_old_gradients(engine):
    model = Caching()
    gram = lw.GramMatrix(model, lw.batches(X, 2), kernel=lw.INNER_PRODUCT, engine=engine)
    once = lw.GramMatrix(model, lw.batches(X, 12), kernel=lw.INNER_PRODUCT, engine="autograd")
    assert torch.allclose(gram.diagonal(), once.diagonal(), rtol=1e-4)
    assert (gram.diagonal() > 0).all() and model.w is None


def test_what_overrides_train_is_not_set_off():
    class Merging(nn.Linear):
        merged = 0

        def train(self, mode=True):
            if not mode:
                self.merged += 1
                self.weight.data += 1
            return super().train(mode)

    model = Merging(3, 2)
    before = model.weight.clone()
    lw.similarity(model, X)
    assert torch.equal(model.weight, before) and model.merged == 0 and model.training


def test_neither_parameters_nor_data_are_written_to():
    embedding = nn.Sequential(nn.Embedding(9, 4, max_norm=0.1), nn.Flatten(), nn.Linear(8, 1))
    for frozen in (False, True):
        embedding[0].weight.requires_grad_(not frozen)
        before, ids = embedding[0].weight.detach().clone(), torch.randint(0, 9, (5, 2))
        lw.soft_neighbors(lw.GramMatrix(embedding, ids))
        assert torch.equal(embedding[0].weight, before)
    data = X.clone()
    lw.similarity(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2)), data)
    assert torch.equal(data, X)


def test_containers_and_buffers_that_forward_fills_are_emptied_again():
    class Logging(nn.Linear):
        def __init__(self):
            super().__init__(3, 2)
            self.log, self.memory = [], {}

        def forward(self, x):
            self.log.append(x)
            self.memory["x"] = x
            self.register_buffer("cache", torch.zeros(2))
            return super().forward(x)

    model = Logging()
    lw.similarity(model, X)
    assert model.log == [] and model.memory == {} and "cache" not in dict(model.named_buffers())


@pytest.mark.parametrize("engine", ["autograd", "layers"])
def test_normalization_does_not_lose_float32(engine):
    class Parallel(nn.Module):
        """Two outputs that are nearly the same."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(3, 1), nn.Linear(3, 1)

        def forward(self, x):
            a = self.a(x)
            return torch.cat([a, a + 1e-2 * self.b(x)], 1)

    found = lw.similarity(Parallel(), X, kernel=lw.INFLUENCE, engine=engine)
    exact = lw.similarity(Parallel().double(), X, kernel=lw.INFLUENCE, engine=engine)
    assert (found - exact).abs().max() < 1e-4 * exact.abs().max()


@pytest.mark.parametrize("scale", [1e-15, 1e15])
def test_tiny_and_huge_gradients_give_the_ratios_of_ordinary_ones(scale):
    class Scaled(nn.Module):
        def __init__(self, scale):
            super().__init__()
            torch.manual_seed(0)
            self.out, self.scale = nn.Linear(3, 2), scale

        def forward(self, x):
            return self.out(x) * self.scale

    plain, scaled = (lw.GramMatrix(Scaled(s), X) for s in (1.0, scale))
    labels = torch.randn(12)
    assert torch.allclose(lw.uncertainty(scaled), lw.uncertainty(plain), rtol=1e-4)
    assert torch.allclose(lw.disturbance(scaled), lw.disturbance(plain), rtol=1e-4)
    assert torch.allclose(lw.soft_neighbors(scaled), lw.soft_neighbors(plain), rtol=1e-4)
    for exact in (True, False):
        found, expected = (lw.denoising(g, exact=exact).factor for g in (scaled, plain))
        assert torch.allclose(found, expected, rtol=1e-3)
    found, expected = (lw.fit_quality(g, labels).label_variance for g in (scaled, plain))
    assert torch.allclose(found, expected, rtol=1e-3)


def test_label_variance_does_not_drown_in_the_mean():
    gram, labels = lw.GramMatrix(nn.Linear(3, 1), X), torch.randn(12, dtype=torch.float64)
    plain, far = (lw.fit_quality(gram, labels + offset).label_variance for offset in (0, 1e5))
    assert torch.allclose(plain, far, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_denoising_of_outputs_that_cannot_move_independently(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4), nn.LogSoftmax(1)).to(dtype)
    gram = lw.GramMatrix(model, X)
    found, exact = lw.denoising(gram), lw.denoising(gram, exact=True)
    assert torch.allclose(found.factor, exact.factor, rtol=0.05)
    assert (exact.factor >= exact.floor * 0.99).all()
    assert (exact.shift.norm(dim=1) <= exact.bound).all()
    alike = lw.denoising(lw.GramMatrix(model, X[:1].expand(4, 3)), exact=True)
    assert torch.allclose(alike.factor, torch.full((4,), 0.5, dtype=dtype), rtol=1e-3)
    assert alike.shift.abs().max() < 1e-5


def test_loaders_keep_their_semantics_or_are_refused():
    data = TensorDataset(X)
    assert lw.batches(DataLoader(data, 5, drop_last=True)).n == 10
    assert lw.batches(DataLoader(data, batch_size=None)).n == 12
    for sampler in (BatchSampler(RandomSampler(data), 4, False), [[9, 8], [1]]):
        with pytest.raises(ValueError, match="batch_sampler"):
            lw.batches(DataLoader(data, batch_sampler=sampler))


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


def test_sparse_gradients():
    ids = torch.randint(0, 9, (5, 2))
    for engine in ("autograd", "layers"):
        torch.manual_seed(0)
        sparse = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 1))
        found = lw.similarity(sparse, ids, engine=engine)
        sparse[0].sparse = False
        assert torch.allclose(found, lw.similarity(sparse, ids, engine=engine), atol=1e-6)


def test_draws_of_different_seeds_are_independent():
    from likewise.readouts import _scrambled

    ids = torch.arange(20_000)
    for rivals in (2, 9, 99):
        first = _scrambled(ids, 0) % rivals
        assert torch.bincount(first).max() < 1.3 * len(ids) / rivals
        for seed in range(1, 5):
            equal = (_scrambled(ids, seed) % rivals == first).double().mean()
            assert abs(equal - 1 / rivals) < 0.02
        pairs = first[:-1] * rivals + first[1:]
        assert len(pairs.unique()) > 0.8 * min(rivals**2, len(ids) * 0.8)


def test_labels_that_are_numbers_or_miss_a_class():
    gram = lw.GramMatrix(nn.Linear(3, 3), X)
    labels = torch.tensor([0, 1] * 6)
    one_hot = nn.functional.one_hot(labels, 3).double()
    found, expected = lw.denoising(gram, labels), lw.denoising(gram, one_hot)
    assert torch.allclose(found.smoothed_label, expected.smoothed_label)
    signs = lw.denoising(gram, 2 * labels - 1)
    assert signs.smoothed_label.shape == (12, 1)
    prices = lw.fit_quality(gram, 300_000 + labels)
    assert abs(prices.total_variance - 0.25) < 1e-9
    with pytest.raises(ValueError, match="class number of 10000000"):
        lw.class_similarity(gram, labels + 10**8)


def test_centered_matrices_follow_the_model_and_are_refused_where_they_mislead():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    gram = lw.GramMatrix(model, X, centered=True)
    gram.dense()
    with torch.no_grad():
        model[0].weight.mul_(3)
    assert torch.allclose(gram.dense(), lw.GramMatrix(model, X, centered=True).dense(), atol=1e-6)
    for statistic in (lw.lipschitz_bound, lambda g: lw.fit_quality(g, torch.randn(12))):
        with pytest.raises(ValueError, match="centered=False"):
            statistic(gram)


def test_autocast_around_a_call_does_not_coarsen_it():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    expected = lw.similarity(model, X)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(lw.similarity(model, X), expected)


def test_thresholds_count_what_equals_them():
    gram = lw.GramMatrix(nn.Linear(3, 2), X[:1].expand(6, 3))
    assert (lw.hard_neighbors(gram, 1.0) == 6).all()
    independent = lw.GramMatrix(nn.Linear(4, 1, bias=False).double(), torch.eye(4).double())
    assert (lw.hard_neighbors(independent, 0.0) == 4).all()  # k = 0 counts at τ = 0


def test_isolated_and_unreliable_are_found():
    model = nn.Linear(4, 1, bias=False).double()
    x = torch.cat([torch.eye(4)[:1].repeat(9, 1) + 0.01 * torch.rand(9, 4), torch.eye(4)[3:]]).double()
    found = lw.label_suspicion(lw.GramMatrix(model, x), torch.zeros(10).long())
    assert found.isolated.tolist() == [False] * 9 + [True]
    opposed = torch.tensor([[1.0, 0, 0, 0], [-0.9, 0.1, 0, 0], [0, 0, 1, 0]]).double()
    denoised = lw.denoising(lw.GramMatrix(model, opposed), exact=True)
    assert denoised.unreliable.tolist() == [True, True, False]
    assert denoised.factor[0] > 1 and denoised.negative_share[0] > 0.3


def test_verdicts():
    alone = lw.GramMatrix(nn.Linear(12, 1, bias=False), torch.eye(12))
    assert lw.fit_quality(alone, torch.randn(12)).verdict == "overfit"
    crowd = lw.GramMatrix(nn.Linear(3, 1), 0.01 * X)
    assert lw.fit_quality(crowd, torch.randn(12)).verdict == "underfit"
    assert lw.fit_quality(crowd, torch.ones(12)).verdict == "fit"


def test_sampled_bound_is_of_the_size_of_the_exact_one():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    gram = lw.GramMatrix(model, torch.randn(300, 3, dtype=torch.float64))
    ratio = lw.denoising(gram, draws=60).bound / lw.denoising(gram, exact=True).bound
    assert 0.7 < ratio.min() and ratio.max() < 1.4


def test_reductions_that_lose_the_rows_are_refused():
    gram = lw.GramMatrix(nn.Linear(3, 2), X)
    with pytest.raises(ValueError, match="keeps the rows"):
        gram.over_rows(lambda k: k.sum())
    with pytest.raises(ValueError, match="no single row sum"):
        gram.with_kernel(lw.Kernel(0, 0, lw.whole_block)).row_sums()


def test_a_bare_linear_layer_has_a_bound():
    assert lw.lipschitz_bound(lw.GramMatrix(nn.Linear(3, 2), X)).isfinite().all()


def test_batches_bound_the_activations_of_pairs():
    sizes = []

    class Watched(nn.Linear):
        def forward(self, x):
            sizes.append(len(x))
            return super().forward(x)

    lw.GramMatrix(Watched(3, 2), lw.batches(X, 4)).dense()
    assert max(sizes) <= 4


def test_no_pass_starts_inside_another():
    gram = lw.GramMatrix(nn.Linear(3, 2), X)
    with pytest.raises(RuntimeError, match="inside another"):
        gram.over_rows(lambda k: lw.soft_neighbors(gram))
    assert lw.soft_neighbors(gram).shape == (12,)  # and nothing is stuck


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


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ([X.numpy(), torch.zeros(12).numpy()], "tuple"),
        ([X, list(range(12))], "tuple"),
        (["a", "b"], "tokenize"),
        ("data.csv", "read it first"),
        (None, "read it first"),
        (list(DataLoader(TensorDataset(X, torch.zeros(12).long()), 4)), "the loader itself"),
    ],
)
def test_what_is_no_data_set_is_said(data, text):
    with pytest.raises(TypeError, match=text):
        lw.batches(data)
