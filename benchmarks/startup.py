"""Time to the first token of a new process, timed from outside: `python -m benchmarks.startup --write`."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from .throughput import ROOT, machine, put

CASES = {
    "import sensorium": ("import sensorium", 0.3),
    "process start to first token of tiny-vl": (
        "from sensorium import LLM, SamplingParams\n"
        "from PIL import Image\n"
        "image = Image.new('RGB', (128, 48), 'white')\n"
        "parts = [{'type': 'image', 'image': image}, {'type': 'text', 'text': 'Read the text.'}]\n"
        "messages = [{'role': 'user', 'content': parts}]\n"
        "out = LLM('assets/tiny-vl').chat(messages, SamplingParams(max_tokens=1), use_tqdm=False)\n"
        "assert len(out[0].outputs[0].token_ids) == 1, out",
        4.0,
    ),
}


def seconds(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    args = parser.parse_args()
    empty = [seconds("pass") for _ in range(args.runs)]
    rows = [f"| empty Python process | {statistics.median(empty):.2f} | {min(empty):.2f} | - |"]
    for name, (code, wanted) in CASES.items():
        times = [seconds(code) for _ in range(args.runs)]
        rows.append(f"| {name} | {statistics.median(times):.2f} | {min(times):.2f} | < {wanted} |")
    table = "\n".join([machine(), "", "| from process start | median s | best s | target |", "|---|---|---|---|", *rows])
    print(table)
    if args.write:
        put("Start-up", table)


if __name__ == "__main__":
    main()
