"""`likewise crossval` and `likewise duplicates`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from likewise.cli.options import (
    Force,
    Form,
    Quiet,
    Request,
    memory_limit,
    open_data,
    open_inputs,
    read_batches,
    renumber_classes,
    takes_settings,
)
from likewise.cli.output import (
    Format,
    be_quiet,
    excerpt,
    print_message,
    print_result,
    table,
)
from likewise.runs.settings import INPUTS, READING
from likewise.thumbnails import picture

if TYPE_CHECKING:
    from likewise.loading import Read
    from likewise.statistics.duplicates import Duplicates

MOST_PRINTED = 10

DATA = ("model", "data", *READING, "follow_links", "limit", "classes", "max_memory")
SKETCH, MANY_PAIRS = 1024, 20_000_000  # sketch width; number of pairs beyond which sketches are compared
TRAINING = {
    "model": "Import string of a training function, such as net.py:train: it gets a data set and returns a model."
}


@takes_settings(DATA, help_texts=TRAINING)
def crossval(
    request: Request,
    folds: Annotated[int, typer.Option(min=2, help="Number of folds, that is, of networks to train.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Seed for the folds and for training.")] = 0,
    out: Annotated[Path, typer.Option(help="The folder for results; an unfinished one is resumed.")] = Path(
        "crossval"
    ),
    form: Form = Format.text,
    quiet: Quiet = False,
) -> None:
    """Judge labels by networks that have not seen them: for each fold, train one on the other folds.

    Example: `likewise crossval net.py:train images/ --out crossval`, then
    `likewise analyze net.py:model images/ --crossval crossval`

    The function gets a torch Dataset of (input, label) pairs. Finished folds are kept.
    """
    be_quiet(quiet)
    from likewise import loading
    from likewise.runs.tables import class_name, write_labels
    from likewise.statistics.crossval import crossval as cross_validate
    from likewise.statistics.label_issues import label_suspicion

    settings = request.settings
    train, read = loading.import_object(settings.model), open_data(settings)
    data, _ = read_batches(read).with_cache(memory_limit(settings) // 4)  # decoded once
    found = cross_validate(
        train,  # type: ignore[arg-type]
        data,
        folds=folds,
        seed=seed,
        out=out,
    )
    issues = label_suspicion(found)
    classes = settings.classes or read.classes
    path = write_labels(out, found, issues, read.names, classes)
    print_message(f"labels: {path}")
    first = issues.suspicion.argsort(descending=True)[:10].tolist()
    rows = [
        {
            "sample": i if read.names is None else read.names[i],
            "label": class_name(int(found.labels[i]), classes),
            "suggested": class_name(int(issues.suggested[i]), classes),
        }
        for i in first
    ]
    facts = {
        "crossval": str(out),
        "samples": len(found.labels),
        "accuracy": found.accuracy,
        "label_issues": int(issues.flagged.sum()),
        "errors": list(issues.errors),
        "labels": str(path),
    }
    print_result(form, facts, repr(found), repr(issues), table(rows, "most suspicious"))


@takes_settings((*INPUTS, "classes", "sketch"))
def duplicates(
    request: Request,
    against: Annotated[
        str | None,
        typer.Option(help="Another data set, such as the training set, to search for the same samples."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The output table of pairs, the most similar first.")] = Path(
        "duplicates.csv"
    ),
    ratio: Annotated[
        float | None,
        typer.Option(
            help="Largest distance of a pair, relative to what is usual in its class; for texts, also the largest "
            "share of words that differ. Larger finds more. [default: 0.125, less if pairs that close can be chance]",
            show_default=False,
        ),
    ] = None,
    force: Force = False,
    form: Form = Format.text,
    quiet: Quiet = False,
) -> None:
    """Find near-duplicates within a data set or between two (leakage).

    Example: `likewise duplicates net.py:model test/ --against train/ --image-size 32`

    A pair counts if the network hardly tells the two apart, or if their pixels, words or numbers are that close.
    """
    be_quiet(quiet)
    from likewise.files import refuse_existing
    from likewise.gram import GramMatrix
    from likewise.runs.tables import write_duplicates
    from likewise.statistics.duplicates import duplicates as find_duplicates

    settings = request.settings
    refuse_existing(out, force, settings.data, *([] if against is None else [against]))
    net, read = open_inputs(settings)
    other = None if against is None else open_data(settings.model_copy(update={"data": against}))
    if other is not None:
        read, other = _number_alike(read, other, settings.data, str(against))
    rows = read_batches(read)
    columns = None if other is None else read_batches(other)
    sketch = settings.sketch
    if sketch == "auto":
        sketch = SKETCH if rows.n * (rows.n if columns is None else columns.n) > MANY_PAIRS else "never"
    print_message(f"comparing {settings.data} to {against or 'itself'} with {settings.model} ...")
    gram = GramMatrix(net, rows, columns=columns, max_memory=memory_limit(settings))
    found = find_duplicates(gram, ratio=ratio, sketch=None if sketch == "never" else int(sketch))
    write_duplicates(out, found, read.names, read.names if other is None else other.names)
    facts = {
        "out": str(out),
        "pairs": len(found.first),
        "other_label": None if found.same_label is None else int((~found.same_label).sum()),
    }
    lines = [f"{repr(found).removeprefix('Duplicates(').removesuffix(')')}: {out}"]
    if facts["other_label"]:
        lines.append(
            f"{facts['other_label']:,} of the pairs have different labels: in each, one label is wrong."
        )
    if len(found.first):
        lines.append(_closest_pairs(found, read, read if other is None else other))
    print_result(form, facts, *lines)


def _number_alike(rows: "Read", columns: "Read", data: str, against: str) -> "tuple[Read, Read]":
    """Number the classes of two data sets consistently: each was numbered by its own class names."""
    if rows.labels is None or columns.labels is None or rows.classes == columns.classes:
        return rows, columns
    if rows.classes is None or columns.classes is None:
        print_message(
            f"note: labels of pairs are not compared, because one of {data} and {against} has names as labels and the "
            "other numbers."
        )
        return rows._replace(labels=None, classes=None), columns._replace(labels=None, classes=None)
    every = tuple(sorted({*rows.classes, *columns.classes}))
    return renumber_classes(rows, every), renumber_classes(columns, every)


def _closest_pairs(found: "Duplicates", rows: "Read", columns: "Read") -> str:
    """Return the most similar pairs as a table, with names and excerpts if there are any."""
    pairs = []
    for place in range(min(MOST_PRINTED, len(found.first))):
        i, j = int(found.first[place]), int(found.second[place])
        pair: dict[str, Any] = {
            "first": _name_of(rows, i),
            "second": _name_of(columns, j),
            "similarity": float(found.similarity[place]),
            "by inputs": float(found.input_similarity[place]),
            "shown first": _excerpt_of(rows, i),
            "shown second": _excerpt_of(columns, j),
        }
        if found.same_label is not None:
            pair["same label"] = "yes" if found.same_label[place] else "no"
        pairs.append(pair)
    title = f"the {len(pairs)} closest" if len(pairs) < len(found.first) else ""
    return table(pairs, title, optional=("shown first", "shown second"))


def _name_of(read: "Read", i: int) -> str:
    return f"{i}" if read.names is None else read.names[i]


def _excerpt_of(read: "Read", i: int) -> str:
    return "" if read.show is None else excerpt(picture(read.show(i)))
