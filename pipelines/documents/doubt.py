"""Signs that a reading is wrong: more text than the page can show, and other numbers than its text layer has."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from ...mm.media.page_facts import PageFacts
from .blocks import Block, NumberCheck
from .ways import why_broken

MAX_LISTED = 50
"""Numbers of each side that a record lists."""
_PER_MARK = 25  # characters for each mark that the page shows, of which letters or words are at least one
SPARE = 50
"""Characters that a reading may have beyond what the page shows room for."""
_PER_HEIGHT = 10  # maximum characters in a part of a line that is as long as the line is high; narrow print has about 4
_MAX_REFUSAL = 300  # characters; a longer text is a reading that contains such words
_REFUSAL = re.compile(
    r"""(?:i['’]?\ ?a?m\ (?:sorry|unable|not\ able)|sorry,|as\ an\ ai\b
    |i\ (?:can(?:no|['’])t|could\ not|do\ not\ see|don['’]t\ see)[ ]
    |there\ (?:is|are|appears\ to\ be)\ no\ (?:\w+\ ){0,2}text\b
    |no\ (?:\w+\ )?text\ (?:is\ |was\ )?(?:visible|found|detected|present)
    |(?:the|this)\ (?:image|page|picture)\ (?:is|appears\ to\ be|seems\ to\ be)\ (?:\w+\ )?(?:blank|empty|too\ blurry)
    |(?:the|this)\ (?:image|page|picture)\ (?:contains|has|shows)\ no\ (?:\w+\ )?text\b|抱歉|对不起|无法识别|图片中没有文字)""",
    re.IGNORECASE | re.VERBOSE,
)
_LEAST = 5  # numbers of a text layer that say something about a reading
_AGREED = 0.5  # share of them that a good reading has
_NUMBER = re.compile(r"\d+(?:[.,'\u202f\u00a0]\d+)*")


def why_invented(blocks: Sequence[Block], line_length: float) -> str | None:
    """Return why a reading is probably invented, None if the lines on its page are long enough for it.

    Args:
        line_length: total length of the lines on the page, each in units of its height.
    """
    count = num_characters(blocks)
    if count <= _PER_HEIGHT * line_length + SPARE:
        return None
    lines = f"lines that together are {line_length:.0f} times as long as high" if line_length else "no lines of text"
    return f"it has {count:,} characters, and the page shows {lines}"


def why_refusal(text: str) -> str | None:
    """Return why an answer is a refusal, None if it does not begin as one: it speaks about the page instead of reading it."""
    is_refusal = len(text) <= _MAX_REFUSAL and _REFUSAL.match(text.strip()) is not None
    return "it speaks about the page instead of reading it" if is_refusal else None


def num_characters(blocks: Sequence[Block]) -> int:
    return sum(not char.isspace() for block in blocks for char in block.text)


def compare_numbers(facts: PageFacts, blocks: Sequence[Block]) -> NumberCheck | None:
    """Return how the numbers of a page's text layer and of its reading agree; None without both.

    Separators do not count, because text layers and models write them differently.
    """
    if not facts.lines or not blocks:
        return None
    layer, reading = _numbers_of(facts, blocks)
    agreed = layer & reading
    only_layer, only_reading = sorted((layer - agreed).elements()), sorted((reading - agreed).elements())
    return NumberCheck(agreed.total(), tuple(only_layer[:MAX_LISTED]), tuple(only_reading[:MAX_LISTED]))


def _numbers_of(facts: PageFacts, blocks: Sequence[Block]) -> tuple[Counter[str], Counter[str]]:
    return _numbers(line.text for line in facts.lines), _numbers(block.text for block in blocks)


def _numbers(texts: Iterable[str]) -> Counter[str]:
    return Counter(re.sub(r"\D", "", number) for text in texts for number in _NUMBER.findall(text))


def doubt_of(facts: PageFacts, blocks: Sequence[Block]) -> str | None:
    """Return why the reading of a page is probably wrong, None if nothing speaks against it."""
    count = num_characters(blocks)
    if facts.num_chars == 0 and facts.marks is not None and count > _PER_MARK * facts.marks + SPARE:
        return f"it has {count:,} characters, and the page shows {facts.marks:,} marks"
    if not blocks or why_broken(facts):
        return None
    layer, reading = _numbers_of(facts, blocks)
    total, agreed = layer.total(), (layer & reading).total()
    if total >= _LEAST and agreed < _AGREED * total:
        return f"it has {agreed:,} of the {total:,} numbers of the page's text layer"
    return None
