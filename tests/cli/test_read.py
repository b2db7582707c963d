"""`sensorium read`: ways of pages, outputs, typed failures, and runs that are killed or share a folder."""

from __future__ import annotations

import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from pdf_files import encrypted_pdf, pdf_of, stream, text_pdf
from PIL import Image, ImageDraw
from sensorium.cli.main import main
from sensorium.cli.ocr import SHIPPED_MODEL
from sensorium.mm.media.page_facts import page_facts, page_pixels
from sensorium.mm.media.policy import MediaPolicy
from sensorium.pipelines.documents import output, readers
from sensorium.pipelines.documents.manifest import NAME
from tqdm import tqdm
from waiting import wait_until

pytest.importorskip("pypdfium2")
HELPER = Path(__file__).parents[1] / "helpers" / "interrupted_reads.py"
LINE = SHIPPED_MODEL.parent / "media" / "line1.png"
NO_PAGES = pdf_of({1: "<</Type/Catalog/Pages 2 0 R>>", 2: "<</Type/Pages/Kids[]/Count 0>>"})


@pytest.fixture(autouse=True)
def no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the text layers are read, whatever is installed."""
    monkeypatch.setattr(readers, "find_spec", lambda name: None)
    monkeypatch.setattr(readers, "is_installed", lambda: False)


@pytest.fixture
def costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of costs, which is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sensorium" / "documents" / "costs.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a document of several pages, a scan, and files that cannot be opened."""
    folder = tmp_path / "in"
    folder.mkdir()
    pages = [[f"# Chapter {number}", f"This is the text of page {number}, which is not a scan."] for number in range(1, 9)]
    pages[3] = []
    (folder / "book.pdf").write_bytes(text_pdf(pages))
    (folder / "hidden.pdf").write_bytes(text_pdf([["An earlier recognition wrote this text."]], text_mode=3))
    scan = Image.new("L", (400, 200), 255)
    ImageDraw.Draw(scan).text((30, 40), "Words of a scan", fill=0, font_size=24)
    scan.save(folder / "scan.tiff", save_all=True, append_images=[Image.new("L", (400, 200), 255), scan])
    (folder / "broken.pdf").write_bytes(b"%PDF-1.7")
    (folder / "empty.pdf").write_bytes(NO_PAGES)
    (folder / "locked.pdf").write_bytes(encrypted_pdf(b"secret"))
    (folder / "large.pdf").write_bytes(text_pdf([["a"]] * 40))
    (folder / "picture.png").write_bytes(b"no picture")
    return folder


def outputs(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder, without the manifest."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if not file.name.startswith(NAME)}


def test_text_files_are_read_by_their_content_unless_their_name_says_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "a.md").write_text("# Title\n\n| a | b |\n|---|---|\n| 1 | 2 |\n", "utf-16")
    (folder / "b.txt").write_bytes("Größe\n\n- eins\n\f".encode("latin-1") + b"zwei")
    (folder / "c.txt").write_bytes("Привет, мир".encode("koi8-r"))
    (folder / "d.png").write_text("404 not found")
    assert main(["read", str(folder), "--output-dir", str(tmp_path / "out"), "--format", "json"]) == 2
    documents = {name: json.loads(data) for name, data in outputs(tmp_path / "out").items()}
    assert [block["kind"] for block in documents["a.json"]["pages"][0]["blocks"]] == ["heading", "table"]
    first, second = documents["b.json"]["pages"]
    assert [block["text"] for page in (first, second) for block in page["blocks"]] == ["Größe", "- eins", "zwei"]
    assert first["doubt"]
    assert [documents[name]["error"]["code"] for name in ("c.json", "d.json")] == ["unsupported", "invalid_media"]
    capsys.readouterr()
    assert main(["read", str(folder / "b.txt"), "--max-pages", "1"]) == 2
    assert "max-pages" in capsys.readouterr().err
    assert main(["read", str(folder / "a.md"), "--format", "pdf", "--output-dir", str(tmp_path / "pdf")]) == 2


def test_each_page_is_read_in_the_cheapest_way(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["read", str(folder), "--max-pages", "30", "--output-dir", str(tmp_path / "out"), "--format", "json"]
    assert main(words) == 2
    err = capsys.readouterr().err
    documents = {name: json.loads(data) for name, data in outputs(tmp_path / "out").items()}
    assert documents.keys() == {f"{file.stem}.json" for file in folder.iterdir()}
    book = documents["book.json"]
    assert [page["way"] for page in book["pages"]] == ["text_layer"] * 3 + ["blank"] + ["text_layer"] * 4
    assert [page["page"] for page in book["pages"]] == list(range(1, 9))
    first, second = book["pages"][0]["blocks"]
    assert (first["kind"], first["level"], first["text"]) == ("heading", 1, "Chapter 1")
    assert (second["kind"], second["source"]) == ("paragraph", "text_layer")
    assert second["box_pixels"] == pytest.approx([2 * side for side in second["box"]], abs=0.02)
    assert [page["way"] for page in documents["scan.json"]["pages"]] == ["unread", "blank", "unread"]
    (hidden,) = documents["hidden.json"]["pages"]
    assert (hidden["way"], hidden["blocks"][0]["text"]) == ("text_layer", "An earlier recognition wrote this text.")
    assert "earlier recognition" in hidden["reason"]
    expected = {
        "broken": ("invalid_media", "is broken"),
        "empty": ("invalid_media", "has no pages"),
        "locked": ("invalid_media", "is encrypted"),
        "large": ("over_limit", "has 40 pages, the limit is 30"),
    }
    for name, (code, message) in expected.items():
        document = documents[f"{name}.json"]
        assert (document["error"]["code"], document["pages"]) == (code, [])
        assert message in document["error"]["message"]
        assert f"sensorium: error: {folder / name}.pdf: " in err
    assert (documents["picture.json"]["error"]["code"], documents["picture.json"]["pages"]) == ("invalid_media", [])
    assert f"{folder / 'scan.tiff'}#page=3: it has no text layer, and nothing can read its picture; pip install" in err
    assert "large.pdf: it has 40 pages, the limit is 30; raise --max-pages" in err


def test_formats_on_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "two.pdf"
    path.write_bytes(text_pdf([["# Title *", "a text of the first page"], ["the second page"]]))
    assert main(["read", str(path)]) == 0
    markdown = "<!-- page 1 -->\n\n# Title \\*\n\na text of the first page\n\n<!-- page 2 -->\n\nthe second page\n"
    assert capsys.readouterr().out == markdown
    assert main(["read", str(path), "--format", "txt"]) == 0
    assert capsys.readouterr().out == "Title *\n\na text of the first page\n\fthe second page\n"
    assert main(["read", str(path), "--format", "html", "--pages", "2-"]) == 0
    out = capsys.readouterr().out
    assert '<section id="page-2" data-way="text_layer">' in out
    assert "first page" not in out
    assert main(["read", str(path), "--pages", "7-9"]) == 2
    assert "it has 2 pages, and --pages '7-9' names none of them" in capsys.readouterr().err
    for pages in ("", "3-1", "0", "a", "1,,2"):
        assert main(["read", str(path), "--pages", pages]) == 2
        assert "names no pages; give numbers from 1 and ranges" in capsys.readouterr().err


def test_the_plan_says_how_and_why(folder: Path, capsys: pytest.CaptureFixture[str], costs: Path) -> None:
    assert main(["read", str(folder / "book.pdf"), str(folder / "scan.tiff"), "--plan"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{folder / 'book.pdf'}#page=1: text_layer: its text layer of 45 characters can be trusted"
    assert lines[3] == f"{folder / 'book.pdf'}#page=4: blank: it shows nothing"
    assert lines[-1] == "7 text_layer, 2 blank, 2 unread"
    assert main(["read", str(folder / "book.pdf"), "--plan", "--model", "M", "--text-layer", "never"]) == 0
    assert capsys.readouterr().out.endswith("7 draft, 1 blank\ndraft by M was not measured on this machine yet\n")


def test_the_plan_estimates_seconds(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], costs: Path) -> None:
    plan = ["read", str(folder / "book.pdf"), str(LINE), "--plan", "--model", str(SHIPPED_MODEL)]
    assert main(plan[:-2]) == 0
    assert "measured" not in capsys.readouterr().out
    assert main([word for word in plan if word != "--plan"]) == 0
    kept = json.loads(costs.read_text())["costs"]
    assert {name: pages for name, (_, pages) in kept.items()} == {"inspected": 9, "reading tiny-vl": 1}
    costs.write_text(json.dumps({"costs": {"inspected": [18, 9], "reading tiny-vl": [300, 2], "draft tiny-vl": [40, 4]}}))
    capsys.readouterr()
    assert main(plan) == 0
    last = "\n7 text_layer, 1 blank, 1 reading\nabout 3 min, by earlier runs on this machine\n"
    assert capsys.readouterr().out.endswith(last)
    assert main([*plan, "--text-layer", "never"]) == 0
    assert "about 4 min, by" in capsys.readouterr().out
    assert main([*plan[:-1], "M"]) == 0
    out = capsys.readouterr().out
    assert "about 18 s without reading, by earlier runs" in out
    assert "reading by M was not measured" in out
    costs.write_text("broken")
    assert main(plan) == 0
    assert "about" not in capsys.readouterr().out


def test_stdin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text_pdf([["a page on stdin"]]))))
    assert main(["read", "-", "--format", "txt"]) == 0
    assert capsys.readouterr().out == "a page on stdin\n"


def test_progress_has_the_pages_that_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = list[tuple[int, int]]()

    class Bar(tqdm):  # type: ignore[type-arg]
        def update(self, n: float | None = 1) -> bool | None:
            self.n += n or 0
            shown.append((int(self.n), int(self.total or 0)))
            return None

    monkeypatch.setattr("tqdm.tqdm", Bar)
    (tmp_path / "a.pdf").write_bytes(text_pdf([["one"], ["two"], ["three"]]))
    (tmp_path / "b.pdf").write_bytes(text_pdf([["four"], ["five"]]))
    first, second = str(tmp_path / "a.pdf"), str(tmp_path / "b.pdf")
    options = ["--output-dir", str(tmp_path / "out"), "--resume"]
    assert main(["read", first, "--pages", "2", *options]) == 0
    assert main(["read", first, second, *options]) == 0
    assert shown == [(1, 1), (1, 2), (2, 2), (3, 4), (4, 4)]


def test_a_folder_is_gone_on_with_only_if_that_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.pdf").write_bytes(text_pdf([["one"], ["two"]]))
    words = ["read", str(tmp_path / "a.pdf"), "--output-dir", str(tmp_path / "out")]
    assert main(["read", str(tmp_path / "a.pdf"), "--resume"]) == 2
    assert "--resume needs --output-dir" in capsys.readouterr().err
    assert main(words) == 0
    before = outputs(tmp_path / "out")
    assert main(words) == 2
    assert "holds the records of an earlier run; add --resume" in capsys.readouterr().err
    (tmp_path / "out" / "a.md").unlink()
    assert main([*words, "--resume"]) == 0
    assert outputs(tmp_path / "out") == before
    assert main([*words, "--resume", "--format", "txt"]) == 0
    assert outputs(tmp_path / "out") == before | {"a.txt": b"one\n\ftwo\n"}
    (tmp_path / "a.pdf").write_bytes(text_pdf([["three"]]))
    assert main([*words, "--resume", "--format", "txt"]) == 0
    assert outputs(tmp_path / "out")["a.txt"] == b"three\n"


def test_a_file_that_no_run_wrote_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.pdf").write_bytes(text_pdf([["one"]]))
    (tmp_path / "report.md").write_text("written by hand")
    words = ["read", str(tmp_path / "report.pdf"), "--output-dir", str(tmp_path)]
    for more in ([], ["--resume"]):
        assert main([*words, *more]) == 2
        assert "report.md exists and would be overwritten; move it, or give another --output-dir" in capsys.readouterr().err
    assert (tmp_path / "report.md").read_text() == "written by hand"
    assert main([*words, "--format", "txt"]) == 0
    assert not (tmp_path / "report.txt").read_text().startswith("written")


def test_options_of_a_model_need_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (
        ["--question", "Read."], ["--max-tokens", "9"], ["--dtype", "float32"], ["--device", "cpu"],
        ["--quantization", "int8"], ["--revision", "main"], ["--offline"],
    ):  # fmt: skip
        assert main(["read", str(tmp_path / "a.pdf"), *flags]) == 2
        assert f"{flags[0]} is for the model that reads pages; give --model" in capsys.readouterr().err


@pytest.mark.parametrize("output_format", ["md", "json", "html"])
def test_a_name_that_is_not_utf8(tmp_path: Path, capfd: pytest.CaptureFixture[str], output_format: str) -> None:
    name = os.fsdecode(b"b\xff.pdf")
    (tmp_path / name).write_bytes(text_pdf([["one"]]))
    assert main(["read", str(tmp_path), "--format", output_format]) == 0
    assert "one" in capfd.readouterr().out
    assert main(["read", str(tmp_path), "--format", output_format, "--output-dir", str(tmp_path / "out")]) == 0
    assert "b\\udcff" in capfd.readouterr().out
    (output,) = (tmp_path / "out").glob(f"b*.{output_format}")
    assert "one" in output.read_text("utf-8")


def tree(folder: Path) -> set[str]:
    """Return the paths of the files in a folder and its subfolders, without the manifest."""
    paths = (file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    return {path for path in paths if not path.startswith(NAME)}


def test_outputs_of_subfolders_are_in_subfolders(tmp_path: Path) -> None:
    """The second run finds a file in a new subfolder, and takes no outputs of the first one for inputs."""
    folder, out = tmp_path / "in", tmp_path / "in" / "out"
    for name in ("a.pdf", "x/a.pdf", "x/a.tiff", "x/y/b.PDF", "x/y/c.jsonl", ".hidden/d.pdf", "z/.d.pdf"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text_pdf([[name]]))
    (folder / "x" / "loop").symlink_to(folder)
    words = ["read", str(folder), "--output-dir", str(out), "--resume"]
    assert main(words) == 0
    first = {"a.md", "x/a.pdf.md", "x/a.tiff.md", "x/y/b.md"}
    assert tree(out) == first
    assert "x/y/b.PDF" in (out / "x" / "y" / "b.md").read_text("utf-8")
    before = {name: (out / name).read_bytes() for name in first}
    (folder / "new").mkdir()
    (folder / "new" / "a.pdf").write_bytes(text_pdf([["one more"]]))
    (out / "x" / "y" / "b.md").unlink()
    assert main(words) == 0
    assert tree(out) == first | {"new/a.md"}
    assert {name: (out / name).read_bytes() for name in first} == before
    with closing(sqlite3.connect(out / NAME)) as base:
        assert base.execute("SELECT attempts FROM pages").fetchall() == [(1,)] * 5


def test_a_subfolder_that_cannot_be_listed_is_an_error_beside_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in" / "locked").mkdir(parents=True)
    (tmp_path / "in" / "a.pdf").write_bytes(text_pdf([["text"]]))
    scandir = os.scandir

    def scan(path: str | int) -> object:
        if str(path).endswith("/locked"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    assert main(["read", str(tmp_path / "in"), "--output-dir", str(tmp_path / "out"), "--format", "json"]) == 2
    assert "locked' cannot be listed (Permission denied)" in capsys.readouterr().err
    assert tree(tmp_path / "out") == {"a.json", "locked.json"}
    assert json.loads((tmp_path / "out" / "locked.json").read_text("utf-8"))["error"]["code"] == "invalid_media"
    assert main(["read", str(tmp_path / "in" / "locked")]) == 2
    assert "cannot be listed" in capsys.readouterr().err


def test_an_output_with_the_name_of_a_subfolder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in" / "a.md").mkdir(parents=True)
    for name in ("a.pdf", "a.md/b.pdf"):
        (tmp_path / "in" / name).write_bytes(text_pdf([["text"]]))
    assert main(["read", str(tmp_path / "in"), "--output-dir", str(tmp_path / "out")]) == 2
    assert "would both be written to a.md; rename one" in capsys.readouterr().err
    assert main(["read", str(tmp_path / "in"), "--output-dir", str(tmp_path / "out"), "--format", "txt"]) == 0
    assert tree(tmp_path / "out") == {"a.txt", "a.md/b.txt"}


@pytest.mark.parametrize("way", ["rights", "error"])
def test_a_folder_that_cannot_be_written_to_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    (tmp_path / "a.pdf").write_bytes(text_pdf([["text"]]))
    out = tmp_path / "out"
    out.mkdir(mode=0o500)
    if way == "error":

        def refuse(dir: Path) -> None:
            raise OSError(30, "Read-only file system")

        monkeypatch.setattr(output, "TemporaryFile", refuse)
    elif os.geteuid() == 0:
        pytest.skip("root may write into any folder")
    assert main(["read", str(tmp_path / "a.pdf"), "--output-dir", str(out)]) == 2
    reason = "Permission denied" if way == "rights" else "Read-only file system"
    assert f"no file can be written into the folder {out}: {reason}; change the folder's rights" in capsys.readouterr().err
    assert not list(out.iterdir())


def test_names_of_outputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.pdf", "b.pdf", "b.tiff", "in/a.pdf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text_pdf([["text"]]))
    assert main(["read", str(tmp_path / "*.*"), "--output-dir", str(tmp_path / "out")]) == 0
    assert outputs(tmp_path / "out").keys() == {"a.md", "b.pdf.md", "b.tiff.md"}
    files = [str(tmp_path / name) for name in ("a.pdf", "in/a.pdf")]
    assert main(["read", *files, "--output-dir", str(tmp_path / "other")]) == 2
    assert "would both be written to a.pdf.md" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kills", "steps", "num_pages"), [(6, 90, 40), (0, 0, 40), pytest.param(100, 180, 1500, marks=pytest.mark.full)]
)
def test_runs_that_are_killed_or_share_a_folder(folder: Path, tmp_path: Path, kills: int, steps: int, num_pages: int) -> None:
    """Pages are read again only if they were in work when a run was killed, and the outputs are those without kills.

    Without kills, two processes read at once: each page is read by one of them, and both end when all is done.
    """
    (folder / "large.pdf").write_bytes(text_pdf([["a"]] * num_pages))
    words = ["read", str(folder), "--output-dir", str(tmp_path / "undisturbed")]
    assert main(words) == 2
    command = [sys.executable, str(HELPER), *map(str, (2, kills, steps)), str(folder), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["codes"] == [-9] * kills + [2] * (1 if kills else 2)
    assert len(report["attempts"]) == 8 + 1 + 3 + num_pages
    assert sum(report["attempts"]) == len(report["attempts"]) + sum(report["in_work"])
    assert max(report["in_work"], default=0) <= 2 * 3  # two leases of three pages each
    assert any(report["in_work"]) == (kills > 0)
    assert outputs(tmp_path / "out") == outputs(tmp_path / "undisturbed")


def test_the_model_reads_what_the_text_layer_does_not_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.pdf").write_bytes(text_pdf([["a page with a text layer"]]))
    files, model = [str(tmp_path / "a.pdf"), str(LINE)], ["--model", str(SHIPPED_MODEL)]
    answers = json.loads((LINE.parent / "answers.json").read_text("utf-8"))
    assert main(["read", *files, *model, "--output-dir", str(tmp_path / "out"), "--format", "json"]) == 0
    text, line = (json.loads((tmp_path / "out" / name).read_text("utf-8")) for name in ("a.json", "line1.json"))
    assert text["pages"][0]["way"] == "text_layer"
    (page,) = line["pages"]
    assert (page["way"], page["reason"]) == ("reading", "it has no text layer")
    (block,) = page["blocks"]
    assert (block["text"], block["source"], block["model"]) == (answers["line1.png"]["answer"], "model", "tiny-vl")
    assert capsys.readouterr().err == ""


def test_searchable_pdfs(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, model = [str(folder / "book.pdf"), str(folder / "broken.pdf"), str(LINE)], ["--model", str(SHIPPED_MODEL)]
    answers = json.loads((LINE.parent / "answers.json").read_text("utf-8"))
    assert main(["read", *files, "--format", "pdf"]) == 2
    assert "--format pdf needs --output-dir" in capsys.readouterr().err
    assert main(["read", *files, *model, "--format", "pdf", "--output-dir", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("broken.pdf") == 1
    assert "broken.pdf" not in captured.out
    written = outputs(tmp_path / "out")
    assert written.keys() == {"book.pdf", "line1.pdf"}
    (line,) = page_facts(written["line1.pdf"], [1], MediaPolicy())
    assert (" ".join(part.text for part in line.lines), line.invisible) == (answers["line1.png"]["answer"], True)
    book = (folder / "book.pdf").read_bytes()
    assert page_facts(written["book.pdf"], [1, 2], MediaPolicy()) == page_facts(book, [1, 2], MediaPolicy())
    assert main(["read", *files, *model, "--format", "pdf", "--output-dir", str(tmp_path / "out"), "--resume"]) == 2
    assert outputs(tmp_path / "out") == written


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_counts_as_no_death(tmp_path: Path, number: signal.Signals, code: int) -> None:
    page = Image.open(LINE).convert("RGB")
    page.save(tmp_path / "scan.tiff", save_all=True, append_images=[page] * 60)
    words = ["read", str(tmp_path / "scan.tiff"), "--model", str(SHIPPED_MODEL), "--output-dir", str(tmp_path / "out")]
    process = subprocess.Popen([sys.executable, "-m", "sensorium", *words], stderr=subprocess.DEVNULL)

    def count(condition: str) -> int:
        with closing(sqlite3.connect(f"file:{tmp_path / 'out' / NAME}?mode=ro", uri=True, timeout=60)) as base:
            return int(base.execute(f"SELECT COUNT(*) FROM pages WHERE {condition}").fetchone()[0])

    wait_until(lambda: (tmp_path / "out" / NAME).exists() and has_table(tmp_path / "out" / NAME) and count("owner IS NOT NULL"))
    process.send_signal(number)
    assert process.wait() == code
    assert count("owner IS NOT NULL OR deaths > 0") == 0
    assert count("record IS NULL") > 0


def has_table(path: Path) -> bool:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=60)) as base:
        return base.execute("SELECT 1 FROM sqlite_master WHERE name='pages'").fetchone() is not None


def test_boxes_drawn_over_pages(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(folder / "book.pdf"), str(folder / "broken.pdf")]
    assert main(["read", *files, "--pages", "1", "--draw", str(tmp_path / "drawn")]) == 2
    assert [path.name for path in (tmp_path / "drawn").iterdir()] == ["book-0001.png"]
    drawn = Image.open(tmp_path / "drawn" / "book-0001.png")
    page = page_pixels((folder / "book.pdf").read_bytes(), 1, MediaPolicy()).numpy()
    assert drawn.size == page.shape[1::-1]
    changed = (np.asarray(drawn) != page).any(axis=2)
    assert 0 < changed.mean() < 0.2
    capsys.readouterr()
    (tmp_path / "file").write_text("")
    assert main(["read", files[0], "--draw", str(tmp_path / "file")]) == 2
    assert "--draw" in capsys.readouterr().err


def test_hostile_pdfs_end_with_a_page_that_says_why(tmp_path: Path) -> None:
    """A tree of pages in itself, a drawing in itself, a font that is missing, and a page that is too large."""
    page = "<</Type/Page/Parent 2 0 R/MediaBox[0 0 {0} {0}]/Contents 4 0 R/Resources<<{1}>>>>"
    root = {1: "<</Type/Catalog/Pages 2 0 R>>", 2: "<</Type/Pages/Kids[3 0 R]/Count 1>>"}
    drawing = "/Type/XObject/Subtype/Form/BBox[0 0 9 9]/Resources<</XObject<</X 5 0 R>>>>"
    files = {
        "pages": {1: root[1], 2: "<</Type/Pages/Kids[2 0 R]/Count 1>>"},
        "drawing": {**root, 3: page.format(200, "/XObject<</X 5 0 R>>"), 4: stream("", "/X Do"), 5: stream(drawing, "/X Do")},
        "font": {**root, 3: page.format(200, "/Font<<>>"), 4: stream("", "BT /F9 12 Tf 20 100 Td (missing font) Tj ET")},
        "large": {**root, 3: page.format(2_000_000, ""), 4: stream("", "0 0 9 9 re f")},
    }
    for name, objects in files.items():
        (tmp_path / f"{name}.pdf").write_bytes(pdf_of(objects))
    assert main(["read", str(tmp_path), "--output-dir", str(tmp_path / "out"), "--format", "json"]) == 2
    pages = {name: json.loads((tmp_path / "out" / f"{name}.json").read_text("utf-8"))["pages"][0] for name in files}
    assert {name: page["error"] and page["error"]["code"] for name, page in pages.items()} == {
        "pages": "invalid_input", "drawing": None, "font": None, "large": "over_limit",
    }  # fmt: skip
    assert [block["text"] for block in pages["font"]["blocks"]] == ["missing font"]
    assert pages["drawing"]["way"] == "blank"
