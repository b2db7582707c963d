"""The benchmark of drafted tokens runs on the shipped model and prints its table; what it measures is not looked at."""

from __future__ import annotations

import re
import sys

import pytest

from benchmarks import drafts


def test_the_table_of_the_shipped_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["drafts", "--rounds", "1", "--max-tokens", "6", "--ignore-eos", "--kv-cache-dtype", "int8"]
    monkeypatch.setattr(sys, "argv", words)
    drafts.main()
    lines = capsys.readouterr().out.splitlines()
    head = next(line for line in lines if line.startswith("tiny-vl, "))
    assert re.fullmatch(r"tiny-vl, auto, cache int8, 1 pairs\. sensorium [\d.]+ on .*, torch .*, \d{4}-\d\d-\d\d", head)
    rows = [line.split("|")[1:-1] for line in lines[lines.index(head) :] if line.startswith("| ") and line.endswith("x |")]
    assert [(row[0].strip(), float(row[1])) for row in rows] == [(w.source, t) for t in (0.0, 0.7) for w in drafts.WORKLOADS]
    assert {int(row[2]) for row in rows} == {6, 24}
    assert lines[-1].startswith("A step in which nothing is verified takes ")
