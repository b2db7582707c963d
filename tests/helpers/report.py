"""Run every test, print the slowest files, and write tests/RESULTS.md: commit, date, counts (`make test-all`).

With arguments, which go to pytest, nothing is written (`make test`).
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import pytest
from sampled import PARTS, VARIABLE, part_of_today

ROOT = Path(__file__).resolve().parents[2]
LONGEST = ("tests/engine/e2e", "tests/models/families", "tests/packaging", "tests/kernels")
"""Folders that start first, so that no long one is left for the end."""
OLDER_CPU = ("tests/kernels/test_[!t]*.py", "tests/models/test_*.py", "tests/engine/e2e/test_decode_graphs.py")
"""Tests of the CPU's kernels. A CPU with AVX-512 runs them a second time as one without (`SENSORIUM_CPU=avx2`)."""
FILES_PER_RUN = 7
WORKERS = 2
SLOWEST = 20
TEST_SECONDS = 600
"""A test of `make test` that takes longer fails. Tests of `make test-all` alone (soaks) may take longer."""
RUN_SECONDS = 1_800
"""A pytest run of `make test` that takes longer, as one that hangs when it exits, is ended; its stacks are printed."""


def commit() -> str:
    """Return the short hash, with "+ changes" if tracked files differ."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!tests/RESULTS.md")
    return (git("rev-parse", "--short", "HEAD") or "none") + (" + changes" if changed else "")


def outcomes(report: Path) -> tuple[dict[str, Counter[str]], dict[str, float]]:
    """Return folder of tests -> counts of passed, failed, skipped, and file -> seconds."""
    found: dict[str, Counter[str]] = {}
    seconds: dict[str, float] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("classname", "")
        folder = name.split(".")[1:2] or ["?"]
        kinds = {child.tag for child in case}
        kind = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found.setdefault(folder[0], Counter())[kind] += 1
        seconds[name] = seconds.get(name, 0.0) + float(case.get("time", 0))
    return found, seconds


def text(found: dict[str, Counter[str]], seconds: float) -> str:
    kinds = ("passed", "failed", "skipped")
    total = sum(found.values(), Counter())
    rows = [*sorted(found.items()), ("all", total)]
    table = "\n".join(f"| {name} | " + " | ".join(str(counts[kind]) for kind in kinds) + " |" for name, counts in rows)
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "numpy"))
    return (
        "# Test results\n\n`make test-all` writes this file.\n\n"
        f"- commit: {commit()}\n- date: {time.strftime('%Y-%m-%d')}\n- time: {seconds / 60:.0f} minutes\n"
        f"- python {platform.python_version()}, {packages}\n\n"
        f"| tests | passed | failed | skipped |\n|---|---|---|---|\n{table}\n"
    )


def split() -> list[tuple[list[str], dict[str, str]]]:
    """Return the files and added environment variables of each pytest run: a few files of one folder."""
    folders: dict[str, list[str]] = {name: [] for name in LONGEST}
    for file in sorted(ROOT.glob("tests/**/test_*.py")):
        folders.setdefault(str(file.parent.relative_to(ROOT)), []).append(str(file.relative_to(ROOT)))
    runs = [(part, {}) for files in folders.values() for part in batched(files)]
    if "avx512f" in Path("/proc/cpuinfo").read_text():
        again = [str(file.relative_to(ROOT)) for pattern in OLDER_CPU for file in sorted(ROOT.glob(pattern))]
        runs += [(part, {"SENSORIUM_CPU": "avx2"}) for part in batched(again)]
    return runs


def batched(files: list[str]) -> list[list[str]]:
    return [files[i : i + FILES_PER_RUN] for i in range(0, len(files), FILES_PER_RUN)]


def run_files(report: Path, files: list[str], settings: dict[str, str]) -> tuple[int, str]:
    """Run pytest on some files and print its last line. Return its exit code, and its output if a test failed."""
    usual = sys.argv[1:]
    command = [sys.executable, "-X", "faulthandler", "-m", "pytest", f"--junitxml={report}", *files, *usual]
    command += [f"--timeout={TEST_SECONDS}"] if usual else []
    env = os.environ | settings | {"OMP_WAIT_POLICY": "PASSIVE"}  # waiting threads yield their core to the other run
    with report.with_suffix(".txt").open("w+") as output:  # a file: processes that a test leaves may hold a pipe open
        child = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)
        code = ended(child, RUN_SECONDS if usual else None)
    said = report.with_suffix(".txt").read_text(errors="replace")
    last = said.splitlines()[-1:] or [""]
    print(*settings.values(), f"{files[0]} ... {Path(files[-1]).name}: {last[0]}", flush=True)
    if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return 0, ""
    return abs(code), f"pytest ended with code {code}\n{said}"


def ended(child: subprocess.Popen[bytes], seconds: float | None) -> int:
    """Wait for a run and return its exit code. After `seconds`, send SIGABRT, which makes it print its stacks and end."""
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGABRT)  # pytest's faulthandler prints the stack of every thread
    try:
        return child.wait(60)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


def run(folder: Path) -> tuple[int, dict[str, Counter[str]]]:
    """Run all files, `WORKERS` runs at a time; print the seconds of the slowest files at the end."""
    runs = split()
    reports = [folder / f"{number}.xml" for number in range(len(runs))]
    with ThreadPoolExecutor(WORKERS) as pool:
        codes, failures = zip(*pool.map(run_files, reports, *zip(*runs, strict=True)), strict=True)
    found: dict[str, Counter[str]] = {}
    seconds: dict[str, float] = {}
    for report in filter(Path.exists, reports):
        counted, taken = outcomes(report)
        for name, spent in taken.items():
            seconds[name] = seconds.get(name, 0.0) + spent
        for name, counts in counted.items():
            found.setdefault(name, Counter()).update(counts)
    slowest = sorted(seconds.items(), key=lambda one: -one[1])[:SLOWEST]
    print("".join(f"{taken:8.1f} s {name}\n" for name, taken in slowest))
    print("\n".join(filter(None, failures)))
    total = sum(found.values(), Counter())
    print(", ".join(f"{total[kind]} {kind}" for kind in ("passed", "failed", "skipped")), flush=True)
    return max(codes), found


def main() -> int:
    if sys.argv[1:]:
        os.environ[VARIABLE] = part_of_today()  # for all runs, also past midnight
        print(f"sampled tests: part {os.environ[VARIABLE]} of {PARTS} ({VARIABLE} selects another)", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        started = time.time()
        code, found = run(Path(folder))
        if not sys.argv[1:]:
            (ROOT / "tests" / "RESULTS.md").write_text(text(found, time.time() - started))
    return code


if __name__ == "__main__":
    sys.exit(main())
