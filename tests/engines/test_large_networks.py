"""Large networks, which are checked on fewer samples before the first number, return right numbers or say why not."""

import copy

import pytest
import torch
from test_validation import (
    Backwards,
    ByExpert,
    Regrouping,
    Rolled,
    SortedByLength,
    SortedByValue,
    Unpadded,
)

import hostile
import likewise as lw
import models
import oracle
from likewise.data import Samples
from likewise.engines import TracedEngine, validation
from likewise.engines.pass_check import PassCheck

REGROUPING = {
    **{
        made.__name__: made for made in (SortedByValue, SortedByLength, Unpadded, ByExpert, Backwards, Rolled)
    },
    **dict.fromkeys(
        [
            "packed sequences",
            "rows without padding",
            "experts in one parameter",
            "the batch in two chunks",
            "the batch backwards",
            "x and -x in one batch",
            "pictures sorted by brightness",
            "time steps before samples, flattened",
            "a loop over samples",
            "control flow on data",
        ]
    ),
}
STATISTICS = {
    "pairs": (lambda gram: gram.dense(), lambda k: k),
    "products": (lambda gram: gram.row_sums(), lambda k: k.sum(1)),
    "diagonal": (lambda gram: gram.diagonal(), lambda k: k.diagonal()),
}
MISMATCH = (lw.GradientMismatchError, lw.DependentSampleError)


@pytest.fixture(autouse=True)
def every_network_is_large(monkeypatch):
    monkeypatch.setattr(validation, "LARGE", -1)


def regrouping(name, n, seed):
    """A model that regroups samples, and n inputs."""
    if REGROUPING[name] is None:
        model, _ = models.of(name, n)
        torch.manual_seed(seed)
        return model.eval(), torch.randn(n, *models.CASES[name][1], dtype=torch.float64)
    torch.manual_seed(seed)
    model = REGROUPING[name]().double().eval()
    x = torch.randn(n, 5, 4, dtype=torch.float64)
    return model, x * (torch.arange(5) < torch.randint(1, 6, (n, 1)))[:, :, None]


def inner_products(model, x):
    rows = oracle.jacobians(model, x)
    return torch.einsum("adp,bdp->ab", rows, rows) / rows.shape[1]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("n", "size"), [(2, 2), (3, 3), (6, 4), (20, 7)])
@pytest.mark.parametrize("name", REGROUPING)
@pytest.mark.filterwarnings("error")
def test_samples_that_forward_regroups_have_right_similarities(name, n, size, seed):
    model, x = regrouping(name, n, seed)
    expected = inner_products(model, x)
    gram = lw.GramMatrix(lw.Network(model, lw.all_outputs), lw.batches(x, size), kernel=lw.INNER_PRODUCT)
    for compute, right in STATISTICS.values():
        torch.testing.assert_close(compute(gram), right(expected), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("rows", [2, 3])
@pytest.mark.parametrize("name", ["SortedByValue", "SortedByLength", "pictures sorted by brightness"])
def test_rows_against_more_columns_are_right(name, rows):
    model, x = regrouping(name, 20, 0)
    gram = lw.GramMatrix(
        lw.Network(model, lw.all_outputs), x[:rows], columns=x[rows:], kernel=lw.INNER_PRODUCT
    )
    torch.testing.assert_close(gram.dense(), inner_products(model, x)[:rows, rows:], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["SortedByValue", "SortedByLength", "pictures sorted by brightness"])
def test_one_row_against_columns_is_right_or_refused(name, seed):
    model, x = regrouping(name, 20, seed)
    net = lw.Network(model, lw.all_outputs)
    gram = lw.GramMatrix(net, x[:1], columns=x[1:], kernel=lw.INNER_PRODUCT)
    try:  # one sample alone does not show that forward sorts several
        found = gram.dense()
    except MISMATCH as error:
        assert 'engine="autograd"' in str(error)
    else:
        torch.testing.assert_close(found, inner_products(model, x)[:1, 1:], rtol=1e-8, atol=1e-8)


class ManySorted(Regrouping):
    """Sorts batches of more than four samples, which no check before the first number has."""

    def regrouped(self, x):
        order = (x[:, 0] * (len(x) > 4)).argsort(stable=True)
        return self.inner(x[order])[order.argsort()]


def two_out_of_order(n, place):
    """Samples in order but for two neighbors."""
    x = torch.randn(n, 4, dtype=torch.float64)
    x[:, 0] = torch.arange(n) / n
    return x[[*range(place), place + 1, place, *range(place + 2, n)]]


@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize("how", STATISTICS)
@pytest.mark.parametrize("place", range(10))
def test_two_samples_of_a_batch_that_change_places_stop_the_first_pass(monkeypatch, place, how, large):
    monkeypatch.setattr(validation, "LARGE", -1 if large else 5e8)
    x = two_out_of_order(12, place)
    gram = lw.GramMatrix(ManySorted().double().eval(), lw.batches(x, 12))
    assert isinstance(gram.engine, TracedEngine)
    with pytest.raises(lw.GradientMismatchError, match="moves samples") as caught:
        STATISTICS[how][0](gram)
    assert caught.value.id in (place, place + 1)


@pytest.mark.parametrize("n", [20, 50])
def test_columns_are_checked_in_a_pass_that_begins_with_rows(n):
    x = two_out_of_order(n, 0).flip(0)  # all change places
    gram = lw.GramMatrix(ManySorted().double().eval(), x[:3], columns=x)
    with pytest.raises(lw.GradientMismatchError, match="moves samples"):
        gram.dense()


def test_every_pass_checks_several_samples_together():
    x = two_out_of_order(12, 0)
    gram = lw.GramMatrix(ManySorted().double().eval(), lw.batches(x.sort(0).values, 12))
    for _ in range(3):
        gram.diagonal()
    moved = gram.with_columns(x.flip(0)).of_columns()  # the fourth pass, of other samples
    with pytest.raises(lw.GradientMismatchError, match="moves samples"):
        moved.diagonal()


def test_a_batch_is_verified_only_in_its_order_and_with_its_values():
    model, x = Regrouping().double(), torch.randn(2, 4, dtype=torch.float64)
    net, samples = lw.Network(model), Samples(x, None, torch.arange(2))
    swapped = samples[torch.tensor([1, 0])]
    others = Samples(x + 1, None, samples.ids)
    for offered, is_checked in [(samples, False), (swapped, True), (samples[:1], True), (others, True)]:
        check = PassCheck(net, verified=samples)
        chosen = []
        with net.evaluation_mode():
            check.offer(offered, None, lambda places, _, seen=chosen: seen.append(places) or [], 2)
        assert bool(chosen) == is_checked


@pytest.mark.parametrize(("n", "later"), [(3, []), (6, [2, 2])])
def test_more_than_two_samples_cost_one_more_call_before_the_first_number(n, later):
    called = []
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).double()
    model.register_forward_pre_hook(lambda _, given: called.append(len(given[0])))
    lw.GramMatrix(model, torch.randn(n, 4, dtype=torch.float64)).engine  # noqa: B018
    # the first alone; a pair by autograd; the pair, recorded; the other alone; one between two copies of the other
    assert called == [1, 2, 2, 1, 3, *later]


class Picky(SortedByValue):
    """Takes no sample that is truncated."""

    def regrouped(self, x):
        if (x == 0).any():
            raise ValueError("a sample is truncated")
        return super().regrouped(x)


class NanIfTruncated(SortedByValue):
    def regrouped(self, x):
        return super().regrouped(x) / (x != 0).all()


class AnotherBranch(SortedByValue):
    """Works more on truncated samples."""

    def regrouped(self, x):
        h = super().regrouped(x)
        return self.b(h) if (x == 0).any() else h


@pytest.mark.parametrize("make", [Picky, NanIfTruncated, AnotherBranch])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.filterwarnings("error")
def test_models_that_take_no_truncated_samples_are_checked_on_whole_ones(make, seed):
    torch.manual_seed(seed)
    model, x = make().double().eval(), torch.randn(6, 5, 4, dtype=torch.float64)
    gram = lw.GramMatrix(lw.Network(model, lw.all_outputs), x, kernel=lw.INNER_PRODUCT)
    torch.testing.assert_close(gram.dense(), inner_products(model, x), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("n", "size"), [(2, 2), (3, 2), (6, 4), (20, 7)])
@pytest.mark.parametrize("name", hostile.MODELS)
def test_hostile_models_return_right_numbers_or_an_error_of_this_package(name, n, size):
    model, expected, _ = hostile.MODELS[name]
    made, x = model(), hostile.inputs(n)
    outcome = hostile.observe(
        lambda: lw.GramMatrix(made, lw.batches(x, size), kernel=lw.INNER_PRODUCT).dense()
    )
    if outcome.error is not None:
        assert not isinstance(expected, hostile.Same) and hostile.is_own(outcome.error), outcome.error
        return
    if isinstance(expected, hostile.ZeroGradient):
        assert not outcome.value.any()
        return
    is_same = isinstance(expected, hostile.Same)
    right = inner_products(hostile.network() if is_same else copy.deepcopy(made).double(), x)
    tolerance = 0.05 if "float16" in name else getattr(expected, "tolerance", 1e-9)
    assert hostile.difference(outcome.value, right, tolerance) is None
