"""Products, attention and whole workloads on this CPU: `python -m benchmarks.cpu --write`.

`--avx2` hides AVX-512 from sensorium, torch, oneDNN and MKL, as on a CPU without it. Rates are those of one thread and of the
fastest of many calls. Workloads run as in benchmarks.throughput: the engines take turns, each in a new process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from .throughput import MODEL, ROOT, WORKLOADS, best_round, machine, ours, put, transformers

AVX2 = {
    "SENSORIUM_CPU": "avx2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
SIZE = 2048  # inputs and outputs of the product
ROWS = (1, 4, 16, 64, 1024)
SEGMENTS = (([64] * 16, 4, 64), ([196] * 4, 4, 64), ([1024], 4, 80))  # lengths, heads, head size
ENGINES: dict[str, Callable[[int], Callable[[list[tuple[str, Any]]], int]]] = {
    "transformers float32": partial(transformers, dtype="float32"),
    "transformers bfloat16": transformers,
    "sensorium bfloat16": ours,
    "sensorium int8": partial(ours, quantization="int8"),
}


def best(call: Callable[[], object], seconds: float = 1.0) -> float:
    """Return the seconds of the fastest call."""
    call()
    fastest, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest


def products() -> list[str]:
    """Return a table of products in GFLOP/s."""
    import torch
    from sensorium.kernels.linear import linear, pack
    from torch.nn import functional as F

    weight = torch.randn(SIZE, SIZE)
    packed = {
        "float32": pack(weight, None),
        "bfloat16": pack(weight.bfloat16(), None),
        "int8": pack(weight.bfloat16(), None, "int8"),
    }
    lines = ["| rows | torch float32 | torch bfloat16 | float32 | bfloat16 | int8 |", "|---|---|---|---|---|---|"]
    for rows in ROWS:
        x, work = torch.randn(rows, SIZE), 2 * rows * SIZE * SIZE / 1e9
        narrow, half = x.bfloat16(), weight.bfloat16()
        times = [best(partial(F.linear, x, weight)), best(partial(F.linear, narrow, half))]
        times += [best(partial(linear, x if name == "float32" else narrow, form)) for name, form in packed.items()]
        lines.append(f"| {rows} | " + " | ".join(f"{work / seconds:.0f}" for seconds in times) + " |")
    return lines


def attention() -> list[str]:
    """Return a table of attention within segments in GFLOP/s."""
    import torch
    from sensorium.kernels.dispatch import use_backends
    from sensorium.kernels.varlen import varlen_attention

    lines = ["| segments | heads x size | torch float32 | float32 | torch bfloat16 | bfloat16 |", "|---|---|---|---|---|---|"]
    for lengths, heads, dim in SEGMENTS:
        rates = []
        for dtype in (torch.float32, torch.bfloat16):
            q, k, v = (torch.randn(sum(lengths), heads, dim).to(dtype) for _ in range(3))
            work = sum(4 * length**2 * heads * dim for length in lengths) / 1e9
            for backend in ("torch", "native"):
                with use_backends(f"varlen_attention={backend}"):
                    rates.append(work / best(partial(varlen_attention, q, k, v, lengths, dim**-0.5)))
        shown = " | ".join(f"{rate:.0f}" for rate in rates)
        lines.append(f"| {len(lengths)} of {lengths[0]} | {heads} x {dim} | {shown} |")
    return lines


def rates() -> str:
    import torch

    torch.set_num_threads(1)
    return "\n".join([machine(), "", *products(), "", *attention()])


def seconds_of(engine: str, workload: str, rounds: int) -> float:
    """Return the seconds of an engine's best round in this process."""
    import torch

    torch.set_num_threads(2)
    return best_round(ENGINES[engine], workload, rounds)


def child(*args: str, avx2: bool) -> str:
    """Run this file with `args` in a new process; return the last line that it prints."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.cpu", *args]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **(AVX2 if avx2 else {})}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return str(json.loads(done.stdout.splitlines()[-1]))


def workloads(processes: int, rounds: int, avx2: bool) -> list[str]:
    """Return a table of seconds, and of the speed relative to the faster form of transformers."""
    lines = [f"| seconds | {' | '.join(ENGINES)} | bfloat16 | int8 |", "|---|---|---|---|---|---|---|"]
    for workload in WORKLOADS:
        found = dict.fromkeys(ENGINES, float("inf"))
        for _ in range(processes):
            for engine in ENGINES:
                seconds = float(child("--one", engine, workload, "--rounds", str(rounds), avx2=avx2))
                found[engine] = min(found[engine], seconds)
        old, plain, int8 = min(list(found.values())[:2]), *list(found.values())[2:]
        shown = " | ".join(f"{seconds:.2f}" for seconds in found.values())
        lines.append(f"| {workload} | {shown} | {old / plain:.2f}x | {old / int8:.2f}x |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--avx2", action="store_true", help="hide AVX-512")
    parser.add_argument("--processes", type=int, default=2, help="processes of each engine and workload")
    parser.add_argument("--rounds", type=int, default=3, help="rounds in each process")
    parser.add_argument("--write", action="store_true", help="put the tables into benchmarks/README.md")
    parser.add_argument("--rates", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--one", nargs=2, metavar=("ENGINE", "WORKLOAD"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rates or args.one:
        print(json.dumps(rates() if args.rates else seconds_of(*args.one, args.rounds)))
        return
    if not (MODEL / "config.json").exists():
        subprocess.run([sys.executable, "-W", "ignore", "-m", "benchmarks.make_model", str(MODEL)], cwd=ROOT, check=True)
    kernels = child("--rates", avx2=args.avx2)
    print(kernels)
    table = "\n".join([kernels, "", *workloads(args.processes, args.rounds, args.avx2)])
    if args.write:
        put(f"One CPU {'without' if args.avx2 else 'with'} AVX-512", table)


if __name__ == "__main__":
    main()
