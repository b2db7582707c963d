"""Cost of batch invariance: `python -m benchmarks.invariance --write`.

The C++ kernels are batch invariant anyway; without them `batch_invariant=True` computes attention row by row. Each mode runs
in its own process, in turn; the best of three rounds counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from functools import partial

from .throughput import ROOT, WORKLOADS, best_round, machine, ours, put

TORCH = ",".join(f"{op}=torch" for op in ("attention", "varlen_attention", "rms_norm", "rotary", "act_and_mul"))
KERNELS = {"C++ kernels": "", "torch": TORCH}


def measure(workload: str, invariant: bool, rounds: int = 3) -> float:
    """Return the seconds of the best round."""
    return best_round(partial(ours, batch_invariant=invariant), workload, rounds)


def row(workload: str, label: str, kernels: str, processes: int) -> str:
    best: dict[bool, float] = {}
    for _ in range(processes):
        for invariant in (False, True):
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.invariance", "--one", workload, str(int(invariant))]
            env = {**os.environ, "SENSORIUM_KERNELS": kernels}
            done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
            seconds = json.loads(done.stdout.splitlines()[-1])
            best[invariant] = min(seconds, best.get(invariant, seconds))
    print(f"{workload}, {label}: {best[False]:.2f} s, invariant {best[True]:.2f} s", flush=True)
    return f"| {workload} | {label} | {best[True] / best[False]:.2f}x |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=2, metavar=("WORKLOAD", "INVARIANT"), help=argparse.SUPPRESS)
    parser.add_argument("--processes", type=int, default=2, help="processes of each mode and workload")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one[0], bool(int(args.one[1])))))
        return
    rows = [row(name, label, kernels, args.processes) for name in WORKLOADS for label, kernels in KERNELS.items()]
    table = "\n".join([machine(), "", "| workload | kernels | time with batch_invariant=True |", "|---|---|---|", *rows])
    print(table)
    if args.write:
        put("What batch invariance costs", table)


if __name__ == "__main__":
    main()
