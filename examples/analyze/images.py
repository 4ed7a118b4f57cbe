"""A small ResNet and a folder of classes with images, for `likewise analyze`.

python examples/analyze/images.py out/images      # writes images by class, trains, saves the weights
likewise analyze examples/analyze/images.py:model out/images/digits \
        --weights out/images/resnet.safetensors --gray --out out/images/run
"""

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn

NAMES = tuple("0123456789")  # folders of classes, in the order of the outputs


class Block(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the features with what the block adds."""
        return torch.relu(x + self.inner(x))


def model() -> nn.Module:
    """Return the network that `likewise analyze` asks for; the weights come from a file."""
    head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, len(NAMES))]
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), Block(16), nn.MaxPool2d(2), Block(16), *head
    )


def written(folder: Path, n: int) -> tuple[Tensor, Tensor]:
    """Write digits as images, a folder for each class; return them as the command will read them."""
    images, labels = load_digits(return_X_y=True)
    pixels = (images[:n].reshape(-1, 8, 8) * 15.9).astype(np.uint8)
    for i, (image, label) in enumerate(zip(pixels, labels[:n], strict=True)):
        (folder / NAMES[label]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / NAMES[label] / f"{i:04}.png")
    return torch.tensor(pixels)[:, None].float() / 255, torch.tensor(labels[:n])


def main(folder: Path, n: int = 600, epochs: int = 15) -> None:
    torch.manual_seed(0)
    x, y = written(folder / "digits", n)
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
            optimizer.step()
    save_file(net.state_dict(), folder / "resnet.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
