"""Rollback and preemption with each kind of second cache group. Answers are those of a sequence that runs alone."""

from dataclasses import replace

import pytest

KINDS = {"window": {"window": 6}, "chunk": {"chunk": 8}, "states": {"states": True}, "answers": {"answer_window": 4}}


@pytest.fixture(params=KINDS)
def model(request, toy):
    return lambda: toy.ToyModel(**KINDS[request.param])


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("back", [1, 3, 9, 30])
def test_a_rollback_to_before_the_held_blocks_computes_the_sequence_again(toy, model, caching, back):
    engine = toy.make_core(model=model(), block_size=4, caching=caching)
    request = toy.random_prompt("r", 40, hold_open=True, max_tokens=6)
    engine.add(request)
    tokens = [*request.prompt_token_ids, *toy.tokens_of(toy.drain(engine)["r"])]
    kept = tokens[: len(tokens) - back]
    engine.truncate("r", len(kept))
    engine.append("r", [7, 8, 9], close=True)
    fresh = replace(request, prompt_token_ids=(*kept, 7, 8, 9), hold_open=False)
    assert toy.tokens_of(toy.drain(engine)["r"]) == toy.alone(fresh, model())[0]
    toy.assert_empty(engine)


def test_sequences_that_do_not_fit_together_are_preempted_and_finished(toy, model):
    engine = toy.make_core(model=model(), block_size=4, blocks=24, budget=9, seqs=4)
    requests = [toy.random_prompt(f"r{i}", 20 + 7 * i, seed=i, max_tokens=12) for i in range(4)]
    for request in requests:
        engine.add(request)
    outputs = toy.drain(engine)
    for request in requests:
        assert toy.tokens_of(outputs[request.request_id]) == toy.alone(request, model())[0]
    assert engine.stats.preemptions
    toy.assert_empty(engine)
