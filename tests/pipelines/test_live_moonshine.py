"""Live transcription by Moonshine Streaming: of an open window, the encoder computes only the rows that new samples change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import family
import numpy as np
import pytest
import torch
from sensorium import LLM, SamplingParams
from sensorium.engine.setup.doctor import explain
from sensorium.models.families.moonshine.model import MoonshineStreaming
from sensorium.pipelines.speech.live import LiveTranscriber
from sensorium.pipelines.speech.options import LiveOptions
from streams import GATES, check_promises, finals, play, run_passes, speech

RATE = 16_000
OPTIONS = {**GATES, "language": None, "sampling_params": SamplingParams(temperature=0.0, max_tokens=6), "max_window": 0.9}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    row = family.load_rows()["moonshine_streaming"]
    with LLM(family.save(row, tmp_path_factory.mktemp("models") / "moonshine_streaming"), max_num_seqs=4) as engine:
        yield engine


def model_of(llm: LLM) -> MoonshineStreaming:
    model = llm.engine.loop.core.executor.runner.model
    assert isinstance(model, MoonshineStreaming)
    return model


def count_rows(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with the rows that the first layer of the encoder computes in each call."""
    layer, rows = model_of(llm).encoder.layers[0], []
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda x, *rest: rows.append(len(x)) or forward(x, *rest))
    return rows


@torch.inference_mode()
@pytest.mark.parametrize("seed", range(4))
def test_a_growing_window_has_the_rows_of_the_whole(llm: LLM, seed: int) -> None:
    """Whatever its lengths are, whole frames or not, also if it does not grow or becomes shorter."""
    model, random = model_of(llm), np.random.default_rng(seed)
    samples = torch.from_numpy(speech(1.0, seed=seed))
    lengths = np.sort(random.integers(80, len(samples) + 1, 12)).tolist()
    model.max_streams, calls = 2, [*lengths, lengths[-1], lengths[3], len(samples)]
    for length in calls:
        item = torch.nn.functional.pad(samples[:length], (0, -length % 80))
        tensors: dict[str, Any] = {"input_values": item, "audio_samples": torch.tensor([length])}
        (whole,) = model.embed_multimodal("audio", tensors)
        (rows,) = model.embed_multimodal("audio", {**tensors, "audio_stream": torch.tensor([[seed, 0]])})
        assert rows.shape == whole.shape
        torch.testing.assert_close(rows, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_events_are_those_of_windows_encoded_as_a_whole(llm: LLM, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = speech(-0.5, 2.2, -0.6, 0.4, -0.2, 0.8, -0.4, seed=seed)
    events = play(llm, samples, **OPTIONS)
    check_promises(events)
    assert len(finals(events)) >= 3
    monkeypatch.setattr(llm.speech, "open_window", lambda *given: None)
    whole = play(llm, samples, **OPTIONS)
    without = [replace(event, window=None) for event in events]  # log probabilities may differ in the last bits
    assert without == [replace(event, window=None) for event in whole]


def test_a_pass_encodes_only_what_is_new(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each pass, the first layer computes the new rows, the few rows that they change, and the rows that these attend to."""
    rows = count_rows(llm, monkeypatch)
    events = play(llm, speech(-1.7, 0.85, -0.5), **{**OPTIONS, "min_chunk": 0.1, "max_window": 1.0})
    assert len([event for event in events if event.kind == "partial"]) >= 4
    new, last, context = 0.256 * 50, 4, 15 + 3  # samples come in blocks of 8 frames of 32 ms; (16, 4) is the layer's window
    assert len(rows) >= 5
    assert max(rows[1:]) <= new + last + context
    monkeypatch.setattr(llm.speech, "open_window", lambda *given: None)
    rows.clear()
    play(llm, speech(-1.7, 0.85, -0.5), **{**OPTIONS, "min_chunk": 0.1, "max_window": 1.0})
    assert max(rows) == 50


def test_a_stream_whose_state_was_dropped_goes_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three streams take turns in a model that keeps the state of one."""
    monkeypatch.setattr(model_of(llm), "max_streams", 1)
    options: dict[str, Any] = {**OPTIONS, "min_chunk": 0.2, "pause": 0.3}
    clips = [speech(-0.4, 0.8, -0.5, seed=seed) for seed in range(3)]
    streams, events = [LiveTranscriber(llm.engine, LiveOptions(**options)) for _ in clips], [[] for _ in clips]
    for at in range(0, len(clips[0]), 1600):
        for transcriber, clip, found in zip(streams, clips, events, strict=True):
            transcriber.push(clip[at : at + 1600])
            found += run_passes(llm, transcriber)[0]
    for transcriber, clip, found in zip(streams, clips, events, strict=True):
        transcriber.finish()
        found += run_passes(llm, transcriber)[0]
        assert finals(found) == finals(play(llm, clip, **options))
        assert len(model_of(llm)._windows._states) <= 1


@torch.inference_mode()
def test_windows_that_were_not_used_longest_are_dropped(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed window keeps no state, nor does one whose rows are not finite. Windows of one call are encoded by themselves."""
    model, samples = model_of(llm), torch.from_numpy(speech(0.5))
    monkeypatch.setattr(model, "max_streams", 2)

    def encode(*windows: tuple[int, int], data: torch.Tensor = samples) -> tuple[list[torch.Tensor], list[int]]:
        lengths = torch.tensor([len(data)] * len(windows))
        tensors = {"input_values": data.repeat(len(windows)), "audio_samples": lengths, "audio_stream": torch.tensor(windows)}
        return model.embed_multimodal("audio", tensors), list(model._windows._states)

    for number in list(model._windows._states):
        model.free_stream(number)
    (alone,), _ = encode((1, 0))
    rows, kept = encode((1, 0), (2, 0))
    assert kept == [1, 2]
    assert all(one.equal(alone) or torch.allclose(one, alone, atol=1e-5) for one in rows)
    assert encode((1, 0))[1] == [2, 1]
    assert encode((3, 0))[1] == [1, 3]
    assert encode((1, 1))[1] == [3]
    assert encode((4, 0), data=samples * torch.nan)[1] == [3]
    model.free_stream(3)


def test_limits_on_audio_hold(llm: LLM, tmp_path: Path) -> None:
    folder = family.save(family.load_rows()["moonshine_streaming"], tmp_path / "model")
    with LLM(folder, max_num_seqs=2, limit_mm_per_prompt={"audio": 0}) as none:
        events = play(none, speech(-0.4, 0.5, -0.8), **OPTIONS)
    assert [event.error.message for event in events if event.kind == "final"] == [
        next(event.error.message for event in events if event.error)
    ]
    assert any("audio" in event.error.message for event in events if event.error)


def test_normalised_samples_are_encoded_as_a_whole(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    files = llm.speech.files
    monkeypatch.setattr(llm.speech, "files", replace(files, audio={**files.audio, "do_normalize": True}))
    assert llm.speech.open_window(torch.zeros(8000), 1, False, torch.float32) is None


def test_the_memory_plan_counts_the_states(llm: LLM) -> None:
    plan, alone = llm.explain(), explain(replace(llm.config, max_live_streams=1))
    model = model_of(llm)
    samples = torch.zeros(16_000)
    with torch.inference_mode():
        _, kept = model.encoder.extend(samples, len(samples), None)
    state = model.stream_bytes(50)
    assert state * 0.6 < sum(one.nbytes for one in (*kept.inputs, kept.rows)) <= state
    assert plan.streams == 4 * state  # max_num_seqs
    assert alone.streams == state
    assert plan.media_held == alone.media_held, "a lost state needs no samples of earlier passes"


def test_a_broken_state_fails_one_pass(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A final text has the error of its window, and the stream goes on."""
    encoder, calls = model_of(llm).encoder, []
    extend = encoder.extend

    def fail(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 1:
            raise RuntimeError("broken")
        return extend(*given)

    monkeypatch.setattr(encoder, "extend", fail)
    events = play(llm, speech(-0.4, 0.5, -0.8, 0.5, -0.5), **{**OPTIONS, "min_chunk": 60.0})
    errors = [event.error and event.error.code for event in events if event.kind == "final"]
    assert errors[0] == "encoder_failed"
    assert errors[-1] is None
    assert events[-1].kind == "ended"
