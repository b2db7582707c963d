"""Count the work of live streams: `python -m benchmarks.live_work FILE MODEL ... [--write]`.

A clip is streamed block by block, and each pass waits for the one before it, so that the numbers do not depend on the load of
the machine. They are counted with drafts, where the text of a pass is the draft of the next one, and without.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .live import BLOCK, RATE
from .throughput import machine, put

SECTION = "Work of live transcription"
NOTE = (
    "The first minute of {clip}, then 58 minutes of silence, then the same minute again, each with its own noise of -120 dB, "
    "so that no encoder rows are shared. A pass per second of audio. Steps: those of the decoder, with the prefill of each "
    "pass. CPU: processor seconds per second of audio. Without drafts: `num_speculative_tokens` is 0. Goals: a third of the "
    "steps, and minute 60 at most 1.05 times minute 1."
)
NOISE = 1e-6
MINUTE, SILENCE = 60, 58 * 60  # seconds
DRAFTS: dict[str, dict[str, Any]] = {"yes": {}, "no": {"speculative_config": {"num_speculative_tokens": 0}}}


async def work(model: Path, clip: np.ndarray, options: dict[str, Any]) -> list[tuple[int, int, float]]:
    """Return passes, steps and CPU seconds of the first minute and of minute 60."""
    from sensorium import AsyncLLM
    from sensorium.pipelines.run import run_async
    from sensorium.pipelines.speech.live import LiveTranscriber
    from sensorium.pipelines.speech.options import LiveOptions

    async with AsyncLLM(model, device="cpu", dtype="float32", **options) as llm:
        stream = LiveTranscriber(llm.engine, LiveOptions(language="en", rate=RATE))

        async def passes(samples: np.ndarray) -> int:
            count = 0
            for block in blocks(samples):
                stream.push(block)
                while (task := stream.next_task()) is not None:
                    await run_async(llm, task)
                    count += 1
            return count

        counted = list[tuple[int, int, float]]()
        for number in (1, 60):
            steps, began = llm.engine.stats.steps, time.process_time()
            noise = np.random.default_rng(number).normal(0, NOISE, len(clip))
            count = await passes((clip + noise).astype(np.float32))
            counted.append((count, llm.engine.stats.steps - steps, time.process_time() - began))
            if number == 1:
                await passes(np.zeros(SILENCE * RATE, np.float32))
        if (error := next((event.error for event in stream.events if event.error is not None), None)) is not None:
            raise RuntimeError(error)
        return counted


def blocks(samples: np.ndarray) -> Iterator[np.ndarray]:
    size = round(BLOCK * RATE)
    yield from (samples[start : start + size] for start in range(0, len(samples), size))


def main() -> None:
    import soundfile

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="at least a minute of English at 16 kHz")
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    args = parser.parse_args()
    clip = soundfile.read(args.file, dtype="float32")[0][: MINUTE * RATE]
    lines = ["| model | drafts | minute | passes | steps | steps per pass | CPU |", "|---|---|---|---|---|---|---|"]
    for model in args.models:
        for drafts, options in DRAFTS.items():
            for number, (count, steps, seconds) in zip((1, 60), asyncio.run(work(model, clip, options)), strict=True):
                cells = [model.name, drafts, number, count, steps, f"{steps / count:.1f}", f"{seconds / MINUTE:.2f}"]
                lines.append(f"| {' | '.join(map(str, cells))} |")
                print(lines[-1], flush=True)
    if args.write:
        put(SECTION, "\n".join([machine(), "", NOTE.format(clip=args.file.name), "", *lines]))


if __name__ == "__main__":
    main()
