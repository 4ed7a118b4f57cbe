"""An index: bytes, what int8 costs, what exact re-ranking gets, whether standard errors hold, time and memory.

    python benchmarks/index.py images [--samples 1500] [--queries 200]
    python benchmarks/index.py pack --data DIR --out cifar10.npz          CIFAR-10 in 51 MB, to carry elsewhere
    python benchmarks/index.py images --set cifar10 --data DIR --samples 50000 --queries 500 --epochs 10 --device cuda
    python benchmarks/index.py texts [--samples 5000] [--queries 500]
    python benchmarks/index.py processes [--samples 2000]
    python benchmarks/index.py peers [--samples 800] [--queries 100]
    python benchmarks/index.py rows [--rows 10000 50000 1000000]

images: scikit-learn's digits or CIFAR-10, a conv net of 290 k parameters trained for a few epochs, one output
(predicted_class). The exact similarities of held-out images with all training images are what answers are compared
with. Building is told in plain training epochs of the same samples, and in backward passes beyond one such epoch: CPU
time against CPU time. --data may be a packed file: all 50,000 images as JPEG (quality 95, no subsampling, blocks of
8 x 8 that no two images share), 40 dB from the original.

texts: which of five installed packages is a docstring from? A convolution over word vectors, 140 k parameters, trained
in seconds, and the same comparisons.

processes: an index built by one process and by two that torchrun starts, one thread each. Efficiency is the CPU time of
one over twice that of the slower of two, without starting them: on a machine that others use, seconds say nothing.

peers: random projections of the same gradients by traker and dattri, where they are installed, to the same number of
float16 numbers a sample, in the same process: CPU seconds from images to numbers, the error of centered similarities,
and how many of the ten nearest are kept. Gradients of peers are those of torch.func, as their examples form them.

rows: synthetic sketches in the files of an index; each number of rows in a fresh process, which tells the time of a
query with its own gradient and the peak of its memory. CPU seconds of one thread are at least the seconds of two cores.
"""

import argparse
import ast
import importlib.util
import io
import json
import re
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

import likewise as lw
from likewise.distributed import process_group, rank
from likewise.gram import similarity_errors
from likewise.index import pairs
from likewise.index.store import INDEX, IndexFolder, Shard, encode
from likewise.manifest import read_manifest
from likewise.statistics.density import PositiveReducer
from likewise.statistics.neighbors import NearestReducer
from likewise.votes import VotesReducer
from nets import conv6, evaluated, trained

sys.path.append(str(Path(__file__).parent.parent / "experiments"))
PACKAGES = ("numpy", "pandas", "sklearn", "scipy", "torch")
WORDS, LENGTH = 4000, 60


def images(given: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    device = torch.device(given.device)
    x, y, new = _read(given, device)
    model = conv6(channels=x.shape[1]).to(device)
    trained(model, x, y, given.epochs, 0)
    found: dict[str, Any] = {"samples": len(x), "queries": len(new), "data": str(given.data.name)}
    found["training accuracy"] = float((evaluated(model, x).argmax(1) == y).float().mean())
    found |= compare(lw.Network(model, lw.predicted_class), model, x, y, new)
    return found


def compare(net: lw.Network, model: Any, x: Any, y: Any, new: Any) -> dict[str, Any]:
    """Return what indexes of (x, y) say of new inputs, compared with exact similarities."""
    device, found = x.device, dict[str, Any]()
    _plain_epoch(model, x[:512], y[:512])  # what is set up at the first call
    epoch = _cost(lambda: _plain_epoch(model, x, y), device)
    forward = _cost(lambda: evaluated(model, x), device)
    gram = lw.GramMatrix(net, new, columns=(x, y), centered=True)
    exact, seconds = _timed(lambda: gram.dense().cpu().double(), device)
    found |= {"seconds of a plain epoch": epoch, "seconds of a forward pass": forward}
    found["seconds of all exact similarities"] = seconds
    best = exact.topk(10).indices
    for dtype in ("float16", "int8"):
        with tempfile.TemporaryDirectory() as folder:
            index, cost = _timed(
                lambda f=folder, d=dtype: lw.build_index(net, (x, y), f, dtype=d, pictures=False), device
            )
            found[dtype] = _compare(index, new, exact, best, (x, y)) | {
                "seconds to build": cost,
                "plain epochs to build": cost / epoch,
                "backward passes beyond a plain epoch": (cost - epoch) / (epoch - forward),
            }
            print(dtype, json.dumps(found[dtype], indent=1), file=sys.stderr, flush=True)
    overlaps = [found[dtype]["top-10 kept by sketches"] for dtype in ("float16", "int8")]
    found["cost of int8 in top-10 overlap"] = overlaps[0] - overlaps[1]
    return found


class TextNet(nn.Module):
    """A convolution over word vectors, the largest of each channel, a linear layer."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 32)
        self.inner = nn.Conv1d(32, 96, 3, padding=1)
        self.out = nn.Linear(96, classes)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return a number for each package."""
        return self.out(F.gelu(self.inner(self.words(words).transpose(1, 2))).amax(2))


def texts(given: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    x, y = _docstrings(given.samples + given.queries)
    new, x, y = x[given.samples :], x[: given.samples], y[: given.samples]
    model = TextNet(len(PACKAGES))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(given.epochs):
        for part in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()
    model.eval()
    found: dict[str, Any] = {"samples": len(x), "queries": len(new)}
    found["training accuracy"] = float((evaluated(model, x).argmax(1) == y).float().mean())
    found |= compare(lw.Network(model, lw.predicted_class), model, x, y, new)
    return found


def _docstrings(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return different docstrings of installed packages as words, and their packages."""
    found: dict[tuple[int, ...], int] = {}
    for label, package in enumerate(PACKAGES):
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None, package
        paths = sorted(Path(spec.origin).parent.rglob("*.py"))
        own = dict.fromkeys(
            numbers
            for path in paths
            if "test" not in str(path.relative_to(Path(spec.origin).parent))
            for numbers in _numbered_docstrings(path)
        )
        found |= {
            numbers: label
            for numbers in islice(own, -(-3 * count // (2 * len(PACKAGES))))
            if numbers not in found
        }
    chosen = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))[:count].tolist()
    keys = list(found)
    x = torch.tensor([keys[i] + (0,) * (LENGTH - len(keys[i])) for i in chosen])
    return x, torch.tensor([found[keys[i]] for i in chosen])


def _numbered_docstrings(path: Path) -> Iterator[tuple[int, ...]]:
    """Yield the docstrings of a file, of at least twelve words, as numbers of words."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="replace"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            words = re.findall("[a-z]+", (ast.get_docstring(node) or "").lower())[:LENGTH]
            if len(words) >= 12:
                yield tuple(1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in words)


def peers(given: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    x, y, new = _read(given, torch.device("cpu"))
    x, y = x[: given.samples], y[: given.samples]
    model = conv6(channels=x.shape[1])
    trained(model, x, y, given.epochs, 0)
    net = lw.Network(model, lw.predicted_class)
    exact = lw.GramMatrix(net, new, columns=(x, y), centered=True).dense().double()
    found: dict[str, Any] = {"samples": len(x), "queries": len(new)}
    with tempfile.TemporaryDirectory() as folder:
        index, seconds = _timed(lambda: lw.build_index(net, (x, y), folder, pictures=False), x.device)
        asked = index.projector(lw.batches(new)).project_all(lw.batches(new)).sketches
        found["likewise"] = _quality(index.sketches(), asked, exact, seconds)
        width = index.width
    for name, make in (("traker", _by_traker), ("dattri", _by_dattri)):
        try:
            project = make(sum(p.numel() for p in model.parameters()), width)
        except ImportError:
            found[name] = "not installed"
            continue
        rows, seconds = _timed(lambda p=project: _projected(model, x, p).half(), x.device)
        found[name] = _quality(rows, _projected(model, new, project), exact, seconds)
        print(name, found[name], file=sys.stderr, flush=True)
    return found


def _quality(rows: Any, new: Any, exact: Any, seconds: float) -> dict[str, Any]:
    """Return what centered similarities of unit vectors say, beside the exact ones."""
    mean = rows.double().mean(0)
    one, other = (F.normalize(part.double() - mean, dim=1) for part in (new, rows))
    similarities = one @ other.T
    kept = (similarities.topk(10).indices[:, :, None] == exact.topk(10).indices[:, None]).any(1)
    return {
        "numbers a sample": rows.shape[1],
        "cpu seconds": round(seconds, 2),
        "root mean square error": float((similarities - exact).square().mean().sqrt()),
        "top-10 kept": float(kept.double().mean()),
    }


def _projected(model: Any, x: Any, project: Any) -> Any:
    """Return projected unit gradients of the predicted class's output."""
    values = {name: value.detach() for name, value in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def output(parameters: Any, one: Any) -> Any:
        return torch.func.functional_call(model, (parameters, buffers), (one[None],))[0].max()

    gradients = torch.func.vmap(torch.func.grad(output), (None, 0))
    parts = []
    for some in x.split(100):
        flat = torch.cat([part.flatten(1) for part in gradients(values, some).values()], 1)
        parts.append(project(F.normalize(flat, dim=1)))
    return torch.cat(parts)


def _by_traker(p: int, width: int) -> Any:
    from trak.projectors import BasicProjector, ProjectionType

    projector = BasicProjector(p, width, 0, ProjectionType.rademacher, torch.device("cpu"))
    return lambda flat: projector.project(flat, 0) / width**0.5


def _by_dattri(p: int, width: int) -> Any:
    from dattri.func.projection import random_project

    return random_project(torch.zeros(100, p), 100, width, 32, 0, "normal", device="cpu")


def processes(given: argparse.Namespace) -> dict[str, Any]:
    times = {}
    for count in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
            script = [__file__, "build", "--folder", folder, "--samples", str(given.samples)]
            subprocess.run([sys.executable, *launcher, *script], check=True, stdout=subprocess.DEVNULL)
            parts = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank-*.json"))]
            times[count] = [round(part["cpu seconds"], 2) for part in parts]
    efficiency = times[1][0] / (2 * max(times[2]))
    return {"samples": given.samples, "cpu seconds by ranks": times, "parallel efficiency": efficiency}


def build(given: argparse.Namespace) -> dict[str, Any]:
    """Build an index in one of the processes that torchrun started."""
    torch.set_num_threads(1)
    chance = torch.Generator().manual_seed(0)
    x, y = torch.randn(given.samples, 3, 32, 32, generator=chance), torch.arange(given.samples) % 10
    net, folder = _random_network(), Path(given.folder)
    with process_group():
        begun = time.process_time()
        lw.build_index(net, (x, y), folder / "index", pictures=False)
        own = {"cpu seconds": time.process_time() - begun}
        (folder / f"rank-{rank()}.json").write_text(json.dumps(own))
    return own


def pack(given: argparse.Namespace) -> dict[str, Any]:
    """Write CIFAR-10 as mosaics of 100 x 100 images in JPEG, labels beside them."""
    from data import images as read

    content = {}
    for split, count in (("train", 50_000), ("test", 10_000)):
        pixels, labels = read("cifar10", given.data, split, count=count)
        for start in range(0, count, 10_000):
            tiles = pixels[start : start + 10_000].reshape(100, 100, 3, 32, 32)
            mosaic = Image.fromarray(tiles.transpose(0, 3, 1, 4, 2).reshape(3200, 3200, 3))
            file = io.BytesIO()
            mosaic.save(file, "JPEG", quality=95, subsampling=0)
            content[f"{split}_{start}"] = np.frombuffer(file.getvalue(), np.uint8)
        content[f"{split}_labels"] = labels.astype(np.uint8)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez(given.out, **content)
    return {"bytes": given.out.stat().st_size}


def unpack(path: Path, split: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first images and labels of a packed CIFAR-10, scaled as `data.scaled` does."""
    from data import SCALE

    with np.load(path) as file:
        names = [f"{split}_{start}" for start in range(0, count, 10_000)]
        mosaics = [np.asarray(Image.open(io.BytesIO(file[name].tobytes()))) for name in names]
        labels = torch.tensor(file[f"{split}_labels"][:count]).long()
    tiles = np.concatenate(
        [m.reshape(100, 32, 100, 32, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32) for m in mosaics]
    )
    mean, spread = SCALE["cifar10"]
    return (torch.tensor(tiles[:count]).float() / 255 - mean) / spread, labels


def _read(given: argparse.Namespace, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return training images, labels, and images that are asked about."""
    if given.set == "digits":
        from sklearn.datasets import load_digits

        digits = load_digits()
        x, y = torch.tensor(digits.images).float()[:, None] / 8 - 1, torch.tensor(digits.target)
        n = min(given.samples, 1500)
        return x[:n].to(device), y[:n].to(device), x[1500 : 1500 + given.queries].to(device)
    from data import scaled

    if given.data.suffix == ".npz":
        x, y = unpack(given.data, "train", given.samples)
        new, _ = unpack(given.data, "test", given.queries)
    else:
        x, y = scaled("cifar10", given.data, "train", count=given.samples)
        new, _ = scaled("cifar10", given.data, "test", count=given.queries)
    return x.to(device), y.to(device), new.to(device)


def _compare(index: lw.Index, new: Any, exact: Any, best: Any, data: Any) -> dict[str, Any]:
    size = index.bytes
    kept = index.nearest(new)
    deviations, errors = _deviations(index, new[:20], exact[:20])
    index.attach(data)
    reranked, seconds = _timed(lambda: index.nearest(new, exact=True), new.device)
    same = [set(a) == set(b) for a, b in zip(reranked.indices.tolist(), best.tolist(), strict=True)]
    ties = _ties(exact, reranked.indices, best)
    novelty = index.novelty(new)
    overlap = (kept.indices[:, :, None] == best[:, None]).any(1).double().mean()
    return {
        "bytes a sample, without pictures": (size["all"] - size["pictures"]) / len(index),
        "top-10 kept by sketches": float(overlap),
        "top-10 equal after exact re-ranking": sum(same) / len(same),
        "top-10 equal, or similarities equal to 1e-6": sum(a or b for a, b in zip(same, ties, strict=True))
        / len(same),
        "seconds to re-rank, the first pass over the data included": seconds,
        "coverage of ±1.96 standard errors": float((deviations.abs() <= 1.96).double().mean()),
        "median standard error": float(errors.median()),
        "largest difference of exact similarities": float(
            (reranked.similarities - exact.gather(1, reranked.indices)).abs().max()
        ),
        "median percentile of held-out novelty": float(novelty.percentile.median()),
    }


def _deviations(index: lw.Index, new: Any, exact: Any) -> tuple[Any, Any]:
    """Return the errors of similarities of inputs with random rows, in standard errors, and these."""
    rows = torch.randperm(len(index), generator=torch.Generator().manual_seed(0))[:2000]
    sketches = index.projector(lw.batches(new)).project_all(lw.batches(new)).sketches.double()
    mean = index._columns.mean
    one, other = (F.normalize(part - mean, dim=1) for part in (sketches, index.sketches(rows)))
    errors = similarity_errors(one, other, index.manifest["projection"]["outputs"])
    return (one @ other.T - exact[:, rows]) / errors, errors


def _ties(exact: Any, found: Any, best: Any) -> list[bool]:
    """Return where the similarities of what was found are those of the best, up to rounding."""
    pairs = (exact.gather(1, found).sort(1).values, exact.gather(1, best).sort(1).values)
    return ((pairs[0] - pairs[1]).abs().amax(1) < 1e-6).tolist()


def _timed(function: Any, device: torch.device) -> tuple[Any, float]:
    """Return a result, and the CPU seconds of a call, or the seconds on a GPU."""
    found: list[Any] = []
    seconds = _cost(lambda: found.append(function()), device)
    return found[0], seconds


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
    share = max(2**25 - pairs.ROW_BYTES * m, 2**23)
    return max(1, min(pairs.TALLEST, share // (8 * m)))


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


COMMANDS = {
    "images": images,
    "texts": texts,
    "peers": peers,
    "processes": processes,
    "rows": rows,
    "pack": pack,
    "build": build,
    "query": query,
}

if __name__ == "__main__":
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("what", choices=list(COMMANDS))
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
    arguments.add_argument("--out", type=Path, default=Path("out/cifar10.npz"))
    given = arguments.parse_args()
    if given.what != "query" and given.device == "cpu":
        torch.set_num_threads(1)
    print(json.dumps(COMMANDS[given.what](given), indent=1))
