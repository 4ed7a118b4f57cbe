"""Directions in which an image changes when it is moved a little, for `losses.along`.

Each returns e(x), of the shape of x = (..., height, width), such that x + ε e(x) is x moved by ε pixels,
turned by ε radians, enlarged by the factor 1 + ε, or brightened by it. Spatial derivatives are central
differences, which suit images that are smooth at the scale of a pixel; at the border they are one-sided.
"""

import torch
from torch import Tensor


def translation(images: Tensor, *, right: float = 1.0, down: float = 0.0) -> Tensor:
    """Return the direction of a shift to the right and down, in pixels.

    Args:
        images: (..., height, width).
        right: Pixels to the right.
        down: Pixels down.

    Returns:
        Of the shape of the images.

    Example:
        >>> import torch, likewise as lw
        >>> ramp = torch.arange(4.0).expand(4, 4)
        >>> lw.losses.directions.translation(ramp)[0]                        # darker by one a pixel
        tensor([-1., -1., -1., -1.])

    """
    vertical, horizontal = _slopes(images)
    return -right * horizontal - down * vertical


def rotation(images: Tensor) -> Tensor:
    """Return the direction of a turn about the center, clockwise as the image is seen.

    Args:
        images: (..., height, width).

    Returns:
        Of the shape of the images.

    Example:
        >>> import torch, likewise as lw
        >>> lw.losses.directions.rotation(torch.rand(2, 1, 8, 8)).shape
        torch.Size([2, 1, 8, 8])

    """
    (vertical, horizontal), (y, x) = _slopes(images), _from_center(images)
    return y * horizontal - x * vertical


def scaling(images: Tensor) -> Tensor:
    """Return the direction of an enlargement about the center.

    Args:
        images: (..., height, width).

    Returns:
        Of the shape of the images.

    Example:
        >>> import torch, likewise as lw
        >>> lw.losses.directions.scaling(torch.rand(2, 1, 8, 8)).shape
        torch.Size([2, 1, 8, 8])

    """
    (vertical, horizontal), (y, x) = _slopes(images), _from_center(images)
    return -x * horizontal - y * vertical


def intensity(images: Tensor) -> Tensor:
    """Return the direction of a brightening of all pixels by one factor.

    Args:
        images: (..., height, width).

    Returns:
        Of the shape of the images.

    Example:
        >>> import torch, likewise as lw
        >>> lw.losses.directions.intensity(torch.rand(2, 1, 8, 8)).shape
        torch.Size([2, 1, 8, 8])

    """
    return images.clone()


def _slopes(images: Tensor) -> tuple[Tensor, Tensor]:
    if images.dim() < 2 or min(images.shape[-2:]) < 2:
        raise ValueError(
            f"Expected images (..., height, width) of at least two pixels per side, found {tuple(images.shape)}."
        )
    vertical, horizontal = torch.gradient(images, dim=(-2, -1))
    return vertical, horizontal


def _from_center(images: Tensor) -> tuple[Tensor, Tensor]:
    h, w = images.shape[-2:]
    y = torch.arange(h).to(images) - (h - 1) / 2
    x = torch.arange(w).to(images) - (w - 1) / 2
    return y[:, None], x
