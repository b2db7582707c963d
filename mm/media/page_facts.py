"""Measures a page without recognising its text: its size, the lines of its text layer, its pictures, and its ink.

`page_facts` runs in a codec worker, as decoding does: PDFium parses the untrusted file for both.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from ctypes import byref, c_int
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .image import decode_image
from .markup import TextPart, is_epub, is_html, text_parts
from .page_rules import Affine, Rule, page_rules
from .pdf import decode_page, holds_pictures, is_pdf, opened_page, render
from .plain_text import GUESSED, TextKind, page_text
from .policy import MediaPolicy

Box = tuple[float, float, float, float]
"""Left, top, right and bottom in points, from the top left corner of the page as it is shown."""
MAX_CHARS = 1 << 17
"""Characters of one page's text layer that are read."""
_INK_DPI = 72.0
_MAX_TEXTS = 256  # text objects that tell whether the text is drawn
_FEW_CHARS = 200  # a page with fewer is rendered to see whether it shows more than its text
_MIN_MARK = 8  # pixels of a mark at 72 dots per inch; the digit 7 in a small font has 10, dust has fewer
_CONTRAST = 40  # difference in brightness, of 255, between a mark and what surrounds it
_FAINT = 5  # the same of a faint mark, after averaging
_MIN_FAINT = 20  # pixels of a faint mark, with those that averaging adds
_NEIGHBOURS = 33  # pixels of the side of the square that a pixel is compared with
_DEVICE = 1 << 14  # device units of a page's side, for the matrix of its coordinates
_GAP = 2.0  # line heights between two parts of a line that belong to different columns
_CUT = 0.6  # line heights between two words that may belong to different cells of a table
_BULLETS = dict.fromkeys(map(ord, "\uf0b7\uf0a7\uf0d8\uf0fc\uf076"), "•")  # codes of Symbol and Wingdings in Word's lists
_HYPHEN = "\u00ad"  # stands for a hyphen that PDFium takes for one of hyphenation
_BAD = ("Cc", "Cn", "Cs")  # categories of characters that no text has
Verticals = NDArray[np.float64]
"""Places of vertical rules, with their upper and lower ends, `[rules, 3]`."""


class LineCut(NamedTuple):
    """A place between two words, or at a vertical rule, where a line may be cut into cells of a table.

    `position`: characters before it. `left` and `right`: ends of the gap in points; equal where there is no gap.
    """

    position: int
    left: float
    right: float


@dataclass(frozen=True)
class TextLine:
    """A line of a text layer, or the part of one that stands in a column. `size` is its height in points, without gaps."""

    text: str
    box: Box
    size: float
    cuts: tuple[LineCut, ...] = ()


@dataclass(frozen=True)
class PageFacts:
    """Facts about a page that decide how it is read.

    Args:
        width, height: in points as the page is shown; of a picture in pixels.
        num_chars: characters of the text layer without spaces.
        num_cut: characters at the end of the text layer that were left out, because it has more than `MAX_CHARS`.
        num_unprintable: how many of them are control characters, unassigned, or have no known meaning in their font.
        num_private: how many are private-use or replacement characters.
        num_outside: how many stand outside of the page.
        invisible: most of the text layer is drawn invisibly, as recognition programs do.
        picture_share: share of the page that its largest picture covers.
        marks: marks that the page shows outside of its text lines; None if that was not looked at.
        num_undecoded: pictures that cannot be decoded, on a page that shows nothing.
        lines: of the text layer, in the order of the file.
        rules: horizontal and vertical lines that are drawn, if there is text.
        parts: blocks of a chapter of a book, of an HTML file or of a text file, which has no size and no lines; None for other
            files.
        guessed_encoding: the encoding of a text file is a guess.
        num_sampled: lines of the text layer that were compared with a reading of their pictures; `page_facts` compares none.
        num_differing: how many of them differ.
    """

    width: float
    height: float
    num_chars: int = 0
    num_cut: int = 0
    num_unprintable: int = 0
    num_private: int = 0
    num_outside: int = 0
    invisible: bool = False
    picture_share: float = 0.0
    marks: int | None = None
    num_undecoded: int = 0
    lines: tuple[TextLine, ...] = ()
    rules: tuple[Rule, ...] = ()
    parts: tuple[TextPart, ...] | None = None
    guessed_encoding: bool = False
    num_sampled: int = 0
    num_differing: int = 0


class PageChar(NamedTuple):
    """A character of a line. `is_unknown`: it has no known meaning in its font."""

    text: str
    box: Box
    is_unknown: bool = False


def page_facts(data: bytes, numbers: list[int], policy: MediaPolicy) -> list[PageFacts]:
    """Return the facts of pages of a PDF, a TIFF or an animation, or of the only page, 1, of another picture or of HTML.

    The pages of a book are its chapters. For text files, see `text_facts`.

    Raises:
        InputError: as `pdf.decode_page`, for the first page that cannot be opened.
    """
    return [_facts(data, number, policy) for number in numbers]


def page_pixels(data: bytes, number: int, policy: MediaPolicy) -> Tensor:
    """Return the pixels of such a page as uint8 `[height, width, 3]`; see `pdf.decode_page`."""
    return decode_page(data, number, policy) if is_pdf(data) or holds_pictures(data) else decode_image(data, policy)


def _facts(data: bytes, number: int, policy: MediaPolicy) -> PageFacts:
    if is_epub(data) or is_html(data):
        return _markup_facts(data, number, policy)
    if not is_pdf(data):
        pixels = page_pixels(data, number, policy)
        return PageFacts(pixels.shape[1], pixels.shape[0], picture_share=1.0, marks=_all_marks(pixels.numpy()))
    with opened_page(data, number, with_forms=True) as page:
        width, height = page.get_size()
        to_page = page_affine(page, width, height)
        chars, num_cut = _chars(page, to_page)
        rules = page_rules(page, to_page) if chars else ()
        lines = tuple(_lines(chars, verticals_of(rules)))
        dark = [char for char in chars if not char.text.isspace()]
        inside = [char for char in dark if _is_inside(char.box, width, height)]
        marks = _marks(page, lines, policy, bool(dark)) if len(dark) < _FEW_CHARS else None
        return PageFacts(
            width,
            height,
            num_chars=len(dark),
            num_cut=num_cut,
            num_unprintable=sum(char.is_unknown or unicodedata.category(char.text) in _BAD for char in dark),
            num_private=sum(unicodedata.category(char.text) == "Co" or char.text == "\ufffd" for char in dark),
            num_outside=len(dark) - len(inside),
            invisible=bool(dark) and _is_invisible(page),
            picture_share=_picture_share(page, to_page, width, height),
            marks=marks,
            num_undecoded=_num_undecoded(page) if not dark and marks == 0 else 0,
            lines=lines,
            rules=rules,
        )


def _markup_facts(data: bytes, number: int, policy: MediaPolicy) -> PageFacts:
    parts, count = list[TextPart](), 0
    for part in text_parts(data, number, policy):
        count += len(part.text)
        parts += [part] if count <= MAX_CHARS else []
    num_chars = sum(not char.isspace() for part in parts for char in part.text)
    return PageFacts(0.0, 0.0, num_chars, num_cut=max(count - sum(len(part.text) for part in parts), 0), parts=tuple(parts))


def text_facts(data: bytes, sizes: list[int], kind: TextKind, encoding: str, policy: MediaPolicy) -> list[PageFacts]:
    """Return the facts of pages of a text file. `data`: the bytes of these pages, joined. `sizes`: bytes of each page."""
    ends = list(accumulate(sizes))
    texts = [page_text(data[end - size : end], encoding) for size, end in zip(sizes, ends, strict=True)]
    counts = [sum(not char.isspace() for char in text) for text in texts]
    return [
        PageFacts(0.0, 0.0, count, parts=(TextPart(kind, text),) if count else (), guessed_encoding=encoding == GUESSED)
        for text, count in zip(texts, counts, strict=True)
    ]


def page_affine(page: Any, width: float, height: float) -> Affine:
    """Return the matrix `(a, b, c, d, e, f)` from the page's own coordinates to points from its top left corner.

    The rotation of the page and the corner of its crop box are in it; PDFium applies them in whole device units.
    """
    from pypdfium2 import raw

    def shown(x: float, y: float) -> tuple[float, float]:
        right, down = c_int(), c_int()
        raw.FPDF_PageToDevice(page, 0, 0, _DEVICE, _DEVICE, 0, x, y, byref(right), byref(down))
        return right.value * width / _DEVICE, down.value * height / _DEVICE

    side = max(width, height)
    (e, f), (x, y), (v, w) = shown(0, 0), shown(side, 0), shown(0, side)
    return (x - e) / side, (y - f) / side, (v - e) / side, (w - f) / side, e, f


def _shown_box(matrix: Affine, left: float, bottom: float, right: float, top: float) -> Box:
    a, b, c, d, e, f = matrix
    x, y, v, w = a * left + c * bottom + e, b * left + d * bottom + f, a * right + c * top + e, b * right + d * top + f
    return min(x, v), min(y, w), max(x, v), max(y, w)


def _is_inside(box: Box, width: float, height: float) -> bool:
    across, down = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    return 0 <= across <= width and 0 <= down <= height


def _chars(page: Any, to_page: Affine) -> tuple[list[PageChar], int]:
    """Return the characters of the text layer, with the spaces and line ends that PDFium adds, and how many were left out."""
    textpage = page.get_textpage()
    try:
        count = textpage.count_chars()
        return list(_first_chars(textpage, min(count, MAX_CHARS), to_page)), max(count - MAX_CHARS, 0)
    finally:
        textpage.close()


def _first_chars(textpage: Any, count: int, to_page: Affine) -> Iterator[PageChar]:
    from pypdfium2 import raw

    rect, high = raw.FS_RECTF(), 0  # `high`: the first half of a character beyond U+FFFF
    for index in range(count):
        code = raw.FPDFText_GetUnicode(textpage, index)
        if 0xD800 <= code < 0xDC00:
            high = code
            continue
        if 0xDC00 <= code < 0xE000:
            code = 0x10000 + (high - 0xD800 << 10) + code - 0xDC00 if high else 0xFFFD
        high = 0
        if code in (2, 0xFFFE) or raw.FPDFText_IsHyphen(textpage, index) == 1:
            code = ord(_HYPHEN)
        box = (0.0, 0.0, 0.0, 0.0)
        if raw.FPDFText_GetLooseCharBox(textpage, index, byref(rect)):
            box = _shown_box(to_page, rect.left, rect.bottom, rect.right, rect.top)
        yield PageChar(_BULLETS.get(code) or chr(code), box, raw.FPDFText_HasUnicodeMapError(textpage, index) == 1)


def _is_invisible(page: Any) -> bool:
    """Return whether most texts of the page are drawn invisibly."""
    from pypdfium2 import raw

    texts = islice(page.get_objects(filter=[raw.FPDF_PAGEOBJ_TEXT], max_depth=3), _MAX_TEXTS)
    hidden = [raw.FPDFTextObj_GetTextRenderMode(text) == raw.FPDF_TEXTRENDERMODE_INVISIBLE for text in texts]
    return hidden.count(True) * 2 > len(hidden)


def verticals_of(rules: Sequence[Rule]) -> Verticals:
    """Return the places of vertical rules, with their upper and lower ends, as float64 `[rules, 3]`."""
    return np.array([(left, top, bottom) for left, top, right, bottom in rules if left == right]).reshape(-1, 3)


def _lines(chars: list[PageChar], verticals: Verticals) -> Iterator[TextLine]:
    """Yield the lines of characters, cut where the gap between two words is wider than any space.

    PDFium ends no line after a hyphen, so a character that stands below and to the left of the one before begins a line, too.
    """
    line, last = list[PageChar](), None
    for char in [*chars, PageChar("\n", (0, 0, 0, 0), False)]:
        is_dark = not char.text.isspace()
        if char.text in "\r\n" or (is_dark and last is not None and _begins_line(char.box, last.box)):
            yield from cut_line(line, verticals)
            line, last = [], None
        if char.text not in "\r\n":
            line.append(char)
            last = char if is_dark else last


def _begins_line(box: Box, before: Box) -> bool:
    return box[0] < before[0] and (box[1] + box[3]) / 2 > before[3]


def cut_line(line: list[PageChar], verticals: Verticals) -> Iterator[TextLine]:
    """Yield the parts of a line whose characters stand in order, with the places where each may be cut."""
    dark = [char for char in line if not char.text.isspace()]
    if not dark:
        return
    size = median(char.box[3] - char.box[1] for char in dark)
    middle = median((char.box[1] + char.box[3]) / 2 for char in dark)
    rules: list[float] = np.sort(verticals[(verticals[:, 1] <= middle) & (verticals[:, 2] >= middle), 0]).tolist()
    part, gaps, before = list[PageChar](), list[LineCut](), dark[0].box
    for char in line:
        if not char.text.isspace():
            gap = char.box[0] - before[2]
            if gap > _GAP * size:
                yield _line_of(part, size, gaps)
                part, gaps = [], []
            elif part and (gap > _CUT * size or _has_rule(before, char.box, rules)):
                gaps.append(LineCut(len(part), min(before[2], char.box[0]), max(before[2], char.box[0])))
            before = char.box
        part.append(char)
    yield _line_of(part, size, gaps)


def _has_rule(before: Box, box: Box, rules: list[float]) -> bool:
    """Return whether a vertical rule stands between the middles of two characters. `rules`: their places in order."""
    return bisect_right(rules, (before[0] + before[2]) / 2) < bisect_left(rules, (box[0] + box[2]) / 2)


def _line_of(chars: list[PageChar], size: float, gaps: list[LineCut]) -> TextLine:
    """Return a line. `gaps`: with indices of characters, among them spaces that its text leaves out."""
    text, start, cuts = "", 0, list[LineCut]()
    for end, left, right in (*gaps, LineCut(len(chars), 0.0, 0.0)):
        part = "".join(char.text for char in chars[start:end])
        is_apart = start > 0 and (part[0].isspace() or chars[start - 1].text.isspace())
        text += f"{' ' if is_apart else ''}{' '.join(part.split())}"
        cuts.append(LineCut(len(text), round(left, 2), round(right, 2)))
        start = end
    lefts, tops, rights, bottoms = zip(*(char.box for char in chars if not char.text.isspace()), strict=True)
    box = (round(min(lefts), 2), round(min(tops), 2), round(max(rights), 2), round(max(bottoms), 2))
    return TextLine(text, box, round(size, 2), tuple(cuts[:-1]))


def _picture_share(page: Any, to_page: Affine, width: float, height: float) -> float:
    """Return the share of the page that its largest picture covers."""
    from pypdfium2 import raw

    largest = 0.0
    for item in page.get_objects(filter=[raw.FPDF_PAGEOBJ_IMAGE], max_depth=3):
        left, top, right, bottom = _shown_box(to_page, *item.get_bounds())
        across, down = min(right, width) - max(left, 0.0), min(bottom, height) - max(top, 0.0)
        largest = max(largest, max(across, 0.0) * max(down, 0.0))
    return min(largest / (width * height), 1.0)


def _num_undecoded(page: Any) -> int:
    """Return the number of the page's pictures that cannot be decoded."""
    from pypdfium2 import raw

    count = 0
    for item in page.get_objects(filter=[raw.FPDF_PAGEOBJ_IMAGE], max_depth=3):
        if bitmap := raw.FPDFImageObj_GetBitmap(item):
            raw.FPDFBitmap_Destroy(bitmap)
        else:
            count += 1
    return count


def _marks(page: Any, lines: tuple[TextLine, ...], policy: MediaPolicy, has_text: bool) -> int:
    pixels = render(page, replace(policy, pdf_dpi=_INK_DPI)).numpy()
    return count_marks(pixels, tuple(line.box for line in lines)) if has_text else _all_marks(pixels)


def _all_marks(pixels: NDArray[np.uint8]) -> int:
    """Return the number of marks of a page without text, of faint ones if there are no others: without any it is blank."""
    return count_marks(pixels, ()) or count_marks(pixels, (), faint=True)


def count_marks(pixels: NDArray[np.uint8], hidden: tuple[Box, ...], faint: bool = False) -> int:
    """Return the number of marks in a picture: connected pixels that are darker or lighter than what surrounds them.

    Args:
        pixels: `[height, width, 3]`, of a page at 72 dots per inch; other sizes are scaled to at most 1000 pixels a side.
        hidden: boxes, in pixels, in which nothing counts.
        faint: count marks of a low contrast, too. The contrast is averaged over 3 x 3 pixels, where that of noise vanishes, and
            cut off, so that dust stays small.
    """
    import cv2

    grey = cv2.cvtColor(np.ascontiguousarray(pixels), cv2.COLOR_RGB2GRAY)
    if (longest := max(grey.shape)) > 1000 and not hidden:
        scale = 1000 / longest
        size = (max(round(grey.shape[1] * scale), 1), max(round(grey.shape[0] * scale), 1))
        grey = cv2.resize(grey, size, interpolation=cv2.INTER_AREA)
    around = cv2.blur(grey, (_NEIGHBOURS, _NEIGHBOURS))
    contrast: NDArray[Any] = cv2.absdiff(grey, around)
    if faint:
        signed = np.clip(cv2.subtract(grey, around, dtype=cv2.CV_32F), -_CONTRAST, _CONTRAST)
        contrast = np.abs(cv2.blur(signed, (3, 3)))
    mask = (contrast > (_FAINT if faint else _CONTRAST)).astype(np.uint8)
    for left, top, right, bottom in hidden:
        mask[max(int(top) - 1, 0) : max(int(bottom) + 2, 0), max(int(left) - 1, 0) : max(int(right) + 2, 0)] = 0
    _, _, stats, _ = cv2.connectedComponentsWithStats(mask, connectivity=8)
    return int((stats[1:, cv2.CC_STAT_AREA] >= (_MIN_FAINT if faint else _MIN_MARK)).sum())
