"""What a person sees of a sample, small: a picture, a text, a row of a table, a signal.

A picture is (kind, bytes) with kind "image" (WebP or JPEG), "text" (UTF-8), "row" (a JSON object, column -> value)
or "signal" (a JSON list of numbers). All are capped, so that of the data only little is copied, and images
lose what a camera or a program wrote beside the pixels: EXIF with its places and names, color profiles.
"""

import io
import json
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np

SIDE = 96  # pixels of a thumbnail
# Pixels up to which a thumbnail is stored without loss, and as JPEG: of an image of 32 × 32 pixels that takes
# 45 µs and 640 bytes, WebP 120 µs, most of them before the first pixel, and 320 bytes (2026-11-19).
TINY, SMALL = 16, 48
EXCERPT = 200  # characters of a text, also of one in a row
COLUMNS = 40
NAME = 60  # characters of a column's name
POINTS = 120  # of a signal
TOGETHER = 64  # images that are scaled at once


class Picture(NamedTuple):
    """A sample as a person sees it."""

    kind: str
    content: bytes


def media_type(image: bytes) -> str:
    """Return the media type of the content of an image."""
    return "image/jpeg" if image.startswith(b"\xff\xd8") else "image/webp"


class Range(NamedTuple):
    """The values that are drawn as black and white, by channel: those of the whole data set."""

    low: np.ndarray
    high: np.ndarray


def picture(raw: Any, values: Range | None = None, excerpt_length: int = EXCERPT) -> Picture | None:
    """Return what to see of a raw sample, or None where there is nothing to see.

    Args:
        raw: An image, a text, a dict of columns or an array.
        values: What is drawn as black and white; the sample's own range if not given.
        excerpt_length: The characters that are kept of a text, also of one in a row.
    """
    if raw is None:
        return None
    if isinstance(raw, Picture):
        return raw
    if isinstance(raw, str):
        return Picture("text", excerpt(raw, excerpt_length).encode("utf-8", "replace"))
    if isinstance(raw, Mapping):
        row = json.dumps(_row(raw, excerpt_length), ensure_ascii=False)
        return Picture("row", row.encode("utf-8", "replace"))
    if hasattr(raw, "convert") and hasattr(raw, "resize"):  # a PIL image
        return Picture("image", _encode(_of_eight_bits(raw, values))) if min(raw.size) else None
    try:
        return _of_array(np.asarray(raw), values)
    except ValueError:  # lists of different lengths
        return picture(str(raw), None, excerpt_length)


def pictures(raws: np.ndarray, values: Range | None = None) -> list[Picture | None]:
    """Return `picture` of each entry of an array, (n, ...): images are scaled together, in a fraction of the time."""
    if values is None or raws.size == 0 or _channels_last(raws[0]) is None:
        return [picture(raw, values) for raw in raws]
    found: list[Picture | None] = []
    for start in range(0, len(raws), TOGETHER):
        some = raws[start : start + TOGETHER]
        images = np.stack([image for raw in some if (image := _channels_last(raw)) is not None])
        found += [Picture("image", _encode(_to_pil(image))) for image in _to_bytes(images, values)]
    return found


def excerpt(text: str, length: int = EXCERPT) -> str:
    """Return the beginning of a text, at most `length` characters, with control characters written out."""
    written = escape_controls(text[: length + 1])
    return written if len(written) <= length else written[: length - 1] + "…"


def values_of(raws: Iterable[Any]) -> Range | None:
    """Return the range of the channels of some samples, None if they are no images."""
    images = [_channels_last(np.asarray(raw)) for raw in raws if hasattr(raw, "shape")]
    known = [image.reshape(-1, image.shape[-1]).astype(np.float64) for image in images if image is not None]
    if not known or len({rows.shape[1] for rows in known}) > 1:
        return None
    rows = np.concatenate(known)
    rows = rows[np.isfinite(rows).all(1)]
    if not len(rows):
        return None
    return Range(np.quantile(rows, 0.002, axis=0), np.quantile(rows, 0.998, axis=0))


def kept(show: Callable[[int], Picture | None], order: Iterable[int], budget: int) -> dict[int, Picture]:
    """Return pictures of samples in the order of their worth, until the budget of bytes is spent."""
    found: dict[int, Picture] = {}
    for sample in order:
        if sample in found:
            continue
        seen = show(sample)
        if seen is None:
            continue
        budget -= len(seen.content) + 8
        if budget < 0:
            break
        found[sample] = seen
    return dict(sorted(found.items()))


def _of_array(array: np.ndarray, values: Range | None) -> Picture | None:
    if array.dtype.kind not in "fiub" or array.size == 0:
        return None
    image = _channels_last(array)
    if image is not None:
        return Picture("image", _encode(_image(image, values)))
    if array.ndim == 0:
        return Picture("text", str(array.item()).encode())
    if array.dtype.kind == "f" and array.ndim <= 2 and array.shape[-1] > COLUMNS:
        line = np.atleast_2d(array)[0].astype(float)
        edges = np.linspace(0, len(line), min(len(line), POINTS) + 1).astype(int)
        means = [float(line[a:b].mean()) for a, b in pairwise(edges)]
        known = [float(f"{v:.4g}") if np.isfinite(v) else None for v in means]
        return Picture("signal", json.dumps(known).encode())
    if array.ndim == 1:
        named = {str(i): value for i, value in enumerate(array.tolist())}
        return Picture("row", json.dumps(_row(named, EXCERPT)).encode())
    return None


def _row(values: Mapping[Any, Any], excerpt_length: int) -> dict[str, Any]:
    cut: dict[str, Any] = {}
    for name, value in islice(values.items(), COLUMNS):
        if hasattr(value, "item") and getattr(value, "size", 1) == 1:
            value = value.item()
        if isinstance(value, float):
            value = float(f"{value:.5g}") if np.isfinite(value) else str(value)
        elif not isinstance(value, bool | int | None):
            value = excerpt(str(value), excerpt_length)
        cut[excerpt(str(name), NAME)] = value
    return cut


def _channels_last(array: np.ndarray) -> np.ndarray | None:
    """Return an array as an image (h, w, c), None if it does not look like one."""
    if array.ndim == 2 and min(array.shape) >= 6:
        return array[..., None]
    if array.ndim != 3:
        return None
    if array.shape[0] in (1, 3, 4) and min(array.shape[1:]) >= 4:
        return array.transpose(1, 2, 0)
    if array.shape[2] in (1, 3, 4) and min(array.shape[:2]) >= 4:
        return array
    return array[:1].transpose(1, 2, 0) if min(array.shape[1:]) >= 6 else None  # the first of many channels


def _image(image: np.ndarray, values: Range | None) -> Any:
    return _to_pil(_to_bytes(image, values))


def _to_bytes(images: np.ndarray, values: Range | None) -> np.ndarray:
    """Return images, (..., h, w, c), as integers from 0 to 255; of several, `values` must be given."""
    if images.dtype == np.uint8:
        return images
    images = images.astype(np.float32 if images.dtype in (np.float16, np.float32) else np.float64)
    if not np.isfinite(images).all():
        images = np.nan_to_num(images)
    low, high = (images.min(), images.max()) if values is None else (values.low, values.high)
    scale = 255 / np.maximum(np.asarray(high, dtype=np.float64) - low, 1e-12)
    scaled = (images - np.asarray(low, dtype=images.dtype)) * scale.astype(images.dtype)
    return np.asarray(scaled.clip(0, 255).round().astype(np.uint8))


def _to_pil(image: np.ndarray) -> Any:
    from PIL import Image

    return Image.fromarray(image[..., 0] if image.shape[2] == 1 else image[..., :3])


def _of_eight_bits(image: Any, values: Range | None) -> Any:
    """Return a PIL image whose pixels have more than 8 bits drawn by their range; to convert would clip them."""
    if image.mode[0] not in "IF":
        return image
    return _image(np.asarray(image)[..., None], values)


def _encode(image: Any) -> bytes:
    """Return the pixels of an image as WebP, small ones as JPEG, tiny ones without loss, and nothing beside them."""
    side = max(image.size)
    if image.mode != "RGB":
        image = image.convert("RGB")
    elif max(image.size) > SIDE:
        image = image.copy()  # which is made small, in place; this one is the user's
    image.thumbnail((SIDE, SIDE))
    into = io.BytesIO()
    bare: dict[str, Any] = {"icc_profile": b"", "exif": b"", "xmp": b""}  # else those of the file
    if TINY < side <= SMALL:
        image.save(into, "JPEG", quality=70, optimize=True, subsampling=0, comment=b"", **bare)
    else:  # method 4 takes twice as long
        image.save(into, "WEBP", lossless=side <= TINY, quality=80 if side <= TINY else 60, method=2, **bare)
    return into.getvalue()


# C0 and C1 controls without tab and line feed, line and paragraph separators, bidirectional embeddings,
# overrides and isolates, the byte order mark. Joiners stay: scripts and emoji need them.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]")


def escape_controls(text: str) -> str:
    r"""Return text with control characters and bidirectional overrides written out, as in ⟨U+202E⟩.

    A name such as "photo\u202egnp.exe" would else be shown as "photoexe.png", and an escape sequence would
    be carried out by a terminal. Line ends of Windows become those of Unix.
    """
    return _CONTROLS.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", text.replace("\r\n", "\n"))
