"""Commands for a start: demo, doctor, reproduce."""

import runpy
import sys
import time
import webbrowser
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from likewise.cli.inputs import open_inputs
from likewise.cli.options import Form, Quiet, Request, takes_settings
from likewise.cli.output import Format, be_quiet, gigabytes, print_message, print_result
from likewise.runs.config import INPUTS, Settings


def demo(
    out: Annotated[Path, typer.Option(help="The folder for results.")] = Path("likewise-demo"),
    browser: Annotated[bool, typer.Option("--open", help="Open the report in the browser.")] = False,
    form: Form = Format.text,
    quiet: Quiet = False,
) -> None:
    """Find planted label errors in handwritten digits: a minute from nothing to a report.

    Example: `likewise demo --open`
    """
    be_quiet(quiet)
    start = time.perf_counter()
    from likewise.demo import run_demo

    found = run_demo(out, print_message)
    path = found.analysis.folder / "report.html"
    facts = {**found._asdict(), "analysis": str(found.analysis.folder), "report": str(path)}
    print_result(
        form,
        facts,
        f"Of {found.planted} labels made wrong on purpose, {found.learned} of them memorized, "
        f"{found.hits} are among the {found.flagged} that look wrong; of the {found.planted} most "
        f"suspicious, {found.top} are.",
        f"report: {path}",
    )
    print_message(
        f"({time.perf_counter() - start:.0f} s) Open the report in a browser; then try your own: likewise "
        "analyze --help"
    )
    if browser:
        webbrowser.open(path.resolve().as_uri())


@takes_settings(INPUTS, optional=True)
def doctor(
    request: Request | None,
    form: Form = Format.text,
) -> None:
    """Tell what is installed, and with a model and data whether they will work and how.

    Example: `likewise doctor net.py:model images/ --image-size 32`
    """
    import torch

    names = (
        "likewise",
        "torch",
        "numpy",
        "pandas",
        "pyarrow",
        "scikit-learn",
        "matplotlib",
        "scipy",
        "umap-learn",
    )
    facts: dict[str, Any] = {"python": sys.version.split()[0], **{name: _version(name) for name in names}}
    facts |= {"threads": torch.get_num_threads(), "cuda": torch.cuda.is_available()}
    if request is not None:
        facts |= _try_inputs(request.settings)
    print_result(
        form,
        facts,
        *(f"{name:<16} {'not installed' if value is None else value}" for name, value in facts.items()),
    )


def _try_inputs(settings: Settings) -> dict[str, Any]:
    """Return what two samples tell of a model and data."""
    from likewise.data import batches
    from likewise.engines import TracedEngine
    from likewise.gram import GramMatrix

    net, read = open_inputs(settings)
    data = batches(read.dataset, labels=read.labels)
    gram = GramMatrix(net, data.take(range(min(8, data.n))), max_memory=settings.max_memory)
    similar = gram.dense()
    is_traced = isinstance(gram.engine, TracedEngine)
    return {
        "samples": data.n,
        "labels": "none" if data.take([0]).labels() is None else "yes",
        "outputs": gram.d,
        "parameters": sum(net.numels.values()),
        "engine": "layers, the fast one" if is_traced else "autograd, the slower reference",
        "bytes per sample": gigabytes(max(gram.engine.memory.bytes_per_sample, 1)),
        "similarities": f"{similar.min():.2f} to {similar.max():.2f} among the first {len(similar)}: it "
        "works",
    }


def reproduce(
    context: typer.Context,
    figure: Annotated[
        str, typer.Argument(help="Which experiment in experiments/, or all of them.", show_default=False)
    ],
    folder: Annotated[Path, typer.Option(help="Where the experiments are.")] = Path("experiments"),
) -> None:
    """Run an experiment of the paper from a clone: toy, mnist, cifar, registration, or all of them.

    Options are passed on to it: --quick (small), --full (the paper's size), --data DIR (images), --out DIR,
    --draw (figures again from results); `likewise reproduce mnist --help` tells all of that one. Example:
    `likewise reproduce toy --quick`
    """
    if figure in ("-h", "--help"):
        typer.echo(context.get_help())
        return
    known = _experiments(folder)
    if figure != "all" and figure not in known:
        there = (
            f"there are: {', '.join(known)}" if known else f"there are none in {folder}/: start from a clone"
        )
        raise ValueError(f"There is no experiment {figure!r}; {there}.")
    failed = []
    for name in known if figure == "all" else [figure]:
        print_message(f"{name}:")
        try:
            _run(known[name], folder, context.args)
        except ModuleNotFoundError as missing:
            failed.append(f"{name}: {missing}; for figures: pip install '.[figures]' in the clone")
        except SystemExit as stopped:
            if stopped.code not in (None, 0):
                failed.append(f"{name}: {stopped.code}")
    if failed:
        raise ValueError("\n".join(failed))


def _run(experiment: Path, folder: Path, arguments: list[str]) -> None:
    before = sys.argv, list(sys.path)
    sys.argv = [str(experiment), *arguments]
    sys.path.insert(0, str(folder.resolve()))
    try:
        runpy.run_path(str(experiment), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before


def _experiments(folder: Path) -> dict[str, Path]:
    """Return what can be run there: files with a main function, folders with a __main__.py."""
    found = {path.stem: path for path in folder.glob("*.py") if "\ndef main(" in path.read_text("utf-8")}
    found |= {path.parent.name: path.parent for path in folder.glob("*/__main__.py")}
    return dict(sorted(found.items()))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
