"""Loops at the end of an answer, against the definition read word by word."""

import random

import pytest
from sensorium.engine.repetition import Loop, RepetitionDetection, find_loop
from sensorium.mm.errors import InputError


def plain_find(tokens, turn_start, detection):
    """Every cycle, shortest first: is the tail one cycle over and over?"""
    answer = tokens[turn_start:]
    for size in range(1, detection.max_cycle + 1):
        length = 0
        while length < len(answer) and (length < size or answer[-1 - length] == answer[-1 - length + size]):
            length += 1
        if length >= max(size * detection.min_repeats, detection.min_tokens):
            start = len(tokens) - length
            return Loop(start, tuple(tokens[start : start + size]))
    return None


@pytest.mark.parametrize("seed", range(6))
def test_against_the_definition(seed):
    rng, found = random.Random(seed), 0
    for _ in range(1500):
        detection = RepetitionDetection(rng.randint(1, 6), rng.randint(2, 4), rng.randint(1, 12))
        tokens = [rng.randrange(3) for _ in range(rng.randint(1, 12))]
        if rng.random() < 0.7:
            tokens += [rng.randrange(3) for _ in range(rng.randint(1, 5))] * rng.randint(1, 5)
            tokens = tokens[: len(tokens) - rng.randint(0, 2)]
        turn_start = rng.randint(0, len(tokens))
        loop = find_loop(tokens, turn_start, detection)
        assert loop == plain_find(tokens, turn_start, detection)
        found += loop is not None
    assert found > 100


def test_the_worked_examples():
    small = RepetitionDetection(max_cycle=3, min_repeats=3, min_tokens=6)
    assert find_loop([5, 1, 2, 1, 2, 1, 2], 0, small) == Loop(1, (1, 2))
    assert find_loop([1, 2, 1, 2, 1], 0, small) is None
    assert find_loop([7, 7, 7], 0, small) is None
    assert find_loop([9, 8, 7, 8, 7, 8, 7, 8], 0, small) == Loop(1, (8, 7))


def test_the_prompt_is_no_part_of_a_loop():
    tokens = [1, 2] * 10
    small = RepetitionDetection(max_cycle=3, min_repeats=3, min_tokens=6)
    assert find_loop(tokens, 15, small) is None
    assert find_loop(tokens, 14, small) == Loop(14, (1, 2))


def test_a_forbidden_cycle_cannot_come_back():
    """However the answer goes on, without the forbidden sequence there is no loop of that cycle or of one turned around."""
    for cycle in ((4,), (4, 5), (4, 5, 6)):
        word = Loop(0, cycle).forbidden
        for turn in range(len(cycle)):
            again = (cycle[turn:] + cycle[:turn]) * 4
            assert any(again[i : i + len(word)] == word for i in range(len(again)))
    assert Loop(0, (4,)).forbidden == (4, 4), "one of it is not a loop"


@pytest.mark.parametrize(
    ("name", "value"), [("max_cycle", 0), ("min_repeats", 1), ("min_tokens", 0.5), ("max_repairs", True), ("repair", 1)]
)
def test_values_outside_their_limits(name, value):
    with pytest.raises(InputError, match=name):
        RepetitionDetection(**{name: value})


def test_a_window_without_end():
    with pytest.raises(InputError, match="lower max_cycle"):
        RepetitionDetection(max_cycle=1 << 15, min_repeats=4)
