"""Groups whose answers read the prompt and their own last tokens only: slots of keys, blocks, and what is shared."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sensorium.models.interface import CacheSpec

WINDOW = 4
SPEC = CacheSpec("full", 1, 8, torch.float32, answer_window=WINDOW)


@pytest.fixture
def core(toy):
    return lambda **options: toy.make_core(model=toy.ToyModel(answer_window=WINDOW), block_size=4, **options)


def test_slots_of_an_answer_are_a_ring_after_the_prompt() -> None:
    assert [SPEC.slot(token, 5) for token in range(14)] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 7, 8, 5]
    assert [SPEC.num_slots(tokens, 5) for tokens in (3, 5, 7, 9, 10, 99)] == [3, 5, 7, 9, 9, 9]
    full = replace(SPEC, answer_window=None)
    assert (full.slot(9, 5), full.num_slots(99, 5)) == (9, 99)


def test_an_answer_holds_no_more_blocks_than_its_window(toy, core) -> None:
    engine = core()
    engine.add(toy.random_prompt("r", 10, max_tokens=30))
    held = []
    while engine.scheduler.waiting or engine.scheduler.running:
        toy.scheduled(engine)
        held += [tuple(map(len, request.block_ids)) for request in engine.scheduler.running]
    assert max(plain for plain, _ in held) == 10, "39 tokens without such a window"
    assert max(windowed for _, windowed in held) == 4, "10 tokens of the prompt and 4 of the answer"


def test_blocks_of_an_answer_are_not_shared(toy, core) -> None:
    """A prompt that continues an answer computes the keys of its tokens as those of a prompt."""
    engine = core()
    first = toy.random_prompt("a", 12, max_tokens=20)
    engine.add(first)
    tokens = [*first.prompt_token_ids, *toy.tokens_of(toy.drain(engine)["a"])]
    second = replace(first, request_id="b", prompt_token_ids=(*tokens, 7))
    engine.add(second)
    outputs = toy.drain(engine)["b"]
    assert outputs[-1].stats.cached_tokens == 12
    assert toy.tokens_of(outputs) == toy.alone(second, toy.ToyModel(answer_window=WINDOW))[0]


def test_tokens_after_a_full_window_are_computed_one_by_one(toy, core) -> None:
    engine = core()
    engine.add(toy.random_prompt("r", 10, max_tokens=20))
    for _ in range(9):
        toy.scheduled(engine)
    engine.truncate("r", 18)
    assert [toy.scheduled(engine)[0]["r"] for _ in range(6)] == [4, 1, 1, 1, 1, 1]
