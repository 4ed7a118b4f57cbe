"""What a run computes: many statistics in one visit of the pairs, then the columns of its tables.

Every statistic is the one of `likewise.statistics`; nothing is defined here. To show another one in the report, add
its reducer to PAIR_STATISTICS (if it needs pairs) and its column to COLUMNS.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from likewise.gram import GramMatrix, PairSource, ProductReducer, Reducer
from likewise.kernels import CORRELATION, INNER_PRODUCT
from likewise.readouts import are_chances
from likewise.statistics.crossval import CrossValidated
from likewise.statistics.duplicates import close_pairs
from likewise.statistics.fit import decide_verdict, explained_shares
from likewise.statistics.label_issues import LabelSuspicion, OpinionAfter, combined_suspicion, order_warning
from likewise.statistics.neighbors import (
    EXPONENT,
    CountReducer,
    HistogramReducer,
    NearestReducer,
    PositiveReducer,
    SelfSimilarityReducer,
    VotesReducer,
    mean_between_classes,
)
from likewise.statistics.novelty import NEIGHBORS, ClosenessReducer, Ingredients, novel_share
from likewise.statistics.reliability import (
    NeighborMeansReducer,
    PredictionTargets,
    Reliability,
)
from likewise.statistics.target_issues import (
    MultilabelSuspicion,
    ValueSuspicion,
    is_label_matrix,
    multilabel_from_votes,
    values_from_votes,
)
from likewise.statistics.targets import class_chances, of_classes
from likewise.statistics.uncertainty import uncertainty_from_sums
from likewise.watch import Watch

Arrays = dict[str, np.ndarray]
BINS = 40  # of similarity, from -1 to 1
PROBES = 64  # random directions for the map
DIRECTIONS = 10  # kept of it; two are drawn
STATUSES = ("ordinary", "isolated", "contested")


@dataclass(frozen=True)
class Targets:
    """The labels of the samples, and the network's outputs."""

    labels: Tensor | None  # (n,) class numbers, or numbers (n, ...)
    outputs: Tensor  # (n, d)
    is_classifier: bool = True  # whether outputs may be those of classes
    is_text: bool = False  # whether outputs are log-likelihoods of texts: no predictions

    @cached_property
    def classes(self) -> Tensor | None:
        """The labels, if they are class numbers."""
        return (
            None
            if self.labels is None or not self.is_classifier
            else of_classes(self.labels, self.outputs.shape[1])
        )

    @cached_property
    def chances(self) -> Tensor | None:
        """The probability of each class, (n, c), where outputs are those of classes."""
        classes = self.classes
        is_value = not self.is_classifier or (self.labels is not None and classes is None)
        return None if is_value else class_chances(self.outputs, classes)

    @cached_property
    def groups(self) -> Tensor | None:
        """The classes that vote: labels, or predictions if there are no labels."""
        if self.labels is not None:
            return self.classes
        return None if self.chances is None else self.chances.argmax(1)

    @cached_property
    def members(self) -> Tensor:
        """The groups one-hot, (n, classes); no column where there are none."""
        if self.groups is None:
            return torch.zeros(len(self.outputs), 0, dtype=torch.float64)
        return torch.nn.functional.one_hot(self.groups).double()

    @cached_property
    def label_matrix(self) -> Tensor | None:
        """The labels (n, classes), if a sample may have several of the classes that outputs tell."""
        same = self.labels is not None and self.labels.shape == self.outputs.shape
        return self.labels if same and self.is_classifier and is_label_matrix(self.labels) else None

    @cached_property
    def values(self) -> Tensor | None:
        """The labels (n, q), if they are numbers that outputs predict."""
        if self.labels is None or self.classes is not None or self.label_matrix is not None:
            return None
        return self.labels.reshape(len(self.outputs), -1).double() if self.labels_are_outputs else None

    @property
    def votes(self) -> Tensor:
        """What samples vote for, (n, c): classes, several labels, or values; no column where there is nothing."""
        found = self.label_matrix if self.label_matrix is not None else self.values
        return self.members if found is None else found.double()

    @property
    def labels_are_outputs(self) -> bool:
        """Whether labels and outputs can be compared, number by number."""
        if self.labels is None or self.classes is not None:
            return self.chances is not None
        if self.label_matrix is not None:  # 0 and 1 are no logits
            return False
        return self.labels[0].numel() == self.outputs.shape[1]

    @cached_property
    def predictions(self) -> PredictionTargets:
        """What is averaged over neighbors; predictions stand in for labels that are missing or of another kind."""
        if self.chances is not None and self.groups is not None:
            return PredictionTargets.of_classes(self.chances, self.chances, self.groups)
        known = self.labels if self.labels is not None and self.labels_are_outputs else self.outputs
        return PredictionTargets.of_values(self.outputs, self.outputs, known)


@dataclass(frozen=True)
class Request:
    """What the reducers of a run need to know."""

    n: int
    k: int  # neighbors kept
    threshold: float
    targets: Targets
    seed: int

    @cached_property
    def probes(self) -> Tensor:
        """Random directions for the map, (n, r)."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(self.n, min(PROBES, self.n), generator=generator)


class PairStatistic(NamedTuple):
    """A statistic of the visit of pairs, and the names under which a stage keeps its results."""

    names: tuple[str, ...]
    reducer: Callable[[Request], Reducer]


PAIR_STATISTICS = (
    PairStatistic(("indices", "similarities"), lambda r: NearestReducer(r.k)),
    PairStatistic(("counts",), lambda r: HistogramReducer(BINS)),
    PairStatistic(("hard_neighbors",), lambda r: CountReducer(r.threshold)),
    PairStatistic(("local_density",), lambda r: PositiveReducer(EXPONENT)),
    PairStatistic(("closeness",), lambda r: ClosenessReducer(min(NEIGHBORS, r.n - 1))),
    PairStatistic(("votes",), lambda r: VotesReducer(r.targets.votes)),
    PairStatistic(("neighbor_means",), lambda r: NeighborMeansReducer(r.targets.predictions.values)),
    PairStatistic(("class_sums",), lambda r: ProductReducer(r.targets.members)),
    PairStatistic(("self_similarity",), lambda r: SelfSimilarityReducer()),
    PairStatistic(("probe_sums",), lambda r: ProductReducer(r.probes)),
)


PASS_ARRAYS = ("density", "uncertainty")  # what pass_statistics returns


def strip_arrays() -> set[str]:
    """Return the names of what `visit_pairs` returns."""
    return {name for statistic in PAIR_STATISTICS for name in statistic.names}


def pair_arrays() -> set[str]:
    """Return the names of what `pair_statistics` returns."""
    return strip_arrays() - {"probe_sums"} | {"coordinates"}


def pass_statistics(gram: GramMatrix) -> dict[str, Tensor]:
    """Return density and uncertainty of each sample, from the same passes."""
    correlation, inner = gram.sums_and_diagonals(CORRELATION, INNER_PRODUCT)
    return {
        "density": correlation.sums / gram.shape[1],
        "uncertainty": uncertainty_from_sums(inner).to(gram.dtype),
    }


def pair_statistics(source: PairSource, request: Request) -> dict[str, Tensor]:
    """Return everything that needs pairs, from one visit of all of them."""
    return complete_pairs(visit_pairs(source, request), request)


def visit_pairs(source: PairSource, request: Request) -> dict[str, Tensor]:
    """Return what reducers keep of every row, from one visit of all pairs, or of some strips."""
    results = source.visit(*(statistic.reducer(request) for statistic in PAIR_STATISTICS))
    return {
        name: tensor
        for statistic, tensors in zip(PAIR_STATISTICS, results, strict=True)
        for name, tensor in zip(statistic.names, tensors, strict=True)
    }


def complete_pairs(found: dict[str, Tensor], request: Request) -> dict[str, Tensor]:
    """Return what was kept of all rows with the coordinates that follow from it."""
    found["coordinates"] = principal_coordinates(found.pop("probe_sums").cpu(), request.probes.double())
    return found


def principal_coordinates(product: Tensor, probes: Tensor) -> Tensor:
    """Return the leading principal coordinates of a symmetric matrix, from its product with probes, (n, 10)."""
    core = probes.T @ product
    values, vectors = torch.linalg.eigh((core + core.T) / 2)
    alive = values > 1e-6 * values[-1].clamp(min=1e-300)
    basis = product @ (vectors[:, alive] * values[alive].rsqrt())
    left, sizes, _ = torch.linalg.svd(basis, full_matrices=False)
    coordinates = torch.zeros(len(product), DIRECTIONS, dtype=product.dtype)
    count = min(DIRECTIONS, left.shape[1])
    coordinates[:, :count] = left[:, :count] * sizes[:count]
    signs = coordinates.gather(0, coordinates.abs().argmax(0, keepdim=True)).sign()
    return coordinates * torch.where(signs == 0, 1, signs)


class Results:
    """Everything that a run found, with the statistics that follow from it."""

    def __init__(
        self,
        found: Arrays,
        targets: Targets,
        margins: Tensor | None = None,
        after: OpinionAfter | None = None,
        validated: CrossValidated | None = None,
        watch: Watch | None = None,
        resemblance: Tensor | None = None,
    ) -> None:
        self.resemblance = resemblance  # of texts with classes, by shared words
        self.found, self.targets = found, targets
        self.watch = watch  # the record of the training run
        self.validated = validated  # what networks that have not seen the samples say
        self.after = after  # what reheated copies of the network say
        self.margins = margins  # (n,) from the record of the training run, NaN where never seen

    @cached_property
    def suspicion(self) -> LabelSuspicion | None:
        """What votes say of the groups: of labels, or of predictions where there are none."""
        groups = self.targets.groups
        if groups is None:
            return None
        chances = None if self.targets.labels is None else self.targets.chances
        votes = torch.tensor(self.found["votes"])
        others = self.margins, self.after, self.validated, self.resemblance
        return combined_suspicion(votes, groups, chances, *others)

    @cached_property
    def odd_record(self) -> str | None:
        """What is odd about the record of the training run, if there is one."""
        groups, margins = self.targets.classes, self.margins
        if groups is None or margins is None:
            return None
        return order_warning(torch.tensor(self.found["votes"]), groups, self.targets.chances, margins)

    @cached_property
    def _votes_and_weights(self) -> tuple[Tensor, Tensor]:
        """The votes, (n, c), and the sum of weights of all voters, (n,)."""
        mine = torch.tensor(self.found["self_similarity"]).double().clamp(min=0).pow(EXPONENT)
        total = (torch.tensor(self.found["local_density"]).double() - mine).clamp(min=0)
        return torch.tensor(self.found["votes"]).double(), total

    @cached_property
    def several_labels(self) -> MultilabelSuspicion | None:
        """What speaks against labels of which a sample may have several."""
        given = self.targets.label_matrix
        if given is None:
            return None
        return multilabel_from_votes(*self._votes_and_weights, given, self.targets.outputs.double())

    @cached_property
    def values(self) -> ValueSuspicion | None:
        """What speaks against labels that are numbers."""
        given = self.targets.values
        if given is None:
            return None
        return values_from_votes(*self._votes_and_weights, given, self.targets.outputs.double())

    @cached_property
    def duplicate_pairs(self) -> np.ndarray:
        """Pairs that are nearly the same to the network, (p, 3): two samples and their similarity, best first."""
        places, similarities = (torch.tensor(self.found[name]) for name in ("indices", "similarities"))
        n, classes = len(places), self.targets.classes
        if not places.shape[1]:
            return np.zeros((0, 3))
        rows = torch.zeros(n, dtype=torch.int64) if classes is None else classes
        i, j = close_pairs(places, similarities, rows, rows).nonzero().unbind(1)
        ends = torch.stack([i, places[i, j]])
        keys, which = (ends.amin(0) * n + ends.amax(0)).unique(return_inverse=True)
        found = torch.zeros(len(keys), dtype=torch.float64)
        found[which] = similarities[i, j].double()
        order = found.argsort(descending=True, stable=True)
        return torch.stack([keys // n, keys % n, found], 1)[order].numpy()

    @cached_property
    def ingredients(self) -> Ingredients:
        """What novelty is made of."""
        names = [name for name in ("feature_novelty", "feature_length") if name in self.found]
        parts = [1 - torch.tensor(self.found["closeness"]), *(torch.tensor(self.found[n]) for n in names)]
        return Ingredients(*(part.double() for part in parts))

    @cached_property
    def reliability(self) -> Reliability:
        """What speaks for each prediction."""
        closeness, means = (torch.tensor(self.found[name]) for name in ("closeness", "neighbor_means"))
        return self.targets.predictions.reliability(closeness, means, torch.float64)

    @cached_property
    def fit(self) -> dict[str, Any] | None:
        """What is learned of the classes, what neighbors support, and what that means."""
        classes, chances = self.targets.classes, self.targets.chances
        if classes is None or chances is None:
            return None
        votes = torch.tensor(self.found["neighbor_means"])[:, : chances.shape[1]]
        learned, supported = explained_shares(classes, chances, votes)
        neighbors = float(np.median(self.found["density"])) * len(classes)
        verdict = decide_verdict(learned, supported, neighbors)
        return {"learned": learned, "supported": supported, "verdict": verdict}

    def class_similarity(self) -> np.ndarray:
        """Return the mean similarity of different samples, class by class; NaN where there is no pair."""
        similarities = torch.tensor(self.found["self_similarity"])
        sums = torch.tensor(self.found["class_sums"]).double()
        return mean_between_classes(sums, similarities.double(), self.targets.members)[0].numpy()


def _label(r: Results) -> Any:
    labels, classes = r.targets.labels, r.targets.classes
    if labels is None or (classes is None and labels[0].numel() > 1):
        return None
    return classes if classes is not None else labels.reshape(-1).double()


def _prediction(r: Results) -> Any:
    if r.targets.is_text:
        return None
    if r.targets.chances is not None:
        return r.targets.chances.argmax(1)
    return r.targets.outputs[:, 0].double() if r.targets.outputs.shape[1] == 1 else None


def _log_likelihood(r: Results) -> Any:
    outputs = r.targets.outputs
    return outputs[:, 0].double() if r.targets.is_text and outputs.shape[1] == 1 else None


def _error(r: Results) -> Any:
    labels, outputs = r.targets.labels, r.targets.outputs
    if labels is None or r.targets.classes is not None or not r.targets.labels_are_outputs:
        return None
    return (labels.reshape(len(outputs), -1).double() - outputs.double()).norm(dim=1)


def _energy(r: Results) -> Any:
    logits = r.targets.outputs.double()
    are_logits = r.targets.chances is not None and logits.shape[1] > 1 and not are_chances(logits)
    return -logits.logsumexp(1) if are_logits else None


def _shift(r: Results) -> Any:
    return r.reliability.shift if len(r.targets.outputs) > 1 and not r.targets.is_text else None


def _agreement(r: Results) -> Any:
    return r.reliability.agreement if r.targets.labels_are_outputs and len(r.targets.outputs) > 1 else None


def _status(r: Results) -> Any:
    if r.suspicion is None or len(r.targets.outputs) < 2:
        return None
    flags = [r.suspicion.isolated.numpy(), r.suspicion.contested.numpy()]
    return np.select(flags, STATUSES[1:], STATUSES[0]).astype(object)


def _of_labels(field: str) -> Callable[[Results], Any]:
    """Return a field of the suspicion of labels; none where there are no labels."""
    return lambda r: None if r.targets.classes is None else getattr(r.suspicion, field)


def _suggestion_support(r: Results) -> Any:
    """Return how far copies or other networks support what they suggest; none where neighbors tell that."""
    return None if r.after is None and r.validated is None else _of_labels("support")(r)


def _target_suspicion(r: Results) -> Any:
    if len(r.targets.outputs) < 2:
        return None
    if r.several_labels is not None:
        return r.several_labels.samples
    return None if r.values is None else r.values.suspicion


def _suspicious_class(r: Results) -> Any:
    return None if r.several_labels is None else r.several_labels.suspicion.argmax(1)


def _duplicates(r: Results) -> Any:
    ends = r.duplicate_pairs[:, :2].astype(np.int64).ravel()
    return np.bincount(ends, minlength=len(r.targets.outputs))


def _of_training(field: str) -> Callable[[Results], Any]:
    """Return a property of the record of training; none where there is no record."""
    return lambda r: None if r.watch is None else getattr(r.watch, field)


COLUMNS: dict[str, Callable[[Results], Any]] = {
    "label": _label,
    "prediction": _prediction,
    "log_likelihood": _log_likelihood,
    "error": _error,
    "density": lambda r: r.found["density"],
    "local_density": lambda r: r.found["local_density"],
    "uncertainty": lambda r: r.found["uncertainty"],
    "hard_neighbors": lambda r: r.found["hard_neighbors"],
    "duplicates": _duplicates,
    "novelty": lambda r: novel_share(r.ingredients, r.ingredients),
    "gradient_novelty": lambda r: r.ingredients.gradient_novelty,
    "feature_novelty": lambda r: r.ingredients.feature_novelty,
    "feature_length": lambda r: r.ingredients.feature_length,
    "energy": _energy,
    "shift": _shift,
    "agreement": _agreement,
    "status": _status,
    "label_suspicion": _of_labels("suspicion"),
    "suggested_label": _of_labels("suggested"),
    "suggestion_support": _suggestion_support,
    "label_issue": _of_labels("flagged"),
    "chance_wrong": _of_labels("chance_wrong"),
    "target_suspicion": _target_suspicion,
    "suspicious_class": _suspicious_class,
    "margin": lambda r: r.margins,
    "training_confidence": _of_training("confidence"),
    "training_variability": _of_training("variability"),
    "forgetting": _of_training("forgetting"),
    "map_x": lambda r: r.found["layout"][:, 0],
    "map_y": lambda r: r.found["layout"][:, 1],
}
RESERVED = frozenset(COLUMNS) | {"sample", "name", "picture"}


def sample_columns(results: Results) -> Arrays:
    """Return the columns of the table of samples."""
    columns: Arrays = {"sample": np.arange(len(results.targets.outputs))}
    for name, compute in COLUMNS.items():
        values = compute(results)
        if values is not None:
            columns[name] = values.numpy() if isinstance(values, Tensor) else values
    return columns
