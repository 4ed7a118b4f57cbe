"""`likewise reproduce`: run the experiments of the paper from a clone."""

import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

from likewise.cli.output import print_message


def reproduce(
    context: typer.Context,
    figure: Annotated[
        str, typer.Argument(help="The name of an experiment in experiments/, or all.", show_default=False)
    ],
    folder: Annotated[Path, typer.Option(help="The folder with the experiments.")] = Path("experiments"),
) -> None:
    """Run an experiment of the paper from a clone: toy, mnist, cifar, registration, or all of them.

    Other options are passed on to the experiment: --quick (small), --full (the paper's size), --data DIR (images),
    --out DIR, --draw (redraw the figures from results). `likewise reproduce mnist --help` lists the options of one
    experiment. Example: `likewise reproduce toy --quick`
    """
    if figure in ("-h", "--help"):
        typer.echo(context.get_help())
        return
    known = _experiments(folder)
    if figure != "all" and figure not in known:
        advice = (
            f"choose one of {', '.join(known)}, or all"
            if known
            else f"{folder}/ has no experiments, so start from a clone of the repository"
        )
        raise ValueError(f"There is no experiment {figure!r}: {advice}.")
    failed = []
    for name in known if figure == "all" else [figure]:
        print_message(f"{name}:")
        try:
            _run(known[name], folder, context.args)
        except ModuleNotFoundError as missing:
            failed.append(f"{name}: {missing}; for figures, run pip install '.[figures]' in the clone")
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
    """Return the experiments in a folder: files with a main function, folders with a __main__.py."""
    found = {path.stem: path for path in folder.glob("*.py") if "\ndef main(" in path.read_text("utf-8")}
    found |= {path.parent.name: path.parent for path in folder.glob("*/__main__.py")}
    return dict(sorted(found.items()))
