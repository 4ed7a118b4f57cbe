"""Nairobi, whose outlines are really off: what the networks move them by, and whether they then lie on edges.

There is no truth. As a witness that no network has seen: the mean slope of the image across the outline,
which is large where an outline runs along the edge of a roof.
"""

from typing import Any

import numpy as np
import torch
from rounds import Models, Views, aligned
from scipy import ndimage
from tiles import SMALLEST, Region, area


def found(regions: list[Region], views: Views, models: Models) -> dict[str, Any]:
    """Return how far each outline is moved (x, y), and the slope across outlines before and after."""
    n = len(next(iter(views.values())))
    moved = -aligned(models, views, torch.zeros(n, 2)).double().cpu().numpy()
    before, after, chance = scores(regions, "nairobi", moved)
    return {
        "moved": moved.round(2).tolist(),
        "median": float(np.median(np.linalg.norm(moved, axis=1))),
        "slope before": float(np.mean(before)),
        "slope after": float(np.mean(after)),
        "slope opposite": float(np.mean(chance)),
        "better": float(np.mean(after > before)),
    }


def scores(regions: list[Region], role: str, moved: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the slope across each outline where it was, where it is moved to, and as far the other way."""
    values, index = [], 0
    for region in (r for r in regions if r.role == role):
        smooth = ndimage.gaussian_filter(region.image.mean(2), 1.5)
        slopes = np.stack(np.gradient(smooth)[::-1])  # along x, along y
        for outline in region.outlines:
            if area(outline) >= SMALLEST:
                move = moved[index]
                values.append([across(slopes, outline + m) for m in (0 * move, move, -move)])
                index += 1
    return tuple(np.array(values).T)


def across(slopes: np.ndarray, outline: np.ndarray) -> float:
    """Return the mean of |slope · normal| along an outline, every two pixels."""
    total, length = 0.0, 0
    for p, q in zip(outline, np.roll(outline, -1, 0), strict=True):
        steps = max(int(np.linalg.norm(q - p) / 2), 1)
        points = p + (q - p) * (np.arange(steps)[:, None] + 0.5) / steps
        normal = np.array([q[1] - p[1], p[0] - q[0]]) / max(np.linalg.norm(q - p), 1e-9)
        here = [ndimage.map_coordinates(s, points[:, ::-1].T, order=1, mode="nearest") for s in slopes]
        total += float(np.abs(normal[0] * here[0] + normal[1] * here[1]).sum())
        length += steps
    return total / length
