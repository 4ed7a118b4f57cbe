"""Are the numbers right on other people's models, and at which speed?

One small model of every family of timm and torchvision, tiny configurations of transformers, peft's adapters:

    python benchmarks/zoo.py --setup out/zoo        # once: an environment with timm, torchvision and peft
    out/zoo/bin/python benchmarks/zoo.py            # measures what has no result yet
    python benchmarks/zoo.py --table                # writes the results into docs/correctness.md

Without that environment the models of transformers alone are measured. Each model runs in a process of its
own, on one thread, under limits of time and memory. `--only llama` measures some, `--again` also those
that have a result. The first lines of `zoo/measurement.py` say what is compared with what.
"""

import argparse
import json
import multiprocessing
import re
import resource
import signal
import time
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from zoo.adapters import peft_cases
from zoo.cases import Case
from zoo.environment import declare_compiled_operators, setup_environment
from zoo.hugging_face import transformers_cases
from zoo.image_models import timm_cases, torchvision_cases
from zoo.table import write_table

PAGE = Path(__file__).parents[1] / "docs" / "correctness.md"
RESULTS = Path(__file__).parent / "results" / "zoo.jsonl"
WAITING = 10  # times the CPU time that a model may take, on busy cores
OUT_OF_TIME = (-signal.SIGKILL, -signal.SIGXCPU)
FORK = multiprocessing.get_context("fork")  # libraries are imported once


def main() -> None:
    given = _arguments()
    if given.setup:
        print(f"{setup_environment(given.setup)} benchmarks/zoo.py")
        return
    if given.table:
        write_table(PAGE, list(read_results(given.out).values()))
        return
    torch.set_num_threads(1)
    cases = [case for case in find_cases() if re.search(given.only, case.key)]
    known = {} if given.again else read_results(given.out)
    run_cases([case for case in cases if case.key not in known], given)


def read_results(file: Path) -> dict[str, dict[str, Any]]:
    """Return the last record of each case."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {record["key"]: record for record in map(json.loads, lines)}


def find_cases() -> list[Case]:
    """Return the cases of the libraries that are installed, and import what their processes share."""
    declare_compiled_operators()
    import transformers.models.auto.modeling_auto  # noqa: F401
    import zoo.measurement  # noqa: F401

    cases = transformers_cases()
    for library, find in (("peft", peft_cases), ("torchvision", torchvision_cases), ("timm", timm_cases)):
        if find_spec(library):
            cases += find()
        else:
            print(f"{library} is not installed: its models are left out (see --setup).")
    return cases


class Running(NamedTuple):
    """A case that is being measured."""

    case: Case
    process: Any
    records: Connection
    until: float


def run_cases(cases: list[Case], given: argparse.Namespace) -> None:
    """Measure each case in a process of its own, and append its record to the file."""
    waiting, running = list(cases), list[Running]()
    while waiting or running:
        while waiting and len(running) < given.processes:
            running.append(_start(waiting.pop(0), given))
        ended = [one for one in running if not one.process.is_alive() or time.monotonic() > one.until]
        for one in ended:
            _append(given.out, _finish(one))
        running = [one for one in running if one not in ended]
        time.sleep(0.02)


def _start(case: Case, given: argparse.Namespace) -> Running:
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_measure, args=(case, sender, given.seconds, given.gigabytes), daemon=True)
    process.start()
    sender.close()
    return Running(case, process, receiver, time.monotonic() + WAITING * given.seconds)


def _measure(case: Case, sender: Connection, seconds: float, gigabytes: float) -> None:
    from zoo.measurement import measure

    limit = int(gigabytes * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    seconds = int(time.process_time() + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    try:
        record = measure(case)
    except Exception as error:  # of the model itself: the rest go on
        record = {"key": case.key, "failed": f"{type(error).__name__}: {error}"[:500]}
    sender.send(record)


def _finish(one: Running) -> dict[str, Any]:
    """Return the record of a case that has ended, or that is ended here because its time is over."""
    if one.records.poll():
        try:
            record = one.records.recv()
            one.process.join()
            return record
        except EOFError:
            pass  # it ended without one
    reason = (
        "out of time"
        if one.process.is_alive() or one.process.exitcode in OUT_OF_TIME
        else f"exit code {one.process.exitcode}"
    )
    one.process.kill()
    one.process.join()
    return {"key": one.case.key, "failed": reason}


def _append(file: Path, record: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(record) + "\n")
    print(json.dumps(record), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setup", type=Path, help="make an environment in this folder, and end")
    parser.add_argument("--table", action="store_true", help="write the results into docs, and end")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where results are appended")
    parser.add_argument("--only", default="", help="cases whose name this regular expression finds")
    parser.add_argument("--again", action="store_true", help="also cases that have a result")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60, help="limit of a model's CPU time")
    parser.add_argument("--gigabytes", type=float, default=6, help="memory limit of a model")
    return parser.parse_args()


if __name__ == "__main__":
    main()
