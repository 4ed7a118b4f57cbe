"""Norms by plain arithmetic: equal to PyTorch's, and differentiable three times."""

import pytest
import torch
import torch.nn.functional as F

from likewise.engines.double_backward import THIRD_ORDER

WEIGHT, BIAS = torch.randn(2, 3, dtype=torch.float64)
LAYER, INSTANCE = ((f, THIRD_ORDER[f]) for f in (F.layer_norm, F.instance_norm))
NORMS = {
    "layer": (LAYER, lambda f, x: f(x, (3,), WEIGHT, BIAS)),
    "layer of two": (LAYER, lambda f, x: f(x, (4, 3), eps=1e-3)),
    "instance": (INSTANCE, lambda f, x: f(x.mT, weight=WEIGHT, bias=BIAS)),
    "with statistics": (INSTANCE, lambda f, x: f(x.mT, BIAS, WEIGHT.abs(), use_input_stats=False)),
}


def slope_of(call, function):
    return lambda x: torch.autograd.grad(call(function, x).pow(3).sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("name", NORMS)
def test_values_and_third_derivatives(name):
    (theirs, ours), call = NORMS[name]
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(call(ours, x), call(theirs, x))
    assert torch.autograd.gradgradcheck(slope_of(call, ours), x)


@pytest.mark.parametrize("name", ["layer", "instance"])
@pytest.mark.xfail(strict=True, reason="PyTorch's own is wrong: if this passes, delete norms.py")
def test_pytorch_has_mended_its_own(name):
    (theirs, _), call = NORMS[name]
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(slope_of(call, theirs), x)
