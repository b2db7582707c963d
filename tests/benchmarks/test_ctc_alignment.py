"""The benchmark of times from a CTC model: what espeak-ng reports, and the table."""

from __future__ import annotations

import ctypes.util
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.ctc_alignment import Clip, Errors, Speaker, Spoken, row
from training.asr.speech import RATE, Voice

LIBRARY = ctypes.util.find_library("espeak-ng")


@pytest.mark.skipif(LIBRARY is None, reason="espeak-ng is not installed")
def test_espeak_reports_words_and_pauses() -> None:
    samples, words = Speaker(str(LIBRARY)).words("Turn on the lamp, in the hall.", Voice("en-us+f4", 150, 50))
    turn, on, _, lamp, inside, the, hall = words
    assert [one.paused for one in words] == [False, False, False, True, False, False, True]
    assert (turn.start, turn.end, inside.end, the.start, the.end) == (0.0, on.start, None, None, hall.start)
    assert lamp.end is not None
    assert inside.start is not None
    pause = samples[round(lamp.end * RATE) : round(inside.start * RATE)]
    assert len(pause) > 0.1 * RATE
    assert np.abs(pause).max() < 0.1 * np.abs(samples).max()


def test_the_row_names_a_missed_goal() -> None:
    errors = Errors(3, [-0.01, 0.02, 0.03], [0.1, 0.1], [-0.2, 0.0, 0.1])
    clip = Clip(np.zeros(8, np.float32), [Spoken("one", 0.0, 0.1, False)] * 4)
    found = row("aligner", "clean", [clip], errors)
    ends = "100 ms (missed) | 100 ms | +100 ms | 100 ms (missed) | 180 ms | +0 ms"
    assert found == f"| aligner | clean | 1 | 4 | 3 | 20 ms | 28 ms | +20 ms | {ends} |"
