"""What 8 bits cost in quality: tiny-vl on held-out data, both ways: `python -m benchmarks.quality --write`."""

from __future__ import annotations

import argparse
from pathlib import Path

from .throughput import ROOT, machine, put

SECTION = "tiny-vl in 8 bits"
NOTE = "Character accuracy; of clips, the share of right directions. Wanted: a drop of at most half a point."
WANTED = 0.005  # the most that character accuracy may drop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "assets" / "tiny-vl")
    parser.add_argument("--share", type=float, default=1.0, help="part of each held-out set to run")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    args = parser.parse_args()
    from sensorium import LLM

    from training.evaluate import ours, score, tasks

    llms = [LLM(args.model, device="cpu", quantization=quantization) for quantization in (None, "int8")]
    lines = ["| held-out set | samples | float32 | int8 | drop | same answers |", "|---|---|---|---|---|---|"]
    for task in tasks(args.share):
        if task.below:  # shuffled clips: a check of the data, not of the model
            continue
        full, int8 = (ours(llm, task.samples) for llm in llms)
        a, b = score(task.samples, full), score(task.samples, int8)
        same = sum(x == y for x, y in zip(full, int8, strict=True))
        late = " (missed)" if a - b > WANTED else ""
        lines.append(f"| {task.name} | {len(task.samples)} | {a:.2%} | {b:.2%} | {100 * (a - b):.2f} points{late} | {same} |")
        print(lines[-1], flush=True)
    if args.write:
        put(SECTION, "\n".join([machine(), "", NOTE, "", *lines]))


if __name__ == "__main__":
    main()
