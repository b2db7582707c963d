"""`make attack` names what becomes of an attack; the cheap ones are refused by typed errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from sensorium import LLM

from benchmarks.attack.__main__ import OPTIONS, attack
from benchmarks.attack.cases import CASES, Case, Target

ROOT = Path(__file__).parents[2]
REFUSED = {
    "fps=1e6": "invalid",
    "an image of 4000x1": "invalid_media",
    "a bad word of 4 MB": "invalid_input",
    "temperature=1e39": "invalid_input",
    "MOV of one PNG, 16000x16000": "invalid_media",
    "MP4 with forged tables": "invalid_media",
    "a lone surrogate as cache_salt": "invalid_input",
    "a template that doubles a string": "too_long",
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    with LLM(ROOT / "assets" / "tiny-vl", **OPTIONS) as llm:
        yield Target(llm, tmp_path_factory.mktemp("attack"))


@pytest.mark.parametrize("case", [case for case in CASES if case.name in REFUSED], ids=lambda case: case.name)
def test_cheap_attacks_are_refused(case, target):
    assert attack(case, target).startswith(f"refused: {REFUSED[case.name]}")


def test_an_untyped_error_is_named(target):
    def bug(_):
        raise KeyError("x")

    assert attack(Case("", "", bug), target) == "UNTYPED KeyError: 'x'"
