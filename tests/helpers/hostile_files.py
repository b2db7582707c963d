"""Documents that are broken or harmful, with what becomes of each: an error of the file, or that of its first page."""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import dataclass

from pdf_files import encrypted_pdf, form_pdf, pdf_of, stream, text_pdf
from PIL import Image

ROOT = {1: "<</Type/Catalog/Pages 2 0 R>>", 2: "<</Type/Pages/Kids[3 0 R]/Count 1>>"}
FONT = "/Font<</F1 9 0 R>>"
HELVETICA = {9: "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"}


@dataclass(frozen=True)
class Harmful:
    """A file.

    Args:
        file_error, page_error: codes of the errors of the file and of its first page, or None.
        text: of the page's blocks if it is read. is_doubted: the page has a doubt.
    """

    data: bytes
    file_error: str | None = None
    page_error: str | None = None
    text: str | None = None
    is_doubted: bool = False


def page(size: float | str, resources: str = "", entries: str = "") -> str:
    return f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 {size} {size}]/Contents 4 0 R/Resources<<{resources}>>{entries}>>"


def packed(entries: str, data: bytes, filters: str = "/FlateDecode") -> str:
    """Return a stream of compressed bytes."""
    return f"<<{entries}/Filter{filters}/Length {len(data)}>>stream\n{data.decode('latin-1')}\nendstream"


def bomb(mebibytes: int) -> bytes:
    """Return compressed spaces."""
    packer = zlib.compressobj(9)
    return b"".join(packer.compress(b" " * (1 << 20)) for _ in range(mebibytes)) + packer.flush()


def nested_pages(levels: int) -> bytes:
    """Return a PDF whose page lies under so many nodes."""
    nodes = {
        10 + level: f"<</Type/Pages/Parent {9 + level if level else 2} 0 R/Kids[{kid} 0 R]/Count 1>>"
        for level, kid in enumerate([*range(11, 10 + levels), 3])
    }
    return pdf_of({**ROOT, 2: "<</Type/Pages/Kids[10 0 R]/Count 1>>", 3: page(200), 4: stream("", ""), **nodes})


def doubling_forms(levels: int) -> bytes:
    """Return a PDF whose page draws a form 2 ** levels times."""
    entries = "/Type/XObject/Subtype/Form/BBox[0 0 99 99]/Resources<</XObject<</X {} 0 R>>>>"
    forms = {10 + level: stream(entries.format(11 + level), "/X Do /X Do") for level in range(levels)}
    last = {10 + levels: stream(entries.format(9), "0 0 9 9 re f")}
    return pdf_of({**ROOT, 3: page(200, "/XObject<</X 10 0 R>>"), 4: stream("", "/X Do"), **forms, **last})


def png_bomb(side: int) -> bytes:
    """Return a PNG of so many rows and columns, without most of its rows."""
    data = zlib.compress(b"\0" * (1 + side // 8) * 99)

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def endless_tiff() -> bytes:
    """Return a TIFF whose only page is followed by itself."""
    file = io.BytesIO()
    Image.new("L", (8, 8), 255).save(file, "TIFF")
    data = bytearray(file.getvalue())
    (start,) = struct.unpack("<I", data[4:8])
    (count,) = struct.unpack("<H", data[start : start + 2])
    data[start + 2 + 12 * count : start + 6 + 12 * count] = struct.pack("<I", start)
    return bytes(data)


def shown(text: str, catalog: str = "") -> bytes:
    """Return a PDF with a line of text. `catalog`: entries of its catalog."""
    body = stream("", f"BT /F1 12 Tf 20 100 Td ({text}) Tj ET")
    return pdf_of({**ROOT, 1: f"<</Type/Catalog/Pages 2 0 R{catalog}>>", 3: page(200, FONT), 4: body, **HELVETICA})


SCRIPT = "<</S/JavaScript/JS(for\\(;;\\);)>>"
GOOD = text_pdf([["the text of a page"]] * 3)
FILES = {
    "locked.pdf": Harmful(encrypted_pdf(b"secret"), "invalid_media"),
    "cut_off.pdf": Harmful(GOOD[: len(GOOD) // 2], "invalid_media"),
    "no_table.pdf": Harmful(GOOD[: GOOD.rindex(b"xref\n0")], "invalid_media"),
    "header.pdf": Harmful(b"%PDF-1.7", "invalid_media"),
    "noise.pdf": Harmful(b"%PDF-1.7\n" + zlib.compress(bytes(range(256)) * 99) * 20, "invalid_media"),
    "no_pages.pdf": Harmful(pdf_of({**ROOT, 2: "<</Type/Pages/Kids[]/Count 0>>"}), "invalid_media"),
    "own_child.pdf": Harmful(pdf_of({**ROOT, 2: "<</Type/Pages/Kids[2 0 R]/Count 1>>"}), page_error="invalid_input"),
    "deep_tree.pdf": Harmful(nested_pages(5000), page_error="invalid_input"),
    "deep_array.pdf": Harmful(
        pdf_of({**ROOT, 2: f"<</Type/Pages/Kids[3 0 R]/Count 1/X {'[' * 9999}{']' * 9999}>>", 3: page(200), 4: stream("", "")})
    ),
    "false_count.pdf": Harmful(
        pdf_of({**ROOT, 2: "<</Type/Pages/Kids[3 0 R]/Count 2000000000>>", 3: page(200), 4: stream("", "")})
    ),
    "pages.pdf": Harmful(
        pdf_of({**ROOT, 2: "<</Type/Pages/Kids[3 0 R]/Count 10000>>", 3: page(200), 4: stream("", "")}), "over_limit"
    ),
    "large.pdf": Harmful(pdf_of({**ROOT, 3: page(2_000_000), 4: stream("", "0 0 9 9 re f")}), page_error="over_limit"),
    "unit.pdf": Harmful(
        pdf_of({**ROOT, 3: page(14_400, "", "/UserUnit 75000"), 4: stream("", "0 0 9 9 re f")}), page_error="over_limit"
    ),
    "flat.pdf": Harmful(pdf_of({**ROOT, 3: page(-200), 4: stream("", "0 0 9 9 re f")})),
    "bomb.pdf": Harmful(
        pdf_of({**ROOT, 3: page(200), 4: packed("", zlib.compress(bomb(512), 9), "[/FlateDecode/FlateDecode]")})
    ),
    "forms.pdf": Harmful(doubling_forms(40), page_error="invalid_input"),
    "picture.pdf": Harmful(
        pdf_of(
            {
                **ROOT,
                3: page(200, "/XObject<</X 5 0 R>>"),
                4: stream("", "200 0 0 200 0 0 cm /X Do"),
                5: packed(
                    "/Type/XObject/Subtype/Image/Width 60000/Height 60000/BitsPerComponent 8/ColorSpace/DeviceRGB", bomb(64)
                ),
            }
        ),
        is_doubted=True,
    ),
    "no_font.pdf": Harmful(
        pdf_of({**ROOT, 3: page(200, "/Font<<>>"), 4: stream("", "BT /F9 12 Tf 20 100 Td (missing font) Tj ET")}),
        text="missing font",
    ),
    "fields.pdf": Harmful(form_pdf(), page_error="unsupported"),
    "script.pdf": Harmful(
        shown("text with a script", f"/OpenAction{SCRIPT}/AA<</WC{SCRIPT}>>/Names<</JavaScript<</Names[(a){SCRIPT}]>>>>"),
        text="text with a script",
    ),
    "launch.pdf": Harmful(
        shown("text that starts a program", "/OpenAction<</S/Launch/F(/bin/false)>>"), text="text that starts a program"
    ),
    "empty.pdf": Harmful(b"", "invalid_media"),
    "empty.png": Harmful(b"", "invalid_media"),
    "text.pdf": Harmful(b"This is a plain text, and no PDF.\n" * 9, "invalid_media"),
    "page.pdf": Harmful(b"<!DOCTYPE html><html><body>404 not found</body></html>", "invalid_media"),
    "bomb.png": Harmful(png_bomb(60_000), "over_limit"),
    "endless.tiff": Harmful(endless_tiff()),
}
