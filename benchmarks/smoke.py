"""Have the main ratios become worse? `make bench-smoke`: a minute, one CPU thread.

Each ratio is taken inside this run (CPU seconds, median of three), so that it hardly depends on the machine's speed,
and compared with the one in results/smoke.json. The bound is generous, twice the recorded ratio: shared machines are
noisy.

    python benchmarks/smoke.py             compare; exit code 1 if a ratio is more than twice the recorded one
    python benchmarks/smoke.py --record    write what was found as the new record
"""

import argparse
import datetime
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import records
import torch
import torch.nn.functional as F
from pairs import by_torch_func, lenet
from torch import Tensor, nn

import likewise as lw
from likewise import losses

RECORD = records.FOLDER / "smoke.json"
BOUND = 2.0


def clock(function: Callable[[], object], repeats: int = 3) -> float:
    """Return the median CPU seconds of some calls, after one that is not counted."""
    function()
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2048, 10),
    )


def epoch_seconds(model: nn.Module, x: Tensor, y: Tensor) -> float:
    def epoch() -> None:
        for inputs, labels in zip(x.split(64), y.split(64), strict=True):
            F.cross_entropy(model(inputs), labels).backward()

    return clock(epoch)


def density_epochs() -> float:
    """N_S of one output, in plain training epochs."""
    model, x, y = network(), torch.randn(512, 1, 16, 16), torch.arange(512) % 10
    gram = lw.GramMatrix(lw.Network(model, readout=lw.one_output(0)), x)
    return clock(lambda: lw.soft_neighbors(gram)) / epoch_seconds(model, x, y)


def sketch_epochs() -> float:
    """An index of 1,024 numbers a sample by one output, built from nothing, in plain training epochs."""
    model, x, y = network(), torch.randn(512, 1, 16, 16), torch.arange(512) % 10

    def build() -> None:
        with tempfile.TemporaryDirectory() as folder:
            lw.build_index(lw.Network(model, readout=lw.one_output(0)), x, folder, width=1024)

    return clock(build) / epoch_seconds(model, x, y)


def pairs_of_one_output() -> float:
    """All 256 × 256 similarities, one output, as a share of the time of torch.func."""
    model, x = lenet(1), torch.randn(256, 1, 28, 28)
    gram = lw.GramMatrix(lw.Network(model, readout=lw.all_outputs), x, kernel=lw.INNER_PRODUCT)
    return clock(gram.dense) / clock(lambda: by_torch_func(model, x))


def pairs_of_ten_outputs() -> float:
    """All 96 × 96 blocks of ten outputs, as a share of the time of torch.func."""
    model, x = lenet(10), torch.randn(96, 1, 28, 28)
    gram = lw.GramMatrix(lw.Network(model, readout=lw.all_outputs), x, kernel=lw.INNER_PRODUCT)
    return clock(gram.dense) / clock(lambda: by_torch_func(model, x))


def group_steps() -> float:
    """A training step with `losses.group`, in steps without."""
    model, x, y = network(), torch.randn(64, 1, 16, 16), torch.arange(64) % 5

    def plain() -> None:
        F.cross_entropy(model(x), y).backward()

    def with_term() -> None:
        term = losses.group(model, x, y, labels=y, readout=lw.label_against_rest)
        (F.cross_entropy(model(x), y) + term).backward()

    return clock(with_term) / clock(plain)


RATIOS: dict[str, Callable[[], float]] = {
    "N_S of one output, in plain epochs": density_epochs,
    "index of 512 samples, in plain epochs": sketch_epochs,
    "all pairs, one output, over torch.func": pairs_of_one_output,
    "all pairs, ten outputs, over torch.func": pairs_of_ten_outputs,
    "step with a group term, in plain steps": group_steps,
}


def main() -> int:
    """Print the table; 1 if a ratio is beyond its bound."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    recorded = json.loads(RECORD.read_text())["ratios"] if RECORD.exists() else {}
    found, beyond = {}, []
    print(f"{'ratio':42} {'now':>7} {'recorded':>9} {'bound':>7}")
    for name, measure in RATIOS.items():
        torch.manual_seed(0)
        found[name] = round(measure(), 3)
        before = recorded.get(name)
        bound = None if before is None else BOUND * before
        over = bound is not None and found[name] > bound
        beyond += [name] if over else []
        cells = [f"{value:.2f}" if value is not None else "none" for value in (found[name], before, bound)]
        print(f"{name:42} {cells[0]:>7} {cells[1]:>9} {cells[2]:>7} {'BEYOND' if over else ''}", flush=True)
    if given.record:
        about = {"date": datetime.date.today().isoformat(), "torch": torch.__version__, "ratios": found}
        RECORD.write_text(json.dumps(about, indent=1) + "\n")
        return 0
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
