"""`make attack` names what becomes of an attack; the cheap ones are refused by typed errors."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import fields
from pathlib import Path

import pytest
from sensorium import LLM, Media, RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
from waiting import LONG, assert_idle, wait_until

from benchmarks.attack import fuzz
from benchmarks.attack.__main__ import OPTIONS, attack, processes
from benchmarks.attack.cases import CASES, Case, Target
from benchmarks.attack.requests import places as attacked
from benchmarks.attack.requests import requests

ROOT = Path(__file__).parents[2]
REFUSED = {
    "fps=1e6": "invalid",
    "an image of 4000x1": "over_limit",
    "a bad word of 4 MB": "over_limit",
    "temperature=1e39": "invalid_value",
    "MOV of one PNG, 16000x16000": "invalid_media",  # codecs of still images are not used in videos
    "MP4 with forged tables": "invalid_media",
    "a lone surrogate as cache_salt": "invalid_input",
    "a template that doubles a string": "too_long",
}
COUNTS = {
    "requests with any value in any place": 200,
    "processing options of all families": 400,
    "mutated image files": 60,
    "mutated video files": 30,
    "mutated audio files": 60,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    with LLM(ROOT / "assets" / "tiny-vl", **OPTIONS) as llm:
        yield Target(llm, tmp_path_factory.mktemp("attack"))


@pytest.mark.parametrize("case", [case for case in CASES if case.name in REFUSED], ids=lambda case: case.name)
def test_cheap_attacks_are_refused(case, target):
    assert attack(case, target).startswith(f"refused: {REFUSED[case.name]}")


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_anything_gets_an_answer_or_a_typed_error(name, count, target):
    counts, untyped = fuzz.tally(*fuzz.areas(target.llm)[name], count)
    assert not untyped, "\n".join(f"{result}: {example!r}" for result, example in untyped.items())
    assert counts["served"] > 0
    assert_idle(target.llm)


def test_every_field_is_attacked(target):
    places = [place for calls in requests(target.llm).values() for call in calls for place in attacked(call)]
    found = {place[-1] for place in places}
    for kind in (SamplingParams, StructuredOutputsParams, RepetitionDetectionParams, Media):
        assert found >= {field.name for field in fields(kind)}
    assert found >= {"priority", "request_id", "cache_salt", "fit", "tools", "chat_template", "dimensions", "query", "detail"}


def test_an_untyped_error_is_named(target):
    def bug(_):
        raise KeyError("x")

    assert attack(Case("", "", bug), target) == "UNTYPED KeyError: 'x'"


def test_memory_counts_grandchildren_and_children_of_other_threads():
    code = "import subprocess, sys; sys.exit(subprocess.call(['cat']))"
    started = []
    thread = threading.Thread(
        target=lambda: (
            started.append(subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)),
            wait_until(lambda: len(list(processes(str(started[0].pid)))) == 2),
            started.append(set(processes(str(os.getpid())))),
        )
    )
    thread.start()
    thread.join(LONG)
    child, found = started
    assert {str(child.pid), *processes(str(child.pid))} <= found
    child.communicate()
