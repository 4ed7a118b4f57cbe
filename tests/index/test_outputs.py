"""What an index keeps of the model's outputs and last layer is read on the way of the passes that form gradients."""

import pytest
import torch
from torch import nn

import likewise as lw
from simulated_graphs import simulate_graphs


def convolutional():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 8), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(8, 5))


def count_samples(model):
    """Return a list to which the batch size of every call of the model is added, and what ends that."""
    calls = []
    handle = model.register_forward_pre_hook(lambda _, arguments: calls.append(len(arguments[0])))
    return calls, handle.remove


def check_kept(index, model, x):
    """Compare outputs and features that an index keeps with those of a forward pass of their own."""
    with torch.no_grad():
        seen = model[:-1](x)
        assert torch.allclose(index.outputs.float(), model(x), atol=2e-3)
    vectors = torch.cat([seen, torch.ones(len(x), 1)], 1)
    directions, lengths = map(torch.cat, zip(*index._columns.features(), strict=True))
    assert torch.allclose(lengths, vectors.norm(dim=1), rtol=1e-5)
    assert torch.allclose(directions, nn.functional.normalize(vectors, dim=1), atol=1e-3)


def test_each_sample_is_called_once(tmp_path):
    model, calls = convolutional(), []
    for n in (100, 200):
        found, remove = count_samples(model)
        lw.build_index(model, torch.randn(n, 3, 8, 8), tmp_path / str(n), width=64, shard_rows=256)
        remove()
        calls.append(sum(found))
    assert 60 < calls[1] - calls[0] < 140  # one pass over them, not two; checks vary


@pytest.mark.parametrize("n", [65, 131])  # the last batch has one sample, which is called twice
def test_what_is_kept_is_that_of_a_pass_of_its_own(tmp_path, n):
    model, x = convolutional(), torch.randn(n, 3, 8, 8)
    check_kept(lw.build_index(model, x, tmp_path, width=64), model, x)
    assert not model._forward_hooks and not model._forward_pre_hooks and not model[-1]._forward_pre_hooks


def test_replayed_passes_are_read_too(tmp_path, monkeypatch):
    model, x = convolutional(), torch.randn(61, 3, 8, 8)
    with simulate_graphs(monkeypatch) as graphs:
        monkeypatch.setattr(
            "likewise.gram.last_layer.LastLayer.read", lambda *_: pytest.fail("the model is called again")
        )
        index = lw.build_index(model, lw.batches(x, size=8), tmp_path, width=64, pictures=False)
    assert sum(graph.replays for graph in graphs) > 5
    check_kept(index, model, x)


def test_a_readout_that_writes_to_the_outputs_changes_nothing(tmp_path):
    def doubled(outputs, labels):
        return outputs.mul_(2)[:, :1]

    model, x = convolutional(), torch.randn(70, 3, 8, 8)
    check_kept(lw.build_index(model, x, tmp_path, width=64, readout=doubled), model, x)


def test_other_engines_call_the_model_again(tmp_path, recwarn):
    """Where gradients are formed one sample at a time, there is no pass to read on the way of."""

    class Sorted(nn.Sequential):
        def forward(self, x):
            order = x.flatten(1).sum(1).argsort()
            return super().forward(x[order])[order.argsort()]

    model, x = Sorted(*convolutional()), torch.randn(70, 3, 8, 8)
    index = lw.build_index(model, x, tmp_path, width=64)
    assert torch.allclose(index.outputs.float(), model(x), atol=2e-3)


def test_infinite_outputs_are_named_and_no_hook_is_left(tmp_path):
    class Inverse(nn.Sequential):
        def forward(self, x):
            outputs = super().forward(x)
            return torch.cat([outputs, 1 / x[:, 0, 0, :1]], 1)

    model, x = Inverse(*convolutional()), torch.rand(70, 3, 8, 8) + 1
    x[41, 0, 0, 0] = 0
    with pytest.raises(ValueError, match=r"outputs of 1 sample are not finite.* \[41\]"):
        lw.build_index(model, x, tmp_path, width=64, readout=lambda outputs, labels: outputs[:, :1])
    assert not model._forward_hooks and not model._forward_pre_hooks and not model[-1]._forward_pre_hooks
