"""Office files: their kinds, the call of LibreOffice, and its limits; books and HTML as documents."""

from __future__ import annotations

import json
import threading
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
from pdf_files import text_pdf
from sensorium.callers.errors import InputError
from sensorium.cli.main import main
from sensorium.mm.media.isolate import Interrupt
from sensorium.mm.media.policy import MediaPolicy
from sensorium.pipelines.documents import office
from sensorium.pipelines.documents.inputs import open_document
from sensorium.pipelines.documents.office import office_kind, office_pdf
from sensorium.pipelines.documents.options import ReadOptions
from sensorium.pipelines.documents.readers import NoReader
from sensorium.pipelines.files import NamedItem

POLICY = MediaPolicy()


def archive(*names: str, first: str = "") -> bytes:
    file = BytesIO()
    with zipfile.ZipFile(file, "w") as base:
        if first:
            base.writestr("mimetype", first)
        for name in names:
            base.writestr(name, "x")
    return file.getvalue()


DOCX = archive("[Content_Types].xml", "word/document.xml")
OPEN = "application/vnd.oasis.opendocument."


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (DOCX, "docx"),
        (archive("[Content_Types].xml", "xl/workbook.xml"), "xlsx"),
        (archive("[Content_Types].xml", "ppt/presentation.xml"), "pptx"),
        (archive("content.xml", first=f"{OPEN}text"), "odt"),
        (archive("content.xml", first=f"{OPEN}spreadsheet"), "ods"),
        (archive("content.xml", first=f"{OPEN}graphics"), None),
        (archive("a.txt"), None),
        (archive("content.xml", first="application/epub+zip"), None),
        (bytes.fromhex("d0cf11e0a1b11ae1") + "WordDocument".encode("utf-16-le"), "doc"),
        (rb"{\rtf1 text}", "rtf"),
        (b"%PDF-1.7", None),
    ],
)
def test_kinds_are_known_by_the_content(data: bytes, kind: str | None) -> None:
    assert office_kind(data) == kind


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in LibreOffice's place, which writes a PDF that it gets from a file, and tells how it was called."""
    (tmp_path / "made.pdf").write_bytes(text_pdf([["from an office file"]]))
    path = tmp_path / "bin" / "soffice"
    path.parent.mkdir()
    path.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/called\nenv > {tmp_path}/env\n'
        f"cp profile/user/registrymodifications.xcu {tmp_path}\ncp {tmp_path}/made.pdf document.pdf\n"
    )
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
    monkeypatch.setenv("SECRET_OF_THE_TEST", "x")
    return path


def test_libreoffice_is_called_with_a_profile_of_its_own(
    program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.docx").write_bytes(DOCX)
    assert main(["read", str(tmp_path / "a.docx"), "--format", "json"]) == 0
    (page,) = json.loads(capsys.readouterr().out)["pages"]
    assert [block["text"] for block in page["blocks"]] == ["from an office file"]
    called, env = ((tmp_path / name).read_text() for name in ("called", "env"))
    assert "-env:UserInstallation=file:///" in called
    assert "--headless" in called
    assert "SECRET_OF_THE_TEST" not in env
    settings = (tmp_path / "registrymodifications.xcu").read_text()
    assert 'oor:name="DisableMacrosExecution"><value>true</value>' in settings
    folder = Path(called.split("--outdir ")[1].split()[0])
    assert not folder.exists()


def test_a_document_keeps_its_key(program: Path, tmp_path: Path) -> None:
    """LibreOffice writes other bytes each time; the records of pages stay those of the office file."""
    first = open_document(NamedItem("a", DOCX), ReadOptions(), NoReader(), POLICY)
    (tmp_path / "made.pdf").write_bytes(text_pdf([["from an office file"], ["more"]]))
    second = open_document(NamedItem("a", DOCX), ReadOptions(), NoReader(), POLICY)
    assert first.key == second.key
    assert (first.num_pages, second.num_pages) == (1, 2)


def test_without_libreoffice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(office, "PROGRAMS", ("no-such-program",))
    document = open_document(NamedItem("a", DOCX), ReadOptions(), NoReader(), POLICY)
    assert document.error is not None
    assert document.error.code == "unsupported"


def test_office_files_can_be_refused(program: Path, tmp_path: Path) -> None:
    document = open_document(NamedItem("a", DOCX), ReadOptions(convert_office=False), NoReader(), POLICY)
    assert document.error is not None
    assert document.error.code == "unsupported"
    assert not (tmp_path / "called").exists()


def test_a_file_that_libreoffice_cannot_read(program: Path) -> None:
    program.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(InputError) as caught:
        office_pdf(DOCX, POLICY)
    assert caught.value.info.code == "invalid_media"


def test_a_pdf_that_is_too_large(program: Path) -> None:
    with pytest.raises(InputError) as caught:
        office_pdf(DOCX, MediaPolicy(max_bytes=10))
    assert caught.value.info.param == "max_bytes"


def test_the_time_of_a_conversion_is_limited(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program.write_text("#!/bin/sh\nsleep 600 & sleep 600\n")
    monkeypatch.setattr(office, "SECONDS", 1.0)
    with pytest.raises(InputError) as caught:
        office_pdf(DOCX, POLICY)
    assert (caught.value.info.code, caught.value.info.limit) == ("over_limit", 1.0)


def test_a_conversion_can_be_stopped(program: Path, tmp_path: Path) -> None:
    program.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nsleep 600\n")
    interrupt = Interrupt()
    threading.Thread(target=lambda: (wait_for(tmp_path / "pid"), interrupt.stop())).start()
    with pytest.raises(InputError):
        interrupt.run(lambda: office_pdf(DOCX, POLICY))
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def wait_for(path: Path) -> None:
    while not path.exists() or not path.read_text().endswith("\n"):
        threading.Event().wait(0.01)


def test_books_and_html(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    container = '<container><rootfile full-path="b.opf"/></container>'
    package = '<p><item id="a" href="a.xhtml" media-type="application/xhtml+xml"/><itemref idref="a"/></p>'
    chapter = "<html><h1>Title</h1><table><tr><th>n</th></tr><tr><td>1</td></tr></table></html>"
    with zipfile.ZipFile(tmp_path / "a.epub", "w") as base:
        base.writestr("mimetype", "application/epub+zip")
        for name, text in (("META-INF/container.xml", container), ("b.opf", package), ("a.xhtml", chapter)):
            base.writestr(name, text)
    (tmp_path / "b.html").write_text("<!DOCTYPE html><p>A page.</p>")
    assert main(["read", str(tmp_path), "--output-dir", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "a.md").read_text() == "<!-- page 1 -->\n\n# Title\n\n| n |\n| --- |\n| 1 |\n"
    assert (tmp_path / "out" / "b.md").read_text() == "<!-- page 1 -->\n\nA page.\n"
    for output_format in ("json", "hocr", "alto", "docling", "csv", "html"):
        assert main(["read", str(tmp_path / "a.epub"), "--format", output_format]) == 0
    assert main(["read", str(tmp_path / "a.epub"), "--text-layer", "never"]) == 0
    assert main(["read", str(tmp_path / "b.html"), "--format", "pdf", "--output-dir", str(tmp_path / "pdf")]) == 2
    assert "choose another format" in capsys.readouterr().err
