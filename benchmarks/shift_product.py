"""`lw.novelty` and `lw.reliability` as a user calls them: aerial patches and corruptions, networks of ten classes.

    python benchmarks/shift_product.py prepare --data DIR --aerial DIR        inputs into out/shift-product.npz
    python benchmarks/shift_product.py run --device cuda --processes 8        networks, into FOLDER/results-*.zip
    python benchmarks/shift_product.py table FOLDER ...                       results/shift_product.jsonl
    python benchmarks/shift_product.py cost                                   CPU seconds of each way to ask

Six networks: ResNet-9 on 7,000 images of CIFAR-10, others than those of benchmarks/shift.py, 30 epochs, clean labels
and 20 % wrong ones, three seeds. 1,500 aerial patches of five places against 1,500 test images; predictions on test
images, blurred, noisy and dark ones, calibrated on 1,000 others. Nothing is chosen on these. After them the networks of
benchmarks/shift.py on Fashion-MNIST, whose ingredients go to shift_scores.py. A network is a process of its own; what
it has found is in FOLDER as soon as it ends, also if it fails.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import shift
import torch
from shift_cases import CHOOSING, EACH, NOVEL, PLACES, TEST, TRAINING, aerial_patches, corrupted
from torch import Tensor

import likewise as lw
from nets import block, evaluated, resnet9, spoiled, trained

SKETCH, MEMORY = 1024, 8 * 2**30
FIRST, COUNT, FIRST_TEST = 30_000, 7000, 4000  # images of CIFAR-10
HELD, KNOWN, CORRUPTED = 1000, 1500, 500
STRENGTHS = {"blur": (1.2, 2.0), "noise": (0.1, 0.2), "darkness": (0.35, 0.15)}
EPOCHS = 30
FILES = 7  # of results
STEPS = ("reliability", "novelty", "index")


def settings() -> list[dict[str, Any]]:
    """Return the networks, those that take longest first."""
    mine = [{"data": "cifar10", "share": share, "seed": seed} for seed in (0, 1, 2) for share in (0.0, 0.2)]
    return mine + [s for s in shift.settings() if s["data"] == "fashion-mnist"]


def prepare(given: argparse.Namespace) -> None:
    """Write all inputs to one file, as bytes."""
    import images  # noqa: F401  finds the folder of the experiments
    from data import images as read

    arrays = {}
    arrays["x"], arrays["y"] = read("cifar10", given.data, "train", FIRST, COUNT)
    arrays["test"], arrays["truth"] = read("cifar10", given.data, "test", FIRST_TEST, HELD + KNOWN)
    name = "fashion-mnist"
    arrays[f"{name}/x"], arrays[f"{name}/y"] = read(name, given.data, "train", 20_000, TRAINING)
    arrays[f"{name}/new"], arrays[f"{name}/truth"] = read(name, given.data, "test", 0, TEST)
    for other in ("cifar10", "mnist"):
        arrays[f"{other}/new"] = read(other, given.data, "test", 0, EACH)[0]
    arrays |= {f"aerial {place}/new": aerial_patches(given.aerial, place) for place in PLACES}
    given.inputs.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(given.inputs, **arrays)
    print(f"{given.inputs}: {given.inputs.stat().st_size:,} bytes")


class Inputs(NamedTuple):
    """Of one network, scaled as it is to get them."""

    x: Tensor
    labels: Tensor  # as trained on
    held: Tensor
    known: Tensor
    aerial: Tensor
    corrupted: dict[str, Tensor]  # of the first known ones
    truth: Tensor  # of held and known ones


def load(setting: dict[str, Any], given: argparse.Namespace) -> Inputs:
    """Return what a network is trained on, and asked."""
    seed, limit = setting["seed"], given.limit
    with np.load(given.inputs) as arrays:
        x, test = (torch.tensor(arrays[name]).float() / 255 for name in ("x", "test"))
        y, truth = (torch.tensor(arrays[name]) for name in ("y", "truth"))
        aerial = torch.cat([torch.tensor(arrays[f"aerial {place}/new"])[:limit] for place in PLACES])
    if setting["share"]:
        y = spoiled(y, "uniform", setting["share"], seed)
    mean, deviation = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
    scale = lambda part: ((part - mean) / deviation).to(given.device)  # noqa: E731
    known = test[HELD:][:limit]
    asked = {
        f"{kind}: {strength:g}": scale(
            corrupted(kind, strength, known[:CORRUPTED], torch.Generator().manual_seed(seed))
        )
        for kind, strengths in STRENGTHS.items()
        for strength in strengths
    }
    return Inputs(
        scale(x[:limit]), y[:limit].to(given.device), scale(test[:HELD][:limit]), scale(known),
        scale(aerial.float() / 255), asked, torch.cat([truth[:HELD][:limit], truth[HELD:][:limit]]),
    )  # fmt: skip


def measure(setting: dict[str, Any], given: argparse.Namespace, file: Path) -> None:
    """Train a network, and write what the package and others say of all inputs, after each step."""
    seconds, arrays = {}, {}
    begun = time.perf_counter()

    def keep(step: str, **found: Tensor) -> None:
        nonlocal begun
        seconds[step] = time.perf_counter() - begun
        arrays.update({name: value.double().cpu().numpy() for name, value in found.items()})
        about = json.dumps({"setting": setting, "seconds": seconds, "corrupted": list(inputs.corrupted)})
        np.savez_compressed(file, about=np.array(about), **arrays)
        print(f"{time.strftime('%X')} {setting} {step} {seconds[step]:.1f} s", flush=True)
        begun = time.perf_counter()

    inputs = load(setting, given)
    torch.manual_seed(setting["seed"])
    epochs = EPOCHS if given.epochs is None else given.epochs
    model = trained(resnet9(10, 32).to(given.device), inputs.x, inputs.labels, epochs, setting["seed"]).model
    model = model.to(memory_format=torch.contiguous_format)
    asked = torch.cat([inputs.known, inputs.aerial])
    predicted = torch.cat([inputs.held, inputs.known, *inputs.corrupted.values()])
    features = shift.FeatureScores(model, shift.Data(inputs.x, inputs.labels, [])).ask(asked)
    names = ("feature tenth", "GradNorm", "ViM", "Mahalanobis")
    keep(
        "training",
        asked_outputs=evaluated(model, asked),
        predicted_outputs=evaluated(model, predicted),
        truth=inputs.truth,
        learned=(evaluated(model, inputs.x).argmax(1) == inputs.labels).float().mean(),
        **{name: features[name] for name in names},
    )
    columns = (inputs.x, inputs.labels)
    if "reliability" in given.steps:
        gram = lw.GramMatrix(model, predicted, columns=columns, max_memory=MEMORY)
        keep("reliability", **lw.reliability(gram, sketch=SKETCH)._asdict())
    if "novelty" in given.steps:
        gram = lw.GramMatrix(model, asked, columns=columns, max_memory=MEMORY)
        keep("novelty", novelty=lw.novelty(gram, sketch=SKETCH))
    if "index" in given.steps:
        with tempfile.TemporaryDirectory() as folder:
            index = lw.build_index(model, columns, folder, width=SKETCH, pictures=False, max_memory=MEMORY)
            keep("index")
            told = index.novelty(asked)
            keep("index novelty", **{f"index {name}": value for name, value in told._asdict().items()})


def run(given: argparse.Namespace) -> None:
    """Start a process for each network, some side by side, and put what they write together."""
    given.out.mkdir(parents=True, exist_ok=True)
    waiting = [number for number, s in enumerate(settings()) if given.only in str(s)]
    running: dict[int, subprocess.Popen[bytes]] = {}
    failed, begun = [], time.monotonic()
    with tempfile.TemporaryDirectory() as work:
        try:
            while (waiting or running) and time.monotonic() - begun < given.seconds:
                while waiting and len(running) < given.processes:
                    number = waiting.pop(0)
                    running[number] = subprocess.Popen(
                        [sys.executable, __file__, "one", str(number), work, *_options(given)]
                    )
                for number, process in list(running.items()):
                    if process.poll() is not None:
                        failed += [number] if process.returncode else []
                        del running[number]
                        _collect(Path(work), number, given.out)
                time.sleep(0.2)
        finally:
            for number, process in running.items():
                process.kill()
                process.wait()
                _collect(Path(work), number, given.out)
    if failed or running or waiting:
        raise SystemExit(f"Failed: {failed}, stopped: {list(running)}, not begun: {waiting}. See above.")


def _options(given: argparse.Namespace) -> list[str]:
    found = ["--inputs", str(given.inputs), "--device", given.device, "--steps", *given.steps]
    for name in ("epochs", "limit"):
        value = getattr(given, name)
        found += [] if value is None else [f"--{name}", str(value)]
    return found


def _collect(work: Path, number: int, out: Path) -> None:
    file = work / f"{number}.npz"
    if file.exists() and zipfile.is_zipfile(file):  # not, where a process was stopped while it wrote
        with zipfile.ZipFile(out / f"results-{number % FILES}.zip", "a") as together:
            together.write(file, file.name)


def run_one(given: argparse.Namespace) -> None:
    """Measure one network; the file is there when it is whole."""
    torch.set_num_threads(1)
    setting, folder = settings()[given.number], Path(given.work)
    if setting["data"] == "cifar10":
        measure(setting, given, folder / f"{given.number}.npz")
        return
    found = shift.measure(setting, given)
    np.savez_compressed(folder / f"{given.number}.npz", **found)


def unpack(folder: Path, to: Path) -> list[Path]:
    """Return the files of all networks, unpacked."""
    for file in sorted(folder.glob("results-*.zip")):
        with zipfile.ZipFile(file) as together:
            together.extractall(to)
    return sorted(to.glob("*.npz"), key=lambda file: int(file.stem))


def make_table(given: argparse.Namespace) -> None:
    """Write areas and risks of the six networks to the results, and ingredients of the others to a folder."""
    from records import FOLDER, add

    results, rest = given.results or FOLDER / "shift_product.jsonl", given.folders[0] / "ingredients"
    results.unlink(missing_ok=True)
    shutil.rmtree(rest, ignore_errors=True)
    rest.mkdir()
    rows: dict[str, dict[str, Any]] = {}
    for folder in given.folders:
        with tempfile.TemporaryDirectory() as work:
            for file in unpack(folder, Path(work)):
                with np.load(file) as arrays:
                    found = {name: arrays[name] for name in arrays.files}
                about = json.loads(str(found.pop("about")))
                if "values" in found:
                    found["about"] = np.array(json.dumps(about))
                    whole = {f"0/{name}": value for name, value in found.items()}
                    np.savez_compressed(rest / f"part-{file.stem}.npz", **whole)
                    continue
                tensors = {name: torch.tensor(value) for name, value in found.items()}
                row = rows.setdefault(json.dumps(about["setting"]), {"seconds": {}})
                row["seconds"] |= about["seconds"]
                row |= evaluate_novelty(tensors) if "novelty" in tensors else {}
                row |= evaluate_trust(tensors, about["corrupted"]) if "closeness" in tensors else {}
    for setting, row in rows.items():
        add(results, json.loads(setting), **row)


def evaluate_novelty(found: dict[str, Tensor]) -> dict[str, Any]:
    """Return areas under the ROC curve, of all places and of some."""
    known, outputs = KNOWN, found["asked_outputs"]
    scores = {"likewise": found["novelty"]}
    if "index novelty" in found:
        scores |= {
            "likewise, index": found["index novelty"],
            "parameters=None": found["index gradient_novelty"],
        }
    scores |= {
        "neighbors in features": found["feature tenth"],
        "largest probability": -outputs.softmax(1).max(1).values,
        "energy": -outputs.logsumexp(1),
        **{name: found[name] for name in ("GradNorm", "ViM", "Mahalanobis")},
    }
    places = torch.arange(len(PLACES)).repeat_interleave((len(outputs) - known) // len(PLACES))
    chosen = torch.tensor([f"aerial {place}" in NOVEL["cifar10"][CHOOSING] for place in PLACES])[places]
    parts = {"all": torch.ones_like(chosen), "choosing": chosen, "reporting": ~chosen}
    areas = {
        part: {name: _area(score[known:][rows], score[:known]) for name, score in scores.items()}
        for part, rows in parts.items()
    }
    return {"areas": areas, "learned": float(found["learned"])}


def evaluate_trust(found: dict[str, Tensor], corrupted: list[str]) -> dict[str, Any]:
    """Return areas under the risk-coverage curve, of calibrated chances and what others use."""
    from reliability import tempered

    outputs, truth = found["predicted_outputs"], found["truth"].long()
    truth = torch.cat([truth, *(truth[HELD:][:CORRUPTED] for _ in corrupted)])
    names = ("closeness", "agreement", "shift", "prediction", "confidence")
    fields = [*(found[name] for name in names), outputs.softmax(1)]
    calibration = lw.calibrate(lw.Reliability(*(part[:HELD] for part in fields)), truth[:HELD])
    heat = tempered(outputs[:HELD], truth[:HELD])
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", lw.CalibrationWarning
        )  # corrupted inputs are unlike the held-out ones
        chances = calibration(lw.Reliability(*fields))
    trust = {
        "likewise": chances,
        "largest probability": outputs.softmax(1).max(1).values,
        "temperature": (outputs / heat).softmax(1).max(1).values,
    }
    wrong = (outputs.argmax(1) != truth).double()
    rows = {"none": slice(HELD, HELD + KNOWN)} | {
        name: slice(HELD + KNOWN + i * CORRUPTED, HELD + KNOWN + (i + 1) * CORRUPTED)
        for i, name in enumerate(corrupted)
    }
    risks = {
        case: {name: _risk(score[where], wrong[where]) for name, score in trust.items()}
        for case, where in rows.items()
    }
    return {"risks": risks}


def measure_cost(given: argparse.Namespace) -> None:
    """Print CPU seconds of 300 inputs of 8 x 8 against 2,000 training samples, median of three (smallest, largest)."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        block(1, 16, pool=True),
        block(16, 32),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(32, 10),
    ).eval()
    x, y, new = torch.randn(2000, 1, 8, 8), torch.arange(2000) % 10, torch.randn(300, 1, 8, 8)
    make = lambda: lw.GramMatrix(model, new, columns=(x, y))  # noqa: E731
    ways: dict[str, Any] = {
        'novelty(gram, parameters="features")': lambda: lw.novelty(make(), parameters="features"),
        "novelty(gram, parameters=None, sketch=None)": lambda: lw.novelty(
            make(), parameters=None, sketch=None
        ),
        "novelty(gram, sketch=None)": lambda: lw.novelty(make(), sketch=None),
        "novelty(gram, parameters=None, sketch=1024)": lambda: lw.novelty(
            make(), parameters=None, sketch=SKETCH
        ),
        "novelty(gram, sketch=1024)": lambda: lw.novelty(make(), sketch=SKETCH),
        "reliability(gram, sketch=1024)": lambda: lw.reliability(make(), sketch=SKETCH),
    }
    with tempfile.TemporaryDirectory() as folder:
        begun = time.process_time()
        index = lw.build_index(model, (x, y), folder, pictures=False)
        print(f"build_index: {time.process_time() - begun:.2f}")
        ways |= {
            "index.novelty": lambda: index.novelty(new),
            "index.reliability": lambda: index.reliability(new),
            "index.explain": lambda: index.explain(new),
        }
        for name, ask in ways.items():
            ask()
            seconds = []
            for _ in range(3):
                begun = time.process_time()
                ask()
                seconds.append(time.process_time() - begun)
            low, middle, high = sorted(seconds)
            print(f"{name}: {middle:.2f} ({low:.2f}, {high:.2f})", flush=True)


def _area(novel: Tensor, known: Tensor) -> float:
    from shift_scores import area

    return area(novel.numpy(), known.numpy())


def _risk(trust: Tensor, wrong: Tensor) -> float:
    from shift_scores import risk_coverage

    return risk_coverage(trust.numpy(), wrong.numpy())


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = arguments.add_subparsers(required=True)
    first = commands.add_parser("prepare")
    first.add_argument("--data", type=Path, required=True, help="folder of MNIST, Fashion-MNIST and CIFAR-10")
    first.add_argument("--aerial", type=Path, required=True, help="folder of tiles, a folder each place")
    first.set_defaults(do=prepare)
    second, one = commands.add_parser("run"), commands.add_parser("one")
    second.add_argument("--out", type=Path, default=Path("out/shift-product"), help="folder of the results")
    second.add_argument("--processes", type=int, default=1)
    second.add_argument("--seconds", type=float, default=1e9, help="stop what still runs after so many")
    second.add_argument("--only", default="", help="networks whose setting contains this")
    second.set_defaults(do=run)
    one.add_argument("number", type=int)
    one.add_argument("work")
    one.set_defaults(do=run_one)
    for command in (second, one):
        command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        command.add_argument("--epochs", type=int, help="instead of the usual ones, to try the file")
        command.add_argument(
            "--steps", nargs="+", default=STEPS, choices=STEPS, help="what CIFAR-10's are asked"
        )
        command.add_argument("--limit", type=int, help="use so many samples of each group, to try the file")
    for command in (first, second, one):
        command.add_argument("--inputs", type=Path, default=Path("out/shift-product.npz"))
    last = commands.add_parser("table")
    last.add_argument("folders", type=Path, nargs="+", help="what run wrote; steps may be of several runs")
    last.add_argument("--results", type=Path, help="instead of benchmarks/results/shift_product.jsonl")
    last.set_defaults(do=make_table)
    commands.add_parser("cost").set_defaults(do=measure_cost)
    given = arguments.parse_args()
    given.do(given)


if __name__ == "__main__":
    main()
