"""`llm.transcribe` on audio of any length: windows of several files in one batch, gates, attempts, and the sequential mode."""

from __future__ import annotations

import asyncio
import gc
import re
import weakref
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import family
import numpy as np
import pytest
import soundfile
import torch
from sensorium import LLM, AsyncLLM, RequestOutput, SamplingParams, Segment
from sensorium.benchmarks import seams
from sensorium.callers.errors import InputError, MediaError
from sensorium.engine.frontend.request_handle import notify
from sensorium.engine.frontend.serve import serve
from sensorium.mm.media import audio, gate
from sensorium.mm.media.audio import decode_audio
from sensorium.mm.media.policy import MediaPolicy
from sensorium.mm.parse import MediaSource
from sensorium.pipelines import transcribe
from sensorium.pipelines.speech import words
from sensorium.pipelines.speech.decode import SpokenLanguage, _Answer, _is_confirmed, _rank
from sensorium.pipelines.speech.options import FileOptions
from sensorium.pipelines.speech.segments import Attempt, WindowResult, WindowText
from sensorium.pipelines.speech.windows import Window, WindowReader
from waiting import wait_until

SHORT = SamplingParams(temperature=0.0, max_tokens=6)
RATE = 16_000


@pytest.fixture(scope="module")
def llm(whisper: Path) -> LLM:
    return LLM(whisper, max_num_seqs=4)


def make_audio(seed: int, seconds: float) -> tuple[np.ndarray, int]:
    return family.make_media("audio", (round(seconds * RATE),), seed), RATE


def heard(llm: LLM, audio: object, **options: Any) -> list[Any]:
    return llm.transcribe(audio, "de", use_tqdm=False, **{"vad": False, "sampling_params": SHORT} | options)


@pytest.mark.parametrize("sequential", [False, True])
def test_text_is_reported_when_it_is_final(llm: LLM, sequential: bool) -> None:
    texts, events = ["", ""], list[str]()

    def on_text(index: int, text: str) -> None:
        texts[index] += text
        events.append("text")

    items = [make_audio(1, 4.3), make_audio(2, 2.9)]
    options = {"sequential": sequential, "on_text": on_text, "on_progress": lambda seconds: events.append("window")}
    found = heard(llm, items, **options)
    assert texts == [one.text for one in found]
    assert any(texts)
    assert "window" in events[events.index("text") :]


def test_a_file_does_not_depend_on_what_it_is_batched_with(llm: LLM) -> None:
    """Ten windows of three files run four at a time, and each has the text of the same samples alone."""
    items = [make_audio(1, 4.3), make_audio(2, 0.7), make_audio(3, 2.9)]
    together = heard(llm, items)
    assert [len(one.windows) for one in together] == [6, 1, 4]
    for item, one in zip(items, together, strict=True):
        (alone,) = heard(llm, item)
        assert (alone.text, alone.windows, alone.info) == (one.text, one.windows, one.info)
        assert one.info.duration == len(item[0]) / RATE
    longest = together[0].windows
    for window in longest:
        part = items[0][0][round(window.start * RATE) : round(window.end * RATE)]
        assert heard(llm, (part, RATE))[0].text == window.text
    assert asyncio.run(AsyncLLM(llm).transcribe(items, "de", vad=False, sampling_params=SHORT))[0].windows == longest


def test_more_files_than_run_at_a_time(llm: LLM) -> None:
    items = [make_audio(seed, 0.4 + 0.1 * seed) if seed % 3 else b"broken" for seed in range(12)]
    found = heard(llm, items)
    assert [one.error is None for one in found] == [seed % 3 > 0 for seed in range(12)]
    assert [one.info.duration for one in found[1:3]] == [0.5, 0.6]


def test_attempts_share_encoder_rows_and_are_repeatable(llm: LLM) -> None:
    llm.reset_mm_cache()
    before = llm.stats.encoder_calls
    options = {"temperature": (0, 0.5, 1.0), "log_prob_threshold": -0.001, "compression_ratio_threshold": None}
    (one,) = heard(llm, make_audio(33, 0.8), **options)
    (window,) = one.windows
    assert [attempt.temperature for attempt in window.attempts] == [0, 0.5, 1.0]
    assert {attempt.rejected for attempt in window.attempts} == {"avg_logprob"}
    assert window.accepted == max(range(3), key=lambda i: window.attempts[i].avg_logprob)
    assert llm.stats.encoder_calls - before == 1
    again = heard(llm, [make_audio(31, 0.9), make_audio(33, 0.8)], **options)[1]
    assert again.windows == one.windows
    (accepted,) = heard(llm, make_audio(30, 0.8), **options | {"log_prob_threshold": None})[0].windows
    assert [attempt.rejected for attempt in accepted.attempts] == [None]


def test_repetition_is_tried_again(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24)
    options = {"sampling_params": params, "temperature": (0, 1.0), "log_prob_threshold": None}
    (loop,) = heard(llm, make_audio(1, 0.8), **options, compression_ratio_threshold=0.5)[0].windows
    assert loop.attempts[0].rejected == "compression_ratio"
    assert [attempt.temperature for attempt in loop.attempts] == [0, 0, 1.0]  # the second one is with timestamps
    (single,) = heard(llm, make_audio(1, 0.8), **options | {"temperature": 0}, compression_ratio_threshold=0.5)[0].windows
    assert len(single.attempts) == 1
    assert loop.attempts[0].compression_ratio > 0.5


def test_sequential_windows_begin_where_the_last_segment_ended(llm: LLM) -> None:
    (one,) = heard(llm, make_audio(4, 3.4), sequential=True, timestamps="segment", condition_on_previous_text=True)
    assert one.error is None
    starts = [window.start for window in one.windows]
    assert starts == sorted(starts)
    for before, after in pairwise(one.windows):
        assert after.start == pytest.approx(before.end - after.overlap, abs=1e-3)
        assert before.start < after.start <= before.start + 1
    assert one.windows[-1].end == one.info.duration
    assert all(0 <= part.start <= one.info.duration for part in one.segments)
    with pytest.raises(InputError, match="needs sequential=True"):
        heard(llm, make_audio(4, 1), condition_on_previous_text=True)


@pytest.mark.parametrize("sequential", [False, True])
def test_memory_does_not_grow_with_the_audio(llm: LLM, monkeypatch: pytest.MonkeyPatch, sequential: bool) -> None:
    """The samples and the tokens of a window are dropped when its text is known."""
    made, alive, kept = list[weakref.ref[torch.Tensor]](), list[Any](), list[WindowText]()
    make, finish = WindowReader._make, transcribe._transcript

    def record(*given: Any) -> Window:
        window = make(*given)
        made.append(weakref.ref(window.samples))
        return window

    def spy(index: int, found: list[WindowText], *rest: Any) -> Any:
        gc.collect()
        alive.extend(samples for samples in made if samples() is not None)
        kept.extend(found)
        return finish(index, found, *rest)

    monkeypatch.setattr(WindowReader, "_make", record)
    monkeypatch.setattr(transcribe, "_transcript", spy)
    (one,) = heard(llm, make_audio(1, 20.0), sequential=sequential)
    assert len(one.windows) >= 20
    assert len(alive) <= 10  # the call holds its first eight requests
    assert one.output.outputs[0].token_ids
    assert not any(text.output.outputs for text in kept)


PROMPT = "<|startoftranscript|><|de|><|transcribe|><|notimestamps|>"


def asked(samples: np.ndarray) -> dict[str, Any]:
    return {"prompt": PROMPT, "multi_modal_data": {"audio": (samples, RATE)}}


def stream_with_a_late_post(llm: LLM, samples: np.ndarray) -> None:
    """Read a streamed answer to its end; the loop posts once more, as it does if the end comes while output is taken."""
    handle = llm.request(asked(samples), SHORT)
    assert list(serve(llm.engine.loop, [handle], stream=True))
    notify([handle])


def live_with_a_late_post(llm: LLM, samples: np.ndarray) -> None:
    with llm.live(asked(samples), SHORT) as session:
        session.answer()
        notify([session._handle])


def transcribe_broken(llm: LLM, samples: np.ndarray) -> None:
    samples[-1] = np.nan
    assert heard(llm, (samples, RATE))[0].error is not None


@pytest.mark.parametrize(
    "call",
    [
        lambda llm, samples: heard(llm, (samples, RATE)),
        lambda llm, samples: heard(llm, (samples, RATE), sequential=True, timestamps="word"),
        lambda llm, samples: llm.generate(asked(samples), SHORT, use_tqdm=False),
        lambda llm, samples: asyncio.run(AsyncLLM(llm).transcribe((samples, RATE), "de", vad=False, sampling_params=SHORT)),
        transcribe_broken,
        stream_with_a_late_post,
        live_with_a_late_post,
    ],
    ids=["transcribe", "sequential", "generate", "async", "broken", "stream", "live"],
)
def test_samples_are_freed_without_the_garbage_collector(llm: LLM, call: Any) -> None:
    call(llm, make_audio(60, 1.8)[0])  # imports, which make cycles of their own
    samples = make_audio(61, 1.8)[0]
    alive = weakref.ref(samples)
    gc.collect()
    gc.disable()
    try:
        call(llm, samples)
        del samples
        wait_until(lambda: alive() is None)  # the loop's thread may still be about to leave the request
    finally:
        gc.enable()


def test_audio_without_speech_makes_no_request(llm: LLM) -> None:
    items = [(np.zeros(3 * RATE, np.float32), RATE), make_audio(1, 2.0)]
    steps = llm.stats.steps
    found = llm.transcribe(items, use_tqdm=False)
    assert [(one.text, one.error, one.windows, one.speech_spans, one.doubt) for one in found] == [("", None, (), (), None)] * 2
    assert [one.info.duration for one in found] == [3.0, 2.0]
    assert llm.stats.steps == steps


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"aligner": "ctc"}, 'aligner is for timestamps="word"'),
        ({"timestamps": "phrase"}, "timestamps='phrase' must be True or False"),
        ({"temperature": (0, -1)}, "temperature=.* must be a number, 0 or above"),
        ({"temperature": ()}, "temperature="),
        ({"vad": "silent"}, "vad='silent' must be"),
        ({"log_prob_threshold": "low"}, "log_prob_threshold='low' must be"),
        ({"log_prob_threshold": float("nan")}, "log_prob_threshold=nan must be a finite number"),
        ({"no_speech_threshold": 1.5}, "no_speech_threshold=1.5 must be a finite number, from 0 to 1"),
        ({"temperature": float("inf")}, "temperature=inf must be a number"),
        ({"sampling_params": SamplingParams(n=2)}, "n=2 is not supported by transcribe"),
        ({"hotwords": 3}, "hotwords=3 must be a string"),
        ({"sequential": 1}, "sequential=1 must be True or False"),
    ],
)
def test_wrong_arguments(llm: LLM, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        heard(llm, make_audio(1, 1), **options)


@pytest.mark.parametrize("name", ["a.wav", "a.flac", "a.ogg"])
def test_files_are_read_in_blocks(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that soundfile reads is never held as a whole, and gives the samples of `decode_audio`."""
    soundfile.write(tmp_path / name, make_audio(1, 30)[0], 22_050)
    whole = decode_audio((tmp_path / name).read_bytes(), RATE, MediaPolicy())
    monkeypatch.setattr(gate, "read", None)
    pieces = list(gate.audio_blocks(MediaSource("audio", 0, tmp_path / name), RATE, MediaPolicy(max_decoded_bytes=1000)))
    assert len(pieces) > 1
    assert np.array_equal(np.concatenate(pieces), whole)


def test_sources_that_cannot_be_read_in_blocks(tmp_path: Path) -> None:
    def read(data: object, **policy: Any) -> int:
        return sum(map(len, gate.audio_blocks(MediaSource("audio", 0, data), RATE, MediaPolicy(**policy))))

    samples, rate = make_audio(1, 2.0)
    soundfile.write(tmp_path / "a.wav", samples, rate)
    assert read(tmp_path / "a.wav", decode_isolation="process") == read((samples, rate)) == 2 * RATE
    for data, said in ((tmp_path, "is a folder"), (tmp_path / "none", "cannot be read"), (b"broken", "supported audio format")):
        with pytest.raises(MediaError, match=said):
            read(data)
    with pytest.raises(MediaError, match="max_transcribed_seconds is 1 s"):
        read(tmp_path / "a.wav", max_transcribed_seconds=1.0)
    assert read(tmp_path / "a.wav", max_audio_seconds=1.0) == 2 * RATE


def test_the_text_before_a_fault_is_kept(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples, _ = make_audio(1, 3.0)
    soundfile.write(tmp_path / "a.wav", samples, RATE, subtype="FLOAT")
    (whole,) = heard(llm, tmp_path / "a.wav")
    real = audio.audio_blocks

    def break_off(*args: Any) -> Any:
        yield from (part.clone() for part in next(real(*args))[: 2 * RATE].split(RATE))
        raise InputError("it is broken here")

    monkeypatch.setattr(audio, "audio_blocks", break_off)
    broken, other = heard(llm, [tmp_path / "a.wav", b"none"])
    assert broken.error.message == "it is broken here"
    assert (broken.error.index, broken.duration) == (0, 2.0)
    assert broken.text
    assert broken.windows[0] == whole.windows[0]
    assert other.text == ""


def test_a_rate_that_is_no_number(llm: LLM) -> None:
    samples, _ = make_audio(1, 0.3)
    for rate in ("16000", "16000.0", None):
        (one,) = heard(llm, (samples, rate))
        assert "its sample rate is" in one.error.message
        assert "give (samples, rate) with a number of hertz" in one.error.message
    assert [one.error is None for one in heard(llm, (samples, samples))] == [True, True]


def test_merging_takes_time_in_proportion_to_the_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each seam looks at the words of two windows only."""
    looked: list[int] = []
    real = words.split_words
    monkeypatch.setattr(words, "split_words", lambda text: looked.append(len(text)) or real(text))
    found = []
    for number in range(40):
        text = " ".join(f"w{number + i}" for i in range(4))
        part = Segment(0.0, 1.0, text, 1)
        result = WindowResult(float(number), number + 2.0, text, (), 0, overlap=float(number > 0))
        window = Window(number * RATE, (number + 2) * RATE, torch.zeros(1), 0)
        found.append(WindowText(result, (part,), RequestOutput(str(number), None, [], []), window))
    job = SimpleNamespace(rate=RATE, options=FileOptions(vad=False, timestamps="segment"))
    reader = SimpleNamespace(length=41 * RATE, spans=[])
    merged = transcribe._transcript(0, found, None, SpokenLanguage("en"), job, reader)
    assert merged.text.split() == [f"w{i}" for i in range(43)]
    assert " ".join(part.text for part in merged.segments) == merged.text
    assert max(looked) < 20


SPOKEN = ("lj001_0001", "lj001_0003", "jfk", "lj001_0005", "lj001_0007")


def words_of(text: str) -> list[str]:
    return re.sub(r"[^\w ]", "", text).casefold().split()


def edits(left: list[str], right: list[str]) -> list[tuple[list[str], list[str]]]:
    """Return the runs of words that differ, in a shortest edit; "wood cutters" and "woodcutters" are equal."""
    cost = np.zeros((len(left) + 1, len(right) + 1), int)
    cost[:, 0], cost[0] = range(len(left) + 1), range(len(right) + 1)
    for i, j in np.ndindex(len(left), len(right)):
        cost[i + 1, j + 1] = min(cost[i, j] + (left[i] != right[j]), cost[i, j + 1] + 1, cost[i + 1, j] + 1)
    i, j = len(left), len(right)
    runs: list[tuple[list[str], list[str]]] = [([], [])]
    while i or j:
        if i and j and left[i - 1] == right[j - 1] and cost[i, j] == cost[i - 1, j - 1]:
            i, j = i - 1, j - 1
            runs.append(([], []))
        elif i and j and cost[i, j] == cost[i - 1, j - 1] + 1:
            i, j = i - 1, j - 1
            runs[-1][0].insert(0, left[i])
            runs[-1][1].insert(0, right[j])
        elif i and cost[i, j] == cost[i - 1, j] + 1:
            i -= 1
            runs[-1][0].insert(0, left[i])
        else:
            j -= 1
            runs[-1][1].insert(0, right[j])
    return [run for run in reversed(runs) if "".join(run[0]) != "".join(run[1])]


@pytest.mark.shared
def test_speech_after_which_the_answer_stopped_is_transcribed(shared_data: Path) -> None:
    """Whisper stops before the last sentence of this window, which has begun only."""
    llm = LLM(shared_data / "whisper-tiny.en", dtype="float32", max_num_seqs=4)
    clips = [soundfile.read(shared_data / "speech" / f"{name}.flac", dtype="float32")[0] for name in SPOKEN * 2]
    audio = np.concatenate(clips)[round(51.05 * RATE) : round(71.05 * RATE)]
    (found,) = llm.transcribe((audio, RATE), vad=False, use_tqdm=False)
    assert "of the netherlands by a similar process and so my fellow americans" in " ".join(words_of(found.text))


@pytest.mark.shared
@pytest.mark.full
def test_no_word_is_lost_or_doubled_at_seams(shared_data: Path) -> None:
    """Clips that are joined to minutes, at twelve phases: the words of all windows are those of the reference, in order.

    The model's own mistakes are those that it makes in the clips alone, and a few that depend on the text around them.
    """
    llm = LLM(shared_data / "whisper-tiny.en", dtype="float32", max_num_seqs=8)
    clips = [soundfile.read(shared_data / "speech" / f"{name}.flac", dtype="float32")[0] for name in SPOKEN * 2]
    whole = np.concatenate(clips)
    alone = words_of(" ".join(one.text for one in llm.transcribe([(clip, RATE) for clip in clips], use_tqdm=False)))
    shifts = [(np.concatenate([np.zeros(round(0.25 * step * RATE), np.float32), whole]), RATE) for step in range(12)]
    for options in ({}, {"timestamps": "segment"}, {"vad": False}):
        for found in llm.transcribe(shifts, use_tqdm=False, **options):
            changes = edits(alone, words_of(found.text))
            assert sum(max(len(left), len(right)) for left, right in changes) <= 0.06 * len(alone)
            assert max(abs(len(left) - len(right)) for left, right in changes) <= 2


def test_a_loss_may_have_several_places() -> None:
    """The seams benchmark looks for a loss in the window that contains it, at any place that gives the same text."""
    said = ["for", "you", "ask", "what", "you", "can"]
    assert seams.equal_losses((1, 4, 1, 1), said) == [(1, 4, 1, 1), (2, 5, 1, 1)]
    assert seams.equal_losses((1, 4, 1, 2), said) == [(1, 4, 1, 2)]


def test_shifts_with_the_same_frames_follow_one_another() -> None:
    """Frames of 512 samples are at the same samples after each 4 s."""
    ordered = seams.by_frames(seams.all_shifts(), 512)
    assert sorted(ordered) == seams.all_shifts()
    assert len(ordered) == 120
    assert ordered[:8] == [0, 4, 8, 12, 16, 20, 24, 28]


@pytest.mark.shared
def test_a_sequential_window_is_read_again_from_a_place_between_words(shared_data: Path) -> None:
    """The first window's last timestamp is inside "Printing", and its text ends before that word."""
    llm = LLM(shared_data / "whisper-tiny.en", dtype="float32", max_num_seqs=1)
    clips = seams.read_clips(shared_data / "speech")
    whole = np.concatenate([clips[i] for i in seams.order_of(clips, 1200)])
    audio = whole[round(626.516 * RATE) : round(660 * RATE)]
    (found,) = llm.transcribe((audio, RATE), sequential=True, timestamps="segment", use_tqdm=False)
    assert "a cup of tea printing in the only sense with which we are at present" in " ".join(words_of(found.text))


@pytest.mark.shared
def test_timestamps_do_not_hide_speech_that_a_text_skips(shared_data: Path) -> None:
    """Whisper's first segment lasts 19.7 s and has the text of 1.3 s; times of words show what is missing."""
    llm = LLM(shared_data / "whisper-tiny.en", dtype="float32", max_num_seqs=4)
    clips = seams.read_clips(shared_data / "speech")
    whole = np.concatenate([clips[i] for i in seams.order_of(clips, 1200)])
    audio = whole[round(610.792 * RATE) : round(640.792 * RATE)]
    (found,) = llm.transcribe((audio, RATE), timestamps="segment", vad=False, use_tqdm=False)
    said = " ".join(words_of(found.text))
    assert "by a similar process and so my fellow americans ask not what your country can do for you ask what" in said
    assert "he might have been made still more respectable than he was and mr john dashwood had then leisure to" in said


@pytest.mark.shared
def test_nothing_is_invented_without_speech(shared_data: Path) -> None:
    llm = LLM(shared_data / "whisper-tiny.en", dtype="float32", max_num_seqs=4)
    hum = 0.3 * np.sin(np.arange(6 * RATE) / RATE * 2 * np.pi * 50).astype(np.float32)
    items = [shared_data / "speech" / "silence_10s.flac", shared_data / "speech" / "noise_10s.flac", (hum, RATE)]
    for one in llm.transcribe(items, use_tqdm=False):
        assert (one.text, one.error, one.windows) == ("", None, ())
    (one,) = llm.transcribe(items[1], vad=False, use_tqdm=False)  # the gates alone
    assert one.text == ""


def test_a_language_in_the_answer_is_in_no_other_prompt(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, and so texts, do not depend on how many windows of a file run at a time; the first window names the language."""
    asked: list[str | None] = []
    make, speech = llm.speech.transcription_request, llm.speech

    def record(language: str | None, *rest: Any) -> Any:
        asked.append(language)
        return make(language or "de", *rest)

    monkeypatch.setattr(speech, "language_detection_request", lambda: None)
    monkeypatch.setattr(speech, "transcription_request", record)
    monkeypatch.setattr(speech, "parse_transcript", lambda text, language: (text, language or "fr"))
    items = [make_audio(1, 2.9), *(make_audio(seed, 0.5) for seed in range(9))]
    alone = llm.transcribe(items[0], vad=False, sampling_params=SHORT, use_tqdm=False)[0]
    together = llm.transcribe(items, vad=False, sampling_params=SHORT, use_tqdm=False)[0]
    assert set(asked) == {None}
    assert (alone.windows, alone.language) == (together.windows, "fr")


def test_a_repetition_is_tried_with_timestamps_before_sampling(llm: LLM) -> None:
    """By default. If every answer fails, the likeliest one is used, not the last one."""
    params = {"compression_ratio_threshold": 0.01, "log_prob_threshold": None}
    (window,) = heard(llm, make_audio(1, 0.8), sampling_params=None, **params)[0].windows
    shown = [(attempt.temperature, attempt.timestamps) for attempt in window.attempts]
    assert shown[:2] == [(0.0, False), (0.0, True)]
    assert [temperature for temperature, _ in shown[2:]] == [0.2, 0.4, 0.6, 0.8, 1.0][: len(shown) - 2]
    assert {attempt.rejected for attempt in window.attempts} == {"compression_ratio"}


def answer(text: str, logprob: float, rejected: str | None, timed: bool = False, fits: bool = True) -> _Answer:
    attempt = Attempt(0.0, logprob, 1.0, rejected, timed)
    return _Answer(None, None, attempt, text, logprob >= -1, fits)


def test_an_unlikely_last_answer_does_not_replace_a_likely_first_one() -> None:
    said = answer("Stand by. " * 8, -0.2, "compression_ratio")
    sampled = answer("Some other words", -1.8, "avg_logprob")
    loop = answer("thank you " * 100, -0.1, "compression_ratio", fits=False)
    passed = answer("All else", -0.9, None)
    ordered = [passed, said, sampled, loop]
    ranks = [_rank(one) for one in ordered]
    assert all(better > worse for better, worse in pairwise(ranks))


def test_a_repetition_that_is_written_twice_alike_was_spoken() -> None:
    said = answer("Stand by. " * 8, -0.2, "compression_ratio")
    assert _is_confirmed([said, answer("stand by, " * 8, -0.3, "compression_ratio", True)])
    assert not _is_confirmed([said, answer("Stand by. " * 3, -0.3, "compression_ratio", True)])
    assert not _is_confirmed([said, answer("Stand by. " * 8, -1.3, "compression_ratio", True)])
    assert not _is_confirmed([said, answer("Stand by. " * 8, -0.3, "compression_ratio")])
    assert not _is_confirmed([said])
