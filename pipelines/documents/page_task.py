"""A page to read, and the interface of page readers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ...callers.errors import ErrorInfo
from ...mm.media.page_facts import PageFacts
from ...mm.media.policy import MediaPolicy
from .blocks import Block, PageRecord, Way
from .doubt import compare_numbers, doubt_of
from .line_recognizer import LineRecognizer
from .stop import StopSignal
from .ways import ReaderKind


@dataclass(frozen=True)
class PageTask:
    """A page that a reader reads: the bytes of its file, the facts about the page, and why it is read in this way."""

    data: bytes
    number: int
    facts: PageFacts
    way: Way
    reason: str
    scale: float

    def record(
        self,
        blocks: tuple[Block, ...] = (),
        error: ErrorInfo | None = None,
        doubt: str | None = None,
        confidence: float | None = None,
    ) -> PageRecord:
        """Return the outcome of the page, with a doubt if its text does not agree with the facts about the page."""
        facts, numbers = self.facts, None
        if self.way in ("draft", "reading"):
            numbers = compare_numbers(facts, blocks)
            doubt = doubt or doubt_of(facts, blocks)
        return PageRecord(
            number=self.number,
            width=facts.width,
            height=facts.height,
            scale=self.scale,
            way=self.way,
            reason=self.reason,
            blocks=blocks,
            error=error,
            doubt=doubt,
            numbers=numbers,
            confidence=confidence,
        )


class PageReader(Protocol):
    """Reads pictures of pages.

    Attributes:
        kind: "none" reads nothing, "lines" one page at a time in any thread, "model" pages in batches. `read` raises
            ReadingStopped soon after its signal.
        digest: of everything on which its results depend.
        name: of the model or reader.
        recognizer: reads single lines, to compare text layers with them; None if nothing that is installed does.
    """

    @property
    def kind(self) -> ReaderKind: ...
    @property
    def digest(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def recognizer(self) -> LineRecognizer | None: ...
    def read(self, pages: Sequence[PageTask], policy: MediaPolicy, stop: StopSignal) -> list[PageRecord]: ...
