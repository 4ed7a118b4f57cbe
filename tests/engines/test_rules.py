"""Sums, differences and products with a parameter have a rule, wherever and however the parameter is broadcast."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import likewise as lw
from likewise.engines import rules


class Elementwise(nn.Module):
    """A layer, an elementwise operation with parameters of several shapes, another layer."""

    def __init__(self, operation: Callable[["Elementwise", Tensor], Tensor]) -> None:
        super().__init__()
        self.operation = operation
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)
        self.feature = nn.Parameter(torch.randn(6))
        self.position = nn.Parameter(torch.randn(1, 4, 6))
        self.column = nn.Parameter(torch.randn(4, 1))
        self.scalar = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.operation(self, self.first(x)).tanh()).sum(1)


def add_in_place(m: Elementwise, h: Tensor) -> Tensor:
    h = h * 1
    h += m.feature
    return h


def multiply_in_place(m: Elementwise, h: Tensor) -> Tensor:
    h = h + 1
    h *= m.feature
    return h


OPERATIONS: dict[str, Callable[[Elementwise, Tensor], Tensor]] = {
    "x + p": lambda m, h: h + m.feature + m.position,
    "p + x": lambda m, h: m.position + h,
    "x - p": lambda m, h: h - m.position,
    "p - x": lambda m, h: m.position - h,
    "alpha": lambda m, h: torch.sub(torch.add(h, m.feature, alpha=2.5), m.position, alpha=-0.5),
    "x * p": lambda m, h: h * m.feature,
    "p * x": lambda m, h: m.column * h,
    "a scalar": lambda m, h: h * m.scalar + m.scalar,
    "in place": add_in_place,
    "a product in place": multiply_in_place,
    "x is broadcast too": lambda m, h: h.mean(-1, keepdim=True) * m.feature,
    "a scalar of each sample": lambda m, h: (h.mean((1, 2)) * m.scalar)[:, None, None] + h,
    "samples in the second dimension": lambda m, h: (h.transpose(0, 1) * m.feature).transpose(0, 1),
    "samples and positions flattened": lambda m, h: (h.reshape(-1, 6) * m.feature + m.feature).view_as(h),
    "used three times": lambda m, h: h * m.feature * m.feature + m.feature,
    "derived from two parameters": lambda m, h: h * (m.feature * m.scalar),
}


@pytest.mark.parametrize("readout", [lw.all_outputs, lw.one_output(1)], ids=["three outputs", "one output"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_elementwise_operations_have_a_rule_and_exact_gradients(operation, readout, monkeypatch):
    def refuse(call: rules.Call) -> None:
        raise AssertionError(f"{call.operation.name} has no rule")

    monkeypatch.setattr(rules, "_generic", refuse)
    torch.manual_seed(0)
    net = lw.Network(Elementwise(OPERATIONS[operation]).double(), readout)
    x = torch.randn(5, 4, 5, dtype=torch.float64)
    by_rules, by_autograd = (
        lw.GramMatrix(net, x, kernel=lw.INNER_PRODUCT, engine=engine) for engine in ("layers", "autograd")
    )
    assert by_rules.engine.name == "layers"
    torch.testing.assert_close(by_rules.dense(), by_autograd.dense(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        lw.soft_neighbors(by_rules.with_kernel(lw.CORRELATION)),
        lw.soft_neighbors(by_autograd.with_kernel(lw.CORRELATION)),
    )


SPECTRA: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "a real factor": lambda x, real, _: x * real,
    "a real term": lambda x, real, _: real - (x + real),
    "a complex term": lambda x, _, pair: torch.add(x, torch.view_as_complex(pair), alpha=1 + 2j),
    "a complex factor": lambda x, _, pair: x * torch.view_as_complex(pair),
    "an expanded factor": lambda x, _, pair: torch.view_as_complex(pair).expand(len(x), -1) * x,
}


class Spectrum(nn.Module):
    """An operation on a Fourier transform, which is complex, with parameters."""

    def __init__(self, operation: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.operation, self.last = operation, nn.Linear(8, 2)
        self.real, self.pair = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        found = self.operation(torch.fft.fft(x), self.real, self.pair)
        return self.last(torch.view_as_real(found).flatten(1).tanh())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("operation", SPECTRA)
def test_complex_values_beside_real_and_complex_parameters(operation):
    torch.manual_seed(0)
    model, x = Spectrum(SPECTRA[operation]).double(), torch.randn(5, 4, dtype=torch.float64)
    net = lw.Network(model, lw.all_outputs)
    by_rules, by_autograd = (
        lw.GramMatrix(net, x, kernel=lw.INNER_PRODUCT, engine=engine) for engine in ("layers", "autograd")
    )
    assert by_rules.engine.name == "layers"
    torch.testing.assert_close(by_rules.dense(), by_autograd.dense(), rtol=1e-10, atol=1e-12)
