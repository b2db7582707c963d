"""`language="auto"`: a language for each window, which changes only if another is clearly likelier; files, batches and live."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import family
import numpy as np
import pytest
import torch
from family import RATE
from sensorium import LLM, SamplingParams
from sensorium.pipelines.speech import decode
from sensorium.pipelines.speech.decode import SpokenLanguage

SHORT = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def llm(whisper: Path) -> Iterator[LLM]:
    with LLM(whisper, max_num_seqs=4, batch_invariant=True) as llm:
        yield llm


def talk(parts: int = 7) -> tuple[np.ndarray, int]:
    """Sounds of different kinds with pauses between them."""
    draw, pause = np.random.default_rng(5), np.zeros(RATE * 5 // 2, np.float32)
    pieces = list[np.ndarray]()
    for number in range(parts):
        noise = draw.normal(0, 0.3, RATE).astype(np.float32)
        pieces += [family.make_media("audio", (RATE,), number) if number % 2 else noise.cumsum() / (20 + 40 * number), pause]
    return np.concatenate(pieces).astype(np.float32).clip(-1, 1), RATE


def everything(rate: int) -> Any:
    """Return a detector of speech that finds all that is not silent, in frames of 32 ms."""
    return lambda samples: (torch.nn.functional.pad(samples, (0, -len(samples) % 512)).view(-1, 512).abs().amax(1) > 0).float()


def hear(llm: LLM, items: object, language: str | None = "auto", **options: Any) -> list[Any]:
    defaults = {"vad": everything, "sampling_params": SHORT, "use_tqdm": False, "no_speech_threshold": None}
    return llm.transcribe(items, language, **defaults | options)


@pytest.mark.parametrize(
    ("before", "probabilities", "code"),
    [
        (None, {"de": 0.4, "en": 0.35}, "de"),
        ("en", {"de": 0.4, "en": 0.35}, "en"),
        ("en", {"de": 0.7, "en": 0.25}, "en"),
        ("en", {"de": 0.8, "en": 0.1}, "de"),
        ("fr", {"de": 0.4, "en": 0.35}, "de"),
    ],
)
def test_a_language_goes_on_unless_another_is_clearly_likelier(
    before: str | None, probabilities: dict[str, float], code: str
) -> None:
    language = SpokenLanguage(None)
    language.follow(before)
    assert language.code is None
    language.set_probabilities(list(probabilities), list(probabilities.values()))
    language.follow(before)
    assert (language.code, language.probability) == (code, probabilities[code])


def test_each_window_has_its_own_language(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_SWITCH", 0.0)
    samples, rate = talk()
    (found,) = hear(llm, (samples, rate), timestamps="segment")
    assert found.error is None
    assert len(found.windows) >= 7
    for window in found.windows:
        part = samples[round(window.start * rate) : round(window.end * rate)]
        (alone,) = hear(llm, (part, rate), None, vad=False, timestamps="segment")
        assert (window.language, window.text) == (alone.language, alone.text)
    languages = [window.language for window in found.windows if window.text]
    assert len(set(languages)) > 1
    spans = [(span.start, span.end, span.language) for span in found.languages]
    assert [code for _, _, code in spans] == [languages[0], *(b for a, b in pairwise(languages) if a != b)]
    assert found.to_dict()["languages"][0] == {"start": spans[0][0], "end": spans[0][1], "language": spans[0][2]}
    for segment in found.segments:
        window = next(one for one in found.windows if one.start <= segment.start < one.end)
        assert segment.language == window.language
    assert found.language in languages


def test_windows_follow_each_other(llm: LLM) -> None:
    """With the usual rule, alone, in a batch, and one after the other."""
    items = [talk(), talk(3)]
    together = hear(llm, items)
    for item, one in zip(items, together, strict=True):
        (alone,), (sequential,) = hear(llm, item), hear(llm, item, sequential=True)
        assert [window.language for window in alone.windows] == [window.language for window in one.windows]
        assert alone.text == one.text
        assert sequential.error is None
    (once,) = hear(llm, items[0], None)
    assert {window.language for window in once.windows} == {once.language}
    assert [span.language for span in once.languages] == [once.language]


def test_a_live_stream_follows_the_language(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_SWITCH", 0.0)
    samples, rate = talk()
    options = {"vad": everything, "sampling_params": SHORT, "no_speech_threshold": None}
    with llm.live_audio(rate, language="auto", **options) as session:
        for start in range(0, len(samples), 8000):
            session.push(samples[start : start + 8000])
        session.finish()
        finals = [event for event in session.events() if event.kind == "final"]
    assert all(event.error is None and event.language is not None for event in finals)
    assert len({event.language for event in finals}) > 1


def test_models_of_one_language_and_those_that_cannot_detect(rows: Any, tmp_path: Path) -> None:
    english, cohere = (rows[name] for name in ("moonshine", "cohere_asr"))
    with LLM(family.save(english, tmp_path / "english"), max_num_seqs=2) as llm:
        found, usual = (llm.transcribe(talk(2), name, sampling_params=SHORT, vad=False)[0] for name in ("auto", None))
        assert (found.error, found.text, found.language) == (None, usual.text, usual.language)
    with LLM(family.save(cohere, tmp_path / "cohere"), max_num_seqs=2) as llm:
        (found,) = llm.transcribe(talk(2), "auto", sampling_params=SHORT, vad=False, use_tqdm=False)
        assert found.language == "en", "as with None, this model assumes English"


@pytest.fixture(scope="module")
def rows() -> Any:
    return family.load_rows()
