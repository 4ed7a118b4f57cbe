"""The recipe of bergson that benchmarks time, against gradients formed one text at a time."""

import pytest
import torch
from bergson import TextProjector, draw_maps, project_gradients
from torch.nn.functional import cross_entropy, normalize
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    config = GPTNeoXConfig(vocab_size=31, max_position_embeddings=12, use_cache=False, **sizes)
    return GPTNeoXForCausalLM(config).double().eval()


def test_projections_by_hooks_are_those_of_gradients_formed_one_text_at_a_time(model):
    tokens = torch.randint(0, 31, (5, 12))
    projector = TextProjector(model, 256)
    with projector.hooks():
        found = projector.project(tokens)
    weights = {name: model.get_submodule(f"gpt_neox.{name}").weight for name in projector.maps}
    assert len(weights) == 8  # four of each block, and not the output layer
    expected = []
    for text in tokens:
        loss = cross_entropy(model(text[None]).logits[0, :-1], text[1:])
        gradients = torch.autograd.grad(loss, list(weights.values()))
        projected = [
            (b @ gradient @ a.T).flatten()
            for gradient, (b, a) in zip(gradients, projector.maps.values(), strict=True)
        ]
        expected.append(normalize(torch.cat(projected), dim=0))
    assert found.shape == (5, projector.width)
    torch.testing.assert_close(found, torch.stack(expected))


def test_hooks_leave_the_model_as_it_was(model):
    next(model.parameters()).requires_grad_(False)
    before = [p.requires_grad for p in model.parameters()]
    with TextProjector(model, 64).hooks():
        pass
    assert [p.requires_grad for p in model.parameters()] == before
    assert not any(m._forward_hooks or m._backward_hooks for m in model.modules())


def test_inner_products_of_gradients_are_kept_on_the_mean_over_maps():
    torch.manual_seed(0)
    gradients = {"one": torch.randn(3, 4, 5), "two": torch.randn(3, 2, 3, 3)}
    shapes = {name: value.shape[1:] for name, value in gradients.items()}
    rows = project_gradients(gradients, draw_maps(shapes, 2 * 200**2))
    flat = torch.cat([value.flatten(1) for value in gradients.values()], 1)
    expected = flat @ flat.T
    assert ((rows @ rows.T) - expected).abs().max() < 0.15 * expected.diagonal().max()
