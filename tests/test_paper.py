"""The paper's theorems as properties, on random nets and inputs."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import likewise as lw
import nets

SEEDS = st.integers(0, 10_000)
OUTPUTS = st.integers(1, 4)
BLOCKS = lw.Kernel(-0.5, -0.5, lw.whole_block)


def random_net(d, seed, n=8):
    torch.manual_seed(seed)
    width = int(torch.randint(4, 9, ()))
    activation = [nn.Tanh(), nn.ELU(), nn.Sigmoid(), nn.SiLU()][seed % 4]
    model = nn.Sequential(nn.Linear(3, width), activation, nn.Linear(width, d)).double()
    return model, torch.randn(n, 3, dtype=torch.float64)


@given(OUTPUTS, SEEDS)
def test_self_similarity_is_the_identity(d, seed):
    model, x = random_net(d, seed)
    blocks = lw.GramMatrix(model, x, kernel=BLOCKS).dense()
    own = blocks[range(8), range(8)]
    assert (own - torch.eye(d).double()).abs().max() < 1e-9


@given(OUTPUTS, SEEDS)
def test_bounds_on_coefficients_trace_and_norm(d, seed):
    model, x = random_net(d, seed)
    blocks = lw.GramMatrix(model, x, kernel=BLOCKS).dense()
    assert blocks.abs().max() <= 1 + 1e-9
    assert blocks.diagonal(dim1=2, dim2=3).sum(-1).abs().max() <= d + 1e-9
    assert blocks.flatten(2).norm(dim=2).max() <= math.sqrt(d) + 1e-9
    gram = lw.GramMatrix(model, x)
    for kernel in (lw.CORRELATION, lw.ROTATION_INVARIANT, lw.SUBSPACE_MATCH, lw.NEAR_IDENTITY):
        assert gram.with_kernel(kernel).dense().abs().max() <= 1 + 1e-9
        assert (gram.with_kernel(kernel).diagonal() - 1).abs().max() < 1e-9


@given(OUTPUTS, SEEDS)
def test_symmetry(d, seed):
    model, x = random_net(d, seed)
    blocks = lw.GramMatrix(model, x, kernel=BLOCKS).dense()
    assert torch.allclose(blocks, blocks.transpose(0, 1).mT, atol=1e-12)


def same_gradient_net(seed, activation):
    """A net of the first input alone: inputs that differ in the second have equal gradients."""
    torch.manual_seed(seed)

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden, self.out = nn.Linear(1, 5).double(), nn.Linear(5, 1).double()

        def forward(self, x):
            self.activity = torch.tanh(self.hidden(x[:, :1]))
            return activation(self.out(self.activity))

    return First()


@pytest.mark.parametrize("activation", [nn.Identity(), nn.Tanh(), nn.Sigmoid(), nn.ReLU()])
@given(seed=SEEDS)
@pytest.mark.filterwarnings("ignore::likewise.ZeroGradientWarning")
def test_equal_gradients_make_equal_outputs_theorem_1_and_corollary(activation, seed):
    model = same_gradient_net(seed, activation)
    x = torch.randn(6, 2, dtype=torch.float64)
    x[3:, 0] = x[:3, 0]
    gram = lw.GramMatrix(model, x)
    k, f = gram.dense(), gram.outputs()[:, 0]
    inner = gram.with_kernel(lw.INNER_PRODUCT).dense()
    alike = k > 1 - 1e-12
    assert alike[range(3), range(3, 6)].eq(~gram.zero_gradients()[:3]).all()
    norms = inner.diagonal()
    apart = norms[:, None] + norms - 2 * inner  # ‖∇f(x) − ∇f(x')‖²
    assert apart[alike].abs().max() < 1e-9 if alike.any() else True
    assert (f[:, None] - f)[alike].abs().max() < 1e-9 if alike.any() else True


@given(SEEDS)
def test_equal_gradients_make_equal_useful_activities_theorem_2(seed):
    model = same_gradient_net(seed, nn.Identity())
    x = torch.randn(2, 2, dtype=torch.float64)
    x[1, 0] = x[0, 0]
    assert lw.similarity(model, x)[0, 1] > 1 - 1e-12
    model(x)
    assert torch.allclose(model.activity[0], model.activity[1])


@given(OUTPUTS, SEEDS)
def test_theorem_3_against_an_actual_step(d, seed):
    model, x = random_net(d, seed)
    move = torch.randn(d, dtype=torch.float64)
    net, at, of = lw.Network(model), x[:1], x
    predicted = lw.predicted_move(net, at, move, of)
    assert torch.allclose(predicted[0], move, atol=1e-9)
    jacobian = torch.stack(
        [
            torch.cat([g.flatten() for g in torch.autograd.grad(model(at)[0, i], list(model.parameters()))])
            for i in range(d)
        ]
    )
    step = jacobian.T @ torch.linalg.solve(jacobian @ jacobian.T, move)
    errors = []
    for epsilon in (1e-2, 1e-3):
        before = nn.utils.parameters_to_vector(model.parameters()).detach()
        was = model(of).detach()
        nn.utils.vector_to_parameters(before + epsilon * step, model.parameters())
        errors.append((model(of).detach() - was - epsilon * predicted).abs().max().item())
        nn.utils.vector_to_parameters(before, model.parameters())
    assert errors[1] <= errors[0] / 50 + 1e-10  # a step of a tenth leaves a hundredth of the error


@given(SEEDS)
def test_several_samples_are_moved_together(seed):
    model, x = random_net(2, seed)
    moves = torch.randn(2, 2, dtype=torch.float64)
    found = lw.predicted_move(lw.Network(model), x[:2], moves, x[:2])
    assert torch.allclose(found, moves, atol=1e-6)


@pytest.mark.parametrize("d", [2, 3, 4])
@given(seed=SEEDS)
def test_rotation_invariant_form_against_a_search(d, seed):
    torch.manual_seed(seed)
    block = torch.randn(d, d, dtype=torch.float64)
    found = lw.best_rotation(block)
    if d == 2:
        angles = torch.linspace(0, 2 * math.pi, 20_000, dtype=torch.float64)
        rotations = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], -1).view(-1, 2, 2)
        assert torch.allclose(found, 0.5 * (block.pow(2).sum() + 2 * block.det()).sqrt())
        searched = (block @ rotations).diagonal(dim1=1, dim2=2).sum(-1).max() / d
        assert abs(found - searched) < 1e-6
    rotations = torch.linalg.qr(torch.randn(500, d, d, dtype=torch.float64)).Q
    rotations[:, :, 0] *= rotations.det()[:, None]
    assert (block @ rotations).diagonal(dim1=1, dim2=2).sum(-1).max() / d <= found + 1e-12
    turned = lw.best_rotation(block @ rotations)
    assert torch.allclose(turned, found.expand(500))


@given(OUTPUTS, SEEDS)
def test_near_identity_is_trace_plus_mismatch(d, seed):
    model, x = random_net(d, seed)
    gram = lw.GramMatrix(model, x)
    mismatch = (1 - gram.with_kernel(lw.SUBSPACE_MATCH).dense()) / 2
    assert mismatch.min() >= -1e-9 and mismatch.max() <= 0.5  # not [0, 1] as printed
    assert torch.allclose(gram.with_kernel(lw.NEAR_IDENTITY).dense(), gram.dense() + mismatch)


@given(st.sampled_from(list(nets.SHAPES)), st.sampled_from([1, 3]), SEEDS)
@pytest.mark.filterwarnings("ignore:torch.func.vmap cannot differentiate Recurrent")
def test_linear_time_count_is_the_quadratic_one(make, d, seed):
    model, x = nets.case(make, d, 6, seed)
    gram = lw.GramMatrix(model, lw.batches(x, size=4))
    assert torch.allclose(lw.soft_neighbors(gram), gram.dense().sum(1), atol=1e-10)


@given(OUTPUTS, SEEDS)
def test_hard_counts_integrate_to_the_positive_one(d, seed):
    model, x = random_net(d, seed)
    gram = lw.GramMatrix(model, x)
    thresholds = (torch.arange(2000).double() + 0.5) / 2000
    k = gram.dense()
    counts = torch.stack([(k >= t).sum(1) for t in thresholds]).double()
    middle = lw.hard_neighbors(gram, float(thresholds[1000]))
    assert torch.equal(middle.double(), counts[1000])
    assert torch.allclose(counts.mean(0), lw.positive_neighbors(gram, 1), atol=8 / 2000)


@given(OUTPUTS, SEEDS)
def test_mean_similarity_of_a_set_is_the_norm_of_its_mean_gradient(d, seed):
    model, x = random_net(d, seed)
    gram = lw.GramMatrix(model, x)
    n, total = 8, gram.products().vjp(lambda where: torch.eye(d).double().expand(len(where), -1, -1))
    mu = total / n
    k = gram.dense()
    mean = (k.sum() - k.diagonal().sum()) / (n * (n - 1))
    assert torch.allclose(mean, n / (n - 1) * mu.pow(2).sum() / d - 1 / (n - 1))
    within = lw.class_similarity(gram, torch.zeros(n, dtype=torch.int64)).mean[0, 0]
    assert torch.allclose(within, mean)


@given(SEEDS)
def test_denoising_factor_lies_between_one_and_its_floor_for_positive_weights(seed):
    torch.manual_seed(seed)
    model = nn.Linear(3, 1).double()  # its kernel x·x' + 1 is positive on positive inputs
    x = torch.rand(9, 3, dtype=torch.float64)
    found = lw.denoising(lw.GramMatrix(model, x), exact=True)
    assert found.negative_share.max() == 0 and not found.unreliable.any()
    assert (found.factor >= found.floor - 1e-12).all() and (found.factor <= 1).all()
    alike = lw.denoising(lw.GramMatrix(model, x[:1].expand(9, 3)), exact=True)
    assert torch.allclose(alike.factor, torch.full((9,), 1 / 3).double())


def test_denoising_factor_of_independent_samples_is_one():
    model = nn.Linear(4, 1, bias=False).double()
    found = lw.denoising(lw.GramMatrix(model, torch.eye(4).double()), exact=True)
    assert torch.allclose(found.factor, torch.ones(4).double())
    assert torch.allclose(found.effective_neighbors, torch.ones(4).double())


@given(SEEDS)
def test_mean_of_predictions_is_that_of_labels_at_the_optimum(seed):
    torch.manual_seed(seed)
    x, y = torch.rand(9, 3, dtype=torch.float64), torch.randn(9, 1, dtype=torch.float64)
    model = nn.Linear(3, 1).double()
    best = torch.linalg.lstsq(torch.cat([x, torch.ones(9, 1).double()], 1), y).solution[:, 0]
    nn.utils.vector_to_parameters(best, model.parameters())
    found = lw.denoising(lw.GramMatrix(model, x), y, exact=True)
    assert torch.allclose(found.smoothed_prediction, found.smoothed_label)


ACTIVATIONS = [nn.Identity(), nn.Tanh(), nn.Sigmoid(), nn.Softplus(), nn.ELU(), nn.GELU()]


@pytest.mark.parametrize("last", [*ACTIVATIONS, nn.LogSoftmax(1)], ids=str)
@given(d=OUTPUTS, seed=SEEDS)
def test_lipschitz_bound_holds_on_every_pair(last, d, seed):
    model, x = random_net(d + isinstance(last, nn.LogSoftmax), seed)
    gram = lw.GramMatrix(nn.Sequential(model, last), x)
    f, bound = gram.outputs(), lw.lipschitz_bound(gram)
    assert bound.isfinite().all()
    assert ((f[:, None] - f).norm(dim=2) <= bound + 1e-9).all()


@given(SEEDS)
def test_lipschitz_bound_is_at_most_the_papers(seed):
    model, x = random_net(1, seed)
    gram = lw.GramMatrix(model, x)
    activity = model[:2](x).detach()
    norms = gram.with_kernel(lw.INNER_PRODUCT).diagonal().sqrt()
    constant = model[2].weight.norm() * norms * (1 + activity.abs()).norm(dim=1)[:, None]
    papers = constant * (2 * (1 - gram.dense()).clamp(min=0)).sqrt()
    assert (lw.lipschitz_bound(gram) <= papers + 1e-9).all()


@given(st.integers(1, 3), SEEDS)
def test_shift_is_within_its_bound(d, seed):
    model, x = random_net(d, seed)
    found = lw.denoising(lw.GramMatrix(model, x), exact=True)
    assert (found.shift.norm(dim=1) <= found.bound + 1e-9).all()
