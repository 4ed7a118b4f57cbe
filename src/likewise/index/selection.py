"""Select samples of an index: similar to targets, different from each other; and measure diversity."""

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from likewise.checks import check_choice, check_flag, check_integer, check_number, check_type
from likewise.data import batches
from likewise.files import write_text
from likewise.gram import Reducer, Strip
from likewise.index.query import Index
from likewise.index.states import choose_in_turn, count_of_share
from likewise.statistics.neighbors import merge_largest
from likewise.wording import agreeing, counted

CANDIDATES = 4  # a diverse selection chooses among this many times the wanted rows
BLOCK = 4096  # rows whose sketches are decoded together
STRIP = 2**25  # similarities that several indexes are averaged in

By = Literal["max", "mean", "each"]


class TargetScores(NamedTuple):
    """How similar the rows of an index are to targets.

    Attributes:
        scores: (m,) what rows are ranked by.
        targets: (m,) the most similar target of each row.
        similarities: (m,) the similarity to it.

    Example:
        >>> import tempfile, torch, likewise as lw
        >>> net, x = torch.nn.Linear(4, 3), torch.randn(40, 4)
        >>> index = lw.build_index(net, x, tempfile.mkdtemp())
        >>> int(lw.score_targets(index, x[:2]).targets[1])
        1

    """

    scores: Tensor
    targets: Tensor
    similarities: Tensor


def score_targets(
    index: Index | Sequence[Index],
    targets: Any,
    *,
    by: Literal["max", "mean"] = "max",
    centered: bool = True,
    weights: Sequence[float] | None = None,
) -> TargetScores:
    """Return how similar every row of an index is to targets.

    Similarities of several indexes (several checkpoints on one data set) are averaged with weights.

    Args:
        index: An index opened with its model, or a list of them.
        targets: Inputs like those one wants to do well on; anything that `likewise.batches` accepts.
        by: "max" scores a row by its most similar target, "mean" by its mean similarity to all of them.
        centered: Centered similarity; False for plain k^C.
        weights: Of several indexes; their learning rates if None, or equal ones if they have none.

    Returns:
        One entry for each row that is not removed, in the order of `index.rows`.

    Example:
        >>> import tempfile, torch, likewise as lw
        >>> net, x = torch.nn.Linear(4, 3), torch.randn(40, 4)
        >>> index = lw.build_index(net, x, tempfile.mkdtemp())
        >>> lw.score_targets(index, x[:2]).scores.shape
        torch.Size([40])

    """
    check_choice("by", by, ("max", "mean"))
    several = _Checkpoints.of(index, weights, check_flag("centered", centered))
    reducer = _Columns(len(several.first))
    several.visit(targets, reducer)
    _warn_of_unlike(reducer.unlike, reducer.count)
    scores = reducer.best if by == "max" else reducer.total / reducer.count
    return TargetScores(scores.clone(), reducer.which, reducer.best)


def select(
    index: Index | Sequence[Index],
    targets: Any,
    *,
    share: float = 0.05,
    count: int | None = None,
    by: By = "max",
    centered: bool = True,
    diverse: bool = False,
    exclude_duplicates: float | None = None,
    weights: Sequence[float] | None = None,
) -> Tensor:
    """Return the rows of an index that the network treats most like the targets, best first.

    Data selection by gradient similarity: which part of a pool should a network be trained on, to do well on the
    targets? One pass over the sketches; no gradient of the pool is computed again.

    Args:
        index: The index of the pool, opened with its model; or indexes of the pool with several checkpoints, whose
            similarities are averaged (LESS); `diverse` and `exclude_duplicates` then use the first one.
        targets: Inputs like those one wants to do well on; anything that `likewise.batches` accepts.
        share: Share of the pool to select, rounded up.
        count: Number of rows to select, instead of `share`.
        by: "max" ranks by the most similar target, "mean" by the mean over targets; "each" lets the targets choose
            in turn, each its most similar remaining row, so that none of them is neglected.
        centered: Centered similarity; False for plain k^C.
        diverse: Among four times as many candidates, select those least similar to the rows selected so far (k-center),
            starting with the best.
        exclude_duplicates: Skip rows whose plain similarity to a selected row is at least this, such as .99.
        weights: Of several indexes; their learning rates if None, or equal ones if they have none.

    Returns:
        (count,) row numbers, best first; fewer if duplicates leave no more.

    Example:
        >>> import tempfile, torch, likewise as lw
        >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
        <torch...>
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        >>> pool = torch.randn(40, 4)
        >>> index = lw.build_index(model, pool, out=tempfile.mkdtemp() + "/index")
        >>> lw.select(index, pool[:2], count=2).sort().values.tolist()
        [0, 1]

    """
    several = _Checkpoints.of(index, weights, check_flag("centered", centered))
    index = several.first
    check_choice("by", by, ("max", "mean", "each"))
    check_flag("diverse", diverse)
    if exclude_duplicates is not None:
        check_number("exclude_duplicates", exclude_duplicates, -1, 1)
    wanted = _count(len(index), share, count)
    needed = min(len(index), CANDIDATES * wanted) if diverse else wanted
    if exclude_duplicates is not None:
        needed = len(index)
    if by == "each":
        order = _choose_in_turn(several, targets, needed)
    else:
        scores = score_targets(several.indexes, targets, by=by, centered=centered, weights=weights).scores
        order = scores.argsort(descending=True, stable=True)[:needed]
    if exclude_duplicates is not None:
        kept = CANDIDATES * wanted if diverse else wanted
        order = _without_duplicates(index, order, exclude_duplicates, kept)
    if diverse:
        order = _spread(index, order, wanted)
    return index.rows[order[:wanted]]


def diversity(index: Index) -> float:
    """Return the effective number of different samples in an index: 1 if all are alike, up to its width.

    The Vendi score of plain similarities: exp(−Σ λ log λ) with the eigenvalues λ of k / n. They are also those of the
    second moment of the sketches, (width, width), so that the cost is linear in the samples. Sketches cannot tell
    more directions apart than they have numbers, which bounds the score by the width.

    Args:
        index: An index of at least one sample; needs no model.

    Returns:
        The exponential of the entropy of the eigenvalues; NaN if all gradients are zero.

    Example:
        >>> import tempfile, torch, likewise as lw
        >>> net, x = torch.nn.Linear(4, 3), torch.randn(40, 4)
        >>> index = lw.build_index(net, x, tempfile.mkdtemp())
        >>> 1 <= lw.diversity(index) <= 40
        True

    """
    check_type("index", index, Index, "a likewise.Index")
    moment = torch.zeros(index.width, index.width, dtype=torch.float64)
    for block in index.rows.split(BLOCK):
        sketches = index.sketches(block)
        moment += sketches.T @ sketches
    values = torch.linalg.eigvalsh(moment).clamp(min=0)
    if values.sum() == 0:
        return math.nan
    return float(torch.special.entr(values / values.sum()).sum().exp())


def write_selection(
    path: Path,
    index: Index,
    chosen: Tensor,
    scores: TargetScores,
    names: Sequence[str] | None = None,
    text_of: Callable[[int], Mapping[str, Any]] | None = None,
) -> None:
    """Write the selected rows as JSON lines: rank, row, name, label, score, and the most similar target.

    Args:
        path: The file.
        index: What was chosen from.
        chosen: (count,) row numbers, best first.
        scores: Of all rows of the index.
        names: Of the targets.
        text_of: Fields with the text of a row, written too; None writes nothing of the data.

    """
    places = torch.searchsorted(index.rows, chosen)
    lines = []
    for rank, (row, place) in enumerate(zip(chosen.tolist(), places.tolist(), strict=True), 1):
        sample, target = index.sample(row), int(scores.targets[place])
        line = {
            "rank": rank,
            "row": row,
            "name": sample.name,
            "label": sample.label_name,
            "score": round(float(scores.scores[place]), 6),
            "target": target if names is None else names[target],
            "similarity": round(float(scores.similarities[place]), 6),
            **({} if text_of is None else text_of(row)),
        }
        lines.append(json.dumps(line, ensure_ascii=False))
    write_text(path, "\n".join(lines) + "\n")


def write_rows(
    path: Path, index: Index, chosen: Tensor, text_of: Callable[[int], Mapping[str, Any]] | None = None
) -> None:
    """Write rows as JSON lines: rank, row, name and label.

    Args:
        path: The file.
        index: What was chosen from.
        chosen: (count,) row numbers, best first.
        text_of: Fields with the text of a row, written too; None writes nothing of the data.

    """
    lines = []
    for rank, row in enumerate(chosen.tolist(), 1):
        sample = index.sample(row)
        line = {
            "rank": rank,
            "row": row,
            "name": sample.name,
            "label": sample.label_name,
            **({} if text_of is None else text_of(row)),
        }
        lines.append(json.dumps(line, ensure_ascii=False))
    write_text(path, "\n".join(lines) + "\n")


class _Columns(Reducer):
    """Of every column the best row, its similarity, and the sum over rows; nothing of the rows."""

    results = 1

    def __init__(self, m: int) -> None:
        self.best = torch.full((m,), -math.inf)
        self.which = torch.zeros(m, dtype=torch.int64)
        self.total = torch.zeros(m, dtype=torch.float64)
        self.unlike = list[int]()  # rows that are similar to no column
        self.count = 0

    def __call__(self, strip: Strip) -> tuple[Tensor, ...]:
        similarity = strip.similarity.float().cpu()
        best, which = similarity.max(0)
        better = best > self.best
        self.best = torch.where(better, best, self.best)
        self.which = torch.where(better, which + self.count, self.which)
        self.total += similarity.double().sum(0)
        self.unlike += _unlike(similarity, self.count)
        self.count += len(similarity)
        return (best.new_zeros(len(similarity)),)


def _count(n: int, share: float, count: int | None) -> int:
    if count is not None:
        return check_integer("count", count, 1, n, f"rows, of which the index has {n:,}")
    return count_of_share(n, check_number("share", share, 0, 1))


def _choose_in_turn(several: "_Checkpoints", targets: Any, wanted: int) -> Tensor:
    """Return the positions that targets choose in turn, each its most similar remaining row."""
    m, given = len(several.first), batches(targets)
    k = min(m, 4 * math.ceil(wanted / given.n))
    while True:
        nearest = _Nearest(k)
        several.visit(given, nearest)
        chosen = choose_in_turn(torch.cat(nearest.places), wanted)
        if len(chosen) == wanted or k == m:
            _warn_of_unlike(nearest.unlike, given.n)
            return chosen
        k = min(m, 4 * k)


class _Nearest(Reducer):
    """The nearest columns of each row; of equal ones the first."""

    results = 1

    def __init__(self, k: int) -> None:
        self._k, self.places = k, list[Tensor]()
        self.unlike = list[int]()  # rows that are similar to no column

    def __call__(self, strip: Strip) -> tuple[Tensor, ...]:
        self.unlike += _unlike(strip.similarity, sum(map(len, self.places)))
        self.places.append(merge_largest(None, strip.similarity, 0, self._k).indices.cpu())
        return (torch.zeros(len(self.places[-1])),)


def _unlike(similarity: Tensor, start: int) -> list[int]:
    """Return the positions of rows that are similar to nothing, counted from `start`."""
    return [start + place for place in (similarity == 0).all(1).nonzero()[:, 0].tolist()]


def _warn_of_unlike(places: list[int], n: int) -> None:
    """Warn about targets with a zero gradient: what they choose is arbitrary."""
    if places:
        shown = ", ".join(map(str, places[:5])) + (" and more" if len(places) > 5 else "")
        warnings.warn(
            f"{len(places)} of {counted(n, 'target')} {agreeing(len(places), 'has', 'have')} a zero gradient and "
            f"{agreeing(len(places), 'is', 'are')} similar to no row of the index (places {shown}): what they choose "
            "is arbitrary. Leave them out, or build the index with another readout.",
            stacklevel=3,
        )


class _Checkpoints(NamedTuple):
    """Indexes of one data set with several checkpoints of a model, combined."""

    indexes: Sequence[Index]
    weights: Tensor  # that add up to 1
    centered: bool

    @property
    def first(self) -> Index:
        """The index that defines rows and similarities among them."""
        return self.indexes[0]

    @classmethod
    def of(
        cls, given: Index | Sequence[Index], weights: Sequence[float] | None, centered: bool
    ) -> "_Checkpoints":
        """Return checked indexes and their weights."""
        listed = list(given) if isinstance(given, list | tuple) else [given]
        if not listed:
            raise ValueError("The list of indexes is empty: pass at least one.")
        expected = "a likewise.Index, opened with its model, or a list of them"
        several: list[Index] = [check_type("index", index, Index, expected) for index in listed]
        first = several[0]
        for other in several[1:]:
            if not torch.equal(first.rows, other.rows) or first.manifest["data"] != other.manifest["data"]:
                raise ValueError(
                    f"{other.path} holds another data set than {first.path}: checkpoints must be indexed on the same "
                    "rows."
                )
        rates = [index.manifest.get("learning_rate") for index in several]
        known = [rate for rate in rates if rate is not None]
        if weights is None and known and len(known) < len(rates):
            raise ValueError("Some of the indexes have a learning rate and some have none: pass weights=.")
        chosen = weights if weights is not None else known or [1.0] * len(several)
        if len(chosen) != len(several):
            raise ValueError(f"{len(chosen)} weights for {len(several)} indexes: expected one for each.")
        values = torch.tensor([check_number("weights", w, 0) for w in chosen], dtype=torch.float64)
        if values.sum() <= 0:
            raise ValueError("Weights must be at least 0, and not all 0.")
        return cls(several, values / values.sum(), centered)

    def visit(self, targets: Any, reducer: Reducer) -> None:
        """Show a reducer the averaged similarities of all targets with all rows."""
        if len(self.indexes) == 1:
            self.first.pairs(targets, centered=self.centered).visit(reducer)
            return
        given = batches(targets)
        step = max(1, STRIP // len(self.first))
        for start in range(0, given.n, step):
            where = range(start, min(start + step, given.n))
            some = given.take(where)
            total = torch.zeros(len(where), len(self.first), dtype=torch.float64)
            for index, weight in zip(self.indexes, self.weights, strict=True):
                if weight:
                    matrix = _Matrix()
                    index.pairs(some, centered=self.centered).visit(matrix)
                    total += weight * torch.cat(matrix.strips).double()
            reducer(_strip(where, total))


class _Matrix(Reducer):
    """All similarities."""

    results = 1

    def __init__(self) -> None:
        self.strips: list[Tensor] = []

    def __call__(self, strip: Strip) -> tuple[Tensor, ...]:
        self.strips.append(strip.similarity.cpu())
        return (torch.zeros(len(self.strips[-1])),)


def _strip(where: range, similarity: Tensor) -> Strip:
    return Strip(
        rows=where, square=False, use_centered=True, plain=lambda: similarity, centered=lambda: similarity
    )


def _without_duplicates(index: Index, order: Tensor, threshold: float, wanted: int) -> Tensor:
    """Return the first `wanted` positions whose similarity to every one before is below a threshold."""
    kept: list[int] = []
    vectors = torch.zeros(0, index.width)
    for block in order.split(256):
        sketches = index.sketches(index.rows[block]).float()
        for place, sketch in zip(block.tolist(), sketches, strict=True):
            if len(kept) == wanted:
                return torch.tensor(kept)
            if not len(kept) or (vectors[: len(kept)] @ sketch).max() < threshold:
                if len(kept) == len(vectors):
                    vectors = torch.cat([vectors, torch.zeros(max(256, len(vectors)), index.width)])
                vectors[len(kept)] = sketch
                kept.append(place)
    return torch.tensor(kept)


def _spread(index: Index, order: Tensor, wanted: int) -> Tensor:
    """Return positions that are least similar to those selected before, starting with the first of the order."""
    sketches = torch.cat([index.sketches(index.rows[block]).float() for block in order.split(BLOCK)])
    nearest = torch.full((len(order),), -math.inf)
    chosen, last = [], 0
    for _ in range(min(wanted, len(order))):
        chosen.append(last)
        nearest = torch.maximum(nearest, sketches @ sketches[last])
        nearest[last] = math.inf
        last = int(nearest.argmin())
    return order[torch.tensor(chosen)]
