"""Live transcription: events of a stream, their promises, bounded cost and limits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import family
import numpy as np
import pytest
import soundfile
import torch
from sensorium import LLM, AsyncLLM, Gap, LiveEvent, SamplingParams
from sensorium.callers.errors import ConfigError, InputError
from sensorium.pipelines.speech import decode
from sensorium.pipelines.speech.live import LiveTranscriber
from sensorium.pipelines.speech.live_windows import LiveWindows
from sensorium.pipelines.speech.merge import join_texts, word_key
from sensorium.pipelines.speech.options import LiveOptions
from streams import DEFAULTS, OPTIONS, RATE, blocks, check_promises, finals, play, run_passes, speech


@pytest.fixture(scope="module")
def llm(whisper: Path) -> LLM:
    return LLM(whisper, max_num_seqs=8)


def test_windows_hold_speech_and_forget_the_rest() -> None:
    windows = LiveWindows(RATE, 6 * RATE, RATE, True)
    cuts, most = [], 0
    for block in torch.from_numpy(speech(-3, 2, -0.5, 2, -5, 3, -200, 8, -2)).split(1000):
        windows.add(block)
        while windows.classify():
            if (cut := windows.cut(last=False)) is not None:
                cuts.append((round(windows.start / RATE), round(cut.end / RATE), cut.reason))
                windows.drop(cut.end)
            most = max(most, windows.num_samples)
    assert cuts == [(2, 8, "pause"), (12, 16, "pause"), (215, 221, "limit"), (221, 224, "pause")]
    assert most <= 7 * RATE


def test_silence_after_the_speech_does_not_make_a_window_too_long() -> None:
    lengths = list[int]()
    for silence in np.arange(3, 3.25, 0.01):
        windows = LiveWindows(RATE, 2 * RATE, RATE // 4, True)
        windows.add(torch.from_numpy(speech(-silence, 1.66, -2)))
        while (cut := windows.cut(last=False)) is None:
            assert windows.classify()
        lengths.append(cut.end - windows.start)
    assert max(lengths) <= 2 * RATE


def test_events_of_a_stream(llm: LLM) -> None:
    events = play(llm, speech(-1, 0.6, -1, 0.5, -1))
    check_promises(events)
    kinds = [event.kind for event in events if event.kind != "partial"]
    assert kinds == ["speech_started", "speech_stopped", "final"] * 2 + ["ended"]
    started, stopped = (next(event for event in events if event.kind == kind) for kind in ("speech_started", "speech_stopped"))
    assert abs(started.start - 1) < 0.1
    assert abs(stopped.start - 1.6) < 0.1
    final = next(event for event in events if event.kind == "final")
    assert final.language == "de"
    assert final.window.attempts
    assert final.start <= 1 < 1.6 <= final.end
    assert final.lag < 0.6
    assert events[-1].reason == "finished"


def test_turns_end_after_their_text(llm: LLM) -> None:
    events = play(llm, speech(-1, 0.6, -1, 3.3, -1), turn_events=True, max_window=0.9, cache_salt="a")
    kinds = [event.kind for event in events if event.kind != "partial"]
    first = kinds.index("turn_ended") + 1
    assert kinds[:first] == ["speech_started", "speech_stopped", "final", "turn_ended"]
    assert (kinds[first], kinds[-2:]) == ("speech_started", ["turn_ended", "ended"])
    assert kinds[first:].count("final") > 1
    assert kinds.count("turn_ended") == kinds.count("speech_stopped") == 2


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("vad", [True, False])
def test_promises_hold(llm: LLM, seed: int, vad: bool) -> None:
    """Long stretches without a pause are cut at the largest length, by timestamps or with an overlap."""
    events = play(llm, speech(-0.5, 3.3, -0.5, 0.4, -0.2, 1.7, seed=seed), vad=vad, max_window=0.9)
    check_promises(events)
    assert len(finals(events)) >= 4


def test_silence_makes_no_request(llm: LLM) -> None:
    steps = llm.stats.steps
    (event,) = play(llm, speech(-20))
    assert event.kind == "ended"
    assert llm.stats.steps == steps
    assert [event.kind for event in play(llm, 0.1 * np.random.default_rng(0).normal(0, 1, 10 * RATE).astype(np.float32))] == [
        "ended"
    ]


def test_minute_60_costs_what_minute_1_costs(whisper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same pattern of speech, with other samples. Work is counted: encoder rows, computed tokens and steps.

    Nothing is drafted, because the speed of the machine decides how many tokens are.
    """
    llm = LLM(whisper, max_num_seqs=8, speculative_config={"method": "suffix", "num_speculative_tokens": 0})
    model, rows = llm.engine.loop.core.executor.runner.model, []
    encode = model.embed_multimodal
    monkeypatch.setattr(model, "embed_multimodal", lambda *given: [rows.append(len(one)) or one for one in encode(*given)])
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    transcriber = LiveTranscriber(llm.engine, LiveOptions(**OPTIONS | {"sampling_params": params, "cache_salt": "minutes"}))

    def minute(number: int) -> list[int]:
        steps, tokens = llm.stats.steps, 0
        rows.clear()
        clip = (
            speech(*[-1, 0.7, -1, 0.6, -0.4, 0.5, -0.8] * 4, seed=number) if number in (1, 2, 59, 60) else speech(-0.5, 0.4, -5)
        )
        for part in np.split(clip, range(1600, len(clip), 1600)):
            transcriber.push(part)
            tokens += run_passes(llm, transcriber)[1]
            assert transcriber.lag < 2.5
        transcriber.gap(Gap(60 - len(clip) / RATE))
        return [sum(rows), tokens + run_passes(llm, transcriber)[1], llm.stats.steps - steps]

    costs = np.array([minute(number) for number in range(1, 61)])
    early, late = costs[:2].sum(0), costs[-2:].sum(0)
    assert early.all()
    assert all(late <= 1.05 * early)


def test_stable_words_are_not_generated_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer of a pass begins with the stable words of the pass before it; the request generates the rest."""
    asked, request = [], llm.engine.request
    monkeypatch.setattr(
        llm.engine, "request", lambda prompt, params: asked.append((prompt, params.max_tokens)) or request(prompt, params)
    )
    decode = llm.get_tokenizer().decode
    word = next(number for number in range(1000) if re.fullmatch(" [a-z]{2,}", decode([number])))
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logit_bias={word: 100.0})
    transcriber, start = LiveTranscriber(llm.engine, LiveOptions(**OPTIONS | {"sampling_params": params, "cache_salt": "a"})), 4
    events: list[LiveEvent] = []
    for part in np.split(speech(-1.2, 0.95), 43):
        stable = events[-1].text[: events[-1].stable_upto] if events and events[-1].kind == "partial" else ""
        count = len(asked)
        transcriber.push(part)
        events += run_passes(llm, transcriber)[0]
        for prompt, max_tokens in asked[count:]:
            known = prompt.get("prompt_token_ids", [])[start:]
            assert decode(known, True).strip() == stable
            assert max_tokens == max(1, 12 - len(known))
    assert any("prompt_token_ids" in prompt for prompt, _ in asked)
    assert {prompt["cache_salt"] for prompt, _ in asked} == {"a"}
    transcriber.finish()
    check_promises(events + run_passes(llm, transcriber)[0])


@pytest.mark.parametrize("temperature", [0.0, (0.0, 0.6)])
def test_the_last_answer_about_a_window_is_the_draft_of_the_next(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, temperature: float | tuple[float, ...]
) -> None:
    """So it is for the next pass over the window, and for the next temperature."""
    asked, answer = list[tuple[Any, tuple[int, ...]]](), decode.answer

    async def record(request: Any) -> Any:
        output = await answer(request)
        if request.input.params.max_tokens > 1:
            asked.append((request.input.params, tuple(output.outputs[0].token_ids)))
        return output

    monkeypatch.setattr(decode, "answer", record)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    more = {"sampling_params": params, "temperature": temperature}
    transcriber = LiveTranscriber(llm.engine, LiveOptions(**OPTIONS | DEFAULTS | more))
    for part in np.split(speech(-1.2, 1.8), 30):
        transcriber.push(part)
        run_passes(llm, transcriber)
    drafts = [(place, params.draft_text) for place, (params, _) in enumerate(asked) if params.draft_text]
    assert len(drafts) > len(asked) / 2, "a window's first pass has none"
    for place, draft in drafts:  # the best of at most two answers
        assert tuple(draft) in {answer[-len(draft) :] for _, answer in asked[max(0, place - 2) : place]}
    assert asked[0][0].draft_text is None
    assert (len({params.temperature for params, _ in asked}) > 1) == isinstance(temperature, tuple)


@pytest.mark.parametrize("max_window", [0.9, None])
def test_finals_have_segments(llm: LLM, max_window: float | None) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=16)
    samples = speech(-0.5, 2.3, -0.7, 0.4, -0.5, 0.6, -1, seed=3)
    events = [
        one for one in play(llm, samples, timestamps="segment", sampling_params=params, max_window=max_window) if one.text
    ]
    found = [event for event in events if event.kind == "final"]
    assert found
    for event in found:
        assert event.segments
        assert join_texts([part.text for part in event.segments]) == event.text
        assert all(event.start <= part.start <= (part.end or event.end) <= event.end for part in event.segments)
    assert all(event.segments is None for event in events if event.kind == "partial")


def test_passes_are_skipped_when_behind(llm: LLM) -> None:
    """All audio at once: one pass for each window, and none between them."""
    samples = speech(-1, 0.6, -1, 0.5, -1)
    events = play(llm, samples, block=10.0)
    assert [event.kind for event in events if event.text] == ["final", "final"]
    assert finals(events) == finals(play(llm, samples, min_chunk=9))


def test_samples_in_any_form(llm: LLM) -> None:
    samples = speech(-0.5, 0.6, -1, 0.5, -0.5)
    pcm = (samples.clip(-1, 1) * 32767).astype("<i2")
    expected = finals(play(llm, pcm, block=0.1))
    assert expected
    for cuts in (
        [pcm.tobytes()[k : k + 333] for k in range(0, 2 * len(pcm), 333)],
        [np.stack([pcm, pcm])],
        [torch.tensor(pcm)],
    ):
        transcriber = LiveTranscriber(llm.engine, LiveOptions(**OPTIONS | {"min_chunk": 9}))
        for block in cuts:
            transcriber.push(block)
        transcriber.finish()
        assert finals(run_passes(llm, transcriber)[0]) == finals(play(llm, pcm, min_chunk=9))


def test_resampling_does_not_depend_on_the_blocks(llm: LLM) -> None:
    samples = speech(-0.5, 0.6, -1, 0.5, -0.5)
    found = []
    for size in (441, 5000, len(samples)):
        transcriber = LiveTranscriber(llm.engine, LiveOptions(rate=44_100, **OPTIONS | {"min_chunk": 9}))
        for start in range(0, len(samples), size):
            transcriber.push(samples[start : start + size])
        transcriber.finish()
        events = run_passes(llm, transcriber)[0]
        found.append([(event.kind, event.text, event.start, event.end) for event in events])
        assert abs(events[-1].end - len(samples) / 44_100) < 0.01
    assert found[0] == found[1] == found[2]


def test_a_gap_ends_the_window(llm: LLM) -> None:
    transcriber = LiveTranscriber(llm.engine, LiveOptions(**OPTIONS))
    transcriber.push(speech(-2, 0.7))
    transcriber.gap(Gap(3600.0))
    transcriber.push(speech(-2, 0.6))
    transcriber.gap(Gap(0))
    transcriber.push(speech(0.6))
    transcriber.finish()
    events = run_passes(llm, transcriber)[0]
    check_promises(events)
    assert [round(event.start) for event in events if event.kind == "speech_started"] == [2, 3605, 3605]
    assert transcriber.has_room(speech(1))
    with pytest.raises(InputError, match="seconds=-1 must be a number"):
        Gap(-1)


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (np.array([0.0, np.nan], np.float32), "NaN"),
        (np.array(["a"]), "must be floating point"),
        (np.zeros((2, 2, 2), np.float32), "1 or 2 axes"),
        (None, "not a known form"),
        (np.zeros(40 * RATE, np.float32), "push blocks of at most half of it"),
        ((np.zeros(20 * RATE, np.float32), RATE // 2), "push blocks of at most half of it"),
        ((np.zeros(RATE, np.float32), 10), "its sample rate is 10 Hz"),
        ((np.zeros(RATE, np.float32), float("nan")), "its sample rate is nan Hz"),
        ((np.array([np.inf], np.float32), 8000), "infinite"),
        ((RATE, np.zeros(RATE, np.float32)), "must be a list of numbers"),
    ],
)
def test_a_broken_block_is_refused_and_the_stream_goes_on(llm: LLM, block: Any, said: str) -> None:
    transcriber = LiveTranscriber(llm.engine, LiveOptions(**OPTIONS, max_buffer_bytes=40 * RATE))
    transcriber.push(speech(-1, 0.7))
    with pytest.raises(InputError, match=said):
        transcriber.push(block)
    transcriber.finish()
    assert len(finals(run_passes(llm, transcriber)[0])) == 1


def test_the_rate_may_change(llm: LLM) -> None:
    """Blocks say their rate; those without one have that of the block before. Times are those of the sound."""
    transcriber = LiveTranscriber(llm.engine, LiveOptions(**OPTIONS, rate=2 * RATE))
    events = list[LiveEvent]()
    for part in np.split(np.repeat(speech(-1, 0.6, -1), 2), 13):
        transcriber.push(part)
        events += run_passes(llm, transcriber)[0]
    halved = speech(-1, 0.6, -1)[::2]
    transcriber.push((halved[:5000], np.int64(RATE // 2)))
    with pytest.raises(InputError) as refused:
        transcriber.push((halved, 10))
    assert refused.value.info.param == "min_audio_rate"
    transcriber.push(halved[5000:])
    transcriber.push((speech(-1, 0.6, -1), float(RATE)))
    transcriber.finish()
    events += run_passes(llm, transcriber)[0]
    check_promises(events)
    starts = [event.start for event in events if event.kind == "speech_started"]
    np.testing.assert_allclose(starts, [1.0, 3.6, 6.2], atol=0.1)
    assert len(finals(events)) == 3
    assert abs(events[-1].end - 7.8) < 0.01


@pytest.mark.parametrize("hours", [0.1, pytest.param(10, marks=pytest.mark.full)])
def test_hours_of_silence_and_jumps_in_time_are_forgotten(llm: LLM, hours: float) -> None:
    """Neither memory nor requests grow, and the times of later speech count them."""
    steps, most = llm.stats.steps, 0
    transcriber = LiveTranscriber(llm.engine, LiveOptions(**OPTIONS))
    silence = speech(-60)
    for _ in range(round(60 * hours)):
        transcriber.push(silence)
        assert run_passes(llm, transcriber)[0] == []
        most = max(most, transcriber.buffered_bytes)
    assert llm.stats.steps == steps
    assert most < 4 * 4 * RATE
    transcriber.gap(Gap(10 * 3600.0))
    transcriber.gap(Gap(1e6))
    transcriber.push(speech(-1, 0.6, -1))
    transcriber.finish()
    events = run_passes(llm, transcriber)[0]
    at = 3600 * hours + 36_000 + 1e6 + 1
    assert [event.start for event in events if event.kind == "speech_started"] == [pytest.approx(at, abs=0.1)]
    (final,) = (event for event in events if event.kind == "final")
    assert at - 1 <= final.start < final.end <= at + 1.6
    assert 0 <= final.lag < 2


def test_the_buffer_is_bounded(llm: LLM) -> None:
    transcriber = LiveTranscriber(llm.engine, LiveOptions(**OPTIONS, max_buffer_bytes=40 * RATE))
    for _ in range(10):
        transcriber.push(speech(1.0))
    with pytest.raises(InputError, match="push it later") as caught:
        transcriber.push(speech(1.0))
    assert caught.value.info.code == "overloaded"
    run_passes(llm, transcriber)
    transcriber.push(speech(1.0))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rate": 10}, "min_audio_rate"),
        ({"rate": "high"}, "rate='high' must be a number"),
        ({"min_chunk": 0}, "min_chunk=0 must be"),
        ({"pause": float("nan")}, "pause=nan must be"),
        ({"max_window": 2}, "max_window=2 must be a number from 0.5 to 1"),
        ({"max_buffer_bytes": 10}, "must be 384,000 or more"),
        ({"max_buffer_bytes": 1e9}, "must be an integer"),
        ({"idle_timeout": 0}, "idle_timeout=0 must be"),
        ({"max_sessions": 0}, "max_sessions=0 must be"),
        ({"vad": "loud"}, "vad='loud' must be"),
        ({"timestamps": "line"}, "timestamps='line' must be"),
        ({"cache_salt": 1}, "cache_salt"),
        ({"condition_on_previous_text": 1}, "must be True or False"),
    ],
)
def test_wrong_arguments(llm: LLM, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        llm.live_audio(**options)
    with pytest.raises(InputError, match=said):
        AsyncLLM(llm).stream_transcribe(blocks([]), **options)


def test_models_that_do_not_transcribe(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="does not transcribe speech"):
        LLM(checkpoint).live_audio()


def test_a_language_model_with_audio(tmp_path: Path) -> None:
    """A family without timestamps: windows overlap where there is no pause."""
    llm = LLM(family.save(family.load_rows()["qwen3_asr"], tmp_path / "qwen3_asr"), max_num_seqs=2)
    options = {"language": "en", "max_window": 1.5, "min_chunk": 0.5}
    events = play(llm, speech(-0.5, 3.4, -1, 0.7, seed=1), **options)
    check_promises(events)
    assert len(finals(events)) >= 2
    assert {event.language for event in events if event.text} == {"en"}


def test_rows_of_closed_windows_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder of Qwen3-ASR attends within windows, here of 2 s: a partial pass encodes only the last one."""
    llm = LLM(family.save(family.load_rows()["qwen3_asr"], tmp_path / "qwen3_asr"), max_num_seqs=2)
    model, encoded = llm.engine.loop.core.executor.runner.model, []
    encode = model.embed_multimodal

    def count(modality: str, tensors: Any) -> Any:
        encoded.extend(tensors["audio_frames"].tolist())
        return encode(modality, tensors)

    monkeypatch.setattr(model, "embed_multimodal", count)
    events = play(llm, speech(-1.2, 7.0, -1), language="en", max_window=8, min_chunk=0.5)
    check_promises(events)
    passes = sum(event.kind == "partial" for event in events)
    *partial, final = encoded
    assert passes > 8
    assert partial.count(200) == 3
    assert max(partial) < 300
    assert sum(partial) < 3 * 200 + 300 * passes
    assert final > 700
    assert llm.stats.prefix_hits > 0


def test_closed_windows_are_not_encoded_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass encodes its samples once, for all its requests, and none before the end of the last final text."""
    model, encoded, passes, opened = llm.engine.loop.core.executor.runner.model, [], [], [0]
    encode, transcribe, open_next = model.embed_multimodal, LiveTranscriber._transcribe, LiveTranscriber._begin
    monkeypatch.setattr(model, "embed_multimodal", lambda *given: [encoded.append(one) or one for one in encode(*given)])

    def record(transcriber: LiveTranscriber, start: int, end: int, *given: Any) -> Any:
        assert start >= opened[-1]
        passes.append((start, end))
        return transcribe(transcriber, start, end, *given)

    monkeypatch.setattr(LiveTranscriber, "_transcribe", record)
    monkeypatch.setattr(LiveTranscriber, "_begin", lambda self, at: opened.append(at) or open_next(self, at))
    samples = speech(-1.2, 0.7, -1, 0.4, -0.5, 2.0, -1)
    events = play(llm, samples, language=None, max_window=0.8, temperature=(0.0, 0.5), **DEFAULTS)
    assert len([event for event in events if event.kind == "final"]) >= 3
    assert any(len(event.window.attempts) > 1 for event in events if event.kind == "final")
    assert len(encoded) == len(set(passes))


def plain(text: str) -> str:
    return " ".join(filter(None, map(word_key, re.split(r"[\s-]+", text))))


@pytest.mark.shared
def test_finals_are_the_offline_transcript(shared_data: Path) -> None:
    llm = LLM(shared_data / "whisper-tiny.en", dtype="float32", max_num_seqs=2)
    for name in ("jfk", "lj001_0001"):
        samples, _ = soundfile.read(shared_data / "speech" / f"{name}.flac", dtype="float32")
        events = play(llm, samples, block=0.5, language=None, sampling_params=None, min_chunk=2.0, pause=1.5, **DEFAULTS)
        check_promises(events)
        (offline,) = llm.transcribe((samples, RATE), use_tqdm=False)
        assert plain(" ".join(finals(events))) == plain(offline.text)
