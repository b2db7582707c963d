"""Quality of tiny-vl in 8 bits on held-out data, weights and KV cache: `python -m benchmarks.quality --write`."""

from __future__ import annotations

import argparse
from pathlib import Path

from .throughput import ROOT, machine, put

SECTION = "tiny-vl in 8 bits"
NOTE = (
    "Character accuracy (videos: share of correct directions) and the number of answers equal to those of float32, with 8-bit "
    "products (`quantization`) or keys and values (`kv_cache_dtype`). Target: a drop of at most half a point."
)
WANTED = 0.005  # largest allowed drop of character accuracy
WAYS = {
    "int8 products": {"quantization": "int8"},
    "int8 cache": {"kv_cache_dtype": "int8"},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "assets" / "tiny-vl")
    parser.add_argument("--share", type=float, default=1.0, help="part of each held-out set to run")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    args = parser.parse_args()
    from sensorium import LLM

    from training.evaluate import ours, score, tasks

    whole, *others = (LLM(args.model, device="cpu", dtype="float32", **way) for way in ({}, *WAYS.values()))
    lines = [f"| held-out set | samples | float32 | {' | '.join(WAYS)} |", "|---|---|---|---|---|---|"]
    for task in tasks(args.share):
        if task.below:  # shuffled frames: a check of the data, not of the model
            continue
        wanted, cells = ours(whole, task.samples), []
        best = score(task.samples, wanted)
        for llm in others:
            found = ours(llm, task.samples)
            reached, same = score(task.samples, found), sum(x == y for x, y in zip(wanted, found, strict=True))
            cells.append(f"{reached:.2%}, {same} the same{' (missed)' if best - reached > WANTED else ''}")
        lines.append(f"| {task.name} | {len(task.samples)} | {best:.2%} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    if args.write:
        put(SECTION, "\n".join([machine(), "", NOTE, "", *lines]))


if __name__ == "__main__":
    main()
