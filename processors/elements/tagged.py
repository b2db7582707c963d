"""Boxes between tags: `<ref>label</ref><box>...</box>` of Qwen2-VL, InternVL, DeepSeek-OCR, Unlimited-OCR and MinerU.

Sources: the model cards; the publisher's post-processing of MinerU; DeepSeek-OCR's post-processing divides by 999.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

from .element import Element, ImageScale, numbers_of
from .tables import read_table

_TURNED = re.compile(r"<\|rotate_(up|right|down|left)\|>")
_LABEL = re.compile(r"\s*([A-Za-z][\w -]*?)\s*(?=\[)")  # before the numbers of a box
_TOKEN = re.compile(r"<\|[^<>|]{1,40}\|>")
_ANGLES = {"up": 0, "right": 90, "down": 180, "left": 270}  # the side that the top of the content points to


@dataclass(frozen=True)
class TagStyle:
    """The tags of one format.

    Args:
        label, box: pairs of an opening and a closing tag.
        units: units along each side of the image.
        has_text: the text from a tag of boxes to the next tag is the content of its first box.
        label_follows: a label comes after its box, and a token for the rotation of its content may come after the label.
        label_inside: a box may begin with its label, such as `title [1, 2, 3, 4]` (Unlimited-OCR).
        content: tags of the content of the box before them; empty: the format has none.
    """

    label: tuple[str, str]
    box: tuple[str, str]
    units: float = 1000.0
    has_text: bool = False
    label_follows: bool = False
    label_inside: bool = False
    content: tuple[str, ...] = ()


OBJECT_REF_BOX = TagStyle(("<|object_ref_start|>", "<|object_ref_end|>"), ("<|box_start|>", "<|box_end|>"))
BOX_REF = TagStyle(("<|ref_start|>", "<|ref_end|>"), ("<|box_start|>", "<|box_end|>"), label_follows=True)
BOX_REF_MD = replace(BOX_REF, content=("<|md_start|>", "<|md_end|>"))
REF_BOX = TagStyle(("<ref>", "</ref>"), ("<box>", "</box>"))
REF_DET = TagStyle(("<|ref|>", "<|/ref|>"), ("<|det|>", "<|/det|>"), 999.0, has_text=True, label_inside=True)


@dataclass(frozen=True)
class _Place:
    """A box that was found. Of several boxes of one tag, the first has the content."""

    label: str
    numbers: list[float]
    content: str
    span: tuple[int, int]
    angle: int | None = None


def find_tagged(text: str, scale: ImageScale, style: TagStyle) -> Iterator[Element]:
    """Yield the elements of the complete pairs of tags, in order. Several boxes may follow a label."""
    parts = re.split("(" + "|".join(map(re.escape, (*style.label, *style.box, *style.content))) + ")", text)
    label, label_start, places = "", 0, list[_Place]()
    parts += ["", ""] if parts[-2:-1] == list(style.content[:1]) else []
    starts = [0, *accumulate(map(len, parts))]
    for at in range(1, len(parts) - 3, 2):
        pair, inside, after = (parts[at], parts[at + 2]), parts[at + 1], parts[at + 3]
        if pair == style.label:
            label, label_start = inside.strip(), starts[at]
            if style.label_follows and places:
                turned = _TURNED.search(after.partition("\n")[0])
                angle, span = (
                    _ANGLES[turned[1]] if turned else None,
                    _extended(text, places[-1].span, starts[at], starts[at + 3]),
                )
                places[-1] = replace(places[-1], label=label, angle=angle, span=span)
        elif pair == style.box:
            named = _LABEL.match(inside) if style.label_inside else None
            numbers = numbers_of(inside[named.end() :] if named else inside)
            content = after.strip() if style.has_text else ""
            name = named[1] if named else "" if style.label_follows else label
            start = label_start if name and label_start >= 0 and not parts[at - 1].strip() else starts[at]
            span, label_start = (start, starts[at + 4] if style.has_text else starts[at + 3]), -1
            places += [_Place(name, numbers[i : i + 4], "" if i else content, span) for i in range(0, len(numbers) - 3, 4)]
        elif parts[at] in style.content[:1] and places:  # an unfinished answer may lack the closing tag
            span = _extended(text, places[-1].span, starts[at], starts[at + 3])
            places[-1] = replace(places[-1], content=inside.removesuffix("<|im_end|>").strip(), span=span)
    for tagged in places:
        element = scale.element(tagged.numbers, style.units, style.units, tagged.label, tagged.content)
        if element is not None:
            yield replace(element, cells=read_table(tagged.content), angle=tagged.angle, span=tagged.span)


def _extended(text: str, span: tuple[int, int], start: int, end: int) -> tuple[int, int]:
    """Return a span that ends with the part of a text from start to end, if only tokens are before that part."""
    return (span[0], end) if not _TOKEN.sub("", text[span[1] : start]).strip() else span
