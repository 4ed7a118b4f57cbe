"""The command `likewise`: arguments → settings → runs and reports.

Results go to stdout, everything else to stderr. Exit codes: 0 done; 1 only for --fail-on; 2 bad usage or
input; 3 would take more than --max-memory; 130 interrupted.
"""

import re
import shlex
import sys
import traceback
import warnings
from importlib import metadata
from typing import Annotated

import typer

from likewise.cli import analyzing, beginning, looking
from likewise.cli.speaking import Failed, said, warned

app = typer.Typer(
    name="likewise",
    help="Which inputs does your neural network treat alike? Start with: likewise demo",
    epilog="--traceback, with any command, shows where an error came from.",
    no_args_is_help=True,
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _start(
    version: Annotated[bool, typer.Option("--version", help="Tell the version.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(metadata.version("likewise"))
        raise typer.Exit()


for command in (
    beginning.demo,
    analyzing.analyze,
    analyzing.plan,
    looking.neighbors,
    looking.report,
    looking.compare,
    looking.export,
    beginning.doctor,
):
    app.command()(command)
PASSING_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
app.command(context_settings=PASSING_ON)(beginning.reproduce)


def main(arguments: list[str] | None = None) -> None:
    """Run the command, and leave by its exit code."""
    sys.exit(exit_code(sys.argv[1:] if arguments is None else arguments))


def exit_code(given: list[str]) -> int:
    """Return what the command ends with, having said why."""
    verbose = "--traceback" in given
    warnings.showwarning = lambda message, *_, **__: said(f"warning: {message}")
    try:
        code = int(app([word for word in given if word != "--traceback"], standalone_mode=False) or 0)
        return _interrupted(given) if code == 130 else code
    except Failed as failure:
        warned(str(failure))
        return 1
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted(given)
    except MemoryError as error:
        warned(f"error: {error}", *_that_would_fit(given, str(error)))
        return 3
    except Exception as error:
        if hasattr(error, "format_message"):  # of the parser of arguments
            warned(f"error: {error.format_message()}", f"likewise {' '.join(given[:1])} --help tells more.")
            return 2
        if verbose:
            traceback.print_exc()
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        known = isinstance(error, ValueError | TypeError | LookupError | OSError | ImportError)
        name = "" if known else f"{type(error).__name__}: "
        warned(f"error: {name}{text}", *([] if known or verbose else ["Add --traceback to see where."]))
        return 2


def _interrupted(given: list[str]) -> int:
    warned("Interrupted.")
    if given[:1] in (["analyze"], ["reproduce"]):
        warned(f"What is done is kept. To go on: {shlex.join(['likewise', *given])}")
    return 130


def _that_would_fit(given: list[str], error: str) -> list[str]:
    """Return the command with the memory that the error asks for."""
    needed = re.search(r"max_memory=([\d_]+)", error)
    if needed is None:
        return []
    megabytes = max(256, -(-4 * int(needed[1].replace("_", "")) // 2**20))  # what just fits takes long
    words, skip = [], False
    for word in given:
        if skip or word.startswith("--max-memory="):
            skip = False
        elif word == "--max-memory":
            skip = True
        else:
            words.append(word)
    return [f"This would fit: {shlex.join(['likewise', *words, '--max-memory', f'{megabytes}MB'])}"]
