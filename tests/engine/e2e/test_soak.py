"""One engine under mixed traffic: no good request fails or differs, and nothing leaks."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import soak


def assert_sound(report: soak.Report, count: int, least: int, kinds: Iterable[str] = soak.KINDS) -> None:
    """Check a report. `least`: minimum count of each rare event; `kinds`: kinds of requests that must occur."""
    counts, stats = report.counts, report.stats
    print(report.text())
    assert counts["asked"] == count
    assert report.failed == []
    assert report.differing == []
    assert report.breaks == []
    assert report.left == []
    assert counts["fresh"] >= 0.3 * count
    assert counts["aborted"] >= 0.2 * count
    assert all(counts[f"aborted {stage}"] for stage in soak.ABORTS)
    assert all(counts[f"kind {kind}"] for kind in kinds)
    assert report.kv_share <= 0.6
    met = {
        "preemptions": stats.preemptions,
        "prefix hits": stats.prefix_hits // soak.OPTIONS["block_size"],
        "encoder hits": stats.encoder_hits,
        "evictions": stats.encoder_evictions,
        "cut items": stats.cut_items,
    }
    assert {name: number for name, number in met.items() if number <= least} == {}


def test_hundreds_of_requests() -> None:
    assert_sound(soak.run(seed=1, count=500), 500, least=5)


@pytest.mark.full
def test_hundreds_of_requests_with_the_core_in_a_separate_process() -> None:
    kinds = set(soak.KINDS) - set(soak.HARMFUL)
    assert_sound(soak.run(seed=1, count=500, process=True), 500, least=5, kinds=kinds)


def twenty_thousand(seed: int) -> None:
    report = soak.run(seed, 20_000)
    assert_sound(report, 20_000, least=100)
    assert report.slope < 1.0


@pytest.mark.full
def test_twenty_thousand_requests_of_a_new_seed() -> None:
    """This runs in a separate process, so that memory of earlier tests does not count."""
    seed = int(os.environ.get("SOAK_SEED") or secrets.randbelow(1 << 31))
    here = Path(__file__).parent
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(here), str(here.parents[1] / "helpers"), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-c", f"import test_soak; test_soak.twenty_thousand({seed})"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    print(f"SOAK_SEED={seed}", done.stdout, done.stderr[-3000:])
    assert done.returncode == 0
