"""Do the cheap defaults of a run rank labels as exact pairs of all outputs do?

Digits of scikit-learn with 5 % wrong labels that the network has memorized (the demo's network and training, other
seeds): average precision of `label_suspicion` with all outputs and exact pairs, with four combinations or contrasts
and exact pairs, and with sketches of 1,024 numbers of four contrasts, as `analyze` takes them where pairs are many.

    python benchmarks/default_readout.py --seeds 0 1 2
"""

import argparse
import time
import warnings

import torch
from sklearn.metrics import average_precision_score

import likewise as lw
from likewise.cli import demo

WAYS = {
    "all outputs, exact": (lw.all_outputs, None),
    "4 combinations, exact": (lw.projected_outputs(4), None),
    "4 contrasts, exact": (lw.class_contrasts(4), None),
    "4 contrasts, sketches of 1,024": (lw.class_contrasts(4), 1024),
}


def main() -> None:
    """Print a row for each seed."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--samples", type=int, default=900)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print("| seed | " + " | ".join(f"{name}: average precision, CPU s" for name in WAYS) + " |")
    print("|---|" + "---|" * len(WAYS))
    for seed in given.seeds:
        demo.SEED = seed
        x, y, planted = (part[: given.samples] for part in demo.digits())
        model = demo.train_network(x, y)
        row = []
        for readout, sketch in WAYS.values():
            begun = time.process_time()
            gram = lw.GramMatrix(lw.Network(model, readout), (x, y))
            suspicion = lw.label_suspicion(gram, sketch=sketch).suspicion
            score = average_precision_score(planted.numpy(), suspicion.cpu().double().numpy())
            row.append(f"{score:.3f}, {time.process_time() - begun:.1f}")
        print(f"| {seed} | " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
