"""Few rows against many columns: directions of the rows and features of the columns give the same similarities."""

import pytest
import torch

import likewise as lw
from likewise.engines import factors
from likewise.engines.factors import FactoredGradient
from likewise.gram.cost import PairOperations
from likewise.gram.strips import JointStrips
from nets import SHAPES, case

KERNELS = {
    "correlation": lw.CORRELATION,
    "inner": lw.INNER_PRODUCT,
    "influence": lw.INFLUENCE,
    "subspace": lw.SUBSPACE_MATCH,
    "blocks": lw.Kernel(-0.5, -0.5, lw.whole_block),
}


def both_ways(gram):
    """The similarities by directions and by features."""
    with gram.net.evaluation_mode():
        return [
            torch.cat([strips.strip(where) for where in strips.strips])
            for strips in (gram._direction_strips(torch.float64), gram.tiles(torch.float64))
        ]


@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize("make", [m for m in SHAPES if m.__name__ != "Added"], ids=lambda m: m.__name__)
@pytest.mark.filterwarnings("ignore:torch.func.vmap cannot differentiate Recurrent")
def test_directions_of_rows_and_features_of_columns_give_the_same_similarities(make, d):
    model, x = case(make, d, 14)
    for kernel in KERNELS.values():
        gram = lw.GramMatrix(
            model, lw.batches(x[:3], size=2), columns=lw.batches(x[3:], size=4), kernel=kernel
        )
        directions, features = both_ways(gram)
        torch.testing.assert_close(directions, features, rtol=1e-9, atol=1e-10)


@pytest.fixture
def grams():
    """Two queries against 40 samples, and all of them as one square matrix."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(64, 3)
    ).double()
    x, y = torch.randn(42, 1, 6, 6, dtype=torch.float64), torch.arange(42) % 3
    return model, (x[:2], y[:2]), (x[2:], y[2:])


@pytest.mark.parametrize("centered", [False, True], ids=["plain", "centered"])
@pytest.mark.parametrize("cheaper", [True, False], ids=["directions", "features"])
def test_statistics_of_few_queries_do_not_depend_on_the_way(grams, monkeypatch, centered, cheaper):
    model, new, known = grams
    monkeypatch.setattr(PairOperations, "directions_are_cheaper", lambda *_: cheaper)
    # little memory: no features are kept, which would be used before either way
    gram = lw.GramMatrix(model, new, columns=known, centered=centered, max_memory=300_000)
    assert type(gram._exact_strips(None)).__name__ == ("DirectionStrips" if cheaper else "Tiles")
    rows, columns = (lw.GramMatrix(model, part[0]) for part in (new, known))
    k = lw.GramMatrix(model, new[0], columns=known[0]).dense()
    c = k
    if centered:
        means, own = columns.dense().mean(1), columns.diagonal()
        of_new, grand = k.mean(1), means.mean()
        scales = (own - 2 * means + grand).rsqrt(), (rows.diagonal() - 2 * of_new + grand).rsqrt()
        c = (k - of_new[:, None] - means + grand) * scales[0] * scales[1][:, None]
    torch.testing.assert_close(gram.dense(), c, rtol=1e-8, atol=1e-9)
    found = lw.nearest(gram, 4)
    torch.testing.assert_close(found.similarities, c.topk(4).values, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(
        lw.novelty(gram, 5, parameters=None), 1 - k.topk(5).values.mean(1), rtol=1e-8, atol=1e-9
    )
    reliability = lw.reliability(gram)
    torch.testing.assert_close(reliability.closeness, k.topk(10).values.mean(1), rtol=1e-8, atol=1e-9)


def test_few_rows_are_directions_and_many_are_not(grams):
    model, _, (x, _) = grams
    few = lw.GramMatrix(model, x[:1], columns=x[1:])
    many = lw.GramMatrix(model, x[:20], columns=x[20:])
    assert few._directions_are_cheaper() and not many._directions_are_cheaper()
    counted = PairOperations(features=100, per_row=1, jvp=60, per_direction=2)
    assert counted.directions_are_cheaper(rows=10, strips=1, d=2)  # 60 + 40 directions < 100 + 10 rows
    assert not counted.directions_are_cheaper(rows=20, strips=1, d=2)  # 60 + 80 > 100 + 20
    assert not counted.directions_are_cheaper(rows=10, strips=2, d=2)


@pytest.mark.parametrize("bad", [0, 1])
def test_samples_without_a_gradient_are_named_either_way(bad):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 4, bias=False), torch.nn.Tanh(), torch.nn.Linear(4, 1, bias=False)
    )
    x = torch.randn(40, 5)
    x[bad] = 0
    gram = lw.GramMatrix(model, x[:1], columns=x[1:])
    assert gram._directions_are_cheaper()
    with pytest.warns(lw.ZeroGradientWarning):
        k = gram.dense()
    assert (k[:, 0] == 0).all()


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=list(KERNELS))
def test_strips_of_a_symmetric_matrix_compute_each_pair_once(kernel):
    torch.manual_seed(0)
    convolutions = [torch.nn.Conv2d(1, 12, 3), torch.nn.Tanh(), torch.nn.Conv2d(12, 12, 3), torch.nn.Tanh()]
    model = torch.nn.Sequential(*convolutions, torch.nn.Flatten(), torch.nn.Linear(48, 2)).double()
    x = torch.randn(60, 1, 6, 6, dtype=torch.float64)
    expected = lw.GramMatrix(model, x, kernel=kernel).dense()
    gram = lw.GramMatrix(model, x, kernel=kernel, max_memory=10**6)
    tiles = gram.tiles(torch.float64)
    strips = tiles.strips
    assert len(strips) > 2
    evaluated, features = [], gram.engine.features

    def count(samples, exponent):
        evaluated.append(len(samples))
        return features(samples, exponent)

    gram.engine.features = count
    with gram.net.evaluation_mode():
        found = [tiles.strip(where).clone() for where in strips]
        again = tiles.strip(strips[1])  # out of order: all columns are computed
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(again, found[1], rtol=1e-9, atol=1e-10)
    all_columns = 60 * (1 + len(strips))
    assert sum(evaluated) - len(strips[1]) - 60 == tiles.gradient_evaluations
    assert (tiles.gradient_evaluations < 0.65 * all_columns) == kernel.symmetric


def test_two_samples_are_taken_together_where_one_would_be_called_twice():
    """A quarter of max_memory holds three copies of the features of one sample, but not of two."""
    model = torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.Tanh(), torch.nn.Linear(300, 5)).double()
    x = torch.randn(4, 3, 40, dtype=torch.float64)
    readout = lambda outputs, labels: outputs.sum(1)  # noqa: E731
    whole = lw.GramMatrix(lw.Network(model, readout), x).tiles()
    gram = lw.GramMatrix(lw.Network(model, readout), x, max_memory=20 * whole.bytes_per_sample)
    assert gram.max_memory // 12 // gram.tiles().bytes_per_sample == 1
    engine, sizes = gram.engine, []
    engine.memory = engine.memory._replace(bytes_per_sample=gram.max_memory // 12)  # about that of ResNet-50
    inner = engine.features
    engine.features = lambda samples, exponent: sizes.append(len(samples)) or inner(samples, exponent)
    found = gram.dense()
    assert set(sizes) == {2}
    assert (found - lw.GramMatrix(lw.Network(model, readout), x).dense()).abs().max() < 1e-12


@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize("make", SHAPES, ids=lambda m: m.__name__)
@pytest.mark.filterwarnings("ignore:torch.func.vmap cannot differentiate Recurrent")
def test_few_samples_layer_by_layer_agree_with_features(make, d):
    model, x = case(make, d, 4)
    for name in ("correlation", "inner", "subspace", "blocks"):
        gram = lw.GramMatrix(model, x, kernel=KERNELS[name])
        joint = gram._exact_strips(torch.float64)
        assert isinstance(joint, JointStrips)
        with gram.net.evaluation_mode():
            found, expected = (
                torch.cat([s.strip(w) for w in s.strips]) for s in (joint, gram.tiles(torch.float64))
            )
        assert found.shape == expected.shape
        assert (found - expected).abs().max() < 1e-9 * expected.abs().max(), name


@pytest.mark.parametrize("n", [1, 2, 5])
def test_few_samples_are_as_exact_as_the_reference(n):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(36, 3)
    )
    x = torch.randn(n, 2, 5, 5)
    found = lw.GramMatrix(lw.Network(model, lw.all_outputs), x).dense()
    model.double()
    net = lw.Network(model, lw.all_outputs)
    expected = lw.GramMatrix(net, x.double(), engine="autograd").dense()
    assert (found - expected).abs().max() < 1e-6


def test_few_samples_by_positions_and_by_rows_agree():
    torch.manual_seed(0)
    inputs, deltas = torch.randn(3, 4, 50), torch.randn(3, 2, 4, 60)
    cheap = FactoredGradient(inputs, deltas)
    rows = cheap.rows().flatten(0, 1).double()
    again = FactoredGradient(inputs, deltas)
    assert (again.joint_gram() - rows @ rows.T).abs().max() < 1e-4
    assert not again.is_dense  # positions were cheaper


@pytest.mark.parametrize("few", [0, 2**30], ids=["float32", "float64"])
@pytest.mark.parametrize(("d", "t"), [(1, 4), (3, 1), (3, 4)])
def test_few_samples_by_positions_are_as_exact_as_in_float64(monkeypatch, few, d, t):
    monkeypatch.setattr(factors, "FEW_MULTIPLICATIONS", few)
    torch.manual_seed(0)
    gradient = FactoredGradient(torch.randn(3, t, 50), torch.randn(3, d, t, 60))
    inputs, deltas = gradient.inputs.double(), gradient.deltas.double()
    rows = torch.einsum("ndto,nti->ndoi", deltas, inputs).flatten(2).flatten(0, 1)
    expected = rows @ rows.T
    assert (gradient.joint_gram() - expected).abs().max() < 1e-6 * expected.max()
    assert not gradient.is_dense  # positions were cheaper


def test_few_samples_whose_positions_cancel_are_compared_by_rows(monkeypatch):
    monkeypatch.setattr(factors, "FEW_MULTIPLICATIONS", 0)
    torch.manual_seed(0)
    deltas = torch.randn(2, 3, 4, 60)
    deltas -= deltas.mean(2, keepdim=True)  # while all inputs are almost one and the same
    gradient = FactoredGradient(1e4 * torch.rand(50) + torch.randn(2, 4, 50), deltas)
    rows = torch.einsum("ndto,nti->ndoi", deltas.double(), gradient.inputs.double()).flatten(2).flatten(0, 1)
    expected = rows @ rows.T
    assert (gradient.joint_gram() - expected).abs().max() < 0.01 * expected.max()
    assert gradient.is_dense
    monkeypatch.setattr(factors, "MOST_CANCELLATION", float("inf"))
    by_positions = FactoredGradient(gradient.inputs, deltas).joint_gram()
    assert (by_positions - expected).abs().max() > 0.1 * expected.max()


def test_the_one_of_few_samples_that_is_not_finite_is_named():
    x = torch.randn(3, 6)
    x[1, 2] = torch.nan
    with pytest.raises(ValueError, match=r"ids \[1\]"):
        lw.GramMatrix(torch.nn.Linear(6, 2), x).dense()


def test_few_samples_without_a_gradient_are_named():
    model = torch.nn.Sequential(torch.nn.Linear(4, 1, bias=False), torch.nn.ReLU())
    model[0].weight.data.fill_(1.0)
    x = torch.tensor([[1.0, 1, 1, 1], [-1, -1, -1, -1], [1, 2, 0, 0]])
    with pytest.warns(lw.ZeroGradientWarning, match=r"ids 1"):
        found = lw.similarity(model, x)
    assert not found[1].any()
    assert (found.diagonal() - torch.tensor([1.0, 0, 1])).abs().max() < 1e-6
