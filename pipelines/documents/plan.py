"""How each page would be read, without reading any."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...callers.errors import ErrorInfo
from ...mm.media.policy import DEFAULT_POLICY, MediaPolicy
from ..files import NamedItem
from .blocks import Way
from .inputs import facts_of, open_document, read_policy
from .options import ReadOptions
from .readers import NoReader
from .ways import ReaderKind, choose_way

_CHUNK = 16  # pages that are inspected together


@dataclass(frozen=True)
class PagePlan:
    """How a page is read and why. `source` has the number of the page; with `error`, it cannot be opened."""

    source: str
    way: Way = "unread"
    reason: str = ""
    error: ErrorInfo | None = None


def plan_pages(
    items: Sequence[NamedItem], options: ReadOptions, kind: ReaderKind, policy: MediaPolicy = DEFAULT_POLICY
) -> Iterator[PagePlan]:
    """Yield the plan of each page, or the error of a document that cannot be opened. `kind`: of the reader at hand."""
    policy = read_policy(policy, options)
    for item in items:
        document = open_document(item, options, NoReader(), policy)
        if document.error is not None:
            yield PagePlan(item.source, error=document.error)
        numbers = [number for first, last in document.ranges for number in range(first, last + 1)]
        for start in range(0, len(numbers), _CHUNK):
            for number, facts in facts_of(document, numbers[start : start + _CHUNK], policy):
                source = f"{item.source}#page={number}"
                if isinstance(facts, ErrorInfo):
                    yield PagePlan(source, error=facts)
                else:
                    way, reason = choose_way(facts, kind, options.text_layer)
                    yield PagePlan(source, way, reason)
