"""An index: bytes, what int8 costs, what exact re-ranking gets, whether standard errors hold, time and memory.

    python benchmarks/index.py images [--samples 1500] [--queries 200]
    python benchmarks/index.py images --set cifar10 --data DIR --samples 50000 --queries 500 --device cuda
    python benchmarks/index.py rows [--rows 10000 50000 1000000]

images: scikit-learn's digits or CIFAR-10, a conv net of 290 k parameters trained for a few epochs, one output
(predicted_class). The exact similarities of held-out images with all training images are what answers are compared
with. Building is told in plain training epochs of the same samples, CPU time against CPU time.

rows: synthetic sketches in the files of an index; each number of rows in a fresh process, which tells the time of a
query with its own gradient and the peak of its memory. CPU seconds of one thread are at least the seconds of two cores.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import likewise as lw
from likewise.index import pairs
from likewise.index.store import INDEX, IndexFolder, Shard, encode
from likewise.manifest import read_manifest
from likewise.statistics.density import PositiveReducer
from likewise.statistics.neighbors import NearestReducer
from likewise.votes import VotesReducer
from nets import conv6, evaluated, trained

sys.path.append(str(Path(__file__).parent.parent / "experiments"))


def images(given: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    device = torch.device(given.device)
    x, y, new = _read(given, device)
    model = conv6(channels=x.shape[1]).to(device)
    trained(model, x, y, given.epochs, 0)
    accuracy = float((evaluated(model, x).argmax(1) == y).float().mean())
    epoch = _cost(lambda: _plain_epoch(model, x, y), device)
    net = lw.Network(model, lw.predicted_class)
    found: dict[str, Any] = {"samples": len(x), "queries": len(new), "training accuracy": accuracy}
    gram = lw.GramMatrix(net, new, columns=(x, y), centered=True)
    exact = gram.dense().cpu().double()
    best = exact.topk(10).indices
    for dtype in ("float16", "int8"):
        with tempfile.TemporaryDirectory() as folder:
            built: list[lw.Index] = []
            cost = _cost(
                lambda f=folder, d=dtype, b=built: b.append(lw.build_index(net, (x, y), f, dtype=d)), device
            )
            found[dtype] = _compare(built[0], new, exact, best, (x, y)) | {"epochs to build": cost / epoch}
            print(dtype, found[dtype], file=sys.stderr, flush=True)
    overlaps = [found[dtype]["top-10 kept by sketches"] for dtype in ("float16", "int8")]
    found["cost of int8 in top-10 overlap"] = overlaps[0] - overlaps[1]
    return found


def _read(given: argparse.Namespace, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return training images, labels, and images that are asked about."""
    if given.set == "digits":
        from sklearn.datasets import load_digits

        digits = load_digits()
        x, y = torch.tensor(digits.images).float()[:, None] / 8 - 1, torch.tensor(digits.target)
        n = min(given.samples, 1500)
        return x[:n].to(device), y[:n].to(device), x[1500 : 1500 + given.queries].to(device)
    from data import scaled

    x, y = scaled("cifar10", given.data, "train", count=given.samples)
    new, _ = scaled("cifar10", given.data, "test", count=given.queries)
    return x.to(device), y.to(device), new.to(device)


def _compare(index: lw.Index, new: Any, exact: Any, best: Any, data: Any) -> dict[str, Any]:
    size = index.bytes
    kept = index.nearest(new)
    every = index.nearest(new[:20], len(index))
    deviations = (every.similarities - exact[:20].gather(1, every.indices)) / every.errors
    index.attach(data)
    reranked = index.nearest(new, exact=True)
    same = [set(a) == set(b) for a, b in zip(reranked.indices.tolist(), best.tolist(), strict=True)]
    novelty = index.novelty(new)
    overlap = (kept.indices[:, :, None] == best[:, None]).any(1).double().mean()
    return {
        "bytes a sample, without pictures": (size["all"] - size["pictures"]) / len(index),
        "bytes of pictures": size["pictures"] / len(index),
        "top-10 kept by sketches": float(overlap),
        "top-10 equal after exact re-ranking": sum(same) / len(same),
        "coverage of ±1.96 standard errors": float((deviations.abs() <= 1.96).double().mean()),
        "median standard error": float(every.errors.median()),
        "largest difference of exact similarities": float(
            (reranked.similarities - exact.gather(1, reranked.indices)).abs().max()
        ),
        "median percentile of held-out novelty": float(novelty.percentile.median()),
    }


def _plain_epoch(model: Any, x: Any, y: Any) -> None:
    for part, labels in zip(x.split(256), y.split(256), strict=True):
        loss = F.cross_entropy(model(part), labels)
        torch.autograd.grad(loss, list(model.parameters()))


def _cost(function: Any, device: torch.device) -> float:
    """Return the CPU seconds of a call, or the seconds on a GPU."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    begun = clock()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - begun


def rows(given: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for n in given.rows:
        with tempfile.TemporaryDirectory() as folder:
            synthesize(Path(folder), n, given.dtype)
            command = [sys.executable, __file__, "query", "--folder", folder, "--threads", str(given.threads)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found[f"{n:,}"] = json.loads(done.stdout)
            print(n, found[f"{n:,}"], file=sys.stderr, flush=True)
    return found


def synthesize(folder: Path, n: int, dtype: str) -> None:
    """Write the index of a few random images, then n rows of random sketches in place of theirs."""
    net = _random_network()
    x, y = torch.randn(128, 3, 32, 32), torch.randint(10, (128,))
    lw.build_index(net, (x, y), folder, dtype=dtype, pictures=False)
    index = IndexFolder(folder, read_manifest(folder, INDEX))
    width, chance = index.state["projection"]["width"], torch.Generator().manual_seed(1)
    index.state |= {"shards": [], "data": [{"samples": n, "fingerprint": ""}]}
    centers = torch.randn(100, width, generator=chance) / width**0.5
    noise = torch.randn(16384, width, generator=chance) * 0.3 / width**0.5
    for start in range(0, n, 16384):
        count = min(16384, n - start)
        classes = torch.randint(100, (count,), generator=chance)
        sketches = 0.4 * centers[classes] + noise.roll(start // 16384, 1)[:count]
        content = {
            **encode(sketches, dtype),
            "dead": torch.zeros(0, dtype=torch.int64),
            "labels": (classes % 10).to(torch.uint8),
            "outputs": torch.randn(count, 10, generator=chance).half(),
        }
        digest, _ = index.write_shard(start, content, None)
        index.state["shards"].append(Shard(start, start + count, 0, digest, None, "")._asdict())
    pairs.REFERENCE = 64  # else a minute for a million rows
    pairs.summarize(index, 2**28)
    index.save()


def query(given: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(given.threads)
    net = _random_network()
    index = lw.Index(given.folder, model=net, verify=False, max_memory=2**28)
    x = torch.randn(8, 3, 32, 32)
    index.nearest(x[:1])
    _forget_peak()
    found: dict[str, Any] = {}
    for name, ask in (
        ("nearest", lambda one: index.nearest(one)),
        ("novelty", lambda one: index.novelty(one)),
        ("explain", lambda one: index.explain(one)),
    ):
        if name == "explain":  # neighbors, votes and density of a few rows, as of all, strip by strip
            votes = VotesReducer(index.labels[:, None] == torch.arange(10))
            index.pairs(rows=range(full_strip(len(index)))).visit(
                NearestReducer(10), PositiveReducer(4), votes
            )
            found["peak MiB of nearest, novelty, votes, density"] = round(_memory("VmHWM") / 1024)
        times = []
        for i in range(1, 6):
            clock = time.perf_counter(), time.process_time()
            ask(x[i : i + 1])
            times.append((time.perf_counter() - clock[0], time.process_time() - clock[1]))
        wall, cpu = (sorted(part)[len(part) // 2] for part in zip(*times, strict=True))
        found[name] = {"seconds": round(wall, 3), "cpu seconds": round(cpu, 3)}
    found["peak MiB with explain"] = round(_memory("VmHWM") / 1024)
    return found


def full_strip(m: int) -> int:
    """Return the rows of a strip that fills its share of the memory."""
    return min(pairs.TALLEST, 2**28 // 8 // (8 * m))


def _random_network() -> lw.Network:
    torch.manual_seed(0)
    return lw.Network(conv6(channels=3).eval(), lw.predicted_class)


def _forget_peak() -> None:
    """Begin to count the peak of memory anew; Linux."""
    Path("/proc/self/clear_refs").write_text("5")


def _memory(name: str) -> int:
    """Return a line of /proc/self/status in KiB: VmRSS now, VmHWM at most; files that are mapped count."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("what", choices=["images", "rows", "query"])
    arguments.add_argument("--set", choices=["digits", "cifar10"], default="digits")
    arguments.add_argument("--data", type=Path, default=Path("data"))
    arguments.add_argument("--samples", type=int, default=5000)
    arguments.add_argument("--queries", type=int, default=200)
    arguments.add_argument("--epochs", type=int, default=4)
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--dtype", default="float16")
    arguments.add_argument("--rows", type=int, nargs="+", default=[10_000, 50_000, 1_000_000])
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--folder")
    given = arguments.parse_args()
    if given.what != "query" and given.device == "cpu":
        torch.set_num_threads(1)
    print(json.dumps({"images": images, "rows": rows, "query": query}[given.what](given), indent=1))
