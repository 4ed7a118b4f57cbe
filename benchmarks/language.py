"""Language models: tokens a second to build an index, which texts to train on, and which texts are copies.

    python benchmarks/language.py speed [--device cuda] [--only 160m]       # --tiny: small shapes, for a CPU
    python benchmarks/language.py prepare [--texts out/language-texts.npz]  # collects texts of this machine
    python benchmarks/language.py quality [--device cuda] [--seeds 0 1 2 3 4]
    python benchmarks/language.py units [--seeds 200 201 202 203]           # small enough for a CPU
    python benchmarks/language.py copies [--device cuda]

speed: shapes of Pythia with random weights, in one process with a plain training step (forward and backward, no
optimizer) and with the recipe of bergson in plain torch (`bergson.py`), all of the same batches; on a CPU in seconds
of the process. Tracing and checking the model come first and are told apart.

prepare: docstrings and sources of Python packages, documentation of Debian packages and licenses, as bytes.

quality: a GPT on bytes is pretrained on a mixture of domains; 5 % of a pool are selected for targets of one domain, and
copies of the GPT are trained on them. Loss on held-out texts of that domain, in nats a byte.

units: what should be of length 1, a text's gradient, that of each layer, or of each hidden matrix? As quality, but
small: one GPT a seed is pretrained for all target domains, and rows are chosen as `likewise select` does at its
defaults, by the best target. Neither domains nor seeds are those that the choice was made on.

copies: texts with words dropped, shuffled or trimmed are planted in a pool; how many of them are among the ten nearest
of what they were made from.
"""

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from bergson import TextProjector
from records import FOLDER, add, lines
from torch import Tensor, nn
from torch.nn import functional as F

import likewise as lw
from likewise.data import batches
from likewise.gram import GramMatrix
from likewise.index.layers import LayerSettings, make_projector

VOCABULARY = 256  # bytes
PAD = 0


# ---- speed

SHAPES = {
    "70m": dict(hidden_size=512, num_hidden_layers=6, num_attention_heads=8, intermediate_size=2048),
    "160m": dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072),
    "1b": dict(hidden_size=2048, num_hidden_layers=16, num_attention_heads=8, intermediate_size=8192),
}
TINY = dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512)


class LowRank(nn.Module):
    """A frozen linear layer with an update of low rank, as LoRA has it; for machines without peft."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        like = dict(device=base.weight.device, dtype=base.weight.dtype)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False, **like)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, **like)
        nn.init.normal_(self.lora_B.weight, std=0.01)  # as after training: a zero B has no gradient in A

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x))


def add_low_rank(model: nn.Module, rank: int) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name != "embed_out":
                setattr(module, name, LowRank(child, rank))


def speed(given: argparse.Namespace) -> None:
    device = torch.device(given.device)
    dtype = torch.float32 if given.tiny or device.type == "cpu" else torch.bfloat16
    if device.type == "cpu":
        torch.set_num_threads(1)
    for shape, adapted in (("70m", False), ("160m", False), ("1b", False), ("1b", True)):
        name = f"{shape}{' lora' if adapted else ''}"
        if given.only in name:
            add(
                given.out,
                {
                    "what": "speed",
                    "shape": name,
                    "tokens": given.length,
                    "tiny": given.tiny,
                    **({"device": "cpu"} if device.type == "cpu" else {}),
                },
                **measure_speed(TINY if given.tiny else SHAPES[shape], adapted, device, dtype, given),
            )


def measure_speed(
    shape: dict[str, int], adapted: bool, device: torch.device, dtype: torch.dtype, given: argparse.Namespace
) -> dict[str, Any]:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    words = 503 if given.tiny else 50304
    config = GPTNeoXConfig(vocab_size=words, max_position_embeddings=2048, use_cache=False, **shape)
    with torch.device(device):
        model = GPTNeoXForCausalLM(config).to(dtype).eval()
    if adapted:
        add_low_rank(model, 8 if given.tiny else 128)
    n = given.batch * (given.repeats + 1)
    tokens = torch.randint(0, words, (n, given.length), generator=torch.Generator().manual_seed(0))
    plain, plain_peak = time_plain(model, tokens, device, given)
    found: dict[str, Any] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "plain tokens/s": given.batch * given.length / statistics.median(plain),
        "plain spread": max(plain) / min(plain) - 1,
        "plain peak MB": plain_peak / 1e6,
    }
    ways = [(projection, unit) for projection in given.projections for unit in given.units]
    for projection, unit in ways:
        way = projection if unit == "sample" else f"{projection}, unit {unit}"
        reset_peak(device)
        net = lw.Network(model, lw.sequence_log_likelihood())
        data = batches(tokens, given.batch)
        begun = now(device)
        gram = GramMatrix(net, data, max_memory=int(given.memory * 2**30))
        projector = make_projector(gram, given.width, 0, LayerSettings(projection, unit))
        seconds = []
        with net.evaluation_mode():
            sizes = {len(where) for where in projector.batches(data, range(given.batch))}
            for start in range(0, n, given.batch):
                if start == given.batch:
                    set_up = now(device) - begun
                first = now(device)
                for where in projector.batches(data, range(start, start + given.batch)):
                    projector.project(data.samples(where), where)
                seconds.append(now(device) - first)
            if given.profile:
                where = next(projector.batches(data, range(given.batch)))
                profile(partial(projector.project, data.samples(where), where), device)
            first = now(device)
            gram.engine.finish_checks()  # once a shard
            checks = now(device) - first
        mine = seconds[1:]
        found[way] = {
            "tokens/s": given.batch * given.length / statistics.median(mine),
            "of plain": statistics.median(plain) / statistics.median(mine),
            "spread": max(mine) / min(mine) - 1,
            "set-up s": set_up,
            "checks of a shard s": checks,
            "samples of a pass": max(sizes),
            "peak MB": peak(device) / 1e6,
            "bytes a sample": 2 * projector.width,
            "width": projector.width,
        }
        print(name_of(model), way, found[way], file=sys.stderr, flush=True)
    found["bergson's recipe"] = time_bergson(model, tokens, statistics.median(plain), device, given)
    print(name_of(model), "bergson's recipe", found["bergson's recipe"], file=sys.stderr, flush=True)
    return found


def time_bergson(
    model: nn.Module, tokens: Tensor, plain: float, device: torch.device, given: argparse.Namespace
) -> dict[str, Any]:
    """Return how fast the recipe of bergson projects each batch but the first, to the same number of numbers."""
    reset_peak(device)
    projector, size, seconds = TextProjector(model, given.width), given.plain_batch or given.batch, []
    with projector.hooks():
        for part in tokens.split(given.batch):
            begun = now(device)
            for some in part.split(size):
                projector.project(some.to(device)).half().cpu()
            seconds.append(now(device) - begun)
    mine = seconds[1:]
    return {
        "tokens/s": given.batch * given.length / statistics.median(mine),
        "of plain": plain / statistics.median(mine),
        "spread": max(mine) / min(mine) - 1,
        "samples of a pass": size,
        "peak MB": peak(device) / 1e6,
        "bytes a sample": 2 * projector.width,
        "width": projector.width,
    }


def profile(function: Callable[[], Any], device: torch.device) -> None:
    """Print which operations of one pass take the device's time, and which the host's."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as found:
        function()
        now(device)
    for order in ("self_cuda_time_total", "self_cpu_time_total")[device.type != "cuda" :]:
        table = found.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=60)
        print("\n".join(line[:180] for line in table.splitlines()), file=sys.stderr, flush=True)


def name_of(model: nn.Module) -> str:
    return f"{sum(p.numel() for p in model.parameters()) / 1e6:,.0f} M"


def time_plain(
    model: nn.Module, tokens: Tensor, device: torch.device, given: argparse.Namespace
) -> tuple[list[float], int]:
    """Return seconds of forward and backward for each batch but the first, and the peak memory."""
    reset_peak(device)
    wanted = [p for p in model.parameters() if p.requires_grad]
    seconds = []
    for part in tokens.split(given.batch):
        begun = now(device)
        for some in part.split(given.plain_batch or given.batch):
            here = some.to(device)
            logits = model(here).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), here[:, 1:].flatten())
            torch.autograd.grad(loss, wanted)
        seconds.append(now(device) - begun)
    return seconds[1:], peak(device)


def now(device: torch.device) -> float:
    """Return seconds: of the GPU's work, or of this process on a CPU that others share."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


# ---- texts


def prepare(given: argparse.Namespace) -> None:
    """Collect texts of several domains, as bytes, and write them as one array."""
    draw = random.Random(0)
    found: dict[str, list[bytes]] = {}
    for domain, pieces in domains().items():
        known = sorted(set(pieces))
        draw.shuffle(known)
        found[domain] = known[: given.per_domain]
        print(f"{domain}: {len(known):,} texts, {len(found[domain]):,} kept", file=sys.stderr)
    names = [name for name in found if len(found[name]) >= given.per_domain // 4]
    texts = [text for name in names for text in found[name]]
    given.texts.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        given.texts,
        bytes=np.frombuffer(b"".join(texts), np.uint8),
        lengths=np.array([len(text) for text in texts], np.int32),
        domain=np.array([i for i, name in enumerate(names) for _ in found[name]], np.int8),
        names=np.array(names),
    )
    print(f"{given.texts}: {len(texts):,} texts, {given.texts.stat().st_size / 1e6:.1f} MB", file=sys.stderr)


def domains() -> dict[str, list[bytes]]:
    import gzip
    import sysconfig

    packages = Path(sysconfig.get_paths()["purelib"])
    sources = sorted(packages.rglob("*.py"))[:6000]
    code, docs = [], []
    for path in sources:
        if path.stat().st_size > 200_000:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        docs += [p for p in text.split('"""')[1::2] if len(p) > 120]
        bare = "".join(text.split('"""')[::2])
        code += [bare[i : i + 400] for i in range(0, len(bare) - 400, 1600)]
    notes = [
        p.read_text(encoding="utf-8", errors="ignore")
        for pattern in ("*.md", "*.rst", "METADATA")
        for p in packages.rglob(pattern)
    ]
    licenses, debian, manuals = [], [], []
    for path in sorted(Path("/usr/share/doc").glob("*/*")):
        if not path.is_file() or path.stat().st_size > 500_000:
            continue
        raw = path.read_bytes()
        if path.suffix == ".gz":
            raw = gzip.decompress(raw)
        text = raw.decode("utf-8", errors="ignore")
        (licenses if "copyright" in path.name else debian).append(text)
    for path in packages.rglob("*LICENSE*"):
        if path.is_file() and path.stat().st_size < 200_000:
            licenses.append(path.read_text(encoding="utf-8", errors="ignore"))
    for path in sorted(Path("/usr/share").glob("man/man*/*.gz")):
        manuals.append(gzip.decompress(path.read_bytes()).decode("utf-8", errors="ignore"))
    locale = [
        p.read_text(encoding="utf-8", errors="ignore")
        for p in packages.rglob("*.json")
        if p.stat().st_size < 10**5
    ]
    html = [
        p.read_text(encoding="utf-8", errors="ignore")
        for pattern in ("*.js", "*.css", "*.html")
        for p in packages.rglob(pattern)
        if p.stat().st_size < 2 * 10**5
    ]
    kinds = {
        "python": code,
        "docstrings": docs,
        "readmes": pieces(notes),
        "licenses": pieces(licenses),
        "debian": pieces(debian),
        "manuals": pieces(manuals),
        "json": pieces(locale),
        "web": pieces(html),
    }
    return {name: [clean(text) for text in texts if len(clean(text)) >= 120] for name, texts in kinds.items()}


def pieces(texts: list[str]) -> list[str]:
    return [text[i : i + 400] for text in texts for i in range(0, min(len(text), 40_000) - 200, 400)]


def clean(text: str) -> bytes:
    return " ".join(text.split()).encode("ascii", errors="ignore").replace(b"\0", b"")[:256]


def load_texts(path: Path) -> tuple[list[bytes], np.ndarray, list[str]]:
    if not path.exists():
        raise SystemExit(f"There is no {path}: python benchmarks/language.py prepare")
    stored = np.load(path)
    ends = stored["lengths"].cumsum()
    whole = stored["bytes"].tobytes()
    texts = [
        whole[end - length : end]
        for end, length in zip(ends.tolist(), stored["lengths"].tolist(), strict=True)
    ]
    return texts, stored["domain"], [str(name) for name in stored["names"]]


def as_tokens(texts: list[bytes], length: int) -> dict[str, Tensor]:
    """Return texts as bytes, padded on the right."""
    ids = torch.full((len(texts), length), PAD)
    for i, text in enumerate(texts):
        ids[i, : min(length, len(text))] = torch.tensor(list(text[:length]))
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def rows_of(data: dict[str, Tensor], where: Any) -> dict[str, Tensor]:
    return {name: value[where] for name, value in data.items()}


# ---- models


def gpt(width: int, layers: int, length: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    off = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=length,
            n_embd=width,
            n_layer=layers,
            n_head=width // 32,
            bos_token_id=PAD,
            eos_token_id=PAD,
            **off,
        )
    )


def losses(model: nn.Module, data: dict[str, Tensor], size: int = 256) -> Tensor:
    """Return the mean loss of each text, (n,)."""
    device, found = next(model.parameters()).device, []
    with torch.no_grad():
        for start in range(0, len(data["input_ids"]), size):
            part = {k: v[start : start + size].to(device) for k, v in data.items()}
            found.append(_loss(model, part).cpu())
    return torch.cat(found)


def _loss(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
    ids, mask = part["input_ids"], part["attention_mask"][:, 1:]
    logits = model(**part).logits[:, :-1].float()
    each = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view_as(mask)
    return (each * mask).sum(1) / mask.sum(1)


def train(
    model: nn.Module, data: dict[str, Tensor], steps: int, rate: float, seed: int, size: int = 32
) -> torch.optim.Optimizer:
    """Train a model in place for some steps of AdamW with a linear schedule, and return the optimizer."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    n, order = len(data["input_ids"]), torch.zeros(0, dtype=torch.int64)
    model.train()
    for step in range(steps):
        if len(order) < size:
            order = torch.cat([order, torch.randperm(n, generator=generator)])
        where, order = order[:size], order[size:]
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 20) * (1 - step / steps)
        optimizer.zero_grad()
        _loss(model, {k: v[where].to(device) for k, v in data.items()}).mean().backward()
        optimizer.step()
    model.eval()
    return optimizer


# ---- ways to rank a pool: each returns (targets, pool) similarities

Ranker = Callable[[], Tensor]


def bm25(targets: list[bytes], pool: list[bytes]) -> Tensor:
    """Return Okapi BM25 of each target as the query, over words, k1 = 1.2, b = 0.75."""
    words = [Counter(text.lower().split()) for text in pool]
    lengths = np.array([sum(count.values()) for count in words], float)
    postings: dict[bytes, list[tuple[int, int]]] = {}
    for i, counts in enumerate(words):
        for word, times in counts.items():
            postings.setdefault(word, []).append((i, times))
    scores = np.zeros((len(targets), len(pool)), np.float32)
    norm = 1.2 * (0.25 + 0.75 * lengths / lengths.mean())
    for t, text in enumerate(targets):
        for word in set(text.lower().split()):
            found = postings.get(word)
            if found:
                places, times = (np.array(v) for v in zip(*found, strict=True))
                rarity = math.log(1 + (len(pool) - len(found) + 0.5) / (len(found) + 0.5))
                scores[t, places] += rarity * times * 2.2 / (times + norm[places])
    return torch.from_numpy(scores)


def gradient_similarity(
    models: list[tuple[nn.Module, Any, float]],
    targets: dict[str, Tensor],
    pool: dict[str, Tensor],
    *,
    width: int = 2048,
    projection: str = "signs",
    adam: bool = False,
    centered: bool = True,
    unit: str = "sample",
) -> Tensor:
    """Return similarities of indexes, averaged over checkpoints by their learning rates."""
    total = torch.zeros(len(targets["input_ids"]), len(pool["input_ids"]), dtype=torch.float64)
    weight = sum(rate for _, _, rate in models)
    for model, optimizer, rate in models:
        with tempfile.TemporaryDirectory() as folder:
            index = lw.build_index(
                model,
                pool,
                folder,
                readout=lw.sequence_log_likelihood(),
                width=width,
                projection=projection,  # type: ignore[arg-type]
                unit=unit,  # type: ignore[arg-type]
                optimizer_state=optimizer if adam else None,
                pictures=False,
                max_memory=2**33 if next(model.parameters()).is_cuda else 2**30,
            )
            total += rate / weight * _dense(index, targets, centered)
    return total


def _dense(index: lw.Index, targets: dict[str, Tensor], centered: bool) -> Tensor:
    from likewise.index.selection import _Matrix

    matrix = _Matrix()
    index.pairs(targets, centered=centered).visit(matrix)
    return torch.cat(matrix.strips).double()


def hidden_similarity(model: nn.Module, targets: dict[str, Tensor], pool: dict[str, Tensor]) -> Tensor:
    """Return RDS+: cosines of the last hidden states, their mean weighted by position."""
    one, other = (lw.pooled_states(model, data) for data in (targets, pool))
    return (one @ other.T).double()


# ---- quality


def quality(given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    texts, domain, names = load_texts(given.texts)
    done = [line["setting"] for line in lines(given.out)]
    for seed in given.seeds:
        for target in given.targets or names:
            setting = {"what": "quality", "target": target, "seed": seed, "pool": given.pool}
            if setting not in done:
                add(given.out, setting, **select_and_train(texts, domain, names, target, seed, given))


def select_and_train(
    texts: list[bytes],
    domain: np.ndarray,
    names: list[str],
    target: str,
    seed: int,
    given: argparse.Namespace,
) -> dict[str, Any]:
    device, draw = torch.device(given.device), np.random.default_rng(seed)
    torch.manual_seed(seed)
    places = {i: draw.permutation(np.flatnonzero(domain == i)) for i in range(len(names))}
    own = names.index(target)
    queries, held_out = places[own][:32], places[own][32:432]
    rest = np.concatenate([places[own][432:], *(places[i] for i in places if i != own)])
    rest = draw.permutation(rest)
    pool, before = rest[: given.pool], rest[given.pool : given.pool + given.pretraining]
    data = as_tokens(texts, given.length)
    model = gpt(given.width, given.layers, given.length).to(device)
    # Two checkpoints of pretraining, each with the state of its optimizer, as LESS has them.
    checkpoints = []
    for part, rate in enumerate((1e-3, 5e-4)):
        optimizer = train(model, rows_of(data, before), given.steps // 2, rate, seed + part)
        checkpoints.append((_copy(model, device, given), optimizer_state(model, optimizer), rate))
    wanted = max(1, len(pool) // 20)
    queried, pooled = rows_of(data, queries), rows_of(data, pool)
    last = checkpoints[-1:]
    rankers: dict[str, Ranker] = {
        "ours": lambda: gradient_similarity(last, queried, pooled),
        "ours two-sided": lambda: gradient_similarity(last, queried, pooled, projection="two-sided"),
        "less": lambda: gradient_similarity(checkpoints, queried, pooled, adam=True, centered=False),
        "ours, not centered": lambda: gradient_similarity(last, queried, pooled, centered=False),
        "ours by layer": lambda: gradient_similarity(last, queried, pooled, unit="layer"),
        "ours by layer, not centered": lambda: gradient_similarity(
            last, queried, pooled, unit="layer", centered=False
        ),
        "ours with Adam": lambda: gradient_similarity(last, queried, pooled, adam=True),
        "less, one checkpoint": lambda: gradient_similarity(last, queried, pooled, adam=True, centered=False),
        "rds+": lambda: hidden_similarity(last[0][0], queried, pooled),
        "bm25": lambda: bm25([texts[i] for i in queries], [texts[i] for i in pool]),
    }
    asked = given.ways or list(rankers)
    chosen = {name: choose(rankers[name](), wanted) for name in asked}
    chosen["random"] = torch.from_numpy(draw.permutation(len(pool))[:wanted])
    chosen["same domain"] = torch.from_numpy(np.flatnonzero(domain[pool] == own)[:wanted])
    test = rows_of(data, held_out)
    found: dict[str, Any] = {"before": float(losses(last[0][0], test).mean()), "chosen": wanted}
    for name, rows in chosen.items():
        tuned = _copy(model, device, given)
        train(tuned, rows_of(pooled, rows), given.tuning, 5e-4, seed)
        found[name] = {
            "loss": float(losses(tuned, test).mean()),
            "of the domain": float((domain[pool][rows] == own).mean()),
        }
    return found


def choose(similarity: Tensor, wanted: int) -> Tensor:
    """Return the rows that targets choose in turn: the same rule for every way to rank."""
    rankings = similarity.argsort(1, descending=True).tolist()
    chosen: dict[int, None] = {}
    for place in range(similarity.shape[1]):
        for ranking in rankings:
            if len(chosen) == wanted:
                return torch.tensor(list(chosen))
            chosen.setdefault(ranking[place])
    return torch.tensor(list(chosen))


def _copy(model: nn.Module, device: torch.device, given: argparse.Namespace) -> nn.Module:
    other = gpt(given.width, given.layers, given.length).to(device).eval()
    other.load_state_dict(model.state_dict(), strict=False)
    return other


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        name: {key: value.clone() for key, value in optimizer.state[p].items()}
        for name, p in model.named_parameters()
    }


# ---- units

SMALL = dict(width=96, layers=2, length=64)


class Pretrained(NamedTuple):
    """A small network with what it was not trained on: targets and held-out texts of some domains, and a pool."""

    checkpoints: list[tuple[nn.Module, Any, float]]
    targets: dict[str, np.ndarray]
    held_out: dict[str, np.ndarray]
    pool: np.ndarray


def units(given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    vars(given).update(SMALL)
    texts, domain, names = load_texts(given.texts)
    done = [line["setting"] for line in lines(given.out)]
    wanted = given.targets or ["licenses", "readmes", "web", "manuals"]
    for seed in given.seeds:
        settings = {name: {"what": "units", "target": name, "seed": seed, "pool": 1500} for name in wanted}
        if all(setting in done for setting in settings.values()):
            continue
        start = pretrain(domain, names, as_tokens(texts, given.length), wanted, seed, given)
        for name, found in compare_units(texts, domain, names, start, seed, given).items():
            add(given.out, settings[name], **found)


def pretrain(
    domain: np.ndarray,
    names: list[str],
    data: dict[str, Tensor],
    wanted: list[str],
    seed: int,
    given: argparse.Namespace,
) -> Pretrained:
    """Return two checkpoints of a network that was trained on 8,000 texts for 1,600 steps."""
    draw = np.random.default_rng(seed)
    torch.manual_seed(seed)
    places = {name: draw.permutation(np.flatnonzero(domain == i)) for i, name in enumerate(names)}
    targets = {name: places[name][:32] for name in names if name in wanted}
    held_out = {name: places[name][32:232] for name in targets}
    rest = draw.permutation(np.concatenate([places[n][232 if n in targets else 0 :] for n in names]))
    model, checkpoints = gpt(given.width, given.layers, given.length), []
    for part, rate in enumerate((2e-3, 1e-3)):
        optimizer = train(model, rows_of(data, rest[1500:9500]), 800, rate, seed + part)
        checkpoints.append(
            (_copy(model, torch.device("cpu"), given), optimizer_state(model, optimizer), rate)
        )
    return Pretrained(checkpoints, targets, held_out, rest[:1500])


def compare_units(
    texts: list[bytes],
    domain: np.ndarray,
    names: list[str],
    start: Pretrained,
    seed: int,
    given: argparse.Namespace,
) -> dict[str, dict[str, Any]]:
    """Return, for each target domain, how well each way chooses."""
    data, draw = as_tokens(texts, given.length), np.random.default_rng(seed + 1000)
    queries, pool, last = np.concatenate(list(start.targets.values())), start.pool, start.checkpoints[-1:]
    asked, pooled = rows_of(data, queries), rows_of(data, pool)
    similarity = {
        unit: gradient_similarity(last, asked, pooled, width=1024, unit=unit)
        for unit in ("sample", "layer", "matrix")
    }
    similarity["less"] = gradient_similarity(
        start.checkpoints, asked, pooled, width=1024, adam=True, centered=False, unit="sample"
    )
    similarity["rds+"] = hidden_similarity(last[0][0], asked, pooled)
    states = [lw.pooled_states(last[0][0], part) for part in (asked, pooled)]
    one, other = (F.normalize(part - states[1].mean(0), dim=1) for part in states)
    similarity["rds+, centered"] = (one @ other.T).double()
    similarity["bm25"] = bm25([texts[i] for i in queries], [texts[i] for i in pool]).double()
    similarity["matrix and rds+"] = sum(
        similarity[name].argsort(1).argsort(1).double() for name in ("matrix", "rds+")
    )
    wanted, results = len(pool) // 20, {}
    for place, target in enumerate(start.targets):
        own = domain[pool] == names.index(target)
        some = {name: one[32 * place : 32 * (place + 1)] for name, one in similarity.items()}
        rows = {name: one.amax(0).argsort(descending=True)[:wanted] for name, one in some.items()}
        rows["random"] = torch.from_numpy(draw.permutation(len(pool))[:wanted])
        rows["same domain"] = torch.from_numpy(np.flatnonzero(own)[:wanted])
        test = rows_of(data, start.held_out[target])
        found: dict[str, Any] = {"before": float(losses(last[0][0], test).mean()), "chosen": wanted}
        for name, chosen in rows.items():
            tuned = _copy(last[0][0], torch.device("cpu"), given)
            train(tuned, rows_of(pooled, chosen), 25, 5e-4, seed)
            found[name] = {
                "loss": float(losses(tuned, test).mean()),
                "of the domain": float(own[chosen].mean()),
            }
            if name in some:
                found[name]["in turn"] = float(own[choose(some[name], wanted)].mean())
                found[name]["by mean"] = float(
                    own[some[name].mean(0).argsort(descending=True)[:wanted]].mean()
                )
        results[target] = found
    return results


# ---- copies


def copies(given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    texts = load_texts(given.texts)[0]
    for seed in given.seeds:
        setting = {"what": "copies", "pool": given.pool, "originals": given.copies, "seed": seed}
        add(given.out, setting, **find_copies(texts, seed, given))


def find_copies(texts: list[bytes], seed: int, given: argparse.Namespace) -> dict[str, Any]:
    draw, device = random.Random(seed), torch.device(given.device)
    torch.manual_seed(seed)
    order = draw.sample(range(len(texts)), len(texts))
    originals = [i for i in order if len(texts[i].split()) >= 16][: given.copies]
    apart = set(originals)
    pool = [texts[i] for i in order if i not in apart][: given.pool]
    kinds = {"trimmed": trim, "half of the words": drop_words, "shuffled": shuffle_words}
    planted = [make(texts[i], draw) for make in kinds.values() for i in originals]
    asked, every = [texts[i] for i in originals], [*pool, *planted]
    everything, queries = as_tokens(every, given.length), as_tokens(asked, given.length)
    model = gpt(given.width, given.layers, given.length).to(device)
    train(model, rows_of(everything, slice(0, len(pool))), given.steps, 1e-3, seed)
    rankers: dict[str, Ranker] = {
        "ours": lambda: gradient_similarity([(model, None, 1.0)], queries, everything),
        "ours by matrix": lambda: gradient_similarity(
            [(model, None, 1.0)], queries, everything, unit="matrix"
        ),
        "rds+": lambda: hidden_similarity(model, queries, everything),
        "bm25": lambda: bm25(asked, every),
    }
    found: dict[str, Any] = {}
    for name, rank in rankers.items():
        nearest = rank().topk(10, dim=1).indices
        found[name] = {}
        for place, kind in enumerate(kinds):
            own = len(pool) + place * len(originals) + torch.arange(len(originals))
            found[name][kind] = float((nearest == own[:, None]).any(1).double().mean())
    return found


def trim(text: bytes, draw: random.Random) -> bytes:
    """Return the middle half of the words."""
    words = text.split()
    start = draw.randint(0, len(words) - len(words) // 2)
    return b" ".join(words[start : start + len(words) // 2])


def drop_words(text: bytes, draw: random.Random) -> bytes:
    """Return the text without half of its words."""
    words = text.split()
    kept = sorted(draw.sample(range(len(words)), len(words) // 2))
    return b" ".join(words[i] for i in kept)


def shuffle_words(text: bytes, draw: random.Random) -> bytes:
    """Return the text with runs of four words in another order."""
    words = text.split()
    runs = [words[i : i + 4] for i in range(0, len(words), 4)]
    draw.shuffle(runs)
    return b" ".join(word for run in runs for word in run)


# ---- summaries


def summary(given: argparse.Namespace) -> None:
    """Print medians, and means with intervals over seeds."""
    for line in lines(given.out):
        if line["setting"]["what"] == "speed":
            print(json.dumps(line, indent=1))
    for what in ("quality", "units", "copies"):
        for group, rows in grouped(what, lines(given.out)):
            print(what, group, f"{len(rows)} seeds")
            for name in rows[0]:
                print(
                    f"  {name:20}",
                    *(interval([row[name][key] for row in rows], key) for key in rows[0][name]),
                )


def grouped(what: str, every: list[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    chosen = [line for line in every if line["setting"]["what"] == what]
    keys = [json.dumps({k: v for k, v in line["setting"].items() if k != "seed"}) for line in chosen]
    for key in dict.fromkeys(keys):
        rows = [line for line, own in zip(chosen, keys, strict=True) if own == key]
        yield key, [{k: v for k, v in row.items() if isinstance(v, dict) and k != "setting"} for row in rows]


def interval(values: list[float], name: str) -> str:
    mean = statistics.mean(values)
    if len(values) < 2:
        return f"{name} {mean:.3f}"
    half = (
        {2: 12.7, 3: 4.30, 4: 3.18, 5: 2.78}.get(len(values), 2.3)
        * statistics.stdev(values)
        / len(values) ** 0.5
    )
    return f"{name} {mean:.3f} ± {half:.3f}"


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("what", choices=["speed", "prepare", "quality", "units", "copies", "summary"])
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments.add_argument("--out", type=Path, default=FOLDER / "language.jsonl")
    arguments.add_argument("--only", default="", help="speed: shapes that contain this")
    arguments.add_argument("--tiny", action="store_true", help="speed: small shapes")
    arguments.add_argument("--length", type=int, default=None, help="tokens of a text")
    arguments.add_argument("--batch", type=int, default=16, help="speed: texts of a batch")
    arguments.add_argument(
        "--plain-batch", type=int, default=None, help="speed: of the plain step, if smaller"
    )
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--memory", type=float, default=64, help="speed: max_memory in GiB")
    arguments.add_argument("--profile", action="store_true", help="speed: what one pass consists of")
    arguments.add_argument("--projections", nargs="+", default=["two-sided", "signs"])
    arguments.add_argument(
        "--units", nargs="+", default=["sample", "matrix"], help="speed: what is of length 1"
    )
    arguments.add_argument(
        "--width", type=int, default=None, help="of a sketch (speed), of the GPT (quality)"
    )
    arguments.add_argument("--layers", type=int, default=4)
    arguments.add_argument("--texts", type=Path, default=Path("out/language-texts.npz"))
    arguments.add_argument("--per-domain", type=int, default=6000)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    arguments.add_argument("--targets", nargs="*", default=[], help="domains")
    arguments.add_argument(
        "--ways", nargs="*", default=[], help="quality: ways to choose; all if none is named"
    )
    arguments.add_argument("--pool", type=int, default=8000)
    arguments.add_argument("--pretraining", type=int, default=8000)
    arguments.add_argument("--steps", type=int, default=1500)
    arguments.add_argument("--tuning", type=int, default=150)
    arguments.add_argument("--copies", type=int, default=200)
    given = arguments.parse_args()
    is_speed = given.what == "speed"
    given.length = given.length or (1024 if is_speed and not given.tiny else 128)
    given.width = given.width or (1024 if is_speed else 192)
    commands = {"speed": speed, "prepare": prepare, "quality": quality, "units": units, "copies": copies}
    {**commands, "summary": summary}[given.what](given)


if __name__ == "__main__":
    main()
