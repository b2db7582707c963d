"""The table in tests/RESULTS.md: a row per folder of tests, with the commit and the machine that ran all of its tests."""

from __future__ import annotations

import platform
import re
import time
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

FILE = Path(__file__).parents[1] / "RESULTS.md"
KINDS = ("passed", "failed", "skipped")
_HEAD = """# Test results

`make test-all` writes this file. `make test-all ONLY="tests/kernels tests/mm"` runs these folders and replaces their rows.

| tests | commit | date | CPU | versions | minutes | passed | failed | skipped |
|---|---|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Row:
    """The results of a folder. `minutes` are those of its processes, of which two run at a time."""

    tests: str
    commit: str
    date: str
    cpu: str
    versions: str
    minutes: int
    passed: int
    failed: int
    skipped: int

    def __str__(self) -> str:
        return "| " + " | ".join(str(value) for value in vars(self).values()) + " |"


def new_row(tests: str, commit: str, seconds: float, counts: Counter[str]) -> Row:
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    passed, failed, skipped = (counts[kind] for kind in KINDS)
    return Row(tests, commit, time.strftime("%Y-%m-%d"), cpu(), versions, round(seconds / 60), passed, failed, skipped)


def cpu() -> str:
    """Return the name of the CPU and its newest vector instructions."""
    text = Path("/proc/cpuinfo").read_text("utf-8")
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    flags = set(text.split())
    newest = next((name for flag, name in (("amx_tile", "AMX"), ("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in flags), "")
    return f"{found[1].strip() if found else platform.machine()} {newest}".strip()


def replace_row(row: Row, file: Path = FILE) -> None:
    """Write the row in place of the one of the same tests."""
    rows = {one.tests: one for one in read_rows(file)} | {row.tests: row}
    file.write_text(_HEAD + "".join(f"{one}\n" for _, one in sorted(rows.items())), "utf-8")


def read_rows(file: Path = FILE) -> list[Row]:
    if not file.exists():
        return []
    cells = [[cell.strip() for cell in line.strip("| \n").split(" | ")] for line in file.read_text("utf-8").splitlines()]
    return [Row(*one[:5], *map(int, one[5:])) for one in cells if len(one) == 9 and one[5].isdecimal()]
