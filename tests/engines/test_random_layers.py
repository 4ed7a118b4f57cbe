"""Every rule over random hyperparameters, alone and inside a net, against plain autograd in float64."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import likewise as lw
import oracle
from likewise.engines.convolution import ConvolutionGradient

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
FEW = settings(max_examples=25, deadline=None)


@st.composite
def convolutions(draw):
    dims, transposed = draw(st.integers(1, 3)), draw(st.booleans())
    groups = draw(st.integers(1, 3))
    i, o = groups * draw(st.integers(1, 3)), groups * draw(st.integers(1, 3))
    kernel, stride, dilation = (draw(st.integers(1, 3)) for _ in range(3))
    options = {"groups": groups, "bias": draw(st.booleans()), "dilation": dilation, "stride": stride}
    if transposed:
        options["padding"] = draw(st.integers(0, 1))
        options["output_padding"] = draw(st.integers(0, max(stride, dilation) - 1)) if stride > 1 else 0
        options["output_padding"] = min(options["output_padding"], stride - 1)
        layer = TRANSPOSED[dims](i, o, kernel, **options)
    else:
        same = stride == 1 and draw(st.booleans())
        options["padding"] = "same" if same else draw(st.integers(0, 2))
        modes = ["zeros", "circular", "reflect"] if options["padding"] != 2 else ["zeros", "circular"]
        options["padding_mode"] = draw(st.sampled_from(modes))
        layer = CONVOLUTIONS[dims](i, o, kernel, **options)
    side = draw(st.integers(7, 8)) if dims < 3 else 7
    return layer, (i, *[side] * dims)


@st.composite
def others(draw):
    kind = draw(
        st.sampled_from(["linear", "layer", "rms", "group", "batch", "instance", "bilinear", "prelu"])
    )
    c, lead = draw(st.integers(2, 5)), tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    affine = draw(st.booleans())
    if kind == "linear":
        return nn.Linear(c, draw(st.integers(1, 4)), bias=affine), (*lead, c)
    if kind == "layer":
        return nn.LayerNorm((*lead, c)[-draw(st.integers(1, len(lead) + 1)) :], bias=affine), (*lead, c)
    if kind == "rms":
        return nn.RMSNorm(c), (*lead, c)
    if kind == "group":
        return nn.GroupNorm(2, 2 * c), (2 * c, *lead)
    if kind == "batch":
        layer = nn.BatchNorm1d(c)
        layer.running_mean.uniform_(-1, 1)
        layer.running_var.uniform_(0.5, 2)
        return layer, (c, draw(st.integers(1, 4)))
    if kind == "instance":
        return nn.InstanceNorm1d(c, affine=True), (c, 5)
    if kind == "bilinear":
        return _Twice(nn.Bilinear(c, c, draw(st.integers(1, 3)))), (c,)
    return nn.PReLU(c if affine else 1), (c, *lead)


class _Twice(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x, x.sin())


def models_of(layer, shape, d):
    """The layer alone, its outputs summed up to d of them, and inside a net."""
    x = torch.randn(3, *shape, dtype=torch.float64)
    size = layer.double()(x).flatten(1).shape[1]
    alone = nn.Sequential(layer, nn.Flatten(), nn.Linear(size, d))
    alone[2].requires_grad_(False)
    q = int(torch.tensor(shape).prod())
    before = nn.Sequential(nn.Flatten(), nn.Linear(q, q), nn.Tanh(), nn.Unflatten(1, shape))
    inside = nn.Sequential(before, layer, nn.Tanh(), nn.Flatten(), nn.Linear(size, d))
    return [alone.double().eval(), inside.double().eval()], x


def agrees(model, x):
    expected = oracle.jacobians(model, x)
    gram = lw.GramMatrix(model, x, engine="layers")
    samples, gradients = gram.data.samples(range(len(x))), gram.engine
    weights = torch.randn(*expected.shape[:2], 2, dtype=torch.float64)
    directions = torch.randn(3, expected.shape[2], dtype=torch.float64)
    assert type(gradients).__name__ == "TracedEngine"
    with gram.net.evaluation_mode():
        pairs = gradients.features(samples, 0)
        for found, right in [
            (gradients.rows(samples, 0).rows, expected),
            (gradients.self_kernel(samples).matrix, expected @ expected.mT),
            (gradients.vjp(samples, weights, 0).total, torch.einsum("ndc,ndp->cp", weights, expected)),
            (gradients.jvp(samples, directions, 0).outputs, expected @ directions.T),
            (pairs.blocks(pairs), torch.einsum("ndp,mep->nmde", expected, expected)),
        ]:
            torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9 * float(right.abs().max()))
        lengths = expected.norm(dim=2, keepdim=True)
        if expected.shape[1] == 1 and lengths.min() > 1e-6:
            right = expected / lengths
            pairs = gradients.features(samples, -0.5)
            close = {"rtol": 0, "atol": 1e-8}
            torch.testing.assert_close(pairs.blocks(pairs), right[:, None] @ right.mT[None], **close)
            torch.testing.assert_close(gradients.rows(samples, -0.5).rows, right, **close)


@FEW
@given(convolutions(), st.integers(1, 3), st.integers(0, 10**6))
def test_convolutions(drawn, d, seed):
    torch.manual_seed(seed)
    for model in (found := models_of(*drawn, d))[0]:
        agrees(model, found[1])


@FEW
@given(others(), st.integers(1, 3), st.integers(0, 10**6))
def test_other_layers(drawn, d, seed):
    torch.manual_seed(seed)
    for model in (found := models_of(*drawn, d))[0]:
        agrees(model, found[1])


class _Added(nn.Module):
    """Layers that get the same output gradient."""

    def __init__(self, layers, bends):
        super().__init__()
        self.layers, self.bends = nn.ModuleList(layers), bends

    def forward(self, x):
        found = sum(layer(x + i) for i, layer in enumerate(self.layers))
        return found.tanh() if self.bends else found


@FEW
@given(
    st.integers(2, 4),
    st.integers(2, 5),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_layers_that_are_added(count, width, d, bends, summed, seed):
    torch.manual_seed(seed)
    added = _Added([nn.Linear(width, 4, bias=bool(i % 2)) for i in range(count)], bends)
    model = nn.Sequential(added, nn.Linear(4, d), _Added([nn.Linear(d, d), nn.Identity()], False))
    x = torch.randn(3, width, dtype=torch.float64)
    agrees(model.double(), x)
    if summed:
        agrees(nn.Sequential(model, _Sum()), x)


class _Sum(nn.Module):
    def forward(self, x):
        return x.sum(1, keepdim=True)


@FEW
@given(st.integers(1, 9), st.integers(1, 12), st.one_of(st.none(), st.integers(0, 8)), st.integers(0, 10**6))
def test_embeddings(width, length, padding, seed):
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Embedding(9, width, padding), nn.Tanh(), nn.Flatten(), nn.Linear(width * length, 2)
    )
    agrees(net.double().eval(), torch.randint(0, 9, (4, length)))


@pytest.mark.parametrize("forms", [True, False], ids=["dense", "by positions"])
@pytest.mark.parametrize("way", ["groups", "per_sample", "shifts", "windows"])
@FEW
@given(drawn=convolutions(), d=st.integers(1, 2), seed=st.integers(0, 10**6))
def test_all_strategies_of_a_convolution_agree(way, forms, drawn, d, seed):
    layer, shape = drawn
    plain = layer.groups == 1 and not layer.transposed
    if way == "shifts" and not (plain and set(layer.stride) == {1}):
        way = "windows"
    if way == "groups" and not plain:
        way = "per_sample"
    torch.manual_seed(seed)
    found, x = models_of(layer, shape, d)
    with (
        mock.patch.object(ConvolutionGradient, "_strategy", way),
        mock.patch.object(ConvolutionGradient, "_dense_is_cheaper", forms or not plain),
    ):
        agrees(found[0], x)


class _Language(nn.Module):
    """A table of embeddings that is also the output's matrix, as it is or transposed, perhaps twice."""

    def __init__(self, rows, width, transposed, twice):
        super().__init__()
        self.table = nn.Parameter(torch.randn(rows, width))
        self.transposed, self.twice = transposed, twice

    def forward(self, tokens):
        x = nn.functional.embedding(tokens, self.table).tanh()
        if self.twice:
            x = x + nn.functional.embedding(tokens.flip(1), self.table)
        x = x @ self.table.T if self.transposed else nn.functional.linear(x, self.table)
        if self.twice:
            x = nn.functional.linear((x.softmax(-1) @ self.table).tanh(), self.table)
        return x.logsumexp(-1)[:, -2:]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("twice", [False, True])
@FEW
@given(st.integers(2, 9), st.integers(1, 5), st.integers(2, 6), st.integers(0, 10**6))
def test_tied_embeddings(transposed, twice, rows, width, length, seed):
    torch.manual_seed(seed)
    agrees(_Language(rows, width, transposed, twice).double(), torch.randint(0, rows, (3, length)))


@FEW
@given(st.integers(2, 5), st.integers(1, 3), st.booleans(), st.integers(0, 10**6))
def test_a_matrix_used_twice(width, length, outer, seed):
    torch.manual_seed(seed)
    layer = nn.Linear(width, width)
    net = nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Flatten(), nn.Linear(width * length, 2))
    x = torch.randn(3, length, width, dtype=torch.float64)
    agrees(net.double(), x)
