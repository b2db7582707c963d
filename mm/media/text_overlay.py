"""Adds invisible text to the pages of a PDF, so that a scan can be searched and copied from. The pages look as before.

The font has one glyph, without area: each character is 0.5 wide and 1 high in units of the font's size, so that a line
fills its box exactly. Its codes are UTF-16 code units. Sources: ISO 32000-1, 9.7; the OpenType specification 1.9.
"""

from __future__ import annotations

import hashlib
import re
import struct
import zlib
from collections.abc import Sequence
from ctypes import c_float, c_ubyte, c_uint
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from .image import count_pages
from .page_facts import Box, page_affine, page_pixels
from .pdf import holds_pictures, is_pdf, opened_pdf
from .policy import MediaPolicy

_ADVANCE = 0.5  # width of a character, in font sizes
_CONTROLS = re.compile(r"[\x00-\x1f\x7f\ufffe\uffff\u00ad]")
_ID = re.compile(rb"/ID\[<([0-9A-Fa-f]{32})><([0-9A-Fa-f]{32})>\]")
_MIN_SIDE = 0.5  # points of a line's box
_CMAP = b"""/CIDInit /ProcSet findresource begin 12 dict begin begincmap
/CIDSystemInfo <</Registry (Adobe) /Ordering (UCS) /Supplement 0>> def
/CMapName /Adobe-Identity-UCS def /CMapType 2 def
1 begincodespacerange <0000> <FFFF> endcodespacerange
1 beginbfrange <0000> <FFFF> <0000> endbfrange
endcmap CMapName currentdict /CMap defineresource pop end end"""


@dataclass(frozen=True)
class PlacedText:
    """A line of text and its box, in points from the top left corner of the page as it is shown."""

    text: str
    box: Box


@dataclass(frozen=True)
class PageText:
    """The lines of a page, whose number counts from 1."""

    number: int
    lines: tuple[PlacedText, ...]


def add_text(data: bytes, pages: list[PageText], policy: MediaPolicy) -> Tensor:
    """Return a PDF with invisible text on its pages, as uint8 `[bytes]`; equal calls give equal bytes. Runs in a codec worker.

    A picture, or a file of pictures, becomes a PDF first: a pixel is a point.

    Raises:
        InputError: the file cannot be opened, or a picture exceeds a limit of the policy.
    """
    if not is_pdf(data):
        data = _pdf_of_pictures(data, policy)
    with opened_pdf(data) as document:
        font = _load_font(document)
        for page in pages:
            _add_lines(document, page, font)
        file = BytesIO()
        document.save(file)
    return torch.frombuffer(bytearray(_with_fixed_id(file.getvalue())), dtype=torch.uint8)


def _add_lines(document: Any, text: PageText, font: Any) -> None:
    from pypdfium2 import raw

    page = document[text.number - 1]
    try:
        to_page = page_affine(page, *page.get_size())
        for line in text.lines:
            codes = _CONTROLS.sub(" ", line.text).encode("utf-16-le", "replace")
            count = len(codes) // 2
            left, top, right, bottom = line.box
            width, height = max(right - left, _MIN_SIDE), max(bottom - top, _MIN_SIDE)
            if not count:
                continue
            item = raw.FPDFPageObj_CreateTextObj(document, font, c_float(height))
            raw.FPDFText_SetCharcodes(item, (c_uint * count)(*struct.unpack(f"<{count}H", codes)), count)
            raw.FPDFTextObj_SetTextRenderMode(item, raw.FPDF_TEXTRENDERMODE_INVISIBLE)
            raw.FPDFPageObj_Transform(item, *_matrix(to_page, left, bottom, width / (count * _ADVANCE * height)))
            raw.FPDFPage_InsertObject(page, item)
        page.gen_content()
    finally:
        page.close()


def _matrix(to_page: Sequence[float], left: float, bottom: float, stretch: float) -> tuple[float, ...]:
    """Return the matrix from a line's own coordinates, from the left end of its base line, to those of its page."""
    a, b, c, d, e, f = to_page
    area = a * d - b * c
    x, y = left - e, bottom - f
    return (
        d * stretch / area, -b * stretch / area, c / area, -a / area, (d * x - c * y) / area, (a * y - b * x) / area,
    )  # fmt: skip


def _load_font(document: Any) -> Any:
    from pypdfium2 import raw

    font, glyphs = _font(), bytes(2 << 16)  # each code has glyph 0
    return raw.FPDFText_LoadCidType2Font(document, _array(font), len(font), _CMAP, _array(glyphs), len(glyphs))


def _array(data: bytes) -> Any:
    return (c_ubyte * len(data)).from_buffer_copy(data)


def _font() -> bytes:
    """Return a TrueType font with one glyph, 500 wide in an em of 1000, from the base line to 1000 above it.

    Its outline is a line, which has no area: PDFium ignores text without a width and height.
    """
    glyph = struct.pack(">5hHH3B6hx", 1, 0, 0, 500, 1000, 2, 0, 1, 1, 1, 0, 500, -500, 0, 1000, -1000)
    names, strings, records = ((1, "Invisible"), (4, "Invisible"), (6, "Invisible")), b"", b""
    for number, name in names:
        encoded = b"".join(b"\0%c" % code for code in name.encode())  # UTF-16, big-endian
        records += struct.pack(">6H", 3, 1, 0x409, number, len(encoded), len(strings))
        strings += encoded
    tables = {
        b"OS/2": struct.pack(">HhHHH11h10s4I4sHHHhhhHH", 0, 500, 400, 5, 0, *(0,) * 11, bytes(10), 0, 0, 0, 0, b"NONE",
                             0, 0, 0xFFFF, 1000, 0, 0, 1000, 0),
        b"cmap": struct.pack(">4HI10HhH", 0, 1, 3, 1, 12, 4, 24, 0, 2, 2, 0, 0, 0xFFFF, 0, 0xFFFF, 1, 0),
        b"glyf": glyph,
        b"head": struct.pack(">4I2H2q4h2H3h", 1 << 16, 1 << 16, 0, 0x5F0F3CF5, 0, 1000, 0, 0, 0, 0, 500, 1000, 0, 8, 2, 0, 0),
        b"hhea": struct.pack(">I3hH11hH", 1 << 16, 1000, 0, 0, 500, 0, 0, 0, 1, *(0,) * 7, 1),
        b"hmtx": struct.pack(">Hh", 500, 0),
        b"loca": struct.pack(">2H", 0, len(glyph) // 2),
        b"maxp": struct.pack(">I14H", 1 << 16, 1, 3, 1, 0, 0, 2, *(0,) * 8),
        b"name": struct.pack(">3H", 0, len(names), 6 + 12 * len(names)) + records + strings,
        b"post": struct.pack(">2I2h5I", 3 << 16, 0, 0, 0, 1, 0, 0, 0, 0),
    }  # fmt: skip
    head, body = struct.pack(">I4H", 1 << 16, len(tables), 128, 3, 16 * len(tables) - 128), b""
    for tag, table in tables.items():
        padded = table + bytes(-len(table) % 4)
        checksum = sum(struct.unpack(f">{len(padded) // 4}I", padded)) & 0xFFFFFFFF
        head += struct.pack(">4s3I", tag, checksum, 12 + 16 * len(tables) + len(body), len(table))
        body += padded
    return head + body


def _with_fixed_id(data: bytes) -> bytes:
    """Return the file with an identifier made from its bytes: PDFium makes it by chance. That of the first version is kept."""
    found = list(_ID.finditer(data))
    if not found:
        return data
    first, second = found[-1].groups()
    start, end = found[-1].span()
    new = hashlib.sha256(data[:start] + data[end:]).hexdigest()[:32].upper().encode()
    return data[:start] + b"/ID[<%b><%b>]" % (new if first == second else first, new) + data[end:]


def _pdf_of_pictures(data: bytes, policy: MediaPolicy) -> bytes:
    """Return a PDF with a page for each picture of a file."""
    count = count_pages(data, policy)[0] if holds_pictures(data) else 1
    objects = {1: b"<</Type/Catalog/Pages 2 0 R>>"}
    kids = b" ".join(b"%d 0 R" % (3 + 3 * index) for index in range(count))
    objects[2] = b"<</Type/Pages/Kids[%b]/Count %d>>" % (kids, count)
    for index in range(count):
        pixels, number = page_pixels(data, index + 1, policy), 3 + 3 * index
        height, width, _ = pixels.shape
        names = b"/Resources<</XObject<</I %d 0 R>>>>/Contents %d 0 R" % (number + 1, number + 2)
        objects[number] = b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 %d %d]%b>>" % (width, height, names)
        entries = b"/Type/XObject/Subtype/Image/Width %d/Height %d/ColorSpace/DeviceRGB/BitsPerComponent 8" % (width, height)
        objects[number + 1] = _stream(entries + b"/Filter/FlateDecode", zlib.compress(pixels.numpy().tobytes()))
        objects[number + 2] = _stream(b"", b"q %d 0 0 %d 0 0 cm /I Do Q" % (width, height))
    parts, places = [b"%PDF-1.7\n"], [9]
    for number, body in objects.items():
        parts.append(b"%d 0 obj\n%b\nendobj\n" % (number, body))
        places.append(places[-1] + len(parts[-1]))
    rows = b"".join(b"%010d 00000 n \n" % place for place in places[:-1])
    size = len(objects) + 1
    table = b"xref\n0 %d\n0000000000 65535 f \n%btrailer<</Root 1 0 R/Size %d>>\n" % (size, rows, size)
    return b"".join([*parts, table, b"startxref\n%d\n%%%%EOF" % places[-1]])


def _stream(entries: bytes, content: bytes) -> bytes:
    return b"<<%b/Length %d>>stream\n%b\nendstream" % (entries, len(content), content)
