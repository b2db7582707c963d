"""The table of results in tests/RESULTS.md."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import report
import results


def test_a_row_replaces_that_of_the_same_tests(tmp_path: Path) -> None:
    file = tmp_path / "RESULTS.md"
    first = results.new_row("tests/mm", "abc", 130, Counter(passed=5, skipped=1))
    second, newer = replace(first, tests="tests/cli", failed=2), replace(first, commit="def", passed=6)
    for row in (first, second, newer):
        results.replace_row(row, file)
    assert results.read_rows(file) == [second, newer]
    assert (newer.minutes, newer.passed, newer.failed, newer.skipped) == (2, 6, 0, 1)


def test_rows_of_the_committed_table_are_folders_of_tests() -> None:
    assert {row.tests for row in results.read_rows()} <= {run.tests for run in report.split()} | {
        f"{run.tests} (SENSORIUM_CPU=avx2)" for run in report.split()
    }


def test_runs_of_some_folders_only() -> None:
    runs = report.split(["tests/mm/tiling", "tests/cli"])
    assert {run.tests for run in runs} == {"tests/mm/tiling", "tests/cli"}
    assert all(len(run.files) <= report.FILES_PER_RUN for run in runs)


def test_a_run_that_does_not_exit_after_its_report_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "EXIT_SECONDS", 0.2)
    written = tmp_path / "0.xml"
    left = f"import time; open({str(written)!r}, 'w').close(); time.sleep(1e4)"
    assert report.ended(subprocess.Popen([sys.executable, "-c", left]), written, float("inf")) == -signal.SIGABRT
    assert report.ended(subprocess.Popen([sys.executable, "-c", ""]), tmp_path / "1.xml", float("inf")) == 0
