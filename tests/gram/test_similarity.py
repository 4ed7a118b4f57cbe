import torch
from torch import nn

import likewise as lw
import nets


def test_perceptual_similarity_is_its_formula():
    model, x = nets.case(nets.mlp, 2, 8)
    layers, weights = ["1", "3"], [2.0, 0.5]
    first = model[:2](x).detach()
    second = model[:4](x).detach()
    products = 2 * first @ first.T + 0.5 * second @ second.T
    gram = lw.perceptual(model, layers, x, weights=weights, kernel=lw.INNER_PRODUCT)
    assert gram.d == 1 and torch.allclose(gram.dense(), products)
    norms = products.diagonal().sqrt()
    cosine = lw.perceptual(model, layers, x, weights=weights)
    assert torch.allclose(cosine.dense(), products / norms / norms[:, None])
    assert torch.allclose(lw.soft_neighbors(cosine), cosine.dense().sum(1))


def test_every_use_works_on_activations():
    model, x = nets.case(nets.conv, 2, 8)
    model.requires_grad_(False)  # a frozen feature extractor
    gram = lw.perceptual(model, "0", x, columns=x[:5], centered=True)
    assert gram.shape == (8, 5) and lw.nearest(gram, 2).indices.shape == (8, 2)
    own = lw.perceptual(model, ["0", "1"], x)
    labels = torch.arange(8) % 2
    assert lw.label_suspicion(own, labels).suspicion.shape == (8,)
    found = lw.denoising(own, labels, exact=True)  # predictions are averaged by activations
    weights = own.with_kernel(lw.INNER_PRODUCT).dense()
    expected = weights / weights.sum(1, keepdim=True) @ own.outputs()
    assert torch.allclose(found.smoothed_prediction, expected)
    assert found.bound.isinf().all()


def test_activations_are_those_before_in_place_layers():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 1)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    before = model[0](x).detach()
    found = lw.perceptual(model, "0", x, kernel=lw.INNER_PRODUCT).dense()
    assert torch.allclose(found, before @ before.T)
