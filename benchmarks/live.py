"""Lag behind real time of live transcription: partial and final texts, median and worst, with 1 and more streams at once.

`python -m benchmarks.live DIR FILE --streams 1 4`: a checkpoint that transcribes, and an audio file.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import soundfile
from sensorium import AsyncLLM

BLOCK = 0.1  # seconds


async def play(samples: np.ndarray, rate: int, started: float) -> AsyncIterator[np.ndarray]:
    """Yield blocks when they have been spoken."""
    size = round(BLOCK * rate)
    for start in range(0, len(samples), size):
        block = samples[start : start + size]
        await asyncio.sleep(max(0.0, started + (start + len(block)) / rate - time.monotonic()))
        yield block


async def measure(engine: AsyncLLM, samples: np.ndarray, rate: int, min_chunk: float) -> dict[str, list[float]]:
    """Return the seconds from the end of the audio of each text until the text is there."""
    lags: dict[str, list[float]] = {"partial": [], "final": []}
    started = time.monotonic()
    async for event in engine.stream_transcribe(play(samples, rate, started), rate, min_chunk=min_chunk):
        if event.kind in lags:
            lags[event.kind].append(time.monotonic() - started - event.end)
    return lags


async def measure_all(args: argparse.Namespace) -> None:
    samples, rate = soundfile.read(args.file, dtype="float32")
    async with AsyncLLM(args.model, dtype=args.dtype) as engine:
        await measure(engine, samples[: 5 * rate], rate, args.min_chunk)  # warm up
        for count in args.streams:
            found = await asyncio.gather(*(measure(engine, samples, rate, args.min_chunk) for _ in range(count)))
            for kind in ("partial", "final"):
                lags = [lag for one in found for lag in one[kind]]
                if lags:
                    shown = f"median {statistics.median(lags):.2f} s, worst {max(lags):.2f} s"
                    print(f"{count} streams, {kind}: {shown}, {len(lags)} events")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--min-chunk", type=float, default=1.0)
    parser.add_argument("--dtype", default="float32")
    asyncio.run(measure_all(parser.parse_args()))


if __name__ == "__main__":
    main()
