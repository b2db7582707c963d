"""Examples on the shipped model: each runs in a process of its own as users start it; errors are one line each."""

from __future__ import annotations

import ast
import functools
import re
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import family
import pytest
import soundfile
from PIL import Image
from sensorium import LLM

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "shared")
PACKAGES = {
    "openai_realtime": ("websockets",),
    "anthropic_messages": ("anthropic",),
    "pdf_text_layer": ("pypdfium2",),
    "read_documents": ("pypdfium2",),
}
"""Example -> what it needs beside the packages of the tests."""
Run = Callable[..., tuple[int, str, str]]


@functools.cache
def start(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run an example without arguments in an empty folder, as users start it. Each is run once."""
    script = FOLDER / f"{name}.py"
    return subprocess.run([sys.executable, str(script)], cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("empty")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run an example with arguments in this process, in `tmp_path`. Returns its exit code, stdout and stderr."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.chdir(tmp_path)

    def run_here(name: str, *words: str) -> tuple[int, str, str]:
        path, code = str(FOLDER / f"{name}.py"), 0
        monkeypatch.setattr(sys, "argv", [path, *words])
        capsys.readouterr()  # drop what the test's preparations printed
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, *capsys.readouterr()

    return run_here


def test_the_reward_of_reinforce_rises(empty: Path) -> None:
    done = start("reinforce", empty)
    rewards = [float(words.split()[3]) for words in done.stdout.splitlines()]
    assert rewards[-1] > rewards[0] + 0.02


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, empty: Path) -> None:
    for package in PACKAGES.get(name, ()):
        pytest.importorskip(package)
    done = start(name, empty)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "Traceback" not in done.stderr
    assert not list(empty.iterdir())


@pytest.mark.full
def test_drafts_save_steps_of_the_examples(empty: Path) -> None:
    """How many are verified depends on what steps cost on this machine, so the counts are not checked."""
    pytest.importorskip("pypdfium2")
    plain, drafted, *lines = start("pdf_text_layer", empty).stdout.splitlines()
    assert re.fullmatch(r"\d+ steps, 0 of 0 drafted tokens accepted", plain)
    assert re.fullmatch(r"\d+ steps, \d+ of \d+ drafted tokens accepted", drafted)
    assert [line.split()[0] for line in lines] == ["TOTAL", "COFFEE"]
    spoken = start("live_transcribe", empty).stdout.splitlines()[-1]
    assert re.fullmatch(r"\d+ steps; \d+ of \d+ drafted tokens were accepted, each of which saved one", spoken)
    assert len(start("custom_proposer", empty).stdout.splitlines()) == 2


def test_several_images_prints_both(empty: Path) -> None:
    out = start("several_images", empty).stdout
    assert "line1.png: " in out
    assert "line2.png: " in out


@pytest.mark.parametrize("name", ["one_image", "several_images", "video", "ocr", "embed_and_rank", "boxes"])
def test_each_kind_of_use_has_a_table_of_models(name: str) -> None:
    described = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text("utf-8"))) or ""
    rows = [line for line in described.splitlines() if line.startswith("| ")]
    assert rows[0].startswith("| model | ")
    models = [model for row in rows[1:] for model in row.split("|")[1].strip().split(", ")]
    assert len(models) >= 4
    assert all(re.fullmatch(r"[\w-]+/[\w.-]+", model) for model in models), models


def test_async_stream_prints_whole_lines(empty: Path) -> None:
    out = start("async_stream", empty).stdout
    for name in ("receipt1", "receipt2"):
        first, *lines = (line for line in out.splitlines() if line.startswith(name))
        assert "first token after" in first
        assert lines[-1].startswith(f"{name}: TOTAL ")


def test_tokens_are_joined_to_the_text(empty: Path) -> None:
    *tokens, joined, conversation = start("openai_tokenize", empty).stdout.splitlines()
    assert "".join(ast.literal_eval(line.partition(": ")[2]) for line in tokens) == "TOTAL 12.50"
    assert joined == "joined: 'TOTAL 12.50'"
    (count, limit) = map(int, re.fullmatch(r"as a conversation: (\d+) of (\d+) tokens", conversation).groups())
    assert len(tokens) < count < limit


def test_plans_of_images_are_those_of_python(empty: Path) -> None:
    media = sorted((FOLDER.parent / "assets" / "media").glob("receipt*.png"))
    llm = LLM(FOLDER.parent / "assets" / "tiny-vl", max_model_len=512)
    items = llm.plan({"multi_modal_data": {"image": [str(path) for path in media]}})
    expected = [
        f"{path.name}: {item.size[1]}x{item.size[0]} pixels, {item.num_tokens} tokens"
        for path, item in zip(media, items, strict=True)
    ]
    together = f"together: {sum(item.num_tokens for item in items)} tokens"
    assert start("openai_media_plan", empty).stdout.splitlines() == [*expected, together]


def test_folder_batch_with_a_broken_image(run: Run, tmp_path: Path) -> None:
    Image.new("RGB", (64, 32), "white").save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"broken")
    code, out, err = run("folder_batch", str(tmp_path))
    assert code == 2, err
    assert out.startswith("a.png: '")
    assert out.count("\n") == err.count("\n") == 1
    assert err.startswith("error: b.png: image 0: ")


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("several_images", ["text.png"], "image 0: it is not in a supported image format"),
        ("several_images", ["nothing.png"], "'nothing.png' cannot be read"),
        ("one_image", ["--image", "nothing.png"], "'nothing.png' cannot be read"),
        ("streaming", ["--image", "nothing.png"], "'nothing.png' cannot be read"),
        ("video", ["--video", "nothing.mp4"], "'nothing.mp4' cannot be read"),
        ("ocr", ["nothing.png"], "error: nothing.png: the file"),
        ("folder_batch", ["nothing"], "nothing is not a folder"),
        ("folder_batch", ["empty"], "there are no images in empty"),
        ("transcribe", ["nothing.flac"], "'nothing.flac' cannot be read"),
        ("transcribe", ["--model", "nowhere", "talk.flac"], "error: 'nowhere' is not a folder"),
        ("omni", ["--model", "nowhere"], "error: 'nowhere' is not a folder"),
        ("openai_chat", ["--image", "nothing.png"], "No such file or directory: 'nothing.png'"),
        ("openai_responses", ["--image", "nothing.png"], "nothing.png cannot be read"),
        ("openai_media_plan", ["nothing.png"], "nothing.png cannot be read"),
        ("openai_transcription", ["nothing.flac"], "nothing.flac cannot be read"),
        ("openai_realtime", ["nothing.flac"], "nothing.flac cannot be read"),
        ("embed_and_rank", ["text.png"], "text.png: image 0: it is not in a supported image format"),
    ],
)
def test_missing_or_broken_files(name: str, words: list[str], said: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "empty").mkdir()
    code, out, err = run(name, *words)
    assert code == 2
    assert not out
    assert said in err
    assert "Traceback" not in err


class Refusing(BaseHTTPRequestHandler):
    """Answers every request with an error."""

    def do_GET(self) -> None:
        body = b'{"error": {"message": "nothing is served here", "code": "invalid_input"}}'
        self.send_response(400)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name.startswith("openai_")])
def test_an_error_of_the_server_is_one_line(name: str, run: Run) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        code, out, err = run(name, "--url", f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert (code, out) == (1, "")
    assert "nothing is served here" in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_audio_that_soundfile_cannot_read(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_text("no audio")
    code, _, err = run("live_transcribe", "a.wav")
    assert code == 1
    assert err.startswith("error: Error opening ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["ocr", "embed_and_rank"])
def test_missing_image_beside_a_good_one(name: str, run: Run) -> None:
    code, out, err = run(name, str(FOLDER.parent / "assets" / "media" / "line1.png"), "nothing.png")
    assert code == 2
    assert out.startswith("line1.png: ")
    assert out.count("\n") == err.count("\n") == 1
    assert err.startswith("error: nothing.png: ")


def test_missing_audio_beside_a_good_one(run: Run, tmp_path: Path) -> None:
    family.save(family.load_rows()["whisper"], tmp_path / "whisper", max_target_positions=64)
    soundfile.write(tmp_path / "talk.flac", family.make_media("audio", (12_000,), 0), 16_000)
    code, out, err = run("transcribe", "--model", "whisper", "--language", "en", "talk.flac", "nothing.flac")
    assert code == 2, err
    assert out.startswith("talk.flac (")
    assert err.startswith("error: nothing.flac: the file 'nothing.flac' cannot be read")


@pytest.mark.parametrize("name", EXAMPLES)
def test_missing_model_is_a_one_line_error(name: str, run: Run) -> None:
    for package in PACKAGES.get(name, ()):
        pytest.importorskip(package)
    code, out, err = run(name, "--model", "nowhere")
    assert code == 2
    assert not out
    assert err.startswith("error: ")
    assert "nowhere" in err
    assert err.count("\n") == 1
