"""Chunks that are recorded and replayed have the numbers of chunks that are not, whatever comes in which order."""

import pytest
import torch
from torch import nn

import likewise as lw
from likewise.engines.chunks import ChunkGraphs
from simulated_graphs import simulate_graphs


class Tokens(nn.Module):
    """An embedding whose table is the last layer too, attention, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x):
        hidden = self.block(self.table(x)).mean(1)
        return hidden @ self.table.weight.T


def convolutional():
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(8 * 9, 4))


NETWORKS = {
    "convolutional": (convolutional, lambda n: torch.randn(n, 3, 8, 8)),
    "tokens": (Tokens, lambda n: torch.randint(11, (n, 6))),
}
READOUTS = {"one": lw.label_against_rest, "three": lw.projected_outputs(3)}


def results(model, x, y, readout, tmp_path):
    """Statistics by every operation of the engine, in chunks of 8 of which the last has 5 samples."""
    gram = lw.GramMatrix(lw.Network(model, readout), lw.batches((x, y), size=8))
    index = lw.build_index(gram.net, lw.batches((x, y), size=8), tmp_path, width=64, pictures=False)
    return {
        "sums": lw.soft_neighbors(gram),
        "product": gram @ torch.linspace(-1, 1, len(x), dtype=torch.float64),
        "pairs": gram.dense(),
        "self kernels": gram.self_kernel(),
        "sketched": lw.nearest(gram, 3, sketch=64).similarities,
        "few queries": lw.GramMatrix(gram.net, (x[:1], y[:1]), columns=(x, y)).dense(),
        "index": index.nearest((x[:5], y[:5]), 3).similarities,
    }


@pytest.mark.parametrize("readout", READOUTS)
@pytest.mark.parametrize("name", NETWORKS)
def test_replayed_chunks_have_the_same_numbers(name, readout, monkeypatch, tmp_path):
    torch.manual_seed(0)
    make, draw = NETWORKS[name]
    model, x, y = make().eval(), draw(61), torch.arange(61) % 4
    expected = results(model, x, y, READOUTS[readout], tmp_path / "a")
    with simulate_graphs(monkeypatch) as graphs:
        found = results(model, x, y, READOUTS[readout], tmp_path / "b")
    assert sum(graph.replays for graph in graphs) > 20
    for key, value in expected.items():
        assert (found[key] - value).abs().max() < 1e-5 * value.abs().max(), (
            key
        )  # chunks of other sizes round otherwise


def test_weights_may_change_between_passes(monkeypatch):
    torch.manual_seed(0)
    model, x, y = convolutional().eval(), torch.randn(40, 3, 8, 8), torch.arange(40) % 4
    with simulate_graphs(monkeypatch):
        gram = lw.GramMatrix(model, lw.batches((x, y), size=8))
        before = lw.soft_neighbors(gram)
        with torch.no_grad():
            model[0].weight.mul_(2)
        model[3].weight.data = torch.randn_like(model[3].weight)  # elsewhere in memory
        after = lw.soft_neighbors(gram)
    assert (before - after).abs().max() > 1e-3
    assert torch.equal(after, lw.soft_neighbors(lw.GramMatrix(model, lw.batches((x, y), size=8))))


def test_the_first_chunk_of_a_later_pass_is_recorded(monkeypatch):
    torch.manual_seed(0)
    model, x = convolutional().eval(), torch.randn(50, 3, 8, 8)
    calls = []
    model.register_forward_pre_hook(lambda _, inputs: calls.append(len(inputs[0])))
    with simulate_graphs(monkeypatch):
        gram = lw.GramMatrix(model, lw.batches(x, size=10))
        first = lw.soft_neighbors(gram)
        before = calls.count(10)
        second = lw.soft_neighbors(gram)
        assert calls.count(10) == before + 1  # the recording; checks call the model on fewer samples
    torch.testing.assert_close(second, first, rtol=1e-6, atol=0)


def test_of_two_chunks_the_first_is_called(monkeypatch):
    torch.manual_seed(0)
    model, x = convolutional().eval(), torch.randn(20, 3, 8, 8)
    calls = []
    model.register_forward_pre_hook(lambda _, inputs: calls.append(len(inputs[0])))
    with simulate_graphs(monkeypatch):
        gram = lw.GramMatrix(model, lw.batches(x, size=10))
        for _ in range(3):
            before = calls.count(10)
            lw.soft_neighbors(gram)
    assert calls.count(10) == before + 2  # called, and recorded


def test_samples_of_other_shapes_come_in_between(monkeypatch):
    torch.manual_seed(0)
    pool = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)]
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), *pool)
    images = [torch.randn(6, 1, side, side) for side in (8, 8, 8, 12, 12, 8, 8, 8, 12, 8, 12, 12, 12, 8, 8)]
    net = lw.Network(model, lw.all_outputs)
    batches = [lw.batches(x, size=6)[0] for x in images]
    engine = lw.GramMatrix(net, images[0]).engine
    with net.evaluation_mode():
        expected = [engine.self_kernel(batch).matrix for batch in batches]
    with simulate_graphs(monkeypatch) as graphs:
        engine = lw.GramMatrix(net, images[0]).engine
        with net.evaluation_mode():
            found = [engine.self_kernel(batch).matrix for batch in batches]
    assert graphs and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_layer_by_layer_is_recorded_too(monkeypatch):
    torch.manual_seed(0)
    model, x, y = convolutional().eval(), torch.randn(61, 3, 8, 8), torch.arange(61) % 4

    def gradients():
        net = lw.Network(model, lw.label_against_rest)
        data = lw.batches((x, y), size=8)
        engine = lw.GramMatrix(net, data).engine
        with net.evaluation_mode():
            groups = [("0.weight", "1.weight"), ("3.weight", "6.weight"), ("0.weight", "1.weight")]
            return [engine.parameter_features(batch, names).tensors for names in groups for batch in data]

    expected = gradients()
    with simulate_graphs(monkeypatch) as graphs:
        found = gradients()
    assert sum(graph.replays for graph in graphs) > 10
    for mine, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_what_cannot_be_recorded_is_called(monkeypatch):
    torch.manual_seed(0)
    model, x = convolutional().eval(), torch.randn(40, 3, 8, 8)
    expected = lw.soft_neighbors(lw.GramMatrix(model, lw.batches(x, size=8)))

    def fail(self, function):
        raise RuntimeError("operation not permitted when stream is capturing")

    with simulate_graphs(monkeypatch):
        monkeypatch.setattr(ChunkGraphs, "_record", fail)
        gram = lw.GramMatrix(model, lw.batches(x, size=8))
        assert torch.equal(lw.soft_neighbors(gram), expected)
    assert gram.engine.graphs.problem == "RuntimeError: operation not permitted when stream is capturing"


def test_a_wrong_replay_is_noticed(monkeypatch):
    torch.manual_seed(0)
    model, x = convolutional().eval(), torch.randn(64, 3, 8, 8)
    with simulate_graphs(monkeypatch) as graphs:
        gram = lw.GramMatrix(model, lw.batches(x, size=8))
        lw.soft_neighbors(gram)
        monkeypatch.setattr(type(graphs[0]), "replay", lambda graph: None)
        with pytest.raises((lw.GradientMismatchError, lw.DependentSampleError, ValueError)):
            for _ in range(3):
                lw.soft_neighbors(gram)


def test_after_a_wrong_replay_chunks_are_called(monkeypatch):
    torch.manual_seed(0)
    model, x = convolutional().eval(), torch.randn(64, 3, 8, 8)
    expected = lw.soft_neighbors(lw.GramMatrix(model, lw.batches(x, size=8)))
    with simulate_graphs(monkeypatch) as graphs:
        gram = lw.GramMatrix(model, lw.batches(x, size=8))
        lw.soft_neighbors(gram)
        replay = type(graphs[0]).replay

        def replay_stale(graph):
            if graph.replays < 1:
                replay(graph)

        monkeypatch.setattr(type(graphs[0]), "replay", replay_stale)  # as of the first samples ever after
        with pytest.raises((lw.GradientMismatchError, lw.DependentSampleError)) as caught:
            for _ in range(20):
                lw.soft_neighbors(gram)
        assert "try again" in caught.value.__notes__[-1]
        assert torch.equal(lw.soft_neighbors(gram), expected)
