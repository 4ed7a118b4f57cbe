"""An index: bytes, what int8 costs, what exact re-ranking gets, whether standard errors hold, time and memory.

    python benchmarks/index.py images [--samples 1500] [--queries 200]
    python benchmarks/index.py pack --data DIR --out cifar10.npz          CIFAR-10 in 51 MB, to carry elsewhere
    python benchmarks/index.py images --set cifar10 --data DIR --samples 50000 --queries 500 --epochs 10 --device cuda
    python benchmarks/index.py texts [--samples 5000] [--queries 500]
    python benchmarks/index.py coverage --samples 400 [--data DIR]
    python benchmarks/index.py processes [--samples 2000]
    python benchmarks/index.py peers [--samples 800] [--queries 100]
    python benchmarks/index.py ask --samples 3000 --queries 20
    python benchmarks/index.py rows [--rows 10000 50000 1000000]

images: scikit-learn's digits or CIFAR-10, a conv net of 290 k parameters trained for a few epochs, one output
(predicted_class). The exact similarities of held-out images with all training images are what answers are compared
with. Building is told in plain training epochs of the same samples, and in backward passes beyond one such epoch: CPU
time against CPU time. --data may be a packed file: all 50,000 images as JPEG (quality 95, no subsampling, blocks of
8 x 8 that no two images share), 40 dB from the original.

texts: which of five installed packages is a docstring from? A convolution over word vectors, 140 k parameters, trained
in seconds, and the same comparisons.

coverage: networks of texts, a table and images, several projections of each: the share of similarities of 40 samples
with others that lie within 1.96 stated errors, mean and range over projections. The samples that tell the error of a
projection (`error_factors`) are others.

processes: an index built by one process and by two that torchrun starts, one thread each. Efficiency is the CPU time of
one over twice that of the slower of two, without starting them: on a machine that others use, seconds say nothing. Two
processes that share nothing, at the same time, show how far two busy cores slow each other down. What two ranks do,
each part counted once, is what one would have done under the same load.

ask: `likewise ask` of --queries new images against --samples random rows, in a fresh process, imports apart.

peers: random projections of the same gradients by traker and dattri, where they are installed, and by the recipe of
bergson in plain torch (its wheel asks for bitsandbytes and torchaudio, and reads texts), to the same number
of float16 numbers a sample, in the same process: CPU seconds from images to numbers, the error of centered
similarities, and how many of the ten nearest are kept. Gradients of peers are those of torch.func, as their examples
form them.

rows: synthetic sketches in the files of an index; each number of rows in a fresh process, which tells the time of a
query with its own gradient and the peak of its memory. CPU seconds of one thread are at least the seconds of two cores.
"""

import argparse
import ast
import cProfile
import importlib.util
import io
import json
import pstats
import re
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bergson import draw_maps, project_gradients
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

import likewise as lw
from likewise.distributed import process_group, rank, record_passes
from likewise.gram import error_factors, similarity_errors
from likewise.index import pairs
from likewise.index.projection import Projector, fit_buckets
from likewise.index.store import INDEX, IndexFolder, Shard, encode
from likewise.manifest import read_manifest
from likewise.statistics.neighbors import NearestReducer, PositiveReducer, VotesReducer
from nets import conv6, evaluated, trained

sys.path.append(str(Path(__file__).parent.parent / "experiments"))
PACKAGES = ("numpy", "pandas", "sklearn", "scipy", "torch")
WORDS, LENGTH = 4000, 60
SHARED = ("a few sketches", "index", "summary of the index")  # passes of which each rank does a part
COVERED = 20  # inputs whose errors are compared with standard errors


def images(given: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    device = torch.device(given.device)
    x, y, new = _read(given, device)
    model = conv6(channels=x.shape[1]).to(device)
    folder = _kept_folder(given)
    if folder is not None and (folder / "model.safetensors").exists():
        model.load_state_dict(load_file(folder / "model.safetensors"))
        model.eval()
    else:
        trained(model, x[: given.fitted], y[: given.fitted], given.epochs, 0)
        if folder is not None:
            save_file(model.state_dict(), folder / "model.safetensors")
    found: dict[str, Any] = {"samples": len(x), "queries": len(new), "data": str(given.data.name)}
    found["training accuracy"] = float((evaluated(model, x).argmax(1) == y).float().mean())
    net = lw.Network(model, lw.predicted_class)
    if given.profile:
        return found | profile(net, x, y)
    found |= compare(net, model, x, y, new, folder, given.rerank)
    return found


def profile(net: lw.Network, x: Any, y: Any) -> dict[str, Any]:
    """Build an index twice and write where the time of the second goes, by Python and by device, to stderr."""
    with tempfile.TemporaryDirectory() as folder:
        first = _cost(lambda: lw.build_index(net, (x, y), f"{folder}/1", pictures=False), x.device)
        calls = cProfile.Profile()
        activities = [torch.profiler.ProfilerActivity.CPU]
        if x.is_cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as kernels:
            calls.enable()
            second = _cost(lambda: lw.build_index(net, (x, y), f"{folder}/2", pictures=False), x.device)
            calls.disable()
    pstats.Stats(calls, stream=sys.stderr).sort_stats("cumulative").print_stats(80)
    pstats.Stats(calls, stream=sys.stderr).sort_stats("tottime").print_stats(30)
    by = "self_cuda_time_total" if x.is_cuda else "self_cpu_time_total"
    print(kernels.key_averages().table(sort_by=by, row_limit=30, max_name_column_width=60), file=sys.stderr)
    return {"seconds": first, "seconds with profilers": second}


def _kept_folder(given: argparse.Namespace) -> Path | None:
    if given.folder is None:
        return None
    folder = Path(given.folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def compare(
    net: lw.Network, model: Any, x: Any, y: Any, new: Any, folder: Path | None, rerank: list[str]
) -> dict[str, Any]:
    """Return what indexes of (x, y) say of new inputs, compared with exact similarities.

    What takes long is kept in a folder, if there is one: a run that was stopped goes on.
    """
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary) if folder is None else folder
        found = _stage(place, "costs", lambda: _plain_costs(model, x, y))
        costs = {name: float(value) for name, value in found.items()}
        answers: dict[str, dict[str, Any]] = {}
        for dtype in ("float16", "int8"):  # each complete before the next: a run may be cut short
            path = place / f"index-{dtype}"
            built = _stage(place, f"built-{dtype}", lambda p=path, d=dtype: _build(net, x, y, p, d))
            index = lw.Index(path, model=net, verify=False)
            answers[dtype] = _describe_build(index, float(built["seconds"]), costs)
            answers[dtype]["seconds of a query"] = _query_seconds(index, new)
            _report({**costs, **answers}, place)
            exact = _stage(place, "exact", lambda: _exact(net, x, y, new))
            best = exact["exact"].topk(10).indices
            answers[dtype] |= _compare_sketches(index, new, exact["exact"], best)
            _report(answers, place)
            if dtype in rerank:
                index.attach((x, y))
                reranked = _stage(place, f"reranked-{dtype}", lambda i=index: _rerank(i, new))
                answers[dtype] |= _compare_reranked(reranked, exact["exact"], best)
                _report(answers, place)
            answers[dtype]["median percentile of held-out novelty"] = float(
                index.novelty(new).percentile.median()
            )
            _report(answers, place)
    overlaps = [answers[dtype]["top-10 kept by sketches"] for dtype in ("float16", "int8")]
    return {
        **costs,
        "seconds of all exact similarities": float(exact["seconds"]),
        **answers,
        "cost of int8 in top-10 overlap": overlaps[0] - overlaps[1],
    }


def _stage(place: Path, name: str, compute: Any) -> dict[str, torch.Tensor]:
    """Return tensors, computed once."""
    file = place / f"{name}.safetensors"
    if not file.exists():
        computed = {key: torch.as_tensor(value).contiguous() for key, value in compute().items()}
        save_file(computed, place / "unfinished")
        (place / "unfinished").rename(file)
    return load_file(file)


def _plain_costs(model: Any, x: Any, y: Any) -> dict[str, float]:
    """Return the seconds of a plain epoch and of a forward pass, of at most 5,000 samples times their number."""
    timed = min(len(x), 5000)
    _plain_epoch(model, x[:512], y[:512])  # what is set up at the first call
    epoch = _cost(lambda: _plain_epoch(model, x[:timed], y[:timed]), x.device)
    forward = _cost(lambda: evaluated(model, x[:timed], 256), x.device)  # in the batches of an epoch
    scale = len(x) / timed
    return {"seconds of a plain epoch": epoch * scale, "seconds of a forward pass": forward * scale}


def _build(net: lw.Network, x: Any, y: Any, path: Path, dtype: str) -> dict[str, float]:
    def build() -> None:
        lw.build_index(net, (x, y), path, dtype=dtype, pictures=False)

    return {"seconds": _cost(build, x.device)}


def _describe_build(index: lw.Index, cost: float, costs: dict[str, float]) -> dict[str, Any]:
    epoch, forward = costs["seconds of a plain epoch"], costs["seconds of a forward pass"]
    size = index.bytes
    return {
        "bytes a sample, without pictures": (size["all"] - size["pictures"]) / len(index),
        "seconds to build": cost,
        "plain epochs to build": cost / epoch,
        "backward passes beyond a plain epoch": (cost - epoch) / (epoch - forward),
    }


def _exact(net: lw.Network, x: Any, y: Any, new: Any) -> dict[str, Any]:
    """Return the exact centered similarities of new inputs with all samples, and the seconds."""
    gram = lw.GramMatrix(net, new, columns=(x, y), centered=True)
    exact, seconds = _timed(lambda: gram.dense().cpu().double(), x.device)
    return {"exact": exact, "seconds": seconds}


def _rerank(index: lw.Index, new: Any) -> dict[str, Any]:
    reranked, seconds = _timed(lambda: index.nearest(new, exact=True), new.device)
    return {"indices": reranked.indices, "similarities": reranked.similarities, "seconds": seconds}


def _report(found: dict[str, Any], place: Path) -> None:
    """Write what is known so far: a run over 50,000 images takes an hour."""
    text = json.dumps(found, indent=1)
    print(text, file=sys.stderr, flush=True)
    (place / "so_far.json").write_text(text)


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
    _fitted(model, x, y, given.epochs)
    found: dict[str, Any] = {"samples": len(x), "queries": len(new)}
    found["training accuracy"] = float((evaluated(model, x).argmax(1) == y).float().mean())
    net = lw.Network(model, lw.predicted_class)
    found |= compare(net, model, x, y, new, None, given.rerank)
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


class WordMeans(nn.Module):
    """The mean of word vectors, then two layers."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 48)
        self.inner = nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, classes))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return a number for each package."""
        return self.inner(self.words(words).mean(1))


class WordAttention(nn.Module):
    """Word vectors with places, one layer of attention, the mean, a linear layer."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 32)
        self.places = nn.Parameter(torch.randn(LENGTH, 32) / 8)
        self.inner = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.out = nn.Linear(32, classes)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return a number for each package."""
        return self.out(self.inner(self.words(words) + self.places).mean(1))


def coverage(given: argparse.Namespace) -> dict[str, Any]:
    """Return the share of similarities within 1.96 stated errors, projection by projection."""
    found = {}
    for name, model, x in _covered_networks(given):
        net = lw.Network(model, lw.predicted_class)
        gram = lw.GramMatrix(net, x)
        plain, exact = gram.dense().double(), gram.with_centering(True).dense().double()
        stated, raw = [], []
        for seed in range(given.seeds):
            sketches = (
                Projector(gram, fit_buckets(1024, 1), seed).project_all(lw.batches(x)).sketches.double()
            )
            vectors = F.normalize(sketches - sketches.mean(0), dim=1)
            off, errors = vectors[:40] @ vectors.T - exact[:40], similarity_errors(vectors[:40], vectors, 1)
            some = slice(len(x) - given.compared, None)
            factor = error_factors(sketches[some], plain[some, some], 1).centered
            here = slice(40, len(x) - given.compared)
            raw.append(float((off.abs() <= 1.96 * errors)[:, here].double().mean()))
            stated.append(float((off.abs() <= 1.96 * factor * errors)[:, here].double().mean()))
        found[name] = {
            "stated": {"mean": np.mean(stated), "lowest": min(stated), "highest": max(stated)},
            "without factors": {"mean": np.mean(raw), "lowest": min(raw), "highest": max(raw)},
        }
        print(name, found[name], file=sys.stderr, flush=True)
    return found


def _covered_networks(given: argparse.Namespace) -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    words, packages = _docstrings(3000)
    for name, make in (
        ("convolution of words", TextNet),
        ("means of words", WordMeans),
        ("attention of words", WordAttention),
    ):
        for epochs in (2, 6):
            torch.manual_seed(1)
            model = _fitted(make(len(PACKAGES)), words, packages, epochs)
            yield f"{name}, {epochs} epochs", model, words[: given.samples]
    from sklearn.datasets import load_breast_cancer, load_digits

    table = load_breast_cancer()
    rows = torch.tensor(table.data).float()
    rows, target = (rows - rows.mean(0)) / rows.std(0), torch.tensor(table.target)
    torch.manual_seed(1)
    dense = nn.Sequential(nn.Linear(30, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
    yield "a table of 30 columns", _fitted(dense, rows, target, 10), rows[: given.samples]
    digits = load_digits()
    x, y = torch.tensor(digits.images).float()[:, None] / 8 - 1, torch.tensor(digits.target)
    torch.manual_seed(1)
    yield "digits", trained(conv6(), x, y, 2, 0).model, x[: given.samples]
    if given.data.exists():
        given.set, kept = "cifar10", given.samples
        given.samples, given.queries = 2000, 1
        images, labels, _ = _read(given, torch.device("cpu"))
        given.samples = kept
        torch.manual_seed(1)
        yield "CIFAR-10", trained(conv6(channels=3), images, labels, 2, 0).model, images[:kept]


def _fitted(model: nn.Module, x: torch.Tensor, y: torch.Tensor, epochs: int) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for part in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()
    return model.eval()


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
    peers = (
        ("traker", _by_traker),
        ("dattri", _by_dattri),
        ("bergson's recipe", partial(_by_bergson, model)),
    )
    for name, make in peers:
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


def _by_bergson(model: nn.Module, p: int, width: int) -> Any:
    """Return the projection that bergson makes of the matrices of linear and convolutional layers."""
    del p
    shapes = {name: value.shape for name, value in model.named_parameters()}
    maps = draw_maps({name: shape for name, shape in shapes.items() if len(shape) > 1}, width)

    def project(flat: torch.Tensor) -> torch.Tensor:
        parts = flat.split([shape.numel() for shape in shapes.values()], 1)
        named = zip(shapes.items(), parts, strict=True)
        return project_gradients(
            {name: part.unflatten(1, shape) for (name, shape), part in named if name in maps}, maps
        )

    return project


def ask(given: argparse.Namespace) -> dict[str, Any]:
    """Ask an index of random rows from the command line, in a fresh process: imports apart."""
    from likewise.runs.settings import Settings

    with tempfile.TemporaryDirectory() as temporary:
        folder, source = Path(temporary), Path(__file__).parent / "nets.py"
        torch.manual_seed(0)
        model = conv6().eval()
        save_file(model.state_dict(), folder / "net.safetensors")
        settings = Settings(
            model=f"{source}:conv6", data="none", weights=str(folder / "net.safetensors"), gray=True
        )
        x, y = torch.randn(128, 1, 32, 32), torch.randint(10, (128,))
        net = lw.Network(model, lw.predicted_class)
        lw.build_index(net, (x, y), folder / "index", settings=settings.text("index"))
        _replace_rows(folder / "index", given.samples, "float16")
        for i in range(given.queries):
            pixels = np.random.default_rng(i).integers(0, 256, (32, 32), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{i}.png")
        words = [
            "ask",
            str(folder / "index"),
            *(str(folder / f"{i}.png") for i in range(given.queries)),
            "-q",
        ]
        script = (
            "import sys, time, torch, numpy, PIL.Image; torch.set_num_threads(1)\n"
            "import likewise.index, likewise.loading, likewise.cli.index; from likewise.cli.app import exit_code\n"
            "imports = time.process_time(); code = exit_code(sys.argv[1:])\n"
            "print(imports, time.process_time() - imports, file=sys.stderr); sys.exit(code)\n"
        )
        command = [sys.executable, "-c", script, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        imports, answering = map(float, done.stderr.split()[-2:])
    return {
        "rows": given.samples,
        "inputs": given.queries,
        "cpu seconds of imports": imports,
        "after": answering,
    }


def processes(given: argparse.Namespace) -> dict[str, Any]:
    (alone,), apart, ranks = (
        _build_together(*how, given.samples) for how in ((1, 1), (2, 1), (1, 2))
    )  # apart: what two processes cost each other by memory and caches
    ceiling = sum(one["cpu seconds"] for one in apart) / len(apart)
    slower = max(one["cpu seconds"] for one in ranks)
    own = sum(one["cpu seconds"] - one["shared"] for one in ranks) / len(ranks)
    return {
        "samples": given.samples,
        "one process": alone,
        "two at once that share nothing, each for all samples": apart,
        "two ranks": ranks,
        "parallel efficiency": alone["cpu seconds"] / (2 * slower),
        "parallel efficiency against two processes at once": ceiling / (2 * slower),
        "parallel efficiency against what two ranks do, done once": (
            own + sum(one["shared"] for one in ranks)
        )
        / (2 * slower),
    }


def _build_together(groups: int, ranks: int, samples: int) -> list[dict[str, float]]:
    """Return the CPU seconds of each process of so many groups of ranks, all at the same time."""
    with tempfile.TemporaryDirectory() as temporary:
        running = []
        for group in range(groups):
            folder = Path(temporary) / str(group)
            folder.mkdir()
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            script = [__file__, "build", "--folder", str(folder), "--samples", str(samples)]
            command = [sys.executable, *launcher, *script]
            running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        if any(process.wait() for process in running):
            raise RuntimeError("A process failed: build by hand says why.")
        return [json.loads(path.read_text()) for path in sorted(Path(temporary).glob("*/rank-*.json"))]


def build(given: argparse.Namespace) -> dict[str, Any]:
    """Build an index in one of the processes that torchrun started."""
    torch.set_num_threads(1)
    chance = torch.Generator().manual_seed(0)
    x, y = torch.randn(given.samples, 3, 32, 32, generator=chance), torch.arange(given.samples) % 10
    net, folder = _random_network(), Path(given.folder)
    with process_group():
        begun = time.process_time()
        with record_passes(time.process_time) as passes:
            lw.build_index(net, (x, y), folder / "index", pictures=False)
        own = {
            "cpu seconds": round(time.process_time() - begun, 2),
            "shared": round(sum(one.cost for one in passes if one.what in SHARED), 2),
        }
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


def _compare_sketches(index: lw.Index, new: Any, exact: Any, best: Any) -> dict[str, Any]:
    kept = index.nearest(new)
    deviations, errors = _deviations(index, new[:COVERED], exact[:COVERED])
    overlap = (kept.indices[:, :, None] == best[:, None]).any(1).double().mean()
    return {
        "top-10 kept by sketches": float(overlap),
        "coverage of ±1.96 standard errors": float((deviations.abs() <= 1.96).double().mean()),
        "root mean square error in standard errors": float(deviations.square().mean().sqrt()),
        "median standard error": float(errors.median()),
    }


def _query_seconds(index: lw.Index, new: Any) -> dict[str, float]:
    """Return the median wall and CPU seconds of a question about one input, its gradient included."""
    times = []
    for i in range(min(len(new), 11)):
        clock = time.perf_counter(), time.process_time()
        index.nearest(new[i : i + 1])
        times.append((time.perf_counter() - clock[0], time.process_time() - clock[1]))
    wall, cpu = (sorted(part)[len(part) // 2] for part in zip(*times, strict=True))
    return {"wall": round(wall, 4), "cpu": round(cpu, 4), "threads": torch.get_num_threads()}


def _compare_reranked(reranked: dict[str, torch.Tensor], exact: Any, best: Any) -> dict[str, Any]:
    indices = reranked["indices"]
    same = [set(a) == set(b) for a, b in zip(indices.tolist(), best.tolist(), strict=True)]
    equal = [a or b for a, b in zip(same, _ties(exact, indices, best), strict=True)]
    return {
        "top-10 equal after exact re-ranking": sum(same) / len(same),
        "top-10 equal, or similarities equal to 1e-6": sum(equal) / len(equal),
        "seconds to re-rank, the first pass over the data included": float(reranked["seconds"]),
        "largest difference of exact similarities": float(
            (reranked["similarities"] - exact.gather(1, indices)).abs().max()
        ),
    }


def _deviations(index: lw.Index, new: Any, exact: Any) -> tuple[Any, Any]:
    """Return the errors of similarities of inputs with random rows, in standard errors, and these."""
    rows = torch.randperm(len(index), generator=torch.Generator().manual_seed(0))[:2000]
    sketches = index.projector(lw.batches(new)).project_all(lw.batches(new)).sketches.double()
    mean = index._columns.mean
    one, other = (F.normalize(part - mean, dim=1) for part in (sketches, index.sketches(rows)))
    errors = index._standard_errors(sketches, rows.expand(len(new), -1), centered=True)
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
    _replace_rows(folder, n, dtype)


def _replace_rows(folder: Path, n: int, dtype: str) -> None:
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
    "coverage": coverage,
    "peers": peers,
    "processes": processes,
    "ask": ask,
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
    arguments.add_argument(
        "--fitted", type=int, help="images: train on so many of the samples; all if left out"
    )
    arguments.add_argument("--seeds", type=int, default=12, help="coverage: projections of each network")
    arguments.add_argument(
        "--compared", type=int, default=128, help="coverage: samples that are compared exactly"
    )
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--profile", action="store_true", help="images: where the time of building goes")
    arguments.add_argument("--float32", action="store_true", help="on a GPU: no TF32 in convolutions")
    arguments.add_argument("--dtype", default="float16")
    arguments.add_argument("--rows", type=int, nargs="+", default=[10_000, 50_000, 1_000_000])
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--folder", help="images: keeps the network, exact similarities and indexes here")
    arguments.add_argument("--rerank", nargs="*", default=["float16", "int8"], help="of which dtypes")
    arguments.add_argument("--out", type=Path, default=Path("out/cifar10.npz"))
    given = arguments.parse_args()
    if given.what != "query" and given.device == "cpu":
        torch.set_num_threads(1)
    elif given.what != "query":
        torch.set_num_threads(2)  # some machines with a GPU begin with one, others with all cores
    if given.float32:
        torch.backends.cudnn.allow_tf32 = False
    print(json.dumps(COMMANDS[given.what](given), indent=1))
