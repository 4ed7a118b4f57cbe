"""Commands on finished runs: neighbors, report, compare, export, verify, and apply for review decisions."""

import tomllib
import webbrowser
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from likewise.cli.options import Force, Form, Quiet
from likewise.cli.output import (
    Failed,
    Format,
    be_quiet,
    excerpt,
    print_message,
    print_result,
    table,
)
from likewise.wording import agreeing, counted

Run = Annotated[Path, typer.Argument(help="The folder of a run.", show_default=False)]


def neighbors(
    run: Run,
    sample: Annotated[str, typer.Argument(help="The number or name of a sample.", show_default=False)],
    k: Annotated[int, typer.Option("-k", min=1, help="Number of neighbors.")] = 10,
    form: Form = Format.text,
) -> None:
    """List the nearest neighbors of a sample: those that the network treats most like it.

    Example: `likewise neighbors run 42 -k 5`
    """
    from likewise.runs.result import Analysis

    found = Analysis(run)
    place = found.place(sample)
    wanted = [
        name for name in ("name", "label", "prediction", "log_likelihood", "status") if name in found.table
    ]
    rows = [
        {
            "sample": int(pair.neighbor),
            "similarity": float(pair.similarity),
            **_values(found, int(pair.neighbor), wanted),
        }
        for pair in found.neighbors(place, k).itertuples()
    ]
    queried = {"sample": place, **_values(found, place, wanted)}
    pictures = found.pictures
    shown_rows = [{**row, "shown": excerpt(pictures.get(row["sample"]))} for row in rows]
    shown_query = {**queried, "shown": excerpt(pictures.get(place))}
    title = "treated most like sample " + ", ".join(
        f"{name.replace('_', ' ')} {f'{value:.3f}' if isinstance(value, float) else value}".removeprefix(
            "shown "
        )
        for name, value in shown_query.items()
        if value != ""
    ).removeprefix("sample ")
    if k > len(rows):
        print_message(
            f"note: this run has only {counted(len(rows), 'neighbor')} per sample (likewise analyze --neighbors)."
        )
    print_result(form, {"of": queried, "neighbors": rows}, table(shown_rows, title))


def report(
    run: Run,
    opened: Annotated[bool, typer.Option("--open", help="Open the report in the browser.")] = False,
    form: Form = Format.text,
) -> None:
    """Rewrite the report of a finished run and print its path.

    Example: `likewise report run --open`
    """
    from likewise.runs.result import Analysis

    path = Analysis(run).report()
    if opened:
        webbrowser.open(path.resolve().as_uri())
    print_result(form, {"report": str(path)}, f"report: {path} ({path.stat().st_size / 1e6:.1f} MB)")


def compare(
    run_a: Annotated[Path, typer.Argument(help="The earlier run.", show_default=False)],
    run_b: Annotated[
        Path,
        typer.Argument(help="The later run: same data, another model or checkpoint.", show_default=False),
    ],
    k: Annotated[
        int, typer.Option("-k", help="Number of samples, or of neighbors of --sample, to list.")
    ] = 10,
    sample: Annotated[
        str | None, typer.Option(help="Show the neighbors of this sample (number or name) side by side.")
    ] = None,
    across_settings: Annotated[
        bool,
        typer.Option(
            "--across-settings",
            help="Also compare runs with different outputs (readout) or parameters.",
        ),
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option("--html", help="Also write a page that shows the samples that changed most."),
    ] = None,
    form: Form = Format.text,
) -> None:
    """Compare two runs on the same data: which samples changed neighbors, which lost density.

    Example: `likewise compare run-epoch-1 run-epoch-20 --html compare.html`
    """
    from likewise.runs.compare import compare_runs, neighbors_side_by_side, write_comparison
    from likewise.runs.result import Analysis

    before, after = Analysis(run_a), Analysis(run_b)
    if html is not None:
        print_message(f"page: {write_comparison(before, after, html, across_settings=across_settings)}")
    if sample is not None:
        near = neighbors_side_by_side(before, after, sample, k, across_settings=across_settings)
        rows = [
            {key: v.item() if hasattr(v, "item") else v for key, v in row.items()}
            for _, row in near.iterrows()
        ]
        stay = int(near["before_stays"].sum())
        line = f"{stay} of {len(near)} neighbors of sample {sample} {agreeing(stay, 'stays', 'stay')}"
        print_result(form, {"sample": before.place(sample), "neighbors": rows}, line, table(rows))
        return
    found = compare_runs(before, after, across_settings=across_settings)
    summary = found.summary._asdict()
    changed = _top_changes(found.changes, "kept_neighbors", k, ascending=True)
    fell = _top_changes(found.changes, "density_rank_change", k, ascending=True)
    print_result(
        form,
        {"summary": summary, "neighbors_changed": changed, "density_fell": fell},
        *(
            f"{name.replace('_', ' ')}: {value:,.3f}"
            if isinstance(value, float)
            else f"{name.replace('_', ' ')}: {value}"
            for name, value in summary.items()
        ),
        table(changed, "neighbors changed most"),
        table(fell, "density fell most (by rank)"),
    )


def export(
    run: Run,
    to: Annotated[
        str,
        typer.Option(
            help="The format: csv, parquet, knn and cleanlab (for cleanlab's Datalab), projector (for TensorBoard), "
            "spotlight, fiftyone, label-studio, argilla."
        ),
    ] = "csv",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The output file or folder; by default, inside the run."),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="For label-studio and argilla: export this many of the most suspicious samples; by default, all "
            "flagged ones.",
        ),
    ] = None,
    force: Force = False,
    form: Form = Format.text,
    quiet: Quiet = False,
) -> None:
    """Write the results of a run in the format of another tool.

    Example: `likewise export run --to label-studio -o tasks --count 100`. To bring decisions back:
    `likewise apply run export.json`
    """
    be_quiet(quiet)
    from likewise.files import refuse_existing
    from likewise.runs.export import export_run
    from likewise.runs.result import Analysis

    found = Analysis(run)
    if out is not None:
        settings = tomllib.loads((found.folder / "settings.toml").read_text(encoding="utf-8"))
        refuse_existing(out, force, settings["data"])
    path = export_run(found, to, out, count=count)
    print_message(f"exported {run} as {to}")
    print_result(form, {"path": str(path)}, str(path))


def verify(
    run: Annotated[Path, typer.Argument(help="The folder of a run or an index.", show_default=False)],
    form: Form = Format.text,
) -> None:
    """Check every file of a run or an index against its checksum: exit code 0 if all are intact, 1 if not.

    Example: `likewise verify run`. To rebuild damaged files, repeat the `likewise analyze` or `likewise index` command.
    """
    from likewise.index.store import check_index
    from likewise.manifest import check_integrity, kind_of

    is_index = kind_of(run) == "index"
    found = check_index(run) if is_index else check_integrity(run)
    inner = run / "index"
    if not is_index and (inner / "manifest.json").exists():
        kept = check_index(inner)
        damaged = found.damaged | {f"index/{name}": reason for name, reason in kept.damaged.items()}
        found = found._replace(
            files=found.files + kept.files, bytes=found.bytes + kept.bytes, damaged=damaged
        )
    facts = {"whole": found.whole, **found._asdict()}
    checked, command = (
        f"{counted(found.files, 'file')}, {found.bytes / 1e6:.1f} MB",
        "index" if is_index else "analyze",
    )
    if found.whole:
        print_result(form, facts, f"{run} is intact: {checked}")
        return
    print_result(form, facts, *(f"{name}: {reason}" for name, reason in found.damaged.items()))
    if found.damaged:
        raise Failed(
            f"{run} is damaged; repeat the likewise {command} command to rebuild it ({checked} checked)"
        )
    raise Failed(
        f"{run} is not finished; repeat the likewise {command} command to resume it ({checked} checked)"
    )


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


def _values(found: Any, sample: int, names: list[str]) -> dict[str, Any]:
    row, classes = found.table.loc[sample], found.manifest.get("classes")
    values = {name: row[name] for name in names}
    for name in ("label", "prediction"):
        if (
            name in values
            and classes
            and float(values[name]).is_integer()
            and int(values[name]) < len(classes)
        ):
            values[name] = classes[int(values[name])]
    return {name: value.item() if hasattr(value, "item") else value for name, value in values.items()}


def _top_changes(changes: Any, by: str, k: int, ascending: bool) -> list[dict[str, Any]]:
    top = changes.sort_values(by, ascending=ascending, kind="stable").head(k)
    return [
        {"sample": int(i), **{str(n): v.item() if hasattr(v, "item") else v for n, v in row.items()}}
        for i, row in top.iterrows()
    ]
