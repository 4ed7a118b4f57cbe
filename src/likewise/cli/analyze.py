"""`likewise analyze` and `likewise plan`."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from likewise.cli.options import (
    Form,
    Quiet,
    Request,
    memory_limit,
    open_inputs,
    read_batches,
    read_part,
    takes_settings,
)
from likewise.cli.output import (
    Failed,
    Format,
    be_quiet,
    excerpt,
    gigabytes,
    print_message,
    print_result,
    print_warning,
    table,
)
from likewise.cli.processes import joined_processes, on_own_device, own_rank, rank_count
from likewise.runs.settings import INPUTS, Settings, read_settings
from likewise.wording import agreeing, counted

if TYPE_CHECKING:
    from likewise.runs.result import Analysis

MOST_PRINTED = 5  # suspicious labels
COUNTED = ("label_issue", "isolated", "contested", "ordinary")


@takes_settings(tuple(Settings.model_fields))
def analyze(
    request: Request,
    out: Annotated[
        Path | None,
        typer.Option(help="The folder for results; an unfinished run there is resumed. [default: run]"),
    ] = None,
    decisions: Annotated[
        Path | None,
        typer.Option(
            help="The decisions downloaded from the report's review; measures the flags' precision."
        ),
    ] = None,
    fail_on: Annotated[
        str | None,
        typer.Option(help="Exit with code 1 if this holds: 'label_issue>1%', 'isolated>50'."),
    ] = None,
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait while another process writes into the folder.")
    ] = math.inf,
    part: Annotated[
        str | None,
        typer.Option(
            help="i/n: compute only part i of n, into --out; likewise merge combines the n folders into a run."
        ),
    ] = None,
    form: Form = Format.text,
    quiet: Quiet = False,
) -> None:
    """Analyze a data set with a model; write a folder of results and an HTML report.

    Example: `likewise analyze net.py:model images/ --weights net.safetensors --image-size 32`

    To resume a run that was stopped, repeat the command. Under torchrun, the processes share the work:
    `torchrun --nproc-per-node 4 -m likewise analyze ...`
    """
    be_quiet(quiet or own_rank() > 0)
    rule = None if fail_on is None else _rule(fail_on)
    if decisions is not None and not decisions.exists():
        raise FileNotFoundError(f"There is no decisions file {decisions}.")
    folder = out or request.folder
    if part is not None:
        _run_part(request.settings, folder, wait, read_part(part), form)
        return
    found = run_analysis(request.settings, folder, wait)
    if own_rank() > 0:
        return
    facts, lines = _describe_run(found)
    if decisions is not None:
        _describe_decisions(found, decisions, facts, lines)
    facts["caveats"] = found.manifest["caveats"]
    print_message(*(f"note: {line}" for line in found.manifest["caveats"]))
    warning = "" if fail_on is None else _fail_on_warning(found, fail_on)
    if warning:
        facts["fail_on_warning"] = warning
        print_warning(f"warning: {warning}")
    print_result(form, facts, *lines)
    if rule is not None:
        rule(found)


def _describe_decisions(found: "Analysis", path: Path, facts: dict[str, Any], lines: list[str]) -> None:
    """Add how many flagged labels, and how many labels in all, the decisions found wrong."""
    from likewise.runs.review import count_verdicts

    precision = found.precision(path)
    counts = count_verdicts(decision.verdict for decision in found.decision_reader.read(path))
    decided = precision.wrong + precision.right
    facts["precision"] = {**precision._asdict(), "share": precision.share if decided else None}
    facts["decided"] = counts._asdict()
    if decided:
        lines.append(
            f"of {counted(decided, 'flagged label')} decided, {precision.wrong} "
            f"{agreeing(precision.wrong, 'is', 'are')} wrong: precision {precision.share:.0%} "
            f"(95 % interval {precision.low:.0%} to {precision.high:.0%}); "
            + _other_verdicts(precision.unsure, precision.dropped)
        )
    elif precision.unsure + precision.dropped:
        lines.append(
            f"no flagged label is decided yet, {_other_verdicts(precision.unsure, precision.dropped)}"
        )
    if sum(counts) > decided + precision.unsure + precision.dropped:
        lines.append(
            f"of {counted(counts.wrong + counts.right, 'label')} decided, flagged or not, {counts.wrong} "
            f"{agreeing(counts.wrong, 'is', 'are')} wrong; " + _other_verdicts(counts.unsure, counts.dropped)
        )
    elif not sum(counts):
        lines.append("no label is decided yet")


def _other_verdicts(unsure: int, dropped: int) -> str:
    return f"{unsure} unsure" + (f", {dropped} dropped, not counted" if dropped else "")


@takes_settings((*INPUTS, "sketch", "exact"))
def plan(
    request: Request,
    form: Form = Format.text,
    quiet: Quiet = False,
) -> None:
    """Estimate time and memory of `analyze` by a dry run on a few samples; writes nothing.

    Example: `likewise plan net.py:model train.csv --label species`
    """
    be_quiet(quiet)
    settings = request.settings
    from likewise.runs.plan import plan_run

    net, read = open_inputs(settings)
    found = plan_run(
        net,
        read.dataset,
        read.labels,
        memory_limit(settings),
        exact=settings.exact,
        sketch=settings.sketch,
    )
    print_result(
        form,
        found._asdict(),
        f"{counted(found.samples, 'sample')} × {counted(found.outputs, 'output')} × "
        f"{counted(found.parameters, 'parameter')}",
        found.method,
        f"about {gigabytes(found.peak_bytes)} on {settings.device}, besides model and data",
    )


def run_analysis(
    settings: Settings, folder: Path, wait: float = math.inf, parts: list[Path] | None = None
) -> "Analysis":
    """Run an analysis with these settings, from its parts if they are given."""
    from likewise.runs.analyze import analyze

    with _analysis_arguments(settings, folder, wait) as (given, options):
        return analyze(*given, **options, parts=parts)


def merge_run(folders: list[Path], out: Path, changes: dict[str, str | None], form: Format) -> None:
    """Merge parts into a run and print its results."""
    from likewise.runs.parts import read_parts

    first = read_parts(folders)[0].path / "settings.toml"
    settings = read_settings(first).model_copy(
        update={name: value for name, value in changes.items() if value is not None}
    )
    found = run_analysis(settings, out, parts=folders)
    if own_rank() == 0:
        facts, lines = _describe_run(found)
        print_result(form, facts, *lines)


def _describe_run(found: "Analysis") -> tuple[dict[str, Any], list[str]]:
    """Return the results of a run as facts, and as lines with the most suspicious labels."""
    suspects, report = _suspects(found), found.folder / "report.html"
    facts = {**found.summary._asdict(), "run": str(found.folder), "report": str(report), "suspects": suspects}
    lines = [repr(found), f"report: {report}"]
    if suspects:
        rows = [{**row, "shown": excerpt(found.pictures.get(row["sample"]))} for row in suspects]
        for row in rows:
            row["doubtful"] = "perhaps" if row["doubtful"] else ""
        lines.append(table(rows, "the most suspicious labels", optional=("name", "doubtful", "shown")))
    return facts, lines


def _suspects(found: "Analysis") -> list[dict[str, Any]]:
    """Return the first flagged labels in review order, with their suggested labels."""
    from likewise.runs.review import ReviewQueue

    if "suggested_label" not in found.table:
        return []
    queue = ReviewQueue(found)
    entries = (queue.describe(int(i)) for i in queue.order[: min(MOST_PRINTED, queue.flagged)])
    return [
        {
            "sample": entry["sample"],
            "name": entry["name"] if "name" in found.table else "",
            "label": entry["label_name"],
            "suggested": entry["suggested_label_name"],
            "doubtful": entry["doubtful"],
            "suspicion": entry["label_suspicion"],
        }
        for entry in entries
    ]


def _run_part(settings: Settings, folder: Path, wait: float, part: tuple[int, int], form: Format) -> None:
    from likewise.runs.analyze import analyze_part

    with _analysis_arguments(settings, folder, wait) as (given, options):
        path = analyze_part(*given, **options, part=part)
    if own_rank() == 0:
        text = f"part {part[0]} of {part[1]}: {path}; when all parts are done: likewise merge PARTS --out run"
        print_result(form, {"part": part, "folder": str(path)}, text)


@contextmanager
def _analysis_arguments(
    settings: Settings, folder: Path, wait: float
) -> Iterator[tuple[tuple[Any, Any], dict[str, Any]]]:
    """Open model and data, join the launched processes, and yield the arguments of `analyze`."""
    from likewise import loading

    local = on_own_device(settings)
    net, read = open_inputs(local)
    show = read.show if settings.show is None else loading.import_object(settings.show)
    print_message(f"analyzing {settings.data} with {settings.model} into {folder}/ ...")
    shared = rank_count() > 1  # `analyze` then chooses one limit for all processes
    options = {
        "out": folder,
        "neighbors": settings.neighbors,
        "threshold": settings.threshold,
        "sketch": settings.sketch,
        "exact": settings.exact,
        "layout": settings.layout,
        "classes": settings.classes or read.classes,
        "names": read.names,
        "show": show,
        "excerpt_length": settings.excerpt_length,
        "token_text": read.token_text if settings.show is None else None,
        "passages": settings.passages,
        "watch": settings.watch,
        "reheat": settings.reheat,
        "crossval": settings.crossval,
        "words": not settings.no_words,
        "index": not settings.no_index,
        "settings": settings.naming_columns(read.columns),
        "max_memory": None if shared and settings.max_memory is None else memory_limit(settings),
        "wait": wait,
    }
    with joined_processes(local.device):
        yield (net, read_batches(read)), options


def _rule(text: str) -> "Callable[[Analysis], None]":
    """Parse --fail-on into a check that raises Failed if too many samples are counted."""
    import re

    parts = re.fullmatch(r"\s*(\w+)\s*>\s*([\d.]+)\s*(%?)\s*", text)
    if parts is None:
        raise ValueError(f"--fail-on must look like 'label_issue>1%' or 'isolated>50', found {text!r}.")
    name, limit, percent = parts[1], float(parts[2]), bool(parts[3])
    if name not in COUNTED:
        raise ValueError(f"--fail-on counts one of {', '.join(COUNTED)}; found {name!r}.")

    def check(found: "Analysis") -> None:
        flags = _flags(found, name)
        count = int(flags.sum())
        value = 100 * count / len(flags) if percent else count
        if value > limit:
            unit = " %" if percent else ""
            raise Failed(
                f"{name}: {value:g}{unit} of the samples, over the limit of {limit:g}{unit} ({count:,} of "
                f"{len(flags):,})"
            )

    return check


def _fail_on_warning(found: "Analysis", rule: str) -> str:
    """Return why a rule on flagged labels says nothing about wrong labels in this run; empty if it does."""
    reason = (found.manifest.get("wrong_labels") or {}).get("reason", "")
    if not reason or not rule.strip().startswith("label_issue"):
        return ""
    return (
        f"even if it passes, --fail-on {rule!r} says nothing about how many labels are wrong: this run cannot "
        f"estimate that. {reason}"
    )


def _flags(found: "Analysis", name: str) -> Any:
    table, column = found.table, "label_issue" if name == "label_issue" else "status"
    if column not in table:
        raise ValueError(f"--fail-on {name} needs class labels, and this run has none.")
    return table["label_issue"] if name == "label_issue" else table["status"] == name
