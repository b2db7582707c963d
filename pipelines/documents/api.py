"""`LLM.read` and `AsyncLLM.read`: documents in memory, and outputs in a folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...callers.errors import ErrorInfo, InputError, short_repr
from ...engine.progress import ShowProgress, make_progress
from ..run import Task, run_all_async, submit
from ..validation import as_items
from .blocks import Document, PageRecord, Way
from .inputs import OpenedDocument, documents_of, read_policy
from .manifest import Manifest
from .options import OutputOptions, ReadOptions
from .output import DocumentFolder
from .projections import SUFFIXES, Projected
from .read import DocumentReader, load
from .readers import ModelReader
from .stop import StopSignal

if TYPE_CHECKING:
    from ...engine.async_llm import AsyncLLM
    from ...engine.engine import Engine
    from ...engine.frontend.adapters import AdapterChoice
    from ..files import NamedItem
    from ..ocr import Page


@dataclass(frozen=True)
class PageDone:
    """A page that has just been read: `page` of the `num_pages` of `source` that are asked for, numbered as in the document."""

    source: str
    page: int
    num_pages: int
    way: Way
    error: ErrorInfo | None


@dataclass(frozen=True)
class ReadJob:
    """The files, folders and patterns of one call of `LLM.read`, and its options. `adapter`: of the requests for all pages."""

    files: object
    options: ReadOptions
    output: OutputOptions
    adapter: AdapterChoice = None

    def items(self) -> list[NamedItem]:
        """Return the files. Raises: InputError: there is none, or the output format is unknown."""
        output_format = self.output.output_format
        if output_format not in SUFFIXES:
            formats = ", ".join(SUFFIXES)
            raise InputError(f"<<param=>>{short_repr(output_format)}; the known ones are {formats}", param="output_format")
        return documents_of(as_items("files", self.files, "image"))


@dataclass(frozen=True)
class _Hooks:
    """Functions that `LLM.read` and `AsyncLLM.read` give differently: one runs the tasks of pages, others report progress."""

    run: Callable[[list[Task[Page]]], list[Page]] | None = None
    on_document: Callable[[], object] = lambda: None
    on_page: Callable[[PageDone], object] | None = None
    stop: StopSignal = field(default_factory=StopSignal)


def read_files(engine: Engine, job: ReadJob, use_tqdm: ShowProgress) -> list[Document]:
    """Return the documents that files, folders and patterns name, in order; see `LLM.read`.

    Raises:
        InputError: there is no file, or an argument has a wrong value.
        ConfigError: of the folder; see `DocumentFolder`.
    """
    items = job.items()
    with make_progress(len(items), use_tqdm) as progress:
        return _read(engine, job, items, _Hooks(on_document=lambda: progress.update(1)))


async def read_files_async(
    llm: AsyncLLM, threads: Executor, job: ReadJob, on_page: Callable[[PageDone], object] | None
) -> list[Document]:
    """`read_files` as a coroutine; the files are read in a thread.

    Cancelling it ends when that thread has ended, or at once if the reading has not begun.
    """
    loop, stop = asyncio.get_running_loop(), StopSignal()

    def run(tasks: list[Task[Page]]) -> list[Page]:
        return stop.wait(lambda: asyncio.run_coroutine_threadsafe(run_all_async(llm, tasks), loop))

    hooks = _Hooks(run, on_page=on_page, stop=stop)
    reading = submit(threads, lambda: _read(llm.engine, job, job.items(), hooks))
    work = asyncio.wrap_future(reading)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        stop.set()
        if not reading.cancel():
            await asyncio.wait({work})
            work.exception()  # it was stopped; it is not reported as an error that nobody has seen
        raise


def _read(engine: Engine, job: ReadJob, items: Sequence[NamedItem], hooks: _Hooks) -> list[Document]:
    options, output = job.options, job.output
    policy, documents, folder = read_policy(engine.config.media, options), dict[int, Document](), None
    if output.output_dir is not None:
        folder = DocumentFolder(Path(output.output_dir), items, output.output_format, output.resume, policy)

    def tell(document: OpenedDocument, records: Sequence[PageRecord]) -> None:
        for record in records if hooks.on_page is not None else ():
            assert hooks.on_page is not None
            hooks.on_page(PageDone(document.source, record.number, document.num_pages, record.way, record.error))

    reader = ModelReader(engine, options, hooks.run, job.adapter)
    with Manifest(None if folder is None else folder.manifest) as manifest:
        reading = DocumentReader(items, reader, options, policy, manifest, tell, hooks.stop)
        for index, opened in reading.documents():
            document = load(opened, manifest)
            if folder is not None:
                document = hooks.stop.run(partial(_write, folder, index, document, manifest.owner))
            documents[index] = document
            hooks.on_document()
        if folder is not None:
            folder.clean(manifest.owner)
    return [document for _, document in sorted(documents.items())]


def _write(folder: DocumentFolder, index: int, document: Document, owner: str) -> Document:
    """Write a document. Return it, with the error if no searchable PDF can be made of it."""
    try:
        folder.write(index, Projected(document.source, document.error, document.pages), owner)
    except InputError as error:
        return replace(document, error=document.error or error.info)
    return document
