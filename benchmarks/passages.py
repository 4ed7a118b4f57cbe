"""What passages cost: the time of a pair of texts in training steps, for GPT-2 of several sizes, on one CPU thread.

python benchmarks/passages.py
"""

import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import likewise as lw
from likewise.gram import passages_by

SIZES = ((64, 2, 64), (256, 4, 128), (512, 6, 128))  # width, layers, tokens of a text
VOCABULARY, TEXTS, NEIGHBORS, REPEATS = 2000, 16, 3, 3


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
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
