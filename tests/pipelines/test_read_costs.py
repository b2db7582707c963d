"""Seconds that pages take, as earlier runs measured them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from sensorium.cli.read import duration
from sensorium.pipelines.documents import costs
from sensorium.pipelines.documents.costs import INSPECTED, Cost, CostClock, keep_costs, kept_costs, seconds_of


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "sensorium" / "documents" / "costs.json"


def test_pages_that_are_read_at_once_share_the_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now, clock = [0.0], CostClock()
    monkeypatch.setattr(costs.time, "monotonic", lambda: now[0])
    with clock.measuring("a", 2):
        now[0] = 4.0
    assert clock.costs == {"a": Cost(4.0, 2)}
    with clock.measuring("a", 1), clock.measuring("a", 1), clock.measuring("b", 1):
        now[0] = 8.0
    assert clock.costs == {"a": Cost(4.0 + 2.0 + 4.0, 4), "b": Cost(4.0, 1)}
    with pytest.raises(ZeroDivisionError), clock.measuring("b", 1):
        1 / 0  # noqa: B018
    assert clock.costs["b"] == Cost(4.0, 1)


def test_later_runs_outweigh_earlier_ones(cache: Path) -> None:
    keep_costs({"a": Cost(200.0, 200)})
    keep_costs({"a": Cost(624.0, 312), "b": Cost(1.0, 1)})
    assert kept_costs() == {"a": Cost(412.0, 256), "b": Cost(1.0, 1)}
    assert [file.name for file in cache.parent.iterdir()] == ["costs.json"]
    keep_costs({})


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"costs": []}',
        '{"costs": {"a": [1]}}',
        '{"costs": {"a": [-1, 0]}}',
        '{"costs": {"a": [1, Infinity]}}',
        '{"costs": {"a": [Infinity, 1]}}',
        "[" * 100_000,
    ],
)
def test_a_broken_file_has_no_costs(cache: Path, content: str) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text(content)
    assert kept_costs() == {}
    keep_costs({"a": Cost(1.0, 2)})
    assert json.loads(cache.read_text()) == {"costs": {"a": [1.0, 2]}}


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    keep_costs({"a": Cost(1.0, 2)})
    assert kept_costs() == {}


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(costs.Path, "home", home)
    keep_costs({"a": Cost(1.0, 2)})
    assert kept_costs() == {}


def test_the_seconds_of_a_plan() -> None:
    known = {INSPECTED: Cost(1.0, 10), "reading r": Cost(10.0, 2), "draft m": Cost(3.0, 1)}
    assert seconds_of({"blank": 5, "text_layer": 5}, "r", known) == (pytest.approx(1.0), [])
    assert seconds_of({"reading": 2, "unread": 1}, "r", known) == (pytest.approx(10.3), [])
    assert seconds_of({"reading": 2, "draft": 1}, "m", known) == (pytest.approx(3.3), ["reading"])
    assert seconds_of({"reading": 2}, "m", {}) == (0.0, ["reading"])
    checked = known | {"text_layer r": Cost(0.2, 2)}
    assert seconds_of({"blank": 5, "text_layer": 5}, "r", checked, True) == (pytest.approx(1.5), [])
    assert seconds_of({"text_layer": 5}, "r", known, True) == (pytest.approx(0.5), ["text_layer"])


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (100, "100 s"), (150, "2 min"), (7199, "2 h 0 min"), (7500, "2 h 5 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
