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
from sensorium.cli.transcribe import boosted_phrase, text
from sensorium.engine.outputs import CompletionOutput, RequestOutput
from sensorium.pipelines.speech import speakers
from sensorium.pipelines.transcribe import Segment, Transcript
from tone_speakers import NETWORKS, conversation

ROW = family.load_rows()["whisper"]


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family.save(ROW, tmp_path_factory.mktemp("models") / "whisper", max_target_positions=40)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Write two valid audio files, one longer than a window, and one that is broken."""
    for number, samples in enumerate((12_000, 5000, 17_000)):
        soundfile.write(tmp_path / f"{number}.wav", family.make_media("audio", (samples,), number), 16_000)
    (tmp_path / "3.wav").write_bytes(b"no audio")
    return [str(tmp_path / f"{number}.wav") for number in range(4)]


def transcribe(whisper: Path, *words: str) -> int:
    return main(["transcribe", *words, "--no-vad", "--model", str(whisper), "--device", "cpu"])


def test_text_of_one_file(whisper: Path, files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from sensorium import LLM

    assert transcribe(whisper, files[0], "--language", "German") == 0
    out, err = capsys.readouterr()
    (expected,) = LLM(whisper).transcribe(files[0], "de", use_tqdm=False, vad=False)
    assert out == expected.text + "\n"
    warnings = (expected.finish_reason == "length") + (expected.doubt is not None)
    assert err.count("\n") == warnings  # no progress bar: stderr is not a terminal


def test_boosted_phrases(whisper: Path, files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    boost = ("--boost", "two five=20", "--boost", "E=x")
    assert transcribe(whisper, files[0], "--language", "de", "--beam-size", "3", "--max-tokens", "24", *boost) == 0
    assert "two five" in capsys.readouterr().out
    assert [boosted_phrase(text) for text in ("a=b=3", "E=x", "=2", "Ann")] == [("a=b", 3.0), "E=x", "=2", "Ann"]
    assert transcribe(whisper, files[0], "--boost", "Ann=nan") == 2


@pytest.mark.full
def test_doctor_misses_no_chat_template(whisper: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", str(whisper), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "none: transcribe needs none" in out
    assert "chat_template=" not in out


def test_json_is_one_object_per_line(whisper: Path, files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Failing files give an error and exit code 2; the others are transcribed."""
    assert transcribe(whisper, *files, "--json", "--timestamps", "--task", "translate") == 2
    out, err = capsys.readouterr()
    found = sorted((json.loads(line) for line in out.splitlines()), key=lambda one: one["file"])
    assert [one["file"] for one in found] == files
    assert [one["error"] is None for one in found] == [True, True, True, False]
    assert all(one["language"] in ROW.build.__globals__["LANGUAGES"] for one in found[:3])
    assert all(one["duration"] > 0 and one["speech_spans"] is None and "compression_ratio" in one for one in found[:3])
    assert all(
        part.keys() >= {"start", "end", "text", "id", "avg_logprob", "compression_ratio"}
        for one in found[:3]
        for part in one["segments"]
    )
    assert [found[3]["error"][name] for name in ("code", "modality", "index")] == ["invalid_media", "audio", 3]
    assert f"sensorium: error: {files[3]}: it is not in a supported audio format" in err


def test_a_file_that_is_cut_off_is_printed_with_an_error(
    whisper: Path, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Path(files[0]).read_bytes()
    Path(files[0]).write_bytes(whole[:16_044])
    assert transcribe(whisper, files[0], "--language", "en") == 2
    out, err = capsys.readouterr()
    assert out.strip()
    assert f"sensorium: error: {files[0]}: it is cut off (it has 16,044 of 24,044 bytes); download or export it again" in err


def test_lines_begin_with_the_file_name(whisper: Path, files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert transcribe(whisper, *files[:2], "--language", "en") == 0
    assert sorted(line.split(":")[0] for line in capsys.readouterr().out.splitlines()) == files[:2]


def test_max_tokens(whisper: Path, files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert transcribe(whisper, files[0], "--language", "de", "--max-tokens", "2", "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["finish_reason"] == "length"
    assert "was cut off at the token limit; raise --max-tokens" in err


def test_texts_that_are_probably_wrong() -> None:
    def heard(text: str, logprob: float) -> Transcript:
        answer = CompletionOutput(0, text, tuple(range(10)), None, 10 * logprob, "stop")
        return Transcript(text, "en", None, None, RequestOutput("0", None, (), (answer,), None, True))

    assert heard("1.5m de " * 27, -0.1).doubt == "it repeats itself: its compression ratio is 11.4, above 2.4"
    assert heard("A sentence.", -1.25).doubt == "the mean log probability of its tokens is -1.25, below -1"
    assert heard("A sentence that is not repeated, said quietly.", -0.4).doubt is None


def test_one_line_per_segment() -> None:
    parts = (Segment(0.0, 2.5, "Hello."), Segment(2.5, None, "And"))
    assert text(Transcript("", "en", parts, None, None)) == "[0.00 - 2.50] Hello.\n[2.50 - ] And"


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_signals_keep_finished_files_and_exit_at_once(whisper: Path, files: list[str], number: str, code: int) -> None:
    """End a child process after its first result, during a step that takes ten minutes."""
    program = f"""
import os, signal, sys, threading, time
from sensorium.cli import main
from sensorium.engine.core.engine_core import EngineCore
from sensorium.pipelines import run
from sensorium.pipelines.speech import options as speech

real, step, ended, taken = run.as_completed, EngineCore.step, [], threading.Event()
def slow(self):
    if ended and self.scheduler.requests:
        taken.wait()
        threading.Timer(0.2, os.kill, (os.getpid(), signal.{number})).start()
        time.sleep(600)
    outputs = step(self)
    ended.extend(output for output in outputs.outputs if output.finish_reason)
    return outputs
def as_completed(*rest, **options):
    for one in real(*rest, **options):
        yield one
        taken.set()
EngineCore.step, run.as_completed = slow, as_completed
speech.TEMPERATURES = (0.0,)  # so that a file has one request
options = ["--device", "cpu", "--language", "de", "--no-vad"]
sys.exit(main.main(["transcribe", *{files[:2] * 40!r}, "--model", {str(whisper)!r}, *options]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert done.stdout.count(f"{files[0]}: ") + done.stdout.count(f"{files[1]}: ") >= 1


def test_wrong_language(whisper: Path, files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert transcribe(whisper, files[0], "--language", "klingon") == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("sensorium: error: ")
    assert "klingon" in err
    assert err.count("\n") == 1


def test_model_that_does_not_transcribe(files: list[str], checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert transcribe(checkpoint, files[0]) == 2
    assert "does not transcribe speech; use `sensorium chat`" in capsys.readouterr().err


def test_a_task_that_the_model_lacks_is_named_by_its_flag(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert transcribe(Path("tiny-asr"), files[0], "--task", "translate") == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("sensorium: error: --task translate is not supported")


@pytest.mark.parametrize(
    ("words", "said"), [(("--format", "srt"), "takes one file, not 4"), (("--json", "--format", "md"), "exclude")]
)
def test_formats_that_cannot_be_printed(
    whisper: Path, files: list[str], words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert transcribe(whisper, *files, *words) == 2
    assert said in capsys.readouterr().err


def test_one_file_per_input_and_resume(
    whisper: Path, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    lines = ("--max-line-width", "20", "--max-line-count", "2")
    options = ("--language", "de", "--format", "srt", "--output-dir", str(out), *lines)
    assert transcribe(whisper, *files, *options) == 2
    shown = capsys.readouterr().out
    assert sorted(one.name for one in out.iterdir()) == [".sensorium-transcribe.json", "0.srt", "1.srt", "2.srt"]
    assert f"{files[0]}: {out / '0.srt'}" in shown
    written = (out / "0.srt").read_text()
    assert " --> " in written
    (out / "0.srt").write_text("kept")
    (out / "1.srt").unlink()
    assert transcribe(whisper, *files[:3], *options, "--resume") == 0
    assert str(out / "1.srt") in capsys.readouterr().out
    assert (out / "0.srt").read_text() == "kept"
    assert (out / "1.srt").exists()
    assert transcribe(whisper, *files[:3], *options, "--resume") == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.endswith("an earlier run has finished all files with these options\n")
    assert transcribe(whisper, files[0], *options, "--resume", "--task", "translate") == 0
    assert (out / "0.srt").read_text() != "kept"


def test_words_in_json(whisper: Path, files: list[str], tmp_path: Path) -> None:
    options = ("--language", "de", "--format", "json", "--word-timestamps", "--output-dir", str(tmp_path / "out"))
    assert transcribe(whisper, files[0], *options) == 0
    (part, *_) = json.loads((tmp_path / "out" / "0.json").read_text())["segments"]
    assert part["words"][0].keys() == {"start", "end", "word", "probability", "speaker", "other_speakers"}
    assert part["speaker"] is None


def test_speakers(whisper: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speakers, "load_speaker_networks", lambda folder: NETWORKS)
    talk, clip = tmp_path / "talk.wav", tmp_path / "ann=1.wav"
    soundfile.write(talk, conversation(20.0, [(1.0, 5.0, 0), (7.0, 12.0, 1)]).numpy(), 16_000)
    soundfile.write(clip, conversation(3.0, [(0.5, 2.5, 1)]).numpy(), 16_000)
    options = (str(talk), "--language", "en", "--speakers", "1-3", "--known-speaker", f"Ann={clip}")
    assert transcribe(whisper, *options, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [turn["speaker"] for turn in found["turns"]] == ["SPEAKER_00", "Ann"]
    assert {part["speaker"] for part in found["segments"]} <= {"SPEAKER_00", "Ann"}
    assert all(word["speaker"] == part["speaker"] for part in found["segments"] for word in part["words"])
    assert transcribe(whisper, *options, "--format", "rttm") == 0
    assert [line.split()[7] for line in capsys.readouterr().out.splitlines()] == ["SPEAKER_00", "Ann"]
    assert transcribe(whisper, *options, "--format", "diarized_json", "--output-dir", str(tmp_path / "out")) == 0
    parts = json.loads((tmp_path / "out" / "talk.json").read_text())["segments"]
    assert [part["text"] for part in parts] == [part["text"] for part in found["segments"]]
    capsys.readouterr()
    assert transcribe(whisper, *options) == 0
    assert capsys.readouterr().out.startswith((f"{found['segments'][0]['speaker']}: ", "\n"))


def test_a_file_after_speakers_is_named(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["transcribe", "--speakers", files[0]]) == 2
    assert "--speakers" in capsys.readouterr().err


def test_lines_of_speakers() -> None:
    parts = (
        Segment(0.0, 1.0, "a", speaker="Ann"),
        Segment(1.0, 2.0, "b", speaker="Ann"),
        Segment(2.0, 3.0, "c", speaker="Bob"),
    )
    output = RequestOutput("0", None, [], [CompletionOutput(0, "", [], finish_reason="stop")])
    found = Transcript("a b c", "en", parts, None, output, turns=())
    assert text(found, False) == "Ann: a b\nBob: c"
    assert text(found).splitlines()[0] == "[0.00 - 1.00] Ann: a"


@pytest.mark.parametrize(
    "options",
    [
        ("--format", "rttm"),
        ("--format", "diarized_json"),
        ("--speakers", "two"),
        ("--speakers", "3-2"),
        ("--speakers", "--known-speaker", "Ann"),
        ("--speakers", "--known-speaker", "=a.wav"),
        ("--known-speaker", "Ann=a.wav"),
        ("--channel", "each", "--speakers", "2"),
        ("--speakers", "--speaker-model", "/nowhere"),
    ],
)
def test_wrong_options_of_speakers(
    whisper: Path, files: list[str], capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    assert transcribe(whisper, files[0], *options) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "--" in err


def test_outputs_that_cannot_be_written(
    whisper: Path, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "0.wav").write_bytes(b"")
    for words, said in (
        ((str(tmp_path / "b" / "0.wav"), "--output-dir", str(tmp_path / "out")), "would both be written to 0.txt"),
        (("--output-dir", files[0]), "cannot be created"),
        (("--resume",), "--resume needs --output-dir"),
    ):
        assert transcribe(whisper, files[0], *words) == 2
        assert said in capsys.readouterr().err
