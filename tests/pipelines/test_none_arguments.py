"""None stands for the default of every optional argument, as callers that pass their own options on expect."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from sensorium import LLM
from sensorium.callers.errors import InputError
from sensorium.pipelines.validation import read_options

ASSETS = Path(__file__).parents[2] / "assets"
DEFAULTS = (
    "task",
    "timestamps",
    "context",
    "prompt",
    "hotwords",
    "vad",
    "sequential",
    "condition_on_previous_text",
    "beam_size",
)
REPORTS = (
    "on_progress",
    "on_text",
    "on_window",
    "on_segments",
    "sampling_params",
    "temperature",
    "aligner",
    "cache_salt",
    "use_tqdm",
)


@dataclass(frozen=True)
class Options:
    mode: str = "a"
    size: int = 3
    threshold: float | None = 0.5
    salt: str | None = None


def test_only_arguments_with_a_default_of_their_own():
    assert read_options(Options, dict.fromkeys(("mode", "size", "threshold", "salt"))) == Options(threshold=None)
    given = {"mode": "b", "size": 0, "threshold": 0.1, "salt": "c"}
    assert read_options(Options, given) == Options(**given)
    assert read_options(Options, {}) == Options()
    with pytest.raises(InputError, match="did you mean size") as caught:
        read_options(Options, {"siez": None})
    assert (caught.value.info.code, caught.value.info.param) == ("unknown_name", "siez")
    with pytest.raises(InputError, match="item, mode, size, threshold, salt") as caught:
        read_options(Options, {"colour": None}, "item")
    assert (caught.value.info.code, caught.value.info.param) == ("unknown_name", "colour")


def test_transcribe():
    sound = np.random.default_rng(0).standard_normal(16_000).astype(np.float32) / 20
    with LLM(ASSETS / "tiny-asr", warm_up=False) as llm:
        (expected,) = llm.transcribe((sound, 16_000), use_tqdm=False)
        (found,) = llm.transcribe((sound, 16_000), None, None, use_tqdm=False, timestamps=None)
        assert (found.text, found.segments) == (expected.text, None)
        (found,) = llm.transcribe((sound, 16_000), **dict.fromkeys((*DEFAULTS, *REPORTS)))
        assert (found.text, found.windows) == (expected.text, expected.windows)
        (found,) = llm.transcribe((sound, 16_000), "en-US", use_tqdm=False)
        assert (found.text, found.language) == (expected.text, "en")
