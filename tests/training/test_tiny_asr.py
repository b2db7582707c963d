"""The shipped speech model: transformers loads it and gives the same tokens, and the shipped clips are understood."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
from sensorium import LLM

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
MODEL, SPEECH = ROOT / "assets" / "tiny-asr", ROOT / "assets" / "speech"
ANSWERS = json.loads((SPEECH / "answers.json").read_text("utf-8"))

from training.asr import evaluate, speech  # noqa: E402
from training.asr.grammar import words  # noqa: E402
from training.asr.tokens import END, NO_TIMES, START, token  # noqa: E402


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(MODEL)


@pytest.fixture(scope="module")
def oracle() -> evaluate.Transformers:
    return evaluate.Transformers(MODEL)


@pytest.mark.parametrize("clip", evaluate.shipped(), ids=list(ANSWERS))
def test_same_tokens_as_transformers(clip: speech.Clip, llm: LLM, oracle: evaluate.Transformers) -> None:
    (heard,) = llm.transcribe((clip.samples, speech.RATE), vad=False, temperature=0.0)
    assert heard.error is None
    control = set(map(token, (START, NO_TIMES, END)))  # transformers returns the first two, the engine the last
    mine, theirs = ([t for t in ids if t not in control] for ids in (heard.output.outputs[0].token_ids, oracle.tokens(clip)))
    assert mine == theirs
    assert mine


def test_shipped_clips_are_understood(llm: LLM) -> None:
    found = llm.transcribe([SPEECH / name for name in ANSWERS], timestamps=True)
    assert {name: words(one.text) for name, one in zip(ANSWERS, found, strict=True)} == {
        name: words(text) for name, text in ANSWERS.items()
    }
    for one, name in zip(found, ANSWERS, strict=True):
        (segment,) = one.segments or ()
        assert segment.start == pytest.approx(0.25, abs=0.2)
        assert segment.end == pytest.approx(soundfile.info(SPEECH / name).duration - 0.25, abs=0.3)


def test_silence_and_noise_have_no_text(llm: LLM) -> None:
    noise = np.random.default_rng(0).normal(0, 0.01, 48_000).astype(np.float32)
    found = llm.transcribe([np.zeros(32_000, np.float32), noise], vad=False)
    assert [one.text for one in found] == ["", ""]


@pytest.mark.skipif(speech.espeak() is None, reason="espeak-ng is not installed")
def test_held_out_speech(llm: LLM) -> None:
    clips = evaluate.held_out("clean", 8)
    assert [one.text for one in clips] == [one.text for one in evaluate.held_out("clean", 8)]
    assert evaluate.score(clips, evaluate.ours(llm, clips)) < 0.3


def test_checkpoint_is_small_and_complete() -> None:
    assert sum(file.stat().st_size for file in MODEL.iterdir()) <= 12 * 2**20
    assert {"config.json", "generation_config.json", "tokenizer.json", "README.md"} <= {file.name for file in MODEL.iterdir()}
