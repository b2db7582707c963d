"""`LLM.read`: documents in memory, and outputs in a folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...callers.errors import InputError, short_repr
from ...engine.progress import ShowProgress, make_progress
from ..validation import as_items
from .blocks import Document
from .inputs import documents_of, read_policy
from .manifest import Manifest
from .options import OutputOptions, ReadOptions
from .output import DocumentFolder
from .projections import SUFFIXES, Projected
from .read import DocumentReader, load
from .readers import ModelReader

if TYPE_CHECKING:
    from ...engine.engine import Engine


def read_files(
    engine: Engine,
    files: object,
    options: ReadOptions,
    output: OutputOptions,
    use_tqdm: ShowProgress,
) -> list[Document]:
    """Return the documents that files, folders and patterns name, in order; see `LLM.read`.

    Raises:
        InputError: there is no file, or an argument has a wrong value.
        ConfigError: of the folder; see `DocumentFolder`.
    """
    if output.output_format not in SUFFIXES:
        formats = ", ".join(SUFFIXES)
        raise InputError(f"<<param=>>{short_repr(output.output_format)}; the known ones are {formats}", param="output_format")
    items = documents_of(as_items("files", files, "image"))
    policy, documents, folder = read_policy(engine.config.media, options), dict[int, Document](), None
    if output.output_dir is not None:
        folder = DocumentFolder(Path(output.output_dir), items, output.output_format, output.resume, policy)
    reader = ModelReader(engine, options.question, options.max_tokens)
    with Manifest(None if folder is None else folder.manifest) as manifest, make_progress(len(items), use_tqdm) as progress:
        for index, opened in DocumentReader(items, reader, options, policy, manifest).documents():
            document = load(opened, manifest)
            if folder is not None:
                document = _write(folder, index, document, manifest.owner)
            documents[index] = document
            progress.update(1)
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
