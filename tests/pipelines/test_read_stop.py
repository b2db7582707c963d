"""A reading that is stopped ends inside the page in work, in codec workers and between the batches of a reader."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import pytest
from pdf_files import text_pdf
from PIL import Image
from sensorium.callers.errors import InputError
from sensorium.mm.media import isolate
from sensorium.mm.media.isolate import run_inline
from sensorium.mm.media.page_facts import PageFacts
from sensorium.mm.media.policy import MediaPolicy
from sensorium.pipelines.documents import inputs, printed_lines, read
from sensorium.pipelines.documents.blocks import PageRecord
from sensorium.pipelines.documents.inputs import OpenedDocument, documents_of
from sensorium.pipelines.documents.lines_reader import LinesReader
from sensorium.pipelines.documents.manifest import Manifest
from sensorium.pipelines.documents.options import ReadOptions
from sensorium.pipelines.documents.page_task import PageTask
from sensorium.pipelines.documents.read import DocumentReader
from sensorium.pipelines.documents.readers import NoReader
from sensorium.pipelines.documents.stop import ReadingStopped, StopSignal

POLICY = MediaPolicy()


class Workers:
    """Codec workers that count pages at once, but never end to inspect a page but 1 by themselves."""

    def __init__(self) -> None:
        self.began, self.calls = threading.Event(), 0

    def run(self, function: Callable[..., Any], data: bytes, *args: Any, **options: object) -> Any:
        if function is not inputs.page_facts:
            return function(data, *args)
        self.calls += 1
        if args[0] == [1]:
            assert self.began.wait(60)
            return [PageFacts(9, 9, marks=0)]
        killed = threading.Event()
        with isolate.watching(killed.set):
            self.began.set()
            assert killed.wait(60)
        raise AssertionError("it was not killed")


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    found = Workers()
    monkeypatch.setattr(inputs, "run_isolated", found.run)
    monkeypatch.setattr("sensorium.mm.media.pdf.run_isolated", found.run)
    monkeypatch.setattr(read, "CHUNK", 1)
    return found


def reader(base: Manifest, stop: StopSignal, on_records: Callable[..., object] = lambda *_: None) -> DocumentReader:
    items = documents_of([text_pdf([["a"]] * 4)])
    return DocumentReader(items, NoReader(), ReadOptions(jobs=2), POLICY, base, on_records, stop)


def records(base: Manifest) -> list[int]:
    return [row[0] for row in base._base.execute("SELECT number FROM pages WHERE record IS NOT NULL")]


def test_a_page_in_a_worker_is_stopped(workers: Workers) -> None:
    stop = StopSignal()
    with Manifest(None) as base, ThreadPoolExecutor(1) as pool:
        work = pool.submit(lambda: list(reader(base, stop).documents()))
        assert workers.began.wait(60)
        stop.set()
        with pytest.raises(ReadingStopped):
            work.result(60)
        assert records(base) in ([], [1])
    assert workers.calls <= 3  # no page is tried again alone


def test_pages_in_work_are_stopped_by_an_error_of_another(workers: Workers) -> None:
    def fail(document: OpenedDocument, pages: Sequence[PageRecord]) -> None:
        raise OSError("the disk is full")

    with Manifest(None) as base:
        with pytest.raises(OSError, match="full"):
            list(reader(base, StopSignal(), fail).documents())
        assert records(base) == [1]


def test_no_worker_starts_for_what_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    stop, taken = StopSignal(), list[object]()
    monkeypatch.setattr(isolate, "_take", lambda *args: taken.append(args))
    stop._interrupt.stop()
    with pytest.raises(InputError):
        stop._interrupt.run(lambda: isolate.run_isolated(len, b"", POLICY))
    late = isolate.Interrupt()
    with pytest.raises(InputError):
        late.run(lambda: (late.stop(), isolate.run_isolated(len, b"", POLICY)))
    assert not taken


def test_the_reader_of_lines_ends_between_two_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    stop, batches = StopSignal(), list[int]()

    class FakeEngine:
        """Has RapidOCR's stages, whose third batch stops the reading."""

        def __init__(self, params: object) -> None:
            self.stages = [SimpleNamespace(session=self.run) for _ in range(3)]
            self._load_det_model, self._load_cls_model, self._load_rec_model = (lambda i=i: self.stages[i] for i in range(3))
            self.crop_text_regions = None

        def run(self, batch: int) -> None:
            batches.append(batch)
            if batch == 3:
                stop.set()

        def __call__(self, pixels: object) -> SimpleNamespace:
            for batch, stage in enumerate((*self.stages, *self.stages[2:] * 9), 1):
                stage.session(batch)
            return SimpleNamespace(boxes=None, txts=None, scores=None)

    monkeypatch.setitem(sys.modules, "rapidocr", SimpleNamespace(RapidOCR=FakeEngine))  # type: ignore[arg-type]
    monkeypatch.setattr(printed_lines, "run_isolated", run_inline)
    file = BytesIO()
    Image.new("RGB", (64, 64)).save(file, "png")
    task = PageTask(file.getvalue(), 1, PageFacts(64, 64), "reading", "", 1.0)
    with pytest.raises(ReadingStopped):
        LinesReader().read([task], POLICY, stop)
    assert batches == [1, 2, 3]
