"""Near-duplicates within a data set and across splits, by the network and by pixels, words or numbers.

    similarity         centered similarity of the network; 1 if it cannot tell two samples apart
    input similarity   cosine of the centered inputs: pixels averaged to 16 × 16, word counts, numbers

How similar distinct samples are depends on their class: a class that is learned well lies close together. So a pair
counts as near-duplicates if, by either similarity, it is closer than an eighth of what is usual in its class. With
distance 1 − similarity: closer than RATIO times the class's median distance to the fifth nearest sample, or the smaller
of two medians if the labels differ. The fifth, so that a data set in which every sample has a copy, or a fully leaked
test set, still has a usual distance. If that distance is only rounding, the network does not distinguish the samples of
the class, and the inputs alone decide. In few dimensions, distinct samples are that close too. So the default factor is
at most (CHANCE / 5)^(2/D), with D the dimension estimated from the distances to the third, fourth and fifth nearest:
one sample in a thousand then has such a neighbor by chance.

Texts also count as near-duplicates if at most RATIO of the words of the longer one are missing in the other. Texts
built from templates are all close to each other, so none of them is closer than usual. Padding is no word: 0 in the
`attention_mask`, or `padding_idx` of the embedding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool1d, adaptive_avg_pool2d, normalize

from likewise.checks import check_flag, check_integer, check_number
from likewise.data import Batches
from likewise.gram import GramMatrix, Reducer, SketchOption, Strip, pair_source
from likewise.statistics.neighbors import merge_largest
from likewise.statistics.shared_words import TokenInput, find_token_input
from likewise.statistics.targets import (
    MOST_CLASSES,
    check_class_numbers,
    count_outputs,
    finite_labels,
    given_labels,
    of_classes,
    refuse_unbounded,
)
from likewise.wording import counted

if TYPE_CHECKING:
    import pandas

RATIO = 0.125  # of the median distance to the fifth nearest in a class: digits that are not copies are further apart
CHANCE = 1e-3  # probability that a distinct sample is that close
USUAL = 5  # the usual distance is that to the fifth nearest sample
ROUNDING = 4e-6  # of 1 − similarity in float32: samples that close are the same to the network
SIDE, LONGEST, WORDS = (
    16,
    4096,
    2048,
)  # pixels a side, numbers, and buckets of words that inputs are compared by


class Duplicates(NamedTuple):
    """Pairs of near-duplicates, the most similar first.

    Attributes:
        first: (p,) number of a row.
        second: (p,) number of a column, larger than `first` within one data set.
        similarity: (p,) by the network.
        input_similarity: (p,) by pixels, words or numbers; NaN if inputs were not compared.
        same_label: (p,) whether both have the same label; None without labels.
        across: (p,) whether the two are in different splits: leakage, if one is for testing.
        counts: (n,) number of pairs that contain a row.

    Example:
        >>> import torch, likewise as lw
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(100, 4)
        >>> x[50] = x[3]
        >>> found = lw.duplicates(lw.GramMatrix(torch.nn.Linear(4, 3), x, centered=True))
        >>> found
        Duplicates(1 pair of 2 samples)

    """

    first: Tensor
    second: Tensor
    similarity: Tensor
    input_similarity: Tensor
    same_label: Tensor | None
    across: Tensor
    counts: Tensor

    def table(self) -> "pandas.DataFrame":
        """Return the pairs as a table, one row per pair."""
        import pandas

        columns = {name: getattr(self, name) for name in DUPLICATE_COLUMNS}
        known = {name: value.cpu().numpy() for name, value in columns.items() if value is not None}
        return pandas.DataFrame(known)

    def __repr__(self) -> str:
        count, samples = len(self.first), len(self.first.unique()) + len(self.second.unique())
        samples -= int(torch.isin(self.first.unique(), self.second).sum()) if not self.across.all() else 0
        between = int(self.across.sum())
        pairs = counted(count, "pair")
        return f"Duplicates({pairs} of {counted(samples, 'sample')}{f', {between:,} across splits' if between else ''})"


DUPLICATE_COLUMNS = ("first", "second", "similarity", "input_similarity", "same_label", "across")


@dataclass(frozen=True)
class PartnersReducer(Reducer):
    """The k most similar columns of each row, and its similarities to given columns."""

    k: int
    partners: Tensor  # (n, q) columns of each row
    results: ClassVar[int] = 3
    centered: ClassVar[bool] = True

    def __call__(self, strip: Strip) -> tuple[Tensor, ...]:
        """Return indices and similarities, (b, k) each, and the similarities to the partners, (b, q)."""
        similarity = strip.without_self(strip.centered, -torch.inf)
        best = merge_largest(None, similarity, 0, self.k)
        mine = self.partners[strip.rows.start : strip.rows.stop].to(similarity.device)
        return best.indices, best.values, similarity.gather(1, mine)


def duplicates(
    gram: GramMatrix,
    labels: Any = None,
    *,
    split: Sequence[Any] | Tensor | None = None,
    k: int = 5,
    ratio: float | None = None,
    sketch: SketchOption = "auto",
    compare_inputs: bool = True,
) -> Duplicates:
    """Near-duplicates: pairs that are almost the same to the network or by their inputs; visits all pairs.

    To find leakage of a test set into a training set, pass `GramMatrix(model, test, columns=training)`, or both as one
    data set with `split`.

    Args:
        gram: Pairs within one data set, or between the rows and the columns. Similarities are centered.
        labels: (m,) class numbers of the columns, for one threshold per class; None uses the labels of the data, or one
            threshold for all samples if there are none or they are values.
        split: (n,) the split of each sample, numbers or names, within one data set.
        k: How many nearest samples of each to consider, by the network and by the inputs.
        ratio: A pair counts if it is closer than this times the median distance to the fifth nearest sample in its
            class; for texts, also if at most this share of the words differ. Larger finds more. None: 1/8, less if
            pairs that close can be chance.
        sketch: Numbers per sample of the random projections that are compared; None: gradients; "auto": gradients if
            that is cheap, else 1024 numbers (`likewise.SketchNotice`).
        compare_inputs: Also compare pixels, words or numbers, which reads the data once more.

    Returns:
        Duplicates, the most similar pairs first.

    Raises:
        ValueError: Labels are NaN, −100 or, for a classifier, negative.

    Example:
        >>> import torch, likewise as lw
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3))
        >>> train, test = torch.randn(300, 20), torch.randn(50, 20)
        >>> test[4] = train[17] + 0.001 * torch.randn(20)                   # a leaked sample, nearly the same
        >>> found = lw.duplicates(lw.GramMatrix(model, test, columns=train))
        >>> found.first.tolist(), found.second.tolist()
        ([4], [17])

    """
    refuse_unbounded(gram)
    k, ratio = (
        check_integer("k", k, 1),
        None if ratio is None else check_number("ratio", ratio, above=0, most=1),
    )
    n, m = gram.shape
    k = min(k, m - gram.square)
    if k < 1:
        raise ValueError("One sample has no other sample to compare with: pass at least two.")
    splits = None if split is None else _split_numbers(split, gram)
    classes = _classes(gram, labels)
    rows, columns = classes or (torch.zeros(n, dtype=torch.int64), torch.zeros(m, dtype=torch.int64))
    near = _nearest_inputs(gram, k) if check_flag("compare_inputs", compare_inputs) else None
    partners = torch.zeros(n, 0, dtype=torch.int64) if near is None else near.places
    ((places, similar, others),) = pair_source(gram, sketch).visit(PartnersReducer(k, partners))
    by_network = close_pairs(places.cpu(), similar.cpu(), rows, columns, ratio, ROUNDING)
    found = [(by_network, similar.cpu(), places.cpu())]
    if near is not None:
        by_inputs = close_pairs(near.places, near.similarities, rows, columns, ratio, 0.0)
        if near.words is not None:
            by_inputs |= near.words <= (RATIO if ratio is None else ratio) + 1e-9
        found.append((by_inputs, others.cpu(), near.places))
    pairs = torch.cat([_pair_rows(chosen, values, where) for chosen, values, where in found])
    return _collect(pairs, gram, near, classes, splits)


def close_pairs(
    places: Tensor,
    similarities: Tensor,
    rows: Tensor,
    columns: Tensor,
    ratio: float | None = None,
    rounding: float = ROUNDING,
) -> Tensor:
    """Return which of the nearest columns (n, k) of each row are near-duplicates, (n, k).

    Args:
        places: (n, k) columns, the nearest first.
        similarities: (n, k).
        rows: (n,) classes of the rows.
        columns: (m,) classes of the columns.
        ratio: Factor on each class's median distance to the fifth nearest, or to the last if there are fewer. None:
            1/8, less if pairs that close can be chance.
        rounding: Distances that mean nothing: in a class whose median is not above it, no pair is close.

    """
    distance = (1 - similarities.double()).clamp(min=0)
    classes = int(max(rows.max(), columns.max())) + 1
    usual = torch.zeros(classes, dtype=torch.float64)
    for c in rows.unique().tolist():
        usual[c] = distance[rows == c, min(USUAL, places.shape[1]) - 1].median()
    factor = min(RATIO, _chance_ratio(distance)) if ratio is None else ratio
    limit = torch.where(usual > rounding, factor * usual, -1)
    known = torch.isin(torch.arange(classes), rows)
    limit[~known] = torch.inf  # nothing is known about classes without a row: the row's own limit holds
    pair_limit = torch.minimum(limit[rows][:, None], limit[columns[places]])
    return (distance < pair_limit) & similarities.isfinite()


def _chance_ratio(distance: Tensor) -> float:
    """Return the share of the distance to the fifth nearest within which hardly any sample has a neighbor by chance."""
    k = min(USUAL, distance.shape[1])
    known = distance[:, k - 1] > 0
    if k < 3 or not known.any():
        return 1.0
    near, far = (
        distance[known, k - 3 : k - 1],
        distance[known, k - 1, None],
    )  # not the first, which may be copies
    logarithm = float((far / near.clamp(min=1e-12)).log().mean()) / 2  # of angles
    inverse = logarithm / ((1 / (k - 1) + 1 / (k - 2) + 1 / (k - 1)) / 2)  # what it is in one dimension
    return float((CHANCE / k) ** (2 * inverse))


def input_features(data: Batches, tokens: TokenInput | None = None) -> Tensor | None:
    """Return numbers by which to compare inputs, (n, f) float32; None for unknown kinds of inputs.

    Args:
        data: The samples.
        tokens: Which input holds the tokens of texts, and which of them are padding; None if that is not known.

    """
    parts = list[Tensor]()
    for batch in data:
        numbers = _numbers(batch.inputs) if tokens is None else _word_counts(*tokens.read(batch.inputs))
        if numbers is None:
            return None
        parts.append(numbers)
    if len({part.shape[1] for part in parts}) > 1:
        return None
    return torch.cat(parts)


def pair_similarity(
    features: Tensor,
    first: Tensor,
    second: Tensor,
    others: Tensor | None = None,
    *,
    mean: Tensor | None = None,
) -> Tensor:
    """Return the cosine of centered features for pairs, (p,).

    Args:
        features: (n, f) features of the rows.
        first: (p,) rows.
        second: (p,) columns.
        others: (m, f) features of the columns; None if these are the rows.
        mean: (f,) mean to subtract; None uses that of the columns.

    """
    columns = features if others is None else others
    mean = columns.double().mean(0) if mean is None else mean
    a = normalize(features[first].double() - mean, dim=1)
    b = normalize(columns[second].double() - mean, dim=1)
    return (a * b).sum(1)


class _NearestInputs(NamedTuple):
    """The columns with the most similar inputs."""

    places: Tensor  # (n, k)
    similarities: Tensor  # (n, k)
    rows: Tensor  # (n, f) features
    columns: Tensor  # (m, f)
    words: Tensor | None  # (n, k) for texts: the share of words that differ


def _nearest_inputs(gram: GramMatrix, k: int) -> _NearestInputs | None:
    """Return the k columns with the most similar inputs; None for unknown kinds of inputs."""
    tokens = find_token_input(gram)
    mine = input_features(gram.data, tokens)
    theirs = mine if gram.square else input_features(gram.columns, tokens)
    if mine is None or theirs is None or mine.shape[1] != theirs.shape[1]:
        return None
    mean = theirs.double().mean(0).float()
    rows, columns = normalize(mine - mean, dim=1), normalize(theirs - mean, dim=1)
    places, values = list[Tensor](), list[Tensor]()
    height = max(1, 2**26 // len(columns))
    for start in range(0, len(rows), height):
        similarity = rows[start : start + height] @ columns.T
        if gram.square:
            here = torch.arange(len(similarity))
            similarity[here, here + start] = -torch.inf
        best = merge_largest(None, similarity, 0, k)
        places.append(best.indices)
        values.append(best.values)
    where = torch.cat(places)
    first = torch.arange(len(rows)).repeat_interleave(
        k
    )  # again in float64: differences of 1 − similarity matter
    exact = pair_similarity(mine, first, where.flatten(), None if gram.square else theirs).reshape(
        where.shape
    )
    order = exact.argsort(dim=1, descending=True)
    where, exact = where.gather(1, order), exact.gather(1, order)
    is_text = tokens is not None or holds_words(gram.data.samples(range(1)).inputs)
    return _NearestInputs(
        where, exact, mine, theirs, differing_words(mine, theirs, where) if is_text else None
    )


def differing_words(rows: Tensor, columns: Tensor, places: Tensor) -> Tensor:
    """Return the share of the words of the longer text that the other one does not have, (n, k).

    Args:
        rows: (n, f) word counts.
        columns: (m, f) word counts.
        places: (n, k) columns for each row.

    """
    parts = []
    for start in range(0, len(rows), 256):
        mine, theirs = rows[start : start + 256, None], columns[places[start : start + 256]]
        longer = torch.maximum(mine.sum(2), theirs.sum(2)).clamp(min=1)
        parts.append(1 - torch.minimum(mine, theirs).sum(2) / longer)
    return torch.cat(parts)


def holds_words(inputs: Any) -> bool:
    """Whether the inputs of a batch are texts: token ids."""
    values, _ = _values(inputs)
    is_whole = isinstance(values, Tensor) and not (values.is_floating_point() or values.is_complex())
    return is_whole and values.dim() == 2 and values.dtype not in (torch.uint8, torch.bool)


def _values(inputs: Any) -> tuple[Any, Any]:
    """Return the tensor by which inputs are compared, and the mask of a text."""
    if isinstance(inputs, Mapping):
        return inputs.get("input_ids", next(iter(inputs.values()))), inputs.get("attention_mask")
    return (inputs[0] if isinstance(inputs, tuple | list) else inputs), None


def _numbers(inputs: Any) -> Tensor | None:
    """Return the inputs of a batch as rows of numbers: pixels, word counts, or table columns."""
    given, mask = _values(inputs)
    if not isinstance(given, Tensor) or given.is_complex() or given.dim() < 2:
        return None
    values = given.detach().cpu()
    if holds_words(inputs):
        return _word_counts(values, mask)
    values = values.float()
    if values.dim() == 4:
        height, width = values.shape[2:]
        return adaptive_avg_pool2d(values, (min(SIDE, height), min(SIDE, width))).flatten(1)
    flat = values.flatten(1)
    return flat if flat.shape[1] <= LONGEST else adaptive_avg_pool1d(flat[:, None], LONGEST)[:, 0]


def _word_counts(ids: Tensor, mask: Any) -> Tensor:
    """Return how often each word occurs, (n, buckets)."""
    weights = torch.ones(ids.shape) if mask is None else mask.detach().cpu().float()
    return torch.zeros(len(ids), WORDS).scatter_add_(1, ids.cpu().long() % WORDS, weights)


def _classes(gram: GramMatrix, labels: Any) -> tuple[Tensor, Tensor] | None:
    """Return the classes of rows and columns; None unless both are known."""
    theirs = given_labels(gram, labels)
    known = None if theirs is None else _class_numbers(theirs, gram)
    if labels is not None and known is None:
        raise ValueError(f"labels must be class numbers, one for each of {gram.shape[1]} samples.")
    if gram.square:
        mine = known
    else:
        own = gram.data.labels()
        mine = None if own is None else _class_numbers(finite_labels(own), gram)
    return None if known is None or mine is None else (mine, known)


def _class_numbers(labels: Tensor, gram: GramMatrix) -> Tensor | None:
    """Return labels as class numbers, also if they are one-hot or floats; None if they are values."""
    width = labels[0].numel()
    classes = of_classes(labels, max(2, width))
    if width > 1 or (classes is not None and int(classes.max()) < MOST_CLASSES):
        return classes
    flat, outputs = labels.reshape(-1), count_outputs(gram)
    if outputs == 1:
        return None
    if flat.is_floating_point() and ((flat != flat.round()).any() or flat.max() >= (outputs or MOST_CLASSES)):
        return None
    return check_class_numbers(flat.long())


def _split_numbers(split: Any, gram: GramMatrix) -> Tensor:
    names = split.tolist() if isinstance(split, Tensor) else [str(name) for name in split]
    if not gram.square or len(names) != gram.shape[0]:
        raise ValueError(
            f"split must name the split of each sample of one data set, found {len(names)} for {gram.shape[0]} rows "
            f"and {gram.shape[1]} columns. For two data sets, pass GramMatrix(model, test, columns=training)."
        )
    known = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return torch.tensor([known[name] for name in names])


def _pair_rows(chosen: Tensor, similarities: Tensor, places: Tensor) -> Tensor:
    """Return the chosen pairs as rows (row, column, similarity), in float64."""
    i, j = chosen.nonzero().unbind(1)
    return torch.stack([i.double(), places[i, j].double(), similarities[i, j].double()], 1)


def _collect(
    pairs: Tensor,
    gram: GramMatrix,
    near: _NearestInputs | None,
    classes: tuple[Tensor, Tensor] | None,
    splits: Tensor | None,
) -> Duplicates:
    """Return the pairs, each once, the most similar first."""
    first, second = pairs[:, 0].long(), pairs[:, 1].long()
    if gram.square:
        first, second = torch.minimum(first, second), torch.maximum(first, second)
    keys, place = (first * gram.shape[1] + second).unique(return_inverse=True)
    similarity = torch.zeros(len(keys), dtype=torch.float64)
    similarity[place] = pairs[:, 2]
    first, second = keys // gram.shape[1], keys % gram.shape[1]
    inputs = torch.full((len(keys),), torch.nan, dtype=torch.float64)
    if near is not None:
        inputs = pair_similarity(near.rows, first, second, None if gram.square else near.columns)
    best = torch.maximum(similarity, inputs.nan_to_num(-1))
    order = best.argsort(descending=True, stable=True)
    first, second, similarity, inputs = first[order], second[order], similarity[order], inputs[order]
    across = torch.full(first.shape, not gram.square)
    if splits is not None:
        across = splits[first] != splits[second]
    counts = torch.bincount(first, minlength=gram.shape[0])
    counts = counts + torch.bincount(second, minlength=gram.shape[0]) if gram.square else counts
    same = None if classes is None else classes[0][first] == classes[1][second]
    return Duplicates(first, second, similarity, inputs, same, across, counts)
