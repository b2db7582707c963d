"""`sensorium transcribe` on a small random Whisper: text, JSON, times, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import family
import pytest
import soundfile
from sensorium.cli.main import main
from sensorium.cli.transcribe import text
from sensorium.pipelines.transcribe import Segment, Transcript

ROW = family.load_rows()["whisper"]


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family.save(ROW, tmp_path_factory.mktemp("models") / "whisper", max_target_positions=40)


@pytest.fixture
def sounds(tmp_path: Path) -> list[str]:
    """Two that the model takes, one that is too long, one that is none."""
    for number, samples in enumerate((12_000, 5000, 17_000)):
        soundfile.write(tmp_path / f"{number}.wav", family.make_media("audio", (samples,), number), 16_000)
    (tmp_path / "3.wav").write_bytes(b"no sound")
    return [str(tmp_path / f"{number}.wav") for number in range(4)]


def transcribe(whisper: Path, *words: str) -> int:
    return main(["transcribe", *words, "--model", str(whisper), "--device", "cpu"])


def test_one_sound_is_its_text(whisper: Path, sounds: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from sensorium import LLM

    assert transcribe(whisper, sounds[0], "--language", "German") == 0
    out, err = capsys.readouterr()
    (expected,) = LLM(whisper).transcribe(sounds[0], "de", use_tqdm=False)
    assert out == expected.text + "\n"
    assert err.count("\n") == int(expected.finish_reason == "length")  # a progress bar is for terminals


def test_json_is_an_object_a_line(whisper: Path, sounds: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Files that fail say so, the others are written down, and the exit code tells."""
    assert transcribe(whisper, *sounds, "--json", "--timestamps", "--task", "translate") == 2
    out, err = capsys.readouterr()
    found = [json.loads(line) for line in out.splitlines()]
    assert [one["file"] for one in found] == sounds
    assert [one["error"] is None for one in found] == [True, True, False, False]
    assert all(one["language"] in ROW.build.__globals__["LANGUAGES"] for one in found[:2])
    assert all(part.keys() == {"start", "end", "text"} for one in found[:2] for part in one["segments"])
    assert "at most 1 s" in found[2]["error"]["message"]
    assert [found[2]["error"][name] for name in ("code", "modality", "index")] == ["invalid_media", "audio", 0]
    assert f"sensorium: error: {sounds[2]}: audio 0: it lasts 1.06 s" in err


def test_several_are_told_apart(whisper: Path, sounds: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert transcribe(whisper, *sounds[:2], "--language", "en") == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == sounds[:2]


def test_times_are_a_line_each() -> None:
    parts = (Segment(0.0, 2.5, "Hello."), Segment(2.5, None, "And"))
    assert text(Transcript("", "en", parts, None, None)) == "[0.00 - 2.50] Hello.\n[2.50 - ] And"


def test_an_interrupt_prints_what_is_done_and_ends_at_once(whisper: Path, sounds: list[str]) -> None:
    """One answer is there and the engine is in the midst of a step of ten minutes; in a process of its own, which ends."""
    program = f"""
import os, signal, sys, threading, time
from sensorium.cli import main
from sensorium.engine.core import EngineCore
from sensorium.pipelines import tasks

real, step, ended, taken = tasks.as_completed, EngineCore.step, [], threading.Event()
def slow(self):
    if ended and self.scheduler.requests:
        taken.wait(60)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        time.sleep(600)
    outputs = step(self)
    ended.extend(output for output in outputs if output.finish_reason)
    return outputs
def as_completed(*rest):
    for one in real(*rest):
        yield one
        taken.set()
EngineCore.step, tasks.as_completed = slow, as_completed
sys.exit(main.main(["transcribe", *{sounds[:2] * 40!r}, "--model", {str(whisper)!r}, "--device", "cpu", "--language", "de"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (130, False), done.stderr
    assert done.stdout.count(f"{sounds[0]}: ") + done.stdout.count(f"{sounds[1]}: ") >= 1


@pytest.mark.parametrize(("words", "said"), [(("--language", "klingon"), "klingon"), (("--task", "sing"), "sing")])
def test_wrong_wishes(
    whisper: Path, sounds: list[str], words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert transcribe(whisper, sounds[0], *words) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("sensorium: error: ")
    assert said in err
    assert err.count("\n") == 1


def test_a_model_without_speech(sounds: list[str], checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert transcribe(checkpoint, sounds[0]) == 2
    assert "does not transcribe speech" in capsys.readouterr().err
