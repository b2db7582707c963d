"""The depth of drafts: the most tokens per second by measured costs and observed acceptance."""

import itertools
import random

import pytest
from sensorium.engine.drafts.depth import STEP_COSTS, AcceptanceRates, Slot, StepCosts, choose_depth, choose_depths


def best_depths(slots, num_sequences, rows, costs):
    """The oracle: tries every combination."""

    def speed(depths):
        gain = sum(sum(slot.survival[:depth]) for slot, depth in zip(slots, depths, strict=True))
        return (num_sequences + gain) / costs.seconds(rows + sum(depths))

    return max(map(speed, itertools.product(*(range(len(slot.survival) + 1) for slot in slots)))), speed


@pytest.mark.parametrize("table", [*STEP_COSTS.values(), (1.0,), (1.0,) * 4 + (2.0,) * 12], ids=str)
def test_depths_are_the_best_of_all(table):
    rng = random.Random(0)
    for _ in range(20):
        costs = StepCosts(table)
        slots = [
            Slot(list(itertools.accumulate((rng.uniform(0.6, 1) for _ in range(rng.randint(1, 4))), lambda a, b: a * b)))
            for _ in range(rng.randint(1, 3))
        ]
        rows = len(slots) + rng.randrange(3)
        choose_depths(slots, rows, rows, costs)
        best, speed = best_depths(slots, rows, rows, costs)
        assert speed([slot.depth for slot in slots]) == pytest.approx(best)


def test_nothing_is_verified_that_does_not_pay():
    costs, slots = StepCosts((1.0, 1.5, 2.0, 2.5)), [Slot([0.49, 0.48])]
    choose_depths(slots, 1, 1, costs)
    assert slots[0].depth == 0
    slots = [Slot([0.4, 0.3]), Slot([0.95, 0.9])]
    choose_depths(slots, 2, 2, costs)
    assert [slot.depth for slot in slots] == [0, 2]


@pytest.mark.parametrize("table", STEP_COSTS.values(), ids=str)
def test_guesses_beside_a_prompt_save_more_than_they_cost(table):
    rng = random.Random(1)
    costs, depths = StepCosts(table), set()
    for _ in range(50):
        survival = list(itertools.accumulate((rng.uniform(0.3, 1) for _ in range(15)), lambda a, b: a * b))
        rows, share = rng.randint(1, 40), rng.uniform(0.2, 1)
        saved = [sum(survival[:depth]) * share - costs.seconds(rows + depth) + costs.seconds(rows) for depth in range(16)]
        depth = choose_depth(survival, rows, costs, share)
        assert survival[:depth] == [] or survival[depth - 1] >= 0.05
        assert saved[depth] == pytest.approx(max(saved), abs=0.15), "guesses that survive less often are left out"
        depths.add(depth)
    assert len(depths) > 2
    assert choose_depth([], 4, costs, 1.0) == 0


def test_measured_costs_replace_the_table():
    costs = StepCosts((1.0, 1.1, 1.2, 1.3))
    assert costs.seconds(4) == 1.3
    for _ in range(100):
        costs.observe(1, 0.010)
        costs.observe(4, 0.040)
    assert costs.seconds(4) == pytest.approx(0.040, rel=0.01)
    assert costs.seconds(2) == pytest.approx(0.011), "the nearest measured number of rows, with the table's ratio"
    costs.observe(4, 40.0)
    assert costs.seconds(4) < 0.05, "one slow step counts little"
    for _ in range(600):
        costs.observe(1, 0.010)
    assert costs.seconds(4) == pytest.approx(0.013), "what was slow once is tried again"
    for rows in (0, 1000):
        costs.observe(rows, 1.0)
    assert costs.seconds(17) > costs.seconds(4)


def test_few_steps_tell_what_rows_cost():
    costs = StepCosts((1.0, 1.02))
    for _ in range(20):
        costs.observe(1, 0.010)
    for seconds in (0.050, 0.013, 0.012, 0.014):
        costs.observe(2, seconds)
    assert costs.seconds(2) == pytest.approx(0.013), "the first step of a number of rows allocates"


def test_acceptance_is_learned_by_request_and_from_all_requests():
    of_all = AcceptanceRates()
    first, rates = of_all.rate("suffix", 3), AcceptanceRates(of_all)
    for _ in range(100):
        rates.observe("suffix", 3, False)
        rates.observe("text", 3, True)
    assert rates.rate("suffix", 3) < 0.05 < first
    assert AcceptanceRates(of_all).rate("suffix", 3) < 0.05
    assert rates.rate("text", 3) > 0.95
    assert of_all.rate("corpus", 3) == first
    survival = rates.survival("text", 2, 6)
    assert survival == sorted(survival, reverse=True)
