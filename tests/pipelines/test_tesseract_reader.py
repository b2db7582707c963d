"""tesseract as a reader of printed lines: its hOCR, its program and its package, and what is said if it is missing."""

from __future__ import annotations

import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont
from sensorium.callers.errors import InputError
from sensorium.cli.main import main
from sensorium.pipelines.documents import readers, tesseract_reader
from sensorium.pipelines.documents.options import ReadOptions
from sensorium.pipelines.documents.page_frame import inner_box, outer_quad
from sensorium.pipelines.documents.readers import find_lines_reader, find_reader
from sensorium.pipelines.documents.stop import StopSignal
from sensorium.pipelines.documents.tesseract_reader import TesseractReader, hocr_lines

HOCR = """<div class='ocr_page' id='page_1' title='image "unknown"; bbox 0 0 400 200; ppageno 0'>
 <div class='ocr_carea' title="bbox 40 40 240 60"><p class='ocr_par' title="bbox 40 40 240 60">
  <span class='ocr_line' id='line_1' title="bbox 40 45 240 60; baseline 0 0; x_size 25; x_descenders 5; x_ascenders 6">
   <span class='ocrx_word' title='bbox 40 45 120 60; x_wconf 96'>a&amp;<strong>no</strong></span>
   <span class='ocrx_word' title='bbox 140 45 240 60; x_wconf 31'>row</span>
  </span>
  <span class='ocr_line' title="bbox 40 100 240 110">
   <span class='ocrx_word' title='bbox 40 100 240 110; x_wconf 90'> </span>
  </span>
  <span class='ocr_header' title="bbox 40 120 240 160; baseline 0.1 -10; x_size 20; x_descenders 4">
   <span class='ocrx_word' title='bbox 40 120 240 160; x_wconf 120'>skewed</span>
  </span>
 </p></div>
</div>"""
PROGRAM = """#!{python}
import sys
arguments = sys.argv[1:]
if arguments == ["--version"]:
    print("tesseract 5.9.1\\n leptonica-1.84")
elif arguments == ["--list-langs"]:
    print('List of available languages in "{folder}/" (3):\\ndeu\\neng\\nosd')
else:
    picture = sys.stdin.buffer.read()
    assert picture.startswith(b"P6 400 200 255\\n") and len(picture) == 15 + 400 * 200 * 3
    open("{folder}/arguments", "a").write(" ".join(arguments) + "\\n")
    {then}
    print(open("{folder}/page.hocr").read())
"""


@pytest.fixture
def no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither RapidOCR nor tesseract is installed."""
    for module in (readers, tesseract_reader):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    monkeypatch.setattr(tesseract_reader.shutil, "which", lambda name: None)


@pytest.fixture
def program(no_reader: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that answers as tesseract does is installed. Return its folder."""
    (tmp_path / "page.hocr").write_text(HOCR)
    (tmp_path / "deu.traineddata").write_bytes(b"first")
    write_program(tmp_path)
    monkeypatch.setattr(tesseract_reader.shutil, "which", lambda name: str(tmp_path / name))
    return tmp_path


def write_program(folder: Path, then: str = "pass") -> None:
    path = folder / "tesseract"
    path.write_text(PROGRAM.format(python=sys.executable, folder=folder, then=then))
    path.chmod(0o755)


def scan(folder: Path) -> Path:
    path = folder / "scan.png"
    picture = Image.new("L", (400, 200), 255)
    ImageDraw.Draw(picture).rectangle((40, 45, 240, 60), fill=0)
    picture.save(path)
    return path


def test_lines_of_hocr() -> None:
    first, skewed = hocr_lines(HOCR)
    assert (first.text, skewed.text) == ("a&no row", "skewed")
    assert first.scores == (0.96,) * 4 + (0.31,) * 3
    (left, top), (right, _), (_, bottom), _ = first.quad
    assert inner_box((left, top, right, bottom)) == pytest.approx((40, 40, 240, 65), abs=0.02)  # the height of the font
    middles = [left + place * (right - left) for place in first.places]
    assert middles == pytest.approx([50, 70, 90, 110, 140 + 100 / 6, 190, 240 - 100 / 6])
    (x, y), (v, w), *_ = skewed.quad
    assert (w - y) / (v - x) == pytest.approx(0.1)
    assert skewed.scores == (1.0,) * 6


def test_a_quad_around_a_box() -> None:
    for box in ((10.0, 20.0, 110.0, 40.0), (10.0, 20.0, 15.0, 40.0)):
        (left, top), _, (right, bottom), _ = outer_quad(box)
        assert inner_box((left, top, right, bottom)) == pytest.approx(box, abs=0.02)


def test_the_program_reads_pages(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["read", str(scan(program)), "--format", "json"]
    assert main([*words, "--reader", "tesseract:deu+eng"]) == 0
    (page,) = json.loads(capsys.readouterr().out)["pages"]
    assert (program / "arguments").read_text() == "stdin stdout -l deu+eng --psm 3 hocr\n"
    assert [block["text"] for block in page["blocks"]] == ["a&no row", "skewed"]
    block = page["blocks"][0]
    assert (page["way"], block["model"], block["confidence_kind"]) == ("reading", "tesseract", "reader_score")
    assert block["lines"][0]["word_confidences"] == [0.96, 0.31]
    assert block["box"] == pytest.approx([40, 40, 240, 65], abs=0.5)
    assert main(words) == 0  # nothing else is installed, and English is the language
    assert json.loads(capsys.readouterr().out)["pages"][0]["blocks"][0]["model"] == "tesseract"
    assert (program / "arguments").read_text().splitlines()[1] == "stdin stdout -l eng --psm 3 hocr"
    assert find_reader(ReadOptions()).recognizer is None


def test_records_depend_on_the_data_of_the_languages(program: Path) -> None:
    first, english = TesseractReader("deu").digest, TesseractReader("eng").digest
    (program / "deu.traineddata").write_bytes(b"second")
    assert len({first, english, TesseractReader("deu").digest}) == 3
    assert first.startswith("tesseract 5.9.1 deu ")


@pytest.mark.parametrize(
    ("then", "code", "message"),
    [
        ("sys.exit('no memory')", "invalid_media", "exit code 1: no memory"),
        ("import time; time.sleep(60)", "over_limit", "0.5 s"),
    ],
)
def test_a_program_that_fails(
    program: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, then: str, code: str, message: str
) -> None:
    path = scan(program)
    assert find_lines_reader("tesseract") is not None
    write_program(program, then)
    if code == "over_limit":
        monkeypatch.setattr(tesseract_reader, "_SECONDS", 0.5)
        monkeypatch.setattr(tesseract_reader._Program, "languages", lambda self: ["eng"])
        monkeypatch.setattr(tesseract_reader._Program, "version", lambda self: "5.9.1")
    assert main(["read", str(path), "--reader", "tesseract", "--format", "json"]) == 2
    (page,) = json.loads(capsys.readouterr().out)["pages"]
    assert page["error"]["code"] == code
    assert message in page["error"]["message"]


def test_what_is_missing_is_named(no_reader: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(scan(tmp_path))
    for reader, message in (
        ("tesseract", "tesseract was not found; install"),
        ("rapidocr", "pip install 'sensorium[documents]'"),
    ):
        assert main(["read", path, "--reader", reader]) == 2
        assert message in capsys.readouterr().err
        with pytest.raises(InputError) as caught:
            find_lines_reader(reader)
        assert (caught.value.info.code, caught.value.info.param) == ("unsupported", "reader")
    assert find_lines_reader() is None
    for reader in ("easyocr", "rapidocr:deu", "tesseract:", "tesseract:deu;rm", "tesseract:deu+"):
        with pytest.raises(InputError, match="the known ones are auto, rapidocr, tesseract") as caught:
            ReadOptions(reader=reader)
        assert caught.value.info.param == "reader"


def test_a_language_that_is_missing_is_named(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["read", str(scan(program)), "--reader", "tesseract:fra"]) == 2
    assert "no data of the language 'fra', only of deu, eng" in capsys.readouterr().err


def test_the_package_reads_pages(no_reader: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """tesserocr comes before the program, and its data is loaded once."""
    made, pictures = list[dict[str, object]](), list[tuple[int, int]]()

    class Api:
        def __init__(self, **options: object) -> None:
            made.append(options)

        def SetImage(self, image: Image.Image) -> None:
            pictures.append(image.size)

        def Recognize(self, milliseconds: int) -> bool:
            return milliseconds == 120_000

        def GetHOCRText(self, page: int) -> str:
            return HOCR

        def Clear(self) -> None: ...

    module = SimpleNamespace(
        tesseract_version=lambda: "tesseract 5.5.4\n leptonica",
        get_languages=lambda: ("/data/", ["eng", "osd"]),
        PyTessBaseAPI=Api,
        PSM=SimpleNamespace(AUTO=3),
    )
    monkeypatch.setitem(sys.modules, "tesserocr", module)
    monkeypatch.setattr(tesseract_reader, "find_spec", lambda name: module if name == "tesserocr" else None)
    reader = find_lines_reader()
    assert isinstance(reader, TesseractReader)
    for _ in range(2):
        lines = reader.lines(np.zeros((20, 40, 3), np.uint8), StopSignal())
        assert [line.text for line in lines] == ["a&no row", "skewed"]
    assert (made, pictures) == ([{"path": "/data/", "lang": "eng", "psm": 3}], [(40, 20)] * 2)
    assert reader.digest.startswith("tesseract 5.5.4 eng ")


def test_a_real_tesseract_reads_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if find_spec("tesserocr") is None and shutil.which("tesseract") is None:
        pytest.skip("needs tesseract, or tesserocr")
    try:
        TesseractReader("eng")
    except InputError as error:
        pytest.skip(str(error))
    picture = Image.new("RGB", (900, 400), "white")
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default(28)
    for row, text in enumerate(("The quick report of 2024", "shows that prices have", "risen by four percent.")):
        pen.text((50, 40 + 45 * row), text, font=font, fill="black")
    picture.rotate(2, fillcolor="white").save(tmp_path / "scan.png")
    assert main(["read", str(tmp_path / "scan.png"), "--reader", "tesseract", "--format", "json"]) == 0
    (page,) = json.loads(capsys.readouterr().out)["pages"]
    assert " ".join(block["text"] for block in page["blocks"]) == (
        "The quick report of 2024 shows that prices have risen by four percent."
    )
    assert page["confidence"] > 0.8
    left, top, _, _ = page["blocks"][0]["box"]
    assert (left, top) == pytest.approx((40, 50), abs=25)
