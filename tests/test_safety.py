"""After any call the model and the generators are what they were, byte for byte."""

import random

import numpy as np
import pytest
import torch

import likewise as lw
import nets


def state(model):
    return {
        "parameters": {k: v.clone() for k, v in model.named_parameters()},
        "buffers": {k: v.clone() for k, v in model.named_buffers()},
        "grads": {k: v.grad.clone() for k, v in model.named_parameters()},
        "modes": [m.training for m in model.modules()],
        "requires": [p.requires_grad for p in model.parameters()],
        "identity": [id(v) for v in [*model.parameters(), *model.buffers()]],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "hooks": [
            [len(v) for k, v in sorted(vars(m).items()) if k.endswith("_hooks")] for m in model.modules()
        ],
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].tolist(),
        "python": random.getstate(),
        "fast attention": torch.backends.mha.get_fastpath_enabled(),
    }


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a == b


CALLS = {
    "similarity": lambda model, x, y: lw.similarity(model, x),
    "soft_neighbors": lambda model, x, y: lw.soft_neighbors(lw.GramMatrix(model, x)),
    "denoising": lambda model, x, y: lw.denoising(lw.GramMatrix(model, x), draws=8),
    "exact denoising": lambda model, x, y: lw.denoising(lw.GramMatrix(model, x), exact=True),
    "label_suspicion": lambda model, x, y: lw.label_suspicion(lw.GramMatrix(model, (x, y), centered=True)),
    "uncertainty": lambda model, x, y: lw.uncertainty(lw.GramMatrix(model, x)),
    "fit_quality": lambda model, x, y: lw.fit_quality(lw.GramMatrix(model, x), y),
    "perceptual": lambda model, x, y: lw.nearest(lw.perceptual(model, "*", x), 2),
    "predicted_move": lambda model, x, y: lw.predicted_move(lw.Network(model), x[:1], torch.ones(2), x),
    "outputs": lambda model, x, y: lw.Network(model).outputs(x),
}


@pytest.mark.parametrize("make", [nets.conv, nets.SmallTransformer, nets.Recurrent], ids=lambda m: m.__name__)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.filterwarnings("ignore:torch.func.vmap cannot differentiate Recurrent")
def test_nothing_is_left_behind(make, call):
    model, x = nets.case(make, 2, 5)
    next(model.children()).eval()  # mixed modes must come back too
    model.register_forward_hook(lambda *_: None)
    model(x).sum().backward()
    before = state(model)
    CALLS[call](model, x, torch.tensor([0, 1, 0, 1, 1]))
    after = state(model)
    for part in before:
        assert same(before[part], after[part]), part


def test_an_error_inside_leaves_nothing_behind():
    model, x = nets.case(nets.conv, 2, 5)
    model(x).sum().backward()
    before = state(model)
    x[2] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        lw.similarity(model, x)
    assert all(same(before[part], state(model)[part]) for part in before)
