"""A network that sees an image and a map and says how to move the map.

Two U-shaped branches, one for the image and one for the map (fill, edge, vertex), of convolutions and ELU,
as in the paper's appendix. They are joined by how well the features of the one, moved by every displacement
within reach, match those of the other: the authors concatenate them instead, which learns the same but from
many times more patches than two cores see in minutes.

Unlike theirs it normalizes, each sample by itself: in groups after each convolution, and each feature over
the patch before the branches meet, so that their products are correlations. Without it features of wide
networks grow until all behind them saturates, and nothing is learned.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

REACH = 3  # pixels of half resolution: matches are sought this far, 6 pixels of the patch
GROUP = 8  # channels that are normalized together


class Alignment(nn.Module):
    """(image, map) (n, 3, size, size) each -> displacement (n, 2) that carries the map home, in pixels.

    `deep`: channels of the coarsest level, where weights are many and cost little.
    """

    def __init__(self, width: int = 8, deep: int = 16) -> None:
        super().__init__()
        self.seen = 0  # patches in training
        self.image, self.map = Branch(width, deep), Branch(width, deep)
        self.match = nn.Sequential(_layer(width, 2 * width), _layer(2 * width, 2 * width))
        self.answer = nn.Linear(2 * width * (2 * REACH + 1) ** 2, 2)
        self.answer.weight.data *= 0.1  # begins with answers near zero

    def forward(self, image: Tensor, drawn: Tensor) -> Tensor:
        agreement = matches(self.image(image), self.map(drawn))
        return self.answer(self.match(agreement).flatten(1))


class Branch(nn.Module):
    """Pictures (n, 3, h, w) -> features (n, width, h/2, w/2), seen at half, quarter and eighth resolution."""

    def __init__(self, width: int, deep: int) -> None:
        super().__init__()
        self.first = nn.Sequential(_layer(3, width // 2), _layer(width // 2, width, stride=2))
        self.second = _layer(width, width)
        self.fourth = nn.Sequential(_layer(width, 2 * width), _layer(2 * width, 2 * width))
        self.eighth = nn.Sequential(_layer(2 * width, deep), _layer(deep, deep))
        self.up = _layer(2 * width + deep, 2 * width)
        self.out = nn.Sequential(nn.Conv2d(3 * width, width, 3, padding=1), nn.GroupNorm(width, width))

    def forward(self, x: Tensor) -> Tensor:
        half = self.second(self.first(x))
        fourth = self.fourth(F.avg_pool2d(half, 2))
        eighth = self.eighth(F.avg_pool2d(fourth, 2))
        fourth = self.up(torch.cat([_doubled(eighth), fourth], 1))
        return self.out(torch.cat([_doubled(fourth), half], 1))


def matches(image: Tensor, drawn: Tensor, reach: int = REACH) -> Tensor:
    """Return the mean product of features over the patch for each displacement, (n, c, 2 reach + 1, ·).

    Element [.., reach + j, reach + i] is high if the map, moved by i to the right and j down, fits the image.
    """
    size, many = image.shape[-2:], 2 * reach + 1
    inner = drawn[..., reach:-reach, reach:-reach]
    padded = F.pad(inner, (0, 2 * reach, 0, 2 * reach))  # so wide that nothing wraps around
    products = torch.fft.irfft2(torch.fft.rfft2(image) * torch.fft.rfft2(padded).conj(), s=size)
    return products[..., :many, :many] / (inner.shape[-2] * inner.shape[-1])


def _layer(i: int, o: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(i, o, 3, stride, 1), nn.GroupNorm(max(1, o // GROUP), o), nn.ELU())


def _doubled(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2.0, mode="nearest")
