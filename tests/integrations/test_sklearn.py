"""Kernel, neighbors and label issues for scikit-learn, against Gram matrices and formulas written out."""

import copy
import pickle
import warnings

import lightning
import numpy as np
import pytest
import skorch
import torch
from sklearn.base import clone
from sklearn.cluster import DBSCAN
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, WhiteKernel
from sklearn.kernel_ridge import KernelRidge
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.svm import SVC
from sklearn.utils.estimator_checks import check_estimator
from torch import nn

import likewise as lw
import oracle
from hostile import is_same, state_of
from likewise.integrations.sklearn import GradientNeighbors, LabelIssueTransformer, SimilarityKernel


def changes(before, model):
    """What of a model is not as it was."""
    after = state_of(model)
    return [name for name in before if "model" in name and not is_same(before[name], after[name])]


def network(outputs=3):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, outputs))


def inputs(n=30, seed=0):
    return np.random.default_rng(seed).normal(size=(n, 4))


def trained_classifier(n=200, wrong=6):
    """A linear network that tells two groups apart, and labels of which the first few are wrong."""
    x, y = inputs(n), np.arange(n) % 2
    x[:, 0] += np.where(y == 1, 4, -4)
    given = y.copy()
    given[:wrong] = 1 - given[:wrong]
    net = nn.Linear(4, 2)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[-2.0, 0, 0, 0], [2, 0, 0, 0]]))
        net.bias.zero_()
    return net, x, y, given


class Lit(lightning.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def skorch_net(net, x, y, **options):
    options = {"max_epochs": 1, "lr": 0.0, "train_split": None, "verbose": 0, **options}
    wrapped = skorch.NeuralNetClassifier(net, criterion=nn.CrossEntropyLoss, **options)
    return wrapped.fit(x.astype(np.float32), y.astype(np.int64))


@pytest.mark.parametrize("similarity", [None, lw.INNER_PRODUCT, lw.SUBSPACE_MATCH], ids=str)
def test_kernel_is_the_gram_matrix_of_the_formula(similarity):
    net, x, z = network(2), inputs(7), inputs(3, seed=3)
    before = state_of(net)
    kernel = SimilarityKernel(net, similarity=similarity)
    left, right = (oracle.jacobians(copy.deepcopy(net).double(), torch.tensor(v)) for v in (x, z))
    powers = 0 if similarity is lw.INNER_PRODUCT else -0.5
    reduce = oracle.subspace_match if similarity is lw.SUBSPACE_MATCH else oracle.trace
    np.testing.assert_allclose(kernel(x), reduce(oracle.blocks(left, left, powers, powers)), atol=1e-6)
    np.testing.assert_allclose(kernel(x, z), reduce(oracle.blocks(left, right, powers, powers)), atol=1e-6)
    gram = lw.GramMatrix(net, torch.tensor(x), torch.tensor(z), kernel=similarity or lw.CORRELATION)
    np.testing.assert_allclose(kernel(x, z), gram.dense(), atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(kernel.diag(x), np.diag(kernel(x)), atol=1e-12)
    assert kernel(x).dtype == np.float64
    assert changes(before, net) == []


def test_kernel_has_no_negative_eigenvalue_although_the_model_is_float32():
    x = np.concatenate([inputs(60), inputs(60)])  # half of the rank
    values = SimilarityKernel(network())(x)
    assert np.array_equal(values, values.T)
    assert np.linalg.eigvalsh(values)[0] > -1e-12


@pytest.mark.parametrize("similarity", [lw.INFLUENCE, lw.NEAR_IDENTITY, lw.ROTATION_INVARIANT], ids=str)
def test_kernels_that_are_not_positive_semi_definite_are_refused(similarity):
    with pytest.raises(ValueError, match="positive semi-definite"):
        SimilarityKernel(network(), similarity=similarity)(inputs())


def test_svc_and_ridge_are_those_of_the_precomputed_matrix():
    net, x, z = network(), inputs(40), inputs(9, seed=5)
    y = (x[:, 0] * x[:, 1] > 0).astype(int)
    kernel = SimilarityKernel(net)
    square, cross = kernel(x), kernel(z, x)
    for make in (lambda k: SVC(kernel=k, C=3), lambda k: KernelRidge(kernel=k, alpha=0.1)):
        found, expected = make(kernel).fit(x, y), make("precomputed").fit(square, y)
        np.testing.assert_allclose(found.predict(z), expected.predict(cross), atol=1e-9)


def test_gaussian_process_is_the_formula():
    net, x, z = network(), inputs(30), inputs(7, seed=5)
    y = np.sin(x[:, 0])
    kernel = SimilarityKernel(net)
    found = GaussianProcessRegressor(kernel, alpha=0.1).fit(x, y)
    mean, spread = found.predict(z, return_std=True)
    inverse = np.linalg.inv(kernel(x) + 0.1 * np.eye(30))
    cross = kernel(z, x)
    np.testing.assert_allclose(mean, cross @ inverse @ y, atol=1e-8)
    np.testing.assert_allclose(spread**2, kernel.diag(z) - np.diag(cross @ inverse @ cross.T), atol=1e-8)


def test_gaussian_process_fits_what_surrounds_the_kernel():
    x = inputs(40)
    y = np.sin(x[:, 0]) + 0.1 * np.random.default_rng(1).normal(size=40)
    kernel = ConstantKernel() * SimilarityKernel(network()) + WhiteKernel()
    found = GaussianProcessRegressor(kernel).fit(x, y)
    assert len(found.kernel_.theta) == 2
    assert found.log_marginal_likelihood_value_ > GaussianProcessRegressor(kernel, optimizer=None).fit(
        x, y
    ).log_marginal_likelihood(kernel.theta)
    assert GaussianProcessClassifier(SimilarityKernel(network())).fit(x, y > 0).score(x, y > 0) > 0.8


def test_the_last_matrix_is_computed_again_when_weights_inputs_or_options_change():
    net, x = network(), inputs(8)
    kernel = SimilarityKernel(net)
    first = kernel(x)
    first[:] = 0  # the caller's own
    assert kernel(x)[0, 0] > 0.9
    known = kernel._last
    assert kernel(x.copy()).shape == (8, 8) and kernel._last is known
    net[0].weight.data.mul_(3.0)  # no version counts this
    assert not np.allclose(kernel(x), known.values)
    np.testing.assert_allclose(kernel(x), SimilarityKernel(net)(x))
    x[0] += 1
    np.testing.assert_allclose(kernel(x), SimilarityKernel(net)(x))
    kernel.set_params(similarity=lw.INNER_PRODUCT)
    np.testing.assert_allclose(kernel(x), SimilarityKernel(net, similarity=lw.INNER_PRODUCT)(x))


def test_the_last_matrix_is_computed_again_when_the_model_computes_something_else():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last, self.activation = torch.nn.Linear(4, 6), torch.nn.Linear(6, 2), torch.tanh

        def forward(self, x):
            return self.last(self.activation(self.first(x)))

    torch.manual_seed(0)
    net, x, chosen = Net(), inputs(8), ["first.*"]
    kernel = SimilarityKernel(net, parameters=chosen)
    before = kernel(x)
    net.activation = torch.sigmoid
    np.testing.assert_allclose(kernel(x), SimilarityKernel(net, parameters=chosen)(x))
    assert not np.allclose(kernel(x), before)
    handle = net.first.register_forward_hook(lambda module, given, output: 3 * output)
    np.testing.assert_allclose(kernel(x), SimilarityKernel(net, parameters=chosen)(x))
    handle.remove()
    chosen.append("last.*")  # the caller's own list
    np.testing.assert_allclose(kernel(x), SimilarityKernel(net)(x))


def test_images_in_rows_are_reshaped_by_prepare():
    net = nn.Sequential(nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(3, 2))
    x, y = inputs(30), np.arange(30) % 2
    kernel = SimilarityKernel(net, prepare=lambda rows: rows.reshape(-1, 1, 2, 2))
    expected = SimilarityKernel(net)(x.reshape(-1, 1, 2, 2))
    np.testing.assert_allclose(kernel(x), expected)
    assert SVC(kernel=kernel).fit(x, y).predict(x[:3]).shape == (3,)


def every_estimator(net):
    return [SimilarityKernel(net), GradientNeighbors(net, n_neighbors=3), LabelIssueTransformer(net)]


@pytest.mark.parametrize("which", [0, 1, 2], ids=["kernel", "neighbors", "labels"])
def test_clones_refer_to_the_same_network(which):
    net, x, _, y = trained_classifier(60)
    wrapped = skorch_net(net, x, y)
    for model in (net, wrapped, lw.Network(net, lw.all_outputs)):
        estimator = every_estimator(model)[which]
        copied = clone(estimator)
        assert copied is not estimator and copied.model is model
        assert copied.get_params(deep=False) == estimator.get_params(deep=False)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["kernel", "neighbors", "labels"])
def test_estimators_are_pickled_as_their_model_is(which):
    net, x, _, y = trained_classifier(60)
    estimator = every_estimator(net)[which]
    if which:
        estimator.fit(x, y)
    copied = pickle.loads(pickle.dumps(estimator))
    if which == 0:
        np.testing.assert_array_equal(copied(x), estimator(x))
    elif which == 1:
        np.testing.assert_array_equal(copied.kneighbors(x)[1], estimator.kneighbors(x)[1])
    else:
        np.testing.assert_array_equal(copied.suspicion_, estimator.suspicion_)


def test_grid_search_clones_and_refits():
    net, x, y, _ = trained_classifier(60)
    before = state_of(net)
    search = GridSearchCV(SVC(kernel=SimilarityKernel(net)), {"C": [0.1, 10]}, cv=2, n_jobs=1).fit(x, y)
    assert search.best_score_ > 0.9
    assert changes(before, net) == []


def test_lightning_modules_and_skorch_nets_stand_for_their_module():
    net, x, _, y = trained_classifier(60)
    lit, wrapped = Lit(net), skorch_net(net, x, y)
    before = state_of(lit)
    expected = lw.similarity(net, torch.tensor(x), readout=lw.all_outputs)
    for model in (lit, wrapped):
        torch.testing.assert_close(lw.similarity(model, torch.tensor(x), readout=lw.all_outputs), expected)
        np.testing.assert_allclose(SimilarityKernel(model)(x), expected, atol=1e-6)
        assert lw.Network(model).model in (net, lit, wrapped.module_)
    assert changes(before, lit) == []


def test_a_skorch_net_without_a_module_is_refused_by_name():
    with pytest.raises(ValueError, match=r"skorch net NeuralNetClassifier has no module yet: call net\.fit"):
        lw.Network(skorch.NeuralNetClassifier(network()))


@pytest.mark.parametrize("centered", [False, True])
def test_neighbors_are_those_of_the_gram_matrix_and_of_the_formula(centered):
    net, x, z = network(2), inputs(12), inputs(4, seed=2)
    before = state_of(net)
    neighbors = GradientNeighbors(net, n_neighbors=4, centered=centered).fit(x)
    for query, columns in ((None, None), (z, x)):
        rows = torch.tensor(x if query is None else query)
        expected = lw.nearest(
            lw.GramMatrix(net, rows, None if columns is None else torch.tensor(x), centered=centered), 4
        )
        distances, indices = neighbors.kneighbors(query)
        np.testing.assert_array_equal(indices, expected.indices)
        np.testing.assert_allclose(distances, 1 - expected.similarities.double(), atol=1e-6)
    assert changes(before, net) == []
    if not centered:
        jacobians = oracle.jacobians(network(2).double(), torch.tensor(x))
        k = oracle.trace(oracle.correlation(jacobians, jacobians)).fill_diagonal_(-2)
        order = k.sort(dim=1, descending=True)
        distances, indices = neighbors.kneighbors()
        np.testing.assert_array_equal(indices, order.indices[:, :4])
        np.testing.assert_allclose(distances, 1 - order.values[:, :4], atol=1e-6)


def test_graph_holds_the_neighbors():
    x, z = inputs(20), inputs(3, seed=2)
    neighbors = GradientNeighbors(network(), n_neighbors=3).fit(x)
    distances, indices = neighbors.kneighbors(z)
    for mode, values in (("connectivity", np.ones((3, 3))), ("distance", distances)):
        graph = neighbors.kneighbors_graph(z, mode=mode)
        expected = np.zeros((3, 20))
        np.put_along_axis(expected, indices, values, axis=1)
        np.testing.assert_allclose(graph.toarray(), expected, atol=1e-11)
    own = neighbors.kneighbors_graph(mode="distance")
    assert own.nnz == 60 and not own.diagonal().any()
    same = neighbors.kneighbors_graph(
        x, 1, mode="distance"
    )  # each finds itself: an entry, although at no distance
    assert same.nnz == 20 and (same.indices == np.arange(20)).all()
    with pytest.raises(ValueError, match="20 neighbors were asked for, and there are 19 others"):
        neighbors.kneighbors(n_neighbors=20)


def test_graph_is_what_precomputed_metrics_take():
    net, x, y, _ = trained_classifier(80)
    pipeline = make_pipeline(
        GradientNeighbors(net, n_neighbors=5), KNeighborsClassifier(metric="precomputed")
    )
    assert pipeline.fit(x, y).score(x, y) > 0.95
    found = GradientNeighbors(net, n_neighbors=5).fit(x)
    clusters = DBSCAN(eps=0.3, metric="precomputed").fit(found.kneighbors_graph(mode="distance"))
    assert len(clusters.labels_) == 80


def test_texts_reach_the_model_through_prepare():
    net = nn.Sequential(nn.EmbeddingBag(256, 6), nn.Linear(6, 2))
    texts = ["alike", "other", "alike", "words"]

    def encode(rows):
        return torch.tensor([[ord(letter) for letter in text] for text in rows])

    neighbors = GradientNeighbors(net, n_neighbors=1, prepare=encode).fit(texts)
    assert neighbors.kneighbors()[1][[0, 2], 0].tolist() == [2, 0]


def test_labels_of_texts_are_judged_through_prepare():
    torch.manual_seed(0)
    net = nn.Sequential(nn.EmbeddingBag(256, 6), nn.Linear(6, 2))
    texts = ["aaab", "abaa"] * 15 + ["yyzz", "zzzy"] * 15
    names = np.array(["first"] * 30 + ["last"] * 30)
    names[3] = "last"

    def encode(rows):
        return torch.tensor([[ord(letter) for letter in text] for text in rows])

    optimizer = torch.optim.Adam(net.parameters(), 0.05)
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(encode(texts)), torch.tensor(names == "last").long()).backward()
        optimizer.step()
    kept, labels = LabelIssueTransformer(net, prepare=encode).fit_resample(texts, names)
    finder = LabelIssueTransformer(net, prepare=encode).fit(texts, names.tolist())
    assert finder.suspicion_.argmax() == 3 and finder.suggested_[3] == "first"
    assert isinstance(kept, list) and len(kept) == len(labels) == 60 - finder.issues_.sum()


def test_label_issues_are_those_of_label_suspicion():
    net, x, _, given = trained_classifier()
    before = state_of(net)
    finder = LabelIssueTransformer(net).fit(x, given)
    expected = lw.label_suspicion(lw.GramMatrix(net, (torch.tensor(x), torch.tensor(given))))
    np.testing.assert_allclose(finder.suspicion_, expected.suspicion, atol=1e-6)
    np.testing.assert_array_equal(finder.issues_, expected.flagged)
    np.testing.assert_array_equal(finder.suggested_, expected.suggested)
    np.testing.assert_allclose(finder.sample_weight_, 1 - finder.suspicion_)
    assert finder.issues_[:6].all()
    assert changes(before, net) == []


def test_resampling_drops_or_relabels_the_issues():
    net, x, right, given = trained_classifier()
    kept, labels = LabelIssueTransformer(net).fit_resample(x, given)
    issues = LabelIssueTransformer(net).fit(x, given).issues_
    np.testing.assert_array_equal(kept, x[~issues])
    np.testing.assert_array_equal(labels, given[~issues])
    same, corrected = LabelIssueTransformer(net, strategy="relabel").fit_resample(x, given)
    assert len(same) == len(x)
    np.testing.assert_array_equal(corrected[:6], right[:6])
    np.testing.assert_array_equal(corrected[~issues], given[~issues])


def test_labels_of_a_table_stay_a_column_of_it():
    pandas = pytest.importorskip("pandas")
    net, x, _, given = trained_classifier()
    column = pandas.Series(given, index=np.arange(len(given)) + 100, name="class")
    for strategy in ("drop", "relabel"):
        finder = LabelIssueTransformer(net, strategy=strategy)
        wanted = finder.fit_resample(x, given)[1]
        found = finder.fit_resample(x, column)[1]
        assert found.name == "class" and found.index.isin(column.index).all()
        np.testing.assert_array_equal(found, wanted)


def test_labels_that_are_names_are_matched_with_outputs():
    net, x, _, given = trained_classifier()
    expected = LabelIssueTransformer(net).fit(x, given)
    sorted_names = np.array(["dog", "eel"])[given]
    found = LabelIssueTransformer(net).fit(x, sorted_names)
    np.testing.assert_array_equal(found.issues_, expected.issues_)
    assert set(found.suggested_) <= {"dog", "eel"}
    other_order = np.array(["eel", "dog"])[given]
    found = LabelIssueTransformer(net, classes=["eel", "dog"]).fit(x, other_order)
    np.testing.assert_array_equal(found.issues_, expected.issues_)
    with pytest.raises(ValueError, match=r"not among the classes, the first .*'eel'"):
        LabelIssueTransformer(net, classes=["cow", "dog"]).fit(x, other_order)
    with pytest.raises(ValueError, match=r"3 outputs, and y holds 2 labels .* Give classes="):
        LabelIssueTransformer(network(3)).fit(x, other_order)


def test_a_skorch_classifier_knows_the_order_of_its_classes():
    net, x, _, given = trained_classifier()
    wrapped = skorch_net(net, x, given)
    expected = LabelIssueTransformer(net).fit(x, given)
    found = LabelIssueTransformer(wrapped).fit(x, given)
    np.testing.assert_array_equal(found.issues_, expected.issues_)
    np.testing.assert_array_equal(found.classes_, wrapped.classes_)


def test_label_issues_in_a_pipeline_of_imbalanced_learn_and_refused_by_that_of_scikit_learn():
    from imblearn.pipeline import make_pipeline as make_resampling_pipeline

    net, x, right, given = trained_classifier()
    finder = LabelIssueTransformer(net)
    found = make_resampling_pipeline(finder, KNeighborsClassifier(1)).fit(x, given)
    assert (found.predict(x[:6]) == right[:6]).all()
    assert len(found.predict(x)) == len(x)
    with pytest.raises(TypeError, match="should be transformers"):
        make_pipeline(finder, KNeighborsClassifier(1)).fit(x, given)


class AnyWidth(nn.Module):
    """Takes rows of any width up to 64, as the checks of scikit-learn use them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.features, self.output = nn.Linear(64, 8).double(), nn.Linear(8, 1).double()

    def forward(self, x):
        rows = x.flatten(1).to(self.output.weight.dtype)
        return self.output(self.features(nn.functional.pad(rows, (0, 64 - rows.shape[1]))).tanh())


# Also listed in docs/howto/scikit-learn.md.
EXPECTED_FAILURES = {
    "check_estimators_overwrite_params": "joblib.hash of a copied nn.Module is not that of the original",
}


@pytest.mark.parametrize("make", [GradientNeighbors, LabelIssueTransformer])
def test_checks_of_scikit_learn_pass_but_for_those_listed(make):
    model = AnyWidth()
    before = state_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of untrained networks, and of skipped checks
        found = check_estimator(
            make(model), on_fail=None, on_skip=None, expected_failed_checks=EXPECTED_FAILURES
        )
    status = {one["check_name"]: (one["status"], one["exception"]) for one in found}
    assert {name: why for name, (state, why) in status.items() if state == "failed"} == {}
    assert {name for name, (state, _) in status.items() if state == "xfail"} == set(EXPECTED_FAILURES)
    assert {name for name, (state, _) in status.items() if state == "skipped"} <= {"check_array_api_input"}
    assert changes(before, model) == []
