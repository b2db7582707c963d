"""Cost of running the core in a process of its own: `python -m benchmarks.core_process --write`.

Both forms run tiny-vl in float32. Start-up and memory are measured in new processes, steps in one process that holds both
engines and lets them answer in turn. The best of all rounds counts for steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .throughput import ROOT, machine, put

MODEL = ROOT / "assets" / "tiny-vl"
SIZES = (1, 16)  # sequences
TOKENS = 128


def llm(engine_process: bool) -> Any:
    from sensorium import LLM

    return LLM(MODEL, dtype="float32", device="cpu", max_model_len=512, max_num_seqs=16, engine_process=engine_process)


def answer(engine: Any, sequences: int, round_: int, tokens: int = TOKENS) -> float:
    """Return the microseconds per step of one batch."""
    from sensorium import SamplingParams

    prompts = [f"user {i} moves left, round {round_}" for i in range(sequences)]
    steps, start = engine.stats.steps, time.perf_counter()
    outputs = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
    seconds = time.perf_counter() - start
    assert all(output.error is None for output in outputs)
    return seconds / (engine.stats.steps - steps) * 1e6


def start(engine_process: bool) -> dict[str, float]:
    """Return seconds until the engine is ready, and memory after an answer. Called in a new process; its child counts, too."""
    began = time.perf_counter()
    with llm(engine_process) as engine:
        seconds = time.perf_counter() - began
        answer(engine, 1, 0, 4)
        pids = ["self", *([str(engine.engine.loop.core.pid)] if engine_process else [])]
        return {"seconds": seconds, "mb": sum(proportional_mb(pid) for pid in pids)}


def proportional_mb(pid: str) -> float:
    """Return the proportional set size: pages that two processes share count half for each."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def starts(runs: int) -> dict[bool, list[dict[str, float]]]:
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for _ in range(runs):
        for form, results in found.items():
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.core_process", "--one", str(int(form))]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
            results.append(json.loads(done.stdout.splitlines()[-1]))
    return found


def steps(rounds: int) -> dict[int, tuple[float, float]]:
    """Return the best microseconds per step of each form, by number of sequences."""
    found: dict[int, tuple[float, float]] = {}
    with llm(False) as here, llm(True) as there:
        for sequences in SIZES:
            pairs = [(answer(here, sequences, round_), answer(there, sequences, round_)) for round_ in range(rounds)]
            found[sequences] = (min(one for one, _ in pairs), min(two for _, two in pairs))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--runs", type=int, default=5, help="starts of each form")
    parser.add_argument("--rounds", type=int, default=15, help="batches of each form and size")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(start(args.one == "1")))
        return
    started = starts(args.runs)
    rows = []
    for name, key, digits in (("start-up, s (median)", "seconds", 2), ("memory, MB (median)", "mb", 0)):
        one, two = (statistics.median(result[key] for result in started[form]) for form in (False, True))
        rows.append(f"| {name} | {one:.{digits}f} | {two:.{digits}f} | {two - one:+.{digits}f} |")
    for sequences, (one, two) in steps(args.rounds).items():
        rows.append(f"| a decode step of {sequences}, microseconds | {one:.0f} | {two:.0f} | {two - one:+.0f} |")
    head = ["| tiny-vl, float32 | in this process | in its own process | difference |", "|---|---|---|---|"]
    table = "\n".join([machine(), "", *head, *rows])
    print(table)
    if args.write:
        put("The core in a process of its own", table)


if __name__ == "__main__":
    main()
