"""Reads documents page by page. Each page ends with a record in the manifest; a document is made from its pages' records."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from ...callers.errors import ErrorInfo, InputError
from ...mm.media.page_facts import MAX_CHARS, PageFacts
from ...mm.media.policy import MediaPolicy
from ...mm.tenants import tenant_of
from ..files import NamedItem
from .blocks import Document, PageRecord, Way
from .costs import INSPECTED, CostClock, cost_of, keep_costs
from .fold import folded
from .inputs import OpenedDocument, facts_of, open_document, patiently, scale_of
from .layer_check import checked_facts
from .manifest import Manifest
from .model_answers import info_of
from .options import LINE_CHARACTERS, ReadOptions
from .page_blocks import page_blocks, part_blocks
from .page_task import PageReader, PageTask
from .stop import ReadingStopped, StopSignal
from .text_blocks import text_order
from .ways import choose_way

CHUNK = 16
"""Pages that are leased and inspected together, and that a model reads in one batch."""
TRANSIENT = ("busy", "out_of_memory", "interrupted", "engine_asleep", "engine_closed", "engine_dead", "internal", "overloaded")
"""Codes of errors that another run may not meet: it reads such pages again."""
Inspected = list[tuple[int, PageFacts | ErrorInfo]]
"""Numbers of pages with what they hold, or why they cannot be opened."""
_POLL = 0.25  # seconds between two looks at pages that other processes read


@dataclass
class DocumentReader:
    """Reads documents with one manifest.

    Args:
        on_records: called with a document and the records of its pages that this run has just finished, in any thread.
        stop: ends `documents` with ReadingStopped.
    """

    items: Sequence[NamedItem]
    reader: PageReader
    options: ReadOptions
    policy: MediaPolicy
    manifest: Manifest
    on_records: Callable[[OpenedDocument, Sequence[PageRecord]], object] = lambda document, records: None
    stop: StopSignal = field(default_factory=StopSignal)
    _unfinished: dict[int, OpenedDocument] = field(default_factory=dict)  # by index of the item, without bytes
    _waiting: list[tuple[OpenedDocument, PageTask]] = field(default_factory=list)  # for a batch of the model
    _clock: CostClock = field(default_factory=CostClock)
    _characters: Counter[str] = field(default_factory=Counter)  # of text layers, by key of the document
    _lock: threading.Lock = field(default_factory=threading.Lock)  # of `_characters`

    def documents(self) -> Iterator[tuple[int, OpenedDocument]]:
        """Yield (index of the item, document) when all of its pages have records, or the document cannot be opened.

        If it is closed, or ends with an exception, pages in work are stopped.
        """
        with ThreadPoolExecutor(self.options.num_jobs, "sensorium-pages") as pool, self._stopping():
            for index in range(len(self.items)):
                document = self._open(index)
                if document.error is not None:
                    yield index, document
                    continue
                self._unfinished[index] = document.closed()
                self.manifest.add(document.key, document.ranges)
                self.manifest.forget(document.key, document.ranges, TRANSIENT)
                self._read(document, pool)
                yield from self._finished()
            self._read_waiting(1)
            yield from self._finished()
            while self._unfinished:  # other processes read the rest, or have left it
                self.stop.check()
                time.sleep(_POLL)
                yield from self._read_rest(pool)
        keep_costs(self._clock.costs)

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.stop.set()  # the threads of the pool would end their pages before
            raise

    def _open(self, index: int) -> OpenedDocument:
        return self.stop.run(lambda: open_document(self.items[index], self.options, self.reader, self.policy))

    def _read_rest(self, pool: ThreadPoolExecutor) -> Iterator[tuple[int, OpenedDocument]]:
        """Read the pages that no other process reads any more."""
        for index, document in list(self._unfinished.items()):
            if not self.manifest.can_claim(document.key, document.ranges):
                continue
            again = self._open(index)
            if again.key != document.key:
                del self._unfinished[index]
                yield index, document.failed(again.error or InputError("the file has changed while it was read").info)
            else:
                self._read(again, pool)
        self._read_waiting(1)
        yield from self._finished()

    def _finished(self) -> Iterator[tuple[int, OpenedDocument]]:
        """Yield documents whose pages all have records."""
        for index, document in list(self._unfinished.items()):
            with self.manifest.snapshot():  # another process may make pages wait again
                if not self.manifest.missing(document.key, document.ranges):
                    del self._unfinished[index]
                    yield index, document

    def _read(self, document: OpenedDocument, pool: ThreadPoolExecutor) -> None:
        """Read the pages of a document that no other process reads."""
        running = set[Future[list[PageTask]]]()
        while True:
            self.stop.check()
            numbers = self.manifest.claim(document.key, document.ranges, CHUNK)
            if numbers:
                running.add(pool.submit(self._read_chunk, document, numbers))
            if not running:
                return
            if not numbers or len(running) >= self.options.num_jobs:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                self._waiting += [(document.closed(), task) for future in done for task in future.result()]
                self._read_waiting(CHUNK)

    def _read_chunk(self, document: OpenedDocument, numbers: list[int]) -> list[PageTask]:
        """Write the records of pages that no model has to read. Return the other pages."""
        if (error := self._over_limit(document)) is not None:
            self._finish(document, [PageRecord(number, reason="the document is too long", error=error) for number in numbers])
            return []
        waiting, scale = list[PageTask](), scale_of(document.data, self.policy)
        with self._clock.measuring(INSPECTED, len(numbers)):
            tenant = tenant_of(self.options.cache_salt)
            inspected = self.stop.run(lambda: list(facts_of(document, numbers, self.policy, tenant)))
        inspected = self._checked(document, inspected)
        for number, facts in inspected:
            self.stop.check()
            if isinstance(facts, ErrorInfo):
                self._finish(document, [PageRecord(number, reason="it cannot be opened", error=facts)])
                continue
            way, reason = choose_way(facts, self.reader.kind, self.options.text_layer)
            task = PageTask(document.data, number, facts, way, reason, scale)
            if way == "blank":
                doubt = f"{facts.num_undecoded} of its pictures cannot be decoded" if facts.num_undecoded else None
                self._finish(document, [task.record(doubt=doubt)])
            elif way == "text_layer" and (error := self._over_limit(document, facts)) is not None:
                self._finish(document, [task.record(error=error)])
            elif way == "text_layer":
                doubt = "its encoding is a guess: Windows-1252; save it as UTF-8" if facts.guessed_encoding else None
                if facts.num_cut:
                    doubt = f"the last {facts.num_cut:,} characters of its text layer are left out, the limit is {MAX_CHARS:,}"
                if facts.parts is not None:
                    blocks = part_blocks(facts.parts)
                else:
                    blocks = page_blocks(facts.lines, [()] * len(facts.lines), text_order, facts.rules)
                self._finish(document, [task.record(blocks, doubt=doubt)])
            elif self.reader.kind == "model":
                waiting.append(task)
            else:
                self._finish(document, self._results([task]))
        return waiting

    def _checked(self, document: OpenedDocument, inspected: Inspected) -> Inspected:
        """Return pages whose text layers would be used with a comparison of these with a reading of sampled lines."""
        recognizer, name = self.reader.recognizer, cost_of("text_layer", self.reader.name)
        pages = [
            (number, facts) for number, facts in inspected if not isinstance(facts, ErrorInfo) and self._is_to_check(facts)
        ]
        if recognizer is None or not pages:
            return inspected
        try:
            with self._clock.measuring(name, len(pages)):
                tenant = tenant_of(self.options.cache_salt)
                checked = checked_facts(document.data, pages, recognizer, self.policy, self.stop, tenant)
        except ReadingStopped:
            raise
        except Exception as error:  # such as a busy machine
            return list({**dict(inspected), **dict.fromkeys(dict(pages), info_of(error))}.items())
        return list({**dict(inspected), **dict(zip(dict(pages), checked, strict=True))}.items())

    def _is_to_check(self, facts: PageFacts) -> bool:
        is_layer = bool(facts.lines) and self.options.text_layer == "auto"
        return is_layer and choose_way(facts, self.reader.kind, "auto")[0] == "text_layer"

    def _over_limit(self, document: OpenedDocument, facts: PageFacts | None = None) -> ErrorInfo | None:
        """Return the error of a document's further pages, or of a page whose text layer is too much; else count it."""
        limit = self.options.max_characters
        if limit is None:
            return None
        number = 0 if facts is None else max(sum(len(line.text) for line in facts.lines), LINE_CHARACTERS * len(facts.lines))
        parts = facts.parts or () if facts is not None else ()
        number += sum(max(len(part.text), LINE_CHARACTERS * (1 + part.text.count("\n"))) for part in parts)
        with self._lock:
            self._characters[document.key] += number
            value = self._characters[document.key]
        if value <= limit:
            return None
        reason = f"the text layers of its document have {value:,} characters or more, the limit is {limit:,}"
        reason = f"{reason}; give fewer pages, or a higher limit"
        return ErrorInfo("over_limit", reason, param="max_characters", limit=limit, value=value)

    def _read_waiting(self, least: int) -> None:
        """Read pages with the model while at least so many wait for it."""
        while len(self._waiting) >= least:
            batch, self._waiting = self._waiting[:CHUNK], self._waiting[CHUNK:]
            for (document, _), record in zip(batch, self._results([task for _, task in batch]), strict=True):
                self._finish(document, [record])

    def _results(self, tasks: Sequence[PageTask]) -> list[PageRecord]:
        """Return the records of pages that the reader reads; with its error if it fails."""
        try:
            way: Way = "draft" if all(task.way == "draft" for task in tasks) else "reading"
            with self._clock.measuring(cost_of(way, self.reader.name), len(tasks)):
                return patiently(lambda: self.reader.read(tasks, self.policy, self.stop))
        except ReadingStopped:
            raise
        except Exception as error:
            return [task.record(error=info_of(error)) for task in tasks]

    def _finish(self, document: OpenedDocument, records: Sequence[PageRecord]) -> None:
        self.manifest.finish(document.key, records)
        self.on_records(document, records)


def load(document: OpenedDocument, manifest: Manifest) -> Document:
    """Return a finished document with all of its pages."""
    return Document(document.source, tuple(pages_of(document, manifest)), document.error)


def pages_of(document: OpenedDocument, manifest: Manifest) -> Iterator[PageRecord]:
    """Yield the pages of a finished document, with what only several of them tell."""
    return folded(partial(manifest.records, document.key, document.ranges))
