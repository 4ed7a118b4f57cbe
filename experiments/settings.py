"""Settings of an experiment: each is measured once and kept as a line, several at a time if wanted."""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, Protocol

import torch
from data import data_option
from tqdm import tqdm


class Setting(Protocol):
    """A named tuple of numbers and names."""

    def _asdict(self) -> dict[str, Any]: ...


Found = dict[str, Any]
Measure = Callable[[Any], Found]


def lines(file: Path) -> list[Found]:
    """Return the results in a file, the last of each setting; a line that was not finished is none."""
    text = file.read_text() if file.exists() else ""
    found = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return list({json.dumps(line["cell"]): line for line in found}.values())


def measure_all(todo: Sequence[Setting], file: Path, measure: Measure, processes: int = 1) -> None:
    """Add to the file what is found of every setting that has no result in it yet.

    If some fail, what is found of the others is added before that is said.
    """
    _drop_half_line(file)
    done = [line["cell"] for line in lines(file)]
    left = [setting for setting in todo if setting._asdict() not in done]
    print(f"{len(left)} settings to measure, {len(todo) - len(left)} are in {file} already", flush=True)
    results = _side_by_side(left, measure, processes) if processes > 1 else ((s, measure(s)) for s in left)
    failed = []
    for setting, found in tqdm(results, desc="settings", total=len(left), disable=None):
        if isinstance(found, Exception):
            failed.append(f"{setting}: {type(found).__name__}: {found}")
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as out:
            out.write(json.dumps({"cell": setting._asdict(), **found}) + "\n")
    if failed:
        raise SystemExit(
            f"{len(failed)} of {len(left)} settings failed, the others are in {file}. First: {failed[0]}\n"
            "Start it again, with fewer --processes if memory was the reason."
        )


def _side_by_side(
    todo: list[Any], measure: Measure, processes: int
) -> Iterator[tuple[Any, Found | Exception]]:
    """Give settings with what was found, or what went wrong, as they end."""
    pool = ProcessPoolExecutor(processes, get_context("spawn"), torch.set_num_threads, (1,))
    try:
        waiting = {pool.submit(measure, setting): setting for setting in todo}
        for ended in as_completed(waiting):
            problem = ended.exception()
            if problem is not None and not isinstance(problem, Exception):  # said by the program to all
                raise problem
            yield waiting[ended], problem or ended.result()
    except BaseException:  # interrupted: nobody waits for what has begun
        for child in active_children():
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _drop_half_line(file: Path) -> None:
    """Leave out what a run that was stopped began to write."""
    if file.exists():
        text = file.read_text()
        if not text.endswith("\n"):
            file.write_text(text[: text.rfind("\n") + 1])


def options(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with what the experiments on images have in common."""
    arguments = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    size = arguments.add_mutually_exclusive_group()
    size.add_argument(
        "--quick", action="store_true", help="small: does it work, and which way does it point?"
    )
    size.add_argument("--full", action="store_true", help="the same as without")
    arguments.add_argument("--draw", action="store_true", help="draw figures again, train nothing")
    arguments.add_argument("--out", type=Path, default=None, help="where results and figures go")
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments.add_argument("--processes", type=int, default=1, help="settings that are measured at a time")
    data_option(arguments)
    return arguments
