"""What tells novel inputs and wrong predictions, on inputs of many kinds? Every ingredient of every sample, kept.

    python benchmarks/shift_cases.py --data DIR --aerial DIR                     inputs into out/shift-data.npz
    python benchmarks/shift.py --device cuda --processes 8 --out FOLDER         networks and ingredients into FOLDER
    python benchmarks/shift_scores.py FOLDER                                    combinations of them, and tables

24 networks: ResNet-9 on CIFAR-10, a conv net on Fashion-MNIST (7,000 images each), an MLP on a table of digits; clean
labels and 20 % wrong ones; few epochs and so many that labels are memorized; two seeds. The cases are those of
shift_cases.py. Kept for every sample of every case, of the known test set, of held-out samples for calibration and of
2,000 training samples, each left out of its own neighbors:

    novelty, by the gradients of every part of the network, of the last ones, and of all: 1 - mean similarity to the ten
        most similar training samples. Of all outputs, of their logsumexp, of the largest one
    agreement and shift of neighbors, as in `lw.reliability`; share of the ten nearest with the predicted class
    length of the gradient by part and readout (logarithm); share outside of 32 directions of training gradients
    what features and outputs tell: neighbors, Mahalanobis, ViM, neighbors in mean activations of every part, outputs
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from shift_cases import CHOOSING, EACH, LEFT_OUT, NOVEL, REPORTING, corrupted, corruptions, novel_inputs
from torch import Tensor, nn
from torch.nn import functional as F

from likewise.linalg import matrix_power, rank_floor
from nets import conv6, evaluated, resnet9, trained

WIDTH = 509  # numbers of a sketch, for each output
NEAREST, FEATURE_VOTERS, DIRECTIONS = 10, 50, 32
EPOCHS = {"cifar10": (8, 30), "fashion-mnist": (5, 30), "table": (15, 150)}
KNOWN, HELD, CORRUPTED, KEPT = 1000, 1000, 500, 2000
BATCH = 80


def settings() -> list[dict[str, Any]]:
    """Return the networks, in an order by which every process gets some of each kind."""
    return [
        {"data": data, "share": share, "memorized": memorized, "seed": seed}
        for data in ("cifar10", "fashion-mnist", "table")
        for seed in (0, 1)
        for share in (0.0, 0.2)
        for memorized in (True, False)
    ]


def mlp(columns: int, classes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in (columns, 128, 128):
        layers += [nn.Linear(width, 128), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(128, classes))


class Group(NamedTuple):
    """Inputs that are asked about."""

    name: str  # "choosing: novel: noise"
    inputs: Tensor
    truth: Tensor  # class numbers, -1 where there is none


class Data(NamedTuple):
    """What a network is trained on, and asked."""

    x: Tensor
    labels: Tensor  # as trained on
    groups: list[Group]


def load(setting: dict[str, Any], file: Path, device: str, limit: int | None = None) -> Data:
    """Return training inputs, labels and all groups of inputs, scaled as the network is to get them."""
    name, seed = setting["data"], setting["seed"]
    with np.load(file) as arrays:
        take = {key: torch.tensor(arrays[f"{name}/{key}"]) for key in ("x", "y", "new", "truth")}
        others = {
            key.removesuffix("/new"): torch.tensor(arrays[key]).float() / 255
            for key in arrays.files
            if key.endswith("/new") and not key.startswith((name, "table"))
        }
    top = 16 if name == "table" else 255
    x, new = take["x"].float() / top, take["new"].float() / top
    left = torch.tensor(LEFT_OUT[name][seed])
    kept, known = ~torch.isin(take["y"], left), ~torch.isin(take["truth"], left)
    numbers = torch.full((10,), -1)
    numbers[[c for c in range(10) if c not in left]] = torch.arange(8)
    x, y = x[kept], numbers[take["y"][kept].long()]
    if setting["share"]:
        y = _spoiled(y, setting["share"], seed)
    test, truth = new[known], numbers[take["truth"][known].long()]
    held = min(HELD, len(test) // 2)
    asked, answers = test[held : held + KNOWN], truth[held : held + KNOWN]
    groups = [Group("held", test[:held], truth[:held]), Group("known", asked, answers)]
    for part in (CHOOSING, REPORTING):
        for case in NOVEL[name][part]:
            if case == "left out":
                if seed != (part == REPORTING):
                    continue
                inputs = new[~known][:EACH]
            else:
                chance = torch.Generator().manual_seed(seed)
                inputs = novel_inputs(case, asked, x, {k: v[:EACH] for k, v in others.items()}, chance)
            groups.append(Group(f"{part}: novel: {case}", inputs, torch.full((len(inputs),), -1)))
        for kind, strengths in corruptions(name)[part].items():
            for strength in strengths:
                chance = torch.Generator().manual_seed(seed)
                inputs = corrupted(kind, strength, asked[:CORRUPTED], chance)
                groups.append(Group(f"{part}: {kind}: {strength:g}", inputs, answers[:CORRUPTED]))
    over = (0, 2, 3) if x.dim() == 4 else (0,)
    mean, deviation = x.mean(over, keepdim=True), x.std(over, keepdim=True).clamp(min=1e-2)
    scale = lambda part: ((part - mean) / deviation).to(device)  # noqa: E731
    cut = [Group(g.name, scale(g.inputs[:limit]), g.truth[:limit]) for g in groups]
    return Data(scale(x[:limit]), y[:limit].to(device), cut)


def _spoiled(y: Tensor, share: float, seed: int) -> Tensor:
    """Return labels of which a share is wrong: any other of the eight classes."""
    chance = torch.Generator().manual_seed(1000 + seed)
    step = torch.randint(1, 8, (len(y),), generator=chance)
    step[torch.randperm(len(y), generator=chance)[round(share * len(y)) :]] = 0
    return (y + step) % 8


class Gradients(NamedTuple):
    """Gradients of samples, by part of the network (P parts, d outputs)."""

    outputs: Tensor  # (n, d)
    sketches: Tensor  # (P, n, d, WIDTH)
    kernels: Tensor  # (P, n, d, d) exact K(x, x)
    means: list[Tensor]  # of each part, (n, channels): its input, averaged over positions


class Gradienter:
    """Sketches of per-sample gradients of all outputs, layer by layer, of a network in evaluation mode."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model.requires_grad_(False)
        self.parts: list[list[nn.Module]] = []
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                self.parts.append([module])
            elif isinstance(module, nn.BatchNorm2d):
                self.parts[-1].append(module)
        self._seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        for module in (m for part in self.parts for m in part):
            module.register_forward_hook(self._keep)
        self._signs: dict[int, Tensor] = {}

    def _keep(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self._seen[module] = (inputs[0].detach(), output)

    def __call__(self, x: Tensor) -> Gradients:
        with torch.enable_grad():
            outputs = self.model(x.requires_grad_(True))
            modules = [m for part in self.parts for m in part]
            made = [self._seen[m][1] for m in modules]
            by_output = [
                torch.autograd.grad(outputs[:, j].sum(), made, retain_graph=True)
                for j in range(outputs.shape[1])
            ]
        deltas = {m: torch.stack([grads[i] for grads in by_output], 1) for i, m in enumerate(modules)}
        sketches, kernels, means = [], [], []
        for number, part in enumerate(self.parts):
            rows = torch.cat([_rows(m, self._seen[m][0], deltas[m]) for m in part], 2)
            kernels.append(rows @ rows.mT)
            sketches.append(self._sketch(number, rows))
            inputs = self._seen[part[0]][0]
            means.append(inputs.flatten(2).mean(2) if inputs.dim() == 4 else inputs)
        self._seen.clear()
        return Gradients(outputs.detach(), torch.stack(sketches), torch.stack(kernels), means)

    def _sketch(self, number: int, rows: Tensor) -> Tensor:
        """Return sums of coordinates with random signs, every WIDTH-th in one; rows are overwritten."""
        p = rows.shape[2]
        if number not in self._signs:
            generator = torch.Generator().manual_seed(number)
            self._signs[number] = (torch.randint(0, 2, (p,), generator=generator) * 2.0 - 1).to(rows)
        rows.mul_(self._signs[number])
        whole = p // WIDTH * WIDTH
        found = (
            rows[:, :, :whole].unflatten(2, (-1, WIDTH)).sum(2)
            if whole
            else rows.new_zeros(*rows.shape[:2], WIDTH)
        )
        found[:, :, : p - whole] += rows[:, :, whole:]
        return found


def _rows(module: nn.Module, inputs: Tensor, delta: Tensor) -> Tensor:
    """Return the gradient of each output in the module's parameters, (n, d, p), from that in its result."""
    n, d = delta.shape[:2]
    if isinstance(module, nn.Conv2d):
        windows = F.unfold(inputs, module.kernel_size, padding=module.padding)
        return (delta.flatten(3).flatten(1, 2) @ windows.mT).view(n, d, -1)
    if isinstance(module, nn.BatchNorm2d):
        shape = (1, -1, 1, 1)
        normal = (inputs - module.running_mean.view(shape)) / (
            module.running_var.view(shape) + module.eps
        ).sqrt()
        return torch.cat([(delta * normal[:, None]).sum((3, 4)), delta.sum((3, 4))], 2)
    return torch.cat([(delta[..., None] * inputs[:, None, None]).flatten(2), delta], 2)


def variants(parts: int) -> dict[str, list[int]]:
    """Return by name which parts of the network are compared together."""
    found = {f"part {i}": [i] for i in range(parts)} | {"all": list(range(parts))}
    return found | {f"last {k}": list(range(parts - k, parts)) for k in (2, 3) if k < parts}


def directions(gradients: Gradients, chosen: dict[str, list[int]]) -> dict[str, Tensor]:
    """Return unit vectors whose products are similarities: of all outputs (whitened), logsumexp, the largest."""
    kernels = torch.stack([gradients.kernels[parts].sum(0) for parts in chosen.values()])
    white = matrix_power(kernels.flatten(0, 1), -0.5, rank_floor(torch.float32)).matrix.view_as(kernels)
    chances, top, found = gradients.outputs.softmax(1), gradients.outputs.argmax(1), {}
    for (name, parts), whitening in zip(chosen.items(), white, strict=True):
        rows = gradients.sketches[parts].sum(0)
        found[name] = (whitening.to(rows) @ rows).flatten(1)
        found[f"lse {name}"] = (chances[:, None] @ rows)[:, 0]
        found[f"top {name}"] = rows[torch.arange(len(rows), device=rows.device), top]
    return {f"direction {name}": F.normalize(vectors, dim=1) for name, vectors in found.items()}


def lengths(gradients: Gradients) -> dict[str, Tensor]:
    """Return the logarithm of the length of the gradient, by part and readout."""
    chances, found = gradients.outputs.softmax(1), {}
    top = F.one_hot(gradients.outputs.argmax(1), gradients.outputs.shape[1]).to(chances)
    for i, kernel in enumerate(gradients.kernels):
        found[f"length part {i}"] = kernel.diagonal(dim1=1, dim2=2).sum(1)
        for name, weights in (("lse", chances), ("top", top)):
            found[f"length {name} part {i}"] = (weights[:, None] @ kernel @ weights[:, :, None])[:, 0, 0]
    return {name: value.clamp(min=1e-30).log() / 2 for name, value in found.items()}


class Bank:
    """The training set: what every other input is compared with."""

    def __init__(self, gradienter: Gradienter, data: Data) -> None:
        self._gradienter, self._labels = gradienter, data.labels
        self._variants = variants(len(gradienter.parts))
        pieces = [self._describe(part) for part in data.x.split(BATCH)]
        self.described = join(pieces)
        self.outputs = self.described["outputs"]
        self._chances = self.outputs.softmax(1)
        self._means = {k: v.mean(0) for k, v in self.described.items() if k.startswith("direction ")}
        self._centered = {
            k: F.normalize(self.described[k] - mean, dim=1)
            for k, mean in self._means.items()
            if not k.startswith(("direction lse", "direction top"))
        }
        self._leading = {
            k: torch.linalg.eigh(v.T @ v)[1][:, -DIRECTIONS:]
            for k, v in self.described.items()
            if k.startswith("direction lse")
        }

    def _describe(self, x: Tensor) -> dict[str, Tensor]:
        gradients = self._gradienter(x)
        found = {"outputs": gradients.outputs} | directions(gradients, self._variants)
        found |= {f"mean {i}": F.normalize(v, dim=1) for i, v in enumerate(gradients.means)}
        return found | lengths(gradients)

    def ask(self, inputs: Tensor) -> dict[str, Tensor]:
        """Return all ingredients of new inputs."""
        pieces = []
        for part in inputs.split(5 * BATCH):
            described = join([self._describe(small) for small in part.split(BATCH)])
            pieces.append(self._compare(described, None))
        return join(pieces)

    def ask_training(self, count: int) -> dict[str, Tensor]:
        """Return those of the first training samples, each left out."""
        pieces = []
        for rows in torch.arange(min(count, len(self._labels)), device=self._labels.device).split(5 * BATCH):
            pieces.append(self._compare({k: v[rows] for k, v in self.described.items()}, rows))
        return join(pieces)

    def _compare(self, described: dict[str, Tensor], own: Tensor | None) -> dict[str, Tensor]:
        outputs = described["outputs"]
        prediction, chances = outputs.argmax(1), outputs.softmax(1)
        found = {f"output {j}": outputs[:, j] for j in range(outputs.shape[1])}
        found |= {k: v for k, v in described.items() if k.startswith("length")}
        for name, vectors in described.items():
            short = name.removeprefix("direction ")
            if name.startswith("mean "):
                found[f"activations {name[5:]}"] = 1 - self._nearest(vectors @ self.described[name].T, own)[0]
            if not name.startswith("direction "):
                continue
            closeness, places = self._nearest(vectors @ self.described[name].T, own)
            found[f"novelty {short}"] = 1 - closeness
            if short.startswith("lse"):
                found[f"outside {short}"] = 1 - (vectors @ self._leading[name]).square().sum(1)
                continue
            if short.startswith("top"):
                continue
            found[f"nearest agree {short}"] = self._agree(places, prediction)
            centered = F.normalize(vectors - self._means[name], dim=1) @ self._centered[name].T
            if own is not None:
                centered[torch.arange(len(own)), own] = 0
            weights = centered.clamp_(min=0).pow_(8)
            weights /= weights.sum(1, keepdim=True).clamp(min=1e-30)
            votes = weights @ F.one_hot(self._labels, outputs.shape[1]).to(weights)
            found[f"agreement {short}"] = votes.gather(1, prediction[:, None])[:, 0]
            found[f"shift {short}"] = (chances - weights @ self._chances).abs().sum(1) / 2
        return found

    def _agree(self, places: Tensor, prediction: Tensor) -> Tensor:
        return (self._labels[places] == prediction[:, None]).float().mean(1)

    @staticmethod
    def _nearest(similarity: Tensor, own: Tensor | None) -> tuple[Tensor, Tensor]:
        if own is not None:
            similarity[torch.arange(len(own)), own] = -2
        top = similarity.topk(NEAREST, dim=1)
        return top.values.mean(1), top.indices


class FeatureScores:
    """What the last layer's inputs tell: neighbors, Mahalanobis, ViM, GradNorm."""

    def __init__(self, model: nn.Sequential, data: Data) -> None:
        self._body, last, y = model[:-1], model[-1], data.labels
        here = evaluated(self._body, data.x).double()
        means = torch.stack([here[y == c].mean(0) for c in range(last.out_features)])
        within = here - means[y]
        self._precision = torch.linalg.pinv(within.T @ within / len(here), hermitian=True, rtol=1e-6)
        self._weight, self._bias = last.weight.detach().double(), last.bias.detach().double()
        self._origin = -torch.linalg.pinv(self._weight) @ self._bias
        centered = here - self._origin
        vectors = torch.linalg.eigh(centered.T @ centered / len(here))[1]
        self._rest = vectors[:, : -min(64, here.shape[1] // 2)]
        outputs = here @ self._weight.T + self._bias
        self._alpha = outputs.max(1).values.sum() / (centered @ self._rest).norm(dim=1).sum()
        self._means, self._labels, self._here = means, y, F.normalize(here, dim=1)

    def ask(self, x: Tensor, training: bool = False) -> dict[str, Tensor]:
        there = evaluated(self._body, x).double()
        outputs = there @ self._weight.T + self._bias
        similarity = F.normalize(there, dim=1) @ self._here.T
        if training:
            similarity[torch.arange(len(x)), torch.arange(len(x))] = -2
        top = similarity.topk(min(FEATURE_VOTERS, similarity.shape[1]), dim=1)
        voters = self._labels[top.indices] == outputs.argmax(1)[:, None]
        gaps = there[:, None] - self._means
        virtual = self._alpha * ((there - self._origin) @ self._rest).norm(dim=1)
        uniform = (outputs.softmax(1) - 1 / outputs.shape[1]).abs().sum(1)
        return {
            "feature novelty": 1 - top.values[:, :NEAREST].mean(1),
            "feature tenth": 1 - top.values[:, NEAREST - 1],
            "feature agreement": voters.double().mean(1),
            "feature length": there.norm(dim=1).clamp(min=1e-30).log(),
            "Mahalanobis": (gaps @ self._precision * gaps).sum(2).min(1).values.clamp(min=1e-30).log(),
            "ViM": virtual - outputs.logsumexp(1),
            "GradNorm": -there.abs().sum(1) * uniform,
        }


def join(pieces: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def measure(setting: dict[str, Any], given: argparse.Namespace) -> dict[str, np.ndarray]:
    """Train a network and return all ingredients of all groups: names, groups, values (v, n) in half precision."""
    begun, name, seed = time.perf_counter(), setting["data"], setting["seed"]
    data = load(setting, given.inputs, given.device, given.limit)
    torch.manual_seed(seed)
    fresh = {
        "cifar10": lambda: resnet9(8, 32),
        "fashion-mnist": lambda: conv6(8),
        "table": lambda: mlp(64, 8),
    }[name]()
    epochs = EPOCHS[name][setting["memorized"]] if given.epochs is None else given.epochs
    fit = trained(fresh.to(given.device), data.x, data.labels, epochs, seed, 64 if name == "table" else 256)
    model = fit.model.to(memory_format=torch.contiguous_format)
    fitted = time.perf_counter()
    features = FeatureScores(model, data)
    gradienter = Gradienter(model)
    bank = Bank(gradienter, data)
    kept = min(KEPT, len(data.x))
    groups = ["training"] * kept
    found = [bank.ask_training(kept) | features.ask(data.x[:kept], training=True)]
    truth = [data.labels[:kept].cpu()]
    for group in data.groups:
        found.append(bank.ask(group.inputs) | features.ask(group.inputs))
        groups += [group.name] * len(group.inputs)
        truth.append(group.truth)
    values = {
        k: v.float().cpu() for k, v in join([{k: v.float() for k, v in f.items()} for f in found]).items()
    }
    names = list(dict.fromkeys(groups))
    right = float(
        (torch.stack([values[f"output {j}"][kept:] for j in range(8)]).argmax(0) == torch.cat(truth[1:]))[
            torch.tensor([g == "known" for g in groups[kept:]])
        ]
        .float()
        .mean()
    )
    learned = float((bank.outputs.argmax(1) == data.labels).float().mean())
    print(
        f"{time.strftime('%X')} {setting} right {right:.3f} learned {learned:.3f} "
        f"training {fitted - begun:.1f} s, ingredients {time.perf_counter() - fitted:.1f} s, {len(groups)} samples",
        flush=True,
    )
    return {
        "values": torch.stack(list(values.values())).half().numpy(),
        "truth": torch.cat(truth).to(torch.int8).numpy(),
        "group": np.array([names.index(g) for g in groups], np.uint8),
        "about": np.array(json.dumps({
            "setting": setting, "groups": names, "names": list(values), "right": right, "learned": learned,
            "parts": [[type(m).__name__ for m in part] for part in gradienter.parts],
        })),
    }  # fmt: skip


def measured(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    first, every = (int(v) for v in given.part.split("/"))
    yield from [s for s in settings() if given.only in str(s)][first - 1 :: every]


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--inputs", type=Path, default=Path("out/shift-data.npz"))
    arguments.add_argument("--out", type=Path, default=Path("out/shift"), help="folder of the results")
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments.add_argument("--processes", type=int, default=1)
    arguments.add_argument("--part", default="1/1", help="i/k: every k-th network from the i-th")
    arguments.add_argument("--only", default="", help="networks whose setting contains this")
    arguments.add_argument("--epochs", type=int, help="instead of the usual ones, to try the file")
    arguments.add_argument("--limit", type=int, help="use so many samples of each group, to try the file")
    given = arguments.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.processes > 1:
        start_processes(given.processes)
        return
    torch.set_num_threads(1 if given.device == "cpu" else 2)
    arrays: dict[str, np.ndarray] = {}
    for number, setting in enumerate(measured(given)):
        arrays |= {f"{number}/{name}": value for name, value in measure(setting, given).items()}
        np.savez_compressed(given.out / f"part-{given.part.replace('/', '-of-')}.npz", **arrays)


def start_processes(count: int) -> None:
    """Start a process for each part, and wait for all."""
    rest = sys.argv[1:]
    place = rest.index("--processes")
    rest = rest[:place] + rest[place + 2 :]
    started = [
        subprocess.Popen([sys.executable, __file__, *rest, "--part", f"{i + 1}/{count}"])
        for i in range(count)
    ]
    if any([process.wait() for process in started]):
        raise SystemExit("A process failed: see above.")


if __name__ == "__main__":
    main()
