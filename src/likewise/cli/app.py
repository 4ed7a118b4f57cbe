"""The command `likewise`: its subcommands, exit codes and error messages.

Results go to stdout, everything else to stderr. Exit codes: 0 done; 1 --fail-on or verify failed; 2 bad usage or
input; 3 not enough memory; 130 interrupted by Ctrl-C or SIGTERM.
"""

import os
import shlex
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Annotated

import typer

from likewise.cli import analyze, demo, doctor, index, labels, reproduce, runs, serve
from likewise.cli.output import Failed, print_message, print_warning
from likewise.engines.memory import MemoryLimitError, is_out_of_memory
from likewise.files import DiskFullError
from likewise.gram import SketchNotice
from likewise.loading.paths import ExpansionError
from likewise.readouts import ReadoutNotice
from likewise.version import VERSION

app = typer.Typer(
    name="likewise",
    help="Which inputs does your neural network treat alike? Start with: likewise demo",
    epilog="Add --traceback to any command to see where an error came from.",
    no_args_is_help=True,
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _start(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(VERSION)
        raise typer.Exit()


for command in (
    demo.demo,
    analyze.analyze,
    analyze.plan,
    index.index,
    index.ask,
    index.select,
    index.merge,
    labels.crossval,
    labels.duplicates,
    runs.neighbors,
    runs.report,
    runs.compare,
    runs.export,
    runs.apply,
    serve.serve,
    runs.verify,
    doctor.doctor,
):
    app.command()(command)
PASSING_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
app.command(context_settings=PASSING_ON)(reproduce.reproduce)


def main(arguments: list[str] | None = None) -> None:
    """Run the command and exit with its code."""
    sys.exit(exit_code(sys.argv[1:] if arguments is None else arguments))


def _expand_json(words: list[str]) -> list[str]:
    """Replace --json by --format json, except in arguments that a command passes on."""
    if words[:1] == ["reproduce"]:
        return words
    ends = words.index("--") if "--" in words else len(words)
    parts = [["--format", "json"] if word == "--json" else [word] for word in words[:ends]]
    return [word for part in parts for word in part] + words[ends:]


def exit_code(given: list[str]) -> int:
    """Run the command and return its exit code; print why it failed. SIGTERM acts like Ctrl-C."""
    verbose = "--traceback" in given
    words = _expand_json([word for word in given if word != "--traceback"])
    try:
        with warnings.catch_warnings(), _terminated_as_interrupted():
            warnings.showwarning = _show_warning
            code = int(copy_context().run(app, words, standalone_mode=False) or 0)
        return _interrupted(given) if code == 130 else code
    except Failed as failure:
        print_warning(str(failure))
        return 1
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted(given)
    except Exception as error:
        if hasattr(error, "format_message"):  # from the argument parser
            print_warning(f"error: {error.format_message()}", f"See likewise {' '.join(given[:1])} --help.")
            return 2
        if verbose:
            traceback.print_exc()
        if any(is_out_of_memory(each) for each in _with_causes(error)):
            return _out_of_memory(given, error)
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        known = isinstance(error, ValueError | TypeError | LookupError | OSError | ImportError)
        name = "" if known else f"{type(error).__name__}: "
        print_warning(
            f"error: {name}{text}", *([] if known or verbose else ["Add --traceback to see where."])
        )
        if isinstance(error, DiskFullError):
            _say_how_to_resume(given)
        return 2


def _show_warning(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    kind = "note" if issubclass(category, ReadoutNotice | SketchNotice) else "warning"
    print_message(f"{kind}: {message}")


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Make SIGTERM raise KeyboardInterrupt inside the block, in this process but not in its children."""
    if threading.current_thread() is not threading.main_thread():  # handlers can only be set there
        yield
        return
    process = os.getpid()

    def interrupt(number: int, _: object) -> None:
        if os.getpid() == process:
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of that, and so on."""
    while error is not None:
        yield error
        error = error.__cause__


def _interrupted(given: list[str]) -> int:
    print_warning("Interrupted.")
    _say_how_to_resume(given)
    return 130


def _say_how_to_resume(given: list[str]) -> None:
    if given[:1] in (["analyze"], ["index"], ["crossval"], ["reproduce"]):
        print_warning(f"Finished work is kept. To resume: {shlex.join(['likewise', *given])}")


def _out_of_memory(given: list[str], error: Exception) -> int:
    if isinstance(error, MemoryLimitError | ExpansionError):
        print_warning(f"error: {error}", f"This would fit: {_with_memory(given, error.enough)}")
        return 3
    text = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    print_warning(
        f"error: out of memory: {text}",
        "The system has no more memory. Close other programs, or pass a smaller --max-memory or --limit, or "
        "fewer --parameters.",
    )
    _say_how_to_resume(given)
    return 3


def _with_memory(given: list[str], enough: int) -> str:
    """Return the command with four times `enough` bytes as --max-memory: a limit that just fits is slow."""
    megabytes = max(256, -(-4 * enough // 2**20))
    words, skip = [], False
    for word in given:
        if skip or word.startswith("--max-memory="):
            skip = False
        elif word == "--max-memory":
            skip = True
        else:
            words.append(word)
    return shlex.join(["likewise", *words, "--max-memory", f"{megabytes}MiB"])
