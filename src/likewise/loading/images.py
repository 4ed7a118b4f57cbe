"""Read a folder of images, or a folder with one subfolder of images per class."""

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from likewise.loading.dataset import Options, Preparation, Prepared, Read
from likewise.loading.imports import library
from likewise.loading.paths import ExpansionError, listed, refuse_expansion

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
# Images too, for others: they are not read, and that is said.
OTHER_SUFFIXES = (
    ".ppm",
    ".pgm",
    ".pbm",
    ".pnm",
    ".jfif",
    ".jp2",
    ".heic",
    ".heif",
    ".avif",
    ".tga",
    ".ico",
    ".svg",
)
# A file's content decides how it is read, not its name: without this list, one could start any decoder.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
USED = ("image_size", "gray", "prepare", "limit", "follow_links")
_pixel_limit = Lock()


def read_folder(folder: Path, options: Options) -> Read:
    """Return the images of a folder, opened on demand: float32 (c, h, w) in [0, 1].

    Classes are its subfolders, sorted by name. A `prepare` function gets the image, in RGB or grayscale, resized if a
    size is given.
    """
    options.refuse_all_but(USED, f"the folder of images {folder}")
    found = _found(folder, options.follow_links)
    kept = _select_positions(len(found.files), options.limit, spread=found.labels is not None)
    files = [found.files[i] for i in kept]
    names = tuple(file.relative_to(folder).as_posix() for file in files)
    labels = None if found.labels is None else torch.tensor([found.labels[i] for i in kept])
    return read_images(files, names, options)._replace(
        labels=labels, classes=found.classes, notes=_unread(folder, found.classes)
    )


class ImageBytes(NamedTuple):
    """An image file in memory, with as much of the Path interface as reading an image needs."""

    name: str
    content: bytes

    def __str__(self) -> str:
        return self.name

    def stat(self) -> os.stat_result:
        """Return its size, where a file's is."""
        return os.stat_result((0, 0, 0, 0, 0, 0, len(self.content), 0, 0, 0))


def read_images(
    files: "Sequence[Path | ImageBytes]",
    names: tuple[str, ...],
    options: Options,
    indexed: tuple[int, int] | None = None,
) -> Read:
    """Return the images of files, read like those of a folder.

    Args:
        files: The image files.
        names: Names of the samples.
        options: How to read them.
        indexed: Width and height of the images in the index that is asked; None if not known.

    """
    prepare = options.prepare
    if prepare is None and options.image_size is None:
        if indexed is None:
            _refuse_sizes(files)
        else:
            _refuse_other_sizes(files, indexed)
    opened = _Opened(files, "L" if options.gray else "RGB", None, options.max_memory)
    raw = opened._replace(size=options.image_size, becomes_tensor=prepare is None)
    dataset = Prepared(
        raw.image, len(files), prepare or Preparation("Turning images into tensors", _tensor), names
    )
    return Read(dataset, names=names, show=opened.image)


class _Found(NamedTuple):
    files: list[Path]
    labels: list[int] | None
    classes: tuple[str, ...] | None


def _found(folder: Path, follow_links: bool) -> _Found:
    root = None if follow_links else Path(os.path.realpath(folder))
    here, folders = _scan(folder, root)
    inside = {entry: _scan(entry, root).images for entry in folders}
    full = {entry: files for entry, files in inside.items() if files}
    if here and full:
        raise ValueError(
            f"{folder} holds images ({listed([p.name for p in here], 2)}) and folders of images "
            f"({listed([p.name for p in full], 2)}): put all of them into folders, one per class, or none."
        )
    if here:
        return _Found(here, None, None)
    if not full:
        raise ValueError(_nothing(folder, list(inside), root))
    if len(full) < len(inside):
        empty = [entry.name for entry in inside if entry not in full]
        raise ValueError(
            f"There are no images in {listed(empty)} of {folder}, where each folder is a class: fill or remove these "
            "folders, so that the class numbers are certain."
        )
    files = [file for part in full.values() for file in part]
    labels = [number for number, part in enumerate(full.values()) for _ in part]
    return _Found(files, labels, tuple(entry.name for entry in full))


class _Scanned(NamedTuple):
    images: list[Path]
    folders: list[Path]


def _scan(folder: Path, root: Path | None) -> _Scanned:
    """Return the images and folders in a folder, by name; none may be a link to outside of `root`."""
    found = _Scanned([], [])
    for entry in _visible(folder):
        path, is_image = Path(entry.path), entry.name.lower().endswith(SUFFIXES)
        is_folder = os.path.isdir(path) if entry.is_symlink() else entry.is_dir()
        if not (is_folder or is_image):
            continue
        if not is_folder and not os.path.isfile(path):
            what = "a link that leads nowhere" if entry.is_symlink() and not path.exists() else "no file"
            raise ValueError(f"{path} is {what}: repair or remove it.")
        if entry.is_symlink() and root is not None:
            _refuse_outside(path, root)
        (found.folders if is_folder else found.images).append(path)
    return found


def _visible(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return sorted((e for e in entries if not e.name.startswith(".")), key=lambda entry: entry.name)


def _unread(folder: Path, classes: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return a note about images that are not read: in folders inside of classes, or in other formats."""
    inside = [folder] if classes is None else [folder / name for name in classes]
    others = [
        Path(entry.path).relative_to(folder).as_posix()
        for place in inside
        for entry in _visible(place)
        if (entry.is_dir() and _holds_images(entry.path)) or entry.name.lower().endswith(OTHER_SUFFIXES)
    ]
    if not others:
        return ()
    return (
        f"not read in {folder}: {listed(others, 4)}. Images are {' '.join(SUFFIXES)} files, those of a class in one "
        "folder.",
    )


def _holds_images(folder: str) -> bool:
    return any(name.lower().endswith(SUFFIXES) for _, _, names in os.walk(folder) for name in names)


def _refuse_outside(path: Path, root: Path) -> None:
    if not Path(os.path.realpath(path)).is_relative_to(root):
        raise ValueError(
            f"{path} is a link to outside of the data folder: to read it too, pass --follow-links "
            "(follow_links=True)."
        )


def _nothing(folder: Path, inside: list[Path], root: Path | None) -> str:
    deeper = [entry for entry in inside if any(_scan(e, root).images for e in _scan(entry, root).folders)]
    advice = "expected folder/class/image.png or folder/image.png"
    if deeper:
        advice = f"they are deeper, give {' or '.join(dict.fromkeys(map(str, deeper)))}"
    there = listed([entry.name for entry in _visible(folder)], 6)
    return f"No images ({' '.join(SUFFIXES)}) in {folder}, which holds {there}: {advice}."


def _select_positions(n: int, limit: int | None, spread: bool) -> list[int]:
    """Return the positions of the first images, or of as many spread evenly over all."""
    count = n if limit is None else min(limit, n)
    return [i * n // count for i in range(count)] if spread else list(range(count))


def _refuse_sizes(files: Sequence[Path | ImageBytes]) -> None:
    """Raise an error if two images differ in size; reads the head of each file."""
    first = _size(files[0])
    for file in files[1:]:
        size = _size(file)
        if size != first:
            raise ValueError(
                f"The images differ in size: {files[0]} is {first[0]} x {first[1]}, {file} is {size[0]} x "
                f"{size[1]} (width x height). Set one size for all, for example --image-size 64."
            )


def _refuse_other_sizes(files: Sequence[Path | ImageBytes], indexed: tuple[int, int]) -> None:
    """Raise an error if an image differs in size from those of an index."""
    for file in files:
        size = _size(file)
        if size != indexed:
            raise ValueError(
                f"{file} is {size[0]} x {size[1]} (width x height), the index holds {indexed[0]} x {indexed[1]} "
                "images: resize it, or build the index with --image-size."
            )


def _size(file: Path | ImageBytes) -> tuple[int, int]:
    try:
        with _open_image(file) as image:
            return image.size
    except Exception as error:
        raise _broken(file, error) from error


@contextmanager
def _open_image(file: Path | ImageBytes) -> "Iterator[Image]":
    """Yield an image of which only the header is read, without Pillow's own limit on pixels."""
    pillow = library("PIL.Image", "pillow")
    with _pixel_limit:
        before, pillow.MAX_IMAGE_PIXELS = pillow.MAX_IMAGE_PIXELS, None
        try:
            source = io.BytesIO(file.content) if isinstance(file, ImageBytes) else file
            image = pillow.open(source, formats=FORMATS)
        finally:
            pillow.MAX_IMAGE_PIXELS = before
    with image:
        yield image


class _Opened(NamedTuple):
    """Images of files, for display."""

    files: Sequence[Path | ImageBytes]
    mode: str
    size: int | None
    max_memory: int
    becomes_tensor: bool = False

    def image(self, i: int) -> "Image":
        """Return image i in the mode, resized to a square if there is a size."""
        file = self.files[i]
        try:
            with _open_image(file) as stored:
                self._refuse_huge(file, stored)
                stored.load()
                deep = stored.mode[0] in "IF"  # more than 8 bits, which to convert would clip
                image = stored.copy() if deep else stored.convert(self.mode)
        except ExpansionError:
            raise
        except Exception as error:
            raise _broken(file, error) from error
        bilinear = library("PIL.Image", "pillow").Resampling.BILINEAR
        return image if self.size is None else image.resize((self.size, self.size), bilinear)

    def _refuse_huge(self, file: Path | ImageBytes, stored: "Image") -> None:
        """Raise an error if the pixels that the header declares would take too much memory."""
        (width, height), channels = stored.size, 1 if self.mode == "L" else 3
        bytes_per_pixel = (1 if stored.mode in ("1", "L", "P") else 4) + (1 if self.mode == "L" else 4)
        if self.becomes_tensor and self.size is None:
            bytes_per_pixel += 2 * 4 * channels  # float32, and once more as it is scaled and transposed
        needed = width * height * bytes_per_pixel
        refuse_expansion(file, f"An image of {width:,} x {height:,} pixels", needed, self.max_memory)


def _broken(file: Path | ImageBytes, error: Exception) -> ValueError:
    return ValueError(
        f"{file} cannot be read as an image ({type(error).__name__}: {error}): repair or remove it."
    )


def _tensor(image: "Image") -> Tensor:
    if image.mode not in ("L", "RGB"):
        raise ValueError(
            f"its pixels have more than 8 bits (mode {image.mode}): pass prepare= to scale them."
        )
    pixels = torch.from_numpy(np.array(image, dtype=np.float32) / 255)
    return pixels[None] if pixels.dim() == 2 else pixels.permute(2, 0, 1).contiguous()
