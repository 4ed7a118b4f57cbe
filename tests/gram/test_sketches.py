"""Sketches keep inner products; centered similarities are the double-centered kernel, normalized."""

import warnings
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import likewise as lw
from likewise.distributed import record_passes
from likewise.engines import OperationCounter
from likewise.engines.factors import FactoredGradient
from likewise.gram import Reducer, cost, sketches
from likewise.gram.sketches import (
    Sketch,
    Sketches,
    draw_signs,
    error_factors,
    similarity_errors,
    whiten_sketches,
)
from nets import SHAPES, Words, case


def conv(outputs=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(96, outputs)), torch.randn(
        40, 1, 6, 6
    )


def sketched(gram, q, seed=0):
    with gram.net.evaluation_mode():
        return Sketch(q, seed)(gram.engine, gram.data.samples(range(gram.shape[0])))


def centered_of(k):
    """The centered similarity written out: normalized gradients less their mean, normalized again."""
    n = len(k)
    h = torch.eye(n, dtype=k.dtype) - 1 / n
    c = h @ k @ h
    scale = c.diagonal().rsqrt()
    return scale[:, None] * c * scale


class Both(Reducer):
    """Keeps whole strips, centered and plain."""

    results, centered = 2, True

    def __call__(self, strip):
        return strip.centered.clone(), strip.plain.clone()


def every(source):
    return source.visit(Both())[0][0]


def test_signs_of_one_draw_are_independent():
    like = torch.zeros(0, dtype=torch.float32)
    signs = draw_signs(64 * 3000 + 5, torch.Generator().manual_seed(0), like)
    assert torch.equal(signs.abs(), torch.ones(64 * 3000 + 5))
    words = signs[: 64 * 3000].view(3000, 64).double()
    assert (words.mean(0).abs() < 4.5 / 3000**0.5).all()
    together = words.T @ words / 3000 - torch.eye(64)
    assert (together.abs() < 5 / 3000**0.5).all() and abs(float(signs.mean())) < 4 / signs.numel() ** 0.5
    again = draw_signs(64 * 3000 + 5, torch.Generator().manual_seed(0), like.double())
    assert torch.equal(again, signs.double())


@pytest.mark.parametrize("engine", ["layers", "autograd"])
def test_inner_products_are_kept_on_average(engine):
    model, x = conv()
    gram = lw.GramMatrix(model, x, engine=engine)
    exact = gram.with_kernel(lw.INNER_PRODUCT).dense() * gram.d
    found = torch.stack(
        [torch.einsum("ndq,mdq->nm", *[sketched(gram, 32, seed).rows] * 2) for seed in range(60)]
    )
    error = (found.mean(0) - exact) / found.std(0)
    assert error.abs().mean() < 0.3  # 60 draws: a standard error is 0.13 standard deviations
    assert error.abs().max() < 0.9


@pytest.fixture
def any_size(monkeypatch):
    """Let matrices of any size be projected from both sides."""
    monkeypatch.setattr(sketches, "FEWEST_ENTRIES", 0)


class Matrices(nn.Module):
    """Long-sided weights: of a convolution, of packed projections, and a table that is an output layer as well."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(30, 24)
        self.attention = nn.MultiheadAttention(24, 2, batch_first=True)
        self.convolution = nn.Conv1d(24, 20, 3)
        self.last = nn.Linear(20, 24)

    def forward(self, tokens):
        x = self.table(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = torch.tanh(self.convolution(x.mT)).mT
        return (torch.tanh(self.last(x)) @ self.table.weight.T).mean(1)[:, :2]


def matrices(n=24):
    torch.manual_seed(1)
    return lw.GramMatrix(lw.Network(Matrices().double(), lw.all_outputs), torch.randint(30, (n, 9)))


def test_matrices_with_long_sides_are_projected_without_being_formed(any_size, monkeypatch):
    gram, formed = matrices(), []
    rows = FactoredGradient.rows
    with gram.net.evaluation_mode():
        first = gram.data.samples(range(1))
        assert not Sketch(512, 0)._find_matrices(gram.engine, first)  # longer than all sides
        names = Sketch(16, 0)._find_matrices(gram.engine, first)
        assert set(names) >= {"table.weight", "convolution.weight", "last.weight"}
        monkeypatch.setattr(FactoredGradient, "rows", lambda g: formed.append(g) or rows(g))
        Sketch(16, 0)(gram.engine, gram.data.samples(range(24)))
    assert not formed


@pytest.mark.parametrize("q", [16, 512], ids=["from two sides", "formed"])
def test_inner_products_are_kept_on_average_whatever_is_projected_from_two_sides(q, any_size):
    gram = matrices()
    exact = gram.with_kernel(lw.INNER_PRODUCT).dense() * gram.d
    found = torch.stack(
        [torch.einsum("ndq,mdq->nm", *[sketched(gram, q, seed).rows] * 2) for seed in range(60)]
    )
    error = (found.mean(0) - exact) / found.std(0)
    assert error.abs().mean() < 0.3 and error.abs().max() < 0.9
    torch.testing.assert_close(sketched(gram, q).squares, gram.self_kernel().diagonal(dim1=1, dim2=2).sum(1))


def test_blocks_of_a_projection_are_told_in_the_errors(any_size):
    """Of layers in which one input dominates: their numbers are far from independent."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(64, 64, 2), nn.Tanh(), nn.Conv1d(64, 64, 2), nn.Flatten(), nn.Linear(192, 1)
    )
    x = torch.randn(40, 64, 5, dtype=torch.float64) * 0.3 + torch.randn(64, 5, dtype=torch.float64)
    gram = lw.GramMatrix(model.double(), x)
    with gram.net.evaluation_mode():
        group = Sketch(132, 0).dependent_buckets(gram.engine, gram.data.samples(range(1)))
    exact, inside = gram.dense(), {1: 0.0, group: 0.0}
    apart, seeds = ~torch.eye(40, dtype=torch.bool), 30
    for seed in range(seeds):
        plain = whiten_sketches(sketched(gram, 132, seed))
        off = (plain @ plain.T - exact)[apart].abs()
        for size in inside:
            errors = similarity_errors(plain, plain, 1, size)[apart]
            inside[size] += float((off <= 1.96 * errors).double().mean()) / seeds
    assert group == 4 and 0.9 < inside[group] < 0.99 and inside[1] < inside[group], inside


@pytest.mark.parametrize("lengths", [[1, 1, 1, 4], [4, 1, 1, 4], [1] * 8 + [3]], ids=str)
def test_texts_of_one_token_are_compared_with_longer_ones(lengths):
    """Of one position, gradients are factors; of several, they come in other parts."""
    torch.manual_seed(0)
    texts = [torch.randint(20, (lengths[i % len(lengths)],)) for i in range(24)]
    pad_all = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    loader = torch.utils.data.DataLoader(texts, batch_size=4, collate_fn=pad_all)
    net = lw.Network(Words().double(), lw.all_outputs)
    gram = lw.GramMatrix(net, lw.batches(loader))
    columns = lw.GramMatrix(net, pad_all(texts[:4]), columns=lw.batches(loader))
    for matrix in (gram, columns):
        rough = lw.nearest(matrix, 3, sketch=2048).similarities  # first: exact pairs settle the parts as well
        assert (rough - lw.nearest(matrix, 3).similarities).abs().max() < 0.1


def test_the_error_falls_as_the_root_of_the_width():
    model, x = conv()
    gram = lw.GramMatrix(model, x)
    exact = gram.dense()
    errors = []
    for q in (16, 64, 256, 1024):
        features = whiten_sketches(sketched(gram, q))
        errors.append(float((features @ features.T - exact).square().mean().sqrt()) * (q * gram.d) ** 0.5)
    assert all(0.2 < error < 2 for error in errors), errors


def test_self_kernels_are_exact_also_where_a_direction_is_null():
    model, x = conv(3)
    for readout in (lw.all_outputs, lw.log_probabilities):
        gram = lw.GramMatrix(lw.Network(model, readout), x)
        found = sketched(gram, 16)
        torch.testing.assert_close(
            found.squares.float(), gram.self_kernel().diagonal(dim1=1, dim2=2).sum(1).float()
        )
        torch.testing.assert_close(
            found.whitening.float(), gram.self_kernel(-0.5).float(), rtol=1e-3, atol=1e-4
        )
        assert found.ranks.tolist() == gram.ranks().tolist()


def test_equal_samples_stay_equal_and_no_gradient_is_like_nothing():
    model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.ReLU(), nn.Linear(5, 2, bias=False))
    x = torch.randn(6, 3)
    x[1], x[2] = x[0], 0
    features = whiten_sketches(sketched(lw.GramMatrix(model, x), 64))
    centered = every(Sketches(features))
    assert torch.allclose(features[0], features[1]) and abs(float(centered[0, 1]) - 1) < 1e-5
    assert features[2].abs().max() == 0 and centered[2].abs().max() == 0


@pytest.mark.parametrize("make", SHAPES, ids=lambda make: make.__name__)
def test_centered_similarities_are_the_double_centered_kernel(make):
    model, x = case(make, 3, 12)
    gram = lw.GramMatrix(model, x)
    found = every(gram)
    assert torch.equal(found, gram.with_centering(True).dense())
    torch.testing.assert_close(found.double(), centered_of(gram.dense().double()), rtol=1e-8, atol=1e-8)


@given(seed=st.integers(0, 10_000), n=st.integers(2, 12), q=st.integers(1, 8))
@settings(max_examples=30, deadline=None)
def test_sketches_center_any_features(seed, n, q):
    chance = torch.Generator().manual_seed(seed)
    features = nn.functional.normalize(torch.randn(n, q + 1, generator=chance, dtype=torch.float64), dim=1)
    found = every(Sketches(features))
    torch.testing.assert_close(found, centered_of(features @ features.T), rtol=1e-6, atol=1e-6)
    assert found.abs().max() <= 1 + 1e-9
    assert torch.allclose(found.diagonal(), torch.ones(n, dtype=torch.float64))


@given(seed=st.integers(0, 10_000), n=st.integers(2, 9), m=st.integers(2, 9))
@settings(max_examples=30, deadline=None)
def test_new_inputs_are_centered_about_the_mean_of_the_data(seed, n, m):
    chance = torch.Generator().manual_seed(seed)
    draw = lambda k: nn.functional.normalize(torch.randn(k, 6, generator=chance).double(), dim=1)  # noqa: E731
    new, data = draw(n), draw(m)
    found, plain = Sketches(new, columns=data).visit(Both())[0]
    apart = [nn.functional.normalize(part - data.mean(0), dim=1) for part in (new, data)]
    torch.testing.assert_close(found, apart[0] @ apart[1].T, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(plain, new @ data.T, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("make", SHAPES, ids=lambda make: make.__name__)
def test_exact_centered_similarities_of_new_inputs(make):
    model, x = case(make, 3, 12)
    gram = lw.GramMatrix(model, x[:4], columns=x[4:])
    found = every(gram)
    data = lw.GramMatrix(model, x[4:]).dense().double()
    cross, own = gram.dense().double(), lw.GramMatrix(model, x[:4]).dense().double()
    r, s, g = cross.mean(1), data.mean(1), data.mean()
    scale = [(k.diagonal() - 2 * means + g).rsqrt() for k, means in ((own, r), (data, s))]
    expected = (cross - r[:, None] - s + g) * scale[0][:, None] * scale[1]
    torch.testing.assert_close(found.double(), expected, rtol=1e-8, atol=1e-8)


def transformer(outputs):
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(8, 16), layer, nn.Flatten(), nn.Linear(16 * 6, outputs))


def image_net(outputs):
    layers = [nn.Conv2d(1, 12, 3), nn.ReLU(), nn.Conv2d(12, 16, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, outputs))


def dense_net(outputs):
    return nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, outputs))


def wide_image_net(outputs):
    """Whose sketches are projected from two sides, for the most part."""
    layers = [nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, outputs))


def test_95_of_100_intervals_of_sketched_similarities_hold_the_exact_one():
    coverage, narrow = [], ((1, 512), (4, 128), (10, 52))
    cases = [(dense_net, (20,), narrow), (image_net, (1, 10, 10), narrow), (transformer, (6, 8), narrow)]
    for make, shape, sizes in [*cases, (wide_image_net, (1, 8, 8), ((10, 116),))]:
        for outputs, q in sizes:
            torch.manual_seed(0)
            model, x = make(outputs).double(), torch.randn(30, *shape, dtype=torch.float64)
            coverage.append(measure_coverage(lw.GramMatrix(model, x), q))
    found = torch.tensor(coverage)  # (nets, plain and centered)
    assert found.min() >= 0.9 and found.max() <= 0.98
    assert 0.93 <= found.mean(0).min() and found.mean(0).max() <= 0.97


def measure_coverage(gram, q, seeds=24):
    """The share of pairs whose exact similarity is within 1.96 errors, plain and centered."""
    apart = torch.triu_indices(30, 30, 1).unbind()
    exact = [gram.with_centering(centered).dense()[apart] for centered in (False, True)]
    inside = torch.zeros(2, dtype=torch.float64)
    with gram.net.evaluation_mode():
        group = Sketch(q, 0).dependent_buckets(gram.engine, gram.data.samples(range(1)))
    for seed in range(seeds):
        plain = whiten_sketches(sketched(gram, q, seed))
        centered = nn.functional.normalize(plain - plain.mean(0), dim=1)
        for kind, vectors in enumerate((plain, centered)):
            errors = similarity_errors(vectors, vectors, gram.d, group)
            assert errors.diagonal().max() < 1e-7  # a sample's similarity to itself is exact
            off = (vectors @ vectors.T)[apart] - exact[kind]
            inside[kind] += (off.abs() <= 1.96 * errors[apart]).double().mean() / seeds
    return inside.tolist()


def test_error_factors_make_19_of_20_errors_smaller_than_two_standard_errors():
    torch.manual_seed(0)
    gram = lw.GramMatrix(dense_net(2).double(), torch.randn(32, 20, dtype=torch.float64))
    sketches = whiten_sketches(sketched(gram, 40))
    exact = gram.dense()
    found = error_factors(sketches, exact, 2)
    centered = gram.with_centering(True).dense()
    vectors = nn.functional.normalize(sketches - sketches.mean(0), dim=1)
    for factor, rows, truth in ((found.centered, vectors, centered), (found.plain, sketches, exact)):
        errors, total = similarity_errors(rows, rows, 2), []
        for i in range(32):
            for j in range(i):
                total.append(abs(float(rows[i] @ rows[j]) - float(truth[i, j])) / float(errors[i, j]))
        inside = sum(value <= 1.96 * factor for value in total) / len(total)
        assert inside == pytest.approx(0.95, abs=1 / len(total))
    assert error_factors(sketches[:20], exact[:20, :20], 2) == (1, 1)  # 190 pairs tell little
    assert error_factors(sketches[:1].expand(32, -1), torch.full((32, 32), 0.5), 2) == (
        1,
        1,
    )  # equal: no error


def test_errors_of_some_pairs_are_those_of_all():
    model, x = conv()
    gram = lw.GramMatrix(model, x)
    vectors = whiten_sketches(sketched(gram, 40))
    errors = similarity_errors(vectors, vectors, 4)
    indices = torch.randint(40, (40, 3), generator=torch.Generator().manual_seed(0))
    some = similarity_errors(vectors[:, None], vectors[indices], 4)[:, 0]
    torch.testing.assert_close(some, errors.gather(1, indices), rtol=1e-3, atol=1e-5)
    with pytest.raises(ValueError, match="a multiple of 16"):
        similarity_errors(vectors[:, :12], vectors[:, :12], 4)
    with pytest.raises(ValueError, match="multiple of 4"):
        Sketch(47, 0)


@pytest.fixture
def costly_pairs(monkeypatch):
    """Let exact pairs be too expensive, however few they are."""
    for name in ("FEW_MULTIPLICATIONS", "FEW_EPOCHS", "FEW_TIMES"):
        monkeypatch.setattr(cost, name, 0)


def pixel_net(outputs=4):
    """Whose gradients have many numbers for its operations: pairs soon take most of the time."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 1), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(256, outputs)).double()


def pixels(n, seed=0):
    return torch.randn(n, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def matrix_of(kind, n=120, centered=False):
    """A square matrix, or one of other rows."""
    rows = None if kind == "square" else pixels(50, seed=1)
    data = (pixels(n), torch.arange(n) % 4)
    return lw.GramMatrix(pixel_net(), data if rows is None else rows, data, centered=centered)


PAIR_STATISTICS = {
    "nearest": lambda gram, **s: lw.nearest(gram, 5, **s),
    "hard_neighbors": lambda gram, **s: lw.hard_neighbors(gram, 0.2, **s),
    "positive_neighbors": lw.positive_neighbors,
    "similarity_histogram": lw.similarity_histogram,
    "duplicates": lambda gram, **s: lw.duplicates(gram, **s).similarity,
    "novelty": lw.novelty,
    "reliability": lambda gram, **s: [part for part in lw.reliability(gram, **s) if torch.is_tensor(part)],
}
OF_ONE_SET = {
    "fit_quality": lambda gram, **s: lw.fit_quality(gram, **s).neighbors,
    "label_suspicion": lambda gram, **s: lw.label_suspicion(gram, **s).suspicion,
    "value_suspicion": lambda gram, **s: lw.value_suspicion(gram, torch.randn(gram.shape[0]), **s).score,
    "multilabel_suspicion": lambda gram, **s: (
        lw.multilabel_suspicion(gram, torch.eye(4, dtype=torch.long)[gram.data.labels()], **s).suspicion
    ),
}


STATISTICS = {**PAIR_STATISTICS, **OF_ONE_SET}
CASES = [(name, "square") for name in STATISTICS] + [(name, "rectangular") for name in PAIR_STATISTICS]


def of_all(found):
    return [found] if isinstance(found, torch.Tensor) else list(found)


@pytest.mark.filterwarnings("error::likewise.SketchNotice", "ignore:Only .* of the predictions match")
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_few_pairs_are_exact_bit_for_bit(name, kind):
    statistic = STATISTICS[name]
    found, exact = (of_all(statistic(matrix_of(kind), **options)) for options in ({}, {"sketch": None}))
    assert len(found) == len(exact) and all(map(torch.equal, found, exact))


@pytest.mark.usefixtures("costly_pairs")
@pytest.mark.filterwarnings("ignore:Only .* of the predictions match")
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_pairs_that_would_take_long_are_those_of_sketches_and_a_notice_says_so(name, kind):
    statistic = STATISTICS[name]
    with pytest.warns(lw.SketchNotice, match=r"sketches of 1,0.. numbers.*about 0\.03.*sketch=None"):
        torch.manual_seed(0)
        found = of_all(statistic(matrix_of(kind)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", lw.SketchNotice)
        torch.manual_seed(0)
        expected = of_all(statistic(matrix_of(kind), sketch=1024))
        assert all(map(torch.equal, found, expected))


def test_three_thousand_samples_of_a_small_network_are_sketched():
    gram = lw.GramMatrix(pixel_net(), pixels(3300))
    count = gram.pair_cost()
    forward = 4 * (9 * 64 + 64 * 64) + 256 * 4  # multiplications of a sample
    numbers = (
        4 * (9 * 64 + 64 + 64 * 64 + 64) + 256 + 4 * (4 + 1) - 4
    )  # the last layer's gradient has two factors
    assert count.exact == pytest.approx(3 + numbers * 3300 / 2 / (3 * forward), rel=0.05)
    assert count.sketched == pytest.approx(3 + 1024 * 3300 / 2 / (3 * forward), rel=0.05)
    with pytest.warns(lw.SketchNotice, match=f"take at least {count.exact:,.0f} plain training epochs"):
        found = lw.nearest(gram, 3)
    exact = lw.GramMatrix(gram.net, pixels(3300)[:30], pixels(3300)).dense()
    off = (exact.gather(1, found.indices[:30]) - found.similarities[:30]).abs()
    assert (off <= 3 * found.errors[:30]).double().mean() > 0.9
    one = lw.nearest(lw.GramMatrix(gram.net, pixels(1, seed=1), pixels(3300)), 3)
    assert one.errors.eq(0).all()  # few queries are exact


@pytest.mark.usefixtures("costly_pairs")
def test_a_notice_comes_once_for_a_matrix_and_those_made_from_it():
    gram = matrix_of("square")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lw.nearest(gram)
        lw.positive_neighbors(gram.with_centering(True))
        lw.nearest(gram, sketch=64)
    (notice,) = [str(one.message) for one in caught if one.category is lw.SketchNotice]
    assert notice.startswith("120 × 120 pairs")
    with pytest.warns(lw.SketchNotice):
        lw.nearest(matrix_of("square"))


@pytest.mark.usefixtures("costly_pairs")
@pytest.mark.filterwarnings("ignore::likewise.SketchNotice")
def test_sketches_are_computed_once_for_all_statistics_until_something_changes():
    data = pixels(120)
    gram = lw.GramMatrix(pixel_net(), data)

    def passes(matrix, **options):
        with record_passes(lambda: 0) as made:
            found = lw.nearest(matrix, 3, **options)
        return found, [one.what for one in made if one.what == "sketches"]

    first, made = passes(gram)
    assert made == ["sketches"]
    for other in (gram, gram.with_centering(True), gram.with_kernel(lw.CORRELATION)):
        assert passes(other)[1] == []
    assert torch.equal(passes(gram)[0].similarities, first.similarities)
    assert passes(gram, sketch=64)[1] == passes(gram)[1] == ["sketches"]  # of another length
    for change in (data.mul_, gram.net.model[0].weight.data.mul_):
        change(1.5)
        found, made = passes(gram)
        assert made == ["sketches"]
        fresh = lw.GramMatrix(gram.net.model, data.clone())
        assert torch.equal(found.similarities, passes(fresh)[0].similarities)
    little = lw.GramMatrix(gram.net, data, max_memory=2**21)  # of which sketches take more than a quarter
    assert passes(little)[1] == passes(little)[1] == ["sketches"]
    other = passes(gram.with_parameters("last layer"))[0]
    assert not torch.equal(other.similarities, found.similarities)


def _list_of_samples():
    samples = list(pixels(40))
    return lw.GramMatrix(pixel_net(), samples), lambda: [sample.mul_(-2) for sample in samples[:20]]


def _data_set():
    class Pixels(torch.utils.data.Dataset):
        contrast = 1.0

        def __len__(self):
            return 40

        def __getitem__(self, i):
            return pixels(40)[i].tanh() * self.contrast

    samples = Pixels()
    return lw.GramMatrix(pixel_net(), samples), partial(setattr, samples, "contrast", 3.0)


def _readout():
    class One:
        i = 0

        def __call__(self, outputs, labels):
            return outputs[:, self.i : self.i + 1]

    readout = One()
    return lw.GramMatrix(lw.Network(pixel_net(), readout), pixels(40)), partial(setattr, readout, "i", 1)


@pytest.mark.parametrize("changing", [_list_of_samples, _data_set, _readout])
def test_sketches_of_data_or_readouts_that_no_tensor_tells_of_are_computed_again(changing):
    gram, change = changing()
    before = lw.nearest(gram, 3, sketch=64).similarities
    change()
    found = lw.nearest(gram, 3, sketch=64).similarities
    fresh = lw.GramMatrix(lw.Network(gram.net.model, gram.net.readout), gram.data)
    assert torch.equal(found, lw.nearest(fresh, 3, sketch=64).similarities)
    assert not torch.allclose(found, before)


def test_other_columns_are_centered_by_the_reference_set_in_sketches_too():
    rows, first = pixels(20), pixels(30, seed=1) + 1
    gram = lw.GramMatrix(pixel_net(), rows, first, centered=True)
    for columns in (pixels(25, seed=2) - 1, rows):
        other = gram.with_columns(columns)
        exact = other.dense()
        found = lw.nearest(other, 19, sketch=4096)
        off = (found.similarities - exact.gather(1, found.indices)).abs()
        assert off.max() < 5 * found.errors.max() < 0.3
        own = lw.GramMatrix(pixel_net(), rows, columns, centered=True).dense()
        assert (own.gather(1, found.indices) - found.similarities).abs().max() > 0.5  # centered by themselves


@pytest.mark.usefixtures("costly_pairs")
@pytest.mark.filterwarnings("error::likewise.SketchNotice")
def test_where_there_are_no_sketches_or_gradients_are_kept_pairs_are_exact():
    gram, x = matrix_of("square"), pixels(40)
    assert lw.nearest(gram.with_kernel(lw.INNER_PRODUCT), 3).errors.eq(0).all()
    assert lw.nearest(lw.perceptual(pixel_net(), "1", x), 3).errors.eq(0).all()
    kept = gram.with_feature_cache()
    assert torch.equal(lw.nearest(kept, 3).similarities, lw.nearest(kept, 3, sketch=None).similarities)
    assert lw.nearest(gram, 3, sketch=None).errors.eq(0).all()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"Sketches are of likewise\.CORRELATION"):
            lw.nearest(gram.with_kernel(lw.INNER_PRODUCT), 3, sketch=64)
        lw.nearest(gram, 3, sketch=64)  # whose sketches the other kernel's matrix finds
    with pytest.raises(TypeError, match="'auto'"):
        lw.nearest(gram, 3, sketch="never")


@pytest.mark.usefixtures("costly_pairs")
@pytest.mark.filterwarnings("ignore::likewise.SketchNotice")
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("kind", ["square", "rectangular"])
def test_95_of_100_intervals_of_neighbors_hold_the_exact_similarity(kind, centered):
    gram = matrix_of(kind, centered=centered)
    found, exact = lw.nearest(gram, 100), gram.dense()
    off = (exact.gather(1, found.indices) - found.similarities).abs()
    assert 0.9 <= (off <= 1.96 * found.errors).double().mean() <= 0.99
    assert found.errors.shape == found.similarities.shape and 0.001 < found.errors.mean() < 0.06


@pytest.mark.usefixtures("costly_pairs")
@pytest.mark.filterwarnings("ignore::likewise.SketchNotice", "ignore:Only .* of the predictions match")
def test_evidence_has_errors_of_centered_similarities():
    gram = matrix_of("square")
    found = lw.label_suspicion(gram)
    evidence = lw.label_evidence(gram, found, k=40)  # of 30 of each class
    exact = gram.with_centering(True).dense().gather(1, evidence.indices)
    there = evidence.similarities > -torch.inf
    off = (exact - evidence.similarities)[there].abs()
    assert 0.9 <= (off <= 1.96 * evidence.errors[there]).double().mean() <= 0.99
    assert (~there).any() and evidence.errors[~there].eq(0).all()


@pytest.mark.usefixtures("costly_pairs")
@pytest.mark.parametrize("kind", ["square", "rectangular", "one"])
def test_a_plan_is_of_what_the_statistic_does(kind):
    gram = matrix_of(kind, n=400)
    if kind == "one":
        gram = lw.GramMatrix(gram.net, pixels(1, seed=1), pixels(400))
    with warnings.catch_warnings():
        warnings.simplefilter("error", lw.SketchNotice)  # a plan announces nothing: the statistic will
        plan = gram.plan(lw.nearest)
        exact = gram.plan(lw.nearest, sketch=None)
    with pytest.warns(lw.SketchNotice), record_passes(lambda: 0) as made:
        lw.nearest(gram)
    visits = [one for one in made if one.what == "pairs of sketches"]
    assert plan.visits_of_pairs == len(visits) == 1
    assert plan.passes == sum(one.what.startswith("sketches") for one in made)
    assert "sketches of gradients" in plan.method and "sketches" not in exact.method
    fresh = lw.GramMatrix(gram.net, gram.data, None if gram.square else gram.columns)
    _ = fresh.engine  # set-up is no part of a plan
    with OperationCounter() as counter:
        lw.hard_neighbors(fresh, sketch=1024)  # has no errors to tell
    assert gram.plan(lw.hard_neighbors).flops == pytest.approx(counter.flops, rel=0.25)
