"""`likewise reproduce`: the experiments of the paper, from a clone."""

import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

from likewise.cli.output import print_message


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
