"""The record of a training run: margin, loss, confidence and forgetting of each sample.

    watch = Watch(n)                            n samples, numbered from 0
    watch.update(logits, labels, ids)           at each training step, before or after the backward pass
    watch.margins, watch.forgetting, ...        (n,) each
    watch.save("run.parquet")

A record is a few running sums per sample. It draws no random numbers and stays outside of the autograd graph, so
training is bit for bit the same without it.
"""

import warnings
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from likewise import files
from likewise.checks import check_integer, check_tensor, check_type, describe, refuse_unreadable
from likewise.wording import agreeing, counted

if TYPE_CHECKING:
    import pandas

INDEX = "sample_index"  # the key under which WithIndex puts positions into samples that are mappings
PENDING_UPDATES, PENDING_ROWS = 64, 1 << 16  # kept where the logits are before they are added up
PENDING_LOGITS = 1 << 16  # of one update; more are reduced to two numbers per sample at once
SCHEMA = b"2"
UNWEIGHTED = b"1"  # of 0.2: without weighted margins
SCHEMA_KEY, CLOCK_KEY = b"likewise.watch", b"likewise.watch.clock"
LEAST_WEIGHT = (
    1e-6  # of an update: where every other sample of all batches was predicted, updates count alike
)
UNKNOWN = -1  # label of a sample that was never seen
NAMED = 5  # samples that a message lists

COLUMNS: dict[str, type] = {  # of the state, one value per sample
    "label": np.int64,
    "updates": np.int64,
    "left_out": np.int64,  # updates whose logits were NaN or infinite
    "margin_sum": np.float64,
    "weight_sum": np.float64,  # see Watch.early_margins
    "weighted_margin_sum": np.float64,
    "loss_sum": np.float64,
    "confidence_sum": np.float64,
    "confidence_square_sum": np.float64,
    "correct": np.int64,  # updates with a correct prediction
    "forgetting": np.int64,
    "first_at": np.int64,  # number of the sample's first update, and of its last
    "last_at": np.int64,
    "first_correct": np.bool_,
    "last_correct": np.bool_,
}
SUMS = (
    "updates",
    "left_out",
    "margin_sum",
    "weight_sum",
    "weighted_margin_sum",
    "loss_sum",
    "confidence_sum",
    "confidence_square_sum",
    "correct",
    "forgetting",
)
State = dict[str, np.ndarray]  # by the names of COLUMNS


class _Pending(NamedTuple):
    """One update that has not been added to the sums yet."""

    logits: Tensor | None  # (b, classes) if they are few: faster to reduce with those of other updates
    values: Tensor | None  # else (2, b), see `_margins_and_log_odds`
    labels: Tensor  # (b,)
    ids: Tensor  # (b,)
    classes: int
    clock: int

    @property
    def kind(self) -> tuple[Any, ...]:
        """What must be equal for updates to be reduced together."""
        known = self.logits if self.logits is not None else self.labels
        return self.logits is None, self.classes, known.dtype, known.device, self.labels.device


class Watch:
    """The record of a training run: running sums of margins, losses and probabilities for each of n samples.

    Each sample in a batch counts as one update, usually one per epoch; a sample that occurs twice in a batch has two.
    Sums are float64 on the CPU. Up to 64 updates are kept on the device of the logits, so that training does not wait
    for the GPU at each step; reading any result adds them first. On a GPU, faulty ids and labels are therefore refused
    up to 64 updates late, but always before a number is returned.

    A prediction is correct if the margin is positive; a tie is not. Updates with NaN or infinite logits are left out
    and counted, with a warning.

    Args:
        n: Number of samples; ids are 0 to n - 1, the positions in the data set.

    Example:
        >>> import torch, likewise as lw
        >>> watch = lw.Watch(3)
        >>> watch.update(torch.tensor([[2.0, 0.5], [1.0, 0.0]]), torch.tensor([0, 1]), ids=torch.tensor([0, 2]))
        >>> watch.margins
        tensor([ 1.5000,     nan, -1.0000], dtype=torch.float64)
        >>> watch
        Watch(3 samples, 1 never seen; 1 update)
    """

    def __init__(self, n: int) -> None:
        self.n = check_integer("n", n, 1)
        self._state = _empty_state(self.n)
        self._clock = 0  # updates so far
        self._pending: list[_Pending] = []
        self._pending_rows = 0
        self._warned = False

    def update(self, logits: Any, labels: Any, ids: Any) -> None:
        """Add one training batch.

        Args:
            logits: (b, classes) as the loss sees them, not probabilities; with two classes, also (b,) or (b, 1) for
                class 1. Any floating dtype; half precision is read as float32.
            labels: (b,) class numbers. With mixed or smoothed targets: the numbers before mixing.
            ids: (b,) positions of the samples in the data set; `WithIndex` adds them to a data set.

        Raises:
            ValueError: A shape, id or label does not fit, or a sample has another label than before.
        """
        logits, labels, ids = self._check_update(logits, labels, ids)
        with torch.no_grad():
            few = logits.numel() <= PENDING_LOGITS
            self._pending.append(
                _Pending(
                    logits.detach().clone() if few else None,
                    None if few else _margins_and_log_odds(logits.detach(), labels),
                    labels.clone(),
                    ids.clone(),
                    logits.shape[1],
                    self._clock,
                )
            )
        self._pending_rows += len(ids)
        self._clock += 1
        if len(self._pending) >= PENDING_UPDATES or self._pending_rows >= PENDING_ROWS:
            self._flush()

    @property
    def updates(self) -> Tensor:
        """How often each sample was seen with finite logits, (n,) integers."""
        return self._column("updates")

    @property
    def left_out(self) -> Tensor:
        """How many updates of each sample were left out for NaN or infinite logits, (n,) integers."""
        return self._column("left_out")

    @property
    def labels(self) -> Tensor:
        """The label that each sample was trained with, (n,) integers; -1 if it was never seen."""
        return self._column("label")

    @property
    def unseen(self) -> Tensor:
        """The samples without an update, by number; all their results are NaN."""
        return (self.updates == 0).nonzero()[:, 0]

    @property
    def margins(self) -> Tensor:
        """Mean of (logit of the label − largest other logit) over the updates, (n,); low means suspicious.

        The area under the margin of Pleiss et al., "Identifying mislabeled data using the area under the margin
        ranking" (2020).
        """
        return self._mean("margin_sum")

    @property
    def early_margins(self) -> Tensor:
        """Mean margin, weighted by how much was still to be learned, (n,); low means suspicious.

        The weight of an update is e (1 − e)², with e the share of mispredicted samples among the others of its batch.
        Updates before a network has learned anything, and after it has memorized its labels, say nothing about wrong
        labels and hardly count. For a network stopped early, this is close to the plain mean. `label_suspicion` ranks
        labels by it.
        """
        total, weight = self._column("weighted_margin_sum"), self._column("weight_sum")
        return torch.where(self.updates > 0, total / weight.clamp(min=LEAST_WEIGHT), torch.nan)

    @property
    def losses(self) -> Tensor:
        """Mean cross entropy over the updates, (n,), without label smoothing or weights."""
        return self._mean("loss_sum")

    @property
    def confidence(self) -> Tensor:
        """Mean probability of the label over the updates, (n,).

        This, `variability` and `correctness` are the coordinates of Swayamdipta et al., "Dataset cartography" (2020).
        """
        return self._mean("confidence_sum")

    @property
    def variability(self) -> Tensor:
        """Standard deviation over the updates of the probability of the label, (n,): divided by their number.

        From sums of squares in float64: below 1e-8 it is rounding.
        """
        return (self._mean("confidence_square_sum") - self.confidence.square()).clamp(min=0).sqrt()

    @property
    def correctness(self) -> Tensor:
        """Share of the updates with a correct prediction, (n,)."""
        return self._mean("correct")

    @property
    def forgetting(self) -> Tensor:
        """How often a sample went from correctly to incorrectly predicted, (n,); NaN if it was never seen.

        Forgetting events of Toneva et al., "An empirical study of example forgetting" (2019). 0 also for a sample that
        was never learned: its `correctness` is 0.
        """
        events = self._column("forgetting").double()
        return torch.where(self.updates > 0, events, torch.nan)

    def table(self) -> "pandas.DataFrame":
        """Return all results, one row per sample."""
        import pandas

        names = (
            "margins", "early_margins", "losses", "confidence", "variability", "correctness", "forgetting",
        )  # fmt: skip
        columns = {
            "label": self.labels,
            "updates": self.updates,
            **{name: getattr(self, name) for name in names},
        }
        table = pandas.DataFrame({name: values.numpy() for name, values in columns.items()})
        singular = {"margins": "margin", "early_margins": "early_margin", "losses": "loss"}
        return table.rename(columns=singular).rename_axis("sample")

    def scalars(self) -> dict[str, float]:
        """Return a few numbers for a logger: means over the samples that were seen."""
        seen = self.updates > 0
        means = {"margin": self.margins, "loss": self.losses, "confidence": self.confidence}
        found = {f"watch/{name}": float(values[seen].mean()) for name, values in means.items()}
        found["watch/forgetting"] = float(self.forgetting[seen].mean())
        found["watch/never_correct"] = float((self.correctness[seen] == 0).double().mean())
        found["watch/unseen"] = float((~seen).sum())
        return found

    def merge(self, other: "Watch") -> None:
        """Add the record of the same samples by another process.

        All sums equal those of a single record. So does `forgetting`, for samples whose updates in one record all come
        before those in the other, counted in calls of `update`; if they alternate, events between the two records are
        not counted. Merge after each epoch to count all of them.

        Raises:
            ValueError: The numbers of samples, or labels, differ.
        """
        check_type("other", other, Watch, "a Watch")
        if other is self:
            raise ValueError("A record cannot be merged with itself: all its sums would count twice.")
        if other.n != self.n:
            raise ValueError(f"A record of {other.n} samples cannot be merged with one of {self.n}.")
        self._flush()
        other._flush()
        seen = np.flatnonzero(other._state["label"] != UNKNOWN)
        self._combine(seen, _rows(other._state, seen))
        self._clock = max(self._clock, other._clock)

    def save(self, path: str | Path) -> None:
        """Write the record atomically as one parquet file of about 80 bytes per sample.

        It holds the running sums, so that training can resume from `Watch.load(path)`.
        """
        import pyarrow
        import pyarrow.parquet

        self._flush()
        columns = {"sample": np.arange(self.n), **self._state}
        metadata = {SCHEMA_KEY: SCHEMA, CLOCK_KEY: str(self._clock).encode()}
        table = pyarrow.table(columns).replace_schema_metadata(metadata)

        def write(file: BinaryIO) -> None:
            pyarrow.parquet.write_table(table, file, compression="zstd")

        files.make_folder(Path(path).absolute().parent)
        files.write_atomically(Path(path), write, table.nbytes)

    @classmethod
    def load(cls, path: str | Path) -> "Watch":
        """Load a record that `save` wrote.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: It is not a record, or it is damaged.
        """
        import pyarrow
        import pyarrow.parquet

        if not Path(path).exists():
            raise FileNotFoundError(f"There is no record {path}: watch.save(path) writes one.")
        try:
            # without threads: pyarrow waits forever if there is no memory for their stacks
            table = pyarrow.parquet.read_table(path, use_threads=False, pre_buffer=False)
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{path} is not a record written by Watch.save: {error}") from error
        metadata = table.schema.metadata or {}
        if metadata.get(SCHEMA_KEY) == UNWEIGHTED and {"updates", "margin_sum"} <= set(table.column_names):
            table = table.append_column("weight_sum", table["updates"])
            table = table.append_column("weighted_margin_sum", table["margin_sum"])
            metadata = {**metadata, SCHEMA_KEY: SCHEMA}
        if metadata.get(SCHEMA_KEY) != SCHEMA or not {"sample", *COLUMNS} <= set(table.column_names):
            raise ValueError(f"{path} is not a record written by Watch.save of this version.")
        if not len(table) or (table["sample"].to_numpy() != np.arange(len(table))).any():
            raise ValueError(
                f"{path} is not in the order in which Watch.save wrote it: samples are numbered from 0."
            )
        watch = cls(len(table))
        watch._state = {name: np.array(table[name].to_numpy(), dtype) for name, dtype in COLUMNS.items()}
        watch._clock = int(metadata[CLOCK_KEY])
        return watch

    def margins_for(self, labels: Any) -> Tensor:
        """Return the early margins, if the record matches these labels of the same samples in the same order.

        Warns if samples were never seen; their margins are NaN.

        Raises:
            ValueError: There are more or fewer labels than samples, or a sample was trained with another label.
        """
        given = check_tensor("labels", labels).cpu()
        if given.shape != (self.n,):
            raise ValueError(
                f"The record is of {self.n:,} samples, but labels have shape {tuple(given.shape)}: record and data "
                "must have the same samples in the same order."
            )
        known = self.labels
        differ = ((known != UNKNOWN) & (known != given)).nonzero()[:, 0]
        if len(differ):
            raise ValueError(
                f"{len(differ):,} of {self.n:,} samples {agreeing(len(differ), 'was', 'were')} trained with another "
                f"label than given: {_list_ids(differ)}. "
                "Ids must be positions in this data set, in this order; after relabeling, train with a new Watch."
            )
        unseen = self.unseen
        if len(unseen):
            warnings.warn(
                f"{len(unseen):,} of {self.n:,} samples {agreeing(len(unseen), 'was', 'were')} never seen in "
                f"training: {_list_ids(unseen)}. They have no margin.",
                stacklevel=3,
            )
        return self.early_margins

    def part(self, samples: slice) -> Tensor:
        """Return the state of some samples as one (k, columns) tensor in float64, to be sent to another process."""
        self._flush()
        return torch.from_numpy(
            np.stack([self._state[name][samples] for name in COLUMNS], 1).astype(np.float64)
        )

    def merge_part(self, samples: slice, part: Tensor) -> None:
        """Merge with what `part` returned for these samples in another process."""
        self._flush()
        columns = part.cpu().numpy().T
        other = {name: column.astype(COLUMNS[name]) for name, column in zip(COLUMNS, columns, strict=True)}
        seen = np.flatnonzero(other["label"] != UNKNOWN)
        self._combine(seen + (samples.start or 0), _rows(other, seen))
        self._clock = max(self._clock, int(other["last_at"].max(initial=-1)) + 1)

    def empty_part(self) -> "Watch":
        """Return an empty record of the same samples, whose updates count as later than all of this one."""
        self._flush()
        later = Watch(self.n)
        later._clock = self._clock
        return later

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        unseen = len(self.unseen)
        never = f", {unseen:,} never seen" if unseen else ""
        return f"Watch({counted(self.n, 'sample')}{never}; {counted(self._clock, 'update')})"

    def _check_update(self, logits: Any, labels: Any, ids: Any) -> tuple[Tensor, Tensor, Tensor]:
        logits = _check_logits(logits)
        labels = _check_integers(
            "labels", labels, len(logits), "class numbers; floats: labels.long(); one-hot: labels.argmax(1)"
        )
        ids = _check_integers(
            "ids", ids, len(logits), "positions in the data set: likewise.WithIndex adds them"
        )
        if ids.device.type == "cpu" and len(ids):
            _refuse_outside("ids", ids.numpy(), self.n)
        if labels.device.type == "cpu" and len(labels):
            _refuse_outside("labels", labels.numpy(), logits.shape[1])
        if logits.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "watch.update cannot run while a CUDA graph is captured: call it with the outputs of a replay."
            )
        return logits, labels, ids

    def _flush(self) -> None:
        """Add pending updates to the sums."""
        if not self._pending:
            return
        groups = [list(group) for _, group in groupby(self._pending, lambda part: part.kind)]
        with torch.no_grad():
            values = np.concatenate([_reduce_updates(group) for group in groups], 1)
        labels = _concatenate([part.labels for part in self._pending])
        ids = _concatenate([part.ids for part in self._pending])
        sizes = [len(part.ids) for part in self._pending]
        values = np.concatenate([values, _weights(values[0], sizes)[None]])
        _refuse_outside("ids", ids, self.n)
        _refuse_outside("labels", labels, np.repeat([part.classes for part in self._pending], sizes))
        clocks = np.repeat([part.clock for part in self._pending], sizes)
        if len(ids):
            order = _stable_order(ids)  # rows of a sample side by side, in the order of their updates
            self._add(ids[order], labels[order], values[:, order], clocks[order])
        self._pending, self._pending_rows = [], 0
        self._warn_of_left_out(
            ids[~np.isfinite(values).all(0)]
        )  # last: filters may turn it into an exception

    def _add(self, ids: np.ndarray, labels: np.ndarray, values: np.ndarray, clocks: np.ndarray) -> None:
        """Add rows that are sorted by sample."""
        repeated = ids[1:] == ids[:-1]
        changed = repeated & (labels[1:] != labels[:-1])
        if changed.any():
            _refuse_changed(ids[1:][changed], labels[:-1][changed], labels[1:][changed])
        finite = np.isfinite(values).all(0)
        starts = np.flatnonzero(np.r_[True, ~repeated])
        known = {
            "label": labels[starts],
            "left_out": np.add.reduceat((~finite).astype(np.int64), starts),
        }
        if finite.all():
            found = _summarize(ids, values, clocks)
        else:
            found = _empty_state(len(starts))
            at = np.flatnonzero(np.logical_or.reduceat(finite, starts))
            if len(at):
                for name, column in _summarize(ids[finite], values[:, finite], clocks[finite]).items():
                    found[name][at] = column
        self._combine(ids[starts], {**found, **known})

    def _warn_of_left_out(self, ids: np.ndarray) -> None:
        """Warn once about samples whose updates were left out."""
        if self._warned or not len(ids):
            return
        self._warned = True
        warnings.warn(
            f"{counted(len(ids), 'update')} with NaN or infinite logits {agreeing(len(ids), 'is', 'are')} left "
            f"out of the record: samples {_list_ids(np.unique(ids))}. watch.left_out counts them.",
            stacklevel=4,
        )

    def _combine(self, ids: np.ndarray, theirs: State) -> None:
        """Merge the state of samples, each of which occurs once in `ids`, with another state of these."""
        mine = _rows(self._state, ids)
        changed = (mine["label"] != UNKNOWN) & (mine["label"] != theirs["label"])
        if changed.any():
            _refuse_changed(ids[changed], mine["label"][changed], theirs["label"][changed])
        for name, column in _joined_in_time(mine, theirs).items():
            self._state[name][ids] = column

    def _column(self, name: str) -> Tensor:
        self._flush()
        return torch.from_numpy(self._state[name].copy())

    def _mean(self, name: str) -> Tensor:
        total, count = self._column(name).double(), self.updates
        return torch.where(count > 0, total / count.clamp(min=1), torch.nan)


class WithIndex(torch.utils.data.Dataset):
    """A data set whose samples carry their position, as `Watch.update` needs it.

    Mappings get a key "sample_index", tuples and lists a last entry; anything else becomes (sample, position). A
    DataLoader collates the positions to a tensor: `for x, y, ids in loader`. Shuffling, workers and samplers do
    not matter. Wrap the data set that you will analyze; take subsets of the wrapped one.

    Args:
        dataset: A map-style data set; an iterable one has no positions to add.

    Example:
        >>> import likewise as lw
        >>> lw.WithIndex([("a", 0), ("b", 1)])[1]
        ('b', 1, 1)
    """

    def __init__(self, dataset: Any) -> None:
        streamed = isinstance(dataset, torch.utils.data.IterableDataset)
        if streamed or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise TypeError(
                f"dataset must have a length and be read by position, found {describe(dataset)}: yield the position of "
                "each sample yourself, and pass it to watch.update."
            )
        if isinstance(dataset, Mapping | torch.utils.data.DataLoader):
            raise TypeError(f"dataset must be a data set of samples, found {describe(dataset)}.")
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return _with_index(self.dataset[index], self._position(index))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several samples; a DataLoader calls this, which is faster for Hugging Face data sets."""
        fetch = getattr(self.dataset, "__getitems__", None)
        items = [self.dataset[index] for index in indices] if fetch is None else fetch(indices)
        return [_with_index(item, self._position(index)) for item, index in zip(items, indices, strict=True)]

    def _position(self, index: Any) -> int:
        place = check_integer("index", index, -len(self), len(self) - 1)
        return place + len(self) if place < 0 else place


def _with_index(item: Any, index: int) -> Any:
    if isinstance(item, Mapping):
        if INDEX in item:
            raise ValueError(
                f"Samples have a key {INDEX!r} already: rename it, or do not wrap the data set twice."
            )
        return {**item, INDEX: index}
    return (*item, index) if isinstance(item, tuple | list) else (item, index)


def _margins_and_log_odds(logits: Tensor, labels: Tensor) -> Tensor:
    """Return margins and log-odds of the labels, (2, b): everything else follows from these."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # faulty labels are refused when they are added; out of range, they would abort all work on a GPU here
    place = labels.to(logits.device, non_blocking=True).clamp(0, logits.shape[1] - 1)[:, None]
    label = logits.gather(1, place)[:, 0]
    others = logits.scatter(1, place, -torch.inf)
    return torch.stack([label - others.amax(1), label - others.logsumexp(1)])


def _reduce_updates(parts: list[_Pending]) -> np.ndarray:
    """Return margins and log-odds of updates of one kind, (2, rows) in float64."""
    if parts[0].logits is None:
        return _concatenate([part.values for part in parts if part.values is not None], 1).astype(np.float64)
    logits = torch.cat([part.logits for part in parts if part.logits is not None])
    return _margins_and_log_odds(logits, torch.cat([part.labels for part in parts])).cpu().double().numpy()


def _weights(margins: np.ndarray, sizes: list[int]) -> np.ndarray:
    """Return the weight of each row, (rows,), see Watch.early_margins; 1 if it is alone in its batch."""
    sizes_of = np.repeat(sizes, sizes)
    missed = ~(margins > 0)
    batches = np.repeat(np.arange(len(sizes)), sizes)
    others = np.bincount(batches, missed, minlength=len(sizes))[batches] - missed
    share = others / np.maximum(sizes_of - 1, 1)
    return np.where(sizes_of > 1, share * (1 - share) ** 2, 1.0) + LEAST_WEIGHT


def _stable_order(ids: np.ndarray) -> np.ndarray:
    """Return the order that sorts ids; equal ones stay in place. Faster than a stable argsort: keys are distinct."""
    return np.sort(ids * len(ids) + np.arange(len(ids))) % len(ids)


def _summarize(ids: np.ndarray, values: np.ndarray, clocks: np.ndarray) -> State:
    """Return what rows, sorted by sample, add to the state of their samples."""
    new = np.r_[True, ids[1:] != ids[:-1]]
    starts = np.flatnonzero(new)
    ends = np.r_[starts[1:], len(ids)] - 1
    margin, log_odds, weight = values
    correct = margin > 0
    decay = np.exp(-np.abs(log_odds))  # so that nothing overflows, and small losses keep their digits
    confidence = np.where(log_odds >= 0, 1, decay) / (1 + decay)
    forgotten = np.r_[False, correct[:-1] & ~correct[1:]] & ~new
    rows = {
        "updates": np.ones(len(ids), np.int64),
        "margin_sum": margin,
        "weight_sum": weight,
        "weighted_margin_sum": weight * margin,
        "loss_sum": np.log1p(decay) + np.maximum(-log_odds, 0),
        "confidence_sum": confidence,
        "confidence_square_sum": confidence**2,
        "correct": correct.astype(np.int64),
        "forgetting": forgotten.astype(np.int64),
    }
    sums = {name: np.add.reduceat(column, starts) for name, column in rows.items()}
    times = {"first_at": clocks[starts], "last_at": clocks[ends]}
    return {**sums, **times, "first_correct": correct[starts], "last_correct": correct[ends]}


def _joined_in_time(a: State, b: State) -> State:
    """Merge the states of the same samples, with some updates in `a` and some in `b`."""
    in_a, in_b = a["updates"] > 0, b["updates"] > 0
    a_before = in_a & in_b & (a["last_at"] <= b["first_at"])
    b_before = in_a & in_b & ~a_before & (b["last_at"] <= a["first_at"])
    between = (a_before & a["last_correct"] & ~b["first_correct"]) | (
        b_before & b["last_correct"] & ~a["first_correct"]
    )
    found = {name: a[name] + b[name] for name in SUMS}
    found["forgetting"] += between
    found["label"] = np.where(b["label"] != UNKNOWN, b["label"], a["label"])
    b_first = in_b & (~in_a | (b["first_at"] < a["first_at"]))
    b_last = in_b & (~in_a | (b["last_at"] >= a["last_at"]))
    for end, is_b in (("first", b_first), ("last", b_last)):
        for name in (f"{end}_at", f"{end}_correct"):
            found[name] = np.where(is_b, b[name], a[name])
    return found


def _empty_state(n: int) -> State:
    state: State = {name: np.zeros(n, dtype) for name, dtype in COLUMNS.items()}
    for name in ("label", "first_at", "last_at"):
        state[name].fill(UNKNOWN)
    return state


def _rows(state: State, samples: np.ndarray) -> State:
    return {name: column[samples] for name, column in state.items()}


def _concatenate(parts: list[Tensor], dim: int = 0) -> np.ndarray:
    """Concatenate tensors into one array; waits for a GPU once."""
    device = parts[-1].device
    return torch.cat([part.to(device) for part in parts], dim).cpu().numpy()


def _check_logits(logits: Any) -> Tensor:
    found = check_tensor("logits", logits, finite=False)
    if not found.is_floating_point():
        raise TypeError(f"logits must be floating-point numbers, found {describe(found)}.")
    if found.dim() == 1 or (found.dim() == 2 and found.shape[1] == 1):
        one = found.reshape(-1, 1)
        return torch.cat([torch.zeros_like(one), one], 1)
    if found.dim() != 2 or found.shape[1] == 0:
        raise ValueError(
            f"logits must have shape (batch, classes), found {tuple(found.shape)}: Watch records one label per sample. "
            "For tokens or pixels, pass one position per sample, or make each token a sample: logits as "
            "(tokens, classes), labels and ids as (tokens,), without those that the loss ignores."
        )
    return found


def _check_integers(name: str, value: Any, b: int, advice: str) -> Tensor:
    found = value if isinstance(value, Tensor) else check_tensor(name, value, advice=advice)
    refuse_unreadable(name, found)
    if found.dim() == 2 and found.shape[1] == 1:
        found = found[:, 0]
    if found.dim() != 1 or len(found) != b:
        raise ValueError(
            f"{name} must have shape ({b},), one per row of the logits, found {describe(found)}: {advice}."
        )
    if found.is_floating_point() or found.is_complex() or (name == "ids" and found.dtype == torch.bool):
        raise TypeError(f"{name} must be integers, found {describe(found)}: {advice}.")
    return found.long()


def _refuse_outside(name: str, found: np.ndarray, limit: int | np.ndarray) -> None:
    """Raise if ids or labels are not from 0 to below a limit."""
    outside = (found < 0) | (found >= limit)
    if not outside.any():
        return
    most = limit if isinstance(limit, int) else int(limit[outside][0])
    what, remedy = {
        "ids": ("samples", "ids are positions in the data set; Watch(n) was given its length."),
        "labels": (
            "classes",
            "leave samples that the loss ignores (such as label -100) out of the update.",
        ),
    }[name]
    raise ValueError(
        f"{name} must be from 0 to {most - 1} for {most} {what}, found "
        f"{_list_ids(np.unique(found[outside]))}: {remedy}"
    )


def _refuse_changed(ids: np.ndarray, before: np.ndarray, now: np.ndarray) -> None:
    raise ValueError(
        f"The label of {counted(len(ids), 'sample')} changed during training: of sample {ids[0]} from {before[0]} "
        f"to {now[0]}{'' if len(ids) == 1 else f' (samples {_list_ids(ids)})'}. Are ids positions in the whole data "
        "set, and labels those before mixing? After relabeling, start a new Watch."
    )


def _list_ids(numbers: np.ndarray | Tensor) -> str:
    more = f" and {len(numbers) - NAMED:,} more" if len(numbers) > NAMED else ""
    return ", ".join(str(int(number)) for number in numbers[:NAMED]) + more
