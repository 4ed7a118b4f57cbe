"""Results of benchmarks that take long: a line of JSON each, so that a run goes on where it was stopped."""

import argparse
import json
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor

FOLDER = Path(__file__).parent / "results"


def options(description: str | None, name: str) -> argparse.ArgumentParser:
    """Return a parser with what all these benchmarks have in common."""
    arguments = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument(
        "--out", type=Path, default=FOLDER / f"{name}.jsonl", help="where results are added"
    )
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--only", default="", help="settings that contain this")
    arguments.add_argument("--part", default="1/1", help="i/k: every k-th setting from the i-th")
    arguments.add_argument("--processes", type=int, default=1, help="so many settings side by side")
    arguments.add_argument("--minutes", type=float, default=1e9, help="begin nothing after so many")
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments.add_argument(
        "--known", type=Path, nargs="*", default=[], help="files of results to skip as well"
    )
    return arguments


def measured(
    settings: Iterable[dict[str, Any]],
    measure: Callable[[dict[str, Any], argparse.Namespace], dict[str, Any]],
    given: argparse.Namespace,
) -> None:
    """Measure the settings that have no result yet, one thread each, and write down each as it is done."""
    one, failures = partial(_attempt, measure, given, time.monotonic() + 60 * given.minutes), []
    for setting, results, failure in _attempts(one, todo(settings, given), given.processes):
        if results is not None:
            add(given.out, setting, **results)
        failures += [f"{named(setting)}: {failure}"] if failure else []
    if failures:
        raise SystemExit("\n".join(failures))


def _attempts(
    one: Callable[[dict[str, Any]], Any], settings: Iterable[dict[str, Any]], processes: int
) -> Iterator[Any]:
    """Yield what is made of each setting, in this process or side by side in others."""
    torch.set_num_threads(1)
    if processes == 1:
        yield from map(one, settings)
        return
    with multiprocessing.get_context("spawn").Pool(processes, torch.set_num_threads, (1,)) as pool:
        yield from pool.imap_unordered(one, settings)


def _attempt(
    measure: Callable[[dict[str, Any], argparse.Namespace], dict[str, Any]],
    given: argparse.Namespace,
    end: float,
    setting: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, Any] | None, str]:
    """Return the setting with its results, or None where there is no time left, or with what went wrong."""
    if time.monotonic() > end:
        return setting, None, ""
    try:
        return setting, measure(setting, given), ""
    except Exception:  # whatever a setting raises: the others go on, and it is told at the end
        return setting, None, traceback.format_exc()


def todo(settings: Iterable[dict[str, Any]], given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the settings that have no result yet, this process's part of them."""
    first, every = (int(v) for v in given.part.split("/"))
    done = [line["setting"] for file in (given.out, *given.known) for line in lines(file)]
    chosen = [s for s in settings if given.only in named(s)]
    for setting in chosen[first - 1 :: every]:
        if setting not in done:
            yield setting


def named(setting: dict[str, Any]) -> str:
    return " ".join(str(v) for v in setting.values())


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def add(file: Path, setting: dict[str, Any], **results: Any) -> None:
    """Write a result down, and say so."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        out.write(json.dumps({"setting": setting, **_short(results)}) + "\n")
    print(named(setting), "done", flush=True)


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _short(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_short(v) for v in value]
    return round(float(value), 4) if isinstance(value, float | np.floating) else value


class Clock:
    """Seconds by name: with a GPU those that pass, its work included; else CPU time, which no other program adds to."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str, function: Callable[[], Any]) -> Any:
        begun = self._now()
        found = function()
        self.seconds[name] = self.seconds.get(name, 0.0) + self._now() - begun
        return found

    @staticmethod
    def _now() -> float:
        if not torch.cuda.is_available():
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()


def ranked(scores: dict[str, Tensor], positive: Tensor) -> dict[str, list[float]]:
    """Return average precision and area under the ROC curve of each score, larger meaning positive."""
    truth = positive.cpu().numpy()
    arrays = {name: score.double().cpu().numpy() for name, score in scores.items()}
    return {
        name: [float(average_precision_score(truth, s)), float(roc_auc_score(truth, s))]
        for name, s in arrays.items()
    }


def risk_coverage(trust: Tensor, loss: Tensor) -> float:
    """Return the area under the risk-coverage curve: mean loss of the most trusted, over all shares."""
    sorted_loss = loss.double().cpu()[trust.cpu().argsort(descending=True)]
    return float((sorted_loss.cumsum(0) / torch.arange(1, len(sorted_loss) + 1)).mean())
