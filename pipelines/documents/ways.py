"""Which way of reading a page is the cheapest that is enough."""

from __future__ import annotations

from typing import Literal

from ...mm.media.page_facts import PageFacts
from .blocks import Way

TextLayer = Literal["auto", "always", "never"]
ReaderKind = Literal["none", "lines", "model"]
RULES = 14
"""Version of the rules: records of pages that other rules chose are not used again."""
INSTALL = "pip install 'sensorium[documents]' for the reader of printed pages, or give a model"
_MAX_UNPRINTABLE = 0.01  # share of the characters
_MAX_PRIVATE = 0.005
_MAX_OUTSIDE = 0.1
_MAX_DIFFERING = 0.5  # share of the sampled lines; the other rules are about characters
_FEW_CHARS = 32  # with fewer, a picture of `_SCAN` of the page is taken for a scan with a stamped number
_SCAN = 0.3
_MARKS_PER_CHAR = 0.5  # marks outside of the text lines, for each character in them
_SPARE_MARKS = 12  # of rules, boxes and small drawings


def choose_way(facts: PageFacts, reader: ReaderKind, text_layer: TextLayer) -> tuple[Way, str]:
    """Return how a page is read, and why in this way."""
    if facts.parts is not None:
        return "text_layer", f"it is text, {facts.num_chars:,} characters"
    if facts.num_chars == 0 and facts.marks == 0:
        return "blank", "it shows nothing"
    doubt = "text layers are not used" if text_layer == "never" else why_not_trusted(facts)
    if text_layer == "always" and facts.num_chars:
        return "text_layer", "text layers are always used"
    if not doubt:
        agreed = facts.num_sampled - facts.num_differing
        sampled = f", and {agreed} of {facts.num_sampled} sampled lines read the same" if facts.num_sampled else ""
        return "text_layer", f"its text layer of {facts.num_chars:,} characters can be trusted{sampled}"
    if reader == "none" and facts.invisible and text_layer != "never" and not why_broken(facts):
        return "text_layer", "an earlier recognition wrote its text layer, and nothing else can read the page"
    if reader == "none":
        return "unread", f"{doubt}, and nothing can read its picture"
    is_draft = reader == "model" and facts.num_chars > 0
    return ("draft" if is_draft else "reading"), doubt


def why_not_trusted(facts: PageFacts) -> str:
    """Return why the text layer of a page is not the page's text, or ""."""
    if not facts.num_chars:
        return "it has no text layer"
    if broken := why_broken(facts):
        return broken
    if facts.invisible:
        return "an earlier recognition wrote its text layer"
    if facts.num_chars < _FEW_CHARS and facts.picture_share > _SCAN:
        return f"its text layer has {facts.num_chars} characters beside a picture of {facts.picture_share:.0%} of the page"
    if facts.marks is not None and facts.marks > _MARKS_PER_CHAR * facts.num_chars + _SPARE_MARKS:
        return f"it shows {facts.marks:,} marks beside the {facts.num_chars} characters of its text layer"
    return ""


def why_broken(facts: PageFacts) -> str:
    """Return what is wrong with the characters of a text layer, or with its lines, or ""."""
    shares = (
        (facts.num_unprintable, _MAX_UNPRINTABLE, "have no meaning in their font"),
        (facts.num_private, _MAX_PRIVATE, "are private-use or replacement characters"),
        (facts.num_outside, _MAX_OUTSIDE, "stand outside of the page"),
    )
    for number, most, fault in shares:
        if number > most * facts.num_chars:
            return f"{number:,} of the {facts.num_chars:,} characters of its text layer {fault}"
    if facts.num_differing > _MAX_DIFFERING * facts.num_sampled:
        return f"{facts.num_differing} of {facts.num_sampled} sampled lines of its text layer read differently"
    return ""
