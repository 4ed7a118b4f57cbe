"""What a person sees of a sample, small and capped."""

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

from likewise.thumbnails import (
    COLUMNS,
    EXCERPT,
    SIDE,
    TOGETHER,
    Picture,
    kept,
    media_type,
    picture,
    pictures,
    values_of,
)


def pixels(found):
    return np.asarray(Image.open(io.BytesIO(found.content)))


@pytest.mark.parametrize("shape", [(1, 12, 10), (3, 12, 10), (12, 10), (12, 10, 3), (4, 12, 10), (7, 12, 10)])
def test_arrays_that_look_like_images_become_images(shape):
    array = np.random.default_rng(0).random(shape).astype(np.float32)
    found = picture(array, values_of([array]))
    assert found.kind == "image" and pixels(found).shape[:2] == (12, 10)


@pytest.mark.parametrize("shape", [(1, 12, 10), (3, 20, 18), (12, 10), (12, 10, 3), (7, 12, 10), (50,), (4,)])
@pytest.mark.parametrize("known", [True, False])
def test_pictures_of_an_array_are_those_of_its_entries(shape, known):
    arrays = np.random.default_rng(0).normal(size=(TOGETHER + 3, *shape)).astype(np.float32)
    arrays[1].flat[0] = np.nan
    values = values_of(arrays) if known else None
    assert pictures(arrays, values) == [picture(array, values) for array in arrays]
    assert pictures(arrays[:0], values) == []


def test_tiny_images_keep_every_pixel_and_the_range_of_the_data():
    dark, bright = np.zeros((1, 8, 8), np.float32), np.ones((1, 8, 8), np.float32) * 4
    dark[0, 2, 3] = 1
    shown = pixels(picture(dark, values_of([dark, bright])))
    assert shown[2, 3, 0] in (63, 64) and shown[0, 0, 0] == 0
    assert (pixels(picture(bright, values_of([dark, bright]))) == 255).all()


def test_large_images_become_thumbnails():
    found = picture(Image.new("RGB", (640, 320), "red"))
    assert Image.open(io.BytesIO(found.content)).size == (SIDE, SIDE // 2)
    assert picture(torch.rand(3, 640, 480).numpy()).kind == "image"


def test_long_texts_and_wide_rows_are_cut():
    assert picture("short").content == b"short"
    assert len(picture("é" * 5000).content.decode()) == EXCERPT
    row = json.loads(picture({f"c{i}": i / 3 for i in range(100)}).content)
    assert len(row) == COLUMNS and row["c1"] == 0.33333
    odd = json.loads(
        picture({"t": "x" * 500, "none": None, "nan": float("nan"), "np": np.int64(3), "flag": True}).content
    )
    assert (
        len(odd["t"]) == EXCERPT
        and odd["none"] is None
        and odd["nan"] == "nan"
        and odd["np"] == 3
        and odd["flag"] is True
    )


def test_signals_and_short_rows():
    line = np.sin(np.linspace(0, 6, 1000)).astype(np.float32)
    found = picture(line[None])
    assert found.kind == "signal" and len(json.loads(found.content)) == 120
    assert picture(np.arange(4.0)).kind == "row"
    assert (
        picture(None) is None and picture(np.zeros((2, 2, 2, 2))) is None and picture(np.array(["a"])) is None
    )


def test_pictures_are_kept_in_order_until_the_budget_is_spent():
    shown = kept(lambda i: picture("x" * 92 if i else None), [5, 3, 5, 0, 9, 7], 310)
    assert list(shown) == [3, 5, 9] and shown[3] == Picture("text", b"x" * 92)


def test_excerpts_are_short_unless_asked_for():
    assert EXCERPT == 200
    assert len(picture("x" * 999, excerpt_length=500).content) == 500 + len("…".encode()) - 1
    row = json.loads(picture({"t": "x" * 999}, excerpt_length=300).content)
    assert len(row["t"]) == 300 and row["t"].endswith("…")
    assert picture("x" * 200).content == b"x" * 200


@pytest.mark.parametrize("character", ["\x00", "\x1b", "\x9b", "\u202e", "\u2066", "\u2028"])
def test_control_characters_and_bidirectional_overrides_are_written_out(character):
    told = f"⟨U+{ord(character):04X}⟩"
    assert picture(f"a{character}b").content.decode() == f"a{told}b"
    assert json.loads(picture({f"n{character}": f"v{character}"}).content) == {f"n{told}": f"v{told}"}
    assert len(picture(character * 500).content.decode()) == EXCERPT
    assert picture("line\r\nnext\tשלום 👩‍👧").content.decode() == "line\nnext\tשלום 👩‍👧"


@pytest.mark.parametrize("form", ["WEBP", "JPEG"])
@pytest.mark.parametrize("size", [(12, 9), (40, 30), (90, 60), (300, 200)])
def test_thumbnails_hold_nothing_but_pixels(size, form):
    image = Image.new("RGB", size, "red")
    exif = Image.Exif()
    exif[0x010F], exif[0x8825] = "Camera of Ann", {1: "N", 2: (52.0, 31.0, 0.0)}
    stored, about = io.BytesIO(), {"comment": b"of Ann"} if form == "JPEG" else {}
    image.save(stored, form, exif=exif, icc_profile=b"of Ann" * 5_000, xmp=b"<x>Ann</x>", **about)
    found = picture(Image.open(stored))
    assert b"Ann" not in found.content and len(found.content) < 1500
    assert not set(Image.open(io.BytesIO(found.content)).info) & {"exif", "icc_profile", "xmp", "comment"}


@pytest.mark.parametrize("side", [12, 16, 17, 32, 48, 49, 200])
def test_thumbnails_look_like_the_image_and_name_their_form(side):
    slope = np.linspace(0, 255, side * side * 3).reshape(side, side, 3).astype(np.uint8)
    found = picture(slope)
    shown = Image.open(io.BytesIO(found.content))
    assert Image.MIME[shown.format] == media_type(found.content)
    expected = np.asarray(Image.fromarray(slope).resize(shown.size, Image.Resampling.BICUBIC)).astype(float)
    assert abs(np.asarray(shown.convert("RGB")) - expected).mean() < 4


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_the_image_of_the_user_stays_as_it_is(mode):
    image = Image.new(mode, (300, 200), "gray")
    before = image.tobytes()
    assert picture(image).kind == "image"
    assert image.size == (300, 200) and image.tobytes() == before


@pytest.mark.parametrize("dtype, most", [("uint16", 65535), ("int32", 4095), ("float32", 1)])
def test_images_of_more_than_eight_bits_are_drawn_by_their_range(dtype, most):
    slope = np.linspace(0, most, 16 * 16).reshape(16, 16)
    seen = picture(Image.fromarray(slope.astype(dtype)))
    drawn = np.asarray(Image.open(io.BytesIO(seen.content)).convert("L")).astype(float)
    assert abs(drawn - slope / most * 255).max() <= 2


@pytest.mark.parametrize("value", [np.float32(0.5), np.array(3), torch.tensor(0.25)])
def test_a_single_number_is_shown_as_text(value):
    assert picture(value) == ("text", str(value.item()).encode())
