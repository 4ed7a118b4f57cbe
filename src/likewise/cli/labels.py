"""`likewise crossval`."""

from pathlib import Path
from typing import Annotated

import typer

from likewise.cli.options import Form, Quiet, Request, open_data, takes_settings
from likewise.cli.output import Format, be_quiet, print_message, print_result, table

DATA = (
    "model",
    "data",
    "label",
    "text_column",
    "columns",
    "image_size",
    "gray",
    "prepare",
    "follow_links",
    "limit",
    "classes",
    "max_memory",
)
TRAINING = {
    "model": "Import string of a function that trains: net.py:train. It gets a data set, and returns a model."
}


@takes_settings(DATA, help_texts=TRAINING)
def crossval(
    request: Request,
    folds: Annotated[int, typer.Option(min=2, help="How many networks are trained.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Of the folds and of each training.")] = 0,
    out: Annotated[Path, typer.Option(help="The folder; one that is there goes on.")] = Path("crossval"),
    form: Form = Format.text,
    quiet: Quiet = False,
) -> None:
    """Judge labels by networks that have not seen them: one is trained for each fold, on all others.

    Example: `likewise crossval net.py:train images/ --out crossval`, then
    `likewise analyze net.py:model images/ --crossval crossval`

    The function is called with a torch Dataset of (input, label) pairs. What is done is kept, fold by fold.
    """
    be_quiet(quiet)
    from likewise import loading
    from likewise.runs.crossval import write_labels
    from likewise.statistics.crossval import crossval as cross_validate
    from likewise.statistics.label_issues import label_suspicion

    settings = request.settings
    train, read = loading.import_object(settings.model), open_data(settings)
    found = cross_validate(
        train,  # type: ignore[arg-type]
        read.dataset,
        labels=read.labels,
        folds=folds,
        seed=seed,
        out=out,
    )
    judged = label_suspicion(found)
    path = write_labels(out, found, judged, read.names, settings.classes or read.classes)
    print_message(f"labels: {path}")
    first = judged.suspicion.argsort(descending=True)[:10].tolist()
    rows = [
        {"sample": i, "label": int(found.labels[i]), "suggested": int(judged.suggested[i])} for i in first
    ]
    facts = {
        "crossval": str(out),
        "samples": len(found.labels),
        "accuracy": found.accuracy,
        "label_issues": int(judged.flagged.sum()),
        "errors": list(judged.errors),
        "labels": str(path),
    }
    print_result(form, facts, repr(found), repr(judged), table(rows, "most suspicious"))
