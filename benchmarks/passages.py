"""What passages cost, in training steps, and how many neighbors of a run are the nearest by exact gradients.

python benchmarks/passages.py           the time of a pair of texts, for GPT-2 of several sizes, on one CPU thread
python benchmarks/passages.py recall    of a run of docstrings of Python's library, by a GPT-2 that is trained briefly
"""

import ast
import random
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import likewise as lw
from likewise.gram import passages_by, sketch_pair
from likewise.gram.sketches import Sketches
from likewise.runs import neighbors

SIZES = ((64, 2, 64), (256, 4, 128), (512, 6, 128))  # width, layers, tokens of a text
VOCABULARY, TEXTS, NEIGHBORS, REPEATS = 2000, 16, 3, 3


def docstrings() -> list[bytes]:
    """Return docstrings of the standard library, in a random order."""
    found = dict[str, None]()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                found[ast.get_docstring(node) or ""] = None
    texts = [text.encode() for text in found if len(text) >= 150]
    random.Random(0).shuffle(texts)
    return texts


def measure_recall(
    n: int = 1000, tokens: int = 96, steps: int = 300, width: int = 144, layers: int = 4
) -> None:
    """Print which share of neighbors is right, and what finding them took, for several numbers of candidates."""
    ids = torch.tensor([list(text[:tokens]) for text in docstrings()[:n]])
    sizes = {"vocab_size": 256, "n_embd": width, "n_layer": layers, "n_head": 4, "n_positions": tokens}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        batch = ids[torch.randint(0, len(ids), (16,))]
        optimizer.zero_grad()
        model(batch, labels=batch).loss.backward()
        optimizer.step()
    net, data = (
        lw.Network(model.eval(), lw.sequence_log_likelihood()),
        lw.batches({"input_ids": ids, "labels": ids}),
    )
    print(f"{sum(net.numels.values()):,} parameters, {len(ids):,} texts of {tokens} tokens")
    gram = lw.GramMatrix(net, data, centered=True)
    exact = gram.dense().double().fill_diagonal_(-torch.inf)
    with tempfile.TemporaryDirectory() as out:
        run = lw.analyze(
            net,
            data,
            out=out,
            sketch=1024,
            token_text=lambda i: (
                bytes(ids[i].tolist()).decode("latin-1"),
                [(j, j + 1) for j in range(tokens)],
            ),
        )
        seconds = {name: stage["cpu_seconds"] for name, stage in run.manifest["stages"].items()}
        print(
            f"run: {sum(seconds.values()):.1f} CPU s",
            {name: round(value, 1) for name, value in seconds.items()},
        )
        samples = run.passages["sample"].unique()
    sketches = Sketches(sketch_pair(gram, 1024).rows, centered=True)
    by_sketches = neighbors._candidates(sketches, torch.tensor(samples), 10)
    print("sketches", _recall(by_sketches, exact[samples], 3), _recall(by_sketches, exact[samples], 10))
    for candidates in (16, 32, 64):
        for in_mean in (64, 128, 256):
            neighbors.CANDIDATES, neighbors.IN_MEAN = candidates, in_mean
            start = time.process_time()
            found = neighbors.rerank_neighbors(gram, sketches, samples, 10)
            taken = time.process_time() - start
            three, ten = (_recall(found["indices"], exact[samples], k) for k in (3, 10))
            off = found["similarities"].double() - exact[samples].gather(1, found["indices"])
            print(
                f"{candidates} candidates, mean of {in_mean}: recall@3 {three:.3f}, @10 {ten:.3f}, off by "
                f"{off.square().mean().sqrt():.4f} (stated {float(found['error']):.4f}), {taken:.1f} CPU s"
            )


def _recall(found: torch.Tensor, exact: torch.Tensor, k: int) -> float:
    pairs = zip(found[:, :k].tolist(), exact.topk(k, 1).indices.tolist(), strict=True)
    return float(np.mean([len(set(mine) & set(true)) / k for mine, true in pairs]))


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if sys.argv[1:] == ["recall"]:
        measure_recall()
        return
    for width, layers, tokens in SIZES:
        sizes = {"n_embd": width, "n_layer": layers, "n_head": 4, "n_positions": tokens}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes)).eval()
        ids = torch.randint(0, VOCABULARY, (TEXTS, tokens))
        data = {"input_ids": ids, "labels": ids}
        start = time.process_time()
        for _ in range(REPEATS):
            model(**data).loss.backward()
        step = (time.process_time() - start) / REPEATS / TEXTS
        batches = lw.batches(data)
        gram = lw.GramMatrix(lw.Network(model, lw.sequence_log_likelihood()), batches)
        passages_by(gram, batches.take([0]), batches.take([1]))  # traces the model
        start = time.process_time()
        for i in range(REPEATS):
            passages_by(gram, batches.take([i]), batches.take(range(i + 1, i + 1 + NEIGHBORS)))
        pair = (time.process_time() - start) / REPEATS / NEIGHBORS
        parameters = sum(p.numel() for p in model.parameters())
        print(f"{parameters:>10,} parameters: {pair / step:.1f} training steps a pair, {1000 * pair:.0f} ms")


if __name__ == "__main__":
    main()
