"""Patches of an image and of a building map that is displaced, with the displacement that carries it back.

A site is one building. Its patch is centered on the building as the map has it, so that the map tells nothing
of where it should lie; the image is shown as far off as the map is wrong. All displacements point from where
the map is to where it should be, in pixels at reference scale: the true one of a patch, y = v + a, is the
displacement v that was added for training and what the annotation itself lacks, a. The network is given
the label ỹ = v: it is told to carry the map back to the annotation, and its noise is ỹ − y = −a.

At scale s all is averaged over s × s pixels, and displacements are divided by s. Around the center the map is
deformed by a smooth random field that vanishes there.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from tiles import PAD, SMALLEST, Region, area, centroid, drawn_map
from torch import Tensor

REACH = 4.0  # pixels at each scale that a network learns to move
FARTHEST = 48.0  # pixels at reference scale: annotations are no farther off along x or y
JITTER = 3.0  # pixels at each scale by which the center of a patch misses that of the building
BEND = 0.5  # pixels at each scale, of the smooth field at the border of a patch


@dataclass(frozen=True)
class Sites:
    """Buildings of some roles, with all that their patches at one scale can show."""

    scale: int
    size: int  # pixels of a patch
    images: Tensor  # (n, 3, w, w) bytes around the building
    maps: Tensor  # (n, 3, u, u) bytes
    spread: Tensor  # (n,) half the building's size in reference pixels
    place: list[str]

    def to(self, device: str) -> "Sites":
        images, maps, spread = (t.to(device) for t in (self.images, self.maps, self.spread))
        return replace(self, images=images, maps=maps, spread=spread)

    def take(self, which: Tensor) -> "Sites":
        images, maps, spread = (t[which.to(t.device)] for t in (self.images, self.maps, self.spread))
        place = [self.place[i] for i in which.tolist()]
        return replace(self, images=images, maps=maps, spread=spread, place=place)

    def nameless(self, which: Tensor) -> "Sites":
        """Return these sites without their places, and without waiting for the device."""
        images, maps, spread = (t[which] for t in (self.images, self.maps, self.spread))
        return replace(self, images=images, maps=maps, spread=spread, place=[])

    def __len__(self) -> int:
        return len(self.images)


class Patches(NamedTuple):
    """What the network sees, and what it is told; displacements in pixels at this scale."""

    image: Tensor  # (n, 3, size, size), about -1 to 1
    map: Tensor  # (n, 3, size, size), 0 to 1
    label: Tensor  # (n, 2) ỹ, x and y
    truth: Tensor  # (n, 2) y

    @property
    def inputs(self) -> tuple[Tensor, Tensor]:
        return self.image, self.map

    @property
    def labeled(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.image, self.map, self.label

    def take(self, which: Tensor | slice) -> "Patches":
        return Patches(*(value[which] for value in self))


class Poses(NamedTuple):
    """How each patch of a set of sites is shown: displacement, jitter, deformation and turn."""

    moved: Tensor  # (n, 2) v, at reference scale
    jitter: Tensor  # (n, 2) pixels at this scale
    bend: Tensor  # (n, 2, 4, 4) control points of the smooth field
    turn: Tensor  # (n,) integers 0 to 7: quarter turns, then mirrored


def sites(found: list[Region], role: str, scale: int, size: int) -> Sites:
    """Return the buildings of a role, with windows of image and map at this scale."""
    images, maps, spread, place = [], [], [], []
    wide, narrow = _windows(scale, size)
    for region in (r for r in found if r.role == role):
        image = np.pad(region.image, ((PAD, PAD), (PAD, PAD), (0, 0)))
        image, drawn = (
            _reduced(x, scale) for x in (image, drawn_map(region.outlines, *region.image.shape[:2]))
        )
        for outline in region.outlines:
            if area(outline) < SMALLEST:
                continue
            middle = (centroid(outline) + PAD) / scale
            images.append(_window(image, middle, wide))
            maps.append(_window(drawn, middle, narrow))
            spread.append(np.abs(outline - centroid(outline)).mean())
            place.append(region.place)
    stacked = [torch.from_numpy(np.stack(w)).permute(0, 3, 1, 2).contiguous() for w in (images, maps)]
    return Sites(scale, size, *stacked, torch.tensor(spread, dtype=torch.float32), place)


def drawn_noise(n: int, sigma: float, seed: int) -> Tensor:
    """Return what n annotations lack, (n, 2): Gaussian, σ at reference scale along x and y."""
    chance = torch.Generator().manual_seed(seed)
    return (sigma * torch.randn(n, 2, generator=chance)).clamp(-FARTHEST, FARTHEST)


def drawn_poses(
    n: int,
    scale: int,
    chance: torch.Generator | None,
    moving: bool = True,
    turning: bool = True,
    device: str = "cpu",
) -> Poses:
    """Return random poses; without moving, the map is shown as annotated, straight and centered."""
    drawn: dict[str, Any] = {"generator": chance, "device": device}
    moved = (2 * torch.rand(n, 2, **drawn) - 1) * REACH * scale * moving
    jitter = (2 * torch.rand(n, 2, **drawn) - 1) * JITTER * moving
    bend = torch.randn(n, 2, 4, 4, **drawn) * BEND * moving
    turn = torch.randint(8, (n,), **drawn) * turning
    return Poses(moved, jitter, bend, turn)


def shown(of: Sites, lacking: Tensor, poses: Poses) -> Patches:
    """Return the patches of these sites whose annotations lack `lacking`, (n, 2), in these poses."""
    device, s, p = of.images.device, of.scale, of.size
    lacking = lacking.to(device)
    poses = Poses(*(value.to(device) for value in poses))
    truth = (poses.moved + lacking) / s
    turns = turn_matrices(poses.turn)
    image = _sampled(of.images, poses.jitter - truth, p, turns) / 127.5 - 1
    drawn = _sampled(of.maps, poses.jitter, p, turns, _smooth(poses.bend, p)) / 255
    label, truth = ((turns @ v[:, :, None]).squeeze(2) for v in (poses.moved / s, truth))
    return Patches(image, drawn, label, truth)


def turn_matrices(turn: Tensor) -> Tensor:
    """Return matrices (n, 2, 2) that turn vectors left by quarters, mirrored first if 4 or more."""
    quarters, mirror = turn % 4, 1.0 - 2.0 * (turn >= 4)
    cosine, sine = (1.0 - quarters) * (quarters % 2 == 0), (2.0 - quarters) * (quarters % 2)
    return torch.stack([cosine * mirror, sine, -sine * mirror, cosine], 1).unflatten(1, (2, 2))


def turned(x: Tensor, turn: int) -> Tensor:
    """Return pictures (n, c, h, w) or vectors (n, 2), all in the same turn."""
    if x.dim() == 4:
        return (x.flip(3) if turn >= 4 else x).rot90(turn % 4, (2, 3))
    return x @ turn_matrices(torch.tensor([turn]))[0].to(x).T


def _windows(scale: int, size: int) -> tuple[int, int]:
    """Return the sizes of windows from which any image and any map of a patch can be cut; both even."""
    far = int(np.ceil(JITTER)) + 2
    return size + 2 * (far + int(REACH) + int(np.ceil(FARTHEST / scale))), size + 2 * (far + 2)


def _reduced(image: np.ndarray, scale: int) -> np.ndarray:
    return np.asarray(Image.fromarray(image).reduce(scale)) if scale > 1 else image


def _window(image: np.ndarray, middle: np.ndarray, size: int) -> np.ndarray:
    """Return size × size pixels around a place; black where there is no image."""
    left, top = (int(v) for v in (middle - size / 2).round())
    box = np.zeros((size, size, 3), np.uint8)
    part = image[max(top, 0) : top + size, max(left, 0) : left + size]
    y, x = max(-top, 0), max(-left, 0)
    box[y : y + part.shape[0], x : x + part.shape[1]] = part
    return box


def _smooth(control: Tensor, size: int) -> Tensor:
    """Return fields (n, size, size, 2) through these control points, zero at the center."""
    field = F.interpolate(control, size=(size, size), mode="bicubic", align_corners=True)
    middle = field[:, :, size // 2 - 1 : size // 2 + 1, size // 2 - 1 : size // 2 + 1].mean(
        (2, 3), keepdim=True
    )
    return (field - middle).permute(0, 2, 3, 1)


def _sampled(windows: Tensor, offset: Tensor, size: int, turns: Tensor, bent: Tensor | float = 0.0) -> Tensor:
    """Return size × size pixels around the center of each window plus an offset (x, y), turned, bilinear."""
    w = windows.shape[-1]
    steps = torch.arange(size, device=windows.device) - (size - 1) / 2
    grid = torch.stack(torch.meshgrid(steps, steps, indexing="xy"), 2).flatten(0, 1) @ turns
    grid = grid.unflatten(1, (size, size)) + offset[:, None, None] + bent
    return F.grid_sample(windows.float(), grid * 2 / w, align_corners=False, padding_mode="border")
