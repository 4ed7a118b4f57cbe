"""Which readout and exponent find wrong labels? The demo's digits and net; average precision.

python benchmarks/label_readouts.py          one minute, one thread
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import likewise as lw

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import digits


def average_precision(score: Tensor, wrong: Tensor) -> float:
    hits = wrong[score.argsort(descending=True)].double()
    return float((hits.cumsum(0) / torch.arange(1, len(hits) + 1) * hits).sum() / hits.sum())


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y, wrong, _ = digits.data()
    model = digits.trained(x, y).eval()
    loss = nn.functional.cross_entropy(model(x), y, reduction="none").detach()
    print(f"in-sample loss {average_precision(loss, wrong):.3f}")
    readouts = {
        "all_outputs": lw.all_outputs,
        "log_probabilities": lw.log_probabilities,
        "sum of outputs": lambda outputs, labels: outputs.sum(1),
        "label_against_rest": lw.label_against_rest,
    }
    for name, readout in readouts.items():
        for centered in (False, True):
            gram = lw.GramMatrix(lw.Network(model, readout), (x, y), centered=centered)
            found = [
                average_precision(lw.label_suspicion(gram, exponent=exponent).suspicion, wrong)
                for exponent in (4, 8, 16)
            ]
            print(f"{name:20}{'centered' if centered else 'plain':10}", " / ".join(f"{v:.3f}" for v in found))
    fit = lw.fit_quality(lw.GramMatrix(model, (x, y)))
    pure = lw.label_suspicion(lw.GramMatrix(model, (x, y))).suspicion[~wrong].median()
    relative = fit.label_variance.median() / fit.total_variance
    print(f"fit_quality: median label variance {relative:.2f} of the whole, verdict {fit.verdict};")
    print(f"votes of other labels around right labels, median share {pure:.3f}")


if __name__ == "__main__":
    main()
