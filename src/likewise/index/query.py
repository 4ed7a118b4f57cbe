"""Query an index: which samples does the network treat like this input, and can the prediction be trusted?

Answers come from sketches, with a standard error for every number. `exact=True` recomputes the gradients of the best
candidates from the data set.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils._pytree import tree_flatten, tree_map

from likewise.checks import check_flag, check_integer, check_type, describe, to_tensor
from likewise.data import Batches, Samples, batches
from likewise.gram import GramMatrix, MatchedPassages, join_passages, passages_by, similarity_errors
from likewise.gram.last_layer import Features
from likewise.index.counterfactual import (
    Counterfactual,
    Flip,
    FlipReducer,
    MeanShiftReducer,
    describe_flip,
    describe_mean_shift,
)
from likewise.index.explanation import Explanation, Neighbor, Sample
from likewise.index.layers import dependent_buckets, refuse_exact, restore_projector
from likewise.index.pairs import Columns, IndexPairs, summarize
from likewise.index.parts import append_index, refuse_other_labels
from likewise.index.pictures import PictureMaker, Show, decode_picture
from likewise.index.projection import (
    Projector,
    SampleReader,
    describe_network,
    describe_recorded_readout,
    recover_readout,
    refuse_other_inputs,
    refuse_other_network,
    refuse_other_projection,
    refuse_other_version,
    repeat_tokens,
)
from likewise.index.search import (
    BEYOND,
    Approximation,
    MeanGradient,
    approximate_columns,
    exact_similarities,
    has_faiss,
    mean_gradient,
    search,
)
from likewise.index.shards import Task, describe_data, fill, hold_folder, rows_per_shard
from likewise.index.store import IndexFolder, OutdatedIndexError
from likewise.locks import FolderLockedError
from likewise.model import Network, to_network
from likewise.progress import announce
from likewise.readouts import Readout, reads_text
from likewise.statistics.neighbors import NearestReducer
from likewise.statistics.novelty import (
    NEIGHBORS,
    ClosenessReducer,
    Ingredients,
    closest_cosines,
    counted_share,
    novel_share,
)
from likewise.statistics.reliability import (
    NeighborMeansReducer,
    PredictionTargets,
    Reliability,
)
from likewise.statistics.targets import of_classes
from likewise.wording import counted

CANDIDATES = 256  # that are re-ranked
MOST_GRADIENT = 2**30  # bytes of the sum of gradients that are kept in the index
TOGETHER = 64  # inputs whose candidates are compared in one go
UNCHANGED = 0.05  # relative difference of gradients by rounding alone, at most
DOUBT = 12  # standard errors by which an exact similarity may differ before the data are taken for others


class IndexNeighbors(NamedTuple):
    """The most similar rows of an index, best first."""

    indices: (
        Tensor  # (n, k) rows: places in the data that the index was built from, in the order they were added
    )
    similarities: Tensor  # (n, k)
    errors: Tensor  # (n, k) standard errors of the similarities, 0 where they are exact


class Novelty(NamedTuple):
    """How unlike all rows of the index each input is; NaN if the index has too few rows, or no features."""

    novelty: (
        Tensor  # (n,) share of the rows, each left out in turn, that are less unusual: `likewise.novelty`
    )
    percentile: (
        Tensor  # (n,) the same as counted, from 0 to 100: 100 is more unusual than all it is compared with
    )
    errors: Tensor  # (n,) standard errors of the novelty, by those of the similarities of sketches
    gradient_novelty: Tensor  # (n,) 1 − mean plain similarity to the ten most similar rows, by gradients
    feature_novelty: Tensor  # (n,) the same by what the last layer sees
    feature_length: Tensor  # (n,) of that


class _Asked(NamedTuple):
    """Inputs that an index was asked about, with their sketches."""

    samples: Samples
    sketches: Tensor  # (n, width)

    def is_of(self, samples: Samples) -> bool:
        """Whether these are the same inputs, labels and numbers."""
        (mine, form), (theirs, other) = (tree_flatten(_tensors(one)) for one in (self.samples, samples))
        return form == other and all(
            torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(mine, theirs, strict=True)
        )


class Index:
    """An index of a data set and a model, opened as a memory map.

    Args:
        path: The folder of the index.
        model: The model that the index was built with, to project new inputs; another one is refused. Questions about
            the rows themselves do not need it.
        data: The indexed data set, for exact=True; a list of data sets if more were added.
        readout: The readout that the index was built with; not needed if it is one of this package.
        verify: Check the checksums of all files; otherwise only that the files exist.
        max_memory: Bytes for gradients and strips.

    Raises:
        FileNotFoundError: There is no index.
        ValueError: The index is unfinished, or belongs to another version, model, readout or precision.
        DamagedIndexError: Files are missing or have changed.

    Example:
        >>> import tempfile, torch, likewise as lw
        >>> net, x = torch.nn.Linear(4, 3), torch.randn(40, 4)
        >>> folder = tempfile.mkdtemp()
        >>> _ = lw.build_index(net, x, folder)
        >>> lw.Index(folder, model=net).novelty(torch.randn(2, 4)).novelty.shape
        torch.Size([2])

    """

    def __init__(
        self,
        path: str | Path,
        *,
        model: nn.Module | Network | None = None,
        data: Any = None,
        readout: Readout | None = None,
        verify: bool = True,
        max_memory: int = 2**31,
    ) -> None:
        self.path = Path(check_type("path", path, (str, PathLike), "the folder of an index"))
        self._max_memory = check_integer("max_memory", max_memory, 2**20)
        self._folder = IndexFolder.open(self.path, verify=check_flag("verify", verify))
        self._projector: Projector | None = None
        self._net: Network | None = None
        self._model_state: tuple[Any, ...] = ()
        self._data: list[Batches] = []
        self._mean: MeanGradient | None = None
        self._lists: Approximation | None = None
        self._asked: _Asked | None = None
        if model is not None:
            self._net = self._check_network(model, readout)
        if data is not None:
            self.attach(data)

    def __repr__(self) -> str:
        state, rows = self.manifest, sum(shard.stop - shard.start for shard in self._folder.shards)
        of = f"{state['model_name']}, {describe_recorded_readout(state['readout'])}"
        if "unit" in state["projection"]:
            of += f", unit {state['projection']['unit']}"
        if state["part"] is not None:
            i, n = state["part"]
            return (
                f"Index({self.path}, part {i} of {n}, {counted(rows, 'sample')} × {self.width} "
                f"{state['dtype']}, {of})"
            )
        removed = f", {rows - len(self):,} removed" if rows != len(self) else ""
        return f"Index({self.path}, {counted(len(self), 'sample')}{removed} × {self.width} {state['dtype']}, {of})"

    def __len__(self) -> int:
        return self._columns.m

    @property
    def manifest(self) -> dict[str, Any]:
        """The manifest: model, readout, parameters, precision, projection, data, checksums."""
        return self._folder.state

    @property
    def width(self) -> int:
        """Numbers per sample."""
        return int(self.manifest["projection"]["width"])

    @property
    def classes(self) -> list[str] | None:
        """The class names."""
        return self.manifest["classes"]

    @property
    def columns(self) -> list[str] | None:
        """The column names of the indexed table, by which new tables are read."""
        return self.manifest.get("columns")

    @property
    def rows(self) -> Tensor:
        """The numbers of the rows that are not removed, (m,)."""
        return self._columns.ids

    @property
    def bytes(self) -> dict[str, int]:
        """The bytes of all files, and of the pictures among them."""
        return self._folder.bytes

    @cached_property
    def labels(self) -> Tensor | None:
        """The labels of the rows that are not removed, (m, ...); None if there are none."""
        return self._gather("labels")

    @cached_property
    def outputs(self) -> Tensor | None:
        """The model's outputs for the rows, (m, c); None if they were too many to store."""
        return self._gather("outputs")

    @cached_property
    def _class_numbers(self) -> Tensor | None:
        """The labels as class numbers, (m,), also if they are one-hot or floats; None if they are values."""
        if self.labels is None:
            return None
        return of_classes(
            self.labels, self.labels[0].numel() if self.outputs is None else self.outputs.shape[1]
        )

    def sketches(self, rows: Sequence[int] | Tensor | None = None) -> Tensor:
        """Return whitened sketches, (n, width) in float64, whose inner products are plain similarities.

        Args:
            rows: Row numbers; None for all that are not removed.

        """
        return self._columns.sketches(torch.arange(len(self)) if rows is None else self._places(rows))

    def pairs(self, x: Any = None, *, centered: bool = True, rows: Sequence[int] | None = None) -> IndexPairs:
        """Return the similarities of inputs with all rows, strip by strip, for reducers of `likewise.statistics`.

        Args:
            x: New inputs; None for the rows with themselves.
            centered: Whether reducers see centered similarity by default.
            rows: A range of positions among the rows, if there are no new inputs; None for all.

        """
        sketches = None if x is None else self._project(self._read(x))
        return IndexPairs(
            self._columns, sketches, places=rows, centered=centered, max_memory=self._max_memory
        )

    def nearest(
        self,
        x: Any,
        k: int = 10,
        exact: bool = False,
        *,
        centered: bool = True,
        candidates: int = CANDIDATES,
        approximate: bool | None = None,
    ) -> IndexNeighbors:
        """Return the k rows that the network treats most like each input, best first.

        Args:
            x: New inputs, anything that `likewise.batches` accepts; (x, y) if the readout looks at labels.
            k: Number of neighbors; fewer if the index has no more.
            exact: Recompute the gradients of the best candidates from the data set, and return exact similarities. The
                first exact centered answer takes a pass over the data set.
            centered: Use centered similarity, as in a run; False for plain k^C.
            candidates: How many of the best rows by sketches to compare exactly.
            approximate: Search with faiss (the extra `faiss`), which reads only part of the rows; `index.recall` is the
                share of neighbors it finds, measured on random rows. None: beyond 10⁷ rows, if faiss is installed.

        """
        k, candidates = check_integer("k", k, 1), check_integer("candidates", candidates, 1)
        check_flag("centered", centered)
        check_flag("exact", exact)
        new = self._read(x)
        lists = self._approximation(approximate, centered)
        return self._nearest(
            new,
            self._pairs_of(self._project(new)),
            k,
            exact,
            centered=centered,
            candidates=candidates,
            lists=lists,
        )

    def passages(self, x: Any, rows: IndexNeighbors | Tensor | Sequence[Sequence[int]]) -> MatchedPassages:
        """Return what each token of some rows contributes to their similarity with an input: see `matched_passages`.

        For language models compared by the log-likelihood of a text. The contributions of a row sum to its plain
        similarity k^C, which is computed exactly; what centering subtracts belongs to no token. Rows are read from the
        data set, and cost about eight training steps each.

        Args:
            x: New inputs, as for `nearest`.
            rows: (n, k) row numbers for each input, or the result of `nearest`; keep them few.

        Returns:
            (n, k, T) contributions, and (n, k) plain similarities.

        Raises:
            ValueError: The index has no data set to read the rows from, or the readout is not a log-likelihood.

        Example:
            >>> import tempfile, torch, likewise as lw
            >>> model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7))
            >>> texts = torch.randint(0, 7, (30, 9))
            >>> index = lw.build_index(model, texts, tempfile.mkdtemp(), readout=lw.sequence_log_likelihood())
            >>> found = index.nearest(texts[:2], k=3)
            >>> index.passages(texts[:2], found).contributions.shape
            torch.Size([2, 3, 9])

        """
        new = self._read(x)
        numbers = _row_numbers(rows.indices if isinstance(rows, IndexNeighbors) else rows, new.n)
        if not self._data:
            raise ValueError(
                "Passages are read from the texts of the data set: open the index with it, likewise.Index(folder, "
                "model=model, data=data), or index.attach(data)."
            )
        refuse_exact(self.manifest["projection"], "index.passages")
        sketches = self._project(new)
        places = self._places(numbers.flatten()).view_as(numbers)
        parts = [self._passages_of(new.take([i]), row) for i, row in enumerate(numbers)]
        found = join_passages(parts, 0)
        self._refuse_other_samples(numbers, self._deviations(sketches, places, found.similarities.cpu()))
        return found

    def _passages_of(self, new: Batches, rows: Tensor) -> MatchedPassages:
        """Return the contributions to the similarities of one input with rows, perhaps of several data sets."""
        gram, first = self.projector(new).gram, 0
        parts = dict[int, MatchedPassages]()
        for data in self._data:
            mine = ((rows >= first) & (rows < first + data.n)).nonzero().flatten()
            if len(mine):
                found = passages_by(gram, new, data.take((rows[mine] - first).tolist()))
                for i, place in enumerate(mine.tolist()):
                    parts[place] = MatchedPassages(*(part[:, i : i + 1] for part in found))
            first += data.n
        return join_passages([parts[place] for place in range(len(rows))], 1)

    def _deviations(self, sketches: Tensor, places: Tensor, exact: Tensor) -> Tensor:
        """Return how far exact plain similarities (n, k) are from those of sketches, in standard errors."""
        errors = self._standard_errors(sketches, places, centered=False)
        rows = [(ones * others).sum(2) for ones, others in self._sketches_at(sketches, places)]
        return (exact.double() - torch.cat(rows).cpu()).abs() / errors.cpu().clamp(min=1e-3)

    def _pairs_of(self, sketches: Tensor) -> IndexPairs:
        return IndexPairs(self._columns, sketches, max_memory=self._max_memory)

    def _nearest(
        self,
        new: Batches,
        pairs: IndexPairs,
        k: int,
        exact: bool,
        *,
        centered: bool = True,
        candidates: int = CANDIDATES,
        lists: Approximation | None = None,
    ) -> IndexNeighbors:
        k, sketches = min(k, len(self)), pairs.sketches
        if exact:
            refuse_exact(self.manifest["projection"])
        count = min(len(self), max(k, candidates)) if exact else k
        if lists is None:
            ((places, similarities),) = pairs.with_centering(centered).visit(NearestReducer(count))
            places, similarities = places.cpu(), similarities.cpu()
        else:
            vectors = self._columns.directions(sketches).vectors
            places, similarities = search(lists, self._columns, vectors, count)
        if exact:
            return self._rerank(new, sketches, places, similarities, k, centered)
        errors = self._standard_errors(sketches, places, centered)
        return IndexNeighbors(self._columns.numbers(places), similarities, errors.to(similarities))

    @property
    def recall(self) -> float | None:
        """The share of neighbors that approximate search finds, measured on random rows; None before the first."""
        return None if self._lists is None else self._lists.recall

    def _approximation(self, asked: bool | None, centered: bool) -> Approximation | None:
        """Return the inverted lists for approximate search, built once; None to search all rows."""
        by_itself = len(self) > BEYOND and centered and has_faiss()
        if not (by_itself if asked is None else check_flag("approximate", asked)):
            return None
        if not centered:
            raise ValueError("Approximate search uses centered similarities: leave out centered=False.")
        if self._lists is None:
            announce(f"preparing approximate search of {len(self):,} rows")
            self._lists = approximate_columns(self._columns, self._max_memory)
            announce(
                f"approximate search: recall {self._lists.recall:.3f} of the ten nearest, on random rows"
            )
        return self._lists

    def novelty(self, x: Any, k: int = NEIGHBORS) -> Novelty:
        """Return the share of the rows that are less unusual than each input: see `likewise.novelty`.

        Uses sketches of gradients and the inputs of the last layer, both compared with rows of the index, each left out
        in turn.

        Args:
            x: New inputs.
            k: Number of rows to average over; the reference always uses the default.

        """
        new = self._read(x)
        pairs = self._pairs_of(self._project(new))
        return self._novelty_of(new, pairs, min(check_integer("k", k, 1), len(self)))

    def _novelty_of(self, new: Batches, pairs: IndexPairs, k: int) -> Novelty:
        (closeness,), (places, _) = pairs.with_centering(False).visit(ClosenessReducer(k), NearestReducer(k))
        errors = self._closeness_errors(pairs.sketches, places.cpu())
        gradient = 1 - closeness.cpu()
        missing = torch.full_like(gradient, math.nan)
        near, length = missing, missing
        features = self._features(new) if self._columns.has_features else None
        if features is not None:
            columns = (part.directions for part in self._columns.features())
            near, length = 1 - closest_cosines(features.directions, columns, k), features.lengths
        if len(self) < 2:
            return Novelty(missing, missing, missing, gradient, near, length)

        def share(by_gradients: Tensor) -> Tensor:
            known = (by_gradients,) if features is None else (by_gradients, near, length)
            return novel_share(Ingredients(*known), self._columns.reference)

        known = Ingredients(gradient) if features is None else Ingredients(gradient, near, length)
        low, high = (share(gradient + step * errors.to(gradient)) for step in (-1, 1))
        found = [share(gradient), 100 * counted_share(known, self._columns.reference), (high - low) / 2]
        novelty, percentile, stated = (part.to(gradient) for part in found)
        return Novelty(novelty, percentile, stated, gradient, near, length)

    def _features(self, new: Batches) -> Features:
        features = self._sample_reader(new).read_all(new)[1]
        if features is None:
            raise ValueError(
                "The index stores inputs of the last layer, but the model does not call that layer for these inputs."
            )
        return features

    def _sample_reader(self, new: Batches) -> SampleReader:
        return SampleReader(self.network, new.samples(range(min(2, new.n))))

    def reliability(self, x: Any) -> Reliability:
        """Return the evidence for each prediction from the rows and their labels: see `likewise.reliability`.

        `shift` is NaN if the model's outputs are not stored (more than 64 numbers per sample).
        """
        new = self._read(x)
        return self._reliability_of(new, self._pairs_of(self._project(new)))

    def _reliability_of(self, new: Batches, pairs: IndexPairs) -> Reliability:
        targets = self._targets(new)
        (closeness,), (means,) = pairs.visit(
            ClosenessReducer(min(NEIGHBORS, len(self))), NeighborMeansReducer(targets.values)
        )
        return self._reliability(targets, closeness.cpu(), means.cpu())

    def explain(
        self, x: Any, k: int = 6, exact: bool = False, *, approximate: bool | None = None
    ) -> list[Explanation]:
        """Return, for each input, the prediction, its neighbors, how far they agree, novelty, and whether to trust it.

        Args:
            x: New inputs; with labels, (x, y), a prediction that differs from the label is not trusted.
            k: Number of neighbors to show.
            exact: Compute the neighbors' similarities exactly, from the data set. Agreement, shift and novelty, which
                use all rows, still come from sketches: `Explanation.sketched` names them.
            approximate: As for `nearest`: search neighbors with faiss. Novelty and agreement still use all rows.

        """
        new = self._read(x)
        lists = self._approximation(approximate, centered=True)
        pairs = self._pairs_of(self._project(new)).kept()
        k, exact = check_integer("k", k, 1), check_flag("exact", exact)
        neighbors = self._nearest(new, pairs, k, exact, lists=lists)
        novelty = self._novelty_of(new, pairs, min(NEIGHBORS, len(self)))
        if self.labels is None:
            return [self._explanation(i, neighbors, novelty, None, None, exact) for i in range(new.n)]
        found, changes = self._reliability_with_changes(new, pairs)
        told = [self._explanation(i, neighbors, novelty, found, changes[i], exact) for i in range(new.n)]
        labels = None if found.probabilities is None else new.labels()
        if found.probabilities is None or labels is None:
            return told
        classes = [of_classes(label[None], found.probabilities.shape[1]) for label in labels]
        return [
            one if own is None else replace(one, label=int(own), label_name=self.class_name(int(own)))
            for one, own in zip(told, classes, strict=True)
        ]

    def _reliability_with_changes(
        self, new: Batches, pairs: IndexPairs
    ) -> tuple[Reliability, list[Counterfactual]]:
        """Return the evidence for each prediction and what would change it, from one pass over the rows."""
        targets = self._targets(new)
        values = targets.labels
        changing = (
            FlipReducer(values.argmax(1), values.shape[1]) if targets.classes else MeanShiftReducer(values)
        )
        (closeness,), (means,), change = pairs.visit(
            ClosenessReducer(min(NEIGHBORS, len(self))), NeighborMeansReducer(targets.values), changing
        )
        found = self._reliability(targets, closeness.cpu(), means.cpu())
        parts = [part.cpu() for part in change]
        describe = self._flip if targets.classes else self._mean_shift
        return found, [describe(found.prediction[i], *(part[i] for part in parts)) for i in range(new.n)]

    def _flip(self, prediction: Tensor, *fields: Tensor) -> Counterfactual:
        flip = Flip(*fields)
        leave_out, relabel, share = int(flip.leave_out), int(flip.relabel), float(flip.share)
        leader, other = self.class_name(int(flip.leader)), int(flip.other)
        would_be = self.class_name(other) if other >= 0 else ""
        places = flip.places[flip.places >= 0][: max(0, leave_out)]
        return Counterfactual(
            votes_for=leader if share else "",
            would_be=would_be,
            share=share,
            leave_out=leave_out if leave_out > 0 else None,
            relabel=relabel if relabel > 0 and other >= 0 else None,
            rows=tuple(self._columns.numbers(places).tolist()),
            text=describe_flip(
                self.class_name(int(prediction)), leader, would_be, share, (leave_out, relabel)
            ),
        )

    def _mean_shift(self, prediction: Tensor, before: Tensor, after: Tensor, place: Tensor) -> Counterfactual:
        del prediction
        rows = tuple(self._columns.numbers(place[None]).tolist()) if int(place) >= 0 else ()
        named = [self.sample(row).name or f"row {row}" for row in rows]
        told = [", ".join(f"{value:.4g}" for value in part.tolist()) for part in (before, after)]
        text = describe_mean_shift(told[0], told[1], named[0] if named else "")
        return Counterfactual(
            votes_for=told[0] if rows else "",
            would_be=told[1] if rows else "",
            share=None,
            leave_out=len(rows) or None,
            relabel=None,
            rows=rows,
            text=text,
        )

    def _explanation(
        self,
        i: int,
        neighbors: IndexNeighbors,
        novelty: Novelty,
        found: Reliability | None,
        change: Counterfactual | None,
        exact: bool,
    ) -> Explanation:
        shown = tuple(
            Neighbor(self.sample(int(row)), float(similarity), float(error))
            for row, similarity, error in zip(*(part[i] for part in neighbors), strict=True)
        )
        if found is None:
            numbers = (float(novelty.novelty[i]), float(novelty.percentile[i]), float(novelty.errors[i]))
            return Explanation.without_labels(shown, *numbers, exact=exact)
        classes = found.confidence is not None
        prediction = found.prediction[i].tolist()
        return Explanation(
            prediction=prediction,
            prediction_name=self.class_name(prediction) if classes else "",
            confidence=float(found.confidence[i]) if found.confidence is not None else None,
            neighbors=shown,
            agreement=float(found.agreement[i]),
            shift=float(found.shift[i]),
            novelty=float(novelty.novelty[i]),
            novelty_percentile=float(novelty.percentile[i]),
            novelty_error=float(novelty.errors[i]),
            counterfactual=change,
            exact=exact,
        )

    def sample(self, row: int) -> Sample:
        """Return the name, label and picture of a row."""
        place = int(self._places([row])[0])
        shard = next(s for s in self._folder.shards if s.start <= row < s.stop)
        seen, name = decode_picture(self._folder.read_pictures(shard), row - shard.start)
        known = self.labels if self._class_numbers is None else self._class_numbers
        label = None if known is None else known[place].tolist()
        return Sample(int(row), name, label, self.class_name(label), seen)

    def class_name(self, label: Any) -> str:
        """Return the name of a class, or its number as text; empty without a label."""
        if label is None:
            return ""
        known = self.classes
        return known[label] if known and isinstance(label, int) and 0 <= label < len(known) else f"{label}"

    def add(
        self,
        data: Any,
        *,
        labels: Any = None,
        names: Sequence[str] | None = None,
        show: Show | None = None,
        wait: float = math.inf,
    ) -> None:
        """Add samples after the existing rows; repeat a call that was stopped to resume it.

        Args:
            data: Anything that `likewise.batches` accepts.
            labels: Labels of the samples; None uses the labels of the data.
            names: Names of the samples.
            show: Returns what to show of sample i.
            wait: Seconds to wait while another process writes into the folder.

        """
        _ = self.network
        more = batches(data, labels=labels).match_columns(self.columns)
        refuse_other_inputs(self.manifest["inputs"], more.samples(range(1)))
        given = None if reads_text(self.network.readout) else more.samples(range(1)).labels
        refuse_other_labels(self.labels, given)
        with hold_folder(self.path, wait):
            self._reload()
            folder = self._folder
            maker = PictureMaker(more, show, names) if folder.state["pictures"] else None
            number, first = len(folder.state["data"]), folder.rows
            task = Task(folder, self.projector(more), more, maker, source_number=number, first_row=first)
            folder.state["data"] = [*folder.state["data"], describe_data(more)]
            fill(task, more.spans(rows_per_shard(more.n)))
        if len(self._data) == number:  # all data sets before are attached
            self._data = [*self._data, more]
        self._reload()

    def remove(self, rows: Sequence[int] | Tensor, *, wait: float = math.inf) -> None:
        """Remove rows by their numbers; the other rows keep theirs. Files keep the sketches, as tombstones."""
        wanted = _check_rows(rows).unique()
        with hold_folder(self.path, wait):
            self._reload()
            self._places(wanted)
            if len(wanted) == len(self):
                raise ValueError(
                    "All rows would be removed, but an index needs at least one. Delete the folder instead."
                )
            every = torch.cat([self._columns.removed, wanted]).sort().values
            self._folder.write_tensors("removed", {"rows": every})
            summarize(self._folder, self._max_memory)
            self._folder.save()
        self._reload()

    def merge(self, other: "str | Path | Index", *, wait: float = math.inf) -> None:
        """Append the rows of another index with the same model, readout and projection."""
        path = other.path if isinstance(other, Index) else Path(other)
        with hold_folder(self.path, wait):
            self._reload()
            append_index(self._folder, IndexFolder.open(path))
            summarize(self._folder, self._max_memory)
            self._folder.save()
        self._reload()

    def _reload(self) -> None:
        """Read the manifest again, after another process, or this one, has written it."""
        self._folder = IndexFolder.open(self.path, verify=False)
        for name in ("_columns", "labels", "outputs", "_class_numbers"):
            self.__dict__.pop(name, None)
        self._mean = self._lists = None
        if len(self._data) != len(self.manifest["data"]):
            self._data = []

    def attach(self, data: Any) -> None:
        """Attach the indexed data set, or a list of data sets in the order they were added, for exact answers.

        Raises:
            ValueError: The data differ from the indexed ones: in their number, or in a few compared samples.

        """
        sources = self.manifest["data"]
        given = list(data) if isinstance(data, list) and len(sources) > 1 else [data]
        if len(given) != len(sources):
            raise ValueError(
                f"The index holds {len(sources)} data sets: pass a list of all of them, found {len(given)}."
            )
        opened = [batches(one).match_columns(self.columns) for one in given]
        for number, (one, source) in enumerate(zip(opened, sources, strict=True)):
            found = describe_data(one)
            if found != source:
                which = f"Data set {number + 1}" if len(sources) > 1 else "The data set"
                raise ValueError(
                    f"{which} is not the one that the index was built from ({source['samples']:,} samples there, "
                    f"{found['samples']:,} here, or some of them differ, labels included): pass it with its labels, "
                    "in the same order."
                )
        self._data = opened

    @cached_property
    def _columns(self) -> Columns:
        if self.manifest["part"] is not None:
            i, n = self.manifest["part"]
            raise ValueError(
                f"{self.path} is part {i} of {n} of an index: merge all {n} parts with likewise merge or "
                "likewise.merge_indexes."
            )
        try:
            return Columns(self._folder, self._device)
        except OutdatedIndexError:  # nothing was read of it yet
            self._reload()
            return Columns(self._folder, self._device)

    @property
    def _device(self) -> torch.device:
        return torch.device("cpu") if self._net is None else next(self._net.model.parameters()).device

    def _gather(self, name: str) -> Tensor | None:
        found = []
        for _, _, content, kept in self._columns.shards():
            values = getattr(content, name)
            if values is None:
                return None
            found.append(values.clone() if kept is None else values[kept])
        dtype = found[0].dtype
        for part in found:
            dtype = torch.promote_types(dtype, part.dtype)
        whole = torch.cat([part.to(dtype) for part in found])
        return whole if whole.is_floating_point() or whole.dtype == torch.bool else whole.long()

    def _places(self, rows: Sequence[int] | Tensor) -> Tensor:
        """Return the positions of rows among those that are not removed."""
        return self._columns.places(_check_rows(rows))

    def _check_network(self, model: nn.Module | Network, readout: Readout | None) -> Network:
        state = self.manifest
        refuse_other_version(
            state, f"The index in {self.path}"
        )  # its readout may be known by another fingerprint
        if isinstance(model, Network):
            net = to_network(model, readout)
            if net.automatic is not None and net.automatic.chosen is None:
                net = net.with_readout(recover_readout(state["readout"]))
        else:
            check_type("model", model, nn.Module, "a torch.nn.Module or a likewise.Network")
            known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
            names = state["parameters"] if set(state["parameters"]) <= known else None
            net = to_network(model, recover_readout(state["readout"]) if readout is None else readout, names)
        refuse_other_network(state, describe_network(net), f"The index in {self.path}")
        self._model_state = net.state()
        return net

    @property
    def network(self) -> Network:
        """The network that projects new inputs.

        Raises:
            ValueError: No model was given, or its weights have changed since.

        """
        if self._net is None:
            raise ValueError(
                f"New inputs are projected by the model: open the index with it, likewise.Index({str(self.path)!r}, "
                "model=model)."
            )
        if self._net.state() != self._model_state:  # written to since: perhaps the same values
            refuse_other_network(self.manifest, describe_network(self._net), f"The index in {self.path}")
            self._refuse_other_behavior()
            self._model_state = self._net.state()
        return self._net

    def _refuse_other_behavior(self) -> None:
        """Raise if the last inputs have other gradients now: a hook or an object that forward reads has changed."""
        asked, projector = self._asked, self._projector
        if asked is None or projector is None:
            return
        with projector.gram.net.evaluation_mode():
            found = projector.project_query(asked.samples).sketches
        if not (found - asked.sketches).norm() <= UNCHANGED * asked.sketches.norm():
            raise ValueError(
                f"The model computes something else than when the index in {self.path} was last asked, with the same "
                "weights: undo what was changed, a hook or a setting, or build an index of the model as it is."
            )

    def _read(self, x: Any) -> Batches:
        """Return new inputs as batches; raise if they differ in kind from the indexed ones."""
        _ = self.network
        new = batches(x).match_columns(self.columns)
        refuse_other_inputs(self.manifest["inputs"], new.samples(range(1)))
        return new

    def projector(self, new: Batches) -> Projector:
        """Return the projector of the index; the first call traces and checks the model."""
        if self._projector is None:
            gram = GramMatrix(self.network, new, max_memory=self._max_memory)
            there = self.manifest["projection"]
            projector = restore_projector(gram, there)
            # A text of one token has gradients in other parts than the texts of the index.
            here = projector.facts(repeat_tokens(new.samples(range(1)), self.manifest["inputs"]))
            if here != there:
                gram.ranks()  # a model that is set up on NaN cannot be traced: such inputs are named first
            refuse_other_projection(there, here, f"The index in {self.path}")
            self._projector = projector
        return self._projector

    def _project(self, new: Batches) -> Tensor:
        """Return the sketches of inputs; those of the last few are cached for further questions."""
        _ = self.network  # refuses one that has changed since
        if new.n > TOGETHER or len(new) > 1:
            return self.projector(new).project_all(new).sketches
        samples, asked = new.samples(range(new.n)), self._asked  # which another thread may replace
        if asked is None or not asked.is_of(samples):
            labels = None if samples.labels is None else samples.labels.clone()
            kept = Samples(tree_map(torch.clone, samples.inputs), labels, samples.ids.clone())
            self._asked = asked = _Asked(kept, self.projector(new).project_all(new).sketches)
        return asked.sketches.clone()

    @property
    def _dependent_buckets(self) -> int:
        return dependent_buckets(self.manifest["projection"])

    def _standard_errors(self, sketches: Tensor, places: Tensor, centered: bool) -> Tensor:
        """Return the standard errors of similarities of inputs with rows at places (n, k)."""
        found = []
        for ones, others in self._sketches_at(sketches, places):
            if centered:
                ones, others = (normalize(part - self._columns.mean, dim=2) for part in (ones, others))
            found.append(self._similarity_errors(ones, others)[:, 0])
        return torch.cat(found) * self._columns.error_factors[0 if centered else 1]

    def _closeness_errors(self, sketches: Tensor, places: Tensor) -> Tensor:
        """Return the standard errors of the mean similarity of inputs to the rows at places (n, k)."""
        errors = [  # the mean similarity to rows is that to their mean
            self._similarity_errors(ones, others.mean(1, keepdim=True))[:, 0, 0]
            for ones, others in self._sketches_at(sketches, places)
        ]
        return torch.cat(errors) * self._columns.error_factors[1]

    def _sketches_at(self, sketches: Tensor, places: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield sketches of inputs, (b, 1, width), and of the rows at their positions, (b, k, width), in float64."""
        size = 64 * max(1, places.shape[1]) * sketches.shape[1]  # bytes, with what errors are computed from
        together = max(1, min(TOGETHER, self._max_memory // size))
        for ones, some in zip(sketches.split(together), places.split(together), strict=True):
            rows = self._columns.sketches(some.flatten())
            yield ones.double()[:, None], rows.view(*some.shape, -1)

    def _similarity_errors(self, rows: Tensor, columns: Tensor) -> Tensor:
        outputs = self.manifest["projection"]["outputs"]
        return similarity_errors(rows, columns, outputs, self._dependent_buckets)

    def _targets(self, new: Batches) -> PredictionTargets:
        """Return predictions of new inputs, and labels and predictions of the rows."""
        if self.labels is None:
            raise ValueError("The index has no labels: build it with labels=, or from data that carry them.")
        outputs = self._sample_reader(new).read_all(new)[0]
        if outputs is None:
            raise ValueError(
                "The model's outputs do not predict a class or value for each sample, so there is no reliability."
            )
        stored = self.outputs
        targets = PredictionTargets.of(
            outputs, outputs[:0] if stored is None else stored.to(outputs), self.labels
        )
        return targets if stored is not None else replace(targets, column_predictions=targets.labels)

    def _reliability(self, targets: PredictionTargets, closeness: Tensor, means: Tensor) -> Reliability:
        found = targets.reliability(closeness, means, torch.float32)
        return (
            found
            if self.outputs is not None
            else found._replace(shift=torch.full_like(found.shift, math.nan))
        )

    def _rerank(
        self, new: Batches, sketches: Tensor, places: Tensor, similarities: Tensor, k: int, centered: bool
    ) -> IndexNeighbors:
        if not self._data:
            raise ValueError(
                "exact=True recomputes gradients from the data set: open the index with it, "
                "likewise.Index(folder, model=model, data=data), or index.attach(data)."
            )
        gram = self.projector(new).gram
        mean = self._mean_gradient(gram) if centered else None
        found = []
        for start in range(0, new.n, TOGETHER):
            here = slice(start, start + TOGETHER)
            some = new.take(range(start, min(start + TOGETHER, new.n)))
            exact = self._exact_similarities(gram, some, self._columns.numbers(places[here]), mean)
            errors = self._standard_errors(sketches[here], places[here], centered)
            deviations = (exact - similarities[here]).abs() / errors.clamp(min=1e-3)
            self._refuse_other_samples(self._columns.numbers(places[here]), deviations)
            found.append(exact)
        best = torch.cat(found).sort(dim=1, descending=True, stable=True)
        kept = best.values[:, :k].to(similarities)
        rows = self._columns.numbers(places).gather(1, best.indices[:, :k])
        return IndexNeighbors(rows, kept, torch.zeros_like(kept))

    def _exact_similarities(
        self, gram: GramMatrix, new: Batches, rows: Tensor, mean: MeanGradient | None
    ) -> Tensor:
        """Return the exact similarities of inputs with rows (n, m); a row needed by several inputs is computed once."""
        distinct, where = rows.unique(return_inverse=True)
        found, first = torch.zeros(new.n, len(distinct), dtype=torch.float64), 0
        for data in self._data:
            mine = (distinct >= first) & (distinct < first + data.n)
            if mine.any():
                found[:, mine] = exact_similarities(
                    gram, new, data.take((distinct[mine] - first).tolist()), mean
                )
            first += data.n
        return found.gather(1, where)

    def _mean_gradient(self, gram: GramMatrix) -> MeanGradient:
        """Return the mean gradient of all rows: cached, stored in the index, or from a pass over the data."""
        if self._mean is None:
            stored = self._folder.read_tensors("gradient")
            if stored:
                self._mean = MeanGradient(stored["total"].double(), len(self))
            else:
                self._mean = self._compute_mean_gradient(gram)
                self._keep_mean_gradient(self._mean)
        return self._mean

    def _compute_mean_gradient(self, gram: GramMatrix) -> MeanGradient:
        parts, first = [], 0
        for data in self._data:
            mine = self.rows[(self.rows >= first) & (self.rows < first + data.n)] - first
            if len(mine):
                parts.append(mean_gradient(gram, data if len(mine) == data.n else data.take(mine.tolist())))
            first += data.n
        total = torch.stack([part.total for part in parts]).sum(0)
        return MeanGradient(total, sum(part.samples for part in parts))

    def _keep_mean_gradient(self, mean: MeanGradient) -> None:
        """Write the sum of gradients into the folder for later questions, if the folder is not locked."""
        if 4 * mean.total.numel() > MOST_GRADIENT or not os.access(self.path, os.W_OK):
            return
        try:
            with hold_folder(self.path, 0):
                folder = IndexFolder.open(self.path, verify=False)
                if folder.state == self.manifest:  # of the same rows: others may have been added or removed
                    folder.write_tensors("gradient", {"total": mean.total.float()})
                    folder.save()
                    self._folder = folder
        except FolderLockedError:  # another process is writing: it stays in memory
            return

    def _refuse_other_samples(self, rows: Tensor, deviations: Tensor) -> None:
        """Raise if exact similarities are too far from those of sketches to come from the same samples."""
        worst = int(deviations.argmax())
        if deviations.flatten()[worst] > DOUBT:
            raise ValueError(
                f"Sample {int(rows.flatten()[worst])} of the data set is not the one that the index was built from: "
                f"its exact similarity is {float(deviations.max()):.0f} standard errors away from that of its sketch."
            )


def _tensors(samples: Samples) -> list[Any]:
    return [samples.inputs, samples.ids, *([] if samples.labels is None else [samples.labels])]


def _check_rows(rows: Any) -> Tensor:
    """Return the numbers of rows, (n,), or say what is wrong with them: a mask would be taken for rows 0 and 1."""
    numbers = to_tensor("rows", rows).cpu().reshape(-1)
    if numbers.numel() and (
        numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool
    ):
        advice = (
            "of a mask over the rows, index.rows[mask]" if numbers.dtype == torch.bool else "whole numbers"
        )
        raise TypeError(f"rows must be the numbers of rows, found {describe(numbers)}: give {advice}.")
    return numbers.long()


def _row_numbers(rows: Tensor | Sequence[Sequence[int]], n: int) -> Tensor:
    """Return row numbers for each of n inputs, (n, k); raise if they do not fit."""
    expected = f"rows must be whole numbers of shape ({n}, k), k of each input, at least one"
    lengths = {len(some) for some in rows if isinstance(some, Sequence)}
    if len(lengths) > 1:
        raise ValueError(f"{expected}, found {' and '.join(map(str, sorted(lengths)))} of an input.")
    numbers = torch.as_tensor(rows).cpu()
    if numbers.dim() != 2 or len(numbers) != n or not numbers.numel() or numbers.is_floating_point():
        raise ValueError(f"{expected}, found {tuple(numbers.shape)} of {numbers.dtype}.")
    return numbers.long()
