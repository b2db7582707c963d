"""tiny-asr's grammar, batches and trainer, with a hum in place of espeak-ng's speech."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sensorium import LLM
from sensorium.pipelines.speech.forced_alignment import CtcAligner

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from training.asr import ctc, dataset, evaluate, export, grammar, speech, tokens, train  # noqa: E402


def hum(text: str, voice: speech.Voice) -> np.ndarray:
    """Return 25 ms of a tone for each letter of the text."""
    t = np.arange(400 * len(text)) / speech.RATE
    return np.asarray(0.2 * np.sin(2 * np.pi * (80 + 4 * voice.pitch) * t), np.float32)


@pytest.fixture(autouse=True)
def without_espeak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech, "speak", hum)
    monkeypatch.setattr(dataset, "SHARD", 12)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_resumes_and_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()

    def run(module: object, *words: str) -> None:
        monkeypatch.setattr(sys, "argv", ["train", "--out", *words])
        module.main()  # type: ignore[attr-defined]

    def fit(minutes: float) -> dict[str, float]:
        run(train, str(tmp_path), "--minutes", str(minutes), "--batch", "2", "--data", str(tmp_path / "data"))
        return json.loads((tmp_path / "state.json").read_text())

    run(dataset, str(tmp_path / "data"), "--shards", "1", "0", "0")
    first = fit(0.01)
    second = fit(first["seconds"] / 60 + 0.02)
    torch.set_num_threads(threads)
    assert 0 < first["step"] < second["step"]
    export.write(tmp_path / "last.safetensors", tmp_path / "model")
    (heard,) = LLM(tmp_path / "model").transcribe(np.zeros(16_000, np.float32), vad=False, temperature=0.0)
    assert heard.error is None


def test_ctc_model_is_one_that_aligner_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(ctc, "DRAWN", 4)
    for minutes in ("0.01", "0.03"):
        monkeypatch.setattr(sys, "argv", ["ctc", "--out", str(tmp_path), "--minutes", minutes, "--batch", "8"])
        ctc.main()
    torch.set_num_threads(threads)
    assert json.loads((tmp_path / "state.json").read_text())["step"] > 1
    model = CtcAligner(tmp_path / "model", speech.RATE)._ctc
    assert model.log_probs(torch.randn(speech.RATE)).shape == (49, len(model.ids))  # as many frames as wav2vec 2.0
    assert (model.blank, model.stride, model.encode("It's")) == (0, 320, tokens.letters("it's"))


@pytest.mark.parametrize("stage", range(len(dataset.STAGES)))
def test_batches(stage: int, tmp_path: Path) -> None:
    rng, path = np.random.default_rng(stage), tmp_path / "shard.npz"
    dataset.write_shard(path, rng, dataset.STAGES[stage])
    samples = dataset.read_shard(path)
    assert len(samples) == 12
    batch = dataset.collate(samples, rng, full=stage == 2, previous=0.5, timed=0.5)
    assert batch.frames.shape[:2] == (12, 80)
    assert batch.frames.shape[2] % 2 == 0
    assert batch.frames.shape[2] == dataset.FRAMES or stage < 2
    assert batch.ids.shape == batch.labels.shape
    assert int(batch.counts.sum()) == len(batch.letters)
    start, end = tokens.token(tokens.START), tokens.token(tokens.END)
    for ids, labels in zip(batch.ids, batch.labels, strict=True):
        at = ids.tolist().index(start)
        assert (labels[:at] == dataset.IGNORE).all()  # the text before is given, not learned
        known = [
            (a, b) for a, b in zip(labels.tolist()[at:], ids.tolist()[at + 1 :], strict=False) if a not in (dataset.IGNORE, end)
        ]
        assert all(a in (b, tokens.token(tokens.NO_SPEECH)) for a, b in known)


def test_timestamps_of_two_utterances() -> None:
    clip = speech.Clip(np.zeros(1, np.float32), ((0.5, 1.24, "Left."), (2.0, 3.0, "Stop.")))
    text = tokens.tokenizer().decode(tokens.answer(clip, timed=True), skip_special_tokens=False)
    assert text == "<|0.50|> Left.<|1.24|><|2.00|> Stop.<|3.00|><|endoftext|>"


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "zero"), (19, "nineteen"), (21, "twenty one"), (300, "three hundred"), (405, "four hundred and five"),
        (2026, "two thousand and twenty six"), (70_100, "seventy thousand one hundred"),
    ],
)  # fmt: skip
def test_numbers(n: int, text: str) -> None:
    assert grammar.number(n) == text


@pytest.mark.parametrize("kind", grammar.KINDS)
def test_every_sentence_can_be_spelled(kind: str) -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        text = grammar.utterance(rng, kind)
        assert text[0].isupper()
        assert text[-1] in ".?"
        assert tokens.letters(text)
        assert tokens.tokenizer().decode(tokens.encode(f" {text}")) == f" {text}"


def test_word_error_rate() -> None:
    clips = [speech.Clip(np.zeros(1, np.float32), ((0, 1, text),)) for text in ("Turn left.", "Five o'clock.")]
    assert evaluate.score(clips, ["turn left", "five o'clock"]) == 0
    assert evaluate.score(clips, ["turn right", "five"]) == 0.5
    assert evaluate.score([speech.Clip(np.zeros(1, np.float32), ())] * 2, ["", "Five."]) == 0.5


def test_without_espeak_the_shipped_clips_are_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech, "espeak", lambda: None)
    (task,) = evaluate.tasks(1.0)
    assert "espeak-ng is not installed" in task.name
    assert len(task.samples) == 3
