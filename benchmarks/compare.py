"""This checkout against another one, in turns: `python -m benchmarks.compare --base DIR --write`.

`DIR` is a checkout of an earlier commit with its extension built. Each case runs in a new process per checkout (A B A B ...),
imports `sensorium` from that checkout, and uses the public API only. The best process of each side counts for times, the median
for memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .startup import CASES as STARTUP
from .throughput import MODEL, ROOT, WORKLOADS, best_round, machine, ours, put

TINY = ROOT / "assets" / "tiny-vl"
TOKENS = 256
DECODE = {"tiny-vl, decode steps of 1": 1, "tiny-vl, decode steps of 16": 16}
CASES = ["process start to first token of tiny-vl", *DECODE, *WORKLOADS]


def decode_steps(sequences: int, rounds: int) -> float:
    """Return the best seconds per decode step of a batch."""
    from sensorium import LLM, SamplingParams

    llm = LLM(TINY, dtype="float32", device="cpu", max_model_len=512, max_num_seqs=16)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    times = []
    for round_ in range(rounds):
        prompts = [f"user {i} moves left, round {round_}" for i in range(sequences)]
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        times.append(time.perf_counter() - start)
        assert all(len(output.outputs[0].token_ids) == TOKENS for output in outputs)
    return min(times) / TOKENS


def measure(case: str, rounds: int) -> dict[str, float]:
    """Run one case in this process; return its seconds and the peak memory in MB."""
    import torch

    torch.set_num_threads(2)
    if case in DECODE:
        seconds = decode_steps(DECODE[case], rounds)
    elif case in STARTUP:
        start = time.perf_counter()
        exec(STARTUP[case][0], {})
        seconds = time.perf_counter() - start
    else:
        seconds = best_round(ours, case, rounds)
    return {"seconds": seconds, "mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def run(checkout: Path, case: str, rounds: int) -> dict[str, float]:
    """Run one case in a new process that imports `sensorium` from `checkout`."""
    with tempfile.TemporaryDirectory() as folder:
        os.symlink(checkout, Path(folder) / "sensorium")
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.compare", "--one", case, "--rounds", str(rounds)]
        environment = {**os.environ, "PYTHONPATH": folder}
        start = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        wall = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{case} failed in {checkout}:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "seconds": wall} if case in STARTUP else found


def row(case: str, results: dict[str, list[dict[str, float]]]) -> str:
    best = {side: min(result["seconds"] for result in found) for side, found in results.items()}
    memory = {side: statistics.median(result["mb"] for result in found) for side, found in results.items()}
    shown = [f"{best[side] * 1e6:.0f} us" if case in DECODE else f"{best[side]:.2f} s" for side in ("base", "now")]
    return (
        f"| {case} | {shown[0]} | {shown[1]} | {best['now'] / best['base']:.3f} "
        f"| {memory['base']:.0f} | {memory['now']:.0f} | {memory['now'] / memory['base']:.3f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, help="the other checkout")
    parser.add_argument("--label", default="base", help="what the table calls the other checkout")
    parser.add_argument("--section", default="Before and after", help="the section of benchmarks/README.md")
    parser.add_argument("--processes", type=int, default=5, help="processes of each checkout and case")
    parser.add_argument("--rounds", type=int, default=4, help="rounds in each process")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.rounds)))
        return
    if args.base is None:
        parser.error("--base is needed: a checkout with its extension built")
    if not (MODEL / "config.json").exists():
        subprocess.run([sys.executable, "-W", "ignore", "-m", "benchmarks.make_model", str(MODEL)], cwd=ROOT, check=True)
    rows = [
        f"| | {args.label} | now | now / before | {args.label}, peak MB | now, peak MB | now / before |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        results: dict[str, list[dict[str, Any]]] = {"base": [], "now": []}
        for _ in range(args.processes):
            for side, checkout in (("base", args.base.resolve()), ("now", ROOT.resolve())):
                results[side].append(run(checkout, case, args.rounds))
        rows.append(row(case, results))
        print(rows[-1], flush=True)
    table = "\n".join([machine(), "", *rows])
    print(table)
    if args.write:
        put(args.section, table)


if __name__ == "__main__":
    main()
