"""Run the tests, a few files per process, and print the slowest files.

`report.py --all [FOLDER ...]` runs every test, of some folders or of all, and writes a row of tests/RESULTS.md as soon as a
folder has ended (`make test-all`). Other arguments go to pytest, and nothing is written (`make test`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from results import KINDS, new_row, replace_row
from sampled import PARTS, VARIABLE, chosen_part

ROOT = Path(__file__).resolve().parents[2]
LONGEST = ("tests/engine/e2e", "tests/models/families", "tests/packaging", "tests/kernels")
"""Folders that start first, so that no long one is left for the end."""
OLDER_CPU = ("tests/kernels/test_[!t]*.py", "tests/models/test_*.py", "tests/engine/e2e/test_decode_graphs.py")
"""Tests of the CPU's kernels. A CPU with AVX-512 runs them a second time as one without (`SENSORIUM_CPU=avx2`)."""
FILES_PER_RUN = 24
WORKERS = 2
SLOWEST = 20
TEST_SECONDS = 600
"""A test of `make test` that takes longer fails. Tests of `make test-all` alone (soaks) may take longer."""
RUN_SECONDS = 1_800
"""A pytest run of `make test` that takes longer is ended; its stacks are printed."""
EXIT_SECONDS = 60
"""So is a pytest run that has written its report and does not exit, because a thread or a child of a test is left."""


def commit() -> str:
    """Return the short hash, with "+ changes" if tracked files differ."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!tests/RESULTS.md")
    return (git("rev-parse", "--short", "HEAD") or "none") + (" + changes" if changed else "")


@dataclass(frozen=True)
class Run:
    """One pytest process: some files of one folder, and environment variables that it gets."""

    files: tuple[str, ...]
    settings: tuple[tuple[str, str], ...] = ()

    @property
    def tests(self) -> str:
        """The name of its row in tests/RESULTS.md."""
        return " ".join((str(Path(self.files[0]).parent), *(f"({name}={value})" for name, value in self.settings)))


@dataclass(frozen=True)
class Outcome:
    """Exit code, counts of passed, failed and skipped tests, seconds of each file, and the output if a test failed."""

    code: int
    counts: Counter[str]
    seconds: dict[str, float]
    failures: str


def read_report(report: Path) -> tuple[Counter[str], dict[str, float]]:
    """Return the counts of passed, failed and skipped tests, and the seconds of each file."""
    counts: Counter[str] = Counter()
    seconds: dict[str, float] = {}
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        name, tags = case.get("classname", ""), {child.tag for child in case}
        counts["failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"] += 1
        seconds[name] = seconds.get(name, 0.0) + float(case.get("time", 0))
    return counts, seconds


def split(only: Sequence[str] = ()) -> list[Run]:
    """Return the pytest runs of all tests, or of those below some folders: a few files of one folder each."""
    folders: dict[str, list[str]] = {name: [] for name in LONGEST}
    for file in sorted(ROOT.glob("tests/**/test_*.py")):
        folders.setdefault(str(file.parent.relative_to(ROOT)), []).append(str(file.relative_to(ROOT)))
    runs = [Run(part) for files in folders.values() for part in batched(files)]
    if "avx512f" in Path("/proc/cpuinfo").read_text():
        again = [str(file.relative_to(ROOT)) for pattern in OLDER_CPU for file in sorted(ROOT.glob(pattern))]
        for folder in dict.fromkeys(str(Path(file).parent) for file in again):
            own = [file for file in again if str(Path(file).parent) == folder]
            runs += [Run(part, (("SENSORIUM_CPU", "avx2"),)) for part in batched(own)]
    return [run for run in runs if not only or any(Path(run.files[0]).is_relative_to(folder) for folder in only)]


def batched(files: list[str]) -> list[tuple[str, ...]]:
    return [tuple(files[i : i + FILES_PER_RUN]) for i in range(0, len(files), FILES_PER_RUN)]


def run_files(run: Run, report: Path, options: Sequence[str]) -> Outcome:
    """Run pytest on some files and print its last line."""
    command = [sys.executable, "-X", "faulthandler", "-m", "pytest", f"--junitxml={report}", *run.files, *options]
    command += [f"--timeout={TEST_SECONDS}"] if options else []
    env = os.environ | dict(run.settings) | {"OMP_WAIT_POLICY": "PASSIVE"}  # waiting threads yield their core to the other run
    with report.with_suffix(".txt").open("w+") as output:  # a file: processes that a test leaves may hold a pipe open
        child = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)
        code = ended(child, report, RUN_SECONDS if options else float("inf"))
    said = report.with_suffix(".txt").read_text(errors="replace")
    last = said.splitlines()[-1:] or [""]
    print(*(value for _, value in run.settings), f"{run.files[0]} ... {Path(run.files[-1]).name}: {last[0]}", flush=True)
    failed = code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    return Outcome(abs(code) if failed else 0, *read_report(report), f"pytest ended with code {code}\n{said}" if failed else "")


def ended(child: subprocess.Popen[bytes], report: Path, seconds: float) -> int:
    """Wait for a run and return its exit code. One that takes too long gets SIGABRT, so that it prints its stacks and ends."""
    end = time.monotonic() + seconds
    while (code := child.poll()) is None and time.monotonic() < end:
        time.sleep(0.1)
        if report.exists():
            end = min(end, report.stat().st_mtime - time.time() + time.monotonic() + EXIT_SECONDS)
    if code is not None:
        return code
    child.send_signal(signal.SIGABRT)  # pytest's faulthandler prints the stack of every thread
    try:
        return child.wait(60)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


class Rows:
    """Writes the row of a folder in tests/RESULTS.md when its last run has ended."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.commit = commit()
        self._lock = threading.Lock()
        self._left = Counter(run.tests for run in runs)
        self._counts: dict[str, Counter[str]] = {run.tests: Counter() for run in runs}
        self._seconds: Counter[str] = Counter()

    def add(self, run: Run, seconds: float, counts: Counter[str]) -> None:
        with self._lock:
            self._left[run.tests] -= 1
            self._counts[run.tests].update(counts)
            self._seconds[run.tests] += round(seconds)
            if not self._left[run.tests]:
                replace_row(new_row(run.tests, self.commit, self._seconds[run.tests], self._counts[run.tests]))


def run_all(runs: Sequence[Run], options: Sequence[str], rows: Rows | None) -> int:
    """Run pytest `WORKERS` times at once until all have run, and print the seconds of the slowest files and the failures."""

    def one(numbered: tuple[int, Run]) -> Outcome:
        number, run = numbered
        started = time.monotonic()
        outcome = run_files(run, Path(folder) / f"{number}.xml", options)
        if rows is not None:
            rows.add(run, time.monotonic() - started, outcome.counts)
        return outcome

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(WORKERS) as pool:
        outcomes = list(pool.map(one, enumerate(runs)))
    seconds: Counter[str] = Counter()
    for outcome in outcomes:
        seconds.update(outcome.seconds)
    print("".join(f"{taken:8.1f} s {name}\n" for name, taken in seconds.most_common(SLOWEST)))
    print("\n".join(outcome.failures for outcome in outcomes if outcome.failures))
    total = sum((outcome.counts for outcome in outcomes), Counter())
    print(", ".join(f"{total[kind]} {kind}" for kind in KINDS), flush=True)
    return max(outcome.code for outcome in outcomes)


def main() -> int:
    if sys.argv[1:2] == ["--all"]:
        runs = split(sys.argv[2:])
        if not runs:
            print(f"no tests below {' '.join(sys.argv[2:])}", file=sys.stderr)
            return 2
        return run_all(runs, (), Rows(runs))
    os.environ[VARIABLE] = chosen_part()
    print(f"sampled tests: part {os.environ[VARIABLE]} of {PARTS} ({VARIABLE} selects another)", flush=True)
    return run_all(split(), sys.argv[1:], None)


if __name__ == "__main__":
    sys.exit(main())
