"""What do exact gradient kernels cost with other libraries? Each in a process of its own, one CPU thread.

    python benchmarks/peers.py                                   what is installed here, some minutes
    python benchmarks/peers.py --peers likewise torch.func --works ab
    python benchmarks/peers.py --python alibi=ENV/bin/python     a peer that needs an environment of its own
    python benchmarks/peers.py --one captum --work a             one line of the table, as JSON

CPU-s is one matrix once all is set up: median of 3 (spread). "First" is set-up and the first matrix: tracing,
checks, compilation. MiB is the peak above the process once it is set up (Linux). The error is relative to
float64, over every eighth row and column. Batch sizes are the quickest for each of a few tried.

Most peers share an environment: `pip install -c constraints.txt . PEER ...`, then `pip uninstall torchvision`
if one of them brought it. alibi and neural-tangents need one each: `pip install -c constraints.txt . PEER`.
"""

import argparse
import copy
import importlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from peers.work import TITLES, CannotDo, Work, relative_error, work_called
from torch import Tensor

Cells = dict[str, str]
T = TypeVar("T")
COLUMNS = ("work", "peer", "version", "CPU-s", "first", "MiB", "error")


@dataclass(frozen=True)
class Peer:
    """Where a peer is found: our module and its function, the package that imports, what pip is told."""

    module: str
    package: str
    pip: str  # the distribution first
    ready: str = "ready"
    works: str = "abcdf"

    @property
    def version(self) -> str:
        return importlib.metadata.version(self.pip.split()[0])


PEERS = {
    "likewise": Peer("by_likewise", "likewise", "likewise", works="abcdef"),
    "torch.func": Peer("by_torch_func", "torch", "torch", works="abcdef"),
    "captum": Peer("by_captum", "captum", "captum"),
    "captum, by batch": Peer("by_captum", "captum", "captum", "ready_by_batch"),
    "dattri": Peer("by_dattri", "dattri", "dattri"),
    "kronfluence": Peer("by_kronfluence", "kronfluence", "kronfluence"),
    "traker": Peer("by_traker", "trak", "traker"),
    "nngeometry": Peer("by_nngeometry", "nngeometry", "nngeometry"),
    "backpack": Peer("by_backpack", "backpack", "backpack-for-pytorch"),
    "opacus": Peer("by_opacus", "opacus", "opacus"),
    "opacus, expanded": Peer("by_opacus", "opacus", "opacus", "ready_expanded"),
    "alibi": Peer("by_alibi", "alibi", "alibi click"),
    "neural-tangents": Peer(
        "by_neural_tangents",
        "neural_tangents",
        "neural-tangents jax==0.4.23 jaxlib==0.4.23 'scipy<1.13' 'numpy<2'",
    ),
}


def figures(ready: Callable[[Work], Callable[[], Tensor]], letter: str) -> Cells:
    """Return time, memory and error of one peer and work."""
    work = work_called(letter)
    untouched = replace(work, model=copy.deepcopy(work.model))  # some peers change the model
    set_up, matrix = _timed(lambda: ready(work))
    before = _forget_peak()
    first, found = _timed(matrix)
    seconds = []
    for _ in range(3):
        del found
        again, found = _timed(matrix)
        seconds.append(again)
    peak = _mebibytes("VmHWM")
    return {
        "CPU-s": f"{statistics.median(seconds):.2f} ({max(seconds) - min(seconds):.2f})",
        "first": f"{set_up + first:.2f}",
        "MiB": f"{peak - before:.0f}",
        "error": f"{relative_error(found.detach(), untouched):.0e}",
    }


def line_of(peer: Peer, letter: str) -> Cells:
    """Return the cells of one line, or of one that says why there are none; in this process."""
    torch.set_num_threads(1)
    try:
        ready = getattr(importlib.import_module(f"peers.{peer.module}"), peer.ready)
        return {"version": peer.version, **figures(ready, letter)}
    except ModuleNotFoundError as problem:
        if problem.name != peer.package:
            return {"CPU-s": _failed(problem)}
        return {"CPU-s": f"not installed: `pip install -c constraints.txt {peer.pip}`"}
    except CannotDo as problem:
        return {"version": peer.version, "CPU-s": f"no: {problem}"}
    except Exception as problem:
        return {"CPU-s": _failed(problem)}


def line_in_own_process(name: str, letter: str, python: str, limit: float) -> Cells:
    """Return the cells of one line, from a fresh process of that interpreter."""
    command = [python, __file__, "--one", name, "--work", letter]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit, env={**os.environ, **threads}
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        return {"CPU-s": _failed(problem)}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
        return {"CPU-s": f"failed: exit code {done.returncode}, {last}"}
    return json.loads(done.stdout.splitlines()[-1])


def print_table(names: list[str], letters: str, pythons: dict[str, str], limit: float) -> None:
    print(f"{platform.machine()}, one thread, torch {torch.__version__}, Python {platform.python_version()}")
    print("\n" + "\n".join(f"- {letter}: {TITLES[letter]}" for letter in letters) + "\n")
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    for letter in letters:
        for name in names:
            if letter in PEERS[name].works:
                cells = line_in_own_process(name, letter, pythons.get(name, sys.executable), limit)
                cells |= {"work": letter, "peer": name}
                print("| " + " | ".join(cells.get(column, "–") for column in COLUMNS) + " |", flush=True)


def _timed(function: Callable[[], T]) -> tuple[float, T]:
    start = time.process_time()
    found = function()
    return time.process_time() - start, found


def _forget_peak() -> float:
    """Let the peak start from the memory in use, and return that, in MiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return _mebibytes("VmRSS")


def _mebibytes(field: str) -> float:
    """Return one field of this process's memory. ru_maxrss would count the parent's peak as well."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field + ":"))


def _failed(problem: BaseException) -> str:
    said = str(problem).strip().splitlines() or [""]
    return f"failed: {type(problem).__name__}: {said[0]}".replace("|", "/")


def _pythons(given: list[str]) -> dict[str, str]:
    pairs = dict(one.split("=", 1) for one in given)
    if unknown := set(pairs) - set(PEERS):
        raise SystemExit(f"--python names {sorted(unknown)}; known are {', '.join(PEERS)}")
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), metavar="PEER")
    parser.add_argument("--works", default="".join(TITLES), help="letters, all of them if not given")
    parser.add_argument("--python", action="append", default=[], metavar="PEER=INTERPRETER")
    parser.add_argument("--limit", type=float, default=600, help="seconds for one line")
    parser.add_argument("--one", choices=PEERS, metavar="PEER")
    parser.add_argument("--work", choices=TITLES, default="a")
    given = parser.parse_args()
    if given.one:
        print("\n" + json.dumps(line_of(PEERS[given.one], given.work)))
    else:
        print_table(given.peers, given.works, _pythons(given.python), given.limit)


if __name__ == "__main__":
    main()
