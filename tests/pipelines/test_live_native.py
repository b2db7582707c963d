"""Live transcription by a model with a causal encoder: chunks are encoded once, with the text of the whole audio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import family
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sensorium import LLM, AsyncLLM, Gap, LiveEvent, SamplingParams
from sensorium.callers.errors import ConfigError, InputError
from sensorium.engine import config
from sensorium.engine.sampling_params import RepetitionDetectionParams, StructuredOutputsParams
from sensorium.engine.scheduler.request import State
from sensorium.engine.setup.doctor import explain
from sensorium.engine.worker.isolate import isolate_failures
from sensorium.mm.fields import merge
from sensorium.models.families.voxtral_realtime import processing
from sensorium.pipelines.speech import live_native
from streams import check_that_the_loop_is_not_held
from waiting import assert_idle, wait_until

RATE = 16_000
WHOLE = {"pause": 60.0, "max_window": 3600.0, "vad": False}  # one final text


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    row = family.load_rows()["voxtral_realtime"]
    return LLM(family.save(row, tmp_path_factory.mktemp("models") / "voxtral_realtime"), max_num_seqs=16)


def clip(seconds: float, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.3, round(seconds * RATE)).astype(np.float32)


def whole_text(llm: LLM, samples: np.ndarray) -> str:
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    prompt = {"prompt": "[STREAMING_PAD]", "multi_modal_data": {"audio": (samples, RATE)}}
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    text = llm.get_tokenizer().decode(output.outputs[0].token_ids, False)
    return llm.speech.parse_transcript(text, None)[0]


async def source(parts: Sequence[Any]) -> AsyncIterator[Any]:
    for part in parts:
        yield part
        await asyncio.sleep(0)


async def stream(llm: LLM, parts: Sequence[Any], **options: Any) -> list[LiveEvent]:
    return [event async for event in AsyncLLM(llm).stream_transcribe(source(parts), **options)]


def finals(events: Sequence[LiveEvent]) -> list[str]:
    return [event.text for event in events if event.kind == "final"]


@pytest.mark.parametrize(("block", "chunk"), [(1000, 0.08), (7777, 0.48), (40_000, 5.0)])
def test_the_streamed_text_is_the_text_of_the_whole(
    llm: LLM, block: int, chunk: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each frame is encoded once, and every partial text is stable."""
    samples, model, frames = clip(3.3), llm.engine.loop.core.executor.runner.model, []
    expected, encode = whole_text(llm, samples), model.embed_multimodal
    rows = llm.speech.num_rows(-(-len(samples) // 160))

    def count(modality: str, tensors: Any) -> Any:
        frames.append(len(tensors["input_features"]))
        return encode(modality, tensors)

    monkeypatch.setattr(model, "embed_multimodal", count)
    parts = np.split(samples, range(block, len(samples), block))
    events = asyncio.run(stream(llm, parts, min_chunk=chunk, **WHOLE))
    assert expected
    assert finals(events) == [expected]
    assert sum(frames) == 8 * rows
    partials = [event for event in events if event.kind == "partial"]
    assert partials
    assert all(expected.startswith(event.text.rstrip("\ufffd")) and event.stable_upto == len(event.text) for event in partials)
    assert events[-1].kind == "ended"
    wait_until(lambda: not llm.engine.loop._names)
    assert_idle(llm)


@pytest.mark.parametrize("rate", [RATE, 44_100])
def test_a_long_block_does_not_hold_the_loop(llm: LLM, rate: int) -> None:
    block = np.concatenate([clip(1.3), 1e-5 * clip(30), clip(2.1, 1)])
    asyncio.run(check_that_the_loop_is_not_held(llm, block, rate))


def test_streams_at_once_have_the_text_that_they_have_alone(llm: LLM) -> None:
    clips = [clip(1 + 0.1 * seed, seed) for seed in range(16)]

    async def together() -> list[list[LiveEvent]]:
        return await asyncio.gather(*(stream(llm, np.split(one, 5), **WHOLE) for one in clips))

    found = asyncio.run(together())
    assert [finals(events) for events in found] == [[whole_text(llm, one)] for one in clips]


def test_long_streams_begin_new_sequences(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that is too long ends, and the next samples begin another one, with the same cost per second."""
    monkeypatch.setattr(live_native, "_RESERVE", llm.max_model_len - 90)
    samples = clip(12)
    events = asyncio.run(stream(llm, np.split(samples, 40), min_chunk=0.5, **WHOLE))
    assert len(finals(events)) >= 2
    assert events[-1].end == 12
    starts = [event.start for event in events if event.kind == "final"]
    assert starts == sorted(starts)


def test_a_gap_ends_the_text(llm: LLM) -> None:
    events = asyncio.run(stream(llm, [clip(1, 1), Gap(100), clip(1, 2)], **WHOLE))
    assert finals(events) == [whole_text(llm, clip(1, seed)) for seed in (1, 2)]
    assert events[-1].end == 102


def test_closing_a_stream_frees_its_sequence(llm: LLM) -> None:
    rows = llm.stats.encoder_bytes

    async def main() -> None:
        events = AsyncLLM(llm).stream_transcribe(source([clip(3), clip(60)]), min_chunk=0.1, vad=False)
        await anext(events)
        await events.aclose()

    asyncio.run(main())
    wait_until(lambda: not llm.engine.loop._names)
    assert_idle(llm)
    assert not llm.engine.loop.core.executor.runner.model._streams._states
    assert llm.stats.encoder_bytes == rows, "and no rows"


def test_states_of_streams_are_in_the_memory_plan(llm: LLM) -> None:
    model, rule = llm.engine.loop.core.executor.runner.model, llm.speech.stream_rule()
    samples = torch.from_numpy(clip(4 * rule.row_samples / RATE))[: 2 * rule.row_samples + rule.overlap]
    with torch.inference_mode():
        for row in (0, 2):
            model.embed_multimodal("audio", merge([rule.item(samples, 1, row, torch.float32)], torch.device("cpu")))
    state = model._streams._states[1]
    tensors = [*state.caches, *(one for pair in state.tails.values() for one in pair)]
    assert model.stream_bytes(1) == sum(one.nbytes for one in tensors)
    model.free_stream(1)
    plan = explain(llm.config)
    assert plan.streams == 16 * model.stream_bytes(1)
    rows = min(config.MAX_STREAM_ROWS, llm.max_model_len)
    alone = explain(replace(llm.config, max_live_streams=1))
    assert plan.streams - alone.streams == 15 * model.stream_bytes(1)
    assert plan.media_held - alone.media_held == 15 * model.input_bytes("audio", rows)
    assert plan.total - replace(plan, streams=0).total == plan.streams
    assert ("states of live streams", f"{plan.streams / 2**20:10,.1f} MiB") in plan.rows()


@pytest.mark.parametrize(
    ("options", "sessions", "name"),
    [
        ({"max_live_streams": 1}, 8, "max_live_streams"),
        ({"max_live_streams": 9, "max_num_seqs": 1}, 8, "max_num_seqs"),
        ({}, 1, "max_sessions"),
    ],
)
def test_more_streams_than_states_are_refused(
    llm: LLM, options: dict[str, int], sessions: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.engine, "config", replace(llm.config, **options))
    with (
        llm.live_audio(max_sessions=sessions),
        pytest.raises(InputError, match=f"1 live streams are open, and {name}.* is 1;") as caught,
    ):
        llm.live_audio(max_sessions=sessions)
    assert (caught.value.info.code, caught.value.info.param) == ("overloaded", name)


def test_chunks_are_encoded_again_after_another_item_failed(llm: LLM) -> None:
    """Last chunks of two streams share an encoder call; it fails once, and the next calls find the states."""
    model, rule = llm.engine.loop.core.executor.runner.model, llm.speech.stream_rule()
    samples = torch.from_numpy(clip(4 * rule.row_samples / RATE))[: 2 * rule.row_samples + rule.overlap]

    def encode(items: Sequence[tuple[int, int]], fails: bool = False) -> list[torch.Tensor]:
        chunks = [rule.item(samples, number, row, torch.float32) for number, row in items]
        rows = model.embed_multimodal("audio", merge(chunks, torch.device("cpu")))
        if fails and len(items) > 1:
            raise InputError("another item failed")
        return rows

    with torch.inference_mode():
        encode([(1, 0), (2, 0)])
        expected = encode([(1, 2), (2, 2)])
        assert isolate_failures([(1, 2), (2, 2)], partial(encode, fails=True))[0].equal(expected[0])
        with pytest.raises(InputError, match="no state of this stream before row 24"):
            encode([(1, 6)])
        assert encode([(1, 2)])[0].equal(expected[0]), "the state was kept"
    model.free_stream(1)
    model.free_stream(2)


@pytest.mark.parametrize("evicted", ["all", "first", "last", "none"])
def test_a_preempted_stream_is_encoded_again_from_its_start(llm: LLM, evicted: str) -> None:
    """`evicted`: chunks whose rows have left the encoder cache before the sequence loses its blocks."""
    samples = clip(5)
    scheduler = llm.engine.loop.core.scheduler

    def idle(engine_loop: Any) -> list[Any]:
        return [request for request in scheduler.requests.values() if request.state is State.IDLE]

    def preempt(engine_loop: Any) -> bool:
        """Take the blocks of the sequence if it is idle."""
        if not (requests := idle(engine_loop)):
            return False
        request = requests[0]
        gone = {"all": request.features, "first": request.features[:1], "last": request.features[-1:], "none": []}[evicted]
        for feature in gone:
            scheduler.encoder_cache.discard(feature.hash)
        scheduler._queues.preempt(request)
        return True

    async def parts() -> AsyncIterator[Any]:
        for number, part in enumerate(np.split(samples, 10)):
            yield part
            while 3 <= number <= 5 and not any(len(one.features) >= number - 2 for one in await call(idle)):
                await asyncio.sleep(0)
            while number == 5 and not await call(preempt):
                await asyncio.sleep(0)

    async def call(function: Any) -> Any:
        return await asyncio.wrap_future(llm.engine.loop.call(function))

    async def main() -> list[LiveEvent]:
        return [event async for event in AsyncLLM(llm).stream_transcribe(parts(), **WHOLE)]

    events = asyncio.run(main())
    assert finals(events) == [whole_text(llm, samples)]
    assert all(event.error is None for event in events)


def test_a_stream_goes_on_with_updated_weights(llm: LLM) -> None:
    """The states of its encoder are gone, so all chunks are encoded again. The same weights give the same text."""
    samples = clip(5)
    stored = load_file(Path(str(llm.engine.config.model)) / "model.safetensors")
    update = {name: tensor for name, tensor in stored.items() if "q_proj" in name}
    version = llm.weights_version

    async def parts() -> AsyncIterator[Any]:
        for number, part in enumerate(np.split(samples, 10)):
            yield part
            if number in (3, 7):
                await AsyncLLM(llm).update_weights(update, "pause")

    async def main() -> list[LiveEvent]:
        return [event async for event in AsyncLLM(llm).stream_transcribe(parts(), **WHOLE)]

    events = asyncio.run(main())
    assert llm.weights_version == version + 2
    assert all(event.error is None for event in events)
    assert finals(events) == [whole_text(llm, samples)]


def test_an_error_in_the_last_chunk_ends_the_sequence(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    model, starts = llm.engine.loop.core.executor.runner.model, []
    encode = model.embed_multimodal

    def fail(modality: str, tensors: Any) -> Any:
        starts.extend(start for _, start in tensors["audio_stream"].tolist())
        if starts[-1]:
            raise InputError("broken")
        return encode(modality, tensors)

    monkeypatch.setattr(model, "embed_multimodal", fail)
    monkeypatch.setattr(processing, "_MAX_CHUNK", 42)
    events = asyncio.run(stream(llm, [clip(48 * 0.08)], min_chunk=5.0, **WHOLE))  # chunks of 42, 42 and 13 rows
    assert [event.error.code for event in events if event.error is not None] == ["encoder_failed"]
    assert [start for start in starts if not start] == [0], "silence begins no other sequence"
    assert events[-1].kind == "ended"


def test_an_error_in_the_first_chunk_has_its_code(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(modality: str, tensors: Any) -> Any:
        raise InputError("broken")

    monkeypatch.setattr(llm.engine.loop.core.executor.runner.model, "embed_multimodal", fail)
    events = asyncio.run(stream(llm, [clip(1)], **WHOLE))
    assert {event.error.code for event in events if event.error is not None} == {"encoder_failed"}


def test_an_engine_without_its_encoder_takes_no_live_audio(llm: LLM) -> None:
    with LLM(llm.config.model, parts="decoder") as language, pytest.raises(InputError) as caught:
        language.live_audio(RATE)
    assert caught.value.info.code == "unsupported"


def test_rows_of_chunks_stay_in_memory(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    store, written = llm.engine.loop.core.executor.runner.store, []
    put = store.put
    monkeypatch.setattr(store, "load", lambda *given: written.append(given))
    monkeypatch.setattr(store, "put", lambda key, rows, write=True: (written.append(key) if write else None, put(key, rows)))
    asyncio.run(stream(llm, [clip(1)], **WHOLE))
    assert not written


def test_a_context_without_room_for_a_stream(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_native, "_RESERVE", llm.max_model_len)
    with pytest.raises(ConfigError, match="raise it"):
        llm.live_audio()


def test_silence_costs_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence makes no request. After `pause` of it, the sequence ends; speech begins another one."""
    quiet, steps, calls = 1e-5 * clip(20), llm.stats.steps, llm.stats.encoder_calls
    assert [event.kind for event in asyncio.run(stream(llm, np.split(quiet, 100)))] == ["ended"]
    assert (llm.stats.steps, llm.stats.encoder_calls) == (steps, calls)
    model, starts = llm.engine.loop.core.executor.runner.model, []
    encode = model.embed_multimodal

    def count(modality: str, tensors: Any) -> Any:
        starts.extend(start for _, start in tensors["audio_stream"].tolist())
        return encode(modality, tensors)

    monkeypatch.setattr(model, "embed_multimodal", count)
    parts = [quiet[: 3 * RATE], clip(1.5), quiet[: 6 * RATE], clip(1.0), quiet[: 4 * RATE]]
    samples = np.concatenate(parts)
    events = asyncio.run(stream(llm, np.split(samples, range(4000, len(samples), 4000)), min_chunk=0.24))
    assert starts.count(0) == 2  # sequences
    assert max(starts) < 4 * (32 + (0.5 + 1.5 + 1.5 + 0.5) / 0.08)
    assert events[-1].end == pytest.approx(15.5)
    assert all(event.start >= 2.4 for event in events)


def test_phrases_are_boosted(llm: LLM) -> None:
    """Tokens without text between those of a phrase do not end it."""
    samples = clip(3.0)
    plain, boosted = (
        " ".join(finals(asyncio.run(stream(llm, np.split(samples, 10), vad=False, boost=boost))))
        for boost in ([], [("two five", 20.0)])
    )
    assert "two five" not in plain
    assert "two five" in boosted


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"language": "de"}, "always detects the language"),
        ({"hotwords": "Ann"}, "unknown argument 'hotwords'"),
        ({"speakers": True}, "who says what"),
        ({"min_chunk": 0}, "min_chunk=0 must be"),
        ({"vad": "loud"}, "vad='loud' must be"),
        ({"max_window": 0}, "max_window=0 must be"),
        ({"max_buffer_bytes": 10}, "two chunks"),
        ({"sampling_params": SamplingParams(stop=["a"])}, "sampling_params.stop would"),
        ({"sampling_params": SamplingParams(stop_token_ids=[3])}, "sampling_params.stop_token_ids would"),
        ({"sampling_params": SamplingParams(repetition_detection=RepetitionDetectionParams())}, "repetition_detection would"),
        (
            {"sampling_params": SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))},
            "structured_outputs would",
        ),
    ],
)
def test_wrong_arguments(llm: LLM, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        llm.live_audio(**options)
