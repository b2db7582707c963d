"""Images in every form and mode, and images that are refused."""

from __future__ import annotations

import io
import re
import struct
import subprocess
import sys
import textwrap
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo
from sensorium.callers.errors import InputError
from sensorium.mm.media.image import decode_image, hash_image, is_slow, probe_image
from sensorium.mm.media.image_pages import tiff_pages
from sensorium.mm.media.policy import MediaPolicy

POLICY = MediaPolicy()
PIXELS = np.random.default_rng(0).integers(0, 256, (12, 20, 3), dtype=np.uint8)


def encoded(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def load(value, policy=POLICY):
    """Return the decoded pixels, after checking that the header has their size."""
    pixels = decode_image(value, policy)
    assert probe_image(value, policy).size == pixels.shape[:2]
    return pixels


def test_every_form_gives_the_same_pixels():
    image = Image.fromarray(PIXELS)
    chw = torch.from_numpy(PIXELS).permute(2, 0, 1)
    raw = [image, PIXELS, PIXELS[::-1].copy()[::-1], torch.from_numpy(PIXELS), chw, chw.contiguous(), chw.numpy()]
    assert len({hash_image(form, POLICY) for form in raw}) == 1
    for form in (*raw, encoded(image)):
        pixels = load(form)
        assert pixels.dtype == torch.uint8
        assert np.array_equal(pixels.numpy(), PIXELS)


def test_a_closed_image_is_named():
    image = Image.open(io.BytesIO(encoded(Image.fromarray(PIXELS))))
    image.close()
    with pytest.raises(InputError, match="was closed"):
        decode_image(image, POLICY)


def test_hashes_differ():
    forms = [Image.new(mode, (2, 8)) for mode in ("1", "L", "RGB", "RGBA", "CMYK")] + [Image.new("RGB", (8, 2))]
    coded = [Image.new("P", (2, 8)) for _ in range(2)]
    for image, palette in zip(coded, ([9, 8, 7], [7, 8, 9]), strict=True):
        image.putpalette(palette)
    identities = [hash_image(form, POLICY) for form in (*forms, *coded, PIXELS, encoded(Image.fromarray(PIXELS)))]
    assert len(set(identities)) == len(identities)
    clear = encoded(Image.new("RGBA", (2, 2)))
    assert hash_image(clear, POLICY) != hash_image(clear, MediaPolicy(background=(0, 0, 0)))


def test_pixels_of_an_array_are_not_copied():
    assert load(PIXELS).data_ptr() == PIXELS.ctypes.data
    frozen = PIXELS.copy()
    frozen.flags.writeable = False
    assert np.array_equal(load(frozen).numpy(), PIXELS)


def test_transparency_is_blended_with_white():
    clear = np.zeros((4, 4, 4), np.uint8)
    clear[:2, :, 3] = 255
    for form in (Image.fromarray(clear), clear, encoded(Image.fromarray(clear))):
        got = load(form)
        assert int(got[:2].max()) == 0
        assert int(got[2:].min()) == 255
    coded = Image.fromarray(np.arange(16, dtype=np.uint8).reshape(4, 4) % 2, "L").convert("P")
    assert load(encoded(coded, transparency=0))[..., 0].unique().tolist() == [1, 255]
    grey = Image.fromarray(np.array([[[9, 255], [9, 0]]], np.uint8), "LA")
    assert load(grey)[0, :, 0].tolist() == [9, 255]
    assert load(grey.convert("La"))[0, :, 0].tolist() == [9, 255]
    policy = MediaPolicy(background=(1, 2, 3))
    red = Image.new("RGB", (2, 2), "red")
    for data in (encoded(red, transparency=(255, 0, 0)), encoded(red.convert("RGBA").convert("P"), transparency=bytes(256))):
        assert load(data, policy)[0, 0].tolist() == [1, 2, 3]
    assert load(red.convert("RGBA"), policy)[0, 0].tolist() == [255, 0, 0]


def test_grey_of_every_depth():
    ramp = np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16)
    assert load(encoded(Image.fromarray(ramp)))[..., 1].flatten().tolist() == list(range(256))
    assert load(Image.fromarray((ramp >> 8).astype(np.int32)))[..., 2].flatten().tolist() == list(range(256))
    assert load(Image.fromarray((ramp >> 8).astype(np.float32)))[..., 2].flatten().tolist() == list(range(256))
    grey = (ramp >> 8).astype(np.uint8)
    for form in (grey, grey[..., None], torch.from_numpy(grey)[None], Image.fromarray(grey)):
        assert np.array_equal(load(form).numpy(), grey[..., None].repeat(3, 2))
    assert load(Image.new("1", (3, 3), 1)).unique().tolist() == [255]


@pytest.mark.parametrize("file", [False, True])
def test_the_range_of_32_bit_grey_decides_which_value_is_white(file: bool) -> None:
    ramp = np.arange(256).reshape(16, 16)
    sharp = np.where(ramp == 255, 1.1, ramp / 255) - 0.05 * (ramp == 0)  # as after resizing
    for dtype, values in [
        ("f4", ramp / 255),
        ("f4", ramp),
        ("f4", ramp * 257),
        ("i4", ramp),
        ("i4", ramp * 257),
        ("f4", sharp),
    ]:
        image = Image.fromarray(values.astype(dtype))
        got = load(encoded(image, "TIFF") if file else image)
        assert got[..., 0].flatten().tolist() == list(range(256)), dtype
    gaps = np.where(ramp == 0, np.nan, ramp / 255).astype(np.float32)
    assert load(Image.fromarray(gaps))[..., 0].flatten().tolist() == list(range(256))
    assert load(Image.new("F", (3, 3), np.nan)).unique().tolist() == [0]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (np.arange(256, dtype=np.int32) * 65536, "from 0 to 16,711,680, but 32-bit grey must be 0 to 255 or 0 to 65535"),
        (np.arange(256, dtype=np.int32) - 300, "from -300 to -45"),
        (np.array([-9999, *range(256)], np.int32), "from -9,999 to 255"),
        (
            np.linspace(-1, 1, 256, dtype=np.float32),
            "to 1, but 32-bit floating-point grey must be 0 to 1 or 0 to 255 or",
        ),
        (np.arange(256, dtype=np.float32) * 1e6, "scale it, or save it as 8-bit"),
    ],
)
def test_32_bit_grey_of_another_range_is_refused(values: np.ndarray, text: str) -> None:
    image = Image.fromarray(np.broadcast_to(values, (4, len(values))).copy())
    for form in (image, encoded(image, "TIFF")):
        with pytest.raises(InputError, match=re.escape(text)):
            load(form)


def test_cmyk_becomes_rgb():
    image = Image.fromarray(PIXELS).convert("CMYK")
    assert np.array_equal(load(image).numpy(), PIXELS)


def test_exif_orientation_is_applied():
    exif = Image.Exif()
    exif[0x0112] = 6  # turn clockwise to see it upright
    item = load(encoded(Image.fromarray(PIXELS), exif=exif))
    assert item.shape[:2] == (20, 12)
    assert np.array_equal(item.numpy(), np.rot90(PIXELS, -1))


def test_first_frame_of_an_animation():
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    for form in ("GIF", "PNG", "WEBP"):
        options = {"lossless": True} if form == "WEBP" else {}
        item = load(encoded(frames[0], form, save_all=True, append_images=frames[1:], **options))
        assert item[0, 0].tolist() == [255, 0, 0]
    with pytest.raises(InputError, match="it has several pages"):  # pages are no animation
        load(encoded(frames[0], "TIFF", save_all=True, append_images=frames[1:]))


def test_colour_profiles_are_ignored():
    assert np.array_equal(load(encoded(Image.fromarray(PIXELS), icc_profile=b"nonsense" * 20)).numpy(), PIXELS)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000"])
def test_headers_agree_for_every_mode_and_size(form):
    for mode in ("1", "L", "P", "RGB", "RGBA", "LA", "CMYK", "YCbCr", "I;16", "I", "F"):
        for size in ((1, 1), (1, 7), (17, 3), (64, 33)):
            try:
                data = encoded(Image.new(mode, size), form)
            except (OSError, ValueError):  # the format does not have this mode
                continue
            assert load(data).shape == (size[1], size[0], 3)


def test_cmyk_of_a_file_is_as_pillow_reads_it():
    data = encoded(Image.fromarray(PIXELS).convert("CMYK"), "JPEG")
    assert b"Adobe" in data  # whose inks are inverted
    with Image.open(io.BytesIO(data)) as image:
        assert np.array_equal(load(data).numpy(), np.asarray(image.convert("RGB")))


def test_a_header_of_billions_of_pixels_is_refused_at_once():
    plain = encoded(Image.fromarray(PIXELS))
    head = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    data = plain[:8] + chunk(b"IHDR", head) + plain[33:]
    for function in (probe_image, decode_image):
        with pytest.raises(InputError, match="50000x50000 is over the limit of 178,956,970 pixels"):
            function(data, POLICY)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_cut_off_files_are_errors(form):
    data = encoded(Image.fromarray(PIXELS.repeat(8, 0).repeat(8, 1)), form)
    for part in (0.1, 0.5, 0.9):
        with pytest.raises(InputError):
            decode_image(data[: int(len(data) * part)], POLICY)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("turn", range(10))
def test_every_orientation_of_every_form(form, turn):
    exif = Image.Exif()
    exif[0x0112] = turn
    data = encoded(Image.fromarray(PIXELS), form, exif=exif)
    with Image.open(io.BytesIO(data)) as image:
        assert np.array_equal(load(data).numpy(), np.asarray(ImageOps.exif_transpose(image).convert("RGB")))


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@pytest.mark.parametrize("size", [(4000, 1), (1, 4000), (65_000, 1), (201, 1), (16_384, 81)])
def test_slivers_are_refused_from_the_header_if_the_policy_has_a_limit(size: tuple[int, int]) -> None:
    policy = MediaPolicy(max_aspect_ratio=200)
    image = Image.new("RGB", size)
    for value in (image, encoded(image), np.asarray(image)):
        for call in (probe_image, decode_image):
            with pytest.raises(
                InputError, match=r"differ by more than 200:1 \(media: max_aspect_ratio\); crop it first"
            ) as error:
                call(value, policy)
            assert error.value.info.param == "max_aspect_ratio"
        assert probe_image(value, MediaPolicy()).size == size[::-1]


def test_orientation_stored_after_the_pixels_of_a_png():
    exif = Image.Exif()
    exif[0x0112] = 6
    plain = encoded(Image.fromarray(PIXELS))
    data = plain[:-12] + chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0")) + plain[-12:]
    assert np.array_equal(load(data).numpy(), np.rot90(PIXELS, -1))
    broken = plain[:-12] + chunk(b"eXIf", b"nonsense") + plain[-12:]
    assert np.array_equal(load(broken).numpy(), PIXELS)


def test_grey_of_16_bits_with_a_transparent_value():
    deep = np.array([[300, 5000], [60000, 300]], np.uint16)
    got = load(encoded(Image.fromarray(deep), transparency=300), MediaPolicy(background=(1, 2, 3)))
    assert got.tolist() == [[[1, 2, 3], [19, 19, 19]], [[234, 234, 234], [1, 2, 3]]]
    assert load(Image.fromarray(np.array([[np.nan, 7]], np.float32)))[0, :, 0].tolist() == [0, 7]


def test_rgb_of_16_bits_with_a_transparent_colour():
    deep = np.array([[[0x0012, 0, 0], [0x1200, 0, 0]], [[0xFF00, 0xFFFF, 0], [0x12FF, 0, 1]]], ">u2")
    header = struct.pack(">2I5B", 2, 2, 16, 2, 0, 0, 0)
    lines = zlib.compress(b"".join(b"\0" + row.tobytes() for row in deep))
    clear = chunk(b"tRNS", struct.pack(">3H", 0x1200, 0, 0))
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + clear + chunk(b"IDAT", lines) + chunk(b"IEND", b"")
    got = load(png, MediaPolicy(background=(1, 2, 3)))
    assert got.tolist() == [[[0, 0, 0], [1, 2, 3]], [[255, 255, 0], [1, 2, 3]]]  # the last is near enough


def test_images_of_too_many_pieces_are_refused():
    png, jpeg, gif = (encoded(Image.fromarray(PIXELS), form) for form in ("PNG", "JPEG", "GIF"))
    place, empty = gif.index(b"\x2c", 13 + 3 * 256), chunk(b"abCd", b"")
    for data in (
        png[:33] + empty * 100_000 + png[33:],
        jpeg[:2] + b"\xff\xe5\0\2" * 100_000 + jpeg[2:],
        jpeg[:2] + b"\xff" * 100_000 + jpeg[2:],
        gif[:place] + b"\x21\xfe\0" * 100_000 + gif[place:],
        b"P6\n" + b"#\n" * 100_000 + b"8 8\n255\n" + b"a" * 192,
    ):
        with pytest.raises(InputError, match="too many small pieces"):
            probe_image(data, POLICY)
    grey = b"P5\n1100 1000\n100\n" + b"\x32" * 1_100_000  # Pillow reads it a sample at a time
    assert decode_image(grey, POLICY).unique().tolist() == [128]
    behind = png[:-12] + empty * 600_000 + png[-12:]
    assert probe_image(behind, POLICY).size == PIXELS.shape[:2]
    with pytest.raises(InputError, match="too many small pieces"):
        decode_image(behind, POLICY)


@pytest.mark.parametrize(
    ("form", "each", "options"),
    [("PNG", 7, {}), ("JPEG", 7, {}), ("JPEG", 13, {"progressive": True}), ("WEBP", 17, {}), ("AVIF", 17, {}), ("QOI", 15, {})],
)
def test_decoding_memory_is_limited_from_the_header(form: str, each: int, options: dict[str, bool]) -> None:
    data = encoded(Image.new("RGB", (100, 80)), form, **options)
    for call in (probe_image, decode_image):
        call(data, MediaPolicy(max_decoded_bytes=each * 8000))
        with pytest.raises(InputError, match="limit max_decoded_bytes is") as error:
            call(data, MediaPolicy(max_decoded_bytes=each * 8000 - 1))
        assert error.value.info.param == "max_decoded_bytes"


def test_one_copy_of_the_pixels_is_held() -> None:
    """A PNG of 1 bit with transparency took 19 bytes a pixel."""
    data = encoded(Image.new("1", (3000, 3000)), transparency=0)
    script = f"""
        import resource
        from sensorium.mm.media.image import decode_image
        from sensorium.mm.media.policy import MediaPolicy
        data = bytes.fromhex("{data.hex()}")
        decode_image(bytes.fromhex("{encoded(Image.new("1", (9, 9)), transparency=0).hex()}"), MediaPolicy())
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        decode_image(data, MediaPolicy())
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 7 * 9_000_000


def test_strips_of_every_mode_join_to_the_whole(monkeypatch) -> None:
    noise = np.random.default_rng(5).integers(0, 256, (41, 30, 4), dtype=np.uint8)
    deep = noise.view(np.uint16)[..., 0]
    images = [
        Image.fromarray(noise, "RGBA").convert(mode) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "RGBa", "CMYK", "YCbCr")
    ]
    images += [
        Image.fromarray(noise[..., 0] / np.float32(255)),
        Image.fromarray(deep),
        Image.fromarray(deep.astype(np.int32)),
        Image.fromarray(noise[..., 0].astype(np.int32)),
    ]
    whole = [decode_image(image, POLICY) for image in images]
    monkeypatch.setattr("sensorium.mm.media.pixels._STRIP_PIXELS", 100)
    for image, want in zip(images, whole, strict=True):
        assert torch.equal(decode_image(image, POLICY), want), image.mode


def scanned(times: int) -> bytes:
    """Return a JPEG whose last scan is repeated."""
    jpeg = encoded(Image.fromarray(PIXELS), "JPEG", progressive=True)
    last = jpeg.rindex(b"\xff\xda")
    return jpeg[:-2] + jpeg[last:-2] * times + jpeg[-2:]


def test_scans_of_a_jpeg_are_counted() -> None:
    assert decode_image(scanned(20), POLICY).shape == (*PIXELS.shape[:2], 3)
    for call in (probe_image, decode_image):
        with pytest.raises(InputError, match=r"more than 64 scans \(media: max_jpeg_scans\)") as error:
            call(scanned(5000), POLICY)
        assert error.value.info.param == "max_jpeg_scans"
    thumbnail = b"\xff\xe1\0\xca" + b"\xff\xda\0\2" * 50
    plain = encoded(Image.fromarray(PIXELS), "JPEG")
    assert decode_image(plain[:2] + thumbnail * 9 + plain[2:], POLICY).shape == (*PIXELS.shape[:2], 3)


def test_strips_of_a_tiff_are_counted() -> None:
    tiff = encoded(Image.new("L", (4, 4)), "TIFF")
    offset = int.from_bytes(tiff[4:8], "little")
    entries = [bytes(tiff[offset + 2 + 12 * i :][:12]) for i in range(int.from_bytes(tiff[offset : offset + 2], "little"))]
    forged = [struct.pack("<HHII", 273, 4, 200_000, 8) if one[:2] == struct.pack("<H", 273) else one for one in entries]
    data = tiff[: offset + 2] + b"".join(forged) + bytes(800_000)
    with pytest.raises(InputError, match=r"more than 65,536 strips .* \(media: max_image_pieces\)") as error:
        probe_image(data, POLICY)
    assert error.value.info.param == "max_image_pieces"


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("big", [False, True])
def test_thumbnails_and_pages_of_a_tiff(order: str, big: bool) -> None:
    def tiff(*pages: tuple[str, int], back: int = 0) -> bytes:
        head, count, pointer = (struct.pack(order + "2sHHHQ", mark, 43, 8, 0, 16), "Q", "Q") if big else (short, "H", "I")
        size = struct.calcsize(order + count + "HH" + 3 * pointer)
        data = head
        for number, (form, value) in enumerate(pages, 1):
            field = struct.pack(order + form, value).ljust(struct.calcsize(pointer), b"\0")
            following = len(head) + number * size if number < len(pages) else back
            data += struct.pack(order + count + "HH" + pointer, 1, 254, 3 if form == "H" else 4, 1)
            data += field + struct.pack(order + pointer, following)
        return data

    mark = b"II" if order == "<" else b"MM"
    short = struct.pack(order + "2sHI", mark, 42, 8)
    for form in "HI":
        assert tiff_pages(tiff((form, 0), (form, 1)), POLICY, 9) == [0]
        assert tiff_pages(tiff((form, 0), back=16 if big else 8), POLICY, 9) == [0]
        assert tiff_pages(tiff((form, 0), (form, 2)), POLICY, 9) == [0, 1]
        assert tiff_pages(tiff((form, 0), (form, 1), (form, 2), (form, 1)), POLICY, 9) == [0, 2]
        with pytest.raises(InputError, match="several pages"):
            decode_image(tiff((form, 0), (form, 2)), POLICY)


def test_is_slow() -> None:
    """They hold the interpreter's lock, so they are decoded in another process."""
    grey = b"P5\n11 10\n100\n" + b"\x32" * 110
    assert all(
        is_slow(data, POLICY)
        for data in (
            grey,
            encoded(Image.fromarray(PIXELS), "QOI"),
            encoded(Image.fromarray(PIXELS), "JPEG2000"),
            b"P3\n1 1\n255\n1 2 3",
        )
    )
    fast = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
    assert not any(is_slow(encoded(Image.fromarray(PIXELS), form), POLICY) for form in fast)
    assert not is_slow(b"qoif", POLICY)


def test_pillows_own_size_limit_is_not_used(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    assert np.array_equal(load(encoded(Image.fromarray(PIXELS))).numpy(), PIXELS)


def test_a_lazy_image_in_several_threads(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "a.jpg").write_bytes(encoded(Image.fromarray(PIXELS.repeat(20, 0).repeat(20, 1)), "JPEG", exif=exif))
    with Image.open(tmp_path / "a.jpg") as image, ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(lambda _: hash_image(image, POLICY), range(8)))) == 1
        assert load(image).shape == (400, 240, 3)


def test_max_pixels_is_checked_on_the_header():
    data = encoded(Image.new("L", (300, 200)))[:200]  # no pixel of it could be decoded
    policy = MediaPolicy(max_pixels=59_999)
    for value in (data, np.zeros((200, 300), np.uint8), Image.new("L", (300, 200))):
        for function in (probe_image, decode_image):
            with pytest.raises(InputError, match="300x200 is over the limit of 59,999 pixels"):
                function(value, policy)


def with_text(text):
    """Return a PNG with a compressed text."""
    info = PngInfo()
    info.add_text("Comment", text, zip=True)
    out = io.BytesIO()
    Image.fromarray(PIXELS).save(out, "PNG", pnginfo=info)
    return out.getvalue()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"", "it is empty"),
        (b"GIF89a nonsense", "not in a supported image format|broken"),
        (encoded(Image.fromarray(PIXELS))[:-60], "broken or cut off .*; download or save it again$"),
        (with_text("a" * (2 << 20)), "its texts or its color profile are too large; save it again without them$"),
        (Image.new("RGB", (0, 5)), "has no pixels"),
        (torch.zeros(3, 4, 4, dtype=torch.uint8).to_sparse(), "dense"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "not in a supported image format"),
        (None, "a value of type NoneType is not a known form"),
        (3.5, "a value of type float is not a known form"),
        (np.zeros((4, 4, 3)), "uint8.*not float64"),
        (torch.zeros(3, 4, 4), "uint8.*not float32; convert them first; multiply fractions by 255"),
        (np.zeros((2, 4, 4, 3), np.uint8), "2 or 3 axes, not 4"),
        (np.zeros((5, 5, 5), np.uint8), "no axis of 1, 3 or 4 channels"),
        (np.zeros((0, 5, 3), np.uint8), "has no pixels"),
    ],
)
def test_invalid_images_are_refused_with_the_reason(value, text):
    with pytest.raises(InputError, match=text) as error:
        decode_image(value, POLICY)
    assert "\n" not in str(error.value)


@pytest.mark.shared
def test_real_images(shared_data: Path):
    folder = shared_data / "images"
    sizes = {
        path.name: tuple(load(path.read_bytes(), MediaPolicy(max_aspect_ratio=500)).shape[:2])
        for path in folder.iterdir()
        if path.name != "edge_truncated.jpg"
    }
    assert sizes["edge_1x1.png"] == (1, 1)
    assert sizes["edge_2000x4.png"] == (4, 2000)
    assert sizes["phototest.tif"] == (480, 640)
    with pytest.raises(InputError, match="it is broken or cut off"):
        load((folder / "edge_truncated.jpg").read_bytes())
    assert float(load((folder / "edge_gray16.png").read_bytes()).float().mean()) == pytest.approx(127.5)
    duck, cmyk = (load((folder / name).read_bytes()).float() for name in ("duck_and_truck.jpg", "edge_cmyk.jpg"))
    assert abs(float(duck.mean() - cmyk.mean())) < 1
    assert load((folder / "white_on_transparent.png").read_bytes()).min() > 200  # white on white


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_a_lazy_image_is_probed_before_it_is_read(form, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    Image.new("RGB", (30, 20)).save(buffer, form, exif=exif)
    lazy = Image.open(io.BytesIO(buffer.getvalue()))
    header = probe_image(lazy, MediaPolicy())
    assert header.size == ((20, 30) if orientation < 5 else (30, 20))
    assert tuple(decode_image(lazy, MediaPolicy()).shape[:2]) == header.size
    assert probe_image(lazy, MediaPolicy()) == header
