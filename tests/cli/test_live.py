"""`sensorium transcribe --live` on a small random Whisper: a pipe, a file, events as JSON, refused options."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import types
from itertools import pairwise
from pathlib import Path
from typing import Any

import family
import numpy as np
import pytest
import soundfile
from sensorium.cli import live
from sensorium.cli.main import main
from sensorium.pipelines.speech import speakers
from tone_speakers import NETWORKS, conversation

RATE = 16_000


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family.save(family.load_rows()["whisper"], tmp_path_factory.mktemp("models") / "whisper", max_target_positions=12)


@pytest.fixture
def pcm() -> bytes:
    bursts = [np.random.default_rng(seed).normal(0, 5000, RATE // 2) for seed in range(2)]
    silence = np.zeros(2 * RATE)
    samples = np.concatenate([silence, bursts[0], silence, bursts[1], silence])
    return samples.clip(-32768, 32767).astype("<i2").tobytes()


class Pipe:
    def __init__(self, data: bytes) -> None:
        self.buffer = io.BytesIO(data)

    def isatty(self) -> bool:
        return False


def transcribe(whisper: Path, *words: str) -> int:
    return main(["transcribe", "--live", *words, "--model", str(whisper), "--device", "cpu", "--language", "en"])


def test_a_pipe(whisper: Path, pcm: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", Pipe(pcm))
    assert transcribe(whisper, "-", "--json") == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kinds = [event["kind"] for event in events if event["kind"].startswith("speech")]
    assert kinds == ["speech_started", "speech_stopped"] * 2
    assert events[-1]["kind"] == "ended"
    assert events[-1]["end"] == 7.0
    monkeypatch.setattr(sys, "stdin", Pipe(pcm))
    assert transcribe(whisper, "-", "--rate", "8000", "--timestamps") == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("[") for line in lines if " - " in line)


def test_a_file_plays_at_its_speed(
    whisper: Path, pcm: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    soundfile.write(tmp_path / "talk.wav", np.frombuffer(pcm, "<i2"), RATE)
    slept: list[float] = []
    clock = types.SimpleNamespace(monotonic=lambda: 0.0, sleep=slept.append)
    monkeypatch.setattr(live, "time", clock)
    assert transcribe(whisper, str(tmp_path / "talk.wav"), "--format", "json") == 0
    assert slept[-1] == pytest.approx(7.0)
    assert all(0 < after - before <= 0.1 + 1e-6 for before, after in pairwise([0.0, *slept]))
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["reason"] == "finished"


def test_the_microphone(whisper: Path, pcm: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    assert transcribe(whisper) == 2
    assert "pip install sounddevice" in capsys.readouterr().err

    class Device(io.BytesIO):
        def read(self, count: int) -> Any:  # type: ignore[override]
            data = super().read(2 * count)
            if not data:
                raise OSError("the device is gone")
            return data, False

    module = types.SimpleNamespace(RawInputStream=lambda **_: Device(pcm))
    monkeypatch.setitem(sys.modules, "sounddevice", module)  # type: ignore[arg-type]
    assert transcribe(whisper, "--json") == 1
    out, err = capsys.readouterr()
    assert '"kind": "ended"' in out
    assert "the device is gone" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a.wav", "b.wav"], "--live takes one source, not 2"),
        (["-", "--format", "srt"], "--format is for files"),
        (["-", "--word-timestamps"], "--word-timestamps is for files"),
        (["-", "--beam-size", "2"], "--beam-size is for files"),
        (["-", "--max-line-count", "2"], "--max-line-count is for files"),
        (["-", "--max-line-width", "20"], "--max-line-width is for files"),
        (["nothing.wav"], "cannot be read"),
        (["-", "--rate", "10"], "sample rate is 10 Hz"),
        (["nothing.wav", "--rate", "8000"], "a file states its own rate"),
    ],
)
def test_refused(
    whisper: Path, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Pipe(b""))
    assert transcribe(whisper, *words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("start", [b"fLaC", b"OggS", b"RIFF", b"ID3\4"])
def test_an_encoded_pipe(
    whisper: Path, start: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Pipe(start + bytes(20_000)))
    assert transcribe(whisper, "-") == 2
    assert "takes raw samples" in capsys.readouterr().err


def test_a_pipe_may_break_samples() -> None:
    parts = iter([b"a", b"bc", b""])
    raw = types.SimpleNamespace(read=lambda size: next(parts))
    assert list(live._read_pcm(types.SimpleNamespace(raw=raw), 4)) == [b"ab", b"c"]


def test_interrupt_with_an_open_pipe() -> None:
    """The thread that reads stdin is still waiting when the command ends."""
    root = Path(live.__file__).parents[1]
    samples = soundfile.read(root / "assets" / "speech" / "alarm.flac", dtype="int16")[0]
    command = [sys.executable, "-m", "sensorium", "transcribe", "--live", "-", "--json", "--device", "cpu"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=root) as running:
        running.stdin.write(samples.astype("<i2").tobytes() + bytes(2 * RATE))
        running.stdin.flush()
        assert b"speech_started" in running.stdout.readline()
        running.send_signal(signal.SIGINT)
        lines, said = running.stdout.read().splitlines(), running.stderr.read()
        assert running.wait(60) == 0
    assert json.loads(lines[-1])["kind"] == "ended"
    assert any(json.loads(line)["kind"] == "final" for line in lines)
    assert b"Fatal" not in said


def test_speakers(whisper: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr(speakers, "load_speaker_networks", lambda folder: NETWORKS)
    pcm = (32767 * conversation(4.0, [(0.5, 3.5, 2)]).numpy()).astype("<i2").tobytes()
    monkeypatch.setattr(sys, "stdin", Pipe(pcm))
    assert transcribe(whisper, "-", "--no-vad", "--speakers", "1-2", "--json") == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {turn["speaker"] for event in events for turn in event["turns"] or ()} == {"SPEAKER_00"}
    assert {part["speaker"] for event in events for part in event["segments"] or ()} == {"SPEAKER_00"}
    clip = tmp_path / "ann.wav"
    soundfile.write(clip, conversation(3.0, [(0.2, 2.8, 2)]).numpy(), RATE)
    for words, start in (((), ""), (("--timestamps",), "[")):
        monkeypatch.setattr(sys, "stdin", Pipe(pcm))
        assert transcribe(whisper, "-", "--no-vad", "--speakers", "--known-speaker", f"Ann={clip}", *words) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines
        assert all("Ann: " in line and line.startswith(start or "Ann: ") for line in lines)


def test_files_are_needed_without_live(whisper: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["transcribe", "--model", str(whisper)]) == 2
    assert "name an audio file" in capsys.readouterr().err
    assert main(["transcribe", "--model", str(whisper), "--rate", "8000", "a.wav"]) == 2
    assert "--rate is for --live" in capsys.readouterr().err
