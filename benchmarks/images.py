"""The images that benchmarks are run on, as the experiments read them, ready for a network."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parent.parent / "experiments"))
import data


def images(
    name: str, folder: Path, split: str = "train", first: int = 0, count: int | None = 10_000
) -> tuple[Tensor, Tensor]:
    """Return `count` images from number `first`, (n, c, h, w) with mean 0 and deviation 1, and labels."""
    return data.scaled(name, folder, split, first, count)


def data_folder(arguments: argparse.ArgumentParser) -> None:
    """Add the option that says where images are."""
    data.data_option(arguments)


def pack_images(file: Path, sets: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Write sets of images and labels into one file, images as bytes: their values are scaled bytes."""
    arrays = dict[str, np.ndarray]()
    for name, (x, y) in sets.items():
        low, high = float(x.amin()), float(x.amax())
        arrays[f"{name} x"] = ((x - low) / (high - low) * 255).round().byte().cpu().numpy()
        arrays[f"{name} y"], arrays[f"{name} range"] = y.cpu().numpy(), np.array([low, high])
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    print(f"{file}: {file.stat().st_size:,} bytes")


def unpack_images(file: Path, name: str) -> tuple[Tensor, Tensor]:
    """Return the images and labels of one set, scaled as they were."""
    with np.load(file) as arrays:
        pixels, y = torch.tensor(arrays[f"{name} x"]), torch.tensor(arrays[f"{name} y"])
        low, high = arrays[f"{name} range"].tolist()
    return pixels.float() / 255 * (high - low) + low, y
