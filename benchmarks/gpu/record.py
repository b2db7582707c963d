"""Record figures as JSON lines and format them as a table."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PEER = "transformers: "
"""Prefix of the name of a part that measures transformers."""


@dataclass(frozen=True)
class Figure:
    """One number of a part.

    Args:
        name: the measurement and its sizes.
        value, unit: "0.62" "of bf16 ceiling", "1.3" "eps", ...
        least, most: the target; None for no target.
        note: the absolute value behind a ratio ("612 TFLOP/s, 0.41 ms"), or a condition.
    """

    name: str
    value: float
    unit: str
    least: float | None = None
    most: float | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.least is None and self.most is None:
            return ""
        good = (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)
        return "ok" if good else "falls short" if self.least is not None else "WRONG"

    @property
    def wanted(self) -> str:
        parts = [f">= {self.least:g}"] if self.least is not None else []
        return ", ".join(parts + ([f"<= {self.most:g}"] if self.most is not None else []))


class Lacks(Exception):
    """A part cannot run because something is missing; not a failure."""


class Journal:
    """Append to `<stem>.jsonl` at once and write `<stem>.md` from it; of a repeated part the last run counts."""

    def __init__(self, stem: Path) -> None:
        self.lines, self.table = stem.with_name(stem.name + ".jsonl"), stem.with_name(stem.name + ".md")

    def write(self, kind: str, **fields: Any) -> None:
        """`kind`: "machine", "begin", "figure", "end", "failure", "lacks" or "left out"."""
        self.lines.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"kind": kind, "time": time.time(), **fields}, ensure_ascii=False)
        with self.lines.open("a", encoding="utf-8") as out:
            out.write(line + "\n")

    def figure(self, section: str, part: str, one: Figure) -> None:
        self.write("figure", section=section, part=part, **asdict(one), verdict=one.verdict)

    def read(self, since: float = 0.0) -> list[dict[str, Any]]:
        """Return all complete lines written at `since` (Unix time) or later."""
        text = self.lines.read_text("utf-8") if self.lines.exists() else ""
        found = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [line for line in found if line["time"] >= since]

    def render(self) -> str:
        """Write the table and return it."""
        text = "\n".join(_table(self.read())) + "\n"
        self.table.write_text(text, "utf-8")
        return text


def show(one: Figure) -> str:
    """Format a figure on one line."""
    return " | ".join(filter(None, (one.name, f"{_number(one.value)} {one.unit}", one.wanted, one.verdict, one.note)))


def _table(lines: list[dict[str, Any]]) -> list[str]:
    machine = next((line for line in reversed(lines) if line["kind"] == "machine"), {})
    head = [f"# {machine.get('card', 'unknown card')}, {machine.get('date', '')}", "", machine.get("versions", "")]
    if machine.get("note"):
        head += ["", machine["note"]]
    for section, parts in _latest(lines).items():
        head += ["", f"## {section}", "", "| part | what | measured | wanted | | note |", "|---|---|---|---|---|---|"]
        head += [row for name, found in parts.items() for row in _rows(name, found)]
        against = list(_against(parts))
        if against:
            head += [
                "",
                "Against transformers in the same run:",
                "",
                "| model | what | ours is faster |",
                "|---|---|---|",
                *against,
            ]
    return head


def _against(parts: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Return the ratio of our figure to the peer's; of several with the same name the first counts."""
    for name, lines in parts.items():
        own = parts.get(name.removeprefix(PEER), []) if name.startswith(PEER) else []
        for theirs in (line for line in lines if line["kind"] == "figure" and line["unit"].startswith("of ")):
            mine = [line["value"] for line in own if line["kind"] == "figure" and _begins(line["name"], theirs["name"])]
            if mine and theirs["value"] > 0:
                yield f"| {name.removeprefix(PEER)} | {theirs['name']} | {mine[0] / theirs['value']:.2f}x |"


def _begins(name: str, start: str) -> bool:
    return name == start or name.startswith(f"{start},")


def _latest(lines: list[dict[str, Any]]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return section -> part -> its lines since its last start."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for line in lines:
        if line["kind"] == "machine":
            continue
        parts = found.setdefault(line["section"], {})
        if line["kind"] in ("begin", "left out"):
            parts[line["part"]] = []
        parts.setdefault(line["part"], []).append(line)
    return found


def _rows(part: str, lines: list[dict[str, Any]]) -> Iterator[str]:
    for line in lines:
        if line["kind"] == "figure":
            one = Figure(*(line[name] for name in ("name", "value", "unit", "least", "most", "note")))
            yield f"| {part} | {one.name} | {_number(one.value)} {one.unit} | {one.wanted} | {one.verdict} | {one.note} |"
        elif line["kind"] in ("failure", "lacks", "left out"):
            yield f"| {part} | | | | **{line['kind']}** | {' '.join(line['note'].split()).replace('|', '/')} |"


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
