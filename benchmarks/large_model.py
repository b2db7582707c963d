"""A model with the true shapes of Qwen2.5-VL-3B on this CPU: `python -m benchmarks.large_model --write`.

The weights are random (`make_model --shape qwen2.5-vl-3b`, 7.5 GB in out/). Each case starts twice, in processes of its own:
the first start packs the weights and writes them to `packed_cache_dir`, the second maps them. A request is one page of 1920 x
1080 pixels and a short question; the answer has 64 tokens.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .cpu_engines import INT4
from .throughput import ROOT, machine, put, requests

SHAPE = "qwen2.5-vl-3b"
MODEL, PACKED = ROOT / "out" / f"bench-{SHAPE}", ROOT / "out" / "bench-packed"
CASES: dict[str, Any] = {"int8": "int8", "int4": INT4}
PAGE, TOKENS = (1920, 1080), 64
MAX_MODEL_LEN = 4096
SECOND_START, SPARE = 3.0, 500  # seconds; megabytes beyond 1.15 times weights and caches


def measure(case: str) -> dict[str, float]:
    """Load the model in this process and answer two pages, the first of which warms up."""
    import torch
    from sensorium import LLM, SamplingParams

    torch.set_num_threads(2)
    start = time.perf_counter()
    llm = LLM(
        MODEL,
        quantization=CASES[case],
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=1,
        limit_mm_per_prompt={"image": 1, "video": 0},
        packed_cache_dir=PACKED,
    )
    loaded = time.perf_counter() - start
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    for round_ in range(2):
        (text, image), times = requests(1, PAGE, round_)[0], [time.perf_counter()]
        outputs = []
        for output in llm.stream({"prompt": text, "multi_modal_data": {"image": image}}, params):
            times.append(time.perf_counter())
            outputs.append(output)
    plan = llm.explain()
    return {
        "load": loaded,
        "first_token": times[1] - times[0],
        "rate": (TOKENS - 1) / (times[-1] - times[1]),
        "prompt": len(outputs[-1].prompt_token_ids),
        "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "allowed": 1.15 * (plan.weights + plan.kv_cache + plan.encoder_cache) / 2**20 + SPARE,
        "weights": plan.weights / 2**20,
    }


def run(case: str) -> dict[str, float]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.large_model", "--one", case]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(case, found, flush=True)
    return found


def row(case: str) -> str:
    shutil.rmtree(PACKED, ignore_errors=True)
    first, second = run(case), run(case)
    numbers = [f"{first['load']:.1f}", f"{second['load']:.1f}", f"{second['first_token']:.1f}", f"{second['rate']:.1f}"]
    memory = [f"{one['rss']:.0f}" for one in (first, second)] + [f"{second['allowed']:.0f}", f"{second['weights']:.0f}"]
    return "| " + " | ".join([case, *numbers, *memory]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one)))
        return
    if not Path(MODEL / "config.json").exists():
        make = [sys.executable, "-W", "ignore", "-m", "benchmarks.make_model", str(MODEL), "--shape", SHAPE]
        subprocess.run(make, cwd=ROOT, check=True)
    columns = ["weights", "first start, s", "second start, s", "first token, s", "tokens/s", "peak MB, first start"]
    columns += ["peak MB, second start", "allowed MB", "weights MB"]
    head = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    table = "\n".join([machine(), "", *head, *[row(case) for case in CASES]])
    print(table)
    if args.write:
        put("A model of 3 billion parameters", table)


if __name__ == "__main__":
    main()
