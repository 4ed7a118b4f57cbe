"""How well do a few combinations of ten class scores stand in for all of them, on networks that have memorized labels?

    python benchmarks/contrasts.py --data DIR                         20 minutes on one thread
    python benchmarks/contrasts.py --data DIR --only fashion-mnist
    python benchmarks/contrasts.py --data DIR --layers               all outputs, the weights of one layer at a time

A convolutional network of 290,000 parameters, 3,000 images of MNIST or Fashion-MNIST (none of those of labels.py), 40
epochs, 10 % of the labels wrong: average precision of the votes of sketches of 1,024 numbers, and the similarities of
200 images beside those of all outputs, centered.
"""

import argparse
import time
from itertools import product

import torch
from images import data_folder, images
from sklearn.metrics import average_precision_score
from torch import Tensor, nn

import likewise as lw
from likewise.readouts import Readout
from likewise.statistics.label_issues import combined_suspicion
from likewise.statistics.neighbors import class_votes
from nets import conv6, evaluated, spoiled, trained

FIRST, COUNT, COMPARED, MEMORY = 30_000, 3000, 200, 2**32
READOUTS: dict[str, Readout] = {
    "all_outputs": lw.all_outputs,
    "projected_outputs(4)": lw.projected_outputs(4),
    "projected_outputs(4, seed=1)": lw.projected_outputs(4, seed=1),
    "class_contrasts(4)": lw.class_contrasts(4),
    "class_contrasts(4, seed=1)": lw.class_contrasts(4, seed=1),
    "class_contrasts(8)": lw.class_contrasts(8),
}


def memorized(x: Tensor, y: Tensor, noise: str) -> tuple[nn.Module, Tensor]:
    """Return a network that has memorized labels of which a tenth is wrong, and these labels."""
    chances = None
    if noise == "instance":
        torch.manual_seed(500)
        chances = evaluated(trained(fresh(), x, y, 4, 0).model, x).softmax(1)
    labels = spoiled(y, noise, 0.1, 0, chances)
    torch.manual_seed(0)
    return trained(fresh(), x, labels, 40, 0).model, labels


def fresh() -> nn.Sequential:
    return conv6().to(memory_format=torch.channels_last)


def ways(model: nn.Module, layers: bool) -> dict[str, lw.Network]:
    """Return the networks to compare, by the name of what they compare."""
    if not layers:
        return {name: lw.Network(model, readout) for name, readout in READOUTS.items()}
    weights = [name for name, value in model.named_parameters() if value.dim() > 1]
    return {name: lw.Network(model, lw.all_outputs, parameters=[name]) for name in weights}


def similarities(net: lw.Network, x: Tensor) -> Tensor:
    """Return the centered similarities of all pairs of the first images."""
    few = x[:COMPARED]
    dense = lw.GramMatrix(net, few, centered=True, max_memory=MEMORY).dense()
    return dense[tuple(torch.triu_indices(len(few), len(few), 1))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    data_folder(parser)
    parser.add_argument("--only", choices=["mnist", "fashion-mnist"], help="images")
    parser.add_argument("--layers", action="store_true", help="compare layers, each with all outputs")
    a = parser.parse_args()
    torch.set_num_threads(1)
    print("| images, noise | readout | average precision | correlation | off by | CPU seconds |")
    print("|---|---|---|---|---|---|")
    for name, noise in product([a.only] if a.only else ["mnist", "fashion-mnist"], ["uniform", "instance"]):
        x, y = images(name, a.data, first=FIRST, count=COUNT)
        model, labels = memorized(x, y, noise)
        exact, chances = similarities(lw.Network(model, lw.all_outputs), x), evaluated(model, x).softmax(1)
        for what, net in ways(model, a.layers).items():
            gram = lw.GramMatrix(net, (x, labels), max_memory=MEMORY)
            start = time.process_time()
            found = combined_suspicion(class_votes(gram, labels, sketch=1024), labels, chances)
            seconds = time.process_time() - start
            precision = average_precision_score(labels != y, found.suspicion)
            ours = similarities(net, x)
            correlation = torch.corrcoef(torch.stack([exact, ours]))[0, 1]
            apart = (exact - ours).square().mean().sqrt()
            print(
                f"| {name}, {noise} | `{what}` | {precision:.3f} | {correlation:.3f} | {apart:.3f} | {seconds:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
