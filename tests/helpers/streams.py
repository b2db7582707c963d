"""Live streams of noise and silence, and what must hold for their events."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest
from sensorium import LLM, AsyncLLM, LiveEvent, SamplingParams
from sensorium.mm.media import audio
from sensorium.pipelines.run import Run
from sensorium.pipelines.speech import live, live_native
from sensorium.pipelines.speech.live import LiveTranscriber
from sensorium.pipelines.speech.live_windows import LiveWindows
from sensorium.pipelines.speech.merge import join_texts
from sensorium.pipelines.speech.options import LiveOptions

RATE = 16_000
DEFAULTS = {"log_prob_threshold": -1.0, "compression_ratio_threshold": 2.4, "no_speech_threshold": 0.6}
SHORT = SamplingParams(temperature=0.0, max_tokens=6)
GATES = {"log_prob_threshold": None, "compression_ratio_threshold": None, "no_speech_threshold": None}
OPTIONS: dict[str, Any] = {"language": "de", "sampling_params": SHORT, "min_chunk": 0.2, "pause": 0.3, **GATES}


def speech(*parts: float, seed: int = 0) -> np.ndarray:
    """Return stretches of noise (positive seconds) and of near silence (negative)."""
    random = np.random.default_rng(seed)
    return np.concatenate([
        random.normal(0, 1, round(abs(part) * RATE)) * (0.3 if part > 0 else 1e-5) for part in parts
    ]).astype(np.float32)  # fmt: skip


async def blocks(parts: Sequence[Any], hold: asyncio.Event | None = None) -> AsyncIterator[Any]:
    for part in parts:
        yield part
        await asyncio.sleep(0)
    if hold is not None:
        await hold.wait()


def run_passes(llm: LLM, transcriber: LiveTranscriber) -> tuple[list[LiveEvent], int]:
    """Run all passes that are due. Return new events, and how many tokens were computed."""
    tokens = 0
    while (task := transcriber.next_task()) is not None or transcriber.busy:
        if task is None:
            continue
        run = Run(task)
        requests = run.start()
        while not run.done:
            ((_, output),) = llm.serve(requests, False)
            tokens += len(output.prompt_token_ids) + len(output.outputs[0].token_ids)
            requests = run.resume(requests[0], output)
    events = list(transcriber.events)
    transcriber.events.clear()
    return events, tokens


def play(llm: LLM, samples: np.ndarray, block: float = 0.1, **options: Any) -> list[LiveEvent]:
    """Return the events of a stream whose passes take no time."""
    transcriber = LiveTranscriber(llm.engine, LiveOptions(**OPTIONS | options))
    found = []
    for part in np.split(samples, range(round(block * RATE), len(samples), round(block * RATE))):
        transcriber.push(part)
        found += run_passes(llm, transcriber)[0]
    transcriber.finish()
    return found + run_passes(llm, transcriber)[0]


async def count_work(llm: LLM, block: np.ndarray, rate: float, **options: Any) -> tuple[list[LiveEvent], dict[str, int]]:
    """Return the events of a stream of one block, and the most values of each kind of work between two turns of the loop."""
    done: dict[str, Counter[int]] = {"mixed": Counter(), "resampled": Counter(), "classified": Counter()}
    turn, mix_block, classify, make = 0, audio.Mixer.mix, LiveWindows.classify, audio.make_resampler

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    def mix(mixer: audio.Mixer, samples: np.ndarray) -> np.ndarray:
        done["mixed"][turn] += samples.size
        return mix_block(mixer, samples)

    def find_speech(windows: LiveWindows, last: bool = False) -> bool:
        before = windows.length
        found = classify(windows, last)
        done["classified"][turn] += windows.length - before
        return found

    class Resampler:
        def __init__(self, source: float, target: float) -> None:
            self.stream = make(source, target)

        def resample_chunk(self, samples: np.ndarray, last: bool = False) -> np.ndarray:
            done["resampled"][turn] += len(samples)
            return self.stream.resample_chunk(samples, last)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audio.Mixer, "mix", mix)
        patch.setattr(LiveWindows, "classify", find_speech)
        patch.setattr(audio, "make_resampler", lambda source, target: Resampler(source, target) if source != target else None)
        counter = asyncio.ensure_future(count_turns())
        events = [event async for event in AsyncLLM(llm).stream_transcribe(blocks([block]), rate, **options)]
        counter.cancel()
    return events, {kind: max(counts.values(), default=0) for kind, counts in done.items()}


async def check_that_the_loop_is_not_held(llm: LLM, block: np.ndarray, rate: float, **options: Any) -> None:
    """A long block is worked on in steps, between which the loop runs, with the events of one step."""
    events, most = await count_work(llm, block, rate, **options)
    assert most["mixed"] <= 1 << 15
    assert most["resampled"] <= 1 << 15
    assert most["classified"] <= 1.6 * RATE, "the first 1.5 s, or 0.5 s and what is left of 8 frames"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audio, "_STEP", 1 << 30)
        for module in (live, live_native):
            patch.setattr(module, "STEP_SECONDS", 1e9)
        whole, most = await count_work(llm, block, rate, **options)
    assert most["mixed"] == block.size
    assert most["classified"] > 5 * RATE, "the block has a long silence, in which no pass is made"
    assert events == whole
    assert finals(events)


def finals(events: Sequence[LiveEvent]) -> list[str]:
    return [event.text for event in events if event.kind == "final"]


def check_promises(events: Sequence[LiveEvent]) -> None:
    """Stable characters of each partial text are in the final texts and the open text after it."""
    done = promised = ""
    for event in events:
        if event.kind == "partial":
            text = join_texts([done, event.text])
            assert text.startswith(promised)
            promised = join_texts([done, event.text[: event.stable_upto]])
        elif event.kind == "final":
            text = done = join_texts([done, event.text])
            assert text.startswith(promised) or promised.startswith(text)
    assert done.startswith(promised)
    assert events[-1].kind == "ended"
    assert all(event.lag >= 0 for event in events)
