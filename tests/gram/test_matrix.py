"""The two uses of a Gram matrix, under little memory, and their errors."""

import pandas
import pytest
import torch
from torch import nn

import likewise as lw
import nets
from likewise.gram import matrix
from likewise.gram.products import FEWEST_COLUMNS


@pytest.fixture
def case():
    return nets.case(nets.conv, 3, 10)


ROW = 3 * 102 * 8  # bytes of one sample's gradients


@pytest.mark.parametrize("max_memory", [16 * ROW, 40 * ROW, 300 * ROW])
@pytest.mark.parametrize("kernel", [lw.CORRELATION, lw.INFLUENCE, lw.ROTATION_INVARIANT], ids=str)
def test_memory_allowed_does_not_change_a_number(case, max_memory, kernel):
    model, x = case
    assert sum(p.numel() for p in model.parameters()) * 3 * 8 <= ROW
    roomy = lw.GramMatrix(model, x, x[:4], kernel=kernel)
    tight = lw.GramMatrix(model, lw.batches(x, 3), lw.batches(x[:4], 3), kernel=kernel, max_memory=max_memory)
    assert torch.allclose(tight.dense(), roomy.dense(), atol=1e-12)
    assert torch.allclose(tight.row_sums(), roomy.row_sums(), atol=1e-12)
    weights = torch.randn(4, 30, dtype=torch.float64)  # more columns than vectors fit
    assert torch.allclose(tight.row_sums(weights), roomy.row_sums(weights), atol=1e-12)
    assert torch.allclose(roomy.row_sums(weights), roomy.dense() @ weights, atol=1e-12)
    square = [lw.GramMatrix(model, x, kernel=kernel, max_memory=m) for m in (max_memory, 2**30)]
    assert torch.allclose(*(lw.nearest(g, 3).similarities for g in square), atol=1e-12)
    assert torch.equal(*(lw.nearest(g, 3).indices for g in square))


def test_products_of_no_columns_are_empty_and_parameters_without_entries_change_nothing(case):
    model, x = case
    gram = lw.GramMatrix(model, x)
    assert (gram @ torch.zeros(10, 0)).shape == (10, 0)
    assert (gram @ torch.zeros(10, 3, 0)).shape == (10, 3, 0)
    expected = gram.row_sums()
    model.register_parameter("empty", nn.Parameter(torch.empty(0, dtype=torch.float64)))
    assert torch.allclose(lw.GramMatrix(model, x).row_sums(), expected)


@pytest.mark.parametrize("max_memory", [120 * ROW, 2**30])
def test_estimates_do_not_depend_on_memory(case, max_memory):
    model, x = case
    gram = lw.GramMatrix(model, lw.batches(x, 3), max_memory=max_memory)
    exact, found = lw.denoising(gram, exact=True), lw.denoising(gram, draws=40)
    assert ((found.factor - exact.factor).abs() <= 6 * found.factor_error + 1e-6).all()


def test_product_is_the_block_matrix_times_the_weights(case):
    model, x = case
    gram = lw.GramMatrix(model, x, x[:4], kernel=lw.INFLUENCE)
    blocks = gram.with_kernel(lw.Kernel(0, -1, lw.whole_block)).dense()
    weights = torch.randn(4, 3, 2, dtype=torch.float64)
    assert torch.allclose(gram @ weights, torch.einsum("nmde,mec->ndc", blocks, weights))


def test_other_columns_keep_the_reference_of_centering(case):
    model, x = case
    gram = lw.GramMatrix(model, x, x[:4], centered=True)
    part = gram.with_columns(gram.columns.take([2, 0]))
    assert torch.allclose(part.dense(), gram.dense()[:, [2, 0]])
    assert torch.allclose(part @ torch.ones(2).double(), part.dense().sum(1))
    with pytest.raises(ValueError, match="centered=True needs a symmetric kernel"):
        lw.GramMatrix(model, x, kernel=lw.INFLUENCE, centered=True)


def test_the_same_data_as_rows_and_columns_is_square(case):
    model, x = case
    assert lw.GramMatrix(model, x, x).square and lw.GramMatrix(model, x, columns=x).square
    data = lw.batches(x)
    assert lw.GramMatrix(model, data, data).square and not lw.GramMatrix(model, x, x.clone()).square


def test_products_take_vectors_matrices_arrays_and_series(case):
    model, x = case
    gram = lw.GramMatrix(model, x)
    dense, weights = gram.dense(), torch.randn(len(x), 3, dtype=torch.float64)
    assert torch.allclose(gram @ weights, dense @ weights)
    assert torch.allclose(gram @ weights[:, 0].numpy(), dense @ weights[:, 0])
    assert torch.allclose(gram @ pandas.Series(weights[:, 1].numpy()), dense @ weights[:, 1])
    with pytest.raises(TypeError, match="weights must be a tensor of numbers"):
        gram @ "ones"


def test_a_users_linear_reduction_takes_two_passes(case):
    model, x = case

    @lw.reduction(linear=True)
    def mixed(blocks):
        return blocks[..., 0, 1] - 2 * blocks[..., 2, 2]

    gram = lw.GramMatrix(model, x, x[:4], kernel=lw.Kernel(-0.5, -0.5, mixed))
    weights = torch.randn(4, 2, dtype=torch.float64)
    assert torch.allclose(gram @ weights, gram.dense() @ weights)
    assert gram.plan().visits_of_pairs == 0


def test_matrices_made_from_one_share_its_engine(case, monkeypatch):
    model, x = case
    count = []
    original = matrix.select_engine
    monkeypatch.setattr(matrix, "select_engine", lambda *args: count.append(1) or original(*args))
    gram = lw.GramMatrix(model, (x, torch.arange(len(x)) % 2))
    other = gram.with_kernel(lw.INNER_PRODUCT).with_centering(True)
    assert other.engine is gram.engine is gram.of_columns().take(3).engine
    lw.label_suspicion(gram), lw.uncertainty(gram), lw.nearest(gram), lw.soft_neighbors(other)
    assert len(count) == 1


def test_rows_are_reduced_strip_by_strip_with_their_own_place(case):
    model, x = case
    gram = lw.GramMatrix(model, x, max_memory=60 * ROW)
    k = gram.dense()
    best, where = gram.over_rows(lambda row: tuple(row.max(1)), fill_diagonal=-torch.inf)
    assert torch.allclose(best, k.clone().fill_diagonal_(-torch.inf).max(1).values)
    assert (where != torch.arange(10)).all()
    places = gram.map_strips(lambda where, _: torch.tensor(list(where)))
    assert places.tolist() == list(range(10))


def test_nothing_is_computed_before_it_is_asked_for():
    class Never(nn.Linear):
        def forward(self, x):
            raise AssertionError("called")

    gram = lw.GramMatrix(Never(3, 2), torch.randn(4, 3))
    assert gram.shape == (4, 4) and "4 × 4" in repr(gram) and "8 parameters" in repr(gram)


def test_diagonal_is_that_of_the_matrix(case):
    model, x = case
    for kernel in (lw.INNER_PRODUCT, lw.INFLUENCE, lw.CORRELATION, lw.ROTATION_INVARIANT):
        gram = lw.GramMatrix(model, x, kernel=kernel)
        assert torch.allclose(gram.diagonal(), gram.dense().diagonal(), atol=1e-10)


def test_wrong_weights_and_kernels_are_said(case):
    model, x = case
    gram = lw.GramMatrix(model, x)
    with pytest.raises(ValueError, match=r"m = 10, d = 3, found \(10, 2, 1\)"):
        gram @ torch.ones(10, 2, 1)
    with pytest.raises(ValueError, match=r"m = 10, found \(9, 2\)"):
        gram.row_sums(torch.ones(9, 2))
    with pytest.raises(ValueError, match="not linear"):
        gram.with_kernel(lw.ROTATION_INVARIANT) @ torch.ones(10, 3, 1)
    with pytest.raises(ValueError, match=r"engine must be 'auto'.*found 'fast'"):
        lw.GramMatrix(model, x, engine="fast")


def test_wrong_arguments_of_statistics_are_said(case):
    model, x = case
    gram, cross = lw.GramMatrix(model, x), lw.GramMatrix(model, x, x.clone())
    labels = torch.zeros(10).long()
    for call, text in [
        (lambda: lw.nearest(gram, 0), "k must be an integer at least 1, found 0"),
        (lambda: lw.positive_neighbors(gram, 0), "exponent must be .* above 0"),
        (lambda: lw.similarity_histogram(gram, 0), "bins must be .* found 0"),
        (lambda: lw.label_suspicion(gram), "Labels are needed"),
        (lambda: lw.label_suspicion(gram, labels[:3]), "3 labels for 10"),
        (lambda: lw.label_suspicion(gram, torch.randn(10)), "Class numbers from 0"),
        (lambda: lw.label_suspicion(gram, labels - 1), "Class numbers from 0"),
        (lambda: lw.label_suspicion(gram, labels, exponent=-1), "exponent must be .* above 0"),
        (lambda: lw.label_suspicion(cross, labels), "without columns"),
        (lambda: lw.class_similarity(cross, labels), "without columns"),
        (lambda: lw.fit_quality(gram), "Labels are needed"),
        (lambda: lw.denoising(gram, draws=2), "draws must be an integer from 4"),
        (lambda: lw.predicted_move(gram.net, x[:1], torch.ones(5), x), r"\(1, 3\) or \(3,\)"),
        (lambda: lw.perceptual(model, "nothing", x), "No layer matches 'nothing'"),
        (lambda: lw.perceptual(model, ["0", "1"], x, weights=[1]), "weights must be 2 numbers"),
    ]:
        with pytest.raises(ValueError, match=text):
            call()


def test_centered_queries_are_about_the_mean_of_the_columns(case):
    model, x = case
    gram = lw.GramMatrix(model, x[:3], x, centered=True)
    with gram.net.evaluation_mode():
        rows = gram.engine.rows(gram.columns.samples(range(10)), -0.5).rows
    shifted = nn.functional.normalize((rows - rows.mean(0)).flatten(1), dim=1)
    assert torch.allclose(gram.dense(), shifted[:3] @ shifted.T)


X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))


def test_sparse_gradients():
    ids = torch.randint(0, 9, (5, 2))
    for engine in ("autograd", "layers"):
        torch.manual_seed(0)
        sparse = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 1))
        found = lw.similarity(sparse, ids, engine=engine)
        sparse[0].sparse = False
        assert torch.allclose(found, lw.similarity(sparse, ids, engine=engine), atol=1e-6)


@pytest.mark.parametrize("table", [nn.Embedding, nn.EmbeddingBag])
def test_gradients_scaled_by_counts_of_a_batch_are_those_of_each_sample(table):
    torch.manual_seed(0)
    ids = torch.randint(0, 3, (7, 5))
    model = nn.Sequential(table(9, 4, scale_grad_by_freq=True), nn.Flatten(), nn.LazyLinear(2))
    model(ids)
    found = lw.similarity(model, ids), lw.similarity(model, ids[:2], ids)
    assert model[0].scale_grad_by_freq
    model[0].scale_grad_by_freq = False
    expected = lw.similarity(model, ids)
    torch.testing.assert_close(found, (expected, expected[:2]))


def test_centered_matrices_follow_the_model_and_are_refused_where_they_mislead():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    gram = lw.GramMatrix(model, X, centered=True)
    gram.dense()
    with torch.no_grad():
        model[0].weight.mul_(3)
    assert torch.allclose(gram.dense(), lw.GramMatrix(model, X, centered=True).dense(), atol=1e-6)
    for statistic in (lw.lipschitz_bound, lambda g: lw.fit_quality(g, torch.randn(12))):
        with pytest.raises(ValueError, match="centered=False"):
            statistic(gram)


def test_reductions_that_lose_the_rows_are_refused():
    gram = lw.GramMatrix(nn.Linear(3, 2), X)
    with pytest.raises(ValueError, match="keeps the rows"):
        gram.over_rows(lambda k: k.sum())
    with pytest.raises(ValueError, match="no single row sum"):
        gram.with_kernel(lw.Kernel(0, 0, lw.whole_block)).row_sums()


def test_batches_bound_the_activations_of_pairs():
    sizes = []

    class Watched(nn.Linear):
        def forward(self, x):
            sizes.append(len(x))
            return super().forward(x)

    lw.GramMatrix(Watched(3, 2), lw.batches(X, 4)).dense()
    assert max(sizes) <= 4


def test_no_pass_starts_inside_another():
    gram = lw.GramMatrix(nn.Linear(3, 2), X)
    with pytest.raises(RuntimeError, match="inside another"):
        gram.over_rows(lambda k: lw.soft_neighbors(gram))
    assert lw.soft_neighbors(gram).shape == (12,)  # and nothing is stuck


WRITES = {
    "through .data": lambda value: value.data.mul_(3),
    "through an array": lambda value: value.detach().numpy().__imul__(3),
    "counted": lambda value: value.detach().mul_(3),
}


@pytest.mark.parametrize("what", ["model", "tensor", "TensorDataset"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_centered_matrices_follow_every_write_to_the_model_and_the_data(what, write):
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), X.float().clone()
    data = torch.utils.data.TensorDataset(x) if what == "TensorDataset" else x
    gram = lw.GramMatrix(model, data, centered=True)
    lw.soft_neighbors(gram)
    write(model[0].weight if what == "model" else x)
    expected = lw.GramMatrix(model, x.clone(), centered=True)
    torch.testing.assert_close(gram.dense(), expected.dense())
    torch.testing.assert_close(lw.soft_neighbors(gram), lw.soft_neighbors(expected))


@pytest.mark.parametrize("change", nets.CHANGES.values(), ids=nets.CHANGES)
def test_what_is_kept_of_a_model_is_dropped_when_what_its_forward_reads_changes(change):
    model = nets.Settings().double()
    gram = lw.GramMatrix(model, X).with_feature_cache()
    centered = lw.GramMatrix(model, X, centered=True)
    gram.dense(), lw.soft_neighbors(centered)
    change(model)
    expected = lw.GramMatrix(model, X.clone())
    torch.testing.assert_close(gram.dense(), expected.dense())
    torch.testing.assert_close(lw.soft_neighbors(gram), lw.soft_neighbors(expected))
    expected = expected.with_centering(True)
    torch.testing.assert_close(lw.soft_neighbors(centered), lw.soft_neighbors(expected))


def test_what_is_kept_of_a_model_stays_when_its_forward_counts_its_calls():
    model = nets.Settings().double()
    gram = lw.GramMatrix(model, X).with_feature_cache()
    kept = gram._kept_features()
    model(X.double())
    assert model.calls == 1
    assert gram._kept_features() is kept


def test_centered_matrices_follow_writes_to_labels_that_were_given_apart():
    model, labels = nets.Settings().double(), torch.arange(len(X)) % 2
    items = [(x,) for x in X]
    net = lw.Network(model, lw.label_against_rest)
    gram = lw.GramMatrix(net, lw.batches(items, labels=labels), centered=True)
    lw.soft_neighbors(gram)
    labels[:3] = 1 - labels[:3]
    expected = lw.GramMatrix(net, lw.batches(items, labels=labels.clone()), centered=True)
    torch.testing.assert_close(lw.soft_neighbors(gram), lw.soft_neighbors(expected))


@pytest.mark.parametrize("sketch", [None, 256])
def test_samples_of_which_centering_leaves_only_rounding_are_counted(sketch):
    """Inputs far smaller than a bias's 1, such as returns of shares: plain similarities are all 1."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
    x = 1e-4 * torch.randn(20, 6)
    gram = lw.GramMatrix(model, x, centered=True)
    with pytest.warns(UserWarning, match="of 20 of 20 samples are the mean of all up to rounding"):
        assert lw.nearest(gram, 3, sketch=sketch).similarities.abs().max() < 1e-3
    exact = lw.nearest(lw.GramMatrix(model.double(), x.double(), centered=True), 3)
    assert exact.similarities[:, 0].min() > 0.1  # there was something to tell


@pytest.mark.parametrize("max_bytes", [2**27, 2**9], ids=["rows", "columns"])
@pytest.mark.parametrize("kernel", [lw.CORRELATION, lw.INNER_PRODUCT, lw.INFLUENCE], ids=["C", "I", "N"])
@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize("make", list(nets.SHAPES), ids=lambda m: m.__name__)
@pytest.mark.filterwarnings("ignore:torch.func.vmap cannot differentiate Recurrent")
def test_sums_of_many_columns_are_those_of_the_matrix(make, d, kernel, max_bytes):
    model, x = nets.case(make, d, 11)
    gram = lw.GramMatrix(model, lw.batches(x, size=4), kernel=kernel)
    if gram.engine.name == "layers":
        gram.engine.memory = gram.engine.memory._replace(product_bytes=max_bytes)
    weights = torch.randn(11, FEWEST_COLUMNS + 1, dtype=torch.float64)
    exact = lw.GramMatrix(model, x, kernel=kernel).dense() @ weights
    torch.testing.assert_close(
        gram.row_sums(weights), exact, rtol=1e-9, atol=1e-10 * float(exact.abs().max())
    )
    queries = lw.GramMatrix(gram.net, x[:3], columns=lw.batches(x, size=4), kernel=kernel)
    torch.testing.assert_close(queries.row_sums(weights), exact[:3], rtol=1e-8, atol=1e-9)
