"""Runs every test and writes tests/RESULTS.md: commit, date, counts. `make test-all`; further arguments go to pytest."""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def commit() -> str:
    """Short hash; with "+ changes" when files that git tracks differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!tests/RESULTS.md")
    return (git("rev-parse", "--short", "HEAD") or "none") + (" + changes" if changed else "")


def outcomes(report: Path) -> dict[str, Counter[str]]:
    """Folder of tests -> how often passed, failed, skipped."""
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


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        report, started = Path(folder) / "report.xml", time.time()
        command = [sys.executable, "-m", "pytest", f"--junitxml={report}", *sys.argv[1:]]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        (ROOT / "tests" / "RESULTS.md").write_text(text(outcomes(report), time.time() - started))
    return code


if __name__ == "__main__":
    sys.exit(main())
