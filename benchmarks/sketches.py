"""What do sketches cost and how far are they off, when gradients of large matrices are formed and when they are not?

A ResNet-9 and a vision transformer, trained for a few epochs on 2,000 images of CIFAR-10, on one CPU thread. Cost in
plain epochs of forward and backward passes; errors of sketches of 1,024 numbers against exact similarities of 96
samples: root mean square, of all pairs and of the most similar tenth, and the share of pairs within ±1.96 of the
standard errors that sketches state.

    python benchmarks/sketches.py --data DIR        15 minutes
    python benchmarks/sketches.py --data DIR --only resnet
"""

import argparse
import time
from unittest.mock import patch

import torch
import torch.nn.functional as F
from images import data_folder, images
from networks import VisionTransformer
from torch import Tensor, nn

import likewise as lw
from likewise.gram import sketches
from likewise.gram.sketches import Sketch, bucket_count, similarity_errors, sketch_rows, whiten_sketches
from nets import resnet9, trained

SAMPLES, COMPARED, SEEDS, BATCH = 2000, 96, 4, 64
NETWORKS = {
    "ResNet-9, 1.6 M": lambda: resnet9(width=32),
    "vision transformer, 3.2 M": lambda: VisionTransformer(4, 256, 4, 4, 32, 10),
}
READOUTS = {
    "label_against_rest": lw.label_against_rest,
    "class_contrasts(4)": lw.class_contrasts(4),
    "all_outputs": lw.all_outputs,
}
WAYS = {"formed": 2**62, "from both sides": sketches.FEWEST_ENTRIES}


def epoch_seconds(model: nn.Module, x: Tensor, y: Tensor) -> float:
    seconds = []
    for _ in range(3):
        start = time.process_time()
        for part in range(0, len(x), BATCH):
            model.zero_grad()
            F.cross_entropy(model(x[part : part + BATCH]), y[part : part + BATCH]).backward()
        seconds.append(time.process_time() - start)
    model.zero_grad(set_to_none=True)
    return min(seconds)


def measure(gram: lw.GramMatrix, exact: Tensor, unit: float) -> str:
    """Return cost, errors, and the share of pairs within the stated errors."""
    n, every = len(exact), []
    apart = ~torch.eye(n, dtype=torch.bool)
    similar = apart & (exact >= exact[apart].quantile(0.9))
    for seed in range(SEEDS):
        sketch, start = Sketch(bucket_count(1024, gram.d), seed), time.process_time()
        vectors = whiten_sketches(sketch_rows(gram, sketch)).double()
        seconds = time.process_time() - start
        with gram.net.evaluation_mode():
            group = sketch.dependent_buckets(gram.engine, gram.data.samples(range(1)))
        off = vectors @ vectors.T - exact
        inside = off.abs() <= 1.96 * similarity_errors(vectors, vectors, gram.d, group)
        values = seconds / unit, off[apart].square().mean() ** 0.5, off[similar].square().mean() ** 0.5
        every.append([float(value) for value in (*values, inside[apart].double().mean())])
    found = torch.tensor(every)
    cost, (_, rmse, near, share) = found[:, 0].median(), found.mean(0)
    spread = found[:, 0].max() - found[:, 0].min()
    return f"{cost:.2f} ({spread:.2f}) | {rmse:.4f} | {near:.4f} | {share:.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    data_folder(parser)
    parser.add_argument("--only", default="", help="a part of the name of a network")
    a = parser.parse_args()
    torch.set_num_threads(1)
    x, y = images("cifar10", a.data, "train", 0, SAMPLES)
    print(
        "| network | readout | gradients | plain epochs (spread) | error | of similar pairs | within 1.96 |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, make in NETWORKS.items():
        if a.only.lower() not in name.lower():
            continue
        torch.manual_seed(0)
        model = trained(make(), x, y, 6, 0).model.eval()
        few, labels = x[:COMPARED], y[:COMPARED]
        unit = epoch_seconds(model, few, labels)
        for read, readout in READOUTS.items():
            gram = lw.GramMatrix(lw.Network(model, readout), lw.batches((few, labels), BATCH))
            exact = gram.dense().double()
            for way, fewest in WAYS.items():
                with patch.object(sketches, "FEWEST_ENTRIES", fewest):
                    print(f"| {name} | {read} | {way} | {measure(gram, exact, unit)} |", flush=True)


if __name__ == "__main__":
    main()
