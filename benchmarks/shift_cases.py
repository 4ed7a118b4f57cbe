"""The cases of benchmarks/shift.py: novel inputs and corruptions, split once into those for choosing and for reporting.

The split was written down before any score was computed. Defaults of `novelty`, `reliability` and `calibrate` are
chosen on the choosing cases alone; tables are of the reporting cases.

    python benchmarks/shift_cases.py --data DIR --aerial DIR     all inputs into one file, out/shift-data.npz

Networks are trained on eight of ten classes; the other two are novel, others for the two seeds.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

CHOOSING, REPORTING = "choosing", "reporting"
LEFT_OUT = {  # by seed: those of seed 0 are a case for choosing, those of seed 1 for reporting
    "cifar10": ((3, 5), (8, 9)),
    "fashion-mnist": ((2, 6), (8, 9)),
    "table": ((8, 9), (3, 5)),
}
NOVEL = {
    "cifar10": {
        CHOOSING: (
            "left out", "fashion-mnist", "aerial kampala", "aerial banepa-drone", "noise", "gratings",
            "quarter turn", "shuffled",
        ),
        REPORTING: (
            "left out", "mnist", "aerial nairobi", "aerial zanzibar", "aerial catanduanes", "clouds", "constant",
            "checkerboards", "upside down", "inverted", "averaged pairs",
        ),
    },
    "fashion-mnist": {
        CHOOSING: ("left out", "mnist", "aerial kampala", "noise", "gratings", "quarter turn", "shuffled"),
        REPORTING: (
            "left out", "cifar10", "aerial nairobi", "clouds", "constant", "checkerboards", "upside down", "inverted",
            "averaged pairs",
        ),
    },
    "table": {
        CHOOSING: ("left out", "fashion-mnist", "uniform rows", "permuted columns", "doubled"),
        REPORTING: (
            "left out", "mnist", "independent columns", "normal rows", "scaled by .4", "averaged pairs",
            "constant rows",
        ),
    },
}  # fmt: skip
CORRUPTED = {  # three strengths of those for reporting, two for choosing
    "images": {
        CHOOSING: {
            "impulses": (0.03, 0.12), "motion blur": (3, 7), "brightness": (0.2, 0.4), "occlusion": (0.3, 0.5),
            "gamma": (1.8, 3.5), "few levels": (5, 3),
        },
        REPORTING: {
            "noise": (0.05, 0.1, 0.2), "blur": (0.7, 1.2, 2.0), "darkness": (0.6, 0.35, 0.15),
            "contrast": (0.6, 0.35, 0.15), "JPEG": (40, 15, 6), "pixelation": (0.6, 0.45, 0.3),
        },
    },
    "table": {
        CHOOSING: {"missing": (0.1, 0.3, 0.5)},
        REPORTING: {"noise": (0.1, 0.2, 0.3), "scale": (0.7, 0.5, 0.3)},
    },
}  # fmt: skip
PLACES = ("kampala", "banepa-drone", "nairobi", "zanzibar", "catanduanes")
TRAINING, TEST, EACH = 8750, 2600, 300  # images with all ten classes; inputs of another kind


def corruptions(data: str) -> dict[str, dict[str, tuple[float, ...]]]:
    """Return kinds and strengths of corruptions, for choosing and for reporting."""
    return CORRUPTED["table" if data == "table" else "images"]


def novel_inputs(
    name: str, known: Tensor, training: Tensor, others: dict[str, Tensor], chance: torch.Generator
) -> Tensor:
    """Return inputs of a kind, in [0, 1].

    Args:
        name: Of a case, but "left out".
        known: (n, ...) inputs of the known kind, of which some cases are made.
        training: The inputs trained on.
        others: Inputs of other data sets by name.
        chance: Random numbers.

    """
    if name in others:
        return fitted(others[name], known)
    return GENERATORS[name](known[:EACH], training, chance)


def fitted(images: Tensor, known: Tensor) -> Tensor:
    """Return images (n, c, h, w) in the size, the number of channels or the columns of the known inputs."""
    if known.dim() == 2:
        side = math.isqrt(known.shape[1])
        small = F.adaptive_avg_pool2d(images.mean(1, keepdim=True), side).flatten(1)
        return small / small.amax(1, keepdim=True).clamp(min=1e-6)  # rows of the table reach from 0 to 1
    if images.shape[1] > known.shape[1]:
        images = images.mean(1, keepdim=True)
    images = F.interpolate(images, known.shape[2:], mode="area")
    return images.expand(-1, known.shape[1], -1, -1)


def _uniform(known: Tensor, training: Tensor, chance: torch.Generator) -> Tensor:
    return torch.rand(known.shape, generator=chance)


def _blocks(known: Tensor, training: Tensor, chance: torch.Generator) -> Tensor:
    """Return images whose 16 blocks are in another order."""
    n, c, h, w = known.shape
    tiles = known.unflatten(3, (4, w // 4)).unflatten(2, (4, h // 4)).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    mixed = torch.stack([tile[torch.randperm(16, generator=chance)] for tile in tiles])
    return mixed.unflatten(1, (4, 4)).permute(0, 3, 1, 4, 2, 5).reshape(n, c, h, w)


def _gratings(known: Tensor, training: Tensor, chance: torch.Generator) -> Tensor:
    n, c, h, w = known.shape
    draw = lambda *shape: torch.rand(*shape, generator=chance)  # noqa: E731
    angle, periods, phase = (
        draw(n, 1, 1, 1) * math.pi,
        1 + 7 * draw(n, 1, 1, 1),
        draw(n, c, 1, 1) * 2 * math.pi,
    )
    y, x = torch.meshgrid(torch.linspace(0, 1, h), torch.linspace(0, 1, w), indexing="ij")
    return 0.5 + 0.5 * (2 * math.pi * periods * (angle.cos() * x + angle.sin() * y) + phase).sin()


def _clouds(known: Tensor, training: Tensor, chance: torch.Generator) -> Tensor:
    """Return noise with the spectrum 1/f of natural images."""
    n, c, h, w = known.shape
    y, x = torch.meshgrid(torch.fft.fftfreq(h), torch.fft.rfftfreq(w), indexing="ij")
    spectrum = torch.fft.rfft2(torch.randn(n, c, h, w, generator=chance)) / (y**2 + x**2).sqrt().clamp(
        min=1 / h
    )
    found = torch.fft.irfft2(spectrum, s=(h, w))
    found = (found - found.mean((1, 2, 3), keepdim=True)) / found.std((1, 2, 3), keepdim=True)
    return (0.5 + 0.25 * found).clamp(0, 1)


def _constant(known: Tensor, training: Tensor, chance: torch.Generator) -> Tensor:
    color = torch.rand(*known.shape[:2], *[1] * (known.dim() - 2), generator=chance)
    return (color[:, :1] if known.dim() == 2 else color).expand_as(known)


def _checkerboards(known: Tensor, training: Tensor, chance: torch.Generator) -> Tensor:
    n, c, h, w = known.shape
    cells = 2 ** torch.randint(1, 4, (n, 1, 1), generator=chance)
    places = torch.arange(h)[:, None] // cells + torch.arange(w) // cells
    one, other = torch.rand(2, n, c, 1, 1, generator=chance)
    return torch.where((places % 2 == 0)[:, None], one, other)


def _pairs(known: Tensor, training: Tensor, chance: torch.Generator) -> Tensor:
    return (known + known[torch.randperm(len(known), generator=chance)]) / 2


def _independent(known: Tensor, training: Tensor, chance: torch.Generator) -> Tensor:
    """Return rows whose columns are drawn each by itself: the same marginal distributions."""
    places = torch.randint(0, len(training), known.shape, generator=chance)
    return training.gather(0, places)


def _normal(known: Tensor, training: Tensor, chance: torch.Generator) -> Tensor:
    """Return rows with the mean and the covariances of the training set."""
    centered = training - training.mean(0)
    weights = torch.randn(len(known), len(training), generator=chance) / len(training) ** 0.5
    return training.mean(0) + weights @ centered


GENERATORS: dict[str, Callable[[Tensor, Tensor, torch.Generator], Tensor]] = {
    "noise": _uniform,
    "uniform rows": _uniform,
    "gratings": _gratings,
    "quarter turn": lambda known, training, chance: known.rot90(1, (2, 3)),
    "shuffled": _blocks,
    "clouds": _clouds,
    "constant": _constant,
    "constant rows": _constant,
    "checkerboards": _checkerboards,
    "upside down": lambda known, training, chance: known.rot90(2, (2, 3)),
    "inverted": lambda known, training, chance: 1 - known,
    "averaged pairs": _pairs,
    "permuted columns": lambda known, training, chance: known[
        :, torch.randperm(known.shape[1], generator=chance)
    ],
    "doubled": lambda known, training, chance: 2 * known,
    "independent columns": _independent,
    "normal rows": _normal,
    "scaled by .4": lambda known, training, chance: 0.4 * known,
}


def corrupted(kind: str, strength: float, x: Tensor, chance: torch.Generator) -> Tensor:
    """Return inputs in [0, 1] with a corruption; rows of a table are not cut off at 1."""
    return CORRUPTIONS[kind](x, strength, chance)


def _impulses(x: Tensor, share: float, chance: torch.Generator) -> Tensor:
    where = torch.rand(len(x), 1, *x.shape[2:], generator=chance) < share
    return torch.where(where, torch.randint(0, 2, x.shape, generator=chance).float(), x)


def _filtered(x: Tensor, weights: Tensor) -> Tensor:
    """Return images filtered by weights (h, w), edges repeated."""
    h, w = weights.shape
    padded = F.pad(x, (w // 2, w // 2, h // 2, h // 2), mode="replicate")
    return F.conv2d(padded.flatten(0, 1)[:, None], weights[None, None])[:, 0].unflatten(0, x.shape[:2])


def _blurred(x: Tensor, width: float, chance: torch.Generator) -> Tensor:
    places = torch.arange(-6, 7.0)
    line = (-(places**2) / (2 * width**2)).exp()
    return _filtered(x, torch.outer(line, line) / line.sum() ** 2)


def _occluded(x: Tensor, share: float, chance: torch.Generator) -> Tensor:
    """Return images with a gray square whose side is this share of the image's."""
    side = x.shape[2]
    size = round(share * side)
    top, left = torch.randint(0, side - size + 1, (2, len(x), 1, 1, 1), generator=chance)
    y, z = torch.arange(side)[:, None], torch.arange(side)
    inside = (y >= top) & (y < top + size) & (z >= left) & (z < left + size)
    return torch.where(inside, torch.full_like(x, 0.5), x)


LUMINANCE = torch.tensor([
    [16, 11, 10, 16, 24, 40, 51, 61], [12, 12, 14, 19, 26, 58, 60, 55], [14, 13, 16, 24, 40, 57, 69, 56],
    [14, 17, 22, 29, 51, 87, 80, 62], [18, 22, 37, 56, 68, 109, 103, 77], [24, 35, 55, 64, 81, 104, 113, 92],
    [49, 64, 78, 87, 103, 121, 120, 101], [72, 92, 95, 98, 112, 100, 103, 99],
])  # fmt: skip


def _compressed(x: Tensor, quality: float, chance: torch.Generator) -> Tensor:
    """Return images after JPEG's rounding of cosine coefficients, by the standard table for all channels."""
    scale = 50 / quality if quality < 50 else 2 - quality / 50
    table = (LUMINANCE * scale).round().clamp(1, 255)
    places = torch.arange(8.0)
    cosines = ((2 * places + 1) * places[:, None] * math.pi / 16).cos() * 0.5
    cosines[0] /= 2**0.5
    h, w = x.shape[2:]
    padded = F.pad(x, (0, -w % 8, 0, -h % 8), mode="replicate") * 255 - 128
    blocks = padded.unflatten(3, (-1, 8)).unflatten(2, (-1, 8)).transpose(3, 4)
    rounded = ((cosines @ blocks @ cosines.T) / table).round() * table
    back = (cosines.T @ rounded @ cosines).transpose(3, 4).flatten(4, 5).flatten(2, 3)
    return ((back + 128) / 255).clamp(0, 1)[:, :, :h, :w]


def _pixelated(x: Tensor, share: float, chance: torch.Generator) -> Tensor:
    small = F.interpolate(x, [round(share * side) for side in x.shape[2:]], mode="area")
    return F.interpolate(small, x.shape[2:], mode="nearest")


def _missing(x: Tensor, share: float, chance: torch.Generator) -> Tensor:
    return torch.where(torch.rand(x.shape, generator=chance) < share, x.mean(0), x)


def _noisy(x: Tensor, deviation: float, chance: torch.Generator) -> Tensor:
    found = x + deviation * torch.randn(x.shape, generator=chance)
    return found if x.dim() == 2 else found.clamp(0, 1)


CORRUPTIONS: dict[str, Callable[[Tensor, float, torch.Generator], Tensor]] = {
    "impulses": _impulses,
    "motion blur": lambda x, length, chance: _filtered(x, torch.full((1, int(length)), 1 / length)),
    "brightness": lambda x, added, chance: (x + added).clamp(0, 1),
    "occlusion": _occluded,
    "gamma": lambda x, power, chance: x**power,
    "few levels": lambda x, levels, chance: (x * (levels - 1)).round() / (levels - 1),
    "noise": _noisy,
    "blur": _blurred,
    "darkness": lambda x, factor, chance: x * factor,
    "scale": lambda x, factor, chance: x * factor,
    "contrast": lambda x, factor, chance: (
        (x - x.mean((1, 2, 3), keepdim=True)) * factor + x.mean((1, 2, 3), keepdim=True)
    ),
    "JPEG": _compressed,
    "pixelation": _pixelated,
    "missing": _missing,
}


def aerial_patches(folder: Path, place: str) -> np.ndarray:
    """Return patches of 64 x 64 pixels of the tiles of a place, halved in size, (300, 3, 32, 32)."""
    from PIL import Image

    tiles = sorted(
        p for p in (folder / place).iterdir() if p.suffix in (".jpg", ".png") and ".mask" not in p.name
    )
    chance = np.random.default_rng(0)
    found = []
    for i in range(EACH):
        image = Image.open(tiles[i % len(tiles)]).convert("RGB")
        left, top = (int(v) for v in chance.integers(0, 192, 2))
        patch = image.crop((left, top, left + 64, top + 64)).resize((32, 32), Image.Resampling.BOX)
        found.append(np.asarray(patch).transpose(2, 0, 1))
    return np.stack(found)


def prepare(given: argparse.Namespace) -> None:
    """Write all inputs to one file, as bytes."""
    import data
    from sklearn.datasets import load_digits

    arrays = {}
    for name in ("cifar10", "fashion-mnist"):
        arrays[f"{name}/x"], arrays[f"{name}/y"] = data.images(name, given.data, "train", 20_000, TRAINING)
        arrays[f"{name}/new"], arrays[f"{name}/truth"] = data.images(name, given.data, "test", 0, TEST)
    arrays["mnist/new"] = data.images("mnist", given.data, "test", 0, EACH)[0]
    digits = load_digits()
    pixels = digits.data.astype(np.uint8)  # 0 to 16
    arrays |= {"table/x": pixels[:1000], "table/y": digits.target[:1000]}
    arrays |= {"table/new": pixels[1000:], "table/truth": digits.target[1000:]}
    arrays |= {f"aerial {place}/new": aerial_patches(given.aerial, place) for place in PLACES}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(given.out, **arrays)
    print(f"{given.out}: {given.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    from images import data_folder

    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    data_folder(arguments)
    arguments.add_argument("--aerial", type=Path, required=True, help="folder of tiles, a folder each place")
    arguments.add_argument("--out", type=Path, default=Path("out/shift-data.npz"))
    prepare(arguments.parse_args())
