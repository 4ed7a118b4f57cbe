"""Memory is counted before it is taken, and max_memory is kept."""

import gc
import weakref

import pytest
import torch
from torch import nn

import likewise as lw
import likewise.model as model_module
from likewise.data import Samples, batches
from likewise.engines import MemoryMeter, TracedEngine, default_max_memory, memory, selection, validation
from likewise.engines.memory import MemoryLimitError, free_bytes, freeze_objects
from likewise.engines.tracer import repeat_samples, trace_model


class CountBackward(torch.autograd.Function):
    """The identity, which counts the backward passes through it."""

    @staticmethod
    def forward(ctx, x, counter):
        ctx.counter = counter
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.counter.n += 1
        return gradient, None


class Counter:
    n = 0


class Counted(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.first, self.last, self.passes = nn.Linear(6, 5), nn.Linear(5, d), Counter()

    def forward(self, x):
        return self.last(CountBackward.apply(torch.tanh(self.first(x)), self.passes))


def conv_net(d):
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3, stride=2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(6 * 9, d)), torch.randn(2, 2, 8, 8)


def wide_net(d):
    return nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, d)), torch.randn(2, 20)


def token_net(d):
    embedding = nn.Embedding(30, 16)
    layers = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.Sequential(embedding, layers, nn.Flatten(), nn.Linear(16 * 6, d)), torch.randint(0, 30, (2, 6))


@pytest.mark.parametrize("d", [8, 40])
@pytest.mark.parametrize("make", [conv_net, wide_net, token_net])
def test_counted_bytes_are_those_measured(make, d):
    torch.manual_seed(0)
    model, x = make(d)
    net = lw.Network(model.eval(), lw.all_outputs)
    samples = batches(x).samples(range(2))
    with net.evaluation_mode():
        trace = trace_model(net, samples)
        few, pair = selection.with_combined_outputs(net, d, 2), repeat_samples(samples[:1], 2)
        counted = selection._try_gradients(few, trace, pair).count_bytes(d)
        _ = net.parameters
        with MemoryMeter() as meter:
            TracedEngine(net, trace, 2).self_kernel(repeat_samples(samples[:1], 2))
    assert meter.peak <= 2 * counted <= 2.5 * meter.peak


def test_many_outputs_take_few_passes_before_the_first_number():
    model = Counted(3000)
    gram = lw.GramMatrix(lw.Network(model, lw.all_outputs), torch.randn(4, 6), max_memory=2**40)
    with pytest.warns(UserWarning, match="3,000 outputs take 3,000 backward passes"):
        assert gram.engine.name == "layers"
    assert 0 < model.passes.n < 100


def test_an_error_names_the_outputs_that_fit():
    model, x = Counted(200_000), torch.randn(5, 6)
    with pytest.warns(UserWarning, match="200,000 outputs"), pytest.raises(MemoryLimitError) as caught:
        lw.soft_neighbors(lw.GramMatrix(lw.Network(model, lw.all_outputs), x, max_memory=2**29))
    assert model.passes.n < 100
    assert caught.value.outputs in {2**i for i in range(18)}
    assert f"likewise.projected_outputs({caught.value.outputs})" in str(caught.value)
    few = lw.Network(model, lw.projected_outputs(caught.value.outputs))
    assert lw.GramMatrix(few, x, max_memory=2**29).engine.name == "layers"


class Sorts(nn.Module):
    """Sorts samples by a value, and puts their outputs back in order."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        order = x[:, 0].argsort()
        return torch.tanh(self.layer(x[order]))[order.argsort()]


@pytest.mark.parametrize("sign", [1, -1])
def test_a_large_model_is_checked_in_brief(monkeypatch, sign):
    monkeypatch.setattr(validation, "LARGE", 0)
    x = sign * torch.arange(18.0).view(6, 3)
    assert lw.GramMatrix(nn.Linear(3, 2), x).engine.name == "layers"
    gram = lw.GramMatrix(Sorts(), x)
    monkeypatch.undo()
    expected = lw.GramMatrix(gram.net, x, engine="autograd").dense()
    assert torch.allclose(gram.dense(), expected, atol=1e-5)  # by rows, or by the reference


class Adapted(nn.Module):
    """A frozen base with a small layer that is trained."""

    def __init__(self, base):
        super().__init__()
        self.base, self.adapter = base.requires_grad_(False), nn.Linear(8, 2)

    def forward(self, x):
        return self.adapter(self.base(x))


def test_frozen_parameters_are_not_copied():
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(8, 2000), nn.ReLU(), nn.Linear(2000, 2000), nn.ReLU(), nn.Linear(2000, 8))
    size = sum(value.nbytes for value in base.parameters())
    gram = lw.GramMatrix(Adapted(base), torch.randn(6, 8))
    with MemoryMeter() as meter:
        lw.soft_neighbors(gram)
        lw.nearest(gram, 2)
    assert meter.peak < 0.1 * size


class Writes(nn.Module):
    """Writes to a frozen parameter in forward, by itself or inside of a function."""

    def __init__(self, inside):
        super().__init__()
        self.inside, self.table, self.last = (
            inside,
            nn.Parameter(3 * torch.rand(5, 4), False),
            nn.Linear(4, 2),
        )

    def forward(self, x):
        if self.inside:
            return self.last(nn.functional.embedding(x, self.table, max_norm=1.0))
        with torch.no_grad():
            self.table.clamp_(max=1)
        return self.last(self.table[x])


@pytest.mark.parametrize("shared_bytes", [0, 2**20])
@pytest.mark.parametrize("inside", [True, False])
def test_a_parameter_that_forward_writes_to_is_copied(inside, shared_bytes, monkeypatch):
    monkeypatch.setattr(model_module, "SHARED_BYTES", shared_bytes)
    model, x = Writes(inside), torch.arange(5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = lw.GramMatrix(model, x).dense()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model(x)  # once written to, the next forward writes the same
    assert torch.allclose(lw.GramMatrix(model, x, engine="autograd").dense(), found, atol=1e-6)


class WritesLater(Writes):
    def forward(self, x):
        if x.max() == 4:
            with torch.no_grad():
                self.table.add_(1)
        return self.last(self.table[x])


def test_a_large_parameter_that_is_written_to_later_is_an_error(monkeypatch):
    monkeypatch.setattr(model_module, "SHARED_BYTES", 0)
    with pytest.raises(RuntimeError, match="wrote to its parameter table"):
        lw.GramMatrix(WritesLater(False), lw.batches(torch.tensor([0, 1, 2, 3, 0, 1, 2, 4]), 4)).dense()


def test_default_is_half_of_what_is_free(monkeypatch):
    assert 2**20 < free_bytes(torch.device("cpu")) < 2**50
    monkeypatch.setattr(memory, "free_bytes", lambda device: 5 * 2**30)
    assert default_max_memory(torch.device("cpu")) == 2**31
    assert lw.GramMatrix(nn.Linear(2, 1), torch.randn(3, 2)).max_memory == 2**31


def test_a_container_limits_what_is_free(monkeypatch):
    files = {
        "/proc/meminfo": ["MemTotal: 9000000 kB", "MemAvailable: 8000000 kB"],
        "/sys/fs/cgroup/memory.max": ["1000000000"],
        "/sys/fs/cgroup/memory.current": ["400000000"],
    }
    monkeypatch.setattr(memory, "_read_lines", lambda path: files.get(path, []))
    assert free_bytes(torch.device("cpu")) == 600_000_000
    files["/sys/fs/cgroup/memory.max"] = ["max"]
    assert free_bytes(torch.device("cpu")) == 8_192_000_000


def test_a_small_parameter_that_is_written_to_later_is_as_before():
    model = WritesLater(False)
    before = model.table.clone()
    with pytest.raises(ValueError, match="depend on the other samples"):  # as what it wrote shows
        lw.GramMatrix(model, lw.batches(torch.tensor([0, 1, 2, 3, 0, 1, 2, 4]), 4)).row_sums()
    assert torch.equal(model.table, before)


def test_one_sample_may_take_more_than_half_of_the_memory():
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 4)),
        torch.randn(4, 3, 8, 8),
    )
    whole = lw.GramMatrix(lw.Network(model, lw.all_outputs), x, max_memory=2**30)
    need = whole.engine.memory.fixed_bytes + whole.engine.memory.bytes_per_sample
    few = lw.GramMatrix(whole.net, x, max_memory=int(1.3 * need))
    assert few.engine.batch_size == 1
    assert (few.dense() - whole.dense()).abs().max() < 1e-5
    with pytest.raises(MemoryError, match="allow max_memory="):
        _ = lw.GramMatrix(whole.net, x, max_memory=int(0.9 * need)).engine


class Growing(torch.utils.data.Dataset):
    """Images that are larger from the 65th on."""

    def __len__(self):
        return 192

    def __getitem__(self, i):
        return torch.randn(3, *[8 if i < 64 else 24] * 2, generator=torch.Generator().manual_seed(i)), i % 4


@pytest.mark.parametrize("statistic", [lw.soft_neighbors, lambda gram: lw.nearest(gram, 3, sketch=64)])
def test_batches_of_larger_samples_than_the_first_are_smaller(statistic):
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.Tanh(), nn.Conv2d(16, 16, 3, padding=1), nn.Tanh()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 4))
    loader = torch.utils.data.DataLoader(Growing(), batch_size=64)
    gram = lw.GramMatrix(lw.Network(model, lw.label_against_rest), lw.batches(loader), max_memory=2**23)
    assert gram.engine.name == "layers"
    with MemoryMeter() as meter:
        statistic(gram)
    assert meter.peak < 2**23
    with gram.net.evaluation_mode():
        assert 1 <= gram.engine.fitting(32, gram.data.samples(range(64, 66))) < 32 // 4


class LongerTexts(torch.utils.data.Dataset):
    """Texts that are four times as long from the 33rd on."""

    def __len__(self):
        return 96

    def __getitem__(self, i):
        tokens = 64 if i < 32 else 256
        return torch.randint(0, 30, (tokens,), generator=torch.Generator().manual_seed(i)), i % 2


STATISTICS = {
    "soft neighbors": lw.soft_neighbors,
    "all pairs": lambda gram: gram.dense(),
    "sketches": lambda gram: lw.nearest(gram, 3, sketch=64),
}


@pytest.mark.parametrize("statistic", STATISTICS)
def test_batches_of_longer_texts_are_smaller_by_what_attention_takes(statistic):
    """That is 16 times as much of texts four times as long: peaks were 1.2 to 1.4 times max_memory."""
    torch.manual_seed(0)
    model = Tokens(8, 4).eval()
    loader = torch.utils.data.DataLoader(LongerTexts(), batch_size=32)
    gram = lw.GramMatrix(lw.Network(model, lw.label_against_rest), lw.batches(loader), max_memory=2**24)
    assert gram.engine.name == "layers"
    with MemoryMeter() as meter:
        STATISTICS[statistic](gram)
    assert meter.peak < 2**24


def test_larger_samples_are_measured_once_for_all_of_about_their_size(monkeypatch):
    measured, measure = [], TracedEngine._measure
    monkeypatch.setattr(TracedEngine, "_measure", lambda e, s: measured.append(s) or measure(e, s))
    gram = lw.GramMatrix(Tokens(8, 4).eval(), torch.randint(0, 30, (4, 8)))
    engine = gram.engine
    with gram.net.evaluation_mode():
        for length in (8, 4, 40, 36, 33, 40, 20, 41):
            tokens, ids = torch.randint(0, 30, (2, length)), torch.arange(2)
            assert (engine.fitting(64, Samples(tokens, None, ids)) < 64) == (length > 8)
    assert [samples.inputs.shape for samples in measured] == [(1, 40), (1, 20), (1, 41)]


def test_few_samples_of_which_later_ones_are_larger_do_not_come_in_one_batch():
    """Of one data loader's batch, padded to the largest; the engine is selected by the first three."""
    images = [torch.randn(3, *[8 if i < 4 else 64] * 2) for i in range(16)]

    def pad_all(some):
        most = max(image.shape[1] for image in some)
        return torch.stack([nn.functional.pad(image, (0, most - image.shape[1]) * 2) for image in some])

    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    loader = torch.utils.data.DataLoader(images, batch_size=16, collate_fn=pad_all)
    gram = lw.GramMatrix(nn.Sequential(*layers, nn.Linear(64, 1)), lw.batches(loader), max_memory=2**22)
    with MemoryMeter() as meter:
        gram.dense()
    assert meter.peak < 2**22


def test_gradients_alone_come_in_larger_batches_than_sums_over_parameters():
    """Of many parameters and short samples, sums in float64 take most of max_memory."""
    model = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 64), nn.Flatten(), nn.Linear(64, 1))
    data = batches(torch.randn(64, 1, 64), 64)
    p = sum(parameter.numel() for parameter in model.parameters())
    engine = lw.GramMatrix(lw.Network(model), data, max_memory=2 * (33 * p)).engine
    assert isinstance(engine, TracedEngine)
    assert engine.batch_size < engine.gradient_batch_size
    fixed, each = engine.memory.fixed_bytes, engine.memory.bytes_per_sample
    assert fixed + engine.batch_size * each <= 33 * p
    assert 16 * p + engine.gradient_batch_size * each <= 33 * p


@pytest.mark.parametrize(
    ("n", "most", "size"), [(16, 14, 8), (16, 16, 16), (16, 100, 16), (7, 3, 3), (1, 5, 1)]
)
def test_parts_are_of_about_one_size(n, most, size):
    assert memory.equal_size(n, most) == size


@pytest.mark.parametrize("budget", [3, 8, 16, 64])  # MiB
@pytest.mark.parametrize(("n", "channels"), [(24, 16), (60, 16), (150, 4)])
def test_all_pairs_of_several_outputs_keep_to_a_small_budget(n, channels, budget):
    """Layer by layer, gradients of whole batches had all entries of linear layers: 3.3 times the budget."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(channels, 2 * channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(2 * channels * 64, 10)).eval()
    x, limit = torch.randn(n, 3, 32, 32), budget * 2**20
    gram = lw.GramMatrix(lw.Network(model, lw.all_outputs), x, max_memory=limit)
    try:
        _ = gram.engine
    except MemoryLimitError as error:
        assert error.enough > limit and budget == 3
        return
    with MemoryMeter() as meter:
        found = gram.dense()
    assert meter.peak <= 1.1 * limit
    few = torch.arange(0, n, 7)
    exact = lw.GramMatrix(gram.net, x[few], max_memory=2**30).dense()
    assert (found[few][:, few] - exact).abs().max() < 1e-4


def test_a_chunk_of_gradients_is_free_before_the_next_is_computed():
    torch.manual_seed(0)
    model, x = conv_net(8)[0].eval(), torch.randn(40, 2, 8, 8)
    net = lw.Network(model, lw.all_outputs)
    samples = batches(x, size=40).samples(range(40))
    peaks = []
    with net.evaluation_mode():
        trace = trace_model(net, samples[:2])
        for count in (10, 40):
            engine = TracedEngine(net, trace, 10)
            with MemoryMeter() as meter:
                engine.self_kernel(samples[:count])
            peaks.append(meter.peak)
    assert peaks[1] < 1.2 * peaks[0]


USES = {
    "self kernels": lambda e, s: e.self_kernel(s),
    "rows": lambda e, s: e.rows(s, -0.5),
    "features": lambda e, s: e.features(s, -0.5),
    "vjp": lambda e, s: e.vjp(s, torch.ones(12, 3, 1, dtype=torch.float64), -0.5),
    "jvp": lambda e, s: e.jvp(s, torch.ones(1, sum(e._numel.values()), dtype=torch.float64), -0.5),
    "parts": lambda e, s: e.map_parts(s, lambda parts: (parts.factors_gram,), None),
    "by parameter": lambda e, s: e.map_by_parameter(
        s, e._numel, lambda named: (named["3.weight"].self_gram(),), None
    ),
    "of some parameters": lambda e, s: e.parameter_features(s, ("0.weight", "3.weight")),
}


@pytest.mark.parametrize("use", USES)
def test_the_gradients_of_one_chunk_are_gone_before_the_next_is_computed(use, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 3)).eval()
    gram = lw.GramMatrix(lw.Network(model, lw.all_outputs), lw.batches(torch.randn(12, 3, 8, 8), size=12))
    engine, compute, references, alive = gram.engine, TracedEngine.gradients, [], []
    engine._size = engine._gradient_size = 4

    def gradients(self, samples, names=None):
        alive.append(sum(reference() is not None for reference in references))
        batch = compute(self, samples, names)
        references.extend(map(weakref.ref, batch.by_parameter.values()))
        return batch

    engine.feature_entries(gram.data.samples(range(1)), 3)  # looks at gradients of its own
    monkeypatch.setattr(TracedEngine, "gradients", gradients)
    with gram.net.evaluation_mode():
        USES[use](engine, gram.data.samples(range(12)))
    assert alive == [0, 0, 0]


def strided_net(d):
    layers = [nn.Conv2d(3, 4, 3, padding=1, stride=2), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(4 * 64, d)), torch.randn(60, 3, 16, 16)


class Tokens(nn.Module):
    """Classifies texts of any length by the mean over a transformer's positions."""

    def __init__(self, width, heads):
        super().__init__()
        self.embedding, self.head = nn.Embedding(30, width), nn.Linear(width, 2)
        self.layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0, batch_first=True)

    def forward(self, tokens):
        return self.head(self.layer(self.embedding(tokens)).mean(1))


def long_token_net(d):
    layers = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)
    model = nn.Sequential(nn.Embedding(30, 8), layers, nn.Flatten(), nn.Linear(8 * 32, d))
    return model, torch.randint(0, 30, (24, 32))


@pytest.mark.parametrize(
    ("make", "d", "budget"), [(strided_net, 4, 4), (strided_net, 4, 8), (long_token_net, 1, 3)]
)
def test_products_with_many_columns_of_weights_keep_to_a_small_budget(make, d, budget):
    """Of a jvp, 64 MiB of temporaries were allowed whatever the budget: 1.2 times as much was taken."""
    torch.manual_seed(0)
    model, x = make(d)
    gram = lw.GramMatrix(lw.Network(model.eval(), lw.all_outputs), x, max_memory=budget * 2**20)
    assert gram.engine.name == "layers"
    weights = torch.randn(len(x), 40)
    with MemoryMeter() as meter:
        found = gram @ weights
    assert meter.peak <= 1.1 * gram.max_memory
    exact = lw.GramMatrix(gram.net, x, max_memory=2**30).dense().double() @ weights.double()
    assert (found - exact).abs().max() < 1e-4 * exact.abs().max()


@pytest.mark.parametrize("statistic", [lw.label_suspicion, lw.novelty])
def test_outputs_are_computed_of_as_many_samples_as_fit(statistic):
    """In batches of the data, of 256 samples, activations took 2.2 times max_memory."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 2)).eval()
    data = lw.batches((torch.randn(256, 3, 16, 16), torch.arange(256) % 2), size=256)
    gram = lw.GramMatrix(lw.Network(model, lw.all_outputs), data, max_memory=2**22)
    assert gram.engine.batch_size < 32
    with MemoryMeter() as meter:
        statistic(gram)
    assert meter.peak <= 1.1 * gram.max_memory


RANDOM = {
    "soft neighbors": lw.soft_neighbors,
    "product": lambda gram: gram @ torch.ones(gram.data.n, 24),
    "uncertainty": lw.uncertainty,
    "nearest": lambda gram: lw.nearest(gram, 3),
    "sketches": lambda gram: lw.nearest(gram, 3, sketch=64),
    "label suspicion": lw.label_suspicion,
    "novelty": lw.novelty,
}


def random_net(draw):
    """A small network of any kind, and inputs of any size."""

    def one_of(*values):
        return values[int(torch.randint(len(values), (), generator=draw))]

    d, n, c, side = one_of(1, 2, 4), one_of(40, 200), one_of(4, 16), one_of(8, 16)
    conv = [nn.Conv2d(3, c, 3, padding=1), nn.ReLU(), nn.Conv2d(c, 8, 3, stride=2, padding=1), nn.Tanh()]
    wide = [nn.Flatten(), nn.Linear(3 * side**2, 4 * c), nn.Tanh(), nn.Linear(4 * c, d)]
    pooled = [*conv, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, d)]
    flat = [*conv, nn.Flatten(), nn.Linear(2 * side**2, d)]
    return nn.Sequential(*one_of(wide, pooled, flat)).eval(), torch.randn(n, 3, side, side), n


@pytest.mark.parametrize("seed", [1, 2, 4, 7])
def test_any_budget_is_kept_or_refused(seed):
    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(seed)
    model, x, n = random_net(draw)
    budget = int(2 ** (20 + 3 * torch.rand((), generator=draw)))  # 1 to 8 MiB
    net, data = lw.Network(model, lw.all_outputs), lw.batches((x, torch.arange(n) % 2), size=256)
    for name, statistic in RANDOM.items():
        gram = lw.GramMatrix(net, data, max_memory=budget)
        try:
            _ = gram.engine
        except MemoryLimitError as error:
            assert error.enough > budget
            assert lw.GramMatrix(net, data, max_memory=error.enough).engine.name == "layers"
            continue
        with MemoryMeter() as meter:
            found = statistic(gram)
            kept = meter.now
        assert meter.peak - kept <= 1.1 * budget, name
        del found


class Cycle:
    """Garbage that only a collection finds."""

    def __init__(self):
        self.me = self


def test_frozen_objects_are_collected_after_it_and_new_ones_inside():
    before = weakref.ref(Cycle())
    with pytest.raises(ValueError), freeze_objects():
        inside = weakref.ref(Cycle())
        gc.collect()
        assert before() is not None and inside() is None
        raise ValueError
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert before() is None


def test_what_the_caller_has_frozen_stays_frozen():
    gc.freeze()
    try:
        with freeze_objects():
            count = gc.get_freeze_count()
        assert gc.get_freeze_count() == count > 0
    finally:
        gc.unfreeze()


def test_a_run_leaves_nothing_frozen(tmp_path):
    found = []
    x, y = torch.randn(30, 4), torch.arange(30) % 3
    lw.analyze(
        nn.Linear(4, 3), (x, y), out=tmp_path, show=lambda i: found.append(gc.get_freeze_count()) or "text"
    )
    assert min(found) > 0 and gc.get_freeze_count() == 0
