"""`likewise apply`: apply review decisions to the data."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from likewise.cli.inspect import Run
from likewise.cli.options import Form, Quiet
from likewise.cli.output import Format, be_quiet, print_message, print_result
from likewise.wording import agreeing, counted


def apply(
    run: Run,
    decisions: Annotated[
        Path,
        typer.Argument(
            help="The decisions downloaded from the report's review, or an export of Label Studio or Argilla.",
            show_default=False,
        ),
    ],
    to: Annotated[
        str,
        typer.Option(
            help="labels.csv, table (in the format of the analyzed table), parquet, folder (of images) or hf-dataset; "
            "or a path that ends in .csv or .parquet."
        ),
    ] = "labels.csv",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="The output file or folder. [default: labels.csv, corrected, ...]",
            show_default=False,
        ),
    ] = None,
    wrong: Annotated[
        Literal["drop", "suggested", "keep"],
        typer.Option(help="What to do with labels that were marked wrong without a correct label."),
    ] = "drop",
    data: Annotated[str | None, typer.Option(help="The data set, if it has moved.")] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Overwrite the output of an earlier apply; never the data or the run."),
    ] = False,
    form: Form = Format.text,
    quiet: Quiet = False,
) -> None:
    """Apply decisions to the data: write corrected labels, drop samples, keep a log. Never overwrites the original.

    Example: `likewise apply run decisions.json --to labels.csv`
    """
    be_quiet(quiet)
    from likewise.runs.apply import apply_decisions

    if not decisions.exists():
        raise FileNotFoundError(f"There is no decisions file {decisions}.")
    found = apply_decisions(run, decisions, wrong=wrong)
    written, kept = found.write(to, out, data=data, force=force), int(found.kept.sum())
    facts = {
        "path": str(written.path),
        "log": str(written.log),
        "relabeled": found.relabeled,
        "dropped": found.dropped,
        "kept": kept,
        "decisions": len(found.changes),
    }
    print_message(f"{counted(len(found.changes), 'decision')} applied to {run}")
    print_result(
        form,
        facts,
        f"{found.relabeled:,} relabeled, {found.dropped:,} dropped, {counted(kept, 'sample')} "
        f"{agreeing(kept, 'remains', 'remain')}",
        f"data: {written.path}",
        f"log: {written.log}",
    )
