"""Pages of TIFFs, and frames of animations and HEIC files, as items like the pages of a PDF."""

from __future__ import annotations

import base64
import gc
import importlib.util
import io
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, features
from sensorium import PdfPage, pdf_pages
from sensorium.callers.errors import InputError, MediaError
from sensorium.mm.media import animations, gate, image, isolate
from sensorium.mm.media.image_pages import may_hold_pages
from sensorium.mm.media.policy import DecodeSpec, MediaPolicy, PdfFiles, slow_error
from sensorium.mm.parse import MediaSource
from sensorium.mm.types import MediaHeader
from sensorium.pipelines.files import images_and_pages
from sensorium.processors.text.message_parts import holds_files, split_media

COLORS = [(250, 10, 10), (10, 240, 10), (10, 10, 230)]
needs_heif = pytest.mark.skipif(importlib.util.find_spec("pillow_heif") is None, reason="needs pillow-heif")
FORMATS = [
    *("TIFF", "GIF", "PNG", "WEBP"),
    pytest.param("AVIF", marks=pytest.mark.skipif(not features.check("avif"), reason="this Pillow has no AVIF")),
    pytest.param("HEIF", marks=needs_heif),
]


@cache
def pictures(form: str, count: int = 3) -> bytes:
    """Return a file of one color per page. Pages of TIFF and HEIC differ in size."""
    if form == "HEIF":
        importlib.import_module("pillow_heif").register_heif_opener()
    grows = form in ("TIFF", "HEIF")
    first, *others = [Image.new("RGB", (40 + 8 * i * grows, 24), COLORS[i % 3]) for i in range(count)]
    options: dict[str, Any] = {} if form == "TIFF" else {"duration": 100}
    buffer = io.BytesIO()
    first.save(buffer, form, save_all=True, append_images=others, **({"quality": 100} if form != "GIF" else {}), **options)
    return buffer.getvalue()


def decoded(page: object) -> np.ndarray:
    source = MediaSource("image", 0, page)
    (header,), (item,) = gate.probe(source, DecodeSpec(), MediaPolicy()), gate.decode(source, DecodeSpec(), MediaPolicy())
    assert (header.height, header.width) == tuple(item.pixels.shape[:2])
    return item.pixels.numpy()


@pytest.mark.parametrize("form", FORMATS)
def test_every_picture_is_a_page(form: str) -> None:
    data = pictures(form)
    assert may_hold_pages(data)
    pages = pdf_pages(data)
    assert [page.number for page in pages] == [1, 2, 3]
    for number, (page, color) in enumerate(zip(pages, COLORS, strict=True)):
        pixels = decoded(page)
        assert pixels.shape == (24, 40 + 8 * number * (form in ("TIFF", "HEIF")), 3)
        assert np.abs(pixels.astype(int) - color).max() <= 8
        if form in ("TIFF", "GIF", "PNG", "WEBP"):
            with Image.open(io.BytesIO(data)) as plain:
                plain.seek(number)
                assert np.array_equal(pixels, np.asarray(plain.convert("RGB")))
    assert len({gate.content_hash(MediaSource("image", 0, page), MediaPolicy()) for page in pages}) == 3
    with pytest.raises(MediaError, match="no page 4") as caught:
        decoded(PdfPage(data, 4))
    info = caught.value.info
    assert (info.code, info.modality, info.index) == ("invalid_media", "image", 0)


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP", *(["AVIF"] if features.check("avif") else [])])
def test_pages_in_order_decode_each_frame_once(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, opened = pictures(form, 40), list[str]()
    real = image._open
    monkeypatch.setattr(image, "_open", lambda *args: opened.append("open") or real(*args))
    monkeypatch.setattr(animations, "_kept", animations._Kept())
    plain = Image.open(io.BytesIO(data))
    steps = []
    if form in ("GIF", "PNG"):  # Pillow decodes one frame per step
        step = type(plain)._seek
        monkeypatch.setattr(
            type(plain), "_seek", lambda self, frame, *flag: steps.append((frame, *flag)) or step(self, frame, *flag)
        )
    for page in range(1, 41):
        image.probe_image(data, MediaPolicy(), min(40, page + 5))  # those of later pages come first
        pixels = image.decode_image(data, MediaPolicy(), page)
        plain.seek(page - 1)
        assert np.array_equal(pixels.numpy(), np.asarray(plain.convert("RGB")))
    assert opened == ["open"]
    assert len([step for step in steps if step[1:] != (False,)]) <= 2 * 40 + 3  # the oracle's, too
    for page in (7, 3, 3, 40, 1):
        plain = Image.open(io.BytesIO(data))  # Pillow itself does not go back in an APNG
        plain.seek(page - 1)
        assert np.array_equal(image.decode_image(data, MediaPolicy(), page).numpy(), np.asarray(plain.convert("RGB")))
    assert len(opened) == 4


def test_probing_a_page_decodes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(animations, "_kept", animations._Kept())
    for form in ("GIF", "PNG", "WEBP"):
        with Image.open(io.BytesIO(pictures(form))) as plain:
            monkeypatch.setattr(type(plain), "load", lambda self: pytest.fail("decodes"))
        assert image.probe_image(pictures(form), MediaPolicy(), 3) == MediaHeader("image", 24, 40)


def test_a_frame_of_a_gif_beyond_its_screen() -> None:
    """Pillow enlarges the canvas from this frame on."""
    data = bytearray(pictures("GIF", 5))
    second = data.find(b"\x2c\0\0\0\0", data.find(b"\x2c\0\0\0\0") + 1)
    data[second + 1 : second + 5] = (16).to_bytes(2, "little") + (9).to_bytes(2, "little")
    for junk in (b"", b"\0\0", b"\x21\xfe\3abc\0"):
        made = bytes(data[:second]) + junk + bytes(data[second:])
        with Image.open(io.BytesIO(made)) as plain:
            for page in range(1, plain.n_frames + 1):
                plain.seek(page - 1)
                want = np.asarray(plain.convert("RGB"))
                header = image.probe_image(made, MediaPolicy(), page)
                assert (header.height, header.width) == want.shape[:2]
                assert image.decode_image(made, MediaPolicy(), page).shape == want.shape
            assert plain.size == (56, 33)
        with pytest.raises(InputError) as caught:
            image.probe_image(made, MediaPolicy(max_pixels=1000), 4)
        info = caught.value.info
        assert (info.code, info.param, info.limit, info.value) == ("over_limit", "max_pixels", 1000, 56 * 33)


def test_animations_that_are_kept_are_few_and_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(animations, "_kept", kept := animations._Kept())
    files = [pictures("GIF", count) for count in range(2, 9)]
    for data in files:
        image.decode_image(data, MediaPolicy(), 2)
    assert [one.data for one in kept.animations] == files[-4:]
    monkeypatch.setattr(animations, "_MOST_BYTES", 3 * kept.animations[-1].held)
    image.decode_image(files[0], MediaPolicy(), 1)
    assert kept.animations[-1].data == files[0]
    assert sum(one.held for one in kept.animations) <= animations._MOST_BYTES
    broken = pictures("GIF", 9)[:-40]
    with pytest.raises(InputError):
        image.decode_image(broken, MediaPolicy(), 9)
    assert all(one.data != broken for one in kept.animations)


def test_long_metadata_does_not_hide_an_animation() -> None:
    first, second = (Image.new("RGB", (40, 24), color) for color in COLORS[:2])
    buffer = io.BytesIO()
    first.save(buffer, "PNG", save_all=True, append_images=[second], icc_profile=np.random.default_rng(0).bytes(200_000))
    assert buffer.getvalue().find(b"acTL") > 100_000
    assert may_hold_pages(buffer.getvalue())
    assert len(pdf_pages(buffer.getvalue())) == 2


def test_a_png_of_empty_chunks_is_not_searched_to_its_end() -> None:
    assert not may_hold_pages(b"\x89PNG\r\n\x1a\n" + (b"\0\0\0\0teSt\0\0\0\0") * 100_000 + b"\0\0\0\0acTL")


def test_one_picture_is_one_page_and_other_images_have_none() -> None:
    for form in ("TIFF", "GIF"):
        assert len(pdf_pages(pictures(form, 1))) == 1
    for form in ("PNG", "WEBP", "JPEG", "BMP"):
        buffer = io.BytesIO()
        Image.new("RGB", (8, 8)).save(buffer, form)
        assert not may_hold_pages(buffer.getvalue())


def test_thumbnails_of_a_tiff_are_no_pages() -> None:
    buffer = io.BytesIO()
    first, thumbnail, second = (Image.new("RGB", (size, size), COLORS[i]) for i, size in enumerate((32, 8, 16)))
    thumbnail.encoderinfo = {"tiffinfo": {254: 1}}
    first.save(buffer, "TIFF", save_all=True, append_images=[thumbnail, second])
    pages = [decoded(page) for page in pdf_pages(buffer.getvalue())]
    assert [page.shape[0] for page in pages] == [32, 16]
    assert (pages[1] == COLORS[2]).all()


def test_a_page_of_a_tiff_is_upright() -> None:
    buffer, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    second = Image.new("RGB", (30, 20), COLORS[0])
    second.paste(COLORS[1], (0, 0, 15, 20))
    second.encoderinfo = {"exif": exif}
    Image.new("RGB", (8, 8)).save(buffer, "TIFF", save_all=True, append_images=[second])
    pixels = decoded(pdf_pages(buffer.getvalue())[1])
    assert pixels.shape == (30, 20, 3)
    assert (pixels[:15] == COLORS[1]).all()  # the left half is above after a quarter turn clockwise
    assert (pixels[15:] == COLORS[0]).all()


def test_limits_are_those_of_pdfs() -> None:
    for form in ("TIFF", "GIF"):
        with pytest.raises(InputError) as caught:
            pdf_pages(pictures(form), MediaPolicy(max_pdf_pages=2))
        info = caught.value.info
        assert (info.code, info.param, info.limit, info.value) == ("over_limit", "max_pdf_pages", 2, 3)
    (*_, last) = pdf_pages(pictures("TIFF"))
    source = MediaSource("image", 0, last)
    with pytest.raises(MediaError) as caught:
        gate.decode(source, DecodeSpec(), MediaPolicy(max_pixels=1000))
    info = caught.value.info
    assert (info.code, info.param, info.limit, info.value) == ("over_limit", "max_pixels", 1000, 56 * 24)
    with pytest.raises(MediaError, match="max_decoded_bytes"):
        gate.decode(source, DecodeSpec(), MediaPolicy(max_decoded_bytes=10_000))


def test_the_pages_of_a_file_have_one_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of a page is what the pages before have left."""
    limits: list[float] = []
    taken = iter((20.0, 30.0, 5.0))

    def run(function: Any, data: bytes, *args: object, tenant: str | None = None, seconds: float | None = None) -> Any:
        assert seconds is not None
        limits.append(seconds)
        if (spent := next(taken)) > seconds:
            raise slow_error(seconds)
        return function(data, *args)[0], spent

    pages = pdf_pages(pictures("TIFF", 4), MediaPolicy())
    monkeypatch.setattr("sensorium.mm.media.isolate.run_isolated", run)
    policy = MediaPolicy(worker_seconds=40.0, max_pages_seconds=45.0)
    items = [MediaSource("image", 0, page) for page in pages]
    gate.decode(items[0], DecodeSpec(), policy)
    for item in (items[1], items[2]):
        with pytest.raises(MediaError) as caught:
            gate.decode(item, DecodeSpec(), policy)
        info = caught.value.info
        assert (info.code, info.param, info.limit) == ("over_limit", "max_pages_seconds", 45.0)
    assert limits == [40.0, 25.0]  # the third page is not tried
    with pytest.raises(MediaError, match="took longer than 45 s"):
        gate.probe(items[3], DecodeSpec(), policy)


def test_the_time_of_pages_of_a_local_file_is_kept_with_it() -> None:
    files = PdfFiles()
    files.once("a", lambda: b"1").clock.add(3.0)
    files.once("b", lambda: b"2")
    gc.collect()  # the first file is gone
    assert (files.once("a", lambda: b"1").clock.seconds, files.once("b", lambda: b"2").clock.seconds) == (3.0, 0.0)


def test_pages_are_opened_in_workers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(isolate, "_ask", lambda request, *_: asked.append(request.name) or 1 / 0)
    for step in (gate.probe, gate.decode):
        with pytest.raises((MediaError, ZeroDivisionError)):
            step(MediaSource("image", 0, PdfPage(pictures("GIF"), 2)), DecodeSpec(), MediaPolicy())
    assert asked == ["probe_timed", "decode_timed"]


def part(data: bytes, media_type: str, kind: str) -> dict[str, Any]:
    url = f"data:{media_type};base64,{base64.b64encode(data).decode()}"
    if kind == "file":
        return {"type": "file", "file": {"file_data": url, "filename": "a"}}
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


def test_pages_of_files_in_messages() -> None:
    cases = [("TIFF", "image/tiff", "file", 3), ("TIFF", "image/tiff", "image_url", 3), ("GIF", "image/gif", "file", 3)]
    cases += [("PNG", "image/png", "file", 3), ("GIF", "image/gif", "image_url", 1)]  # an image_url gives the first frame
    for form, media_type, kind, count in cases:
        messages = [{"role": "user", "content": [part(pictures(form), media_type, kind)]}]
        assert holds_files(messages) == (count == 3)
        plain, media, places = split_media(messages)
        assert plain[0]["content"] == [{"type": "image", "image": True}] * count
        assert len(media) == len(places) == count
        if count == 3:
            assert [item.data.number for _, item in media] == [1, 2, 3]
            assert all((item.options.get("detail") == "low") == (kind == "image_url") for _, item in media)
    single = [{"role": "user", "content": [part(pictures("TIFF", 1), "image/tiff", "image_url")]}]
    ((_, alone),) = split_media(single)[1]
    assert not isinstance(alone.data, PdfPage)
    with pytest.raises(InputError) as caught:
        split_media([{"role": "user", "content": [part(pictures("TIFF"), "image/tiff", "file")]}], MediaPolicy(max_pdf_pages=2))
    assert (caught.value.info.code, caught.value.info.param) == ("over_limit", "max_pdf_pages")


def test_pages_on_the_command_line(tmp_path: Path) -> None:
    for name, data in (
        ("a.tif", pictures("TIFF")),
        ("b.gif", pictures("GIF")),
        ("c.tif", pictures("TIFF", 1)),
        ("d.tif", b"II*\0"),
    ):
        (tmp_path / name).write_bytes(data)
    items = {Path(named.source).name: named.item for named in images_and_pages([tmp_path])}
    names = [f"{name}#page={number}" for name in ("a.tif", "b.gif") for number in (1, 2, 3)]
    assert list(items) == [*names, "c.tif", "d.tif"]
    assert items["b.gif#page=2"] == PdfPage(str(tmp_path / "b.gif"), 2)
    assert items["c.tif"] == str(tmp_path / "c.tif")
    assert items["d.tif"] == str(tmp_path / "d.tif")


@needs_heif
def test_a_heic_image_is_decoded_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pictures("HEIF", 1)
    assert np.abs(decoded(data).astype(int) - COLORS[0]).max() <= 8
    monkeypatch.setattr(isolate, "_ask", lambda *_: 1 / 0)
    for step in (gate.probe, gate.decode):
        with pytest.raises((MediaError, ZeroDivisionError)):
            step(MediaSource("image", 0, data), DecodeSpec(), MediaPolicy())


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    data = b"\0\0\0\x1cftypheic\0\0\0\0mif1heicmiaf" + bytes(100)
    for read in (image.probe_image, image.decode_image):
        with pytest.raises(InputError, match=r"sensorium\[heif\]"):
            read(data, MediaPolicy())
