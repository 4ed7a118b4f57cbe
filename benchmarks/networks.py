"""What do the statistics of common networks cost, in plain epochs of forward and backward passes?

ResNet-50, ViT-B/16 and GPT-2 small with random weights and inputs: what is measured is time and memory. A plain epoch
is a forward and a backward pass of the loss in evaluation mode, in batches of the same size. PyTorch's default
precision unless a row says float32: convolutions in TF32, matrix products in float32.

    python benchmarks/networks.py --device cuda                      all rows, under 8 minutes on an H200
    python benchmarks/networks.py --device cuda --rows soft-resnet50-60,soft-vit
    python benchmarks/networks.py --device cuda --profile soft-resnet50-60    where the time of one row goes
    python benchmarks/networks.py --tiny                             small networks on a CPU: does it run?

A row that fails says so and the others go on.
"""

import argparse
import gc
import statistics
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import likewise as lw
from likewise.gram import pair_source
from likewise.statistics.neighbors import NearestReducer

GIB = 2**30


class Bottleneck(nn.Module):
    """Three convolutions, the middle one narrow, and a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        same = stride == 1 and inputs == outputs
        projection = (
            [] if same else [nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)]
        )
        self.shortcut = nn.Sequential(*projection)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layers(x) + self.shortcut(x), inplace=True)


def resnet(blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> nn.Module:
    """Return a ResNet of bottlenecks; ResNet-50 by default."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = width
    for stage, count in enumerate(blocks):
        for i in range(count):
            layers.append(Bottleneck(inputs, width * 2**stage, 2 if stage and not i else 1))
            inputs = 4 * width * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class TransformerBlock(nn.Module):
    """Attention and a multilayer perceptron, each after a norm and beside a shortcut."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(attended.transpose(1, 2).reshape(n, t, c))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """ViT-B/16 by default."""

    def __init__(
        self,
        depth: int = 12,
        width: int = 768,
        heads: int = 12,
        patch: int = 16,
        side: int = 224,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, 1 + (side // patch) ** 2, width) * 0.02)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, causal=False) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.positions
        return self.head(self.norm(self.blocks(tokens))[:, 0])


class LanguageModel(nn.Module):
    """GPT-2 small by default, its head tied to its embedding."""

    def __init__(
        self, depth: int = 12, width: int = 768, heads: int = 12, vocabulary: int = 50_257, length: int = 1024
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, causal=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, input_ids: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.blocks(self.tokens(input_ids) + self.positions(places))
        return F.linear(self.norm(hidden), self.tokens.weight)


class Task(NamedTuple):
    """A network, its data, and how it is read."""

    model: nn.Module
    inputs: Any  # as likewise.batches takes them
    readout: Any
    loss: Callable[[slice], Tensor]  # of some samples, for the plain epoch
    n: int


def images_task(model: nn.Module, n: int, side: int, classes: int, device: str) -> Task:
    model = model.to(device).eval()
    x, y = torch.randn(n, 3, side, side, device=device), torch.arange(n, device=device) % classes
    return Task(
        model, (x, y), lw.label_against_rest, lambda part: F.cross_entropy(model(x[part]), y[part]), n
    )


def text_task(model: nn.Module, n: int, length: int, vocabulary: int, device: str) -> Task:
    model = model.to(device).eval()
    tokens = torch.randint(0, vocabulary, (n, length), device=device)

    def loss(part: slice) -> Tensor:
        return F.cross_entropy(model(tokens[part])[:, :-1].flatten(0, 1), tokens[part, 1:].flatten())

    return Task(model, {"input_ids": tokens}, lw.sequence_log_likelihood(), loss, n)


def resnet50_task(n: int, device: str, tiny: bool) -> Task:
    if tiny:
        return images_task(resnet((1, 1, 1, 1), 8, 10), n, 32, 10, device)
    return images_task(resnet(), n, 224, 1000, device)


def vit_task(n: int, device: str, tiny: bool) -> Task:
    if tiny:
        return images_task(VisionTransformer(2, 32, 4, 8, 32, 10), n, 32, 10, device)
    return images_task(VisionTransformer(), n, 224, 1000, device)


def gpt2_task(n: int, device: str, tiny: bool) -> Task:
    if tiny:
        return text_task(LanguageModel(2, 32, 4, 500, 16), n, 16, 500, device)
    return text_task(LanguageModel(), n, 512, 50_257, device)


def soft(gram: lw.GramMatrix) -> Tensor:
    return lw.soft_neighbors(gram)


def nearest(gram: lw.GramMatrix) -> Tensor:
    return lw.nearest(gram, 10, sketch=None).similarities


def sketched(gram: lw.GramMatrix) -> Tensor:
    """Return neighbors by sketches, without the standard errors that 64 exact comparisons tell."""
    forget_sketches(gram)
    (found,) = pair_source(gram, 1024).visit(NearestReducer(10))
    return found[1]


def sketched_with_errors(gram: lw.GramMatrix) -> Tensor:
    forget_sketches(gram)
    found = lw.nearest(gram, 10, sketch=1024)
    return torch.stack([found.similarities, found.errors])


def forget_sketches(gram: lw.GramMatrix) -> None:
    """Have sketches computed again: a matrix keeps them for its other statistics."""
    gram.sketch_cache = type(gram.sketch_cache)()


class Row(NamedTuple):
    """One line of the table."""

    task: Callable[[int, str, bool], Task]
    statistic: Callable[[lw.GramMatrix], Tensor]
    n: int
    batch: int
    gib: float  # max_memory
    goal: float | None  # plain epochs
    float32: bool = False  # throughout


ROWS = {
    "soft-resnet50-60": Row(resnet50_task, soft, 1024, 64, 60, 2.5),
    "soft-resnet50-8": Row(resnet50_task, soft, 1024, 64, 8, 3),
    "soft-resnet50-float32": Row(resnet50_task, soft, 1024, 256, 100, 2.2, float32=True),
    "soft-vit": Row(vit_task, soft, 512, 64, 60, 2.3),
    "soft-gpt2": Row(gpt2_task, soft, 128, 16, 60, 2.3),
    "nearest-resnet50": Row(resnet50_task, nearest, 1024, 64, 60, 5),
    "nearest-vit": Row(vit_task, nearest, 512, 64, 60, 4),
    "sketch-resnet50": Row(resnet50_task, sketched, 1024, 64, 60, 1.5),
    "sketch-vit": Row(vit_task, sketched, 512, 64, 60, 1.5),
    "errors-resnet50": Row(resnet50_task, sketched_with_errors, 1024, 64, 60, None),
}


@contextmanager
def precision(float32: bool):
    """PyTorch's default precision, or float32 throughout."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = not float32, False
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


class Clock:
    """Wall-clock seconds on a GPU, its work included; CPU seconds elsewhere."""

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda

    def __call__(self, function: Callable[[], Any]) -> float:
        start = self._now()
        function()
        return self._now() - start

    def repeat(self, function: Callable[[], Any], repeats: int, limit: float) -> list[float]:
        """Return the seconds of a few runs; of one if it takes longer than the limit."""
        seconds = [self(function)]
        while len(seconds) < repeats and sum(seconds) + seconds[-1] < limit:
            seconds.append(self(function))
        return seconds

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter() if self._cuda else time.process_time()


def measure(name: str, row: Row, a: argparse.Namespace) -> str:
    """Return the line of one row."""
    cuda, clock = a.device == "cuda", Clock(a.device == "cuda")
    torch.manual_seed(0)
    n = a.samples or (16 if a.tiny else row.n)
    batch = min(n, row.batch)
    task = row.task(n, a.device, a.tiny)

    def epoch() -> None:
        for start in range(0, n, batch):
            task.model.zero_grad(set_to_none=True)
            task.loss(slice(start, start + batch)).backward()

    with precision(row.float32):
        epoch()
        unit = statistics.median(clock.repeat(epoch, 3, 15))
        task.model.zero_grad(set_to_none=True)
        if cuda:
            torch.cuda.empty_cache()
        gram = matrix(task, batch, row)
        before = torch.cuda.memory_allocated() if cuda else 0
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        setup = clock(lambda: gram.engine)
        first = clock(lambda: row.statistic(gram))
        seconds = clock.repeat(lambda: row.statistic(gram), a.repeats, a.limit)
    peak = (torch.cuda.max_memory_allocated() - before) / GIB if cuda else float("nan")
    median, spread = statistics.median(seconds), max(seconds) - min(seconds)
    problem = gram.engine.graphs.problem if gram.engine.name == "layers" else "reference engine"
    return (
        f"{name:22} {median / unit:6.2f} epochs (goal {row.goal or 'none'}, spread {spread / unit:.2f}, "
        f"first {first / unit:.2f}), "
        f"epoch {unit:.3f} s, set-up {setup:.2f} s, chunks of {gram.engine.batch_size}, "
        f"peak {peak:.1f} of {row.gib:g} GiB, engine {gram.engine.name}"
        + (f", not recorded: {problem}" if cuda and problem else "")
    )


def matrix(task: Task, batch: int, row: Row) -> lw.GramMatrix:
    data = lw.batches(task.inputs, batch)
    return lw.GramMatrix(lw.Network(task.model, task.readout), data, max_memory=int(row.gib * GIB))


def profile(name: str, row: Row, a: argparse.Namespace) -> None:
    """Print where the time of one row goes: operations by their time on the device and on the CPU."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    cuda = a.device == "cuda"
    n = a.samples or (16 if a.tiny else min(row.n, 256))
    task = row.task(n, a.device, a.tiny)
    with precision(row.float32):
        gram = matrix(task, min(n, row.batch), row)
        row.statistic(gram)
        kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
        clock = Clock(cuda)
        plain = clock(lambda: row.statistic(gram))
        with record(activities=kinds) as recorded:
            seconds = clock(lambda: row.statistic(gram))
    averages = recorded.key_averages()
    device = sum(event.self_device_time_total for event in averages) / 1e6
    cpu = sum(event.self_cpu_time_total for event in averages) / 1e6
    calls = sum(event.count for event in averages)
    print(
        f"{name}, {n} samples, chunks of {gram.engine.batch_size}: {plain:.3f} s ({seconds:.3f} s while recorded), "
        f"device busy {device:.3f} s, operations on the CPU {cpu:.3f} s, {calls} calls"
    )
    keys = ["self_device_time_total"] if cuda else []
    for key in [*keys, "self_cpu_time_total"]:
        print(averages.table(sort_by=key, row_limit=a.top, max_name_column_width=60))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", default=",".join(ROWS), help="names, separated by commas")
    parser.add_argument("--profile", metavar="ROW", help="profile one row instead")
    parser.add_argument("--top", type=int, default=25, help="operations shown by --profile")
    parser.add_argument("--samples", type=int, help="instead of those of the rows")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=20, help="seconds after which a row is not repeated")
    parser.add_argument("--tiny", action="store_true", help="small networks and data")
    a = parser.parse_args()
    if a.device == "cpu":
        torch.set_num_threads(1)
    name = torch.cuda.get_device_name() if a.device == "cuda" else "CPU, one thread"
    print(f"{name}, torch {torch.__version__}, likewise {lw.__version__}", flush=True)
    if a.profile:
        return profile(a.profile, ROWS[a.profile], a)
    for chosen in a.rows.split(","):
        try:
            print(measure(chosen, ROWS[chosen], a), flush=True)
        except Exception as error:  # a row that fails is a result too
            last = traceback.extract_tb(error.__traceback__)[-1]
            print(
                f"{chosen:22} {type(error).__name__}: {str(error).strip()[:300]} ({last.filename}:{last.lineno})",
                flush=True,
            )
        gc.collect()  # a failed row's tensors are held by its traceback
        if a.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
