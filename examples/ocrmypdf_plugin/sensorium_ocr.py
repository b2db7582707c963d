"""An OCR engine for OCRmyPDF: pages are read by a sensorium model, or by the reader of printed lines.

    pip install ocrmypdf 'sensorium[documents]'
    ocrmypdf --plugin examples/ocrmypdf_plugin/sensorium_ocr.py scan.pdf searchable.pdf
    ocrmypdf --plugin examples/ocrmypdf_plugin/sensorium_ocr.py --sensorium-model rednote-hilab/dots.ocr scan.pdf searchable.pdf

Models whose answers have boxes (docs/documents.md) give text at its place; text without boxes covers the page. OCRmyPDF starts
`--jobs` processes, and each one loads the model: give `--jobs 1` with a model that fills the memory.
"""

from __future__ import annotations

import threading
from functools import cache
from pathlib import Path
from typing import Any

from ocrmypdf import OcrEngine, OrientationConfidence, hookimpl
from ocrmypdf.builtin_plugins.tesseract_ocr import TesseractOptions
from sensorium import LLM, __version__
from sensorium.mm.media.policy import MediaPolicy
from sensorium.pipelines.documents.blocks import Document
from sensorium.pipelines.documents.inputs import documents_of
from sensorium.pipelines.documents.manifest import Manifest
from sensorium.pipelines.documents.options import ReadOptions
from sensorium.pipelines.documents.page_task import PageReader
from sensorium.pipelines.documents.projections import Projected, project
from sensorium.pipelines.documents.read import DocumentReader, load
from sensorium.pipelines.documents.readers import ModelReader, find_reader

LANGUAGES = {"eng", "deu", "fra", "ita", "spa", "por", "nld", "pol", "chi_sim", "chi_tra", "jpn", "kor", "ara", "rus"}
"""Languages that OCRmyPDF lets pass. Models know more, or fewer, and take no language."""
_lock = threading.Lock()  # a model reads one page after the other


@cache
def reader_of(model: str) -> PageReader:
    """Return the reader of a process; it loads the model once."""
    options = ReadOptions()
    return ModelReader(LLM(model).engine, options) if model else find_reader(options)


def read_image(path: Path, model: str) -> Document:
    """Return the page of an image.

    Raises:
        SensoriumError: it cannot be opened or read.
    """
    with _lock, Manifest(None) as manifest:
        reading = DocumentReader(documents_of([path]), reader_of(model), ReadOptions(), MediaPolicy(), manifest)
        ((_, opened),) = reading.documents()
        document = load(opened, manifest)
    for error in filter(None, (document.error, *(page.error for page in document.pages))):
        raise error.exception()
    return document


class SensoriumEngine(OcrEngine):
    """Reads the pages that OCRmyPDF has rendered, into hOCR."""

    @staticmethod
    def version() -> str:
        return str(__version__)

    @staticmethod
    def creator_tag(options: Any) -> str:
        return f"sensorium {__version__} {reader_of(options.sensorium_model).name}"

    def __str__(self) -> str:
        return f"sensorium {__version__}"

    @staticmethod
    def languages(options: Any) -> set[str]:
        return LANGUAGES

    @staticmethod
    def get_orientation(input_file: Path, options: Any) -> OrientationConfidence:
        return OrientationConfidence(angle=0, confidence=0.0)

    @staticmethod
    def generate_hocr(input_file: Path, output_hocr: Path, output_text: Path, options: Any) -> None:
        document = read_image(input_file, options.sensorium_model)
        output_hocr.write_text("".join(project(Projected(document.source, None, document.pages), "hocr")), "utf-8")
        output_text.write_text(f"{document.text}\n", "utf-8")

    @staticmethod
    def generate_pdf(input_file: Path, output_pdf: Path, output_text: Path, options: Any) -> None:
        raise NotImplementedError("sensorium writes hOCR; leave --pdf-renderer sandwich out")


@hookimpl
def initialize(plugin_manager: Any) -> None:
    plugin_manager.set_blocked("ocrmypdf.builtin_plugins.tesseract_ocr")  # which else requires that Tesseract is installed


@hookimpl
def register_options() -> dict[str, Any]:
    return {"tesseract": TesseractOptions}  # which OCRmyPDF looks at for any engine


@hookimpl
def add_options(parser: Any) -> None:
    help_text = "folder or Hugging Face id of the model that reads pages (default: the reader of printed lines)"
    parser.add_argument_group("sensorium").add_argument("--sensorium-model", default="", help=help_text)


@hookimpl
def get_ocr_engine(options: Any) -> SensoriumEngine:
    return SensoriumEngine()
