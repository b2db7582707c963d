"""Small PDFs, written object by object."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

FIELDS = {  # name: entries of a form field, its rectangle and the color of its appearance; pages are 200x200 points
    "text": ("/FT/Tx/V(HELLO)/DA(/Helv 12 Tf 0 g)", (10, 170, 110, 190), (255, 0, 0)),
    "tick": ("/FT/Btn/V/Yes/AS/Yes/MK<</CA(4)>>/DA(/ZaDb 0 Tf 0 g)", (10, 140, 30, 160), (0, 255, 0)),
    "radio": ("/FT/Btn/Ff 49152/V/Yes/AS/Yes/MK<</CA(l)>>/DA(/ZaDb 0 Tf 0 g)", (40, 140, 60, 160), (0, 0, 255)),
    "combo": ("/FT/Ch/Ff 131072/V(TWO)/Opt[(ONE)(TWO)]/DA(/Helv 12 Tf 0 g)", (10, 110, 110, 130), (0, 255, 255)),
    "list": ("/FT/Ch/V(TWO)/Opt[(ONE)(TWO)]/DA(/Helv 8 Tf 0 g)", (10, 80, 110, 100), (255, 0, 255)),
    "signature": ("/FT/Sig", (10, 50, 110, 70), (255, 255, 0)),
}


def pdf_of(objects: Mapping[int, str], trailer: str = "") -> bytes:
    """Return a PDF with these objects; number 1 is its catalog."""
    data = b"%PDF-1.7\n"
    places = {}
    for number, body in objects.items():
        places[number] = len(data)
        data += f"{number} 0 obj\n{body}\nendobj\n".encode("latin-1")
    rows = [f"{places[n]:010} 00000 n \n" if n in places else "0000000000 65535 f \n" for n in range(max(objects) + 1)]
    table = f"xref\n0 {len(rows)}\n{''.join(rows)}trailer<</Root 1 0 R/Size {len(rows)}{trailer}>>\n"
    return data + f"{table}startxref\n{len(data)}\n%%EOF".encode("latin-1")


def stream(entries: str, content: str) -> str:
    return f"<<{entries}/Length {len(content)}>>stream\n{content}\nendstream"


def form_pdf(
    appearances: bool = True, acro_form: str | None = "/Fields[10 0 R 11 0 R 12 0 R 13 0 R 14 0 R 15 0 R]", page: str = ""
) -> bytes:
    """Return a page with a field of each kind, a stamp and a highlight.

    Args:
        appearances: fields have an appearance, a box of one color; else a viewer makes it from the value.
        acro_form: entries of the document's form, None for none. page: further entries of the page.
    """
    annotations = " ".join(f"{number} 0 R" for number in range(10, 18))
    form = "" if acro_form is None else f"/AcroForm<<{acro_form}/DR<</Font<</Helv 5 0 R>>>>>>"
    objects = {
        1: f"<</Type/Catalog/Pages 2 0 R{form}>>",
        2: "<</Type/Pages/Kids[3 0 R]/Count 1>>",
        3: f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 200 200]/Resources<<>>/Annots[{annotations}]{page}>>",
        5: "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
        16: "<</Type/Annot/Subtype/Stamp/F 4/Rect[10 20 110 40]/AP<</N 26 0 R>>>>",
        17: "<</Type/Annot/Subtype/Highlight/F 4/Rect[120 20 190 40]/QuadPoints[120 40 190 40 120 20 190 20]/C[1 1 0]>>",
        26: _box((100, 20), (128, 0, 0)),
    }
    for number, (name, (entries, place, color)) in enumerate(FIELDS.items()):
        ap = f"<</Yes {20 + number} 0 R>>" if "/Btn" in entries else f"{20 + number} 0 R"
        shown = f"/AP<</N {ap}>>" if appearances else ""
        rectangle = " ".join(map(str, place))
        objects[10 + number] = f"<</Type/Annot/Subtype/Widget/T({name}){entries}/F 4/Rect[{rectangle}]/P 3 0 R{shown}>>"
        objects[20 + number] = _box((place[2] - place[0], place[3] - place[1]), color)
    return pdf_of(objects)


def _box(size: tuple[int, int], color: tuple[int, int, int]) -> str:
    width, height = size
    fill = " ".join(f"{value / 255:.4f}" for value in color)
    return stream(f"/Type/XObject/Subtype/Form/BBox[0 0 {width} {height}]", f"{fill} rg 0 0 {width} {height} re f")


def encrypted_pdf(user_password: bytes) -> bytes:
    """Return a page that is half red, encrypted with RC4 of 40 bits (ISO 32000-1, 7.6), with the owner's password "owner"."""
    padding = bytes.fromhex("28BF4E5E4E758A4164004E56FFFA01082E2E00B6D0683E802F0CA9FE6453697A")
    user, owner = (user_password + padding)[:32], (b"owner" + padding)[:32]
    hidden = _rc4(hashlib.md5(owner).digest()[:5], user)
    key = hashlib.md5(user + hidden + (-4).to_bytes(4, "little", signed=True) + b"0123456789abcdef").digest()[:5]
    content = _rc4(hashlib.md5(key + b"\4\0\0\0\0").digest()[:10], b"1 0 0 rg 0 0 50 100 re f")  # of object 4 0
    objects = {
        1: "<</Type/Catalog/Pages 2 0 R>>",
        2: "<</Type/Pages/Kids[3 0 R]/Count 1>>",
        3: "<</Type/Page/Parent 2 0 R/MediaBox[0 0 100 100]/Resources<<>>/Contents 4 0 R>>",
        4: stream("", content.decode("latin-1")),
        5: f"<</Filter/Standard/V 1/R 2/P -4/O<{hidden.hex()}>/U<{_rc4(key, padding).hex()}>>>",
    }
    name = b"0123456789abcdef".hex()
    return pdf_of(objects, f"/Encrypt 5 0 R/ID[<{name}><{name}>]")


def _rc4(key: bytes, data: bytes) -> bytes:
    state, j, out = list(range(256)), 0, bytearray()
    for i in range(256):
        j = (j + state[i] + key[i % len(key)]) % 256
        state[i], state[j] = state[j], state[i]
    i = j = 0
    for byte in data:
        i = (i + 1) % 256
        j = (j + state[i]) % 256
        state[i], state[j] = state[j], state[i]
        out.append(byte ^ state[(state[i] + state[j]) % 256])
    return bytes(out)


def text_pdf(
    pages: Sequence[Sequence[str]],
    size: tuple[int, int] = (400, 300),
    page: str = "",
    text_mode: int = 0,
    shift: int = 0,
    picture: tuple[int, int, bytes] | None = None,
) -> bytes:
    """Return a PDF whose pages have these lines in Helvetica, 20 points apart; "# " begins one in twice the size.

    Args:
        page: further entries of each page. text_mode: 3 draws invisibly.
        shift: the text layer has characters with codes that are higher by this.
        picture: width, height and grey pixels of a picture that covers each page, so that nothing of its lines is seen.
    """
    kids = " ".join(f"{10 + 2 * number} 0 R" for number in range(len(pages)))
    objects = {
        1: "<</Type/Catalog/Pages 2 0 R>>",
        2: f"<</Type/Pages/Kids[{kids}]/Count {len(pages)}>>",
        5: f"<</Type/Font/Subtype/Type1/BaseFont/Helvetica{'/ToUnicode 6 0 R' if shift else ''}>>",
    }
    if shift:
        ranges = f"1 beginbfrange<21><7d><{0x21 + shift:04x}>endbfrange"
        objects[6] = stream("", f"begincmap 1 begincodespacerange<00><ff>endcodespacerange {ranges} endcmap")
    cover = ""
    if picture is not None:
        width, height, pixels = picture
        entries = f"/Type/XObject/Subtype/Image/Width {width}/Height {height}/ColorSpace/DeviceGray/BitsPerComponent 8"
        objects[7], cover = stream(entries, pixels.decode("latin-1")), f"q {size[0]} 0 0 {size[1]} 0 0 cm /P Do Q\n"
    for number, lines in enumerate(pages):
        shown = ""
        for row, line in enumerate(lines):
            height, text = (24, line[2:]) if line.startswith("# ") else (12, line)
            shown += f"BT {text_mode} Tr /F1 {height} Tf 30 {size[1] - 40 - 20 * row} Td ({text}) Tj ET\n"
        objects[10 + 2 * number] = (
            f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 {size[0]} {size[1]}]/Contents {11 + 2 * number} 0 R"
            f"/Resources<</Font<</F1 5 0 R>>{'/XObject<</P 7 0 R>>' if cover else ''}>>{page}>>"
        )
        objects[11 + 2 * number] = stream("", shown + cover)
    return pdf_of(objects)
