"""Live streams of noise and silence, and what must hold for their events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
from sensorium import LLM, LiveEvent, SamplingParams
from sensorium.pipelines.speech.live import LiveTranscriber
from sensorium.pipelines.speech.merge import join_texts
from sensorium.pipelines.tasks import advance

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
    while (task := transcriber.next_task()) is not None:
        step = advance(task)
        while step is not None:
            ((_, output),) = llm.serve([step], False)
            tokens += len(output.prompt_token_ids) + len(output.outputs[0].token_ids)
            step = advance(task, output)
    events = list(transcriber.events)
    transcriber.events.clear()
    return events, tokens


def play(llm: LLM, samples: np.ndarray, block: float = 0.1, **options: Any) -> list[LiveEvent]:
    """Return the events of a stream whose passes take no time."""
    transcriber = LiveTranscriber(llm, **OPTIONS | options)
    found = []
    for part in np.split(samples, range(round(block * RATE), len(samples), round(block * RATE))):
        transcriber.push(part)
        found += run_passes(llm, transcriber)[0]
    transcriber.finish()
    return found + run_passes(llm, transcriber)[0]


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
