"""Kernels, neighbors and label issues of a trained network, for scikit-learn.

    SVC(kernel=SimilarityKernel(model)).fit(X, y)
    GradientNeighbors(model).fit(X).kneighbors(X_new)
    X_clean, y_clean = LabelIssueTransformer(model).fit_resample(X, y)

The network must be trained; nothing here trains or changes it. A clone of an estimator refers to the same network, not
to a copy. Similarities use the weights at the time of the call.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import sklearn
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.gaussian_process.kernels import GenericKernelMixin
from sklearn.gaussian_process.kernels import Kernel as SklearnKernel
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, check_is_fitted, column_or_1d
from torch import Tensor, nn

from likewise.checks import check_choice, check_flag, check_integer, check_type, describe
from likewise.data import Batches, batches
from likewise.fingerprint import checksums, describe_module
from likewise.gram import GramMatrix
from likewise.identity import measure_behavior
from likewise.kernels import CORRELATION, Kernel, mean_diagonal, subspace_match
from likewise.model import Network, to_network
from likewise.readouts import Readout, all_outputs
from likewise.statistics.label_issues import label_suspicion
from likewise.statistics.neighbors import nearest
from likewise.statistics.reheat import Reheated

try:
    from sklearn.utils.validation import validate_data
except ImportError as missing:
    raise ImportError(
        f"likewise.integrations.sklearn needs scikit-learn 1.6 or newer, found {sklearn.__version__}: "
        "pip install -U scikit-learn"
    ) from missing

__all__ = ["GradientNeighbors", "LabelIssueTransformer", "SimilarityKernel"]

Array = NDArray[Any]
Prepare = Callable[[Any], Any]
LEAST_DISTANCE = 1e-12  # a distance of zero would be missing in a sparse graph


class _Matrix(NamedTuple):
    """The last matrix of X with itself, and what it was computed from."""

    inputs: Array
    options: tuple[Any, ...]
    weights: list[str]
    values: Array


class SimilarityKernel(GenericKernelMixin, SklearnKernel):
    """The similarity of two inputs to a trained network, as a kernel for scikit-learn.

    For `SVC`, `SVR`, `KernelRidge`, `KernelPCA` and other estimators with `kernel=`, and for `GaussianProcessRegressor`
    and `GaussianProcessClassifier`, where it can be added to and multiplied by scikit-learn's kernels. Symmetric and
    positive semi-definite: an inner product of normalized gradients. It has no hyperparameters.

    Args:
        model: A trained model: nn.Module, LightningModule, fitted skorch net, or a Network.
        readout: The outputs to compare; None chooses by the model (see `Network`).
        parameters: Parameters whose gradients are compared, as for `Network`; all if None.
        similarity: `likewise.CORRELATION` if None; or `INNER_PRODUCT`, `SUBSPACE_MATCH`, or a Kernel with equal powers
            on both sides and one of their reductions. Others are not positive semi-definite and are refused.
        prepare: Turns rows of X into what the model takes, such as `lambda rows: rows.reshape(-1, 1, 8, 8)`;
            estimators that accept only two-dimensional X need it for images. None: rows as they are.
        float64: Compute in float64, so that rounding leaves no negative eigenvalues that stop a Cholesky
            decomposition. False: in the model's type, faster, for models that fix a type inside forward.

    Example:
        >>> import torch
        >>> from sklearn.svm import SVC
        >>> from likewise.integrations.sklearn import SimilarityKernel
        >>> _ = torch.manual_seed(0)
        >>> X, y = torch.randn(60, 4).numpy(), [0, 1, 2] * 20
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        >>> kernel = SimilarityKernel(net)
        >>> kernel(X).shape, kernel(X[:5], X).shape
        ((60, 60), (5, 60))
        >>> SVC(kernel=kernel).fit(X, y).predict(X[:5]).shape
        (5,)

    """

    def __init__(
        self,
        model: Any,
        *,
        readout: Readout | None = None,
        parameters: str | Sequence[str] | None = None,
        similarity: Kernel | None = None,
        prepare: Prepare | None = None,
        float64: bool = True,
    ) -> None:
        self.model = model
        self.readout = readout
        self.parameters = parameters
        self.similarity = similarity
        self.prepare = prepare
        self.float64 = float64
        self._last: _Matrix | None = None

    def __sklearn_clone__(self) -> "SimilarityKernel":
        clone = type(self)(**self.get_params())
        clone._last = self._last
        return clone

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_last": None}

    def __repr__(self) -> str:
        return f"SimilarityKernel({_model_name(self.model)}, {_kernel(self.similarity)})"

    def __call__(self, X: Any, Y: Any = None, eval_gradient: bool = False) -> Any:
        """Return the similarities of the rows of X with those of Y, or with each other.

        Args:
            X: (n, ...) inputs.
            Y: (m, ...) inputs; X if None.
            eval_gradient: Also return the gradient in the hyperparameters, of which there are none.

        Returns:
            (n, m) in float64; with `eval_gradient` a pair of that and an empty array (n, n, 0).

        """
        if eval_gradient and Y is not None:
            raise ValueError("The gradient is only defined for X with itself: leave out Y or eval_gradient.")
        if Y is not None and Y is not X:
            return _to_numpy(self._gram(X, Y).dense())
        values = self._square(X)
        return (values, np.empty((*values.shape, 0))) if eval_gradient else values

    def diag(self, X: Any) -> Array:
        """Return the similarity of each input with itself, (n,): 1 for CORRELATION, less if outputs are dependent."""
        return _to_numpy(self._gram(X).diagonal())

    def is_stationary(self) -> bool:
        """Return False: the similarity is not a function of X - Y."""
        return False

    def _square(self, X: Any) -> Array:
        """Return the matrix of X with itself, cached: a Gaussian process needs the same one at each step of its fit."""
        gram = self._gram(X)
        net, model = gram.net, gram.net.model
        settings = [_settings(part) for part in model.modules()]
        given = (self.readout, net.names, self.similarity, self.prepare, self.float64)
        behavior = measure_behavior(net, gram.data)[
            "rows"
        ]  # detects hooks, and functions that are attributes
        options = (model, describe_module(model), settings, behavior, *given)
        weights = checksums([value.detach() for value in (*model.parameters(), *model.buffers())])
        inputs, last = np.asarray(X), self._last
        same = last is not None and last.options == options and last.weights == weights
        if last is None or not same or not np.array_equal(last.inputs, inputs):
            found = _to_numpy(gram.dense())
            last = self._last = _Matrix(inputs.copy(), options, weights, (found + found.T) / 2)
        return last.values.copy()

    def _gram(self, X: Any, Y: Any = None) -> GramMatrix:
        similarity = _kernel(self.similarity)
        _refuse_indefinite(similarity)
        net = to_network(self.model, self.readout, self.parameters)
        if check_flag("float64", self.float64):
            net = net.in_float64()
        rows = _prepare_inputs(X, self.prepare)
        columns = None if Y is None else _prepare_inputs(Y, self.prepare)
        return GramMatrix(net, rows, columns, kernel=similarity)


class _NetworkEstimator(BaseEstimator):
    """An estimator with a trained network: a clone refers to the same network, and X may be images or texts."""

    model: Any
    prepare: Prepare | None
    readout: Readout | None
    parameters: str | Sequence[str] | None

    def __sklearn_clone__(self) -> Any:
        return type(self)(**self.get_params(deep=False))

    def _network(self) -> Network:
        return to_network(self.model, self.readout, self.parameters)

    def _validate_inputs(self, X: Any, reset: bool) -> Any:
        """Return X as an array; unchanged if `prepare` reads it."""
        if self.prepare is None:
            return validate_data(self, X, reset=reset, allow_nd=True)
        if len(X) == 0:
            raise ValueError("Found 0 samples, a minimum of 1 is required.")
        return X


class GradientNeighbors(TransformerMixin, _NetworkEstimator):
    """The samples that a trained network treats most alike, with the methods of scikit-learn's `NearestNeighbors`.

    Distances are 1 − similarity, in [0, 2]. As a step of a pipeline it returns the sparse graph of distances that
    estimators with `metric="precomputed"` take, like scikit-learn's `KNeighborsTransformer`.

    Args:
        model: A trained model: nn.Module, LightningModule, fitted skorch net, or a Network.
        n_neighbors: Default number of neighbors.
        readout: The outputs to compare; None chooses by the model (see `Network`).
        parameters: Parameters whose gradients are compared, as for `Network`; all if None.
        similarity: A normalized kernel: at most 1, and 1 for the same input; `likewise.CORRELATION` if None.
        centered: Use centered similarity, over the fitted samples.
        prepare: Turns X into what the model takes, also if X is not an array, such as a list of texts.

    Attributes:
        n_samples_fit_: Number of fitted samples.
        n_features_in_: Number of columns of X, if X is an array.

    Example:
        >>> import torch
        >>> from likewise.integrations.sklearn import GradientNeighbors
        >>> X = torch.randn(60, 4).numpy()
        >>> neighbors = GradientNeighbors(torch.nn.Linear(4, 3), n_neighbors=5).fit(X)
        >>> distances, indices = neighbors.kneighbors(X[:2])
        >>> indices.shape, bool((indices[:, 0] == [0, 1]).all())
        ((2, 5), True)
        >>> neighbors.kneighbors_graph(mode="distance").nnz
        300

    """

    def __init__(
        self,
        model: Any,
        *,
        n_neighbors: int = 5,
        readout: Readout | None = None,
        parameters: str | Sequence[str] | None = None,
        similarity: Kernel | None = None,
        centered: bool = False,
        prepare: Prepare | None = None,
    ) -> None:
        self.model = model
        self.n_neighbors = n_neighbors
        self.readout = readout
        self.parameters = parameters
        self.similarity = similarity
        self.centered = centered
        self.prepare = prepare

    def fit(self, X: Any, y: Any = None) -> "GradientNeighbors":
        """Store the samples among which neighbors are searched.

        Args:
            X: (n, ...) inputs.
            y: Ignored.

        """
        similarity = _kernel(self.similarity)
        if not similarity.bounded or similarity.keeps_blocks:
            raise ValueError(
                "Distances are 1 − similarity and need a normalized kernel such as likewise.CORRELATION, found "
                f"{similarity}."
            )
        check_integer("n_neighbors", self.n_neighbors, 1)
        self._network()
        self._fit_X = self._validate_inputs(X, reset=True)
        self.n_samples_fit_ = len(self._fit_X)
        return self

    def kneighbors(self, X: Any = None, n_neighbors: int | None = None, return_distance: bool = True) -> Any:
        """Return distances and indices of the nearest fitted samples, nearest first.

        Args:
            X: (n, ...) inputs; None: the fitted samples, each without itself.
            n_neighbors: Number of neighbors; None uses the estimator's.
            return_distance: Return both; False returns the indices only.

        Returns:
            Distances (n, k) in float64 and indices (n, k), or the indices.

        """
        check_is_fitted(self, "n_samples_fit_")
        rows = None if X is None else self._validate_inputs(X, reset=False)
        k = check_integer("n_neighbors", self.n_neighbors if n_neighbors is None else n_neighbors, 1)
        most = self.n_samples_fit_ - (X is None)
        if k > most:
            others = "others" if X is None else "samples"
            raise ValueError(
                f"Expected n_neighbors <= n_samples_fit: {k} neighbors were asked for, and there are "
                f"{most} {others} (n_samples_fit = {self.n_samples_fit_}, n_samples = {len(self._fit_X)})."
            )
        fitted = _prepare_inputs(self._fit_X, self.prepare)
        data = (fitted, None) if rows is None else (_prepare_inputs(rows, self.prepare), fitted)
        gram = GramMatrix(self._network(), *data, kernel=_kernel(self.similarity), centered=self.centered)
        found = nearest(gram, k)
        indices = found.indices.cpu().numpy()
        if not return_distance:
            return indices
        return np.maximum(1 - _to_numpy(found.similarities), 0), indices

    def kneighbors_graph(
        self,
        X: Any = None,
        n_neighbors: int | None = None,
        mode: Literal["connectivity", "distance"] = "connectivity",
    ) -> Any:
        """Return the graph of neighbors as a sparse matrix.

        Args:
            X: (n, ...) inputs; None: the fitted samples, each without itself.
            n_neighbors: Number of neighbors; None uses the estimator's.
            mode: "connectivity": 1 for each neighbor; "distance": 1 − similarity, at least 1e-12, because a sparse
                matrix drops 0.

        Returns:
            (n, n_samples_fit) scipy.sparse.csr_matrix, rows sorted by distance.

        """
        from scipy.sparse import csr_matrix

        check_choice("mode", mode, ("connectivity", "distance"))
        distances, indices = self.kneighbors(X, n_neighbors)
        n, k = indices.shape
        values = np.ones(n * k) if mode == "connectivity" else np.maximum(distances.ravel(), LEAST_DISTANCE)
        return csr_matrix((values, indices.ravel(), np.arange(n + 1) * k), shape=(n, self.n_samples_fit_))

    def transform(self, X: Any) -> Any:
        """Return the graph of distances of X to the fitted samples, with one neighbor more: a sample finds itself.

        Args:
            X: (n, ...) inputs.

        Returns:
            (n, n_samples_fit) scipy.sparse.csr_matrix, for estimators with metric="precomputed".

        """
        check_is_fitted(self, "n_samples_fit_")
        return self.kneighbors_graph(X, min(self.n_neighbors + 1, self.n_samples_fit_), mode="distance")


class LabelIssueTransformer(_NetworkEstimator):
    """Finds labels that similar samples and the network contradict, and drops or corrects them.

    scikit-learn's `transform` sees only X and must return all rows, so it can neither drop a sample nor change a label.
    This class therefore has no `transform`, and a scikit-learn Pipeline refuses it instead of passing wrong labels
    through. Use one of:

    - `fit_resample(X, y)`, also as a step of a Pipeline of imbalanced-learn, which applies it while fitting only;
    - `fit(X, y)`, then `sample_weight_` in the `fit` of an estimator, or the mask `issues_`.

    Args:
        model: A trained model: nn.Module, LightningModule, fitted skorch net, or a Network.
        strategy: What `fit_resample` does with flagged samples: "drop" them, or "relabel" them with the suggested
            class.
        readout: Which outputs are compared; chosen by the model's outputs if None. It should not look at the label.
        parameters: Parameters whose gradients are compared, as for `Network`; all if None.
        reheat: As for `likewise.label_suspicion`: "auto" for a network that may have memorized wrong labels.
        classes: Labels in the order of the network's outputs. None: integers from 0 are numbers of outputs; other
            labels are sorted, if there are as many as outputs; a skorch classifier knows its own.
        prepare: Turns X into what the model takes, also if X is not an array, such as a list of texts.

    Attributes:
        issues_: (n,) bool: labels that are more likely wrong than right.
        suspicion_: (n,) in [0, 1], to rank by.
        suggested_: (n,) the label that network and neighbors support.
        sample_weight_: (n,) 1 − suspicion.
        found_: The LabelSuspicion, with the estimated number of wrong labels.
        classes_: Labels in the order of the network's outputs.

    Example:
        >>> import torch
        >>> from likewise.integrations.sklearn import LabelIssueTransformer
        >>> _ = torch.manual_seed(0)
        >>> X = torch.randn(200, 4)
        >>> y = (X[:, 0] > 0).long()
        >>> y[7] = 1 - y[7]                                                   # a wrong label
        >>> net = torch.nn.Linear(4, 2)
        >>> _ = net.weight.data.copy_(torch.tensor([[-1.0, 0, 0, 0], [1, 0, 0, 0]]))      # trained
        >>> finder = LabelIssueTransformer(net).fit(X.numpy(), y.numpy())
        >>> int(finder.suspicion_.argmax()), float(finder.sample_weight_[7]) < 0.5
        (7, True)

    """

    def __init__(
        self,
        model: Any,
        *,
        strategy: Literal["drop", "relabel"] = "drop",
        readout: Readout | None = None,
        parameters: str | Sequence[str] | None = None,
        reheat: Literal["auto"] | bool | Reheated | None = None,
        classes: Sequence[Any] | None = None,
        prepare: Prepare | None = None,
    ) -> None:
        self.model = model
        self.strategy = strategy
        self.readout = readout
        self.parameters = parameters
        self.reheat = reheat
        self.classes = classes
        self.prepare = prepare

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        return tags

    def fit(self, X: Any, y: Any) -> "LabelIssueTransformer":
        """Compute how suspicious each label is.

        Args:
            X: (n, ...) inputs.
            y: (n,) labels, numbers or names.

        """
        self._find(X, y)
        return self

    def fit_resample(self, X: Any, y: Any) -> tuple[Any, Any]:
        """Compute how suspicious each label is; return the data with issues dropped or relabeled.

        Args:
            X: (n, ...) inputs.
            y: (n,) labels, numbers or names.

        Returns:
            X and y without the flagged samples, or all of them with suggested labels; tables stay tables.

        """
        check_choice("strategy", self.strategy, ("drop", "relabel"))
        labels = self._find(X, y)
        if self.strategy == "relabel":
            return X, _as_table(np.where(self.issues_, self.suggested_, labels), y)
        kept = np.flatnonzero(~self.issues_)
        return _take(X, kept), _take(y, kept)

    def _find(self, X: Any, y: Any) -> Array:
        if y is None:
            raise ValueError(
                f"{type(self).__name__} requires y to be passed, but the target y is None: it judges labels."
            )
        if self.prepare is None:
            X, labels = validate_data(self, X, y, allow_nd=True, dtype="numeric")
        else:
            X, labels = self._validate_inputs(X, reset=True), check_array(y, ensure_2d=False, dtype=None)
        labels = column_or_1d(labels, warn=True)
        check_classification_targets(labels)
        net, data = self._network(), _prepare_inputs(X, self.prepare)
        classes = self._class_order(net, data, labels)
        numbers = _class_numbers(labels, classes)
        found = label_suspicion(GramMatrix(net, data), torch.from_numpy(numbers), reheat=self.reheat)
        self.classes_, self.found_ = classes, found
        self.suspicion_ = _to_numpy(found.suspicion)
        self.issues_ = found.flagged.cpu().numpy()
        self.suggested_ = classes[found.suggested.cpu().numpy()]
        self.sample_weight_ = 1 - self.suspicion_
        return labels

    def _class_order(self, net: Network, data: Batches, labels: Array) -> Array:
        """Return the labels in the order of the network's outputs."""
        given = self.classes if self.classes is not None else getattr(self.model, "classes_", None)
        if given is not None:
            return np.asarray(given)
        present = np.unique(labels)
        if present.dtype.kind in "iu" and present[0] >= 0:
            return np.arange(present[-1] + 1)
        first = data.samples(range(1))
        outputs = net.with_readout(all_outputs).outputs(first.inputs).shape[1]
        if outputs > max(1, len(present)):
            raise ValueError(
                f"The network has {outputs} outputs, and y holds {len(present)} labels that are not numbers from 0, "
                f"the first {present[0]!r}: which output belongs to which? Give classes=[...], the labels in the order "
                "of the outputs."
            )
        return present


def _class_numbers(labels: Array, classes: Array) -> NDArray[np.int64]:
    """Return the position of each label in the classes."""
    order = np.argsort(classes, kind="stable")
    places = np.searchsorted(classes, labels, sorter=order).clip(0, len(classes) - 1)
    numbers = order[places]
    unknown = np.unique(labels[classes[numbers] != labels])
    if len(unknown):
        raise ValueError(f"y holds labels that are not among the classes, the first {unknown[0]!r}.")
    return numbers.astype(np.int64)


def _take(values: Any, places: Array) -> Any:
    """Return these rows of an array, a table, or a sequence."""
    if hasattr(values, "iloc"):
        return values.iloc[places]
    return values[places] if hasattr(values, "shape") else [values[i] for i in places]


def _as_table(values: Array, table: Any) -> Any:
    """Return values as a column with the index and name of another, if that is a column."""
    if not hasattr(table, "iloc") or not hasattr(table, "name"):
        return values
    return type(table)(values, index=table.index, name=table.name)


def _prepare_inputs(X: Any, prepare: Prepare | None) -> Batches:
    """Return rows of X as inputs of the model."""
    inputs = X if prepare is None else prepare(X)
    if isinstance(inputs, Tensor | np.ndarray):
        return batches(torch.as_tensor(np.array(inputs)) if isinstance(inputs, np.ndarray) else inputs)
    if hasattr(inputs, "data") and isinstance(inputs.data, dict):  # a tokenizer's BatchEncoding
        inputs = dict(inputs.data)
    return batches(inputs, labels=False)


def _kernel(similarity: Any) -> Kernel:
    if similarity is None:
        return CORRELATION
    checked: Kernel = check_type("similarity", similarity, Kernel, "a likewise.Kernel")
    return checked


def _refuse_indefinite(similarity: Kernel) -> None:
    """Raise if a kernel may have negative eigenvalues."""
    if similarity.left_power == similarity.right_power and similarity.reduce in (
        mean_diagonal,
        subspace_match,
    ):
        return
    raise ValueError(
        "A kernel for scikit-learn must be positive semi-definite, which likewise.CORRELATION, INNER_PRODUCT and "
        f"SUBSPACE_MATCH are; found {similarity}. Compute that one with likewise.GramMatrix."
    )


def _settings(module: nn.Module) -> dict[str, Any]:
    """Return plain attributes of a module that its forward may read."""
    return {
        name: value for name, value in vars(module).items() if isinstance(value, bool | int | float | str)
    }


def _model_name(model: Any) -> str:
    inner = model.model if isinstance(model, Network) else model
    return type(inner).__name__ if isinstance(inner, nn.Module) else describe(inner)


def _to_numpy(values: Tensor) -> NDArray[np.float64]:
    return values.detach().double().cpu().numpy()
