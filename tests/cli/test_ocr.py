"""`sensorium ocr` with the shipped model and images: text, JSON, exit codes."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tracemalloc
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image, ImageDraw, ImageFont
from sensorium.cli.main import main
from sensorium.cli.ocr import SHIPPED_MODEL, SHIPPED_READS, in_page_order
from sensorium.mm.media.policy import PdfFiles, PdfPage
from sensorium.pipelines import run
from sensorium.pipelines.files import images_and_pages

MEDIA = SHIPPED_MODEL.parent / "media"
LINES = [str(MEDIA / f"line{number}.png") for number in (1, 2, 3)]
URLS = [Path(LINES[0]).as_uri(), "data:image/png;base64," + b64encode(Path(LINES[0]).read_bytes()).decode()]
NOTE = f"sensorium: note: {SHIPPED_READS}\n"
ANSWERS = json.loads((MEDIA / "answers.json").read_text("utf-8"))


def test_text_of_one_image(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ocr", str(MEDIA / "receipt1.png"), "--question", "Read the receipt."]) == 0
    out, err = capsys.readouterr()
    assert out == ANSWERS["receipt1.png"]["answer"] + "\n"
    assert err == NOTE  # no progress bar: stderr is not a terminal


def test_several_in_one_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A broken image fails alone."""
    (tmp_path / "broken.png").write_bytes(b"no image")
    assert main(["ocr", LINES[0], str(tmp_path / "broken.png"), *LINES[1:]]) == 2
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == [f"{path}: {ANSWERS[Path(path).name]['answer']}" for path in LINES]
    assert f"sensorium: error: {tmp_path / 'broken.png'}: it is " in err


def test_pages_of_pdfs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A PDF in a folder, one on stdin, and a broken one, which fails alone."""
    first, *others = [Image.open(path).convert("RGB") for path in LINES]
    first.save(tmp_path / "lines.pdf", save_all=True, append_images=others, resolution=144.0, quality=95)
    (tmp_path / "zz.PDF").write_bytes(b"%PDF-1.7")
    first.save(tmp_path / "long.pdf", save_all=True, append_images=[first] * 512)
    assert main(["ocr", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    answers = [ANSWERS[Path(path).name]["answer"] for path in LINES]
    pages = [f"{tmp_path / 'lines.pdf'}#page={number}: {answer}" for number, answer in enumerate(answers, 1)]
    assert sorted(out.splitlines()) == sorted(pages)
    assert f"sensorium: error: {tmp_path / 'zz.PDF'}: the PDF cannot be read: it is broken" in err
    assert f"sensorium: error: {tmp_path / 'long.pdf'}: the PDF has 513 pages, the limit is 512" in err


@pytest.mark.full
def test_a_local_pdf_is_read_once_for_all_its_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = [Image.open(path).convert("RGB") for path in LINES]
    first.save(tmp_path / "lines.pdf", save_all=True, append_images=others, resolution=144.0, quality=95)
    files, once = list[object](), PdfFiles.once
    monkeypatch.setattr(PdfFiles, "once", lambda *args: files.append(once(*args)) or files[-1])
    assert main(["ocr", str(tmp_path / "lines.pdf"), "--max-tokens", "2"]) == 0
    assert len(files) >= 3  # more if their text layers are read, too
    assert len(set(map(id, files))) == 1


def test_pages_of_a_document_come_in_order() -> None:
    names = ["-#page=1", "-#page=2", "-#page=3", "a.png", "b.pdf#page=1", "b.pdf#page=2", "b.pdf#page=1"]
    done = [2, 3, 6, 1, 5, 0, 4]
    assert [*in_page_order(names, ((index, names[index]) for index in done))] == [
        (index, names[index]) for index in (3, 0, 1, 2, 4, 5, 6)
    ]
    assert [*in_page_order(["a", "b#page=2", "b#page=3"], [(2, "z"), (1, "y"), (0, "x")])] == [(1, "y"), (2, "z"), (0, "x")]


def test_pdfs_are_not_kept_in_memory(tmp_path: Path) -> None:
    """Pages of local files are paths and numbers; those of stdin share its bytes."""
    noise = Image.effect_noise((1000, 1000), 100.0)
    for number in range(6):
        noise.save(tmp_path / f"{number}.pdf", save_all=True, append_images=[noise])
    size = (tmp_path / "0.pdf").stat().st_size
    assert size > 1 << 20
    tracemalloc.start()
    found = list(images_and_pages([str(tmp_path)]))
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < size
    assert [page.item for page in found] == [PdfPage(str(tmp_path / f"{i}.pdf"), page) for i in range(6) for page in (1, 2)]
    data = (tmp_path / "0.pdf").read_bytes()
    assert all(page.item.file is data for page in images_and_pages([data]))  # type: ignore[attr-defined]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ocr", *LINES, "--json", "--max-tokens", "16"]) == 0
    found = sorted((json.loads(line) for line in capsys.readouterr().out.splitlines()), key=lambda one: one["file"])
    assert all(-0.2 < one.pop("avg_logprob") <= 0 for one in found)
    rest = {"finish_reason": "stop", "doubt": None, "error": None}
    assert found == [{"file": path, "text": ANSWERS[Path(path).name]["answer"], **rest} for path in LINES]


def test_pages_that_the_model_cannot_read_give_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    invoice, draw = Image.new("RGB", (500, 300), "white"), "Invoice No. 4711, due 2024-05-31, net 14 days"
    for line in range(9):
        ImageDraw.Draw(invoice).text((20, 20 + 30 * line), draw[line:], font=ImageFont.load_default(16), fill="black")
    invoice.save(tmp_path / "invoice.png")
    assert main(["ocr", str(tmp_path / "invoice.png"), "--json", "--max-tokens", "200"]) == 0
    out, err = capsys.readouterr()
    fields = json.loads(out)
    assert fields["avg_logprob"] < -0.5
    assert fields["doubt"].startswith("the mean log probability of its tokens is -")
    assert err.startswith(NOTE)
    assert f"sensorium: warning: the text of {tmp_path / 'invoice.png'} is probably wrong: {fields['doubt']}" in err
    assert "4711" not in fields["text"]


def test_folders_patterns_and_stdin_are_inputs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders, patterns and stdin."""
    folder = tmp_path / "scans"
    folder.mkdir()
    for path in LINES:
        shutil.copy(path, folder)
    (folder / "notes.txt").write_text("no image")
    answers = [ANSWERS[Path(path).name]["answer"] for path in LINES]
    lines = [f"{folder / Path(path).name}: {text}" for path, text in zip(LINES, answers, strict=True)]
    for words in ([str(folder)], [str(folder / "*.png")], [str(tmp_path / "**" / "line?.png")]):
        assert main(["ocr", *words]) == 0
        assert sorted(capsys.readouterr().out.splitlines()) == lines
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(Path(LINES[0]).read_bytes())))
    assert main(["ocr", "-"]) == 0
    assert capsys.readouterr().out == f"{answers[0]}\n"
    (tmp_path / "empty").mkdir()
    for words, said in (
        (["-", "-"], "- is given twice"),
        ([str(tmp_path / "empty")], "holds no file of the kinds png, jpg"),
        ([str(tmp_path / "*.bmp")], "no file matches"),
    ):
        assert main(["ocr", *words]) == 2
        assert said in capsys.readouterr().err


def test_lines_are_printed_when_files_are_done(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown, real = [], run.as_completed

    def as_completed(*rest: object) -> Iterator[object]:
        for one in real(*rest):  # type: ignore[arg-type]
            yield one
            shown.append(capsys.readouterr().out)

    monkeypatch.setattr(run, "as_completed", as_completed)
    assert main(["ocr", *LINES]) == 0
    assert [text.count("\n") for text in shown] == [1, 1, 1]


def test_warning_for_a_truncated_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ocr", LINES[0], "--json", "--max-tokens", "1"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["finish_reason"] == "length"
    assert err == f"{NOTE}sensorium: warning: the text of {LINES[0]} was cut off at the token limit; raise --max-tokens\n"


def test_no_such_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ocr", "nothing.png"]) == 2
    assert "nothing.png" in capsys.readouterr().err


def test_llm_ocr_takes_every_form_of_image() -> None:
    from PIL import Image
    from sensorium import LLM, Media

    with Image.open(LINES[0]) as image:
        forms = [LINES[0], Path(LINES[0]), Path(LINES[0]).read_bytes(), image.convert("RGB"), *URLS, Media(LINES[0], "line")]
    llm = LLM(SHIPPED_MODEL)
    assert {page.text for page in llm.ocr([*forms, Media(None, "line")])} == {ANSWERS["line1.png"]["answer"]}
    assert [page.text for page in llm.ocr(forms[3], use_tqdm=False)] == [ANSWERS["line1.png"]["answer"]]
    whole, small = (llm.ocr(one)[0].output for one in (LINES[0], Media(LINES[0], max_pixels=3000)))
    assert small.items[0].num_tokens < whole.items[0].num_tokens


def test_data_urls_are_shortened_in_output(capsys: pytest.CaptureFixture[str]) -> None:
    broken = f"data:image/png;base64,{'A' * 400}"
    assert main(["ocr", *URLS, broken]) == 2
    out, err = capsys.readouterr()
    assert [line.rpartition(": ")[2] for line in out.splitlines()] == [ANSWERS["line1.png"]["answer"]] * 2
    assert err.startswith(f"{NOTE}sensorium: error: data:image/png;base64,AAAAAAAAAAAAAAAAAA...: ")
    assert "A" * 20 not in out + err
    assert main(["ocr", "A" * 100_000]) == 2
    assert len(capsys.readouterr().err) < 5000


def test_without_asserts_and_docstrings_and_with_warnings_as_errors() -> None:
    command = [sys.executable, "-OO", "-W", "error", "-m", "sensorium", "ocr", LINES[0]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, ANSWERS["line1.png"]["answer"] + "\n", NOTE)
