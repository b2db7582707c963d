"""Progress of a batch: bars on terminals, lines in the log, and a callable such as tqdm."""

from __future__ import annotations

import io
import logging
import sys

import pytest
from sensorium.callers.errors import InputError
from sensorium.engine import progress
from sensorium.engine.progress import make_progress
from tqdm import tqdm


def test_true_shows_a_bar_on_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for on_terminal, show, shown in ((True, True, True), (True, False, False), (False, True, False)):
        out = io.StringIO()
        out.isatty = lambda is_terminal=on_terminal: is_terminal  # type: ignore[method-assign]
        monkeypatch.setattr(sys, "stderr", out)
        with make_progress(2, show) as bar:
            bar.update(2)
        assert ("Answered prompts: 100%" in out.getvalue()) == shown


def test_the_log_has_a_line_every_ten_seconds_and_at_the_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with caplog.at_level(logging.INFO, "sensorium"), make_progress(30, "log") as lines:
        for _ in range(30):
            now[0] += 1.0
            lines.update(1)
    assert caplog.messages == [
        "answered 10 of 30 prompts in 10 s",
        "answered 20 of 30 prompts in 20 s",
        "answered 30 of 30 prompts in 30 s",
        "answered 30 of 30 prompts in 30 s",
    ]


def test_a_callable_makes_the_bar() -> None:
    out = io.StringIO()
    with make_progress(1, lambda **options: tqdm(file=out, **options)) as bar:
        bar.update(1)
    assert "Answered prompts: 100%" in out.getvalue()


@pytest.mark.parametrize("show", ["yes", 1])
def test_other_values_are_refused(show: object) -> None:
    with pytest.raises(InputError, match=r'must be True, False, "log" or a class like tqdm'):
        make_progress(1, show)  # type: ignore[arg-type]
