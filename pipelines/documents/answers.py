"""Answers of document models to blocks.

Elements (`output.elements`) say where the parts of an answer are, what they are called and what they hold, in each family's
published format; what is in no element is read as Markdown, which is all that many models write. So no text is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import unescape

from ...engine.elements import HTML_BOX, MAX_CELLS, Cell, Element, MarkedText, read_table, text_outside
from ...mm.media.page_facts import Box
from .blocks import Block, Kind, table_text, union
from .markdown import markdown_blocks

_KINDS: dict[str, Kind] = {
    **dict.fromkeys(("title", "doc_title", "section_header", "sub_title", "paragraph_title", "section"), "heading"),
    **{f"section_header_level_{level}": "heading" for level in range(1, 7)},
    **{f"h{level}": "heading" for level in range(1, 7)},
    **dict.fromkeys(("page_header", "header"), "page_header"),
    **dict.fromkeys(("page_footer", "footer", "page_number"), "page_footer"),
    **dict.fromkeys(("caption", "image_caption", "table_caption", "figure_caption", "code_caption", "figcaption"), "caption"),
    **dict.fromkeys(("footnote", "page_footnote", "image_footnote", "table_footnote"), "footnote"),
    **dict.fromkeys(("table", "otsl"), "table"),
    **dict.fromkeys(("formula", "equation", "interline_equation", "equation_block"), "formula"),
    **dict.fromkeys(("display_formula", "inline_formula"), "formula"),
    **dict.fromkeys(("code", "code_block", "algorithm", "pre"), "code"),
    **dict.fromkeys(("picture", "image", "figure", "chart", "img", "logo", "stamp", "image_block", "unknown"), "picture"),
    **dict.fromkeys(("list_item", "list", "li", "checkbox_selected", "checkbox_unselected"), "list_item"),
    **dict.fromkeys(("text", "paragraph", "p", "abstract", "reference", "ref_text", "aside_text", "bibliography"), "paragraph"),
    **{"head": "page_header", "foot": "page_footer", "cap": "caption", "fnote": "footnote", "tab": "table", "equ": "formula"},
    **{"fig": "picture", "para": "paragraph", "half_para": "paragraph"},
    **{f"sec_{level}": "heading" for level in range(6)},
}  # fmt: skip
"""Labels of layout elements in DocTags, dots.ocr, DeepSeek-OCR, Dolphin, MinerU, Nemotron-Parse and Qwen, with underscores."""
_CONTAINERS = ("key_value_region", "form", "inline", "document_index")
"""Labels of DocTags whose contents are elements of their own."""
_PLAIN = (
    "doctags",
    "corner_tokens",
    "pairs_in_text",
    "ref_box",
    "loc_tokens",
    "html",
)
"""Formats whose contents are not Markdown."""
_LEVELS = {"section_header": 2, "section": 2, "paragraph_title": 2, "sub_title": 2}
_SPECIAL = re.compile(r"<[|｜][^<>|｜\s]{1,40}[|｜]>|</?s>|<(?:eos|bos|pad|end_of_utterance)>")
_DOCTAG = re.compile(r"</?(?:doctag|(?:un)?ordered_list|group|page_break|loc_\d{1,3}|_[^<>\s]{1,40}_)>")
_UNLOCATED = re.compile(rf"<({'|'.join(_KINDS)})>(.*?)(?:</\1>|$)", re.DOTALL)
_SYNTAX = re.compile(r"[\s\[\],{}]*(?:```\w*[\s\[\],{}]*)?")  # of JSON around its objects
_HTML_TAG = re.compile(r"</?[A-Za-z][^<>]*>")
_ENDS = ('"}', '"]}', "}", "]}")  # of an object that was cut off
_MATHS = re.compile(r"\s*(?:\$\$(.*)\$\$|\\\[(.*)\\\]|\$([^$]*)\$|\\\((.*)\\\))\s*", re.DOTALL)


def answer_blocks(text: str, marked: MarkedText | None, scale: float, model: str) -> tuple[Block, ...]:
    """Return the blocks of a model's answer about one page.

    Args:
        text: the answer without special tokens.
        marked: the answer with them and its format, for models that name elements.
        scale: pixels per point of the page's image, in whose pixels the boxes of elements are.
    """
    base = Block("paragraph", "", source="model", model=model)
    elements = [] if marked is None else _in_order(marked)
    if marked is None or not elements:
        return tuple(markdown_blocks(text, base))
    if sum(len(element.cells) for element in elements) >= MAX_CELLS:  # cells are missing
        return (replace(base, kind="page", text=text),)
    answer, end, blocks = marked.text, 0, list[Block]()
    markup = "html" if HTML_BOX in answer else marked.format
    for group in _by_span(elements):
        start, stop = group[0].span
        blocks += _between(answer[end:start], markup, base)
        blocks += _element_blocks(group, answer, base, scale, markup in _PLAIN)
        end = max(end, stop)
    return tuple(_placed_tables([*blocks, *_between(answer[end:], markup, base)]))


def kind_of(element: Element) -> Kind:
    """Return the kind of block that the label of an element names; a paragraph for unknown labels."""
    return _KINDS.get(_plain_label(element), "paragraph")


def region_blocks(region: Element, scale: float, model: str) -> tuple[Block, ...]:
    """Return the blocks of a region that a model has read by itself. `region.text`: its answer with special tokens."""
    cells = read_table(region.text) if kind_of(region) == "table" else ()
    region = replace(region, cells=cells)
    return tuple(_blocks_of(region, [region], Block("paragraph", "", source="model", model=model), scale, False))


def _plain_label(element: Element) -> str:
    return re.sub(r"[\s-]+", "_", element.label.strip().lower())


def _placed_tables(blocks: Sequence[Block]) -> Iterator[Block]:
    """Yield blocks. A table without a box gets that of an empty table before it, which is left out; captions may be between."""
    waiting = list[Block]()  # an empty table, and the captions after it
    for block in blocks:
        if waiting and block.kind == "table" and block.cells and block.box is None:
            yield from waiting[1:]
            yield replace(block, box=waiting[0].box)
            waiting = []
        elif waiting and block.kind == "caption":
            waiting.append(block)
        else:
            yield from waiting
            is_empty = block.kind == "table" and block.box is not None and not block.text
            waiting = [block] if is_empty else []
            yield from [] if is_empty else [block]
    yield from waiting


def _in_order(marked: MarkedText) -> list[Element]:
    """Return the elements of an answer in its order; one that is the whole answer stands alone."""
    elements = [element for element in marked.elements() if element.span[1] and (element.box or element.cells)]
    elements.sort(key=lambda element: (element.span[0], -element.span[1]))
    return elements[:1] if elements and elements[0].box is None else elements


def _by_span(elements: Sequence[Element]) -> Iterator[list[Element]]:
    """Yield the elements of each piece of markup: several boxes of one content, or the elements of one JSON object."""
    group = list[Element]()
    for element in elements:
        if group and element.span != group[0].span:
            yield group
            group = []
        group.append(element)
    if group:
        yield group


def _element_blocks(group: list[Element], answer: str, base: Block, scale: float, is_plain: bool) -> Iterator[Block]:
    """Yield the blocks of the elements with one span."""
    start, end = group[0].span
    if answer[start : start + 1] == "{":  # an object of JSON
        for element in group:
            yield from _blocks_of(element, [element], base, scale, is_plain)
        known = [text for element in group for text in (element.text, element.label)]
        yield from _rest_of_object(answer[start:end], known, base)
        return
    yield from _blocks_of(group[0], group, base, scale, is_plain)


def _blocks_of(element: Element, group: Sequence[Element], base: Block, scale: float, is_plain: bool) -> Iterator[Block]:
    """Yield the blocks of an element; `group` has it and the other boxes of its content."""
    label = _plain_label(element)
    kind: Kind = _KINDS.get(label, "paragraph")
    text = _SPECIAL.sub("", element.text).strip()
    if not text and label in _CONTAINERS:
        return
    if not text and not element.cells and label not in _KINDS:
        text = element.label  # what was found is named, as in answers that spot text
    boxes = [other.box for other in group if other.box is not None]
    box: Box | None = None
    if boxes:
        left, top, right, bottom = (round(side / scale, 2) for side in union(boxes))
        box = left, top, right, bottom
    base = replace(base, box=box)
    if element.cells:
        if outside := _outside(text, element.cells):
            yield replace(base, kind="caption" if kind == "table" else "paragraph", text=outside)
        yield replace(base, kind="table", text=table_text(element.cells), cells=element.cells)
    elif kind == "table" and (parts := _tables_in(text, base)):
        yield from parts
    elif kind in ("table", "code", "picture", "formula"):
        maths = _MATHS.fullmatch(text) if kind == "formula" else None
        yield replace(base, kind=kind, text=next((part for part in maths.groups() if part), "").strip() if maths else text)
    elif is_plain:
        yield _labelled(replace(base, text=" ".join(text.split())), kind, label)
    else:
        for block in markdown_blocks(text, base) if text else (base,):
            yield _labelled(block, kind, label)


def _tables_in(text: str, base: Block) -> list[Block]:
    """Return the blocks of a table element whose text has a table in LaTeX or with `|`; [] if it has none."""
    parts = [_labelled(part, "caption", "caption") for part in markdown_blocks(text, base)]
    return parts if any(part.cells for part in parts) else []


def _labelled(block: Block, kind: Kind, label: str) -> Block:
    """Return a block with the kind that its label gives, if it is a paragraph by itself."""
    if block.kind != "paragraph" and not (block.kind == "heading" and kind in ("page_header", "page_footer", "caption")):
        return block
    digit = label[-1:] if label[:-1] in ("h", "section_header_level_", "sec_") else ""
    level = int(digit) + (label[0] == "s") if digit else _LEVELS.get(label, 1)
    return replace(block, kind=kind, level=min(level, 6) if kind == "heading" else 1 if kind == "list_item" else 0)


def _outside(text: str, cells: Sequence[Cell]) -> str:
    """Return the text of a table's element that is in none of its cells."""
    if "<" in text and (text_outside(text) or "<t" in text.lower() or "cel>" in text):
        return text_outside(text)
    parts, end = list[str](), 0  # DocTags: tags are spaces already
    for cell in cells:
        at = text.find(cell.text, end)
        if cell.text and at >= 0:
            parts.append(text[end:at])
            end = at + len(cell.text)
    return " ".join(" ".join([*parts, text[end:]]).split())


def _between(text: str, markup: str, base: Block) -> Iterator[Block]:
    """Yield the blocks of what stands between elements."""
    text = _SPECIAL.sub("", text)
    if markup == "doctags":
        end, text = 0, _DOCTAG.sub("", text)
        for tagged in _UNLOCATED.finditer(text):
            yield from markdown_blocks(_HTML_TAG.sub("", text[end : tagged.start()]), base)
            yield from _blocks_of(Element(tagged[1], _HTML_TAG.sub("", tagged[2])), (), base, 1.0, True)
            end = tagged.end()
        yield from markdown_blocks(_HTML_TAG.sub("", text[end:]), base)
        return
    if _SYNTAX.fullmatch(text):
        return
    start = text.find("{")
    if start >= 0 and _SYNTAX.fullmatch(text[:start]) and (strings := _cut_off(text[start:])):
        for string in strings:
            yield from markdown_blocks(string, base)
        return
    yield from markdown_blocks(unescape(_HTML_TAG.sub("", text)) if markup == "html" else text, base)


def _rest_of_object(text: str, known: Sequence[str], base: Block) -> Iterator[Block]:
    """Yield the strings of a JSON object that no element has."""
    left = list(known)
    for string in _strings(json.loads(text, strict=False)):
        if string in left:
            left.remove(string)
        elif string.strip():
            yield from markdown_blocks(string, base)


def _cut_off(text: str) -> list[str]:
    """Return the strings of a JSON object at the end of an answer that was cut off, without its label; [] if it is none."""
    for end in _ENDS:
        try:
            strings = list(_strings(json.loads(text + end, strict=False)))
        except (ValueError, RecursionError):
            continue
        return [text for text in strings if re.sub(r"[\s-]+", "_", text.strip().lower()) not in _KINDS]
    return []


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _strings(entry)
