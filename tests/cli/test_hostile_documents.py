"""`sensorium read` of broken and harmful files: each ends with its text, or with an error that says why."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hostile_files import FILES
from pdf_files import text_pdf
from sensorium.cli.main import main
from sensorium.pipelines.documents import readers
from sensorium.pipelines.documents.manifest import Manifest

pytest.importorskip("pypdfium2")


@pytest.fixture(autouse=True)
def no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "find_lines_reader", lambda name: None)


def test_each_file_ends_with_its_text_or_why_it_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    for name, file in FILES.items():
        (folder / name).write_bytes(file.data)
    assert main(["read", str(folder), "--output-dir", str(out), "--format", "json"]) == 2
    documents = {Path(doc["source"]).name: doc for doc in (json.loads(path.read_bytes()) for path in out.glob("*.json"))}
    assert documents.keys() == FILES.keys()
    for name, file in FILES.items():
        error, pages = documents[name]["error"], documents[name]["pages"]
        assert (error and error["code"], len(pages)) == (file.file_error, int(error is None)), name
        for page in pages:
            assert (page["error"] and page["error"]["code"]) == file.page_error, name
            assert " ".join(block["text"] for block in page["blocks"]) == (file.text or ""), name
            assert (page["doubt"] is not None) is file.is_doubted, name
    printed = capsys.readouterr()
    for message in ("it holds text, and is named .pdf", "it is encrypted; remove its password", "raise --max-pages"):
        assert message in printed.err
    assert "1 of its pictures cannot be decoded" in printed.err


def test_a_file_that_is_removed_while_it_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first file is read from the bytes that were opened. The second one is gone before it is opened."""
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("a.pdf", "b.pdf"):
        (folder / name).write_bytes(text_pdf([[f"the text of {name}"]] * 40))
    claim = Manifest.claim

    def remove(self: Manifest, *args: object) -> list[int]:
        for path in folder.iterdir():
            path.unlink()
        return claim(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Manifest, "claim", remove)
    assert main(["read", str(folder), "--output-dir", str(tmp_path / "out"), "--format", "json"]) == 2
    first, second = (json.loads((tmp_path / "out" / f"{name}.json").read_bytes()) for name in "ab")
    assert (first["error"], len(first["pages"]), {page["way"] for page in first["pages"]}) == (None, 40, {"text_layer"})
    assert (second["error"]["code"], second["pages"]) == ("invalid_input", [])
    assert "b.pdf" in capsys.readouterr().err


def test_a_file_that_is_removed_before_its_rest_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has read a part of it, and has ended."""
    path, out = tmp_path / "a.pdf", tmp_path / "out"
    path.write_bytes(text_pdf([["text"]] * 3))
    claim, claims = Manifest.claim, list[int]()

    def leave(self: Manifest, *args: object) -> list[int]:
        claims.append(1)
        if len(claims) == 1:
            path.unlink()
            return []
        return claim(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Manifest, "claim", leave)
    monkeypatch.setattr("sensorium.pipelines.documents.read._POLL", 0.01)
    assert main(["read", str(path), "--output-dir", str(out), "--format", "json"]) == 2
    (output,) = out.glob("*.json")
    assert json.loads(output.read_bytes())["error"]["code"] == "invalid_input"


def test_what_is_no_file_does_not_wait(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe without a writer and an endless device: the first is passed over in a folder."""
    os.mkfifo(tmp_path / "pipe.pdf")
    (tmp_path / "a.txt").write_text("text")
    assert main(["read", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip().endswith("text")
    for path in (tmp_path / "pipe.pdf", Path("/dev/zero")):
        assert main(["read", str(path)]) == 2
        assert path.name in capsys.readouterr().err
