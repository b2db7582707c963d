"""Lag of live transcription behind real time: `python -m benchmarks.live MODEL FILE --peer-python VENV/bin/python`.

A clip is played at real speed. The lag of a word is the time from its end until a text with it is shown, and until it is
confirmed, that is, will not change. The peer is the method of whisper_streaming (arXiv 2307.14743) with faster-whisper, whose
interpreter is --peer-python: each pass transcribes a buffer of up to 15 s, cut at ends of segments, and words on which two
passes agree are confirmed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np

from .seams import words
from .speech import converted, version
from .throughput import ROOT, machine, put

SECTION = "Live transcription"
NOTE = (
    "Seconds from the end of a word until it is shown, and until it is confirmed: median and worst. Times of words are those "
    "of the transcript of the whole clip. CPU: processor seconds per second of audio, without loading. whisper_streaming: its "
    "method with faster-whisper in float32, with beam 5 as published. Each stream has its own faint noise, so that "
    "none shares encoder rows with another. {remark}"
)
RATE, BLOCK = 16_000, 0.1  # hertz; seconds
BUFFER = 15.0  # seconds after which whisper_streaming cuts its buffer
CONTEXT = 200  # characters of confirmed text in its prompts
Trace = list[tuple[float, int, int]]
"""Seconds since the start, and the number of words that are shown and confirmed then."""


async def play(samples: np.ndarray, started: float) -> AsyncIterator[np.ndarray]:
    """Yield blocks when they have been spoken."""
    size = round(BLOCK * RATE)
    for start in range(0, len(samples), size):
        block = samples[start : start + size]
        await asyncio.sleep(max(0.0, started + (start + len(block)) / RATE - time.monotonic()))
        yield block


async def measure(engine: Any, samples: np.ndarray, min_chunk: float) -> tuple[Trace, list[str]]:
    """Return the trace of a stream, and its words."""
    trace, final, started = Trace(), list[str](), time.monotonic()
    async for event in engine.stream_transcribe(play(samples, started), RATE, min_chunk=min_chunk):
        if event.kind not in ("partial", "final"):
            continue
        stable = len(final) + len(words(event.text[: event.stable_upto]))
        shown = len(final) + len(words(event.text))
        final += words(event.text) if event.kind == "final" else []
        trace.append((time.monotonic() - started, shown, len(final) if event.kind == "final" else stable))
    return trace, final


async def run_in_step(llm: Any, samples: np.ndarray, options: Any, threads: Any = None) -> list[Any]:
    """Return the events of a stream whose blocks wait for the passes over those before, so that they do not depend on time.

    Args:
        llm: an AsyncLLM. options: LiveOptions with the rate of the samples.
        threads: for the networks that tell speakers apart.
    """
    from sensorium.pipelines.run import run_async
    from sensorium.pipelines.speech.live import LiveTranscriber

    stream, size = LiveTranscriber(llm.engine, options), round(BLOCK * options.rate)
    for start in range(0, len(samples) + size, size):
        if start < len(samples):
            stream.push(samples[start : start + size])
        else:
            stream.finish()
        while (task := stream.next_task()) is not None or stream.busy:
            if task is not None:
                await run_async(llm, task, threads)
    if (error := next((event.error for event in stream.events if event.error is not None), None)) is not None:
        raise RuntimeError(error)
    return list(stream.events)


def noisy(samples: np.ndarray, seed: int) -> np.ndarray:
    """Return the samples with noise that nobody hears, so that streams of one clip share nothing in the encoder cache."""
    noise: np.ndarray = np.random.default_rng(seed).normal(0, 1e-4, len(samples)).astype(np.float32)
    return samples + noise


async def run_ours(args: argparse.Namespace, samples: np.ndarray) -> tuple[list[tuple[str, float]], dict[str, Any]]:
    """Return the words of the clip with their ends, and for each number of streams the traces, words and CPU seconds."""
    from sensorium import AsyncLLM

    async with AsyncLLM(args.model, device="cpu", dtype="float32") as engine:
        (whole,) = await engine.transcribe((samples, RATE), timestamps="word")
        spoken = [(one, word.end) for part in whole.segments for word in part.words for one in words(word.word)]
        await measure(engine, samples[: 5 * RATE], args.min_chunk)  # warm up
        found = {}
        for count in args.streams:
            began = time.process_time()
            runs = await asyncio.gather(
                *(measure(engine, noisy(samples, 100 * count + i), args.min_chunk) for i in range(count))
            )
            found[f"sensorium, streams: {count}"] = runs, (time.process_time() - began) / count
    return spoken, found


class WordAgreement:
    """The words of a growing buffer: those on which two passes agree are confirmed."""

    def __init__(self) -> None:
        self.confirmed: list[tuple[float, float, str]] = []
        self.rest: list[tuple[float, float, str]] = []

    def add(self, found: Sequence[tuple[float, float, str]]) -> None:
        last = self.confirmed[-1][1] if self.confirmed else -1.0
        new = [word for word in found if word[0] > last - 0.1]
        for count in range(min(5, len(self.confirmed), len(new)), 0, -1):  # words that are confirmed already
            if [word for *_, word in self.confirmed[-count:]] == [word for *_, word in new[:count]]:
                new = new[count:]
                break
        same = next(
            (i for i, (a, b) in enumerate(zip(self.rest, new, strict=False)) if a[2] != b[2]), min(len(self.rest), len(new))
        )
        self.confirmed += new[:same]
        self.rest = new[same:]


def run_peer(model: Path, samples: np.ndarray, min_chunk: float) -> tuple[Trace, list[str], float]:
    """Transcribe the clip with whisper_streaming's method. Return its trace, words and CPU seconds."""
    from faster_whisper import WhisperModel

    whisper = WhisperModel(str(converted(model)), compute_type="float32", cpu_threads=2)
    state, trace, begin, at = WordAgreement(), Trace(), 0.0, 0.0
    began, started, length = time.process_time(), time.monotonic(), len(samples) / RATE
    while at < length:
        time.sleep(max(0.0, started + min(at + min_chunk, length) - time.monotonic()))
        at = min(length, int((time.monotonic() - started) / BLOCK) * BLOCK)
        before = "".join(word for _, end, word in state.confirmed if end <= begin)[-CONTEXT:]
        options = {"language": "en", "beam_size": 5, "word_timestamps": True, "condition_on_previous_text": True}
        segments, _ = whisper.transcribe(samples[round(begin * RATE) : round(at * RATE)], initial_prompt=before, **options)
        parts = list(segments)
        state.add([(begin + one.start, begin + one.end, one.word) for part in parts for one in part.words])
        ends = [begin + part.end for part in parts[:-1] if state.confirmed and begin + part.end <= state.confirmed[-1][1]]
        begin = ends[-1] if ends and at - begin > BUFFER else begin
        counts = [len(words("".join(word for *_, word in of))) for of in (state.confirmed, state.rest)]
        trace.append((time.monotonic() - started, sum(counts), counts[0]))
    trace.append((trace[-1][0], trace[-1][1], trace[-1][1]))  # the end confirms the rest
    return trace, words("".join(word for *_, word in state.confirmed + state.rest)), time.process_time() - began


def lags(trace: Trace, found: Sequence[str], spoken: Sequence[tuple[str, float]]) -> tuple[list[float], list[float]]:
    """Return for each word that was spoken and found the seconds until it was shown, and until it was confirmed."""
    blocks = SequenceMatcher(None, [word for word, _ in spoken], list(found), autojunk=False).get_matching_blocks()
    pairs = [(spoken[block.a + i][1], block.b + i) for block in blocks for i in range(block.size)]
    shown = [next(at for at, count, _ in trace if count > index) - end for end, index in pairs]
    return shown, [next(at for at, _, count in trace if count > index) - end for end, index in pairs]


def row(name: str, runs: Sequence[tuple[Trace, Sequence[str]]], cpu: float, spoken: Sequence[tuple[str, float]]) -> str:
    pairs = [lags(trace, found, spoken) for trace, found in runs]
    values = [[lag for pair in pairs for lag in pair[kind]] for kind in (0, 1)]
    texts = [f"{statistics.median(of):.2f} | {max(of):.2f}" for of in values]
    return f"| {name} | {texts[0]} | {texts[1]} | {len(values[0]) / len(runs):.0f} of {len(spoken)} | {cpu:.2f} |"


def main() -> None:
    import soundfile

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the clip")
    parser.add_argument("--streams", type=int, nargs="+", default=[1])
    parser.add_argument("--min-chunk", type=float, default=1.0, help="seconds")
    parser.add_argument(
        "--peer-python", default=os.environ.get("SENSORIUM_PEER_PYTHON"), help="interpreter with faster-whisper"
    )
    parser.add_argument("--remark", default="", help="added to the table's note")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    samples = soundfile.read(args.file, dtype="float32")[0][: round(args.seconds * RATE)]
    if args.peer:
        print(json.dumps(run_peer(args.model, samples, args.min_chunk)))
        return
    spoken, ours = asyncio.run(run_ours(args, samples))
    rows = [row(name, runs, cpu / args.seconds, spoken) for name, (runs, cpu) in ours.items()]
    if args.peer_python:
        command = [args.peer_python, "-m", "benchmarks.live", *sys.argv[1:], "--peer"]
        output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
        trace, found, cpu = json.loads(output.splitlines()[-1])
        rows.append(row("whisper_streaming's method", [(trace, found)], cpu / args.seconds, spoken))
    head = [
        "| system | shown, median | worst | confirmed, median | worst | words found | CPU |",
        "|---|---|---|---|---|---|---|",
    ]
    what = f"{args.model.name}, {args.seconds:g} s of {args.file.name}, a pass per {args.min_chunk:g} s"
    peer = f", faster-whisper {version(args.peer_python)}" if args.peer_python else ""
    table = "\n".join([f"{machine()}{peer}; {what}", "", NOTE.format(remark=args.remark).strip(), "", *head, *rows])
    print(table)
    if args.write:
        put(SECTION, table)


if __name__ == "__main__":
    main()
