"""How long does `likewise serve` take from a new image to its answer, and with fifty clients at once?

An index of random images of 32 × 32 by a small convolutional network (what is asked of it does not depend on what the
images show), served by a process of its own on the loopback address. Wall-clock seconds as a client sees them, with
decoding, gradient, comparison with every row and neighbors' pictures; CPU seconds of the server beside them, since the
machine may be busy.

    python benchmarks/serve.py                    50,000 rows, 1 and 50 clients: minutes, most of it for the index
    python benchmarks/serve.py --rows 2000 --clients 10
"""

import argparse
import io
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image
from records import FOLDER, add

from likewise.index.shards import rows_per_shard

CASE = """
import numpy as np
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 16, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(3),
        nn.Flatten(), nn.Linear(144, 10)
    )

class Images:
    def __len__(self):
        return ROWS
    def __getitem__(self, i):
        return np.random.default_rng(i).integers(0, 255, (32, 32, 3), dtype=np.uint8)

def data():
    return {"dataset": Images(), "labels": np.arange(ROWS) % 10}

def prepare(raw):
    pixels = np.asarray(raw, dtype=np.float32) / 255
    return torch.from_numpy(pixels).permute(2, 0, 1)
"""


BUILD = """
import case
import likewise
from likewise.runs.settings import Settings

settings = Settings(model="case.py:model", data="case.py:data", prepare="case.py:prepare")
images = case.Images()
rows = [(case.prepare(images[i]), i % 10) for i in range(len(images))]
likewise.build_index(
    case.model(), rows, "part", show=images.__getitem__, shard_rows={shard}, settings=settings.text()
)
likewise.merge_indexes(["part"] * {copies}, "index")
"""
COPIES = 10  # of the same rows: the index takes a tenth of the time to build, and is as large


def png(seed: int) -> bytes:
    content = io.BytesIO()
    pixels = np.random.default_rng(10**6 + seed).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


def ask(address: str, picture: bytes) -> float:
    """Return the seconds to an answer."""
    start = time.perf_counter()
    request = urllib.request.Request(f"{address}ask?k=12", picture, {"Content-Type": "image/png"})
    with urllib.request.urlopen(request, timeout=120) as response:
        response.read()
    return time.perf_counter() - start


def cpu_seconds(process: int) -> float:
    """Return the CPU time of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(address: str, process: int, clients: int, rounds: int) -> dict[str, float]:
    """Return seconds to answers, with so many clients that ask one question after another."""
    pictures = [png(i) for i in range(clients * rounds)]
    before, start = cpu_seconds(process), time.perf_counter()
    with ThreadPoolExecutor(clients) as threads:
        found = sorted(threads.map(lambda picture: ask(address, picture), pictures))
    wall = time.perf_counter() - start
    return {
        "answers": len(found),
        "median": round(statistics.median(found), 4),
        "p95": round(found[int(0.95 * (len(found) - 1))], 4),
        "largest": round(found[-1], 4),
        "answers_per_second": round(len(found) / wall, 1),
        "server_cpu_per_answer": round((cpu_seconds(process) - before) / len(found), 4),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--rows", type=int, default=50_000)
    arguments.add_argument("--clients", type=int, default=50)
    arguments.add_argument("--rounds", type=int, default=4, help="questions of each client")
    arguments.add_argument("--threads", type=int, default=2, help="of the server")
    arguments.add_argument("--out", type=Path, default=FOLDER / "serve.jsonl")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "case.py").write_text(CASE.replace("ROWS", str(given.rows // COPIES)))
        Path(folder, "build.py").write_text(BUILD.format(copies=COPIES, shard=rows_per_shard(given.rows)))
        environment = {**os.environ, "OMP_NUM_THREADS": str(given.threads)}
        words = [sys.executable, "-m", "likewise"]
        subprocess.run([sys.executable, "build.py"], cwd=folder, env=environment, check=True)
        serve = [*words, "serve", "index", "--quiet"]
        server = subprocess.Popen(serve, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        try:
            first = round(ask(address, png(-1)), 4)
            alone = measure(address, server.pid, 1, 30)
            together = measure(address, server.pid, given.clients, given.rounds)
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(30)
    setting = {
        "rows": given.rows,
        "clients": given.clients,
        "threads": given.threads,
        "machine": platform.machine(),
    }
    results = {"first": first, "alone": alone, "together": together}
    add(given.out, setting, **results)
    print(setting, *(f"{name}: {value}" for name, value in results.items()), sep="\n")


if __name__ == "__main__":
    main()
