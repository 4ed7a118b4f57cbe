"""Tables: samples, neighbors, details and pictures of a run, with what the manifest says of them; CSV files of labels.

`likewise crossval` and `likewise duplicates` write theirs without a run folder: cross-validated labels, most suspicious
first, and pairs that are nearly the same.
"""

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from likewise import files
from likewise.checks import describe
from likewise.data import Batches
from likewise.index.pictures import PictureMaker, StoredPictures
from likewise.index.store import IndexFolder
from likewise.runs.columns import BINS, RESERVED, Results, Targets, sample_columns
from likewise.runs.neighbors import NeighborLists, describe_passages, passage_table
from likewise.runs.store import Arrays, RunStore
from likewise.statistics.crossval import CrossValidated
from likewise.statistics.duplicates import DUPLICATE_COLUMNS, Duplicates, input_features, pair_similarity
from likewise.statistics.label_issues import LabelSuspicion, advice
from likewise.statistics.shared_words import TokenInput
from likewise.statistics.spot_check import spot_check
from likewise.statistics.targets import accuracy_warning, are_chances
from likewise.thumbnails import kept
from likewise.wording import counted

PICTURES = 3_500_000  # bytes
MOST_PICTURES = 1500  # a quarter of a millisecond each, where there is no index to read them from
SEED = 0
MOST_DUPLICATES = 10_000  # pairs
FAR_BELOW = (
    0.15  # accuracy below what neighbors support: a network that was trained on such inputs knows no less
)
MOST_CLASSES, MOST_IN_A_MATRIX = 20_000, 500
DRAWN, SPOT_CHECKED = 100, 30  # samples of a spot check, and how many of them the report asks for


class Shown(NamedTuple):
    """What a person is told of the samples."""

    classes: Sequence[str] | None
    names: Sequence[str] | None
    show: Callable[[int], Any] | Sequence[Any] | None
    extra: Mapping[str, Any]
    excerpt_length: int
    token_text: Callable[[int], tuple[str, Sequence[tuple[int, int]] | None]] | None = None


def write_tables(
    folder: RunStore,
    data: Batches,
    results: Results,
    near: NeighborLists,
    shown: Shown,
    added: Arrays,
    index: IndexFolder | None = None,
    passages: Arrays | None = None,
    tokens: TokenInput | None = None,
) -> None:
    """Write the tables of a run.

    Args:
        folder: Where to.
        data: The samples.
        results: What was found of them.
        near: Their neighbors.
        shown: What a person is told of them.
        added: The columns that the user gave, as `user_columns` returns them.
        index: That of the same samples, whose pictures are read; None if none was kept.
        passages: What tokens contribute to similarities, as `likewise.runs.neighbors` found it.
        tokens: Which input holds the tokens of texts; None if that is not known.

    """
    found, n = results.found, data.n
    columns = sample_columns(results)
    if shown.names is not None:
        columns = {
            "sample": columns.pop("sample"),
            "name": np.array([written(name) for name in shown.names], dtype=object),
            **columns,
        }
    columns |= added
    folder.state |= {**_describe(results, shown, n), "own_columns": list(shown.extra)}
    folder.write_table("neighbors.parquet", _neighbor_table(near))
    folder.write_table("duplicates.parquet", _duplicate_table(results, data, columns, tokens))
    lists = {
        "counts": found["counts"].astype(np.int32),
        "coordinates": found["coordinates"].astype(np.float32),
    }
    folder.write_table("details.parquet", {name: _lists(values) for name, values in lists.items()})
    pictures = StoredPictures(index) if index is not None else _picture_maker(shown, data)
    order = _worth_seeing(columns, near.indices, _drawn(folder.state))
    folder.write_table("pictures.parquet", _picture_table(pictures, order))
    if passages is not None and shown.token_text is not None:
        table, unplaced = passage_table(passages, shown.token_text, shown.excerpt_length)
        folder.state["passages"] = describe_passages(passages, table, unplaced)
        folder.write_table("passages.parquet", table)
    folder.write_table("samples.parquet", columns)


def refuse_mismatch(shown: Shown, targets: Targets, n: int) -> None:
    """Raise where labels, names or what is shown do not fit the samples."""
    if targets.classes is not None and int(targets.classes.max()) >= MOST_CLASSES:
        raise ValueError(
            f"A label of {int(targets.classes.max())} would mean as many classes: number those there are, "
            "for example by torch.unique(labels, return_inverse=True), or give numbers that are measured "
            "as floats."
        )
    for what, given in (("names", shown.names), ("show", shown.show)):
        if given is not None and not callable(given) and len(given) != n:
            raise ValueError(f"{what} has {len(given)} entries for {n} samples.")
    if (
        shown.classes is not None
        and targets.groups is not None
        and int(targets.groups.max()) >= len(shown.classes)
    ):
        raise ValueError(
            f"There are {len(shown.classes)} names of classes, and a label or prediction is class "
            f"{int(targets.groups.max())}: give a name for each class, in order from 0."
        )


def user_columns(extra: Mapping[str, Any], n: int) -> Arrays:
    """Return the columns that the user gave, or say what is wrong with them."""
    found: Arrays = {}
    for name, values in extra.items():
        column = _user_column(name, values)
        if name in RESERVED or column.shape != (n,):
            wrong = "is a name of ours" if name in RESERVED else f"has shape {column.shape}, not ({n},)"
            raise ValueError(f"The column {name!r} of your own {wrong}: one value a sample, another name.")
        plain = column.dtype.kind in "biuf"
        found[str(name)] = column if plain else np.array([written(v) for v in column], dtype=object)
    return found


def _describe(results: Results, shown: Shown, n: int) -> dict[str, Any]:
    targets = results.targets
    groups = targets.groups
    about: dict[str, Any] = {"edges": np.linspace(-1, 1, BINS + 1).round(4).tolist()}
    about["classes"] = None
    if groups is not None:
        count = int(groups.max()) + 1 if targets.chances is None else targets.chances.shape[1]
        count = max(count, int(groups.max()) + 1)
        named = [] if shown.classes is None else [str(name) for name in shown.classes]
        about["classes"] = named + [str(number) for number in range(len(named), count)]
        if count <= MOST_IN_A_MATRIX:
            means = results.class_similarity()
            about["class_similarity"] = [
                [None if np.isnan(v) else round(float(v), 4) for v in r] for r in means
            ]
    suspicion = results.suspicion
    if targets.classes is not None and suspicion is not None:
        known = not np.isnan(suspicion.precision.likely)
        todo = advice(reheated=results.after is not None, validated=results.validated is not None)
        about["wrong_labels"] = {
            "errors": None if suspicion.reason else [round(v) for v in suspicion.errors],
            "precision": [round(v, 3) for v in suspicion.precision] if known else None,
            "distinct": suspicion.distinct,
            "reason": f"{suspicion.reason} {todo}" if suspicion.reason else "",
        }
        if suspicion.words_weight > 0:
            about["wrong_labels"]["words_weight"] = round(suspicion.words_weight, 3)
        check = spot_check(suspicion, count=DRAWN, seed=SEED)
        about["spot_check"] = {
            "samples": check.samples.tolist(),
            "strata": check.strata[check.samples].tolist(),
            "sizes": list(check.sizes),
        }
    about["fit"] = results.fit
    about["caveats"] = _caveats(targets, n)
    about["caveats"] += [] if results.odd_record is None else [results.odd_record]
    if (odd := _unlike_training(results.fit)) is not None:
        about["caveats"].append(odd)
    if results.margins is not None and results.margins.isnan().any():
        unseen = int(results.margins.isnan().sum())
        about["caveats"].append(
            f"The record of training has no margin of {unseen:,} of {n:,} samples: their suspicion is by votes alone."
        )
    return about


def _unlike_training(fit: dict[str, Any] | None) -> str | None:
    """Return what is odd about a network that knows less of its labels than their neighbors by its own gradients."""
    if fit is None or not fit["learned"] < fit["supported"] - FAR_BELOW:
        return None
    return (
        f"The network predicts {fit['learned']:.0%} of the labels, and neighbors by its gradients "
        f"{fit['supported']:.0%}: are inputs prepared (scaled, normalized) as in training? likewise analyze: --prepare."
    )


def _caveats(targets: Targets, n: int) -> list[str]:
    found = []
    if targets.labels is None and not targets.is_text:
        found.append("No labels were given: agreement is that of predictions, and labels are not judged.")
    if targets.classes is not None and targets.chances is not None:
        odd = accuracy_warning(targets.chances, targets.classes)
        if odd is not None:
            advice = "--weights loads trained weights, --classes gives the order of classes"
            found.append(f"{odd} (likewise analyze: {advice}.)")
    if targets.label_matrix is not None:
        found.append(
            f"Labels are 0 and 1, {targets.outputs.shape[1]} for each sample, which may have several. target_suspicion "
            "is that of the label that looks wrong most, suspicious_class says which."
        )
    elif targets.labels is not None and targets.classes is None and not targets.labels.is_floating_point():
        found.append(_describe_integers(targets.labels, targets.outputs.shape[1]))
    if targets.chances is not None and are_chances(targets.outputs):
        found.append("Outputs look like probabilities and are taken as such, not as logits.")
    if n < 100:
        found.append(f"With {counted(n, 'sample')}, neighbors are few: read single numbers with care.")
    return found


def _describe_integers(labels: Tensor, outputs: int) -> str:
    """Return what integer labels are taken for that are no classes of the samples."""
    each = labels[0].numel()
    if each == 1 and outputs == 1:
        return "Labels are integers and there is one output: they are taken as numbers, not classes."
    if each == outputs:
        return f"Labels are {outputs:,} integers for each sample, one for each output: they are taken as numbers."
    return (
        f"Labels are {counted(each, 'integer')} for each sample, and there are {counted(outputs, 'output')}: they fit "
        "neither as a class nor as numbers to predict, so labels are not judged. To judge classes of samples, give one "
        "class number for each."
    )


def _neighbor_table(near: NeighborLists) -> Arrays:
    n, k = near.indices.shape
    return {
        "sample": np.repeat(np.arange(n), k),
        "rank": np.tile(np.arange(k), n),
        "neighbor": near.indices.ravel(),
        "similarity": near.similarities.ravel(),
        "exact": np.repeat(near.exact, k),
    }


def _lists(values: np.ndarray) -> Any:
    import pyarrow

    return pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(values.ravel()), values.shape[1])


def _user_column(name: Any, values: Any) -> np.ndarray:
    try:
        return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"extra[{name!r}] must be one value a sample, found {describe(values)} ({error})."
        ) from error


def written(value: Any) -> str:
    """Return a value as text that any file can hold."""
    return str(value).encode("utf-8", "replace").decode()


def _duplicate_table(
    results: Results, data: Batches, columns: Arrays, tokens: TokenInput | None
) -> dict[str, Any]:
    """Return the pairs that are nearly the same sample, the most similar first, with their inputs compared."""
    pairs = results.duplicate_pairs[:MOST_DUPLICATES]
    first, second = pairs[:, 0].astype(np.int64), pairs[:, 1].astype(np.int64)
    classes, split = results.targets.classes, columns.get("split")
    return {
        "first": first,
        "second": second,
        "similarity": pairs[:, 2],
        "input_similarity": _input_similarities(data, tokens, first, second),
        **({} if classes is None else {"same_label": (classes[first] == classes[second]).numpy()}),
        **({} if split is None else {"first_split": split[first], "second_split": split[second]}),
    }


def _input_similarities(
    data: Batches, tokens: TokenInput | None, first: np.ndarray, second: np.ndarray
) -> np.ndarray:
    """Return the similarity of the inputs of pairs, (p,), NaN where inputs are of no known kind."""
    if not len(first):
        return np.zeros(0)
    usual = np.linspace(0, data.n - 1, min(data.n, 1000)).astype(int)  # whose mean is what is usual
    places = np.unique(np.concatenate([first, second, usual]))
    features = input_features(data.take(places.tolist()), tokens)
    if features is None:
        return np.full(len(first), np.nan)
    mean = features[np.searchsorted(places, usual)].double().mean(0)
    where = (torch.tensor(np.searchsorted(places, each)) for each in (first, second))
    return pair_similarity(features, *where, mean=mean).numpy()


def _picture_maker(shown: Shown, data: Batches) -> PictureMaker:
    return PictureMaker(data, shown.show, shown.names, shown.excerpt_length)


def _picture_table(pictures: PictureMaker | StoredPictures, order: Iterator[int]) -> dict[str, Any]:
    import pyarrow

    found = kept(pictures.picture, islice(dict.fromkeys(order), MOST_PICTURES), PICTURES)
    return {
        "sample": pyarrow.array(list(found), pyarrow.int64()),
        "kind": pyarrow.array([picture.kind for picture in found.values()], pyarrow.string()),
        "content": pyarrow.array([picture.content for picture in found.values()], pyarrow.binary()),
    }


def _drawn(state: Mapping[str, Any]) -> list[int]:
    """Return the samples that a spot check asks for first."""
    return list(state["spot_check"]["samples"][:SPOT_CHECKED]) if "spot_check" in state else []


def _worth_seeing(columns: Arrays, indices: np.ndarray, drawn: Sequence[int]) -> Iterator[int]:
    """Yield samples, those that a reader will open first: drawn, of every density, suspicious, alone, near."""
    yield from drawn
    for i in drawn:
        yield from (int(j) for j in indices[i, :8])
    n, density = len(indices), columns["density"]
    order = np.argsort(density, kind="stable")
    first = [int(i) for i in order[np.linspace(0, n - 1, min(n, 200)).astype(int)]]
    for name in ("label_suspicion", "novelty", "shift"):
        if name in columns:
            worst = np.argsort(-columns[name], kind="stable")[: max(200, n // 20)]
            first += [int(i) for i in worst[:1000]]
    first = list(dict.fromkeys(first))
    yield from first
    for i in first:
        yield from (int(j) for j in indices[i, :8])  # as many as the review shows
    yield from (int(i) for i in np.random.default_rng(SEED).permutation(n))


LABELS_FILE = "labels.csv"


def class_name(number: int, classes: Sequence[str] | None) -> str:
    """Return the name of a class, or its number where it has none."""
    return str(classes[number]) if classes is not None and number < len(classes) else str(number)


def write_labels(
    folder: Path,
    found: CrossValidated,
    judged: LabelSuspicion,
    names: Sequence[str] | None,
    classes: Sequence[str] | None,
) -> Path:
    """Write labels.csv, with the columns of `likewise analyze`, and return where it is."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = ("label", "suggested_label", "label_suspicion", "label_issue", "chance_wrong", "probability")
    writer.writerow(["sample", *([] if names is None else ["name"]), *columns])
    mine = found.probabilities.gather(1, found.labels[:, None])[:, 0]
    for i in judged.suspicion.argsort(descending=True, stable=True).tolist():
        writer.writerow(
            [
                i,
                *([] if names is None else [names[i]]),
                class_name(int(found.labels[i]), classes),
                class_name(int(judged.suggested[i]), classes),
                f"{judged.suspicion[i]:.6g}",
                int(judged.flagged[i]),
                f"{judged.chance_wrong[i]:.6g}",
                f"{mine[i]:.6g}",
            ]
        )
    files.write_text(folder / LABELS_FILE, text.getvalue())
    return folder / LABELS_FILE


def write_duplicates(
    path: Path, found: Duplicates, rows: Sequence[str] | None, columns: Sequence[str] | None
) -> None:
    """Write the pairs as CSV, with the names of the samples where they have any."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    known = [name for name in DUPLICATE_COLUMNS if getattr(found, name) is not None and name != "across"]
    named = rows is not None and columns is not None
    writer.writerow([*known, *(["first_name", "second_name"] if named else [])])
    values = [getattr(found, name).tolist() for name in known]
    for pair in zip(*values, strict=True):
        cells = [f"{value:.6g}" if isinstance(value, float) else int(value) for value in pair]
        names = [] if rows is None or columns is None else [rows[pair[0]], columns[pair[1]]]
        writer.writerow([*cells, *names])
    files.make_folder(path.absolute().parent)
    files.write_text(path, text.getvalue())
