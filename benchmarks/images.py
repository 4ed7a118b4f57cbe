"""The images that benchmarks are run on, as the experiments read them, ready for a network."""

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parent.parent / "experiments"))
import data

SCALE = {"mnist": (0.1307, 0.3081), "fashion-mnist": (0.2860, 0.3530), "cifar10": (0.4734, 0.2516)}


def images(
    name: str, folder: Path, split: str = "train", first: int = 0, count: int | None = 10_000
) -> tuple[Tensor, Tensor]:
    """Return `count` images from number `first`, (n, c, h, w) with mean 0 and deviation 1, and labels."""
    pixels, labels = data.images(name, folder, split, first, count)
    mean, spread = SCALE[name]
    return (torch.tensor(pixels).float() / 255 - mean) / spread, torch.tensor(labels)


def data_folder(arguments: argparse.ArgumentParser) -> None:
    """Add the option that says where images are."""
    data.data_option(arguments)
