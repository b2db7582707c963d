"""Run every test and write tests/RESULTS.md: commit, date, counts (`make test-all`). Arguments go to pytest; then
nothing is written (`make test`)."""

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


def commit() -> str:
    """Return the short hash, with "+ changes" if tracked files differ."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!tests/RESULTS.md")
    return (git("rev-parse", "--short", "HEAD") or "none") + (" + changes" if changed else "")


def outcomes(report: Path) -> dict[str, Counter[str]]:
    """Return folder of tests -> counts of passed, failed, skipped."""
    found: dict[str, Counter[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        folder = case.get("classname", "").split(".")[1:2] or ["?"]
        kinds = {child.tag for child in case}
        kind = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found.setdefault(folder[0], Counter())[kind] += 1
    return found


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
    """Run both lanes at once; print the second's output when it ends."""
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
    for report, _ in lanes:
        for name, counts in outcomes(report).items() if report.exists() else ():
            found.setdefault(name, Counter()).update(counts)
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
