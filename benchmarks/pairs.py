"""What do all pairs of sketches cost, with the ten statistics of a run?

Random sketches around ten centers, ten classes, one CPU thread, CPU time.

    python benchmarks/pairs.py                   # 10,000 samples
    python benchmarks/pairs.py --samples 50000
    python benchmarks/pairs.py --profile         # by operation
"""

import argparse
import time

import torch
from torch.profiler import ProfilerActivity, profile

from likewise.gram import Sketches
from likewise.runs.columns import Request, Targets, pair_statistics


def main() -> None:
    """Print the seconds."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--samples", type=int, default=10_000)
    arguments.add_argument("--width", type=int, default=1072, help="numbers of a sketch")
    arguments.add_argument("--profile", action="store_true")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    n, q = given.samples, given.width
    y = torch.randint(0, 10, (n,))
    sketches = 0.5 * torch.randn(10, q)[y] + 0.7 * torch.randn(n, q) + torch.randn(q)
    source = Sketches(torch.nn.functional.normalize(sketches, dim=1), centered=True)
    request = Request(n, 10, 0.9, Targets(y, torch.randn(n, 10)), 0)
    if given.profile:
        with profile(activities=[ProfilerActivity.CPU]) as found:
            pair_statistics(source, request)
        print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=20))
        return
    start = time.process_time()
    pair_statistics(source, request)
    print(f"{n:,} samples, {q:,} numbers each: {time.process_time() - start:.2f} s of CPU time")


if __name__ == "__main__":
    main()
