"""`sensorium chat` on a small random checkpoint: output and errors; what the answer says is not judged."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from PIL import Image
from sensorium.cli.main import main
from sensorium.cli.ocr import SHIPPED_MODEL
from sensorium.engine.worker.model_runner import ModelRunner
from sensorium.processors.elements.element import Element
from sensorium.processors.elements.marked_text import MarkedText


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "image.png"
    Image.effect_noise((90, 70), 60).convert("RGB").save(path)
    return path


def chat(checkpoint: Path, *words: str) -> int:
    return main(["chat", "--model", str(checkpoint), "--max-tokens", "6", "--temperature", "0", "--device", "cpu", *words])


def test_answer_equals_that_of_llm_chat(checkpoint: Path, image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sensorium import LLM, SamplingParams

    assert chat(checkpoint, "--image", str(image), "--image", str(image), "What is it?") == 0
    shown = capsys.readouterr().out
    parts = [{"type": "image", "image": image}] * 2
    content = [*parts, {"type": "text", "text": "What is it?"}]
    llm = LLM(str(checkpoint), device="cpu")
    (answer,) = llm.chat([{"role": "user", "content": content}], SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
    assert answer.error is None
    assert shown == answer.outputs[0].text + "\n"


def test_text_only(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(checkpoint, "Hello") == 0
    assert capsys.readouterr().out.endswith("\n")


def test_explain(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(checkpoint, "Hello", "--explain") == 0
    shown = capsys.readouterr().err
    assert re.search(r"^answer +\d tokens, 0 of them without a step of their own$", shown, re.M)
    assert "drafts" in shown


def test_quantization(capsys: pytest.CaptureFixture[str]) -> None:
    images = ["--image", str(SHIPPED_MODEL.parent / "media" / "line1.png")]
    for method in ("int8", '{"method": "int4", "group_size": 64}'):
        assert chat(SHIPPED_MODEL, *images, "--quantization", method, "Read the text.") == 0
        assert capsys.readouterr().out == "DMTYZ\n"
    assert chat(SHIPPED_MODEL, "--quantization", "int5", "Read.") == 2
    assert "--quantization 'int5' must be one of" in capsys.readouterr().err


def test_elements_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    elements = (Element("cup", box=(10.0, 20.0, 60.0, 50.0)), Element("cup", points=((80.0, 20.0),)))
    monkeypatch.setattr(MarkedText, "elements", lambda self: elements)
    source, out = SHIPPED_MODEL.parent / "media" / "line1.png", tmp_path / "out.png"
    words = ["chat", "--model", str(SHIPPED_MODEL), "--max-tokens", "2", "--draw", str(out), "Read the text."]
    assert main([*words, "--image", str(source), "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["elements"][0]["box"] == [10.0, 20.0, 60.0, 50.0]
    assert "no boxes or points" not in said.err
    with Image.open(source) as before, Image.open(out) as after:
        assert after.size == before.size
        color = after.getpixel((10, 30))
        assert color != before.convert("RGB").getpixel((10, 30))
        assert after.getpixel((80, 20)) == color
    monkeypatch.setattr(MarkedText, "elements", lambda self: ())
    assert main([*words, "--image", str(source)]) == 0
    assert "no boxes or points" in capsys.readouterr().err
    assert main(words) == 2
    assert "--draw needs one --image and a question" in capsys.readouterr().err
    assert main([*words[:6], "out.txt", "--image", str(source), "hello"]) == 2
    assert "is not an image file" in capsys.readouterr().err


def test_warning_for_a_truncated_answer(capsys: pytest.CaptureFixture[str]) -> None:
    image = str(SHIPPED_MODEL.parent / "media" / "line1.png")
    words = ["chat", "--model", str(SHIPPED_MODEL), "--image", image, "Read the text.", "--temperature", "0"]
    assert main(words) == 0
    assert not capsys.readouterr().err
    assert main([*words, "--max-tokens", "2"]) == 0
    assert capsys.readouterr().err == ("sensorium: warning: the answer was cut off at the token limit; raise --max-tokens\n")


def test_internal_errors_exit_with_1(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:

    def broken(*_: object) -> None:
        raise IndexError("gone")

    monkeypatch.setattr(ModelRunner, "execute_model", broken)
    assert chat(checkpoint, "Hello") == 1
    assert capsys.readouterr().err.startswith("sensorium: error: internal error in a step: IndexError: gone; report it")
    assert main(["ocr", str(SHIPPED_MODEL.parent / "media" / "line1.png")]) == 1


def test_outside_the_main_thread(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(chat, checkpoint, "Hello").result() == 0
    assert not capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"not an image"])
def test_broken_image(checkpoint: Path, tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.png"
    path.write_bytes(content)
    assert chat(checkpoint, "--image", str(path), "What is it?") == 2
    line = capsys.readouterr().err
    assert line.startswith(f"sensorium: error: {path}: it is ")
    assert line.count("\n") == 1


def test_the_file_at_fault_is_named(
    checkpoint: Path, image: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = image.with_name("cut\n.png")
    cut.write_bytes(image.read_bytes()[:500])
    assert chat(checkpoint, "--image", str(image), "--image", str(cut), "What is it?") == 2
    name = str(cut).replace("\n", "\\n")
    reason = "it is broken or cut off (image file is truncated); download or save it again"
    assert capsys.readouterr().err == f"sensorium: error: {name}: {reason}\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("What is it?\nAnd now?\n"))
    assert chat(checkpoint, "--video", str(image)) == 2
    assert capsys.readouterr().err.count(f"sensorium: error: {image}: it is an image, not in a supported video format") == 2


def test_missing_image(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(checkpoint, "--image", str(tmp_path / "none.png"), "What is it?") == 2
    line = capsys.readouterr().err
    assert line.startswith(f"sensorium: error: the file '{tmp_path / 'none.png'}' cannot be read")


def test_wrong_temperature(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(checkpoint, "--temperature", "-1", "Hello") == 2
    assert "temperature" in capsys.readouterr().err


def conversation(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, lines: str, *words: str) -> int:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    return chat(checkpoint, *words)


def test_a_conversation_keeps_the_cache(
    checkpoint: Path, image: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each line is a turn; the image belongs to the first one."""
    from sensorium import LLM, SamplingParams

    lines = "What is it?\n\nAnd why?\n/clear\nWhat is it?\n/exit\nnever asked\n"
    assert conversation(checkpoint, monkeypatch, lines, "--image", str(image), "--json", "--system", "Be brief.") == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(found) == 3
    assert found[1]["cached_tokens"] > found[0]["cached_tokens"] == 0
    llm, params = LLM(str(checkpoint), device="cpu"), SamplingParams(temperature=0, max_tokens=6)
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": found[0]["text"]},
        {"role": "user", "content": "And why?"},
    ]
    for length, one in ((2, found[0]), (4, found[1])):
        (output,) = llm.chat(talk[:length], params, use_tqdm=False)
        assert one["text"] == output.outputs[0].text
        assert one["prompt_tokens"] == len(output.prompt_token_ids)
    assert found[2]["prompt_tokens"] < found[0]["prompt_tokens"]  # the image was forgotten, too


def test_a_conversation_without_stdin(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert chat(Path("never-loaded")) == 2
    assert "stdin is closed" in capsys.readouterr().err


def test_a_conversation_without_a_line(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert chat(checkpoint) == 2
    assert capsys.readouterr().err == (
        "sensorium: error: stdin holds no text; give a question, or a conversation with one turn on each line\n"
    )


def test_lines_that_are_not_utf8(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\nHello\n"), "utf-8"))
    assert chat(checkpoint, "--json") == 0
    assert [json.loads(line)["error"] for line in capsys.readouterr().out.splitlines()] == [None, None]


def test_a_turn_that_fails_is_forgotten(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = f"Hello\n{'long ' * 600}\nHello\n"
    assert conversation(checkpoint, monkeypatch, lines, "--json", "--max-model-len", "512") == 2
    out, err = capsys.readouterr()
    codes = [json.loads(line)["error"] and json.loads(line)["error"]["code"] for line in out.splitlines()]
    assert codes == [None, "too_long", None]
    assert err.count("sensorium: error: ") == 1


def test_the_question_from_stdin(
    checkpoint: Path, image: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(checkpoint, "Hello", "--json") == 0
    asked = json.loads(capsys.readouterr().out)
    assert conversation(checkpoint, monkeypatch, "Hello", "-", "--json") == 0
    assert json.loads(capsys.readouterr().out) == asked
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(image.read_bytes())))
    assert chat(checkpoint, "--image", "-", "What is it?", "--json") == 0
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] > asked["prompt_tokens"]
    for words in (("--image", "-", "-"), ("--image", "-"), ("--image", "-", "--video", "-", "What?")):
        assert chat(checkpoint, *words) == 2
        assert "stdin can hold one input only" in capsys.readouterr().err


def test_chat_template(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    counts = []
    for words in ((), ("--chat-template", str(tmp_path / "own.jinja"))):
        assert chat(checkpoint, "Hello", "--json", *words) == 0
        counts.append(json.loads(capsys.readouterr().out)["prompt_tokens"])
    assert counts[0] > counts[1] + 5
    assert chat(checkpoint, "Hello", "--chat-template", "{% if") == 2
    assert "the chat template cannot be compiled" in capsys.readouterr().err


def test_interrupting_a_conversation_keeps_the_finished_answers() -> None:
    """Ctrl-C during the second answer. A finaliser may swallow one, so that a person would press the keys again."""
    program = f"""
import signal, sys, threading
from sensorium.cli import main
from sensorium.engine.core.engine_core import EngineCore

real, answered = EngineCore.step, []
def step(self):
    if answered and self.scheduler.requests:
        while True:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            threading.Event().wait(60)
    outputs = real(self)
    answered.extend(output for output in outputs.outputs if output.finish_reason)
    return outputs
EngineCore.step = step
sys.exit(main.main(["chat", "--model", {str(SHIPPED_MODEL)!r}, "--max-tokens", "4", "--device", "cpu", "--json"]))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, input="READ\nAGAIN\n", capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout.count("\n"), "Traceback" in done.stderr) == (130, 1, False), done.stderr
    assert json.loads(done.stdout)["error"] is None
