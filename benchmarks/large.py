"""Whole data sets on one GPU: a U-Net, a ResNet-9, GPT-2, and how many digits lower precision leaves.

Random weights and inputs: what is measured is time, memory and rounding, never a finding.

    python benchmarks/large.py unet         3,045 inputs of 124 × 124, two outputs: N_S
    python benchmarks/large.py resnet9      50,000 × 2,000 similarities
    python benchmarks/large.py gpt2         N_S of 128 tokens each, in plain epochs
    python benchmarks/large.py precision    N_S of 50,000 samples in float32, TF32, bfloat16, float16
"""

import argparse
import time

import torch
import torch.nn.functional as F
from passes import clock, resnet18
from torch import Tensor, nn

import likewise as lw


def level(i: int, o: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.ELU(), nn.Conv2d(o, o, 3, padding=1), nn.ELU())


class TwoBranches(nn.Module):
    """A U-Net with a branch for the image and one for the map, joined at each of four levels."""

    def __init__(self) -> None:
        super().__init__()
        image, outline, joined = (32, 64, 128, 256), (16, 32, 64, 128), (50, 100, 200, 400)
        self.image = nn.ModuleList(level(i, o) for i, o in zip((3, *image), image, strict=False))
        self.outline = nn.ModuleList(level(i, o) for i, o in zip((3, *outline), outline, strict=False))
        self.join = nn.ModuleList(level(a + b, c) for a, b, c in zip(image, outline, joined, strict=True))
        self.up = nn.ModuleList(level(joined[i + 1] + joined[i], joined[i]) for i in range(3))
        self.head = nn.Conv2d(joined[0], 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        image, outline, joined = x[:, :3], x[:, 3:], []
        for a, b, c in zip(self.image, self.outline, self.join, strict=True):
            image, outline = a(image), b(outline)
            joined.append(c(torch.cat([image, outline], 1)))
            image, outline = F.max_pool2d(image, 2), F.max_pool2d(outline, 2)
        y = joined[3]
        for i in (2, 1, 0):
            larger = F.interpolate(y, size=joined[i].shape[2:])
            y = self.up[i](torch.cat([larger, joined[i]], 1))
        return torch.tanh(self.head(y))[:, :, 62, 62]


def block(i: int, o: int, kernel: int = 3, stride: int = 1, padding: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(i, o, kernel, stride, padding, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True)
    )


class Around(nn.Sequential):
    """A way around some layers."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def resnet9() -> nn.Module:
    return nn.Sequential(
        block(3, 64),
        block(64, 128, 5, 2, 2),
        Around(block(128, 128), block(128, 128)),
        block(128, 256),
        nn.MaxPool2d(2),
        Around(block(256, 256), block(256, 256)),
        block(256, 128, padding=0),
        nn.AdaptiveMaxPool2d((1, 1)),
        nn.Flatten(),
        nn.Linear(128, 10, bias=False),
    )


def report(what: str, seconds: float, memory: bool = True) -> None:
    peak = f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if memory else ""
    print(f"{what}: {seconds:.2f} s{peak}", flush=True)


def unet(a: argparse.Namespace) -> None:
    model = TwoBranches().cuda().eval()
    used = sum(p.numel() for p in model.parameters())
    x = torch.randn(a.samples or 3045, 6, 124, 124)
    gram = lw.GramMatrix(model, lw.batches(x, 64), max_memory=a.memory * 2**30)
    start = time.perf_counter()
    lw.soft_neighbors(gram)
    report(
        f"U-Net of {used / 1e6:.1f} M parameters, N_S of {len(x)} inputs, set-up included",
        time.perf_counter() - start,
    )


def similarities(a: argparse.Namespace) -> None:
    model = resnet9().cuda().eval()
    n = a.samples or 50_000
    rows, columns = torch.randn(n, 3, 32, 32).cuda(), torch.randn(2_000, 3, 32, 32).cuda()
    net = lw.Network(model, lw.label_against_rest)
    data = (
        lw.batches((rows, torch.arange(n) % 10), 1000),
        lw.batches((columns, torch.arange(2_000) % 10), 1000),
    )
    for tf32 in (False, True):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
        gram = lw.GramMatrix(net, *data, max_memory=a.memory * 2**30)
        _ = gram.engine
        seconds, _ = clock(gram.dense, 1, True)
        p = sum(q.numel() for q in model.parameters()) / 1e6
        report(f"ResNet-9 ({p:.1f} M), {n:,} × 2,000 similarities, {'TF32' if tf32 else 'float32'}", seconds)


def gpt2(a: argparse.Namespace) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(attn_implementation="eager", use_cache=False)).cuda().eval()
    tokens = torch.randint(0, 50_257, (a.samples or 256, 128)).cuda()

    def score(outputs: Tensor, labels: Tensor) -> Tensor:
        """The mean log-probability of the next token."""
        chosen = outputs.logits[:, :-1].log_softmax(-1).gather(2, labels[:, 1:, None])
        return chosen.mean((1, 2))[:, None]

    def epoch() -> None:
        for part in tokens.split(16):
            model.zero_grad(set_to_none=True)
            score(model(part), part).sum().backward()

    epoch()
    unit, _ = clock(epoch, 3, True)
    model.zero_grad(set_to_none=True)
    data = lw.batches({"input_ids": tokens, "labels": tokens}, 16)
    gram = lw.GramMatrix(lw.Network(model, score), data, max_memory=a.memory * 2**30)
    _ = gram.engine
    torch.cuda.reset_peak_memory_stats()
    seconds, _ = clock(lambda: lw.soft_neighbors(gram), 3, True)
    report(f"GPT-2 small, {len(tokens)} × 128 tokens, N_S {seconds / unit:.2f} plain epochs", seconds)


def precision(a: argparse.Namespace) -> None:
    n = a.samples or 50_000
    torch.manual_seed(0)
    for name, model in (("conv net", resnet9()), ("ResNet-18", resnet18(1))):
        model.cuda().eval()
        x = torch.randn(n if name == "conv net" else n // 10, 3, 32, 32).cuda()
        labels = torch.arange(len(x)) % 10
        readout = lw.label_against_rest if name == "conv net" else lw.all_outputs

        def found(
            x: Tensor, autocast: torch.dtype | None = None, model=model, readout=readout, y=labels
        ) -> Tensor:
            net = lw.Network(model, readout, autocast=autocast)
            return lw.soft_neighbors(lw.GramMatrix(net, lw.batches((x, y), 500), max_memory=a.memory * 2**30))

        model.double()
        exact = found(x.double())
        model.float()
        for tf32, low in ((False, None), (True, None), (True, torch.bfloat16), (True, torch.float16)):
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
            start = time.perf_counter()
            difference = (found(x, low).double() - exact).abs()
            what = str(low) if low else "TF32" if tf32 else "float32"
            largest, median = difference.max() / exact.abs().max(), (difference / exact.abs()).median()
            report(
                f"{name}, N = {len(x):,}, {what}: N_S errs by {largest:.1e} of the largest, "
                f"{median:.1e} of itself in the median",
                time.perf_counter() - start,
                memory=False,
            )
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def main() -> None:
    ways = {"unet": unet, "resnet9": similarities, "gpt2": gpt2, "precision": precision}
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=ways)
    parser.add_argument("--memory", type=int, default=64, help="GiB for gradients")
    parser.add_argument("--samples", type=int)
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    ways[arguments.what](arguments)


if __name__ == "__main__":
    main()
