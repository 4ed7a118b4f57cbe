"""Gradients that one pass retains for the next give the numbers of gradients that are computed again."""

import gc
import weakref

import pytest
import torch
from torch import nn

import likewise as lw
import nets
from likewise.data import batches
from likewise.engines import MemoryMeter, TracedEngine, retained
from likewise.engines.factors import DenseGradient, FactoredGradient
from likewise.engines.gradient_batch import GradientBatch
from likewise.engines.retained import RetainedGradients
from likewise.gram import products
from likewise.statistics.denoising import row_squares
from simulated_graphs import simulate_graphs


@pytest.fixture(autouse=True)
def _small_tensors(monkeypatch):
    monkeypatch.setattr(retained, "LEAST_BYTES", 0)


class CountedCalls:
    """Counts the samples of all forward passes of a model."""

    def __init__(self, model):
        self.samples = 0
        model.register_forward_pre_hook(self._count)

    def _count(self, _, inputs):
        self.samples += len(inputs[0])


def two_passes(gram, weights, max_bytes):
    """Return Σ S(x)ᵀ w(x) and S(x) of it, by batches of 4, and how many gradients the second pass found."""
    engine, found = gram.engine, 0
    with gram.net.evaluation_mode(), engine.retain(max_bytes, gram.data.n):
        total = sum(engine.vjp(s, weights[s.ids], -0.5).total for s in gram.data)
        if engine._retained is not None:
            found = sum(engine._retained.get(s) is not None for s in gram.data)
        return total, torch.cat([engine.jvp(s, total, -0.5).outputs for s in gram.data]), found


@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize("make", list(nets.SHAPES), ids=lambda m: m.__name__)
def test_retained_gradients_give_the_same_products(make, d):
    model, x = nets.case(make, d, 13)
    gram = lw.GramMatrix(lw.Network(model, lw.all_outputs), batches(x, 4), engine="layers")
    weights = torch.randn(13, d, 2, dtype=torch.float64)
    expected = two_passes(gram, weights, 0)
    found = two_passes(gram, weights, 2**30)
    assert (expected[2], found[2]) == (0, len(gram.data))
    for value, ours in zip(expected[:2], found[:2], strict=True):
        torch.testing.assert_close(ours, value, rtol=1e-9, atol=1e-12)
    assert gram.engine._retained is None


def test_batches_of_small_tensors_are_computed_again(monkeypatch):
    model, x = nets.case(nets.conv, 2, 13)
    gram = lw.GramMatrix(lw.Network(model, lw.all_outputs), batches(x, 4), engine="layers")
    weights = torch.randn(13, 2, 1, dtype=torch.float64)
    assert two_passes(gram, weights, 2**30)[2] == len(gram.data)
    monkeypatch.setattr(retained, "LEAST_BYTES", 2**12)
    assert two_passes(gram, weights, 2**30)[2] == 0


def test_what_does_not_fit_is_computed_again():
    model, x = nets.case(nets.conv, 2, 24)
    gram = lw.GramMatrix(lw.Network(model, lw.all_outputs), batches(x, 4), engine="layers")
    weights = torch.randn(24, 2, 1, dtype=torch.float64)
    expected = two_passes(gram, weights, 0)
    counts = set()
    for max_bytes in (2**12, 2**14, 2**18):
        found = two_passes(gram, weights, max_bytes)
        counts.add(found[2])
        torch.testing.assert_close(found[1], expected[1], rtol=1e-9, atol=1e-12)
    assert {0, len(gram.data)} < counts  # none, all, and some


STATISTICS = {
    "soft neighbors": lambda g: lw.soft_neighbors(g),
    "product": lambda g: g @ torch.linspace(-1, 1, g.data.n, dtype=torch.float64),
    "uncertainty": lambda g: lw.uncertainty(g),
    "denoising": lambda g: row_squares(g, torch.eye(g.d, dtype=torch.float64).expand(61, -1, -1), 8, 0).sums,
    "class similarity": lambda g: lw.class_similarity(g).mean,
    "centered": lambda g: lw.soft_neighbors(
        lw.GramMatrix(g.net, g.data, centered=True, max_memory=g.max_memory)
    ),
}


def convolutional():
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(8 * 9, 4)).eval()


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("statistic", STATISTICS)
def test_statistics_read_most_samples_once(statistic, recorded, monkeypatch):
    torch.manual_seed(0)
    model, x, y = convolutional(), torch.randn(61, 3, 8, 8), torch.arange(61) % 4
    calls = CountedCalls(model)

    def matrix():
        net = lw.Network(model, lw.projected_outputs(3))
        return lw.GramMatrix(net, lw.batches((x, y), size=8), max_memory=2**28)

    def measure():
        gram = matrix()
        assert gram.engine.name == "layers"
        calls.samples = 0
        return STATISTICS[statistic](gram), calls.samples

    expected, before = measure()
    monkeypatch.setattr(products, "RETAINING_DEVICES", {"cpu"})
    if recorded:
        with simulate_graphs(monkeypatch):
            found, _ = measure()
    else:
        found, after = measure()
        assert after < 0.75 * before
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_wrong_retained_gradients_are_noticed(monkeypatch):
    monkeypatch.setattr(products, "RETAINING_DEVICES", {"cpu"})
    torch.manual_seed(0)
    model, x = convolutional(), torch.randn(64, 3, 8, 8)
    gram = lw.GramMatrix(lw.Network(model, lw.one_output(0)), batches(x, 8), max_memory=2**28)
    expected = lw.soft_neighbors(gram)
    get = RetainedGradients.get

    def get_overwritten(self, samples):
        found = get(self, samples)
        if found is not None:
            found.by_parameter["6.weight"].deltas.mul_(1.5)
        return found

    monkeypatch.setattr(RetainedGradients, "get", get_overwritten)
    with pytest.raises(lw.GradientMismatchError):
        lw.soft_neighbors(gram)
    monkeypatch.undo()
    torch.testing.assert_close(lw.soft_neighbors(gram), expected, rtol=1e-6, atol=0)


def test_max_memory_holds_with_retained_gradients(monkeypatch):
    torch.manual_seed(0)
    model, x = convolutional(), torch.randn(400, 3, 8, 8)
    monkeypatch.setattr(products, "RETAINING_DEVICES", {"cpu"})
    for max_memory in (2**22, 2**23, 2**24):
        gram = lw.GramMatrix(lw.Network(model, lw.one_output(0)), batches(x, 8), max_memory=max_memory)
        lw.soft_neighbors(gram)
        with MemoryMeter() as meter:
            lw.soft_neighbors(gram)
        assert meter.peak < max_memory


@pytest.mark.parametrize("statistic", STATISTICS)
def test_where_few_gradients_would_fit_batches_are_larger(statistic, monkeypatch):
    torch.manual_seed(0)
    model, x, sizes = convolutional(), torch.randn(1200, 3, 8, 8), []
    every = {name: None for name in STATISTICS} | {
        "denoising": lambda g: (
            row_squares(g, torch.eye(g.d, dtype=torch.float64).expand(1200, -1, -1), 8, 0).sums
        )
    }
    run = every[statistic] or STATISTICS[statistic]

    def matrix():
        net = lw.Network(model, lw.label_against_rest)
        return lw.GramMatrix(net, lw.batches((x, torch.arange(1200) % 4), size=512), max_memory=2**22)

    expected, small = run(matrix()), matrix().engine.batch_size
    monkeypatch.setattr(products, "RETAINING_DEVICES", {"cpu"})
    model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    gram = matrix()
    assert gram.engine.name == "layers"
    with MemoryMeter() as meter:
        found = run(gram)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert max(sizes) > 1.2 * small and meter.peak < 2**22
    assert gram.engine.batch_size == small


@pytest.mark.parametrize("max_memory", [2**22, 2**24])
def test_a_plan_knows_larger_batches_and_retained_gradients(max_memory, monkeypatch):
    """It told the batch of a CPU, and a quarter or half of the memory."""
    torch.manual_seed(0)
    model, x, loaded = convolutional(), torch.randn(1200, 3, 8, 8), []
    monkeypatch.setattr(products, "RETAINING_DEVICES", {"cpu"})
    gram = lw.GramMatrix(lw.Network(model, lw.one_output(0)), x, max_memory=max_memory)
    plan = gram.plan(lw.soft_neighbors)
    vjp = TracedEngine.vjp
    monkeypatch.setattr(TracedEngine, "vjp", lambda e, s, *rest: loaded.append(len(s)) or vjp(e, s, *rest))
    with MemoryMeter() as meter:
        lw.soft_neighbors(gram)
    assert plan.batch == max(loaded)
    assert 0.9 * meter.peak < plan.peak_bytes < min(1.6 * meter.peak, 1.01 * max_memory)


def test_only_copies_are_kept():
    samples, inputs = lw.batches(torch.randn(4, 2), size=4)[0], torch.randn(4, 5, 6)
    gradient = FactoredGradient(inputs, torch.randn(4, 1, 5, 3))
    kept, reference = RetainedGradients(2**20, 4, {}), weakref.ref(inputs)
    gc.disable()  # a reference cycle would hold a batch until it is collected
    try:
        kept.keep(samples, GradientBatch(samples, 1, {"a": gradient}))
        del gradient, inputs
        assert reference() is None
    finally:
        gc.enable()


def test_weights_changed_between_statistics_are_seen(monkeypatch):
    monkeypatch.setattr(products, "RETAINING_DEVICES", {"cpu"})
    torch.manual_seed(0)
    model, x = convolutional(), torch.randn(24, 3, 8, 8)
    gram = lw.GramMatrix(model, batches(x, 8), max_memory=2**28)
    lw.soft_neighbors(gram)
    with torch.no_grad():
        model[0].weight.mul_(2)
    again = lw.soft_neighbors(gram)
    assert torch.equal(again, lw.soft_neighbors(lw.GramMatrix(model, batches(x, 8), max_memory=2**28)))


def test_repeated_entries_and_shared_tensors_take_their_memory_once():
    samples = lw.batches(torch.randn(4, 2), size=4)[0]
    inputs, row = torch.randn(4, 5, 6), torch.randn(4, 1, 1, 3)
    transposed = torch.randn(4, 6, 5).mT
    gradients = GradientBatch(
        samples,
        1,
        {
            "a": FactoredGradient(inputs, row.expand(4, 1, 5, 3)),
            "b": FactoredGradient(inputs, row.expand(4, 1, 5, 3), inputs_first=True),
            "c": FactoredGradient(transposed, row.expand(4, 1, 5, 3)),
            "d": DenseGradient(torch.randn(4, 1, 7)),
        },
    )
    kept = RetainedGradients(2**20, 4, {})
    kept.keep(samples, gradients)
    assert len(kept._left) == 0
    assert kept._left.untyped_storage().nbytes() == 4 * 512  # two of inputs, one row, one dense gradient
    found = kept.get(samples)
    for name, gradient in gradients.by_parameter.items():
        assert torch.equal(found.by_parameter[name].rows(), gradient.rows())
    assert found.by_parameter["c"].inputs.stride() == transposed.stride()


def test_gradients_of_larger_samples_than_the_first_are_found_in_the_batches_in_which_they_were_kept():
    model, x = nets.case(nets.conv, 1, 8)
    gram = lw.GramMatrix(model, batches(x, 8), engine="layers")
    engine, samples = gram.engine, gram.data.samples(range(8))
    engine.memory = engine.memory._replace(entries_per_sample=x[0].numel() // 2)
    with gram.net.evaluation_mode():
        engine._size, engine._larger = 8, {x[0].numel(): 2 * engine.memory.bytes_per_sample + 1}
        names = tuple(engine.matrices(samples))
        kept = RetainedGradients(2**30, 8, gram.net.parameters, least_bytes=0, names=names)
        expected = engine.parameter_features(samples, names, kept).rows
        assert len(kept._batches) == 3
        found = engine.retained_features(samples.ids, names, kept)
        assert found is not None
        assert torch.equal(found.rows, expected)
        assert engine.retained_features(torch.arange(1, 5), names, kept) is None
