"""Convolutions by their three operations: PyTorch's values and first two derivatives."""

import pytest
import torch
import torch.nn.functional as F

from likewise.engines.double_backward import SECOND_ORDER

CASES = {
    "plain": (F.conv2d, (2, 3, 6, 5), (4, 3, 3, 2), {}),
    "padded, strided, dilated": (
        F.conv2d,
        (2, 3, 7, 8),
        (4, 3, 3, 2),
        {"padding": 1, "stride": (2, 1), "dilation": (1, 2)},
    ),
    "groups": (F.conv2d, (2, 4, 5, 5), (6, 2, 3, 3), {"groups": 2}),
    "same": (F.conv1d, (2, 3, 7), (2, 3, 4), {"padding": "same"}),
    "valid": (F.conv1d, (2, 3, 7), (2, 3, 4), {"padding": "valid"}),
    "volumes": (F.conv3d, (1, 2, 3, 3, 3), (2, 2, 2, 2, 2), {}),
    "one image": (F.conv2d, (3, 6, 5), (4, 3, 3, 2), {}),
    "transposed": (F.conv_transpose2d, (2, 3, 4, 4), (3, 2, 3, 3), {"stride": 2, "output_padding": 1}),
    "transposed groups": (F.conv_transpose1d, (2, 4, 5), (4, 3, 3), {"groups": 2, "padding": 1}),
}


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_values_and_derivatives(name, biased):
    function, shape, kernel, options = CASES[name]
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    w = torch.randn(kernel, dtype=torch.float64, requires_grad=True)
    outputs = w.shape[1] * options.get("groups", 1) if "transpose" in function.__name__ else len(w)
    b = torch.randn(outputs, dtype=torch.float64, requires_grad=True) if biased else None
    leaves = (x, w) if b is None else (x, w, b)

    def slopes(call):
        value = call(x, w, bias=b, **options).tanh()
        first = torch.autograd.grad(value.pow(2).sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.pow(3).sum() for g in first), leaves, create_graph=True)
        return value, *first, *second

    for ours, theirs in zip(slopes(SECOND_ORDER[function]), slopes(function), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_third_derivatives():
    x = torch.randn(1, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    w = torch.randn(2, 2, 3, 3, dtype=torch.float64, requires_grad=True)

    def slope(x, w):
        return torch.autograd.grad(SECOND_ORDER[F.conv2d](x, w).pow(3).sum(), (x, w), create_graph=True)

    assert torch.autograd.gradgradcheck(slope, (x, w))
