"""`sensorium bench startup`: the time from the start of a process to the first token."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

from ...callers.errors import ConfigError, one_line
from ..common import add_engine_arguments, add_model_arguments, engine_arguments, engine_options, positive_int
from .report import Result, add_report_arguments, print_table, save

EXAMPLE = "sensorium bench startup --model assets/tiny-vl --num-iters 5"
_CODE = """
import json, resource, sys, time
started, options = json.loads(sys.argv[1])
import sensorium
def main():
    imported = time.time()
    llm = sensorium.LLM(**options)
    ready = time.time()
    prompt = {"prompt_token_ids": llm.get_tokenizer().encode("a")[:1]}
    (output,) = llm.generate(prompt, sensorium.SamplingParams(max_tokens=1), use_tqdm=False, on_error="raise")
    seconds = {"import": imported - started, "ready": ready - started, "first_token": time.time() - started}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({f"{name}_seconds": value for name, value in seconds.items()} | {"peak_mb": peak}))
if __name__ == "__main__":
    main()
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--num-iters", metavar="N", type=positive_int, default=3, help="number of processes (default: 3)")
    add_report_arguments(parser)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    seconds = [_measure(engine_options(args) | engine_arguments(args)) for _ in range(args.num_iters)]
    result: Result = {"model": args.model, "num_iters": args.num_iters}
    for name in seconds[0]:
        values = [times[name] for times in seconds]
        result |= {f"median_{name}": statistics.median(values), f"min_{name}": min(values), f"max_{name}": max(values)}
    print_table(result)
    save(args, result, "startup")
    return 0


def _measure(options: dict[str, Any]) -> dict[str, float]:
    """Start a process that generates one token; return its seconds since its start and its peak memory in MB."""
    command = [sys.executable, "-c", _CODE, json.dumps([time.time(), options])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = one_line((done.stderr.strip().splitlines() or ["no message"])[-1])
        raise ConfigError(f"a process could not generate a token: {reason}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result
