"""find_loop agrees with the definition of a loop, applied directly."""

import random

import pytest
from sensorium.callers.errors import InputError
from sensorium.engine.sampling_params import RepetitionDetectionParams
from sensorium.engine.scheduler.repetition import Loop, find_loop


def find_by_definition(tokens, turn_start, detection):
    """Find the shortest cycle with which the tail repeats, by trying every length."""
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
def test_loops_are_those_of_the_definition(seed):
    rng, found = random.Random(seed), 0
    for _ in range(1500):
        detection = RepetitionDetectionParams(rng.randint(1, 6), rng.randint(2, 4), rng.randint(1, 12))
        tokens = [rng.randrange(3) for _ in range(rng.randint(1, 12))]
        if rng.random() < 0.7:
            tokens += [rng.randrange(3) for _ in range(rng.randint(1, 5))] * rng.randint(1, 5)
            tokens = tokens[: len(tokens) - rng.randint(0, 2)]
        turn_start = rng.randint(0, len(tokens))
        loop = find_loop(tokens, turn_start, detection)
        assert loop == find_by_definition(tokens, turn_start, detection)
        found += loop is not None
    assert found > 100


def test_examples_of_the_docstring():
    small = RepetitionDetectionParams(max_cycle=3, min_repeats=3, min_tokens=6)
    assert find_loop([5, 1, 2, 1, 2, 1, 2], 0, small) == Loop(1, (1, 2))
    assert find_loop([1, 2, 1, 2, 1], 0, small) is None
    assert find_loop([7, 7, 7], 0, small) is None
    assert find_loop([9, 8, 7, 8, 7, 8, 7, 8], 0, small) == Loop(1, (8, 7))


def test_a_loop_does_not_extend_into_the_prompt():
    tokens = [1, 2] * 10
    small = RepetitionDetectionParams(max_cycle=3, min_repeats=3, min_tokens=6)
    assert find_loop(tokens, 15, small) is None
    assert find_loop(tokens, 14, small) == Loop(14, (1, 2))


def test_every_repetition_of_a_loop_contains_its_forbidden_tokens():
    """The forbidden tokens also prevent the loop if it starts at another token of the cycle."""
    for cycle in ((4,), (4, 5), (4, 5, 6)):
        word = Loop(0, cycle).forbidden
        for turn in range(len(cycle)):
            again = (cycle[turn:] + cycle[:turn]) * 4
            assert any(again[i : i + len(word)] == word for i in range(len(again)))
    assert Loop(0, (4,)).forbidden == (4, 4), "the token itself stays allowed"


@pytest.mark.parametrize(
    ("name", "value"), [("max_cycle", 0), ("min_repeats", 1), ("min_tokens", 0.5), ("max_repairs", True), ("repair", 1)]
)
def test_values_outside_their_limits_are_refused(name, value):
    with pytest.raises(InputError, match=name):
        RepetitionDetectionParams(**{name: value})


def test_parameters_that_read_too_many_tokens_are_refused():
    with pytest.raises(InputError, match="lower max_cycle"):
        RepetitionDetectionParams(max_cycle=1 << 15, min_repeats=4)


def test_the_widest_check_finds_the_longest_cycle_only():
    widest = RepetitionDetectionParams(max_cycle=2048, min_repeats=2, min_tokens=4096)
    assert find_loop([7] * 6000 + [8] + [7] * 2047, 0, widest) is None
    cycle = [2**31 - 1, *[7] * 2047]
    found = find_loop([5, *cycle * 3], 0, widest)
    assert found is not None
    assert (found.start, found.cycle) == (1, tuple(cycle))
