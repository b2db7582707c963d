"""Pictures in every form and mode, and those that are refused."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sensorium.mm.errors import MediaError
from sensorium.mm.media.image import load_image

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 20, 3), dtype=np.uint8)


def encoded(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def test_every_form_gives_the_same_item(tmp_path):
    image = Image.fromarray(PIXELS)
    data = encoded(image)
    (tmp_path / "a.png").write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    chw = torch.from_numpy(PIXELS).permute(2, 0, 1)
    forms = [image, PIXELS, PIXELS[::-1][::-1], torch.from_numpy(PIXELS), chw, chw.numpy(), data, bytearray(data), url]
    forms += [tmp_path / "a.png", str(tmp_path / "a.png")]
    items = [load_image(form, 0) for form in forms]
    assert len({item.hash for item in items}) == 1
    for item in items:
        assert item.size == (12, 20)
        assert item.pixels.dtype == torch.uint8
        assert np.array_equal(item.pixels.numpy(), PIXELS)


def test_pixels_of_an_array_are_not_copied():
    assert load_image(PIXELS, 0).pixels.data_ptr() == PIXELS.ctypes.data
    frozen = PIXELS.copy()
    frozen.flags.writeable = False
    assert np.array_equal(load_image(frozen, 0).pixels.numpy(), PIXELS)


def test_transparency_lies_on_white():
    clear = np.zeros((4, 4, 4), np.uint8)
    clear[:2, :, 3] = 255
    for form in (Image.fromarray(clear), clear, encoded(Image.fromarray(clear))):
        got = load_image(form, 0).pixels
        assert int(got[:2].max()) == 0
        assert int(got[2:].min()) == 255
    coded = Image.fromarray(np.arange(16, dtype=np.uint8).reshape(4, 4) % 2, "L").convert("P")
    assert load_image(encoded(coded, transparency=0), 0).pixels[..., 0].unique().tolist() == [1, 255]
    grey = Image.fromarray(np.array([[[9, 255], [9, 0]]], np.uint8), "LA")
    assert load_image(grey, 0).pixels[0, :, 0].tolist() == [9, 255]


def test_grey_of_every_depth():
    ramp = np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16)
    assert load_image(encoded(Image.fromarray(ramp)), 0).pixels[..., 1].flatten().tolist() == list(range(256))
    assert load_image(Image.fromarray((ramp >> 8).astype(np.int32)), 0).pixels[..., 2].flatten().tolist() == list(range(256))
    assert load_image(Image.fromarray((ramp >> 8).astype(np.float32)), 0).pixels[..., 2].flatten().tolist() == list(range(256))
    grey = (ramp >> 8).astype(np.uint8)
    for form in (grey, grey[..., None], torch.from_numpy(grey)[None], Image.fromarray(grey)):
        assert np.array_equal(load_image(form, 0).pixels.numpy(), grey[..., None].repeat(3, 2))
    assert load_image(Image.new("1", (3, 3), 1), 0).pixels.unique().tolist() == [255]


def test_cmyk_becomes_rgb():
    image = Image.fromarray(PIXELS).convert("CMYK")
    assert np.array_equal(load_image(image, 0).pixels.numpy(), PIXELS)


def test_exif_orientation_comes_first():
    exif = Image.Exif()
    exif[0x0112] = 6  # turn clockwise to see it upright
    item = load_image(encoded(Image.fromarray(PIXELS), exif=exif), 0)
    assert item.size == (20, 12)
    assert np.array_equal(item.pixels.numpy(), np.rot90(PIXELS, -1))


def test_first_frame_of_an_animation():
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    item = load_image(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]), 0)
    assert item.pixels[0, 0].tolist() == [255, 0, 0]


def test_budget_is_checked_on_the_header():
    data = encoded(Image.new("L", (300, 200)))[:200]  # no pixel of it could be decoded
    with pytest.raises(MediaError, match=r"image 4: 300x200 is over the limit of 59,999 pixels"):
        load_image(data, 4, max_pixels=59_999)
    with pytest.raises(MediaError, match="over the limit"):
        load_image(np.zeros((300, 200), np.uint8), 0, max_pixels=59_999)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"", "image 2: it is empty"),
        (b"GIF89a nonsense", "not in a picture format|broken"),
        (encoded(Image.fromarray(PIXELS))[:-60], "broken or cut off"),
        ("https://example.com/a.png", "fetching https URLs is off"),
        ("file:///etc/passwd", "fetching file URLs is off"),
        ("data:image/png,abc", "looks like"),
        ("data:image/png;base64,@@@", "valid base64"),
        ("/no/such/file.png", r"'/no/such/file.png' cannot be read \(No such file"),
        (None, "a NoneType is not a known form"),
        (3.5, "a float is not a known form"),
        (np.zeros((4, 4, 3)), "uint8.*not float64"),
        (torch.zeros(3, 4, 4), "uint8.*not float32"),
        (np.zeros((2, 4, 4, 3), np.uint8), "2 or 3 axes, not 4"),
        (np.zeros((5, 5, 5), np.uint8), "no axis of 1, 3 or 4 channels"),
        (np.zeros((0, 5, 3), np.uint8), "has no pixels"),
    ],
)
def test_what_is_refused_is_named(value, text):
    with pytest.raises(MediaError, match=text) as error:
        load_image(value, 2)
    assert str(error.value).startswith("image 2: ")
    assert "\n" not in str(error.value)


@pytest.mark.shared
def test_real_pictures(shared_data: Path):
    folder = shared_data / "images"
    sizes = {path.name: load_image(path, 0).size for path in folder.iterdir() if path.name != "edge_truncated.jpg"}
    assert sizes["edge_1x1.png"] == (1, 1)
    assert sizes["edge_2000x4.png"] == (4, 2000)
    assert sizes["phototest.tif"] == (480, 640)
    with pytest.raises(MediaError, match="image 7: it is broken or cut off"):
        load_image(folder / "edge_truncated.jpg", 7)
    assert float(load_image(folder / "edge_gray16.png", 0).pixels.float().mean()) == pytest.approx(127.5)
    duck, cmyk = (load_image(folder / name, 0).pixels.float() for name in ("duck_and_truck.jpg", "edge_cmyk.jpg"))
    assert abs(float(duck.mean() - cmyk.mean())) < 1
    assert load_image(folder / "white_on_transparent.png", 0).pixels.min() > 200  # white on white
