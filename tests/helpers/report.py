"""Run every test, print the slowest files, and write tests/RESULTS.md: commit, date, counts (`make test-all`).

With arguments, which go to pytest, nothing is written (`make test`).
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LANES = (("tests/models",), ("tests", "--ignore=tests/models"))
"""Folders that run side by side; each takes about half of the time."""
SLOWEST = 20


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


def run(folder: Path) -> tuple[int, dict[str, Counter[str]]]:
    """Run both lanes at once; print the second's output and the seconds of the slowest files at the end."""
    lanes = [(folder / f"{number}.xml", where) for number, where in enumerate(LANES)]
    commands = [[sys.executable, "-m", "pytest", f"--junitxml={report}", *where, *sys.argv[1:]] for report, where in lanes]
    env = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}  # waiting threads yield their core to the other lane
    with (folder / "second").open("w+") as second:
        started = [
            subprocess.Popen(command, cwd=ROOT, env=env, stdout=out)
            for command, out in zip(commands, (None, second), strict=True)
        ]
        codes = [process.wait() for process in started]
        second.seek(0)
        print(second.read())
    found: dict[str, Counter[str]] = {}
    for report, where in lanes:
        counted, seconds = outcomes(report) if report.exists() else ({}, {})
        for name, counts in counted.items():
            found.setdefault(name, Counter()).update(counts)
        print(f"{sum(seconds.values()):6.0f} s {' '.join(where)}")
        slowest = sorted(seconds.items(), key=lambda one: -one[1])[:SLOWEST]
        print("".join(f"{taken:8.1f} s {name}\n" for name, taken in slowest), flush=True)
    return max(map(abs, codes)), found  # a process ended by a signal has a negative code


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        started = time.time()
        code, found = run(Path(folder))
        if not sys.argv[1:]:
            (ROOT / "tests" / "RESULTS.md").write_text(text(found, time.time() - started))
    return code


if __name__ == "__main__":
    sys.exit(main())
