"""The benchmarks of words with a peer that is a few lines of Python: options, manifest, the peer's program and the tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks import word_errors, word_times

PEER = """
from types import SimpleNamespace as Part

class WhisperModel:
    def __init__(self, folder, **options):
        assert folder == "ct2"

    def transcribe(self, file, **options):
        words = [Part(start=0.5, end=1.04, word=" one"), Part(start=1.1, end=1.5, word=" two")]
        return [Part(text=" one two", words=words)], None
"""
ENTRIES = [
    {"file": "a.wav", "text": "One two.", "lang": "en", "duration": 2.0},
    {"file": "b.wav", "text": "Eins", "lang": "de", "duration": 2.0},
    {"file": "c.wav", "text": "", "lang": "", "duration": 40.0},
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "faster_whisper.py").write_text(PEER)
    (tmp_path / "manifest.jsonl").write_text("\n".join(map(json.dumps, ENTRIES)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["x", "model", str(tmp_path), "--peer", "ct2", "--peer-python", sys.executable])
    return tmp_path


def test_word_errors(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(word_errors, "ours", lambda model, files: [["one too", ""]] * 2)
    word_errors.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| 1 | sensorium | 2 | 1 | 50.00% | a.wav 1 |"
    assert lines[3] == "| 1 | faster-whisper | 2 | 2 | 100.00% | c.wav 2 |"
    assert len(lines) == 6


def test_word_times(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    times = [(0.5, 1.0, " one"), (1.2, 1.5, " two")]
    monkeypatch.setattr(word_times, "ours", lambda model, files: {str(folder / "a.wav"): times})
    monkeypatch.setattr(word_times, "transformers", lambda model, files: dict.fromkeys(files, times))
    word_times.main()
    *_, transformers, peer = capsys.readouterr().out.splitlines()
    assert transformers == "| transformers | 1 | 2 | 2 | 0 ms | 100% | 0 ms | 0 ms | 100% |"
    assert peer.startswith("| faster-whisper | 1 | 2 | 2 | 50 ms | 50% | 100 ms | 20 ms | 100% |")
