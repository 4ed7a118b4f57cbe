"""What does the first answer cost, for networks as people have them, at the defaults?

`plan`, `doctor` and the first `similarity` (of two samples) of each network, random weights, one CPU thread, CPU
seconds after the imports; beside it the largest difference from explicit gradients of plain autograd with the
same readout. The goal is 10 s for each.

    python benchmarks/first_minute.py
    python benchmarks/first_minute.py --only vit --no-check
"""

import argparse
import resource
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import networks
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import likewise as lw
from likewise.cli.doctor import examine
from likewise.engines import default_max_memory
from likewise.readouts import check_readout
from likewise.runs.plan import plan_run

SAMPLES = 64  # of the data that plan and doctor are asked about


class Fire(nn.Module):
    """A 1 × 1 convolution, then a 1 × 1 and a 3 × 3 one side by side."""

    def __init__(self, i: int, squeezed: int, o: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(i, squeezed, 1)
        self.one, self.three = nn.Conv2d(squeezed, o, 1), nn.Conv2d(squeezed, o, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.squeeze(x))
        return F.relu(torch.cat([self.one(x), self.three(x)], 1))


def squeezenet(classes: int = 1000) -> nn.Module:
    """Return SqueezeNet 1.1."""
    pool = lambda: nn.MaxPool2d(3, 2, ceil_mode=True)  # noqa: E731
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 3, 2), nn.ReLU(), pool()),
        *(Fire(64, 16, 64), Fire(128, 16, 64), pool()),
        *(Fire(128, 32, 128), Fire(256, 32, 128), pool()),
        *(Fire(256, 48, 192), Fire(384, 48, 192), Fire(384, 64, 256), Fire(512, 64, 256)),
        *(nn.Conv2d(512, classes, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    )


class UNet(nn.Module):
    """Three levels down, three up, with skip connections."""

    def __init__(self, classes: int = 2, width: int = 16) -> None:
        super().__init__()

        def level(i: int, o: int) -> nn.Module:
            layers = [nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU()]
            return nn.Sequential(*layers, nn.Conv2d(o, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())

        sizes = [width * 2**i for i in range(4)]
        self.down = nn.ModuleList(level(i, o) for i, o in zip([3, *sizes], sizes, strict=False))
        self.rise = nn.ModuleList(nn.ConvTranspose2d(2 * s, s, 2, 2) for s in sizes[:-1])
        self.up = nn.ModuleList(level(2 * s, s) for s in sizes[:-1])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for i, level in enumerate(self.down):
            x = level(F.max_pool2d(x, 2) if i else x)
            kept.append(x)
        for i in reversed(range(len(self.up))):
            x = self.up[i](torch.cat([self.rise[i](x), kept[i]], 1))
        return self.head(x)


def llama() -> nn.Module:
    """Return a Llama of four layers with 4,000 words."""
    import transformers

    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 8}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=4000, **sizes))


def gpt2() -> nn.Module:
    """Return GPT-2 small with 50,257 words."""
    import transformers

    return transformers.GPT2LMHeadModel(transformers.GPT2Config())


def pictures(side: int) -> Callable[[int], Any]:
    return lambda n: torch.randn(n, 3, side, side)


def texts(vocabulary: int, length: int) -> Callable[[int], Any]:
    def draw(n: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, vocabulary, (n, length))
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}

    return draw


class Case(NamedTuple):
    """A network, and how to draw data for it."""

    build: Callable[[], nn.Module]
    draw: Callable[[int], Any]


CASES = {
    "squeezenet, 1,000 classes, 128 px": Case(squeezenet, pictures(128)),
    "resnet-50, 1,000 classes, 224 px": Case(networks.resnet, pictures(224)),
    "llama, 4 layers, 4,000 words, 64 tokens": Case(llama, texts(4000, 64)),
    "gpt-2, 50,257 words, 64 tokens": Case(gpt2, texts(50_257, 64)),
    "u-net, 2 × 128 × 128 outputs": Case(UNet, pictures(128)),
    "vit-b/16, 1,000 classes, 224 px": Case(networks.VisionTransformer, pictures(224)),
}


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    begun = time.process_time()
    result = call()
    return result, time.process_time() - begun


def explicit_similarity(model: nn.Module, data: Any, readout: Any) -> Tensor:
    """Return k^C of two samples by plain autograd: a backward pass for each output of each of them."""
    wanted = [p for p in model.parameters() if p.requires_grad]

    def rows(i: int) -> list[list[Tensor]]:
        # as a batch of two copies: PyTorch's BatchNorm2d is wrong for a batch of one (docs/upstream.md)
        pick = lambda value: torch.cat([value[i : i + 1]] * 2)  # noqa: E731
        inputs = {k: pick(v) for k, v in data.items()} if isinstance(data, dict) else pick(data)
        returned = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        more = {"inputs": inputs} if check_readout(readout).has("inputs") else {}
        outputs = readout(returned, None, **more)[0]
        gradients = []
        for j, output in enumerate(outputs):
            last = j + 1 == len(outputs)
            found = torch.autograd.grad(output, wanted, retain_graph=not last, allow_unused=True)
            gradients.append([torch.zeros(0) if g is None else g.flatten() for g in found])
        return gradients

    def inner(a: list[list[Tensor]], b: list[list[Tensor]]) -> Tensor:
        products = [
            [sum(float(p.double() @ q.double()) for p, q in zip(x, y, strict=True)) for y in b] for x in a
        ]
        return torch.tensor(products, dtype=torch.float64)

    def whiten(block: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(block)
        return vectors * values.rsqrt() @ vectors.T

    a, b = rows(0), rows(1)
    left, right = whiten(inner(a, a)), whiten(inner(b, b))
    between = (left @ inner(a, b) @ right).diagonal().mean()
    return torch.tensor([[1.0, float(between)], [float(between), 1.0]])


def measure(name: str, case: Case, check: bool) -> str:
    torch.manual_seed(0)
    model = case.build().eval()
    data, two = case.draw(SAMPLES), case.draw(2)
    memory = default_max_memory(torch.device("cpu"))
    plan, plan_cpu = timed(lambda: plan_run(lw.Network(model), data, None, memory))
    _, doctor_cpu = timed(lambda: examine(lw.Network(model), data, None, memory))
    net = lw.Network(model)
    found, cpu = timed(lambda: lw.similarity(net, two))
    error = "–"
    if check:
        error = f"{(found - explicit_similarity(model, two, net.readout)).abs().max():.0e}"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return (
        f"| {name} | {plan.parameters / 1e6:.1f} M | {net.automatic} | {plan_cpu:.1f} | {doctor_cpu:.1f} | {cpu:.1f} | "
        f"{error} | {peak:.1f} |"
    )


def main() -> None:
    """Print the table."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--only", default="", help="networks whose name contains this")
    arguments.add_argument("--no-check", action="store_true", help="without the explicit computation")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", lw.ReadoutNotice)
    print(f"torch {torch.__version__}, one thread; CPU seconds\n")
    print(
        "| network | parameters | readout | plan | doctor | similarity | error | peak GiB so far |\n|"
        + "---|" * 8
    )
    for name, case in CASES.items():
        if given.only in name:
            print(measure(name, case, not given.no_check), flush=True)


if __name__ == "__main__":
    main()
