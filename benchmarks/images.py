"""The images that benchmarks are run on, as the experiments read them, ready for a network."""

import argparse
import sys
from pathlib import Path

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
