"""The engine for OCRmyPDF writes hOCR and text of a page's picture; it is loaded with a stand-in for that package."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from xml.etree import ElementTree

import pytest
from sensorium.callers.errors import InputError
from sensorium.cli.ocr import SHIPPED_MODEL

PLUGIN = Path(__file__).parents[2] / "examples" / "ocrmypdf_plugin" / "sensorium_ocr.py"
MEDIA = SHIPPED_MODEL.parent / "media"


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    package, tesseract = ModuleType("ocrmypdf"), ModuleType("ocrmypdf.builtin_plugins.tesseract_ocr")
    package.OcrEngine, package.OrientationConfidence, package.hookimpl = object, SimpleNamespace, lambda hook: hook  # type: ignore[attr-defined]
    tesseract.TesseractOptions = object  # type: ignore[attr-defined]
    for name in ("ocrmypdf", "ocrmypdf.builtin_plugins"):
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, tesseract.__name__, tesseract)
    spec = importlib.util.spec_from_file_location("sensorium_ocr", PLUGIN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_page_becomes_hocr(plugin: ModuleType, tmp_path: Path) -> None:
    answer = json.loads((MEDIA / "answers.json").read_text("utf-8"))["line1.png"]["answer"]
    options, engine = SimpleNamespace(sensorium_model=str(SHIPPED_MODEL)), plugin.get_ocr_engine(None)
    engine.generate_hocr(MEDIA / "line1.png", tmp_path / "a.hocr", tmp_path / "a.txt", options)
    assert (tmp_path / "a.txt").read_text("utf-8") == f"{answer}\n"
    words = ElementTree.parse(tmp_path / "a.hocr").iterfind(".//{*}span[@class='ocrx_word']")
    assert " ".join(word.text or "" for word in words) == answer
    assert engine.creator_tag(options).endswith("tiny-vl")


def test_a_page_that_cannot_be_read_is_an_error(plugin: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        plugin.read_image(tmp_path / "missing.png", str(SHIPPED_MODEL))
