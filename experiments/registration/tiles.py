"""The aerial images and their building outlines, each place as one or more regions at about 0.15 m a pixel.

Coordinates are pixels of the region's image, x to the right and y down. Outlines may reach beyond it. Places
are never mixed between roles: training, validation (other ground of a training city), held-out (cities
never trained on), and Nairobi, whose outlines are really misaligned, so that no truth is known there.
"""

import json
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

ZOOM = 20  # of tiles of 256 pixels; 0.13 to 0.15 m a pixel at these latitudes
EAST = 5 * 512  # of Banepa's 3072 columns: what lies further is validation
SMALLEST = 300  # square pixels, about 6 m²: smaller outlines are no buildings to align by
PAD = 640  # pixels of map around each image: patches near its border see outlines beyond it
ROLES = {"zanzibar": "train", "kampala": "held-out", "catanduanes": "held-out", "nairobi": "nairobi"}
ROLES |= {"banepa-drone": "validation"}


class Region(NamedTuple):
    """One image without gaps, with its outlines."""

    place: str
    role: str
    image: np.ndarray  # (h, w, 3) bytes
    outlines: list[np.ndarray]  # each (v, 2) floats, x and y


def folder(given: Path | None) -> Path:
    """Return where the data lie: the folder given, or $LIKEWISE_DATA."""
    chosen = given or os.environ.get("LIKEWISE_DATA")
    if chosen is None:
        raise SystemExit(
            "Say where the data are: --data DIR or $LIKEWISE_DATA, with aerial-5aoi/ and aerial-banepa/."
        )
    missing = [n for n in ("aerial-5aoi", "aerial-banepa") if not (Path(chosen) / n).is_dir()]
    if missing:
        raise SystemExit(
            f"{chosen} has no {' and no '.join(missing)}: docs/registration.md says where both come from "
            "and how they are laid out."
        )
    return Path(chosen)


def regions(data: Path) -> list[Region]:
    """Return every region of every place."""
    found = _banepa(data / "aerial-banepa")
    for name, role in ROLES.items():
        place = data / "aerial-5aoi" / name
        files = [p for p in place.glob(f"{ZOOM}-*") if not p.name.endswith(".mask.png")]
        shapes = _shapes(place / "labels.geojson")
        for group in _contiguous({_address(p): p for p in files}):
            image, corner = _stitched(group, 256)
            found.append(Region(name, role, image, _inside(shapes, corner, image.shape)))
    return found


def centroid(outline: np.ndarray) -> np.ndarray:
    """Return the center of an outline's area, x and y."""
    p, q = outline, np.roll(outline, -1, 0)
    cross = p[:, 0] * q[:, 1] - q[:, 0] * p[:, 1]
    if abs(cross.sum()) < 1e-6:
        return outline.mean(0)
    return ((p + q) * cross[:, None]).sum(0) / (3 * cross.sum())


def area(outline: np.ndarray) -> float:
    """Return an outline's area in square pixels."""
    q = np.roll(outline, -1, 0)
    return float(abs((outline[:, 0] * q[:, 1] - q[:, 0] * outline[:, 1]).sum()) / 2)


def drawn_map(outlines: list[np.ndarray], height: int, width: int, pad: int = PAD) -> np.ndarray:
    """Return fill, edge and vertex channels, (h + 2 pad, w + 2 pad, 3) bytes."""
    size = (width + 2 * pad, height + 2 * pad)
    layers = [Image.new("L", size) for _ in range(3)]
    fill, edge, vertex = (ImageDraw.Draw(layer) for layer in layers)
    for outline in outlines:
        points = [(float(x), float(y)) for x, y in outline + pad]
        fill.polygon(points, fill=255)
        edge.line([*points, points[0]], fill=255, width=3)
        for x, y in points:
            vertex.ellipse([x - 3, y - 3, x + 3, y + 3], fill=255)
    return np.stack([np.asarray(layer) for layer in layers], 2)


def _banepa(place: Path) -> list[Region]:
    files = {_address(p): p for p in (place / "labelled").glob("*.tif")}
    image, corner = _stitched(files, 512)
    outlines = _inside(_shapes(place / "osm_buildings.geojson"), corner, image.shape)
    west = [o for o in outlines if centroid(o)[0] < EAST]
    east = [o - [EAST, 0] for o in outlines if centroid(o)[0] >= EAST]
    return [
        Region("banepa", "train", image[:, :EAST], west),
        Region("banepa", "validation", image[:, EAST:], east),
    ]


def _address(path: Path) -> tuple[int, int]:
    _, x, y = path.name.split(".")[0].split("-")
    return int(x), int(y)


def _contiguous(files: dict[tuple[int, int], Path]) -> list[dict[tuple[int, int], Path]]:
    """Return the tiles in groups that touch."""
    left, groups = set(files), []
    while left:
        front, group = [min(left)], []
        left -= set(front)
        while front:
            x, y = front.pop()
            group.append((x, y))
            beside = {(x + i, y + j) for i in (-1, 0, 1) for j in (-1, 0, 1)} & left
            left -= beside
            front += sorted(beside)
        groups.append({address: files[address] for address in sorted(group)})
    return sorted(groups, key=min)


def _stitched(files: dict[tuple[int, int], Path], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return one image of tiles and the place of its corner in the world's pixels."""
    addresses = np.array(list(files))
    first, last = addresses.min(0), addresses.max(0)
    columns, rows = (last - first + 1) * size
    image = np.zeros((rows, columns, 3), np.uint8)
    for (x, y), path in files.items():
        left, top = (np.array([x, y]) - first) * size
        image[top : top + size, left : left + size] = np.asarray(Image.open(path).convert("RGB"))
    return image, first * size


def _shapes(path: Path) -> list[np.ndarray]:
    """Return outlines in the world's pixels (web mercator)."""
    n, shapes = 256 * 2**ZOOM, []
    for feature in json.loads(path.read_text(encoding="utf-8"))["features"]:
        ring = np.array(feature["geometry"]["coordinates"][0])[:-1, :2]
        latitude = np.radians(ring[:, 1])
        x = (ring[:, 0] + 180) / 360 * n
        y = (0.5 - np.arcsinh(np.tan(latitude)) / (2 * np.pi)) * n
        shapes.append(np.stack([x, y], 1))
    return shapes


def _inside(shapes: list[np.ndarray], corner: np.ndarray, shape: tuple[int, ...]) -> list[np.ndarray]:
    """Return the outlines whose center lies in the image, in its pixels."""
    moved = [s - corner for s in shapes]
    size = np.array([shape[1], shape[0]])
    return [o for o in moved if ((centroid(o) >= 0) & (centroid(o) < size)).all()]
