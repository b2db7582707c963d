"""A document's pages as hOCR and ALTO, which hold the boxes of lines and words in pixels.

Sources: the hOCR specification 1.2 (kba.github.io/hocr-spec/1.2) and ALTO 4 (loc.gov/standards/alto). Words get their share of
their line's box by their characters, because records hold lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from html import escape

from ...mm.media.page_facts import Box
from .blocks import Block, Line, PageRecord, pixel_box

_INVALID = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # characters that XML cannot hold
_ALTO = "http://www.loc.gov/standards/alto/ns-v4#"


def hocr(source: str, error: str | None, pages: Iterable[PageRecord]) -> Iterator[str]:
    yield '<?xml version="1.0" encoding="UTF-8"?>\n<!DOCTYPE html>\n<html xmlns="http://www.w3.org/1999/xhtml">\n<head>\n'
    yield f'<meta charset="utf-8" />\n<title>{_xml(source)}</title>\n<meta name="ocr-system" content="sensorium" />\n'
    yield '<meta name="ocr-capabilities" content="ocr_page ocr_par ocr_line ocrx_word" />\n</head>\n<body>\n'
    yield "" if error is None else f"<!-- not read: {_comment(error)} -->\n"
    for page in pages:
        title = f"bbox {_corners(_page_box(page))}; ppageno {page.number - 1}"
        yield f'<div class="ocr_page" id="page_{page.number}" title="{title}">\n'
        yield "" if page.error is None else f"<!-- not read: {_comment(page.error.message)} -->\n"
        for order, block in enumerate(page.blocks):
            yield f'<p class="ocr_par" id="par_{page.number}_{order}" title="bbox {_corners(_block_box(page, block))}">\n'
            for line, box in placed_lines(page, block):
                yield f'<span class="ocr_line" title="bbox {_corners(box)}">'
                words = (
                    f'<span class="ocrx_word" title="bbox {_corners(word_box)}{_wconf(confidence)}">{_xml(word)}</span>'
                    for word, word_box, confidence in _words(line, box)
                )
                yield f"{' '.join(words)}</span>\n"
            yield "</p>\n"
        yield "</div>\n"
    yield "</body>\n</html>\n"


def alto(source: str, error: str | None, pages: Iterable[PageRecord]) -> Iterator[str]:
    yield f'<?xml version="1.0" encoding="UTF-8"?>\n<alto xmlns="{_ALTO}">\n<Description>\n'
    yield f"<MeasurementUnit>pixel</MeasurementUnit>\n<sourceImageInformation><fileName>{_xml(source)}</fileName>"
    yield "</sourceImageInformation>\n</Description>\n<Layout>\n"
    yield "" if error is None else f"<!-- not read: {_comment(error)} -->\n"
    for page in pages:
        _, _, width, height = _page_box(page)
        size = f'WIDTH="{round(width)}" HEIGHT="{round(height)}"'
        yield f'<Page ID="page_{page.number}" PHYSICAL_IMG_NR="{page.number}" {size}>\n'
        yield "" if page.error is None else f"<!-- not read: {_comment(page.error.message)} -->\n"
        yield f'<PrintSpace HPOS="0" VPOS="0" {size}>\n'
        for order, block in enumerate(page.blocks):
            yield f'<TextBlock ID="block_{page.number}_{order}" {_place(_block_box(page, block))}>\n'
            for line, box in placed_lines(page, block):
                strings = (
                    f'<String CONTENT="{_xml(word)}" {_place(word_box)}{_wc(confidence)}/>'
                    for word, word_box, confidence in _words(line, box)
                )
                yield f"<TextLine {_place(box)}>{'<SP/>'.join(strings)}</TextLine>\n"
            yield "</TextBlock>\n"
        yield "</PrintSpace>\n</Page>\n"
    yield "</Layout>\n</alto>\n"


def placed_lines(page: PageRecord, block: Block) -> Iterator[tuple[Line, Box]]:
    """Yield the lines of a block that have text, with boxes in pixels. Lines without boxes share the block evenly."""
    lines = [line for line in block.lines or map(Line, block.text.splitlines()) if line.text.strip()]
    left, top, right, bottom = _block_box(page, block)
    for row, line in enumerate(lines):
        height = (bottom - top) / len(lines)
        share = (left, top + row * height, right, top + (row + 1) * height)
        yield line, share if line.box is None else pixel_box(line.box, page.scale)


def _words(line: Line, box: Box) -> Iterator[tuple[str, Box, float | None]]:
    """Yield the words of a line with their boxes and confidences."""
    left, top, right, bottom = box
    for index, match in enumerate(re.finditer(r"\S+", line.text)):
        start, end = (left + (right - left) * at / len(line.text) for at in match.span())
        confidence = line.word_confidences[index] if line.word_confidences else line.confidence
        yield match[0], (start, top, end, bottom), confidence


def _wconf(confidence: float | None) -> str:
    return "" if confidence is None else f"; x_wconf {round(100 * confidence)}"


def _wc(confidence: float | None) -> str:
    return "" if confidence is None else f' WC="{confidence:.2f}"'


def _page_box(page: PageRecord) -> Box:
    return pixel_box((0, 0, page.width, page.height), page.scale)


def _block_box(page: PageRecord, block: Block) -> Box:
    return _page_box(page) if block.box is None else pixel_box(block.box, page.scale)


def _corners(box: Box) -> str:
    return " ".join(str(max(round(side), 0)) for side in box)


def _place(box: Box) -> str:
    left, top, right, bottom = (max(round(side), 0) for side in box)
    return f'HPOS="{left}" VPOS="{top}" WIDTH="{right - left}" HEIGHT="{bottom - top}"'


def _xml(text: str) -> str:
    return escape(_INVALID.sub("\ufffd", text))


def _comment(text: str) -> str:
    return re.sub("-(?=-)", "- ", _INVALID.sub("\ufffd", text))
