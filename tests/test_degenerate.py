"""Each gives the right number, or an error that says what was found, expected and to be done."""

import copy
import re
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import likewise as lw
import nets
import oracle


def linear(d=1):
    return nn.Linear(3, d).double()


def inputs(n=6):
    return torch.randn(n, 3, dtype=torch.float64)


class Dead(nn.Module):
    """The output of samples with a negative first input is a dead ReLU."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(3, 2).double()

    def forward(self, x):
        return torch.where(x[:, :1] > 0, self.out(x), 0 * self.out(x).detach())


def half_dead():
    x = inputs()
    x[:, 0] = torch.tensor([1.0, -1, 1, 1, -1, 1])
    return Dead(), x, torch.tensor([False, True, False, False, True, False])


def test_zero_gradients_are_named_and_left_out():
    model, x, dead = half_dead()
    gram = lw.GramMatrix(model, x)
    with pytest.warns(lw.ZeroGradientWarning, match=r"2 of 6 samples .*ids 1, 4"):
        counts = lw.soft_neighbors(gram)
    assert torch.equal(gram.zero_gradients(), dead)
    assert (counts[dead] == 0).all()
    expected = lw.soft_neighbors(lw.GramMatrix(model, x[~dead]))
    assert torch.allclose(counts[~dead], expected)


@pytest.mark.filterwarnings("ignore::likewise.ZeroGradientWarning")
def test_no_statistic_of_zero_gradients_is_nan():
    model, x, dead = half_dead()
    labels = torch.tensor([0, 1, 0, 1, 0, 1])
    gram, alive = lw.GramMatrix(model, x), lw.GramMatrix(model, x[~dead])
    assert torch.allclose(lw.uncertainty(gram)[~dead], lw.uncertainty(alive))
    assert (lw.uncertainty(gram)[dead] == 0).all()
    assert torch.allclose(lw.disturbance(gram)[~dead], lw.disturbance(alive))
    assert lw.disturbance(gram)[dead].isposinf().all()
    suspicion = lw.label_suspicion(gram, labels)
    assert suspicion.isolated[dead].all() and (suspicion.suspicion[dead] == 0).all()
    assert torch.equal(suspicion.suggested[dead], labels[dead])
    fit = lw.fit_quality(gram, labels)
    for exact in (True, False):
        found = lw.denoising(gram, labels, exact=exact)
        assert (found.factor[dead] == 1).all() and found.unreliable[dead].all()
        assert (found.shift[dead] == 0).all()
        assert torch.allclose(found.factor[~dead], lw.denoising(alive, exact=True).factor, rtol=1e-4)
        values = [v for v in found if isinstance(v, torch.Tensor)]
        assert not any(v.isnan().any() for v in [*values, fit.label_variance, suspicion.suspicion])


def test_zero_columns_are_named_too():
    model, x, dead = half_dead()
    with pytest.warns(lw.ZeroGradientWarning, match="ids 1, 4"):
        counts = lw.soft_neighbors(lw.GramMatrix(model, x[~dead], columns=x))
    assert torch.allclose(counts, lw.soft_neighbors(lw.GramMatrix(model, x[~dead])))


def test_rank_deficient_outputs_keep_their_null_direction():
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Softmax(1)).double()
    gram = lw.GramMatrix(model, inputs())
    assert (gram.ranks() == 3).all()
    assert torch.allclose(gram.diagonal(), torch.full((6,), 0.75).double())
    blocks = gram.with_kernel(lw.Kernel(-0.5, -0.5, lw.whole_block)).dense()
    own = blocks[range(6), range(6)]
    assert torch.allclose(own @ own, own) and blocks.abs().max() <= 1 + 1e-9
    assert torch.allclose(own.sum(2), torch.zeros(6, 4).double(), atol=1e-9)
    assert torch.allclose(lw.soft_neighbors(gram), gram.dense().sum(1))


def test_rank_is_found_in_float32_and_half_precision():
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 4), nn.Softmax(1))
    x = torch.randn(6, 3)
    assert (lw.GramMatrix(model, x).ranks() == 3).all()
    assert (lw.GramMatrix(model.bfloat16(), x).ranks() <= 3).all()


@pytest.mark.parametrize("d", [1, 1000])
def test_few_and_many_outputs(d):
    model, x = nn.Linear(3, d).double(), inputs(3)
    gram = lw.GramMatrix(lw.Network(model, lw.all_outputs), x)
    expected = (x @ x.T + 1) / ((x**2).sum(1) + 1).sqrt() / ((x**2).sum(1) + 1).sqrt()[:, None]
    assert gram.d == d
    assert torch.allclose(gram.dense(), expected)
    assert torch.allclose(lw.soft_neighbors(gram), expected.sum(1))


def test_one_sample():
    gram = lw.GramMatrix(linear(2), inputs(1))
    assert torch.allclose(lw.soft_neighbors(gram), torch.ones(1).double())
    assert lw.nearest(gram).indices.shape == (1, 0)
    found = lw.denoising(gram, exact=True)
    assert torch.allclose(found.factor, torch.ones(1).double()) and found.floor == 1
    assert torch.allclose(lw.uncertainty(gram), torch.ones(1).double())
    centered = lw.GramMatrix(linear(2), inputs(1), centered=True)
    assert not centered.dense().any()  # nothing is left of a single gradient less the mean


def test_duplicates_are_fully_similar():
    x = inputs(1).expand(5, 3)
    gram = lw.GramMatrix(linear(3), x)
    assert torch.allclose(gram.dense(), torch.ones(5, 5).double())
    assert torch.allclose(lw.denoising(gram, exact=True).factor, torch.full((5,), 5**-0.5).double())
    assert not lw.GramMatrix(linear(3), x, centered=True).dense().any()


def test_empty_data_is_refused():
    with pytest.raises(ValueError, match="empty"):
        lw.similarity(linear(), inputs(0))


def test_nan_inputs_are_named():
    x = inputs()
    x[3, 1] = torch.nan
    with pytest.raises(ValueError, match=r"not finite, the first with ids \[3\]"):
        lw.soft_neighbors(lw.GramMatrix(linear(), x))


PRODUCTS = {
    "dense": lambda g: g.dense(),
    "sums": lambda g: g.row_sums(),
    "reading": lambda g: g.with_columns(inputs(2)).row_sums(),
    "uncertainty": lw.uncertainty,
    "denoising": lw.denoising,
    "diagonal": lambda g: g.diagonal(),
}


@pytest.mark.parametrize("engine", ["autograd", "layers"])
@pytest.mark.parametrize("use", PRODUCTS)
def test_nan_inputs_are_named_without_any_normalization(use, engine):
    x = inputs()
    x[4, 1] = torch.nan  # a linear layer whose bias gradient stays finite
    gram = lw.GramMatrix(linear(2), x, kernel=lw.INNER_PRODUCT, engine=engine)
    with pytest.raises(ValueError, match=r"not finite, the first with ids \[4\]"):
        PRODUCTS[use](gram)


def test_integer_inputs():
    model = nn.Sequential(nn.Embedding(7, 4, padding_idx=0), nn.Flatten(), nn.Linear(12, 2)).double()
    x = torch.randint(0, 7, (6, 3))
    jacobian = oracle.jacobians(model, x)
    expected = oracle.trace(oracle.correlation(jacobian, jacobian))
    gram = lw.GramMatrix(model, x)
    assert torch.allclose(gram.dense(), expected)
    assert torch.allclose(lw.soft_neighbors(gram), expected.sum(1))


def test_frozen_and_unused_parameters():
    model = nns = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    nns.register_parameter("unused", nn.Parameter(torch.randn(5).double()))
    for p in model[0].parameters():
        p.requires_grad = False
    x = inputs()
    jacobian = oracle.jacobians(model, x)
    assert jacobian.shape[2] == 10 + 5
    assert torch.allclose(lw.similarity(model, x), oracle.trace(oracle.correlation(jacobian, jacobian)))
    with pytest.raises(ValueError, match="requires grad"):
        lw.Network(model.requires_grad_(False))
    assert lw.GramMatrix(lw.Network(model, parameters="*"), x).dense().shape == (6, 6)


@pytest.mark.parametrize("make", [nets.Tied, nets.conv])
def test_training_mode_is_left_for_the_time_of_a_call(make):
    model, x = nets.case(make, 2, 6)
    assert model.training
    assert torch.equal(lw.similarity(model, x), lw.similarity(model.eval(), x))


def test_batch_statistics_in_evaluation_mode_are_refused():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False)).double()
    with pytest.raises(ValueError, match="other samples of its batch"):
        lw.similarity(model.eval(), inputs())


def test_randomness_in_evaluation_mode_is_refused():
    class Noisy(nn.Linear):
        def forward(self, x):
            return nn.functional.dropout(super().forward(x), 0.5)

    with pytest.raises(ValueError, match="random"):
        lw.similarity(Noisy(3, 8).double(), inputs())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models_give_float32_near_the_exact(dtype):
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
    x = torch.randn(8, 3)
    exact = lw.similarity(model, x)
    found = lw.similarity(model.to(dtype), x)
    assert found.dtype == torch.float32
    assert (found - exact).abs().max() < 0.05


def test_sums_of_float32_models_hold():
    model = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))
    x = torch.randn(3000, 3)
    found = lw.soft_neighbors(lw.GramMatrix(model, x))
    exact = lw.soft_neighbors(lw.GramMatrix(model.double(), x))
    assert found.dtype == torch.float32
    assert (found - exact).abs().max() / 3000 < 1e-6


class Counting(nn.Module):
    """Buffers and attributes that forward changes."""

    def __init__(self, style):
        super().__init__()
        self.out, self.style = nn.Linear(3, 2).double(), style
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(3).double())
        self.last = None

    def forward(self, x):
        if self.style == "in place":
            self.calls += 1
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        else:
            self.calls = self.calls + 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.last = x
        return self.out(x)


@pytest.mark.parametrize("style", ["in place", "assigned"])
@pytest.mark.filterwarnings("ignore:torch.func.vmap cannot differentiate Counting")
def test_buffers_updated_in_forward(style):
    model, x = Counting(style), inputs()
    expected = lw.similarity(model.out, x)
    assert torch.allclose(lw.similarity(model, x), expected)
    assert model.calls == 0 and (model.mean == 0).all() and model.last is None


class Wrapped(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.out, self.wrap = nn.Linear(3, 2).double(), wrap

    def forward(self, x):
        return self.wrap(self.out(x))


def test_structured_outputs():
    x = inputs()
    plain = Wrapped(lambda y: y)
    expected = lw.similarity(plain, x)
    for wrap in (lambda y: (y, y + 1), lambda y: {"logits": y, "other": y}, lambda y: {"only": y}):
        model = Wrapped(wrap)
        model.load_state_dict(plain.state_dict())
        assert torch.allclose(lw.similarity(model, x), expected)


def test_unclear_outputs_are_refused_and_a_readout_settles_them():
    model, x = Wrapped(lambda y: {"a": y, "b": y**2}), inputs()
    with pytest.raises(TypeError, match=r"\['a', 'b'\].*pass a readout"):
        lw.similarity(model, x)
    settled = lw.similarity(model, x, readout=lambda outputs, labels: outputs["a"])
    assert settled.shape == (6, 6)
    with pytest.raises(TypeError, match="str"):
        lw.similarity(Wrapped(lambda y: "no tensor"), x)


def test_squeezed_outputs():
    model, x = Wrapped(lambda y: y[:, :1].squeeze()), inputs()
    assert torch.allclose(lw.similarity(model, x).diagonal(), torch.ones(6).double())


def test_outputs_without_a_batch_are_refused():
    with pytest.raises(ValueError, match=r"expected \(3, d\)"):
        lw.similarity(Wrapped(lambda y: y.sum(0)[None]), inputs())


def test_what_vmap_cannot_do_is_done_one_by_one():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = linear(2), linear(2)

        def forward(self, x):
            return torch.cat([(self.a if row.sum() > 0 else self.b)(row[None]) for row in x])

    model, x = Branching(), inputs()
    jacobian = oracle.jacobians(model, x)
    with pytest.warns(UserWarning, match="one sample at a time"):
        found = lw.similarity(model, x, engine="autograd")
    assert torch.allclose(found, oracle.trace(oracle.correlation(jacobian, jacobian)))


def test_too_little_memory_is_said_with_numbers():
    with pytest.raises(MemoryError, match=r"2 outputs × 8 parameters.*max_memory"):
        lw.GramMatrix(linear(2), inputs(), max_memory=64).dense()


def test_centered_gradients_cannot_be_divided_by_their_sum():
    gram = lw.GramMatrix(linear(), inputs(), centered=True)
    for statistic in (lw.uncertainty, lw.disturbance, lw.denoising):
        with pytest.raises(ValueError, match="centered=False"):
            statistic(gram)


def test_inference_mode_and_no_grad_do_not_matter():
    model, x = nets.case(nets.mlp, 2, 6)
    expected = lw.similarity(model, x)
    with torch.no_grad():
        assert torch.equal(lw.similarity(model, x), expected)
    with torch.inference_mode():
        assert torch.equal(lw.similarity(model, x * 1), expected)
    assert not expected.requires_grad


@pytest.mark.parametrize("spread, coarse", [(0.1, False), (1e-2, True)])
def test_rounding_that_centering_brings_out_is_small_or_said(spread, coarse):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    x = torch.randn(1, 10) + spread * torch.randn(40, 10)  # gradients nearly alike: the mean is most of each
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found = lw.GramMatrix(model, x, centered=True).dense()
    exact = lw.GramMatrix(model.double(), x.double(), centered=True).dense()
    error = float((found - exact).abs().max())
    said = [re.search(r"off by up to about (\S+):", str(w.message)) for w in heard]
    assert bool(said) == coarse
    assert error < (float(said[0][1]) * 2 if coarse else 5e-4)


LARGE = {"mlp": (nets.mlp, (3,)), "conv": (nets.conv, (1, 5, 5))}


@pytest.mark.parametrize("engine", ["autograd", "layers"])
@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize("net", LARGE)
def test_gradients_whose_squares_overflow_have_the_same_similarities(net, d, engine):
    make, shape = LARGE[net]
    torch.manual_seed(0)
    model, x = make(d).float().eval(), torch.randn(6, *shape)
    expected = lw.similarity(copy.deepcopy(model).double(), 1e19 * x.double())
    gram = lw.GramMatrix(model, 1e19 * x, engine=engine)
    assert torch.allclose(gram.dense().double(), expected, atol=1e-5)
    assert torch.equal(lw.hard_neighbors(gram, 0.5), (expected >= 0.5).sum(1))
    best = expected.clone().fill_diagonal_(-2).sort(1, descending=True).values[:, :2]
    assert torch.allclose(lw.nearest(gram, 2).similarities.double(), best, atol=1e-5)
    assert torch.allclose(lw.novelty(gram, 2, parameters=None).double(), 1 - best.mean(1), atol=1e-5)
    assert lw.denoising(gram, exact=True).factor.isfinite().all()


def test_an_analysis_of_gradients_whose_squares_overflow(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(30, 3)
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    large = lw.analyze(model, (1e19 * x, torch.arange(30) % 2), out=tmp_path / "large", sketch="never")
    assert np.isfinite(large.similarity_matrix).all()


@pytest.mark.parametrize("use", ["dense", "row_sums", "diagonal"])
def test_values_out_of_range_are_refused_by_name(use):
    x = torch.ones(4, 3)
    x[2] = 1e25
    gram = lw.GramMatrix(nn.Linear(3, 1), x, kernel=lw.INNER_PRODUCT)
    with pytest.raises(ValueError, match=r"out of the range of torch.float32 .* ids \[.*2.*\]"):
        getattr(gram, use)()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_thresholds_and_exponents_that_are_no_numbers_are_refused(bad):
    gram = lw.GramMatrix(linear(), inputs())
    for call in (
        lambda: lw.hard_neighbors(gram, bad),
        lambda: lw.positive_neighbors(gram, bad),
        lambda: lw.similarity_histogram(gram, high=bad),
        lambda: lw.Kernel(bad, 0),
    ):
        with pytest.raises(ValueError, match="finite"):
            call()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("statistic", [lw.denoising, lw.fit_quality])
def test_labels_of_the_data_that_are_not_finite_are_named(statistic, bad):
    labels = torch.zeros(6, 1).double()
    labels[3] = bad
    with pytest.raises(ValueError, match=r"1 label is NaN or infinite, the first of samples \[3\]"):
        statistic(lw.GramMatrix(linear(), (inputs(), labels)))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_an_output_that_is_not_finite_but_has_a_zero_gradient_is_named(bad):
    def readout(outputs, labels):
        return torch.where(labels[:, None] > 0, bad, outputs)

    labels = torch.zeros(6)
    labels[4] = 1
    net = lw.Network(linear(), readout)
    gram = lw.GramMatrix(net, (inputs(), labels))
    with pytest.raises(ValueError, match=r"outputs of 1 sample are not finite, the first with ids \[4\]"):
        lw.denoising(gram, labels=torch.zeros(6, 1).double())
    others = gram.with_columns((inputs(4), torch.tensor([0.0, 0, 1, 0])))
    with pytest.raises(ValueError, match=r"ids \[2\]|ids \[4\]"):
        lw.denoising(others, labels=torch.zeros(4, 1).double())
